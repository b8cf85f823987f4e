"""What OCM and OnPro have in common: InfoNCE over the pseudo classes that rotations make of every class.

    R(x) <- 16 views of x: none, one or both halves of the image turned by 180 degrees, the whole by 0, 90, 180 or 270
    the pseudo label of view k of an image of class c is (c, k)
    F, Z <- unit features and unit projections of V = [R(x); A(R(x))], A the run's augmentation, drawn for every row
    S <- λ (Z F_s' + Z Z'), F_s as many columns of F as Z has, from a random place on
    l_ij <- -log softmax_j(S_ij / τ)
    L_new <- mean_i l_i,pair(i) + 2 · mean_i mean_j l_ij        on new images; pair(i) is the other view of row i
    L_mem <- mean_i mean_j l_ij                                 on replayed ones; both inner means run over i's pseudo class

The softmax of L_new leaves j = i out, that of L_mem does not. New and replayed images share a forward.

The projection has a quarter of the features' columns, as with the papers' 128 of 512, so that narrower nets have room for F_s.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from gracecl.core import Batch, Block, LossTable, Plan, Selection, Taps, View, apart
from gracecl.errors import UserError
from gracecl.functional.losses import info_nce, info_nce_of_pairs, info_nce_terms, split_similarity
from gracecl.images.augment import ROTATIONS
from gracecl.memory import Memories
from gracecl.methods.replay import Replay
from gracecl.nets.tapped import StackedLinear, TappedNet
from gracecl.registry.spec import Above, AtLeast

TURNED = ("new", "replay")
"""the blocks that are seen in all rotations, raw and augmented"""
FEATURES_PER_PROJECTION = 4


@dataclass(eq=False, repr=False)
class RotationContrast(Replay):
    """A method that contrasts 16 rotations of new and replayed images."""

    recall_per_class: Annotated[int, AtLeast(1)] | None = field(default=7, kw_only=True)
    """draw at most so many images for each class met so far; None draws n_recall at once"""
    scale: float = field(default=1.0, kw_only=True)
    """λ of steps with replay, which similarities are multiplied by; it is 1 in the first task"""
    temperature: Annotated[float, Above(0)] = field(default=0.07, kw_only=True)
    """τ"""
    projection: int | None = field(default=None, kw_only=True)
    """columns of the projection; None is a quarter of the features'"""

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        height, width = memories.replay.images.shape[-2:]
        if height != width:
            raise UserError(f"{self.name} turns images by 90 degrees, so they must be square, not {height} × {width}")
        columns = max(1, net.width // FEATURES_PER_PROJECTION) if self.projection is None else self.projection
        if not 1 <= columns <= net.width:
            raise UserError(f"{self.name}: projection must lie between 1 and the {net.width} features of the net, not {columns}")
        if columns != net.projector.weight.shape[-1]:
            net.projector = StackedLinear(net.layers, net.width, columns).to(net.projector.weight)

    def prepare(self, batch: Batch) -> None:
        batch.supervised = batch.rows("supervised")

    def contrasts(self, out: Taps, batch: Batch) -> LossTable:
        """Return L_new, and L_mem where images are replayed."""
        replayed = "replay" in batch.blocks
        scale, projected = self.scale if replayed else 1.0, self.projected(out, batch)
        table = {}
        for block, start in zip(TURNED[: 1 + replayed], self.starts(batch), strict=False):
            where = batch.blocks[block]
            similarity = scale * split_similarity(out.features[:, where.rows], projected[:, where.rows], start)
            terms = info_nce_terms(similarity, self.temperature, exclude_self=block == "new")
            table[f"sc/{block}"] = info_nce(terms, pseudo_labels(self.labels_of(block, batch), batch.classes).repeat(2))
            if block == "new":
                table["sc/new"] = info_nce_of_pairs(terms) + 2 * table["sc/new"]
        return table

    def projected(self, out: Taps, batch: Batch) -> Tensor:
        """Return projections of the rotated views, which are the first rows of a step."""
        return out[slice(0, max(batch.rows(block).stop for block in TURNED if block in batch.blocks))].embedding

    def starts(self, batch: Batch) -> tuple[int, int]:
        """Draw the first columns of F_s, for new and for replayed images. As in the programs, the last place is
        never drawn.
        """
        room = self.net.width - self.net.projector.weight.shape[-1]
        new, replayed = batch.rng("columns of features").integers(0, max(1, room), 2)
        return int(new), int(replayed)

    def labels_of(self, block: str, batch: Batch) -> Tensor:
        """Return the labels that make images of a block the same class."""
        return batch.y[batch.blocks[block].view(0)]


def turned_plan(turned: dict[str, Selection], others: dict[str, Selection], augment: View) -> Plan:
    """Plan blocks in all rotations, which share a forward, and others, which have one each; all augmented."""
    views = (*ROTATIONS, *((*rotation, *augment) for rotation in ROTATIONS))
    blocks = {block: replace(rows, views=views) for block, rows in turned.items()}
    return Plan(blocks | others, forwards=[[*turned], *apart(others)])


def pseudo_labels(y: Tensor, classes: int) -> Tensor:
    """Return `[16 n]`: a number for each label `[n]` and view, view after view."""
    return (y + classes * torch.arange(len(ROTATIONS), device=y.device)[:, None]).flatten()


def raw_turned(block: Block) -> slice:
    """Return the rows of the views R(x), without the augmented ones."""
    return slice(block.start, block.start + len(ROTATIONS) * block.images)
