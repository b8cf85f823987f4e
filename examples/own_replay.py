"""A replay method of your own that stores something beside its images: the logits they had when they were new, as DER does."""

from dataclasses import dataclass

import numpy as np

import gracecl
from gracecl.core import Plan, Selection
from gracecl.functional.losses import cross_entropy, logit_distance
from gracecl.methods.replay import Replay
from gracecl.methods.state import per_class
from gracecl.registry import methods


@methods.register("own_der")
@dataclass(eq=False, repr=False)
class OwnDER(Replay):
    """Stored images are replayed against the logits they had when they were new."""

    alpha: float = 0.2  # weight of the distance to these logits
    kept = (per_class("logits", axis=1),)  # [layers, classes] beside each image, longer when a class is new

    def plan(self, new, memories, planning):
        slots = memories.replay.draw(self.n_recall, planning.rng)
        replay = {"replay": Selection(slots=slots)} if len(slots) else {}
        return Plan({"new": Selection(np.arange(len(new)))} | replay)

    def losses(self, out, batch):
        new = batch.rows("new")
        table = {"ce/new": cross_entropy(out.logits[:, new], batch.y[new])}
        if "replay" in batch.blocks:
            table["kd/logits"] = self.alpha * logit_distance(out.logits[:, batch.rows("replay")], batch.stored("replay", "logits"))
        return table

    def after_step(self, out, batch):
        batch.keep(logits=out.logits)


for method in ("own_der", "grace(own_der(n_recall=16))"):
    print(gracecl.run(method, stream="split-digits(size=8, tasks=5)", net="mlp(width=32, depth=4)", memory=100, augment="none"))
