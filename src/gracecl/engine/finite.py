"""Numbers that are not finite are found before they are kept: gradients before the optimizer's step, weights before a checkpoint
or a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gracecl.core import is_loss
from gracecl.errors import UserError

LOOK_EVERY = 50
REMEDY = "use a smaller learning rate (optimizer, such as 'sgd(lr=0.01)') or precision fp32"


class Norms:
    """Collect gradient norms: checked before the step on a CPU, elsewhere in one transfer for many updates."""

    def __init__(self, device: torch.device, refuse: Callable[[int, int, float], UserError | None]) -> None:
        """`refuse(step, position, norm)` is called for a norm that is not finite and returns an error, or None for
        an overflow.
        """
        self.every, self.refuse = 1 if device.type == "cpu" else LOOK_EVERY, refuse
        self._noted: list[tuple[int, Tensor]] = []

    def note(self, step: int, norms: Tensor) -> None:
        """Note the norms [P] of an update."""
        self._noted.append((step, norms))
        if len(self._noted) >= self.every:
            self.check()

    def check(self) -> None:
        """Check the norms noted since the last time."""
        noted, self._noted = self._noted, []
        if noted and not math.isfinite(torch.stack([norms.sum() for _, norms in noted]).sum().item()):
            for step, norms in noted:
                for position, norm in enumerate(norms.tolist()):
                    if not math.isfinite(norm) and (error := self.refuse(step, position, norm)):
                        raise error


def check_scale(scaler: torch.amp.GradScaler, step: int) -> None:
    """Refuse to go on once GradScaler has skipped so many steps that its scale is below 1."""
    if scaler.is_enabled() and scaler.get_scale() < 1:
        raise UserError(
            f"so many steps were left out, as their gradients were not finite, that half precision scales the loss by less than 1 "
            f"at step {step}; {REMEDY}"
        )


def check_losses(rows: dict[str, list[float]], step: int) -> None:
    """Refuse losses that are not finite: the weights are lost, and all that follows would mean nothing."""
    for row, values in rows.items():
        if is_loss(row) and not all(map(math.isfinite, values)):
            raise UserError(f"the loss row '{row}' became {values} at step {step}; {REMEDY}")


def check_weights(net: nn.Module, step: int) -> None:
    """Refuse to save weights that are not finite, or to predict with them."""
    values = {name: value for name, value in net.state_dict().items() if value.is_floating_point() and value.numel()}
    finite = torch.stack([value.isfinite().all() for value in values.values()]).tolist()
    for name, good in zip(values, finite, strict=True):
        if not good:
            raise UserError(f"'{name}' of the net is not finite after step {step - 1}; what was saved before is intact; {REMEDY}")


def check_scores(scores: Tensor, step: int) -> None:
    """Refuse scores that are not numbers."""
    if bool(scores.isnan().any()):
        raise UserError(f"the net's scores are not numbers after step {step - 1}; what was saved before is intact; {REMEDY}")
