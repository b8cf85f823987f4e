"""GRACE: layer-wise feedback around any method. Wu, Wang, Huang, Dynamic Feedback Engines, 2025.

    α_l <- 1
    for each task t:
        if t > 1: A_l <- accuracy of head l on images of the past;  s <- (A - mean A) / std A;  α <- exp(tanh(-s))
        for each mini-batch:
            H_l <- mean entropy of softmax(head l);  z <- (H - mean H) / std H;  γ <- β exp(tanh(z))
            step on Σ_l ( α_l · L_l + γ_l · H_l )

L_l is whatever the inner method's table says; α multiplies its cross-entropy rows, the others (contrast, distillation, penalties)
stay. A controller makes α and γ (`controllers/`); `strength` names another one.

Differences from the paper, which contradicts itself in places; each choice is an option below: α_l L_l is summed in every
mini-batch (the printed algorithm sums it once, before any batch exists); γ is not differentiated; std is that of a complete set;
where all layers agree (std below 1e-8) z is 0; the past is the replay memory at the task boundary, so α moves no image out of the
budget, and the task that just ended belongs to it (`past_tasks`); accuracies are those of the linear heads (`past_head`); entropies
are those of the heads' softmax (the printed algorithm takes the softmax of the features: `entropy_of`), of every layer
(`entropy_layers`), averaged (`entropy_sum`) over all images of the step and spread over all outputs. Predictions are the inner
method's. On a stream without task marks α is renewed every `refresh_every` steps, which is our extension.

On a GPU the host waits for the device where a task ends, for the accuracies that it records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from gracecl import controllers, registry
from gracecl.controllers import Controller, Signals
from gracecl.controllers.base import in_double
from gracecl.controllers.feedback import Feedback
from gracecl.controllers.paper import EntropyMode
from gracecl.core import NO_TASK, Batch, Ints, LossTable, Progress, StreamBatch, Taps, is_loss
from gracecl.errors import UserError
from gracecl.functional.losses import full_precision
from gracecl.memory import Memories
from gracecl.methods.base import Method, TaskValues, Traits, Wrapper
from gracecl.nets.class_means import class_means, nearest_mean
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods, spec
from gracecl.registry.spec import AtLeast

Scores = Callable[[Taps], Tensor]
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
    alpha_on: Literal["ce", "ce_new", "ce_past", "all", "entropy"] = "ce"
    """which rows α multiplies: cross-entropy, that on the block of new images alone, that on the balanced or replayed block
    alone, every row of the inner method, or the entropy row alone (α γ H, "reducing the impact of regularisation")"""
    val_source: Literal["buffer", "heldout", "test_oracle"] = "buffer"
    """images that give A: the replay memory; a tenth of its slots that is never replayed; the test sets (for diagnosis only)"""
    past_tasks: Literal["all", "finished"] = "all"
    """tasks that A is measured on: all met so far, or all but the newest, so that α stays 1 until two tasks are done; on a stream
    without task marks every image counts"""
    past_head: Literal["linear", "ncm", "others"] = "linear"
    """what A is the accuracy of: each layer's linear head; the nearest class mean of the memory's features in each layer; or the
    votes of all layers but this one, so that α grows for a layer without which the votes are worse"""
    entropy_of: Literal["head", "features"] = "head"
    """whose softmax the entropy is taken of: the heads' outputs, or the features themselves, as Algorithm 1 prints it"""
    entropy_layers: Literal["all", "last"] = "all"
    """layers whose entropy is added: all, or the deepest alone, as the paper describes CPR"""
    entropy_sum: bool = False
    """sum entropies over the images of the step instead of averaging them"""
    entropy_on: Literal["all", "new", "stream"] = "all"
    """images whose entropy counts: all supervised rows, the block of new images, or the raw views of the stream's own images"""
    classes: Literal["all", "seen"] = "all"
    """outputs that the entropy's softmax spans"""
    unbiased: bool = False
    """divide by L - 1 instead of L in both standard deviations"""
    attached: bool = False
    """let gradients flow through γ, which strength="paper" may do"""
    sigma_floor: float = 1e-8
    """smallest standard deviation of the entropies that z is divided by; below 1e-8, z is 0"""
    accuracy_floor: float = 1e-8
    """smallest standard deviation of the accuracies that s is divided by; differences well below it leave α near 1"""
    strength: str = "paper"
    """the controller that makes γ: paper, bayes, pi, balance, forgetting (which makes α instead) or your own, with options as in
    "bayes(c=1, tau=0.5)"; beta, adaptive, unbiased and the two floors hold for each of them"""
    refresh_every: Annotated[int, AtLeast(0)] = 500
    """steps after which α is renewed on a stream without task marks; 0 leaves it at 1 there"""

    traits = Traits(boundaries="used", interval="refresh_every", all_taps=True, met_only=False)
    state = ("feedback",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.entropy_of == "features" and self.classes == "seen":
            raise UserError(
                "grace: the softmax of features spans features, not classes; use classes='all' with entropy_of='features'"
            )
        controller = registry.normal(spec.parse_call(self.strength).name)
        if self.entropy_of == "features" and controller in ("balance", "forgetting"):
            raise UserError(f"grace: strength='{controller}' compares what the heads put out; use entropy_of='head' with it")
        self.controller()  # refuses a bad expression now, not at the first step

    def attach(self, net: TappedNet, memories: Memories) -> None:
        if self.val_source == "heldout":
            memories.reserve("heldout", max(1, round(HELDOUT_SHARE * memories.replay.capacity)))
        super().attach(net, memories)
        self.feedback = Feedback(net.layers, self.controller(), net.classifier.weight.device)

    def controller(self) -> Controller:
        """Build the controller that `strength` names, with this method's options where the expression gives none."""
        shared = {name: getattr(self, name) for name in ("beta", "adaptive", "unbiased", "sigma_floor", "accuracy_floor")}
        readings = {"entropy_mode": self.entropy_mode, "attached": self.attached}
        if registry.normal(spec.parse_call(self.strength).name) == "paper":
            return controllers.build(self.strength, **shared | readings)
        if readings != {"entropy_mode": "alg1", "attached": False}:
            raise UserError(f"grace: entropy_mode and attached are readings of strength='paper', not of '{self.strength}'")
        return controllers.build(self.strength, **shared)

    def end_task(self, memories: Memories, progress: Progress) -> TaskValues:
        self.look_back(memories, progress)
        controller, accuracy = self.feedback.controller, self.feedback.accuracy
        values = {"A": accuracy, "s": controller.relative_accuracy(accuracy), "alpha": controller.weights(accuracy)}
        return {name: value.tolist() for name, value in values.items()}

    def look_back(self, memories: Memories, progress: Progress) -> None:
        """Measure each layer's accuracy on the past, which sets α from now on."""
        images, labels = self.past(memories, progress)
        if len(labels) and self.inside.traits.trains == "stream":  # else its heads know nothing yet, and α stays 1
            net = self.inside.eval_net(self.net)
            self.feedback.accuracy = layer_accuracies(net, images, labels, self.scores(net, memories, progress))

    def scores(self, net: TappedNet, memories: Memories, progress: Progress) -> Scores:
        """Return what makes the scores `[L, B, C]` that each layer's accuracy on the past is that of."""
        if self.past_head == "others":
            return lambda taps: votes_of_others(taps.logits, list(progress.seen))
        if self.past_head == "ncm":
            means = memory_means(net, memories, progress)
            not_met = (means == 0).all(dim=-1)[:, None]  # the means of classes not met so far are 0
            return lambda taps: nearest_mean(taps.features, means).masked_fill(not_met, -torch.inf)
        return lambda taps: taps.logits

    def past(self, memories: Memories, progress: Progress) -> tuple[Tensor, Ints]:
        """Return images of the past and their labels."""
        if self.val_source == "test_oracle":
            if memories.test_images is None:
                raise UserError("grace: val_source='test_oracle' needs a stream with test images; use 'buffer' or 'heldout' here")
            images, labels, _ = memories.test_images(progress.seen)
            newest = np.isin(labels, progress.current)
        else:
            store = memories["heldout"] if self.val_source == "heldout" else memories.replay
            images, labels, tasks = store.examples
            newest = tasks == progress.task
        if self.past_tasks == "all" or progress.task == NO_TASK:
            return images, labels
        older = np.flatnonzero(~newest)
        return images[torch.from_numpy(older).to(images.device)], labels[older]

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        """Return the entropy's term, and the observations behind it."""
        signals, controller = self.signals(out, batch), self.feedback.controller
        alpha, gamma = self.feedback.factors(signals)
        table: LossTable = {}
        if self.entropy_mode != "none" and controller.beta != 0:
            table["entropy"] = self.entropy_row(controller.term(signals, gamma), alpha)
        table |= {f"log/{name}": value for name, value in self.feedback.described(signals, alpha, gamma).items()}
        if batch.progress.step % RATIO_EVERY == 0 and self.entropy_of == "head":
            table["log/gradient_ratio"] = self.feedback.gradient_ratio(signals, alpha, gamma)
        return table

    def entropy_row(self, term: Tensor, alpha: Tensor) -> Tensor:
        """Return the entropy's term of each layer that has one, with α if it acts here."""
        if self.entropy_layers == "last":
            term = torch.cat([torch.zeros_like(term[:-1]), term[-1:]])
        return alpha * term if self.alpha_on == "entropy" else term

    def signals(self, out: Taps, batch: Batch) -> Signals:
        """Measure the layers on the images whose entropy counts."""
        rows, accuracy = self.entropy_rows(batch), self.feedback.accuracy
        if self.entropy_of == "features":
            return Signals(out.features[:, rows], accuracy, summed=self.entropy_sum)
        classes = batch.seen if self.classes == "seen" else None
        return Signals(out.logits[:, rows], accuracy, batch.y[rows], classes, summed=self.entropy_sum, past=batch.from_memory[rows])

    def adjust(self, table: LossTable, out: Taps, batch: Batch) -> LossTable:
        """Multiply the terms of the inner method by α where it acts."""
        alpha = table["log/alpha"]
        rows = [row for row in table if is_loss(row) and row != "entropy"]
        chosen = {row for row in rows if self.acts_on(row)}
        nothing_past_yet = self.alpha_on == "ce_past" and "ce/new" in table
        if not chosen and self.alpha_on != "entropy" and not nothing_past_yet:
            raise UserError(
                f"{self!r}: {self.inner!r} has no loss row for alpha_on='{self.alpha_on}' "
                f"(its rows: {', '.join(rows)}); use alpha_on='all' or another that matches"
            )
        return {row: alpha * value if row in chosen else value for row, value in table.items()}

    def acts_on(self, row: str) -> bool:
        match self.alpha_on:
            case "all":
                return True
            case "entropy":
                return False
            case "ce_new":
                return row == "ce/new"
            case "ce_past":
                return row in ("ce/balanced", "ce/replay")
        return row.split("/")[0] == "ce"

    def entropy_rows(self, batch: Batch) -> slice | Tensor:
        if self.entropy_on == "stream":
            return batch.stream_rows
        if self.entropy_on == "new":
            if "new" not in batch.blocks:
                raise UserError(f"{self!r}: {self.inner!r} has no block of new images; use entropy_on='all' or 'stream'")
            return batch.rows("new")
        return batch.supervised

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.feedback.controller.after_step(self.signals(out, batch))

    def after_batch(self, memories: Memories, new: StreamBatch) -> StreamBatch | None:
        """Hold some of the images out; every image is offered to one store, so none is ever in both."""
        if self.val_source != "heldout":
            return None
        rng = new.rng("heldout")
        aside = rng.random(len(new)) < HELDOUT_SHARE
        held = new.select(np.flatnonzero(aside))
        memories["heldout"].add(rng, held.x, held.labels, held.progress.task)
        return new.select(np.flatnonzero(~aside))


def layer_accuracies(net: TappedNet, images: Tensor, labels: Ints, scores: Scores = lambda taps: taps.logits) -> Tensor:
    """Return [L]: the accuracy of each layer's scores, those of its linear head over all outputs unless others are given."""
    device = net.classifier.weight.device
    right = torch.zeros(net.layers, dtype=torch.int64, device=device)
    for rows, taps in net.sweep(images):
        right += (scores(taps).argmax(dim=-1) == torch.from_numpy(labels[rows]).to(device)).sum(dim=-1)
    return in_double(right) / len(labels)


def votes_of_others(logits: Tensor, seen: list[int]) -> Tensor:
    """Return [L, B, C]: for each layer the summed softmax, among the classes met, of all the other layers."""
    votes = torch.full_like(logits, -torch.inf)
    own = full_precision(logits[:, :, seen]).softmax(dim=-1)
    votes[:, :, seen] = (own.sum(dim=0) - own).to(votes)
    return votes


def memory_means(net: TappedNet, memories: Memories, progress: Progress) -> Tensor:
    """Return `[L, C, D]`: the class means of what the replay memory holds."""
    memory = memories.replay
    return class_means(net, memory.examples.images, memory.examples.labels, progress.seen)
