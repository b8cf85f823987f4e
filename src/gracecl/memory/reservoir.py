"""A bounded memory of images that keeps a uniform sample of everything it was offered.

Vitter, Random Sampling with a Reservoir, 1985. Images stay bytes on the device; labels, tasks and slot lists live on the host, so
drawing "64 images of other tasks" costs the same at a thousand images and at a million, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gracecl.core import NO_TASK, Ints
from gracecl.errors import UserError
from gracecl.inputs import Batched, Inputs, plain, tree_of, write_rows
from gracecl.machine import check_room

BOOKKEEPING = 64
"""bytes that a slot takes beside its image: label, task, places in the lists"""


class Examples(NamedTuple):
    """Images with their labels and tasks."""

    images: Batched
    labels: Ints
    tasks: Ints


class Memory:
    """Preallocated slots. `add` offers images, `draw` picks slots, `memory[slots]` gives their images.

    Memories that keep images elsewhere than in RAM override the methods from `room` to `send_images`.
    """

    spread = False
    """whether each process of a group holds a part of the images, so that all of them must read together"""

    def __init__(self, capacity: int, inputs: Inputs, device: torch.device | str = "cpu") -> None:
        if capacity < 0:
            raise UserError(f"a memory cannot hold {capacity} images; give 0 or more")
        self.capacity, self.filled, self.offered, self.inputs = capacity, 0, 0, inputs
        self.device = torch.device(device)
        self.images: Batched = self.room()
        self.labels: Ints = np.full(capacity, -1, np.int64)
        self.tasks: Ints = np.full(capacity, NO_TASK, np.int64)
        self.attributes: dict[str, Tensor] = {}
        self._by_label, self._by_task = Buckets(capacity), Buckets(capacity)

    def room(self) -> Batched:
        """Slots for images, in the place of a batch of them."""
        what, remedy = f"a memory of {self.capacity} images", "use a smaller --memory"
        check_room(self.capacity * (self.inputs.bytes + BOOKKEEPING), what, remedy)
        try:
            return self.inputs.blank(self.capacity, self.device)
        except RuntimeError:
            raise UserError(f"there is no room for {what} ({self.capacity * self.inputs.bytes / 1e9:.1f} GB); {remedy}") from None

    def write(self, slots: Ints, where: Tensor, rows: Batched) -> None:
        """Put examples into slots, whose numbers are on the host and, as `where`, on the device."""
        write_rows(self.images, where, rows.to(self.images.device))

    def saved_images(self) -> Any:
        """The images of the filled slots, for a checkpoint."""
        return plain(self.images[: self.filled])

    def load_images(self, saved: Any) -> None:
        """Fill the slots with what `saved_images` gave."""
        self.images[: self.filled] = tree_of(saved).to(self.images.device)

    def send_images(self) -> None:
        """Take part in a checkpoint that the first process of the group writes, where it needs the images of this one."""

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Around the writing of a checkpoint."""
        yield

    def __len__(self) -> int:
        return self.filled

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.filled} of {self.capacity} images, {self.offered} were offered)"

    @property
    def examples(self) -> Examples:
        """Images, labels and tasks of the filled slots, as views of the memory."""
        held = slice(0, self.filled)
        return Examples(self.images[held], self.labels[held], self.tasks[held])

    def __getitem__(self, slots: Ints) -> Batched:
        """Return the images in these slots."""
        return self.images.index_select(0, torch.from_numpy(slots).to(self.images.device))

    def add(self, rng: np.random.Generator, x: Batched, labels: Ints, task: int = NO_TASK, **attributes: Tensor) -> Ints:
        """Offer a batch, image after image: each is kept with the probability that leaves all offered so far equally likely.

        Returns the slots written. Where two images of the batch fall on one slot, the later one stays, as if they came singly.
        """
        slots, rows = self.choose(rng, len(labels))
        self.put(slots, x, rows, labels, task, attributes)
        return slots

    def choose(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        """Draw the slots for a batch of `count` images, and the rows of the batch that go there; count them as offered."""
        order = np.arange(self.offered, self.offered + count)
        self.offered += count
        chosen = rng.integers(0, order + 1) if len(order) else order
        free = max(0, self.capacity - self.offered + len(order))
        chosen[:free] = order[:free]
        last = {slot: row for row, slot in enumerate(chosen.tolist()) if slot < self.capacity}
        rows = np.sort(np.fromiter(last.values(), np.int64, len(last)))
        return chosen[rows], rows

    def put(self, slots: Ints, x: Batched, rows: Ints, labels: Ints, task: int, attributes: dict[str, Tensor]) -> None:
        """Write rows of a batch into slots of the caller's choice; the batch may be on another device."""
        if len(slots) == 0:
            return
        device = self.images.device
        where, which = torch.from_numpy(slots).to(device), torch.from_numpy(rows).to(device)
        self.write(slots, where, x.index_select(0, which.to(x.device)))
        for name in self.attributes.keys() - attributes.keys():
            self.attributes[name][where] = 0
        for name, value in attributes.items():
            if name not in self.attributes:
                self.attributes[name] = torch.zeros((self.capacity, *value.shape[1:]), dtype=value.dtype, device=device)
            held, given = self.attributes[name].shape[1:], value.shape[1:]
            if held != given:
                raise UserError(
                    f"what is stored under '{name}' beside an image had the shape {list(held)} and now has {list(given)}; if an "
                    f"axis runs over the classes, declare it in the method: kept = (per_class('{name}', axis=...),)"
                )
            self.attributes[name][where] = value.detach().index_select(0, which)
        places, old, new = slots.tolist(), self.labels[slots].tolist(), labels[rows]
        occupied = [label >= 0 for label in old]
        self._by_label.move(places, old, new.tolist(), occupied)
        self._by_task.move(places, self.tasks[slots].tolist(), [task] * len(places), occupied)
        self.labels[slots], self.tasks[slots] = new, task
        self.filled = max(self.filled, max(places) + 1)

    def draw(
        self,
        n: int,
        rng: np.random.Generator,
        *,
        task: int | None = None,
        except_task: int | None = None,
        labels: Iterable[int] | None = None,
        except_labels: Iterable[int] | None = None,
    ) -> Ints:
        """Draw n different slots, uniform over those that qualify (all of them if fewer do). At most one condition
        can be given.
        """
        if sum(condition is not None for condition in (task, except_task, labels, except_labels)) > 1:
            raise ValueError("draw takes one condition at most")
        if task is not None:
            return self._by_task.draw(n, rng, {task})
        if except_task is not None:
            return self._by_task.draw(n, rng, self._by_task.keys() - {except_task})
        if labels is not None:
            return self._by_label.draw(n, rng, set(labels))
        if except_labels is not None:
            return self._by_label.draw(n, rng, self._by_label.keys() - set(except_labels))
        return distinct(n, self.filled, rng)

    def draw_by_class(self, n: int, rng: np.random.Generator) -> Ints:
        """Draw n slots, for each a class drawn uniformly among those held, then one of its images; repeats are
        possible.
        """
        return self._by_label.draw_by_key(n, rng)

    def clear(self) -> None:
        """Forget everything, also how much was offered."""
        self.filled = self.offered = 0
        self.labels[:], self.tasks[:] = -1, NO_TASK
        self._by_label, self._by_task = Buckets(self.capacity), Buckets(self.capacity)

    def count(self, *, task: int | None = None, label: int | None = None) -> int:
        """Count slots with images of a task, of a label, or of anything."""
        if task is not None:
            return self._by_task.size(task)
        return self._by_label.size(label) if label is not None else self.filled

    def held(self) -> dict[int, int]:
        """Return {label: images held} for every label that ever was in memory, in the order of first arrival."""
        return self._by_label.sizes()

    def slots_of(self, label: int) -> Ints:
        """Return all slots that hold images of a label, in no particular order."""
        return self._by_label.all(label)

    def composition(self) -> dict[int, int]:
        """Return {label: images held}."""
        return {label: self._by_label.size(label) for label in sorted(self._by_label.keys()) if self._by_label.size(label)}

    def state_dict(self) -> dict[str, Any]:
        """Save filled slots only: a checkpoint of a half-empty memory is half the size."""
        held = slice(0, self.filled)
        return {
            "images": self.saved_images(),
            "labels": self.labels[held],
            "tasks": self.tasks[held],
            "by_label": self._by_label.state_dict(self.filled),
            "by_task": self._by_task.state_dict(self.filled),
            "offered": self.offered,
            "attributes": {name: value[held] for name, value in self.attributes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.filled, self.offered = len(state["labels"]), state["offered"]
        if self.filled > self.capacity:
            raise UserError(f"the saved memory holds {self.filled} images but this one only {self.capacity} slots")
        held = slice(0, self.filled)
        self.labels[:], self.tasks[:] = -1, NO_TASK
        self.load_images(state["images"])
        self.labels[held], self.tasks[held] = state["labels"], state["tasks"]
        self._by_label.load_state_dict(state["by_label"], self.labels[held])
        self._by_task.load_state_dict(state["by_task"], self.tasks[held])
        for name, value in state["attributes"].items():
            self.attributes[name] = torch.zeros((self.capacity, *value.shape[1:]), dtype=value.dtype, device=self.images.device)
            self.attributes[name][held] = value.to(self.images.device)


class Buckets:
    """The slots of each key (a label or a task), so that a filtered draw looks at no slot it does not return.

    A slot leaves its bucket by changing places with the bucket's last one; `place` remembers where each slot stands.
    """

    def __init__(self, capacity: int) -> None:
        self.place: Ints = np.zeros(capacity, np.int64)
        self._slots: dict[int, list[int]] = {}

    def keys(self) -> set[int]:
        return set(self._slots)

    def sizes(self) -> dict[int, int]:
        return {key: len(slots) for key, slots in self._slots.items()}

    def size(self, key: int) -> int:
        return len(self._slots.get(key, ()))

    def all(self, key: int) -> Ints:
        return np.array(self._slots.get(key, ()), np.int64)

    def move(self, slots: list[int], old: list[int], new: list[int], occupied: list[bool]) -> None:
        """Take the occupied slots out of their buckets `old` and put all of them into `new`.

        Plain Python over the slots just written: at most a stream batch of them, and ever fewer as the reservoir fills.
        """
        for slot, leave, key, was_in in zip(slots, old, new, occupied, strict=True):
            if was_in:
                bucket, hole = self._slots[leave], int(self.place[slot])
                last = bucket.pop()
                if last != slot:
                    bucket[hole] = last
                    self.place[last] = hole
            bucket = self._slots.setdefault(key, [])
            self.place[slot] = len(bucket)
            bucket.append(slot)

    def draw(self, n: int, rng: np.random.Generator, keys: set[int]) -> Ints:
        """n different slots, uniform over the union of the keys' buckets, which count in the order their keys were first met."""
        buckets = [bucket for key, bucket in self._slots.items() if key in keys]
        ends = np.cumsum([0] + [len(bucket) for bucket in buckets])
        picks = distinct(n, int(ends[-1]), rng)
        which = np.searchsorted(ends, picks, side="right") - 1
        within = picks - ends[which]
        return np.array([buckets[b][i] for b, i in zip(which.tolist(), within.tolist(), strict=True)], np.int64)

    def draw_by_key(self, n: int, rng: np.random.Generator) -> Ints:
        """n slots, each of a key drawn uniformly among those that have any; none where nothing is held."""
        buckets = [bucket for bucket in self._slots.values() if bucket]
        if not buckets:
            return np.empty(0, np.int64)
        which = rng.integers(0, len(buckets), n)
        within = rng.integers(0, np.array([len(bucket) for bucket in buckets])[which])
        return np.array([buckets[b][i] for b, i in zip(which.tolist(), within.tolist(), strict=True)], np.int64)

    def state_dict(self, filled: int) -> dict[str, Any]:
        return {"keys": list(self._slots), "place": self.place[:filled]}

    def load_state_dict(self, state: dict[str, Any], key_of_slot: Ints) -> None:
        """The buckets as they were, from each slot's key and its place in the key's bucket."""
        self.place[: len(key_of_slot)] = state["place"]
        self._slots = {key: [] for key in state["keys"]}
        for slot in np.argsort(state["place"], kind="stable").tolist():
            self._slots[int(key_of_slot[slot])].append(slot)


def distinct(n: int, among: int, rng: np.random.Generator) -> Ints:
    """n different integers below `among`, in random order, at a cost that depends on n alone (all of them if n is larger)."""
    if n >= among:
        return rng.permutation(among)
    if 3 * n > among:
        return rng.permutation(among)[:n]
    picks: dict[int, None] = {}
    while len(picks) < n:
        picks.update(dict.fromkeys(rng.integers(0, among, n - len(picks)).tolist()))
    return np.fromiter(picks, np.int64, n)
