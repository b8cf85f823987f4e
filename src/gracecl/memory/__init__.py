"""What a learner keeps of the past: stores of images, and the collection of them that one learner owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from gracecl import processes
from gracecl.core import Ints
from gracecl.errors import UserError
from gracecl.inputs import Inputs
from gracecl.memory.compressed import QUALITY, JpegMemory
from gracecl.memory.in_group import ShardedMemory
from gracecl.memory.on_disk import DiskMemory
from gracecl.memory.reservoir import Memory
from gracecl.registry import nearest, spec
from gracecl.registry.spec import Within

__all__ = ["Memories", "Memory", "check_store"]


class Place(NamedTuple):
    """What a store is made for."""

    capacity: int
    inputs: Inputs
    device: torch.device | str
    file: Path | None


def ram(place: Place) -> Memory:
    return Memory(place.capacity, place.inputs, place.device)


def disk(place: Place) -> Memory:
    return DiskMemory(place.capacity, place.inputs, place.device, place.file)


def jpeg(place: Place, quality: Annotated[int, Within(1, 100)] = QUALITY) -> Memory:
    return JpegMemory(place.capacity, place.inputs, place.device, quality)


def sharded(place: Place) -> Memory:
    return (Memory if processes.count() == 1 else ShardedMemory)(place.capacity, place.inputs, place.device)


STORES: dict[str, Callable[..., Memory]] = {"ram": ram, "disk": disk, "jpeg": jpeg, "sharded": sharded}
"""kinds of memories by name; their parameters after the first are options of the expression"""


def check_store(expression: str) -> tuple[Callable[..., Memory], dict[str, Any]]:
    """The kind of memory that an expression such as `jpeg(quality=90)` names, and its options."""
    call = spec.parse_call(expression)
    if call.name not in STORES:
        raise UserError(f"unknown store '{call.name}'{nearest(call.name, STORES)} (there are: {', '.join(STORES)})")
    return STORES[call.name], spec.arguments(STORES[call.name], call, before=1)


class Memories:
    """The stores of one learner: `replay`, and others reserved out of the same budget of slots."""

    def __init__(
        self,
        capacity: int,
        inputs: Inputs,
        device: torch.device | str = "cpu",
        store: str = "ram",
        folder: Path | None = None,
    ) -> None:
        """`store` says where images are kept, `folder` where the files of such on disk lie; temporary ones, if left out."""
        self._kind, self._options = check_store(store)
        self._inputs, self._device, self._folder = inputs, device, folder
        self.stores = {"replay": self._made("replay", capacity)}
        self.beyond_budget = 0
        """slots of scratch stores; a run notes them in its config.json"""
        self.test_images: Callable[[tuple[int, ...]], tuple[Tensor, Ints, Ints]] | None = None
        """the test images of some classes, their labels and tasks, where a stream is learned from: for diagnosis alone"""

    def _made(self, name: str, capacity: int) -> Memory:
        file = None if self._folder is None else self._folder / name
        return self._kind(Place(capacity, self._inputs, self._device, file), **self._options)

    def __repr__(self) -> str:
        return f"Memories({', '.join(f'{name}: {len(store)} of {store.capacity} images' for name, store in self.stores.items())})"

    @property
    def replay(self) -> Memory:
        return self.stores["replay"]

    def __getitem__(self, name: str) -> Memory:
        return self.stores[name]

    def reserve(self, name: str, slots: int) -> Memory:
        """Make a second store with slots taken from `replay`, so that the total stays what the user gave."""
        if slots > self.replay.capacity:
            raise UserError(f"a memory of {self.replay.capacity} images has no {slots} slots for '{name}'; use a larger --memory")
        self.stores["replay"] = self._made("replay", self.replay.capacity - slots)
        self.stores[name] = self._made(name, slots)
        return self.stores[name]

    def scratch(self, name: str, slots: int) -> Memory:
        """Make a store beyond the budget, for a method that looks at its task once more when it ends and then
        forgets it.
        """
        self.stores[name] = self._made(name, slots)
        self.beyond_budget += slots
        return self.stores[name]

    @property
    def spread(self) -> bool:
        """Whether each process of a group holds a part of the images."""
        return self.replay.spread

    def send_images(self) -> None:
        """Take part in a checkpoint that the first process of the group writes; nothing, where it holds all images."""
        for store in self.stores.values():
            store.send_images()

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Around the writing of a checkpoint, which may then name what lies in files of its own beside it."""
        with ExitStack() as stack:
            for store in self.stores.values():
                stack.enter_context(store.checkpointing())
            yield

    def state_dict(self) -> dict[str, Any]:
        return {name: store.state_dict() for name, store in self.stores.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, store in self.stores.items():
            store.load_state_dict(state[name])
