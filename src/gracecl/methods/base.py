"""A method is a learner written as hooks; a wrapper is a method around a method; `a + b` adds b's losses to a's.

Every hook has a default except `losses`. The engine calls them in this order for each batch of the stream::

    [closing_steps, end_task, begin_task]  →  rate, plan  →  views, forwards  →  prepare, targets  →  losses
        →  backward, after_backward  →  after_step  →  attributes  →  store  →  observe

and `before_eval`, `rules` when somebody asks for predictions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Batch, LossTable, Planning, Progress, Selection, StreamBatch, Taps, total
from gracecl.errors import UserError
from gracecl.functional.augment import View
from gracecl.registry import methods, spec

if TYPE_CHECKING:
    from gracecl.engine.fit import Fit
    from gracecl.memory import Memories
    from gracecl.nets.tapped import TappedNet
    from gracecl.streams import Stream

Boundaries = Literal["unused", "used", "required"]
Trains = Literal["stream", "evaluation", "never"]
V = TypeVar("V")
STRENGTH: tuple[Boundaries, ...] = ("unused", "used", "required")


@dataclass(eq=False, repr=False)
class Method:
    """What a learner does at each point of a step. Fields are its hyperparameters."""

    boundaries: ClassVar[Boundaries] = "unused"
    """whether task marks are needed: a method that requires them is refused on a stream without"""
    wants_taps: ClassVar[bool] = False
    """whether `taps = auto` should give it all tapped layers instead of the last alone"""
    repeats: ClassVar[int] = 1
    """optimizer steps per stream batch; each plans anew, the batch is stored once"""
    trains: ClassVar[Trains] = "stream"
    """when it makes training steps: on the stream; before an evaluation alone, in a fit on a net of its own; or never, where
    nothing is trained by gradients and a wrapper has nothing to act on"""
    needs_attention: ClassVar[bool] = False
    """whether it works on transformers alone"""
    clock: ClassVar[str | None] = None
    """the option that says every how many steps it does without task marks what it does at them"""

    def __post_init__(self) -> None:
        spec.check_fields(self, self.name)

    @property
    def name(self) -> str:
        return methods.name_of(type(self))

    def __repr__(self) -> str:
        return spec.show(self, self.name)

    def __add__(self, other: Addition) -> Method:
        return Sum(self, other)

    def as_learner(self) -> Method:
        """A learner: itself, unless it is only an addition to one."""
        return self

    # Once, before the optimizer is built.

    def stream(self, stream: Stream) -> Stream:
        """The stream it learns from, before the first step: the one given, unless the method is a bound that sees everything."""
        return stream

    def attach(self, net: TappedNet, memories: Memories) -> None:
        """Remembers the net; may add modules to it (`net.extra`) and reserve second stores out of the memory."""
        self.net = net

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
        """Its own optimizer, or None for the run's."""
        return None

    def rate(self, progress: Progress) -> float:
        """The part of the optimizer's learning rate that steps at this point of the stream use."""
        return 1.0

    # At task marks, on streams that have them.

    def begin_task(self, progress: Progress) -> None:
        """Before the first step of a task."""

    def closing_steps(self, memories: Memories, progress: Progress, rng: np.random.Generator) -> Iterable[dict[str, Selection]]:
        """Plans of further optimizer steps, on memory alone, when a task ends and before `end_task`."""
        return ()

    def end_task(self, memories: Memories, progress: Progress) -> None:
        """After the last step of a task and before its evaluation."""

    # One step.

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> dict[str, Selection]:
        """Which images make up the step, by block. An empty plan means no update; the batch is stored all the same."""
        return {"all": Selection(np.arange(len(new)))}

    def views(self, block: str, augment: View) -> Sequence[View]:
        """The views of each image of a block; `augment` is the run's augmentation."""
        return (augment,)

    def forwards(self, blocks: list[str]) -> list[list[str]]:
        """Which blocks share a forward pass, hence a BatchNorm batch. All of them, unless the paper says otherwise."""
        return [blocks]

    def prepare(self, batch: Batch) -> None:
        """May change the step's images before anything looks at them (mixed, attacked), or which rows are supervised."""

    def targets(self, batch: Batch) -> dict[str, Tensor]:
        """What teachers say, computed once without gradient and kept in `batch.targets`."""
        return {}

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        """The terms of the objective, `{role/part: [L]}`. Pure: calling it twice gives the same table."""
        raise NotImplementedError(f"{type(self).__name__} must say what its losses are")

    def backward(self, table: LossTable, scale: Tensor | None = None) -> None:
        """Fills `.grad`. `scale` is the loss scaling of half precision, None where there is none."""
        total(table).backward(scale)  # type: ignore[no-untyped-call]

    def after_backward(self, batch: Batch) -> None:
        """Sees (and may change) the gradients of the data terms; those of `penalty/…` rows are added after it."""

    def after_step(self, out: Taps, batch: Batch) -> None:
        """Once per optimizer step."""

    def attributes(self, out: Taps, batch: Batch) -> dict[str, Tensor]:
        """What to store beside each image of the incoming batch, in its order."""
        return {}

    def store(self, memories: Memories, new: StreamBatch, rng: np.random.Generator, attributes: dict[str, Tensor]) -> None:
        """Once per stream batch, after the update. The default is the exact reservoir."""
        memories.replay.add(rng, new.x, new.labels, new.progress.task, **attributes)

    def observe(self, memories: Memories, new: StreamBatch, rng: np.random.Generator) -> None:
        """Every batch of the stream once, after it was stored: for whoever keeps statistics, also beside another learner."""

    # Inference.

    @property
    def rule(self) -> str:
        """The headline among the rules: a family, then `_last`, `_mean` or the number of a tap."""
        return "linear_last"

    @property
    def eval_net(self) -> TappedNet:
        return self.net

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> Fit | None:
        """Whatever inference needs that training does not; at most once per step, and it leaves training untouched.

        What takes many steps is returned as a fit: predictions are then those of the fit's net, once it is done.
        """
        return None

    def rules(self, out: Taps) -> dict[str, Tensor]:
        """`{family: scores [L, B, C]}`; higher is better. Unseen classes are ruled out by the caller."""
        return {"linear": out.logits}

    # What a checkpoint must hold beyond the net, the optimizer and the memories.

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""

    def task_values(self) -> dict[str, list[float]]:
        """Per-layer values fixed for a task, recorded at its end."""
        return {}


@dataclass(eq=False, repr=False)
class Wrapper(Method):
    """A method that holds a method and passes every hook on; a subclass overrides the hooks it changes."""

    inner: Method
    """the method inside; text is read as an expression"""

    def __post_init__(self) -> None:
        if isinstance(self.inner, str):
            self.inner = spec.parse_method(self.inner)
        if not isinstance(self.inner, Method):
            raise UserError(f"{self.name} wraps a method, such as {self.name}(er()), not {self.inner!r}")
        self.inner = self.inner.as_learner()
        if self.inner.trains == "never":
            raise UserError(f"{self.name} acts on training steps, of which {self.inner!r} makes none; use {self.inner!r} alone")
        super().__post_init__()

    @property
    def boundaries(self) -> Boundaries:  # type: ignore[override]
        return max(type(self).own_boundaries, self.inner.boundaries, key=STRENGTH.index)

    own_boundaries: ClassVar[Boundaries] = "unused"

    @property
    def wants_taps(self) -> bool:  # type: ignore[override]
        return self.inner.wants_taps

    @property
    def needs_attention(self) -> bool:  # type: ignore[override]
        return self.inner.needs_attention

    @property
    def repeats(self) -> int:  # type: ignore[override]
        return self.inner.repeats

    @property
    def trains(self) -> Trains:  # type: ignore[override]
        return self.inner.trains

    @property
    def rule(self) -> str:
        return self.inner.rule

    @property
    def eval_net(self) -> TappedNet:
        return self.inner.eval_net

    def stream(self, stream: Stream) -> Stream:
        return self.inner.stream(stream)

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.inner.attach(net, memories)

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
        return self.inner.optimizer(params)

    def rate(self, progress: Progress) -> float:
        return self.inner.rate(progress)

    def begin_task(self, progress: Progress) -> None:
        self.inner.begin_task(progress)

    def closing_steps(self, memories: Memories, progress: Progress, rng: np.random.Generator) -> Iterable[dict[str, Selection]]:
        return self.inner.closing_steps(memories, progress, rng)

    def end_task(self, memories: Memories, progress: Progress) -> None:
        self.inner.end_task(memories, progress)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> dict[str, Selection]:
        return self.inner.plan(new, memories, planning)

    def views(self, block: str, augment: View) -> Sequence[View]:
        return self.inner.views(block, augment)

    def forwards(self, blocks: list[str]) -> list[list[str]]:
        return self.inner.forwards(blocks)

    def prepare(self, batch: Batch) -> None:
        self.inner.prepare(batch)

    def targets(self, batch: Batch) -> dict[str, Tensor]:
        return self.inner.targets(batch)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        return self.inner.losses(out, batch)

    def backward(self, table: LossTable, scale: Tensor | None = None) -> None:
        self.inner.backward(table, scale)

    def after_backward(self, batch: Batch) -> None:
        self.inner.after_backward(batch)

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.inner.after_step(out, batch)

    def attributes(self, out: Taps, batch: Batch) -> dict[str, Tensor]:
        return self.inner.attributes(out, batch)

    def store(self, memories: Memories, new: StreamBatch, rng: np.random.Generator, attributes: dict[str, Tensor]) -> None:
        self.inner.store(memories, new, rng, attributes)

    def observe(self, memories: Memories, new: StreamBatch, rng: np.random.Generator) -> None:
        self.inner.observe(memories, new, rng)

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> Fit | None:
        return self.inner.before_eval(net, memories, progress)

    def rules(self, out: Taps) -> dict[str, Tensor]:
        return self.inner.rules(out)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])

    def task_values(self) -> dict[str, list[float]]:
        return self.inner.task_values()


@dataclass(eq=False, repr=False)
class Addition(Method):
    """A method that adds losses to a learner's and has none of its own: `ewc()` alone means `sgd() + ewc()`."""

    def as_learner(self) -> Method:
        learner: Method = spec.parse_method("sgd()")
        return learner + self


@dataclass(eq=False, repr=False)
class Sum(Wrapper):
    """`learner + addition`: the left one is the learner; the right one adds its losses and observes."""

    right: Addition = None  # type: ignore[assignment]
    """what adds its losses"""

    def __post_init__(self) -> None:
        if not isinstance(self.right, Addition):
            raise UserError(
                f"{self.right!r} cannot be added to {self.inner!r}: on the right of + stand additions such as ewc() or cpr(), "
                "on the left the learner they are added to"
            )
        for hook in vars(Wrapper).keys() & vars(Method).keys() - vars(Sum).keys():  # what is not passed on to the right
            if getattr(type(self.right), hook) is not getattr(Addition, hook):
                raise UserError(f"{self.right!r} is an addition and defines {hook}, which the learner on the left of + decides")
        super().__post_init__()
        if any(part.name == self.right.name for part in parts(self.inner)):  # now, as some rows begin with the second task
            raise UserError(f"{self!r}: {self.right.name} is added twice, with rows of the same names; leave one of them out")

    @property
    def name(self) -> str:
        return "sum"

    def __repr__(self) -> str:
        return f"{self.inner!r} + {self.right!r}"

    @property
    def boundaries(self) -> Boundaries:  # type: ignore[override]
        return max(self.inner.boundaries, self.right.boundaries, key=STRENGTH.index)

    @property
    def wants_taps(self) -> bool:  # type: ignore[override]
        return self.inner.wants_taps or self.right.wants_taps

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.right.attach(net, memories)

    def begin_task(self, progress: Progress) -> None:
        super().begin_task(progress)
        self.right.begin_task(progress)

    def end_task(self, memories: Memories, progress: Progress) -> None:
        super().end_task(memories, progress)
        self.right.end_task(memories, progress)

    def targets(self, batch: Batch) -> dict[str, Tensor]:
        return joined(self, "target", super().targets(batch), self.right.targets(batch))

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        return joined(self, "loss row", super().losses(out, batch), self.right.losses(out, batch))

    def after_backward(self, batch: Batch) -> None:
        super().after_backward(batch)
        self.right.after_backward(batch)

    def after_step(self, out: Taps, batch: Batch) -> None:
        super().after_step(out, batch)
        self.right.after_step(out, batch)

    def observe(self, memories: Memories, new: StreamBatch, rng: np.random.Generator) -> None:
        super().observe(memories, new, rng)
        self.right.observe(memories, new, rng)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"right": self.right.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.right.load_state_dict(state["right"])

    def task_values(self) -> dict[str, list[float]]:
        return joined(self, "task value", super().task_values(), self.right.task_values())


def joined(method: Method, kind: str, inner: dict[str, V], own: dict[str, V]) -> dict[str, V]:
    """Merge what two parts of a method return; refuse a key of both, where one value would silently replace the other."""
    if both := inner.keys() & own.keys():
        raise UserError(f"{method!r}: two of its parts define the {kind} '{min(both)}'; leave one of them out")
    return inner | own


class SeparateForwards:
    """Stands before `Method`: each block has a forward pass of its own, unless the option `joint_forward` joins them."""

    joint_forward: bool = False

    def forwards(self, blocks: list[str]) -> list[list[str]]:
        return [blocks] if self.joint_forward else [[block] for block in blocks]


def parts(method: Method) -> list[Method]:
    """The method and every method inside it."""
    inside = [getattr(method, field.name) for field in dataclasses.fields(method)]
    return [method, *(part for value in inside if isinstance(value, Method) for part in parts(value))]
