"""Records in, tables, pictures and pages out. Reads run folders; knows nothing of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gracecl.errors import UserError
from gracecl.files import Written, write_json, write_sealed, write_text
from gracecl.report import figures, page
from gracecl.report.runs import RECORD, SUMMARY, Run, find_folders, find_runs, read_run, read_runs, read_summary, summary
from gracecl.report.tables import comparison_markdown

__all__ = [
    "Run",
    "find_folders",
    "find_runs",
    "read_run",
    "read_runs",
    "read_summary",
    "summary",
    "write_comparison",
    "write_run_report",
]


def write_run_report(path: str | Path, record: Written | None = None) -> dict[str, Any]:
    """Write summary.json, accuracy.json and the pictures of one run into its folder; the summary is returned.

    `record` is what the run recorded, to be compared with what is there; the summary holds it for whoever reads the run later.
    """
    record = record or Written.to(Path(path) / RECORD)
    run = read_run(path, record)
    result = summary(run) | {"record": record._asdict()}
    write_json(run.path / "accuracy.json", {rule: run.matrix(rule).tolist() for rule in run.rules()})
    figures.accuracy_matrix(run, run.path / "matrix.png")
    figures.layer_curves(run, run.path / "layers.png")
    figures.loss_curves(run, run.path / "losses.png")
    write_sealed(run.path / SUMMARY, result)  # last: it marks the run as finished
    return result


def write_comparison(root: str | Path, runs: Sequence[Run] | None = None) -> None:
    """Write report.html, report.md and comparison.png into `root`, about the given runs or else about all runs below it."""
    folder = Path(root)
    chosen = find_runs(folder) if runs is None else list(runs)
    if not chosen:
        raise UserError(f"there is no run in {folder} or below it")
    folder.mkdir(parents=True, exist_ok=True)
    settings = [_setting(chosen, name) for name in ("stream", "net", "memory", "commit")]
    parts = ["# Comparison", ", ".join(text for text in settings if text), comparison_markdown(chosen).rstrip()]
    if figures.comparison(chosen, folder / "comparison.png"):
        parts += [
            "![Accuracy over the stream, and the entropy of each layer](comparison.png)",
            "Accuracy on the tasks seen so far: mean over seeds in a band of one sample standard deviation. Entropies "
            "are those of one run: faint as recorded, strong as a running mean within each task.",
        ]
    page.write(folder / "report.html", chosen, str(folder), folder)
    write_text(folder / "report.md", "\n\n".join(part for part in parts if part) + "\n")


def _setting(runs: Sequence[Run], name: str) -> str:
    """`stream: split-digits(tasks=5)`, every value that occurs."""
    values = dict.fromkeys(str(run.config[name]) for run in runs if run.config.get(name) is not None)
    return f"{name}: {' / '.join(f'`{value}`' for value in values)}" if values else ""
