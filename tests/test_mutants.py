"""The list of errors that `make mutants` makes is one of this source: each has its place, and every equation's file has one."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from gracecl.registry import controllers, methods

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "mutants"))

from listed import MUTANTS, SOURCE  # noqa: E402 (its folder is no package)

WITHOUT_EQUATIONS = {
    "nets/__init__.py",
    "nets/efficientnet_lite.py",
    "nets/mode.py",
    "nets/timm.py",
    "nets/transformers.py",
    "functional/__init__.py",
    "theory/__init__.py",
    "theory/page.py",
    "controllers/__init__.py",
}
"""that put parts together, or show what others computed"""


def test_every_mutant_has_its_place_and_is_python() -> None:
    for mutant in MUTANTS:
        ast.parse(mutant.changed(SOURCE))
        assert mutant.tests
        assert all((HERE / test).is_file() for test in mutant.tests), mutant


def test_no_mutant_stands_there_twice() -> None:
    assert len({str(mutant) for mutant in MUTANTS}) == len(MUTANTS)


def test_every_method_and_every_rule_has_a_mutant() -> None:
    with_one = {mutant.file for mutant in MUTANTS}
    for registry, folder in ((methods, "methods"), (controllers, "controllers")):
        files = {f"{folder}/{module.rpartition('.')[2]}.py" for module, _ in registry.written.values()}
        assert files - with_one == set()


def test_every_file_of_numbers_has_a_mutant() -> None:
    with_one = {mutant.file for mutant in MUTANTS}
    for folder in ("functional", "nets", "memory", "controllers", "streams", "theory"):
        files = {f"{folder}/{file.name}" for file in (SOURCE / folder).glob("*.py")}
        assert files - with_one - WITHOUT_EQUATIONS == set()
