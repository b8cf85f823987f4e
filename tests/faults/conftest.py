"""Counts what came of every fault, and prints the table at the end, also of several test processes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from machine import Count, Damaged, Machine, machine, table


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if shutil.which("cc") is None:
        pytest.skip("a C compiler makes the disk that fails")
    with machine(tmp_path_factory.mktemp("machine")) as found:
        yield found


@pytest.fixture(scope="session")
def damaged(made: Machine) -> Damaged:
    return Damaged.prepare(made)


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """Notes what came of a fault of some kind."""
    return lambda kind, outcome: record_property("fault", (kind, outcome))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: dict[str, Counter[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for name, found in report.user_properties:
                    if name == "fault":
                        counts.setdefault(found[0], Counter())[found[1]] += 1
    if counts:
        terminalreporter.write_line("\n" + table(counts))
