"""Retrospective adversarial replay (RAR). Kumari, Wang, Zhou, Bilmes, NeurIPS 2022.

    for each batch B_n from the stream:
        (u, v) <- n_recall images drawn from memory, of classes that are not in B_n;  none: step on CE(B_n) and go on
        θ' <- θ - virtual_lr · ∇CE(B_n; θ);  h' <- features under θ'
        t_i <- the image of B_n with the smallest |h'(u_i) - h'(t_i)|
        d <- u;  m <- 0
        `attack_steps` times:
            a <- ∇_d |h'(d) - h'(t)|², each image's divided by its sum of absolute values
            m <- momentum · m + a
            d <- d - step_size · sign(m), kept within radius of u and within the range of pixels
        step from θ on CE(B_n) + (1 - β) CE(u, v) + β CE(d, v)
        memory <- reservoir(memory, B_n)
    with mix:  u is mixed with a permutation of itself before it is matched and attacked, and so are the labels of d

The attacked images lie between old and new classes, so their step moves the boundary there. Pixels are those of [0, 1].

(Repeated Augmented Rehearsal, which goes by the same letters, is `rar`.)

Differences from the paper and its program: retrieval is uniform (the paper also retrieves by MIR and ASER); replay begins with the
first image of another class in memory, not with the second task, so no task marks are needed; only filled slots are replayed; the
stream's batch passes the net once more in the training step (the program reuses the gradient of θ'), which lets wrappers reweigh
the loss; the attack starts from the replayed images as the run's augmentation shows them (the program has none); with several
tapped layers θ' follows their summed loss and h' is the deepest layer's; 64 images are drawn (the program: 10), and β is what
is reported for CIFAR-100 (the program's for CIFAR-10 are 0.5 and 0.1, by the memory's size).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from gracecl.core import Batch, LossTable, Plan, Planning, Selection, StreamBatch, Taps, apart
from gracecl.functional.losses import cross_entropy, mixed_cross_entropy
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.replay import Replay
from gracecl.nets.scoring import Weights, gradient, rate_ahead, scoring, step_ahead
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast, Within


@methods.register("adversarial_replay")
@dataclass(eq=False, repr=False)
class AdversarialReplay(Replay):
    """Retrospective adversarial replay: stored images pushed towards their nearest new ones are replayed beside the originals."""

    beta: Annotated[float, Within(0, 1)] = 0.4
    """β, the weight of the attacked images; the replayed ones have the rest"""
    radius: Annotated[float, AtLeast(0)] = 8 / 255
    """how far a pixel may move, of a range of 1"""
    step_size: float | None = None
    """how far one step of the attack moves a pixel; None is the radius"""
    attack_steps: Annotated[int, Within(0, 1000)] = 2
    """steps of the attack"""
    momentum: float = 1.0
    """of the attack's direction"""
    random_start: bool = False
    """whether the attack starts at a random place within the radius"""
    match_on: Literal["features", "logits"] = "features"
    """where images are compared"""
    mix: bool = False
    """whether the attacked images are mixed from two memory images each"""
    virtual_lr: float | None = None
    """rate of the step that is looked ahead; None is the optimizer's for SGD, 0.1 for others, whose rates mean something else"""

    traits = Traits(images="moves pixels of images within [0, 1]")

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        stream = np.arange(len(new))
        slots = memories.replay.draw(self.recalled(new), planning.rng, except_labels=new.labels.tolist())
        blocks = {"new": Selection(stream)}
        if len(slots):
            blocks["replay"] = Selection(slots=slots)
            if self.beta:
                blocks["adversarial"] = Selection(slots=slots, views=((),))  # attacked images take the place of these
        return Plan(blocks, forwards=apart(blocks))

    def prepare(self, batch: Batch) -> None:
        if "adversarial" not in batch.blocks:
            return
        new, replay = batch.rows("new"), batch.rows("replay")
        x, u = batch.x[new], batch.x[replay]
        if self.mix:
            rng = batch.rng("mix")
            share, order = torch.tensor(rng.random(), dtype=u.dtype, device=u.device), torch.from_numpy(rng.permutation(len(u)))
            order = order.to(u.device)
            u = share * u + (1 - share) * u[order]
            batch.blocks["adversarial"].found.update(share=share, other=batch.y[replay][order])
        ahead = step_ahead(
            self.net, gradient(self.net, x, batch.y[new], "frozen"), rate_ahead(self.virtual_lr, batch.learning_rate)
        )
        batch.x[batch.rows("adversarial")] = self.attack(u, x, ahead, batch.rng("start"))

    def attack(self, u: Tensor, x: Tensor, ahead: Weights, rng: np.random.Generator) -> Tensor:
        """Move memory images u towards the stream images x that lie nearest under the weights after the virtual
        step.
        """
        net, pixels = self.net, self.net.inputs.images
        with scoring(net, "frozen"):
            goal = self.look(x[self.match(u, x, ahead)], ahead)
            original = pixels.restore(u)
            moved, direction = original.clamp(0, 1), torch.zeros_like(original)
            if self.random_start:
                noise = torch.from_numpy(2 * rng.random(tuple(u.shape)) - 1).to(u)
                moved = (moved + self.radius * noise).clamp(0, 1)
            for _ in range(self.attack_steps):
                moved = moved.detach().requires_grad_()
                with torch.enable_grad():
                    distance = F.mse_loss(self.look((moved - pixels.mean) / pixels.std, ahead), goal)
                    (slope,) = torch.autograd.grad(distance, moved)
                net.meter.count(backward=len(u))
                direction = self.momentum * direction + slope / slope.abs().sum(dim=(1, 2, 3), keepdim=True).clamp(min=1e-12)
                moved = moved.detach() - (self.radius if self.step_size is None else self.step_size) * direction.sign()
                moved = moved.clamp(original - self.radius, original + self.radius).clamp(0, 1)
        return (moved.detach() - pixels.mean) / pixels.std

    def match(self, u: Tensor, x: Tensor, ahead: Weights) -> Tensor:
        """Return `[R]`: of each memory image the nearest stream image."""
        return torch.cdist(self.look(u, ahead), self.look(x, ahead), compute_mode="donot_use_mm_for_euclid_dist").argmin(dim=1)

    def look(self, x: Tensor, weights: Weights) -> Tensor:
        """Return what images are compared by, under other weights than the net's own."""
        out: Taps = functional_call(self.net, weights, (x,))
        self.net.meter.count(forward=len(x))
        return (out.features if self.match_on == "features" else out.logits)[-1]

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        logits = {block: out.logits[:, where.rows] for block, where in batch.blocks.items()}
        y = {block: batch.y[where.rows] for block, where in batch.blocks.items()}
        table = {"ce/new": cross_entropy(logits["new"], y["new"])}
        if "replay" in logits:
            table["ce/replay"] = (1 - self.beta) * cross_entropy(logits["replay"], y["replay"])
        if "adversarial" in logits:
            attacked, labels, mixed = logits["adversarial"], y["adversarial"], batch.blocks["adversarial"].found
            if mixed:
                table["ce/adversarial"] = self.beta * mixed_cross_entropy(attacked, labels, mixed["other"], mixed["share"])
            else:
                table["ce/adversarial"] = self.beta * cross_entropy(attacked, labels)
        return table
