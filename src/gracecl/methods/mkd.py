"""MKD, a momentum teacher. Michel et al., Rethinking Momentum Knowledge Distillation in Online Continual Learning, ICML 2024.

    teacher <- copy of the net
    for each optimizer step of the inner method on images x:
        t <- teacher(x), or teacher(RandAugment(x)) if harder > 0, s <- net(x), both with the statistics of the batch
        step on the inner method's losses + λ T² mean KL( softmax(t/T) ‖ softmax(s/T) )
        teacher <- (1 - a) teacher + a net, weights alone
    predict with the mean of the net's and the teacher's weights

No task marks are needed: the teacher is slow, not old.

Differences from the paper: the teacher sees the views that the inner method trains on, so no view is added for it and no further
cross-entropy (the paper draws a view of its own and pulls the net on the raw image, too, to what the teacher says of it); it starts
as a copy (the released program's starts near zero and takes about 300 steps to grow); the term can act on all tapped layers, a
share of λ each, where the paper's nets have one. `harder` is not in the paper: the net learns what the teacher says of a harder
view of the image, the step of the chain in CCL-DC (Wang et al., Improving Plasticity in Online Continual Learning via Collaborative
Learning, CVPR 2024), with the average in the place of its second net, and RandAugment drawn for each image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from gracecl.core import Batch, LossTable, Taps
from gracecl.functional.losses import distillation
from gracecl.images.rand_augment import RandAugment
from gracecl.memory import Memories
from gracecl.methods.base import Method, Traits, Wrapper
from gracecl.nets.tapped import BATCH_NORMS, TappedNet
from gracecl.nets.teacher import Average, frozen_copy
from gracecl.registry import methods
from gracecl.registry.spec import Above, Within


@methods.register("mkd")
@dataclass(eq=False, repr=False)
class MKD(Wrapper):
    """MKD: distillation from a moving average of the net's own weights, around any method."""

    inner: Method = "er()"  # type: ignore[assignment]
    """the method that makes the other losses"""
    strength: float = 5.5
    """λ, the weight of the distillation"""
    teacher_rate: Annotated[float, Within(0, 1)] = 0.01
    """a, the share of the net that the teacher takes on at each optimizer step"""
    temperature: Annotated[float, Above(0)] = 4.0
    """T, by which logits are divided"""
    harder: Annotated[int, Within(0, 100)] = 0
    """operations of RandAugment that make the teacher's view harder than the net's; CCL-DC has 3 on CIFAR, 0 is the same view"""
    magnitude: Annotated[float, Within(0, 30)] = 15
    """their strength from 0 to 30"""
    layers: Literal["last", "all"] = "last"
    """tapped layers that are distilled: the deepest, or all of them with an equal share of λ"""
    predict: Literal["mean", "teacher", "net"] = "mean"
    """whose weights predict; all with the net's running statistics"""

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return Traits(met_only=False, makes_inputs=self.harder > 0)

    state = ("teacher", "begun")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        self.teacher = Average(net, statistics=False)
        for module in self.teacher.copy.train().modules():
            if isinstance(module, BATCH_NORMS):
                module.momentum = 0.0  # it uses each batch's statistics and keeps none
        weight = torch.ones(net.layers) / net.layers if self.layers == "all" else torch.eye(net.layers)[-1]
        self.begun = False
        self.layer_weight = weight.to(net.classifier.weight.device)

    def prepare(self, batch: Batch) -> None:
        if not self.begun:  # whatever weights the first step starts from, the teacher starts from too
            self.teacher.start_over()
        self.net.meter.count(forward=len(batch))
        x = batch.x
        if self.harder:
            view = RandAugment(self.harder, self.magnitude)
            x = view(x, batch.rng("the teacher's view").random((len(batch), view.draws)), self.net.inputs.images)
        batch.targets["mkd"] = self.teacher.copy(x).logits

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        rows = batch.supervised
        towards = distillation(out.logits[:, rows], batch.targets["mkd"][:, rows], self.temperature)
        return {"kd/teacher": self.strength * self.temperature**2 * self.layer_weight * towards}

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.teacher.update(1 - self.teacher_rate)
        self.begun = True

    def eval_net(self, net: TappedNet) -> TappedNet:
        if self.predict == "net":
            return net
        mean, share = frozen_copy(self.net), 0.5 if self.predict == "mean" else 0.0
        with torch.no_grad():
            for own, slow, fast in zip(mean.parameters(), self.teacher.copy.parameters(), self.net.parameters(), strict=True):
                own.copy_(slow).lerp_(fast, share)
        return mean
