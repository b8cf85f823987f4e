"""Live objects of a learner: a method, net, optimizer, scheduler or augmentation given as it is, in place of an expression."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from gracecl.engine import auto
from gracecl.errors import UserError
from gracecl.methods.base import Method
from gracecl.registry import objects, spec


@dataclass(frozen=True)
class Live:
    """The objects that a program gave; None is for what an expression names."""

    method: Method | None = None
    net: nn.Module | Callable[[], nn.Module] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    augment: Any = None

    @classmethod
    def take(cls, options: Mapping[str, Any], weights: bool = False) -> tuple[dict[str, Any], Live]:
        """The options with text in place of objects, and the objects.

        With `weights`, two nets of one class and other weights are two nets: for runs, whose results depend on where they begin.
        """
        texts, given = dict(options), dict[str, Any]()
        if isinstance(texts.get("net"), nn.Module) and "method" in texts:
            texts["method"] = auto.meant(texts["method"], texts["net"])  # afterwards the module is but a name
        for name in NAMES:
            value = texts.get(name)
            if value is not None and not isinstance(value, str) and _fits(name, value):
                given[name] = value.as_learner() if isinstance(value, Method) else value
                texts[name] = _text(given[name], weights)
        return texts, cls(**given)

    def check(self, what: str, settings: Mapping[str, Any], remedy: str) -> None:
        """Refuse settings that stand for objects which were not given."""
        objects.missing(what, {name: settings.get(name) for name in NAMES}, vars(self), remedy)

    def copied(self) -> Live:
        """The same with a method and a net of its own, for a run that may be repeated."""
        net = copy.deepcopy(self.net) if isinstance(self.net, nn.Module) else self.net
        return Live(copy.deepcopy(self.method), net, self.optimizer, self.scheduler, self.augment)


NAMES = tuple(field.name for field in fields(Live))


def is_expressible(method: Method) -> bool:
    """Return whether the expression that a method writes of itself names this very method: the same classes with
    the same options.
    """
    try:
        again = spec.parse_method(repr(method))
    except UserError:
        return False
    return len(again.parts) == len(method.parts) and all(map(_same, method.parts, again.parts))


def _same(one: Method, other: Method) -> bool:
    def held(part: Method) -> dict[str, Any]:
        return {name: value for name, value in vars(part).items() if name != "chain" and not isinstance(value, Method)}

    return type(one) is type(other) and repr(held(one)) == repr(held(other))


def _text(value: Any, weights: bool) -> str:
    if isinstance(value, Method):
        return repr(value) if is_expressible(value) else objects.opaque(repr(value), value.parts)
    if isinstance(value, nn.Module) and weights:
        return objects.opaque(objects.name_of(value), (value, dict(value.state_dict())))
    return objects.opaque(objects.name_of(value), value)


def _fits(name: str, value: Any) -> bool:
    """Return whether an object can stand in place of an expression; what it is not is said here, or by the check
    of the options.
    """
    if name == "method":
        return isinstance(value, Method)
    if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        maker = "params: torch.optim.AdamW(params, 1e-3)" if name == "optimizer" else "optimizer: StepLR(optimizer, 100)"
        raise UserError(
            f"{name} is a function that makes one, not a {type(value).__name__} made already, as the learner adds weights "
            f"of its own; write {name}=lambda {maker}"
        )
    return callable(value)
