"""The files of a run belong together: what was taken from another run is found, and what is lost is named."""

from __future__ import annotations

import csv
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from commands import gracecl
from gracecl import checkpoint
from gracecl.errors import UserError
from gracecl.files import as_cell, parse_json, write_text
from gracecl.lab import report
from gracecl.lab.report.frames import load_runs
from gracecl.lab.report.keep import keep_runs
from gracecl.lab.runs.export import export_run
from gracecl.lab.runs.run import RunConfig, resume, snapshot_file
from gracecl.lab.theory.measure import Settings, measure
from gracecl.registry.options import OF_THE_DATA, RunOptions, run_name
from run_folders import unfinish, write_run

STREAM = "split-digits(size=8, classes='0-3', tasks=2, per_class=20)"
SMALL = ["--stream", STREAM, "--net", "mlp(width=4)", "--memory", "10", "--device", "cpu", "--threads", "1", "--jobs", "1"]
DEEP = 100_000 * "["
MORE_OF: dict[str, Callable[[Path], list[str | Path]]] = {
    "export": lambda place: [place / "runs.csv"],
    "keep": lambda place: [place / "kept"],
    "resume": lambda _: ["--jobs", "1"],
}
"""what commands take beside the folder of runs"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of er on three seeds and of sgd on one, all finished."""
    out = tmp_path_factory.mktemp("made")
    assert gracecl("run", "er", "--seeds", "0-2", "--snapshots", *SMALL, "--out", out).code == 0
    assert gracecl("run", "sgd", *SMALL, "--out", out).code == 0
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def run_of(out: Path, method: str, seed: int) -> Path:
    [found] = [file.parent for file in out.glob(f"*/{method}/*/{seed}/config.json")]
    return found


def copy(name: str, source: Path, to: Path) -> None:
    shutil.copyfile(source / name, to / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "files"),
    [
        ("er", ["config.json"]),
        ("sgd", ["config.json"]),
        ("er", ["summary.json"]),
        ("er", ["metrics.jsonl"]),
        ("er", ["timing.json"]),
        ("sgd", ["timing.json"]),
        ("er", ["summary.json", "metrics.jsonl", "timing.json"]),
        ("er", ["config.json", "summary.json", "metrics.jsonl", "timing.json", "accuracy.json"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else value,
)
def test_files_of_another_run_are_found(method: str, files: list[str], out: Path) -> None:
    other, mixed = run_of(out, method, 0), run_of(out, "er", 1)
    for name in files:
        copy(name, other, mixed)
    runs, [sentence] = report.read_runs(report.find_places(out))
    assert [run.config["seed"] for run in runs] == [0, 2, 0]
    assert str(mixed) in sentence
    assert "put " in sentence


@pytest.mark.parametrize("command", ["report", "compare", "export", "keep", "resume"])
def test_whoever_reads_a_run_refuses_the_configuration_of_another(command: str, out: Path, tmp_path: Path) -> None:
    mixed = run_of(out, "er", 1)
    copy("config.json", run_of(out, "er", 0), mixed)
    said = gracecl(command, out, *MORE_OF.get(command, lambda _: [])(tmp_path))
    assert said.code == 2
    assert f"{mixed / 'config.json'} is not the configuration of its folder" in said.sentence
    assert not list((tmp_path / "kept").glob("*/er/*/1"))
    if command == "export":
        rows = csv.DictReader((tmp_path / "runs.csv").read_text().splitlines())
        assert [row["seed"] for row in rows] == ["0", "2", "0"]


def test_a_record_and_checkpoint_of_another_unfinished_run_are_found(out: Path) -> None:
    for seed in (0, 1):
        (run_of(out, "er", seed) / "summary.json").unlink()
    mixed = run_of(out, "er", 1)
    report.read_run(mixed)
    for name in ("metrics.jsonl", "checkpoint.safetensors"):
        copy(name, run_of(out, "er", 0), mixed)
    with pytest.raises(UserError, match=r"checkpoint\.safetensors is another run's: its seed is 0"):
        report.read_run(mixed)


def test_a_run_keeps_its_identity_wherever_it_is_moved(out: Path, tmp_path: Path) -> None:
    place = shutil.copytree(run_of(out, "er", 1), tmp_path / "mine" / "best run")
    assert report.read_run(place).config["seed"] == 1
    copy("config.json", run_of(out, "er", 0), place)
    with pytest.raises(UserError, match=r"summary\.json is another run's: its seed is 1"):
        report.read_run(place)
    linked = tmp_path / "linked"
    linked.symlink_to(run_of(out, "er", 2))
    assert report.read_run(linked).config["seed"] == 2


def test_older_files_that_name_no_run_are_read_and_compared_by_what_they_say(out: Path) -> None:
    folder = run_of(out, "er", 1)
    for name in ("summary.json", "timing.json"):
        values = json.loads((folder / name).read_bytes())
        older = {key: value for key, value in values.items() if key not in ("run", "digests")}
        write_text(folder / name, json.dumps(older))
    assert report.read_run(folder).finished
    copy("summary.json", run_of(out, "sgd", 0), folder)
    with pytest.raises(UserError, match=r"summary\.json is another run's: its method is 'sgd\(\)'"):
        report.read_run(folder)


def test_committed_results_are_read() -> None:
    """A run of each study, those of older versions among them."""
    studies = [folder for folder in sorted(Path("results").iterdir()) if folder.is_dir()]
    first = [next(iter(report.find_places(study)), None) for study in studies]
    found = [report.read_run(folder) for folder in first if folder is not None]
    assert len(found) >= 10
    assert all(run.config and run.timing for run in found)


def test_an_imported_result_is_known_by_its_place(tmp_path: Path) -> None:
    results = [{"method": "Theirs", "stream": "s", "seed": seed, "accuracy": [[50.0 + seed]]} for seed in (0, 1)]
    (tmp_path / "theirs.json").write_text(json.dumps(results))
    assert gracecl("import", tmp_path / "theirs.json", "--out", tmp_path / "runs").code == 0
    [first, second] = report.find_places(tmp_path / "runs")
    assert len(report.find_runs(tmp_path / "runs")) == 2
    for name in ("timing.json", "summary.json", "config.json"):
        copy(name, first, second)
        with pytest.raises(UserError, match="another run's"):
            report.read_run(second)


@pytest.mark.parametrize("written", range(1, 5))
def test_an_import_that_was_broken_off_leaves_the_other_runs_readable(written: int, out: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_text(json.dumps({"method": "Theirs", "stream": "s", "seed": 0, "accuracy": [[50.0]]}))
    assert gracecl("import", tmp_path / "theirs.json", "--out", out).code == 0
    [half] = out.glob("*/*/imported/0")
    whole = ("config.json", "metrics.jsonl", "timing.json", "accuracy.json", "summary.json")
    for name in whole[written:]:
        (half / name).unlink()
    runs, damaged = report.read_runs(report.find_places(out))
    assert (len(runs), damaged) == (4 if written == 1 else 5, [])
    assert ("Theirs" in [*load_runs(out)["method"]]) == (written > 1)


def test_the_name_of_a_run_is_the_end_of_its_folder() -> None:
    config = RunConfig("er", seed=3, device="cpu").canonical()
    assert str(config.folder(Path())).endswith(run_name({"method": "er()", "seed": 3, "device": "cpu"}))
    assert run_name(vars(config) | {"seed": 4, "snapshots": True, "commit": "x"}) == run_name(vars(config)).replace("/3", "/4")
    assert run_name(vars(config) | {"plugin_code": "a"}) != run_name(vars(config)) != run_name(vars(config) | {"memory": 7})
    assert run_name(vars(RunOptions()) | {"normalise": OF_THE_DATA}) == run_name({"seed": 0})


# --- what is lost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report", "compare", "export", "keep", "resume"])
def test_a_lost_configuration_is_named(command: str, out: Path, tmp_path: Path) -> None:
    lost = run_of(out, "er", 1)
    (lost / "config.json").unlink()
    before = sorted(lost.iterdir())
    said = gracecl(command, out, *MORE_OF.get(command, lambda _: [])(tmp_path))
    assert said.code == 2
    assert f"{lost} has no config.json beside its metrics.jsonl" in said.sentence
    assert sorted(lost.iterdir()) == before


def test_a_lost_configuration_is_written_anew_by_the_command_of_a_run_that_is_not_finished(out: Path) -> None:
    lost = run_of(out, "er", 1)
    before = (lost / "config.json").read_bytes()
    for name in ("config.json", "summary.json"):
        (lost / name).unlink()
    with pytest.raises(UserError, match="'gracecl run' command, given again, writes it anew"):
        resume(lost)
    assert gracecl("run", "er", "--seeds", "1", "--snapshots", *SMALL, "--out", out).code == 0
    assert (lost / "config.json").read_bytes() == before


def test_one_run_among_several_is_not_chosen_because_others_lost_their_configuration(out: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        (run_of(out, "er", seed) / "config.json").unlink()
    said = gracecl("export", run_of(out, "er", 2).parent, tmp_path / "net.safetensors")
    assert (said.code, "holds 3 runs" in said.sentence) == (2, True)


def test_a_run_that_is_just_beginning_is_not_taken_for_one_that_lost_its_configuration(out: Path) -> None:
    beginning = out / "split" / "er" / "0123abcd" / "0"
    beginning.mkdir(parents=True)
    (beginning / "metrics.jsonl").touch()
    assert gracecl("report", out).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, b"", b"{", b"{}", DEEP.encode()], ids=["gone", "empty", "cut", "other", "deep"])
def test_keep_names_a_finished_run_without_its_summary(content: bytes | None, out: Path, tmp_path: Path) -> None:
    file = run_of(out, "er", 1) / "summary.json"
    file.unlink() if content is None else file.write_bytes(content)
    said = gracecl("keep", out, tmp_path / "kept")
    assert (said.code, "3 runs are kept" in said.out) == (2, True)
    assert str(file.parent) in said.sentence
    resume(file.parent)  # writes it anew
    assert gracecl("keep", out, tmp_path / "kept").code == 0


def test_keep_leaves_out_a_run_that_is_not_finished(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "er()")
    begun = write_run(tmp_path / "runs", "mose()")
    report.write_run_report(tmp_path / "runs" / "er()" / "100" / "0")
    unfinish(begun, 5)
    kept, damaged = keep_runs(tmp_path / "runs", tmp_path / "kept", 50)
    assert (len(kept), damaged) == (1, [])


@pytest.mark.slow
def test_a_study_names_its_runs_that_cannot_be_read(tmp_path: Path) -> None:
    seeds = ["--seeds", "0-2", "--jobs", "1", "--threads", "1"]
    command = ["study", "mini", "--quick", "--methods", "sgd()", *seeds, "--out", tmp_path]
    assert gracecl(*command).code == 0
    first, second, third = (run_of(tmp_path, "sgd", seed) for seed in range(3))
    copy("config.json", first, second)
    (third / "timing.json").unlink()
    (first / "timing.json").write_text('{"steps": 7}')  # an older run's, which counted less
    said = gracecl(*command, "--as-is")
    assert (said.code, "1 of 3 runs" in said.out, "Traceback" in said.err) == (2, True, False)
    assert "| – | – | – | `linear_last` | 0 |" in said.out
    assert f"{second / 'config.json'} is not the configuration of its folder" in said.err
    assert f"{third} has no timing.json beside its summary.json" in said.err
    (second / "summary.json").write_text("{")
    assert f"{second / 'config.json'} is not" in gracecl(*command, "--as-is").err


# --- weights ----------------------------------------------------------------------------------------------------------------


def test_the_weights_of_another_seed_are_not_exported(out: Path, tmp_path: Path) -> None:
    copy("checkpoint.safetensors", run_of(out, "er", 0), run_of(out, "er", 1))
    with pytest.raises(UserError, match="was written with seed 0, and the configuration beside it has 1"):
        export_run(run_of(out, "er", 1), tmp_path / "net.safetensors")
    assert not (tmp_path / "net.safetensors").exists()


def test_the_weights_of_the_middle_of_a_run_are_not_exported(out: Path, tmp_path: Path) -> None:
    folder = run_of(out, "er", 1)
    state = checkpoint.load(folder / "checkpoint.safetensors")
    state["record"] |= {"bytes": 10}
    checkpoint.save(folder / "checkpoint.safetensors", state)
    with pytest.raises(UserError, match="is not the checkpoint that the run ended with"):
        export_run(folder, tmp_path / "net.safetensors")


@pytest.mark.parametrize(
    "exchanged", [[(1, 1, 2), (2, 1, 1)], [(1, 0, 1)], [(0, 0, 0), (1, 0, 1), (2, 0, 2)]], ids=["order", "one", "all"]
)
def test_snapshots_of_another_task_or_run_are_refused(exchanged: list[tuple[int, int, int]], out: Path, made: Path) -> None:
    for number, seed, ended in exchanged:
        shutil.copyfile(snapshot_file(run_of(made, "er", seed), ended), snapshot_file(run_of(out, "er", 1), number))
    said = gracecl("theory", run_of(out, "er", 1), "--draws", "2", "--points", "2", "--images", "4")
    assert (said.code, "put its own back from a copy" in said.sentence) == (2, True)


def test_older_snapshots_are_read_with_a_warning(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file, save_file

    folder = run_of(out, "er", 1)
    for number in range(3):
        file = snapshot_file(folder, number)
        save_file(load_file(file), file)
    measure(folder, Settings(draws=2, points=2, images=4))
    assert sum("is taken as it is" in record.message for record in caplog.records) == 3


def test_all_files_of_a_run_have_the_mode_of_new_files(made: Path, tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    files = [file for file in made.rglob("*") if file.is_file()]
    assert {file.stat().st_mode for file in files} == {(tmp_path / "new").stat().st_mode}
    assert {"checkpoint.safetensors", "0.safetensors", "config.json", "metrics.jsonl", "report.html"} <= {
        file.name for file in files
    }
    before = os.umask(0o027)
    try:
        checkpoint.save(tmp_path / "state", {"weight": torch.ones(2)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o640


# --- JSON and CSV -----------------------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return depth * "[" + depth * "]"


def test_json_that_cannot_be_walked_through_or_written_is_refused() -> None:
    assert parse_json('{"a": [1, null, "\\ud83d\\ude00", "["]}') == {"a": [1, None, "😀", "["]}
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert parse_json(nested(200)) is not None
    assert parse_json(f"[{', '.join(1000 * ['[]'])}]") == 1000 * [[]]
    for text in (nested(201), nested(950), DEEP, f'{{"a": {nested(300)}, "b": 1}}'):
        with pytest.raises(ValueError, match="more than 200 lists or tables within each other"):
            parse_json(text)
    for text in ('"\\ud800"', b'"\\uDC00"'):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            parse_json(text)
    for text in (b"\xff", b'"\xed\xa0\x80"', "", "{", 5000 * "1"):
        with pytest.raises(ValueError, match="is not JSON"):
            parse_json(text)


@pytest.mark.parametrize("depth", [300, 950, 100_000])
@pytest.mark.parametrize("name", ["config.json", "summary.json", "timing.json", "metrics.jsonl"])
def test_a_run_s_file_of_deep_json_is_one_sentence(name: str, depth: int, out: Path) -> None:
    damaged = run_of(out, "er", 1)
    write_text(damaged / name, f'{{"kind": {nested(depth)}}}\n')
    _, [sentence] = report.read_runs(report.find_places(out))
    assert str(damaged / name) in sentence


@pytest.mark.parametrize(
    "content",
    [DEEP, nested(950), '{"study": "x", "taken_over": 5}', '{"study": "x", "taken_over": [5, "\\u0000", null]}', '"\\ud800"'],
    ids=["cut", "deep", "number", "places", "surrogate"],
)
def test_other_json_in_a_folder_of_runs_is_passed_over(content: str, out: Path) -> None:
    (out / "other.json").write_text(content)
    assert len(report.find_runs(out)) == 4


def test_a_checkpoint_s_header_of_deep_json_is_one_sentence(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tree = nested(950)
    file = tmp_path / "deep.safetensors"
    save_file({}, file, metadata={checkpoint.CHECKPOINT_FORMAT: f"{checkpoint._digest({}, tree)}:{tree}"})
    with pytest.raises(UserError, match="within each other"):
        checkpoint.load(file)
    write_run(tmp_path, "er()")
    shutil.copyfile(file, tmp_path / "er()" / "100" / "0" / "checkpoint.safetensors")
    assert report.read_run(tmp_path / "er()" / "100" / "0").finished


@pytest.mark.parametrize("begins", ["=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", "er\r=1"])
def test_no_text_in_a_table_begins_a_formula(begins: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "er()")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"method": begins, "lr": -0.5, begins: "x"}))
    for name in ("runs", "evaluations", "steps"):
        assert gracecl("export", tmp_path / "runs", tmp_path / f"{name}.csv", "--what", name).code == 0
    assert gracecl("report", tmp_path / "runs", "--formats", "csv", "--out", tmp_path).code == 0
    for file in tmp_path.glob("*.csv"):
        with file.open(newline="") as opened:
            cells = [cell for row in csv.reader(opened) for cell in row]
        assert as_cell(begins) in cells, file
        assert all(_is_number(cell) for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))), file
    assert [as_cell(value) for value in (-1, "er()", None, "-1", "@x")] == [-1, "er()", None, "'-1", "'@x"]
    assert load_runs(tmp_path / "runs")["method"][0] == begins


def _is_number(cell: str) -> bool:
    try:
        return bool(torch.isfinite(torch.tensor(float(cell))))
    except ValueError:
        return False
