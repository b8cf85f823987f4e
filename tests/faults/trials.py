"""Hostile trials: files of another run, links, code that was not named, odd text, closed outputs; and what came of each.

`python tests/faults/trials.py` tries every kind and prints the table; with `SOURCE=DIR` on the code of another folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from machine import RUN, Ended, Machine, Outcome, flipped, machine, results, table

STUDY = """
seeds = "0-2"
methods = ["er()", "sgd()"]
stream = "split-digits(size=8, classes='0-3', tasks=2)"
net = "mlp(width=4)"
memory = 10
steps = 9
control = "er()"
show = ["paired"]
"""
VERBS = ("report", "compare", "keep", "export", "study")
SECONDS = 60
"""after which a command hangs"""


@dataclass
class Group:
    """Finished runs of two methods and three seeds, the study that made them, and what each command makes of them."""

    made: Machine
    folder: Path
    file: Path

    @classmethod
    def prepare(cls, made: Machine) -> Group:
        place = made.fresh()
        file = place / "mine.toml"
        file.write_text(STUDY)
        group = cls(made, place / "group", file)
        ended = made("study", file, "--out", group.folder, "--jobs", "1", "--threads", "1", folder=place)
        assert ended.code == 0, ended.text
        return group

    def runs(self, folder: Path) -> list[Path]:
        """The runs of one method come one after the other, by seed."""
        return sorted(path.parent for path in folder.rglob("config.json"))

    def call(self, verb: str, folder: Path) -> tuple[Ended, str]:
        """How the command ended, and what it showed."""
        out = self.made.fresh()
        words: dict[str, list[str | Path]] = {
            "report": [folder, "--out", out],
            "compare": ["er()", "sgd()", "--runs", folder],
            "keep": [folder, out],
            "export": [folder, out / "runs.csv"],
            "study": [self.file, "--out", folder, "--as-is"],
        }
        ended = self.made(verb, *words[verb], folder=out)
        if verb == "keep":
            shown = "".join(
                f"{file.relative_to(out)}\n{file.read_text()}"
                for file in sorted([*out.rglob("metrics.jsonl"), *out.rglob("config.json")])
            )
        else:
            files = {"report": out / "report.md", "export": out / "runs.csv", "study": folder / "mine.md"}
            shown = files[verb].read_text() if verb in files and files[verb].is_file() else ended.text
        return ended, shown.replace(str(folder), "FOLDER").replace(str(out), "OUT")

    def attempt(self, verb: str, change: Callable[[list[Path]], None]) -> Outcome:
        """One command over the group after a change to it."""
        folder = self.made.fresh() / "group"
        shutil.copytree(self.folder, folder)
        _, whole = self.call(verb, folder)
        change(self.runs(folder))
        ended, shown = self.call(verb, folder)
        outcome = plain(ended)
        return "silent" if outcome == "identical" and shown != whole else outcome


def copy(name: str, source: int, target: int) -> Callable[[list[Path]], None]:
    """A file of one run lies in the folder of another."""

    def change(runs: list[Path]) -> None:
        shutil.copy(runs[source] / name, runs[target] / name)

    return change


def delete(name: str, target: int) -> Callable[[list[Path]], None]:
    return lambda runs: (runs[target] / name).unlink()


def swapped_files(group: Group, name: str) -> Iterator[Outcome]:
    """A file of a run of another seed, or of another method."""
    for verb, (source, target) in product(VERBS, ((1, 0), (0, 2), (3, 0), (1, 5))):
        yield group.attempt(verb, copy(name, source, target))


def deleted_configurations(group: Group) -> Iterator[Outcome]:
    for verb, target in product(VERBS, range(6)):
        yield group.attempt(verb, delete("config.json", target))


def deleted_times(group: Group) -> Iterator[Outcome]:
    """A report can be made without times; what it shows of them is missing."""
    for verb, target in product(VERBS, (0, 3)):
        outcome = group.attempt(verb, delete("timing.json", target))
        yield "identical" if outcome == "silent" else outcome


def cut_records(group: Group) -> Iterator[Outcome]:
    def change(runs: list[Path]) -> None:
        file = runs[2] / "metrics.jsonl"
        file.write_bytes(file.read_bytes()[:-40])

    for verb in VERBS:
        yield group.attempt(verb, change)


def odd_studies(group: Group) -> Iterator[Outcome]:
    """A file beside the runs that looks like a study's, or is JSON of a depth that nobody reads."""
    texts = ('{"study":"x","taken_over":5}', '{"study":"x","taken_over":[5, null]}', "[" * 5000 + "]" * 5000, '{"study": {}}', "5")
    for verb, text in product(("report", "compare", "export"), texts):

        def change(runs: list[Path], text: str = text) -> None:
            (runs[0].parents[3] / "odd.json").write_text(text)

        yield group.attempt(verb, change)


def wrong_if_done(ended: Ended) -> Outcome:
    """A command that has to refuse."""
    outcome = plain(ended)
    return "silent" if outcome == "identical" else outcome


def swapped_checkpoints(group: Group) -> Iterator[Outcome]:
    """`export` of a run whose checkpoint is that of another seed, or another method."""
    made = group.made
    for source, target in ((1, 0), (2, 0), (3, 0), (4, 3)):
        folder = made.fresh() / "group"
        shutil.copytree(group.folder, folder)
        runs = group.runs(folder)
        copy("checkpoint.safetensors", source, target)(runs)
        ended = made("export", runs[target], made.fresh() / "model.safetensors", folder=folder)
        yield wrong_if_done(ended)


def swapped_snapshots(made: Machine) -> Iterator[Outcome]:
    """`theory` of a run whose snapshots changed places, or are those of another seed."""
    place = made.fresh()
    command = ["run", "grace(er())", *RUN[1:], "--snapshots", "--seeds", "0,1", "--jobs", "1", "--out", place]
    command[command.index("mlp(width=4)")] = "mlp(width=4, depth=4)"
    command[command.index("9")] = "60"
    ended = made(*command, folder=place)
    assert ended.code == 0, ended.text
    runs = sorted(path.parent for path in place.rglob("config.json"))
    assert made("theory", runs[0], folder=place).code == 0
    for source, target in (((0, "1"), "2"), ((0, "2"), "1"), ((0, "0"), "1"), ((1, "1"), "1"), ((1, "2"), "2"), ((1, "0"), "0")):
        copied = made.fresh() / "runs"
        shutil.copytree(place, copied)
        found = sorted(path.parent for path in copied.rglob("config.json"))
        shutil.copy(found[source[0]] / f"snapshots/{source[1]}.safetensors", found[0] / f"snapshots/{target}.safetensors")
        ended = made("theory", found[0], folder=copied)
        yield wrong_if_done(ended)


PLUGIN = """
from dataclasses import dataclass
from gracecl.methods.er import ER
from gracecl.registry import methods

@methods.register("foo")
@dataclass(eq=False, repr=False)
class Foo(ER):
    \"\"\"Replay at its own scale.\"\"\"

    def losses(self, out, batch):
        return {name: %s * value for name, value in super().losses(out, batch).items()}
"""


def plugin_runs(made: Machine) -> Iterator[Outcome]:
    """Stopped runs of two plugins that register one name, resumed by one command: each ends with its own code."""
    code, out, alone = made.fresh(), made.fresh(), made.fresh()
    whole = {}
    for letter, scale in (("a", "1.0"), ("b", "0.1")):
        (code / f"{letter}.py").write_text(PLUGIN % scale)
    for seed, letter in product(range(4), "ab"):
        options = ["run", "foo", *RUN[1:], "--seeds", str(seed), "--plugin", code / f"{letter}.py", "--jobs", "1"]
        assert made(*options, "--out", alone / f"{seed}{letter}", folder=alone).code == 0
        whole[f"{seed}{letter}"] = results(alone / f"{seed}{letter}")
        assert made(*options, "--out", out / f"{seed}{letter}", folder=out / f"{seed}{letter}", end_at=25).code == -9
    ended = made("resume", out, "--jobs", "1", folder=out)
    for name, found in whole.items():
        outcome = plain(ended)
        yield "silent" if outcome == "identical" and results(out / name) != found else outcome
    both = made("run", "foo", *RUN[1:], "--plugin", code / "a.py", "--plugin", code / "b.py", "--out", made.fresh(), folder=out)
    yield wrong_if_done(both)


def foreign_code(made: Machine) -> Iterator[Outcome]:
    """A note beside a stopped run names code that the run did not; code that it loads late was changed."""
    place = made.fresh()
    for name in ("evil.py", "package/evil.py"):
        out = made.fresh()
        evil, trace = place / name, place / "executed"
        evil.parent.mkdir(exist_ok=True)
        evil.write_text(f"open({str(trace)!r}, 'w').close()\n")
        made.run(out, end_at=25)
        (config,) = out.rglob("config.json")
        (config.parent / "plugins").write_text(str(evil))
        ended = made("resume", out, folder=out)
        yield "silent" if trace.exists() else plain(ended)
        trace.unlink(missing_ok=True)
    for late in ("import helper", "import importlib; helper = importlib.import_module('helper')"):
        code, out = made.fresh(), made.fresh()
        (code / "helper.py").write_text("scale = 1.0\n")
        text = (PLUGIN % "helper.scale").replace("        return {name", f"        {late}\n        return {{name")
        (code / "mine.py").write_text(f"import sys\nsys.path.insert(0, {str(code)!r})\n{text}")
        options = ["run", "foo", *RUN[1:], "--plugin", code / "mine.py", "--jobs", "1", "--out", out]
        stopped = made(*options, folder=out, end_at=45)  # after a checkpoint, which knows what was loaded
        assert stopped.code == -9, stopped.text
        (code / "helper.py").write_text("scale = 0.1\n")
        ended = made("resume", out, "--jobs", "1", folder=out)
        yield wrong_if_done(ended)


LINKED = (
    ".lock",
    "metrics.jsonl",
    "config.json",
    "summary.json",
    "timing.json",
    "accuracy.json",
    "checkpoint.safetensors",
    "plugins",
)


def links(made: Machine) -> Iterator[Outcome]:
    """A name of a run's file leads to somebody else's file, which stays as it is; so do names where `keep` writes."""
    stopped, finished = made.fresh(), made.fresh()
    made.run(stopped, end_at=25)
    assert made.run(finished).code == 0
    for verb, name in product(("resume", "run", "report", "keep"), LINKED):
        out, victim = made.fresh() / "runs", made.fresh() / "victim"
        shutil.copytree(stopped if verb in ("resume", "run") else finished, out)
        (config,) = out.rglob("config.json")
        where = out / "kept" / config.parent.relative_to(out) if verb == "keep" else config.parent
        where.mkdir(parents=True, exist_ok=True)
        if (where / name).is_file():
            shutil.move(where / name, victim)
        else:
            victim.write_text("precious")
        before = victim.read_bytes()
        (where / name).symlink_to(victim)
        words = {"resume": ["resume", out], "run": ["run", *RUN, "--out", out], "report": ["report", out]}
        ended = made(*words.get(verb, ["keep", out, out / "kept"]), folder=out)
        yield plain(ended) if victim.read_bytes() == before else "lost"


# Files that somebody writes by hand.

RESULT = {"method": "ER", "stream": "split-x(tasks=2)", "seed": 0, "accuracy": [[90.0], [80.0, 85.0]]}


def odd_results() -> list[str]:
    """Results of others, as text: fine ones with odd names, and ones that cannot be."""
    names = [
        "ER ($x_$)",
        "$",
        "$$",
        "\\frac",
        "a\x1b[31mred",
        "\x07",
        "ü" * 300,
        "..",
        "/",
        "a/b",
        "=1+1",
        "%s {0} \\n",
        "\u202eer",
    ]
    named = [json.dumps(RESULT | {key: name}) for name in names for key in ("method", "stream")]
    values = [None, True, -1, 1e308, 10**30, "1", [], {}, [[]], {"a": 1}]
    wrong = [json.dumps(RESULT | {key: value}) for key, value in product((*RESULT, "memory", "seconds", "rule", "tasks"), values)]
    deep = "[" * 2000 + "]" * 2000
    texts = [
        deep,
        json.dumps(RESULT)[:-1] + f', "note": {deep}}}',
        json.dumps(RESULT).replace('"seed": 0', f'"seed": {"9" * 400}'),
        json.dumps(RESULT).replace("90.0", "9" * 400),
        json.dumps(RESULT).replace("90.0", "NaN"),
        json.dumps(RESULT).replace("90.0", "Infinity"),
        json.dumps(RESULT).replace('"ER"', '"\\ud800"'),
        json.dumps(RESULT).replace('"split-x', '"\\udfff'),
        "",
        "\0",
        "null",
        "[]",
        "{}",
        "[null]",
    ]
    return [*named, *wrong, *texts]


def imports(made: Machine) -> Iterator[Outcome]:
    """`import`, then a report over what it left: both work, or nothing is left."""
    for text in odd_results():
        place = made.fresh()
        (place / "result.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        imported = made("import", place / "result.json", "--out", place / "out", folder=place)
        if "Traceback" in imported.text or "\x1b" in imported.text:
            yield "traceback"
        elif imported.code == 0:
            shown = made("report", place / "out", folder=place)
            raw = "Traceback" in shown.text or "\x1b[31m" in shown.text
            yield "traceback" if raw else "identical" if shown.code == 0 else "lost"
        else:
            left = list((place / "out").rglob("*")) if (place / "out").exists() else []
            yield "refused" if imported.sentence and not [path for path in left if path.is_file()] else "lost"


WRONG = ("1", "1.5", "true", '"text"', "[]", "[1]", '[["a"]]', "{a = 1}", "1979-05-27", "nan", "-1")


def default_files(made: Machine) -> Iterator[Outcome]:
    """A file of defaults with a value of every kind at every place."""
    good = 'streams = ["split-digits"]\n[[er]]\noptimizer = "sgd(lr=0.1)"\nsource = "me"\n'
    texts = [f"streams = {value}\n[[er]]\nn_recall = 4\nsource = 'me'\n" for value in WRONG]
    texts += [f"er = {value}\n" for value in WRONG]
    texts += [f"{good}{key} = {value}\n" for key, value in product(("n_recall", "augment", "source2", "streams"), WRONG)]
    texts += [good.replace('"me"', value) for value in WRONG]
    texts += [good + "[[ER]]\nn_recall = 4\nsource = 'me'\n", "streams = 'split-digits'\n" + good[27:], "[er]\nn_recall = 4\n", "x"]
    for text in texts:
        place = made.fresh()
        (place / "mine.toml").write_text(text)
        ended = made("run", *RUN, "--steps", "2", "--defaults", place / "mine.toml", "--out", place / "out", folder=place)
        yield plain(ended)


def study_files(made: Machine) -> Iterator[Outcome]:
    """A study with a value of every kind at every key: it is fine, or refused before any run by a sentence with the file."""
    keys = (
        "about",
        "methods",
        "seeds",
        "stream",
        "memory",
        "net",
        "steps",
        "taps",
        "augment",
        "optimizer",
        "control",
        "show",
        "runs",
    )
    lines = STUDY.strip().splitlines()
    texts = [
        "\n".join([*(line for line in lines if not line.startswith(f"{key} ")), f"{key} = {value}"])
        for key, value in product(keys, WRONG)
    ]
    block = [("net", '"mlp(widht=4)"'), ("net", '"mpl()"'), ("methods", '["er(n_recal=3)"]'), ("stream", '"split-digits(taks=2)"'),
             ("optimizer", '"sgdd(lr=1)"'), ("augment", '"nothing"'), ("steps", '"many"'), ("memory", "-3"),
             ("widht", "4")]  # fmt: skip
    texts += [f"{STUDY}\n[[runs]]\n\n[[runs]]\n{key} = {value}\n" for key, value in block]
    texts += [f"{STUDY}\nrepeat_{'x' * 100} = 1", STUDY + "x = " + "[" * 3000 + "]" * 3000]
    for text in texts:
        place = made.fresh()
        (place / "mine.toml").write_text(text)
        ended = made("study", place / "mine.toml", "--out", place / "out", "--as-is", folder=place)
        outcome = plain(ended)
        if "no finished run of this study" in ended.text:  # the file is fine
            outcome = "identical"
        yield "lost" if outcome == "refused" and "mine.toml" not in ended.text else outcome


def plain(ended: Ended) -> Outcome:
    """A command that needs no comparing: it works, or one sentence says why not."""
    if "Traceback" in ended.text or ended.code < 0:
        return "traceback"
    return "identical" if ended.code == 0 else "refused" if ended.sentence else "lost"


def search_files(made: Machine, number: int) -> Iterator[Outcome]:
    """One bit of what a tuning study's trials.db holds is another: the same winner, or a sentence."""
    place = made.fresh()
    command = [
        "tune",
        "er",
        *RUN[1:],
        "--space",
        "lr=0.0001,0.3",
        "--sampler",
        "grid",
        "--trials",
        "2",
        "--seeds",
        "0",
        "--tasks",
        "1",
    ]
    command = [word for word in command if word not in ("--eval-every", "4", "--checkpoint-every")] + ["--jobs", "1"]
    command.remove("3")
    ended = made(*command, "--out", place / "tune", folder=place)
    assert ended.code == 0, ended.text

    def winner(text: str) -> str:
        return next((line for line in text.splitlines() if line.startswith("best")), "")

    whole, draw = winner(ended.text), random.Random(5)
    (name,) = [file.name for file in (place / "tune").glob("trials.*")]
    places = [at for at, byte in enumerate((place / "tune" / name).read_bytes()) if byte]  # a database is mostly empty
    for _ in range(number):
        out = made.fresh() / "tune"
        shutil.copytree(place / "tune", out)
        file = out / name
        file.write_bytes(flipped(draw.choice(places), draw.randrange(8))(file.read_bytes()))
        again = made(*command, "--out", out, folder=out)
        outcome = plain(again)
        yield "silent" if outcome == "identical" and winner(again.text) != whole else outcome


# Processes of their own: what surrounds a command.


def surroundings(source: Path | None) -> Iterator[Outcome]:
    """Outputs that are closed, encodings, widths of a terminal, options of Python, memory."""
    package = (source or Path(__file__).parents[2]) / "src"
    gracecl = str(Path(sys.executable).parent / "gracecl")
    run = f"{gracecl} run " + " ".join(f'"{word}"' for word in RUN) + " --out OUT"
    report = 'test -n "$(find OUT -name summary.json)"'
    commands = [
        f"{run} 2>&- && {report}",
        f"{run} >&- && {report}",
        f"{run} >&- 2>&- && {report}",
        f"{run} | head -1 && {report}",
        f"{run} > /dev/null; {gracecl} report OUT | head -c 1; test -f OUT/report.md",
        f"{run} > /dev/null; {gracecl} list methods | head -c 1",
        *(f"PYTHONIOENCODING={name} {run} && {report}" for name in ("latin-1", "ascii", "cp1252")),
        *(f"PYTHONIOENCODING={name} {gracecl} list methods" for name in ("latin-1", "ascii")),
        f"LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 {run} && {report}",
        f"LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 {gracecl} report OUT || test $? = 2",
        *(f"COLUMNS={width} {gracecl} run --help" for width in (0, 1, 5, 100000, "x", -3)),
        *(f"COLUMNS={width} {run} && {report}" for width in (1, "x")),
        f"PYTHONOPTIMIZE=1 {run} && {report}",
        f"PYTHONOPTIMIZE=2 {run} && {report}",
        f"PYTHONOPTIMIZE=2 {gracecl} run --help",
        f"(ulimit -v 3000000; {run.replace('width=4', 'width=12000, depth=4')}) || test $? = 2",
        *(
            f"mkfifo OUT.fifo; {gracecl} {words} OUT.fifo || test $? = 2"
            for words in ("import", "study", "run er --defaults", "run er --plugin")
        ),
    ]
    for command in commands:
        with tempfile.TemporaryDirectory() as place:
            environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
            with subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", command.replace("OUT", f"{place}/out")],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            ) as process:  # fmt: skip
                try:
                    text, _ = process.communicate(timeout=SECONDS)
                except subprocess.TimeoutExpired:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, 9)
                    yield "lost"
                    continue
            failed = b"Traceback" in text
            yield "traceback" if failed else "identical" if process.returncode == 0 else "lost"


def main() -> None:
    source = Path(os.environ["SOURCE"]).resolve() if "SOURCE" in os.environ else None
    with tempfile.TemporaryDirectory() as place, machine(Path(place), source) as made:
        group = Group.prepare(made)
        kinds: dict[str, Iterator[Outcome]] = {
            "another run's config.json": swapped_files(group, "config.json"),
            "another run's summary.json": swapped_files(group, "summary.json"),
            "another run's metrics.jsonl": swapped_files(group, "metrics.jsonl"),
            "another run's timing.json": swapped_files(group, "timing.json"),
            "config.json deleted": deleted_configurations(group),
            "timing.json deleted": deleted_times(group),
            "one record of six cut": cut_records(group),
            "odd JSON beside the runs": odd_studies(group),
            "another run's checkpoint, export": swapped_checkpoints(group),
            "another snapshot, theory": swapped_snapshots(made),
            "two plugins with one name, resume": plugin_runs(made),
            "code that the run did not name, resume": foreign_code(made),
            "links instead of files": links(made),
            "odd results, import and report": imports(made),
            "files of defaults": default_files(made),
            "files of studies": study_files(made),
            "a search's trials with a flipped bit": search_files(made, 100),
            "outputs, encodings, widths, memory": surroundings(source),
        }
        wanted = os.environ.get("ONLY", "")
        counts = {}
        for kind, outcomes in kinds.items():
            if wanted in kind:
                found = list(outcomes)
                counts[kind] = Counter(found)
                sys.stderr.write(f"{kind}: {' '.join(outcome[0] for outcome in found)}\n")
    sys.stdout.write(table(counts) + "\n")


if __name__ == "__main__":
    main()
