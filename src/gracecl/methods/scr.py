"""SCR, supervised contrastive replay. Mai et al., Supervised Contrastive Replay, CVPR workshops 2021.

    for each batch B_n from the stream:
        if memory is empty: store B_n and go on
        X <- B_n ∪ n_recall images drawn from memory, none of them twice;  X' <- T(X)
        z <- unit vectors of g(f(X)) and g(f(X')), f the encoder, g a projector, in a forward each
        step on SC(z): each of the 2|X| vectors against all the others, those of its class positive
        memory <- reservoir(memory, B_n)
    predict by the nearest class mean of the memory's features f; the projector has no part in it

There is no softmax over classes: contrast is the loss that SCR classifies by, itself a softmax cross-entropy in which the other
images stand for classes. Its row is `ce/contrast`, so that GRACE's α acts on it. But what GRACE reads, entropies and accuracies,
comes from linear heads, and SCR trains none: write grace(scr(train_head=True)), which trains them on features that they do not
move, the row `ce/head`. Encoder, projector and nearest-mean predictions of scr() itself are the same with such heads and without.

Differences from the paper and its program: T is the run's augmentation (`--augment full` is the program's); n_recall is 64, for
comparison with other methods (the paper's 100 is worth some points, and worth as many to experience replay); a seen class without
images in memory cannot be predicted (the program draws a random direction, without_images='random'); the pass over memory at the
end of each task, which is in the program's configurations but not in the paper, is the option `review`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from gracecl.core import Batch, Ints, LossTable, Plan, Planning, Progress, Selection, StreamBatch, Taps, View, apart
from gracecl.errors import UserError
from gracecl.functional.losses import classes_among, cross_entropy, supervised_contrast
from gracecl.memory import Memories
from gracecl.methods.base import Traits
from gracecl.methods.replay import Replay
from gracecl.methods.state import per_class
from gracecl.nets.class_means import class_means, nearest_mean
from gracecl.nets.closed_rule import CLOSED_RULES, closed_rule
from gracecl.nets.tapped import StackedLinear, TappedNet
from gracecl.registry import methods
from gracecl.registry.spec import Above

REVIEW_SCALE = 0.1
"""what gradients are multiplied by in the review"""


@methods.register("scr")
@dataclass(eq=False, repr=False)
class SCR(Replay):
    """SCR: supervised contrast over two views of new and replayed images; predictions by the nearest class mean."""

    temperature: Annotated[float, Above(0)] = 0.1
    """of the contrast"""
    projector: Literal["mlp", "linear", "none"] = "mlp"
    """what makes vectors to contrast of features: a hidden layer of their width and a linear one, the latter alone, or nothing"""
    joint_forward: bool = False
    """one forward for both views, hence one BatchNorm batch, instead of one for each"""
    review: bool = False
    """at the end of each task, one pass over memory with gradients divided by 10"""
    train_head: bool = False
    """train the linear heads beside it, on features that they do not move: for GRACE, and for inference='linear'"""
    inference: Literal["ncm", "linear", "lda", "ridge"] = "ncm"
    """predict by the nearest class mean, or by the linear head"""
    without_images: Literal["exclude", "last_mean", "random"] = "exclude"
    """what the nearest mean does with a seen class that memory holds no image of: never predict it, use its mean at the end of the
    last task that it had images at, or put it in a random direction"""

    state = (per_class("last_means", axis=1), per_class("ever_held"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inference == "linear" and not self.train_head:
            raise UserError("scr: inference='linear' needs heads that were trained; add train_head=True")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        looks_back = self.review or self.without_images == "last_mean"
        return Traits(boundaries="used" if looks_back else "unused", met_only=self.inference != "linear")

    def attach(self, net: TappedNet, memories: Memories) -> None:
        super().attach(net, memories)
        if self.projector == "mlp":
            self.hidden = net.add_extra("projector_hidden", StackedLinear(net.layers, net.width, net.width))
        device = net.classifier.weight.device
        self.last_means = torch.zeros(net.layers, net.classes, net.width, device=device)
        self.ever_held = torch.zeros(net.classes, dtype=torch.bool, device=device)

    def plan(self, new: StreamBatch, memories: Memories, planning: Planning) -> Plan:
        if len(memories.replay) == 0:
            return Plan({})
        rows = Selection(np.arange(len(new)), memories.replay.draw(self.recalled(new), planning.rng))
        return self.seen_twice("raw", "augmented", rows, planning.augment)

    def seen_twice(self, raw: str, augmented: str, rows: Selection, augment: View) -> Plan:
        """Return two blocks of the same images: raw and augmented."""
        blocks = {raw: replace(rows, views=((),)), augmented: replace(rows, views=(augment,))}
        return Plan(blocks, forwards=None if self.joint_forward else apart(blocks))

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        table = {"ce/contrast": supervised_contrast(self.projected(out), batch.y, self.temperature)}
        if self.train_head:
            table["ce/head"] = cross_entropy(self.net.classifier(out.features.detach()), batch.y)
        return table

    def projected(self, out: Taps) -> Tensor:
        """Return the vectors that are contrasted, before they are brought to unit length."""
        match self.projector:
            case "none":
                return out.features
            case "linear":
                return out.embedding
        projected: Tensor = self.net.projector(torch.relu(self.hidden(out.features)))
        return projected

    def closing(self, progress: Progress, memories: Memories, planning: Planning) -> Iterator[Plan]:
        """Yield the review: memory in random order, in whole batches of n_recall."""
        batches = len(memories.replay) // self.n_recall if self.review and self.n_recall else 0
        order = planning.rng.permutation(len(memories.replay))
        for slots in np.split(order[: batches * self.n_recall], batches) if batches else ():
            yield self.seen_twice("review", "review_augmented", Selection(slots=slots), planning.augment)

    def after_backward(self, batch: Batch) -> None:
        if "review" in batch.blocks:
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    parameter.grad *= REVIEW_SCALE

    def end_task(self, memories: Memories, progress: Progress) -> None:
        if self.without_images == "last_mean":
            self.last_means, self.ever_held = self.known_means(self.net, memories, progress)

    def before_eval(self, net: TappedNet, memories: Memories, progress: Progress) -> None:
        self.means, self.predictable = self.known_means(net, memories, progress)
        if self.inference in CLOSED_RULES:
            examples = memories.replay.examples
            self.by_sums = closed_rule(net, examples.images, examples.labels, self.inference)

    def known_means(self, net: TappedNet, memories: Memories, progress: Progress) -> tuple[Tensor, Tensor]:
        """Return the mean of each class, `[L, C, D]`, and which classes can be predicted by it, `[C]`."""
        memory = memories.replay
        labels: Ints = memory.examples.labels
        means = class_means(net, memory.examples.images, labels, progress.seen)
        if self.without_images == "random" or len(labels) == 0:  # with no image at all, directions are as good as anything
            return means, torch.ones_like(self.ever_held)
        held = classes_among(torch.from_numpy(labels), net.classes).to(means.device)
        return torch.where(held[:, None], means, self.last_means), held | self.ever_held

    def rules(self, out: Taps) -> dict[str, Tensor]:
        nearest = nearest_mean(out.features, self.means).masked_fill(~self.predictable, -torch.inf)
        fitted = {self.inference: self.by_sums(out.features.double())} if self.inference in CLOSED_RULES else {}
        return {"ncm": nearest} | fitted | ({"linear": out.logits} if self.train_head else {})
