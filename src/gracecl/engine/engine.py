"""One learner's state and what it does with one batch of the stream. The trainer and the embeddable learner both drive this.

plans: which images, by block  →  gather (bytes)  →  views, augmented on the device  →  prepare  →  net, one forward per group
    →  losses {role/part: [L]}  →  backward, optimizer  →  after_step  →  after_batch
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracecl import processes, rng
from gracecl.core import Batch, LossTable, Plan, Planning, Progress, Selection, StreamBatch, View
from gracecl.detectors import Detector
from gracecl.engine.assemble import assemble
from gracecl.engine.finite import check_scale, check_weights
from gracecl.engine.fit import Fit
from gracecl.engine.schedule import Schedule, SchedulerFactory
from gracecl.engine.update import Update, observations, split
from gracecl.errors import UserError
from gracecl.functional import optim
from gracecl.functional.budgets import updates_at, updates_before
from gracecl.images import augment
from gracecl.inputs import loaded
from gracecl.memory import Memories
from gracecl.methods.base import Method, TaskValues
from gracecl.nets.growth import Growth
from gracecl.nets.tapped import TappedNet
from gracecl.registry.options import OPTIMIZER, Precision, SchedulerStep
from gracecl.streams import Stream

NOTHING_LEARNED = "nothing was learned yet, so there is nothing to predict; call learn(x, y) first"


@dataclass(frozen=True)
class StepResult:
    """Outcome of a batch of the stream: the last table, without gradients, and how many images that took."""

    table: LossTable
    images: int
    """trained on, over all repeats"""
    forward: int = 0
    """that went through the net, those of scoring, teachers and the memory's update too"""
    backward: int = 0
    """that a gradient was taken of"""
    updates: int = 0
    """steps of the optimizer"""


class Engine:
    """A method, its net, its memories and its optimizer, at some step."""

    def __init__(
        self,
        method: Method,
        net: TappedNet,
        memories: Memories,
        *,
        seed: int = 0,
        augmentation: str | Callable[[Any, torch.Generator], Any] = "tau",
        optimizer: str | optim.OptimizerFactory = OPTIMIZER,
        scheduler: str | SchedulerFactory | None = None,
        scheduler_step: SchedulerStep = "step",
        precision: Precision = "fp32",
        detector: Detector | None = None,
    ) -> None:
        """`detector` says where tasks begin, in place of what batches say of it (see `boundaries.py`)."""
        self.method, self.chain, self.net, self.memories, self.seed = method, method.chain, net, memories, seed
        self.device = net.classifier.weight.device
        self.augmentation, self.precision = augment.augmentation(augmentation), precision
        if self.augmentation and not callable(augmentation) and net.inputs.known:
            _ = net.inputs.images  # others are refused before anything is learned
        with rng.torch_seed(seed, "modules of the method", device=self.device):
            self.chain.attach(net, memories)
        groups = net.parameter_groups()
        params = [parameter for _, members in groups for parameter in members]
        self.optimizer = self.chain.optimizer(params) or optim.build(optimizer, groups)
        self.schedule: Schedule | None = None
        if scheduler is not None:
            make = optim.scheduler(scheduler) if isinstance(scheduler, str) else scheduler
            self.schedule = Schedule(make, self.optimizer, scheduler_step)
        self.full_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.update = Update(self.chain, net, params, self.optimizer, self.scaler, precision)
        self.detector, self.alarm = detector, False
        """what says where tasks begin, and whether it said so of the next batch"""
        self.progress = Progress()
        self.images_seen = 0
        self.task_open = False
        """whether a task has begun and not ended"""
        self.task_values: TaskValues = {}
        """what the parts said of the task that ended last, per layer"""
        self.fit: Fit | None = None
        """what the predictions of this step are made by, where the method trains before evaluation"""
        self.predictor = net
        """the net that predicts at the step `ready_at`"""
        self.ready_at = -1
        self.ready_exactly = True
        """whether it predicts as evaluations want it, or as the learner does between them"""
        self.updates_per_step: Fraction | None = None
        """optimizer steps that each batch of the stream may lead to; None is as many as the method makes"""
        self.fit_images: int | None = None
        """images that a fit may train on; None is as many as the method wants"""
        self._generators: dict[str, rng.Reseeded] = {}
        net.train()

    # Learning.

    def as_seen(self, stream: Stream) -> Stream:
        """The stream in the order in which the learner sees it: its own, unless the learner is a bound."""
        order = self.chain.traits.order
        seen = stream if order is None else order(stream)
        self.memories.test_images = seen.test_images
        return seen

    def learn(self, batch: StreamBatch) -> StepResult | None:
        """Learn one batch of the stream; return None where the method chose not to update."""
        self.fit = None
        new = self.meet(batch)
        table: LossTable | None = None
        images, updates, meter = 0, 0, self.net.meter
        forward, backward = meter.forward, meter.backward
        if self.device.type == "cuda":
            # What compiled graphs returned in the last step may be overwritten from here on.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with rng.torch_seed(self.seed, "torch", self.progress.step, device=self.device):
            for repeat, plan in enumerate(islice(self.plans(new), self._updates_allowed)):
                if plan:
                    self._set_rates(plan)
                    assembled = self.assemble(plan, new, repeat)
                    table = self.update(assembled)
                    images, updates = images + len(assembled), updates + 1
        if new.fresh:
            if self._may_store:
                self.chain.after_batch(self.memories, new)
            if self.detector is None or self.detector.guesses:
                self.chain.tick(self.memories, new.progress)
        self.images_seen += len(new)
        self.progress = replace(self.progress, step=self.progress.step + 1, first_of_task=False)
        result = None if table is None else StepResult(table, images, meter.forward - forward, meter.backward - backward, updates)
        if new.last_of_task:
            self.end_task()
        self._advance("step")
        return result

    @property
    def _updates_allowed(self) -> int | None:
        """Optimizer steps that this step may make; None is any number."""
        return None if self.updates_per_step is None else updates_at(self.progress.step, self.updates_per_step)

    @property
    def _may_store(self) -> bool:
        """Whether this step's images are stored: where no update is made, only if none would bring values to stand beside them."""
        if self.updates_per_step is None or self._updates_allowed:
            return True
        return updates_before(self.progress.step, self.updates_per_step) > 0 and not self.memories.replay.attributes

    def meet(self, batch: StreamBatch) -> StreamBatch:
        """Move to the batch's task and add its labels to those met; return the batch as hooks see it, on the device."""
        if batch.marked != self.progress.marked:
            self.progress = replace(self.progress, marked=batch.marked)
        progress = self.progress
        if batch.task != progress.task:
            self.end_task()
            progress = replace(progress, task=batch.task, first_of_task=True, current=())
            self.progress, self.task_open = progress, True
            self.chain.begin_task(progress)
        if self.net.sharing != "off" and not processes.all_have(zlib.crc32(batch.labels.tobytes()), self.device):
            raise UserError(
                "the processes of the group were given different batches, or one of them made another call that needs all; give "
                "the whole batch to each, or sharing='off' to a learner of one process"
            )
        met = dict.fromkeys(batch.labels.tolist())
        seen, current = dict.fromkeys(progress.seen), dict.fromkeys(progress.current)
        if not met.keys() <= current.keys():
            self.grow(max(met) + 1)
            self.progress = replace(progress, seen=tuple(seen | met), current=tuple(current | met))
        sources = np.arange(self.images_seen, self.images_seen + len(batch)) if len(batch.sources) == 0 else batch.sources
        x = batch.x.to(self.device, non_blocking=True)
        return replace(batch, x=x, sources=sources, progress=self.progress, rng=self.rng, kept={}, found={})

    def grow(self, classes: int) -> None:
        """Make room for so many classes, wherever there is an axis over them; nothing, if there is room already.

        The net's new weights are a function of seed and class. All else begins at 0: moments of the optimizer, statistics, what was
        stored beside images. Masks leave the new classes out, and copies of the net get the weights that it gets.
        """
        if classes <= self.net.classes:
            return
        growth = Growth(self.net.classes, classes, self.seed)
        self.net.grown(growth)
        self._grow_moments(growth)
        self.chain.grow(growth)
        for store in self.memories.stores.values():
            for name in self.chain.kept:
                if name in store.attributes:
                    store.attributes[name] = growth.padded(store.attributes[name], 1 + name.axis)

    def _grow_moments(self, growth: Growth) -> None:
        """Pads the optimizer's moments of parameters that have grown; those of another shape than the parameter begin anew."""
        for name, along in self.net.class_axes.items():
            parameter = self.net.get_parameter(name)
            moments, before = self.optimizer.state.get(parameter, {}), growth.shape_before(parameter, along)
            tensors = {key: value for key, value in moments.items() if isinstance(value, Tensor) and value.ndim}
            if any(list(value.shape) != before for value in tensors.values()):
                del self.optimizer.state[parameter]
            else:
                moments |= {key: growth.padded(value, along.axis, along.blocks) for key, value in tensors.items()}

    def plans(self, new: StreamBatch) -> Iterator[Plan]:
        """Yield the updates that the method wants, each planned when the one before it is done.

        To score images, planning may ask how the stream's would look in the update, and how far it would go.
        """
        repeat = 0

        def preview(views: tuple[View, ...]) -> Any:
            return self.assemble(Plan({"new": Selection(np.arange(len(new)), views=views)}), new, repeat).x

        planning = Planning(self.rng("plan"), self.augmentation, self.full_rate, preview)
        plans = self.chain.plans(new, self.memories, planning)
        while (plan := next(plans, None)) is not None:
            yield plan
            repeat += 1
            self.rng("plan", repeat)  # sends the generator that `planning` holds to the next update's place

    def plan(self, new: StreamBatch) -> Plan:
        """Return the first of the plans; an empty one where there is none."""
        return next(self.plans(new), Plan({}))

    def assemble(self, plan: Plan, new: StreamBatch, repeat: int = 0, seed: int | None = None) -> Batch:
        """Assemble the batch of an update: see `assemble.py`."""
        return assemble(
            self.net,
            self.memories,
            plan,
            new,
            self.augmentation,
            seed=self.seed if seed is None else seed,
            repeat=repeat,
            learning_rate=self.learning_rate,
        )

    @property
    def learning_rate(self) -> float | None:
        """Of this update, where the optimizer is gradient descent without adaptive scaling."""
        return self.optimizer.param_groups[-1]["lr"] if isinstance(self.optimizer, torch.optim.SGD) else None

    @property
    def full_rate(self) -> float | None:
        """The learning rate of an update whose plan does not change it, where the optimizer is of that kind."""
        return self.full_rates[-1] if isinstance(self.optimizer, torch.optim.SGD) else None

    def rng(self, purpose: str, repeat: int = 0) -> np.random.Generator:
        """Return the generator of a purpose at this step, the same whenever it is asked for."""
        if purpose not in self._generators:
            self._generators[purpose] = rng.Reseeded()
        return self._generators[purpose](self.seed, purpose, self.progress.step, repeat)

    def end_task(self) -> None:
        """Tell the method that the task is over; harmless when it was told already. `learn` does so where a batch says it."""
        if self.task_open:
            self.task_open = False
            self._close_task()
            self.task_values = self.chain.end_task(self.memories, self.progress)
            self._advance("task")

    def _close_task(self) -> None:
        """Make the updates on the memory alone that the method wants when a task ends."""
        seed, step = rng.key(self.seed, "closing steps"), self.progress.step
        planning = Planning(rng.generator(seed, step), self.augmentation, self.full_rate)
        for number, plan in enumerate(self.chain.closing(self.progress, self.memories, planning)):
            self._set_rates(plan)
            with rng.torch_seed(seed, "torch", step, number, device=self.device):
                self.update(self.assemble(plan, self._nothing(), number, seed))
            self.invalidate_predictions()

    def _set_rates(self, plan: Plan) -> None:
        """Set the learning rates of an update."""
        for group, full in zip(self.optimizer.param_groups, self.full_rates, strict=True):
            group["lr"] = plan.rate * full

    def _advance(self, per: SchedulerStep) -> None:
        """The schedule's next learning rates, where it goes by these."""
        if self.schedule is not None and self.schedule.per == per:
            self.full_rates = self.schedule.advance(self.full_rates)

    def _nothing(self) -> StreamBatch:
        """Return a batch of the stream without images, for steps on the memory alone."""
        return StreamBatch(loaded(self.memories.replay.images[:0]), np.empty(0, np.int64), progress=self.progress)

    # Inference.

    def ready_to_predict(self, exact: bool = True) -> TappedNet:
        """Return the net to predict with, after the method prepared its rules: once per step.

        Evaluations are exact. Predictions while the stream goes on need not be, where the method approximates them.
        """
        if not self.progress.seen:
            raise UserError(NOTHING_LEARNED)
        self.get_ready(exact)
        while fit := self.unfinished_fit:
            self.step_fit(fit)
        return self.predictor if self.fit is None else self.fit.net

    def invalidate_predictions(self) -> None:
        """Discard cached class means and fits; they are made again before the next prediction."""
        self.ready_at = -1

    def get_ready(self, exact: bool = True) -> None:
        """Begin what predictions need, once per step. Where that is a fit, it is left to be stepped to its end."""
        exact = exact or not self.chain.traits.approximates
        if self.ready_at == self.progress.step and self.ready_exactly == exact:
            return
        self.check_finite()
        with torch.inference_mode(False), torch.no_grad():  # a fit's net must be trainable, wherever predictions are asked for
            self.predictor = self.chain.eval_net(self.net)
            self.fit = self.chain.before_eval(self.predictor, self.memories, replace(self.progress, evaluating=exact))
        if self.fit is not None:
            scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
            self.fit.begin(rng.key(self.seed, "fit", self.progress.step), scaler)
            if self.fit_images is not None:
                self.fit.shorten(self.fit_images)
        self.ready_at, self.ready_exactly = self.progress.step, exact

    @property
    def unfinished_fit(self) -> Fit | None:
        """The fit that predictions wait for, if one has begun."""
        return None if self.fit is None or self.fit.done else self.fit

    def step_fit(self, fit: Fit) -> StepResult:
        """Make one step of a fit, with the losses of the whole method."""
        with torch.inference_mode(False), rng.torch_seed(fit.seed, "torch", fit.at, device=self.device):
            batch = self.assemble_fit(fit)
            out, table = self.update.losses(batch, lambda batch: fit.net(batch.x))
            fit.step(split(table)[0])  # penalties hold the learner's own net, which is not the one that is trained here
        if fit.done:
            with torch.no_grad():
                table = observations(out, batch) | table
        return StepResult({row: value.detach() for row, value in table.items()}, len(batch), len(batch), len(batch), updates=1)

    def assemble_fit(self, fit: Fit) -> Batch:
        """Assemble the batch of a fit's next step: images of the memory alone."""
        batch = self.assemble(fit.plan(), self._nothing(), fit.at, fit.seed)
        self.update.prepare(batch)
        return batch

    # Checkpoints.

    def check_finite(self) -> None:
        """Refuse gradients and weights that are not numbers, before anything is made of them."""
        self.update.norms.check()
        check_scale(self.scaler, self.progress.step)
        check_weights(self.net, self.progress.step)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on; whatever is random is a function of the step."""
        self.check_finite()
        fit = self.unfinished_fit
        some: dict[str, Any] = {} if fit is None else {"fit": fit.state_dict()}
        if self.schedule is not None:
            some |= {"schedule": self.schedule.state_dict(), "full_rates": self.full_rates}
        if self.detector is not None:
            some |= {"detector": self.detector.state_dict(), "alarm": self.alarm}
        return some | {
            "progress": {name: getattr(self.progress, name) for name in ("step", "task", "first_of_task", "marked")}
            | {"seen": list(self.progress.seen), "current": list(self.progress.current)},
            "task_open": self.task_open,
            "images_seen": self.images_seen,
            "net": self.net.state_dict(),
            "method": self.chain.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memories": self.memories.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        at = state["progress"]
        seen, current = tuple(at["seen"]), tuple(at["current"])
        self.progress = Progress(at["step"], at["task"], at["first_of_task"], seen, current, at.get("marked", True))
        self.task_open, self.images_seen, self.ready_at = state["task_open"], state["images_seen"], -1
        saved, own = state["net"]["classifier.weight"].shape[-1], self.net.classes
        if saved < own:
            raise UserError(f"the saved learner has room for {saved} classes and this one for {own}; load it into a new learner")
        self.grow(saved)
        self.net.load_state_dict(state["net"])
        self.chain.load_state_dict(state["method"])
        optim.restore(self.optimizer, state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
            self.full_rates = list(state["full_rates"])
        if self.detector is not None:
            self.detector.load_state_dict(state["detector"])
            self.alarm = bool(state["alarm"])
        self.memories.load_state_dict(state["memories"])
        self.scaler.load_state_dict(state["scaler"])
        self.fit = None
        if "fit" in state:
            self.get_ready()
            if self.fit is not None:
                self.fit.load_state_dict(state["fit"])
