"""Domain-incremental: the same classes in every task, seen in another way.

An entry of the order is a pair, written as domain · N + image, N the number of training images; `views` says
what a domain makes of an image. What a batch holds is computed when it is asked for; test images are computed
once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch

from gracecl import rng
from gracecl.core import Ints
from gracecl.data import Data
from gracecl.data.domains import Domains
from gracecl.errors import UserError
from gracecl.images.domains import CORRUPTIONS, TEST_IMAGES, Corrupted, DomainView, Permuted, Plain, Rotated
from gracecl.inputs import TensorTree
from gracecl.machine import check_room
from gracecl.registry import nearest, normal, spec, streams
from gracecl.registry.spec import AtLeast, Within
from gracecl.streams import Stream
from gracecl.streams.i_blurry import in_random_order
from gracecl.streams.parts import in_tasks, smallest


@dataclass(frozen=True, eq=False, repr=False)
class DomainStream(Stream):
    """A stream whose order says for each position the domain, too."""

    views: tuple[DomainView, ...] = ()

    def inputs(self, items: Ints) -> torch.Tensor:
        domains, images = np.divmod(items, len(self.data.train_y))
        raw = super().inputs(images)
        pixels = raw.cpu().numpy()  # on the host, so that every device sees the same bytes
        seen = np.empty_like(pixels)
        for domain in np.unique(domains).tolist():
            rows = domains == domain
            seen[rows] = self.views[domain](pixels[rows], images[rows])
        return torch.from_numpy(seen).to(raw.device)

    def labels(self, items: Ints) -> Ints:
        return self.data.train_y[items % len(self.data.train_y)]

    @property
    def beyond_the_order(self) -> dict[str, Any]:
        return super().beyond_the_order | {"views": self.views}


@streams.register("domain")
def domain(
    data: Data,
    seed: int,
    kind: Literal["rotate", "permute", "corrupt"] = "rotate",
    tasks: Annotated[int, AtLeast(1)] | None = None,
    again: bool = True,
    identity: bool = True,
    angles: Literal["fixed", "random"] = "fixed",
    corruptions: str = "all",
    severity: Annotated[int, Within(0, 5)] = 3,
    test_per_domain: Annotated[int, AtLeast(1)] | None = None,
    batch: Annotated[int, AtLeast(1)] = 10,
    marked: bool = True,
) -> Stream:
    """The same classes in every task, seen in another way: rotated, with permuted pixels, corrupted, or from folders.

    Each task shows all images (`again`), or each image is shown in one of them. The first domain is the images as they are, unless
    `identity=False`. Angles are k · 180 / `tasks`, or random below 180. `corruptions` names some, such as 'fog,jpeg'. Accuracy is
    that of the domains so far, on all test images in each, or on `test_per_domain`. `domain-folder(path='DIR', size=32)` reads
    DIR/<domain>/<class>/… and takes each domain's own images.
    """
    given = {"kind": kind, "tasks": tasks, "again": again, "identity": identity, "angles": angles, "corruptions": corruptions}
    given |= {"severity": severity, "test_per_domain": test_per_domain, "batch": batch, "marked": marked}
    spec.check_options(domain, "domain", given)
    if isinstance(data, Domains):
        return of_folders(data, seed, batch, marked)
    if isinstance(data.train_x, TensorTree) or data.train_x.ndim != 4 or data.train_x.dtype != torch.uint8:
        raise UserError(f"domain: {data.name} holds no images of bytes, which rotations, permutations and corruptions need")
    views = views_of(kind, data, seed, tasks, identity, angles, corruptions, severity)
    images = np.arange(len(data.train_y))
    check_room(8 * len(views) * len(images), f"the order of {len(views)} domains", "use fewer tasks, or again=False")
    shown = [images] * len(views) if again else np.array_split(smallest(images, len(images), seed, "domains"), len(views))
    parts = [in_random_order(part, seed, number) + number * len(images) for number, part in enumerate(shown)]
    if min(map(len, parts)) == 0:
        raise UserError(f"domain: {len(images)} images cannot be dealt to {len(views)} domains; use fewer tasks, or again=True")
    tested, test_task = seen_tests(data, views, test_per_domain, seed)
    made = in_tasks(tested, seed, parts, batch, marked=marked, test_task=test_task, rule="tasks so far")
    return DomainStream(**vars(made) | {"views": views})


def views_of(
    kind: str, data: Data, seed: int, tasks: int | None, identity: bool, angles: str, corruptions: str, severity: int
) -> tuple[DomainView, ...]:
    """What each domain makes of images."""
    if kind == "corrupt":
        names = known_corruptions(corruptions, data.shape[0])
        every: list[DomainView] = [Plain()] if identity else []
        every += [Corrupted(name, severity, seed) for name in names]
        if tasks is not None and tasks > len(every):
            raise UserError(f"domain: these corruptions make {len(every)} domains, not {tasks}; use fewer tasks, or name more")
        return tuple(every[:tasks])
    tasks = data.tasks if tasks is None else tasks
    if kind == "permute":
        return tuple(Plain() if identity and not number else Permuted(seed, number) for number in range(tasks))
    if angles == "random":
        drawn = rng.generator(seed, "angles").uniform(0, 180, tasks).tolist()
        return tuple(Plain() if identity and not number else Rotated(angle) for number, angle in enumerate(drawn))
    return tuple(Rotated((number + (not identity)) * 180 / tasks) for number in range(tasks))


def known_corruptions(text: str, channels: int) -> list[str]:
    """The corruptions that a text such as 'fog,jpeg' names; 'all' are those that such images can have."""
    possible = [name for name in CORRUPTIONS if channels == 3 or name != "saturate"]
    if text == "all":
        return possible if channels in (1, 3) else [name for name in possible if name not in ("jpeg", "pixelate")]
    names = [normal(name) for name in text.split(",")]
    for name in names:
        if name not in CORRUPTIONS:
            raise UserError(
                f"domain: unknown corruption '{name}'{nearest(name, CORRUPTIONS)} (there are: {', '.join(CORRUPTIONS)})"
            )
        if name not in possible:
            raise UserError(f"domain: {name} needs images of three channels, and these have {channels}; leave it out")
    return names


def seen_tests(data: Data, views: tuple[DomainView, ...], number: int | None, seed: int) -> tuple[Data, Ints]:
    """The data with its test images, or `number` of them, once for each domain; and which domain each is of."""
    rows = np.arange(len(data.test_y))
    rows = rows if number is None else np.sort(smallest(rows, number, seed, "test images"))
    pixels = data.test_x[torch.from_numpy(rows)].numpy()
    remedy = "use fewer tasks, or test_per_domain"
    check_room(len(views) * pixels.nbytes, f"the test images of {len(views)} domains", remedy)
    seen = np.concatenate([view(pixels, rows + TEST_IMAGES) for view in views])
    test_y = np.tile(data.test_y[rows], len(views))
    return replace(data, test_x=torch.from_numpy(seen), test_y=test_y), np.repeat(np.arange(len(views)), len(rows))


def of_folders(data: Domains, seed: int, batch: int, marked: bool) -> Stream:
    """Domain after domain, each with images of its own."""
    parts = [in_random_order(np.flatnonzero(data.train_domain == number), seed, number) for number in range(len(data.domain_names))]
    return in_tasks(data, seed, parts, batch, marked=marked, test_task=data.test_domain, rule="tasks so far")
