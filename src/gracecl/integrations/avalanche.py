"""GRACE in Avalanche (https://avalanche.continualai.org): a plugin that adds feedback to any of its supervised strategies::

    net = gracecl.tap(model, classes=10)
    strategy = Replay(model=LastExit(net), plugins=[GracePlugin()], ...)

The strategy's own criterion becomes one loss per tapped layer, weighted by α; γ times each layer's entropy is added; whatever other
plugins add (a penalty, a distillation) stays. After each experience the layers' accuracies on past images set the next α.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gracecl.controllers import Controller
from gracecl.errors import UserError
from gracecl.feedback import Feedback
from gracecl.integrations.exits import LastExit, Past, find_exit

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from avalanche.training.plugins import SupervisedPlugin
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit the installed torch
    raise UserError(f"GracePlugin needs Avalanche, which cannot be imported ({error}); pip install 'gracecl[avalanche]'") from None

__all__ = ["GracePlugin", "LastExit"]


class GracePlugin(SupervisedPlugin):  # type: ignore[misc]
    """Feedback for a strategy whose model is a `LastExit(gracecl.tap(...))`; `plugin.feedback.history` tells what it did."""

    def __init__(self, controller: str | Controller = "paper", past: int = 200) -> None:
        """`past` is how many images of the stream the plugin keeps for itself, to measure each layer's accuracy on."""
        super().__init__()
        self._controller, self.past = controller, Past(past)
        self.feedback: Feedback | None = None

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        if self.feedback is None:
            layers = find_exit(strategy.model).net.layers
            self.feedback = Feedback(layers, self._controller, strategy.device)

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """The last layer's loss is in `strategy.loss` already, so it is taken out of the sum that goes in."""
        taps = find_exit(strategy.model).taps
        if taps is None or self.feedback is None or taps.logits.shape[1] != len(strategy.mb_y):
            raise UserError(
                "GracePlugin: the strategy's model did not see the mini-batch in one forward pass, which feedback needs"
            )
        losses = torch.stack([strategy._criterion(logits, strategy.mb_y) for logits in taps.logits])
        strategy.loss = strategy.loss - losses[-1] + self.feedback(taps.logits, losses, strategy.mb_y)

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.past.show(strategy.mb_x, strategy.mb_y)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        sample = self.past.sample()
        if sample is not None and self.feedback is not None:
            x, y = sample
            self.feedback.observe_past(find_exit(strategy.model).net, x.to(strategy.device), y)
