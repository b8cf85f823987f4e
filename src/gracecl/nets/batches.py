"""How many images go through a net at once where nothing depends on it but time: so many that its maps stay in a core's caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gracecl.inputs import Batched
from gracecl.nets.mode import in_mode

CACHED_BYTES = 1 << 25
"""of the inputs and outputs of one layer, for all images of a batch"""
MOST_AT_ONCE = 128
ON_A_GPU = 256


def batch_for(backbone: nn.Module, example: Batched) -> int:
    """The largest power of two of inputs such as this one whose maps, before and behind any layer, fit into `CACHED_BYTES`.

    It follows from the net and the size of the inputs alone, so that all CPUs add up the same sums.
    """
    if example.device.type != "cpu":
        return ON_A_GPU
    largest = 1

    def look(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        nonlocal largest
        tensors = [value for value in (*given, output) if isinstance(value, Tensor)]
        largest = max(largest, sum(value.numel() * value.element_size() for value in tensors))

    hooks = [part.register_forward_hook(look) for part in backbone.modules() if not any(True for _ in part.children())]
    try:
        with in_mode(backbone, training=False), torch.no_grad():
            backbone.forward(example)  # not by a call, which may be compiled
    finally:
        for hook in hooks:
            hook.remove()
    fitting = max(1, CACHED_BYTES * len(example) // largest)
    return min(MOST_AT_ONCE, 1 << (fitting.bit_length() - 1))
