"""A single error that tests must find: an expression or a statement of one function, and what stands there instead.

Code is compared as syntax trees inside the named function, so layout, quotes, comments and all other code do not matter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

SOURCE = Path(__file__).parents[2] / "src" / "gracecl"
TESTS = Path(__file__).parents[1]
REGULARISERS = "golden/test_golden_regularisers.py oracle/test_regularisers.py"

Change: TypeAlias = "tuple[str, str] | tuple[str, str, int]"
"""before, after and, where the function holds `before` several times, which of them it is (from 1)"""
Place: TypeAlias = "tuple[str, tuple[Change, ...]]"


@dataclass(frozen=True)
class Mutant:
    file: str
    function: str
    """its qualified name, such as `MIR.plan`; or that of a class, a field or a constant"""
    before: str
    """a whole expression or statement"""
    after: str
    tests: tuple[str, ...]
    """where it is found, below `tests/`"""
    nth: int | None = None
    """which of several equal places, from 1; None where there is one"""

    def place(self, tree: ast.Module) -> ast.AST:
        """Find the code that becomes an error."""
        [before], _ = self.code
        whole = [node for name, node in definitions(tree) if name == self.function]
        places = [node for definition in whole for node in equal(definition, before)]
        if not (len(places) == 1 if self.nth is None else 1 <= self.nth <= len(places)):
            told = f"{self.function} holds it {len(places)} times" if whole else f"there is no {self.function}"
            raise ValueError(f"{self}: {told}")
        return places[(self.nth or 1) - 1]

    def changed(self, text: str) -> str:
        """Return the code of the file with the error in it."""
        tree = ast.parse(text)
        _, after = self.code
        return ast.unparse(Replacing(self.place(tree), after).visit(tree))

    @property
    def code(self) -> tuple[list[ast.AST], list[ast.AST]]:
        """What stands there and what is put there: two expressions, or a statement and one or several."""
        bodies = [ast.parse(code).body for code in (self.before, self.after)]
        before, after = ([node.value if isinstance(node, ast.Expr) else node for node in body] for body in bodies)
        alike = all(isinstance(node, ast.expr) for node in (*before, *after))
        return (before, after) if alike else (list(bodies[0]), list(bodies[1]))

    @property
    def part(self) -> str:
        """The part of the library that it is made in: a folder, or a file that is in none."""
        return self.file.partition("/")[0]

    def __str__(self) -> str:
        which = "" if self.nth is None else f" (number {self.nth})"
        return f"{self.file}: {self.function}: {self.before}{which}  ->  {self.after}"


def definitions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield functions, classes and assigned names below a node, each with its qualified name."""
    for child in ast.iter_child_nodes(node):
        match child:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name))
            ):
                yield outer + name, child
                yield from definitions(child, f"{outer}{name}.")
            case ast.stmt() | ast.excepthandler():
                yield from definitions(child, outer)


def equal(whole: ast.AST, wanted: ast.AST) -> list[ast.AST]:
    """Return the nodes below one that are the same code as another, in the order of the source."""
    form = ast.dump(wanted)
    found = [node for node in ast.walk(whole) if type(node) is type(wanted) and ast.dump(node) == form]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


class Replacing(ast.NodeTransformer):
    """Puts other code in the place of one node."""

    def __init__(self, place: ast.AST, other: list[ast.AST]) -> None:
        self.place, self.other = place, other

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        if node is not self.place:
            return self.generic_visit(node)
        return self.other if isinstance(node, ast.stmt) else self.other[0]


def within(function: str, *changes: Change) -> Place:
    """Errors in one function, field or constant."""
    return function, changes


def of(file: str, tests: str, *places: Place) -> list[Mutant]:
    """Errors in one file that the same tests find."""
    return [
        Mutant(file, function, before, after, tuple(tests.split()), *nth)
        for function, changes in places
        for before, after, *nth in changes
    ]


def method(name: str, *places: Place, tests: str = "") -> list[Mutant]:
    """Errors in the file of a method, whose tests are its oracle and golden files unless others are named."""
    own = (f"golden/test_golden_{name}.py", f"oracle/test_{name}.py")
    return of(f"methods/{name}.py", tests or " ".join(file for file in own if (TESTS / file).exists()), *places)
