"""What one example looks like, and how a batch of examples becomes what the net sees.

An example is a tensor of any shape and type, or a dict or tuple of such (`Parts`), nested or not. A batch of the latter is a
`TensorTree`, which is indexed, joined, moved and stored as a tensor is, so that nobody else needs to know what is in it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.data import Dataset

from gracecl.errors import UserError
from gracecl.rows import Rows

Kind = TypeVar("Kind", bound="Inputs")
Batched = Any
"""a tensor with the batch as first axis, `Rows` in its place, or a `TensorTree` of such"""
FULL = {torch.uint8: 255, torch.uint16: 65535, torch.float16: 1, torch.float32: 1, torch.float64: 1}
"""the value of a white pixel, for each type that images may have"""


class TensorTree:
    """Several tensors with a common batch axis, by name or by place, handled as one. `tree["mask"]` is the part of that name."""

    def __init__(self, parts: Mapping[str, Batched] | Sequence[Batched]) -> None:
        self.parts = dict(parts) if isinstance(parts, Mapping) else tuple(parts)

    def map(self, change: Callable[[Tensor], Tensor]) -> TensorTree:
        """The same tree of other tensors, each made of one."""
        if isinstance(self.parts, dict):
            return TensorTree({name: mapped(change, part) for name, part in self.parts.items()})
        return TensorTree([mapped(change, part) for part in self.parts])

    def leaves(self, place: str = "") -> Iterator[tuple[str, Tensor]]:
        """The tensors, each with its place: `['mask']`, `[0]['x']`."""
        for name, part in self.parts.items() if isinstance(self.parts, dict) else enumerate(self.parts):
            yield from leaves(part, f"{place}[{name!r}]")

    def plain(self) -> Any:
        """Dicts and tuples of tensors."""
        if isinstance(self.parts, dict):
            return {name: plain(part) for name, part in self.parts.items()}
        return tuple(map(plain, self.parts))

    @property
    def first(self) -> Tensor:
        return next(leaf for _, leaf in self.leaves())

    def __len__(self) -> int:
        return len(self.first)

    def __repr__(self) -> str:
        return f"TensorTree({', '.join(f'{place} {_kind(leaf.dtype, leaf.shape)}' for place, leaf in self.leaves())})"

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, str):
            return self.parts[rows]  # type: ignore[call-overload]
        return self.map(lambda leaf: leaf[rows])

    def __setitem__(self, rows: Any, values: TensorTree) -> None:
        for (_, leaf), (_, value) in zip(self.leaves(), values.leaves(), strict=True):
            leaf[rows] = value

    @property
    def device(self) -> torch.device:
        return self.first.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TensorTree:
        return self.map(lambda leaf: leaf.to(device, non_blocking=non_blocking))

    def index_select(self, axis: int, index: Tensor) -> TensorTree:
        return self.map(lambda leaf: leaf.index_select(axis, index))

    def unflatten(self, axis: int, sizes: Sequence[int]) -> TensorTree:
        return self.map(lambda leaf: leaf.unflatten(axis, sizes))  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.cat:
            trees = args[0]
            joined = [torch.cat(parts) for parts in zip(*([leaf for _, leaf in tree.leaves()] for tree in trees), strict=True)]
            pieces = iter(joined)
            return trees[0].map(lambda _: next(pieces))
        if function is torch.equal:
            pairs = zip(*([leaf for _, leaf in tree.leaves()] for tree in args), strict=True)
            return all(torch.equal(one, other) for one, other in pairs)
        return NotImplemented


def _of_parts(parts: Any, names: Any) -> TensorTree:
    return TensorTree(list(parts) if names is None else dict(zip(names, parts, strict=True)))


def _parts_of(tree: TensorTree) -> tuple[list[Any], Any]:
    named = isinstance(tree.parts, dict)
    return list(tree.parts.values() if named else tree.parts), tuple(tree.parts) if named else None  # type: ignore[union-attr]


register_pytree_node(TensorTree, _parts_of, _of_parts)


def mapped(change: Callable[[Tensor], Tensor], x: Batched) -> Batched:
    """A batch of other tensors, each made of one."""
    return x.map(change) if isinstance(x, TensorTree) else change(x)


def leaves(x: Batched, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, each with its place; a tensor is its only one."""
    if isinstance(x, TensorTree):
        yield from x.leaves(place)
    else:
        yield place, x


def loaded(x: Batched) -> Batched:
    """The batch in memory: `Rows` are read, tensors are themselves."""
    return mapped(lambda leaf: leaf.loaded() if isinstance(leaf, Rows) else leaf, x)


def in_memory(x: Batched) -> bool:
    """Whether indexing a batch reads nothing from elsewhere."""
    return not any(isinstance(leaf, Rows) for _, leaf in leaves(x))


def plain(x: Batched) -> Any:
    """A batch as the dicts and tuples that a user, a net or a file knows."""
    return x.plain() if isinstance(x, TensorTree) else x


def call(module: nn.Module, x: Batched) -> Any:
    """What a module makes of a batch: named parts are given by keyword, others by place."""
    if not isinstance(x, TensorTree):
        return module(x)
    given = x.plain()
    return module(**given) if isinstance(given, dict) else module(*given)


class Inputs:
    """A tensor that the net takes as it comes; half precision is widened to the net's."""

    def __init__(self, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32) -> None:
        """`shape` is that of one example, without the batch axis; None where nobody needs to know."""
        if shape is not None and (not isinstance(shape, Sequence) or not all(map(is_count, shape))):
            raise UserError(f"shape is that of one example, whole numbers of at least 1, not {shape!r}")
        self.known = shape is not None
        self.shape, self.dtype = tuple(map(int, shape or ())), dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape}, {_name(self.dtype)})"

    def __str__(self) -> str:
        return _kind(self.dtype, ("batch", *self.shape))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inputs) and self.saved() == other.saved()

    __hash__ = None  # type: ignore[assignment]

    def saved(self) -> dict[str, Any]:
        """Plain values, of which `restored` makes it again."""
        return {"kind": type(self).__name__, "shape": list(self.shape), "dtype": _name(self.dtype)}

    def takes(self, other: Inputs) -> bool:
        """Whether batches of others can be read as its own, whatever their mean and std."""
        return type(self) is type(other) and (self.shape, self.dtype) == (other.shape, other.dtype)

    def blank(self, count: int, device: torch.device | str = "cpu") -> Batched:
        """So many raw examples of zeros."""
        return torch.zeros((count, *self.shape), dtype=self.dtype, device=device)

    @property
    def bytes(self) -> int:
        """of one raw example"""
        return math.prod(self.shape) * self.dtype.itemsize

    def seen(self, count: int, make: Callable[[tuple[int, ...]], Tensor]) -> Batched:
        """So many made-up examples as the net sees them: numbers come from `make`, ids and masks are 1."""
        whole = not (isinstance(self, Images) or self.dtype.is_floating_point)
        return torch.ones((count, *self.shape), dtype=self.dtype) if whole else make((count, *self.shape))

    def normalise(self, x: Batched) -> Batched:
        """What the net sees of a raw batch."""
        return x.float() if self.known and x.dtype in (torch.float16, torch.bfloat16) else x

    def read(self, x: Any, what: str = "x") -> Batched:
        """A batch from arrays, tensors or lists, checked and in the types that it is kept in."""
        tensor = as_tensor(x, what)
        if tensor.ndim == 0 or tuple(tensor.shape[1:]) != self.shape:
            raise UserError(f"{what} must have the shape [{_sizes(('batch', *self.shape))}], not {list(tensor.shape)}")
        if len(tensor) == 0:
            raise UserError(f"{what} is empty; give at least one example")
        if tensor.dtype != self.dtype:
            kept = torch.promote_types(tensor.dtype, self.dtype) == self.dtype
            if not (kept or (tensor.is_floating_point() and self.dtype.is_floating_point)):
                raise UserError(f"{what} must be {_name(self.dtype)}, not {_name(tensor.dtype)}; convert it first")
            tensor = tensor.to(self.dtype)
        check_finite(tensor, what)
        return tensor

    @property
    def images(self) -> Images:
        """Itself, for what is defined on images alone."""
        raise UserError(
            f"crops, mirror images and the like are views of images, and the inputs are {self}; use augment='none', a function of "
            "your own as augment=, or a method without such views"
        )

    def to(self: Kind, device: torch.device | str) -> Kind:
        """The same for batches on a device."""
        return self


class Images(Inputs):
    """Images `[channels, height, width]`: bytes, or numbers of a kind in `FULL`, scaled to [0, 1], then normalised per channel."""

    def __init__(
        self,
        shape: Sequence[int],
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        """`mean` and `std` are those of the pixels scaled to [0, 1], per channel; the default is 1/2 and 1/4."""
        if not isinstance(shape, Sequence) or len(shape) != 3 or not all(map(is_count, shape)):
            raise UserError(f"shape is (channels, height, width), whole numbers of at least 1, not {shape!r}")
        if dtype not in FULL:
            raise UserError(f"images are {', '.join(map(_name, FULL))}, not {_name(dtype)}")
        super().__init__(shape, dtype)
        channels = shape[0]
        try:
            means = (0.5,) * channels if mean is None else tuple(map(float, mean))
            stds = (0.25,) * channels if std is None else tuple(map(float, std))
        except (TypeError, ValueError):
            raise UserError(f"mean and std are lists of numbers, not {mean!r} and {std!r}") from None
        if not len(means) == len(stds) == channels:
            raise UserError(f"mean and std need one number for each of the {channels} channels")
        if not all(map(math.isfinite, (*means, *stds))) or min(stds) <= 0:
            raise UserError(f"mean and std of the pixels must be finite and std above 0, not mean {means} and std {stds}")
        self.statistics = means, stds
        """mean and std as they were given"""
        self._number = torch.float64 if dtype == torch.float64 else torch.float32
        self.mean, self.std = (torch.tensor(values, dtype=self._number).view(1, -1, 1, 1) for values in self.statistics)
        self._scale = 1 / (FULL[dtype] * self.std)
        self._shift = -self.mean / self.std
        self.black = self._shift

    def saved(self) -> dict[str, Any]:
        mean, std = self.statistics
        return super().saved() | {"mean": list(mean), "std": list(std)}

    def normalise(self, x: Tensor) -> Tensor:
        return torch.addcmul(self._shift, x.to(self._number), self._scale)

    def read(self, x: Any, what: str = "images") -> Tensor:
        images = as_tensor(x, what)
        if images.dtype != self.dtype:
            cast = "to(torch.uint8)" if isinstance(x, Tensor) else "astype('uint8')"
            advice = f"; for floats in [0, 1] use (x * 255).round().{cast}" if self.dtype == torch.uint8 else ""
            wanted = "uint8 (0 to 255)" if self.dtype == torch.uint8 else _name(self.dtype)
            raise UserError(f"{what} must be {wanted}, not {getattr(x, 'dtype', images.dtype)}{advice}")
        if images.ndim != 4 or tuple(images.shape[1:]) != self.shape:
            raise UserError(f"{what} must have the shape [{_sizes(('batch', *self.shape))}], not {list(images.shape)}")
        if len(images) == 0:
            raise UserError("the batch is empty; give at least one image")
        check_finite(images, what)
        return images

    @property
    def images(self) -> Images:
        return self

    def restore(self, x: Tensor) -> Tensor:
        """Back to [0, 1], for operations that are defined on colours."""
        return x * self.std + self.mean

    def to(self, device: torch.device | str) -> Images:
        moved = copy.copy(self)
        for name in ("mean", "std", "_scale", "_shift", "black"):
            setattr(moved, name, getattr(self, name).to(device))
        return moved


class Parts(Inputs):
    """Several inputs, by name or by place, which the net gets by keyword or in this order."""

    def __init__(self, parts: Mapping[str, Inputs] | Sequence[Inputs]) -> None:
        super().__init__((1,))
        self.shape = ()
        self.parts = dict(parts) if isinstance(parts, Mapping) else tuple(parts)
        if not self.parts:
            raise UserError("inputs of several parts need at least one of them")

    @property
    def items(self) -> list[tuple[Any, Inputs]]:
        return list(self.parts.items() if isinstance(self.parts, dict) else enumerate(self.parts))

    def __repr__(self) -> str:
        return f"Parts({self.parts!r})"

    def __str__(self) -> str:
        return (
            f"{'dict' if isinstance(self.parts, dict) else 'tuple'} of {', '.join(f'{name}: {part}' for name, part in self.items)}"
        )

    def saved(self) -> dict[str, Any]:
        named = isinstance(self.parts, dict)
        return {"kind": "Parts", "named": named, "parts": [[name, part.saved()] for name, part in self.items]}

    def takes(self, other: Inputs) -> bool:
        names = [name for name, _ in self.items]
        same = isinstance(other, Parts) and type(self.parts) is type(other.parts) and names == [name for name, _ in other.items]
        return same and all(part.takes(theirs) for (_, part), (_, theirs) in zip(self.items, other.items, strict=True))  # type: ignore[attr-defined]

    def _made(self, make: Callable[[Any, Inputs], Any]) -> TensorTree:
        made = {name: make(name, part) for name, part in self.items}
        return TensorTree(made if isinstance(self.parts, dict) else list(made.values()))

    def blank(self, count: int, device: torch.device | str = "cpu") -> TensorTree:
        return self._made(lambda _, part: part.blank(count, device))

    def seen(self, count: int, make: Callable[[tuple[int, ...]], Tensor]) -> TensorTree:
        return self._made(lambda _, part: part.seen(count, make))

    @property
    def bytes(self) -> int:
        return sum(part.bytes for _, part in self.items)

    def normalise(self, x: TensorTree) -> TensorTree:
        return self._made(lambda name, part: part.normalise(x.parts[name]))

    def read(self, x: Any, what: str = "x") -> TensorTree:
        given = x.parts if isinstance(x, TensorTree) else x
        if isinstance(self.parts, dict):
            if not isinstance(given, Mapping) or set(given) != set(self.parts):
                came = f"the names {_names(given)}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
                raise UserError(f"{what} must be a dict with the names {_names(self.parts)}, not {came}")
        elif not isinstance(given, tuple | list) or len(given) != len(self.parts):
            raise UserError(f"{what} must be a tuple of {len(self.parts)} arrays or tensors, not a {type(given).__name__}")
        read = self._made(lambda name, part: part.read(given[name], f"{what}[{name!r}]"))
        lengths = {place: len(leaf) for place, leaf in read.leaves()}
        if len(set(lengths.values())) > 1:
            raise UserError(f"the parts of {what} have different lengths: " + ", ".join(f"{k} {n}" for k, n in lengths.items()))
        return read

    def to(self, device: torch.device | str) -> Parts:
        moved = [(name, part.to(device)) for name, part in self.items]
        return Parts(dict(moved) if isinstance(self.parts, dict) else [part for _, part in moved])


def restored(saved: Mapping[str, Any]) -> Inputs:
    """The inputs that `saved()` wrote down."""
    if saved["kind"] == "Parts":
        parts = {name: restored(part) for name, part in saved["parts"]}
        return Parts(parts if saved["named"] else list(parts.values()))
    dtype: torch.dtype = getattr(torch, saved["dtype"])
    if saved["kind"] == "Images":
        return Images(saved["shape"], saved["mean"], saved["std"], dtype)
    return Inputs(saved["shape"], dtype)


def inputs_of(x: Any, what: str = "x") -> Inputs:
    """What a batch of examples shows: `[N, C, H, W]` of bytes or 16 bits are images, all else is taken as it comes.

    Double precision becomes single, the net's own.
    """
    if isinstance(x, TensorTree):
        x = x.parts
    if isinstance(x, Mapping):
        if wrong := next((name for name in x if not isinstance(name, str)), None):
            raise UserError(f"the names of the parts of {what} are text, as a net takes them by keyword, not {wrong!r}")
        return Parts({name: inputs_of(part, f"{what}[{name!r}]") for name, part in x.items()})
    if isinstance(x, tuple):
        return Parts([inputs_of(part, f"{what}[{place}]") for place, part in enumerate(x)])
    tensor = as_tensor(x, what)
    if tensor.ndim == 0 or 0 in tensor.shape:
        raise UserError(
            f"{what} is a batch of examples, and this one has the shape {list(tensor.shape)}; give at least one example"
        )
    if tensor.ndim == 4 and tensor.dtype in (torch.uint8, torch.uint16):
        return Images(tensor.shape[1:], dtype=tensor.dtype)
    return Inputs(tensor.shape[1:], torch.float32 if tensor.dtype == torch.float64 else tensor.dtype)


def as_array(given: Any, what: str) -> npt.NDArray[Any]:
    """The values as a numpy array, whose memory they may share."""
    if isinstance(given, Dataset) or hasattr(given, "fingerprint"):
        raise UserError(
            f"{what} is a data set ({type(given).__name__}) and not an array; gracecl.from_torch(dataset, test_dataset) takes one, "
            "or take its images and labels out of it, for example torch.stack([image for image, _ in dataset]) and "
            "[label for _, label in dataset]"
        )
    if not isinstance(given, Tensor | Sequence) and not hasattr(given, "__array__") and not hasattr(given, "__array_interface__"):
        # numpy would take it for one value, or ask for its items one by one, without end where no IndexError comes.
        raise UserError(f"{what} must be an array or a tensor, not {'missing' if given is None else 'a ' + type(given).__name__}")
    try:
        return _host_array(given) if isinstance(given, Tensor) else np.asarray(given)
    except (ValueError, TypeError, RuntimeError):
        raise UserError(
            f"{what} must be an array or a tensor, not a {type(given).__name__} of uneven parts, "
            "or of tensors that numpy cannot read"
        ) from None


def _host_array(tensor: Tensor) -> npt.NDArray[Any]:
    tensor = tensor.detach().cpu().to_dense()
    array: npt.NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # numpy has no bfloat16
    return array


def as_tensor(x: Any, what: str) -> Tensor:
    """An array, a tensor or a list as a tensor; arrays are copied, so that read-only and mirrored ones are as good as any."""
    if isinstance(x, Tensor):
        return x.detach().to_dense()
    array = np.array(as_array(x, what))
    if array.dtype.kind not in "biuf":
        raise UserError(f"{what} must be numbers, not {array.dtype}; give names and texts as the numbers that a net takes")
    return torch.from_numpy(array)


def tree_of(x: Any) -> Batched:
    """Dicts and tuples of tensors as a `TensorTree`; a tensor is itself."""
    if isinstance(x, Mapping):
        return TensorTree({name: tree_of(part) for name, part in x.items()})
    return TensorTree([tree_of(part) for part in x]) if isinstance(x, tuple | list) else x


def write_rows(target: Batched, rows: Tensor, values: Batched) -> None:
    """Put examples into rows of a batch, in place."""
    for (_, leaf), (_, value) in zip(leaves(target), leaves(values), strict=True):
        if leaf.dtype == torch.uint16:  # which PyTorch cannot copy by index
            leaf, value = leaf.view(torch.int16), value.view(torch.int16)
        leaf.index_copy_(0, rows, value)


def as_bytes(x: Tensor) -> Tensor:
    """`[n, bytes of an example]`: the bytes of the examples of one tensor."""
    return x.contiguous().reshape(len(x), math.prod(x.shape[1:])).view(torch.uint8)


def same_rows(one: Batched, other: Batched) -> Tensor:
    """`[n, m]`: which examples of two batches are equal in every value."""
    pairs = zip(leaves(one), leaves(other), strict=True)
    same = [(a[:, None] == b).flatten(2).all(dim=2) if a.ndim > 1 else a[:, None] == b for (_, a), (_, b) in pairs]
    return torch.stack(same).all(dim=0) if len(same) > 1 else same[0]


def check_finite(x: Tensor, what: str) -> None:
    """Refuse NaN and infinity, naming the first row that has one."""
    if x.is_floating_point() and len(x) and not bool(x.isfinite().all()):
        row = int((~x.isfinite()).reshape(len(x), -1).any(dim=1).nonzero()[0])
        raise UserError(f"{what} has NaN or infinity in row {row}; replace such values or leave the row out")


def is_count(value: Any) -> bool:
    """Whether it is a whole number that things can be counted with."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(1 <= value < 1 << 31)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(parts: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, parts))


def _sizes(sizes: Sequence[Any]) -> str:
    return ", ".join(map(str, sizes))


def _kind(dtype: torch.dtype, sizes: Sequence[Any]) -> str:
    return f"{_name(dtype)} [{_sizes(sizes)}]"
