"""RandAugment against the same operations of an image library, one image at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from gracecl.images.rand_augment import OPERATIONS, RandAugment
from gracecl.inputs import Images

PIXELS = Images((3, 1, 1), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
NAMES = [operation.__name__ for operation, *_ in OPERATIONS]
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 17, 17, 3)).astype(np.uint8)
IMAGES[0] = np.linspace(30, 200, 17, dtype=np.uint8)[None, :, None]
IMAGES[1] = 77

Edit = Callable[[Image.Image, float], Image.Image]


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


def add_then_solarise(image: Image.Image, value: float) -> Image.Image:
    return ImageOps.solarize(Image.fromarray(np.clip(np.array(image).astype(int) + value, 0, 255).astype(np.uint8)), 128)


EDITS: dict[str, Edit] = {
    "autocontrast": lambda image, value: ImageOps.autocontrast(image),
    "equalise": lambda image, value: ImageOps.equalize(image),
    "invert": lambda image, value: ImageOps.invert(image),
    "rotate": lambda image, value: image.rotate(value),
    "posterise": lambda image, value: ImageOps.posterize(image, max(1, int(value))),
    "solarise": lambda image, value: ImageOps.solarize(image, value),  # type: ignore[arg-type]
    "add_and_solarise": add_then_solarise,
    "colour": lambda image, value: ImageEnhance.Color(image).enhance(value),
    "contrast": lambda image, value: ImageEnhance.Contrast(image).enhance(value),
    "brightness": lambda image, value: ImageEnhance.Brightness(image).enhance(value),
    "sharpness": lambda image, value: ImageEnhance.Sharpness(image).enhance(value),
    "shear_x": lambda image, value: affine(image, 1, value, 0, 0, 1, 0),
    "shear_y": lambda image, value: affine(image, 1, 0, 0, value, 1, 0),
    "shift_x": lambda image, value: affine(image, 1, 0, value, 0, 1, 0),
    "shift_y": lambda image, value: affine(image, 1, 0, 0, 0, 1, value),
}
ON_EDGES = {"colour", "contrast", "brightness", "sharpness", "autocontrast"}
SIGNED = {"rotate", "shear_x", "shear_y", "shift_x", "shift_y"}


def augmented(name: str, magnitude: float, u: float = 0.0, scaled: bool = True, images: np.ndarray = IMAGES) -> np.ndarray:
    """Bytes after one operation of a chosen name, through the view that a step applies."""
    x = PIXELS.normalise(torch.from_numpy(images).permute(0, 3, 1, 2))
    draws = np.full((len(images), 4), u)
    draws[:, 0] = (NAMES.index(name) + 0.5) / len(NAMES)
    out = RandAugment(1, magnitude, scaled)(x, draws, PIXELS)
    return (255 * PIXELS.restore(out)).round().permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("magnitude", [0, 7, 14, 23.5, 30])
@pytest.mark.parametrize("name", EDITS)
def test_operation(name: str, magnitude: float) -> None:
    _, low, high, in_pixels = OPERATIONS[NAMES.index(name)]
    value = low + (high - low) * magnitude / 30
    if in_pixels:
        value *= 17 / 224
    for u in (0.0, 0.9) if name in SIGNED else (0.0,):
        ours = augmented(name, magnitude, u)
        for image, mine in zip(IMAGES, ours, strict=True):
            theirs = np.array(EDITS[name](Image.fromarray(image), value if u < 0.5 else -value)).astype(float)
            # The library works in single precision where a number lies on an edge: one step of brightness, or a pixel's neighbour.
            off = np.abs(mine - theirs)
            assert name == "rotate" or off.max() <= (1 if name in ON_EDGES else 0), f"{name} at {value}: off by {off.max()}"
            share = (off > 0).mean()
            assert share <= (0.06 if name in ON_EDGES else 0.02), f"{name} at {value}: {share:.3f} of the numbers differ"


def test_equalise_where_a_grey_level_has_many_pixels() -> None:
    images = np.random.default_rng(1).integers(0, 90, (2, 45, 45, 3)).astype(np.uint8)
    expected = [np.array(ImageOps.equalize(Image.fromarray(image))) for image in images]
    np.testing.assert_array_equal(augmented("equalise", 14, images=images), expected)


def test_cut_out() -> None:
    """A grey square of the right size inside the image, the rest untouched."""
    for u in (0.0, 0.37, 0.99):
        ours = augmented("cut_out", 30, u)
        size = 40 * 17 / 224
        first = max(0.0, u * 17 - size / 2) // 1
        inside = (np.arange(17) >= first) & (np.arange(17) <= min(17, first + size))
        square = inside[:, None] & inside[None, :]
        expected = np.where(square[None, :, :, None], np.array([125, 123, 114]), IMAGES)
        assert np.array_equal(ours, expected)


def test_ranges_in_pixels_can_be_absolute() -> None:
    assert augmented("shift_x", 14, scaled=False).max() == 0  # 47 pixels to the left of 17
    assert augmented("shift_x", 14).max() > 0


def test_each_image_has_its_own_operations_and_none_depends_on_the_others() -> None:
    x = PIXELS.normalise(torch.from_numpy(np.repeat(IMAGES[2:3], 64, axis=0)).permute(0, 3, 1, 2))
    u = np.random.default_rng(1).random((64, 12))
    view = RandAugment(3, 14)
    assert view.draws == 12
    together = view(x, u, PIXELS)
    singly = torch.cat([view(x[i : i + 1], u[i : i + 1], PIXELS) for i in range(64)])
    torch.testing.assert_close(together, singly, rtol=0, atol=1e-5)
    assert len({tuple(image.flatten().tolist()) for image in together}) > 40


def test_operations_are_drawn_uniformly() -> None:
    drawn: list[int] = []

    class Noting(RandAugment):
        def apply(self, number: int, x: torch.Tensor, u: np.ndarray) -> torch.Tensor:
            drawn.extend([number] * len(x))
            return x

    x = torch.zeros(3200, 3, 2, 2)
    Noting(1, 14)(x, np.random.default_rng(2).random((3200, 4)), PIXELS)
    counts = np.bincount(drawn, minlength=16)
    assert ((counts - 200.0) ** 2 / 200).sum() < 37.7  # p = 0.001 at 15 degrees of freedom


def test_no_operation_is_the_image_itself_and_one_channel_is_enough() -> None:
    grey = Images((1, 1, 1), (0.5,), (0.25,))
    x = grey.normalise(torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8))
    torch.testing.assert_close(RandAugment(0)(x, np.empty((40, 0)), grey), x)
    out = RandAugment(2)(x, np.random.default_rng(3).random((40, 8)), grey)
    assert out.shape == x.shape
    assert out.isfinite().all()
