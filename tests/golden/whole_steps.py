"""Whole steps of a learner on the golden files' vectors: its memory and images are numbers of any precision, not bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from small import LinearNet, SmallNet

from gracecl.engine.engine import Engine
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.base import Method


def engine_with(small: SmallNet | LinearNet, method: Method, optimizer: str, x: Any, y: Any, capacity: int | None = None) -> Engine:
    """An engine that has met every class, with vectors in the first slots of its memory."""
    zeros, ones = (0.0,) * small.shape[0], (1.0,) * small.shape[0]
    small.net.inputs = Images(small.shape, zeros, ones, torch.as_tensor(x).dtype)
    memories = Memories(len(y) if capacity is None else capacity, small.net.inputs)
    memory = memories.replay
    memory.add(np.random.default_rng(0), small.images(x), np.asarray(y))
    return Engine(method, small.net, memories, optimizer=optimizer, augmentation="none")
