"""Small files in the official layouts, for the tests of this folder."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from gracecl.data.tinyimagenet import WORDNET_IDS


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def cifar100(root: Path, train: int = 200, test: int = 100) -> Path:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for seed, (part, count) in enumerate((("train", train), ("test", test))):
        content = {
            b"data": noise(count, 3072, seed=seed),
            b"fine_labels": [row % 100 for row in range(count)],
            b"coarse_labels": [row % 20 for row in range(count)],
            b"filenames": [b"%d.png" % row for row in range(count)],
        }
        (folder / part).write_bytes(pickle.dumps(content, protocol=2))
    names = {"fine_label_names": [f"fine{k}" for k in range(100)], "coarse_label_names": []}
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=2))
    return folder


def cifar10(root: Path, each: int = 20) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    files = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]
    for seed, file in enumerate(files):
        content = {b"data": noise(each, 3072, seed=seed), b"labels": [row % 10 for row in range(each)]}
        (folder / file).write_bytes(pickle.dumps(content, protocol=2))
    names = {b"label_names": [b"class%d" % k for k in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    return folder


def tinyimagenet(root: Path, classes: int = 3, train: int = 4, test: int = 2) -> Path:
    """The last classes in alphabetical order, written in reverse, with one grey image among the coloured ones."""
    folder = root / "tiny-imagenet-200"
    (folder / "val" / "images").mkdir(parents=True)
    notes = []
    for wnid in reversed(WORDNET_IDS[-classes:]):
        images = folder / "train" / wnid / "images"
        images.mkdir(parents=True)
        for k in range(train):
            Image.fromarray(noise(64, 64) if k == 0 else noise(64, 64, 3, seed=k)).save(images / f"{wnid}_{k}.JPEG")
        for _ in range(test):
            file = f"val_{len(notes)}.JPEG"
            Image.fromarray(noise(64, 64, 3, seed=len(notes))).save(folder / "val" / "images" / file)
            notes.append(f"{file}\t{wnid}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(notes))
    (folder / "words.txt").write_text(f"{WORDNET_IDS[-1]}\tlast word, another name\n")
    return folder


def cub200(root: Path, classes: int = 3, each: int = 4) -> Path:
    folder = root / "CUB_200_2011"
    tables: dict[str, list[str]] = {"images": [], "image_class_labels": [], "train_test_split": [], "classes": []}
    row = 0
    for label in range(1, classes + 1):
        name = f"{label:03d}.Bird_{label}"
        (folder / "images" / name).mkdir(parents=True)
        tables["classes"].append(f"{label} {name}\n")
        for k in range(each):
            row += 1
            Image.fromarray(noise(50 + 10 * k, 70, 3, seed=row)).save(folder / "images" / name / f"{k}.jpg")
            tables["images"].append(f"{row} {name}/{k}.jpg\n")
            tables["image_class_labels"].append(f"{row} {label}\n")
            tables["train_test_split"].append(f"{row} {k % 2}\n")
    for table, lines in tables.items():
        (folder / f"{table}.txt").write_text("".join(lines))
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx(root: Path, name: str = "mnist", zipped: bool = True) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for part, count in (("train", 40), ("t10k", 20)):
        arrays = {"images-idx3": noise(count, 28, 28), "labels-idx1": (np.arange(count) % 10).astype(np.uint8)}
        for kind, array in arrays.items():
            content = idx_bytes(array)
            file = folder / f"{part}-{kind}-ubyte{'.gz' if zipped else ''}"
            file.write_bytes(gzip.compress(content) if zipped else content)
    return folder
