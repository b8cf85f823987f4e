"""The command as it is typed: its help, its lists, its progress, its plugins, and a sentence for every mistake."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commands import gracecl
from gracecl import checkpoint, registry
from gracecl.lab import cli
from gracecl.lab.cli.main import VERBS
from gracecl.lab.runs import watch
from gracecl.registry import methods
from terminal import terminal

SMALL = {
    "--stream": "split-digits(size=8, classes='0-3', tasks=2)",
    "--net": "mlp(width=8, depth=4)",
    "--memory": "20",
    "--steps": "3",
    "--device": "cpu",
}


@pytest.fixture(autouse=True)
def nobody_s_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRACECL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(out: Path, *methods: str, **changed: str) -> tuple[int, str, str]:
    options = SMALL | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return gracecl("run", *methods, *(word for pair in options.items() for word in pair), "--out", out)


def one_sentence(code: int, out: str, err: str) -> str:
    assert code == 2, f"exit code {code}: {err}"
    assert out == ""
    assert err.startswith("gracecl: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, f"more than a line:\n{err}"
    return err.removeprefix("gracecl: ").strip()


# Mistakes.

METHOD_MISTAKES = {
    "ers": "unknown method 'ers'; did you mean 'er'?",
    "gracee(er)": "unknown method 'gracee'; did you mean 'grace'?",
    "grace(ers)": "did you mean 'er'?",
    "nothing_like_it": "'gracecl list methods'",
    "er(n_recal=3)": "er has no option 'n_recal'; did you mean 'n_recall'?",
    "er(n_recall='many')": "n_recall must be a whole number, not 'many'",
    "er(n_recall=1.5)": "n_recall must be a whole number, not 1.5",
    "er(reduction='sums')": "one of concat, sum_of_means",
    "er(1, 'concat', 1, 'linear', 3, 5)": "at most 5 arguments",
    "er(1, n_recall=2)": "n_recall",
    "er(**options)": "'**'",
    "er(n_recall=some)": "some",
    "grace(er, beta='x')": "beta must be a number, not 'x'",
    "grace(3)": "wraps a method",
    "er + 3": "only methods can be added",
    "er + er": "on the right of + stand additions",
    "derpp + sgd": "on the right of + stand additions",
    "grace(er(": "cannot read the expression 'grace(er('",
    "er)": "cannot read the expression 'er)'",
    "er er": "cannot read the expression",
    "import os": "cannot read the expression",
    "__import__('os')": "unknown method '__import__'",
    "er()()": "er()()",
    "": "cannot read the expression ''",
    "3": "3",
    "'er'": "er",
}


@pytest.mark.parametrize("expression", METHOD_MISTAKES)
def test_a_mistake_in_a_method_is_one_sentence(expression: str, tmp_path: Path) -> None:
    assert METHOD_MISTAKES[expression] in one_sentence(*run(tmp_path, expression))
    assert not list(tmp_path.rglob("checkpoint.safetensors"))


MISTAKES = [
    ("net", "resnet19", "unknown net 'resnet19'; did you mean 'resnet18'?"),
    ("net", "mlp(widht=3)", "mlp has no option 'widht'; did you mean 'width'?"),
    ("net", "mlp(width='wide')", "width"),
    ("net", "mlp(width=2.5)", "width"),
    ("net", "mlp(width=None)", "width"),
    ("net", "mlp(width=0)", "at least 1"),
    ("net", "mlp(taps=3)", "taps"),
    ("net", "resnet18(width=-1)", "at least 1"),
    ("net", "mlp + mlp", "mlp + mlp"),
    ("net", "mlp(", "cannot read the expression 'mlp('"),
    ("net", "mlp(width=[8])", "width"),
    ("taps", "9", "--taps"),
    ("taps", "0", "taps"),
    ("taps", "-1", "taps"),
    ("stream", "split-digit", "unknown dataset 'digit'; did you mean 'digits'?"),
    ("stream", "splot-cifar100", "unknown stream"),
    ("stream", "splot-cifar100", "did you mean 'split-cifar100'?"),
    ("stream", "split", "unknown stream 'split'"),
    ("stream", "digits", "unknown stream 'digits'"),
    ("stream", "split-digits(taks=2)", "split has no option 'taks'; did you mean 'tasks'?"),
    ("stream", "split-digits(tasks=99)", "10 classes cannot make 99 tasks"),
    ("stream", "split-digits(tasks=0)", "cannot make 0 tasks"),
    ("stream", "split-digits(tasks='five')", "tasks"),
    ("stream", "split-digits(tasks=2.5)", "tasks"),
    ("stream", "split-digits(batch=0)", "batch"),
    ("stream", "split-digits(batch='big')", "batch"),
    ("stream", "split-digits(batch=2.5)", "batch"),
    ("stream", "split-digits(epochs=0)", "epochs"),
    ("stream", "split-digits(order='random')", "order"),
    ("stream", "split-digits(seed=3)", "seed"),
    ("stream", "split-digits(size=0)", "size"),
    ("stream", "split-digits(size=-8)", "size"),
    ("stream", "split-digits(size='large')", "size"),
    ("stream", "split-digits(classes='0-99')", "digits has 0 … 9"),
    ("stream", "split-digits(classes='all')", "cannot read classes 'all'"),
    ("stream", "split-digits(classes=[0, 0])", "twice"),
    ("stream", "split-digits(classes=3)", "classes"),
    ("stream", "split-digits(classes='')", "classes"),
    ("augment", "taus", "unknown augmentation 'taus'; did you mean 'tau'?"),
    ("normalise", "halve", "unknown normalisation 'halve'; did you mean 'half'?"),
    ("optimizer", "adams", "unknown optimizer 'adams'; did you mean 'adam'?"),
    ("optimizer", "adam(lrr=1)", "adam has no option 'lrr'; did you mean 'lr'?"),
    ("optimizer", "adam(lr=-1)", "learning rate"),
    ("optimizer", "sgd(lr=-0.1)", "learning rate"),
    ("optimizer", "adam(lr='fast')", "lr"),
    ("optimizer", "adam(lr=None)", "lr"),
    ("optimizer", "sgd(momentum=-1)", "momentum"),
    ("optimizer", "adam(params=3)", "params"),
    ("memory", "-1", "memory must be at least 0, not -1"),
    ("steps", "0", "the run: steps must be at least 1 or None, not 0"),
    ("steps", "-3", "steps must be at least 1 or None, not -3"),
    ("seeds", "x", "seeds 'x'"),
    ("seeds", "", "seeds ''"),
    ("seeds", "3-1", "seeds"),
    ("seeds", "0,,1", "seeds"),
    ("seeds", "1.5", "seeds '1.5'"),
    ("eval_every", "-1", "eval_every must be at least 0, not -1"),
    ("checkpoint_every", "0", "checkpoint_every must be at least 1, not 0"),
    ("device", "gpu", "unknown device 'gpu'"),
    ("device", "cuda:x", "unknown device 'cuda:x'"),
    ("device", "", "unknown device ''"),
    ("device", "meta", "meta"),
    ("plugin", "no_such_module", "cannot import the plugin 'no_such_module'"),
    ("plugin", "no_such_file.py", "cannot import the plugin 'no_such_file.py'"),
    ("plugin", "", "cannot import the plugin ''"),
]


@pytest.mark.parametrize(("option", "value", "part"), MISTAKES)
def test_a_mistake_in_an_option_is_one_sentence(option: str, value: str, part: str, tmp_path: Path) -> None:
    assert part in one_sentence(*run(tmp_path, "er", **{option: value}))
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    assert "this PyTorch sees no GPU; use --device cpu" in one_sentence(*run(tmp_path, "er", device="cuda"))


def test_a_data_set_that_is_not_there_is_one_sentence_that_says_how_to_get_it(tmp_path: Path) -> None:
    sentence = one_sentence(*run(tmp_path, "er", stream="split-cifar100", data=str(tmp_path / "nowhere"), defaults="none"))
    assert "gracecl data get cifar100" in sentence
    assert str(tmp_path / "nowhere") in sentence


@pytest.mark.parametrize("below", ["", "runs"])
def test_a_file_where_the_folder_should_be_is_one_sentence(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "choose another --out" in one_sentence(*run(tmp_path / "file" / below, "er"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "text",
    ["import no_such_module\n", "def f(:\n", "1 / 0\n", "raise SystemExit(0)\n", "import sys; sys.exit('bye')\n", "assert False\n"],
)
def test_a_plugin_that_cannot_be_imported_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert "cannot import the plugin" in one_sentence(*run(tmp_path, "er", plugin=str(tmp_path / "mine.py")))


def test_no_method_is_one_sentence(tmp_path: Path) -> None:
    assert "name at least one method" in one_sentence(*run(tmp_path))


def test_one_mistake_among_several_methods_stops_before_any_is_trained(tmp_path: Path) -> None:
    one_sentence(*run(tmp_path, "er", "ers"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "er", "--stepz", "3"],
        ["run", "er", "--precision", "fp8"],
        ["run", "er", "--memory", "x"],
        ["runn"],
        ["list", "x"],
        [],
    ],
)
def test_an_unknown_flag_verb_or_choice_is_told_without_a_traceback(arguments: list[str]) -> None:
    code, out, err = gracecl(*arguments)
    assert code == 2
    assert out == ""
    assert err
    assert "Traceback" not in err


def test_a_report_of_nothing_is_one_sentence(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert str(folder) in one_sentence(*gracecl("report", folder))


# Several passes.

MORE = {"once": [], "thrice": ["--epochs", "3"]}


@pytest.mark.slow
def test_epochs_are_passes_over_each_task_that_store_nothing_again(tmp_path: Path) -> None:
    """A method of offline training, one of online training, and GRACE, over each task three times."""
    words = [
        "--stream",
        "split-digits(size=8, classes='0-3', tasks=2, batch=40)",
        "--net",
        "mlp(width=8, depth=4)",
        "--memory",
        "20",
    ]
    words += ["--jobs", "1", "--device", "cpu"]
    for name, more in MORE.items():
        code, _, err = gracecl("run", "er", "lucir", "grace", *words, *more, "--out", tmp_path / name)
        assert code == 0, err
    folders = {
        name: {file.parent.parent.parent.name: file.parent for file in (tmp_path / name).rglob("config.json")} for name in MORE
    }
    assert folders["once"].keys() == folders["thrice"].keys() == {"er", "lucir", "grace-mose"}
    for method in folders["once"]:
        once, thrice = (json.loads((folders[name][method] / "config.json").read_text()) for name in MORE)
        assert thrice["stream"] == once["stream"][:-1] + ", epochs=3)"
        assert thrice["stream_steps"] == 3 * once["stream_steps"]
        states = [checkpoint.load(folders[name][method] / "checkpoint.safetensors")["trainer"] for name in MORE]
        offered, again = (state["engine"]["memories"]["replay"]["offered"] for state in states)
        assert offered == again > 500, "later passes offer no image to memory"


def test_epochs_are_given_once(tmp_path: Path) -> None:
    sentence = one_sentence(*run(tmp_path, "er", stream="split-digits(epochs=2)", epochs="3"))
    assert "gives epochs already; leave that or --epochs out" in sentence
    assert "epochs must be at least 1" in one_sentence(*run(tmp_path, "er", epochs="0"))


# Help and lists.


def test_help_and_lists_answer_without_importing_torch() -> None:
    """`--help` is there in under half a second: it costs the interpreter and the parser, and no more."""
    program = (
        "import sys\n"
        "from gracecl.lab.cli import call\n"
        "for words in sys.argv[1:]:\n"
        "    try: call(words.split())\n"
        "    except SystemExit as leave: assert not leave.code\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'matplotlib', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    asked = ["--help", "run --help", "list methods", "list streams", "list nets", "list datasets"]
    answer = subprocess.run([sys.executable, "-c", program, *asked], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.returncode == 0, answer.stderr
    for verb, function in VERBS.items():
        assert f"  {verb:<8} {function.__doc__.splitlines()[0]}\n" in answer.stdout
    assert "--checkpoint-every" in answer.stdout
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 2, f"six answers took {seconds:.1f} s of computing"


@pytest.mark.parametrize(
    ("words", "known"),
    [("methods --describe", registry.methods), ("nets", registry.nets), ("datasets", registry.datasets)],
)
def test_list_prints_every_registered_name_with_its_line(words: str, known: registry.Registry) -> None:
    code, out, err = gracecl("list", *words.split())
    assert (code, err) == (0, "")
    printed = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert list(printed) == known.names()
    for name in known.names():
        described = known.get(name).__doc__.strip().split("\n")[0]
        assert printed[name] == described


def test_list_methods_prints_a_table_of_what_they_need_and_cost() -> None:
    code, out, err = gracecl("list", "methods")
    assert (code, err) == (0, "")
    header, *lines = out.splitlines()
    assert header.split() == ["method", "year", "family", "marks", "grace", "keeps", "images", "paper"]
    cells = [line.split() for line in lines[: len(registry.methods.names())]]
    assert [row[0] for row in cells] == registry.methods.names()
    assert ["mir", "2019", "select", "–", "yes", "images", "596/84", "16.0"] in cells
    assert ["bic", "2019", "teacher", "needs", "yes", "+", "net", "148/74", "21.2"] in cells
    assert "--describe and --markdown are for methods" in one_sentence(*gracecl("list", "nets", "--describe"))


def test_list_streams_prints_every_family_and_the_data_sets() -> None:
    code, out, _ = gracecl("list", "streams")
    assert code == 0
    printed = {line.split()[0] for line in out.splitlines() if line}
    assert {"split-DATA", "iid-DATA", "i-blurry-DATA", "si-blurry-DATA", "gaussian-DATA", "noisy-DATA"} <= printed
    assert "cifar10, cifar100, cub200, digits" in out


def test_stream_show_writes_a_picture(tmp_path: Path) -> None:
    place = tmp_path / "stream.svg"
    code, out, err = gracecl("stream", "show", "noisy(i-blurry-digits(tasks=5, size=8), 0.2)", "--out", str(place))
    assert (code, err) == (0, "")
    assert out == (
        "Stream(noisy(i-blurry) of digits: no task marks, 10 classes, 146 steps, 1438 images, seed 0)\n"
        f"from 32 batches on, labels alone do not say what comes: --near-future 32\n{place}\n"
    )
    assert place.read_text().startswith("<?xml")
    assert "ends in none of them" in one_sentence(*gracecl("stream", "show", "split-digits(size=8)", "--out", "stream.gif"))
    assert "unknown stream 'i_blurie_digits'" in one_sentence(*gracecl("stream", "show", "i-blurie-digits"))


def test_data_check_says_that_the_digits_are_complete_and_suggests_a_name_for_unknown_sets() -> None:
    assert gracecl("data", "check", "digits") == (0, "digits: complete\n", "")
    for action in ("check", "get"):
        assert "unknown dataset 'digit'; did you mean 'digits'?" in one_sentence(*gracecl("data", action, "digit"))
    assert "needs no download" in one_sentence(*gracecl("data", "get", "digits"))


def test_data_check_of_a_missing_set_says_what_is_missing(tmp_path: Path) -> None:
    assert "cifar-10-batches-py" in one_sentence(*gracecl("data", "check", "cifar10", "--data", tmp_path))


# Plugins.

PLUGIN = '''from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from gracecl.functional.losses import cross_entropy
from gracecl.methods.base import Method
from gracecl.registry import methods


@methods.register("sharp-er")
@dataclass(eq=False, repr=False)
class Sharp(Method):
    """Fine-tuning with sharpened logits."""

    sharpness: float = 2.0
    side: Literal["left", "right"] = "left"

    def losses(self, out, batch):
        return {"ce/all": cross_entropy(self.sharpness * out.logits, batch.y)}
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    return file


@pytest.mark.slow
def test_a_user_s_method_runs_alone_and_inside_grace(plugin: Path, tmp_path: Path) -> None:
    assert PLUGIN.count("\n") < 20
    code, out, err = run(tmp_path / "out", "sharp-er(sharpness=3)", "grace(sharp_er)", plugin=str(plugin))
    assert code == 0, err
    configs = {json.loads(file.read_text())["method"]: file.parent for file in tmp_path.rglob("config.json")}
    assert configs.keys() == {"sharp_er(sharpness=3)", "grace(sharp_er())"}
    for method, folder in configs.items():
        assert method in out
        assert json.loads((folder / "summary.json").read_text())["finished"]
    last = (configs["grace(sharp_er())"] / "metrics.jsonl").read_text().splitlines()[2]
    assert {"ce/all", "entropy"} <= json.loads(last)["rows"].keys()
    assert "side must be one of left, right" in one_sentence(*run(tmp_path, "sharp_er(side='up')", plugin=str(plugin)))


def test_a_user_s_method_is_listed_beside_the_others(plugin: Path) -> None:
    assert re.search(r"^sharp_er +–", gracecl("list", "methods", "--plugin", plugin)[1], flags=re.MULTILINE)
    code, out, _ = gracecl("list", "methods", "--describe", "--plugin", plugin)
    assert code == 0
    assert re.search(r"^sharp_er +Fine-tuning with sharpened logits\.$", out, flags=re.MULTILINE)
    assert re.search(r"^er ", out, flags=re.MULTILINE)


@pytest.mark.slow
def test_an_edited_plugin_makes_another_run_and_does_not_continue_the_old_one(plugin: Path, tmp_path: Path) -> None:
    """The same command after an edit gives the new code's numbers; a run that had begun says that its code is gone."""
    options = {"plugin": str(plugin), "checkpoint_every": "1"}
    assert run(tmp_path / "out", "sharp_er", **options)[0] == 0
    [first] = (tmp_path / "out").rglob("metrics.jsonl")
    numbers = first.read_bytes()
    plugin.write_text(PLUGIN.replace("self.sharpness * out", "9 * self.sharpness * out"))
    assert run(tmp_path / "out", "sharp_er", **options)[0] == 0
    assert first.read_bytes() == numbers
    [second] = set((tmp_path / "out").rglob("metrics.jsonl")) - {first}
    assert second.read_bytes() != numbers
    (first.parent / "summary.json").unlink()
    code, _, err = gracecl("resume", first.parent)
    assert code == 2
    assert re.fullmatch(r"gracecl: .*mine\.py is not what it was when the run in .* began; .*\n", err)
    plugin.write_text(PLUGIN)
    assert gracecl("resume", first.parent)[0] == 0
    assert first.read_bytes() == numbers


@pytest.mark.parametrize("name", ["mine.py", "parts.mine"])
def test_what_a_plugin_imports_of_one_s_own_belongs_to_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for file, text in {
        "mine.py": "import parts.losses",
        "parts/__init__.py": "",
        "parts/mine.py": "from . import losses",
        "parts/losses.py": "from parts.numbers import RATE",
        "parts/numbers.py": "RATE = 1",
        "parts/unused.py": "",
    }.items():
        (tmp_path / file).write_text(text)
    code = "import sys; from gracecl.registry.plugins import digest_of; print(digest_of(sys.argv[1:]))"

    def digest() -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-B", "-c", code, name]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    before = digest()
    (tmp_path / "parts/unused.py").write_text("OTHER = 1")
    assert digest() == before
    (tmp_path / "parts/numbers.py").write_text("RATE = 2")
    assert digest() != before


def test_a_plugin_takes_the_place_of_a_built_in_method_only_where_it_says_so(tmp_path: Path) -> None:
    file = tmp_path / "takes_er.py"
    file.write_text(PLUGIN.replace("sharp_er", "er").replace("sharp-er", "er"))
    assert "'er' is a method of gracecl itself; register yours under another name" in one_sentence(
        *run(tmp_path / "out", "er", plugin=str(file))
    )
    mine = methods.get("er")
    file.write_text(file.read_text().replace('register("er")', 'register("er", override=True)'))
    assert run(tmp_path / "out", "er", plugin=str(file))[0] == 0
    assert "ce/all" in next((tmp_path / "out").rglob("metrics.jsonl")).read_text()
    assert methods.get("er") is mine, "the next run has the library's own"


def test_a_plugin_may_be_a_module_by_name(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.rename(plugin.with_name("a_module_of_mine.py"))
    monkeypatch.syspath_prepend(plugin.parent)
    assert "sharp_er" in gracecl("list", "methods", "--plugin", "a_module_of_mine")[1]


# Progress.


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_LINES", 0.0)
    code, _, err = run(tmp_path, "grace(er)", steps="12")
    assert code == 0
    lines = err.splitlines()
    assert len(lines) == 13, "a line after each step, and one at the end"
    assert "\x1b" not in err
    for line in lines:
        assert re.match(r"grace\(er\(\)\), seed 0: step \d+ of 12, [\d.]+/s, \d+ s left", line)
    entropies = re.search(r"batch \d+ %, H (\d\.\d\d \d\.\d\d \d\.\d\d \d\.\d\d)$", lines[-1])
    assert entropies, lines[-1]
    assert re.search(r"step 12 of 12, .* 0 s left, test \d+\.\d %", lines[-1])
    recorded = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    last = [line["rows"]["log/H"] for line in recorded if line["kind"] == "step" and "log/H" in line["rows"]][-1]
    assert entropies[1].split() == [f"{value:.2f}" for value in last]


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the usual width: steps, rate and time left beside the bar, accuracy and the entropy of each layer below it."""
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_LOOKS", 0.0)
    method = "grace(mose(), entropy_mode='deviation')"
    with terminal(monkeypatch, columns=80) as seen, contextlib.redirect_stdout(io.StringIO()):
        code = cli.call(["run", method, *(word for pair in SMALL.items() for word in pair), "--out", str(tmp_path)])
    assert code == 0
    text = seen.text
    assert "━" in text
    assert re.search(r" 0/3 .* -:--:--", text), "no bar before the first step"
    *_, state, _ = re.split(r"[\r\n]+", text)
    assert re.search(r"━ 3/3 [\d.]+/s 0:00:00", text), text
    assert re.fullmatch(r"test \d+\.\d %(, batch \d+ %)?, H( \d\.\d\d){4} *", state), state


def test_progress_stops_cleanly_when_the_reader_of_the_table_goes_away(tmp_path: Path) -> None:
    """`gracecl list methods | head -1` ends without a word."""
    program = "import sys; from gracecl.lab.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "list", "streams"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
