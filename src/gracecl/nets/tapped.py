"""A backbone and a head at each tap: images in, `Taps` with the layer as first axis out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl.core import Taps
from gracecl.errors import UserError
from gracecl.functional.optim import ParameterGroup
from gracecl.inputs import Batched, Inputs, leaves, loaded
from gracecl.nets.batches import MOST_AT_ONCE, batch_for
from gracecl.nets.growth import ClassAxis, Growth
from gracecl.nets.mode import in_mode
from gracecl.nets.sharing import features_of_all
from gracecl.registry.options import Sharing

M = TypeVar("M", bound=nn.Module)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Backbone(nn.Module):
    """Normalised images `[B, channels, height, width]` → features `[L, B, D]` of the tapped layers, the deepest last."""

    layers: int
    """L"""
    width: int
    """D"""
    frozen: bool = False
    """whether the trunk's weights and running statistics stay as they are"""
    trunk_lr: float = 1.0
    """the trunk's learning rate as a part of the optimizer's"""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def drop_last_relu(self) -> None:
        """Let each tap read its layer before the layer's last ReLU, so that features may be negative.

        For a backbone whose taps end in no ReLU, or one that does not know its parts, this changes nothing.
        """

    def tap_parts(self) -> list[nn.Module]:
        """What a tap reads its layer through and no later layer uses, such as gates and norms; the rest is the trunk."""
        return []

    def trunk_modules(self) -> list[nn.Module]:
        """Every module of the trunk, those inside others too."""
        of_taps = {module for part in self.tap_parts() for module in part.modules()}
        return [module for module in self.modules() if module not in of_taps]

    def trunk_parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.trunk_modules() for parameter in module.parameters(recurse=False)]

    @property
    def reads_vectors(self) -> bool:
        """Whether what learns at the taps of a frozen trunk needs no more than `trunk_vectors`."""
        return not any(True for part in self.tap_parts() for _ in part.parameters())

    def trunk_vectors(self, x: Batched) -> list[Tensor]:
        """For each tap a vector `[B, width]` of its own width, before what `read_vectors` makes of it."""
        return list(self(x))

    def read_vectors(self, vectors: Sequence[Tensor]) -> Tensor:
        """The features `[L, B, D]` from those vectors, the same as those of a forward pass."""
        return stack_layers(list(vectors))

    def train(self, mode: bool = True) -> Backbone:
        """Set the mode; batch norms of a frozen trunk stay in evaluation mode, where their statistics do not move."""
        super().train(mode)
        for module in self.trunk_modules() if self.frozen else ():
            if isinstance(module, BATCH_NORMS):
                module.eval()
        return self


def stack_layers(features: list[Tensor]) -> Tensor:
    """Return `[L, B, D]` from the features of each layer; a single layer is not copied."""
    return torch.stack(features) if len(features) > 1 else features[0].unsqueeze(0)


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm that uses its running statistics where a batch has one value per channel, from which no spread can be told."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.shape[0] * x.shape[2] * x.shape[3] == 1:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


class StackedLinear(nn.Module):
    """One linear layer per tap, `[L, B, in] → [L, B, out]` in one product. Initialised as `nn.Linear` initialises each."""

    def __init__(self, layers: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = max(inputs, 1) ** -0.5
        self.class_axes: dict[str, ClassAxis] = {}
        """the axis of each parameter that runs over the classes; any module of a net may have such an attribute"""
        self.weight = nn.Parameter(torch.empty(layers, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(layers, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.weight) == 1:  # the plain product has less overhead, which a small net's step notices
            return torch.addmm(self.bias.squeeze(0), x.squeeze(0), self.weight.squeeze(0)).unsqueeze(0)
        return torch.baddbmm(self.bias, x, self.weight)

    def over_classes(self) -> StackedLinear:
        """Declares that there is an output for each class; returns the layer."""
        axis = ClassAxis(2, bound=max(self.weight.shape[1], 1) ** -0.5)
        self.class_axes = {"weight": axis} if self.bias is None else {"weight": axis, "bias": axis}
        return self

    def from_classes(self, times: int) -> StackedLinear:
        """Declares that there is an input for each class, so many times over; returns the layer."""
        self.class_axes = {"weight": ClassAxis(1, blocks=times)}
        return self


class NoProjector(nn.Module):
    """In the place of projectors in a net that was made without."""

    def forward(self, features: Tensor) -> Tensor:
        raise UserError("this net has no projectors, which contrastive terms need; make it with tap(..., embedding=128)")


class Meter:
    """Images that went through a net, those of its copies (teachers) too, and images that a gradient was taken of."""

    def __init__(self) -> None:
        self.forward, self.backward = 0, 0

    def count(self, *, forward: int = 0, backward: int = 0) -> None:
        self.forward += forward
        self.backward += backward


class TrunkVectors(NamedTuple):
    """What a net is given in place of images: the vectors of its frozen trunk."""

    images: Inputs
    """what the trunk takes"""
    widths: tuple[int, ...]
    """of each tap's vector"""
    made_by: dict[str, Any]
    """backend and origin, as config.json states them"""


class TappedNet(nn.Module):
    """Backbone, and per tap a linear classifier and a linear projector for contrastive terms."""

    def __init__(self, backbone: Backbone, classes: int, inputs: Inputs | None = None, embedding: int | None = 128) -> None:
        """`inputs` says what it is fed with; None is for inputs of any shape that are taken as they are.

        `embedding` is the width of the projectors; None is no projector.
        """
        super().__init__()
        self.backbone = backbone
        self.layers, self.width, self.classes = backbone.layers, backbone.width, classes
        self.classifier = StackedLinear(self.layers, self.width, classes).over_classes()
        self.projector: StackedLinear = (
            NoProjector() if embedding is None else StackedLinear(self.layers, self.width, embedding)  # type: ignore[assignment]
        )
        self.extras = nn.ModuleDict()
        """modules that methods add, trained and saved with the net"""
        self.inputs = Inputs() if inputs is None else inputs
        self.meter = Meter()
        """what its passes cost so far; whoever makes a pass counts it"""
        self.mirrored = False
        """whether scoring passes look at each image and at its mirror image, and average what they show"""
        self.of_images: TrunkVectors | None = None
        """set where the net is given the trunk's vectors in place of images"""
        self.sharing: Sharing = "off"
        """how the processes of a group share its passes"""
        self._at_once: dict[tuple[tuple[int, ...], ...], int] = {}

    def forward(self, x: Batched) -> Taps:
        if self.of_images is None:
            features = features_of_all(self.backbone, x, self.sharing)
        else:
            features = self.backbone.read_vectors(x.split(list(self.of_images.widths), dim=1))
        return Taps(features, self.classifier(features), self.projector)

    def take_vectors(self, widths: Sequence[int], made_by: dict[str, Any] | None = None) -> None:
        """Take, from now on, what the frozen trunk makes of images (`Backbone.trunk_vectors`, side by side) in their place."""
        self.of_images = TrunkVectors(self.inputs, tuple(widths), made_by or {})
        self.inputs = Inputs((sum(widths),))

    def take_images(self) -> None:
        """Take images again."""
        if self.of_images is not None:
            self.inputs = self.of_images.images
            self.of_images = None

    def parameter_groups(self) -> list[ParameterGroup]:
        """What the optimizer trains, with factors of its learning rate: the trunk's own, and 1 for taps, heads and extras."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.backbone.trunk_lr == 1:
            return [(1.0, trained)]
        trunk = set(self.backbone.trunk_parameters())
        of_trunk, others = ([value for value in trained if (value in trunk) == inside] for inside in (True, False))
        return [(self.backbone.trunk_lr, of_trunk), (1.0, others)]

    @property
    def class_axes(self) -> dict[str, ClassAxis]:
        """By the name of each parameter that has an axis over the classes."""
        return {
            f"{name}.{parameter}": axis
            for name, module in self.named_modules()
            if module is not self
            for parameter, axis in getattr(module, "class_axes", {}).items()
        }

    @torch.no_grad()
    def grown(self, growth: Growth) -> TappedNet:
        """Make room for new classes; parameters stay the same objects, so that optimizers and averages still hold them."""
        if self.classes < growth.after:
            for name, axis in self.class_axes.items():
                parameter = self.get_parameter(name)
                parameter.data, parameter.grad = growth.grown(parameter.data, name, axis), None
            self.classes = growth.after
        return self

    def add_extra(self, name: str, module: M) -> M:
        """Add a method's own module, on the net's device. What has an axis over the classes says so in `class_axes`."""
        self.extras[name] = module.to(self.classifier.weight.device)
        return module

    def predict(self, x: Batched) -> Taps:
        """Return the taps that predictions use: of the inputs or, if `mirrored`, the mean over them and their mirror images."""
        taps: Taps = self(x)
        return Taps.mean(taps, self(x.flip(-1))) if self.mirrored else taps

    def at_once(self, images: Batched) -> int:
        """How many such raw images go through the net at once; found once for each shape."""
        if self.of_images is not None or len(images) <= 1:
            return MOST_AT_ONCE
        shapes = tuple(tuple(leaf.shape[1:]) for _, leaf in leaves(images))
        if shapes not in self._at_once:
            example = self.inputs.normalise(loaded(images[:1]).to(self.classifier.weight.device))
            self._at_once[shapes] = batch_for(self.backbone, example)
        return self._at_once[shapes]

    def sweep(self, images: Batched, batch: int | None = None) -> Iterator[tuple[slice, Taps]]:
        """A scoring pass over raw images, in evaluation mode and full precision; it leaves the net as it was.

        As many go through the net at once as `batch_for` finds, or `batch`.
        """
        device = self.classifier.weight.device
        batch = self.at_once(images) if batch is None else batch
        with in_mode(self, training=False):
            for start in range(0, len(images), batch):
                rows = slice(start, min(start + batch, len(images)))
                # Not inside the generator's yield: the caller's code must run under the caller's own gradient mode.
                with torch.no_grad():
                    x = self.inputs.normalise(loaded(images[rows]).to(device))
                    taps = self.predict(x)
                self.meter.count(forward=len(x) * (1 + self.mirrored))
                yield rows, taps
