"""The options of a learner and of a run: name, type, default and sentence, each written once.

`Recipe` and `RunConfig` are made of them; the command, `gracecl.run` and `Learner` take their signatures and their help from here.
This file needs no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from gracecl.errors import UserError
from gracecl.registry import nearest, quantity, spec
from gracecl.registry.spec import AtLeast

F = TypeVar("F", bound=Callable[..., Any])
Layout = Literal["auto", "contiguous", "channels_last"]
Precision = Literal["fp32", "bf16", "fp16"]
SchedulerStep = Literal["step", "task"]
TrunkFeatures = Literal["auto", "torch", "onnx", "off"]
Sharing = Literal["exact", "local_norm", "off"]
ALIASES = {"buffer_size": "memory"}
"""what other libraries call an option"""
OPTIMIZER = "adam(lr=0.001, weight_decay=0.0001)"
OF_THE_DATA, BY_THE_NET = "data", "auto"
NO_EFFECT_ON_RESULTS = ("checkpoint_every", "snapshots", "tuned_on")
"""options that do not change results"""
LIMITS = ("budget", "bytes", "pace")
"""options that limit what a run may compute or keep"""
ADDED_LATER = {
    "normalise": OF_THE_DATA,
    "features": "auto",
    "plugin_code": None,
    "scheduler": None,
    "scheduler_step": "step",
    "boundaries": "auto",
    "eval_every_images": 0,
    "eval_after_marks": 0,
    "eval_images": None,
    "store": "ram",
    "sharing": "exact",
    "prequential": False,
    "near_future": 0,
    "probabilities": False,
    **dict.fromkeys(LIMITS),
}
"""settings that older runs lack; at these values they are left out of the folder's hash, so that older runs are found"""


AUTO_ON_FEATURES = "closed(temperature=True)"
AUTO_FROM_SCRATCH = "best()"
"""what the method `auto` stands for on a net that is pretrained or frozen, and on one that begins from scratch (engine/auto.py)"""


@dataclass(frozen=True)
class LearnerOptions:
    """Options that a run and an embedded learner share."""

    error_name: ClassVar[str] = "the learner"
    """subject of errors about its values"""

    method: str = "grace"
    """an expression such as grace(er(n_recall=64)); grace alone is grace(mose()), the paper's system; auto follows from the net"""
    net: str = "resnet18(width=64)"
    """an expression such as "resnet18(width=20)" """
    memory: Annotated[int, AtLeast(0)] = 1000
    """images that may be kept; what others call the buffer's size"""
    seed: Annotated[int, AtLeast(0)] = 0
    """of everything random; the same seed gives every method the same stream and the same memory"""
    taps: Annotated[int, AtLeast(1)] | None = None
    """tapped layers, counted from the last; None is 4 for methods that work on layers, else 1"""
    augment: str = "tau"
    """none, tau, simclr, partial, full, mild or crop"""
    optimizer: str = OPTIMIZER
    """an expression such as "sgd(lr=0.1)" """
    scheduler: str | None = None
    """how the learning rate changes, such as "cosine(steps=500)", linear, warmup or "drop(at=[100, 200])"; None is not at all"""
    scheduler_step: SchedulerStep = "step"
    """advance the scheduler after each batch, or at the end of each task"""
    boundaries: str = "auto"
    """where tasks begin for the method: auto is where the stream marks them; "every(100)" steps, novelty (a label not met before),
    adwin (the error rises) and never do not look at marks"""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, xpu, or auto: the CUDA GPU if there is one"""
    precision: Precision = "fp32"
    """of forward and losses"""
    compile: bool = False
    """let torch.compile fuse the backbone; worth its minute from some hundred steps on"""
    cuda_graphs: bool = False
    """compile, and replay the backbone's kernels as CUDA graphs"""
    layout: Layout = "auto"
    """how maps lie in memory, which shows in speed and rounding; auto is channels_last on a CPU, for nets wide enough"""
    store: str = "ram"
    """where the memory's images are kept: ram, disk (a mapped file, with the same results), "jpeg(quality=90)" (lossy), or sharded
    (each of several processes holds a part; as ram in one process)"""
    sharing: Sharing = "exact"
    """how several processes share each pass (--nproc): exact gives the numbers of one process, local_norm lets BatchNorm see each
    process's images alone, off lets each process learn by itself"""

    def __post_init__(self) -> None:
        if not isinstance(self.net, str):
            raise UserError(
                f"net is an expression such as 'resnet18(width=20)', not a {type(self.net).__name__}; "
                "Learner and gracecl.run also take a torch.nn.Module or a function that makes one"
            )
        spec.check_fields(self, self.error_name)


@dataclass(frozen=True)
class RunOptions(LearnerOptions):
    """Options of a run: a learner's, the stream, and how often to evaluate and save."""

    error_name: ClassVar[str] = "the run"

    stream: str = "split-cifar100"
    """an expression such as "split-cifar100(tasks=5, classes='0-19')" """
    normalise: str = BY_THE_NET
    """mean and std of pixels: auto is what a pretrained net was trained with, else data, the data set's own; half (0.5, 0.5),
    imagenet, clip or none by name"""
    features: TrunkFeatures = "auto"
    """what computes a frozen trunk's features, once, for all runs: onnx (ONNX Runtime), torch, or auto; off computes them in every
    pass"""
    steps: Annotated[int, AtLeast(1)] | None = None
    """batches after which the stream is cut; None is all of it"""
    eval_every: Annotated[int, AtLeast(0)] = 0
    """evaluate every so many steps too, not only where tasks end"""
    eval_every_images: Annotated[int, AtLeast(0)] = 0
    """evaluate each time that so many images have come, too; the area under the any-time curve is the mean of these"""
    eval_after_marks: Annotated[int, AtLeast(0)] = 0
    """evaluate after each of the first steps of a new task, so many of them, where the stability gap lies"""
    eval_images: Annotated[int, AtLeast(1)] | None = None
    """evaluate on so many of the test images, equally many of each class; None is all of them"""
    prequential: bool = False
    """predict each batch before it is learned, and record labels and predictions: accuracy on the stream itself"""
    near_future: Annotated[int, AtLeast(0)] = 0
    """at each step, predict the batch that comes so many steps later too; 0 is none"""
    probabilities: bool = False
    """beside these predictions, record the largest probability and the label's, where the method's rule gives some"""
    checkpoint_every: Annotated[int, AtLeast(1)] = 500
    """save every so many steps (and every two minutes)"""
    snapshots: bool = False
    """keep the net as it was at the start and at the end of each task, for 'gracecl theory'"""
    budget: str | None = None
    """FLOPs that learning may take: 2G/step, 500G for the whole stream, or what a method takes here, such as "er()"; a method that
    takes more makes fewer updates"""
    bytes: str | None = None
    """bytes that may be kept (images, nets, optimizer, statistics): 4MB, or what a method keeps here; a method that keeps more
    gets a smaller memory"""
    pace: str | None = None
    """the stream's speed in FLOPs per batch: 2G/batch, or what a method takes per batch, such as "er()"; a method that takes k
    times as many learns from every k-th batch"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in LIMITS:
            if (value := getattr(self, name)) is not None:
                quantity.parse(value, name)


def run_name(settings: Mapping[str, Any]) -> str:
    """Return a run's name, `<hash>/<seed>`: the end of its folder's path, which its files repeat.

    The hash identifies the configuration without its seed. A missing setting has its default.
    """
    known = {field.name: field.default for field in dataclasses.fields(RunOptions)} | ADDED_LATER
    values = {name: settings.get(name, default) for name, default in known.items() if name not in ("seed", *NO_EFFECT_ON_RESULTS)}
    identity = {name: value for name, value in values.items() if name not in ADDED_LATER or value != ADDED_LATER[name]}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    return f"{digest}/{settings['seed']}"


def sentences(kind: type[Any]) -> Mapping[str, str]:
    """Return the docstring below each field of a class and its bases."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__[:-1]):
        [body] = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = " ".join(words.split())
    return found


def docstring(thing: Any) -> str:
    """Return the docstring of a function or class, even where Python drops it (PYTHONOPTIMIZE=2)."""
    if thing.__doc__ is None:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
        assert isinstance(definition, ast.FunctionDef | ast.ClassDef)
        return ast.get_docstring(definition) or ""
    return inspect.cleandoc(thing.__doc__)


def takes(
    kind: type[Any], *, leave_out: Sequence[str] = ("method",), open_ended: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """Decorate a function with `**options`: add the options of `kind` to its signature and docstring.

    Options in `open_ended` get the default None; its text says what None means.
    """
    unset = open_ended or {}

    def apply(function: F) -> F:
        known, hints = inspect.signature(function, eval_str=False), typing.get_type_hints(kind)
        own = [parameter for parameter in known.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
        added, lines, words = [], [], sentences(kind)
        for field in dataclasses.fields(kind):
            if field.name in leave_out:
                continue
            type_, default, text = hints[field.name], field.default, words[field.name]
            if field.name in unset:
                type_, default, text = type_ | None, None, f"{text} (default: {unset[field.name]}, else {default})"
            added.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=type_))
            lines.append(f"{field.name}: {text}")
        function.__signature__ = known.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        function.__annotations__ |= {parameter.name: parameter.annotation for parameter in added}
        text = docstring(function)
        listed = textwrap.indent("\n".join(lines), "    ")
        function.__doc__ = f"{text}\n{listed}" if "Args:" in text else f"{text}\n\nArgs:\n{listed}"
        return function

    return apply


def by_name(kind: type[LearnerOptions], options: Mapping[str, Any], beside: Sequence[str], of: str) -> dict[str, Any]:
    """Return options by field name, with aliases resolved; refuse names that neither `kind` has nor `beside` lists."""
    names = [field.name for field in dataclasses.fields(kind) if field.name != "method"]
    named: dict[str, Any] = {}
    for option, value in options.items():
        name = ALIASES.get(option, option)
        if name not in names:
            known = list(dict.fromkeys([*names, *beside, *ALIASES]))
            raise UserError(f"{of} has no option '{option}'{nearest(option, known)} (options: {', '.join(known)})")
        if name in named:
            alias = next(alias for alias, meant in ALIASES.items() if meant == name)
            raise UserError(f"{name} and {alias} name one option; leave one of them out")
        named[name] = value
    return named
