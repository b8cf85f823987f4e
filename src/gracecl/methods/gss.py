"""GSS-Greedy. Aljundi et al., Gradient Based Sample Selection for Online Continual Learning, NeurIPS 2019.

    for each batch B_n from the stream:
        step as experience replay does
        if memory has room: keep the first images that fit, each with score max_i cos(∇CE(x_k), G_i), or 0.1 if memory was empty
        else: G_i <- ∇CE of n_groups random groups of group_size stored images
            if max_i cos(∇CE(B_n), G_i) < threshold:
                v_1 .. v_b <- distinct slots, likely by their score
                c_k <- max_i cos(∇CE(x_k), G_i)
                replace v_k by x_k, with score c_k, with probability (s_v + 1) / (c_k + 1 + s_v + 1)

Gradients are those of the raw images' cross-entropy in evaluation mode, all weights as one vector, summed over the tapped layers.
Training is experience replay's, with its options.

Differences from the paper: a candidate is compared with groups of ten stored images (the program's way; `group_size=1` is the
paper's); victims are drawn by scores scaled from the lowest to the highest (the program's way; `victims="proportional"` is the
paper's); new and replayed images share one optimizer step (the program takes two, ten times per batch: see `mem_iters`); a batch
that does not fit is cut (the program's memory may grow beyond its size); slots are drawn uniformly where too few have a chance
(the program stops with an error).

On a GPU each step with a full memory waits for the device, as the host decides which slots are replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Ints, StreamBatch
from gracecl.memory import Memories, Memory
from gracecl.memory.gss import draw_groups, draw_victims, replacement_chance, similarity, victim_weights
from gracecl.methods.er import ER
from gracecl.nets.scoring import gradients_of_groups
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast

FIRST_SCORE = 0.1
SCORE = "score"


@methods.register("gss")
@dataclass(eq=False, repr=False)
class GSS(ER):
    """GSS-Greedy: experience replay from a memory whose images have dissimilar gradients."""

    n_groups: Annotated[int, AtLeast(1)] = 10
    """groups of stored images that new ones are compared with"""
    group_size: Annotated[int, AtLeast(1)] = 10
    """stored images in a group, of which the mean gradient counts"""
    threshold: float = 0.0
    """a full memory takes no image of a batch whose gradient has at least this cosine with that of a group"""
    victims: Literal["min_max", "proportional"] = "min_max"
    """whether stored images are offered for replacement by their score between the lowest and the highest, or by score + 1"""
    scope: Literal["all", "heads"] = "all"
    """the weights whose gradients are compared; those of the heads alone are an approximation that saves memory and time"""

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        memory, rng = memories.replay, new.rng("store")
        memory.offered += len(new)
        if memory.capacity == 0 or len(new) == 0:
            return
        if len(memory) == 0:
            rows = np.arange(min(memory.capacity, len(new)))
            self.write(memory, rows, rows, torch.full((len(rows),), FIRST_SCORE), new)
            return
        groups = self.gradients(*self.stored(memory, draw_groups(len(memory), self.n_groups, self.group_size, rng)))
        if (free := memory.capacity - len(memory)) > 0:
            rows = np.arange(min(free, len(new)))
            self.write(memory, len(memory) + rows, rows, self.scores(new.select(rows), groups), new)
            return
        whole = self.gradients(self.net.inputs.normalise(new.x)[None], new.labels[None])
        # Whether to go on decides about ten more passes and about slots, which live on the host: worth waiting for the device.
        if similarity(whole, groups).cpu()[0] >= self.threshold:
            return
        stored = memory.attributes[SCORE].cpu().double().numpy()
        slots = draw_victims(victim_weights(stored) if self.victims == "min_max" else stored + 1, len(new), rng)
        rows = np.arange(len(slots))
        scores = self.scores(new.select(rows), groups).cpu()
        taken = rng.random(len(slots)) < replacement_chance(scores.double().numpy(), stored[slots])
        self.write(memory, slots[taken], rows[taken], scores[torch.from_numpy(taken)], new)

    def scores(self, new: StreamBatch, groups: Tensor) -> Tensor:
        """Return `[b]`: how similar each image's gradient is to the most similar of the groups'."""
        return similarity(self.gradients(self.net.inputs.normalise(new.x)[:, None], new.labels[:, None]), groups)

    def stored(self, memory: Memory, slots: Ints) -> tuple[Tensor, Ints]:
        """Return normalised images `[n, b, …]` and labels `[n, b]` of groups of slots."""
        images = self.net.inputs.normalise(memory[slots.reshape(-1)])
        return images.unflatten(0, slots.shape), memory.labels[slots]

    def gradients(self, x: Tensor, labels: Ints) -> Tensor:
        return gradients_of_groups(self.net, x, torch.from_numpy(labels).to(x.device), self.scope)

    def write(self, memory: Memory, slots: Ints, rows: Ints, scores: Tensor, new: StreamBatch) -> None:
        """Put rows of the batch into slots, each with its score."""
        place = torch.from_numpy(rows).to(new.x.device)
        all_scores = torch.zeros(len(new), device=new.x.device, dtype=scores.dtype).index_copy(0, place, scores.to(new.x.device))
        memory.put(slots, new.x, rows, new.labels, new.progress.task, new.kept | {SCORE: all_scores})
