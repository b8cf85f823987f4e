"""Batches of examples that come one by one, from WebDataset's pipelines or Hugging Face's `IterableDataset`.

Not exactly resumable: such a source has no examples by number, and where it goes on after a stop is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gracecl.data.torch_datasets import Reader, one
from gracecl.errors import UserError
from gracecl.inputs import Batched, inputs_of


@dataclass(frozen=True, repr=False)
class Batches:
    """Batches `(x, y)` for `Learner.fit`, of the examples that `source` yields. Not exactly resumable.

    Such as `learner.fit(Batches(webdataset.WebDataset("train-{000..099}.tar").decode("pil"), size=10))`, or
    `learner.fit(Batches(datasets.load_dataset("cifar100", split="train", streaming=True), label="fine_label"))`.

    An example is a pair `(input, label)` or a dict, as `from_torch` takes them; `label` names the label's entry.
    """

    exactly_resumable: ClassVar[bool] = False
    source: Iterable[Any]
    size: int = 10
    label: str | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.source, "__iter__") or isinstance(self.source, str):
            raise UserError(f"batches are made of an iterable of examples, not of a {type(self.source).__name__}")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise UserError(f"size must be a whole number of at least 1, not {self.size!r}")

    def __repr__(self) -> str:
        return f"Batches(of {self.size} examples of a {type(self.source).__name__}, not exactly resumable)"

    def __iter__(self) -> Iterator[tuple[Batched, list[Any]]]:
        reader, inputs = Reader(self.source, "the source", self.label), None
        parts, labels = list[Batched](), list[Any]()
        for number, example in enumerate(self.source):
            what = f"example {number} of the source"
            x, y = reader.split(example, what)
            inputs = inputs or inputs_of(one(x), what)
            parts.append(inputs.read(one(x), what))
            labels.append(y)
            if len(labels) == self.size:
                yield torch.cat(parts), labels
                parts, labels = [], []
        if labels:
            yield torch.cat(parts), labels
