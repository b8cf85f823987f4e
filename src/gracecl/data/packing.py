"""`pack`: write any data set as shards, so that streams over it need not fit into memory (`gracecl data pack`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gracecl.data.archives import archives_of, examples_in, split_off
from gracecl.data.arrays import numbered
from gracecl.data.cache import files_key
from gracecl.data.dataset import Data, Labels, with_own_statistics
from gracecl.data.folder import rows_of
from gracecl.data.labels import exact_in_a_file
from gracecl.data.loading import load
from gracecl.data.pixels import BLOCK, Extent, FilePixels, ImageFile, header
from gracecl.data.progress import Advance, progress
from gracecl.data.saved import saved_dataset
from gracecl.data.shards import (
    FORMAT,
    INDEX,
    LABELS,
    PLAN,
    SPLITS,
    as_bytes,
    checks_of,
    data_in,
    from_shards,
    is_packed,
    shard_file,
)
from gracecl.data.torch_datasets import Items, as_images
from gracecl.errors import UserError
from gracecl.files import as_path, file_digests, lock, make_folder, read_sealed, replacing, without_nul, write_sealed
from gracecl.inputs import Batched, Images, Inputs, leaves, loaded
from gracecl.machine import check_room, free_space

SHARD_BYTES = 64 << 20
"""of one shard, about"""
LabelledFiles = Sequence[tuple[ImageFile, Any]]
TEST_PARTS = ("test", "validation", "val")
"""what the test part of a dict of data sets may be called"""


@dataclass(frozen=True)
class Split:
    """Examples that can be read by number."""

    length: int
    read: Callable[[int, int], tuple[Batched, Sequence[Any]]]
    """examples and labels of the numbers from … to …"""


@dataclass(frozen=True)
class Packing:
    """A data set on its way into shards."""

    name: str
    key: str
    """changes with the source, so that another one does not go on where this one stopped"""
    inputs: Inputs
    train: Split
    test: Split
    class_names: Sequence[str] | None
    labels: tuple[Any, ...] | None
    """the labels of the classes, where labels are numbers of classes already"""
    tasks: int
    statistics: bool
    """whether mean and std are still to be computed"""


def pack(
    source: Any,
    dest: str | Path,
    *,
    test: Any = None,
    size: int | None = None,
    label: str | None = None,
    class_names: Sequence[str] | None = None,
    name: str | None = None,
    tasks: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    data: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    show: bool = True,
) -> Data:
    """Write a data set as shards into the folder `dest` and return it, read from there.

    >>> gracecl.pack(torch_dataset, "DIR", test=test_dataset)
    >>> gracecl.stream("split-shards(path='DIR', tasks=10)")

    The source is the name of a data set (looked for in `data`), a folder of images, tar archives in WebDataset's layout (a path, a
    folder of them or a pattern), a folder of MosaicML's MDS shards or of Hugging Face's `save_to_disk`, a `Data`, or any map-style
    dataset as `from_torch` takes it; `test` is another of the same kind.
    Folders and archives without one have `test_fraction` of each class held out, by `seed`; a dict of data sets has a part 'test'
    or 'validation'. `size` is the extent of images that are decoded here. What was interrupted goes on with the next shard when it
    is called again.
    """
    folder = as_path(dest, "dest").expanduser().resolve()
    if is_packed(folder):
        raise UserError(f"{folder} holds shards already; delete it to pack another data set there, or choose another place")
    given = {"size": size, "label": label, "class_names": class_names, "tasks": tasks, "test_fraction": test_fraction, "seed": seed}
    packing = _packing(source, test, name, data, **given)
    make_folder(folder)
    with _alone_in(folder):
        return _write(packing, folder, shard_bytes, show)


def _packing(source: Any, test: Any, name: str | None, root: str | Path | None, **given: Any) -> Packing:
    """Find out what the source is."""
    if isinstance(source, Data):
        return _of_data(source, name, given["tasks"])
    if not isinstance(source, str | Path):
        return _of_items(source, test, name, given["label"], given["class_names"], given["tasks"])
    if archives := archives_of(without_nul(source)):
        return _of_archives(archives, test, name, **given)
    place = Path(source).expanduser().resolve()
    if (dataset := saved_dataset(place, given["size"])) is not None:
        tested = None if test is None else saved_dataset(Path(without_nul(test)).expanduser().resolve(), given["size"])
        return _of_items(dataset, tested, name or place.name, given["label"], given["class_names"], given["tasks"])
    if place.is_dir():
        if test is not None:
            raise UserError("a folder has its test images in a folder 'test' or 'val' beside 'train'; leave test out")
        rows = rows_of(place, given["test_fraction"], given["seed"])
        key = files_key([image for image, _ in (*rows[0], *rows[1])], None) + f"-{given['test_fraction']}-{given['seed']}"
        names = sorted({label for _, label in rows[0]})
        train, tested = ([(image, names.index(label)) for image, label in part] for part in rows)
        return _of_files(train, tested, name or place.name, key, given["size"], given["tasks"], names)
    return _of_data(load(str(source), root, size=given["size"]), name, given["tasks"])


def _of_data(data: Data, name: str | None, tasks: int | None) -> Packing:
    def split(x: Batched, y: Labels) -> Split:
        return Split(len(y), lambda start, stop: (loaded(x[start:stop]), y[start:stop].tolist()))

    train, test = split(data.train_x, data.train_y), split(data.test_x, data.test_y)
    title, number = name or data.name, data.tasks if tasks is None else tasks
    return Packing(title, data.fingerprint, data.inputs, train, test, data.class_names, data.labels, number, statistics=False)


def _of_items(
    dataset: Any, test: Any, name: str | None, label: str | None, class_names: Sequence[str] | None, tasks: int | None
) -> Packing:
    if isinstance(dataset, Mapping) and "train" in dataset:
        test = test if test is not None else next((dataset[part] for part in TEST_PARTS if part in dataset), None)
        dataset = dataset["train"]
    if test is None:
        raise UserError(f"{name or f'a {type(dataset).__name__}'} is packed with a test set beside it: give test= (--test)")
    items = [Items(given, what, label) for given, what in ((dataset, "the dataset"), (test, "the test dataset"))]
    inputs, names = items[0].inputs(), items[0].class_names if class_names is None else class_names

    def split(of: Items) -> Split:
        def read(start: int, stop: int) -> tuple[Batched, Sequence[Any]]:
            pairs = list(of.between(start, stop, inputs))
            return torch.cat([x for x, _ in pairs]), [y for _, y in pairs]

        return Split(of.length, read)

    title = name or type(dataset).__name__
    first = [as_bytes(leaf.contiguous()).numpy().tobytes() for _, leaf in leaves(next(items[0].between(0, 1, inputs))[0])]
    key = sha256(repr((title, [of.length for of in items], inputs.saved(), names, first)).encode()).hexdigest()
    return Packing(title, key, inputs, split(items[0]), split(items[1]), names, None, tasks or 1, statistics=True)


def _of_archives(archives: list[Path], test: Any, name: str | None, **given: Any) -> Packing:
    rows = examples_in(archives)
    more = [] if test is None else archives_of(without_nul(test))
    if test is not None and not more:
        raise UserError(f"{test} names no tar archive; give test= a path, a folder or a pattern such as 'test-*.tar'")
    train, tested = (rows, examples_in(more)) if more else split_off(rows, given["test_fraction"], given["seed"])
    if not tested:
        raise UserError(f"every class in {archives[0]} has one example only: there is nothing to hold out for testing; give test=")
    key = files_key([*archives, *more], None) + f"-{given['test_fraction']}-{given['seed']}"
    return _of_files(train, tested, name or archives[0].stem, key, given["size"], given["tasks"], given["class_names"])


def _of_files(
    train: LabelledFiles,
    test: LabelledFiles,
    name: str,
    key: str,
    size: int | None,
    tasks: int | None,
    names: Sequence[str] | None,
) -> Packing:
    headers = [header(file) for file, _ in (*train, *test)]
    extent: Extent = (size, size) if size else headers[0][0]
    channels = 1 if all(grey for _, grey in headers) else 3

    def split(rows: LabelledFiles) -> Split:
        def read(start: int, stop: int) -> tuple[Batched, Sequence[Any]]:
            [block] = FilePixels([file for file, _ in rows[start:stop]], channels, extent).blocks(extent)
            return torch.from_numpy(block), [label for _, label in rows[start:stop]]

        return Split(len(rows), read)

    inputs = Images((channels, *extent))
    return Packing(name, f"{key}-{extent}", inputs, split(train), split(test), names, None, tasks or 1, statistics=True)


def _write(packing: Packing, folder: Path, shard_bytes: int, show: bool) -> Data:
    of_each = max(1, min(shard_bytes // packing.inputs.bytes, max(packing.train.length, packing.test.length)))
    plan = {"format": FORMAT, "name": packing.name, "key": packing.key, "of_each": of_each}
    if (folder / PLAN).is_file():
        if read_sealed(folder / PLAN) != plan:
            raise UserError(f"{folder} holds the beginning of another data set; delete it, or choose another place")
    elif any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose a folder for the shards alone")
    else:
        write_sealed(folder / PLAN, plan)
    for left in folder.glob("*.part"):
        left.unlink()
    splits = {"train": packing.train, "test": packing.test}
    missing = [
        (split, start)
        for split in SPLITS
        for start in range(0, splits[split].length, of_each)
        if not (folder / shard_file(split, start // of_each)).is_file()
    ]
    total = sum(split.length for split in splits.values())
    left_over = sum(min(of_each, splits[split].length - start) for split, start in missing)
    room = free_space(folder)
    check_room(left_over * packing.inputs.bytes, f"the shards of {packing.name}", "choose a place with more room", room)
    with progress(f"packing {packing.name}", total, "examples", done=total - left_over, show=show) as advance:
        for split, start in missing:
            _write_shard(folder / shard_file(split, start // of_each), splits[split], packing.inputs, start, of_each, advance)
    return _seal(packing, folder, of_each, show)


def _write_shard(path: Path, split: Split, inputs: Inputs, start: int, of_each: int, advance: Advance) -> None:
    stop = min(start + of_each, split.length)
    room, labels = inputs.blank(stop - start), []
    for begin in range(start, stop, BLOCK):
        x, y = split.read(begin, min(begin + BLOCK, stop))
        room[begin - start : begin - start + len(y)] = x
        labels += list(y)
        advance(len(y))
    for value in labels:
        if not exact_in_a_file(value):
            raise UserError(f"the label {value!r} is a {type(value).__name__}, which a file does not give back as it was")
    tensors: dict[str, Tensor] = {"labels": torch.frombuffer(bytearray(json.dumps(labels).encode()), dtype=torch.uint8)}
    for place, leaf in leaves(room):
        tensors |= {f"x{place}": leaf, f"check{place}": checks_of(leaf)}
    try:
        with replacing(path) as beside:
            save_file(tensors, beside)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error}); free some space and give the same command again, which goes on") from None


def _seal(packing: Packing, folder: Path, of_each: int, show: bool) -> Data:
    """Number the labels, compute what depends on all examples, and write the index, which makes the folder whole."""
    lengths = {"train": packing.train.length, "test": packing.test.length}
    files = {split: [shard_file(split, number) for number in range(-(-lengths[split] // of_each))] for split in SPLITS}
    raw = [[label for file in files[split] for label in _labels_in(folder / file)] for split in SPLITS]
    numbers, names, given = numbered(
        [(raw[0], "the labels", lengths["train"]), (raw[1], "the test labels", lengths["test"])], packing.class_names
    )
    tensors = {split: torch.from_numpy(np.ascontiguousarray(y)) for split, y in zip(SPLITS, numbers, strict=True)}
    with replacing(folder / LABELS) as beside:
        save_file(tensors, beside)
    about: dict[str, Any] = {
        "format": FORMAT,
        "name": packing.name,
        "inputs": packing.inputs.saved(),
        "class_names": names,
        "labels": packing.labels or given,
        "tasks": packing.tasks,
        "fingerprint": "",
        "files": {},
    } | {split: {"rows": lengths[split], "of_each": of_each} for split in SPLITS}
    with progress(f"digests of {packing.name}", sum(lengths.values()), "examples", show=show) as advance:
        for file in (*files["train"], *files["test"], LABELS):
            path = folder / file
            about["files"][file] = {"bytes": path.stat().st_size, "digests": file_digests(path)}
            advance(0 if file == LABELS else of_each)
    draft = data_in(folder, about)
    inputs = packing.inputs
    if packing.statistics:
        inputs = with_own_statistics(as_images(inputs, draft.train_x, draft.test_x), draft.train_x)
    about |= {"inputs": inputs.saved(), "fingerprint": replace(draft, inputs=inputs).fingerprint}
    write_sealed(folder / INDEX, about)
    (folder / PLAN).unlink()
    return from_shards(folder)


def _labels_in(path: Path) -> list[Any]:
    with safe_open(path, framework="pt") as file:
        found: list[Any] = json.loads(bytes(file.get_tensor("labels").numpy()))
    return [tuple(label) if isinstance(label, list) else label for label in found]


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep another process from packing into the same folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            lock(handle, wait=False)
        except BlockingIOError:
            raise UserError(f"another process packs into {folder}; wait for it, or choose another place") from None
        yield
    finally:
        os.close(handle)
