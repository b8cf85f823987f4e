"""Images that are kept from training: the first ones of each class, an equal share of a store's slots for every class met.

On a GPU it waits for the device, as the host keeps the list of slots.
"""

from __future__ import annotations

import numpy as np

from gracecl.core import Ints, StreamBatch
from gracecl.inputs import same_rows
from gracecl.memory.class_balanced import place_in_class
from gracecl.memory.reservoir import Memory


class HeldOut:
    """Choose images of the stream to hold out from training, equally many of each class, and keep them.

    The share of a class is the number of slots over that of the classes met, without remainder, so it shrinks as classes come, and
    those above it give way at random where room is needed. Where there are fewer slots than classes, a class has one image as long
    as there is a slot left.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def share(self, classes: int) -> int:
        """Return the images of each class, for so many classes met."""
        return self.memory.capacity // max(classes, 1)

    def rows(self, new: StreamBatch) -> Ints:
        """Return positions in a batch of the images that are held out.

        In later epochs over a task these are the images that are in the store, which their pixels tell.
        """
        if not new.fresh:
            return self._known(new)
        share = self.share(len(new.progress.seen))
        held = np.array([self.memory.count(label=label) for label in new.labels.tolist()], np.int64)
        place = held + place_in_class(new.labels)
        if share:
            return np.flatnonzero(place < share)
        return np.flatnonzero(place == 0)[: self.memory.capacity - len(self.memory)]

    def add(self, new: StreamBatch, rng: np.random.Generator) -> None:
        """Keep images that `rows` named: in free slots, then in those of random images of classes above their share."""
        memory, size = self.memory, len(self.memory)
        slots = np.arange(size, min(size + len(new), memory.capacity))
        if len(slots) < len(new):
            order = rng.permutation(size)
            above = order[place_in_class(memory.labels[order]) >= self.share(len(new.progress.seen))]
            slots = np.concatenate([slots, above[: len(new) - len(slots)]])
        memory.put(slots, new.x, np.arange(len(new)), new.labels, new.progress.task, {})
        memory.offered += len(new)

    def balanced(self, classes: int) -> Ints:
        """Return slots of an equal number of images of each class, for so many classes met."""
        labels = self.memory.examples.labels
        return np.flatnonzero(place_in_class(labels) < max(1, self.share(classes)))

    def _known(self, new: StreamBatch) -> Ints:
        memory = self.memory
        slots = np.flatnonzero(np.isin(memory.examples.labels, new.labels))
        same = same_rows(new.x, memory[slots]).any(dim=1)
        return np.flatnonzero(same.cpu().numpy())
