"""Does the ranking of methods survive a change of protocol? Ranks by protocol as one picture, and Kendall's τ between protocols."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from gracecl import streams
from gracecl.functional.statistics import Summary, kendall, summarise
from gracecl.lab.report import Run, figures
from gracecl.lab.report.groups import complete, group_runs, options_that_vary, setting_of, told_apart, value_of
from gracecl.lab.report.table import Cell, Entry, Table, number
from gracecl.lab.report.terms import terms
from gracecl.lab.studies.results import Results, Section
from gracecl.registry import renderers
from gracecl.registry.options import ADDED_LATER
from gracecl.registry.spec import parse_call

FAMILIES = {
    "split": "class-incremental",
    "i_blurry": "blurry",
    "si_blurry": "blurry",
    "domain": "domain",
    "longtail": "long-tailed",
    "noisy": "noisy labels",
    "delayed": "late labels",
}
"""what streams of a family are called; others go by the family's name"""
LIMITED = {"pace": "real-time", "budget": "budgeted", "bytes": "few bytes"}
METRIC = "acc"
LONGEST_NAME = 32
"""letters of a method on a page of ranks; a longer expression is cut to its outermost name"""
FAR = 3
"""ranks by which a method has to move to be named"""


@dataclass(frozen=True)
class Protocol:
    """The accuracies of methods under one protocol."""

    name: str
    values: dict[str, dict[int, float]]
    """by method, with the options in which its runs differ, and seed"""

    def mean(self, method: str) -> float:
        of_seeds = self.values[method].values()
        return sum(of_seeds) / len(of_seeds)

    def rank(self, method: str, among: Sequence[str]) -> int:
        """Return 1 for the best; equal means share the better rank."""
        return 1 + sum(self.mean(other) > self.mean(method) for other in among)


def name_of(run: Run) -> str:
    """Name a run's protocol: by what limits it, else by the family of its stream."""
    limits = [name for option, name in LIMITED.items() if run.config.get(option) is not None]
    family, _ = streams.parts_of(parse_call(str(run.config["stream"])).name)
    return ", ".join(limits) or FAMILIES.get(family, family.replace("_", "-"))


def by_protocol(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each setting under its protocol's name, in the order of the runs."""
    of_setting: dict[str, list[Run]] = {}
    for run in runs:
        of_setting.setdefault(setting_of(run), []).append(run)
    return dict(zip(_names(of_setting), of_setting.values(), strict=True))


def protocols(runs: Sequence[Run]) -> list[Protocol]:
    """Collect what the runs of each protocol reached."""
    found = []
    for name, members in by_protocol(runs).items():
        values: dict[str, dict[int, float]] = {}
        for run in members:
            values.setdefault(_learner(run, runs), {})[run.config["seed"]] = value_of(run, METRIC, run.rule)
        found.append(Protocol(name, values))
    return found


def _names(of_setting: Mapping[str, Sequence[Run]]) -> list[str]:
    """Name each setting; those that share a name say what tells them apart, in brackets."""
    configs = [members[0].config for members in of_setting.values()]
    short = [name_of(members[0]) for members in of_setting.values()]
    names = list(short)
    for name in {name for name in short if short.count(name) > 1}:
        places = [place for place, other in enumerate(short) if other == name]
        for place, apart in zip(places, told_apart([configs[place] for place in places]), strict=True):
            names[place] = f"{name} ({apart})" if apart else name
    return [name if names.count(name) == 1 else setting for name, setting in zip(names, of_setting, strict=True)]


def _learner(run: Run, runs: Sequence[Run]) -> str:
    """Name a run's method, with those of the options in which runs of this method differ that are not at their defaults."""
    method, config = str(run.config["method"]), complete(run.config)
    varying = options_that_vary([other.config for other in runs if other.config["method"] == method])
    given = (name for name in varying if name in config and not (name in ADDED_LATER and config[name] == ADDED_LATER[name]))
    return ", ".join([method, *(f"{name}={config[name]}" for name in given)])


def brief(methods: Sequence[str]) -> dict[str, str]:
    """Return a short name for each method: `best(…)` for a long expression, unless another one begins with the same word."""
    words = [method.partition("(")[0] for method in methods]
    return {
        method: f"{word}(…)" if len(method) > LONGEST_NAME and words.count(word) == 1 else method
        for method, word in zip(methods, words, strict=True)
    }


def agreement(one: Protocol, other: Protocol) -> Summary:
    """Return Kendall's τ of two rankings: a value for each seed, over the methods that have it in both."""
    seeds = sorted({seed for values in one.values.values() for seed in values})
    return summarise([tau for seed in seeds if not math.isnan(tau := _tau((one, seed), (other, seed)))])


def _tau(one: tuple[Protocol, int], other: tuple[Protocol, int]) -> float:
    """Return Kendall's τ of the methods that have both seeds; NaN for fewer than two."""
    of_one, of_other = (
        {method: values[seed] for method, values in protocol.values.items() if seed in values} for protocol, seed in (one, other)
    )
    methods = [method for method in of_one if method in of_other]
    return kendall([of_one[method] for method in methods], [of_other[method] for method in methods])


def between_seeds(protocol: Protocol) -> float:
    """Return the mean of Kendall's τ over pairs of seeds of one protocol: what chance alone leaves of a ranking."""
    seeds = sorted({seed for values in protocol.values.values() for seed in values})
    taus = [_tau((protocol, one), (protocol, other)) for one, other in combinations(seeds, 2)]
    return summarise([tau for tau in taus if not math.isnan(tau)]).mean


@renderers.register("rankings")
def sections(results: Results) -> list[Section]:
    """Ranks of the methods under each protocol as a picture, what moves them in sentences, and Kendall's τ between protocols."""
    found = [protocol for protocol in protocols(results.runs) if len(protocol.values) > 1]
    if not found:
        return []
    methods = list(dict.fromkeys(method for protocol in found for method in protocol.values))
    short = brief(methods)
    ranks = {
        method: [protocol.rank(method, list(protocol.values)) if method in protocol.values else math.nan for protocol in found]
        for method in methods
    }
    file = f"{results.name}-ranks.png"
    for kind in ("png", "pdf"):
        title = results.titled("Rank by final accuracy under each protocol")
        drawn = {short[method]: places for method, places in ranks.items()}
        figures.ranks(drawn, [protocol.name for protocol in found], (results.out / file).with_suffix(f".{kind}"), title)
    taus = {(one.name, other.name): agreement(one, other) for one, other in combinations(found, 2)}
    alone = {protocol.name: between_seeds(protocol) for protocol in found}
    text = "\n\n".join(
        [
            "## Ranks under each protocol",
            f"![Ranks of the methods under each protocol]({file})",
            " ".join(findings(found, {short[method]: places for method, places in ranks.items()}, taus, alone)),
            _means(found, methods, ranks, short).to_markdown(tight=True),
            "Rank and final accuracy in percent, mean over seeds.",
            "### Kendall's τ between protocols",
            _agreements(found, taus, alone).to_markdown(tight=True),
            "1 is the same ranking, 0 none in common, −1 the reverse: the mean of one τ per seed, ± the half-width of its 95 % "
            "Student-t interval from three seeds on, over the methods that both protocols have. On the diagonal stands τ between "
            "the seeds of one protocol: what remains of a ranking when nothing but the seed changes.",
            _terms(results.runs),
        ]
    )
    data = {
        "ranks": {protocol.name: {method: ranks[method][place] for method in methods} for place, protocol in enumerate(found)},
        "tau": [{"protocols": list(pair), **summary._asdict()} for pair, summary in taus.items()],
        "between_seeds": alone,
    }
    return [Section("rankings", text, data, leads=True)]


def findings(
    found: Sequence[Protocol],
    ranks: Mapping[str, Sequence[float]],
    taus: Mapping[tuple[str, str], Summary],
    alone: Mapping[str, float],
) -> list[str]:
    """Say how far rankings of two protocols agree, beside those of two seeds, which methods lead, and which move far."""
    usual, told = found[0].name, []
    known = {pair: tau.mean for pair, tau in taus.items() if not math.isnan(tau.mean)}
    chance = [tau for tau in alone.values() if not math.isnan(tau)]
    if beside := [f"{number(tau, 2)} ({other})" for (one, other), tau in known.items() if one == usual]:
        told.append(f"Kendall's τ with the ranking under {usual}: {', '.join(beside)}.")
    both = {pair: tau for pair, tau in known.items() if not any(math.isnan(alone[name]) for name in pair)}
    if chance:
        told.append(f"Between two seeds of one protocol τ is {_from_to(chance)}.")
    if both:
        lower = sum(tau < min(alone[one], alone[other]) for (one, other), tau in both.items())
        told.append(f"For {lower} of {len(both)} pairs of protocols it is lower than between the seeds of either.")
    first: dict[str, list[str]] = {}
    for place, protocol in enumerate(found):
        for method in (method for method, places in ranks.items() if places[place] == 1):
            first.setdefault(method, []).append(protocol.name)
    told.append(f"First is {'; '.join(f'`{method}` under {_listed(names, len(found))}' for method, names in first.items())}.")
    moves = []
    for method, places in ranks.items():
        moved = [(abs(rank - places[0]), place) for place, rank in enumerate(places) if not math.isnan(rank - places[0])]
        distance, place = max(moved, key=lambda move: move[0], default=(0, 0))
        if distance >= FAR:
            moves.append((distance, f"`{method}` from {places[0]:.0f} to {places[place]:.0f} ({found[place].name})"))
    moves.sort(key=lambda move: -move[0])
    if moves:
        moved_far = ", ".join(text for _, text in moves)
        told.append(f"Against {usual}, these move by {FAR} ranks or more, each where it moves most: {moved_far}.")
    elif len(found) > 1:
        told.append(f"Against {usual}, no method moves by {FAR} ranks or more.")
    return told


def _from_to(values: Sequence[float]) -> str:
    low, high = number(min(values), 2), number(max(values), 2)
    return low if low == high else f"{low} to {high}"


def _listed(names: Sequence[str], among: int) -> str:
    return "every protocol" if len(names) == among > 1 else ", ".join(names)


def _terms(runs: Sequence[Run]) -> str:
    """Say for each protocol whether its methods were compared on equal terms."""
    return "\n".join(f"- {name}: {terms(group_runs(members))}" for name, members in by_protocol(runs).items())


def _means(found: Sequence[Protocol], methods: Sequence[str], ranks: dict[str, list[float]], short: Mapping[str, str]) -> Table:
    def cell(method: str, place: int) -> Entry:
        known = method in found[place].values
        return f"{ranks[method][place]:.0f} ({found[place].mean(method):.1f})" if known else number(math.nan, 0)

    rows: list[list[Entry]] = [
        [Cell(short[method], code=True), *(cell(method, place) for place in range(len(found)))]
        for method in sorted(methods, key=lambda method: (math.isnan(ranks[method][0]), ranks[method][0]))
    ]
    return Table(["method", *(protocol.name for protocol in found)], "l" + "r" * len(found), rows)


def _agreements(found: Sequence[Protocol], taus: dict[tuple[str, str], Summary], alone: dict[str, float]) -> Table:
    def cell(row: str, column: str) -> str:
        if row == column:
            return number(alone[row], 2)
        tau = taus.get((row, column)) or taus[column, row]
        return number(tau.mean, 2) + ("" if math.isnan(tau.half_width) else f" ± {tau.half_width:.2f}")

    names = [protocol.name for protocol in found]
    return Table(["", *names], "l" + "r" * len(names), [[name, *(cell(name, other) for other in names)] for name in names])
