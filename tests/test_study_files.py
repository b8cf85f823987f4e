"""Studies as files: the package's own at every scale, one of the user's, mistakes in it, runs that another study has finished."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gracecl.errors import UserError
from gracecl.files import read_sealed, write_sealed
from gracecl.lab import cli, paper
from gracecl.lab.report import Run, find_runs
from gracecl.lab.report.beside_paper import row_of
from gracecl.lab.report.runs import measure
from gracecl.lab.studies import accuracy_by_bytes, beside_paper, page
from gracecl.lab.studies.results import Results
from gracecl.lab.studies.reuse import SAME_NUMBERS
from gracecl.lab.studies.study import SCALES, StudyFile, names, on_digits, read
from gracecl.registry.plugins import in_use
from test_study import final, run_of

DOCS = (Path(__file__).parent.parent / "docs" / "studies.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"```toml\n(.*?)```", DOCS, flags=re.DOTALL)[0]
RENDERER = re.findall(r"```python\n(.*?)```", DOCS, flags=re.DOTALL)[0]
EVERY = [(name, scale) for name in names() for scale in StudyFile(name).scales()]
ALONE = ["--jobs", "1", "--threads", "1"]


def study(*words: str | Path) -> int:
    return cli.call(["study", *map(str, words), *ALONE])


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


# Those of the package.


@pytest.mark.exhaustive
def test_the_paper_s_tables_have_every_scale() -> None:
    own = {
        "mini",
        "readings",
        "regimes",
        "record",
        "feedback",
        "protocols",
        "unmarked",
        "equal-cost",
        "frontier",
        "feedback-on-best",
    }
    assert {name for name, scale in EVERY if scale == "full"} == set(names()) - own - {"protocol", "pretrained"}
    assert {(name, scale) for name, scale in EVERY if name in own} == {(name, "mini") for name in own}
    for table in paper.tables()["tables"]:
        asked = {(run.paper or {}).get("table") for name in names() for run in read(name).plan(seeds=[0])}
        assert table in asked, "every table of the paper has a study"


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_every_run_of_a_study_is_one_and_stands_beside_what_the_paper_has(name: str, scale: str) -> None:
    runs = read(name, scale).plan(seeds=[0, 1])
    assert len({run.config.folder(Path()) for run in runs}) == len(runs)
    for run in runs:
        if run.paper is not None:
            assert paper.records(**run.paper), f"the paper has nothing for {run.paper}"
    if scale == "full" and name in ("accuracy", "forgetting", "memory-efficiency", "cub200", "training-cost"):
        beside = {(row_of(run.config.method), *sorted((run.paper or {}).items())) for run in runs}
        for run in runs:
            assert run.paper is not None
            for record in paper.records(**run.paper):
                assert (record["method"], *sorted(run.paper.items())) in beside, "every row of the paper has a run"


@pytest.mark.parametrize("name", ["accuracy", "forgetting"])
def test_reduced_scales_are_those_of_finished_runs(name: str) -> None:
    """Scale mini is the study mini's setting, so that its runs are taken over."""
    mini = {run.config for run in read("mini").plan(seeds=[0])}
    runs = read(name, "mini").plan(seeds=[0])
    assert {run.config for run in runs if "cifar100" in run.config.stream} < mini
    rows = {row_of(run.config.method) for run in runs}
    assert rows >= set(paper.accuracies())
    small = read(name, "small").plan()
    assert {(run.config.stream, run.config.memory, run.config.net, run.config.seed) for run in small} == {
        ("split-cifar100(size=16, batch=20)", 1000, "resnet18(width=8)", 0)
    }
    assert len(small) == 20 + 2


def test_both_protocols_of_tiny_imagenet_stand_beside_the_same_numbers() -> None:
    runs = [run for run in read("accuracy", "full").plan(["mose()"], [0]) if "tiny" in run.config.stream]
    assert {(run.config.stream, run.config.memory) for run in runs} == {
        (f"split-tinyimagenet(tasks={tasks})", memory) for tasks in (10, 100) for memory in (2000, 4000, 10000)
    }


def test_full_scale_has_the_options_of_the_paper_s_frame() -> None:
    [run] = [run for run in read("accuracy").plan(["er()"], [0]) if run.config.memory == 5000]
    assert run.config.net == "resnet18(width=64)"
    assert "recall_per_class=7" in run.config.method
    assert read("accuracy").scale == "full"


FOLDERS = {
    ("mini", "mini"): (94, "1be6c2b818ac9020"),
    ("accuracy", "small"): (22, "7c9482ada25b7626"),
    ("readings", "mini"): (156, "5cc96eef92007412"),
    ("regimes", "mini"): (87, "5645a08b028f34a0"),
    ("record", "mini"): (129, "5df036816609d8c2"),
    ("feedback", "mini"): (24, "fa336f758d203381"),
}
"""runs, and a digest of their folders; a change here leaves finished runs of before behind"""


@pytest.mark.parametrize(("name", "scale"), FOLDERS)
def test_a_study_has_the_runs_it_had(name: str, scale: str) -> None:
    """Else finished runs would not be found again."""
    folders = sorted(str(run.config.folder(Path())) for run in read(name, scale).plan())
    assert (len(folders), hashlib.sha256("\n".join(folders).encode()).hexdigest()[:16]) == FOLDERS[name, scale]


# One of the user's own.


@pytest.mark.slow
def test_the_study_in_the_docs_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, EXAMPLE)
    assert study(file, "--out", tmp_path / "out", "--seeds", "0") == 0
    content = json.loads((tmp_path / "out" / "mine.json").read_text())
    assert content["finished"] == content["planned"] == 3 + 6 + 1
    assert content["scale"] == "own"
    assert {line["setting"] for line in content["paired"]} == {
        f"split-digits(size=8, classes='0-3', tasks=2, batch=20), mlp(width=16, depth=4), {memory}" for memory in (10, 20, 40)
    }
    printed = capsys.readouterr().out
    assert "Scale own: that of the study's file." in printed
    assert "**Scale own: that of the study's file.**" in (tmp_path / "out" / "mine.md").read_text()


def test_blocks_are_products_and_say_only_what_they_change(tmp_path: Path) -> None:
    found = read(str(write(tmp_path, EXAMPLE)))
    runs = [(run.config.seed, run.config.memory, run.config.method, run.config.taps) for run in found.plan()]
    methods = ["sgd()", "er()", "derpp()"]
    of_a_seed = [(20, None, method) for method in methods]
    of_a_seed += [(memory, None, method) for memory in (10, 40) for method in methods]
    wanted = [
        (seed, memory, method, taps)
        for seed in range(3)
        for memory, taps, method in of_a_seed + ([(20, 4, "er()")] if seed < 2 else [])
    ]
    assert runs == wanted
    asked = [(run.config.method, run.config.taps) for run in found.plan(["er", "mir()"], [0])]
    assert asked.count(("mir()", None)) == 3
    assert [method for method, taps in asked if taps == 4] == ["er()"], "a block with methods of its own has those among them"


def test_a_study_begins_from_another(tmp_path: Path) -> None:
    file = write(tmp_path, 'base = "accuracy"\nabout = "x"\nmethods = ["er(n_recall=5)"]\nshow = []\n[mini]\nmemory = 50\n')
    mini, small = read(str(file), "mini"), read(str(file), "small")
    assert (mini.name, mini.about, mini.show) == ("mine-mini", "x", ())
    assert {run.config.memory for run in mini.plan()} == {50}
    assert [(run.config.method, run.config.stream) for run in small.plan()] == [
        ("er(n_recall=5)", "split-cifar100(size=16, batch=20)")
    ]
    again = write(tmp_path, 'base = "mine.toml"\nseeds = "7"\n', "again.toml")
    assert [run.config.seed for run in read(str(again), "small").plan()] == [7]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("memry = 3", "'memry' is no key; did you mean 'memory'?"),
        ('methods = ["ers"]', "unknown method 'ers'; did you mean 'er'?"),
        ('methods = "er()"', "methods must be a list, not 'er()'"),
        ("methods = [3]", 'methods are texts such as "er()", not 3'),
        ("methods = []", "methods is an empty list; name at least one, or leave the key out"),
        ("seeds = 3", "seeds must be text in quotes, not 3"),
        ('seeds = "x"', "cannot read seeds 'x'"),
        ('methods = ["er()"]\nmemory = "many"', "memory must be a whole number, not 'many'"),
        ('methods = ["er()"]\nmemory = []', "memory is an empty list"),
        ('methods = ["er()"]\nstream = "split-nothing"', "unknown dataset 'nothing'"),
        ('methods = ["er()"]\nnet = "resnet81"', "unknown net 'resnet81'; did you mean 'resnet18'?"),
        ('methods = ["er()"]\nshow = ["pared"]', "show has no 'pared'; did you mean 'paired'?"),
        ('methods = ["er()"]\nshow = ["paired"]', "show 'paired' compares with a control; add for example control"),
        ('methods = ["er()"]\npaper.table = "main"', "paper has no table 'main'"),
        ('methods = ["er()"]\n[[runs]]\nabout = "x"', "[[runs]] 1 'about' is no key"),
        ('methods = ["er()"]\nruns = [3]', "[[runs]] 1 must be a table"),
        ('methods = ["er()"]\n[mini]\nbase = "x"', "[mini] 'base' is no key"),
        ('stream = "split-digits"', "names no methods; add for example methods"),
        ('base = "minni"', "there is no study 'minni'; did you mean 'mini'?"),
        ('base = "mine.toml"', "base leads back to the file itself; leave it out"),
        ('base = "other.toml"', "there is no file"),
        ("methods = [", "is not a TOML file"),
    ],
)
def test_a_mistake_in_the_file_is_a_sentence_that_names_it(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, text)
    assert study(file, "--out", tmp_path / "out") == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert sentence in told.err
    assert "mine.toml" in told.err or "minni" in told.err or "other.toml" in told.err
    assert told.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]


def test_files_and_scales_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study(tmp_path / "none.toml") == 2
    assert f"there is no file {tmp_path / 'none.toml'}; name a study's TOML file, or one of: ablation," in capsys.readouterr().err
    assert study("readings", "--scale", "full") == 2
    assert "study readings has the scale mini, not 'full'; leave --scale out" in capsys.readouterr().err
    assert study(write(tmp_path, EXAMPLE), "--scale", "mini") == 2
    assert "mine.toml has no scales, not 'mini'" in capsys.readouterr().err


# Runs are made once.

SMALL = """
methods = ["sgd()"]
seeds = "0"
stream = "split-digits(size=8, classes='0-3', tasks=2, batch=20)"
net = "mlp(width=16, depth=4)"
memory = 20
"""


@pytest.mark.slow
def test_a_finished_run_of_another_study_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        write(tmp_path, SMALL, "first.toml"),
        write(tmp_path, SMALL.replace('"sgd()"', '"sgd()", "er()"'), "second.toml"),
    )
    out = tmp_path / "results"
    assert study(first, "--out", out / "first") == 0
    capsys.readouterr()
    assert study(second, "--out", out / "second") == 0
    assert f"1 finished runs are taken from {out / 'first'}" in capsys.readouterr().out
    made = [file.parent for file in (out / "second").rglob("config.json")]
    assert ["/er/" in str(folder) for folder in made] == [True]
    assert {run.config["method"] for run in find_runs(out / "second")} == {"sgd()", "er()"}, "a report is about both"
    content = json.loads((out / "second" / "second.json").read_text())
    assert (content["finished"], content["taken_from"]) == (2, {str(out / "first"): 1})
    assert f"1 of `{out / 'first'}`" in (out / "second" / "second.md").read_text()

    [run] = find_runs(out / "first")
    config = read_sealed(run.path / "config.json")
    for version, own in {"0.1.0": 1, "0.0.1": 2}.items():
        write_sealed(run.path / "config.json", config | {"versions": config["versions"] | {"gracecl": version}})
        assert study(second, "--out", out / "second") == 0
        assert len(list((out / "second").rglob("config.json"))) == own, "only runs of versions with the same numbers are taken"


def test_committed_runs_are_of_versions_whose_numbers_hold() -> None:
    files = sorted((Path(__file__).parents[1] / "results").glob("*/runs.jsonl"))
    versions = {version for file in files for version in re.findall(r'"versions":{"gracecl":"([^"]+)"', file.read_text())}
    assert files
    assert versions <= set(SAME_NUMBERS)


def test_the_scale_is_on_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, f"[mini]{SMALL}[small]{SMALL}")
    assert study(file, "--scale", "mini") == 0
    sentence = f"Scale mini: {SCALES['mini']}."
    assert sentence in capsys.readouterr().out
    page = Path("results/mine-mini/mine-mini.md")
    assert page.read_text().startswith(f"# Study mine-mini\n\n**{sentence}**\n")
    content = json.loads(page.with_suffix(".json").read_text())
    assert content["scale"] == "mini"
    assert content["command"] == f"gracecl study {file} --seeds 0 --scale mini"
    assert Results("x", "mini", "", [], [], tmp_path).titled("Against er()") == "Against er() (scale mini)"


# Renderers of one's own.


def test_a_renderer_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of docs/studies.md. Runs do not depend on it: an edit makes another page of the same runs."""
    file, plugin = write(tmp_path, SMALL + 'show = ["worst_seed"]\n'), write(tmp_path, RENDERER, "worst.py")
    out = tmp_path / "out"
    assert study(file, "--out", out) == 2
    there_are = "accuracies, accuracy_by_bytes, against_paper, beside_paper, cost, entropy, frontier, mechanism, paired, rankings"
    assert f"show has no 'worst_seed' (there are: {there_are}; --plugin names a file" in capsys.readouterr().err
    assert not out.exists()

    assert study(file, "--out", out, "--plugin", plugin) == 0
    runs = find_runs(out)
    assert all(run.plugins == [] and "plugin_code" not in run.config for run in runs)
    [lowest] = [measure(run, run.rule)["acc"] for run in runs]
    assert f"| method | lowest acc |\n| --- | ---: |\n| `sgd()` | {lowest:.1f} |" in (out / "mine.md").read_text(encoding="utf-8")
    assert json.loads((out / "mine.json").read_text())["worst_seed"] == {"sgd()": pytest.approx(lowest)}

    write(tmp_path, RENDERER.replace("lowest acc", "lowest"), "worst.py")
    assert study(file, "--out", out, "--plugin", plugin, "--as-is") == 0
    assert "| method | lowest |" in (out / "mine.md").read_text(encoding="utf-8")
    assert len(find_runs(out)) == 1


def test_a_plugin_with_a_method_and_a_renderer_belongs_to_its_runs(tmp_path: Path) -> None:
    method = (
        "from gracecl.methods.er import ER\nfrom gracecl.registry import methods\n\n@methods.register('mine')\nclass M(ER): pass\n"
    )
    both = write(tmp_path, RENDERER + method, "both.py")
    alone = write(tmp_path, RENDERER.replace("worst_seed", "other"), "alone.py")
    with in_use([str(both), str(alone)]) as code:
        assert code.of_runs == (str(both),)
    with in_use([str(write(tmp_path, "", "empty.py"))]) as code:
        assert code.of_runs == code.names, "what registers nothing may change runs in another way"


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("'## Text'", "the renderer 'own' returned '## Text'; return a list of gracecl.lab.studies.results.Section"),
        ("[Section('seeds', '', 1)]", "a section of the page has the key 'seeds', which page.json has already; give it another"),
    ],
)
def test_what_a_renderer_returns_is_checked(returned: str, sentence: str, tmp_path: Path) -> None:
    text = "from gracecl.registry import renderers\nfrom gracecl.lab.studies.results import Section\n"
    plugin = write(tmp_path, f"{text}\n@renderers.register('own')\ndef own(results): return {returned}\n", "own.py")
    results = Results("page", "own", "", [final("er()", 35.0)], [None], tmp_path)
    with in_use([str(plugin)]):
        asked = replace(read("mini"), name="page", show=("own",))
        with pytest.raises(UserError, match=re.escape(sentence)):
            page.write(asked, results, page.Made("", 1, {}))
    assert not (tmp_path / "page.md").exists()


# Beside the paper's tables.


def test_ours_the_paper_s_and_the_difference() -> None:
    where = {"table": "ablation", "dataset": "Split CIFAR-100", "buffer_size": 1000}
    runs = [final("grace(mose())", 40.0), final("grace(mose())", 42.0, seed=1), final("grace(mose(), adaptive=False)", 30.0)]
    runs.append(final("mose()", 35.0))
    runs = [at(run, f"{run.config['method']} {run.config['seed']}") for run in runs]
    beside = [{**where, "variant": "full"}] * 2 + [{**where, "variant": "without_adaptive_training"}]
    found = beside_paper.lines(runs, [*beside, {**where, "table": "main_accuracy"}])
    values = [
        (line.row, line.group.label, value.ours.mean, value.paper, value.difference)
        for line in found
        for value in line.values.values()
    ]
    assert values == [
        ("GRACE", "grace(mose())", 41.0, 39.4, pytest.approx(1.6)),
        ("MOSE", "mose()", 35.0, 37.4, pytest.approx(-2.4)),
        ("GRACE", "grace(mose(), adaptive=False)", 30.0, 38.9, pytest.approx(-8.9)),
    ]
    text = beside_paper.markdown(found)
    assert "| `grace(mose())` | GRACE | 2 | 41.0 ± 1.4 | 39.4 | +1.6 |" in text
    assert "| `mose()` | MOSE | 1 | 35.0 | 37.4 ± 0.3 | -2.4 |" in text


def test_the_area_under_the_any_time_curve_has_a_column_where_it_was_measured(tmp_path: Path) -> None:
    """That is where a run was evaluated at equal distances: 30 % and 50 % of all images, between marks of 20 % and 40 %."""
    plain = run_of("slda()", 0, [[20.0], [20.0, 40.0]])
    evals = [
        plain.evals[0]
        | {"step": step, "accuracy": {"linear_last": [value]}, "task_images": [10], "task_end": end, "regular": not end}
        for step, (value, end) in enumerate(((30.0, False), (20.0, True), (50.0, False), (40.0, True)), 1)
    ]
    curve = replace(plain, config=plain.config | {"stream": "si-blurry-digits"}, evals=evals)
    [section] = accuracy_by_bytes.sections(Results("x", "own", "", [plain, curve], [None, None], tmp_path))
    without, with_area = section.text.split("si-blurry-digits")
    assert "a_auc" not in without
    assert "| a_auc ↑ |" in with_area
    [line] = next(lines for setting, lines in section.data.items() if "si-blurry" in setting)
    assert line["a_auc"] == 40.0


def test_forgetting_is_the_paper_s_definition() -> None:
    where = {"table": "main_forgetting", "dataset": "Split CIFAR-100", "buffer_size": 1000}
    [line] = beside_paper.lines([final("mose()", 35.0)], [where])
    assert list(line.values) == ["AF"]
    assert beside_paper.heading("AF") == "forgetting_mose (AF) ↓"


@pytest.mark.parametrize(("table", "best_first"), [("main_forgetting", ["er()", "mose()"]), ("main_accuracy", ["mose()", "er()"])])
def test_the_best_stands_first_in_a_table_of_the_paper(table: str, best_first: list[str]) -> None:
    """The least forgetting, the highest accuracy; what was not measured comes last."""
    where = {"table": table, "dataset": "Split CIFAR-100", "buffer_size": 1000}
    runs = [run_of("mose()", 0, [[90.0], [50.0, 90.0]]), run_of("er()", 0, [[50.0], [40.0, 40.0]])]
    found = beside_paper.lines(runs, [where] * 2)
    assert [line.group.method for line in found] == best_first


def at(run: Run, place: str) -> Run:
    """In a folder of its own."""
    return Run(Path(place), run.config, run.steps, run.evals, run.tasks, run.timing, finished=run.finished)


@pytest.mark.slow
def test_every_renderer_shows_something(tmp_path: Path) -> None:
    """Through the command, on the digits."""
    for name, keys in (
        ("accuracy", {"beside_paper", "against_paper"}),
        ("entropy", {"entropy"}),
        ("training-cost", {"cost", "beside_paper"}),
        ("pretrained", {"accuracy_by_bytes"}),
    ):
        out = tmp_path / name
        assert study(name, "--quick", "--seeds", "0", "--out", out) == 0
        content = json.loads((out / f"{name}.json").read_text())
        assert content.keys() >= keys
        assert content["scale"] == "quick"
    cost = json.loads((tmp_path / "training-cost" / "training-cost.json").read_text())["cost"]
    assert all(line["peak_memory"] > 100 and line["parameters"] > 0 for line in cost)
    by_bytes = json.loads((tmp_path / "pretrained" / "pretrained.json").read_text())["accuracy_by_bytes"]
    assert all(line["megabytes"] > 0 and line["seeds"] == 1 for lines in by_bytes.values() for line in lines)
    entropy = json.loads((tmp_path / "entropy" / "entropy.json").read_text())["entropy"]
    assert {method: len(values["layers"]) for method, values in entropy.items()} == {"mose()": 4, "grace(mose())": 4}
    assert (tmp_path / "entropy" / "entropy-entropy.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("expression", "quick"),
    [
        ("split-cifar100(tasks=10, per_class=100)", "split-digits(OF_DIGITS)"),
        ("si-blurry-cifar100(tasks=5, size=16, blur=20)", "si-blurry-digits(OF_DIGITS)"),
        ("domain-cifar100(kind='corrupt', tasks=5, again=False)", "domain-digits(OF_DIGITS, kind='corrupt', again=False)"),
        ("noisy(longtail-cifar100(20, tasks=5), rate=0.4)", "noisy(longtail(split-digits(OF_DIGITS), 20), rate=0.4)"),
        ("delayed(split-cifar100(tasks=10), 5)", "delayed(split-digits(OF_DIGITS), 5)"),
        ("delayed(split-cifar100(tasks=10), 50)", "split-digits(OF_DIGITS)"),
        ("split-features(path='of.feat', tasks=10)", "split-digits(OF_DIGITS)"),
        ("of-a-plugin-cifar100", "split-digits(OF_DIGITS)"),
    ],
)
def test_quick_streams_are_of_the_same_families(expression: str, quick: str) -> None:
    assert on_digits(expression) == quick.replace("OF_DIGITS", "size=8, classes='0-3', tasks=2, batch=20")
