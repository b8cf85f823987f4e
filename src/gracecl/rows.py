"""`Rows`: examples that are read when they are asked for, where a batch of all of them does not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Numbers = npt.NDArray[np.int64]


class RowSource(Protocol):
    """Numbered examples of one shape and type, outside memory or packed."""

    shape: tuple[int, ...]
    """`[N, …]`"""
    dtype: torch.dtype

    def read(self, numbers: Numbers) -> Tensor:
        """The examples of these numbers, on the host, in memory of their own. It may be called from any thread."""


class Rows:
    """Some examples of a source, in the place of a tensor.

    Indexing gives other `Rows` and reads nothing. `index_select`, `loaded` and functions of torch read, the last two all of it.
    """

    def __init__(self, source: RowSource, chosen: Numbers | None = None, device: torch.device | str = "cpu") -> None:
        self.source, self.device = source, torch.device(device)
        self.chosen = np.arange(source.shape[0]) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __repr__(self) -> str:
        return f"Rows({list(self.shape)}, {self.dtype}, of a {type(self.source).__name__})"

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.chosen), *self.source.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def ndim(self) -> int:
        return len(self.source.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows: slice | Numbers | Tensor) -> Rows:
        index = rows.cpu().numpy() if isinstance(rows, Tensor) else rows
        return Rows(self.source, self.chosen[index], self.device)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.index_select(0, torch.tensor([row]))[0] for row in range(len(self)))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Rows:
        """The same examples, moved to a device whenever they are read."""
        return Rows(self.source, self.chosen, device)

    def index_select(self, axis: int, index: Tensor) -> Tensor:
        """Read the examples in these places."""
        assert axis == 0
        return self.source.read(self.chosen[index.cpu().numpy()]).to(self.device)

    def loaded(self) -> Tensor:
        """Read all of them."""
        return self.source.read(self.chosen).to(self.device)

    def numpy(self) -> npt.NDArray[Any]:
        """Read all of them into an array."""
        array: npt.NDArray[Any] = self.loaded().numpy()
        return array

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = tree_map(lambda part: part.loaded() if isinstance(part, Rows) else part, (args, kwargs or {}))
        return function(*read[0], **read[1])
