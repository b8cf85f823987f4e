"""Which files differ from a revision."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


def changed_since(revision: str, folders: Sequence[Path]) -> set[Path]:
    """Return the files in these folders that differ from a revision, new ones included."""
    commands = (["diff", "--name-only", "--relative", revision, "--", "."], ["ls-files", "--others", "--exclude-standard"])
    return {folder / line for folder in folders for command in commands for line in told_by_git(command, folder)}


def told_by_git(command: Sequence[str], folder: Path) -> list[str]:
    told = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=False)
    if told.returncode:
        raise ValueError(f"git {' '.join(command)}: {told.stderr.strip()}")
    return told.stdout.splitlines()
