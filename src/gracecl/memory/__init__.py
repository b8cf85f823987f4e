"""What a learner keeps of the past: stores of images, and the collection of them that one learner owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gracecl.core import Ints
from gracecl.errors import UserError
from gracecl.inputs import Inputs
from gracecl.memory.reservoir import Memory

__all__ = ["Memories", "Memory"]


class Memories:
    """The stores of one learner: `replay`, and others reserved out of the same budget of slots."""

    def __init__(self, capacity: int, inputs: Inputs, device: torch.device | str = "cpu") -> None:
        self.stores = {"replay": Memory(capacity, inputs, device)}
        self._inputs, self._device = inputs, device
        self.beyond_budget = 0
        """slots of scratch stores; a run notes them in its config.json"""
        self.test_images: Callable[[tuple[int, ...]], tuple[Tensor, Ints, Ints]] | None = None
        """the test images of some classes, their labels and tasks, where a stream is learned from: for diagnosis alone"""

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
        self.stores["replay"] = Memory(self.replay.capacity - slots, self._inputs, self._device)
        self.stores[name] = Memory(slots, self._inputs, self._device)
        return self.stores[name]

    def scratch(self, name: str, slots: int) -> Memory:
        """Make a store beyond the budget, for a method that looks at its task once more when it ends and then
        forgets it.
        """
        self.stores[name] = Memory(slots, self._inputs, self._device)
        self.beyond_budget += slots
        return self.stores[name]

    def state_dict(self) -> dict[str, Any]:
        return {name: store.state_dict() for name, store in self.stores.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, store in self.stores.items():
            store.load_state_dict(state[name])
