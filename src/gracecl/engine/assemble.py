"""From a plan to the batch of an update: gather the images as bytes, then make their views on the device."""

from __future__ import annotations

import numpy as np
import torch

from gracecl import rng
from gracecl.core import MEMORY_SOURCE, Batch, Block, Ints, Plan, StreamBatch, View
from gracecl.images import augment
from gracecl.inputs import Batched
from gracecl.memory import Memories
from gracecl.nets.tapped import TappedNet


def assemble(
    net: TappedNet,
    memories: Memories,
    plan: Plan,
    new: StreamBatch,
    augmentation: View,
    *,
    seed: int,
    repeat: int = 0,
    learning_rate: float | None = None,
) -> Batch:
    """The planned images: blocks one after the other, in each view after view.

    Draws are keyed by seed, step, repeat, place of the block, view and image, so an image's augmentation does not depend on what
    else is in the batch.
    """
    progress, usual = new.progress, (augmentation if plan.augment is None else plan.augment,)
    blocks: dict[str, Block] = {}
    pixels, labels, sources = [], [], []
    start = 0
    for place, (name, chosen) in enumerate(plan.blocks.items()):
        memory = memories[chosen.store]
        origin = np.concatenate([new.sources[chosen.stream], MEMORY_SOURCE + chosen.slots])
        base = net.inputs.normalise(gather(new.x, chosen.stream, memory[chosen.slots]))
        views, raw = usual if chosen.views is None else chosen.views, []
        for number, view in enumerate(views):
            if augment.is_raw(view):
                raw.append(number)
            stem = rng.key(seed, "augment", progress.step, repeat, place, number)
            pixels.append(augment.apply(view, base, rng.uniform(stem, origin, augment.draws(view)), net.inputs))
        labels += [new.labels[chosen.stream], memory.labels[chosen.slots]] * len(views)
        sources += [origin] * len(views)
        blocks[name] = Block(start, len(chosen), len(views), len(chosen.stream), tuple(raw), chosen.found, memory, chosen.stream)
        start += len(chosen) * len(views)
    x = torch.cat(pixels) if len(pixels) > 1 else pixels[0]
    y, origins = np.concatenate(labels), np.concatenate(sources)
    return Batch(x, y, origins, blocks, progress, net.classes, seed, repeat, learning_rate, plan, new, usual[0])


def gather(x: Batched, positions: Ints, more: Batched) -> Batched:
    """Some images of x, then more images."""
    some = x if np.array_equal(positions, np.arange(len(x))) else x.index_select(0, torch.from_numpy(positions).to(x.device))
    return torch.cat([some, more]) if len(more) else some
