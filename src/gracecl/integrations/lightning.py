"""GRACE in Lightning (https://lightning.ai): a callback that adds feedback to any module with a tapped net in it::

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = LastExit(gracecl.tap(backbone, classes=10))
        def training_step(self, batch, number):
            x, y = batch
            return F.cross_entropy(self.model(x), y)

    Trainer(callbacks=[GraceCallback()]).fit(Classifier(), loader)

What `training_step` returns must hold the mean cross-entropy of the last head, as above, and keeps its other terms; the callback
adds what makes the whole `Σ_l (α_l · CE_l + γ_l · H_l)`, where CE_l is the mean cross-entropy of each tapped layer's head. α stays
1 unless the rule is adaptive, `GraceCallback("paper(adaptive=True)")`: the paper's α lowered accuracy in our runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gracecl.controllers import Controller
from gracecl.controllers.feedback import Feedback
from gracecl.errors import UserError
from gracecl.functional.losses import cross_entropy
from gracecl.integrations.exits import LastExit, Past, find_exit
from gracecl.nets.module import optional_package

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["GraceCallback", "LastExit"]

Callback: Any = optional_package("lightning.pytorch", "lightning", "GraceCallback").Callback


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
        """An adaptive α is renewed every `refresh_every` steps, or after each epoch if that is 0, on `past` images kept aside."""
        super().__init__()
        self._controller, self.refresh_every, self._inputs, self._labels = controller, refresh_every, inputs, labels
        self.past = Past(past)
        self.feedback: Feedback | None = None
        self._restored: dict[str, Any] | None = None
        self._looked_back_at = 0
        """optimizer steps there had been when α was last renewed"""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise UserError(
                f"GraceCallback adds to the loss that training_step returns, and {type(pl_module).__name__} optimises by itself "
                "(automatic_optimization=False), so it would do nothing; use gracecl.Feedback in the training step"
            )
        net = find_exit(pl_module).net
        if self.feedback is None:
            self.feedback = Feedback(net.layers, self._controller, pl_module.device)
        if self._restored is not None:
            self.feedback.load_state_dict(self._restored)
            self._restored = None
        self._looked_back_at = trainer.global_step
        plain = pl_module.training_step

        def with_feedback(batch: Any, *more: Any, **named: Any) -> Any:
            find_exit(pl_module).taps = None  # those of an earlier step must not pass for this one's
            output = plain(batch, *more, **named)
            if output is None:  # the step is skipped
                return None
            added = self._added(pl_module, self._labels(batch))
            return output + added if isinstance(output, Tensor) else {**output, "loss": output["loss"] + added}

        pl_module.training_step = with_feedback

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        vars(pl_module).pop("training_step", None)  # the class's own comes back

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def _added(self, module: LightningModule, labels: Tensor) -> Tensor:
        """What is missing between the last head's loss and the whole objective."""
        taps = find_exit(module).taps
        if taps is None or self.feedback is None or taps.logits.shape[1] != len(labels):
            raise UserError("GraceCallback: the training step did not pass the batch through its LastExit in one call")
        losses = cross_entropy(taps.logits, labels)
        return self.feedback(taps.logits, losses, labels) - losses[-1]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.past.show(self._inputs(batch), self._labels(batch))
        step = trainer.global_step  # the same for several batches where gradients are accumulated
        if self.refresh_every and step % self.refresh_every == 0 and step != self._looked_back_at:
            self._looked_back_at = step
            self._look_back(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.refresh_every:
            self._look_back(pl_module)

    def _look_back(self, module: LightningModule) -> None:
        sample = self.past.sample()
        if sample is not None and self.feedback is not None:
            self.feedback.observe_past(find_exit(module).net, *sample)

    def state_dict(self) -> dict[str, Any]:
        return {"past": self.past.state_dict(), "feedback": self.feedback.state_dict() if self.feedback else self._restored}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.past.load_state_dict(state_dict["past"])
        self._restored = state_dict["feedback"]
