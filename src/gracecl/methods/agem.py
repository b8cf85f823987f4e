"""A-GEM, averaged gradient episodic memory. Chaudhry et al., Efficient Lifelong Learning with A-GEM, ICLR 2019.

    for each batch B_n from the stream:
        g <- ∇CE(B_n)
        if memory has images: g_ref <- ∇CE(n_reference images drawn from memory), all weights as one vector
            if <g, g_ref> < 0: g <- g - <g, g_ref> / <g_ref, g_ref> · g_ref
        step along g
        memory <- reservoir(memory, B_n)

The memory is not trained on; it only vetoes the part of a step that would raise its loss. Its loss is therefore no term of the
objective, and wrappers leave it as it is: under GRACE the stream's cross-entropy is weighted and its entropy added, while the
reference stays the memory's plain loss in full precision, summed over the layers. Penalties of other methods are added after the
projection, as the optimizer's own weight decay and momentum are.

Differences from the paper: the softmax spans all classes (the paper's is restricted to each image's own task); memory is a
reservoir of everything seen (the paper's has a fixed number of slots per class); images of the current task may be in the
reference (`exclude_current_task` gives the paper's rule); the stream's forward comes first (the paper's program begins with the
memory's, which only BatchNorm's running statistics can tell); a reference shorter than 1e-6 forbids nothing (the program divides
by it); 64 images make the reference (the program: 256); images are seen through the run's augmentation (the program has none).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Batch, LossTable, Plan, Planning, Selection, StreamBatch, Taps
from gracecl.functional.losses import cross_entropy
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits
from gracecl.nets.flat import FlatParameters
from gracecl.nets.scoring import gradient
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import AtLeast

SMALLEST_SQUARE = 1e-12


@methods.register("agem")
@dataclass(eq=False, repr=False)
class AGEM(Method):
    """A-GEM: steps on the stream, without what would raise the loss of images drawn from memory."""

    n_reference: Annotated[int, AtLeast(0)] = 64
    """images drawn from memory at each step, whose loss may not rise"""
    exclude_current_task: bool = False
    """draw them from finished tasks alone, as the paper does; needs a stream with task marks"""
    add_reference: bool = False
    """train on the memory as well, by adding its gradient after the projection (A-GEM++)"""

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return Traits(boundaries="required" if self.exclude_current_task else "unused")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.weights = FlatParameters(net, memories.replay.inputs)

    def plans(self, new: StreamBatch, memories: Memories, planning: Planning) -> Iterator[Plan]:
        barred = new.progress.task if self.exclude_current_task else None
        slots = memories.replay.draw(self.n_reference, planning.rng, except_task=barred)
        reference = {"reference": Selection(slots=slots)} if len(slots) else {}
        yield Plan({"new": Selection(np.arange(len(new)))} | reference)

    def prepare(self, batch: Batch) -> None:
        if "reference" in batch.blocks:
            batch.targets["agem/images"], batch.targets["agem/labels"] = batch.take_out("reference")

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        return {"ce/new": cross_entropy(out.logits, batch.y)}

    def after_backward(self, batch: Batch) -> None:
        """Project the stream's gradient."""
        if "agem/images" in batch.targets:
            reference = self.reference(batch.targets["agem/images"], batch.targets["agem/labels"])
            allowed = project(self.weights.gradient(), reference)
            self.weights.set_gradient(allowed + reference if self.add_reference else allowed)

    def reference(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return `[P]`: the gradient of their loss. The pass moves BatchNorm's statistics, as every pass in
        training does.
        """
        found = gradient(self.net, images, labels, "train")
        of = {parameter: found.get(name, torch.zeros_like(parameter)) for name, parameter in self.net.named_parameters()}
        return self.weights.gather(of.__getitem__)


def project(g: Tensor, reference: Tensor) -> Tensor:
    """Return g without its part against the reference if it points that way; a reference of length 0 forbids
    nothing.
    """
    product, square = g @ reference, reference @ reference
    without = g - product / square.clamp(min=SMALLEST_SQUARE) * reference
    return torch.where((product < 0) & (square >= SMALLEST_SQUARE), without, g)
