"""Data sets of the same classes from several domains: photographs and sketches, sessions, years."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gracecl.data.dataset import Data, Labels, channel_statistics
from gracecl.data.folder import from_folder
from gracecl.errors import UserError
from gracecl.files import without_nul
from gracecl.inputs import Images


@dataclass(frozen=True, eq=False, repr=False)
class Domains(Data):
    """A data set that knows which domain each image is of."""

    train_domain: Labels
    test_domain: Labels
    domain_names: tuple[str, ...]


def domains_of(data: Data, train: Labels, test: Labels | None = None) -> dict[str, Any]:
    """The domains of some training images, and of some test images, for `dataclasses.replace`; of other data nothing."""
    if not isinstance(data, Domains):
        return {}
    return {"train_domain": data.train_domain[train], "test_domain": data.test_domain if test is None else data.test_domain[test]}


def from_domains(parts: Mapping[str, Data], name: str = "domains") -> Domains:
    """One data set of several, a domain each, in the order given; classes are matched by their names."""
    if not parts:
        raise UserError("from_domains: there are no domains; give at least one data set")
    if not all(isinstance(data.inputs, Images) for data in parts.values()):
        raise UserError("from_domains joins data sets of images; concatenate the arrays of others and give them to from_arrays")
    if len({data.shape[1:] for data in parts.values()}) > 1:
        raise UserError("the domains hold images of different extents; give a size, as in domain-folder(path='DIR', size=32)")
    names = sorted({label for data in parts.values() for label in data.class_names})
    channels = max(data.shape[0] for data in parts.values())
    x: dict[str, list[torch.Tensor]] = {"train": [], "test": []}
    y: dict[str, list[Labels]] = {"train": [], "test": []}
    for data in parts.values():
        number = np.array([names.index(label) for label in data.class_names])
        for part, images, labels in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
            x[part].append(images.expand(-1, channels, -1, -1))
            y[part].append(number[labels])
    train_x = torch.cat(x["train"])
    return Domains(
        name=name,
        train_x=train_x,
        train_y=np.concatenate(y["train"]),
        test_x=torch.cat(x["test"]),
        test_y=np.concatenate(y["test"]),
        inputs=Images(train_x.shape[1:], *channel_statistics(train_x.numpy())),
        class_names=tuple(names),
        tasks=len(parts),
        train_domain=np.repeat(np.arange(len(parts)), [len(labels) for labels in y["train"]]),
        test_domain=np.repeat(np.arange(len(parts)), [len(labels) for labels in y["test"]]),
        domain_names=tuple(parts),
    )


def from_domain_folders(path: str | Path, *, size: int | None = None, root: str | Path | None = None) -> Domains:
    """A data set from `path/<domain>/<class>/…`; each domain is read as `from_folder` reads a folder, in alphabetical order."""
    place = without_nul(path).expanduser().resolve()
    if not place.is_dir():
        raise UserError(f"there is no folder {place}")
    folders = sorted(folder for folder in place.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if not folders:
        raise UserError(f"{place} has no sub-folders; it needs one for each domain, with one for each class inside")
    return from_domains({folder.name: from_folder(folder, size=size, root=root) for folder in folders}, place.name)
