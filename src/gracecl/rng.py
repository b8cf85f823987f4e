"""Randomness as a function: `f(seed, purpose, step, …)`, never a state that has to be carried along.

Two forms. `generator(...)` gives a NumPy generator for one purpose at one step (which slots to draw, which to overwrite).
`uniform(key, ids, n)` gives every id its own n numbers, whatever the other ids are: an image's augmentation does not depend on
which images share its batch. Nothing here reads or moves a global random state, except `torch_seed`, which puts it back.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_torch_generators = threading.RLock()


@lru_cache(maxsize=4096)
def _word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    """Apply the finaliser of SplitMix64 (Steele et al., 2014): every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(*parts: int | str) -> int:
    """Return 64 bits that depend on every part and on their order."""
    state = 0
    for part in parts:
        word = _word(part) if isinstance(part, str) else int(part) & _MASK
        state = _mix((state + _GOLDEN + word) & _MASK)
    return state


def generator(*parts: int | str) -> np.random.Generator:
    """Return a generator for one purpose: the same parts give the same numbers on every machine."""
    return np.random.Generator(np.random.Philox(key=key(*parts)))


class Reseeded:
    """One generator, sent back to the first number of `generator(*parts)` at each call: a tenth of the cost of a new one.

    What a call returned is no longer valid after the next.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._start = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def __call__(self, *parts: int | str) -> np.random.Generator:
        self._start["state"]["key"][0] = key(*parts)
        self._bits.state = self._start
        return self._generator


def uniform(stem: int, ids: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.float64]:
    """Return `[len(ids), n]` numbers in [0, 1): row i depends only on `stem` and `ids[i]`."""
    if n == 0:
        return np.empty((len(ids), 0))
    with np.errstate(over="ignore"):
        rows = _mix_array(ids.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(stem))
        columns = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        bits = _mix_array(rows[:, None] + columns[None, :])
    numbers: npt.NDArray[np.float64] = (bits >> np.uint64(11)) * 2.0**-53
    return numbers


def _mix_array(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed


@contextmanager
def torch_seed(*parts: int | str, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch for the block (initial weights, dropout) and restore the caller's state afterwards.

    Torch has one generator for all threads, so blocks of several threads wait for one another. The generators are seeded directly:
    `torch.manual_seed` also visits every other backend, at a cost that a small step notices.
    """
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    with _torch_generators:
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(key(*parts) & (_MASK >> 1))
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
