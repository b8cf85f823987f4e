"""Write the files of a report: of a run into its folder, of a comparison into another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gracecl.errors import UserError
from gracecl.files import Written, as_name, write_json, write_sealed, write_text
from gracecl.lab.report import evaluation_figures, figures, page, sheet
from gracecl.lab.report.beside_paper import column_for
from gracecl.lab.report.groups import COSTS, group_runs
from gracecl.lab.report.runs import MATRICES, RECORD, SUMMARY, Run, find_runs, read_run, summary
from gracecl.lab.report.tables import COMPARED, comparison_markdown
from gracecl.lab.report.terms import terms

FIGURES = ("pdf", "svg", "png")
FORMATS = ("html", "md", "csv", "tex", *FIGURES)
"""of a report: the page, a table each, and figures"""


def write_run_report(path: str | Path, record: Written | None = None) -> dict[str, Any]:
    """Write summary.json, accuracy.json and the pictures of a run into its folder; return the summary.

    `record` is what the run recorded, to be compared with what is there; the summary holds it for whoever reads the run later.
    """
    record = record or Written.to(Path(path) / RECORD)
    run = read_run(path, record)
    result = summary(run) | {"finished": True, "record": record._asdict()}
    write_json(run.path / MATRICES, run.matrices())
    figures.accuracy_matrix(run, run.path / "matrix.png")
    figures.layer_curves(run, run.path / "layers.png")
    figures.loss_curves(run, run.path / "losses.png")
    write_sealed(run.path / SUMMARY, result)  # last: it marks the run as finished
    return result


def write_comparison(
    root: str | Path,
    runs: Sequence[Run] | None = None,
    formats: Sequence[str] = ("html", "md"),
    metrics: Sequence[str] = COMPARED,
    paper: str = "auto",
) -> list[Path]:
    """Write a report on the given runs, or on all runs below `root`, into that folder; return the files written.

    `html` is the page report.html, `md` report.md with comparison.png, `csv` and `tex` report.csv and report.tex, `pdf`, `svg` and
    `png` the folder figures. Tables have these metrics, and beside them the paper's numbers: of the same data set and memory with
    `auto`, of another memory, or `none`. The page has them for each method by itself.
    """
    folder = Path(root)
    chosen = find_runs(folder) if runs is None else list(runs)
    if not chosen:
        raise UserError(f"there is no run in {folder} or below it")
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"report.{kind}" for kind in formats if kind not in FIGURES]
    column = column_for(chosen, paper)
    found = sheet.lines(group_runs(chosen), metrics, column)
    settings = ", ".join(text for text in (_setting(chosen, name) for name in ("stream", "net", "memory", "commit")) if text)
    if "html" in formats:
        page.write(folder / "report.html", chosen, str(folder), folder, paper)
    if "csv" in formats:
        write_text(folder / "report.csv", sheet.csv(found, metrics))
    if "tex" in formats:
        beside = f" {column.about}" if column and sheet.beside(found, metrics) else ""
        about = "Mean ± sample standard deviation over seeds; the best bold, the second underlined."
        caption = f"{about} {settings.replace('`', '')}.{beside} {terms([line.group for line in found])}"
        write_text(folder / "report.tex", sheet.latex(found, metrics, caption))
    if "md" in formats:
        parts = ["# Comparison", settings, comparison_markdown(chosen, metrics, column).rstrip()]
        if figures.comparison(chosen, folder / "comparison.png"):
            parts += [
                "![Accuracy over the stream, and the entropy of each layer](comparison.png)",
                "Accuracy on the tasks seen so far: mean over seeds in a band of one sample standard deviation. Entropies "
                "are those of one run: faint as recorded, strong as a running mean within each task.",
            ]
        write_text(folder / "report.md", "\n\n".join(part for part in parts if part) + "\n")
    for kind in (kind for kind in formats if kind in FIGURES):
        written += write_figures(folder / "figures", chosen, kind)
    return written


def write_figures(folder: Path, runs: Sequence[Run], kind: str) -> list[Path]:
    """Draw all figures of the comparison and of the first run of each method; return the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = [group for group in group_runs(runs) if group.runs]
    over_time = "accuracy-over-the-stream"
    drawn = [(over_time, figures.comparison(runs, folder / f"{over_time}.{kind}"))]
    for metric in ("acc", "forgetting"):
        drawn.append((metric, figures.seeds_and_intervals(groups, metric, folder / f"{metric}.{kind}")))
    for cost, label in COSTS.items():
        name = f"acc-against-{cost}"
        drawn.append((name, figures.against(groups, "acc", cost, label, folder / f"{name}.{kind}")))
    of_a_run = {
        "matrix": figures.accuracy_matrix,
        "tasks": figures.task_curves,
        "layers": figures.layer_curves,
        "feedback": figures.feedback_maps,
        "losses": figures.loss_curves,
        "prequential": evaluation_figures.prequential,
        "gaps": evaluation_figures.gaps,
        "calibration": evaluation_figures.calibration,
        "confusion": evaluation_figures.confusion,
    }
    for number, group in enumerate(groups, start=1):
        method = as_name(group.label)[:60]
        for what, draw in of_a_run.items():
            name = f"{number:02d}-{method}-{what}"
            drawn.append((name, draw(group.runs[0], folder / f"{name}.{kind}")))
    return [folder / f"{name}.{kind}" for name, done in drawn if done]


def _setting(runs: Sequence[Run], name: str) -> str:
    """Format `stream: split-digits(tasks=5)` with every value that occurs."""
    values = dict.fromkeys(str(run.config[name]) for run in runs if run.config.get(name) is not None)
    return f"{name}: {' / '.join(f'`{value}`' for value in values)}" if values else ""
