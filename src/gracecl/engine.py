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

from gracecl import augment, optim, rng
from gracecl.core import MEMORY_SOURCE, NO_TASK, Batch, Block, Incoming, Ints, LossTable, Progress, Rows, Taps
from gracecl.errors import UserError
from gracecl.losses import entropy
from gracecl.memory import Memories
from gracecl.method import Method
from gracecl.nets.tapped import TappedNet

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OBSERVE_EVERY = 10


@dataclass(frozen=True)
class Outcome:
    """What a step did: the table, without gradients, and how many images went through the net."""

    table: LossTable
    images: int


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
        self._params = list(net.parameters())
        self.optimiser = method.optimiser(self._params) or optim.build(optimiser, self._params)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.progress = Progress()
        self.images_seen = 0
        self._task_open = False
        self._ready_at = -1
        self._generators = {purpose: rng.Reseeded() for purpose in ("plan", "store")}
        net.train()

    # Learning.

    def learn(
        self, x: Tensor, labels: Ints, task: int = NO_TASK, sources: Ints | None = None, fresh: bool = True
    ) -> Outcome | None:
        """One batch of the stream. Returns None where the method chose not to update."""
        self._advance(labels, task)
        if sources is None:
            sources = np.arange(self.images_seen, self.images_seen + len(labels))
        new = Incoming(x.to(self.device, non_blocking=True), labels, sources, self.progress, fresh)
        outcome: Outcome | None = None
        notes: dict[str, Tensor] = {}
        if self.device.type == "cuda":
            # What compiled graphs returned in the last step may be overwritten from here on.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with rng.torch_seed(self.seed, "torch", self.progress.step, device=self.device):
            for repeat in range(self.method.repeats):
                plan = self.method.plan(new, self.memories, self._rng("plan", repeat))
                if plan:
                    outcome, notes = self._update(self._assemble(plan, new, repeat))
        if fresh:
            self.method.store(self.memories, new, self._rng("store"), notes)
        self.images_seen += len(labels)
        self.progress = replace(self.progress, step=self.progress.step + 1, first_of_task=False)
        return outcome

    def end_task(self) -> None:
        """Tells the method that the task is over; harmless when it was told already."""
        if self._task_open:
            self._task_open = False
            self.method.end_task(self.memories, self.progress)

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

    def _assemble(self, plan: dict[str, Rows], new: Incoming, repeat: int) -> Batch:
        """Gathers the planned images and makes their views: blocks one after the other, in each view after view."""
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
                if draws == 0:
                    raw.append(number)
                stem = rng.key(self.seed, "augment", self.progress.step, repeat, place, number)
                pixels.append(augment.apply(view, base, rng.uniform(stem, origin, draws), self.net.pixels))
            labels += [new.labels[rows.stream], memory.labels[rows.slots]] * len(views)
            sources += [origin] * len(views)
            blocks[name] = Block(start, len(rows), len(views), len(rows.stream), tuple(raw))
            start += len(rows) * len(views)
        x = torch.cat(pixels) if len(pixels) > 1 else pixels[0]
        y, origins = np.concatenate(labels), np.concatenate(sources)
        return Batch(x, y, origins, blocks, self.progress, self.net.classes, self.seed, repeat)

    def _update(self, batch: Batch) -> tuple[Outcome, dict[str, Tensor]]:
        """Forward, losses, backward, one optimiser step."""
        with torch.no_grad():
            batch.targets = self.method.targets(batch)
        with self._autocast():
            out = self._forward(batch)
            table = self.method.losses(out, batch)
        for parameter in self._params:  # as zero_grad() does, without its bookkeeping, which a small step notices
            parameter.grad = None
        self.method.backward(table, self.scaler.scale(torch.ones((), device=self.device)) if self.scaler.is_enabled() else None)
        self.scaler.unscale_(self.optimiser)
        self.method.after_backward(batch)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        with torch.no_grad():
            self.method.after_step(out, batch)
            notes = self.method.notes(out, batch)
            if self.progress.step % OBSERVE_EVERY == 0:
                table = observations(out, batch) | table
        return Outcome({row: value.detach() for row, value in table.items()}, len(batch)), notes

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
        net = self.method.eval_net
        if self._ready_at != self.progress.step:
            with torch.no_grad():
                self.method.before_eval(net, self.memories, self.progress)
            self._ready_at = self.progress.step
        return net

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; whatever is random is a function of the step."""
        return {
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
        self.optimiser.load_state_dict(state["optimiser"])
        for parameter, moments in self.optimiser.state.items():
            for name, value in moments.items():
                if value.shape == parameter.shape:  # fused optimisers walk through both in the order of their memory
                    moments[name] = torch.empty_like(parameter).copy_(value)
        self.memories.load_state_dict(state["memories"])
        self.scaler.load_state_dict(state["scaler"])


def observations(out: Taps, batch: Batch) -> LossTable:
    """What the progress line and the curves show of any method: each layer's entropy, and its accuracy on the step's images."""
    logits = out.logits[:, batch.supervised]
    right = (logits.argmax(dim=-1) == batch.y[batch.supervised]).float().mean(dim=1)
    return {"log/H": entropy(logits), "log/accuracy": right}


def _gather(x: Tensor, rows: Ints, more: Tensor) -> Tensor:
    """The rows of x, then more images."""
    some = x if np.array_equal(rows, np.arange(len(x))) else x.index_select(0, torch.from_numpy(rows).to(x.device))
    return torch.cat([some, more]) if len(more) else some
