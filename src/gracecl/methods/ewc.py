"""Elastic Weight Consolidation. Kirkpatrick et al., Overcoming Catastrophic Forgetting in Neural Networks, PNAS 2017.

    at the end of task k: F_k,p <- mean over images of the task of (∂ log p(y|x) / ∂θ_p)², image by image;  θ*_k <- θ
    penalty:              λ/2 Σ_k Σ_p F_k,p (θ_p - θ*_k,p)²

A sum of parabolas is a parabola: the pairs (F_k, θ*_k) of all tasks are kept as one pair, Σ_k F_k and its centre, and the height
of its lowest point, which gives the same penalty and gradient at two vectors in all instead of two per task.

Differences from the paper: the task's images must be seen again when it ends, so a uniform sample of them is kept beside the
memory until then (`n_fisher`; a run reports it). With several tapped layers the likelihood is the product of all heads'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl import rng
from gracecl.core import Progress
from gracecl.inputs import loaded
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.quadratic import MeasuredAtTaskEnd
from gracecl.nets.scoring import scoring
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast


@methods.register("ewc")
@dataclass(eq=False, repr=False)
class EWC(MeasuredAtTaskEnd):
    """Elastic weight consolidation: weights matter by the Fisher information of each task; added to a learner."""

    strength: Annotated[float, AtLeast(0)] = 100.0
    """λ, the strength of the pull"""
    labels: Literal["true", "sample", "pred", "all", "true_weighted"] = "true"
    """labels of the Fisher information. true: the images' own, empirical. sample: drawn from the net. pred: its guess. all: every
    label by its probability, exact, and as many passes as classes. true_weighted: the images' own by their probability"""

    traits = Traits(boundaries="used", interval="every", met_only=False)
    half = True
    state = ("lowest",)

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.lowest = self.anchor.new_zeros(net.layers)

    def consolidate(self, memories: Memories, progress: Progress) -> None:
        images = memories[self.name]
        if len(images):
            x = loaded(images.examples.images)
            y = torch.from_numpy(images.labels[: len(images)]).to(x.device)
            self.remember(self.fisher(x, y, rng.generator(self.name, progress.step)))
            images.clear()

    def fisher(self, x: Tensor, y: Tensor, generator: np.random.Generator) -> Tensor:
        """Return `[P]`: the mean over images of the squared gradient of log p(label | x)."""
        if self.labels == "all":
            heads = range(self.net.layers)
            return sum(
                (self._for_class(x, head, c) for head in heads for c in range(self.net.classes)), torch.zeros_like(self.anchor)
            )
        labels = self._labels(x, y, generator)
        if self.labels == "true_weighted":
            return self._mean_square(x, lambda log_p: log_p * (log_p.detach() / 2).exp(), labels)
        return self._mean_square(x, lambda log_p: log_p, labels)

    def remember(self, fisher: Tensor) -> None:
        """Add a task's parabola to the sum of those before it."""
        weights, total = self.flat.snapshot(), self.importance + fisher
        share = torch.where(total > 0, fisher / total, 1.0)
        away = weights - self.anchor
        self.lowest = self.lowest + self.flat.by_layer(self.importance * share * away.square())
        self.anchor, self.importance = torch.lerp(self.anchor, weights, share), total

    def distance(self) -> Tensor:
        return super().distance() + self.lowest

    def _mean_square(self, x: Tensor, scaled: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
        """`labels [n, L]`, one for each head; `scaled` turns the log-likelihood of each head into what is differentiated."""

        def score(logits: Tensor, of_heads: Tensor) -> Tensor:
            log_p = F.log_softmax(logits[:, 0], dim=-1)
            return scaled(log_p.gather(1, of_heads[:, None])).sum()

        return self.average(x, score, torch.square, labels)

    def _for_class(self, x: Tensor, head: int, label: int) -> Tensor:
        """The part of the exact Fisher information that one label of one head contributes."""

        def score(logits: Tensor) -> Tensor:
            log_p = F.log_softmax(logits[head, 0], dim=-1)[label]
            return log_p * (log_p.detach() / 2).exp()  # √p outside the gradient is p outside its square

        return self.average(x, score, torch.square)

    def _labels(self, x: Tensor, y: Tensor, generator: np.random.Generator) -> Tensor:
        """Return `[n, L]`."""
        if self.labels in ("true", "true_weighted"):
            return y[:, None].expand(-1, self.net.layers)
        with scoring(self.net), torch.no_grad():
            p = (
                torch.cat([self.net(self.normalised(x[at : at + 256])).logits for at in range(0, len(x), 256)], dim=1)
                .softmax(dim=-1)
                .transpose(0, 1)
            )
        self.net.meter.count(forward=len(x))
        if self.labels == "pred":
            return p.argmax(dim=-1)
        chances = torch.from_numpy(generator.random((*p.shape[:2], 1))).to(p)
        return (p.cumsum(dim=-1) < chances).sum(dim=-1).clamp(max=self.net.classes - 1)
