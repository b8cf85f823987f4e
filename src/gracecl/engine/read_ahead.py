"""Read the next batches of a stream in the background while the learner works on this one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from gracecl.core import StreamBatch
from gracecl.inputs import in_memory
from gracecl.streams import Stream

AHEAD = 3
"""batches that are read before they are asked for"""


def read_ahead(stream: Stream) -> Callable[[int], StreamBatch]:
    """`stream.batch`, which for inputs outside memory has the next batches read by a thread.

    A batch depends on its step alone, so the learner gets the same ones, and may ask for any.
    """
    return stream.batch if in_memory(stream.data.train_x) else ReadAhead(stream)


class ReadAhead:
    """The batches of a stream; those after the one that is asked for are read meanwhile."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="gracecl-read-ahead")
        self._coming: dict[int, Future[StreamBatch]] = {}

    def __call__(self, step: int) -> StreamBatch:
        for old in [number for number in self._coming if not step <= number <= step + AHEAD]:
            self._coming.pop(old).cancel()
        for number in range(step, min(step + AHEAD + 1, len(self.stream))):
            if number not in self._coming:
                self._coming[number] = self._reader.submit(self.stream.batch, number)
        return self._coming.pop(step).result() if step in self._coming else self.stream.batch(step)
