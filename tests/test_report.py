"""Run folders in, tables, pictures and pages out."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gracecl.errors import UserError
from gracecl.files import replacing
from gracecl.lab.report import figures, find_runs, read_run, summary, tables, write_comparison, write_run_report
from gracecl.lab.report.groups import Group
from gracecl.lab.report.runs import Run, measure
from gracecl.lab.report.style import spread
from gracecl.lab.report.table import Table
from run_folders import STEPS_PER_TASK, unfinish, write_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, three seeds each."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("er()", "mose()", "grace(mose())"):
        for seed in range(3):
            write_run(folder, method, seed)
    return folder


def shown(table: Table, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


# --- reading


def test_a_run_is_read(root: Path) -> None:
    run = read_run(root / "mose()" / "100" / "1")
    assert run.finished
    assert len(run.steps) == 3 * STEPS_PER_TASK
    assert run.task_ends == [39, 79, 119]
    a = run.matrix("ncm_mean")
    assert a.shape == (3, 3)
    assert np.isnan(a[np.triu_indices(3, 1)]).all()
    assert a[2].tolist() == run.evals[-1]["accuracy"]["ncm_mean"]
    steps, rows = run.seen("ncm_mean")
    assert steps == [19, 39, 59, 79, 99, 119]
    assert [len(row) for row in rows] == [1, 1, 2, 2, 3, 3]


def evaluated(*evals: tuple[int, bool, list[float]], **timing: float) -> Run:
    """A run with these evaluations: task, whether it ended there, accuracies."""
    records = [
        {"step": step, "task": task, "task_end": end, "accuracy": {"linear_last": row}}
        for step, (task, end, row) in enumerate(evals)
    ]
    return Run(Path("run"), {"rule": "linear_last", "method": "er()"}, [], records, [], dict(timing))


def test_a_task_that_has_not_ended_is_not_in_the_matrix_and_counts_at_any_time() -> None:
    run = evaluated((0, False, [30.0]), (0, True, [80.0]), (1, False, [60.0, 20.0]))
    assert run.matrix("linear_last").tolist() == [[80.0]]
    found = measure(run, "linear_last")
    assert (found["acc"], found["learning_acc"]) == (80.0, 80.0)
    assert found["aaa"] == pytest.approx((30 + 80 + 40) / 3)


def test_a_cost_is_the_mean_over_seeds() -> None:
    group = Group("er()", [evaluated(train_seconds=3.0), evaluated(train_seconds=5.0)], 0, "linear_last")
    assert group.cost("seconds") == 4.0


def test_runs_are_found_in_the_order_of_seeds(tmp_path: Path) -> None:
    for seed in (10, 2):
        write_run(tmp_path, "er()", seed, tasks=1)
    assert [run.config["seed"] for run in find_runs(tmp_path)] == [2, 10]


@pytest.mark.parametrize("cut", [1, 30, 100])
def test_a_last_line_cut_short_is_dropped(tmp_path: Path, cut: int) -> None:
    folder = write_run(tmp_path)
    file = folder / "metrics.jsonl"
    file.write_bytes(file.read_bytes().rstrip(b"\n")[:-cut])
    run = read_run(folder)
    assert len(run.tasks) == 2
    assert len(run.evals) == 6


def test_a_killed_run_is_not_finished_and_counts_the_tasks_that_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    assert read_run(folder).finished
    unfinish(folder, 100)
    run = read_run(folder)
    assert not run.finished
    assert run.matrix("ncm_mean").shape == (2, 2)
    assert math.isfinite(summary(run)["metrics"]["ncm_mean"]["forgetting"])
    assert summary(run)["steps"] == run.steps[-1]["step"] + 1


def test_steps_written_again_after_a_resume_count_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    file = folder / "metrics.jsonl"
    once = read_run(folder)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines + lines[50:]))
    again = read_run(folder)
    assert (again.steps, again.evals, again.tasks) == (once.steps, once.evals, once.tasks)


def test_an_any_time_evaluation_does_not_hide_the_one_at_the_end_of_the_task(tmp_path: Path) -> None:
    folder = write_run(tmp_path, tasks=1)
    end = read_run(folder).evals[-1]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**end, "task_end": False}) + "\n")
    assert read_run(folder).evals[-1] == end


def test_a_run_that_sees_every_task_from_the_start(tmp_path: Path) -> None:
    """joint: the entries above the diagonal are kept in the matrix and count in no metric."""
    folder = write_run(tmp_path, "er()", tasks=2)
    records = [
        {"kind": "eval", "step": 10, "task": 0, "task_end": True, "accuracy": {"linear_last": [80.0, 70.0]}},
        {"kind": "eval", "step": 20, "task": 1, "task_end": True, "accuracy": {"linear_last": [90.0, 60.0]}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = read_run(folder)
    assert run.matrix("linear_last").tolist() == [[80.0, 70.0], [90.0, 60.0]]
    assert [row.tolist() for row in run.seen("linear_last")[1]] == [[80.0], [90.0, 60.0]]
    assert summary(run)["metrics"]["linear_last"]["aia"] == pytest.approx((80 + 75) / 2)


def test_what_is_not_a_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run \(no config\.json\)"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="no folder"):
        find_runs(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text('{"method": "er()"}')
    with pytest.raises(UserError, match="lacks stream, seed, rule"):
        read_run(tmp_path)


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    with pytest.raises(UserError, match=r"line 2 of .* is damaged"):
        read_run(folder)
    file.write_text('{"kind": "eval", "step": 3}\n')
    with pytest.raises(UserError, match=r"line 1 of .* is no eval record"):
        read_run(folder)


def test_a_rule_that_was_not_evaluated_is_refused(root: Path) -> None:
    with pytest.raises(UserError, match="not evaluated with the rule 'ncm_mean'; it has linear_last"):
        read_run(root / "er()" / "100" / "0").matrix("ncm_mean")


def test_summary_separates_rules_from_taps(root: Path) -> None:
    result = summary(read_run(root / "grace(mose())" / "100" / "2"))
    assert (result["rule"], result["seed"], result["steps"]) == ("ncm_mean", 2, 120)
    assert list(result["metrics"]) == ["linear_last", "linear_mean", "ncm_last", "ncm_mean"]
    assert list(result["per_tap"]) == [f"{rule}_{layer}" for rule in ("linear", "ncm") for layer in (1, 2, 3, 4)]
    assert result["metrics"]["linear_last"]["ece"] == 0.12
    assert "ece" not in result["metrics"]["ncm_mean"]


# --- tables


def test_comparison_has_a_row_per_method(root: Path) -> None:
    runs = find_runs(root)
    text = shown(tables.comparison_table(runs))
    values = [summary(run)["metrics"]["linear_last"]["acc"] for run in runs if run.config["method"] == "er()"]
    row = next(line for line in text.splitlines() if "er()" in line)
    assert f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}" in row
    assert "14 ± 1" in row  # seconds 12.5, 13.5, 14.5
    assert "linear_last" in text


def test_tables_fit_into_eighty_columns(root: Path) -> None:
    runs = find_runs(root)
    grace = [run for run in runs if run.config["method"] == "grace(mose())"]
    for table in (tables.comparison_table(runs), tables.rules_table(grace), tables.run_table(grace[0])):
        assert "…" not in shown(table, width=80)


def test_columns_that_do_not_fit_stand_below(root: Path) -> None:
    metrics = ("acc", "aia", "forgetting", "forgetting_mose", "bwt", "learning_acc", "min_acc", "wc_acc")
    wide = tables.comparison_table(find_runs(root), metrics)
    below = shown(wide, width=80)
    assert "…" not in below
    assert all(len(line) <= 80 for line in below.splitlines())
    assert below.count("method") > shown(wide, width=300).count("method"), "each part begins with the methods"
    for text in ("wc_acc ↑", "seconds", "percent; mean ± sample std"):
        assert below.count(text) == shown(wide, width=300).count(text) == 1


def test_markdown_pairs_methods_by_seed(root: Path) -> None:
    runs = find_runs(root)
    text = tables.comparison_markdown(runs, metrics=("acc",))
    acc = {(run.config["method"], run.config["seed"]): summary(run)["metrics"][run.rule]["acc"] for run in runs}
    differences = [acc["mose()", seed] - acc["er()", seed] for seed in range(3)]
    assert "### Difference to `er()` on the same seeds" in text
    assert f"| `mose()` | 3 | {np.mean(differences):+.2f} [" in text
    assert "(± " in text


def test_no_pairs_on_different_streams(tmp_path: Path) -> None:
    write_run(tmp_path, "er()", 0, stream_hash="one order")
    write_run(tmp_path, "mose()", 0, stream_hash="another order")
    assert "Difference" not in tables.comparison_markdown(find_runs(tmp_path))


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    write_run(tmp_path, "er()")
    write_run(tmp_path, "mose()")
    text = tables.comparison_markdown(find_runs(tmp_path))
    assert "±" not in text.split("\n\n")[0]
    assert "nan" not in text


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    for memory in (100, 200):
        write_run(tmp_path, "er()", memory=memory)
    text = shown(tables.comparison_table(find_runs(tmp_path)))
    assert "er(), memory=100" in text
    assert "er(), memory=200" in text


def test_unfinished_runs_are_left_out_and_counted(tmp_path: Path) -> None:
    write_run(tmp_path, "er()", 0)
    unfinish(write_run(tmp_path, "er()", 1), 0)
    text = tables.comparison_markdown(find_runs(tmp_path))
    assert "| `er()` | `linear_last` | 1 seed: no interval |" in text
    assert "(1 unfinished run left out)" in text
    caption = " ".join(shown(tables.comparison_table(find_runs(tmp_path))).split())
    assert "over n seeds (1 unfinished run left out). Same stream: yes;" in caption


def test_rules_table(root: Path) -> None:
    runs = find_runs(root / "grace(mose())")
    for text in (shown(tables.rules_table(runs)), shown(tables.rules_table(runs[0]))):
        assert "ncm_mean *" in text
        assert text.index("ncm_last") < text.index("linear_1") < text.index("ncm_4")
    with pytest.raises(UserError, match="one method"):
        tables.rules_table(find_runs(root))


def test_run_table(root: Path) -> None:
    run = read_run(root / "grace(mose())" / "100" / "0")
    text = shown(tables.run_table(run))
    assert "grace(mose()) on split-digits(tasks=3), seed 0" in text
    for metric in ("acc ↑", "wc_acc ↑", "bwt ↑", "ece ↓", "nll ↓"):
        assert metric in text
    assert f"{summary(run)['metrics']['ncm_mean']['aaa']:.2f}" in text


# --- files and pictures


def test_run_report_writes_strict_json_and_pictures(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "summary.json").unlink()
    before = {file.name for file in folder.iterdir()}
    result = write_run_report(folder)
    written = {file.name for file in folder.iterdir()} - before
    assert written == {"summary.json", "accuracy.json", "matrix.png", "layers.png", "losses.png"}
    assert all((folder / name).read_bytes().startswith(PNG) for name in written if name.endswith("png"))
    assert json.loads((folder / "summary.json").read_text())["metrics"] == result["metrics"]
    accuracy = json.loads((folder / "accuracy.json").read_text())
    assert accuracy["ncm_mean"][0][1:] == [None, None]
    assert accuracy["linear_3"][2] == read_run(folder).evals[-1]["accuracy"]["linear_3"]
    assert write_run_report(folder) == result


def test_a_run_that_diverged_has_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    for index in range(90, len(lines)):
        record = json.loads(lines[index])
        for row in record.get("rows", {}).values():
            row[0], row[-1] = float("nan"), float("inf")
        lines[index] = json.dumps(record)
    file.write_text("\n".join(lines) + "\n")
    write_run_report(folder)
    assert (folder / "layers.png").exists()


def test_a_method_without_feedback_has_no_layer_picture(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "er()")
    write_run_report(folder)
    assert (folder / "losses.png").exists()
    assert not (folder / "layers.png").exists()


def test_a_run_that_only_began_has_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "metrics.jsonl").write_text("")
    assert write_run_report(folder)["metrics"] == {}
    assert not list(folder.glob("*.png"))


def test_one_task(tmp_path: Path) -> None:
    folder = write_run(tmp_path, tasks=1)
    assert write_run_report(folder)["metrics"]["ncm_mean"]["forgetting"] == 0.0


def test_many_tasks_and_methods(tmp_path: Path) -> None:
    """Numbers and direct labels have no room here; the pictures must still come out."""
    run = read_run(write_run(tmp_path, tasks=25))
    assert figures.accuracy_matrix(run, tmp_path / "matrix.png")
    for index in range(9):
        write_run(tmp_path, f"mose(n_recall={index})", tasks=2)
    assert figures.comparison(find_runs(tmp_path), tmp_path / "comparison.png")


def test_seeds_evaluated_at_different_steps_are_compared(tmp_path: Path) -> None:
    write_run(tmp_path, "er()", 0)
    file = write_run(tmp_path, "er()", 1) / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**record, "step": record["step"] + 7}) + "\n" for record in records))
    assert figures.comparison(find_runs(tmp_path), tmp_path / "comparison.png")


def test_comparison_page(root: Path) -> None:
    write_comparison(root)
    text = (root / "report.md").read_text()
    assert "stream: `split-digits(tasks=3)`, net: `resnet18(width=8)`, memory: `100`, commit: `0123abc`" in text
    assert "](comparison.png)" in text
    assert (root / "comparison.png").read_bytes().startswith(PNG)
    with pytest.raises(UserError, match="no run"):
        write_comparison(root, [])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    target.write_text("old")

    def fail() -> None:
        with replacing(target) as temporary:
            temporary.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    assert target.read_text() == "old"


def test_labels_are_pushed_apart_no_more_than_needed() -> None:
    assert spread(np.array([0.9, 0.1, 0.5]), 0.1).tolist() == pytest.approx([0.9, 0.1, 0.5])
    assert spread(np.array([0.5, 0.5, 0.9]), 0.1).tolist() == pytest.approx([0.45, 0.55, 0.9])
    assert spread(np.array([1.0, 1.0, 0.0]), 0.1).tolist() == pytest.approx([0.85, 0.95, 0.05])  # inside the axes


def test_reports_need_no_torch_and_tables_no_matplotlib() -> None:
    code = "import sys, gracecl.lab.report.tables; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
