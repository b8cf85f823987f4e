"""Classification heads other than the linear one; a method that wants one puts it in the linear one's place when it is attached.

A head that was declared has a row for every class from the start; by `HeldRows`, a row stays as it began until its class is met.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gracecl.functional.losses import unit
from gracecl.nets.tapped import StackedLinear, TappedNet

COSINE_EPSILON = 1e-12
"""added to norms"""


class CosineHead(StackedLinear):
    """`scale · cos(features, weights of the class)` at each tap, without bias. It takes over the weights of a linear head."""

    def __init__(self, head: StackedLinear, scale: float, epsilon: float, learned: bool = False) -> None:
        """`epsilon` is added to each norm. A learned scale is each tap's own and starts at `scale`."""
        super().__init__(*head.weight.shape)
        self.weight = head.weight
        self.register_parameter("bias", None)
        self.over_classes()
        self.epsilon = epsilon
        self.scale: Tensor | float = nn.Parameter(head.weight.new_full((len(head.weight), 1, 1), scale)) if learned else scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.cosine(x)

    def cosine(self, x: Tensor) -> Tensor:
        """Return `[L, B, C]`, between -1 and 1, whatever the scale is."""
        return unit(x, self.epsilon) @ unit(self.weight, self.epsilon, dim=1)

    @torch.no_grad()
    def imprint(self, directions: Tensor, like: Tensor) -> None:
        """Rows become the unit vectors `directions [L, C, D]`, as long as the rows of `like [C]` are on average.

        Qi et al., Low-Shot Learning with Imprinted Weights, CVPR 2018. A row stays where its direction is the zero vector.
        """
        norms = torch.linalg.vector_norm(self.weight, dim=1)
        length = (norms * like).sum(dim=1) / like.sum()
        given = directions.any(dim=-1)[:, None]
        self.weight.copy_(torch.where(given, length[:, None, None] * directions.transpose(1, 2), self.weight))


def use_cosine_head(net: TappedNet, scale: float, keep_relu: bool) -> CosineHead:
    """Replace the linear head of a net by a cosine head with a learned scale, and drop the last ReLU unless it is kept."""
    if not keep_relu:
        net.backbone.drop_last_relu()
    head = CosineHead(net.classifier, scale, COSINE_EPSILON, learned=True)
    net.classifier = head
    return head


class HeldRows:
    """Hold rows of a head fixed in a step. Momentum and weight decay move every row, so these are put back."""

    def __init__(self, head: StackedLinear) -> None:
        self.parameters = [value for value in (head.weight, head.bias) if value is not None]

    def remember(self) -> None:
        """Copy the rows before the step."""
        self.before = [value.detach().clone() for value in self.parameters]

    @torch.no_grad()
    def put_back(self, moving: Tensor) -> None:
        """Restore, after the step, the rows of all classes but those marked in `moving [C]`, to the bit."""
        for value, before in zip(self.parameters, self.before, strict=True):
            value.copy_(torch.where(moving, value, before))
