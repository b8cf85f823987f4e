"""A finished run with snapshots → the quantities of the two theorems.

θ are the tensors that the outputs depend on in evaluation mode. BatchNorm is the map x · scale + shift there, so a scale and a
shift per channel stand for its weight, bias and running statistics: everything that moves the net is counted, and once. Losses
are in [0, 1]: 0-1 error for theorem 1, 1 - p_y for theorem 2, the softmax over all outputs. "Population" is a task's test images,
"empirical" its training images.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from gracecl import checkpoint, rng
from gracecl.core import Ints
from gracecl.data.progress import Advance, progress
from gracecl.errors import UserError
from gracecl.functional.losses import entropy
from gracecl.lab import report
from gracecl.lab.runs.run import RunConfig, Work, about_snapshot, learner_and_stream, snapshot_file
from gracecl.lab.theory.bounds import (
    ForgettingBound,
    Objective,
    PacBayes,
    Point,
    Segment,
    choice_cost,
    complexity,
    difference,
    gaussian_kl,
    largest_gradient,
    measure_segment,
    norm,
    printed_kl,
)
from gracecl.methods.grace import Grace
from gracecl.nets import TappedNet
from gracecl.registry import spec
from gracecl.registry.spec import Above, AtLeast, Below
from gracecl.streams import Stream

log = logging.getLogger(__name__)

Head = Literal["last", "mean"]
FAMILIES = ("isotropic", "relative")
RUNGS = 12
STEP_DOWN = 4.0
"""variances to choose from: 1, 1/4, 1/16, …"""
SEARCH_DRAWS, SEARCH_IMAGES = 3, 256
"""with which the variance is chosen; the bound itself is taken with all draws and images"""
TOLERATED = 0.05
"""a variance is tolerated where it adds at most so much to the training error"""
BATCH = 250
LARGEST_LOGIT = 1e4
"""of a net with noise"""
LAST_ROWS = 20
"""recorded rows at the end of a task whose mean entropy is H*"""
NO_SCALE = 1e-8
"""a mean square below this is that of a tensor which starts at zero and has no scale of its own"""
ANEW = "run it again with --snapshots and another --out"


@dataclass(frozen=True)
class Settings:
    """Accuracy of the measurement."""

    draws: Annotated[int, AtLeast(2)] = 20
    """from each posterior"""
    points: Annotated[int, AtLeast(2)] = 11
    """on each segment, its ends included"""
    images: Annotated[int, AtLeast(1)] = 500
    """of each task's training and test set at most, drawn at random"""
    delta: Annotated[float, Above(0), Below(1)] = 0.05
    head: Head = "last"
    """whose softmax is the prediction: the last tap's, or the mean of all taps'"""

    def __post_init__(self) -> None:
        spec.check_fields(self, "theory")


@dataclass(frozen=True)
class Noise:
    """A variance that was tried."""

    family: str
    rung: int
    variance: float
    kl: float
    training_error: float
    bound: float


@dataclass(frozen=True)
class NoiseSearch:
    """All variances that were tried for one task."""

    tried: tuple[Noise, ...]
    error: float
    """training error of the net without noise, on the same images"""

    @property
    def best(self) -> Noise:
        return min(self.tried, key=lambda noise: noise.bound)

    @property
    def tolerated(self) -> Noise | None:
        """The variance with the smallest KL among those that keep the error low; None if none does."""
        stood = [noise for noise in self.tried if noise.training_error <= self.error + TOLERATED]
        return min(stood, key=lambda noise: noise.kl, default=None)


@dataclass(frozen=True)
class Theory:
    """All measurements, for the page."""

    folder: Path
    config: RunConfig
    settings: Settings
    weight: float
    """λ"""
    why_weight: str
    targets: tuple[float, ...]
    """H* of each task; NaN where λ is 0"""
    outputs: int
    """classes that the head tells apart"""
    entries: int
    """numbers in θ"""
    norm_entries: int
    """of which BatchNorm's scales and shifts"""
    training_images: tuple[int, ...]
    test_images: tuple[int, ...]
    """of each task, used"""
    tasks: tuple[PacBayes, ...]
    searches: tuple[NoiseSearch, ...]
    segments: tuple[Segment, ...]
    norms_moved: tuple[float, ...]
    """the scales' and shifts' part of each d_k"""
    pairs: tuple[ForgettingBound, ...]


@dataclass(frozen=True)
class LabelledImages:
    """A set of images on which the net can be evaluated at any θ."""

    net: nn.Module
    normalise: Callable[[Tensor], Tensor]
    x: Tensor
    """uint8"""
    y: Tensor
    head: Head
    entropies: bool
    """whether the layers' entropies are wanted too"""

    def first(self, number: int) -> LabelledImages:
        return replace(self, x=self.x[:number], y=self.y[:number])

    def objective(self, weight: float, target: float) -> Objective:
        """Return 1 - p_y and the entropies, for theorem 2."""
        return Objective([self._part(rows, self._missing) for rows in self._slices()], weight, target)

    def errors(self) -> Objective:
        """Return the 0-1 error and the entropies, for theorem 1, without gradients."""
        return Objective([self._part(rows, self._wrong) for rows in self._slices()])

    def _slices(self) -> list[slice]:
        return [slice(start, start + BATCH) for start in range(0, len(self.y), BATCH)]

    def _part(self, rows: slice, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Point], Tensor]:
        """Return what a batch of images contributes to [R, H_1, …]."""

        def part(theta: Point) -> Tensor:
            y = self.y[rows]
            logits = functional_call(self.net, dict(theta), (self.normalise(self.x[rows]),)).logits
            if loss == self._wrong:  # noise may make a net overflow; it still predicts something
                logits = logits.nan_to_num(0.0).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
            chances = logits[-1].softmax(dim=-1) if self.head == "last" else logits.softmax(dim=-1).mean(dim=0)
            terms = loss(chances, y).mean().unsqueeze(0)
            if self.entropies:
                terms = torch.cat([terms, entropy(logits)])
            return terms * (len(y) / len(self.y))

        return part

    @staticmethod
    def _missing(chances: Tensor, y: Tensor) -> Tensor:
        return 1 - chances.gather(1, y[:, None])[:, 0]

    @staticmethod
    def _wrong(chances: Tensor, y: Tensor) -> Tensor:
        return (chances.argmax(dim=1) != y).to(chances.dtype)


def measure(folder: Path, settings: Settings, data_root: Path | None = None) -> Theory:
    """Measure both theorems for the run in a folder."""
    work = Work.begun(folder, data_root)
    with work.own_code():
        return _measure(work, settings)


def _measure(work: Work, settings: Settings) -> Theory:
    folder = work.folder
    if not work.finished:
        raise UserError(f"the run in {folder} is not finished; finish it with: gracecl resume {folder}")
    # The net is evaluated in full precision and differentiated twice, which compiled code does not allow.
    features = work.as_begun().features
    config = replace(work.config, features=features, device="auto", precision="fp32", compile=False, cuda_graphs=False)
    engine, stream = learner_and_stream(config, work.data_root, allotted=work.allotted)
    if not stream.has_tasks:
        raise UserError(f"the run in {folder} learns from a stream without tasks, and both theorems are about tasks")
    run = report.read_run(folder)
    ends = [step for step in range(len(stream)) if stream.ends_task(step)]
    snapshots = [_snapshot(work, number, engine.device) for number in range(len(ends) + 1)]

    samples = [_samples(stream, ends, number) for number in range(len(ends))]
    if min(samples) < 2:
        raise UserError(f"a task of the run in {folder} has one training image, and theorem 1 needs two; use more --steps")

    weight, why = entropy_weight(work.config)
    targets = target_entropies(run, ends) if weight else (math.nan,) * len(ends)
    net = engine.net.eval()
    for name, value in net.named_parameters():
        value.requires_grad_(False)
        if name not in snapshots[0]:
            raise UserError(f"the snapshots in {folder} are of another net (they lack {name}); run it again with --snapshots")
    norms = fold_norms(net)
    snapshots = [fold(snapshot, norms) for snapshot in snapshots]
    sets = [_images_of_task(net, stream, ends, number, settings, bool(weight)) for number in range(len(ends))]
    names = _used_tensors(sets[0][0], snapshots)
    thetas = [{name: snapshot[name] for name in names} for snapshot in snapshots]
    moved = [_of_norms(difference(*pair), norms) for pair in pairwise(thetas)]

    with progress("theorem 1", len(ends), "tasks") as advance:
        tasks, searches = [], []
        for number, (training, test) in enumerate(sets):
            search = choose_noise(training, thetas[number], thetas[number + 1], samples[number], settings, config.seed)
            searches.append(search)
            chosen = PacBayesTask(number + 1, samples[number], training, test, weight, targets[number])
            tasks.append(chosen.measure(search.best, thetas[number], thetas[number + 1], settings, config.seed))
            advance(1)
    with progress("theorem 2, segments", len(ends), "segments") as advance:
        segments = []
        for number, (training, _) in enumerate(sets):
            objective = training.objective(weight, targets[number])
            segments.append(measure_segment(objective, thetas[number], thetas[number + 1], settings.points))
            advance(1)
    populations = [test.objective(weight, target) for (_, test), target in zip(sets, targets, strict=True)]
    with progress("theorem 2, pairs", len(ends) * (len(ends) - 1) // 2, "pairs", show=len(ends) > 1) as advance:
        pairs = forgetting_of_all_pairs(populations, thetas, segments, settings.points, advance)
    return Theory(
        folder=folder,
        config=work.config,
        settings=settings,
        weight=weight,
        why_weight=why,
        targets=targets,
        outputs=net.classes,
        entries=sum(value.numel() for value in thetas[0].values()),
        norm_entries=sum(value.numel() for value in _of_norms(thetas[0], norms).values()),
        training_images=tuple(len(training.y) for training, _ in sets),
        test_images=tuple(len(test.y) for _, test in sets),
        tasks=tuple(tasks),
        searches=tuple(searches),
        segments=tuple(segments),
        norms_moved=tuple(map(norm, moved)),
        pairs=tuple(pairs),
    )


# --- what the run says ----------------------------------------------------------------------------------------------------


def entropy_weight(config: RunConfig) -> tuple[float, str]:
    """Return λ and its origin."""
    found = [part for part in spec.parse_method(config.method).parts if isinstance(part, Grace)]
    if not found:
        return 0.0, "λ = 0, because the method has no entropy term"
    beta = found[0].controller().beta
    if found[0].entropy_mode == "none" or beta == 0:
        return 0.0, "λ = 0, because GRACE's entropy term is off"
    return beta, f"λ = β = {beta:g}, H* = mean entropy over the layers in the last {LAST_ROWS} recorded steps of a task"


def target_entropies(run: report.Run, ends: list[int]) -> tuple[float, ...]:
    """Return H* of each task: the recorded entropy over the task's last recorded steps, mean over layers."""
    steps, values, _ = run.series("log/H")
    starts = [-1, *ends[:-1]]
    rows = [values[(steps > start) & (steps <= end)] for start, end in zip(starts, ends, strict=True)]
    if any(len(found) == 0 for found in rows):
        raise UserError(f"{run.path / 'metrics.jsonl'} has a task without recorded entropies, so there is no target for it")
    return tuple(float(found[-LAST_ROWS:].mean()) for found in rows)


def _snapshot(work: Work, number: int, device: torch.device) -> dict[str, Tensor]:
    """Load the net as it was after `ended` tasks."""
    file = snapshot_file(work.folder, number)
    if not file.parent.is_dir():
        raise UserError(f"the run in {work.folder} kept no snapshots; {ANEW}")
    try:
        found, about = checkpoint.load_tensors(file)
    except (OSError, SafetensorError, ValueError):
        raise UserError(f"{file} is missing or damaged; {ANEW}") from None
    if not about:
        log.warning("%s was written by an earlier version, which did not note its run and task, and is taken as it is", file)
    elif about != about_snapshot(work.config, number):
        whose = f"of the run {about.get('run')} after {about.get('ended')} tasks"
        raise UserError(f"{file} is {whose}, and not of this run after {number}; put its own back from a copy, or {ANEW}")
    return {name: value.to(device) for name, value in found.items() if value.is_floating_point()}


# --- images -----------------------------------------------------------------------------------------------------------------


def _positions(stream: Stream, ends: list[int], number: int) -> slice:
    start = int(stream.ends[ends[number - 1]]) if number else 0
    return slice(start, int(stream.ends[ends[number]]))


def _samples(stream: Stream, ends: list[int], number: int) -> int:
    """Return n_t: the training images that the stream showed in a task."""
    return len(np.unique(stream.order[_positions(stream, ends, number)]))


def _images_of_task(
    net: TappedNet, stream: Stream, ends: list[int], number: int, settings: Settings, entropies: bool
) -> tuple[LabelledImages, LabelledImages]:
    """Return a task's training and test images, at most as many as wanted."""
    data, task = stream.data, int(stream.task_of_step[ends[number]])
    training = np.unique(stream.order[_positions(stream, ends, number)])
    test = np.flatnonzero(stream.test_task == task)
    if len(test) == 0:
        raise UserError(f"task {number + 1} has no test images, so its population quantities cannot be estimated")

    def chosen(purpose: str, index: Ints) -> Ints:
        return rng.generator(stream.seed, "theory", purpose, number).permutation(index)[: settings.images]

    def shown(x: Tensor, y: Ints) -> LabelledImages:
        return LabelledImages(net, net.inputs.normalise, x, torch.from_numpy(y).to(x.device), settings.head, entropies)

    items, rows = chosen("training", training), chosen("test", test)
    test_x = data.test_x.index_select(0, torch.from_numpy(rows).to(data.test_x.device))
    return shown(stream.inputs(items), stream.labels(items)), shown(test_x, data.test_y[rows])


# --- θ ----------------------------------------------------------------------------------------------------------------------


def fold_norms(net: nn.Module) -> dict[str, float]:
    """Let every BatchNorm compute x · scale + shift from two buffers of that name; return the ε of each by its name.

    PyTorch's own has no derivative by the running statistics. The modules stay what they are, for nets that ask for their type.
    """
    folded = {}
    for name, module in net.named_modules():
        if isinstance(module, BatchNorm) and module.running_mean is not None:
            for part in ("scale", "shift"):
                module.register_buffer(part, torch.zeros_like(module.running_mean))
            setattr(module, "forward", partial(_scale_and_shift, module))  # noqa: B010 (a method cannot be assigned to)
            folded[name] = module.eps
    return folded


def _scale_and_shift(norm: BatchNorm, x: Tensor) -> Tensor:
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return torch.addcmul(norm.get_buffer("shift").view(shape), x, norm.get_buffer("scale").view(shape))


def fold(snapshot: Mapping[str, Tensor], norms: Mapping[str, float]) -> dict[str, Tensor]:
    """Replace the statistics and weights of BatchNorm in a snapshot by scale and shift."""
    found = dict(snapshot)
    for name, eps in norms.items():
        mean, variance = found.pop(f"{name}.running_mean"), found.pop(f"{name}.running_var")
        scale = torch.rsqrt(variance + eps) * found.pop(f"{name}.weight", torch.ones_like(variance))
        found[f"{name}.scale"] = scale
        found[f"{name}.shift"] = found.pop(f"{name}.bias", torch.zeros_like(mean)) - mean * scale
    return found


def _used_tensors(images: LabelledImages, snapshots: list[dict[str, Tensor]]) -> list[str]:
    """Name the tensors that the outputs depend on at any snapshot: projectors, for one, play no part."""
    used: dict[str, None] = {}
    x = images.normalise(images.x[:BATCH])
    for snapshot in snapshots:
        leaves = {name: value.detach().requires_grad_() for name, value in snapshot.items()}
        logits = functional_call(images.net, leaves, (x,)).logits
        wanted = logits[-1] if images.head == "last" and not images.entropies else logits
        found = torch.autograd.grad(wanted.square().sum(), list(leaves.values()), allow_unused=True)
        used |= {name: None for name, slope in zip(leaves, found, strict=True) if slope is not None and bool(slope.any())}
    return [name for name in snapshots[0] if name in used]


def _of_norms(theta: Point, norms: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: value for name, value in theta.items() if name.rpartition(".")[0] in norms}


# --- theorem 1 ----------------------------------------------------------------------------------------------------------------


def variances(prior_centre: Point, family: str, variance: float) -> dict[str, float]:
    """Return the variance of each tensor, from what was known before the task began."""
    if family == "isotropic":
        return dict.fromkeys(prior_centre, variance)
    squares = {name: float(value.double().square().mean()) for name, value in prior_centre.items()}
    return {name: variance * (square if square > NO_SCALE else 1.0) for name, square in squares.items()}


def drawn(centre: Point, spread: Mapping[str, float], *key: int | str) -> dict[str, Tensor]:
    """Draw a sample around a point."""
    generator = torch.Generator().manual_seed(rng.key(*key) >> 1)
    found = {}
    for name, value in centre.items():
        found[name] = value + math.sqrt(spread[name]) * torch.randn(value.shape, generator=generator).to(value)
    return found


def choose_noise(images: LabelledImages, before: Point, after: Point, samples: int, settings: Settings, seed: int) -> NoiseSearch:
    """Try every variance with few draws and images; `choice_cost` pays for the choice."""
    few = images.first(SEARCH_IMAGES).errors()
    tried = []
    for family in FAMILIES:
        for rung in range(1, RUNGS + 1):
            variance = STEP_DOWN ** (1 - rung)
            spread = variances(before, family, variance)
            kl = gaussian_kl(before, after, spread, spread)
            draws = (drawn(after, spread, seed, "theory search", draw) for draw in range(SEARCH_DRAWS))
            error = float(np.mean([few.values(theta).risk for theta in draws]))
            bound = error + complexity(kl + choice_cost(rung, len(FAMILIES)), samples, settings.delta)
            tried.append(Noise(family, rung, variance, kl, error, bound))
    return NoiseSearch(tuple(tried), few.values(after).risk)


@dataclass(frozen=True)
class PacBayesTask:
    """A task for theorem 1."""

    number: int
    samples: int
    training: LabelledImages
    test: LabelledImages
    weight: float
    target: float

    def measure(self, noise: Noise, before: Point, after: Point, settings: Settings, seed: int) -> PacBayes:
        """Evaluate the bound with the chosen variance and all draws."""
        spread = variances(before, noise.family, noise.variance)
        training, test = (replace(images.errors(), target=self.target) for images in (self.training, self.test))
        draws = (drawn(after, spread, seed, "theory", self.number, draw) for draw in range(settings.draws))
        seen, unseen = zip(*((training.values(theta), test.values(theta)) for theta in draws), strict=True)
        errors = [values.risk for values in seen]
        return PacBayes(
            task=self.number,
            samples=self.samples,
            family=noise.family,
            rung=noise.rung,
            variance=noise.variance,
            kl=gaussian_kl(before, after, spread, spread),
            kl_printed=printed_kl(before, after, spread, spread),
            cost=choice_cost(noise.rung, len(FAMILIES)),
            training_error=float(np.mean(errors)),
            spread=float(np.std(errors, ddof=1)) / math.sqrt(len(errors)),
            test_error=float(np.mean([values.risk for values in unseen])),
            net_error=test.values(after).risk,
            training_deviation=float(np.mean([values.deviation for values in seen])),
            test_deviation=float(np.mean([values.deviation for values in unseen])),
            weight=self.weight,
        )


# --- theorem 2 ----------------------------------------------------------------------------------------------------------------


def forgetting_of_all_pairs(
    populations: list[Objective], thetas: list[dict[str, Tensor]], segments: list[Segment], points: int, advance: Advance
) -> list[ForgettingBound]:
    """Return the bounds for every s < t; `thetas` begin with the one before the first task."""
    found = []
    for old, population in enumerate(populations, start=1):
        at_first, steepness = population.values(thetas[old]).total, 0.0
        for new in range(old + 1, len(thetas)):
            last = largest_gradient(population, thetas[new - 1], thetas[new], points)
            steepness = max(steepness, last)
            straight = new == old + 1
            found.append(
                ForgettingBound(
                    old=old,
                    new=new,
                    measured=population.values(thetas[new]).total - at_first,
                    steepness=steepness,
                    chord_steepness=last if straight else largest_gradient(population, thetas[old], thetas[new], points),
                    distance=norm(difference(thetas[old], thetas[new])),
                    segments=tuple(segments[old:new]),
                    weight=population.weight,
                )
            )
            advance(1)
    return found
