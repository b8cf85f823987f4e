"""GRACE in Avalanche (https://avalanche.continualai.org): a plugin that adds feedback to any of its supervised strategies::

    net = gracecl.tap(model, classes=10)
    strategy = Replay(model=LastExit(net), plugins=[GracePlugin()], ...)

The strategy's own criterion becomes one loss per tapped layer, weighted by α; γ times each layer's entropy is added; whatever other
plugins add (a penalty, a distillation) stays. With `GracePlugin("paper(adaptive=True)")`, the paper's whole rule, the layers'
accuracies on past images set the next α after each experience; without, α stays 1, as that α lowered accuracy in our runs.

This is for strategies whose loss is `criterion(mb_output, mb_y)` and what plugins add to it: Naive, Replay, EWC, LwF, SI, GEM and
others. Those with a loop and a loss of their own (DER, ER_ACE, SCR) are methods of this library instead: `grace(derpp())`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gracecl.controllers import Controller
from gracecl.controllers.feedback import Feedback
from gracecl.errors import UserError
from gracecl.integrations.exits import LastExit, Past, find_exit
from gracecl.nets.module import optional_package

__all__ = ["GracePlugin", "LastExit"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SupervisedPlugin: Any = optional_package("avalanche.training.plugins", "avalanche", "GracePlugin").SupervisedPlugin


TEMPLATES = "avalanche.training.templates"
"""where the loop and the loss are defined that feedback goes into"""


class GracePlugin(SupervisedPlugin):  # type: ignore[misc]
    """Feedback for a strategy whose model is a `LastExit(gracecl.tap(...))`; `plugin.feedback.history` tells what it did."""

    def __init__(self, controller: str | Controller = "paper", past: int = 200) -> None:
        """`past` is how many images of the stream the plugin keeps for itself, to measure each layer's accuracy on."""
        super().__init__()
        self._controller, self.past = controller, Past(past)
        self.feedback: Feedback | None = None

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        for part in ("training_epoch", "criterion"):
            if not getattr(type(strategy), part).__module__.startswith(TEMPLATES):
                raise UserError(
                    f"GracePlugin: {type(strategy).__name__} has a {part} of its own, which feedback does not fit; use a strategy "
                    "whose loss is criterion(mb_output, mb_y), such as Naive or Replay, or a method of this library, grace(derpp())"
                )
        if self.feedback is None:
            layers = find_exit(strategy.model).net.layers
            self.feedback = Feedback(layers, self._controller, strategy.device)

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """The last layer's loss is in `strategy.loss` already, so it is taken out of the sum that goes in."""
        taps = find_exit(strategy.model).taps
        if taps is None or self.feedback is None or taps.logits[-1].data_ptr() != strategy.mb_output.data_ptr():
            raise UserError(
                f"GracePlugin: the latest forward pass of {type(strategy).__name__}'s model is not the one that gave mb_output, "
                "which feedback needs; use a strategy that looks at its mini-batch once, such as Naive or Replay"
            )
        losses = torch.stack([strategy._criterion(logits, strategy.mb_y) for logits in taps.logits])
        strategy.loss = strategy.loss - losses[-1] + self.feedback(taps.logits, losses, strategy.mb_y)

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.past.show(strategy.mb_x, strategy.mb_y)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        sample = self.past.sample()
        if sample is not None and self.feedback is not None:
            self.feedback.observe_past(find_exit(strategy.model).net, *sample)
