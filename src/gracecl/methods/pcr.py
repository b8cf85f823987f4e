"""PCR, proxy-based contrastive replay. Lin et al., CVPR 2023.

    for each batch x from the stream:
        if memory is empty: store x and go on
        u <- n_recall images drawn from memory, none of them twice
        F <- features of u, T(u) in one forward and of x, T(x) in another;  n_c <- how many of these rows are of class c
        s <- cos(F, W) / temperature, W the proxies of the classes: the weights of a head without bias
        step on  mean_i [ -s_i,y + log Σ_c n_c exp(s_i,c) ]
        memory <- reservoir(memory, x)
    predict the class whose proxy is nearest by cosine

The sum runs over the classes of the step, so no other proxy moves; each counts as often as it occurs, which damps frequent ones. It
is contrast with the proxies of all images' classes in closed form, and a softmax cross-entropy with logits shifted by log n_c:
the row is `ce/proxy`, and GRACE's α acts on it.

Differences from the paper and its program: T is the run's augmentation (`--augment full` is the program's); with n_recall=0 the
step trains on the new images' two views once memory holds anything; n_recall is 64 (the program's 10 belongs to a smaller net).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from gracecl.core import Batch, LossTable, Plan, Planning, Selection, StreamBatch, Taps, apart
from gracecl.functional.losses import proxy_contrast
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.replay import Replay
from gracecl.nets.heads import CosineHead
from gracecl.nets.tapped import TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above

COSINE_EPSILON = 1e-6


@methods.register("pcr")
@dataclass(eq=False, repr=False)
class PCR(Replay):
    """PCR: every image against the proxies of the classes in its step, each counted as often as the class occurs."""

    temperature: Annotated[float, Above(0)] = 0.09
    """cosines are divided by it"""
    joint_forward: bool = False
    """one forward for new and replayed images, hence one BatchNorm batch, instead of one for each"""

    traits = Traits(met_only=True)

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        net.classifier = CosineHead(net.classifier, 1 / self.temperature, COSINE_EPSILON)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        if len(memories.replay) == 0:
            return Plan({})
        slots, views = memories.replay.draw(self.recalled(new), planning.rng), ((), planning.augment)
        blocks = {"replay": Selection(slots=slots, views=views), "new": Selection(np.arange(len(new)), views=views)}
        blocks = {block: rows for block, rows in blocks.items() if len(rows)}
        return Plan(blocks, forwards=None if self.joint_forward else apart(blocks))

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        return {"ce/proxy": proxy_contrast(out.logits, batch.y)}
