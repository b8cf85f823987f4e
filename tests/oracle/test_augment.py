"""Augmentation against per-pixel loops, and its random draws against the distributions that the methods specify."""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from gracecl import rng
from gracecl.errors import UserError
from gracecl.images import augment
from gracecl.images.augment import AUGMENTATIONS, ColourJitter, Flip, Grey, Mirror, PadCrop, ResizedCrop
from gracecl.inputs import Images

PIXELS = Images((3, 1, 1), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
NO_CHANGE = Images((3, 1, 1), (0.0,) * 3, (1.0,) * 3)
"""colours in [0, 1] as they are"""


def images(n: int, height: int = 6, width: int = 7, channels: int = 3, seed: int = 0) -> Tensor:
    return torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(seed))


def numbers(n: int, view: augment.View | augment.Operation, seed: int = 0) -> np.ndarray:
    needed = augment.draws(view) if isinstance(view, tuple) else view.draws
    return np.random.default_rng(seed).random((n, needed))


# Bytes to numbers.


def test_normalisation_is_the_formula() -> None:
    x = torch.tensor([0, 1, 127, 255], dtype=torch.uint8).view(1, 1, 2, 2).expand(1, 3, 2, 2)
    got = PIXELS.normalise(x)
    for c, (mean, std) in enumerate(zip((0.5, 0.4, 0.3), (0.2, 0.25, 0.3), strict=True)):
        expected = [(value / 255 - mean) / std for value in (0, 1, 127, 255)]
        assert got[0, c].flatten().tolist() == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(PIXELS.restore(got), x / 255, rtol=0, atol=1e-6)
    assert torch.equal(PIXELS.black.expand(1, 3, 1, 1), PIXELS.normalise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)))


# The resized crop.


def reflect(position: float, size: int) -> float:
    """A position outside [-1/2, size - 1/2] mirrored at the outer edges of the border pixels, then held to pixel centres."""
    while not -0.5 <= position <= size - 0.5:
        position = -1 - position if position < -0.5 else 2 * size - 1 - position
    return min(max(position, 0), size - 1)


def crop_by_loops(image: Tensor, w: float, h: float, x_offset: float, y_offset: float) -> Tensor:
    """Output pixel (i, j) samples the window at its own place in it, bilinearly. Offsets are in units of half the image."""
    channels, height, width = image.shape
    left = width / 2 + x_offset * width / 2 - w / 2
    top = height / 2 + y_offset * height / 2 - h / 2
    out = torch.empty_like(image)
    for i in range(height):
        for j in range(width):
            y = reflect(top + (i + 0.5) * h / height - 0.5, height)
            x = reflect(left + (j + 0.5) * w / width - 0.5, width)
            y0, x0 = math.floor(y), math.floor(x)
            y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
            for c in range(channels):
                above = (1 - (x - x0)) * image[c, y0, x0] + (x - x0) * image[c, y0, x1]
                below = (1 - (x - x0)) * image[c, y1, x0] + (x - x0) * image[c, y1, x1]
                out[c, i, j] = (1 - (y - y0)) * above + (y - y0) * below
    return out


@pytest.mark.parametrize(
    ("w", "h", "across", "down"),
    [(4, 3, 0, 0), (4, 3, -3, 3), (4, 3, 3, -2), (7, 2, 0, -4), (1, 1, 6, 5), (3, 6, -1, 0), (7, 6, 0, 0), (4, 3, 7, -6)],
)
def test_crop_is_bilinear_with_reflection(w: int, h: int, across: int, down: int) -> None:
    """Windows in the middle, at the borders, of a single pixel and reaching outside, against a loop over the pixels."""
    [image] = images(1, channels=2)
    got = augment.crop(image[None], *(np.array([float(v)]) for v in (w, h, across / 7, down / 6)))
    torch.testing.assert_close(got[0], crop_by_loops(image, w, h, across / 7, down / 6), rtol=0, atol=2e-6)


def test_a_window_of_the_full_size_is_the_image() -> None:
    x = images(3)
    full = augment.crop(x, np.full(3, 7.0), np.full(3, 6.0), np.zeros(3), np.zeros(3))
    torch.testing.assert_close(full, x, rtol=0, atol=1e-6)
    whole = ResizedCrop(1.0, 1.0)
    u = numbers(3, whole)
    u[:, :20] = 0.0  # aspect 3/4 at full area: no candidate fits, so the whole image is used
    torch.testing.assert_close(whole(x, u, PIXELS), x, rtol=0, atol=1e-6)


def seen_windows(operation: ResizedCrop, u: np.ndarray, height: int, width: int) -> tuple[np.ndarray, ...]:
    """w, h, left and top edge of the windows that the operation really used, read from what it does to an image of coordinates."""
    across = torch.arange(width, dtype=torch.float64).expand(height, width)
    down = torch.arange(height, dtype=torch.float64)[:, None].expand(height, width)
    out = operation(torch.stack([across, down]).expand(len(u), 2, height, width), u, PIXELS).numpy()
    # Far from the border nothing is reflected, so the coordinate grows by w / width per pixel.
    x = out[:, 0, height // 2, width // 2 - 1 : width // 2 + 1]
    y = out[:, 1, height // 2 - 1 : height // 2 + 1, width // 2]
    w, h = (x[:, 1] - x[:, 0]) * width, (y[:, 1] - y[:, 0]) * height
    return w, h, x.mean(axis=1) + 0.5 - w / 2, y.mean(axis=1) + 0.5 - h / 2


def windows_by_loop(u: np.ndarray, low: float, high: float, height: int, width: int) -> list[tuple[float, ...]]:
    """grace.md 1.3, image by image: the first of ten candidates that fits, then a whole number for each offset."""
    result = []
    for row in u:
        w, h = width, height
        for i in range(10):
            area = (low + (high - low) * row[i]) * width * height
            ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * row[10 + i])
            a, b = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 1 <= a <= width and 1 <= b <= height:
                w, h = a, b
                break
        kx = math.floor(row[20] * (2 * (width - w) + 1)) - (width - w)
        ky = math.floor(row[21] * (2 * (height - h) + 1)) - (height - h)
        # An offset of k / width in [-1, 1] coordinates moves the centre by k / 2 pixels.
        result.append((w, h, (width + kx - w) / 2, (height + ky - h) / 2))
    return result


@pytest.mark.parametrize(("height", "width"), [(32, 32), (28, 32), (16, 10)])
@pytest.mark.parametrize("low", [0.3, 0.9])
def test_windows_are_the_first_candidates_that_fit(height: int, width: int, low: float) -> None:
    operation = ResizedCrop(low, 1.0)
    u = numbers(300, operation)
    got = np.stack(seen_windows(operation, u, height, width), axis=1)
    np.testing.assert_allclose(got, windows_by_loop(u, low, 1.0, height, width), atol=1e-6)


def test_windows_have_the_specified_area_aspect_and_place() -> None:
    """Tau's own crop: always inside the image, area and aspect within their bounds up to rounding to pixels."""
    operation, size = ResizedCrop(0.3, 1.0), 32
    w, h, left, top = seen_windows(operation, numbers(2000, operation), size, size)
    for length, start in ((w, left), (h, top)):
        np.testing.assert_allclose(length, length.round(), atol=1e-6)
        assert length.min() >= 1
        assert start.min() >= -1e-6
        assert (start + length).max() <= size + 1e-6
    assert ((w + 0.5) * (h + 0.5)).min() >= 0.3 * size**2 - 1e-6
    assert ((w + 0.5) / (h - 0.5)).min() >= 3 / 4
    assert ((w - 0.5) / (h + 0.5)).max() <= 4 / 3
    # Both extremes occur, so the whole range is in use.
    assert (w * h).min() < 0.35 * size**2
    assert (w * h).max() > 0.95 * size**2
    assert (w / h).min() < 0.8
    assert (w / h).max() > 1.25


def test_area_is_uniform_and_aspect_log_uniform_where_nothing_is_rejected() -> None:
    """With areas up to one half every candidate fits; rounding to whole pixels is less than the test can see."""
    operation, size = ResizedCrop(0.1, 0.5), 96
    w, h, _, _ = seen_windows(operation, numbers(1000, operation, seed=1), size, size)
    area = stats.uniform(0.1, 0.4).cdf
    assert stats.kstest(w * h / size**2, area).pvalue > 1e-3
    assert stats.kstest(np.log(w / h), stats.uniform(math.log(3 / 4), math.log(16 / 9)).cdf).pvalue > 1e-3
    assert abs(stats.spearmanr(w * h, w / h).statistic) < 0.1
    # The test would notice if the side were uniform instead of the area.
    side = np.random.default_rng(2).uniform(math.sqrt(0.1), math.sqrt(0.5), 1000)
    assert stats.kstest(side**2, area).pvalue < 1e-3


def test_offsets_are_uniform_whole_numbers() -> None:
    """k in {-room, …, room}, all equally often, the two ends included."""
    window, size = np.full(6000, 28.0), 32
    offset = augment.window_offset(np.random.default_rng(3).random(6000), window, size) * size
    np.testing.assert_allclose(offset, offset.round(), atol=1e-9)
    counts = np.bincount(offset.round().astype(int) + 4, minlength=9)
    assert len(counts) == 9
    assert stats.chisquare(counts).pvalue > 1e-3
    assert augment.window_offset(np.array([0.0, 1 - 2**-53]), np.array([32.0, 32.0]), 32).tolist() == [0, 0]
    assert augment.window_offset(np.array([0.0, 1 - 2**-53]), np.array([28.0, 28.0]), 32).tolist() == [-4 / 32, 4 / 32]


# Grey, mirror, flip, pad and crop.


def test_grey_is_the_weighted_sum_in_every_channel() -> None:
    x = images(2)
    got = Grey(1.0)(x, np.zeros((2, 1)), PIXELS)
    for n in range(2):
        for i in range(6):
            for j in range(7):
                red, green, blue = x[n, :, i, j].tolist()
                expected = 0.299 * red + 0.587 * green + 0.114 * blue
                assert got[n, :, i, j].tolist() == pytest.approx([expected] * 3, abs=1e-6)


def test_grey_leaves_one_channel_alone() -> None:
    x = images(4, channels=1)
    assert torch.equal(Grey(1.0)(x, np.zeros((4, 1)), PIXELS), x)


def test_mirror_exchanges_left_and_right() -> None:
    x = images(3)
    got = Mirror()(x, np.zeros((3, 0)), PIXELS)
    for column in range(7):
        assert torch.equal(got[..., column], x[..., 6 - column])


@pytest.mark.parametrize(("operation", "p"), [(Flip(0.5), 0.5), (Flip(0.1), 0.1), (Grey(0.25), 0.25), (ColourJitter(p=0.8), 0.8)])
def test_an_operation_touches_its_share_of_the_images(operation: augment.Operation, p: float) -> None:
    """Exactly those whose number is below p, the others not by a bit; over keyed draws that is a fair coin."""
    n = 3000
    u = rng.uniform(rng.key(0, "augment", 1), np.arange(n), operation.draws)
    x = images(1, 2, 3).expand(n, 3, 2, 3)
    changed = (operation(x, u, PIXELS) != x).flatten(1).any(dim=1).numpy()
    np.testing.assert_array_equal(changed, u[:, 0] < p)
    assert stats.binomtest(int(changed.sum()), n, p).pvalue > 1e-3


def test_flip_mirrors_what_it_touches() -> None:
    x = images(2)
    got = Flip(0.5)(x, np.array([[0.2], [0.7]]), PIXELS)
    assert torch.equal(got[0], x[0].flip(-1))
    assert torch.equal(got[1], x[1])


def test_pad_crop_is_an_exact_window_with_a_black_border() -> None:
    """Against a loop: the image moved by whole pixels, black where it was not."""
    operation = PadCrop(2)
    x, u = images(40), numbers(40, operation)
    got = operation(x, u, PIXELS)
    for n in range(40):
        down, across = (math.floor(value * 5) - 2 for value in u[n])
        for i in range(6):
            for j in range(7):
                inside = 0 <= i + down < 6 and 0 <= j + across < 7
                expected = x[n, :, i + down, j + across] if inside else PIXELS.black[0, :, 0, 0]
                assert torch.equal(got[n, :, i, j], expected)


def test_pad_crop_reaches_every_offset_equally() -> None:
    u = numbers(4000, PadCrop(1))
    x = torch.arange(9.0).view(1, 1, 3, 3).expand(4000, 1, 3, 3)
    middle = PadCrop(1)(x, u, Images((1, 1, 1), (0.0,), (1.0,)))[:, 0, 1, 1].numpy().astype(int)
    assert stats.chisquare(np.bincount(middle, minlength=9)).pvalue > 1e-3


# Colour jitter.


def jitter_by_loops(image: np.ndarray, brightness: float, contrast: float, saturation: float, hue: float) -> np.ndarray:
    """Brightness, contrast, saturation, hue, each clamped to [0, 1], pixel by pixel and with the standard library's colours."""

    def grey(pixel: np.ndarray) -> float:
        return 0.299 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2]

    places = list(np.ndindex(*image.shape[1:]))
    out = np.clip(image * brightness, 0, 1)
    mean = sum(grey(out[:, i, j]) for i, j in places) / len(places)
    out = np.clip(contrast * out + (1 - contrast) * mean, 0, 1)
    for i, j in places:
        pixel = out[:, i, j]
        pixel = np.clip(saturation * pixel + (1 - saturation) * grey(pixel), 0, 1)
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        out[:, i, j] = colorsys.hsv_to_rgb((h + hue) % 1, s, v)
    return out


def test_colour_jitter_is_the_loop() -> None:
    operation = ColourJitter(0.4, 0.3, 0.2, 0.1, p=1.0)
    x, u = images(12, 4, 3).double(), numbers(12, operation)
    got = operation(x, u, NO_CHANGE).numpy()
    for n in range(12):
        b, c, s, h = 2 * u[n, 1:] - 1
        expected = jitter_by_loops(x[n].numpy(), 1 + 0.4 * b, 1 + 0.3 * c, 1 + 0.2 * s, 0.1 * h)
        np.testing.assert_allclose(got[n], expected, atol=1e-6)


def test_colour_jitter_acts_on_colours_not_on_normalised_numbers() -> None:
    """The same colours under another normalisation are jittered to the same colours."""
    operation = ColourJitter(p=1.0)
    colours, u = images(5), numbers(5, operation)
    normalised = (colours - PIXELS.mean) / PIXELS.std
    got = PIXELS.restore(operation(normalised, u, PIXELS))
    torch.testing.assert_close(got, operation(colours, u, NO_CHANGE), rtol=0, atol=1e-5)


def test_colour_jitter_in_the_middle_of_its_ranges_changes_nothing() -> None:
    x = images(4)
    u = np.full((4, 5), 0.5)
    u[:, 0] = 0
    torch.testing.assert_close(ColourJitter(p=1.0)(x, u, NO_CHANGE), x, rtol=0, atol=1e-6)
    torch.testing.assert_close(ColourJitter(0, 0, 0, 0, p=1.0)(x, numbers(4, ColourJitter()), NO_CHANGE), x, rtol=0, atol=1e-6)


def test_colour_jitter_of_one_channel_keeps_one_channel() -> None:
    one = Images((1, 1, 1), (0.5,), (0.25,))
    x, operation = images(3, channels=1), ColourJitter(p=1.0)
    got = operation((x - 0.5) / 0.25, numbers(3, operation), one)
    assert got.shape == x.shape
    assert torch.isfinite(got).all()


def test_a_third_of_a_turn_takes_red_to_green_to_blue() -> None:
    red, green, blue = (torch.tensor(c).view(1, 3, 1, 1) for c in ([1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]))
    third = torch.full((1, 1, 1), 1 / 3)
    for before, after in ((red, green), (green, blue), (blue, red)):
        torch.testing.assert_close(augment.shift_hue(before, third), after, rtol=0, atol=1e-5)
        torch.testing.assert_close(augment.shift_hue(after, -third), before, rtol=0, atol=1e-5)


def test_hue_shift_agrees_with_colorsys() -> None:
    """Random colours, ties between channels, greys, black and white, turned forwards and backwards."""
    colours = np.random.default_rng(0).random((60, 3))
    colours[:20] = np.random.default_rng(1).integers(0, 3, (20, 3)) / 2
    turn = np.random.default_rng(2).uniform(-0.5, 0.5, 60)
    got = augment.shift_hue(torch.from_numpy(colours).view(60, 3, 1, 1), torch.from_numpy(turn).view(60, 1, 1)).view(60, 3)
    for colour, by, result in zip(colours, turn, got.numpy(), strict=True):
        h, s, v = colorsys.rgb_to_hsv(*colour)
        np.testing.assert_allclose(result, colorsys.hsv_to_rgb((h + by) % 1, s, v), atol=1e-9)


# Views.


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_image_looks_the_same_in_any_company(name: str) -> None:
    """Draws are keyed by image, so a subset in another order gives the same pixels, and so does doing it again."""
    view = AUGMENTATIONS[name]
    x, ids, stem = PIXELS.normalise((images(12, 8, 8) * 255).to(torch.uint8)), np.arange(50, 62), rng.key(0, "augment", 7)
    every = augment.apply(view, x, rng.uniform(stem, ids, augment.draws(view)), PIXELS)
    again = augment.apply(view, x, rng.uniform(stem, ids, augment.draws(view)), PIXELS)
    assert torch.equal(every, again)
    for some in ([3], [11, 0], [5, 4, 3, 9], [7, 1, 2, 10, 6, 8, 0]):
        part = augment.apply(view, x[some], rng.uniform(stem, ids[some], augment.draws(view)), PIXELS)
        torch.testing.assert_close(part, every[some], rtol=0, atol=1e-6)
    if view:
        other = augment.apply(view, x, rng.uniform(rng.key(0, "augment", 8), ids, augment.draws(view)), PIXELS)
        assert not torch.equal(every, other)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_views_leave_their_input_alone(name: str) -> None:
    view, x = AUGMENTATIONS[name], images(10, 8, 8)
    before = x.clone()
    augment.apply(view, x, numbers(10, view), PIXELS)
    assert torch.equal(x, before)


def test_a_view_applies_its_operations_in_order_each_with_its_own_numbers() -> None:
    view = (Flip(0.5), Mirror(), Grey(0.25), PadCrop(1))
    x, u = images(30), numbers(30, view)
    assert augment.draws(view) == 1 + 0 + 1 + 2
    step = Flip(0.5)(x, u[:, :1], PIXELS)
    step = Mirror()(step, u[:, :0], PIXELS)
    step = Grey(0.25)(step, u[:, 1:2], PIXELS)
    assert torch.equal(augment.apply(view, x, u, PIXELS), PadCrop(1)(step, u[:, 2:4], PIXELS))


def test_the_named_views_are_the_specified_ones() -> None:
    """grace.md 1.3 and bounds.md 5."""
    assert AUGMENTATIONS["tau"] == (Grey(0.25), ResizedCrop(0.3, 1.0))
    assert AUGMENTATIONS["simclr"] == (Flip(0.5), *AUGMENTATIONS["tau"])
    assert AUGMENTATIONS["partial"] == (PadCrop(4), Flip(0.5))
    assert AUGMENTATIONS["full"] == (ResizedCrop(0.2, 1.0), Flip(0.5), ColourJitter(0.4, 0.4, 0.4, 0.1, 0.8), Grey(0.2))
    assert AUGMENTATIONS["mild"] == (Grey(0.2), ResizedCrop(0.6, 1.0))
    assert AUGMENTATIONS["crop"] == (ResizedCrop(0.05, 1.0), Flip(0.5))


@pytest.mark.parametrize("channels", [1, 3])
def test_normalisations(channels: int) -> None:
    """The data's own mean and std, or 2 x - 1 ("half"), or x in [0, 1] ("none"), for any number of channels."""
    mean, std = (0.3,) * channels, (0.2,) * channels
    own = Images((channels, 1, 1), mean, std)
    assert augment.normalisation("data", own) is own
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, channels, 1, 1)
    for name, expected in (("half", [-1.0, -0.6, 1.0]), ("none", [0.0, 0.2, 1.0])):
        x = augment.normalisation(name, own).normalise(images)
        assert x.shape == images.shape
        torch.testing.assert_close(x[:, -1, 0, 0], torch.tensor(expected))


def test_the_normalisation_of_imagenet_is_for_colours_and_grey_takes_their_mean() -> None:
    usual = augment.normalisation("imagenet", Images((3, 4, 4)))
    assert usual.statistics == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    ((mean,), (std,)) = augment.normalisation("imagenet", Images((1, 4, 4))).statistics
    assert (mean, std) == pytest.approx((0.449, 0.226), abs=1e-9)
    with pytest.raises(UserError, match="3 channels, not 4"):
        augment.normalisation("imagenet", Images((4, 4, 4)))


def test_an_unknown_augmentation_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'simclr'"):
        augment.augmentation("simcler")


# Mixes.


def test_mix_is_a_share_of_each_image() -> None:
    x = images(5)
    first, second, share = np.array([0, 4, 2]), np.array([1, 4, 0]), np.array([0.25, 0.7, 1.0])
    mixed = augment.mix(x, first, second, share)
    for row, (i, j, own) in enumerate(zip(first, second, share, strict=True)):
        torch.testing.assert_close(mixed[row], float(own) * x[i] + (1 - float(own)) * x[j])
    assert torch.equal(mixed[2], x[2])
    assert augment.mix(x, first[:0], second[:0], share[:0]).shape == (0, *x.shape[1:])


@pytest.mark.parametrize("labels", [[0, 1, 2, 1, 0], [3, 3, 3], [5], []])
def test_unlike_pairs_are_those_of_permutations(labels: list[int]) -> None:
    y, generator = np.array(labels, np.int64), np.random.default_rng(3)
    expected = []
    for _ in range(4):
        order = generator.permutation(len(labels))
        expected += [(i, int(order[i])) for i in range(len(labels)) if labels[i] != labels[order[i]]]
    first, second = augment.unlike_pairs(y, 4, np.random.default_rng(3))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == expected
    assert bool(expected) == (len(set(labels)) > 1)


def test_central_shares_are_half_where_a_draw_lies_outside() -> None:
    share, drawn = augment.central_shares(2000, 20, np.random.default_rng(1)), np.random.default_rng(1).beta(20, 20, 2000)
    inside = (drawn >= 0.4) & (drawn <= 0.6)
    assert 0.1 < 1 - inside.mean() < 0.3
    assert np.array_equal(share[inside], drawn[inside])
    assert (share[~inside] == 0.5).all()


@pytest.mark.parametrize("n", [2, 3, 7, 20])
def test_pair_number_counts_unordered_pairs(n: int) -> None:
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    a, b = np.array(pairs).T
    assert augment.pair_number(a, b, n).tolist() == list(range(n * (n - 1) // 2))
    assert np.array_equal(augment.pair_number(b, a, n), augment.pair_number(a, b, n))
