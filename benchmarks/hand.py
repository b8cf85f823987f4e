"""What a careful person would write by hand for the same arithmetic: the yardsticks of the step benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.scene import STREAM_BATCH
from gracecl.inputs import Inputs
from gracecl.nets import TappedNet


class ReplayLoop:
    """Experience replay without any library: slices of a stream, a reservoir in two tensors, one forward, one step of Adam."""

    def __init__(self, net: nn.Module, images: Tensor, labels: Tensor, inputs: Inputs, memory: int, n_recall: int) -> None:
        self.net, self.images, self.labels, self.inputs, self.n_recall = net, images, labels, inputs, n_recall
        self.optimizer = adam(net)
        self.rng = np.random.default_rng(0)
        rows = torch.arange(memory) % len(images)
        self.memory_x, self.memory_y = images[rows], labels[rows]
        self.offered, self.at = 2 * memory, 0

    def step(self) -> None:
        start = self.at % (len(self.images) - STREAM_BATCH + 1)
        self.at += STREAM_BATCH
        x, y = self.images[start : start + STREAM_BATCH], self.labels[start : start + STREAM_BATCH]
        slots = torch.from_numpy(self.rng.choice(len(self.memory_x), self.n_recall, replace=False))
        both = self.inputs.normalise(torch.cat([x, self.memory_x[slots]]))
        loss = F.cross_entropy(self.net(both), torch.cat([y, self.memory_y[slots]]))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        chosen = self.rng.integers(0, np.arange(self.offered, self.offered + STREAM_BATCH) + 1)
        self.offered += STREAM_BATCH
        for image, slot in enumerate(chosen.tolist()):
            if slot < len(self.memory_x):
                self.memory_x[slot], self.memory_y[slot] = x[image], y[image]


def two_layers(inputs: int, width: int, classes: int) -> nn.Module:
    """The net that `mlp(width, depth=2)` is, in PyTorch's own words."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


def bare_step(net: TappedNet, x: Tensor) -> Callable[[], None]:
    """Forward, mean cross-entropy, backward and optimizer on ready images, and nothing else."""
    optimizer = adam(net)
    y = torch.randint(0, net.classes, (len(x),)).repeat(net.layers)

    def step() -> None:
        loss = F.cross_entropy(net(x).logits.flatten(0, 1), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """As the learner's default."""
    return torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
