"""Detectors: where a task begins for a learner that does not go by the stream's marks.

A detector looks at each batch before it is learned (`begins`), or at which of its images were predicted wrongly (`update`)::

    @detectors.register("threshold")
    @dataclass(eq=False, repr=False)
    class Threshold(Detector):
        \"\"\"A task begins after a batch with too many errors.\"\"\"

        share: float = 0.9
        \"\"\"of the batch's images that must be predicted wrongly\"\"\"

        def update(self, errors):
            return errors.mean() > self.share

after which `Learner("grace", boundaries="threshold(share=0.8)")` and `gracecl run --boundaries threshold` know it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gracecl.core import Progress, StreamBatch
from gracecl.registry import detectors, normal, spec

AUTO = "auto"
"""the marks of the stream, or no detector at all"""


@dataclass(eq=False, repr=False)
class Detector:
    """Says where tasks begin; the first batch always begins one. Fields are its options."""

    guesses: ClassVar[bool] = True
    """whether its boundaries may stop coming; parts of a method that have an interval for streams without marks then keep to it"""
    state: ClassVar[tuple[str, ...]] = ()
    """attributes that a checkpoint must hold: numbers, texts, lists and dicts of them"""

    def __post_init__(self) -> None:
        spec.check_fields(self, self.name)

    @property
    def name(self) -> str:
        return detectors.name_of(type(self))

    def __repr__(self) -> str:
        return spec.show(self, self.name)

    def begins(self, batch: StreamBatch, progress: Progress) -> bool:
        """Return whether a task begins with this batch, from its labels and from what was met before it."""
        return False

    def update(self, errors: npt.NDArray[np.bool_]) -> bool:
        """Return whether a task begins with the next batch; `errors` says which images of this one are predicted wrongly.

        A detector that defines it costs a prediction of every image of the stream.
        """
        return False

    def is_idle(self, steps: int) -> bool:
        """Return whether it is known beforehand that no second task begins in so many steps."""
        return False

    @property
    def by_errors(self) -> bool:
        """Whether it needs predictions."""
        return type(self).update is not Detector.update

    def state_dict(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state:
            setattr(self, name, copy.deepcopy(state[name]))


def build(boundaries: str) -> Detector | None:
    """Build the detector that an expression names; None for `auto`."""
    call = spec.parse_call(boundaries)
    if normal(call.name) == AUTO and not call.args and not call.kwargs:
        return None
    made: Detector = spec.construct(detectors, call)
    return made


def canonical(boundaries: str) -> str:
    """Return an expression as runs record it: `ADWIN` becomes `adwin()`."""
    made = build(boundaries)
    return AUTO if made is None else repr(made)
