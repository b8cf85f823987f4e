"""Tables for a paper: LaTeX, CSV and Markdown with the paper's numbers beside ours, and figures as PDF and SVG."""

from __future__ import annotations

import csv
import math
import re
import shutil
import subprocess
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gracecl.errors import UserError
from gracecl.lab import cli, paper
from gracecl.lab.report import figures, find_runs, sheet, style, write_figures
from gracecl.lab.report.beside_paper import Column, column_for, row_of
from gracecl.lab.report.groups import group_runs
from gracecl.lab.report.tables import comparison_markdown, comparison_table
from gracecl.lab.studies import mechanism
from run_folders import write_run

METHODS = ("er()", "mose()", "grace(mose())")
PAPER = {row: paper.accuracies()[row] for row in ("ER", "MOSE", "GRACE")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods on CIFAR-100 with a memory that the paper has."""
    folder = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        for seed in range(3):
            write_run(folder, method, seed, stream="split-cifar100(tasks=3)", memory=1000)
    return folder


def test_rows_of_the_paper() -> None:
    assert row_of("er(n_recall=10)") == "ER"
    assert row_of("grace(mose(), beta=0.5)") == "GRACE"
    assert row_of("er() + ewc()") is None
    assert row_of("Somebody's method") is None
    assert Column("Split CIFAR-100", 1000).value("er()", "acc") == PAPER["ER"]
    [record] = paper.records(table="main_forgetting", method="ER", dataset="Split CIFAR-100", buffer_size=1000)
    assert Column("Split CIFAR-100", 1000).value("er()", "forgetting_mose") == record["mean"]
    assert Column("Split CIFAR-100", 1000).value("er()", "bwt") is None


def test_which_column_of_the_paper(root: Path, tmp_path: Path) -> None:
    runs = find_runs(root)
    assert column_for(runs, "auto") == Column("Split CIFAR-100", 1000)
    assert column_for(runs, "2000") == Column("Split CIFAR-100", 2000)
    assert column_for(runs, "none") is None
    write_run(tmp_path, "er()")
    assert column_for(find_runs(tmp_path), "auto") is None, "the digits are not in the paper"
    with pytest.raises(UserError, match=r"--paper must be auto, none or a memory .*: 200, 500, 1000, 2000, 5000"):
        column_for(runs, "1500")


def test_latex(root: Path) -> None:
    found = sheet.lines(group_runs(find_runs(root)), ["acc", "bwt"], Column("Split CIFAR-100", 1000))
    text = sheet.latex(found, ["acc", "bwt"], "50 % of _it_")
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert r"\begin{tabular}{lrrrr}" in text
    assert r"Method & acc $\uparrow$ & paper & $\Delta$ & bwt $\uparrow$ \\" in text
    assert r"\caption{50 \% of \_it\_}" in text
    rows = [re.split(r" & ", line.strip().removesuffix(r" \\")) for line in body]
    assert [len(row) for row in rows] == [5, 5, 5]
    for row, line, name in zip(rows, found, ("ER", "GRACE", "MOSE"), strict=True):
        mean, std = line.values["acc"].ours[:2]
        assert row[0] == rf"\texttt{{{line.group.label}}}"
        assert re.sub(r"\\(textbf|underline){(.*?)}", r"\2", row[1]) == rf"{mean:.1f} {{\scriptsize $\pm$ {std:.1f}}}"
        assert row[2] == f"{PAPER[name]:.1f}"
        assert row[3] == f"${mean - PAPER[name]:+.1f}$"
    by_accuracy = sorted(rows, key=lambda row: -found[rows.index(row)].values["acc"].ours.mean)
    assert r"\textbf" in by_accuracy[0][1]
    assert r"\underline" in by_accuracy[1][1]
    assert "{" not in by_accuracy[2][1].split("{\\scriptsize")[0]


def has_tex() -> bool:
    """pdflatex and booktabs."""
    if shutil.which("pdflatex") is None or (find := shutil.which("kpsewhich")) is None:
        return False
    return subprocess.run([find, "booktabs.sty"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not has_tex(), reason="needs pdflatex and booktabs: Debian's texlive-latex-recommended")
def test_latex_compiles(root: Path, tmp_path: Path) -> None:
    """The table of the command, and names with every letter that LaTeX gives a meaning."""
    assert cli.call(["report", str(root), "--formats", "tex", "--metrics", "acc,bwt,ece", "--out", str(tmp_path)]) == 0
    [group, *_] = group_runs(find_runs(root))
    odd = replace(group, label="é # $ % & ~ _ ^ \\ { } ± − < > | \" ' `")
    text = sheet.latex(sheet.lines([group, odd], ["acc"]), ["acc"], odd.label)
    (tmp_path / "odd.tex").write_text(text, encoding="utf-8")
    document = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{report}\input{odd}\end{document}"
    (tmp_path / "document.tex").write_text(document, encoding="utf-8")
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "document.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "document.pdf").read_bytes().startswith(b"%PDF")


def test_less_is_better_where_it_is(root: Path) -> None:
    found = sheet.lines(group_runs(find_runs(root)), ["forgetting"])
    best = min(found, key=lambda line: line.values["forgetting"].ours.mean)
    assert best.values["forgetting"].place == 0
    assert sorted(line.values["forgetting"].place for line in found if line.values["forgetting"].place is not None) == [0, 1]


def test_csv(root: Path) -> None:
    found = sheet.lines(group_runs(find_runs(root)), ["acc"], Column("Split CIFAR-100", 1000))
    rows = list(csv.DictReader(StringIO(sheet.csv(found, ["acc"]))))
    assert [row["method"] for row in rows] == [line.group.label for line in found]
    assert float(rows[0]["acc"]) == found[0].values["acc"].ours.mean
    assert float(rows[0]["acc_difference"]) == pytest.approx(found[0].values["acc"].ours.mean - PAPER["ER"])


def test_one_seed_leaves_cells_empty(tmp_path: Path) -> None:
    write_run(tmp_path, "er()", 0)
    found = sheet.lines(group_runs(find_runs(tmp_path)), ["acc"])
    [row] = csv.DictReader(StringIO(sheet.csv(found, ["acc"])))
    assert row["acc_std"] == row["acc_half_width"] == ""
    assert "pm" not in sheet.latex(found, ["acc"], "")
    assert math.isnan(found[0].values["acc"].difference)


def test_the_paper_stands_beside_ours_in_every_table(root: Path) -> None:
    column = Column("Split CIFAR-100", 1000)
    text = comparison_markdown(find_runs(root), ["acc"], column)
    assert f"| {PAPER['GRACE']:.1f} |" in text
    assert "with a memory of 1,000" in text
    assert text.count("**") == 2
    assert text.count("<u>") == 1
    console = Console(file=StringIO(), width=200)
    console.print(comparison_table(find_runs(root), ["acc"], column))
    assert f"{PAPER['MOSE']:.1f}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_command_writes_what_it_is_asked_for(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", str(root), "--out", str(tmp_path), "--metrics", "bwt,forgetting_mose"]
    assert cli.call([*words, "--formats", "csv,tex"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.csv", "report.tex"]
    assert "bwt" in (tmp_path / "report.tex").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert "report.csv" in printed
    assert "Open" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pdf", "svg"])
def test_figures(root: Path, tmp_path: Path, kind: str) -> None:
    runs = [run for run in find_runs(root) if run.config["method"] != "mose()"]
    written = write_figures(tmp_path / "first", runs, kind)
    names = {path.stem for path in written}
    assert {
        "accuracy-over-the-stream",
        "forgetting",
        "02-grace-mose-matrix",
        "02-grace-mose-tasks",
        "02-grace-mose-feedback",
    } <= names
    assert "01-er-feedback" not in names, "er has neither α nor γ"
    start = {"pdf": b"%PDF", "svg": b"<?xml"}[kind]
    assert all(path.read_bytes().startswith(start) for path in written)
    again = tmp_path / f"again.{kind}"
    figures.loss_curves(next(run for run in runs if run.config["method"] == "grace(mose())"), again)
    assert again.read_bytes() in [path.read_bytes() for path in written], "no date, no random name"


def test_accuracy_against_memory(tmp_path: Path) -> None:
    for memory in (50, 200):
        write_run(tmp_path, "er()", 0, memory=memory)
    names = {path.stem for path in write_figures(tmp_path / "figures", find_runs(tmp_path), "svg")}
    assert "acc-against-memory" in names


def test_a_report_on_what_is_not_there(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> str:
        assert cli.call(["report", *words]) == 2
        return capsys.readouterr().err

    assert "name the runs" in told()
    assert "no study's runs in results/nothing" in told("nothing")
    assert "needs a folder of its own" in told(str(root), str(tmp_path))
    assert "there is no format 'doc'" in told(str(root), "--formats", "doc")
    assert "did you mean 'bwt'" in told(str(root), "--metrics", "bwd")


def test_a_study_by_its_name(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mini").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    assert cli.call(["report", "mini", "--formats", "csv", "--out", "made"]) == 0
    assert (tmp_path / "made" / "report.csv").is_file()


def test_feedback_inside_the_net_is_drawn(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entropy of two runs, α and γ of the one with feedback: a line per layer in each of the four panels."""
    drawn: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: drawn.append(figure))
    run = find_runs(root / "grace(mose())")[0]
    mechanism.picture(run, run, tmp_path / "mechanism.png", "Inside the net (scale mini)")
    panels = drawn[0].axes
    assert len(panels) == 4
    assert all(len(axes.get_lines()) >= 4 for axes in panels[2:])
