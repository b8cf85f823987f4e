"""Options of any net: a frozen trunk, low-rank adapters (LoRA) in its attention, another learning rate for it.

`nets.build` takes these options out of the net's expression, as in `vit(patch=16, lora=4)` or `resnet18(freeze=True)`, so that
the functions that make nets need not know them. The trunk is the backbone without what belongs to its taps (`Backbone.tap_parts`);
taps, heads and modules of methods always learn, at the optimizer's own rate.

Adapters: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. They are put on query and value, as in the
paper: W x + (alpha / rank) B A x with B = 0 at the start, so the net begins as what it was. A layer that gives query, key and value
at once, in this order, is changed in its query and value rows alone.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl.errors import UserError
from gracecl.machine import check_training
from gracecl.nets.mode import in_mode
from gracecl.nets.tapped import TappedNet
from gracecl.registry import nets, spec
from gracecl.registry.spec import Above, AtLeast

QUERY_AND_VALUE = (("query", "value"), ("q_proj", "v_proj"), ("q", "v"), ("to_q", "to_v"), ("q_lin", "v_lin"), ("wq", "wv"))
"""names of linear layers that stand side by side in an attention module"""
FUSED = ("qkv", "to_qkv")
"""names of linear layers that give query, key and value, in this order"""


@dataclass(frozen=True)
class TrunkOptions:
    """What of the trunk learns, and how fast."""

    freeze: bool = False
    """keep the trunk's weights and running statistics as they are"""
    lora: Annotated[int, AtLeast(0)] = 0
    """rank of adapters on the queries and values of a frozen trunk; 0 for none"""
    lora_alpha: Annotated[float, Above(0)] | None = None
    """the adapters' output is scaled by lora_alpha / lora; None is lora, hence 1"""
    trunk_lr: Annotated[float, Above(0)] = 1.0
    """learning rate of whatever learns in the trunk, its adapters too, as a factor of the optimizer's; freeze=True stands for 0"""

    def __post_init__(self) -> None:
        spec.check_fields(self, "the net")
        if self.lora_alpha is not None and not self.lora:
            raise UserError("the net: lora_alpha scales adapters, of which there are none; give lora=4 too")
        if self.freeze and not self.lora and self.trunk_lr != 1:
            raise UserError(
                "the net: with freeze=True nothing in the trunk learns, so trunk_lr has no meaning; leave one of them out"
            )

    def apply(self, net: TappedNet, name: str) -> None:
        """Freezes, adapts and marks the trunk of a net that was just made."""
        net.backbone.trunk_lr = self.trunk_lr
        if self.freeze or self.lora:
            net.backbone.frozen = True
            for parameter in net.backbone.trunk_parameters():
                parameter.requires_grad_(False)
            net.train(net.training)
        if self.lora:
            adapt(net, name, self.lora, 1.0 if self.lora_alpha is None else self.lora_alpha / self.lora)


def take_options(call: spec.Call) -> tuple[spec.Call, TrunkOptions]:
    """The options of the trunk in a net's expression, and the expression without them."""
    names = {field.name for field in dataclasses.fields(TrunkOptions)}
    options = TrunkOptions(**{name: value for name, value in call.kwargs.items() if name in names})
    rest = {name: value for name, value in call.kwargs.items() if name not in names}
    return dataclasses.replace(call, kwargs=rest), options


def arguments_of(call: spec.Call) -> dict[str, Any]:
    """The options of a net in an expression, without those of its trunk, with the defaults of what makes it."""
    made_by = nets.get(call.name)
    defaults = {name: option.default for name, option in inspect.signature(made_by).parameters.items()}
    return defaults | spec.arguments(made_by, take_options(call)[0], before=3)


class LowRankLinear(nn.Linear):
    """A linear layer that keeps its weights and learns a change of low rank; of a fused one, in query and value only."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, fused: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scale, self.fused = scale, fused
        changed, outputs = (2, linear.out_features // 3) if fused else (1, linear.out_features)
        weight = linear.weight
        self.down = nn.Parameter(weight.new_empty(changed * rank, linear.in_features).uniform_(-self.bound, self.bound))
        self.up = nn.Parameter(weight.new_zeros(changed, outputs, rank))

    @property
    def bound(self) -> float:
        """of the uniform distribution that A is drawn from"""
        return float(self.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.down), self.matrix_up(self.up))

    def matrix_up(self, up: Tensor) -> Tensor:
        """B: of a fused layer, a block each for query and value, and between them the key's, with rows but no columns."""
        if not self.fused:
            return up[0]
        blocks = up[0], up.new_zeros(up.shape[1], 0), up[1]
        matrix: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        return matrix

    def change(self, down: Tensor, up: Tensor) -> Tensor:
        """What factors such as its own add to the layer's weights."""
        return self.scale * (self.matrix_up(up) @ down)


def adapt(net: TappedNet, name: str, rank: int, scale: float) -> None:
    """Put adapters on the queries and values that the net's inputs pass through."""
    found = [(module, child) for module in net.backbone.trunk_modules() for child in attention_projections(module)]
    used = layers_called(net, [module.get_submodule(child) for module, child in found])
    if not used:
        raise UserError(
            f"lora has nothing to adapt: {name} calls no linear layers for the queries and values of attention; use freeze=True"
        )
    layers = [layer for layer in used if isinstance(layer, nn.Linear)]
    weights = rank * sum(layer.in_features + layer.out_features for layer in layers)
    check_training(weights, f"adapters of rank {rank}", "use a smaller rank")
    for module, child in found:
        linear = module.get_submodule(child)
        if isinstance(linear, nn.Linear) and linear in used:
            setattr(module, child, LowRankLinear(linear, rank, scale, fused=child in FUSED))


def attention_projections(module: nn.Module) -> list[str]:
    """Return the names of a module's own linear layers that give query or value."""
    linear = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    separate = [name for pair in QUERY_AND_VALUE if all(name in linear for name in pair) for name in pair]
    return separate + [name for name in FUSED if name in linear and linear[name].out_features % 3 == 0]


def layers_called(net: TappedNet, layers: list[nn.Module]) -> set[nn.Module]:
    """Those that a forward pass calls: not the ones behind the last tap, nor those of which only the weight is read."""
    called: set[nn.Module] = set()
    hooks = [layer.register_forward_hook(lambda layer, *_: called.add(layer)) for layer in layers]
    try:
        with in_mode(net, training=False), torch.no_grad():
            net.backbone.forward(
                net.inputs.seen(1, net.classifier.weight.new_zeros).to(net.classifier.weight.device)
            )  # not by a call, which may be compiled
    finally:
        for hook in hooks:
            hook.remove()
    return called
