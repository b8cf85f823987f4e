"""Controllers: signals of each tapped layer in, its loss weight α and its regularisation strength γ out.

A controller is one function, `controller(signals) -> (α, γ)`. It consists of `weights`, past accuracies → α, and `strengths`,
entropies → γ; your own controller overrides either or both::

    @controllers.register("threshold")
    @dataclass(eq=False, repr=False)
    class Threshold(Controller):
        \"\"\"Full strength for layers above some entropy, none below.\"\"\"

        nats: float = 1.0
        \"\"\"entropy above which a layer is regularised\"\"\"

        def strengths(self, signals):
            return self.beta * (signals.entropy.detach() > self.nats)

after which `grace(er(), strength="threshold(nats=0.5)")` and `Feedback(layers=4, controller="threshold")` know it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.errors import UserError
from gracecl.functional.losses import entropy, full_precision
from gracecl.registry import controllers, spec

__all__ = ["Controller", "Signals", "build", "relative", "spread"]

LEAST_SPREAD = 1e-8
"""standard deviation below which layers count as equal"""


class Signals:
    """Measurements of the tapped layers in one step."""

    def __init__(
        self,
        logits: Tensor,
        accuracy: Tensor,
        labels: Tensor | None = None,
        classes: Tensor | None = None,
        *,
        summed: bool = False,
        past: Tensor | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take `logits [L, B, C]`, `accuracy [L]` on past images (NaN before it was measured), and the `classes
        [C]` of the entropy.

        With `summed`, entropies are summed over the images instead of averaged. `past [B]` marks images from a memory. `agree`
        turns values of this process into those that all processes share.
        """
        self.logits, self.accuracy, self.labels, self._classes, self._past = logits, accuracy, labels, classes, past
        self._agree = agree
        self._per_image = logits.shape[1] if summed else 1

    @cached_property
    def entropy(self) -> Tensor:
        """`[L]`: mean (or summed) entropy of each layer's softmax, in nats; gradients flow through it."""
        own = self._per_image * entropy(self.logits, self._classes)
        return own if self._agree is None else self._agree(own.detach()) + (own - own.detach())

    @property
    def widest(self) -> Tensor | float:
        """The entropy of a head that knows nothing: ln of the number of outputs that the entropy spans."""
        return self._per_image * (math.log(self.logits.shape[-1]) if self._classes is None else self._classes.sum().log())

    @cached_property
    def forgetting(self) -> Tensor:
        """`[L]`: mean cross-entropy on images from a memory minus that on new ones; NaN where the step has one kind alone."""
        if self.labels is None or self._past is None:
            raise UserError("this controller compares new images with replayed ones, which only grace(...) can tell apart")
        logits = full_precision(self.logits.detach())
        of_each = F.cross_entropy(logits.transpose(1, 2), self.labels.expand(len(logits), -1), reduction="none")
        past = self._past.to(of_each)
        old, new = ((of_each * weight).sum(dim=1) / weight.sum() for weight in (past, 1 - past))
        return old - new

    @cached_property
    def pull(self) -> Tensor:
        """`[L]`: the gradient norm of the entropy at the logits over that of a plain mean cross-entropy on the same images.

        In closed form ∂H/∂logit = -p (ln p + H), with p the softmax over the outputs that the entropy spans, and
        ∂CE/∂logit = softmax - onehot(y) over all of them.
        """
        if self.labels is None:
            raise UserError("this controller compares gradients and needs the labels of the step; call feedback(..., labels=y)")
        logits = full_precision(self.logits.detach())
        spanned = logits if self._classes is None else logits.masked_fill(~self._classes, -torch.inf)
        log_p = F.log_softmax(spanned, dim=-1).clamp(min=-1e4)  # p is 0 where this acts
        p = log_p.exp()
        h = -(p * log_p).sum(dim=-1, keepdim=True)
        of_entropy = (p * (log_p + h)).flatten(1).norm(dim=1)
        of_cross_entropy = (logits.softmax(dim=-1) - F.one_hot(self.labels, p.shape[-1])).flatten(1).norm(dim=1)
        ratio: Tensor = self._per_image * of_entropy / of_cross_entropy.clamp(min=1e-12)
        return ratio if self._agree is None else self._agree(ratio)


@dataclass(eq=False, repr=False)
class Controller:
    """Compute α and γ from the layers' signals; this base class gives the paper's α if asked for, and no γ."""

    beta: float = 0.005
    """β, the base strength"""
    adaptive: bool = False
    """whether α follows the past accuracies; False is α = 1, for the paper's α can cost a learner accuracy, and γ alone does not
    (docs/feedback.md). grace(...) is the paper's and sets it"""
    unbiased: bool = False
    """divide by L - 1 instead of L in standard deviations over the layers"""
    sigma_floor: float = LEAST_SPREAD
    """smallest standard deviation that a relative entropy is divided by"""
    accuracy_floor: float = LEAST_SPREAD
    """smallest standard deviation that a relative accuracy is divided by; differences well below it leave α near 1"""

    def __post_init__(self) -> None:
        spec.check_fields(self, controllers.name_of(type(self)))

    def __repr__(self) -> str:
        return spec.show(self, controllers.name_of(type(self)))

    def __call__(self, signals: Signals) -> tuple[Tensor, Tensor]:
        """Return α and γ, `[L]` each."""
        return self.weights(signals.accuracy), self.strengths(signals)

    def weights(self, accuracy: Tensor) -> Tensor:
        """Return α: layers with lower accuracy on the past weigh more; 1 as long as it is unknown."""
        if not self.adaptive:
            return torch.ones_like(accuracy)
        return torch.exp(torch.tanh(-self.relative_accuracy(accuracy))).nan_to_num(nan=1.0)

    def strengths(self, signals: Signals) -> Tensor:
        """Return γ: the factor of each layer's entropy in the objective."""
        raise NotImplementedError(f"{type(self).__name__} must say what its strengths are")

    def term(self, signals: Signals, gamma: Tensor) -> Tensor:
        """Return what is added to the objective per layer."""
        return gamma * signals.entropy

    def slope(self, signals: Signals, gamma: Tensor) -> Tensor:
        """Return the derivative of each layer's term with respect to its entropy."""
        return gamma

    def relative(self, entropies: Tensor) -> Tensor:
        return relative(entropies, self.unbiased, self.sigma_floor)

    def relative_accuracy(self, accuracy: Tensor) -> Tensor:
        return relative(accuracy, self.unbiased, self.accuracy_floor)

    def after_step(self, signals: Signals) -> None:
        """Update a controller's state, once after each step."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""


def relative(values: Tensor, unbiased: bool = False, floor: float = LEAST_SPREAD) -> Tensor:
    """Return z-scores over the layers, (value - mean) / std, and 0 where all agree."""
    std, precise = spread(values, unbiased), in_double(values)
    z = (precise - precise.mean()) / std.clamp(min=max(floor, LEAST_SPREAD))
    return torch.where(std < LEAST_SPREAD, torch.zeros_like(z), z).to(values)


def spread(values: Tensor, unbiased: bool = False) -> Tensor:
    """Return the standard deviation over the layers, in double precision: in single, the mean of equal values may
    differ from them.
    """
    precise = in_double(values)
    variance = ((precise - precise.mean()) ** 2).sum() / max(1, len(values) - unbiased)
    return torch.sqrt(variance.clamp(min=1e-20))  # the root of 0 has no gradient


def in_double(values: Tensor) -> Tensor:
    """Convert to double precision, on the host where the device has none: these are a few numbers, one per layer."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def build(expression: str, **defaults: Any) -> Controller:
    """Build the controller that an expression names; options it does not give come from `defaults`."""
    call = spec.parse_call(expression)
    given = [field.name for field in dataclasses.fields(controllers.get(call.name))][: len(call.args)]
    more = {name: value for name, value in defaults.items() if name not in given}
    made: Controller = spec.construct(controllers, spec.Call(call.name, call.args, more | call.kwargs))
    return made
