"""GSA, gradient-based self-adaptive loss. Guo, Liu, Zhao, Dealing with Cross-Task Class Discrimination, CVPR 2023.

    K_c, P_c, N_c <- 0 for every class c, over the whole run
    for each batch x of task t; `new` the classes of the task, `seen` those of all tasks so far, B = n_recall:
        X <- x ∪ draw(n_current images of task t)
        if memory is empty: step on CE(A(V(X)), softmax over new)
        else:
            u <- first B·|new|/|seen| of X ∪ draw(B·(1 - |new|/|seen|) images of other tasks)
            q <- softmax over seen of the logits of V(u)
            for each row i of V(u), v its label:  K_v += 1;  P_v += q_iv;  N_c += q_ic for every c ≠ v
            g_c <- (K_c - P_c) / N_c;  w_c <- 2 σ(g_c - 1), or 1 in the task's first warm_up batches
            step on  2 · mean_i [ -w_v log q_iv ] + CE(A(V(X)), softmax over new)
        memory <- reservoir(memory, x)
    V(x) = A(x), mirrored A(x), each with draws of its own

K - P is how hard a class's logit has been pulled up by images of the class, N how hard it was pushed down by those of others; at
g = 1 they balance and w is 1. w lies between 2 / (1 + e) and 2. Each block has a forward of its own; each tapped layer has its own
sums, hence its own weights.

Differences from the paper and its program: `new` and `seen` are the classes met so far (the program's head has a task's classes
from the task's start); outputs of all classes are there from the beginning, and the optimizer's weight decay acts on those not met
(the program's head grows); A is the run's augmentation (`--augment mild` is the program's); a class with N_c = 0 has weight 1; the
head is trained in every task (the program's optimizer holds the first task's head, which a larger one replaces, so later ones are
never trained and their new outputs stay as they were drawn; reference=True reproduces it); passes of the program whose outputs no
loss uses, and which move BatchNorm's statistics, are not made; precision is the run's (the program uses fp16). The weight grows
with g, as in the program; balance='inverse' lets it grow with 1/g.

No softmax here spans a class before it is met. Under grace(...) say classes='seen', or the entropy of all outputs is lowered
through those of unmet classes, which nothing else holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Batch, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps, View, apart
from gracecl.functional.losses import cross_entropy, cross_entropy_of_each, full_precision
from gracecl.images.augment import Mirror
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits
from gracecl.methods.state import per_class
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast


@methods.register("gsa")
@dataclass(eq=False, repr=False)
class GSA(Method):
    """GSA: a softmax among the task's classes, and class-balanced replay weighted by each class's pull and push so far."""

    n_recall: Annotated[int, AtLeast(0)] = 64
    """B, images of the balanced block, shared between the task and the past as their classes are"""
    n_current: Annotated[int, AtLeast(0)] = 22
    """images of the current task drawn from memory to join the new ones"""
    replay_weight: Annotated[float, AtLeast(0)] = 2.0
    """of the loss on the balanced block"""
    warm_up: Annotated[int, AtLeast(0)] = 5
    """batches at the start of each task in which every class weighs 1"""
    mirrored: bool = True
    """a second, mirrored view of every image"""
    balance: Literal["ratio", "inverse"] = "ratio"
    """whether weights grow with g, pull over push, as in the authors' program, or with 1/g"""
    reference: bool = False
    """leave the head as it is from the second task on, outputs of new classes as drawn, as the authors' program does by accident"""

    traits = Traits(boundaries="required", met_only=True, images="shows images mirrored")
    state = (per_class("sums", axis=2), "task_start", "fresh")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.sums = torch.zeros(3, net.layers, net.classes, dtype=torch.float64, device=net.classifier.weight.device)
        """K, P and N of each layer and class"""
        self.task_start = 0
        self.fresh = {name: value.clone() for name, value in net.classifier.state_dict().items()}
        """the head as it was drawn, with the classes that were declared"""

    def begin_task(self, progress: Progress) -> None:
        self.task_start = progress.step
        if self.reference:
            # The program's head grows by outputs just drawn; in this one, weight decay has shrunk them since the run began.
            unmet = [label for label in range(self.fresh["weight"].shape[-1]) if label not in progress.seen]
            with torch.no_grad():
                for name, value in self.net.classifier.named_parameters():
                    value[..., unmet] = self.fresh[name][..., unmet]

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        memory, progress, stream = memories.replay, new.progress, np.arange(len(new))
        current = memory.draw(self.n_current, planning.rng, task=progress.task)
        blocks = {"new": Selection(stream, current, views=self.views(planning.augment, twice=True))}
        if len(memory):
            met, seen = len(progress.current), len(progress.seen)
            n_new, n_past = self.n_recall * met // seen, self.n_recall * (seen - met) // seen
            past = memory.draw(n_past, planning.rng, except_task=progress.task)
            of_task = current[: max(0, n_new - len(new))]
            views = self.views(planning.augment, twice=False)
            blocks["balanced"] = Selection(stream[:n_new], np.concatenate([of_task, past]), views=views)
        blocks = {name: rows for name, rows in blocks.items() if len(rows)}
        yield Plan(blocks, forwards=apart(blocks))

    def views(self, augment: View, twice: bool) -> tuple[View, ...]:
        """Return an image's views: itself and its mirror image, augmented once, or twice as new images are."""
        again = augment if twice else ()
        return ((*augment, *again), (*augment, Mirror(), *again))[: 1 + self.mirrored]

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        new = batch.rows("new")
        table = {"ce/new": cross_entropy(out.logits[:, new], batch.y[new], batch.current)}
        if "balanced" in batch.blocks:
            rows = batch.rows("balanced")
            of_each = cross_entropy_of_each(out.logits[:, rows], batch.y[rows], batch.seen)
            weight = self.weights(out, batch).to(of_each)[:, batch.y[rows]]
            table["ce/balanced"] = self.replay_weight * (weight * of_each).mean(dim=1)
        return table

    def weights(self, out: Taps, batch: Batch) -> Tensor:
        """Return `[L, C]`: w of each class, from sums that include this step."""
        count, probability, push = self.sums_with(out, batch)
        if batch.progress.step - self.task_start < self.warm_up:
            return torch.ones_like(push)
        pull = count - probability
        up, down = (pull, push) if self.balance == "ratio" else (push, pull)
        return torch.where(down > 0, 2 * torch.sigmoid(up / down - 1), 1.0)

    def sums_with(self, out: Taps, batch: Batch) -> Tensor:
        """Return `[3, L, C]`: K, P and N with this step's balanced block."""
        if "balanced" not in batch.blocks:
            return self.sums
        rows = batch.rows("balanced")
        logits = full_precision(out.logits.detach()[:, rows])
        p = F.softmax(logits.masked_fill(~batch.seen, -torch.inf), dim=-1).double()
        own = F.one_hot(batch.y[rows], batch.classes).double().expand_as(p)
        return self.sums + torch.stack([own, own * p, (1 - own) * p]).sum(dim=2)

    def after_backward(self, batch: Batch) -> None:
        if self.reference and batch.progress.task > 0:
            for parameter in self.net.classifier.parameters():
                parameter.grad = None

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.sums = self.sums_with(out, batch)
