"""Any `nn.Module` as a tapped net: features are read at the modules one names, or at evenly spaced blocks.

    net = gracecl.tap(model, at=["layer2", "layer3", "layer4"], classes=100)

A tap reads whatever its module returns: the average over a map `[B, C, H, W]`, the class token or the mean token of a sequence
`[B, T, D]` through a norm of its own, a vector `[B, D]` as it is. Taps whose width differs from the last one's get a linear map to
it. All of that is laid out by one dry forward at construction.

The model's forward is left when the last tap was read, so its own head costs nothing and its parameters keep `.grad` at None.
Hooks are in place during a forward only: the net can be copied, saved and called functionally, and other hooks stay as they are.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl.errors import UserError
from gracecl.inputs import Batched, TensorTree, call, inputs_of, leaves, mapped
from gracecl.nets.mode import in_mode
from gracecl.nets.tapped import BATCH_NORMS, Backbone, TappedNet, stack_layers

Pool = Literal["auto", "class", "mean", "maps"]
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding", "cls_embedding")
"""what models call the token that stands for the whole sequence"""
SIZES = (32, 224)
"""sides of the square images that are tried where no example is given"""
STAGES = 4
"""a list of so many blocks is preferred to longer ones further inside, each of which is then a single stage"""
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, ArithmeticError)
"""what models raise when an input does not suit them"""


def tap(
    model: nn.Module,
    at: str | Sequence[str] | None = None,
    *,
    classes: int,
    taps: int = 4,
    example: Batched | Sequence[int] | None = None,
    embedding: int | None = None,
    pool: Pool = "auto",
) -> TappedNet:
    """Return the model with a classifier at each tap; `net(x)` takes what the model takes, `net.backbone.names`
    lists the taps.

    `at` names modules as `model.named_modules()` does; without it the last of the model's blocks and evenly spaced ones before it
    are tapped, at most `taps`. `example` is an input or its shape, batch first, for models from which it cannot be guessed. `pool`
    says how maps and sequences become vectors: "maps" averages over all axes after the second, "mean" over those between the first
    and the last, "class" takes the first token; "auto" decides by the shape and by whether the model has a class token.
    `embedding` is the width of projectors for contrastive terms, `net(x).embedding`; None is none. Weights of the model that no tap
    depends on, such as its own head, are no longer trained, so that DistributedDataParallel does not wait for them.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"tap takes a torch.nn.Module, not a {type(model).__name__}; gracecl.Learner takes a net by its expression")
    for name, count in {"classes": classes, "taps": taps, "embedding": 1 if embedding is None else embedding}.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UserError(f"tap: {name} is a whole number of at least 1, not {count!r}")
    weight = next(model.parameters(), None)
    if weight is not None and weight.dtype != torch.float32:
        raise UserError(
            f"tap takes a model in float32, not {str(weight.dtype).removeprefix('torch.')}; "
            "use model.float(), and torch.autocast around the loop for half precision"
        )
    backbone = ModuleBackbone(model, at, taps, example=example, pool=pool, freeze_unread=True)
    net = TappedNet(backbone, classes, embedding=embedding)
    return net if weight is None else net.to(weight.device)


class ModuleBackbone(Backbone):
    """A module, and at each tap a reader that makes a vector of the common width out of what the tapped part returns."""

    names: tuple[str, ...]
    """the tapped modules, in the order in which they finish"""

    def __init__(
        self,
        model: nn.Module,
        at: str | Sequence[str] | None = None,
        taps: int = STAGES,
        at_most: bool = True,
        example: Batched | Sequence[int] | None = None,
        pool: Pool = "auto",
        freeze_unread: bool = False,
        to_output: bool = False,
    ) -> None:
        """`at_most` says that `taps` was not asked for: all that `at` names are tapped, or as many blocks as there are up to it.

        Otherwise there must be so many; names are counted from the last. `freeze_unread` stops the training of weights that no tap
        depends on. With `to_output` what the model returns is its features, and the last tap reads them.
        """
        super().__init__()
        if pool not in get_args(Pool):
            raise UserError(f"pool must be one of {', '.join(get_args(Pool))}, not {pool!r}")
        if taps < 1:
            raise UserError(f"the number of taps must be at least 1, not {taps}")
        if at is not None and not (isinstance(at, str) or (isinstance(at, Sequence) and all(isinstance(name, str) for name in at))):
            raise UserError(f"at= is the name of a module, as model.named_modules() gives it, or a list of names, not {at!r}")
        run = dry_run(model, example)
        if to_output:
            places = blocks_and_output(model, run)
        else:
            places = found_blocks(model, run) if at is None else named(model, run, [at] if isinstance(at, str) else list(at))
        if taps > len(places) and not at_most:
            raise UserError(
                f"there are {len(places)} places to tap ({', '.join(places)}), not {taps}; "
                f"use --taps {len(places)}, or name others with at="
            )
        self.names = tuple(evenly_spaced(places, taps) if at is None else places if at_most else places[-taps:])
        outputs = [readable(run, name) for name in self.names]
        pools = [choose_pool(model, run, name, output, pool) for name, output in zip(self.names, outputs, strict=True)]
        widths = [output.shape[1 if kind == "maps" else -1] for output, kind in zip(outputs, pools, strict=True)]
        self.layers, self.width = len(self.names), widths[-1]
        self.model = model
        self.readers = nn.ModuleList(Reader(kind, width, self.width) for kind, width in zip(pools, widths, strict=True))
        self.last_runs = run.finished.count(self.names[-1])
        """how often the last tapped module runs in a forward; a tap reads what its module returned last"""
        if freeze_unread:
            self._freeze_unread(run.x)

    def _freeze_unread(self, x: Batched) -> None:
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        with in_mode(self, training=False), torch.enable_grad():
            gradients = torch.autograd.grad(self(x).sum(), weights, allow_unused=True) if weights else ()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.requires_grad_(gradient is not None)

    def tap_parts(self) -> list[nn.Module]:
        return [self.readers]

    @property
    def reads_vectors(self) -> bool:
        return True

    def forward(self, x: Batched) -> Tensor:
        return stack_layers([reader(value) for reader, value in zip(self.readers, self.pooled(x), strict=True)])

    def trunk_vectors(self, x: Batched) -> list[Tensor]:
        return [reader.standardised(value) for reader, value in zip(self.readers, self.pooled(x), strict=True)]  # type: ignore[operator]

    def read_vectors(self, vectors: Sequence[Tensor]) -> Tensor:
        return stack_layers([reader.read(value) for reader, value in zip(self.readers, vectors, strict=True)])  # type: ignore[operator]

    def pooled(self, x: Batched) -> list[Tensor]:
        """What each tap reads, as a vector of its own width."""
        pooled: dict[str, Tensor] = {}
        enough = Enough()
        runs_left = self.last_runs

        def keep(name: str, reader: Reader) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                nonlocal runs_left
                pooled[name] = reader.pool(tensor_of(output))
                if name == self.names[-1]:
                    runs_left -= 1
                    if runs_left == 0 and not is_exporting():  # an export must see every module end
                        raise enough

            return hook

        modules = [self.model.get_submodule(name) for name in self.names]
        hooks = [
            module.register_forward_hook(keep(name, reader))  # type: ignore[arg-type]
            for module, name, reader in zip(modules, self.names, self.readers, strict=True)
        ]
        try:
            with lone_values_allowed(self.model, x):
                call(self.model, x)
        except Enough as stop:
            if stop is not enough:  # that of a net around this one
                raise
        finally:
            enough.__traceback__ = None  # which would keep the callers' graphs alive until garbage is collected
            for handle in hooks:
                handle.remove()
        if missing := [name for name in self.names if name not in pooled]:
            raise UserError(
                f"the model did not run '{missing[0]}' for this input, so its tap has nothing to read; tap another module"
            )
        return [pooled[name] for name in self.names]


def is_exporting() -> bool:
    """Whether torch.export goes through the net; older PyTorch cannot tell."""
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


class Reader(nn.Module):
    """Turn a module's output at one tap into a vector: pooled, tokens normalised, mapped where the width differs."""

    def __init__(self, kind: str, width: int, common: int) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(width) if kind in ("class", "mean") else nn.Identity()
        self.map = nn.Linear(width, common) if width != common else nn.Identity()

    def pool(self, output: Tensor) -> Tensor:
        """Return `[B, width]`, always a new tensor, for the model may go on and change its own in place."""
        if self.kind == "maps":
            return output.flatten(2).mean(dim=2)
        if self.kind == "mean":
            return output.flatten(1, -2).mean(dim=1)
        return (output[:, 0] if self.kind == "class" else output).clone()

    def forward(self, pooled: Tensor) -> Tensor:
        out: Tensor = self.map(self.norm(pooled))
        return out

    def standardised(self, pooled: Tensor) -> Tensor:
        """The norm without what it learns."""
        return F.layer_norm(pooled, pooled.shape[1:], eps=self.norm.eps) if isinstance(self.norm, nn.LayerNorm) else pooled

    def read(self, standardised: Tensor) -> Tensor:
        """What a forward pass makes of a pooled vector, from its standardised one."""
        scaled = standardised * self.norm.weight + self.norm.bias if isinstance(self.norm, nn.LayerNorm) else standardised
        out: Tensor = self.map(scaled)
        return out


class Enough(BaseException):
    """Leave a model's forward once the last tap was read. Not an Exception, which a model might catch."""


@contextmanager
def lone_values_allowed(model: nn.Module, x: Batched) -> Iterator[None]:
    """Batch norms use their running statistics where one image leaves one value per channel, from which no spread can be told."""
    norms = [part for part in model.modules() if isinstance(part, BATCH_NORMS) and part.training]
    norms = norms if norms and len(x) == 1 else []

    def look(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        norm.training = inputs[0].numel() > inputs[0].shape[1] or norm.running_mean is None

    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    try:
        yield
    finally:
        for norm, hook in zip(norms, hooks, strict=True):
            norm.training = True
            hook.remove()


# The dry run, and what follows from it.


class DryRun(NamedTuple):
    """Record of a forward on an example."""

    x: Batched
    finished: list[str]
    """names of the modules that ran, in the order in which they finished; one that ran twice stands there twice"""
    outputs: dict[str, Any]
    """what each of them returned last"""


def dry_run(model: nn.Module, example: Batched | Sequence[int] | None) -> DryRun:
    """Run a forward on two copies of the example, in evaluation mode; restore every module's mode afterwards."""
    weight = next(model.parameters(), torch.empty(0))
    reasons = []
    for x in [torch.zeros(shape) for shape in guesses(model)] if example is None else [one_input(example)]:
        x = mapped(lambda leaf: torch.cat([leaf, leaf]).to(weight.device, weight.dtype if leaf.is_floating_point() else None), x)
        try:
            return watched(model, x)
        except MODEL_ERRORS as error:
            shapes = ", ".join(f"{place}{' ' if place else ''}{list(leaf.shape)}" for place, leaf in leaves(x))
            reasons.append(f"{shapes}: {first_line(error)}")
    if example is not None:
        raise UserError(
            f"{type(model).__name__} does not take inputs of the shape {reasons[0]}; "
            "use the size and channels it was made for (a stream's size=, or example= of tap)"
        )
    tried_text = f" (tried {'; '.join(reasons)})" if reasons else ""
    raise UserError(
        f"cannot guess what {type(model).__name__} takes{tried_text}; give example=, an input or its shape such as (1, 3, 64, 64)"
    )


def one_input(example: Any) -> Batched:
    """Return the first input of an example, or zeros of the given shape."""
    if isinstance(example, Mapping | TensorTree) or (
        isinstance(example, tuple) and any(isinstance(part, Tensor | np.ndarray | Mapping) for part in example)
    ):
        inputs = inputs_of(example, "example=")
        return inputs.normalise(inputs.read(example, "example="))[:1]
    if isinstance(example, np.ndarray):
        example = torch.from_numpy(example)
    if isinstance(example, Tensor) and example.ndim > 0:
        return example[:1]
    if isinstance(example, Sequence) and not isinstance(example, str) and example:
        sizes = list(example)
        if all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
            return torch.zeros(1, *sizes[1:])
    raise UserError(
        f"example= is one tensor with the batch first, or its shape such as (1, 3, 64, 64), not a {type(example).__name__}"
        + (f" ({example!r})" if isinstance(example, (int, str, tuple, list)) and len(repr(example)) < 60 else "")
        + "; a model that takes several is given a dict or a tuple of tensors"
    )


def guesses(model: nn.Module) -> list[tuple[int, ...]]:
    """Return shapes that the model's first layer would take."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return [(1, module.in_channels, side, side) for side in SIZES]
        if isinstance(module, nn.Linear):
            return [(1, module.in_features)]
    return []


def watched(model: nn.Module, x: Batched) -> DryRun:
    run = DryRun(x, [], {})

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            run.finished.append(name)
            run.outputs[name] = output

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    try:
        with in_mode(model, training=False), torch.no_grad():
            call(model, x)
    finally:
        for hook in hooks:
            hook.remove()
    return run


def tensor_of(output: Any) -> Tensor:
    """Return the hidden state in a module's output: itself, its entry `last_hidden_state`, or its first tensor."""
    if isinstance(output, Mapping):
        output = [output.get("last_hidden_state"), *output.values()]
    if isinstance(output, (tuple, list)):
        output = next((part for part in output if isinstance(part, Tensor)), None)
    if not isinstance(output, Tensor):
        raise UserError(f"a tapped module returned a {type(output).__name__} and no tensor; tap a module that returns its features")
    return output


def readable(run: DryRun, name: str) -> Tensor:
    """Return the features of a module, or say why it has none."""
    output = run.outputs[name]
    try:
        tensor = tensor_of(output)
    except UserError:
        raise UserError(f"'{name}' returns a {type(output).__name__} without a tensor, which a tap cannot read") from None
    if tensor.ndim not in (2, 3, 4) or len(tensor) != len(run.x) or not tensor.is_floating_point():
        raise UserError(
            f"'{name}' returns {tensor.dtype} of shape {list(tensor.shape)} for {len(run.x)} inputs; a tap reads floats with the "
            "batch first: vectors [B, D], sequences [B, T, D] or maps [B, C, H, W]"
        )
    return tensor


def is_readable(run: DryRun, name: str) -> bool:
    try:
        readable(run, name)
    except UserError:
        return False
    return True


def choose_pool(model: nn.Module, run: DryRun, name: str, output: Tensor, pool: Pool) -> str:
    """Choose how a tap pools its module's output."""
    if output.ndim == 2:
        return "vector"
    if pool == "class" and output.ndim != 3:
        raise UserError(f"pool='class' needs sequences [B, T, D], but '{name}' returns {list(output.shape)}; use pool='auto'")
    if pool != "auto":
        return pool
    if output.ndim == 4:
        # Square images have square maps, which tells maps with channels last (as in Swin) from the usual ones.
        shape = next(leaf.shape for _, leaf in leaves(run.x))
        square_input = len(shape) == 4 and shape[2] == shape[3]
        return "mean" if square_input and output.shape[1] == output.shape[2] != output.shape[3] else "maps"
    kinds = [type(module) for module in model.modules()]
    if nn.Conv1d in kinds and nn.LayerNorm not in kinds:  # signals [B, C, T], not sequences
        return "maps"
    has_class_token = any(parameter.rsplit(".", 1)[-1] in CLASS_TOKENS for parameter, _ in model.named_parameters())
    return "class" if has_class_token else "mean"


def named(model: nn.Module, run: DryRun, names: list[str]) -> list[str]:
    """Check the names and return them in the order in which the modules finish."""
    if not names:
        raise UserError("at= names no module to tap; leave it out to have evenly spaced blocks tapped")
    known = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4) or known[:5]
            raise UserError(f"the model has no module '{name}' to tap; did you mean {' or '.join(map(repr, close))}?")
        if name not in run.outputs:
            inside = [other for other in dict.fromkeys(run.finished) if other.startswith(f"{name}.") and is_readable(run, other)]
            instead = f", such as '{inside[-1]}'" if inside else ""
            raise UserError(
                f"'{name}' is not called by the model's forward, so it cannot be tapped; name a module that is{instead}"
            )
    if len(set(names)) < len(names):
        raise UserError(f"at= names a module twice: {', '.join(names)}")
    return sorted(names, key=last_place(run).__getitem__)


def evenly_spaced(places: list[str], taps: int) -> list[str]:
    """Return the last, and others at equal distances before it; deeper ones where that is uneven."""
    taps = min(taps, len(places))
    return [places[math.ceil((number + 1) * len(places) / taps) - 1] for number in range(taps)]


def last_place(run: DryRun) -> dict[str, int]:
    return {name: place for place, name in enumerate(run.finished)}


def first_line(error: BaseException) -> str:
    """Shorten another library's error to fit into a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def optional_package(name: str, extra: str, what: str) -> ModuleType:
    """Import a package that one of gracecl's extras installs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason, remedy = first_line(error), f"install it with: pip install 'gracecl[{extra}]'"
    except RuntimeError as error:  # what a torchvision that was made for another PyTorch raises
        reason, remedy = first_line(error), "install builds of torch and torchvision that belong together, or remove torchvision"
    raise UserError(f"{what} needs the package {name}, which cannot be imported ({reason}); {remedy}")


# Blocks.


def found_blocks(model: nn.Module, run: DryRun) -> list[str]:
    """Find the blocks or stages that hold most of the model's layers, in the order in which they finish.

    Children of one module are a list of blocks if they hold at least half of the layers that ran. The outermost list of at least
    four is taken, else the longest. A final linear layer that gives the model's output is its head and not a block.
    """
    layers = [name for name in run.finished if is_layer(model.get_submodule(name))]
    head = layers.pop() if layers and gives_the_result(model, run, layers[-1]) else ""
    lists = []
    for parent in sorted(dict(model.named_modules()), key=lambda name: name.count(".") + bool(name)):
        blocks = blocks_of(model, run, parent, head)
        inside = sum(any(layer == part or layer.startswith(f"{part}.") for part in blocks.values()) for layer in layers)
        if blocks and 2 * inside >= len(layers):
            lists.append(list(blocks))
    if not lists:
        raise UserError(f"no blocks to tap were found in {type(model).__name__}; name modules with at=[...]")
    return next((places for places in lists if len(places) >= STAGES), max(lists, key=len))


def blocks_and_output(model: nn.Module, run: DryRun) -> list[str]:
    """The blocks before the model's output, as far as some are found, and the model itself."""
    readable(run, "")
    try:
        blocks = found_blocks(model, run)
    except UserError:
        blocks = []
    result = tensor_of(run.outputs[""])
    return [*(name for name in blocks if tensor_of(run.outputs[name]) is not result), ""]


def blocks_of(model: nn.Module, run: DryRun, parent: str, head: str) -> dict[str, str]:
    """Return `{where to tap: the block's layer or the block}` of a module's children.

    Children with layers inside are blocks. Where there is at most one, each child that is a layer begins a block that lasts until
    the next, and is tapped at its end: the activation or pooling after a convolution.
    """
    place = last_place(run)
    children = [f"{parent}.{child}" if parent else child for child, _ in model.get_submodule(parent).named_children()]
    ran = sorted((name for name in children if name in place), key=place.__getitem__)
    usable = [name for name in ran if name != head and not head.startswith(f"{name}.") and is_readable(run, name)]
    modules = {name: model.get_submodule(name) for name in usable}
    nested = {
        name: name for name, module in modules.items() if any(is_layer(part) for part in module.modules() if part is not module)
    }
    if len(nested) > 1:
        return nested
    ends: dict[str, str] = {}
    layer = ""
    for name, module in modules.items():
        if is_layer(module):
            layer = name
        if layer and name not in nested and not isinstance(module, nn.Flatten):
            ends[layer] = name
    single = {end: layer for layer, end in ends.items()}
    return single if len(single) > len(nested) else nested


def is_layer(module: nn.Module) -> bool:
    """Return whether the module is one layer with weights: a convolution or a linear map, not a norm."""
    return not list(module.children()) and any(weight.ndim > 1 for weight in module.parameters(recurse=False))


def gives_the_result(model: nn.Module, run: DryRun, name: str) -> bool:
    """Return whether a linear layer's output is what the model returns."""
    if not isinstance(model.get_submodule(name), nn.Linear) or not is_readable(run, ""):
        return False
    return run.outputs[name] is tensor_of(run.outputs[""])
