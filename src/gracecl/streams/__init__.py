"""Streams: a data set and an order. Batch t is a slice of the order, so a stream has no state and any step can be asked for."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch

from gracecl import data as datasets
from gracecl.core import NO_TASK, Ints, StreamBatch
from gracecl.data import Data
from gracecl.data.loading import FOLDER
from gracecl.errors import UserError
from gracecl.files import as_path
from gracecl.registry import datasets as known
from gracecl.registry import nearest, normal, spec, streams
from gracecl.registry.spec import AtLeast

__all__ = ["Stream", "StreamBatch", "build", "stream"]

ALIASES = {"seq": "split"}
"""what other libraries call a family"""


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

    def __len__(self) -> int:
        return len(self.ends)

    def __repr__(self) -> str:
        tasks = f"{self.tasks} tasks" if self.has_tasks else "no task marks"
        size = f"{len(self)} steps, {len(self.order)} images"
        return f"Stream({self.data.name}: {tasks}, {self.data.classes} classes, {size}, seed {self.seed})"

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
        index = self.order[positions]
        images = self.data.train_x
        x = images.index_select(0, torch.from_numpy(index).to(images.device))
        task, fresh = int(self.task_of_step[step]), bool(self.fresh[step])
        return StreamBatch(x, self.data.train_y[index], positions, task, fresh, self.ends_task(step))

    def ends_task(self, step: int) -> bool:
        """Whether this is the last step of its task."""
        return self.has_tasks and bool(step + 1 == len(self) or self.task_of_step[step + 1] != self.task_of_step[step])

    def test_images(self, seen: Collection[int]) -> tuple[torch.Tensor, Ints, Ints]:
        """Test images, labels and tasks of the tasks of which a class is among those seen."""
        data, tasks = self.data, self.test_task
        met = np.unique(tasks[np.isin(data.test_y, list(seen))])
        if len(met) == self.tasks:
            return data.test_x, data.test_y, tasks
        index = np.flatnonzero(np.isin(tasks, met))
        return data.test_x[index], data.test_y[index], tasks[index]

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
        )

    def to(self, device: torch.device) -> Stream:
        """The same stream with its images on a device, so that a step moves indices and not pixels."""
        data = dataclasses.replace(self.data, train_x=self.data.train_x.to(device), test_x=self.data.test_x.to(device))
        return dataclasses.replace(self, data=data)

    @cached_property
    def hash(self) -> str:
        """Identifies what is learned in which order: the data's content, the order, the batches and the marks."""
        digest = hashlib.sha256(self.data.fingerprint.encode())
        for part in (self.order, self.ends, self.task_of_step, self.marks, self.test_task):
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return digest.hexdigest()


def check_evaluations(stream: Stream) -> None:
    """Refuses a stream whose runs would end without an accuracy, or leave some test images out of it."""
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
    """Ends of batches of `size` over `length` positions; the last one may be smaller."""
    return start + np.minimum(np.arange(size, length + size, size), length)


def stream(
    source: str | Data | Stream, *, seed: Annotated[int, AtLeast(0)] = 0, data: str | Path | None = None, **options: Any
) -> Stream:
    """The stream that an expression names, or a data set split into tasks; a stream is itself.

    >>> gracecl.stream("split-digits(tasks=5)", seed=1)
    >>> gracecl.stream(gracecl.from_arrays(train_x, train_y, test_x, test_y), tasks=5, batch=10)

    `data` is the folder of the data sets ($GRACECL_DATA, if left out). The options are those of the stream: `tasks`, `order`,
    `batch`, `epochs`, `per_class`, `marked` and others; an expression may hold them itself.
    """
    seed = int(seed) if isinstance(seed, np.integer) else seed
    spec.check_options(stream, "stream", {"seed": seed})
    if data is not None:
        as_path(data, "data")
    if isinstance(source, Data):
        split: Stream = spec.construct(streams, spec.Call("split", (), options), source, seed)
        return split
    if isinstance(source, str):
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


def from_anywhere(expression: str) -> str:
    """The same stream whatever the working folder is: the path of a folder of images is written out."""
    call = spec.parse_call(expression)
    path = call.kwargs.get("path")
    if not normal(call.name).endswith("_folder") or not isinstance(path, str):
        return expression
    options = call.kwargs | {"path": str(Path(path).expanduser().resolve())}
    arguments = [*map(repr, call.args), *(f"{name}={value!r}" for name, value in options.items())]
    return f"{expression[: expression.index('(')]}({', '.join(arguments)})"


def parts_of(name: str) -> tuple[str, str]:
    """`split` and `cifar100` of the name of a stream."""
    family, _, dataset = normal(name).partition("_")
    family = ALIASES.get(family, family)
    if family not in streams.names() or not dataset:
        close = nearest(family, streams.names()).replace("'?", f"-{dataset or 'cifar100'}'?")
        raise UserError(f"unknown stream '{name}'{close} ('gracecl list streams' prints all of them)")
    return family, dataset


def build(expression: str, seed: int, root: str | Path | None = None) -> Stream:
    """The stream an expression such as `split-cifar100(tasks=5, classes='0-19')` names.

    The first word is the family (`split`), the rest the data set; `classes` and `size` go to the data, all else to the family.
    `split-folder(path='DIR', size=32)` is a stream over any folder of images.
    """
    call, dataset, picked = _read(expression)
    data = datasets.load(dataset, root, **picked)
    stream: Stream = spec.construct(streams, call, data, seed)
    return stream


def check(expression: str) -> None:
    """Refuse an expression that names no stream or data set, or options that they do not have; no data is loaded."""
    call, dataset, picked = _read(expression)
    if not dataset.startswith(FOLDER):
        known.get(dataset)
    spec.check_options(datasets.load, dataset, picked)
    spec.arguments(streams.get(call.name), call, before=2)


def _read(expression: str) -> tuple[spec.Call, str, dict[str, Any]]:
    """The family of a stream with its options, its data set, and what is picked from that."""
    call = spec.parse_call(expression)
    family, dataset = parts_of(call.name)
    options = dict(call.kwargs)
    picked: dict[str, Any] = {name: options.pop(name) for name in ("classes", "size") if name in options}
    if dataset == "folder":
        if "path" not in options:
            raise UserError(f"{call.name} needs the folder of images: {family}-folder(path='DIR')")
        dataset = f"{FOLDER}{options.pop('path')}"
    return spec.Call(family, call.args, options), dataset, picked
