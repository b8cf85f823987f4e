"""GRACE in Lightning (https://lightning.ai): a callback that adds feedback to any module with a tapped net in it::

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = LastExit(gracecl.tap(backbone, classes=10))
        def training_step(self, batch, number):
            x, y = batch
            return F.cross_entropy(self.model(x), y)

    Trainer(callbacks=[GraceCallback()]).fit(Classifier(), loader)

What `training_step` returns keeps all its terms; the callback adds, for each tapped layer, what makes the whole
`Σ_l (α_l · CE_l + γ_l · H_l)`, where CE_l is the mean cross-entropy of that layer's head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gracecl.controllers import Controller
from gracecl.errors import UserError
from gracecl.feedback import Feedback
from gracecl.integrations.exits import LastExit, Past, find_exit
from gracecl.losses import cross_entropy

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit the installed torch
    raise UserError(
        f"GraceCallback needs Lightning, which cannot be imported ({error}); pip install 'gracecl[lightning]'"
    ) from None

__all__ = ["GraceCallback", "LastExit"]


def second(batch: Any) -> Tensor:
    """The labels of a batch `(x, y)`."""
    if not isinstance(batch, Sequence) or len(batch) < 2 or not isinstance(batch[1], Tensor):
        raise UserError("GraceCallback expects batches (x, y); for others give GraceCallback(labels=lambda batch: …, inputs=…)")
    return batch[1]


def first(batch: Any) -> Tensor:
    """The inputs of a batch `(x, y)`."""
    return batch[0]  # type: ignore[no-any-return]


class GraceCallback(Callback):  # type: ignore[misc]
    """Feedback for a module that holds a `LastExit(gracecl.tap(...))`; `callback.feedback.history` tells what it did."""

    def __init__(
        self,
        controller: str | Controller = "paper",
        past: int = 200,
        refresh_every: int = 0,
        inputs: Callable[[Any], Tensor] = first,
        labels: Callable[[Any], Tensor] = second,
    ) -> None:
        """α is renewed every `refresh_every` steps, or at the end of each epoch if that is 0, on `past` images kept aside."""
        super().__init__()
        self._controller, self.refresh_every, self._inputs, self._labels = controller, refresh_every, inputs, labels
        self.past = Past(past)
        self.feedback: Feedback | None = None
        self._restored: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        net = find_exit(pl_module).net
        if self.feedback is None:
            self.feedback = Feedback(net.layers, self._controller, pl_module.device)
        if self._restored is not None:
            self.feedback.load_state_dict(self._restored)
        plain = pl_module.training_step

        def with_feedback(batch: Any, *more: Any, **named: Any) -> Any:
            output = plain(batch, *more, **named)
            added = self._added(pl_module, self._labels(batch))
            if isinstance(output, Tensor):
                return output + added
            return output if output is None else {**output, "loss": output["loss"] + added}

        pl_module.training_step = with_feedback

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del pl_module.training_step  # the class's own comes back

    def _added(self, module: LightningModule, labels: Tensor) -> Tensor:
        """What is missing between the last head's loss and the whole objective."""
        taps = find_exit(module).taps
        if taps is None or self.feedback is None or taps.logits.shape[1] != len(labels):
            raise UserError("GraceCallback: the training step did not pass the batch through its LastExit in one call")
        losses = cross_entropy(taps.logits, labels)
        return self.feedback(taps.logits, losses, labels) - losses[-1]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.past.show(self._inputs(batch), self._labels(batch))
        if self.refresh_every and trainer.global_step % self.refresh_every == 0:
            self._look_back(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.refresh_every:
            self._look_back(pl_module)

    def _look_back(self, module: LightningModule) -> None:
        sample = self.past.sample()
        if sample is not None and self.feedback is not None:
            x, y = sample
            self.feedback.observe_past(find_exit(module).net, x.to(module.device), y)

    def state_dict(self) -> dict[str, Any]:
        return {"past": self.past.state_dict(), "feedback": self.feedback.state_dict() if self.feedback else self._restored}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.past.load_state_dict(state_dict["past"])
        self._restored = state_dict["feedback"]
