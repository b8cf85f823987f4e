"""A learner for your own program: `learn(x, y)`, `predict(x)`, or `fit` of a whole stream. Nothing of the laboratory is needed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gracecl import checkpoint, processes, streams
from gracecl.core import NO_SOURCES, Ints, StreamBatch
from gracecl.data import Data
from gracecl.data.arrays import MANY_TIMES
from gracecl.data.labels import UNKNOWN, ClassLabels, as_labels, whole_numbers
from gracecl.engine.boundaries import check_marks, placed
from gracecl.engine.engine import NOTHING_LEARNED, Engine
from gracecl.engine.finite import check_losses
from gracecl.engine.live import Live
from gracecl.engine.loop import Callbacks, Loop, PredictionLog
from gracecl.engine.read_ahead import read_ahead
from gracecl.engine.recipe import Recipe, name_flat_images, name_unfit_augmentation
from gracecl.engine.serving import Serving, Snapshot
from gracecl.errors import Misfit, UserError
from gracecl.files import check_format
from gracecl.forking import Turns, calls
from gracecl.functional.prequential import Prequential
from gracecl.images.augment import normalisation
from gracecl.inputs import Batched, Inputs, inputs_of, restored
from gracecl.inputs import Images as ImageInputs
from gracecl.methods.base import Method
from gracecl.nets import pixels
from gracecl.nets.sharing import alone
from gracecl.nets.tapped import TappedNet
from gracecl.registry import UnknownName, options
from gracecl.registry.options import LearnerOptions
from gracecl.streams import Stream
from gracecl.streams.batches import batches_of

F = TypeVar("F", bound=Callable[..., Any])
FORMAT = 1
"""of saved learners; files without a note are of format 1"""
MOST_TASKS = 1_000_000
ENOUGH_STEPS = 100
"""after which the classes met are compared with those declared"""
Images = Tensor | npt.NDArray[Any] | Mapping[str, Any] | tuple[Any, ...]
"""a batch of images or of other inputs, the examples first"""
Labels = Tensor | npt.NDArray[Any] | Sequence[Hashable]


@dataclass(frozen=True, eq=False)
class Accuracy:
    """Accuracy in percent."""

    overall: float
    """of all images"""
    per_task: npt.NDArray[np.float64]
    """of each task's, NaN for a task that has none"""
    rule: str
    """what classified them"""

    @property
    def average(self) -> float:
        """The mean over the tasks, which a run calls `acc`."""
        return float(np.nanmean(self.per_task))


def one_at_a_time(function: F) -> F:
    """Serialise calls of a learner, in the order in which they came; forks wait for them too."""

    @functools.wraps(function)
    def alone(self: Learner, *args: Any, **named: Any) -> Any:
        with calls.one(), self._turns:
            return function(self, *args, **named)

    return alone  # type: ignore[return-value]


class Learner:
    """Keeps learning from batches of labelled images. Several threads may use it; each call waits for the one before, except
    `predict` and `predict_proba`: while another thread learns, they answer from the last step that is finished.

    `os.fork` waits for the call in progress, too, so that a child has the learner as it was between two calls.

    >>> learner = Learner("er", net="resnet18(width=8)")
    >>> learner.learn(x, ["rose", "tulip"])      # as often as batches come; x is uint8 [b, 3, 32, 32]
    >>> learner.predict(x)                       # labels

    >>> learner = Learner("er", net="mlp").fit("split-digits(tasks=5)")      # or a whole stream
    >>> learner.evaluate("split-digits(tasks=5)").per_task
    """

    @options.takes(LearnerOptions)
    def __init__(
        self,
        method: str | Method = "grace",
        *,
        classes: int | Sequence[Hashable] | None = None,
        shape: tuple[int, ...] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        inputs: Inputs | None = None,
        **more: Any,
    ) -> None:
        """`classes` declares the labels 0 to classes - 1, or those of a list, so that each takes part in the losses from the start.

        Without it, labels may be of any hashable kind, and the heads grow when one is new. `shape` is that of one example:
        (channels, height, width) of images, or that of a vector or sequence of floats; `inputs` says more, as
        `Images(shape, dtype=...)` does.
        Without either, inputs are what the first batch shows, and the net is built then. `mean` and `std` are those of the pixels
        scaled to [0, 1], per channel; by default those that a pretrained net was trained with, else 1/2 and 1/4.
        """
        self.labels = ClassLabels(classes)
        given = options.by_name(Recipe, more, ("classes", "shape", "mean", "std", "inputs"), "a learner")
        texts, live = Live.take({"method": method, **given})
        self.recipe = Recipe(**texts)
        self.method = self.recipe.check(live)
        self._live: Live | None = replace(live, method=self.method)
        self.inputs: Inputs | None = None
        self._statistics = mean, std
        self._own_augment = "augment" not in more
        self._engine: Engine | None = None
        self._named_unmet = False
        self._task: str | int | None = None
        self._turns = Turns()
        self._serving = Serving(self._turns)
        if inputs is not None or shape is not None:
            self._build(self._declared(inputs, shape))

    def _declared(self, inputs: Inputs | None, shape: Sequence[int] | None) -> Inputs:
        """Return the inputs that the user declares."""
        if inputs is not None:
            if not isinstance(inputs, Inputs) or not inputs.known:
                raise UserError(f"inputs says what one example looks like, such as Inputs((64,)), not {inputs!r}")
            if shape is not None or self._statistics != (None, None):
                raise UserError("inputs= says shape, mean and std too; leave those out")
            return inputs
        if isinstance(shape, Sequence) and len(shape) in (1, 2) and self._statistics == (None, None):
            return Inputs(shape)
        return self._own_statistics(ImageInputs(shape))  # type: ignore[arg-type]

    def _build(self, inputs: Inputs) -> None:
        """Make the engine, for such inputs."""
        self._engine = self.recipe.build(inputs, len(self.labels), self._live)
        self._live = None
        self.inputs, self.method = inputs, self._engine.method
        if self._own_augment:
            name_unfit_augmentation(self.recipe.augment, self.method, inputs)

    @property
    def engine(self) -> Engine:
        """Return what learns, at some step, with its net, memories and optimizer."""
        if self._engine is None:
            raise UserError(
                "this learner is built when its first batch shows what its inputs are; call learn(x, y), or give shape="
            )
        return self._engine

    @property
    def net(self) -> TappedNet:
        return self.engine.net

    @property
    def classes(self) -> int:
        """How many classes were declared, or came so far."""
        return len(self.labels)

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """Return the labels in the order of the columns of `predict_proba`, as declared or as they came."""
        return self.labels.array

    def __getstate__(self) -> dict[str, Any]:
        """Without the lock and the snapshots that depend on it, which cannot be copied."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_turns", "_serving")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        turns = Turns()
        self.__dict__ = state | {"_turns": turns, "_serving": Serving(turns)}

    @one_at_a_time
    def learn(self, x: Images, y: Labels, task: Hashable = None) -> dict[str, list[float]]:
        """Learn from one batch and its labels: uint8 images `[b, channels, height, width]`, vectors, a dict of tensors.

        `task` names the task; another name than the last one's ends that task. Without names, a batch that brings a label not met
        before starts a task, if the method works with tasks; as labels may stop being new while the stream goes on, what a method
        does at task marks it then does every so many steps too (`every`, `refresh_every`). Returns the loss of each term and tapped
        layer (nothing where the method only stored).
        """
        batch = self._batch(x, y, task)  # which may build the engine
        outcome = self.engine.learn(placed(self.engine, batch))
        losses = {} if outcome is None else {row: value.tolist() for row, value in outcome.table.items()}
        check_losses(losses, self.engine.progress.step - 1)
        self._publish()
        return losses

    def _publish(self) -> None:
        """Let other threads predict from the step that is finished, if any wait for this one."""
        with self._by_itself():
            self._serving.publish(self.engine, self.labels)

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Make the passes of the block in this process, whatever others of its group do; they need not ask for the same."""
        ready_at = -1 if self._engine is None else self._engine.ready_at
        with alone():
            yield
        if self._engine is not None and self._engine.net.sharing != "off":
            self._engine.ready_at = ready_at  # so that all prepare the next predictions that they make together

    @one_at_a_time
    def fit(
        self,
        stream: Stream | Data | str | Iterable[Any],
        data: str | Path | None = None,
        *,
        start: int = 0,
        callbacks: Iterable[Any] = (),
        eval_every: int = 0,
    ) -> Learner:
        """Learn a whole stream, ending tasks where it says so; return the learner.

        The stream is one of `gracecl.stream(...)`, its expression, which takes the learner's seed, or a data set; `data` is the
        folder of the data sets. What was learned before stays, and the stream's first task is a new one. Its labels are its class
        numbers; they are its class names, if the learner was given all of these as labels. `start` continues a stream at one of its
        batches, of which the learner had those before: after a stop the result is the same to the bit.

        Or it is anything that yields batches `(x, y)`, `(x, y, task)` or dicts: a `DataLoader`, a generator. Each batch is learned
        as by `learn`; the last task stays open until `end_task` or another task. Where such an iterable stopped is for its owner
        to know: it has no batches by number, hence no `start`.

        `callbacks` are called between steps and may stop (see `gracecl.Callback`); the learner then stays at that step. If one of
        them has `on_evaluation`, the test images of a stream are evaluated at its marks, and every `eval_every` steps.
        """
        self._loop(stream, data, start, Callbacks(callbacks), eval_every).run(after_step=self._publish)
        return self

    @one_at_a_time
    def prequential(
        self, stream: Stream | Data | str | Iterable[Any], data: str | Path | None = None, *, callbacks: Iterable[Any] = ()
    ) -> Prequential:
        """Learn a stream as `fit` does, and predict each batch before it is learned; return what was right (test-then-train).

        A batch is predicted as a whole; batches of one example are predicted and learned one by one. Before anything was learned
        nothing is predicted, which counts as wrong, as an example of a class never met does. Labels are class numbers in the
        result; `classes_[result.labels]` are the labels themselves.

        >>> result = Learner("er", net="mlp").prequential("split-digits(tasks=5)")
        >>> result.accuracy, result.sliding(1000), result.measures["kappa_temporal"]
        """
        log = PredictionLog()
        self._loop(stream, data, 0, Callbacks(callbacks), 0, log).run(after_step=self._publish)
        return Prequential.of(log.lines)

    def _loop(
        self,
        stream: Stream | Data | str | Iterable[Any],
        data: str | Path | None,
        start: int,
        callbacks: Callbacks,
        eval_every: int,
        log: PredictionLog | None = None,
    ) -> Loop:
        """Return the loop over a stream or through batches; with a log, each batch is predicted before it is learned."""
        if isinstance(stream, (Stream, Data, str)):
            return self._loop_over(self._own_numbers(self._stream(stream, data)), start, callbacks, eval_every, log)
        return self._loop_through(stream, start, callbacks, eval_every, log)

    def _loop_over(self, stream: Stream, start: int, callbacks: Callbacks, eval_every: int, log: PredictionLog | None) -> Loop:
        """Return the loop over an indexed stream, from one of its steps on."""
        stream = self.engine.as_seen(stream.to(self.engine.device))
        check_marks(self.engine, stream)
        self._name_flat(stream.batch(0).x)
        if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= min(len(stream), self.engine.progress.step):
            raise UserError(
                f"start is the number of the stream's batches that were learned already, of {len(stream)} batches and "
                f"{self.engine.progress.step} steps, not {start!r}"
            )
        begun = int(stream.task_of_step[start - 1]) if start else -1
        first, self._task = self.engine.progress.task - begun, None
        read = read_ahead(stream)

        def batch(step: int) -> StreamBatch:
            found = read(step)
            task = first + found.task if stream.has_tasks else self.engine.progress.task
            return replace(found, task=task, sources=NO_SOURCES)

        return Loop(
            self.engine,
            batch,
            begin=self.engine.progress.step - start,
            steps=len(stream),
            test=stream if callbacks.of["on_evaluation"] else None,
            eval_every=eval_every,
            log=log,
            prequential=log is not None,
            callbacks=callbacks,
        )

    def _loop_through(
        self, source: Iterable[Any], start: int, callbacks: Callbacks, eval_every: int, log: PredictionLog | None
    ) -> Loop:
        """Return the loop through batches that come one after the other."""
        if start:
            raise UserError(
                f"a {type(source).__name__} has no batches by number, so it cannot be continued at {start}; "
                "leave out the batches that were learned (itertools.islice), or fit a gracecl.stream"
            )
        if eval_every or callbacks.of["on_evaluation"]:
            raise UserError("only a gracecl.stream brings test images; evaluate(x, y) in on_step, or leave on_evaluation out")
        batches: Iterator[tuple[int, Any]] = enumerate(batches_of(source), start=1)
        if self._engine is None:
            first = next(batches, None)
            if first is None:
                raise UserError(f"the {type(source).__name__} has no batch, from which this learner would be built")
            batches = chain([first], batches)
            try:
                self._build_for(self._checked(*first[1][:2])[0])
            except UserError as error:
                raise UserError(f"batch 1: {error}") from None

        def batch(step: int) -> StreamBatch | None:
            if (found := next(batches, None)) is None:
                return None
            number, parts = found
            try:
                return self._batch(*parts)
            except UserError as error:
                raise UserError(f"batch {number}: {error}") from None

        begin = self.engine.progress.step
        return Loop(self.engine, batch, begin=begin, log=log, prequential=log is not None, callbacks=callbacks)

    @one_at_a_time
    def end_task(self) -> None:
        """Tell the method that the task is over, as the start of another one does; useful before evaluating."""
        if self._engine is not None:
            self._engine.end_task()
            self._publish()

    def predict(self, x: Images, rule: str | None = None, default: Hashable = ...) -> npt.NDArray[Any]:
        """Return the label of each input, among those met so far: integers if all labels are such, else objects.

        Before anything was learned it is `default` for each, if one is given.
        """
        with self._by_itself(), self._predicting() as now:
            if now is None and default is not ...:
                return as_labels([default] * len(x))
            now = _learned(now)
            return now.labels.named(_best(self._scores(now, x, rule)))

    @property
    def nothing_learned(self) -> bool:
        return self._engine is None or not self._engine.progress.seen

    def predict_proba(self, x: Images, rule: str | None = None) -> npt.NDArray[np.float32]:
        """`[n, classes]`: the softmax of the rule's scores, 0 for classes not met; flat where the rule is a nearest-mean one.

        Column k is that of the label `classes_[k]`.
        """
        with self._by_itself(), self._predicting() as now:
            now, chances = _learned(now), []
            for scores, columns in self._scores(now, x, rule):
                full = torch.zeros(len(scores), len(now.labels))
                full[:, columns.cpu()] = scores.softmax(dim=1).float().cpu()
                chances.append(full.numpy())
            return np.concatenate(chances)

    @contextmanager
    def _predicting(self) -> Iterator[Snapshot | None]:
        """What predicts: the learner itself if no other thread uses it, else the last step that is finished; None before any."""
        with calls.one():
            while True:
                with self._serving.reading() as snapshot:
                    if snapshot is not None and not self._turns.mine:
                        yield snapshot
                        return
                if self._turns.take(unless=self._wants_snapshot):
                    try:
                        yield self._as_it_is()
                        return
                    finally:
                        self._turns.give()

    def _wants_snapshot(self) -> bool:
        """Ask for snapshots, unless one process cannot make them by itself; return whether there is one already."""
        return not (self._engine is not None and self._engine.memories.spread) and self._serving.wanted()

    def _as_it_is(self, exact: bool = False) -> Snapshot | None:
        """The learner itself, ready to predict."""
        return None if self.nothing_learned else Snapshot.of(self.engine, self.labels, exact)

    @one_at_a_time
    def evaluate(
        self,
        x: Images | Stream | Data | str,
        y: Labels | None = None,
        tasks: Labels | None = None,
        rule: str | None = None,
        data: str | Path | None = None,
    ) -> Accuracy:
        """Percent right of images with their labels and the tasks they belong to, or of a stream's test images.

        Of a stream, those of the tasks of which a class was met count. `rule` is the method's own unless another is named.
        """
        if isinstance(x, (Stream, Data, str)):
            if y is not None or tasks is not None:
                raise UserError("a stream brings its own labels and tasks; evaluate takes either a stream or images and labels")
            stream = self._stream(x, data)
            own = self.labels.numbers(self._labels_of(stream))  # of each of the stream's classes
            met = () if self._engine is None else np.flatnonzero(np.isin(own, self._engine.progress.seen)).tolist()
            images, labels, numbers = stream.test_images(tuple(met))
            labels = own[labels]
            if len(labels) == 0:
                raise UserError("none of the stream's classes was learned yet; call fit(stream) first")
        else:
            if y is None:
                raise UserError("the labels are missing; call evaluate(x, y), or evaluate(stream)")
            images, labels = self._read(x), self.labels.numbers(y)
            if len(labels) and len(self.labels) and (labels == UNKNOWN).all():
                met = ", ".join(map(repr, self.labels.array[:3].tolist()))
                raise UserError(f"none of these labels was ever learned; those that were are {met}{', …' * (self.classes > 3)}")
            named = np.zeros(len(labels), np.int64) if tasks is None else whole_numbers(tasks, "tasks")
            if not len(images) == len(labels) == len(named):
                raise UserError(f"{len(images)} images came with {len(labels)} labels and {len(named)} tasks; give one per image")
            wrong = named[(named < 0) | (named >= MOST_TASKS)]
            if len(wrong):
                raise UserError(f"tasks are numbers from 0 to {MOST_TASKS - 1:,}, and one of them is {wrong[0]}")
            numbers = named.astype(np.int64)
        with self._by_itself():
            right = 100.0 * (_best(self._scores(_learned(self._as_it_is(exact=True)), images, rule)) == labels)
        with np.errstate(invalid="ignore"):
            per_task = np.bincount(numbers, weights=right) / np.bincount(numbers)
        return Accuracy(float(right.mean()), per_task, rule or self.engine.chain.rule)

    @one_at_a_time
    def save(self, path: str | Path) -> None:
        """Save everything needed to go on exactly from here, in one file.

        Of a memory that is spread over processes (`store="sharded"`), all of them call it, and the first writes the file.
        """
        mean, std = self._statistics
        shown = {"mean": mean, "std": std} if self.inputs is None else {"inputs": self.inputs.saved()}
        data = {"classes": self.labels.declared} | shown
        recipe = {name: value for name, value in asdict(self.recipe).items() if name not in ("device", "compile", "cuda_graphs")}
        state = {"format": FORMAT, "learner": data | recipe, "task": self._task, "labels": self.labels.saved()}
        if self._engine is not None:
            state["engine"] = self._engine.state_dict()
            if self._engine.memories.spread and not processes.is_first():
                self._engine.memories.send_images()
                return
        checkpoint.save(Path(path), state)

    @one_at_a_time
    def export(self, path: str | Path, rule: str | None = None) -> str:
        """Write the net (.safetensors) or what predicts (.onnx, .pt2) for other programs; return a sentence about the file.

        `rule` is the method's own unless another is named. What was written is compared with the learner before it is kept.
        """
        from gracecl import exporting

        about: dict[str, Any] = {"method": self.recipe.method, "net": self.recipe.net}
        if self.labels.counted is None:
            about["labels"] = [label if isinstance(label, str | int) else repr(label) for label in self.labels.labels]
        with self._by_itself():
            return exporting.export(self.engine, Path(path), rule, about)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "auto",
        *,
        method: Method | None = None,
        net: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        augment: Any = None,
        accept_changes: bool = False,
    ) -> Learner:
        """Load the learner that `save` wrote, on whichever device.

        What was given to the learner as an object, and no expression names, is given here again. Its source must be what it was,
        unless `accept_changes` says that the change is meant. The weights of a net are those of the file.
        """
        state = checkpoint.load(Path(path), remedy="take an earlier copy of it")
        check_format(state.get("format", 1), FORMAT, Path(path), "take an earlier copy of it")
        if "learner" not in state:
            raise UserError(f"{path} is the checkpoint of a run, not of a learner; continue it with 'gracecl resume'")
        try:
            saved = state["learner"]
            if "inputs" in saved:
                saved = saved | {"inputs": restored(saved["inputs"])}
            given = {"method": method, "net": net, "optimizer": optimizer, "scheduler": scheduler, "augment": augment}
            objects = {name: value for name, value in given.items() if value is not None}
            texts, live = Live.take(objects)
            live.check("it", saved, f"load it with Learner.load({str(path)!r}, {{name}}=…)")
            if not accept_changes:
                _compare(saved, texts)
            learner = cls(**saved | objects, device=device)
            learner.labels.add(state.get("labels", ()))
            if "engine" in state:
                learner.engine.load_state_dict(state["engine"])
            learner._task = state["task"]
        except UnknownName as error:
            raise UserError(
                f"{path} holds a learner with an {error}; if it is your own, first import the module that registers it"
            ) from None
        except UserError as error:
            raise UserError(f"{path} does not hold a learner that can be made here: {error}") from None
        except Exception as error:  # noqa: BLE001 (whatever a changed byte may lead to)
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); load another copy of it") from None
        return learner

    def __repr__(self) -> str:
        if self._engine is None:
            return f"Learner({self.method!r}, nothing learned yet)"
        progress = self._engine.progress
        declared = "" if self.labels.open else f" of {self.classes}"
        return f"Learner({self.method!r}, {len(progress.seen)}{declared} classes met in {progress.step} steps)"

    def _scores(self, now: Snapshot, x: Images, rule: str | None) -> list[tuple[Tensor, Tensor]]:
        if rule is not None and not isinstance(rule, str):
            raise UserError(f"rule is a name such as 'linear_last', not {rule!r}")
        images = self._read(x)
        self._name_unmet_classes()
        return now.scores(images, rule)

    def _name_unmet_classes(self) -> None:
        """Say once that most of the declared classes never came: each takes part in the losses."""
        met, steps = len(self.engine.progress.seen), self.engine.progress.step
        if not self.labels.open and not self._named_unmet and steps >= ENOUGH_STEPS and self.classes > MANY_TIMES * met:
            self._named_unmet = True
            warnings.warn(
                f"{self.classes:,} classes are declared and {met:,} were met in {steps:,} steps; every declared class takes part "
                "in the losses and costs accuracy, so give classes= as many as will come, or leave it out",
                Misfit,
                stacklevel=4,
            )

    def _batch(self, x: Images, y: Labels, task: Hashable) -> StreamBatch:
        """A batch of the user's own, checked; it builds a learner that is not built, and its labels are known from now on."""
        images, labels = self._checked(x, y)
        self._build_for(images)
        self._name_flat(images)
        labels = self.labels.learned(labels)
        return StreamBatch(images, labels, task=self._number_of(task, labels), marked=task is not None)

    def _checked(self, x: Images, y: Labels) -> tuple[Batched, Any]:
        """Images and labels that can be learned; nothing is changed by asking."""
        images, labels = self._read(x), self.labels.checked(y)
        if len(images) != len(labels):
            raise UserError(f"{len(images)} images came with {len(labels)} labels; give one label per image")
        return images, labels

    def _build_for(self, images: Batched) -> None:
        """Build a learner that is not built yet."""
        if self._engine is None:
            self._build(self._taken(images))

    def _name_flat(self, images: Tensor) -> None:
        """Look at the first batch, unless the augmentation is the user's choice."""
        if self._own_augment and self.engine.progress.step == 0:
            name_flat_images(self.recipe.augment, self.method, images)

    def _number_of(self, task: Hashable, labels: Ints) -> int:
        """Return the running number of the batch's task."""
        progress = self.engine.progress
        name = task if isinstance(task, (str, int, type(None))) else repr(task)  # what a file can hold
        unnamed = name is None and self._task is None
        starts = not set(labels.tolist()) <= set(progress.seen) if unnamed else name != self._task
        self._task = name
        return progress.task + 1 if starts else progress.task

    def _stream(self, source: Stream | Data | str, root: str | Path | None) -> Stream:
        """A stream of images and classes that the learner was made for."""
        stream = streams.stream(source, seed=self.recipe.seed, data=root)
        if self.inputs is not None and not self.inputs.takes(stream.data.inputs):
            if isinstance(stream.data.inputs, ImageInputs) and isinstance(self.inputs, ImageInputs):
                raise UserError(
                    f"the stream's images have the shape {stream.data.shape} and this learner's {self.inputs.shape}; give it shape="
                )
            raise UserError(f"the stream's inputs are {stream.data.inputs} and this learner's {self.inputs}; give it inputs=")
        if stream.data.classes > self.classes and not self.labels.open:
            raise UserError(
                f"the stream has {stream.data.classes} classes and this learner {self.classes}; declare more with classes="
            )
        return stream

    def _labels_of(self, stream: Stream) -> Sequence[Hashable]:
        """The label of each of a stream's classes: as it was given to `from_arrays`; else its number, or its name if all of these
        are labels of the learner."""
        names, given = stream.data.class_names, stream.data.labels
        if given is not None and self.labels.counted is None:
            return given
        return names if self.labels.known(names) else range(len(names))

    def _own_numbers(self, stream: Stream) -> Stream:
        """A stream to learn from, with classes numbered as the learner does: new ones in the order in which they come."""
        if self._engine is None:
            self._build(self._own_statistics(stream.data.inputs))
        labels = self._labels_of(stream)
        by_arrival = dict.fromkeys([*stream.labels(stream.order).tolist(), *range(len(labels))])
        if self.labels.open:
            self.labels.add([labels[number] for number in by_arrival])
        own = self.labels.numbers(labels)
        if np.array_equal(own, np.arange(len(own))):
            return stream
        data, names = stream.data, tuple(map(str, self.labels.array))
        data = replace(data, train_y=own[data.train_y], test_y=own[data.test_y], class_names=names)
        return replace(stream, data=data, clean_y=None if stream.clean_y is None else own[stream.clean_y])

    def _read(self, x: Any) -> Batched:
        """A batch of inputs, checked against what the learner was built for, or against what it would be built for."""
        if self.inputs is not None:
            return self.inputs.read(x, self._what)
        if isinstance(x, Tensor | np.ndarray) and x.ndim == 4 and not isinstance(self._taken(x), ImageInputs):
            cast = "to(torch.uint8)" if isinstance(x, Tensor) else "astype('uint8')"
            raise UserError(
                f"images must be uint8 (0 to 255), not {x.dtype}; for floats in [0, 1] use (x * 255).round().{cast}, or give the "
                "learner inputs=Images(shape, dtype=...), or inputs=Inputs(shape) if they are no images"
            )
        return self._taken(x).read(x, self._what)

    @property
    def _what(self) -> str:
        """What errors call a batch of inputs."""
        return "images" if isinstance(self.inputs, ImageInputs) else "x"

    def _taken(self, x: Any) -> Inputs:
        """What a batch shows of the inputs to come."""
        return self._own_statistics(inputs_of(x))

    def _own_statistics(self, inputs: Inputs) -> Inputs:
        """The same inputs with the mean and std that the learner was given, or that its net was trained with; those that are no
        images have none.
        """
        if not isinstance(inputs, ImageInputs):
            return inputs
        if self._statistics == (None, None) and (own := pixels.expected(self.recipe.net)) is not None:
            return normalisation(own, inputs)
        return ImageInputs(inputs.shape, *self._statistics, inputs.dtype)


export = Learner.export


def _learned(now: Snapshot | None) -> Snapshot:
    """Refuse to predict before anything was learned."""
    if now is None:
        raise UserError(NOTHING_LEARNED)
    return now


def _best(scores: Iterable[tuple[Tensor, Tensor]]) -> Ints:
    """The number of the class with the highest score, for each image."""
    return np.concatenate([columns[of_part.argmax(dim=1)].cpu().numpy() for of_part, columns in scores])


def _compare(saved: dict[str, Any], texts: dict[str, Any]) -> None:
    """Refuse objects other than those that a learner was saved with."""
    for name, text in texts.items():
        if text != saved.get(name):
            raise UserError(
                f"it was saved with the {name} {saved.get(name)}, and the one given is {text}; give that one, "
                "or say accept_changes=True if the change is meant"
            )
