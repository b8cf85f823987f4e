"""Views of images that make domains: rotations, pixel permutations and corruptions, computed when an image is
asked for.

A view is a pure function of an image's bytes and its number: the same image looks the same whenever it is
asked for, whatever else is asked for with it. Numbers of test images begin at `TEST_IMAGES`. Each view is a
dataclass, whose text names it.

Corruptions and their strengths are those of CIFAR-10-C for images of 32 × 32 pixels: Hendrycks and
Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019.

Differences from its program: draws belong to images; `glass` exchanges pixels, where the program copies one
over the other; `zoom` enlarges about the exact centre; pixels without colour keep none in `saturate`. Frost,
snow and motion blur need pictures or programs of others.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

from gracecl import rng
from gracecl.core import Ints

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

TEST_IMAGES = 1 << 40
"""added to the numbers of test images, so that they never are those of training images"""


class DomainView(Protocol):
    """What a domain makes of images `[n, channels, height, width]` with these numbers."""

    def __call__(self, images: Bytes, numbers: Ints) -> Bytes: ...


@dataclass(frozen=True)
class Plain:
    """The images as they are."""

    def __call__(self, images: Bytes, numbers: Ints) -> Bytes:
        return images


@dataclass(frozen=True)
class Rotated:
    """Turned about the centre, against the clock; what comes from outside is black."""

    degrees: float

    def __call__(self, images: Bytes, numbers: Ints) -> Bytes:
        if self.degrees % 360 == 0:
            return images
        turned = ndimage.rotate(images.astype(np.float64), self.degrees, axes=(2, 3), reshape=False, order=1, mode="constant")
        return as_bytes(turned / 255)


@dataclass(frozen=True)
class Permuted:
    """The pixels of all images in one random order, all channels alike."""

    seed: int
    domain: int

    def order(self, pixels: int) -> Ints:
        return rng.generator(self.seed, "pixel permutation", self.domain).permutation(pixels)

    def __call__(self, images: Bytes, numbers: Ints) -> Bytes:
        flat = images.reshape(*images.shape[:2], -1)
        permuted: Bytes = flat[:, :, self.order(flat.shape[2])].reshape(images.shape)
        return permuted


@dataclass(frozen=True)
class Corrupted:
    """Noise, blur, weather or coding, of a severity from 1 to 5; 0 leaves images as they are."""

    name: str
    severity: int
    seed: int

    @cached_property
    def strength(self) -> Any:
        return CORRUPTIONS[self.name][1][self.severity - 1]

    def __call__(self, images: Bytes, numbers: Ints) -> Bytes:
        if self.severity == 0:
            return images
        corrupt = CORRUPTIONS[self.name][0]
        made = np.empty_like(images)
        for row, number in enumerate(numbers.tolist()):
            generator = rng.generator(self.seed, self.name, number)
            made[row] = as_bytes(corrupt(images[row] / 255, self.strength, generator))
        return made


def as_bytes(image: Floats) -> Bytes:
    """Values in [0, 1] as bytes; those outside are cut off."""
    return np.rint(255 * np.clip(image, 0, 1)).astype(np.uint8)


# Corruptions of one image, [channels, height, width] in [0, 1].


def gaussian_noise(x: Floats, deviation: float, generator: np.random.Generator) -> Floats:
    return x + deviation * generator.standard_normal(x.shape)


def shot_noise(x: Floats, scale: float, generator: np.random.Generator) -> Floats:
    return generator.poisson(x * scale) / scale


def impulse_noise(x: Floats, share: float, generator: np.random.Generator) -> Floats:
    chance = generator.random(x.shape)
    return np.where(chance < share / 2, 0, np.where(chance < share, 1, x))


def speckle_noise(x: Floats, deviation: float, generator: np.random.Generator) -> Floats:
    return x + x * deviation * generator.standard_normal(x.shape)


def gaussian_blur(x: Floats, deviation: float, generator: np.random.Generator) -> Floats:
    return blurred(x, deviation)


def defocus_blur(x: Floats, disk: tuple[float, float], generator: np.random.Generator) -> Floats:
    radius, alias = disk
    away = np.arange(-8, 9)
    kernel = ((away[:, None] ** 2 + away[None, :] ** 2) <= radius**2).astype(np.float64)
    soft = np.exp(-(np.arange(-1, 2) ** 2) / (2 * alias**2))
    kernel = ndimage.correlate(kernel / kernel.sum(), np.outer(soft, soft) / soft.sum() ** 2, mode="constant")
    return np.stack([ndimage.correlate(channel, kernel, mode="mirror") for channel in x])


def glass_blur(x: Floats, glass: tuple[float, int, int], generator: np.random.Generator) -> Floats:
    deviation, reach, rounds = glass
    x = blurred(x, deviation)
    height, width = x.shape[1:]
    for _ in range(rounds):
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                down, right = generator.integers(-reach, reach, 2)
                there = x[:, row + down, column + right].copy()
                x[:, row + down, column + right] = x[:, row, column]
                x[:, row, column] = there
    return blurred(x, deviation)


def zoom_blur(x: Floats, largest: float, generator: np.random.Generator) -> Floats:
    factors = 1 + 0.01 * np.arange(round(100 * (largest - 1)) + 1)
    return (x + sum(enlarged(x, factor) for factor in factors)) / (1 + len(factors))


def fog(x: Floats, thick: tuple[float, float], generator: np.random.Generator) -> Floats:
    amount, decay = thick
    brightest = float(x.max())
    height, width = x.shape[1:]
    return (x + amount * plasma(max(height, width), decay, generator)[:height, :width]) * brightest / (brightest + amount)


def brightness(x: Floats, more: float, generator: np.random.Generator) -> Floats:
    value: Floats = x.max(axis=0)
    lighter: Floats = np.clip(value + more, 0, 1)
    return np.where(value > 0, x * lighter / np.maximum(value, 1e-12), lighter)


def contrast(x: Floats, factor: float, generator: np.random.Generator) -> Floats:
    mean: Floats = x.mean(axis=(1, 2), keepdims=True)
    return (x - mean) * factor + mean


def saturate(x: Floats, change: tuple[float, float], generator: np.random.Generator) -> Floats:
    factor, more = change
    value = x.max(axis=0)
    saturation = (value - x.min(axis=0)) / np.maximum(value, 1e-12)
    ratio = np.clip(factor * saturation + more, 0, 1) / np.maximum(saturation, 1e-12)
    return np.where(saturation > 0, value - (value - x) * ratio, x)


def jpeg(x: Floats, quality: int, generator: np.random.Generator) -> Floats:
    file = io.BytesIO()
    as_picture(x).save(file, "JPEG", quality=quality)
    return from_picture(Image.open(file))


def pixelate(x: Floats, share: float, generator: np.random.Generator) -> Floats:
    height, width = x.shape[1:]
    small = (max(1, int(width * share)), max(1, int(height * share)))
    picture = as_picture(x).resize(small, Image.Resampling.BOX).resize((width, height), Image.Resampling.BOX)
    return from_picture(picture)


def blurred(x: Floats, deviation: float) -> Floats:
    soft: Floats = ndimage.gaussian_filter(x, (0, deviation, deviation), mode="nearest")
    return soft


def enlarged(x: Floats, factor: float) -> Floats:
    """Enlarged about the centre, in its own extent."""
    centre = (np.array(x.shape[1:]) - 1) / 2
    offset = centre - centre / factor
    return np.stack([ndimage.affine_transform(channel, [1 / factor] * 2, offset, order=1, mode="nearest") for channel in x])


def plasma(side: int, decay: float, generator: np.random.Generator) -> Floats:
    """Clouds in [0, 1] by diamonds and squares: midpoints are means of their corners and a draw that shrinks by `decay`."""
    size = 1 << (side - 1).bit_length()
    field, step, wobble = np.zeros((size, size)), size, 100.0
    while step >= 2:
        half = step // 2
        corners = field[::step, ::step]
        across = corners + np.roll(corners, -1, axis=0)
        total = across + np.roll(across, -1, axis=1)
        field[half::step, half::step] = total / 4 + wobble * generator.uniform(-1, 1, total.shape)
        middles = field[half::step, half::step]
        beside = middles + np.roll(middles, 1, axis=0) + corners + np.roll(corners, -1, axis=1)
        below = middles + np.roll(middles, 1, axis=1) + corners + np.roll(corners, -1, axis=0)
        field[::step, half::step] = beside / 4 + wobble * generator.uniform(-1, 1, beside.shape)
        field[half::step, ::step] = below / 4 + wobble * generator.uniform(-1, 1, below.shape)
        step, wobble = half, wobble / decay
    field -= field.min()
    return field / max(float(field.max()), 1e-12)


def as_picture(x: Floats) -> Image.Image:
    pixels = as_bytes(x)
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def from_picture(picture: Image.Image) -> Floats:
    pixels = np.asarray(picture) / 255
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


CORRUPTIONS: dict[str, tuple[Callable[[Floats, Any, np.random.Generator], Floats], tuple[Any, ...]]] = {
    "gaussian_noise": (gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "speckle_noise": (speckle_noise, (0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian_blur": (gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1)),
    "defocus_blur": (defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": (glass_blur, ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))),
    "zoom_blur": (zoom_blur, (1.05, 1.10, 1.15, 1.20, 1.25)),
    "fog": (fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "saturate": (saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
    "jpeg": (jpeg, (80, 65, 58, 50, 40)),
    "pixelate": (pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
}
"""a function and its strength at severities 1 to 5"""
