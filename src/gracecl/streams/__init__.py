"""Streams: a data set and an order. Batch t is a slice of the order, so a stream has no state and any step can be asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from gracecl import data as datasets
from gracecl import rng
from gracecl.core import NO_TASK, Ints, StreamBatch
from gracecl.data import Data
from gracecl.data.domains import domains_of
from gracecl.data.loading import DOMAINS, FEATURES, FOLDER, PLACES, SHARDS
from gracecl.data.locations import only_below_data
from gracecl.errors import UserError
from gracecl.files import as_path
from gracecl.inputs import Batched
from gracecl.registry import datasets as known_sets
from gracecl.registry import nearest, normal, spec, streams
from gracecl.registry.spec import AtLeast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Family", "Stream", "StreamBatch", "build", "stream"]

ALIASES = {"seq": "split"}
"""what other libraries call a family"""
PATHS = ("path", "times", "test_times", "order_file")
"""options that name a file or a folder"""

Rule = Literal["tasks met", "classes met", "tasks so far", "all"]
"""Which test images an evaluation looks at: those of tasks of which a class was met, of classes that were met, of the tasks
that the stream has come to, or all of them."""


@dataclass(frozen=True, eq=False, repr=False)
class Stream:
    """An order over the training images, cut into batches, with marks where tasks end and where to evaluate."""

    data: Data
    seed: int
    order: Ints
    """training image at each position"""
    ends: Ints
    """position after the last image of each batch"""
    task_of_step: Ints
    """NO_TASK everywhere on a stream without marks"""
    marks: Ints
    """steps after which to evaluate; the last step of each task where there are tasks"""
    test_task: Ints
    """the task that each test image belongs to"""
    fresh: npt.NDArray[np.bool_]
    """False for the batches of later epochs, whose images came before"""
    rule: Rule = "tasks met"
    """which test images an evaluation looks at"""
    masked: bool = False
    """also evaluate among the classes of each image's task alone (task-incremental)"""
    clean_y: Ints | None = None
    """the training labels before noise, for whoever evaluates; a learner never sees them"""
    family: str = ""
    """what made it, as its `repr` names it: `noisy(longtail)`"""
    arriving: Ints | None = None
    """training image at each position of the order of arrival; None where batches are learned as they arrive"""
    arrived: Ints | None = None
    """position in `arriving` after the last image that has arrived when the batch of each step is learned"""
    made_of: str | None = None
    """hash of the stream whose batches these are some of; None for a stream of its own"""

    def __len__(self) -> int:
        return len(self.ends)

    def __repr__(self) -> str:
        tasks = f"{self.tasks} tasks" if self.has_tasks else "no task marks"
        size = f"{len(self)} steps, {len(self.order)} images"
        family = f"{self.family} of " if self.family not in ("", "split") else ""
        return f"Stream({family}{self.data.name}: {tasks}, {self.data.classes} classes, {size}, seed {self.seed})"

    @property
    def has_tasks(self) -> bool:
        return bool(self.task_of_step[0] != NO_TASK)

    @property
    def tasks(self) -> int:
        return int(max(self.test_task.max(), self.task_of_step.max())) + 1

    def __iter__(self) -> Iterator[StreamBatch]:
        return map(self.batch, range(len(self)))

    def batch(self, step: int) -> StreamBatch:
        if not isinstance(step, int | np.integer) or not 0 <= step < len(self):
            raise UserError(f"the stream has the batches 0 to {len(self) - 1}, not {step!r}")
        positions = np.arange(self.ends[step - 1] if step else 0, self.ends[step])
        items = self.order[positions]
        task, fresh = int(self.task_of_step[step]), bool(self.fresh[step])
        return StreamBatch(self.inputs(items), self.labels(items), positions, task, fresh, self.ends_task(step))

    def arrivals(self, step: int) -> StreamBatch:
        """What arrives before the batch of a step is learned and after the one before was, which a learner predicts first.

        It is the batch itself, unless labels come late or the learner is too slow for the stream; then it may also be nothing.
        """
        if self.arriving is None or self.arrived is None:
            return self.batch(step)
        items = self.arriving[self.arrived[step - 1] if step else 0 : self.arrived[step]]
        return StreamBatch(self.inputs(items), self.labels(items))

    def inputs(self, items: Ints) -> Batched:
        """What the learner sees of entries of the order: the training images of these numbers."""
        images = self.data.train_x
        return images.index_select(0, torch.from_numpy(items).to(images.device))

    def labels(self, items: Ints) -> Ints:
        """The labels of entries of the order."""
        return self.data.train_y[items]

    def ends_task(self, step: int) -> bool:
        """Whether this is the last step of its task."""
        return self.has_tasks and bool(step + 1 == len(self) or self.task_of_step[step + 1] != self.task_of_step[step])

    def test_images(self, seen: Collection[int], step: int | None = None) -> tuple[Batched, Ints, Ints]:
        """Test images, labels and tasks that an evaluation looks at, by the stream's rule.

        `seen` are the classes met, `step` is the last step learned; left out, the stream has come to its end.
        """
        data, tasks = self.data, self.test_task
        if self.rule == "all":
            chosen = np.ones(len(tasks), bool)
        elif self.rule == "tasks so far":
            chosen = tasks <= np.searchsorted(self.marks, len(self) - 1 if step is None else step)
        elif self.rule == "classes met":
            chosen = np.isin(data.test_y, list(seen))
        else:
            met = np.unique(tasks[np.isin(data.test_y, list(seen))])
            chosen = np.isin(tasks, met)
        if chosen.all():
            return data.test_x, data.test_y, tasks
        index = np.flatnonzero(chosen)
        return data.test_x[index], data.test_y[index], tasks[index]

    @cached_property
    def classes_of_task(self) -> npt.NDArray[np.bool_]:
        """[tasks, classes] True where a test task has images of a class"""
        members = np.zeros((int(self.test_task.max()) + 1, self.data.classes), bool)
        members[self.test_task, self.data.test_y] = True
        return members

    def tested_on(self, images: int) -> Stream:
        """The same stream with so many of its test images: of each task and class equally many, and always the same ones.

        A larger number adds images to those of a smaller one.
        """
        groups, group = np.unique(np.stack([self.test_task, self.data.test_y]), axis=1, return_inverse=True)
        if images < groups.shape[1]:
            raise UserError(
                f"the stream has {groups.shape[1]} classes in the test images of its tasks, and {images} images cannot show each; "
                "give eval_images at least that many"
            )
        if images >= len(self.test_task):
            return self
        priority = rng.generator(0, "test images to evaluate").permutation(len(self.test_task))
        by_group = np.lexsort((priority, group.ravel()))
        first = np.concatenate([[0], np.cumsum(np.bincount(group.ravel()))[:-1]])
        place = np.empty(len(by_group), np.int64)
        place[by_group] = np.arange(len(by_group)) - np.repeat(first, np.bincount(group.ravel()))
        chosen = np.sort(np.lexsort((priority, place))[:images])
        data = self.data
        domains = domains_of(data, np.arange(len(data.train_y)), chosen)
        data = dataclasses.replace(data, test_x=data.test_x[chosen], test_y=data.test_y[chosen], **domains)
        return dataclasses.replace(self, data=data, test_task=self.test_task[chosen])

    def cut(self, steps: int) -> Stream:
        """The first steps alone, as if the stream ended there."""
        if not isinstance(steps, int | np.integer) or steps < 1:
            raise UserError(f"a stream cannot be cut after {steps!r} steps; keep at least 1")
        if steps >= len(self):
            return self
        marks = np.unique(np.append(self.marks[self.marks < steps], steps - 1))
        return dataclasses.replace(
            self,
            order=self.order[: self.ends[steps - 1]],
            ends=self.ends[:steps],
            task_of_step=self.task_of_step[:steps],
            marks=marks,
            fresh=self.fresh[:steps],
            arrived=None if self.arrived is None else self.arrived[:steps],
        )

    def to(self, device: torch.device) -> Stream:
        """The same stream with its images on a device, so that a step moves indices and not pixels."""
        data = dataclasses.replace(self.data, train_x=self.data.train_x.to(device), test_x=self.data.test_x.to(device))
        return dataclasses.replace(self, data=data)

    @cached_property
    def hash(self) -> str:
        """Return a digest of what is learned in which order, of the data's content, the order, the batches and the marks."""
        if self.made_of is not None:
            return self.made_of
        digest = hashlib.sha256(self.data.fingerprint.encode())
        for part in (self.order, self.ends, self.task_of_step, self.marks, self.test_task):
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        if more := self.beyond_the_order:
            digest.update(repr(more).encode())
        return digest.hexdigest()

    @property
    def beyond_the_order(self) -> dict[str, Any]:
        """What else says what is learned and evaluated, as far as it is not what a split stream has."""
        usual = {"rule": "tasks met", "masked": False}
        return {name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value}

    def plot(self, path: str | Path | None = None) -> Figure:
        """A picture of the stream: classes over time, evaluation marks, images per class. With `path`, it is written there too."""
        from gracecl.streams.picture import picture

        return picture(self, path)


def check_evaluations(stream: Stream) -> None:
    """Refuse a stream whose runs would end without an accuracy, or leave some test images out of it."""
    if len(stream.marks) == 0 or stream.marks[-1] != len(stream) - 1:
        raise UserError("the stream's last step is not marked for evaluation; let its marks end with the last step")
    if len(stream.test_task) != len(stream.data.test_y) or len(stream.test_task) == 0 or stream.test_task.min() < 0:
        raise UserError("the stream's test images do not belong to a task each; give one test_task, from 0, for each test image")
    last = int(stream.test_task.max())
    if last >= len(stream.marks):
        raise UserError(
            f"the stream has test images of task {last} and only {len(stream.marks)} evaluation marks, so that no mark ends this "
            f"task; give it {last + 1} marks, or test_task numbers below {len(stream.marks)}"
        )


def cut_into_batches(length: int, size: int, start: int = 0) -> Ints:
    """Return the ends of batches of `size` over `length` positions; the last one may be smaller."""
    return start + np.minimum(np.arange(size, length + size, size), length)


def stream(
    source: str | Data | Stream,
    *,
    seed: Annotated[int, AtLeast(0)] = 0,
    data: str | Path | None = None,
    family: str = "split",
    **options: Any,
) -> Stream:
    """The stream that an expression names, or a data set as a stream, split into tasks; a stream is itself.

    >>> gracecl.stream("split-digits(tasks=5)", seed=1)
    >>> gracecl.stream("noisy(longtail-digits(ratio=50), 0.2)")
    >>> gracecl.stream(gracecl.from_arrays(train_x, train_y, test_x, test_y), tasks=5, batch=10)
    >>> gracecl.stream(gracecl.from_arrays(train_x, train_y, test_x, test_y), family="noisy(i-blurry(tasks=5), 0.2)")

    `data` is the folder of the data sets ($GRACECL_DATA, if left out). `family` says what becomes of a data set (`gracecl list
    streams`). The options are those of the stream: `tasks`, `order`, `batch`, `marked` and others; an expression may hold them
    itself.
    """
    seed = int(seed) if isinstance(seed, np.integer) else seed
    spec.check_options(stream, "stream", {"seed": seed, "family": family})
    if data is not None:
        as_path(data, "data")
    if isinstance(source, Data):
        call = spec.parse_call(family)
        if twice := call.kwargs.keys() & options.keys():
            raise UserError(f"stream: '{min(twice)}' is given twice, in family and as an option; leave one of them out")
        made, _, picked = _read(spec.Call(call.name, call.args, call.kwargs | options), of_data=True)
        if picked:
            raise UserError(f"stream: {min(picked)} is an option of named data sets, and this one is given; pick from its arrays")
        return made(source, seed)
    if isinstance(source, str):
        if family != "split":
            raise UserError(f"stream: the expression '{source}' says its family itself; leave family out")
        for name, value in options.items():
            value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
            source = spec.with_option(source, name, value)
        return build(source, seed, data)
    if isinstance(source, Stream) and not options:
        return source
    what = "one that is made already" if isinstance(source, Stream) else f"a value of type {type(source).__name__}"
    raise UserError(
        f"a stream is made of an expression such as 'split-digits(tasks=5)' or of a data set, not of {what}; "
        "gracecl.from_arrays makes a data set of arrays"
    )


@dataclass(frozen=True)
class Family:
    """An order with its options, yet without data; a wrapper's is around another one."""

    call: spec.Call
    inside: Family | None = None

    def __call__(self, data: Data, seed: int) -> Stream:
        """The stream of a data set."""
        before = (data, seed) if self.inside is None else (self.inside, data, seed)
        made: Stream = spec.construct(streams, self.call, *before)
        return dataclasses.replace(made, family=str(self))

    def __str__(self) -> str:
        name = self.call.name.replace("_", "-")
        return name if self.inside is None else f"{name}({self.inside})"

    @property
    def options(self) -> dict[str, Any]:
        """What the expression gives for this family and for those inside, checked."""
        own = spec.arguments(streams.get(self.call.name), self.call, before=2 if self.inside is None else 3)
        return own if self.inside is None else self.inside.options | own


def is_wrapper(family: str) -> bool:
    """True for what is registered as a function of another family: its first parameter is `inner`."""
    return next(iter(inspect.signature(streams.get(family)).parameters), "") == "inner"


def from_anywhere(expression: str) -> str:
    """The same stream whatever the working folder is: paths from there are written out, those below the data's folder stay."""
    call = spec.parse_call(expression)
    return _with_whole_paths(call, expression[: expression.index("(")]) if _names_a_path(call) else expression


def _names_a_path(call: spec.Call) -> bool:
    return any(isinstance(call.kwargs.get(name), str) for name in PATHS) or any(
        _names_a_path(value) for value in call.args if isinstance(value, spec.Call)
    )


def _with_whole_paths(call: spec.Call, name: str) -> str:
    """The call as an expression, with every path in it absolute that starts in the working folder."""
    values = [
        _with_whole_paths(value, value.name.replace("_", "-")) if isinstance(value, spec.Call) else repr(value)
        for value in call.args
    ]
    given = {name: call.kwargs[name] for name in PATHS if isinstance(call.kwargs.get(name), str)}
    paths = {
        name: str(Path(path).expanduser().resolve())
        for name, path in given.items()
        if not (name == "path" and only_below_data(path))
    }
    options = [f"{option}={value!r}" for option, value in (call.kwargs | paths).items()]
    return f"{name}({', '.join([*values, *options])})"


def _inner(call: spec.Call) -> Any:
    """What stands first between the brackets, if anything does."""
    return call.args[0] if call.args else None


def parts_of(name: str) -> tuple[str, str]:
    """`split` and `cifar100` of the name of a stream; of a family alone, the data set is empty."""
    key = normal(name)
    for family in sorted({*streams.names(), *ALIASES}, key=len, reverse=True):
        if key == family or key.startswith(f"{family}_"):
            return ALIASES.get(family, family), key[len(family) + 1 :]
    dataset = next((known for known in known_sets.names() if key.endswith(f"_{known}")), key.partition("_")[2])
    family = key[: len(key) - len(dataset)].rstrip("_")
    close = nearest(family, streams.names()).replace("'?", f"-{dataset or 'cifar100'}'?").replace("_", "-")
    raise UserError(f"unknown stream '{name}'{close} ('gracecl list streams' prints all of them)")


def build(expression: str, seed: int, root: str | Path | None = None) -> Stream:
    """The stream an expression such as `split-cifar100(tasks=5, classes='0-19')` names.

    The first words are the family (`split`, `i-blurry`), the rest the data set; `classes` and `size` go to the data, all else to
    the family. `split-folder(path='DIR', size=32)` is a stream over any folder of images, `split-shards(path='DIR')` one over
    shards, `split-features(path='FILE')` over what `gracecl features` wrote. A wrapper stands around another stream,
    `noisy(split-digits(tasks=5), 0.2)`, or before a data set, where it is around its split stream: `noisy-digits(0.2, tasks=5)`.
    """
    family, dataset, picked = read(expression)
    return family(datasets.load(dataset, root, **picked), seed)


def read(expression: str) -> tuple[Family, str, dict[str, Any]]:
    """What an expression names: a family, a data set, and what is picked from that; no data is loaded."""
    return _read(spec.parse_call(expression))


def check(expression: str) -> None:
    """Refuse an expression that names no stream or data set, or options that they do not have; no data is loaded."""
    family, dataset, picked = read(expression)
    if not dataset.startswith(PLACES):
        known_sets.get(dataset)
    spec.check_options(datasets.load, dataset, picked)
    _ = family.options  # which checks them


def source_of(expression: str) -> tuple[str, Any]:
    """Return the data set that a stream is of, and the classes that it picks from it; None for all."""
    _, dataset, picked = _read(spec.parse_call(expression))
    return dataset, picked.get("classes")


def takes(expression: str, option: str) -> bool:
    """Return whether a stream or one that it is around has an option of this name."""
    family: Family | None = _read(spec.parse_call(expression))[0]
    while family is not None:
        if option in inspect.signature(streams.get(family.call.name)).parameters:
            return True
        family = family.inside
    return False


def _read(call: spec.Call, of_data: bool = False) -> tuple[Family, str, dict[str, Any]]:
    """A family, its data set, and what is picked from that; with `of_data` names stand without data sets.

    What a wrapper has no option for is meant for what it is around.
    """
    name, dataset = parts_of(call.name)
    if not is_wrapper(name):
        return _read_family(call, name, dataset, of_data)
    own = list(inspect.signature(streams.get(name)).parameters)[3:]
    mine = {option: value for option, value in call.kwargs.items() if option in own}
    rest = {option: value for option, value in call.kwargs.items() if option not in own}
    inner, args = _inner(call), call.args
    if isinstance(inner, spec.Call) and not dataset:
        if twice := inner.kwargs.keys() & rest.keys():
            raise UserError(f"{call.name}: '{min(twice)}' is given twice, inside and outside; leave one of them out")
        inner, args = spec.Call(inner.name, inner.args, inner.kwargs | rest), args[1:]
    elif dataset or of_data:
        inner = spec.Call(f"split_{dataset}" if dataset else "split", (), rest)
    else:
        shown = name.replace("_", "-")
        raise UserError(
            f"{shown} is around another stream: write {shown}(split-digits(), …), or {shown}-digits(…) where that is a split stream"
        )
    inside, dataset, picked = _read(inner, of_data)
    return Family(spec.Call(name, args, mine), inside), dataset, picked


def _read_family(call: spec.Call, name: str, dataset: str, of_data: bool) -> tuple[Family, str, dict[str, Any]]:
    if of_data and dataset:
        raise UserError(f"'{call.name}' names the data set {dataset}, and another one is given; write {name.replace('_', '-')}")
    if not dataset and not of_data:
        raise UserError(f"unknown stream '{call.name}': the data set is missing, as in {name.replace('_', '-')}-cifar100")
    options = dict(call.kwargs)
    picked: dict[str, Any] = {option: options.pop(option) for option in ("classes", "size") if option in options}
    if dataset in ("folder", "shards", "features"):
        if "path" not in options:
            what = {"folder": "the folder of images", "shards": "the folder that 'gracecl data pack' made"}
            needed = what.get(dataset, "the file that 'gracecl features' made")
            shown = "FILE" if dataset == "features" else "DIR"
            raise UserError(f"{call.name} needs {needed}: {name.replace('_', '-')}-{dataset}(path='{shown}')")
        place = {"shards": SHARDS, "features": FEATURES}.get(dataset, DOMAINS if name == "domain" else FOLDER)
        dataset = f"{place}{options.pop('path')}"
    return Family(spec.Call(name, call.args, options)), dataset, picked
