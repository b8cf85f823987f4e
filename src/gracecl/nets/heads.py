"""Classification heads other than the linear one; a method that wants one puts it in the linear one's place when it is attached."""

from __future__ import annotations

from torch import Tensor

from gracecl.losses import unit
from gracecl.nets.tapped import StackedLinear


class CosineHead(StackedLinear):
    """`scale · cos(features, weights of the class)` at each tap, without bias. It takes over the weights of a linear head."""

    def __init__(self, head: StackedLinear, scale: float, epsilon: float) -> None:
        """`epsilon` is added to each norm."""
        super().__init__(*head.weight.shape)
        self.weight = head.weight
        self.register_parameter("bias", None)
        self.scale, self.epsilon = scale, epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (unit(x, self.epsilon) @ unit(self.weight, self.epsilon, dim=1))
