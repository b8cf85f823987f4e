"""One learner's state and what it does with one batch of the stream. The trainer and the embeddable learner both drive this.

plan: which images, by block  →  gather (bytes)  →  views, augmented on the device  →  net, one forward per group
    →  losses {role/part: [L]}  →  backward, optimiser  →  after_step  →  store
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gracecl import rng
from gracecl.core import MEMORY_SOURCE, NO_TASK, Batch, Block, Incoming, Ints, LossTable, Progress, Rows, Taps, is_penalty, total
from gracecl.engine.fit import Fit
from gracecl.errors import UserError
from gracecl.functional import augment, optim
from gracecl.functional.losses import entropy
from gracecl.memory import Memories
from gracecl.methods.base import Method
from gracecl.nets.tapped import TappedNet

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OBSERVE_EVERY = 10


@dataclass(frozen=True)
class Outcome:
    """What a batch of the stream led to: the last table, without gradients, and how many images that took."""

    table: LossTable
    images: int
    """trained on, over all repeats"""
    forward: int = 0
    """that went through the net, those of scoring, teachers and the memory's update too"""
    backward: int = 0
    """that a gradient was taken of"""


class Engine:
    """A method, its net, its memories and its optimiser, at some step."""

    def __init__(
        self,
        method: Method,
        net: TappedNet,
        memories: Memories,
        *,
        seed: int = 0,
        augmentation: str = "tau",
        optimiser: str = optim.DEFAULT,
        precision: Precision = "fp32",
    ) -> None:
        self.method, self.net, self.memories, self.seed = method, net, memories, seed
        self.device = net.classifier.weight.device
        self.augmentation, self.precision = augment.augmentation(augmentation), precision
        with rng.torch_seed(seed, "modules of the method", device=self.device):
            method.attach(net, memories)
        groups = net.parameter_groups()
        self._params = [parameter for _, params in groups for parameter in params]
        self.optimiser = method.optimiser(self._params) or optim.build(optimiser, groups)
        self._full_rates = [group["lr"] for group in self.optimiser.param_groups]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.progress = Progress()
        self.images_seen = 0
        self._task_open = False
        self.fit: Fit | None = None
        """what the predictions of this step are made by, where the method trains before evaluation"""
        self._ready_at = -1
        self._generators = {purpose: rng.Reseeded() for purpose in ("plan", "store", "observe")}
        net.train()

    # Learning.

    def learn(
        self, x: Tensor, labels: Ints, task: int = NO_TASK, sources: Ints | None = None, fresh: bool = True
    ) -> Outcome | None:
        """One batch of the stream. Returns None where the method chose not to update."""
        self.fit = None
        self._advance(labels, task)
        self._set_rates()
        if sources is None:
            sources = np.arange(self.images_seen, self.images_seen + len(labels))
        new = Incoming(x.to(self.device, non_blocking=True), labels, sources, self.progress, fresh)
        outcome: Outcome | None = None
        notes: dict[str, Tensor] = {}
        images, forward, backward = 0, self.net.forwarded, self.net.backwarded
        if self.device.type == "cuda":
            # What compiled graphs returned in the last step may be overwritten from here on.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with rng.torch_seed(self.seed, "torch", self.progress.step, device=self.device):
            for repeat in range(self.method.repeats):
                plan = self._plan(new, repeat)
                if plan:
                    outcome, notes = self._update(self._assemble(plan, new, repeat))
                    images += outcome.images
        if fresh:
            self.method.store(self.memories, new, self._rng("store"), notes)
            self.method.observe(self.memories, new, self._rng("observe"))
        self.images_seen += len(labels)
        self.progress = replace(self.progress, step=self.progress.step + 1, first_of_task=False)
        if outcome is None:
            return None
        return Outcome(outcome.table, images, self.net.forwarded - forward, self.net.backwarded - backward)

    def end_task(self) -> None:
        """Tells the method that the task is over; harmless when it was told already."""
        if self._task_open:
            self._task_open = False
            self._close_task()
            self.method.end_task(self.memories, self.progress)

    def _close_task(self) -> None:
        """The steps that the method takes on its memory when a task ends; none, for most."""
        seed, step = rng.key(self.seed, "closing steps"), self.progress.step
        for number, plan in enumerate(self.method.closing_steps(self.memories, self.progress, rng.generator(seed, step))):
            with rng.torch_seed(seed, "torch", step, number, device=self.device):
                self._update(self._assemble(plan, self._nothing(), number, seed))
            self._ready_at = -1  # what was made for predictions before these steps is out of date

    def _advance(self, labels: Ints, task: int) -> None:
        """Moves to the batch's task and adds its labels to those met."""
        progress = self.progress
        if task != progress.task:
            self.end_task()
            progress = replace(progress, task=task, first_of_task=True, current=())
            self.progress, self._task_open = progress, True
            self.method.begin_task(progress)
        met = dict.fromkeys(labels.tolist())
        seen, current = dict.fromkeys(progress.seen), dict.fromkeys(progress.current)
        if not met.keys() <= current.keys():
            self.progress = replace(progress, seen=tuple(seen | met), current=tuple(current | met))

    def _set_rates(self) -> None:
        """The learning rates of this step."""
        part = self.method.rate(self.progress)
        for group, full in zip(self.optimiser.param_groups, self._full_rates, strict=True):
            group["lr"] = part * full

    def _plan(self, new: Incoming, repeat: int) -> dict[str, Rows]:
        """What the method wants to train on; to score images it may ask how the stream's would look and how far a step would go."""
        rate = self.optimiser.param_groups[-1]["lr"] if isinstance(self.optimiser, torch.optim.SGD) else None

        def view() -> Tensor:
            return self._assemble({"new": Rows(np.arange(len(new)))}, new, repeat).x

        return self.method.plan(replace(new, view=view, rate=rate, repeat=repeat), self.memories, self._rng("plan", repeat))

    def _nothing(self) -> Incoming:
        """A batch of the stream without images, for steps on the memory alone."""
        return Incoming(self.memories.replay.images[:0], np.empty(0, np.int64), np.empty(0, np.int64), self.progress)

    def _assemble(self, plan: dict[str, Rows], new: Incoming, repeat: int, seed: int | None = None) -> Batch:
        """Gathers the planned images and makes their views: blocks one after the other, in each view after view."""
        seed = self.seed if seed is None else seed
        blocks: dict[str, Block] = {}
        pixels, labels, sources = [], [], []
        start = 0
        for place, (name, rows) in enumerate(plan.items()):
            memory = self.memories[rows.store]
            origin = np.concatenate([new.sources[rows.stream], MEMORY_SOURCE + rows.slots])
            base = self.net.pixels.normalise(_gather(new.x, rows.stream, memory[rows.slots]))
            views, raw = self.method.views(name, self.augmentation), []
            for number, view in enumerate(views):
                draws = augment.draws(view)
                if augment.is_raw(view):
                    raw.append(number)
                stem = rng.key(seed, "augment", self.progress.step, repeat, place, number)
                pixels.append(augment.apply(view, base, rng.uniform(stem, origin, draws), self.net.pixels))
            labels += [new.labels[rows.stream], memory.labels[rows.slots]] * len(views)
            sources += [origin] * len(views)
            blocks[name] = Block(start, len(rows), len(views), len(rows.stream), tuple(raw))
            start += len(rows) * len(views)
        x = torch.cat(pixels) if len(pixels) > 1 else pixels[0]
        y, origins = np.concatenate(labels), np.concatenate(sources)
        return Batch(x, y, origins, blocks, self.progress, self.net.classes, seed, repeat)

    def _update(self, batch: Batch) -> tuple[Outcome, dict[str, Tensor]]:
        """Forward, losses, backward, one optimiser step."""
        self._prepare_batch(batch)
        with self._autocast():
            out = self._forward(batch)
            table = self.method.losses(out, batch)
        for parameter in self._params:  # as zero_grad() does, without its bookkeeping, which a small step notices
            parameter.grad = None
        data, penalties = split(table)
        self.method.backward(data, self.scaler.scale(torch.ones((), device=self.device)) if self.scaler.is_enabled() else None)
        self.net.count(backward=len(batch))
        self.scaler.unscale_(self.optimiser)
        self.method.after_backward(batch)
        if penalties:
            total(penalties).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimiser)
        self.scaler.update()
        with torch.no_grad():
            self.method.after_step(out, batch)
            notes = self.method.notes(out, batch)
            if self.progress.step % OBSERVE_EVERY == 0:
                table = observations(out, batch) | table
        return Outcome({row: value.detach() for row, value in table.items()}, len(batch)), notes

    def _prepare_batch(self, batch: Batch) -> None:
        """The method's changes to the images, then what its teachers say of them."""
        with torch.no_grad():
            self.method.prepare(batch)
            batch.targets |= self.method.targets(batch)

    def _forward(self, batch: Batch) -> Taps:
        groups = self.method.forwards(list(batch.blocks))
        if len(groups) == 1:
            return self.net(batch.x)  # type: ignore[no-any-return]
        spans = [slice(batch.blocks[group[0]].rows.start, batch.blocks[group[-1]].rows.stop) for group in groups]
        return Taps.join([self.net(batch.x[span]) for span in spans])

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32" and not torch.is_autocast_enabled(self.device.type):  # of the program around the learner
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES.get(self.precision), enabled=self.precision != "fp32")

    def _rng(self, purpose: str, repeat: int = 0) -> np.random.Generator:
        return self._generators[purpose](self.seed, purpose, self.progress.step, repeat)

    # Inference.

    def ready_to_predict(self) -> TappedNet:
        """The net to predict with, after the method made what its rules need: once per step."""
        if not self.progress.seen:
            raise UserError("nothing was learned yet, so there is nothing to predict; call learn(x, y) first")
        self.prepare()
        while fit := self.unfinished_fit:
            self.step_fit(fit)
        return self.method.eval_net if self.fit is None else self.fit.net

    def prepare(self) -> None:
        """Begins what predictions need, once per step. Where that is a fit, it is left to be stepped to its end."""
        if self._ready_at == self.progress.step:
            return
        with torch.inference_mode(False), torch.no_grad():  # a fit's net must be trainable, wherever predictions are asked for
            self.fit = self.method.before_eval(self.method.eval_net, self.memories, self.progress)
        if self.fit is not None:
            scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
            self.fit.begin(rng.key(self.seed, "fit", self.progress.step), scaler)
        self._ready_at = self.progress.step

    @property
    def unfinished_fit(self) -> Fit | None:
        """The fit that predictions wait for, if one has begun."""
        return None if self.fit is None or self.fit.done else self.fit

    def step_fit(self, fit: Fit) -> Outcome:
        """One step of a fit, with the losses of the whole method."""
        with torch.inference_mode(False), rng.torch_seed(fit.seed, "torch", fit.at, device=self.device):
            batch = self._assemble_fit(fit)
            with self._autocast():
                out = fit.net(batch.x)
                table = self.method.losses(out, batch)
            fit.step(total(split(table)[0]))  # penalties hold the learner's own net, which is not the one that is trained here
        if fit.done:
            with torch.no_grad():
                table = observations(out, batch) | table
        return Outcome({row: value.detach() for row, value in table.items()}, len(batch), len(batch), len(batch))

    def _assemble_fit(self, fit: Fit) -> Batch:
        """The batch of a fit's next step: images of the memory alone."""
        batch = self._assemble(fit.plan(), self._nothing(), fit.at, fit.seed)
        self._prepare_batch(batch)
        return batch

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; whatever is random is a function of the step."""
        fit = self.unfinished_fit
        unfinished = {} if fit is None else {"fit": fit.state_dict()}
        return unfinished | {
            "progress": {name: getattr(self.progress, name) for name in ("step", "task", "first_of_task")}
            | {"seen": list(self.progress.seen), "current": list(self.progress.current)},
            "task_open": self._task_open,
            "images_seen": self.images_seen,
            "net": self.net.state_dict(),
            "method": self.method.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "memories": self.memories.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        at = state["progress"]
        self.progress = Progress(at["step"], at["task"], at["first_of_task"], tuple(at["seen"]), tuple(at["current"]))
        self._task_open, self.images_seen, self._ready_at = state["task_open"], state["images_seen"], -1
        self.net.load_state_dict(state["net"])
        self.method.load_state_dict(state["method"])
        optim.restore(self.optimiser, state["optimiser"])
        self.memories.load_state_dict(state["memories"])
        self.scaler.load_state_dict(state["scaler"])
        self.fit = None
        if "fit" in state:
            self.prepare()
            if self.fit is not None:
                self.fit.load_state_dict(state["fit"])


def split(table: LossTable) -> tuple[LossTable, LossTable]:
    """The rows that depend on the step's images, and the penalties on the weights."""
    data: LossTable = {}
    penalties: LossTable = {}
    for row, value in table.items():
        (penalties if is_penalty(row) else data)[row] = value
    return data, penalties


def observations(out: Taps, batch: Batch) -> LossTable:
    """What the progress line and the curves show of any method: each layer's entropy, and its accuracy on the step's images."""
    logits = out.logits[:, batch.supervised]
    right = (logits.argmax(dim=-1) == batch.y[batch.supervised]).float().mean(dim=1)
    return {"log/H": entropy(logits), "log/accuracy": right}


def _gather(x: Tensor, rows: Ints, more: Tensor) -> Tensor:
    """The rows of x, then more images."""
    some = x if np.array_equal(rows, np.arange(len(x))) else x.index_select(0, torch.from_numpy(rows).to(x.device))
    return torch.cat([some, more]) if len(more) else some
