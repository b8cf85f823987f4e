"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from gracecl.lab.runs import jobs


def pytest_configure() -> None:
    """Heed Ctrl-C and the end of a terminal, which tests send, also where whoever started the tests ignores them."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first, so that no process waits for the other's last one."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True, scope="session")
def one_run_at_a_time() -> Iterator[None]:
    """Tests run side by side already; runs in processes of their own would load everything anew. Tests of that say --jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "cores", lambda: 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny nets are fastest on one thread, and processes that a test starts do the same arithmetic as the test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
