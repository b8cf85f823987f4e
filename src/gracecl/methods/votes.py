"""A head at every tapped layer and predictions by their votes, around any method that trains linear heads. Of our own.

    train the heads of all tapped layers by the inner method's losses, summed over the layers
    class <- argmax Σ_l softmax over the classes met (output of head l)

This is what a method gains from deep supervision alone, so that it can be compared with methods that bring their own heads on equal
terms: votes(er_ace()) beside mose(inference='linear_votes').

Differences from a paper: none, there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

from gracecl.errors import UserError
from gracecl.methods.base import Method, Traits, Wrapper
from gracecl.registry import methods


@methods.register("votes")
@dataclass(eq=False, repr=False)
class Votes(Wrapper):
    """A head at every tapped layer and predictions by the mean of their softmax, around any method."""

    inner: Method = "er()"  # type: ignore[assignment]
    """the method that trains the heads"""

    traits = Traits(all_taps=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inside.traits.trains == "evaluation":
            raise UserError(f"{self.name}: {self.inner!r} predicts by a net of its own; use it alone")

    @property
    def rule(self) -> str:
        return "linear_votes"
