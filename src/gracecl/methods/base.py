"""A method is a part of a learner, written as hooks; a learner is a flat chain of parts.

`grace(er() + ewc())` is the chain er, ewc, grace (`Chain`): the learner that draws the images, what adds losses to it, what stands
around both. A hook either notifies (every part that defines it is called, in this order) or passes a value from part to part. Every
hook has a default except the learner's `losses`. The engine calls them in this order for each batch of the stream::

    [closing, end_task, begin_task]  →  plans  →  prepare  →  losses, adjust  →  after_backward  →  after_step  →  after_batch

and `eval_net`, `before_eval`, `rules` when somebody asks for predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Batch, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.methods.state import per_class, per_weight, restored, saved
from gracecl.nets.growth import Grows, Growth
from gracecl.registry import methods, spec

if TYPE_CHECKING:
    from gracecl.engine.fit import Fit
    from gracecl.memory import Memories
    from gracecl.nets.tapped import TappedNet
    from gracecl.streams import Stream

Boundaries = Literal["unused", "used", "required"]
Trains = Literal["stream", "evaluation", "never"]
STRENGTH: tuple[Boundaries, ...] = ("unused", "used", "required")
TaskValues = dict[str, list[float]]
V = TypeVar("V")


@dataclass(frozen=True)
class Traits:
    """What the engine must know of a part before it runs."""

    boundaries: Boundaries = "unused"
    """whether task marks are needed: a method that requires them is refused on a stream without"""
    interval: str | None = None
    """name of the interval option used when the stream has no task marks: `end_task` is then called every so many steps"""
    instead: str = ""
    """what a part that uses marks, and has no interval, does on a stream without any: "takes each batch's classes for the task's";
    "" is nothing: what it does at the end of tasks it then never does"""
    all_taps: bool = False
    """whether `taps = auto` should give it all tapped layers instead of the last alone"""
    trains: Trains = "stream"
    """when it makes training steps: on the stream; before an evaluation alone, in a fit on a net of its own; or never, where
    nothing is trained by gradients and a wrapper has nothing to act on"""
    attention: bool = False
    """whether it works on transformers alone"""
    images: str = ""
    """what it does with images and can do with nothing else, as its name says it: "shows images mirrored"; "" for any input"""
    makes_inputs: bool = False
    """whether it makes inputs of its own from those it is given, such as mixtures, so that it needs the inputs themselves and not
    what a frozen trunk made of them"""
    moves_weights: bool = False
    """whether its `after_step` changes weights, so that it comes before those that follow the weights"""
    met_only: bool | None = None
    """whether classes that were declared and never met leave all its losses and statistics alone, so that it learns the same with
    a head that grows as with one declared larger; plain cross-entropy spans every output. None is False for a learner and True
    for what is added to it or stands around it"""
    approximates: bool = False
    """whether `before_eval` may prepare predictions between evaluations (`progress.evaluating` is False) from a little less than
    all that was learned, since solving after each batch would cost too much; it then keeps what it prepared in its state"""
    order: Callable[[Stream], Stream] | None = None
    """the order in which a bound sees the stream's images; None is the stream's own"""


@dataclass(eq=False, repr=False)
class Method:
    """A part of a learner: hooks for each point of a step. Fields are its hyperparameters."""

    traits: ClassVar[Traits] = Traits()
    """a property where options decide"""
    state: ClassVar[tuple[str, ...]] = ()
    """attributes that a checkpoint must hold beyond the net, the optimizer and the memories, in addition to those of the parents;
    `per_class` and `per_weight` declare those that get longer when a class arrives"""
    kept: ClassVar[tuple[per_class, ...]] = ()
    """what `batch.keep` stores with an axis over the classes: axis 0 is the one after the images"""

    in_use: ClassVar[bool] = False
    """whether it belongs to a learner, whose state it then holds"""

    def __post_init__(self) -> None:
        spec.check_fields(self, self.name)

    @cached_property
    def name(self) -> str:
        return methods.name_of(type(self))

    def __repr__(self) -> str:
        return spec.show(self, self.name)

    def __add__(self, other: Addition) -> Method:
        return Sum(self, other)

    def as_learner(self) -> Method:
        """Return a learner: the method itself, or `sgd()` with an addition."""
        return self

    @property
    def parts(self) -> tuple[Method, ...]:
        """The parts of the learner that the expression means, from the innermost to the outermost."""
        return (self,)

    @cached_property
    def chain(self) -> Chain:
        """Build the learner that the expression means."""
        return Chain(self)

    # Once, before the optimizer is built.

    def attach(self, net: TappedNet, memories: Memories) -> None:
        """Remember the net; may add modules to it (`net.add_extra`) and reserve second stores out of the memory."""
        self.net = net

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
        """Return the method's own optimizer, or None for the run's."""
        return None

    # At task marks, on streams that have them.

    def begin_task(self, progress: Progress) -> None:
        """Prepare for a task, before its first step."""

    def closing(self, progress: Progress, memories: Memories, planning: Planning) -> Iterator[Plan]:
        """Yield plans of further updates, on memory alone, when a task ends and before `end_task`."""
        return iter(())

    def end_task(self, memories: Memories, progress: Progress) -> TaskValues | None:
        """Finish a task, after its last step and before its evaluation; return per-layer values to record.

        On a stream without task marks it is called every so many steps, if `traits.interval` names the option that says how many.
        """
        return None

    # One step.

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        """Yield the updates for a batch of the stream, each planned when the one before it is done."""
        yield Plan({"all": Selection(np.arange(len(new)))})

    def prepare(self, batch: Batch) -> None:
        """Before each forward pass, without gradients: may change the images (mixed, attacked) or which rows are supervised, and
        puts what teachers say of them into `batch.targets`."""

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        """Return the terms that this part adds to the objective, `{role/part: [L]}`. Pure: calling it twice gives
        the same table.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what its losses are")

    def adjust(self, table: LossTable, out: Taps, batch: Batch) -> LossTable:
        """Return the table of the parts inside, reweighted or rewritten. Pure, as `losses`."""
        return table

    def after_backward(self, batch: Batch) -> None:
        """Look at the gradients of the data terms, or change them; those of `penalty/…` terms are added after it."""

    def after_step(self, out: Taps, batch: Batch) -> None:
        """Act once per optimizer step; `batch.keep(...)` stores values beside the new images."""

    def after_batch(self, memories: Memories, new: StreamBatch) -> StreamBatch | None:
        """Once per batch of the stream, after its updates, the outermost part first: what the memory keeps, statistics.

        A part that takes images for itself returns the others, which is all that the parts inside see. The learner's default is
        the exact reservoir.
        """
        memories.replay.add(new.rng("store"), new.x, new.labels, new.progress.task, **new.kept)
        return None

    # Inference.

    @property
    def rule(self) -> str:
        """Return the headline among the learner's rules, a family and then `_last`, `_mean` or the number of a tap."""
        return "linear_last"

    def eval_net(self, net: TappedNet) -> TappedNet:
        """Return the net that predicts, given that of the parts inside."""
        return net

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> Fit | None:
        """Prepare what the learner's rules need, with the net that predicts; training stays untouched.

        What takes many steps is returned as a fit: predictions are then those of the fit's net, once it is done.
        """
        return None

    def rules(self, out: Taps) -> dict[str, Tensor]:
        """Return the learner's `{family: scores [L, B, C]}`; higher is better. The caller rules out unseen classes."""
        return {"linear": out.logits}

    # Checkpoints and classes that arrive: both follow from `state`.

    @classmethod
    def stated(cls) -> list[str]:
        """The attributes that a checkpoint holds, those that parents declare first."""
        return list(dict.fromkeys(name for kind in reversed(cls.__mro__) for name in vars(kind).get("state", ())))

    def state_dict(self) -> dict[str, Any]:
        return {name: saved(getattr(self, name)) for name in self.stated()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.stated():
            setattr(self, name, restored(getattr(self, name), state[name], self.net.classifier.weight.device))

    def grow(self, growth: Growth) -> None:
        """Make room for new classes in all that `state` declares to have some; the net has room already."""
        for name in self.stated():
            value = getattr(self, name)
            if isinstance(name, per_class):
                setattr(self, name, growth.padded(value, name.axis))
            elif isinstance(name, per_weight):
                setattr(self, name, self.flat.grown(value, growth, name.as_weights))  # type: ignore[attr-defined]
            elif isinstance(value, Grows):
                setattr(self, name, value.grown(growth))


OF_A_LEARNER = ("closing", "plans", "optimizer", "adjust", "eval_net", "before_eval", "rules", "rule")
"""hooks that an addition cannot define"""


class Chain:
    """A learner: its parts from the innermost to the outermost, and what each hook does with them.

    Which parts define a hook is found once, so that a hook costs a step no more than the parts that have something to do.
    """

    def __init__(self, method: Method) -> None:
        self.method, self.parts = method, method.parts
        self.learner, self.traits = self.parts[0], combined([part.traits for part in self.parts])
        self._beginning, self._ending = self.defining("begin_task"), self.defining("end_task")
        self._preparing, self._following = self.defining("prepare"), self.defining("after_backward")
        self._stepping = sorted(self.defining("after_step"), key=lambda part: not part.traits.moves_weights)
        self._batching = [part for part in reversed(self.parts) if part is self.learner or defines(part, "after_batch")]
        adding = [part for part in self.parts if part is self.learner or defines(part, "losses")]
        # Gradients are summed in the order in which terms are made, so that order is part of a result: wrappers make theirs first.
        self._adding = sorted(adding, key=lambda part: -self.parts.index(part) if isinstance(part, Wrapper) else 1)
        self._tabled = [(part, part in adding, defines(part, "adjust")) for part in self.parts]
        self._tabled = [(part, adds, adjusts) for part, adds, adjusts in self._tabled if adds or adjusts]
        self._looking = self.defining("eval_net")
        self._planning, self._closing, self._ruling = (
            ([*self.defining(hook)] or [self.learner])[-1] for hook in ("plans", "closing", "rule")
        )
        self._ticking = [(part, getattr(part, part.traits.interval)) for part in self.parts if part.traits.interval is not None]

    def __repr__(self) -> str:
        return repr(self.method)

    @property
    def unmarked(self) -> str:
        """What the learner does on a stream without task marks, in a few words."""
        if self.traits.boundaries == "required":
            return "refused"
        return "; ".join(words for part in self.parts if (words := part_unmarked(part))) or "same"

    def defining(self, hook: str) -> list[Method]:
        """Return the parts that define a hook, from the innermost to the outermost."""
        return [part for part in self.parts if defines(part, hook)]

    def attach(self, net: TappedNet, memories: Memories) -> None:
        for part in self.parts:
            if part.traits.images and net.inputs.known and not isinstance(net.inputs, Images):
                raise UserError(f"{part.name} {part.traits.images}, and the inputs are {net.inputs}; use a method such as er()")
            part.attach(net, memories)
            part.in_use = True  # type: ignore[misc]

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
        return self.learner.optimizer(params)

    def begin_task(self, progress: Progress) -> None:
        for part in self._beginning:
            part.begin_task(progress)

    def end_task(self, memories: Memories, progress: Progress) -> TaskValues:
        values: TaskValues = {}
        for part in self._ending:
            values = self._joined("task value", values, part.end_task(memories, progress) or {})
        return values

    def tick(self, memories: Memories, progress: Progress) -> None:
        """End a task, where the stream has no marks, for the parts whose interval is over."""
        for part, every in self._ticking:
            if progress.tick(every):
                part.end_task(memories, progress)

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        return self._planning.plans(new, memories, planning)

    def closing(self, progress: Progress, memories: Memories, planning: Planning) -> Iterator[Plan]:
        return self._closing.closing(progress, memories, planning)

    def prepare(self, batch: Batch) -> None:
        if len(self._preparing) == 1:
            return self._preparing[0].prepare(batch)
        made: dict[str, Tensor] = {}
        for part in self._preparing:
            before = dict(batch.targets)
            part.prepare(batch)
            own = {name: value for name, value in batch.targets.items() if before.get(name) is not value}
            made = self._joined("target", made, own)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        made = {part: part.losses(out, batch) for part in self._adding}
        table: LossTable = {}
        for part, adds, adjusts in self._tabled:
            if adds:
                table = self._joined("loss row", table, made[part])
            if adjusts:
                table = part.adjust(table, out, batch)
        return table

    def _joined(self, kind: str, inner: dict[str, V], own: dict[str, V]) -> dict[str, V]:
        """Merge what two parts made; refuse a key of both, where one value would silently replace the other."""
        if both := inner.keys() & own.keys():
            raise UserError(f"{self!r}: two of its parts define the {kind} '{min(both)}'; leave one of them out")
        return inner | own

    def after_backward(self, batch: Batch) -> None:
        for part in self._following:
            part.after_backward(batch)

    def after_step(self, out: Taps, batch: Batch) -> None:
        for part in self._stepping:
            part.after_step(out, batch)

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        for part in self._batching:
            rest = part.after_batch(memories, new)
            new = new if rest is None else rest

    @property
    def rule(self) -> str:
        return self._ruling.rule

    def eval_net(self, net: TappedNet) -> TappedNet:
        for part in self._looking:
            net = part.eval_net(net)
        return net

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> Fit | None:
        return self.learner.before_eval(net, memories, progress)

    def rules(self, out: Taps) -> dict[str, Tensor]:
        return self.learner.rules(out)

    def grow(self, growth: Growth) -> None:
        for part in self.parts:
            part.grow(growth)

    @property
    def kept(self) -> list[per_class]:
        return [name for part in self.parts for name in part.kept]

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for part, own in zip(self.parts, state, strict=True):
            part.load_state_dict(own)


def defines(part: Method, hook: str) -> bool:
    """Return whether a part has a hook of its own, from its class or set on the part itself."""
    return hook in vars(part) or getattr(type(part), hook) is not getattr(Method, hook)


def part_unmarked(part: Method) -> str:
    """Return what a part does on a stream without task marks; nothing, if marks make no difference to it."""
    if part.traits.interval is not None:
        return f"every {getattr(part, part.traits.interval)} steps"
    return "" if part.traits.boundaries == "unused" else part.traits.instead or "never"


def combined(traits: list[Traits]) -> Traits:
    """Combine the traits of a learner's parts; the innermost decides when it trains and in which order it sees
    images.
    """
    return Traits(
        boundaries=max((of_part.boundaries for of_part in traits), key=STRENGTH.index),
        all_taps=any(of_part.all_taps for of_part in traits),
        trains=traits[0].trains,
        attention=any(of_part.attention for of_part in traits),
        met_only=bool(traits[0].met_only) and all(of_part.met_only is not False for of_part in traits),
        approximates=traits[0].approximates,
        order=traits[0].order,
    )


@dataclass(eq=False, repr=False)
class Wrapper(Method):
    """A part written around a learner, as in `grace(er())`; it comes after the parts of that learner in the chain."""

    inner: Method
    """the method inside; text is read as an expression"""

    def __post_init__(self) -> None:
        if isinstance(self.inner, str):
            self.inner = spec.parse_method(self.inner)
        if not isinstance(self.inner, Method):
            raise UserError(f"{self.name} wraps a method, such as {self.name}(er()), not {self.inner!r}")
        self.inner = self.inner.as_learner()
        if self.inside.traits.trains == "never":
            raise UserError(f"{self.name} acts on training steps, of which {self.inner!r} makes none; use {self.inner!r} alone")
        super().__post_init__()

    @property
    def inside(self) -> Chain:
        """The learner that it is around."""
        return self.inner.chain

    @property
    def parts(self) -> tuple[Method, ...]:
        return (*self.inner.parts, self)


@dataclass(eq=False, repr=False)
class Addition(Method):
    """A part that adds losses to a learner's and has none of its own: `ewc()` alone means `sgd() + ewc()`."""

    def as_learner(self) -> Method:
        learner: Method = spec.parse_method("sgd()")
        return learner + self


@dataclass(eq=False, repr=False)
class Sum(Method):
    """The expression `learner + addition`: the parts of the left one, then the right one."""

    inner: Method
    """the learner"""
    right: Addition
    """what adds its losses"""

    def __post_init__(self) -> None:
        if not isinstance(self.right, Addition):
            raise UserError(
                f"{self.right!r} cannot be added to {self.inner!r}: on the right of + stand additions such as ewc() or cpr(), "
                "on the left the learner they are added to"
            )
        for hook in OF_A_LEARNER:
            if defines(self.right, hook):
                raise UserError(f"{self.right!r} is an addition and defines {hook}, which the learner on the left of + decides")
        self.inner = self.inner.as_learner()
        if self.inner.chain.traits.trains == "never":
            raise UserError(f"sum acts on training steps, of which {self.inner!r} makes none; use {self.inner!r} alone")
        if any(part.name == self.right.name for part in self.inner.parts):  # now, as some rows begin with the second task
            raise UserError(f"{self!r}: {self.right.name} is added twice, with rows of the same names; leave one of them out")

    @property
    def name(self) -> str:
        return "sum"

    def __repr__(self) -> str:
        return f"{self.inner!r} + {self.right!r}"

    @property
    def parts(self) -> tuple[Method, ...]:
        return (*self.inner.parts, self.right)
