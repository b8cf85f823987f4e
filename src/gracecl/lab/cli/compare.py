"""`gracecl compare`."""

from __future__ import annotations

from pathlib import Path

from gracecl.lab.cli.output import print_damaged
from gracecl.terminal import print_out, print_table


def compare(
    names: tuple[str, ...],
    /,
    runs: Path = Path("runs"),
    metric: str = "acc",
    rule: str | None = None,
    out: Path | None = None,
) -> int:
    """Say whether methods differ, on the seeds they share: intervals, tests, effect sizes, seeds needed, and a sentence each.

    The first NAME is what the others are compared with. A name is a folder of runs, or a method among the runs below --runs; a
    single folder stands for all its methods. Where several settings have the same methods, they are also ranked over the settings.

    Args:
        names: folders, or expressions of methods
        runs: where methods are looked for
        metric: acc, aia, forgetting, forgetting_mose (the paper's AF), bwt, learning_acc, aaa, min_acc, wc_acc, ece, nll or seconds
        rule: compare what this inference rule predicts (default: each method's own)
        out: folder for compare.md, compare.json, compare.png and, over several settings, ranks.png
    """
    from gracecl.lab.report import compare as comparing
    from gracecl.lab.report.select import select

    comparing.check_metric(metric)
    damaged: list[str] = []
    selections = select(names, runs, rule, damaged)
    pairs = comparing.against_first(selections)
    found, under = comparing.compare(pairs, metric), comparing.terms_of(pairs)
    over = comparing.over_settings([group for selection in selections for group in selection], metric)
    for table in comparing.terminal_tables(found, under):
        print_table(table)
    several = len({line.setting for line in found}) > 1
    for line in found:
        print_out(line.sentence + (f" ({line.setting})" if several else ""))
    if over is not None:
        print_out(comparing.ranks_sentence(*over, metric))
    if out is not None:
        comparing.write(out, found, under, over)
        print_out(f"{out / 'compare.md'}, compare.json and compare.png hold it")
    return print_damaged(list(dict.fromkeys(damaged)))
