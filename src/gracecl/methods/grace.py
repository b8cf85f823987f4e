"""GRACE: layer-wise feedback around any method. Wu, Wang, Huang, Dynamic Feedback Engines, 2025.

    α_l <- 1
    for each task t:
        if t > 1: A_l <- accuracy of head l on images of the past;  s <- (A - mean A) / std A;  α <- exp(tanh(-s))
        for each mini-batch:
            H_l <- mean entropy of softmax(head l);  z <- (H - mean H) / std H;  γ <- β exp(tanh(z))
            step on Σ_l ( α_l · L_l + γ_l · H_l )

L_l is whatever the inner method's table says; α multiplies its cross-entropy rows, the others (contrast, distillation, penalties)
stay.

Differences from the paper, which contradicts itself in places; each choice is an option below: α_l L_l is summed in every
mini-batch (the printed algorithm sums it once, before any batch exists); γ is not differentiated; std is that of a complete set;
where all layers agree (std below 1e-8) z is 0; the past is the replay memory at the task boundary, so α moves no image out of the
budget; entropies are taken over all images of the step and all outputs. Predictions are the inner method's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Batch, Incoming, Ints, LossTable, Progress, Taps, is_loss
from gracecl.errors import UserError
from gracecl.losses import entropy, full_precision
from gracecl.memory import Memories
from gracecl.method import Boundaries, Method, Wrapper
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods

HELDOUT_SHARE = 0.1
RATIO_EVERY = 100


@methods.register("grace")
@dataclass(eq=False, repr=False)
class Grace(Wrapper):
    """GRACE: per-layer loss weights from past accuracy and per-layer entropy regularisation, around any method."""

    inner: Method = "mose()"  # type: ignore[assignment]
    """the method that makes the losses; the paper's is mose()"""
    beta: float = 0.005
    """β, the base strength of the entropy term"""
    entropy_mode: Literal["alg1", "cpr", "target", "deviation", "cpr_literal", "uniform", "none"] = "alg1"
    """what is added per layer. alg1: +β e^tanh(z) H, as Algorithm 1 prints. cpr: -β e^tanh(-z) H, as the introduction says.
    target: β (e^tanh(z) - 1) H, towards the mean, as the abstract says. deviation: β (H - mean H)², as the theorems say.
    cpr_literal: -β e^tanh(z) H. uniform: β H. none: nothing"""
    adaptive: bool = True
    """whether α follows the past accuracies; False is the ablation without adaptive training, α = 1"""
    alpha_on: Literal["ce", "ce_new", "all"] = "ce"
    """which rows α multiplies: cross-entropy, cross-entropy on the current task alone, or every row"""
    val_source: Literal["buffer", "heldout", "test_oracle"] = "buffer"
    """images that give A: the replay memory; a tenth of its slots that is never replayed; the test sets (for diagnosis only)"""
    entropy_on: Literal["all", "new", "stream"] = "all"
    """images whose entropy counts: all supervised rows, the block of new images, or the raw views of the stream's own images"""
    classes: Literal["all", "seen"] = "all"
    """outputs that the entropy's softmax spans"""
    unbiased: bool = False
    """divide by L - 1 instead of L in both standard deviations"""
    attached: bool = False
    """let gradients flow through γ"""
    sigma_floor: float = 1e-8
    """smallest standard deviation that z is divided by; below 1e-8, z is 0"""

    own_boundaries: ClassVar[Boundaries] = "used"
    wants_taps: ClassVar[bool] = True

    def attach(self, net: TappedNet, memories: Memories) -> None:
        if self.val_source == "heldout":
            memories.carve("heldout", max(1, round(HELDOUT_SHARE * memories.replay.capacity)))
        super().attach(net, memories)
        self.alpha = torch.ones(net.layers, device=net.classifier.weight.device)
        self.accuracy = torch.full_like(self.alpha, torch.nan)

    def end_task(self, memories: Memories, progress: Progress) -> None:
        """α for the next task, from how well each head still knows the past."""
        super().end_task(memories, progress)
        images, labels = self.past(memories)
        if len(labels) == 0:
            return
        self.accuracy = head_accuracies(self.eval_net, images, labels)
        if self.adaptive:
            self.alpha = torch.exp(torch.tanh(-self.relative(self.accuracy)))

    def past(self, memories: Memories) -> tuple[Tensor, Ints]:
        if self.val_source == "test_oracle":
            if memories.oracle is None:
                raise UserError("grace: val_source='test_oracle' needs a stream with test images; use 'buffer' or 'heldout' here")
            return memories.oracle()
        store = memories["heldout"] if self.val_source == "heldout" else memories.replay
        return store.images[: len(store)], store.labels[: len(store)]

    def relative(self, values: Tensor) -> Tensor:
        """Each layer's value against the others': (value - mean) / std over the layers."""
        std = self.spread(values)
        precise = values.double()
        z = (precise - precise.mean()) / std.clamp(min=max(self.sigma_floor, 1e-8))
        return torch.where(std < 1e-8, torch.zeros_like(z), z).to(values.dtype)

    def spread(self, values: Tensor) -> Tensor:
        """The standard deviation over the layers, in double precision: in single, the mean of equal values may differ from them."""
        precise = values.double()
        variance = ((precise - precise.mean()) ** 2).sum() / max(1, len(values) - self.unbiased)
        return torch.sqrt(variance.clamp(min=1e-20))  # the root of 0 has no gradient

    def strength(self, z: Tensor) -> Tensor:
        """The factor of each layer's entropy in the objective."""
        match self.entropy_mode:
            case "alg1":
                return self.beta * torch.exp(torch.tanh(z))
            case "cpr":
                return -self.beta * torch.exp(torch.tanh(-z))
            case "cpr_literal":
                return -self.beta * torch.exp(torch.tanh(z))
            case "target":
                return self.beta * (torch.exp(torch.tanh(z)) - 1)
            case "none":
                return torch.zeros_like(z)
        return torch.full_like(z, self.beta)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        table = self.weighted(super().losses(out, batch))
        rows = self.entropy_rows(batch)
        logits = out.logits[:, rows]
        h = entropy(logits, batch.seen if self.classes == "seen" else None)
        z = self.relative(h if self.attached else h.detach())
        gamma = self.strength(z)
        distance = h - h.detach().mean()
        if self.entropy_mode != "none" and self.beta != 0:
            if "entropy" in table:
                raise UserError(f"{self!r}: {self.inner!r} has an entropy row already; one grace is enough")
            table["entropy"] = gamma * (distance**2 if self.entropy_mode == "deviation" else h)
        table |= {"log/H": h, "log/z": z, "log/gamma": gamma, "log/alpha": self.alpha}
        table["log/sigma_H"] = self.spread(h).to(h.dtype).expand_as(h)
        if batch.progress.step % RATIO_EVERY == 0:
            slope = 2 * gamma * distance if self.entropy_mode == "deviation" else gamma
            table["log/gradient_ratio"] = gradient_ratio(logits.detach(), batch.y[rows], slope, self.alpha)
        return table

    def weighted(self, table: LossTable) -> LossTable:
        """The inner table with α on the rows it acts on."""
        chosen = {row for row in table if is_loss(row) and self.acts_on(row)}
        if not chosen:
            raise UserError(
                f"{self!r}: {self.inner!r} has no loss row for alpha_on='{self.alpha_on}' "
                f"(its rows: {', '.join(table)}); use alpha_on='all' or another that matches"
            )
        return {row: self.alpha * value if row in chosen else value for row, value in table.items()}

    def acts_on(self, row: str) -> bool:
        if self.alpha_on == "all":
            return True
        return row == "ce/new" if self.alpha_on == "ce_new" else row.split("/")[0] == "ce"

    def entropy_rows(self, batch: Batch) -> slice | Tensor:
        if self.entropy_on == "stream":
            return batch.stream_rows
        if self.entropy_on == "new":
            if "new" not in batch.blocks:
                raise UserError(f"{self!r}: {self.inner!r} has no block of new images; use entropy_on='all' or 'stream'")
            return batch.rows("new")
        return batch.supervised

    def store(self, memories: Memories, new: Incoming, rng: np.random.Generator, notes: dict[str, Tensor]) -> None:
        if self.val_source != "heldout":
            return super().store(memories, new, rng, notes)
        aside = rng.random(len(new)) < HELDOUT_SHARE  # every image is offered to one store, so none is ever in both
        some, rest = np.flatnonzero(aside), np.flatnonzero(~aside)
        held = new.select(some)
        memories["heldout"].add(rng, held.x, held.labels, held.progress.task)
        super().store(
            memories,
            new.select(rest),
            rng,
            {name: value[torch.from_numpy(rest).to(value.device)] for name, value in notes.items()},
        )

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"alpha": self.alpha, "accuracy": self.accuracy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.alpha, self.accuracy = state["alpha"].to(self.alpha.device), state["accuracy"].to(self.alpha.device)

    def task_values(self) -> dict[str, list[float]]:
        values = {"A": self.accuracy, "s": self.relative(self.accuracy), "alpha": self.alpha}
        return super().task_values() | {name: value.tolist() for name, value in values.items()}


def head_accuracies(net: TappedNet, images: Tensor, labels: Ints) -> Tensor:
    """[L]: share of images that each linear head gets right, its argmax taken over all outputs."""
    device = net.classifier.weight.device
    right = torch.zeros(net.layers, device=device)
    for rows, taps in net.sweep(images):
        right += (taps.logits.argmax(dim=-1) == torch.from_numpy(labels[rows]).to(device)).sum(dim=-1)
    return right / len(labels)


def gradient_ratio(logits: Tensor, y: Tensor, slope: Tensor, alpha: Tensor) -> Tensor:
    """[L]: norm of the entropy term's gradient at the logits over that of α times a plain mean cross-entropy on the same images.

    In closed form, with p the softmax over all outputs: ∂H/∂logit = -p (ln p + H) and ∂CE/∂logit = p - onehot(y). `slope` is the
    derivative of each layer's term with respect to its H, which is γ except in mode `deviation`.
    """
    log_p = F.log_softmax(full_precision(logits), dim=-1)
    p = log_p.exp()
    h = -(p * log_p).sum(dim=-1, keepdim=True)
    of_entropy = (p * (log_p + h)).flatten(1).norm(dim=1)
    of_cross_entropy = (p - F.one_hot(y, p.shape[-1])).flatten(1).norm(dim=1)
    ratio: Tensor = slope.detach().abs() * of_entropy / (alpha * of_cross_entropy).clamp(min=1e-12)
    return ratio
