"""Merge learners of different machines: sums over features can be added, trained weights cannot."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch

from gracecl.errors import UserError
from gracecl.learner import Learner
from gracecl.methods.closed_form import ClosedForm


def merge(a: Learner, b: Learner) -> Learner:
    """Return the learner that would have seen the images of both: learn on two sites, add the sums.

    For closed forms (`closed`, `slda`, `ranpac` and others that keep sums), of the same method, seed and net. No image is needed.
    Labels are compared by their names, so that the sites may have met them in different orders. Both learners stay as they are.

    >>> both = gracecl.merge(Learner.load("here"), Learner.load("there"))
    """
    merged = copy.deepcopy(a)
    mine, other = merged.engine, b.engine
    learner, theirs = mine.chain.learner, other.chain.learner
    if not isinstance(learner, ClosedForm) or not isinstance(theirs, ClosedForm):
        trained = a if not isinstance(learner, ClosedForm) else b
        raise UserError(f"{trained.method!r} trains its weights, which cannot be added; merge learners such as closed() or slda()")
    if repr(a.method) != repr(b.method):
        raise UserError(f"the learners are {a.method!r} and {b.method!r}; merge two of the same method and options")
    if a.recipe.seed != b.recipe.seed:
        raise UserError(f"the learners have the seeds {a.recipe.seed} and {b.recipe.seed}; merge two of the same seed")
    if not same_trunk(a, b):
        raise UserError("the learners have different nets, so that their features mean different things; merge two of the same net")
    if merged.labels.counted != b.labels.counted:
        raise UserError(f"the learners have {a.classes} and {b.classes} declared classes; give both the same classes=, or none")
    met = np.array(other.progress.seen, np.int64)
    numbers = torch.zeros(other.net.classes, dtype=torch.int64)
    numbers[met] = torch.from_numpy(merged.labels.learned(merged.labels.checked(b.labels.named(met))))
    mine.grow(len(merged.labels))
    learner.merge(theirs, numbers.to(mine.device))
    progress = mine.progress
    seen = dict.fromkeys((*progress.seen, *numbers[met].tolist()))
    mine.progress = replace(progress, step=progress.step + other.progress.step, seen=tuple(seen))
    mine.images_seen += other.images_seen
    return merged


def same_trunk(a: Learner, b: Learner) -> bool:
    """Whether the nets below the heads have the same weights and statistics, to the bit."""
    one, two = a.net.backbone.state_dict(), b.net.backbone.state_dict()
    if a.engine.net.inputs.shape != b.engine.net.inputs.shape or one.keys() != two.keys():
        return False
    return all(value.shape == two[name].shape and torch.equal(value, two[name].to(value.device)) for name, value in one.items())
