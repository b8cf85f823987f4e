"""MIR, maximally interfered retrieval. Aljundi et al., Online Continual Learning with Maximally Interfered Retrieval, NeurIPS 2019.

    for each batch B_n from the stream:
        C <- n_candidates images drawn from memory, none of them twice
        θ_v <- θ - virtual_lr · ∇CE(B_n; θ)
        s_i <- CE(x_i; θ_v) - CE(x_i; θ) for each candidate
        B_M <- the n_recall candidates with the largest s_i
        step from θ on CE(B_n) + CE(B_M)
        memory <- reservoir(memory, B_n)

θ_v is one plain step, without momentum, weight decay or adaptive scaling. It is taken on the stream's images as the training step
will see them; candidates are scored as they are stored and augmented after the selection. With several tapped layers a loss is
summed over them; GRACE's weights act on the training step, not on the scores.

Differences from the paper: candidates may be of the current task, and are replayed in the first one (the paper's runs leave both
out); BatchNorm normalises the candidates by their own batch as the paper's program does, but scoring does not move its running
statistics (`score_bn`); the stream's batch passes the net once more in the training step, so a step costs its forward and backward
twice (the paper's program reuses the gradient), which lets planning leave the learner untouched and wrappers reweigh the loss;
64 of 256 candidates are replayed (the program: 10 of 50).

On a GPU each step waits for the device, as the host keeps the list of slots that are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from gracecl.core import Batch, Ints, Planning, Selection, StreamBatch, Taps
from gracecl.functional.losses import cross_entropy_of_each
from gracecl.memory import Memories
from gracecl.methods.er import ER
from gracecl.nets.scoring import Normalisation, gradient, loss_of_each, rate_ahead, step_ahead
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast

BEST_LOSS, SCORED = "best_loss", "scored"


@methods.register("mir")
@dataclass(eq=False, repr=False)
class MIR(ER):
    """MIR: replay the stored images whose loss would grow most under the step on the new ones."""

    reduction: Literal["concat", "sum_of_means"] = "sum_of_means"
    """two forwards and the sum of two means, or one forward and one mean over new and replayed images"""
    n_candidates: Annotated[int, AtLeast(0)] = 256
    """images drawn from memory and scored at each step"""
    virtual_lr: float | None = None
    """rate of the step that is looked ahead; None is the optimizer's for SGD and 0.1 for others, whose rates mean something else"""
    criterion: Literal["growth", "over_best"] = "growth"
    """what the loss after the virtual step is compared with: the loss now, or the smallest loss the image ever had, if less"""
    score_bn: Normalisation = "frozen"
    """how BatchNorm treats the candidates: by their batch with the running statistics kept, by the running statistics (`eval`), or
    by their batch with the statistics moved once more (`train`, as the paper's program does)"""

    def recall(self, new: StreamBatch, memories: Memories, planning: Planning) -> Selection:
        """Return the candidates with the most interference. Slots are needed on the host, so this waits for the
        device once.
        """
        wanted = self.recalled(new)
        slots = memories.replay.draw(max(self.n_candidates, wanted), planning.rng)
        if len(slots) <= wanted:
            return Selection(slots=slots)
        before, after = self.losses_around_the_step(new, memories, planning, slots)
        chosen: Ints = (after - before).topk(wanted).indices.cpu().numpy()
        return Selection(slots=slots[chosen], found={SCORED: (slots, before)} if self.criterion == "over_best" else {})

    def losses_around_the_step(
        self, new: StreamBatch, memories: Memories, planning: Planning, slots: Ints
    ) -> tuple[Tensor, Tensor]:
        """Return `[C]` each: what the loss of each candidate is compared with, and what it would be after the
        virtual step.
        """
        net, memory, device = self.net, memories.replay, new.x.device
        x = net.inputs.normalise(new.x) if planning.preview is None else planning.preview((planning.augment,))
        direction = gradient(net, x, torch.from_numpy(new.labels).to(device), "frozen")
        ahead = step_ahead(net, direction, rate_ahead(self.virtual_lr, planning.learning_rate))
        candidates, labels = net.inputs.normalise(memory[slots]), torch.from_numpy(memory.labels[slots]).to(device)
        now = loss_of_each(net, candidates, labels, normalisation=self.score_bn)
        then = loss_of_each(net, candidates, labels, ahead, "eval" if self.score_bn == "eval" else "frozen")
        if self.criterion == "over_best":
            now = torch.minimum(now, memory.attributes[BEST_LOSS][torch.from_numpy(slots).to(device)])
        return now, then

    def after_step(self, out: Taps, batch: Batch) -> None:
        """Keep the smallest losses, where the criterion asks for them."""
        for block in batch.blocks.values():
            if SCORED in block.found:
                slots, losses = block.found[SCORED]
                block.memory.attributes[BEST_LOSS][torch.from_numpy(slots).to(losses.device)] = losses
        if self.criterion == "over_best":
            batch.keep(**{BEST_LOSS: cross_entropy_of_each(out.logits, batch.y).sum(dim=0)})
