"""Folders that other libraries wrote: MosaicML's MDS shards, and what Hugging Face's `save_to_disk` leaves."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gracecl.data.pixels import FORMATS, Extent, centre
from gracecl.errors import UserError
from gracecl.files import open_to_read, parse_json

MDS_INDEX, MDS_VERSION = "index.json", 2
HUGGING_FACE = ("dataset_dict.json", "state.json")
"""files that `save_to_disk` writes for several data sets, and for one"""
PARTS = ("train", "test", "validation", "val")
WORD = 4
"""bytes of a count, a size and an offset in MDS shards"""
SCALARS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")


def saved_dataset(place: Path, size: int | None) -> Any:
    """Return the map-style dataset in a folder of another library, or a dict of several; None if it is no such folder.

    `size` is the extent of pictures; those of MDS shards alone are resized.
    """
    if any((place / name).is_file() for name in HUGGING_FACE):
        return _of_hugging_face(place, size)
    if is_mds(place):
        return MDS(place, size)
    parts = {name: place / name for name in PARTS if is_mds(place / name)}
    return {name: MDS(part, size) for name, part in parts.items()} if "train" in parts else None


def _of_hugging_face(place: Path, size: int | None) -> Any:
    if size is not None:
        raise UserError(
            f"{place} holds a Hugging Face data set, whose pictures keep their size; resize them there, or leave size out"
        )
    try:
        import datasets
    except ImportError:
        raise UserError(f"{place} holds a Hugging Face data set, which needs its library: pip install datasets") from None
    return datasets.load_from_disk(str(place))


def is_mds(place: Path) -> bool:
    """Return whether a folder holds MDS shards."""
    index = place / MDS_INDEX
    return index.is_file() and b'"mds"' in index.read_bytes()


class MDS:
    """The examples of MDS shards by number, as dicts; read from the file whenever they are asked for."""

    def __init__(self, place: Path, size: int | None = None) -> None:
        self.place, self.size = place, size
        try:
            self.shards = parse_json((place / MDS_INDEX).read_text(encoding="utf-8"))["shards"]
            self.ends = list(accumulate(int(shard["samples"]) for shard in self.shards))
            for shard in self.shards:
                self._check(shard)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"cannot read the MDS index {place / MDS_INDEX} ({error!r}); write the shards again") from None

    def _check(self, shard: Mapping[str, Any]) -> None:
        if shard["compression"] is not None or shard["version"] != MDS_VERSION:
            raise UserError(
                f"{self.place} has MDS shards of version {shard['version']}, compression {shard['compression']}; "
                f"version {MDS_VERSION} without compression is read: write them again so, or give gracecl.pack a StreamingDataset"
            )
        for name, encoding in zip(shard["column_names"], shard["column_encodings"], strict=True):
            _decoder(name, encoding, self.size)
        file = self._file(shard)
        if (found := file.stat().st_size) != shard["raw_data"]["bytes"]:
            raise UserError(f"{file} has {found} bytes of {shard['raw_data']['bytes']}; copy it again")

    def _file(self, shard: Mapping[str, Any]) -> Path:
        return self.place / Path(shard["raw_data"]["basename"]).name

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        at = bisect_right(self.ends, number)
        shard, file = self.shards[at], self._file(self.shards[at])
        place = number - (self.ends[at - 1] if at else 0)
        with open_to_read(file) as opened:
            opened.seek(WORD * (1 + place))
            begin, end = _words(opened.read(2 * WORD))
            opened.seek(begin)
            content = opened.read(end - begin)
        try:
            return self._example(shard, content)
        except (ValueError, IndexError, OSError) as error:
            raise UserError(f"example {place} of {file} cannot be read ({error}); copy the file again") from None

    def _example(self, shard: Mapping[str, Any], content: bytes) -> dict[str, Any]:
        """The columns of an example: the sizes of those that vary, then the values of all."""
        varying = sum(size is None for size in shard["column_sizes"])
        given = iter(_words(content[: varying * WORD]))
        sizes = [next(given) if size is None else int(size) for size in shard["column_sizes"]]
        found, at = {}, varying * WORD
        for name, encoding, size in zip(shard["column_names"], shard["column_encodings"], sizes, strict=True):
            found[name] = _decoder(name, encoding, self.size)(content[at : at + size])
            at += size
        return found


def _words(content: bytes) -> list[int]:
    words: list[int] = np.frombuffer(content, "<u4").tolist()
    return words


def _decoder(name: str, encoding: str, size: int | None) -> Callable[[bytes], Any]:
    """What makes a value of a column's bytes."""
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind in ("jpeg", "png"):
        return lambda content: _picture(Image.open(io.BytesIO(content), formats=FORMATS), size)
    if kind == "pil":
        return lambda content: _picture(_raw_picture(content), size)
    if kind == "str":
        return lambda content: content.decode("utf-8")
    if kind == "int":
        return lambda content: int(np.frombuffer(content, "<i8")[0])
    if kind in SCALARS:
        return lambda content: np.frombuffer(content, kind)[0].item()
    if kind == "ndarray" and dtype in SCALARS and shape:
        return partial(_array, dtype=dtype, shape=tuple(map(int, shape.split(","))))
    raise UserError(
        f"the column {name!r} has the MDS encoding {encoding!r}, which is not read here (jpeg, png, pil, str, int, numbers, and "
        "arrays of one type and shape are); leave the column out, or give gracecl.pack a StreamingDataset"
    )


def _array(content: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    return np.frombuffer(content, dtype).reshape(shape)


def _picture(picture: Image.Image, size: int | None) -> Image.Image:
    extent: Extent | None = (size, size) if size else None
    picture.load()
    return picture if extent is None else centre(picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB"), extent, 1.0)


def _raw_picture(content: bytes) -> Image.Image:
    width, height, length = _words(content[: 3 * WORD])
    mode = content[3 * WORD : 3 * WORD + length].decode("ascii")
    return Image.frombytes(mode, (width, height), content[3 * WORD + length :])
