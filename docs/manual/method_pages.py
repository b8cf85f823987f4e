"""A page for each method, of its file, the catalogue, the committed results and the paper's numbers; and an index by family."""

from __future__ import annotations

import ast
import dataclasses
import html
import importlib
import inspect
import json
import math
import re
import textwrap
import types
import typing
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from gracecl.functional.statistics import Paired, paired, t_quantile
from gracecl.lab import paper
from gracecl.lab.catalogue import FACTS, Facts
from gracecl.lab.report.command import as_typed, option_words
from gracecl.registry import methods
from gracecl.registry.options import sentences
from gracecl.registry.spec import Limit, parse_method
from manual.examples import title_of, with_code
from manual.pages import ROOT, table, write_page

FOLDER = ROOT / "docs/methods"
COSTS = ROOT / "results/costs/costs.json"
"""written by count_costs.py"""
FAMILIES = {
    "bound": ("Bounds", "What to compare with: learning without any protection, and learning from everything at once."),
    "replay": ("Replay", "Keep some images and learn from them again."),
    "select": ("What to keep and replay", "Replay that chooses which images to keep, or which of the kept ones to repeat."),
    "contrast": ("Contrast", "Learn features by comparing images with each other."),
    "teacher": ("Teacher of earlier tasks", "Stay close to a copy of the net from before the task. Made for offline training."),
    "frozen": ("On a pretrained net", "The net stays as it is, or gets small adapters. Most make no training step at all."),
    "add": ("Additions", "Terms that are added to any learner: `er() + ewc()`."),
    "wrap": ("Wrappers", "Methods around another one: `grace(er())`."),
}
UNMARKED = {
    "same": "The same. It does not use task marks.",
    "refused": "It is refused, as it needs task marks. With `--boundaries` it [guesses them](../streams.md#without-marks).",
}
GRACE = {
    "yes": "yes",
    "head": "with `train_head=True`, as it trains no linear head of its own",
    "γ": "the entropy term alone; there are no images of the past to find α from",
    "no": "no",
}
STUDIES = ("mini", "accuracy-small", "record", "pretrained")
"""studies with runs of their own; others are made of these runs"""
DATA_SETS = {"cifar100": "CIFAR-100", "cub200": "CUB-200", "tinyimagenet": "Tiny-ImageNet", "digits": "digits"}
CLASSES_OF_FEATURES = {"cub200": "40 classes of ", "tinyimagenet": "50 classes of "}
"""of which the feature files of the study pretrained were made, where not of all"""
DIFFERENCES = re.compile(r"^Differences from (the|a) (paper|source)[^:]*: |^Differences from the paper, ", re.MULTILINE)

NO_PAPER = re.compile(r"^(None, there|There) is none\.\s*", re.IGNORECASE)


def write() -> None:
    for name in FACTS:
        write_page(FOLDER / f"{name}.md", page(name))
    write_page(FOLDER / "index.md", index())
    for left in {path.stem for path in FOLDER.glob("*.md")} - FACTS.keys() - {"index"}:
        (FOLDER / f"{left}.md").unlink()  # of a method that was renamed


def index() -> str:
    described = methods.summaries()
    parts = [INDEX]
    for family, (title, text) in FAMILIES.items():
        rows = [
            [f"[`{name}`]({name}.md)", facts.year or "–", described[name], accuracy_in_mini(name)]
            for name, facts in FACTS.items()
            if facts.family == family
        ]
        parts.append(f"## {title}\n\n{text}\n\n{table(['method', 'year', 'what it does', 'acc'], rows, right=(1, 3))}\n")
    hidden = "\n".join(sorted(FACTS))
    return "\n".join([*parts, f"```{{toctree}}\n:hidden:\n\n{hidden}\n```\n"])


INDEX = """\
# Methods by family

Each page has the algorithm, its options, its differences from the paper, its cost, and what we measured.
**acc** is the mean accuracy of the study [mini](../../results/mini/mini.md): twenty classes of CIFAR-100 in
five tasks, three seeds, every method with the same net, optimizer and memory. Methods that stand there beside
`er()` or another learner show that learner's number with them. It is a small setting: read the number as a
first guess, not as a ranking. [All methods in one table](../methods.md) has what each one needs and keeps, and
[Which method should I use?](../start/which_method.md) has advice.
"""


def accuracy_in_mini(name: str) -> str:
    found = measured("mini", name)
    return f"{found[0]['acc']:.1f}" if found else "–"


# One page.


def page(name: str) -> str:
    facts, kind = FACTS[name], methods.get(name)
    module = importlib.import_module(kind.__module__)
    reference, box, prose, differences = sections(ast.get_docstring(ast.parse(inspect.getsource(module))) or "")
    summary = methods.summaries()[name]
    parts = [
        f"# `{name}`",
        summary,
        f"*{reference}*",
        "## Algorithm",
        f"```{{code-block}} text\n:class: algorithm\n\n{box}\n```",
        prose,
    ]
    parts += ["## Use it", use(name, facts), "## Options", options(kind), "## Needs and costs", needs(name, facts)]
    differences = NO_PAPER.sub("It is not from a paper. ", differences) or (
        "It is not from a paper." if facts.year is None else "None are known."
    )
    parts += ["## Differences from the paper", differences]
    parts += ["## Measured", measurements(name)]
    if compared := strong_and_weak(name):
        parts += ["## Strong and weak", compared]
    parts += ["## In the GRACE paper", in_the_paper(name), "## More", more(name, kind, facts)]
    return "\n\n".join(part for part in parts if part) + "\n"


def sections(text: str) -> tuple[str, str, str, str]:
    """Split a file's docstring: its first paragraph, the indented boxes, prose, and the differences from the paper."""
    first, _, rest = text.partition("\n\n")
    boxes, prose, differences = [], [], []
    for block in re.split(r"\n\n", rest):
        if block.startswith("    "):
            boxes.append(textwrap.dedent(block))
        elif DIFFERENCES.match(block):
            cut = DIFFERENCES.sub("", block, count=1)
            differences.append((cut[0].upper() if cut[0].isascii() else cut[0]) + cut[1:])
        else:
            prose.append(block)
    return " ".join(first.split()), "\n\n".join(boxes), markdown("\n\n".join(prose)), markdown("\n\n".join(differences))


def markdown(text: str) -> str:
    """Escape what Markdown would take for its own in the prose of a docstring, and link the pages and methods that it names."""
    text = re.sub(r"(?<![`\w])([*<])", r"\\\1", text)
    text = re.sub(r"\bdocs/(\w+)\.md\b", r"[\1](../\1.md)", text)
    return re.sub(r"\b(\w+)\.py\b", lambda found: f"[`{found[1]}`]({found[1]}.md)" if found[1] in FACTS else found[0], text)


def use(name: str, facts: Facts) -> str:
    learner = {"add": f"er() + {name}()"}.get(facts.family, name)
    if facts.family == "frozen":
        net, where = ("vit(patch=8, dim=32, depth=4, heads=2)", "") if name == "online_lora" else ("identity()", "; on a net: ")
        note = "" if name == "online_lora" else f'{where}`--net "efficientnet_lite0(freeze=True)"`'
        text = f'gracecl run {name} --stream "split-digits(tasks=5)" --memory 100 --net "{net}"'
        return f"```sh\n{text}\n```" + (f"\n\n`identity()` takes the pixels for features{note}." if note else "")
    command = as_typed(
        ["gracecl", "run", learner, "--stream", "split-digits(tasks=5)", "--memory", "100", "--net", "resnet18(width=8)"]
    )
    program = f'learner = gracecl.Learner("{learner}", memory=100, net="resnet18(width=8)")'
    return f"```sh\n{command}\n```\n\nIn a program: `{program}` ([guide](../learner.md))."


def options(kind: Any) -> str:
    words, hints = sentences(kind), typing.get_type_hints(kind, include_extras=True)
    rows = [
        [f"`{field.name}`", f"`{default_of(field)}`", values(hints[field.name]), words.get(field.name, "the method inside")]
        for field in dataclasses.fields(kind)
        if field.init
    ]
    if not rows:
        return "It has none."
    return table(["option", "default", "values", "what it is"], rows)


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return str(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"


def values(hint: Any) -> str:
    """Return what an annotation allows, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = [str(limit) for limit in hint.__metadata__ if isinstance(limit, Limit)]
        return " ".join([values(arguments[0]), " and ".join(limits)]).strip()
    if origin is Literal:
        return ", ".join(f"`{value!r}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(values, arguments))
    plain = {int: "whole number", float: "number", bool: "`True`, `False`", str: "text", type(None): "`None`"}
    return plain.get(hint, "method")


def needs(name: str, facts: Facts) -> str:
    without = UNMARKED.get(facts.unmarked)
    if without is None and facts.unmarked.startswith("every"):
        without = f"What it does at the end of a task, it does {facts.unmarked} instead (option `every` or `refresh_every`)."
    beside = {"add": ", with `er()`"}.get(facts.family, "")
    rows: list[list[object]] = [
        ["family", FAMILIES[facts.family][0].lower()],
        ["on a stream without task marks", without or f"It {facts.unmarked}."],
        ["keeps besides its weights", facts.keeps],
        ["images through the net per step", f"{facts.forward:,}"],
        ["of these, with a gradient", f"{facts.backward:,}"],
        [f"FLOPs per step{beside}", f"{counted(name)['flops'] / 1e9:.2f} · 10⁹"],
        [f"bytes kept{beside}", f"{counted(name)['bytes'] / 1e6:.2f} MB, with 200 images in memory"],
        ["inside `grace(...)`", GRACE[facts.grace]],
    ]
    note = (
        "Images are counted with 10 new ones per step, a memory of 1,000, in the last of ten tasks of ten classes. FLOPs and bytes "
        "are counted in [the setting of mini](../../results/costs/costs.md): images of 16 × 16 pixels, a narrow ResNet-18"
        + (", here a transformer" if name == "online_lora" else "")
        + "."
    )
    return f"{table(['', 'by default'], rows)}\n\n{note}"


@cache
def all_costs() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(COSTS.read_text(encoding="utf-8"))
    return found


def counted(name: str) -> dict[str, float]:
    return all_costs()[name]


# Numbers.


def study_file(study: str) -> Path:
    [file] = (ROOT / "results" / study).glob("*.json")
    return file


@cache
def lines(study: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(study_file(study).read_text(encoding="utf-8"))["lines"]
    return found


@cache
def configurations(study: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of a study's runs by their method, of the first setting in which it stands."""
    found: dict[str, dict[str, Any]] = {}
    with (ROOT / "results" / study / "runs.jsonl").open(encoding="utf-8") as kept:
        for line in kept:
            config = json.loads(line)["config"]
            found.setdefault(config["method"], config)
    return found


def measured(study: str, name: str) -> list[dict[str, Any]]:
    """Return the lines of a study that are about a method: it is the outermost, or the one that is added."""
    added = FACTS[name].family == "add"
    about = re.compile(rf"\+ {name}\([^()]*\)$" if added else rf"^{name}\((?!.*\) \+ ).*\)$")
    return [line for line in lines(study) if about.search(line["method"]) and ", optimizer=" not in line["method"]]


def measurements(name: str) -> str:
    rows: list[list[object]] = []
    for study in STUDIES:
        for line in measured(study, name):
            rows.append(
                [
                    where(study, line),
                    breakable(row_of(name, line)),
                    with_spread(line, "acc"),
                    interval_of_mean(line),
                    with_spread(line, "forgetting"),
                    f"`{line['rule']}`",
                    len(line["seeds"]),
                ]
            )
    if not rows:
        return "No committed result has it."
    heads = ["where", "row", "acc ↑", "95 % interval", "forgetting ↓", "predicts by", "seeds"]
    parts = [table(heads, rows, right=(2, 3, 4, 6)), HOW_TO_READ, again(name)]
    return "\n\n".join(part for part in parts if part)


HOW_TO_READ = (
    "Percent, mean ± sample standard deviation over seeds, and the 95 % interval of the mean where there are three seeds or more. "
    "Each study's page says what else is fixed. [Results](../../results/README.md) says what the numbers can and cannot show."
)


def where(study: str, line: dict[str, Any]) -> str:
    """Return a link to a study's page and the setting of a line."""
    return f"[{study}](../../results/{study}/{study_file(study).stem}.md): {setting(study, line)}"


def breakable(code: str) -> str:
    """Return a long expression as code that a table may break behind its parentheses and commas."""
    if len(code) < 28:
        return code
    broken = re.sub(r"(\((?!\))|, ?)", r"\1<wbr>", html.escape(code.strip("`"), quote=False))
    return f'<code class="docutils literal notranslate long">{broken}</code>'


def setting_of(study: str, line: dict[str, Any]) -> tuple[str, str, int]:
    """Return the stream, the net and the memory of a line; a study with one setting has it beside its lines."""
    told = json.loads(study_file(study).read_text(encoding="utf-8"))["setting"]
    text = line.get("setting") or ", ".join(str(told[key][0]) for key in ("stream", "net", "memory"))
    found = re.fullmatch(r"(.*\)), (\w+(?:\(.*\))?), (\d+)", text)
    assert found, f"{study} has a setting of another form: {text}"
    return found[1], found[2], int(found[3])


def setting(study: str, line: dict[str, Any]) -> str:
    """Return the stream and the memory of a line in words."""
    stream, net, memory = setting_of(study, line)
    found = dict(re.findall(r"(\w+)='?([^',)]+)", stream))
    data = re.search("|".join(DATA_SETS), stream)
    assert data, f"{study} has data without a name here: {stream}"
    words = [CLASSES_OF_FEATURES.get(data[0], "") * ("path" in found) + DATA_SETS[data[0]]]
    if "classes" in found:
        words[0] = f"classes {found['classes'].replace('-', '–')} of {words[0]}"
    words += ["features of EfficientNet-Lite0"] if "path" in found else []
    words += [f"on a frozen {net.partition('(')[0]}"] if "freeze" in net else []
    words += ["Si-Blurry"] if stream.startswith("si-blurry") else []
    words += [f"{found.get('tasks', 10)} tasks"]
    words += [f"{found['size']} pixels a side"] if "size" in found else []
    words += [f"order {found['order']}"] if "order" in found else []
    words += [f"batches of {found['batch']}"] if found.get("batch", "20") != "20" else []
    return f"{', '.join(words)}, memory {memory:,}"


@cache
def runs(study: str) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Return the metrics of a study's runs by rule; of each setting and method, by seed."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    with (ROOT / "results" / study / "runs.jsonl").open(encoding="utf-8") as kept:
        for run in map(json.loads, kept):
            config = run["config"]
            where = ", ".join(str(config[key]) for key in ("stream", "net", "memory"))
            found.setdefault((where, config["method"]), {})[config["seed"]] = run["summary"]["metrics"]
    return found


def by_seed(study: str, line: dict[str, Any], metric: str) -> dict[int, float]:
    """Return the metric of each seed of a line; a study may have taken runs over from another one."""
    place = (", ".join(map(str, setting_of(study, line))), line["method"])
    found: dict[int, dict[str, Any]] = {}
    for kept_by in (study, *STUDIES):
        found = runs(kept_by).get(place, {}) | found
    values = {seed: found[seed][line["rule"]][metric] for seed in line["seeds"] if line["rule"] in found.get(seed, {})}
    complete = len(values) == len(line["seeds"]) and math.isclose(sum(values.values()) / len(values), line[metric], abs_tol=1e-6)
    return values if complete else {}


def interval_of_mean(line: dict[str, Any]) -> str:
    n = len(line["seeds"])
    half_width = t_quantile(n) * (line["acc_std"] or 0.0) / math.sqrt(n)
    return "–" if math.isnan(half_width) else f"{line['acc'] - half_width:.1f} to {line['acc'] + half_width:.1f}"


# Strong and weak: beside another method of the same study and setting.


def strong_and_weak(name: str) -> str:
    """Compare a method on paired seeds with what one would take without it, where a study has both."""
    rows: list[list[object]] = []
    found: dict[str, list[tuple[Paired | None, Paired | None, float]]] = {}
    for study in STUDIES:
        for line in measured(study, name):
            other = beside(study, name, line)
            if other is None:
                continue
            accuracy, forgetting = (difference(study, line, other, metric) for metric in ("acc", "forgetting"))
            times = arithmetic(line) / arithmetic(other) if arithmetic(other) else math.nan
            shown = [
                breakable(row_of(name, line)),
                breakable(f"`{other['method']}`"),
                in_points(accuracy),
                in_points(forgetting),
                f"× {times:.1f}" if times > 0 else "–",
            ]
            rows.append([where(study, line), *shown])
            if row_of(name, line).startswith(f"`{name}()") or FACTS[name].family in ("add", "wrap"):
                found.setdefault(other["method"], []).append((accuracy, forgetting, times))
    if not rows:
        return ""
    heads = ["where", "row", "beside", "accuracy", "forgetting", "arithmetic"]
    return "\n\n".join([*verdicts(found), table(heads, rows, right=(3, 4, 5)), HOW_COMPARED])


def row_of(name: str, line: dict[str, Any]) -> str:
    """Return the expression of a line; that of a method with its default options in short."""
    return f"`{name}()`" if line["method"] == default_form(name) and FACTS[name].family != "add" else f"`{line['method']}`"


@cache
def default_form(name: str) -> str:
    return str(parse_method(f"{name}()"))


def verdicts(found: dict[str, list[tuple[Paired | None, Paired | None, float]]]) -> list[str]:
    """Say beside each other method where accuracy, forgetting and arithmetic are better or worse."""
    strong, weak = [], []
    for other, settings in found.items():
        for place, more, less, good in ((0, "more accurate", "less accurate", 1), (1, "forgets less", "forgets more", -1)):
            told = [one[place] for one in settings if one[place] is not None]
            for words, side, sign in ((more, strong, good), (less, weak, -good)):
                sure = [abs(one.mean) for one in told if one.low * one.high > 0 and one.mean * sign > 0]
                if sure:
                    points = " to ".join(dict.fromkeys(f"{one:.1f}" for one in (min(sure), max(sure))))
                    where = "" if len(told) == 1 else f" in {len(sure)} of {len(told)} settings"
                    side.append(f"{words} than `{other}`{where} ({points} points)")
        times = [one[2] for one in settings if one[2] > 0] or [1.0]
        if min(times) > 1.5:
            weak.append(f"{max(times):.1f} times the arithmetic of `{other}`")
        elif max(times) < 0.67:
            strong.append(f"{max(times):.2f} of the arithmetic of `{other}`")
    told_sides = [f"**{side}:** {'; '.join(points)}." for side, points in (("Strong", strong), ("Weak", weak)) if points]
    return told_sides or ["No difference can be told from the seeds that were run."]


HOW_COMPARED = (
    "Differences in points on paired seeds, with their 95 % intervals; arithmetic is how many times the passes of the other one it "
    "takes (images forward, and twice those backward). Strong and weak name a difference only where its interval leaves out zero, "
    "without a correction for the number of comparisons."
)


def beside(study: str, name: str, line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the line to compare with: the learner inside or added to, `closed()` on features, else `er()`; `sgd()` for `er()`."""
    inner = re.fullmatch(rf"(.+) \+ {name}\(.*\)|{name}\((\w+\(.*\)).*\)", line["method"])
    wanted = [inner[1] or inner[2], re.findall(r"\w+\(", line["method"])[-1] + ")"] if inner else []
    wanted += ["closed()"] if FACTS[name].family == "frozen" else []
    same = {other["method"]: other for other in lines(study) if other.get("setting") == line.get("setting")}
    return next((same[other] for other in [*wanted, "er()", "sgd()"] if other in same and other != line["method"]), None)


def difference(study: str, line: dict[str, Any], other: dict[str, Any], metric: str) -> Paired | None:
    """Return the paired difference of two lines; None where fewer than three seeds are shared."""
    ours, theirs = (by_seed(study, one, metric) for one in (line, other))
    seeds = sorted(ours.keys() & theirs.keys())
    found = paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    return None if math.isnan(found.low) else found


def in_points(found: Paired | None) -> str:
    return "–" if found is None else f"{found.mean:+.1f}<br>({found.low:+.1f} to {found.high:+.1f})".replace("-", "−")


def arithmetic(line: dict[str, Any]) -> float:
    return float(line["forward"] + 2 * line["backward"])


def with_spread(line: dict[str, Any], metric: str) -> str:
    spread = line[f"{metric}_std"]
    return f"{line[metric]:.1f}" + ("" if spread is None else f" ± {spread:.1f}")


def again(name: str) -> str:
    """Return the command that makes a row of mini again from nothing, and where to read it."""
    found = measured("mini", name)
    if not found:
        return ""
    line = found[0]
    minutes = line["seconds"] * line["steps"] * len(line["seeds"]) / 60
    config = configurations("mini")[line["method"]]
    command = as_typed(["gracecl", "run", line["method"], *option_words(config), "--seeds", "0-2", "--out", "runs/again"])
    return (
        "The row of `mini` again, from nothing (it needs CIFAR-100: `gracecl data get cifar100 --data DIR`):\n\n"
        f"```sh\n{over_lines(command)}\n```\n\n"
        "Read the column `acc` of the last table that it prints, in the row of the method; the line below "
        f"it names the rule, here `{line['rule']}`. Training took {max(1, round(minutes))} min of a core here. "
        "Numbers equal ours to the digit only with the same PyTorch, processor and threads; else expect them within the spread."
    )


def over_lines(command: str) -> str:
    """Break a command before its options, for a shell to read it as one."""
    first, *options = re.split(r" (?=--)", command)
    together = " ".join(option.replace(" ", "\0") for option in options)
    lines = textwrap.wrap(together, 88, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join([first, *lines]).replace("\0", " ")


def in_the_paper(name: str) -> str:
    names = [row for row, expression in paper.EXPRESSIONS.items() if outermost(expression) == name]
    rows: list[list[object]] = []
    for row in names:
        for record in paper.records(table="main_accuracy", method=row) + paper.records(
            table="cub200", metric="A_Final", method=row
        ):
            value = f"{record['mean']:.1f}" + ("" if record.get("std") is None else f" ± {record['std']:.1f}")
            rows.append([row, record["dataset"], f"{record['buffer_size']:,}" if record.get("buffer_size") else "–", value])
    if not rows:
        return "It is not in the paper's tables."
    return f"{table(['row', 'data', 'memory', 'acc'], rows, right=(2, 3))}\n\n{PAPER_NOTE}"


PAPER_NOTE = (
    "From the paper's tables: final accuracy, ten tasks on CIFAR-100. All rows but MOSE and GRACE are copied there from other "
    "papers, in settings that are partly not known. Our settings above are smaller, so the numbers are not to be compared directly."
)


def outermost(expression: str) -> str:
    return re.split(r"\(", expression.rsplit(" + ", 1)[-1])[0]


def more(name: str, kind: Any, facts: Facts) -> str:
    file = f"src/{kind.__module__.replace('.', '/')}.py"
    found = [f"- The code: `{file}`.", "- [All methods in one table](../methods.md)."]
    others = sorted(other for other, told in FACTS.items() if told.family == facts.family and other != name)
    found.append("- The same family: " + ", ".join(f"[`{other}`]({other}.md)" for other in others) + ".")
    if examples := used_in(name):
        found.append("- Where it is used: " + ", ".join(examples) + ".")
    aliases = sorted(alias for alias, meant in methods.aliases.items() if meant == name)
    if aliases:
        found.append("- Also understood: " + ", ".join(f"`{alias}`" for alias in aliases) + ".")
    return "\n".join(found)


def used_in(name: str) -> list[str]:
    """Return links to the tutorials and programs whose code names a method."""
    found = with_code(rf"[\"'( ]{name}\(|\"{name}\"|gracecl run (\S+ )*{name}\b")
    return [f"[{title_of(path)}](../../{path})" for path in found]
