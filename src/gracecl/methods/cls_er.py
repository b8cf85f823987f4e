"""CLS-ER. Arani, Sarfraz, Zonooz, Learning Fast, Learning Slow: a General Continual Learning Method based on Complementary Learning
System, ICLR 2022.

    θ_P, θ_S <- copies of the net's weights θ, the plastic and the stable model
    for each batch x from the stream, step number k = 1, 2, …:
        u <- n_recall images drawn from memory, none of them twice
        z_i <- logits of u_i by the stable model if its softmax of the true class is larger than the plastic one's, else by that
        step on CE(x ∪ u) + λ · mean (logits of u - z)²
        with probability plastic_rate: θ_P <- a θ_P + (1 - a) θ, a = min(1 - 1 / (k + 1), plastic_momentum)
        with probability stable_rate:  θ_S <- a θ_S + (1 - a) θ, a = min(1 - 1 / (k + 1), stable_momentum)
        memory <- reservoir(memory, x)
    predict with the stable model

The plastic model should move more often or faster than the stable one. Neither is trained; both only follow. A head at each of
several layers is compared with the same head of the models, and each layer chooses between them by itself. Under grace(...) the
stable model, which predicts, also gives the past accuracies, hence α.

Differences from the paper and its program: both terms use one forward of x and u (the program passes u once more, alone, for the
second); the models are in evaluation mode and their BatchNorm statistics are averaged like weights (the program's models normalise
by the batch and collect statistics of replayed images of their own); the rates and momenta are the program's defaults, which its
runs replace for each benchmark (strength 0.15, rates 0.1 and 0.3, momenta 0.999 for CIFAR-10 in 50 epochs with 200 images; strength
2, rates 0.9 and 1, momenta 0.99 for one epoch of MNIST).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from gracecl.core import Batch, LossTable, Plan, Planning, Selection, StreamBatch, Taps
from gracecl.functional.losses import cross_entropy, cross_entropy_of_each, logit_distance
from gracecl.memory import Memories
from gracecl.methods.replay import Replay
from gracecl.nets.tapped import TappedNet
from gracecl.nets.teacher import Average
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast, Within


@methods.register("cls_er")
@dataclass(eq=False, repr=False)
class CLSER(Replay):
    """CLS-ER: replay towards the surer of two slow averages of the net; predictions by the slower one."""

    strength: Annotated[float, AtLeast(0)] = 0.1
    """λ, the weight of the distance to the averages' logits"""
    plastic_rate: Annotated[float, Within(0, 1)] = 0.9
    """probability that the plastic model is updated after a step"""
    plastic_momentum: Annotated[float, Within(0, 1)] = 0.999
    """largest share of itself that the plastic model keeps in an update"""
    stable_rate: Annotated[float, Within(0, 1)] = 0.7
    """probability that the stable model is updated after a step"""
    stable_momentum: Annotated[float, Within(0, 1)] = 0.999
    """largest share of itself that the stable model keeps in an update"""

    state = ("plastic", "stable", "steps")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.plastic, self.stable = Average(net), Average(net)
        self.steps = 0

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        return Plan({"all": Selection(np.arange(len(new)), memories.replay.draw(self.recalled(new), planning.rng))})

    def prepare(self, batch: Batch) -> None:
        """Take the logits of the more confident model for each replayed image, in each layer."""
        if self.steps == 0:  # whatever weights the first step starts from, both models start from too
            self.plastic.start_over()
            self.stable.start_over()
        rows = replayed(batch)
        if rows.start == rows.stop:
            return
        x, y = batch.x[rows], batch.y[rows]
        stable, plastic = (model.copy(x).logits for model in (self.stable, self.plastic))
        self.net.meter.count(forward=2 * len(x))
        surer = cross_entropy_of_each(stable, y) < cross_entropy_of_each(plastic, y)
        batch.targets["cls_er"] = torch.where(surer[..., None], stable, plastic)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        table = {"ce/all": cross_entropy(out.logits, batch.y)}
        if "cls_er" in batch.targets:
            table["kd/surer"] = self.strength * logit_distance(out.logits[:, replayed(batch)], batch.targets["cls_er"])
        return table

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.steps += 1
        early = 1 - 1 / (self.steps + 1)
        plastic, stable = batch.rng("cls_er").random(2)
        if plastic < self.plastic_rate:
            self.plastic.update(min(early, self.plastic_momentum))
        if stable < self.stable_rate:
            self.stable.update(min(early, self.stable_momentum))

    def eval_net(self, net: TappedNet) -> TappedNet:
        return self.stable.copy


def replayed(batch: Batch) -> slice:
    """Return the rows that came from memory, which stand after the stream's."""
    block = batch.blocks["all"]
    return slice(block.start + block.from_stream, block.start + block.images)
