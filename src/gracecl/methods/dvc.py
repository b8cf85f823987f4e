"""DVC. Gu et al., Not Just Selection, but Exploration: Online Class-Incremental Continual Learning via Dual View Consistency,
CVPR 2022.

    for each batch x from the stream, T an augmentation:
        C <- n_candidates images drawn from memory, none of them twice
        θ_v <- θ - virtual_lr · ∇ L(x; θ)
        s_i <- g(u_i; θ_v) - g(u_i; θ) for each candidate u_i, with g = ‖softmax(z) - e_y‖₁ · ‖features‖₁
        u <- the n_recall candidates with the largest s_i
        step from θ on L(x) + L(u)
        memory <- reservoir(memory, x)

    L(x): z, z' <- logits of x and T(x), in one forward;  j <- Q(z, z'), with Q = Linear(2C, 128), ReLU, Linear(128, C)
          p, p', q <- softmax of z, z', j;  p̄, p̄', q̄ <- their means over the batch
          CE(z) and CE(z'), their mean
          - mi_weight · (H(p̄) + H(p̄') + H(q̄)) / 3
          + dl_weight · mean of |q - p| and |q - p'| over images, views and outputs

g is the L1 norm of the cross-entropy's gradient with respect to the head's weights, so the images are replayed whose gradient would
grow most (maximal gradient interference). The second and third term are how the paper raises the mutual information of the two
views' outputs: each distribution spread over classes, both near their joint one. Q takes part in training alone. With several
tapped layers each has its own Q, and scores and the loss that is looked ahead are summed over them; GRACE's weights act on the
training step, on the rows `ce/…`, not on the scores.

Differences from the paper and its program: p, p', q and Q's inputs span the classes met so far, in the order in which they came
(the program's span all outputs, which pulls the means towards classes not met yet, and depend on class numbers); candidates are
scored as they are stored and augmented after the selection (the program scores them beside their augmented view and trains on that
same view), and scoring does not move BatchNorm's running statistics; T is the run's augmentation (`--augment full` is the
program's); the stream's batch passes the net once more, as in MIR; 64 of 256 candidates are replayed (the program: 10 of 50).

On a GPU each step waits for the device, as the host keeps the list of slots that are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Batch, Ints, LossTable, Plan, Planning, Selection, StreamBatch, Taps, apart
from gracecl.functional.losses import cross_entropy, full_precision
from gracecl.memory import Memories
from gracecl.methods.replay import Replay
from gracecl.nets.scoring import gradient_of, outputs, rate_ahead, step_ahead
from gracecl.nets.tapped import StackedLinear, TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast

HIDDEN = 128
SMALLEST = 2.0**-52
"""probabilities are not smaller than this in a logarithm"""


@methods.register("dvc")
@dataclass(eq=False, repr=False)
class DVC(Replay):
    """DVC: two views with consistent outputs; replays the images whose gradient would grow most under the step on the new ones."""

    n_candidates: Annotated[int, AtLeast(0)] = 256
    """images drawn from memory and scored at each step"""
    virtual_lr: float | None = None
    """rate of the step that is looked ahead; None is the optimizer's for SGD and 0.1 for others, whose rates mean something else"""
    mi_weight: Annotated[float, AtLeast(0)] = 1.0
    """weight of the entropies of mean outputs"""
    dl_weight: Annotated[float, AtLeast(0)] = 4.0
    """weight of the distance of both views' outputs from their joint one; the paper's is 2 on CIFAR-10"""

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.hidden = net.add_extra("dvc_hidden", StackedLinear(net.layers, 2 * net.classes, HIDDEN).from_classes(times=2))
        self.joint = net.add_extra("dvc_joint", StackedLinear(net.layers, HIDDEN, net.classes).over_classes())

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        slots, views = self.recall(new, memories, planning), ((), planning.augment)
        blocks = {"new": Selection(np.arange(len(new)), views=views), "replay": Selection(slots=slots, views=views)}
        blocks = {block: rows for block, rows in blocks.items() if len(rows)}
        return Plan(blocks, forwards=apart(blocks))

    def recall(self, new: StreamBatch, memories: Memories, planning: Planning) -> Ints:
        """Return the candidates whose gradient would grow most. Slots are needed on the host, so this waits for
        the device once.
        """
        count = self.recalled(new)
        slots = memories.replay.draw(max(self.n_candidates, count), planning.rng)
        if len(slots) <= count:
            return slots
        chosen: Ints = self.interference(new, memories, planning, slots).topk(count).indices.cpu().numpy()
        return slots[chosen]

    def interference(self, new: StreamBatch, memories: Memories, planning: Planning, slots: Ints) -> Tensor:
        """Return `[C]`: by how much the gradient of each candidate would grow."""
        net, memory, device = self.net, memories.replay, new.x.device
        raw = net.inputs.normalise(new.x)
        views = torch.cat([raw, raw]) if planning.preview is None else planning.preview(((), planning.augment))
        y = torch.from_numpy(new.labels).to(device)
        seen = torch.tensor(new.progress.seen, device=device)
        direction = gradient_of(net, views, lambda out: sum_of(self.terms(out.logits, y, seen)), "frozen")
        ahead = step_ahead(net, direction, rate_ahead(self.virtual_lr, planning.learning_rate))
        candidates, labels = net.inputs.normalise(memory[slots]), torch.from_numpy(memory.labels[slots]).to(device)
        now, then = (outputs(net, candidates, weights, "frozen") for weights in (None, ahead))
        return head_gradients(then, labels) - head_gradients(now, labels)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        seen = torch.tensor(batch.progress.seen, device=batch.x.device)
        table: LossTable = {}
        for block, where in batch.blocks.items():
            terms = self.terms(out.logits[:, where.rows], batch.y[where.view(0)], seen)
            table |= {f"{role}/{block}": value for role, value in terms.items()}
        return table

    def terms(self, logits: Tensor, y: Tensor, seen: Tensor) -> LossTable:
        """Return `{role: [L]}` for the logits of two views, one after the other; `seen` are the classes in the
        order of the stream.
        """
        p = full_precision(logits[..., seen]).softmax(dim=-1)
        first, second = p[:, : len(y)], p[:, len(y) :]
        both = self.jointly(logits[:, : len(y), seen], logits[:, len(y) :, seen])
        distance = ((both - first).abs() + (both - second).abs()).mean(dim=1).sum(dim=-1) / (2 * logits.shape[-1])
        spread = entropy_of_mean(first) + entropy_of_mean(second) + entropy_of_mean(both)
        return {
            "ce": cross_entropy(logits, y.repeat(2)),
            "mi": -self.mi_weight * spread / 3,
            "dl": self.dl_weight * distance,
        }

    def jointly(self, first: Tensor, second: Tensor) -> Tensor:
        """q, `[L, n, seen]`: inputs and outputs of classes not met yet are left out."""
        room = (0, self.net.classes - first.shape[-1])
        hidden = torch.relu(self.hidden(torch.cat([F.pad(first, room), F.pad(second, room)], dim=-1)))
        return full_precision(self.joint(hidden)[..., : first.shape[-1]]).softmax(dim=-1)


def sum_of(terms: LossTable) -> Tensor:
    return torch.stack(list(terms.values())).sum()


def entropy_of_mean(p: Tensor) -> Tensor:
    """Return `[L]`: the entropy of the mean over images of distributions `[L, n, K]`."""
    mean = p.mean(dim=1)
    return -(mean * mean.clamp(min=SMALLEST).log()).sum(dim=-1)


def head_gradients(out: Taps, y: Tensor) -> Tensor:
    """Return `[B]`: the L1 norm of each image's cross-entropy gradient with respect to the weights of its heads,
    summed over layers.
    """
    error = full_precision(out.logits).softmax(dim=-1) - F.one_hot(y, out.logits.shape[-1])
    return (error.abs().sum(dim=-1) * full_precision(out.features).abs().sum(dim=-1)).sum(dim=0)
