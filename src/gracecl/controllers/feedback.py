"""Layer-wise feedback for any training loop: `Σ_l (α_l · L_l + γ_l · H_l)` with α and γ that follow what the layers show.

In a loop of your own, with no trainer, stream or memory of ours::

    net = gracecl.tap(my_model, classes=100)
    feedback = gracecl.Feedback(layers=net.layers)
    out = net(x)
    loss = feedback(out.logits, ce_per_layer)        # Σ α·CE + γ·H, and it logs itself
    feedback.observe_past(net, past_x, past_y)       # once per task, or every k steps

α stays 1 unless the controller says `adaptive=True`, as in `Feedback(net.layers, "paper(adaptive=True)")`, which is the paper's:
in our runs its α lowered accuracy, and γ alone did no harm (docs/feedback.md).

Under `torch.distributed`, where each process has images of its own, all processes follow the mean of their entropies and one
accuracy of the past, so that α and γ are the same everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, distributed, nn

from gracecl import controllers
from gracecl.controllers.base import Controller, Signals, in_double, spread
from gracecl.core import LossTable, Taps
from gracecl.errors import UserError
from gracecl.nets.mode import in_mode

FETCH_EVERY = 500
"""calls between two transfers of the history to the host"""


class Feedback:
    """Compute α, γ and the objective they make. Calling it is one step of a loop; `history` records all of them."""

    def __init__(
        self,
        layers: int,
        controller: str | Controller = "paper",
        device: torch.device | str = "cpu",
        synchronise: bool = True,
    ) -> None:
        """Build the feedback for so many layers; `controller` is an expression such as "bayes(tau=0.5)" ('gracecl
        list controllers').

        With `synchronise`, the processes of `torch.distributed` agree on α and γ, and each of them must make the same calls; give
        False where a process learns by itself.
        """
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
            raise UserError(f"feedback needs at least one tapped layer, not {layers!r}; give layers=net.layers")
        if not isinstance(controller, str | Controller):
            raise UserError(f"controller is an expression such as 'bayes(tau=0.5)', not a {type(controller).__name__}")
        self.layers = layers
        self.controller = controllers.build(controller) if isinstance(controller, str) else controller
        self.synchronise = synchronise
        self.accuracy = in_double(torch.full((layers,), torch.nan, device=device))
        """of each layer on past images, in double precision; NaN before any was observed"""
        self._recent: dict[str, list[Tensor]] = {}
        self._fetched: dict[str, list[npt.NDArray[np.float32]]] = {}

    # In a loop of your own.

    def __call__(self, logits: Tensor, losses: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the objective of one step, to call `backward()` on.

        `logits [L, B, C]` of the tapped layers, `losses [L]` of their heads, both with gradients; `labels [B]` for rules that
        compare gradients, and for the history to tell how the two terms' gradients compare.
        """
        if not isinstance(logits, Tensor) or not isinstance(losses, Tensor):
            raise UserError(
                f"feedback needs logits and losses as tensors, not a {type(logits).__name__} and a {type(losses).__name__}; "
                "net(x).logits of a tapped net and gracecl.functional.losses.cross_entropy(logits, y) are such"
            )
        if logits.ndim != 3 or len(logits) != self.layers or logits.shape[1] == 0:
            raise UserError(f"feedback needs logits [{self.layers} layers, images, classes], not {list(logits.shape)}")
        if losses.shape != (self.layers,):
            raise UserError(
                f"feedback needs one loss per tapped layer, [{self.layers}], not {list(losses.shape)}; "
                "gracecl.functional.losses.cross_entropy(logits, y) gives them"
            )
        agree = self._mean_over_processes if self._shared else None
        signals = Signals(logits, self.accuracy, labels, agree=agree)
        alpha, gamma = self.factors(signals)
        total = (alpha * losses + self.controller.term(signals, gamma)).sum()
        with torch.no_grad():
            self._note({"loss": losses} | self.described(signals, alpha, gamma))
            if labels is not None:
                self._note({"gradient_ratio": self.gradient_ratio(signals, alpha, gamma)})
            self.controller.after_step(signals)
        return total

    def observe_past(self, net: nn.Module, x: Tensor, y: Tensor | npt.ArrayLike, batch: int = 256) -> Tensor:
        """Measure each layer's accuracy on images of the past, which sets an adaptive α from now on; return the accuracies `[L]`.

        `net(x)` gives taps or logits `[L, B, C]`. It is evaluated without gradients and left in the mode it was in. Images may
        be on another device than the net; they are brought to it batch by batch.
        """
        if not isinstance(net, nn.Module):
            raise UserError(f"observe_past needs a net, such as gracecl.tap(...) gives, not a {type(net).__name__}")
        x = torch.as_tensor(x)
        labels = torch.as_tensor(np.asarray(y) if not isinstance(y, Tensor) else y)
        if len(x) != len(labels) or len(labels) == 0:
            raise UserError(f"observe_past needs images and as many labels, at least one, not {len(x)} and {len(labels)}")
        right = torch.zeros(self.layers, dtype=torch.int64)
        device = next((weight.device for weight in net.parameters()), x.device)
        with in_mode(net, training=False), torch.no_grad():
            for start in range(0, len(labels), batch):
                out = net(x[start : start + batch].to(device))
                logits = out.logits if isinstance(out, Taps) else out
                if logits.ndim != 3 or len(logits) != self.layers:
                    raise UserError(
                        f"observe_past needs a net that gives logits [{self.layers} layers, images, classes], not "
                        f"{list(logits.shape)}; give what gracecl.tap(...) returned"
                    )
                wanted = labels[start : start + batch].to(logits.device)
                if labels.is_floating_point() or not ((wanted >= 0) & (wanted < logits.shape[-1])).all():
                    raise UserError(
                        f"observe_past needs labels from 0 to {logits.shape[-1] - 1}, whole numbers of the net's classes"
                    )
                right = right.to(logits.device) + (logits.argmax(dim=-1) == wanted).sum(dim=-1)
        counted = torch.cat([right, right.new_tensor([len(labels)])])
        if self._shared:
            distributed.all_reduce(counted)
        counted = in_double(counted)
        self.accuracy = counted[:-1] / counted[-1]
        return self.accuracy

    @property
    def _shared(self) -> bool:
        """Return whether other processes train the same net."""
        return self.synchronise and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1

    @staticmethod
    def _mean_over_processes(values: Tensor) -> Tensor:
        shared = values.clone()
        distributed.all_reduce(shared)
        return shared / distributed.get_world_size()

    @property
    def history(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return arrays `[steps, layers]` of every call, by name. Of calls with labels there is a gradient_ratio, too."""
        for name in self._recent:
            self._fetch(name)
        return {name: np.concatenate(parts) for name, parts in self._fetched.items()}

    def _note(self, rows: LossTable) -> None:
        for name, value in rows.items():
            recent = self._recent.setdefault(name, [])
            recent.append(value.detach().float())
            if len(recent) == FETCH_EVERY:
                self._fetch(name)

    def _fetch(self, name: str) -> None:
        """Fetch the latest values to the host, in one transfer."""
        if recent := self._recent[name]:
            self._fetched.setdefault(name, []).append(torch.stack(recent).cpu().numpy())
            recent.clear()

    # What grace(...) shares with it.

    def factors(self, signals: Signals) -> tuple[Tensor, Tensor]:
        """Return α and γ of a step on the device of the entropies and in their precision."""
        alpha, gamma = self.controller(signals)
        return alpha.to(signals.entropy), gamma.to(signals.entropy)

    def described(self, signals: Signals, alpha: Tensor, gamma: Tensor) -> LossTable:
        """Return what is recorded of a step."""
        h = signals.entropy.detach()
        sigma = spread(h, self.controller.unbiased).to(h).expand_as(h)
        return {"H": h, "z": self.controller.relative(h), "gamma": gamma.detach(), "alpha": alpha, "sigma_H": sigma}

    def gradient_ratio(self, signals: Signals, alpha: Tensor, gamma: Tensor) -> Tensor:
        """`[L]`: the gradient norm of the entropy term at the logits over that of α times a plain mean cross-entropy."""
        return self.controller.slope(signals, gamma).detach().abs() * signals.pull / alpha

    def state_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accuracy = state["accuracy"].to(self.accuracy)
        self.controller.load_state_dict(state["controller"])
