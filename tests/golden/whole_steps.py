"""Whole steps of a learner on the golden files' vectors: its memory and images are numbers of any precision, not bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from small import LinearNet, SmallNet
from torch import Tensor

from gracecl.engine.engine import Engine
from gracecl.functional.augment import Pixels
from gracecl.memory import Memories
from gracecl.methods.base import Method


class UnchangedInputs(Pixels):
    """Images that are what the net sees already."""

    def normalise(self, images: Tensor) -> Tensor:
        return images


def engine_with(small: SmallNet | LinearNet, method: Method, optimizer: str, x: Any, y: Any, capacity: int | None = None) -> Engine:
    """An engine that has met every class, with vectors in the first slots of its memory."""
    memories = Memories(len(y) if capacity is None else capacity, small.shape)
    memory = memories.replay
    memory.images = torch.zeros(memory.capacity, *small.shape, dtype=torch.as_tensor(x).dtype)
    small.net.pixels = UnchangedInputs((0.0,), (1.0,))
    memory.add(np.random.default_rng(0), small.images(x), np.asarray(y))
    return Engine(method, small.net, memories, optimizer=optimizer, augmentation="none")
