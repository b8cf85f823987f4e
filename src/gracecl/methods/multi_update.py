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

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from gracecl.core import Batch, LossTable, Planning, Progress, Selection, StreamBatch, Taps
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

    @property
    def repeats(self) -> int:  # type: ignore[override]
        return self.updates * self.inner.repeats

    def rate(self, progress: Progress) -> float:
        return self.lr_factor * super().rate(progress)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> dict[str, Selection]:
        step, turn = divmod(planning.repeat, self.updates)
        if turn == 0:
            self.gathered: dict[str, Tensor] = {}
        plan = super().plan(new, memories, replace(planning, repeat=step))
        images = max((len(rows.stream) for rows in plan.values()), default=0) or self.updates
        kept = {block: self.part_of(rows, len(self.views(block, ())), turn, images) for block, rows in plan.items()}
        self.batch, self.stream_rows = len(new), next((rows.stream for rows in kept.values() if len(rows.stream)), new.labels[:0])
        return {block: rows for block, rows in kept.items() if len(rows)}

    def part_of(self, rows: Selection, views: int, turn: int, images: int) -> Selection:
        """Keep an update's share of a block's views and images; `images` of the stream make at most as many parts."""
        shown = tuple(range(views)) if rows.shown is None else rows.shown
        groups, parts = self.shares(len(shown))
        parts, place = min(parts, images), turn // groups
        mine = slice(place, None, parts) if place < parts else slice(0)
        kept = tuple(view for place, view in enumerate(shown) if there_and_back(place, groups) == turn % groups)
        return replace(rows, stream=rows.stream[mine], slots=rows.slots[mine], shown=kept)

    def shares(self, views: int) -> tuple[int, int]:
        """Into how many groups the views are shared out, and into how many parts the images."""
        fewer, more = sorted((self.updates, views))
        if more % fewer:
            raise UserError(
                f"multi_update: {self.updates} updates cannot share out {views} views of each image; use a divisor or a multiple"
            )
        return fewer, self.updates // fewer

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        try:
            return super().losses(out, batch)
        except (RuntimeError, IndexError) as error:
            raise UserError(
                f"{self!r}: the losses of {self.inner!r} need more views or images in one update than {self.updates} updates leave "
                f"({error}); use fewer updates or {self.inner!r} alone"
            ) from error

    def attributes(self, out: Taps, batch: Batch) -> dict[str, Tensor]:
        """Those of this update's images beside those of the updates before it: after the last, the whole batch's."""
        for name, value in super().attributes(out, batch).items():
            if name not in self.gathered:
                self.gathered[name] = value.new_zeros(self.batch, *value.shape[1:])
            self.gathered[name][torch.from_numpy(self.stream_rows).to(value.device)] = value
        return self.gathered


def there_and_back(place: int, groups: int) -> int:
    """0, 1, 2, 2, 1, 0, 0, 1, …: the group of each view in turn, first and last together."""
    row, column = divmod(place, groups)
    return groups - 1 - column if row % 2 else column
