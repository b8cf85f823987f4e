"""What the classifiers for scikit-learn and river share: a learner's options as attributes, and the learner made of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gracecl.errors import UserError
from gracecl.learner import Learner
from gracecl.registry import options
from gracecl.registry.options import LearnerOptions

OPEN_NET = {"net": "mlp for rows of numbers"}
"""what the option net means where it is left open"""


class LearnerEstimator:
    """An estimator whose constructor stores the options of a learner, as both libraries ask of their estimators."""

    method: Any
    net: Any
    batch: int

    def _store(self, method: Any, given: Mapping[str, Any], **own: Any) -> None:
        """Store the options of a learner and the estimator's own under their names; nothing is checked but names."""
        named = options.by_name(LearnerOptions, given, tuple(own), type(self).__name__)
        defaults = {field.name: field.default for field in fields(LearnerOptions)} | dict.fromkeys(OPEN_NET)
        for name, value in {**defaults, **named, **own, "method": method}.items():
            setattr(self, name, value)

    def _new_learner(self, of_images: bool, **more: Any) -> Learner:
        """A learner that begins with the options. Objects among them are copied, so that a second learner can begin as well."""
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise UserError(f"batch is the number of examples that a step learns from, at least 1, not {self.batch!r}")
        given = {field.name: copy.deepcopy(getattr(self, field.name)) for field in fields(LearnerOptions)}
        if given["net"] is None:
            given["net"] = LearnerOptions.net if of_images else "mlp"
        return Learner(**given, **more)
