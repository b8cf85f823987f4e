"""Progress goes to stderr, as a bar or as lines."""

from __future__ import annotations

import sys

from gracecl.data import progress as module
from gracecl.data.progress import progress


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    with progress("decoding x", 10) as advance:
        advance(4)
        advance(6)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("decoding x: 4 of 10 images, ")
    assert lines[0].endswith("s left")
    assert lines[-1].startswith("decoding x: 10 images, ")


def test_bytes_continue_from_what_was_there(capsys):
    with progress("x.zip", 3_000_000, "bytes", done=1_000_000) as advance:
        advance(500_000)
    assert capsys.readouterr().err.startswith("x.zip: 1.5 MB of 3.0 MB, ")


def test_unknown_totals_and_silence(capsys):
    with progress("unpacking", None, "files") as advance:
        advance(3)
    assert capsys.readouterr().err.startswith("unpacking: 3 files")
    with progress("quiet", 3, show=False) as advance:
        advance(3)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for unit in ("bytes", "images"):
        with progress("title", 10, unit) as advance:
            advance(10)
    assert "title" in capsys.readouterr().err
