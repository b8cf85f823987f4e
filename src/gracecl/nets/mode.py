"""Training and evaluation mode for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(net: nn.Module, training: bool) -> Iterator[None]:
    """The net in training or in evaluation mode; every part of it is afterwards in the mode it was in."""
    modes = [(module, module.training) for module in net.modules()]
    net.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before
