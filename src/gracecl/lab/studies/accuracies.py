"""What each method reached in each setting of a study, as one table: a row for each method, a column for each setting."""

from __future__ import annotations

from gracecl.functional.statistics import summarise
from gracecl.lab.report.groups import group_runs
from gracecl.lab.report.table import Cell, Entry, Table
from gracecl.lab.report.tables import spread_text
from gracecl.lab.report.terms import terms
from gracecl.lab.studies.rankings import METRIC, Protocol, brief, protocols
from gracecl.lab.studies.results import Results, Section
from gracecl.registry import renderers


@renderers.register("accuracies")
def sections(results: Results) -> list[Section]:
    """Final accuracy of each method in each setting, in one table; methods are told apart by their options, too."""
    found = protocols(results.runs)
    methods = list(dict.fromkeys(method for protocol in found for method in protocol.values))
    if not methods:
        return []
    short = brief(methods)
    rows: list[list[Entry]] = [
        [Cell(short[method], code=True), *(_shown(method, protocol) for protocol in found)] for method in methods
    ]
    about = f"`{METRIC}` in percent: mean ± sample standard deviation over seeds; – was not run. {terms(group_runs(results.runs))}"
    table = Table(["method", *(protocol.name for protocol in found)], "l" + "r" * len(found), rows, "", about)
    data = {protocol.name: protocol.values for protocol in found}
    return [Section("accuracies", f"## Accuracy in each setting\n\n{table.to_markdown(tight=True)}", data, leads=True)]


def _shown(method: str, protocol: Protocol) -> str:
    return spread_text(summarise(list(protocol.values.get(method, {}).values())), 1)
