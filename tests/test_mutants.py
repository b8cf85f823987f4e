"""The list of errors that `make mutants` makes is one of this source: each has its place, and one for every method."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from gracecl.registry import methods

HERE = Path(__file__).parent
WITHOUT_EQUATIONS = {"best"}
"""methods that are put together from others"""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("listed_mutants", HERE / "mutants" / "listed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["listed_mutants"] = module  # where its dataclass looks for names
    spec.loader.exec_module(module)
    return module


LISTED = load()


def test_every_mutant_has_its_place_and_is_python() -> None:
    for mutant in LISTED.MUTANTS:
        ast.parse(mutant.changed(LISTED.SOURCE))
        assert mutant.tests
        assert all((HERE / test).is_file() for test in mutant.tests), mutant


def test_every_method_has_a_mutant() -> None:
    with_one = {Path(mutant.file).stem for mutant in LISTED.MUTANTS}
    files = {module.rpartition(".")[2] for module, _ in methods.written.values()}
    assert files - with_one - WITHOUT_EQUATIONS == set()
