"""Training and evaluation mode for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(net: nn.Module, training: bool) -> Iterator[None]:
    """Set training or evaluation mode for the block; restore every module's mode afterwards."""
    modes = [(module, module.training) for module in net.modules()]
    net.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before
