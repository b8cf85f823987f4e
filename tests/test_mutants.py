"""The list of errors that `make mutants` makes is one of this source: each has its place, and every equation's file has one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from gracecl.registry import controllers, methods

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "mutants"))

from changes import changed_since  # noqa: E402 (their folder is no package)
from listed import MUTANTS, SOURCE, Mutant  # noqa: E402

WITHOUT_EQUATIONS = {
    "nets/__init__.py",
    "nets/efficientnet_lite.py",
    "nets/mode.py",
    "nets/timm.py",
    "nets/transformers.py",
    "functional/__init__.py",
    "streams/batches.py",
    "streams/shown.py",
    "lab/theory/__init__.py",
    "lab/theory/page.py",
    "controllers/__init__.py",
}
"""that put parts together, or show what others computed"""


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {file: (SOURCE / file).read_text(encoding="utf-8") for file in {mutant.file for mutant in MUTANTS}}


def test_every_mutant_has_its_place_and_its_tests(texts: dict[str, str]) -> None:
    trees = {file: ast.parse(text) for file, text in texts.items()}
    for mutant in MUTANTS:
        mutant.place(trees[mutant.file])
        assert mutant.tests
        assert all((HERE / test).is_file() for test in mutant.tests), mutant


def test_mutants_do_not_depend_on_layout_or_on_the_order_of_definitions(texts: dict[str, str]) -> None:
    trees = {file: laid_out_anew(text) for file, text in texts.items()}
    for mutant in MUTANTS:
        mutant.place(trees[mutant.file])


@pytest.mark.exhaustive
def test_every_mutant_is_other_python(texts: dict[str, str]) -> None:
    without = {file: ast.unparse(ast.parse(text)) for file, text in texts.items()}
    for mutant in MUTANTS:
        changed = mutant.changed(texts[mutant.file])
        ast.parse(changed)
        assert changed != without[mutant.file], mutant


def laid_out_anew(text: str) -> ast.Module:
    """Parse a file again without comments, with a line per statement, and everything that it defines in reverse order."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            node.body.reverse()
    return ast.parse(ast.unparse(tree))


FILE = """
class Box:
    size: int = 3

    def volume(self, n: int = 2) -> float:
        # three edges
        return (self.size ** n) * self.scaled(
            "a", self.size,
        )

    def surface(self) -> float:
        self.note()
        return 6 * self.size**2 + 0 * self.size
"""


def made(function: str, before: str, after: str, nth: int | None = None) -> str:
    return Mutant("box.py", function, before, after, (), nth).changed(FILE)


def test_a_mutant_is_an_expression_or_a_statement_of_one_function() -> None:
    assert "return self.size * self.scaled('a', self.size)" in made("Box.volume", "self.size**n", "self.size")
    assert "self.size ** n * 2" in made("Box.volume", "self.scaled('a', self.size)", "2")
    assert "    pass\n        return 6" in made("Box.surface", "self.note()", "pass")
    assert "size: int = 4" in made("Box.size", "3", "4")
    assert "shape = 1\n    size: int = 3" in made("Box", "size: int = 3", "shape = 1; size: int = 3")
    assert "self.size ** 2 + 0 * 1" in made("Box.surface", "self.size", "1", nth=2)


@pytest.mark.parametrize(
    ("function", "before", "told"),
    [
        ("Box.surface", "self.size", "Box.surface holds it 2 times"),
        ("Box.surface", "self.size**3", "Box.surface holds it 0 times"),
        ("surface", "self.size**2", "there is no surface"),
    ],
)
def test_a_mutant_without_its_place_says_so(function: str, before: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        made(function, before, "1")


def test_files_that_differ_from_a_revision(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    source, tests = tmp_path / "src", tmp_path / "tests"
    for folder in (source, tests):
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "kept.py").write_text("1\n")
        (folder / "edited.py").write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (source / "edited.py").write_text("2\n")
    (source / "inner" / "committed.py").write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "second")
    (tests / "inner" / "new.py").write_text("1\n")
    uncommitted = {tests / "inner" / "new.py"}
    assert changed_since("HEAD", (source, tests)) == uncommitted
    assert changed_since("HEAD~1", (source, tests)) == uncommitted | {source / "edited.py", source / "inner" / "committed.py"}
    with pytest.raises(ValueError, match="nowhere"):
        changed_since("nowhere", (source, tests))


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
