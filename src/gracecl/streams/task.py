"""Task-incremental evaluation beside the class-incremental one, from the same run: the same logits, read twice."""

from __future__ import annotations

from dataclasses import replace

from gracecl.data import Data
from gracecl.errors import UserError
from gracecl.registry import streams
from gracecl.streams import Family, Stream


@streams.register("task")
def task(inner: Family, data: Data, seed: int) -> Stream:
    """Around a stream: evaluated also among the classes of each image's task alone (rules named `…_masked`).

    What is learned does not change. Streams whose tasks share some of their classes have no such reading.
    """
    stream = inner(data, seed)
    if stream.rule == "classes met":
        raise UserError(
            f"task: the tasks of {inner} have no classes of their own, so there is nothing to mask; use split or domain"
        )
    return replace(stream, masked=True)
