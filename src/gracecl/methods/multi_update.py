"""Several small updates in place of a large one, around any method: the same number of images, more steps. A method of our own.

    for each batch of the stream, for update u = 1 .. U:
        plan <- what the inner method would train on, drawn anew from memory
        with V views of each image:
            U <= V: keep V/U of the views
            U >  V: keep one view, and of every block each (U/V)-th image; of n < U/V images of the stream, each n-th
        step on the inner method's losses of what is kept, at lr_factor times the learning rate
    memory <- as the inner method, once per batch

Each view of a stream image is seen once, as without the wrapper, so the cost in images is that of the inner method's one step. What
changes is how many optimizer steps they buy: MOSE spends 384 images on each. Views are shared out so that the first update of two
has the first and the last of four (MOSE: raw, and mirrored and cropped), the second the two between.

Differences from a paper: none, there is none. Batch statistics and contrast see fewer images at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Annotated

from gracecl.core import Plan, Planning, Progress, Selection, StreamBatch
from gracecl.errors import UserError
from gracecl.memory import Memories
from gracecl.methods.base import Method, Wrapper
from gracecl.registry import methods
from gracecl.registry.spec import Above, Within


@methods.register("multi_update")
@dataclass(eq=False, repr=False)
class MultiUpdate(Wrapper):
    """Several small updates per batch from the images of one large one, around any method."""

    inner: Method = "mose()"  # type: ignore[assignment]
    """the method whose step is shared out"""
    updates: Annotated[int, Within(1, 1000)] = 4
    """U, optimizer steps in place of each of the inner method's; a divisor or a multiple of its number of views"""
    lr_factor: Annotated[float, Above(0)] = 1.0
    """their learning rate as a multiple of the inner method's"""

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        rate = planning.learning_rate
        planning = replace(planning, learning_rate=None if rate is None else self.lr_factor * rate)
        # Each turn follows plans of its own, so that every update draws its images anew.
        turns = [self.inside.plans(new, memories, planning) for _ in range(self.updates)]
        for turn, plans in cycle(enumerate(turns)):
            plan = next(plans, None)
            if plan is None:
                return
            images = max((len(rows.stream) for rows in plan.blocks.values()), default=0) or self.updates
            kept = {block: self.part_of(rows, turn, images) for block, rows in plan.blocks.items()}
            kept = {block: rows for block, rows in kept.items() if len(rows)}
            forwards = plan.forwards and [[block for block in group if block in kept] for group in plan.forwards]
            yield replace(
                plan,
                blocks=kept,
                forwards=forwards and [group for group in forwards if group],
                rate=self.lr_factor * plan.rate,
                shared_out=f"{self!r}: the losses of {self.inner!r} need more views or images in one update than {self.updates} "
                f"updates leave; use fewer updates or {self.inner!r} alone",
            )

    def closing(self, progress: Progress, memories: Memories, planning: Planning) -> Iterator[Plan]:
        for plan in self.inside.closing(progress, memories, planning):
            yield replace(plan, rate=self.lr_factor * plan.rate)

    def part_of(self, rows: Selection, turn: int, images: int) -> Selection:
        """Keep an update's share of a block's views and images; `images` of the stream make at most as many parts."""
        groups, parts = self.shares(1 if rows.views is None else len(rows.views))
        parts, place = min(parts, images), turn // groups
        mine = slice(place, None, parts) if place < parts else slice(0)
        views = rows.views and tuple(view for place, view in enumerate(rows.views) if snake_group(place, groups) == turn % groups)
        return replace(rows, stream=rows.stream[mine], slots=rows.slots[mine], views=views)

    def shares(self, views: int) -> tuple[int, int]:
        """Return the number of groups of views, and the number of parts of images."""
        fewer, more = sorted((self.updates, views))
        if more % fewer:
            raise UserError(
                f"multi_update: {self.updates} updates cannot share out {views} views of each image; use a divisor or a multiple"
            )
        return fewer, self.updates // fewer


def snake_group(place: int, groups: int) -> int:
    """Return the group of the view at `place`: 0, 1, 2, 2, 1, 0, 0, 1, …, so that groups mix early and late views."""
    row, column = divmod(place, groups)
    return groups - 1 - column if row % 2 else column
