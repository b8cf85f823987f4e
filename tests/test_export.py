"""Runs as tables, results of others as runs, learners as models for other programs."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import gracecl
from gracecl import Inputs, Learner, exporting
from gracecl.errors import UserError
from gracecl.lab import cli
from gracecl.lab.report import find_runs
from gracecl.lab.report.foreign import problem_of
from run_folders import write_run

FOREIGN: dict[str, Any] = {
    "method": "DER++ (authors' code)",
    "stream": "split-digits(tasks=3)",
    "seed": 0,
    "accuracy": [[91.0], [80.5, 88.0], [70.2, 75.1, 86.3]],
    "memory": 100,
    "seconds": 12.5,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for method in ("er()", "grace(mose())"):
        for seed in range(2):
            write_run(folder, method, seed)
    return folder


# --- tables


def test_runs_are_a_table(root: Path) -> None:
    pytest.importorskip("pandas")
    table = gracecl.load_runs(root)
    assert len(table) == 4
    run = next(run for run in find_runs(root) if run.config["method"] == "grace(mose())" and run.config["seed"] == 1)
    row = table[(table.method == "grace(mose())") & (table.seed == 1)].iloc[0]
    assert row.acc == pytest.approx(run.matrix("ncm_mean")[-1].mean())
    assert (row.memory, row.seconds, row["rule"], row.finished) == (100, 13.5, "ncm_mean", True)
    other = gracecl.load_runs(root / "grace(mose())", rule="linear_1")
    assert other.iloc[0].acc == pytest.approx(find_runs(root / "grace(mose())")[0].matrix("linear_1")[-1].mean())


def test_steps_and_evaluations_are_tables(root: Path) -> None:
    pytest.importorskip("pandas")
    steps = gracecl.load_runs(root, "steps")
    run = find_runs(root / "grace(mose())")[0]
    chosen = steps[(steps.folder == str(run.path)) & (steps.term == "log/gamma") & (steps.layer == 2)]
    np.testing.assert_array_equal(chosen.value, run.series("log/gamma")[1][:, 1])
    evaluations = gracecl.load_runs(root, "evaluations")
    assert set(evaluations.columns) >= {"folder", "method", "seed", "step", "rule", "task", "accuracy"}
    with pytest.raises(UserError, match="not 'weights'"):
        gracecl.load_runs(root, "weights")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_are_files(root: Path, tmp_path: Path, kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    file = tmp_path / f"runs.{kind}"
    assert cli.call(["export", str(root), str(file), "--what", "evaluations"]) == 0
    read = getattr(pandas, f"read_{kind}")(file)
    pandas.testing.assert_frame_equal(read, gracecl.load_runs(root, "evaluations"))


def test_an_unknown_ending_is_refused(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["export", str(root), str(tmp_path / "runs.xls")]) == 2
    assert "must end in .csv, .parquet or .safetensors" in capsys.readouterr().err


# --- results of others


@pytest.mark.slow
def test_results_of_others_stand_in_the_same_table(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs.json").write_text(json.dumps([FOREIGN, FOREIGN | {"seed": 1}]), encoding="utf-8")
    assert cli.call(["import", str(tmp_path / "theirs.json"), "--out", str(tmp_path / "imported")]) == 0
    first, _ = find_runs(tmp_path / "imported")
    assert first.finished
    np.testing.assert_allclose(first.matrix("reported")[2], [70.2, 75.1, 86.3])
    words = ["report", str(root), str(tmp_path / "imported"), "--out", str(tmp_path / "report"), "--formats", "md,html,csv,tex,svg"]
    assert cli.call(words) == 0
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "| `DER++ (authors' code)` | `reported` | 2 seeds: no interval |" in text
    assert f"{(70.2 + 75.1 + 86.3) / 3:.2f}" in text
    assert "gracecl import theirs.json" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


def test_rows_that_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "their.json").write_text(json.dumps(FOREIGN | {"accuracy": [None, None, [70, 75, 86]]}), encoding="utf-8")
    assert cli.call(["import", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    [run] = find_runs(tmp_path / "out")
    metrics = export_metrics(run)
    assert metrics["acc"] == pytest.approx(77.0)
    assert math.isnan(metrics["forgetting"])


def export_metrics(run: Any) -> dict[str, float]:
    from gracecl.lab.report.runs import measure

    return measure(run, "reported")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"method": None}, "needs 'method' as text"),
        ({"seed": "0"}, "needs 'seed' as a whole number"),
        ({"seed": True}, "needs 'seed' as a whole number"),
        ({"accuracy": [[91.0], [80.5]]}, "needs 2 percentages from 0 to 100 in row 2"),
        ({"accuracy": [[101.0]]}, "needs 1 percentages"),
        ({"accuracy": [[float("nan")]]}, "needs 1 percentages"),
        ({"accuracy": [[50.0], None]}, "needs the last row"),
        ({"accuracy": []}, "needs the last row"),
        ({"accuracy": 3}, "needs 'accuracy' as a list of rows"),
        ({"seed": 10**30}, "needs 'seed' as a whole number"),
        ({"memory": "many"}, "needs 'memory' as a whole number"),
        ({"seconds": "long"}, "needs 'seconds' as a number"),
        ({"seconds": -1}, "needs 'seconds' as a number"),
    ],
)
def test_what_is_wrong_with_a_result(change: dict[str, Any], told: str) -> None:
    assert told in problem_of(FOREIGN | change)


def test_names_that_lead_out_of_the_folder_stay_inside_and_digests_are_our_own(tmp_path: Path) -> None:
    named = {"method": "..", "stream": "../..", "digests": {"method": "wrong"}}
    (tmp_path / "their.json").write_text(json.dumps(FOREIGN | named), encoding="utf-8")
    assert cli.call(["import", str(tmp_path / "their.json"), "--out", str(tmp_path / "a" / "b" / "out")]) == 0
    [run] = find_runs(tmp_path)
    assert run.path.is_relative_to(tmp_path / "a" / "b" / "out")
    config = run.path / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"seed": 0', '"seed": 1'), encoding="utf-8")
    with pytest.raises(UserError, match="seed was changed by hand"):
        find_runs(tmp_path)


def test_files_that_hold_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(source: Path) -> str:
        assert cli.call(["import", str(source), "--out", str(tmp_path / "out")]) == 2
        return capsys.readouterr().err

    assert "no file or folder" in told(tmp_path / "nothing")
    (tmp_path / "one.json").write_text("{", encoding="utf-8")
    assert "is not JSON" in told(tmp_path / "one.json")
    (tmp_path / "one.json").write_text("[1]", encoding="utf-8")
    assert "result 1 of" in told(tmp_path)
    (tmp_path / "one.json").write_text(json.dumps([FOREIGN, FOREIGN]), encoding="utf-8")
    assert "two results have the same" in told(tmp_path)
    assert not (tmp_path / "out").exists()


# --- models


@pytest.fixture(
    scope="module",
    params=[
        "er() on mlp(width=8)",
        "grace(mose()) on mlp(width=8)",
        pytest.param("grace(mose()) on resnet18(width=4)", marks=pytest.mark.exhaustive),
    ],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that predicts by its head, and one by class means over taps."""
    out = tmp_path_factory.mktemp("trained")
    method, net = request.param.split(" on ")
    words = shlex.split(f"--net '{net}' --memory 30 --steps 12 --jobs 1 --threads 1 --defaults none")
    stream = "split-digits(size=8, classes='0-3', tasks=2)"
    assert cli.call(["run", method, "--stream", stream, *words, "--out", str(out)]) == 0
    [run] = find_runs(out)
    return run.path


def engine_of(folder: Path) -> Any:
    from gracecl import checkpoint
    from gracecl.lab.runs.run import Work, learner_and_stream

    engine, _ = learner_and_stream(Work.begun(folder).as_begun())
    engine.load_state_dict(checkpoint.load(folder / "checkpoint.safetensors")["trainer"]["engine"])
    return engine


IMAGES = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (7, 1, 8, 8), np.uint8))


def predicted(folder: Path) -> Any:
    """The learner's own scores, through what `predict` uses."""
    from gracecl.engine.evaluate import seen_scores

    engine = engine_of(folder)
    [(_, out)] = list(engine.ready_to_predict().sweep(IMAGES))
    return seen_scores(engine.chain, out, engine.progress, engine.chain.rule)[0]


@pytest.mark.slow
def test_the_predictor_as_an_exported_program(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    assert cli.call(["export", str(trained), str(file)]) == 0
    extra = {"gracecl.json": ""}
    found = torch.export.load(str(file), extra_files=extra).module()(IMAGES).detach()
    torch.testing.assert_close(found, predicted(trained), rtol=1e-5, atol=1e-5)
    assert json.loads(extra["gracecl.json"])["seen"] == list(engine_of(trained).progress.seen)


@pytest.mark.slow
def test_the_predictor_as_onnx(trained: Path, tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    import onnxruntime

    file = tmp_path / "model.onnx"
    assert cli.call(["export", str(trained), str(file)]) == 0
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    [found] = session.run(None, {"images": IMAGES.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), predicted(trained), rtol=1e-5, atol=1e-5)
    about = json.loads(session.get_modelmeta().custom_metadata_map["gracecl"])
    assert about["rule"] == engine_of(trained).chain.rule


@pytest.mark.slow
def test_the_net_as_safetensors(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    assert cli.call(["export", str(trained), str(file)]) == 0
    net, ours = exporting.load_net(file), engine_of(trained).ready_to_predict().eval()
    with torch.no_grad():
        torch.testing.assert_close(net(net.inputs.normalise(IMAGES)).features, ours(ours.inputs.normalise(IMAGES)).features)
    with safe_open(str(file), "pt") as saved:
        names = set(saved.keys())
    assert ("class_means" in names) == (engine_of(trained).chain.rule != "linear_last")


WITHOUT_GRACECL = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "gracecl":
            raise ImportError("gracecl is not installed")
sys.meta_path.insert(0, Nowhere())
import torch
images = torch.load("images.pt")
{loader}
torch.save((logits, features), "found.pt")
try:
    import gracecl
except ImportError:
    sys.exit(0)
"""


@pytest.mark.slow
def test_the_net_without_gracecl(trained: Path, tmp_path: Path) -> None:
    """The loader of docs/reports.md, in a process that cannot import this library."""
    text = (Path(__file__).parents[1] / "docs" / "reports.md").read_text(encoding="utf-8")
    [loader] = [block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "safe_open" in block]
    assert len([line for line in loader.splitlines() if line]) <= 10
    assert cli.call(["export", str(trained), str(tmp_path / "net.safetensors")]) == 0
    torch.save(IMAGES, tmp_path / "images.pt")
    program = WITHOUT_GRACECL.format(loader=loader)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    logits, features = torch.load(tmp_path / "found.pt")
    ours = engine_of(trained).ready_to_predict().eval()
    with torch.no_grad():
        wanted = ours(ours.inputs.normalise(IMAGES))
    torch.testing.assert_close(logits, wanted.logits)
    torch.testing.assert_close(features, wanted.features)


@pytest.mark.slow
def test_a_net_that_its_method_changed(tmp_path: Path) -> None:
    """lucir() has cosine heads, which mlp() does not: the program is kept, and loading says so."""
    learner = Learner("lucir", classes=4, shape=(1, 8, 8), memory=10, net="mlp(width=8)")
    learner.learn(np.random.default_rng(0).integers(0, 256, (8, 1, 8, 8), np.uint8), np.arange(8) % 3)
    file = tmp_path / "net.safetensors"
    exporting.export(learner.engine, file, None, {"method": "lucir()", "net": "mlp(width=8)"})
    assert file.is_file()
    with pytest.raises(UserError, match=r"lucir\(\) gave the net in .* other layers than mlp\(width=8\) has; use the program"):
        exporting.load_net(file)


def test_what_differs_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"wrong")
    with pytest.raises(UserError, match=r"differs from the learner by 0\.1"):
        exporting._compare(torch.tensor([1.1]), torch.tensor([1.0]), file)
    assert not file.exists()


def test_a_run_without_weights_has_no_model(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["export", str(root / "er()" / "100" / "0"), str(tmp_path / "model.onnx")]) == 2
    assert "no finished run with its weights" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pt2", "onnx", "safetensors"])
@pytest.mark.parametrize(("method", "vectors"), [("er", False), ("slda", True), ("er(inference='ncm')", True)])
def test_a_learner_of_ones_own_is_exported_too(kind: str, method: str, vectors: bool, tmp_path: Path) -> None:
    """As it is, by either name, or from the file it was saved in; on vectors as on images."""
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    learner = Learner(method, memory=10, net="mlp(width=8)", device="cpu")
    of = np.random.default_rng(0)
    x = of.random((9, 5), np.float32) if vectors else of.integers(0, 256, (9, 1, 8, 8), np.uint8)
    learner.learn(x, ["rose", "tulip", "poppy"] * 3)
    one, two, saved = tmp_path / f"one.{kind}", tmp_path / f"two.{kind}", tmp_path / "learner"
    told = learner.export(one)
    assert told == gracecl.export(learner, one)
    assert learner.net.training, "it goes on as it was"
    if kind != "safetensors":
        assert ("float32 inputs [5] in" if vectors else "uint8 images [1, 8, 8] in") in told
    learner.save(saved)
    assert cli.call(["export", str(saved), str(two)]) == 0
    for file in (one, two):
        if kind == "safetensors":
            with safe_open(str(file), "pt") as opened:
                about = json.loads(opened.metadata()["gracecl"])
            net = exporting.load_net(file)
            torch.testing.assert_close(net.classifier.weight, learner.net.classifier.weight)
            assert net.inputs == learner.inputs
        elif kind == "pt2":
            extra = {"gracecl.json": ""}
            scores = torch.export.load(str(file), extra_files=extra).module()(torch.from_numpy(x)).detach().numpy()
            about = json.loads(extra["gracecl.json"])
        else:
            scores = exporting._run_onnx(file, torch.from_numpy(x)).numpy()
            about = json.loads(__import__("onnx").load(file).metadata_props[0].value)
        assert about["labels"] == ["rose", "tulip", "poppy"]
        if kind != "safetensors":
            labels = np.array(about["labels"])[np.array(about["seen"])[scores.argmax(axis=1)]]
            assert labels.tolist() == learner.predict(x).tolist()


def test_what_cannot_be_exported_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learner = Learner("sgd", net="mlp(width=8)", device="cpu")
    with pytest.raises(UserError, match="this learner is built when its first batch"):
        learner.export(tmp_path / "model.pt2")
    learner.learn(np.zeros((2, 5), np.float32), [0, 1])
    with pytest.raises(UserError, match=r"must end in .safetensors, .pt2 or .onnx"):
        learner.export(tmp_path / "model.bin")
    with pytest.raises(UserError, match="images and floats can be exported, and the inputs are"):
        exporting.examples(Inputs((4,), torch.int64))
    learner.save(tmp_path / "saved")
    assert cli.call(["export", str(tmp_path / "saved"), str(tmp_path / "runs.csv")]) == 2
    assert "is a file, and tables are of runs" in capsys.readouterr().err
    (tmp_path / "other").write_text("nothing")
    assert cli.call(["export", str(tmp_path / "other"), str(tmp_path / "model.pt2")]) == 2
