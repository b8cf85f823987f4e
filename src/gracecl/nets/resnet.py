"""ResNet-18 for small images, tapped at its four stages as in MOSE (Yan et al., CVPR 2024).

Stage i's output o_i feeds the next stage unchanged. Its tap reads it through a gate, g_i = sigmoid(up(ReLU(BN(D(o_i))))) for all
but the last stage, and a chain of separable blocks D that double the channels and halve the map until the last stage's width;
then the average over the map gives f_i. A net with one tap is the plain ResNet-18: no gate, no chain, PyTorch's default
initialisation.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl.errors import UserError
from gracecl.nets.tapped import Backbone, BatchNorm, stack_layers
from gracecl.registry import nets
from gracecl.registry.spec import AtLeast


@nets.register("resnet18")
def resnet18(shape: tuple[int, int, int], taps: int, at_most: bool, width: Annotated[int, AtLeast(1)] = 64) -> Backbone:
    """ResNet-18 for small images, tapped at its four stages; width 64 is the paper's, 8-32 suit a CPU."""
    if not 1 <= taps <= 4:
        raise UserError(f"resnet18 has 4 stages to tap; --taps {taps} is not between 1 and 4")
    return ResNet18(shape[0], width, taps)


class Conv3x3(nn.Conv2d):
    """A 3×3 convolution, dense or depthwise, padded by 1.

    On maps of at most 2×2 points every point of the input reaches every point of the output, so there the convolution is a plain
    product. A CPU makes that in a third of the time of the dense convolution, which also multiplies the padding, and in a sixth of
    the time of the depthwise one. The numbers are the same but for rounding.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride, 1, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or max(x.shape[-2:]) > 2:
            return super().forward(x)
        height, width = (len(range(0, size, self.stride[0])) for size in x.shape[-2:])
        points = x.permute(0, 2, 3, 1).flatten(1, 2)  # [B, from, inputs]
        weights = self.weight.flatten(2).permute(2, 1, 0)[
            self.taps(x.shape[-2], x.shape[-1])
        ]  # [from, to, inputs of a group, outputs]
        if self.groups > 1:
            y = (points[:, :, None] * weights.squeeze(2)).sum(dim=1)
        else:
            y = points.flatten(1) @ weights.transpose(1, 2).flatten(2).flatten(0, 1)
        y = y.view(x.shape[0], height, width, -1)
        y = y if self.bias is None else y + self.bias  # of a batch norm that was folded into it
        layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
        return y.permute(0, 3, 1, 2).contiguous(memory_format=layout)

    def taps(self, height: int, width: int) -> Tensor:
        """Return `[from, to]`: which of the nine weights takes a point of the input to a point of the output."""
        down, across = (torch.arange(size)[:, None] + 1 - torch.arange(0, size, self.stride[0]) for size in (height, width))
        return (3 * down[:, None, :, None] + across[None, :, None, :]).flatten(2).flatten(0, 1)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv3x3(inputs, outputs, stride)
        self.norm1 = BatchNorm(outputs)
        self.conv2 = Conv3x3(outputs, outputs)
        self.norm2 = BatchNorm(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), BatchNorm(outputs))
        )
        self.last_relu = True

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y)) + self.shortcut(x)
        return F.relu(y, inplace=True) if self.last_relu else y


def separable_down(inputs: int, outputs: int) -> nn.Sequential:
    """D: depthwise and pointwise convolutions, twice, the first with stride 2."""
    return nn.Sequential(
        Conv3x3(inputs, inputs, 2, groups=inputs),
        nn.Conv2d(inputs, inputs, 1, bias=False),
        BatchNorm(inputs),
        nn.ReLU(inplace=True),
        Conv3x3(inputs, inputs, groups=inputs),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        BatchNorm(outputs),
        nn.ReLU(inplace=True),
    )


class Gate(nn.Module):
    """Weighs a map by what a coarser look at it says; the ReLU before the sigmoid keeps the weight in [1/2, 1)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.look = separable_down(channels, channels)
        self.norm = BatchNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        coarse = F.relu(self.norm(self.look(x)), inplace=True)
        return x * enlarge(coarse, x.shape[-2], x.shape[-1]).sigmoid_()


def enlarge(maps: Tensor, height: int, width: int) -> Tensor:
    """Bilinear enlargement of maps `[B, C, h, w]`, as products with the weights of each axis.

    The same numbers as `F.interpolate`, which on a CPU turns contiguous maps into channels-last ones and back, at two to three
    times the cost.
    """
    if maps.device.type != "cpu" or not maps.is_contiguous():
        return F.interpolate(maps, (height, width), mode="bilinear", align_corners=False)
    return line_weights(maps.shape[-2], height, maps).T @ maps @ line_weights(maps.shape[-1], width, maps)


def line_weights(size: int, larger: int, like: Tensor) -> Tensor:
    """Return `[size, larger]`: how much each of `size` points counts at each of `larger` points between them."""
    points = torch.eye(size, dtype=like.dtype, device=like.device)
    return F.interpolate(points[None], larger, mode="linear", align_corners=False)[0]


class ResNet18(Backbone):
    def __init__(self, channels: int, width: int, taps: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.layers, self.width = taps, widths[-1]
        self.first_tap = 4 - taps
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, 1, 1, bias=False), BatchNorm(width), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList(
            nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))
            for inputs, outputs, stride in zip([width, *widths], widths, [1, 2, 2, 2], strict=False)
        )
        shallow = range(self.first_tap, 3)
        self.gates = nn.ModuleList(Gate(widths[stage]) for stage in shallow)
        self.chains = nn.ModuleList(
            nn.Sequential(*(separable_down(widths[i], widths[i + 1]) for i in range(stage, 3))) for stage in shallow
        )
        if taps > 1:
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def drop_last_relu(self) -> None:
        """That of the last stage, and of each shallow tap's chain."""
        *_, block = self.stages[-1].children()
        assert isinstance(block, BasicBlock)
        block.last_relu = False
        for chain in self.chains:
            *_, last = chain.children()
            assert isinstance(last, nn.Sequential)
            last[-1] = nn.Identity()

    def tap_parts(self) -> list[nn.Module]:
        return [self.gates, self.chains]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        aligned = []
        for number, stage in enumerate(self.stages):
            x = stage(x)
            tap = number - self.first_tap
            if 0 <= tap < len(self.gates):
                aligned.append(self.chains[tap](self.gates[tap](x)))
        aligned.append(x)
        return stack_layers([side.mean(dim=(2, 3)) for side in aligned])
