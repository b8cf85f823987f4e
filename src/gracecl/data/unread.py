"""A data set of images before they are decoded: labels at once, pixels block by block, for whoever looks at each image once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gracecl.data.dataset import Data, Labels
from gracecl.data.domains import Domains
from gracecl.data.pixels import ArrayPixels, Extent, Pixels
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.rows import Rows


class NoImages(UserError):
    """The data set holds something else than images."""


@dataclass(frozen=True)
class Unread:
    """Labels, names and `Pixels` of a training and a test set, and the extent at which the images are wanted."""

    name: str
    train: Pixels
    train_y: Labels
    test: Pixels
    test_y: Labels
    inputs: Images
    """what one image looks like at the extent asked for"""
    class_names: tuple[str, ...]
    tasks: int
    key: str
    """changes with the images; of files it is made of their names, sizes and dates"""
    labels: tuple[Hashable, ...] | None = None
    domains: dict[str, Any] = field(default_factory=dict)
    """which domain each image is of, where there are domains: fields of `Domains`"""

    @property
    def extent(self) -> Extent:
        return self.inputs.shape[1], self.inputs.shape[2]

    @classmethod
    def of(cls, data: Data, size: int | None = None) -> Unread:
        """The images of a data set that is there already, enlarged or reduced to `size` pixels a side."""
        inputs = data.inputs
        if not isinstance(inputs, Images):
            raise NoImages(f"features are made of images, and {data.name} holds {inputs}; give a data set of images")
        if size is not None and inputs.shape[1:] != (size, size):
            if inputs.dtype != torch.uint8:
                raise UserError(
                    f"size= is for images of bytes, and those of {data.name} are {inputs.dtype}; resize them beforehand"
                )
            inputs = Images((inputs.shape[0], size, size), *inputs.statistics)
        names = ("train_domain", "test_domain", "domain_names")
        return cls(
            name=data.name,
            train=_pixels(data.train_x),
            train_y=data.train_y,
            test=_pixels(data.test_x),
            test_y=data.test_y,
            inputs=inputs,
            class_names=data.class_names,
            tasks=data.tasks,
            key=data.fingerprint,
            labels=data.labels,
            domains={name: getattr(data, name) for name in names} if isinstance(data, Domains) else {},
        )


def _pixels(x: Tensor | Rows) -> ArrayPixels:
    return ArrayPixels(x if isinstance(x, Rows) else x.numpy())
