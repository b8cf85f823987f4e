"""Facts about each method without running it: year, needs, state, cost, and how GRACE acts on it.

`gracecl list methods` and docs/methods.md show the table below, and the command must answer without torch. A test runs every method
and compares (tests/test_catalogue.py).
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from gracecl.lab import paper
from gracecl.registry import methods
from gracecl.registry.options import AUTO_FROM_SCRATCH, AUTO_ON_FEATURES

BY_BATCH = "takes each batch's classes for the task's"
SLOWS = "slows its average after 500 updates"


@dataclass(frozen=True)
class Facts:
    """Facts about a method with its default options."""

    family: str
    """bound, replay, select (what to keep and replay), contrast, teacher (of earlier tasks), frozen (a net that others trained),
    add (to a learner), wrap (around a learner)"""
    year: int | None
    """of publication; None if never published as a method"""
    unmarked: str
    """what it does on a stream without task marks: same, as it does not use any; refused, as it needs them; or what stands in place
    of what it does at them"""
    keeps: str
    """what it remembers besides its weights"""
    terms: str
    """its losses in later tasks; α acts on those called ce"""
    forward: int
    """images through the net at each step: in the last of ten tasks of ten classes, with 10 new images, a memory of 1,000"""
    backward: int
    """images that a gradient is taken of"""
    grace: str = "yes"
    """what works inside grace(...): yes; head, with train_head=True, as GRACE reads linear heads and it trains none of its own;
    γ alone, as there are no images of the past to find α from while it trains; no"""

    @property
    def marks(self) -> str:
        """The same in five letters: nothing, needed, the steps of an interval, or a way of its own."""
        interval = re.search(r"every (\d+) steps", self.unmarked)
        return {"same": "–", "refused": "needs"}.get(self.unmarked) or (interval[1] if interval else "own")

    @property
    def images(self) -> str:
        return f"{self.forward}" if self.forward == self.backward else f"{self.forward}/{self.backward}"


FACTS = {
    "sgd": Facts("bound", None, "same", "nothing", "ce/all", 10, 10, "γ"),
    "joint": Facts("bound", None, "same", "nothing", "ce/all", 74, 74, "γ"),
    "er": Facts("replay", 2019, "same", "images", "ce/all", 74, 74),
    "agem": Facts("replay", 2019, "same", "images", "ce/new", 74, 74),
    "der": Facts("replay", 2020, "same", "images, logits", "ce/new kd/logits", 74, 74),
    "derpp": Facts("replay", 2020, "same", "images, logits", "ce/new kd/logits ce/replay", 138, 138),
    "er_ace": Facts("replay", 2022, "same", "images", "ce/new ce/replay", 74, 74),
    "er_aml": Facts("replay", 2022, "same", "images", "sc ce/replay", 94, 94),
    "adversarial_replay": Facts("replay", 2022, "same", "images", "ce/new ce/replay ce/adversarial", 414, 276),
    "cls_er": Facts("replay", 2022, "same", "images, 2 averages", "ce/all kd/surer", 202, 74),
    "gsa": Facts("replay", 2023, "refused", "images, counts", "ce/new ce/balanced", 190, 190),
    "mose": Facts("replay", 2024, BY_BATCH, "images", "sc ce/new ce/balanced rsd", 384, 384),
    "mir": Facts("select", 2019, "same", "images", "ce/new ce/replay", 596, 84),
    "gss": Facts("select", 2019, "same", "images, scores", "ce/all", 184, 184),
    "gdumb": Facts("select", 2020, "same", "images", "", 0, 0, "γ"),
    "aser": Facts("select", 2021, "same", "images", "ce/all", 894, 74),
    "dvc": Facts("select", 2022, "same", "images", "ce/new mi/new dl/new ce/replay mi/replay dl/replay", 680, 168),
    "scr": Facts("contrast", 2021, "same", "images", "ce/contrast", 148, 148, "head"),
    "co2l": Facts("contrast", 2021, "every 500 steps", "images, net", "ce/contrast kd/relations", 296, 148, "head"),
    "ocm": Facts(
        "contrast", 2022, "every 500 steps", "images, net", "ce/replay sc/new sc/replay kd/projected kd/logits", 3520, 2432
    ),
    "onpro": Facts(
        "contrast",
        2023,
        "as in later tasks, from the start",
        "images, means",
        "ce/replay sc/new sc/replay ope/new ope/seen",
        2560,
        2560,
    ),
    "pcr": Facts("contrast", 2023, "same", "images", "ce/proxy", 148, 148),
    "icarl": Facts("teacher", 2017, "every 500 steps", "images, net", "ce/new kd/old", 148, 74),
    "bic": Facts("teacher", 2019, "refused", "images, net", "ce/all kd/old", 148, 74),
    "lucir": Facts("teacher", 2019, "refused", "images, net", "ce/all kd/features margin/old", 148, 74),
    "ccil": Facts("teacher", 2021, "refused", "images, net", "ce/new kd/new ce/replay kd/replay", 148, 74),
    "il2a": Facts("teacher", 2021, "refused", "images, net", "ce/all ce/semantic kd/features", 218, 109),
    "ssil": Facts("teacher", 2021, "refused", "images, net", "ce/new ce/replay kd/tasks", 148, 74),
    "closed": Facts("frozen", None, "same", "sums", "", 10, 0, "no"),
    "slda": Facts("frozen", 2020, "same", "sums", "", 10, 0, "no"),
    "acil": Facts("frozen", 2022, "same", "sums", "", 10, 0, "no"),
    "fecam": Facts("frozen", 2023, "same", "sums", "", 10, 0, "no"),
    "ranpac": Facts("frozen", 2023, "same", "sums", "", 10, 0, "no"),
    "air": Facts("frozen", 2024, "same", "sums", "", 10, 0, "no"),
    "foal": Facts("frozen", 2024, "same", "sums", "", 10, 0, "no"),
    "gacl": Facts("frozen", 2024, "same", "sums", "", 10, 0, "no"),
    "ncm": Facts("frozen", 2024, "same", "sums", "", 10, 0, "no"),
    "randumb": Facts("frozen", 2024, "same", "sums", "", 10, 0, "no"),
    "klda": Facts("frozen", 2025, "same", "sums", "", 10, 0, "no"),
    "online_lora": Facts("frozen", 2025, "same", "images", "ce/new ce/hard", 50, 50),
    "lwf": Facts("add", 2016, "every 500 steps", "net", "ce/all kd/lwf", 20, 10, "γ"),
    "ewc": Facts("add", 2017, "every 500 steps", "weights", "ce/all penalty/ewc", 10, 10, "γ"),
    "si": Facts("add", 2017, "every 500 steps", "weights", "ce/all penalty/si", 10, 10, "γ"),
    "ewc_on": Facts("add", 2018, "every 500 steps", "weights", "ce/all penalty/ewc_on", 10, 10, "γ"),
    "ewc_pp": Facts("add", 2018, "every 500 steps", "weights", "ce/all penalty/ewc_pp", 10, 10, "γ"),
    "mas": Facts("add", 2018, "every 500 steps", "weights", "ce/all penalty/mas", 10, 10, "γ"),
    "cpr": Facts("add", 2021, "same", "nothing", "ce/all cpr", 10, 10, "γ"),
    "rar": Facts("wrap", 2022, "same", "images", "ce/new ce/replay", 740, 740),
    "ema": Facts("wrap", 2023, SLOWS, "images, average", "ce/new kd/logits ce/replay", 138, 138),
    "lode": Facts("wrap", 2023, "refused", "images, logits", "ce/new kd/logits ce/replay", 138, 138),
    "mkd": Facts("wrap", 2024, "same", "images, average", "ce/all kd/teacher", 148, 74),
    "lpr": Facts("wrap", 2024, "same", "images, matrices", "ce/all", 91, 74),
    "best": Facts(
        "wrap", None, f"{BY_BATCH}; slows its average after 500 updates", "images, average", "ce/new ce/balanced rsd", 192, 192
    ),
    "mirrored": Facts("wrap", None, "same", "images", "ce/all", 74, 74),
    "votes": Facts("wrap", None, "same", "images", "ce/all", 74, 74),
    "multi_update": Facts("wrap", None, BY_BATCH, "images", "sc ce/new ce/balanced rsd", 384, 384),
    "grace": Facts("wrap", 2025, f"{BY_BATCH}; every 500 steps", "images", "sc ce/new ce/balanced rsd entropy", 384, 384, "no"),
}
"""Wrappers wrap their default method; additions are added to sgd()."""
LEARNERS = (
    "sgd()",
    "er()",
    "agem()",
    "mir()",
    "dvc()",
    "gss()",
    "aser()",
    "er_ace()",
    "er_aml()",
    "gdumb()",
    "scr()",
    "pcr()",
    "co2l()",
    "ocm()",
    "onpro()",
    "rar()",
    "adversarial_replay()",
    "der()",
    "derpp()",
    "lode()",
    "cls_er()",
    "ema(derpp())",
    "ema(rar(er(), iterations=3, augmentation='run'))",
    "gsa()",
    "il2a()",
    "icarl()",
    "bic()",
    "ssil()",
    "lucir()",
    "ccil()",
    "mose()",
    "grace(mose())",
    "slda()",
    "ranpac(projections=500)",
    "closed()",
    "ncm()",
    "acil(size=500)",
    "gacl(size=500)",
    "foal(size=500)",
    "air(size=500)",
    "klda(size=500)",
    "randumb(size=500)",
    "fecam()",
    "online_lora()",
    "mkd(er())",
    "lpr(er())",
    "mirrored(er())",
    "votes(er())",
    "multi_update(mose())",
    "best()",
    "er() + ewc()",
    "er() + ewc_on()",
    "er() + ewc_pp()",
    "er() + si()",
    "er() + mas()",
    "er() + cpr()",
    "sgd(classes='current') + lwf()",
)
"""Every method as a runnable learner, for tests and benchmarks over all of them. joint() is left out: its step is that of sgd() on
another stream. Additions are added to er(), or to sgd() where their paper has no memory."""


def paper_accuracy(method: str) -> float | None:
    """Return the paper's accuracy for a method on Split CIFAR-100 with a memory of 1,000, or None."""
    found = paper.accuracies()
    rows = [row for row, expression in paper.EXPRESSIONS.items() if expression.startswith(f"{method}(") and row in found]
    return found[rows[0]] if rows else None


def table() -> str:
    """Return a line for each method, at most 80 columns wide."""
    lines: list[tuple[str, ...]] = [("method", "year", "family", "marks", "grace", "keeps", "images", "paper")]
    for name in methods.names():
        facts = FACTS.get(name)  # a method of the user's own has none
        if facts is None:
            lines.append((name, *["–"] * 7))
            continue
        reported = paper_accuracy(name)
        lines.append(
            (
                name,
                str(facts.year or "–"),
                facts.family,
                facts.marks,
                facts.grace,
                facts.keeps.replace("images,", "+"),
                facts.images,
                "–" if reported is None else f"{reported:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_the_right = {lines[0].index("images"), lines[0].index("paper")}
    rows = [
        "  ".join(
            f"{cell:>{width}}" if i in to_the_right else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    notes = [f"also understood: {also_understood()}", on_auto()]
    return "\n".join([*rows, "", LEGEND, *(line for note in notes for line in textwrap.wrap(note, 80))])


def also_understood(quote: str = "") -> str:
    """List every method that has aliases, with them."""
    others: dict[str, list[str]] = {}
    for alias, name in methods.aliases.items():
        others.setdefault(name, []).append(f"{quote}{alias.replace('_pp', '++')}{quote}")
    return "; ".join(f"{', '.join(listed)} for {quote}{name}{quote}" for name, listed in others.items())


def on_auto(quote: str = "") -> str:
    """Say what the method `auto` stands for."""
    frozen, new = (f"{quote}{meant}{quote}" for meant in (AUTO_ON_FEATURES, AUTO_FROM_SCRATCH))
    return f"{quote}auto{quote} is {frozen} on a pretrained or frozen net, {new} on a new one"


LEGEND = """\
marks   needs task marks; acts every so many steps without them; has an own way
        without; or – does not use any. --boundaries guesses them for all
grace   works inside grace(...): yes; head, with train_head=True; γ, only the
        entropy term, as α has no images of the past; or no
keeps   besides its weights; + is images and more
images  through the net per step, of which a gradient is taken of those after
        the slash: 10 new ones, defaults, the last of ten tasks of ten classes
paper   the GRACE paper's accuracy on Split CIFAR-100, memory 1,000
'gracecl list methods --describe' says what each one does."""


def markdown() -> str:
    """Return the page docs/methods.md."""
    described = methods.summaries()
    rows = []
    for name, facts in sorted(FACTS.items()):
        reported = paper_accuracy(name)
        rows.append(
            f"| `{name}` | {facts.year or '–'} | {facts.family} | {described[name].rstrip('.')} | {_under_grace(facts)} "
            f"| {facts.unmarked} | {facts.keeps} | {facts.images} | {'–' if reported is None else f'{reported:.1f}'} |"
        )
    header = (
        "| method | year | family | what it does | inside `grace(...)` | without task marks | keeps | images per step | paper |"
    )
    names = f"Also understood: {also_understood('`')}. A run is recorded under the method's name here.\n\n{on_auto('`')}.\n"
    return "\n".join([PAGE, names, header, "|---|---|---|---|---|---|---|---:|---:|", *rows, ""])


def _under_grace(facts: Facts) -> str:
    if facts.grace == "no":
        return "not possible"
    acted = [term for term in facts.terms.split() if term.split("/")[0] == "ce"]
    others = [term for term in facts.terms.split() if term not in acted]
    left = f", not on {_listed(others)}" if others else ""
    if facts.family == "add":
        return f"α on the learner's rows{left}; alone, γ"
    if facts.grace == "γ":
        return "γ alone"
    return f"α on {_listed(acted)}{left}" + ("; with `train_head=True`" if facts.grace == "head" else "")


def _listed(rows: list[str]) -> str:
    return ", ".join(f"`{row}`" for row in rows)


PAGE = """\
# All methods in one table

This table says what each method needs, keeps and costs; [each has a page](methods/index.md) with more. It is written
by `gracecl list methods --markdown`, and a test compares it with what the methods do. Methods are described with
their default options, wrappers around their default method, additions with `sgd()`.

- **family**: bound; replay; select, which chooses what to keep or replay; contrast; teacher, which distils from a copy of the net
  of earlier tasks; frozen, on a net that others trained; add, to a learner: `er() + ewc()`; wrap, around a learner: `ema(er())`.
- **inside `grace(...)`**: GRACE multiplies the rows named by the layer's α, whatever weight the method gave them before, and leaves
  the others alone; it adds γ times the entropy of every layer's linear head. *γ alone* means that α stays 1, because nothing of the
  past is kept to measure heads on, or nothing is trained while the stream passes; an addition to a learner that keeps images,
  `grace(er() + ewc())`, has both.
- **without task marks**: what it does on a stream that has none. *same*: tasks make no difference to it; *refused*: it needs them;
  *every 500 steps*: what it does at a task's end it does at this interval, its option `every` or `refresh_every`; else what it does
  in place of it. `boundaries=` (`--boundaries`) lets every method, also those that need marks, go by a clock, by new labels or by a
  rise of the error instead: [streams](streams.md#without-marks).
- **keeps**: what it remembers besides the weights that it trains.
- **images per step**: through the net, and after a slash those that a gradient is taken of, where they are fewer: with 10 new
  images, in the last of ten tasks of ten classes, with a memory of 1,000. `gdumb` trains on its memory before an evaluation
  instead; closed forms (`closed`, `slda`, `ranpac` and others that keep sums) make no training steps at all.
- **paper**: the GRACE paper's accuracy on Split CIFAR-100 with a memory of 1,000, where it has one.
"""
