"""Online-LoRA. Wei, Li, Marculescu, Online-LoRA: Task-free Online Continual Learning via Low Rank Adaptation, WACV 2025.

    freeze the transformer; give the queries and values of each block a pair A, B of rank r: W x + B A x, with B = 0
    H <- {}, a list of whole batches of the stream;  k <- 0;  peak <- true
    for each batch b from the stream:
        L <- CE(b) + Σ over h in H of CE(h), each a mean;  append L to the window of the last 5
        Adam step on A, B and the head for L + (λ / 2) Σ_p Ω_p θ_p², over the entries θ of all A and B, once there is Ω
        μ, v <- mean and variance of the window;  peak <- peak or μ > μ_last + √v_last
        if the loss is on a plateau (μ < mean_below, v < variance_below), peak holds, the window is full and H is not empty:
            k <- k + 1;  μ_last, v_last <- μ, v;  peak <- false
            G <- Σ over h in H of the mean over its images of the squared gradient of -log softmax at the predicted class
            Ω <- G / k + (1 - 1/k) Ω
            W <- W + B A;  a new pair: A drawn anew, B = 0
        H <- the n_hard batches of H ∪ {b} with the largest losses

It needs no task marks: where the loss rises and settles again, something new was learned. A new pair starts near 0, which is what
the penalty holds it to. μ is that of a sum of 1 + |H| losses, so thresholds go with n_hard and the size of a batch. On several taps
each loss is the mean over them where the window and the list look at it, the importance is of their sum, and what a tap reads its
layer through (a norm of its own, say) is trained with its head.

Adapters are this method's own (`rank`), and so is Adam (`lr`), whose moments are cleared for a new pair; the run's optimizer has no
part in it. Whether to consolidate and what to keep depends on the losses, so each step waits for the device once.

Differences from the paper and its program: H lies in the run's memory, so it holds fewer batches where these do not fit; its images
are kept raw and seen through another augmentation at each step (the program keeps the augmented ones). The program consolidates
from the first step on, before there is anything in H; takes one softmax over all outputs of the hardest batch alone for G; adds
the pairs' factors instead of their products, which changes the function; and starts the new pair at A = B = 0, where only the
moments that Adam has left move it. reference=True does all of that. Images are normalised as the run says (the program does not;
`--normalise half` is what timm's ViT-B/16 expects).

On a GPU each step waits for the device, as the host looks for plateaus of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl.core import Batch, LossTable, Plan, Planning, Selection, StreamBatch, Taps
from gracecl.errors import UserError
from gracecl.functional import optim
from gracecl.functional.losses import cross_entropy_of_each, full_precision
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits
from gracecl.methods.state import per_weight
from gracecl.nets.flat import FlatParameters
from gracecl.nets.scoring import gradients_of_each
from gracecl.nets.tapped import TappedNet
from gracecl.nets.trunk import LowRankLinear, TrunkOptions, attention_projections
from gracecl.registry import methods
from gracecl.registry.spec import Above, AtLeast

LOSS = "loss"
"""stored beside each image: the mean loss of the batch that it came with, when it was last trained on"""


@methods.register("online_lora")
@dataclass(eq=False, repr=False)
class OnlineLoRA(Method):
    """Online-LoRA: low-rank adapters on a frozen transformer, folded into it and held by importance at plateaus of the loss."""

    rank: Annotated[int, AtLeast(1)] = 4
    """r, of the adapters"""
    n_hard: Annotated[int, AtLeast(0)] = 4
    """h, batches of the stream that are kept and trained on at every step: the hardest ones"""
    strength: Annotated[float, AtLeast(0)] = 2000.0
    """λ, of the pull of the adapters' important entries towards 0"""
    mean_below: float = 6.0
    """the loss is on a plateau where the mean of its window is below this"""
    variance_below: float = 0.1
    """and the window's variance below this"""
    window: Annotated[int, AtLeast(1)] = 5
    """how many of the last losses are looked at"""
    lr: Annotated[float, Above(0)] = 0.0002
    """learning rate of its Adam"""
    reference: bool = False
    """do as the authors' program does, faults included: see the differences above"""

    traits = Traits(attention=True)
    state = (per_weight("importance"), per_weight("frozen"), "consolidated", "losses_seen", "sizes")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        if any(isinstance(module, LowRankLinear) for module in net.modules()):
            raise UserError("online_lora makes its own adapters, of its option rank; leave lora out of the net's expression")
        if not any(attention_projections(module) for module in net.backbone.trunk_modules()):
            raise UserError(
                "online_lora adapts the queries and values of attention, and this net has none; take a transformer such as vit(...)"
            )
        TrunkOptions(lora=self.rank, trunk_lr=net.backbone.trunk_lr).apply(net, "the net")
        self.adapters = [module for module in net.modules() if isinstance(module, LowRankLinear)]
        factors = {factor for adapter in self.adapters for factor in (adapter.down, adapter.up)}
        self.names = {parameter: name for name, parameter in net.named_parameters() if parameter in factors}
        self.flat = FlatParameters(net, memories.replay.inputs)
        self.importance = self.of_adapters(torch.zeros_like)
        self.frozen = torch.zeros_like(self.importance)
        """the factors that were folded so far, added up; only the authors' program needs them"""
        self.consolidated = 0
        self.losses_seen = LossWindow(self.window, self.mean_below, self.variance_below, whole=not self.reference)
        self.sizes: list[int] = []
        """images of each batch in H, the hardest first; they fill the memory in this order"""

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        self.adam = optim.build(f"adam(lr={self.lr})", [(1.0, params)])
        return self.adam

    def of_adapters(self, value_of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Return `[P]`: a tensor for each factor of the adapters as one vector, 0 for all other weights."""
        return self.flat.gather(lambda parameter: value_of(parameter) if parameter in self.names else torch.zeros_like(parameter))

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        hard = {"hard": Selection(slots=np.arange(sum(self.sizes)))} if self.sizes else {}
        yield Plan({"new": Selection(np.arange(len(new)))} | hard)

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        of_batches = self.loss_of_each_batch(out, batch)
        table = {"ce/new": of_batches[:, 0]}
        if self.sizes:
            table["ce/hard"] = of_batches[:, 1:].sum(dim=1)
        if self.consolidated and self.strength:
            squares = self.of_adapters(lambda factor: factor).square()
            table["penalty/online_lora"] = self.strength / 2 * self.flat.by_layer(self.importance * squares)
        return table

    def loss_of_each_batch(self, out: Taps, batch: Batch) -> Tensor:
        """Return `[L, 1 + |H|]`: the mean cross-entropy of the stream's batch, then of those in H."""
        of_images = cross_entropy_of_each(out.logits, batch.y)
        parts = torch.split(of_images, [batch.blocks["new"].images, *self.sizes], dim=1)
        return torch.stack([part.mean(dim=1) for part in parts], dim=1)

    def after_step(self, out: Taps, batch: Batch) -> None:
        losses = self.loss_of_each_batch(out, batch).mean(dim=0)
        if self.losses_seen.add(sum(losses.tolist()), ready=bool(self.sizes) or self.reference):
            self.consolidate(batch)
        of_images = losses.repeat_interleave(torch.tensor([batch.blocks["new"].images, *self.sizes], device=losses.device))
        batch.keep(**{LOSS: of_images})
        if self.sizes:
            block = batch.blocks["hard"]
            block.memory.attributes[LOSS][: block.images] = of_images[block.rows]

    def consolidate(self, batch: Batch) -> None:
        """Find what was important to the adapters, and fold them."""
        self.consolidated += 1
        share = 1 / self.consolidated
        self.importance = share * self.squared_gradients(batch) + (1 - share) * self.importance
        if self.reference:
            self.add_factors()
        else:
            self.fold(batch.rng("adapters"))

    def squared_gradients(self, batch: Batch) -> Tensor:
        """Return G as one vector."""
        weights = {name: parameter.detach() for parameter, name in self.names.items()}
        sums = {name: torch.zeros_like(value) for name, value in weights.items()}
        entries = torch.split(batch.x[batch.rows("hard")], self.sizes) if self.sizes else ()
        for images in entries[:1] if self.reference else entries:
            groups = images.unsqueeze(0 if self.reference else 1)
            for name, gradients in gradients_of_each(self.net, weights, surprise_of_prediction, groups).items():
                sums[name] += gradients.square().mean(dim=0)
        return self.of_adapters(lambda parameter: sums[self.names[parameter]])

    def fold(self, rng: np.random.Generator) -> None:
        """Add the adapters to the weights that they change, so that the function stays, and begin new ones."""
        for adapter in self.adapters:
            adapter.weight += adapter.change(adapter.down, adapter.up)
            drawn = rng.uniform(-adapter.bound, adapter.bound, adapter.down.shape)
            adapter.down.copy_(torch.from_numpy(drawn))
            adapter.up.zero_()
        for factor in self.names:
            self.adam.state.pop(factor, None)

    def add_factors(self) -> None:
        """Add A and B to those folded before and begin both at 0, as the authors' program does instead of folding."""
        before, self.frozen = self.frozen, self.frozen + self.of_adapters(lambda factor: factor)
        were, are = self.flat.scatter(before), self.flat.scatter(self.frozen)
        for adapter in self.adapters:
            down, up = adapter.down, adapter.up
            adapter.weight += adapter.change(are[down], are[up]) - adapter.change(were[down], were[up])
        for factor in self.names:
            factor.zero_()

    def after_batch(self, memories: Memories, new: StreamBatch) -> None:
        """Keep the hardest batches, as many as n_hard and the memory allow."""
        memory, sizes = memories.replay, [len(new), *self.sizes]
        of_images = new.kept[LOSS]
        if self.sizes:
            of_images = torch.cat([of_images, memory.attributes[LOSS][: len(memory)]])
        losses = of_images[torch.from_numpy(np.cumsum([0, *sizes[:-1]])).to(of_images.device)].tolist()
        kept: list[int] = []
        room = memory.capacity
        for entry in sorted(range(len(sizes)), key=lambda entry: -losses[entry]):
            if len(kept) < self.n_hard and 0 < sizes[entry] <= room:  # one that does not fit costs no other its place
                kept.append(entry)
                room -= sizes[entry]
        if kept == list(range(1, len(sizes))):
            return
        images = torch.cat([new.x, memory.examples.images])
        labels = np.concatenate([new.labels, memory.examples.labels])
        tasks = np.concatenate([np.full(len(new), new.progress.task), memory.examples.tasks])
        rows = np.split(np.arange(len(labels)), np.cumsum(sizes)[:-1])
        memory.clear()
        self.sizes = [sizes[entry] for entry in kept]
        for entry in kept:
            slots = len(memory) + np.arange(sizes[entry])
            memory.put(slots, images, rows[entry], labels, int(tasks[rows[entry][0]]), {LOSS: of_images})


class LossWindow:
    """The last losses, and whether they lie on a plateau that follows a peak."""

    def __init__(self, length: int, mean_below: float, variance_below: float, whole: bool) -> None:
        """`whole` asks for a full window."""
        self.length, self.mean_below, self.variance_below, self.whole = length, mean_below, variance_below, whole
        self.values: list[float] = []
        self.peak = True
        self.last_mean = self.last_variance = 0.0
        """of the last plateau, once there was one"""

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def variance(self) -> float:
        return float(np.var(self.values))

    def add(self, loss: float, ready: bool) -> bool:
        """Add the next loss; return whether it makes a plateau, which nothing does before `ready`."""
        self.values = [*self.values, loss][-self.length :]
        mean, variance = self.mean, self.variance
        self.peak = self.peak or mean > self.last_mean + self.last_variance**0.5
        ready = ready and (len(self.values) == self.length or not self.whole)
        if not (ready and self.peak and mean < self.mean_below and variance < self.variance_below):
            return False
        self.peak, self.last_mean, self.last_variance = False, mean, variance
        return True

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("values", "peak", "last_mean", "last_variance")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def surprise_of_prediction(logits: Tensor) -> Tensor:
    """Return -log softmax at its largest entry, summed over layers; outputs of several images count as those of one."""
    return -F.log_softmax(full_precision(logits).flatten(1), dim=-1).amax(dim=-1).sum()
