"""Domains, views and times: each against a literal loop, worked sizes and what must not change."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gracecl
from gracecl import rng, streams
from gracecl.data import Data, from_arrays, from_domains
from gracecl.errors import UserError
from gracecl.images.domains import CORRUPTIONS, TEST_IMAGES, Corrupted, Permuted, Rotated, enlarged, plasma
from gracecl.streams import Stream
from gracecl.streams.domain import domain
from gracecl.streams.iid import shuffled
from gracecl.streams.timed import timed
from gracecl.testing import check_stream


def dataset(per_class: int, classes: int = 4, channels: int = 1, side: int = 6, tasks: int = 3) -> Data:
    generator = np.random.default_rng(per_class)
    y, test_y = generator.permutation(np.repeat(np.arange(classes), per_class)), np.repeat(np.arange(classes), 2)
    x, test_x = (torch.from_numpy(generator.integers(0, 256, (len(n), channels, side, side), dtype=np.uint8)) for n in (y, test_y))
    return from_arrays(x, y, test_x, test_y, tasks=tasks)


GREY, COLOUR = dataset(9), dataset(5, channels=3, side=32)
PICTURES = COLOUR.train_x.numpy()[:4]


# Views.


@pytest.mark.parametrize("degrees", [30.0, 90.0, 117.5])
def test_rotation_by_a_literal_loop(degrees: float) -> None:
    """Each pixel is the bilinear mean of where it came from; nothing is outside."""
    images = PICTURES[:2, :, :7, :7]
    turned = Rotated(degrees)(images, np.arange(2))
    cosine, sine, middle = math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), 3
    for row in range(7):
        for column in range(7):
            y = middle + cosine * (row - middle) + sine * (column - middle)
            x = middle - sine * (row - middle) + cosine * (column - middle)
            inside = -1e-9 <= y <= 6 + 1e-9 and -1e-9 <= x <= 6 + 1e-9
            y0, x0 = min(max(math.floor(y + 1e-9), 0), 5), min(max(math.floor(x + 1e-9), 0), 5)
            dy, dx = y - y0, x - x0
            value = np.zeros((2, 3))
            for weight, r, c in (
                ((1 - dy) * (1 - dx), y0, x0),
                ((1 - dy) * dx, y0, x0 + 1),
                (dy * (1 - dx), y0 + 1, x0),
                (dy * dx, y0 + 1, x0 + 1),
            ):
                value += weight * images[:, :, r, c] * inside
            assert np.all(np.abs(turned[:, :, row, column] - value) <= 0.5 + 1e-6)


def test_quarter_turns_and_none() -> None:
    assert np.array_equal(Rotated(90)(PICTURES, np.arange(4)), np.rot90(PICTURES, axes=(2, 3)))
    assert np.array_equal(Rotated(0)(PICTURES, np.arange(4)), PICTURES)
    assert np.array_equal(Rotated(360)(PICTURES, np.arange(4)), PICTURES)


def test_a_permutation_can_be_undone_and_moves_channels_together() -> None:
    view = Permuted(3, 1)
    seen = view(PICTURES, np.arange(4))
    order = view.order(32 * 32)
    back = np.empty_like(PICTURES).reshape(4, 3, -1)
    back[:, :, order] = seen.reshape(4, 3, -1)
    assert np.array_equal(back.reshape(PICTURES.shape), PICTURES)
    assert not np.array_equal(seen, Permuted(3, 2)(PICTURES, np.arange(4)))
    assert not np.array_equal(seen, Permuted(4, 1)(PICTURES, np.arange(4)))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_belong_to_images_and_grow_with_severity(name: str) -> None:
    """The same in a batch or alone; other images and seeds get other draws; severity 0 changes nothing; 5 changes more than 1."""
    smooth = np.stack([np.add.outer(np.arange(32), np.arange(32)) * 3 + 20 * channel for channel in range(3)]).astype(np.uint8)
    images, numbers = np.stack([smooth, PICTURES[0], smooth]), np.array([7, 8, TEST_IMAGES + 7])
    view = Corrupted(name, 3, 5)
    seen = view(images, numbers)
    assert seen.dtype == np.uint8
    assert seen.shape == images.shape
    for row in range(3):
        assert np.array_equal(view(images[row : row + 1], numbers[row : row + 1])[0], seen[row])
    random = name.endswith("noise") or name in ("glass_blur", "fog")
    assert np.array_equal(seen[0], seen[2]) != random
    assert np.array_equal(seen, Corrupted(name, 3, 6)(images, numbers)) != random
    assert np.array_equal(Corrupted(name, 0, 5)(images, numbers), images)
    assert np.array_equal(images[0], smooth), "the images stay as they were"
    mild, strong = (np.abs(Corrupted(name, s, 5)(PICTURES, np.arange(4)).astype(int) - PICTURES).mean() for s in (1, 5))
    assert strong > 0
    assert strong > mild or name in ("saturate", "defocus_blur", "glass_blur")


def corrupted(name: str, severity: int, image: np.ndarray, number: int = 0) -> tuple[np.ndarray, np.random.Generator]:
    """What the view gives, in [0, 1], and the generator it drew from."""
    return Corrupted(name, severity, 1)(image[None], np.array([number]))[0] / 255, rng.generator(1, name, number)


def test_noises_by_their_formulas() -> None:
    image = PICTURES[1]
    x = image / 255
    made, generator = corrupted("gaussian_noise", 2, image)
    assert np.allclose(made, np.clip(x + 0.06 * generator.standard_normal(x.shape), 0, 1), atol=0.5 / 255 + 1e-9)
    made, generator = corrupted("shot_noise", 3, image)
    assert np.allclose(made, np.clip(generator.poisson(x * 100) / 100, 0, 1), atol=0.5 / 255 + 1e-9)
    made, generator = corrupted("speckle_noise", 5, image)
    assert np.allclose(made, np.clip(x + 0.2 * x * generator.standard_normal(x.shape), 0, 1), atol=0.5 / 255 + 1e-9)
    grey = np.full((3, 32, 32), 128, np.uint8)
    shares = [[np.mean(corrupted("impulse_noise", 5, grey, n)[0] == value) for value in (0, 1)] for n in range(30)]
    assert np.allclose(np.mean(shares, axis=0), 0.035, atol=0.003)


def test_changes_of_light_and_colour_by_their_formulas() -> None:
    import colorsys

    image = PICTURES[2]
    x = image / 255
    made, _ = corrupted("contrast", 4, image)
    mean = x.mean(axis=(1, 2), keepdims=True)
    assert np.allclose(made, np.clip((x - mean) * 0.3 + mean, 0, 1), atol=0.5 / 255 + 1e-9)
    light, colour = corrupted("brightness", 4, image)[0], corrupted("saturate", 4, image)[0]
    for row in range(0, 32, 5):
        for column in range(0, 32, 5):
            h, s, v = colorsys.rgb_to_hsv(*x[:, row, column])
            assert np.allclose(light[:, row, column], colorsys.hsv_to_rgb(h, s, min(v + 0.2, 1)), atol=1 / 255)
            assert np.allclose(colour[:, row, column], colorsys.hsv_to_rgb(h, min(2 * s + 0.1, 1), v), atol=1 / 255)


def test_blurs_by_their_formulas() -> None:
    image = np.zeros((1, 9, 9), np.uint8)
    image[0, 4, 4] = 255
    made, _ = corrupted("gaussian_blur", 5, image)
    bell = np.exp(-(np.arange(-4, 5) ** 2) / 2)
    bell /= bell.sum()
    assert np.allclose(made[0], np.outer(bell, bell), atol=0.5 / 255 + 1e-4)
    made, _ = corrupted("defocus_blur", 4, image)
    inside = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]]) / 5
    assert np.allclose(made[0, 3:6, 3:6], inside, atol=0.5 / 255 + 1e-3)
    line = np.arange(9.0)
    assert np.allclose(enlarged(np.tile(line, (1, 9, 1)), 2.0)[0, 0], 4 + (line - 4) / 2)
    made, _ = corrupted("zoom_blur", 1, np.tile((20 * line).astype(np.uint8), (1, 9, 1)))
    factors = [1, *(1 + 0.01 * n for n in range(6))]
    assert np.allclose(made[0, 0], np.mean([20 * (4 + (line - 4) / f) for f in factors], axis=0) / 255, atol=0.5 / 255 + 1e-9)
    shuffled_glass = corrupted("glass_blur", 1, PICTURES[0])[0]
    assert np.allclose(np.sort(shuffled_glass.ravel()), np.sort(PICTURES[0].ravel() / 255), atol=1e-9), "pixels change places"


def test_pixelate_jpeg_and_fog() -> None:
    sizes = []
    for severity in range(1, 6):
        made = np.rint(255 * corrupted("pixelate", severity, PICTURES[0])[0]).astype(np.uint8)
        side = int(32 * CORRUPTIONS["pixelate"][1][severity - 1])
        sizes.append(side)
        picture = Image.fromarray(PICTURES[0].transpose(1, 2, 0)).resize((side, side), Image.Resampling.BOX)
        assert np.array_equal(made.transpose(1, 2, 0), np.asarray(picture.resize((32, 32), Image.Resampling.BOX)))
    assert sizes == [30, 28, 27, 24, 20]
    clouds = plasma(32, 3, rng.generator("fog"))
    assert (clouds.min(), clouds.max(), clouds.shape) == (0, 1, (32, 32))
    assert np.abs(np.diff(clouds, axis=0)).mean() < 0.1, "clouds are smooth"
    dark = PICTURES[0] // 2
    made, generator = corrupted("fog", 2, dark)
    x = dark / 255
    assert np.allclose(made, (x + 0.5 * plasma(32, 3, generator)) * x.max() / (x.max() + 0.5), atol=0.5 / 255 + 1e-9)
    flat = np.full((3, 32, 32), 77, np.uint8)
    assert np.abs(255 * corrupted("jpeg", 5, flat)[0] - 77).max() <= 2


# Streams of domains.


def whole(stream: Stream) -> tuple[torch.Tensor, np.ndarray]:
    batches = list(stream)
    return torch.cat([batch.x for batch in batches]), np.concatenate([batch.labels for batch in batches])


@pytest.mark.parametrize("kind", ["rotate", "permute", "corrupt"])
@pytest.mark.parametrize("again", [True, False])
def test_domains_by_a_literal_loop(kind: str, again: bool) -> None:
    stream = domain(GREY, 2, kind=kind, tasks=3, again=again, corruptions="contrast,shot_noise", severity=4, batch=5)
    check_stream(stream)
    views = {
        "rotate": [Rotated(0), Rotated(60), Rotated(120)],
        "permute": [Rotated(0), Permuted(2, 1), Permuted(2, 2)],
        "corrupt": [Rotated(0), Corrupted("contrast", 4, 2), Corrupted("shot_noise", 4, 2)],
    }[kind]
    chance = {i: rng.uniform(rng.key(2, "domains"), np.array([i]), 1)[0, 0] for i in range(36)}
    dealt = np.array_split(sorted(range(36), key=chance.__getitem__), 3)
    pixels, labels = [], []
    for task, view in enumerate(views):
        members = list(range(36)) if again else sorted(dealt[task].tolist())
        for place in rng.generator(2, "stream order", task, 0).permutation(len(members)):
            image = members[place]
            pixels.append(view(GREY.train_x[image : image + 1].numpy(), np.array([image]))[0])
            labels.append(int(GREY.train_y[image]))
    x, y = whole(stream)
    assert np.array_equal(x.numpy(), np.stack(pixels))
    assert y.tolist() == labels
    assert stream.ends[stream.marks].tolist() == ([36, 72, 108] if again else [12, 24, 36])
    for task, view in enumerate(views):
        rows = np.flatnonzero(stream.test_task == task)
        assert np.array_equal(stream.data.test_x.numpy()[rows], view(GREY.test_x.numpy(), np.arange(8) + TEST_IMAGES))
        assert stream.data.test_y[rows].tolist() == GREY.test_y.tolist()
    assert stream.has_tasks
    assert stream.rule == "tasks so far"


def test_domains_have_hashes_of_their_own_and_can_be_shuffled() -> None:
    made = [
        domain(GREY, 0, tasks=2),
        domain(GREY, 0, tasks=2, identity=False),
        domain(GREY, 0, tasks=2, angles="random"),
        domain(GREY, 0, tasks=2, kind="permute"),
        domain(GREY, 0, tasks=2, kind="permute", identity=False),
        domain(GREY, 0, kind="corrupt", corruptions="fog"),
        domain(GREY, 0, kind="corrupt", corruptions="fog", severity=4),
    ]
    assert len({stream.hash for stream in made}) == len(made)
    assert dataclasses.replace(made[0], views=(Rotated(0.0), Rotated(45.0))).hash != made[0].hash
    bound = shuffled(made[0], 2)
    check_stream(bound)
    counts = np.bincount(whole(shuffled(made[0], 0))[1], minlength=4)
    assert counts.tolist() == [18] * 4
    assert made[0].cut(3).batch(2).labels.tolist() == made[0].batch(2).labels.tolist()
    few = domain(GREY, 0, tasks=3, test_per_domain=3)
    assert np.bincount(few.test_task).tolist() == [3, 3, 3]
    assert few.test_images({0, 1, 2, 3}, 0)[2].tolist() == [0, 0, 0]
    assert domain(GREY, 0, tasks=2, identity=False).views == (Rotated(90.0), Rotated(180.0))
    assert len(domain(COLOUR, 0, kind="corrupt", test_per_domain=1).marks) == 15
    assert len(domain(GREY, 0, kind="corrupt", test_per_domain=1).marks) == 14, "grey images have no colour to saturate"


def test_labels_may_be_noisy_and_heads_masked_on_domains() -> None:
    noisy = gracecl.stream(GREY, family="noisy(domain(tasks=2), 0.5)")
    check_stream(noisy)
    assert np.sum(noisy.data.train_y != GREY.train_y) == 4 * round(4.5)
    assert gracecl.stream(GREY, family="task(domain(tasks=2))").masked


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "corrupt", "corruptions": "fig"}, "unknown corruption 'fig'; did you mean 'fog'"),
        ({"kind": "corrupt", "corruptions": "fog,saturate"}, "saturate needs images of three channels"),
        ({"kind": "corrupt", "corruptions": "fog", "tasks": 3}, "make 2 domains, not 3"),
        ({"kind": "turn"}, "kind must be one of rotate, permute, corrupt"),
        ({"tasks": 40, "again": False}, "36 images cannot be dealt to 40 domains"),
        ({"severity": 6}, "severity must be between 0 and 5"),
    ],
)
def test_domains_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        domain(GREY, 0, **options)


def write_pictures(place: Path, classes: list[str], number: int, mode: str, value: int) -> None:
    for label, name in enumerate(classes):
        (place / name).mkdir(parents=True)
        for i in range(number):
            pixels = np.full((8, 8) if mode == "L" else (8, 8, 3), value + 10 * label + i, np.uint8)
            Image.fromarray(pixels).save(place / name / f"{i}.png")


def test_a_folder_for_each_domain(tmp_path: Path) -> None:
    place = tmp_path / "pictures"
    write_pictures(place / "photo", ["cat", "dog"], 5, "RGB", 20)
    write_pictures(place / "sketch", ["bird", "cat"], 5, "L", 120)
    stream = streams.build(f"domain-folder(path='{place}', size=8, batch=3)", 0, tmp_path / "cache")
    check_stream(stream)
    assert stream.data.class_names == ("bird", "cat", "dog")
    assert stream.data.shape == (3, 8, 8)
    x, y = whole(stream)
    assert [set(part) for part in np.split(y, [8])] == [{1, 2}, {0, 1}]
    assert np.all((x.numpy()[:, 0, 0, 0] >= 100) == ([False] * 8 + [True] * 8))
    assert stream.test_task.tolist() == [0, 0, 1, 1]
    tail = streams.build(f"longtail(domain-folder(path='{place}', size=8), 4)", 0, tmp_path / "cache")
    assert len(tail.order) < 16
    picked = streams.build(f"domain-folder(path='{place}', size=8, classes='1')", 0, tmp_path / "cache")
    assert (len(picked.order), picked.tasks) == (8, 2)
    with pytest.raises(UserError, match="there is no folder"):
        streams.build(f"domain-folder(path='{place}/none')", 0)
    with pytest.raises(UserError, match="different extents; give a size"):
        from_domains({"one": GREY, "two": COLOUR})
    with pytest.raises(UserError, match="there are no domains"):
        from_domains({})


# Times.


def test_the_order_of_time(tmp_path: Path) -> None:
    taken = np.array([5, 1, 3, 1, 9, 2, 2, 8, *range(20, 48)])
    (tmp_path / "times.txt").write_text("\n".join(map(str, taken)))
    (tmp_path / "test.csv").write_text("name,taken\n" + "".join(f"a,{t}\n" for t in [0, 1, 2, 21, 24, 40, 100, 36]))
    (tmp_path / "times.csv").write_text("taken,name\n" + "".join(f"{t},a\n" for t in taken))
    expected = sorted(range(36), key=lambda i: (taken[i], i))
    stream = timed(GREY, 0, times=str(tmp_path / "times.txt"), tasks=3, batch=5)
    check_stream(stream)
    assert stream.order.tolist() == expected
    assert stream.hash == timed(GREY, 9, times=str(tmp_path / "times.txt"), tasks=3, batch=5).hash, "the seed changes nothing"
    assert stream.rule == "all"
    both = timed(GREY, 0, str(tmp_path / "times.csv"), test_times=str(tmp_path / "test.csv"), column="taken", tasks=3, batch=5)
    assert both.order.tolist() == expected
    begins = [taken[expected[12]], taken[expected[24]]]
    assert both.test_task.tolist() == [sum(t >= begin for begin in begins) for t in [0, 1, 2, 21, 24, 40, 100, 36]]
    assert both.rule == "tasks so far"
    np.save(tmp_path / "days.npy", np.datetime64("2012-01-01") + taken)
    assert timed(GREY, 0, str(tmp_path / "days.npy")).order.tolist() == expected
    (tmp_path / "days.txt").write_text("\n".join(str(np.datetime64("2012-01-01") + day) for day in taken))
    assert timed(GREY, 0, str(tmp_path / "days.txt")).order.tolist() == expected
    assert timed(GREY, 0).order.tolist() == list(range(36))
    assert timed(GREY, 0, marked=True).has_tasks


def test_order_files(tmp_path: Path) -> None:
    file = tmp_path / "order.txt"
    file.write_text("7 3\n35\n0 12 4\n")
    stream = timed(GREY, 0, order_file=str(file), tasks=2, batch=2)
    assert stream.order.tolist() == [7, 3, 35, 0, 12, 4]
    assert stream.marks.tolist() == [1, 3]
    whole_path = streams.from_anywhere(f"timed-digits(order_file='{file}')")
    assert whole_path == f"timed-digits(order_file='{file}')"
    for text, says in {
        "1 1": "names some image twice",
        "36": "numbers of training images, 0 to 35",
        "-1": "numbers of training images",
        "1.5": "whole numbers of training images",
        "": "at least one",
        "one": "neither numbers nor dates",
        "nan": "finite numbers",
        "2012-01-01 NaT": "finite numbers",
    }.items():
        file.write_text(text)
        with pytest.raises(UserError, match=says):
            timed(GREY, 0, order_file=str(file))


def test_times_that_cannot_be(tmp_path: Path) -> None:
    file, days = tmp_path / "times.csv", tmp_path / "days.txt"
    file.write_text("a,b\n" + "1,2\n" * 36)
    days.write_text("2012-01-01\n" * 8)
    for options, says in (
        ({"times": str(file), "column": "c"}, r"no column 'c' \(there are: a, b\)"),
        ({"times": str(days)}, "has 8 values, and there are 36 images"),
        ({"times": str(tmp_path / "none")}, "there is no file"),
        ({"times": str(file), "order_file": str(file)}, "both say the order"),
        ({"test_times": str(file)}, "give times, too"),
        ({"tasks": 5}, "4 classes cannot make 5 tasks"),
    ):
        with pytest.raises(UserError, match=says):
            timed(GREY, 0, **options)
    plain = tmp_path / "plain.txt"
    plain.write_text("1\n" * 36)
    with pytest.raises(UserError, match="dates and the other numbers"):
        timed(GREY, 0, times=str(plain), test_times=str(days))
    np.save(tmp_path / "words.npy", np.array([{}], object))
    with pytest.raises(UserError, match="not an array of numbers"):
        timed(GREY, 0, times=str(tmp_path / "words.npy"))


# Runs.


@pytest.mark.parametrize("kind", ["rotate", pytest.param("permute", marks=pytest.mark.slow)])
def test_runs_on_domains(kind: str) -> None:
    """Task after task, evaluated on the domains so far, and resumed exactly as any other."""
    stream = f"domain-digits(kind='{kind}', tasks=2, size=8, classes='0-3', batch=50)"
    result = gracecl.run("er", stream=stream, memory=20, net="mlp(width=8)", augment="none", threads=1)
    assert np.isnan(result.accuracy[0, 1])
    assert np.isfinite(result.accuracy[np.tril_indices(2)]).all()
