"""What was measured of the two theorems, as files beside the run (theory.md, theory.json, theory.png) and as tables to print."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from gracecl.files import write_json, write_text
from gracecl.lab.report.style import INK, METHOD_COLOURS, QUIET, new_figure, plain, save
from gracecl.lab.report.table import Table
from gracecl.lab.theory.bounds import STATIONARY, Convexity, ForgettingBound
from gracecl.lab.theory.measure import TOLERATED, Theory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_APPLICABLE = "not applicable"
KINDS: tuple[Convexity, ...] = ("curvature", "secant")
Rows = list[dict[str, str]]
"""a table: what each column is called, and its cell"""
MOST_PAIRS = 15
"""drawn one below the other; beyond it the picture has only what was forgotten from one task to the next and by the end"""


def write(theory: Theory) -> None:
    """Write theory.json, theory.png and theory.md into the run's folder."""
    write_json(theory.folder / "theory.json", as_json(theory))
    draw(theory, theory.folder / "theory.png")
    write_text(theory.folder / "theory.md", markdown(theory))


# --- numbers ------------------------------------------------------------------------------------------------------------------


def as_json(theory: Theory) -> dict[str, Any]:
    """Return every number as plain values, by level."""
    delta, all_tasks = theory.settings.delta, _all_tasks(theory)
    tasks = [
        asdict(task)
        | {
            "target_entropy": target,
            "training_images": training,
            "test_images": test,
            "bound": task.bound(delta),
            "bound_all_tasks": task.bound(all_tasks),
            "bound_printed_kl": task.bound_printed_kl(delta),
            "bound_objective": task.bound_objective(delta),
            "bound_objective_all_tasks": task.bound_objective(all_tasks),
            "objective": task.objective,
            "error_without_noise_in_search": search.error,
            "tolerated": None if search.tolerated is None else asdict(search.tolerated),
            "search": [asdict(noise) for noise in search.tried],
        }
        for task, search, target, training, test in zip(
            theory.tasks, theory.searches, theory.targets, theory.training_images, theory.test_images, strict=True
        )
    ]
    segments = [
        {"task": number, **asdict(segment), "stationary": segment.stationary, "length_of_norms": moved}
        for number, (segment, moved) in enumerate(zip(theory.segments, theory.norms_moved, strict=True), start=1)
    ]
    return {
        "method": theory.config.method,
        "stream": theory.config.stream,
        "net": theory.config.net,
        "seed": theory.config.seed,
        "settings": asdict(theory.settings),
        "lambda": theory.weight,
        "why_lambda": theory.why_weight,
        "entries_of_theta": theory.entries,
        "of_which_norms": theory.norm_entries,
        "delta_all_tasks": all_tasks,
        "theorem_1": tasks,
        "theorem_2": {"segments": segments, "pairs": [_pair_json(pair) for pair in theory.pairs]},
    }


def _pair_json(pair: ForgettingBound) -> dict[str, Any]:
    levels = {
        f"{name}_{kind}": level(kind)
        for name, level in (("corrected", pair.corrected), ("printed", pair.printed), ("second_form", pair.second_form))
        for kind in KINDS
    }
    plain_values = ("old", "new", "measured", "steepness", "chord_steepness", "distance", "by_distance", "by_path", "stationary")
    return {name: getattr(pair, name) for name in plain_values} | {"entropy_lipschitz": pair.entropy_lipschitz} | levels


def _all_tasks(theory: Theory) -> float:
    """Return the δ of each task for which all bounds hold at once with probability 1 - δ."""
    return theory.settings.delta / len(theory.tasks)


# --- tables -------------------------------------------------------------------------------------------------------------------


def _task_rows(theory: Theory) -> Rows:
    delta, all_tasks = theory.settings.delta, _all_tasks(theory)
    return [
        {
            "task": str(task.task),
            "n": f"{task.samples:,}",
            "v": f"{task.variance:.2g} {task.family[:3]}.",
            "KL": _number(task.kl),
            "E_q\ntrain": f"{task.training_error:.3f}",
            "E_q\ntest": f"{task.test_error:.3f}",
            "net\ntest": f"{task.net_error:.3f}",
            "bound": _number(task.bound(delta)),
            "bound,\nall tasks": _number(task.bound(all_tasks)),
            "bound,\nprinted KL": _number(task.bound_printed_kl(delta)),
            "bound\nR+λΔ": _number(task.bound_objective(delta)),
            "E_q\nR+λΔ": _number(task.objective),
        }
        for task in theory.tasks
    ]


def _segment_rows(theory: Theory) -> Rows:
    return [
        {
            "k": str(number),
            "d_k": _number(segment.length),
            "of it\nnorms": _number(moved),
            "μ_k\ncurvature": _number(segment.curvature),
            "μ_k\nsecant": _number(segment.secant),
            "‖∇J_k‖\nat θ_k-1": _number(segment.gradient_before),
            "‖∇J_k‖\nat θ_k": _number(segment.gradient_after),
            "‖∇R̂_k‖\nat θ_k-1": _number(segment.risk_gradient),
            "Δ̂_k\nat θ_k-1": _number(segment.deviation),
            "C_Δ": _number(math.hypot(*segment.entropy_gradients)),
        }
        for number, (segment, moved) in enumerate(zip(theory.segments, theory.norms_moved, strict=True), start=1)
    ]


def _pair_rows(theory: Theory) -> Rows:
    return [
        {
            "s→t": f"{pair.old}→{pair.new}",
            "F": _number(pair.measured),
            "L_s": _number(pair.steepness),
            "L_s ·\n‖θ_t-θ_s‖": _number(pair.by_distance),
            "L_s ·\nΣd_k": _number(pair.by_path),
        }
        | {f"corrected\n{kind}": _level(pair.corrected(kind)) for kind in KINDS}
        | {f"printed\n{kind}": _level(pair.printed(kind), in_brackets=not pair.stationary) for kind in KINDS}
        for pair in theory.pairs
    ]


def tables(theory: Theory) -> list[RichTable]:
    """Return the tables for a terminal of 80 columns."""
    found = [
        _table("Theorem 1: PAC-Bayes, per task", _task_rows(theory), leave_out=("v", "bound,\nprinted KL")),
        _table("Theorem 2: the way of each task", _segment_rows(theory), leave_out=("of it\nnorms", "‖∇R̂_k‖\nat θ_k-1")),
    ]
    if theory.pairs:
        pairs = _table("Theorem 2: forgetting, per pair of tasks", _pair_rows(theory), leave_out=("L_s",))
        pairs.caption = (
            f"{NOT_APPLICABLE}: some μ_k ≤ 0; in brackets: computed although ∇J_k(θ_k) ≠ 0, so not a bound; "
            "all bounds are estimates, not certificates"
        )
        found.append(pairs)
    return found


def _table(title: str, rows: Rows, leave_out: Sequence[str]) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, caption_justify="left", title_justify="left")
    columns = [name for name in rows[0] if name not in leave_out]
    for name in columns:
        table.add_column(escape(name), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(row[name].replace(NOT_APPLICABLE, NOT_APPLICABLE.replace(" ", "\n"))) for name in columns))
    return table


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    if 100 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3f}" if 0.001 <= abs(value) < 100 or value == 0 else f"{value:.2g}"


def _level(value: float | None, *, in_brackets: bool = False) -> str:
    if value is None:
        return NOT_APPLICABLE
    return f"({_number(value)})" if in_brackets else _number(value)


# --- the page -----------------------------------------------------------------------------------------------------------------


def markdown(theory: Theory) -> str:
    settings, config = theory.settings, theory.config
    head = "the last head" if settings.head == "last" else "the mean over the heads"
    norms = f", {theory.norm_entries:,} of them BatchNorm's scales and shifts" if theory.norm_entries else ""
    sections = [
        "# The paper's bounds on this run",
        f"`{config.method}` on `{config.stream}`, net `{config.net}`, memory {config.memory}, seed {config.seed}; "
        f"snapshots of the net at the start (θ_0) and at the end of each of {len(theory.tasks)} tasks.",
        f"Evaluation mode throughout, softmax of {head} over all outputs. θ: the {theory.entries:,} numbers that the "
        f"outputs depend on{norms}. Training sets: {_range(theory.training_images)} images per task, test sets: "
        f"{_range(theory.test_images)} (random subsets of at most {settings.images}). {theory.why_weight}{_targets(theory)}. "
        "Every bound is an estimate, not a certificate: expectations are means over draws and images, suprema are maxima "
        "over points.",
        "## Theorem 1: PAC-Bayes, per task",
        _markdown(_task_rows(theory)),
        f"0-1 error. p = N(θ_t-1, V), q = N(θ_t, V), {settings.draws} draws from q; V is v for every entry (iso.) or v times "
        "the mean square of each tensor at θ_t-1 (rel.), chosen among powers of 1/4 at a cost of ln(π²j²/6) + ln 2. *bound* "
        f"holds for one task with probability 1 - δ, δ = {settings.delta:g}; *all tasks* for all at once "
        f"(δ/{len(theory.tasks)}); *printed KL* has the paper's (κ/2)‖θ_t-θ_t-1‖² for KL. *bound R+λΔ* is the printed one, on "
        "*E_q R+λΔ*.",
        "## Theorem 2: forgetting",
        _markdown(_segment_rows(theory)),
        "The way from θ_k-1 to θ_k under J_k = R̂_k + λΔ̂_k with the loss 1 - p_y: its length, of it BatchNorm's part, "
        f"the smallest directional curvature at {settings.points} points, the secant's, and the gradients at its ends. A "
        "μ_k that is not positive breaks the assumption of strong convexity.",
    ]
    if theory.pairs:
        sections += [
            _markdown(_pair_rows(theory)),
            "F = L_s(θ_t) - L_s(θ_s) on task s's test images; L_s is the largest gradient found on the segments between. "
            "*corrected*: L_s Σ (‖∇J_k(θ_k-1)‖ + ‖∇J_k(θ_k)‖)/μ_k, which does without the assumption that θ_k is a stationary "
            f"point; *printed*: the paper's, in brackets where ‖∇J_k(θ_k)‖ is above {STATIONARY:.0%} of ‖∇J_k(θ_k-1)‖, so that "
            f"it is no bound. {NOT_APPLICABLE.capitalize()}: some μ_k is not positive. {_chord(theory)}".rstrip(),
        ]
    else:
        sections.append("There is one task, so nothing could be forgotten.")
    sections += ["![Bounds and measured values](theory.png)", "## What the numbers do and do not show", reading(theory)]
    return "\n\n".join(sections) + "\n"


def reading(theory: Theory) -> str:
    """Summarise in one paragraph what the numbers show."""
    delta = theory.settings.delta
    bounds = [task.bound(delta) for task in theory.tasks]
    noisy = [task.test_error - task.net_error for task in theory.tasks]
    above = sum(bound >= 1 for bound in bounds)
    text = (
        f"The PAC-Bayes bound is {_range(bounds)}; it is at or above 1, where it says nothing, for {above} of {len(bounds)} "
        f"tasks. It speaks of the noisy net q, whose test error is {_range(noisy)} above the net's own (guessing among the "
        f"{theory.outputs} outputs errs at {1 - 1 / theory.outputs:.3g}). "
    )
    stood = [search.tolerated for search in theory.searches]
    ratios = [noise.kl / task.samples for noise, task in zip(stood, theory.tasks, strict=True) if noise is not None]
    if ratios:
        text += (
            f"At noise that adds at most {TOLERATED:g} to the training error, KL is {_range(ratios)} times n; a bound below 1 "
            "needs less than about 2. "
        )
    if theory.weight:
        cost = [task.bound_objective(delta) - task.bound(delta) for task in theory.tasks]
        text += (
            f"The printed bound on R + λΔ adds {_range(cost)}: it is the bound on R with λΔ on both sides and λΔ̂ on the right, "
            "so it is tightest at λ = 0 and cannot show that controlling entropy improves generalisation. "
        )
    text += _reading_of_forgetting(theory)
    return text + (
        "None of it compares methods: a run that moves less has smaller bounds whether or not it forgets less, and the "
        "entropy deviation enters as a cost for every rule that leaves it large, not as evidence for GRACE's."
    )


def _reading_of_forgetting(theory: Theory) -> str:
    if not theory.pairs:
        return ""
    pairs, later = theory.pairs, theory.segments[1:]
    lost = [pair for pair in pairs if pair.measured > 0]
    broken = [pair for pair in pairs if pair.measured > pair.by_path]
    concave = sum(not segment.curvature > 0 for segment in later)
    slopes = [segment.gradient_after / segment.gradient_before for segment in later if segment.gradient_before > 0]
    text = f"Something was forgotten on {len(lost)} of {len(pairs)} pairs (F > 0). "
    if lost:
        factors = [pair.by_path / pair.measured for pair in lost]
        text += f"There L_s Σd_k is {_range(factors)} times F (median {_number(median(factors))}). "
    text += f"F exceeds L_s Σd_k on {len(broken)} pairs. " if broken else "F stays below L_s Σd_k on all pairs. "
    text += f"J_k curves downwards somewhere on {concave} of the {len(later)} segments after the first task"
    if slopes:
        text += f", the gradient of J_k at θ_k is {_range(slopes)} times that at θ_k-1 where the printed proof has 0"
    printed = sum(pair.printed() is not None and pair.stationary for pair in pairs)
    text += f", and so the theorem as printed applies to {printed} of {len(pairs)} pairs. "
    secants = [level / pair.by_path for pair in pairs if (level := pair.corrected("secant")) is not None and pair.by_path > 0]
    if secants:
        text += (
            f"With the secant's μ_k the corrected level is {_range(secants)} times L_s Σd_k: once there are snapshots d_k is "
            "known, and this half of the argument only loosens the bound. "
        )
    return text


def _chord(theory: Theory) -> str:
    """Say whether the first level is supported where the printed proof leaves the polyline."""
    longer = [pair for pair in theory.pairs if pair.new > pair.old + 1]
    above = sum(pair.chord_steepness > pair.steepness for pair in longer)
    if not longer:
        return ""
    return (
        "L_s‖θ_t-θ_s‖ follows the straight line from θ_s to θ_t, which is not part of the segments for t > s+1; the gradient "
        f"found on it is above L_s on {above} of {len(longer)} such pairs, where this level is not backed."
    )


def _targets(theory: Theory) -> str:
    return f" ({', '.join(f'{target:.2f}' for target in theory.targets)} nats)" if theory.weight else ""


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)

    def shown(value: float) -> str:
        return f"{value:,}" if isinstance(value, int) else _number(value)

    return shown(low) if shown(low) == shown(high) else f"{shown(low)} to {shown(high)}"


def _markdown(rows: Rows) -> str:
    return Table(list(rows[0]), "r" * len(rows[0]), [list(row.values()) for row in rows]).to_markdown()


# --- the picture ----------------------------------------------------------------------------------------------------------------


def draw(theory: Theory, path: Path) -> None:
    """Draw theorem 1 per task (left) and theorem 2 per pair (right), every level on one logarithmic axis."""
    pairs = list(theory.pairs)
    if len(pairs) > MOST_PAIRS:
        pairs = [pair for pair in pairs if pair.new in (pair.old + 1, len(theory.tasks))]
    figure = new_figure(max(2.6, 0.19 * max(len(pairs), len(theory.tasks)) + 1.5))
    panels = figure.subplots(1, 2 if pairs else 1, squeeze=False, width_ratios=[1, 1.6] if pairs else [1])[0]
    _draw_tasks(panels[0], theory)
    if pairs:
        _draw_pairs(panels[1], pairs)
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    title = f"{theory.config.method} on {theory.config.stream}, seed {theory.config.seed}: estimates, not certificates"
    figure.suptitle(title, x=0.01, ha="left", size=9, color=INK)
    save(figure, path)


def _draw_tasks(axes: Axes, theory: Theory) -> None:
    numbers = [task.task for task in theory.tasks]
    blue, red, green, *_ = METHOD_COLOURS
    axes.axhline(1, color=QUIET, linewidth=0.8, linestyle="--")
    axes.plot(numbers, [task.bound(theory.settings.delta) for task in theory.tasks], "v", color=red, label="bound on E_q[R]")
    axes.plot(numbers, [task.test_error for task in theory.tasks], "o", color=blue, label="E_q[R], test")
    axes.plot(numbers, [task.net_error for task in theory.tasks], "x", color=green, label="R(θ_t), test")
    axes.set(xlabel="task", ylabel="0-1 error", xticks=numbers)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0.5, len(numbers) + 0.5)
    plain(axes, "theorem 1: PAC-Bayes (1 says nothing)")


def _draw_pairs(axes: Axes, pairs: Sequence[ForgettingBound]) -> None:
    rows = range(len(pairs))
    blue, red, green, pink, orange, sky, _ = METHOD_COLOURS
    levels: list[tuple[str, str, str, Callable[[ForgettingBound], float | None]]] = [
        ("F > 0, measured", "o", blue, lambda pair: pair.measured),
        ("L_s‖θ_t-θ_s‖", "o", green, lambda pair: pair.by_distance),
        ("L_s Σd_k", "v", red, lambda pair: pair.by_path),
        ("corrected, curvature", "s", pink, lambda pair: pair.corrected()),
        ("corrected, secant", "d", orange, lambda pair: pair.corrected("secant")),
        ("printed, secant", "+", sky, lambda pair: pair.printed("secant")),
    ]
    for label, marker, colour, level in levels:
        found = [(value, row) for row, pair in zip(rows, pairs, strict=True) if (value := level(pair)) is not None and value > 0]
        if found:
            # The first two levels differ little: a ring stays visible around whatever lies in it.
            ring = {"markersize": 8, "fillstyle": "none"} if level is levels[1][3] else {"markersize": 5}
            axes.plot(*zip(*found, strict=True), marker, color=colour, label=label, **ring)
    axes.set_xscale("log")
    names = [f"{pair.old}→{pair.new}{'' if pair.measured > 0 else ' (F ≤ 0)'}" for pair in pairs]
    axes.set(yticks=list(rows), yticklabels=names, xlabel="forgetting, in units of the loss")
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    plain(axes, "theorem 2: task s forgotten by the end of task t")
