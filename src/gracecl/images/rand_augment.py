"""RandAugment: operations of an image editor, drawn for each image, all at one strength. Cubuk et al., 2020.

Each of `operations` rounds draws one of sixteen operations for every image, with replacement, and applies it at magnitude / 30 of
its range. Signs of geometric operations are drawn, strengths are not. Arithmetic is that of 8-bit images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.images.augment import Floats
from gracecl.inputs import Images

MADE_FOR = 224
"""size of the images that the ranges in pixels were chosen for"""
GREY = (125.0, 123.0, 114.0)
"""the colour of a cut-out"""


@dataclass(frozen=True)
class RandAugment:
    """`operations` rounds of one random operation an image, at `magnitude` of 30."""

    operations: int = 1
    magnitude: float = 14
    scaled: bool = True
    """ranges in pixels (shifts up to 100, cut-outs up to 40) are scaled from images of 224 pixels; False takes them as they are"""

    @property
    def draws(self) -> int:
        return 4 * self.operations

    def __call__(self, x: Tensor, u: Floats, inputs: Images) -> Tensor:
        images = (255 * inputs.restore(x)).round().clamp(0, 255)
        for drawn in np.split(u, self.operations, axis=1) if self.operations else ():
            chosen = (drawn[:, 0] * len(OPERATIONS)).astype(np.int64)
            order = np.argsort(chosen, kind="stable")  # images of one operation stand together, and then go back to their places
            counts = np.bincount(chosen, minlength=len(OPERATIONS)).tolist()
            groups = torch.split(images[torch.from_numpy(order).to(x.device)], counts)
            numbers = np.split(drawn[order, 1:], np.cumsum(counts)[:-1])
            done = [self.apply(number, *of_it) for number, of_it in enumerate(zip(groups, numbers, strict=True)) if counts[number]]
            images = torch.cat(done)[torch.from_numpy(np.argsort(order)).to(x.device)]
        return inputs.normalise(images)

    def apply(self, number: int, x: Tensor, u: Floats) -> Tensor:
        """One operation on images of whole numbers from 0 to 255."""
        operation, low, high, in_pixels = OPERATIONS[number]
        value = low + (high - low) * self.magnitude / 30
        if in_pixels and self.scaled:
            value *= x.shape[-1] / MADE_FOR
        return operation(x, value, u)


def autocontrast(x: Tensor, value: float, u: Floats) -> Tensor:
    low, high = x.amin(dim=(-2, -1), keepdim=True), x.amax(dim=(-2, -1), keepdim=True)
    stretched = ((x - low) * (255 / (high - low).clamp(min=1))).floor()
    return torch.where(high > low, stretched, x)


def equalise(x: Tensor, value: float, u: Floats) -> Tensor:
    """Every channel's histogram made flat."""
    n, channels = x.shape[:2]
    flat = x.reshape(n, channels, -1).long()
    counts = torch.zeros(n, channels, 256, dtype=torch.int64, device=x.device).scatter_add_(2, flat, torch.ones_like(flat))
    brightest = counts.gather(2, flat.amax(dim=2, keepdim=True))
    step = (flat.shape[2] - brightest) // 255
    below = counts.cumsum(dim=2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where((step > 0)[..., None], table.gather(2, flat).view_as(x).to(x.dtype), x)


def invert(x: Tensor, value: float, u: Floats) -> Tensor:
    return 255 - x


def posterise(x: Tensor, value: float, u: Floats) -> Tensor:
    """The `value` highest bits of each number, at least one."""
    unit = float(1 << (8 - max(1, int(value))))
    return (x / unit).floor() * unit


def solarise(x: Tensor, value: float, u: Floats) -> Tensor:
    return torch.where(x < value, x, 255 - x)


def add_and_solarise(x: Tensor, value: float, u: Floats) -> Tensor:
    return solarise((x + value).clamp(0, 255).floor(), 128, u)


def blend(degenerate: Tensor, x: Tensor, value: float) -> Tensor:
    """From the degenerate image (0) through the image itself (1) and beyond, without fractions."""
    return (degenerate + value * (x - degenerate)).clamp(0, 255).floor()


def grey_of(x: Tensor) -> Tensor:
    """[n, 1, height, width] luminance in whole numbers."""
    if x.shape[1] != 3:
        return x
    return ((19595 * x[:, 0:1] + 38470 * x[:, 1:2] + 7471 * x[:, 2:3] + 32768) / 65536).floor()


def colour(x: Tensor, value: float, u: Floats) -> Tensor:
    return blend(grey_of(x).expand_as(x), x, value)


def contrast(x: Tensor, value: float, u: Floats) -> Tensor:
    mean = (grey_of(x).mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor()
    return blend(mean.expand_as(x), x, value)


def brightness(x: Tensor, value: float, u: Floats) -> Tensor:
    return blend(torch.zeros_like(x), x, value)


def sharpness(x: Tensor, value: float, u: Floats) -> Tensor:
    """Against a copy whose inner pixels are smoothed."""
    channels = x.shape[1]
    if min(x.shape[-2:]) < 3:
        return x
    kernel = torch.ones(3, 3, device=x.device, dtype=x.dtype)
    kernel[1, 1] = 5
    smooth = x.clone()
    smooth[..., 1:-1, 1:-1] = (F.conv2d(x, (kernel / 13).expand(channels, 1, 3, 3), groups=channels) + 0.5).floor()
    return blend(smooth, x, value)


def rotate(x: Tensor, value: float, u: Floats) -> Tensor:
    """By `value` degrees either way, about the centre."""
    height, width = x.shape[-2:]
    angle = -np.radians(value) * sign(u)
    cos, sin = np.cos(angle), np.sin(angle)
    from_left = width / 2 - cos * width / 2 - sin * height / 2
    from_top = height / 2 + sin * width / 2 - cos * height / 2
    return moved(x, (cos, sin, from_left), (-sin, cos, from_top))


def shear_x(x: Tensor, value: float, u: Floats) -> Tensor:
    one, zero = np.ones(len(x)), np.zeros(len(x))
    return moved(x, (one, value * sign(u), zero), (zero, one, zero))


def shear_y(x: Tensor, value: float, u: Floats) -> Tensor:
    one, zero = np.ones(len(x)), np.zeros(len(x))
    return moved(x, (one, zero, zero), (value * sign(u), one, zero))


def shift_x(x: Tensor, value: float, u: Floats) -> Tensor:
    one, zero = np.ones(len(x)), np.zeros(len(x))
    return moved(x, (one, zero, value * sign(u)), (zero, one, zero))


def shift_y(x: Tensor, value: float, u: Floats) -> Tensor:
    one, zero = np.ones(len(x)), np.zeros(len(x))
    return moved(x, (one, zero, zero), (zero, one, value * sign(u)))


def sign(u: Floats) -> Floats:
    return np.where(u[:, 0] < 0.5, 1.0, -1.0)


def moved(x: Tensor, across: tuple[Floats, Floats, Floats], down: tuple[Floats, Floats, Floats]) -> Tensor:
    """Each pixel taken from where an affine map of its centre lies, black where that is outside. One map for each image."""
    n, channels, height, width = x.shape
    column, row = np.arange(width)[None, None, :] + 0.5, np.arange(height)[None, :, None] + 0.5
    columns, rows = (
        np.floor(a[:, None, None] * column + b[:, None, None] * row + c[:, None, None]).astype(np.int64)
        for a, b, c in (across, down)
    )
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    source = torch.from_numpy(np.where(inside, rows * width + columns, 0)).to(x.device).view(n, 1, -1)
    taken = x.reshape(n, channels, -1).gather(2, source.expand(-1, channels, -1)).view_as(x)
    return taken * torch.from_numpy(inside).to(x.device)[:, None]


def cut_out(x: Tensor, value: float, u: Floats) -> Tensor:
    """A grey square of `value` pixels around a random place."""
    height, width = x.shape[-2:]
    left, top = (np.floor(np.maximum(0, u[:, axis] * size - value / 2)) for axis, size in ((1, width), (2, height)))
    columns, rows = np.arange(width)[None, :], np.arange(height)[None, :]
    across = (columns >= left[:, None]) & (columns <= np.minimum(width, left + math.floor(value))[:, None])
    down = (rows >= top[:, None]) & (rows <= np.minimum(height, top + math.floor(value))[:, None])
    hidden = torch.from_numpy(down[:, None, :, None] & across[:, None, None, :]).to(x.device)
    colour_of = torch.tensor(GREY if x.shape[1] == 3 else GREY[:1], device=x.device, dtype=x.dtype).view(1, -1, 1, 1)
    return torch.where(hidden, colour_of, x)


OPERATIONS: tuple[tuple[Callable[[Tensor, float, Floats], Tensor], float, float, bool], ...] = (
    (autocontrast, 0, 1, False),
    (equalise, 0, 1, False),
    (invert, 0, 1, False),
    (rotate, 0, 30, False),
    (posterise, 0, 4, False),
    (solarise, 0, 256, False),
    (add_and_solarise, 0, 110, False),
    (colour, 0.1, 1.9, False),
    (contrast, 0.1, 1.9, False),
    (brightness, 0.1, 1.9, False),
    (sharpness, 0.1, 1.9, False),
    (shear_x, 0, 0.3, False),
    (shear_y, 0, 0.3, False),
    (cut_out, 0, 40, True),
    (shift_x, 0, 100, True),
    (shift_y, 0, 100, True),
)
"""operation, its weakest and strongest value, and whether that is a number of pixels"""
