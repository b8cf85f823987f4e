"""`make mutants`: each single error of the list, made in a copy of the source, must be found by a test.

    python tests/mutants [--at-once N] [--changed REVISION] [words of a file, a function or its code ...]

Each runs in a child of this process, which has loaded already whatever takes long. The unchanged source runs first: its tests must
pass. What was found is noted in a file, so that a run that was stopped goes on; the notes hold for one state of source and tests.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from changes import changed_since
from listed import MUTANTS, SOURCE, TESTS, Mutant

FOUND, SURVIVED = 1, 0
"""what pytest ends with"""
NOTES = Path("runs") / "mutants.txt"
TAKE_LONG = (
    "hypothesis.strategies",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pytest_timeout",
    "scipy.stats",
    "sklearn.linear_model",
    "torch._dynamo",
    "torch.func",
    "tyro",
)
"""modules of others that tests import"""
OPTIONS = ("-x", "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-m", "not slow")
OPTIONS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""of pytest, which would rather load hypothesis by itself"""


class Trial:
    """Tests in a process of their own, with a copy of the source in which some files have other code."""

    def __init__(self, code: Mapping[str, str], tests: Sequence[str], mutant: Mutant | None = None) -> None:
        self.mutant = mutant
        self.folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        package = self.folder / "gracecl"
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
        for file, text in code.items():
            (package / file).write_text(text, encoding="utf-8")
        self.process = os.fork()
        if self.process == 0:
            os._exit(self._run(tests))

    @classmethod
    def of(cls, mutant: Mutant) -> Trial:
        """Try a mutant."""
        return cls({mutant.file: mutant.changed(source_of(mutant.file))}, mutant.tests, mutant)

    @classmethod
    def without(cls, mutants: Sequence[Mutant]) -> Trial:
        """Try the source without errors, written as those of the mutants are: without comments."""
        code = {file: ast.unparse(ast.parse(source_of(file))) for file in {mutant.file for mutant in mutants}}
        return cls(code, sorted({test for mutant in mutants for test in mutant.tests}))

    def _run(self, tests: Sequence[str]) -> int:
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.path.insert(0, str(self.folder))
        os.environ["PYTHONPATH"] = str(self.folder)  # for the processes that tests start
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins that these tests do not use take a second to load
        torch.set_num_threads(1)
        try:
            return int(pytest.main([*OPTIONS, *(str(TESTS / test) for test in tests)]))
        except BaseException:  # noqa: BLE001 (an error of the source's own may be of any kind)
            return FOUND

    def end(self, status: int) -> int:
        """Say how it went; return what pytest ended with."""
        code = os.waitstatus_to_exitcode(status)
        if self.mutant is not None:
            told = {FOUND: "found", SURVIVED: "SURVIVED"}.get(code, f"pytest ended with {code}")
            print(f"{told:9} {self.mutant}", flush=True)
        if code not in (FOUND, SURVIVED) or (self.mutant is None and code == FOUND):
            print((self.folder / "log").read_text(errors="replace"))
        shutil.rmtree(self.folder)
        return code


def source_of(file: str) -> str:
    return (SOURCE / file).read_text(encoding="utf-8")


class Notes:
    """Which errors were found so far, in a file; those of another state of source and tests are dropped."""

    def __init__(self, file: Path) -> None:
        self.file, state = file, state_of_the_tree()
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        self.found = set(lines[1:]) if lines[:1] == [state] else set[str]()
        if lines[:1] != [state]:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{state}\n", encoding="utf-8")

    def add(self, mutant: Mutant) -> None:
        self.found.add(str(mutant))
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(f"{mutant}\n")


def state_of_the_tree() -> str:
    """A digest of all that the outcome depends on."""
    files = sorted(
        file for root in (SOURCE, TESTS) for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def table(chosen: Sequence[Mutant], found: set[str]) -> str:
    """How many errors were made in each part of the library, and how many were found."""
    made = Counter(mutant.part for mutant in chosen)
    seen = Counter(mutant.part for mutant in chosen if str(mutant) in found)
    rows = [(f"`{part}`", made[part], seen[part]) for part in sorted(made)] + [("all", made.total(), seen.total())]
    return "\n".join(["| part | errors | found |", "|---|---:|---:|", *(f"| {part} | {n} | {k} |" for part, n, k in rows)])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose line holds all of these")
    parser.add_argument("--at-once", type=int, default=2, help="processes side by side")
    parser.add_argument("--sure", action="store_true", help="the tests are known to pass without any mutant")
    parser.add_argument("--notes", type=Path, default=NOTES, help="file of what was found so far")
    parser.add_argument("--changed", metavar="REVISION", help="only mutants whose file, or one of whose tests, differs from it")
    given = parser.parse_args(arguments)
    chosen, notes = [mutant for mutant in MUTANTS if all(word in str(mutant) for word in given.words)], Notes(given.notes)
    if given.changed:
        try:
            changed = changed_since(given.changed, (SOURCE, TESTS))
        except ValueError as error:
            parser.error(str(error))
        chosen = [mutant for mutant in chosen if changed & {SOURCE / mutant.file, *(TESTS / test for test in mutant.tests)}]
    waiting = [mutant for mutant in reversed(chosen) if str(mutant) not in notes.found]
    for module in TAKE_LONG:
        importlib.import_module(module)
    gc.freeze()  # else every child looks through all that was loaded, and copies it
    if not given.sure and waiting:
        plain = Trial.without(waiting)
        if plain.end(os.waitpid(plain.process, 0)[1]) != SURVIVED:
            print("the tests fail without any mutant")
            return 1
    running = dict[int, Trial]()
    while waiting or running:
        while waiting and len(running) < given.at_once:
            mutant = waiting.pop()
            trial = Trial.of(mutant)
            running[trial.process] = trial
        process, status = os.wait()
        if process in running:
            trial = running.pop(process)
            if trial.end(status) == FOUND and trial.mutant is not None:
                notes.add(trial.mutant)
    print(table(chosen, notes.found))
    return 0 if all(str(mutant) in notes.found for mutant in chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
