"""A study as a file: what it is about, which runs belong to it, and what its page shows.

    about = "Does replay need a large memory?"
    seeds = "0-2"
    methods = ["er()", "derpp()"]
    stream = "split-digits(tasks=5)"
    net = "mlp"
    control = "er()"
    show = ["paired"]

    [[runs]]
    memory = [50, 100]

    [[runs]]
    memory = 100
    taps = 4
    methods = ["er()"]

Every `[[runs]]` is a grid of runs, which overrides the settings at the top of the file. A list of values of an option means a run
with each. `[full]`, `[small]` and `[mini]` hold what a scale changes; `base` names a study that this one extends.
docs/studies.md has every key.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from gracecl import streams
from gracecl.errors import UserError
from gracecl.files import parse_toml, read_file
from gracecl.lab import paper
from gracecl.lab.defaults import NONE as NO_DEFAULTS
from gracecl.lab.defaults import read as read_defaults
from gracecl.lab.runs.check import check_option
from gracecl.lab.runs.result import configuration
from gracecl.lab.runs.run import RunConfig
from gracecl.registry import nearest, normal, renderers
from gracecl.registry.options import ALIASES, RunOptions
from gracecl.registry.spec import in_full, parse_method, parse_numbers

SCALES = {
    "full": "the paper's protocol, as far as the paper states it",
    "small": "a reduced run, not the paper's protocol: a narrow net on small images",
    "mini": "a reduced run, not the paper's protocol: a narrow net on small images of few classes",
}
OWN = "own"
"""the scale of a study whose file has none of these"""
QUICK = "quick"
"""a scale on the digits, to see that a study works"""
ABOUT_SCALES = SCALES | {
    OWN: "that of the study's file",
    QUICK: "the embedded digits, to see that it works; the figures mean little",
}
QUICK_DATA = "size=8, classes='0-3', tasks=2, batch=20"
QUICK_SETTING: dict[str, list[Any]] = {
    "net": ["mlp(width=32, depth=4)"],
    "memory": [20],
    "augment": ["none"],
    "device": ["cpu"],
}
QUICK_METHODS = 2
"""number of methods in quick mode unless [quick] names them; one of a grid with methods of its own"""

OPTIONS = tuple(field.name for field in fields(RunOptions) if field.name not in ("method", "seed"))
OF_A_BLOCK: dict[str, type] = {"methods": list, "seeds": str, "defaults": str, "paper": dict}
"""keys of a block of runs besides the options of a run"""
OF_A_STUDY: dict[str, type] = {"about": str, "show": list, "control": str, "runs": list}
"""keys at the top of a file, and of a scale, besides those of a block"""
AT_THE_TOP: dict[str, type] = {"base": str, **dict.fromkeys((*SCALES, QUICK), dict)}
"""keys at the top alone"""
CHECKS: dict[str, Callable[[str], Any]] = {
    "methods": parse_method,
    "control": parse_method,
    "seeds": lambda text: parse_numbers(text, "seeds"),
    "defaults": lambda name: None if name == NO_DEFAULTS else read_defaults(name),
}
"""parsers of these keys; each raises UserError"""
MOST_RUNS = 20_000
"""of one study"""
KINDS: dict[type, str] = {str: "text in quotes", list: "a list", dict: "a table"}


@dataclass(frozen=True)
class Planned:
    """A run that a study asks for."""

    config: RunConfig
    paper: Mapping[str, Any] | None = None
    """fields of those of the paper's records that the run is set beside"""


@dataclass(frozen=True)
class RunGrid:
    """A grid of runs: methods × every combination of options, with common seeds."""

    methods: tuple[str, ...]
    own_methods: bool
    """whether the grid names its own methods"""
    seeds: frozenset[int] | None
    """seeds that the grid is limited to"""
    options: Mapping[str, Sequence[Any]]
    """the values of each"""
    defaults: str
    paper: Mapping[str, Any] | None

    def configs(self, asked: Sequence[str]) -> list[RunConfig]:
        """Return the configurations for one seed; `asked` replaces the study's methods, and filters a grid's own."""
        wanted = set(map(in_full, asked))
        methods = [method for method in self.methods if not asked or in_full(method) in wanted] if self.own_methods else asked
        found = []
        for values in product(*self.options.values()):
            options = dict(zip(self.options, values, strict=True))
            for method in methods or ([] if asked else self.methods):
                found.append(configuration(method, self.defaults, **options)[0].canonical())
        return found

    def count(self, asked: Sequence[str]) -> int:
        """Return the largest possible number of configurations."""
        return len(asked if asked and not self.own_methods else self.methods) * math.prod(map(len, self.options.values()))


@dataclass(frozen=True)
class Study:
    """A study at one of its scales."""

    file: str
    name: str
    """with the scale appended where there are several"""
    scale: str
    about: str
    show: tuple[str, ...]
    control: str
    seeds: str
    blocks: tuple[RunGrid, ...]

    @property
    def scale_sentence(self) -> str:
        """For every output, so that a reduced run is not mistaken for the paper's protocol."""
        return f"Scale {self.scale}: {ABOUT_SCALES[self.scale]}."

    def plan(self, methods: Sequence[str] = (), seeds: Sequence[int] | None = None) -> list[Planned]:
        """Return the runs, seed by seed, so that every method has one before any has two; `methods` replaces the
        study's.
        """
        numbers = parse_numbers(self.seeds, "seeds") if seeds is None else seeds
        for method in methods:
            parse_method(method)
        if (count := len(numbers) * sum(block.count(methods) for block in self.blocks)) > MOST_RUNS:
            raise UserError(f"{self.file} has {count:,} runs, more than {MOST_RUNS:,}; list fewer values, or split the study")
        try:
            blocks = [(block, block.configs(methods)) for block in self.blocks]
        except UserError as error:
            raise UserError(f"{self.file}: {error}") from None
        found: dict[RunConfig, Planned] = {}
        for seed in numbers:
            for block, configs in blocks:
                for config in configs if block.seeds is None or seed in block.seeds else []:
                    found.setdefault(run := replace(config, seed=seed), Planned(run, block.paper))
        if not found:
            raise UserError(f"{self.file} has no run with these methods and seeds; leave --methods or --seeds out")
        return list(found.values())


# Reading.


def names() -> list[str]:
    """List the studies that come with the library."""
    found = (file.name for file in resources.files(__package__).iterdir())
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml"))


def read(name: str, scale: str | None = None, quick: bool = False) -> Study:
    """Read a study by name, or a user's file by path, at a scale (default: the first it has)."""
    source = StudyFile(name)
    scales = source.scales()
    if scale is not None and scale not in scales:
        has = f"has the scale{'s' if len(scales) > 1 else ''} {', '.join(scales)}" if scales else "has no scales"
        raise UserError(f"{source.file} {has}, not '{scale}'{nearest(scale, scales)}; leave --scale out or name another")
    chosen = scale or next(iter(scales), OWN)
    values, in_quick = source.at(chosen), source.at(QUICK, alone=True)
    blocks = [source.block(values | in_quick if quick else values, own) for own in values.get("runs", [{}])]
    control = values.get("control", "")
    study = Study(
        source.file,
        source.name if quick or len(scales) < 2 else f"{source.name}-{chosen}",
        QUICK if quick else chosen,
        values.get("about", "").strip(),
        tuple(values.get("show", ())),
        in_full(control) if control else "",
        values.get("seeds", "0"),
        tuple(made_quick(block, "methods" in in_quick) if quick else block for block in blocks),
    )
    for wanted in study.show:
        if getattr(renderers.get(wanted), "needs_control", False) and not control:
            raise UserError(f"{source.file}: show '{wanted}' compares with a control; add for example control = \"er()\"")
    return study


def made_quick(block: RunGrid, named: bool) -> RunGrid:
    """Reduce a grid to the digits and few methods: those that [quick] names, if it does."""
    methods = block.methods[:1] if block.own_methods else block.methods if named else block.methods[:QUICK_METHODS]
    kept = {name: values for name, values in block.options.items() if name not in ("normalise", "augment")}
    shown = list(dict.fromkeys(map(on_digits, kept.get("stream", [""]))))
    return replace(block, methods=methods, options={**kept, "stream": shown, **QUICK_SETTING}, defaults="none")


def on_digits(expression: str) -> str:
    """Return a stream of the same families on a few digits, or a split one where they are too few for it."""
    try:
        quick = _on_digits(streams.read(expression)[0])
        streams.check_evaluations(streams.build(quick, 0))
    except UserError:
        return f"split-digits({QUICK_DATA})"
    return quick


def _on_digits(family: streams.Family) -> str:
    """Write a family's expression: wrappers as they are, and of the innermost one what is no number, path or list."""
    name = family.call.name.replace("_", "-")
    if family.inside is not None:
        given = [*map(repr, family.call.args), *(f"{option}={value!r}" for option, value in family.call.kwargs.items())]
        return f"{name}({', '.join([_on_digits(family.inside), *given])})"
    words = {option: value for option, value in family.call.kwargs.items() if isinstance(value, str | bool)}
    return f"{name}-digits({', '.join([QUICK_DATA, *(f'{o}={v!r}' for o, v in words.items() if o not in streams.PATHS)])})"


class StudyFile:
    """A study's file with its base files, checked."""

    def __init__(self, name: str, beside: Path | None = None, above: tuple[str, ...] = ()) -> None:
        """Read a study; `beside` is the folder of the file that names it as base, `above` the files that led here."""
        own = name.endswith(".toml")
        path = (beside or Path()) / name
        self.file, self.name = (str(path), path.stem) if own else (f"study {name}", name)
        self._named_by = f"{above[-1]}: base: " if above else ""
        if self.file in above:
            raise UserError(f"{self.file}: base leads back to the file itself; leave it out")
        if not own and name not in names():
            known = f"{nearest(name, names())} (there are: {', '.join(names())}, or your own FILE.toml)"
            raise UserError(f"{self._named_by}there is no study '{name}'{known}")
        self.content = self._read(path if own else None)
        self._check(self.content, "", top=True)
        for scale in (*SCALES, QUICK):
            if scale in self.content:
                self._check(self.content[scale], f"[{scale}] ")
        base = self.content.get("base")
        self.base = StudyFile(base, path.parent if own else None, (*above, self.file)) if base else None

    def _read(self, path: Path | None) -> dict[str, Any]:
        try:
            packaged = resources.files(__package__) / f"{self.name}.toml"
            text = (read_file(path) if path else packaged.read_bytes()).decode("utf-8")
        except (FileNotFoundError, IsADirectoryError):
            known = f"name a study's TOML file, or one of: {', '.join(names())}"
            raise UserError(f"{self._named_by}there is no file {self.file}; {known}") from None
        except UnicodeDecodeError:
            raise UserError(f"{self.file} is not a TOML file: it is not text; name a study's TOML file") from None
        try:
            return parse_toml(text)
        except ValueError as error:
            raise UserError(f"{self.file} is not a TOML file: {error}; docs/studies.md shows one") from None

    def _check(self, values: Any, where: str, *, top: bool = False) -> None:
        """Refuse unknown keys and values of the wrong kind; `where` names the place: top, scale or [[runs]]."""
        if not isinstance(values, dict):
            raise UserError(f"{self.file}: {where.strip()} must be a table; write {where.strip()} on a line of its own")
        for alias, name in ALIASES.items():
            if alias in values and name in values:
                raise UserError(f"{self.file}: {where}{name} and {alias} name one option; leave one of them out")
        in_block = where.startswith("[[")
        kinds = OF_A_BLOCK | ({} if in_block else OF_A_STUDY) | (AT_THE_TOP if top else {})
        for key, value in values.items():
            option = str(ALIASES.get(key, key))
            if key not in kinds and option not in OPTIONS:
                known = [*kinds, *OPTIONS]
                raise UserError(f"{self.file}: {where}'{key}' is no key{nearest(key, known)} (there are: {', '.join(known)})")
            if key in kinds and not isinstance(value, kinds[key]):
                raise UserError(f"{self.file}: {where}{key} must be {KINDS[kinds[key]]}, not {reprlib.repr(value)}")
            if value == [] and key != "show":
                raise UserError(f"{self.file}: {where}{key} is an empty list; name at least one, or leave the key out")
            if key not in kinds:
                for one in value if isinstance(value, list) else [value]:
                    check_option(f"{self.file}: {where}".rstrip(": "), option, one)
        self._check_content(values, where)
        for number, block in enumerate(values.get("runs", []), start=1):
            self._check(block, f"[[runs]] {number} ")

    def _check_content(self, values: Mapping[str, Any], where: str) -> None:
        """Validate names and values of the keys that are no options of a run."""
        shown = renderers.names()
        for name in values.get("show", []):
            if not isinstance(name, str) or normal(name) not in shown:
                raise UserError(
                    f"{self.file}: {where}show has no '{name}'{nearest(str(name), shown)} (there are: {', '.join(shown)}; "
                    "--plugin names a file that registers your own)"
                )
        for key, check in CHECKS.items():
            for value in values.get(key, []) if key == "methods" else [values[key]] if key in values else []:
                if not isinstance(value, str):
                    raise UserError(f'{self.file}: {where}methods are texts such as "er()", not {reprlib.repr(value)}')
                try:
                    check(value)
                except UserError as error:
                    raise UserError(f"{self.file}: {where}{key}: {error}") from None
        fields_of_paper = {name for record in paper.tables()["records"] for name in record}
        if unknown := [name for name in values.get("paper", {}) if name not in fields_of_paper]:
            known = ", ".join(sorted(fields_of_paper))
            raise UserError(f"{self.file}: {where}paper has no field '{unknown[0]}' (there are: {known})")
        tables = paper.tables()["tables"]
        if (table := values.get("paper", {}).get("table")) not in (None, *tables):
            raise UserError(
                f"{self.file}: {where}paper has no table '{table}'{nearest(str(table), tables)} (there are: {', '.join(tables)})"
            )

    def scales(self) -> list[str]:
        """List the scales that the file or its base has."""
        inherited = self.base.scales() if self.base else []
        return [scale for scale in SCALES if scale in self.content or scale in inherited]

    def at(self, scale: str, alone: bool = False) -> dict[str, Any]:
        """Return the merged settings at a scale: base, then file, then scale; with `alone` only the scale's."""
        values = self.base.at(scale, alone) if self.base else {}
        parts = [self.content.get(scale, {})]
        if not alone:
            parts.insert(0, {key: value for key, value in self.content.items() if key not in AT_THE_TOP})
        for part in parts:
            values = together(values, part)
        return values

    def block(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> RunGrid:
        """Build the grid of a [[runs]] block, with the settings above it."""
        whole = together({key: value for key, value in values.items() if key not in OF_A_STUDY}, own)
        if "methods" not in whole:
            raise UserError(f'{self.file} names no methods; add for example methods = ["er()"]')
        options = {key: value for key, value in whole.items() if key not in OF_A_BLOCK}
        return RunGrid(
            tuple(whole["methods"]),
            "methods" in own,
            frozenset(parse_numbers(own["seeds"], "seeds")) if "seeds" in own else None,
            {name: value if isinstance(value, list) else [value] for name, value in options.items()},
            whole.get("defaults", "none"),
            whole.get("paper"),
        )


def together(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings key by key, the second over the first; `paper` field by field."""
    merged = {ALIASES.get(key, key): value for part in (values, more) for key, value in part.items()}
    if "paper" in values and "paper" in more:
        merged["paper"] = {**values["paper"], **more["paper"]}
    return merged
