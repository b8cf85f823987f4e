"""GRACE: layer-wise feedback around any method. Wu, Wang, Huang, Dynamic Feedback Engines, 2025.

    α_l <- 1
    for each task t:
        if t > 1: A_l <- accuracy of head l on images of the past;  s <- (A - mean A) / std A;  α <- exp(tanh(-s))
        for each mini-batch:
            H_l <- mean entropy of softmax(head l);  z <- (H - mean H) / std H;  γ <- β exp(tanh(z))
            step on Σ_l ( α_l · L_l + γ_l · H_l )

L_l is whatever the inner method's table says; α multiplies its cross-entropy rows, the others (contrast, distillation, penalties)
stay. The rule that makes α and γ is a controller (`controllers/`); `strength` names another one.

Differences from the paper, which contradicts itself in places; each choice is an option below: α_l L_l is summed in every
mini-batch (the printed algorithm sums it once, before any batch exists); γ is not differentiated; std is that of a complete set;
where all layers agree (std below 1e-8) z is 0; the past is the replay memory at the task boundary, so α moves no image out of the
budget; entropies are taken over all images of the step and all outputs. Predictions are the inner method's. On a stream without
task marks α is renewed every `refresh_every` steps, which is our extension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from gracecl import controllers, registry, spec
from gracecl.controllers import Controller, Signals
from gracecl.controllers.paper import EntropyMode
from gracecl.core import NO_TASK, Batch, Incoming, Ints, LossTable, Progress, Taps, is_loss
from gracecl.errors import UserError
from gracecl.feedback import Feedback
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
    entropy_mode: EntropyMode = "alg1"
    """what strength="paper" adds per layer. alg1: +β e^tanh(z) H, as Algorithm 1 prints. cpr: -β e^tanh(-z) H, as the
    introduction says. target: β (e^tanh(z) - 1) H, towards the mean, as the abstract says. deviation: β (H - mean H)², as the
    theorems say. cpr_literal: -β e^tanh(z) H. uniform: β H. none: nothing"""
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
    """let gradients flow through γ, which strength="paper" may do"""
    sigma_floor: float = 1e-8
    """smallest standard deviation that z is divided by; below 1e-8, z is 0"""
    strength: str = "paper"
    """the rule that makes γ: paper, bayes, pi, balance or one of your own, with options as in "bayes(c=1, tau=0.5)"; beta,
    adaptive, unbiased and sigma_floor hold for each of them"""
    refresh_every: int = 500
    """steps after which α is renewed on a stream without task marks; 0 leaves it at 1 there"""

    own_boundaries: ClassVar[Boundaries] = "used"
    wants_taps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh_every < 0:
            raise UserError(f"grace: refresh_every cannot be negative, as {self.refresh_every} is; 0 means never")
        self.controller()  # refuses a bad rule now, not at the first step

    def attach(self, net: TappedNet, memories: Memories) -> None:
        if self.val_source == "heldout":
            memories.carve("heldout", max(1, round(HELDOUT_SHARE * memories.replay.capacity)))
        super().attach(net, memories)
        self.feedback = Feedback(net.layers, self.controller(), net.classifier.weight.device)

    def controller(self) -> Controller:
        """The rule that `strength` names, with this method's options where the expression gives none."""
        shared = {name: getattr(self, name) for name in ("beta", "adaptive", "unbiased", "sigma_floor")}
        readings = {"entropy_mode": self.entropy_mode, "attached": self.attached}
        if registry.normal(spec.parse_call(self.strength).name) == "paper":
            return controllers.build(self.strength, **shared | readings)
        if readings != {"entropy_mode": "alg1", "attached": False}:
            raise UserError(f"grace: entropy_mode and attached are readings of strength='paper', not of '{self.strength}'")
        return controllers.build(self.strength, **shared)

    def end_task(self, memories: Memories, progress: Progress) -> None:
        super().end_task(memories, progress)
        self.look_back(memories)

    def look_back(self, memories: Memories) -> None:
        """What α follows from now on: how well each head still knows the past."""
        images, labels = self.past(memories)
        if len(labels) and self.trains_on_stream:  # else its heads know nothing yet, and α stays 1
            self.feedback.accuracy = head_accuracies(self.eval_net, images, labels)

    def past(self, memories: Memories) -> tuple[Tensor, Ints]:
        if self.val_source == "test_oracle":
            if memories.oracle is None:
                raise UserError("grace: val_source='test_oracle' needs a stream with test images; use 'buffer' or 'heldout' here")
            return memories.oracle()
        store = memories["heldout"] if self.val_source == "heldout" else memories.replay
        return store.images[: len(store)], store.labels[: len(store)]

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        signals = self.signals(out, batch)
        controller = self.feedback.controller
        alpha, gamma = controller(signals)
        table = self.weighted(super().losses(out, batch), alpha)
        if self.entropy_mode != "none" and controller.beta != 0:
            if "entropy" in table:
                raise UserError(f"{self!r}: {self.inner!r} has an entropy row already; one grace is enough")
            table["entropy"] = controller.term(signals, gamma)
        table |= {f"log/{name}": value for name, value in self.feedback.described(signals, alpha, gamma).items()}
        if batch.progress.step % RATIO_EVERY == 0:
            table["log/gradient_ratio"] = self.feedback.gradient_ratio(signals, alpha, gamma)
        return table

    def signals(self, out: Taps, batch: Batch) -> Signals:
        """What the layers show on the images whose entropy counts."""
        rows = self.entropy_rows(batch)
        return Signals(out.logits[:, rows], self.feedback.accuracy, batch.y[rows], batch.seen if self.classes == "seen" else None)

    def weighted(self, table: LossTable, alpha: Tensor) -> LossTable:
        """The inner table with α on the rows it acts on."""
        chosen = {row for row in table if is_loss(row) and self.acts_on(row)}
        if not chosen:
            raise UserError(
                f"{self!r}: {self.inner!r} has no loss row for alpha_on='{self.alpha_on}' "
                f"(its rows: {', '.join(table)}); use alpha_on='all' or another that matches"
            )
        return {row: alpha * value if row in chosen else value for row, value in table.items()}

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

    def after_step(self, out: Taps, batch: Batch) -> None:
        super().after_step(out, batch)
        self.feedback.controller.after_step(self.signals(out, batch))

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

    def observe(self, memories: Memories, new: Incoming, rng: np.random.Generator) -> None:
        super().observe(memories, new, rng)
        step = new.progress.step + 1
        if new.progress.task == NO_TASK and self.refresh_every and step % self.refresh_every == 0:
            self.look_back(memories)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.feedback.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.feedback.load_state_dict(state)

    def task_values(self) -> dict[str, list[float]]:
        controller, accuracy = self.feedback.controller, self.feedback.accuracy
        values = {"A": accuracy, "s": controller.relative(accuracy), "alpha": controller.weights(accuracy)}
        return super().task_values() | {name: value.tolist() for name, value in values.items()}


def head_accuracies(net: TappedNet, images: Tensor, labels: Ints) -> Tensor:
    """[L]: share of images that each linear head gets right, its argmax taken over all outputs."""
    device = net.classifier.weight.device
    right = torch.zeros(net.layers, device=device)
    for rows, taps in net.sweep(images):
        right += (taps.logits.argmax(dim=-1) == torch.from_numpy(labels[rows]).to(device)).sum(dim=-1)
    return right / len(labels)
