"""Plugins: a run executes the code that it names and no other, whichever the process, and none that has changed since."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gracecl as library
from gracecl.errors import UserError
from gracecl.lab.runs.run import Interrupted, RunConfig, Work
from gracecl.registry import controllers, datasets, methods, nets, renderers, streams
from gracecl.registry.plugins import digest_of, in_use
from tests.commands import gracecl, only_run
from tests.stopping import StopAfter

FOO = """
from dataclasses import dataclass

from gracecl.methods.er import ER
from gracecl.registry import methods


@methods.register("foo")
@dataclass(eq=False, repr=False)
class Foo(ER):
    "Experience replay at some rate."

    def losses(self, out, batch):
        return {{name: {rate} * value for name, value in super().losses(out, batch).items()}}
"""
SETTINGS: dict[str, Any] = {
    "stream": "split-digits(size=8, tasks=2, per_class=8)",
    "net": "mlp(width=4)",
    "memory": 10,
    "steps": 6,
    "device": "cpu",
}
OPTIONS = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


def written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two files that register one name."""
    return written(tmp_path / "a.py", FOO.format(rate=1)), written(tmp_path / "b.py", FOO.format(rate=2))


def work_of(plugin: Path | str, out: Path, method: str = "foo", **more: Any) -> Work:
    return Work.new(RunConfig(method, **SETTINGS | more), out, plugins=(str(plugin),))


def stopped(work: Work, step: int = 3) -> Path:
    """The folder of a run that is stopped after a step, which spares it the report."""
    with pytest.raises(Interrupted):
        work.run(StopAfter(step))
    return work.folder


def record(folder: Path) -> str:
    return (folder / "metrics.jsonl").read_text()


def begun(work: Work) -> str:
    """What the first steps of a run record."""
    return record(stopped(work, 5))


# Which code a run executes.


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_runs_of_two_files_that_register_one_name_end_each_with_its_own_code(
    jobs: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    wanted = [begun(work_of(plugin, tmp_path / f"alone{number}")) for number, plugin in enumerate(pair)]
    assert wanted[0] != wanted[1]
    folders = [stopped(work_of(pair[number % 2], tmp_path / "mix" / str(number))) for number in range(1 + int(jobs))]
    said = gracecl("resume", tmp_path / "mix", "--jobs", jobs)
    assert said.code == 0, said.err
    for number, folder in enumerate(folders):
        assert record(folder).startswith(wanted[number % 2])


def test_helpers_of_one_name_beside_two_plugins_are_each_its_own(tmp_path: Path) -> None:
    """Found through sys.path, which a plugin may change, and when the run has begun."""
    text = "import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parent))\n" + FOO.format(rate="rate()")
    text += "\n\ndef rate():\n    from numbers_of_mine import RATE\n\n    return RATE\n"
    plugins = [written(tmp_path / str(rate) / "same.py", text) for rate in (1, 2)]
    for rate, plugin in enumerate(plugins, 1):
        written(plugin.parent / "numbers_of_mine.py", f"RATE = {rate}\n")
    plain = [written(tmp_path / f"plain{rate}.py", FOO.format(rate=rate)) for rate in (1, 2)]
    wanted = [begun(work_of(plugin, tmp_path / "plain" / plugin.stem)) for plugin in plain]
    found = [begun(work_of(plugins[i % 2], tmp_path / "out" / str(i))) for i in range(3)]
    assert found == [wanted[0], wanted[1], wanted[0]]


@pytest.mark.slow
def test_what_a_plugin_registered_is_not_known_after_its_run(pair: tuple[Path, Path], tmp_path: Path) -> None:
    before = methods.names()
    with in_use([str(pair[0])]):
        mine = methods.get("foo")
        assert methods.name_of(mine) == "foo"
        with in_use([]):
            assert "foo" not in methods.names(), "a run without plugins knows none"
        with in_use([str(pair[1])]):
            assert methods.get("foo") is not mine
        assert methods.get("foo") is mine
    assert methods.names() == before
    first, second = (library.run("foo", plugins=[str(plugin)], **SETTINGS) for plugin in pair)
    assert first.steps != second.steps
    with pytest.raises(UserError, match="unknown method 'foo'"):
        library.run("foo", **SETTINGS)
    assert methods.names() == before


def test_what_the_program_itself_registers_stays(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.loaded, "mine", methods.get("er"))
    with in_use([str(pair[0])]):
        assert methods.get("mine") is methods.get("er")


@pytest.mark.slow
def test_a_module_by_name_is_executed_anew_when_its_code_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    written(tmp_path / "mine_by_name" / "__init__.py", "from mine_by_name.method import Foo\n")
    for rate in (1, 2):
        written(tmp_path / "mine_by_name" / "method.py", FOO.format(rate=rate))
        wanted = begun(work_of(written(tmp_path / f"plain{rate}.py", FOO.format(rate=rate)), tmp_path / "plain" / str(rate)))
        for name in ("mine_by_name", "mine_by_name.method"):
            assert begun(work_of(name, tmp_path / "out" / name / str(rate))) == wanted


KINDS = {
    "method": methods,
    "net": nets,
    "stream": streams,
    "dataset": datasets,
    "controller": controllers,
    "renderer": renderers,
}


def test_plugins_are_named_after_one_option(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The parser would forget the first of two."""
    said = gracecl("run", "foo", *OPTIONS, "--out", tmp_path / "out", "--plugin", pair[0], "--plugin", pair[1])
    assert said.code == 2
    assert "--plugin is given 2 times; give it once, with all its values after it" in said.sentence


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["twice", "builtin"])
def test_two_plugins_that_register_one_name_are_refused(kind: str, name: str, tmp_path: Path) -> None:
    """Also where both take the place of one of the library's own."""
    registered = name if name == "twice" else KINDS[kind].names()[0]
    text = f"from gracecl.registry import {kind}s\n\n@{kind}s.register({registered!r}, override=True)\ndef f(): pass\n"
    first, second = written(tmp_path / "1" / "same.py", text), written(tmp_path / "2" / "same.py", text)
    said = gracecl("run", "er", *OPTIONS, "--out", tmp_path / "out", "--plugin", first, second)
    assert said.code == 2
    assert said.sentence == (
        f"gracecl: {first} and {second} both register the {kind} '{registered}'; rename one of them, or use one file at a time"
    )
    assert not (tmp_path / "out").exists()
    assert gracecl("list", "methods", "--plugin", first, first).code == 0, "the same file twice is one"


# Code that a run did not name.


def evil(tmp_path: Path, name: str = "evil.py") -> tuple[Path, Path]:
    """A plugin, and the file that shows that it was executed."""
    trace = tmp_path / "executed"
    return written(tmp_path / name, f"open({str(trace)!r}, 'w').close()\n"), trace


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["resume", "export", "theory"])
@pytest.mark.parametrize("began_with", ["nothing", "a plugin"])
def test_code_that_a_run_did_not_name_is_not_executed(verb: str, began_with: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    method, plugins = ("er", ()) if began_with == "nothing" else ("foo", (str(pair[0]),))
    work = Work.new(RunConfig(method, **SETTINGS), tmp_path / "out", plugins=plugins)
    folder = stopped(work) if verb == "resume" else work.run()
    plugin, trace = evil(tmp_path)
    (folder / "plugins").write_text(str(plugin))
    said = gracecl(verb, folder, *([tmp_path / "model.safetensors"] if verb == "export" else []))
    assert said.code == 2
    why = "began without plugins" if began_with == "nothing" else "is not what it was when the run in"
    assert why in said.sentence
    assert str(plugin) in said.sentence
    assert not trace.exists()
    if verb == "resume":
        assert gracecl("resume", folder, "--plugin", plugin).code == 2
        assert not trace.exists()
        (folder / "plugins").unlink()
        said = gracecl("resume", folder)
        assert (said.code == 0) if began_with == "nothing" else ("name them with --plugin" in said.sentence)


def test_an_edited_plugin_is_not_executed_in_the_run_it_belonged_to(tmp_path: Path) -> None:
    plugin = written(tmp_path / "mine.py", FOO.format(rate=1))
    folder = stopped(work_of(plugin, tmp_path / "out"))
    text = plugin.read_text()
    _, trace = evil(tmp_path, "mine.py")
    assert "is not what it was" in gracecl("resume", folder).sentence
    assert not trace.exists()
    plugin.write_text(text)
    assert gracecl("resume", folder).code == 0


# Helpers.

LATE = {
    "in a function": "from helpers_of_mine.late import RATE",
    "importlib": "RATE = __import__('importlib').import_module('helpers_of_mine.late').RATE",
}


@pytest.fixture(params=LATE)
def late(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, bool]:
    """A plugin, its helper that it loads when the run has begun, and whether an import statement names it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    text = FOO.format(rate="rate()") + f"\n\ndef rate():\n    {LATE[request.param]}\n\n    return RATE\n"
    written(tmp_path / "helpers_of_mine" / "__init__.py", "")
    helper = written(tmp_path / "helpers_of_mine" / "late.py", "RATE = 1\n")
    written(tmp_path / "helpers_of_mine" / "unused.py", "")
    return written(tmp_path / "mine.py", text), helper, request.param == "in a function"


@pytest.mark.slow
def test_a_helper_that_is_loaded_when_the_run_has_begun_belongs_to_it(late: tuple[Path, Path, bool], tmp_path: Path) -> None:
    plugin, helper, is_seen = late
    work_of(plugin, tmp_path / "whole").run()
    wanted, folder = begun(work_of(plugin, tmp_path / "alone")), stopped(work_of(plugin, tmp_path / "out"))
    before = digest_of([str(plugin)])
    helper.write_text("RATE = 2\n")
    assert (digest_of([str(plugin)]) != before) == is_seen
    said = gracecl("resume", folder)
    assert said.code == 2
    assert f"{plugin if is_seen else helper} is not what it was when the run in {folder} began" in said.sentence
    command = ["run", "foo", *OPTIONS, "--plugin", plugin, "--out", tmp_path / "whole"]
    again = gracecl(*command)
    if is_seen:
        assert again.code == 0, "an edit makes another run"
        assert len(list((tmp_path / "whole").rglob("summary.json"))) == 2
    else:
        assert f"{helper} is not what it was" in again.sentence, "a finished run of the old code would pass for one of the new"
    helper.write_text("RATE = 1\n")
    (tmp_path / "helpers_of_mine" / "unused.py").write_text("OTHER = 1\n")
    assert gracecl("resume", folder).code == 0
    assert record(folder).startswith(wanted)
    helper.unlink()
    assert "is not what it was" in gracecl("export", folder, tmp_path / "model.safetensors").sentence


# What else runs are used for.

EVERYTHING = """
from dataclasses import dataclass

from gracecl.controllers.paper import Paper
from gracecl.methods.er import ER
from gracecl.nets.mlp import mlp
from gracecl.registry import controllers, methods, nets


@methods.register("own_method")
@dataclass(eq=False, repr=False)
class Own(ER):
    "Experience replay."

@controllers.register("own_rule")
@dataclass(eq=False, repr=False)
class Rule(Paper):
    "The paper's rule."


@nets.register("own_net")
def own_net(shape, taps, at_most, hidden=4):
    "A small net."
    return mlp(shape, taps, at_most, width=hidden)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a method, a rule and a net of its own."""
    folder = tmp_path_factory.mktemp("everything")
    plugin = written(folder / "everything.py", EVERYTHING)
    own = {"method": "grace(own_method(), strength='own_rule')", "net": "own_net(hidden=6)"}
    return work_of(plugin, folder / "out", **own, snapshots=True, steps=16).run()


@pytest.mark.slow
def test_a_run_with_plugins_can_be_exported(finished: Path, tmp_path: Path) -> None:
    said = gracecl("export", finished, tmp_path / "model.safetensors")
    assert said.code == 0, said.err
    assert (tmp_path / "model.safetensors").exists()
    assert "own_net" not in nets.names()


@pytest.mark.slow
def test_the_theory_of_a_run_with_plugins(finished: Path) -> None:
    said = gracecl("theory", finished)
    assert said.code == 0, said.err


def test_the_record_of_plugins_without_late_helpers_is_their_digest_alone(finished: Path) -> None:
    config = json.loads((finished / "config.json").read_text())
    [plugin] = (finished / "plugins").read_text().splitlines()
    assert config["plugin_code"] == digest_of([plugin])
    assert b"plugin_files" not in (finished / "checkpoint.safetensors").read_bytes()


@pytest.mark.slow
def test_a_search_and_a_study_use_plugins(pair: tuple[Path, Path], tmp_path: Path) -> None:
    options = ["--stream", SETTINGS["stream"], "--net", "mlp(width=4)", "--memory", "10", "--plugin", pair[0]]
    search = ["--space", "n_recall=4,8", "--sampler", "grid", "--tasks", "1", "--seeds", "0"]
    said = gracecl("tune", "foo", *search, *options, "--out", tmp_path / "tune")
    assert said.code == 0, said.err
    text = f'about = "mine"\nmethods = ["foo"]\nstream = "{SETTINGS["stream"]}"\nnet = "mlp"\nmemory = 10\nsteps = 4\nseeds = "0"\n'
    said = gracecl("study", written(tmp_path / "mine.toml", text), "--plugin", pair[1], "--out", tmp_path / "study")
    assert said.code == 0, said.err
    assert json.loads((only_run(tmp_path / "study") / "config.json").read_text())["plugin_code"] == digest_of([str(pair[1])])
