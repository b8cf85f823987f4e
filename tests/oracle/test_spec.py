"""Expressions and names: what can be written is what is built, and nothing written is ever executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gracecl import nets, rng
from gracecl.core import Batch, LossTable, StreamBatch, Taps
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.base import Addition, Method, Sum, Wrapper
from gracecl.methods.er import ER
from gracecl.methods.grace import Grace
from gracecl.methods.mose import MOSE
from gracecl.registry import Registry, methods, nearest, normal, spec
from gracecl.registry.spec import Call, parse_call, parse_method, with_option


@dataclass(eq=False, repr=False)
class Pull(Addition):
    """A penalty that pulls the classifier towards zero: the smallest part one can add."""

    strength: float = 1.0
    """weight of the penalty"""
    words: str = "a-b"
    """text with a hyphen, to be kept as it is"""
    steps: int = 0

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        return {"penalty/pull": self.strength * self.net.classifier.weight.square().sum(dim=(1, 2))}

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.steps += 1


@dataclass(eq=False, repr=False)
class PullToo(Pull):
    """Another addition with the same row, and with the target of a method that it does not know."""

    def prepare(self, batch: Batch) -> None:
        batch.targets["mkd"] = batch.x


@dataclass(eq=False, repr=False)
class Same(Wrapper):
    """A wrapper that changes nothing."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The test's own methods have names for as long as a test runs."""
    for name, kind in (("pull-zero", Pull), ("pull-too", PullToo), ("same", Same)):
        methods.register(name)(kind)
    yield
    for name, kind in (("pull_zero", Pull), ("pull_too", PullToo), ("same", Same)):
        del methods.loaded[name], methods._name_of[kind]


def describe(method: Any) -> Any:
    """A method as plain nested values, to compare structure and every field."""
    if isinstance(method, Method):
        return type(method), {field.name: describe(getattr(method, field.name)) for field in fields(method)}
    return method


EXPRESSIONS = [
    "sgd()",
    "er()",
    "er(n_recall=32)",
    "er(n_recall=32, reduction='sum_of_means')",
    "joint(offline_epochs=3)",
    "mose(temperature=0.1, student=-2, inference='linear_last')",
    "grace(mose())",
    "grace(mose(per_class=3), beta=1e-05, adaptive=False)",
    "grace(er(n_recall=5), entropy_mode='deviation', sigma_floor=0.05)",
    "er() + pull_zero()",
    "er(n_recall=7) + pull_zero(strength=0.5)",
    "grace(er() + pull_zero(strength=-3, words='x - y'))",
    "grace(grace(er(), beta=0.1), beta=0.2)",
    "grace(er()) + pull_zero()",
    "same(grace(same(mose())))",
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_expression_is_what_repr_writes(text: str) -> None:
    """`repr` gives the canonical text back, and parsing that gives the same method with the same options, nested or summed."""
    method = parse_method(text)
    assert repr(method) == text
    assert describe(parse_method(repr(method))) == describe(method)


def test_an_expression_builds_what_it_says() -> None:
    method = parse_method("grace(er(5, reduction='sum_of_means') + pull_zero(0.5), beta=0.25)")
    assert isinstance(method, Grace)
    assert method.beta == 0.25
    assert isinstance(method.inner, Sum)
    assert isinstance(method.inner.inner, ER)
    assert (method.inner.inner.n_recall, method.inner.inner.reduction) == (5, "sum_of_means")
    assert isinstance(method.inner.right, Pull)
    assert method.inner.right.strength == 0.5
    assert [type(part) for part in method.parts] == [ER, Pull, Grace]


@pytest.mark.parametrize("text", ["ER", "Er()", " er ( ) ", "eR\n"])
def test_case_and_spaces_do_not_matter(text: str) -> None:
    assert repr(parse_method(text)) == "er()"


@pytest.mark.parametrize("text", ["pull-zero", "PULL-ZERO()", "Pull_Zero", "pull-Zero()"])
def test_hyphens_and_underscores_are_one(text: str) -> None:
    assert isinstance(parse_method(text).right, Pull)
    assert isinstance(parse_method(f"er+{text}"), Sum)


def test_hyphens_inside_quotes_and_numbers_are_kept() -> None:
    method = parse_method("pull-zero(words='split-cifar-x', strength=1e-3)").right
    assert (method.words, method.strength) == ("split-cifar-x", 0.001)
    assert parse_method('pull-zero(words="a-b", strength=-2)').right.strength == -2


def test_a_bare_wrapper_is_the_papers_system() -> None:
    assert repr(parse_method("grace")) == "grace(mose())"
    assert isinstance(parse_method("grace").inner, MOSE)


def test_sums_read_from_the_left() -> None:
    method = parse_method("same(er()) + pull_zero(1.5) + pull_too(2.5)")
    assert isinstance(method, Sum)
    assert isinstance(method.inner, Sum)
    assert describe(parse_method(repr(method))) == describe(method)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("f(1)", 1),
        ("f(-1.5)", -1.5),
        ("f(1e-3)", 0.001),
        ("f(True)", True),
        ("f(None)", None),
        ("f('0-19')", "0-19"),
        ("f([1, 2])", [1, 2]),
        ("f((1, 'a'))", (1, "a")),
        ("f({'a': 1})", {"a": 1}),
    ],
)
def test_literals(text: str, value: object) -> None:
    assert parse_call(text) == Call("f", (value,), {})
    assert parse_call(text.replace("f(", "f(x=")) == Call("f", (), {"x": value})


# Nothing is executed.

MALICIOUS = [
    "__import__('os').system('touch {file}')",
    "er(__import__('os').system('touch {file}'))",
    "er(n_recall=__import__('os').system('touch {file}'))",
    "er(n_recall=[open('{file}', 'w')])",
    "er(n_recall=(lambda: open('{file}', 'w'))())",
    "open('{file}', 'w')",
    "eval(\"open('{file}', 'w')\")",
    "exec(\"open('{file}', 'w')\")",
    "er().__class__.__init__.__globals__",
    "er.__class__",
    "[er for er in (1,)]",
    "er(**{{'n_recall': 3}})",
    "er(*[3])",
    "er(n_recall := 3)",
    "f'{{open(1)}}'",
    "er() if True else er()",
    "er() - er()",
    "er(n_recall=3 * 10)",
    "er(n_recall=10 ** 10)",
    "er(); er()",
    "import os",
    "",
    "   ",
    "er(",
    "er)",
    "er()()",
    "grace(er)(er)",
    "@",
    "er\0",
]


@pytest.mark.parametrize("text", MALICIOUS)
def test_code_is_refused_and_not_run(text: str, tmp_path: Path) -> None:
    file = tmp_path / "executed"
    with pytest.raises(UserError):
        parse_method(text.format(file=file))
    assert not file.exists()


# Mistakes are told in a sentence.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mosse", "unknown method 'mosse'; did you mean 'mose'"),
        ("grce(er())", "did you mean 'grace'"),
        ("grace(moose())", "did you mean 'mose'"),
        ("pull-zer", "did you mean 'pull_zero'"),
        ("xyzzy", "unknown method 'xyzzy' "),
        ("er(n_recal=3)", "er has no option 'n_recal'; did you mean 'n_recall'"),
        ("grace(er(), entropymode='cpr')", "did you mean 'entropy_mode'"),
        ("er(64, 'concat', 1, 'linear', 5, 6)", "at most 5 arguments"),
        ("er(n_recall='many')", "n_recall must be a whole number, not 'many'"),
        ("er(n_recall=2.5)", "whole number"),
        ("er(n_recall=True)", "whole number"),
        ("grace(beta='x')", "beta must be a number"),
        ("grace(adaptive=1)", "adaptive must be True or False"),
        ("grace(entropy_mode='alg2')", "one of alg1, cpr, target, deviation, cpr_literal, uniform, none"),
        ("grace(3)", "wraps a method"),
        ("er() + 3", "only methods can be added"),
        ("er(er())", "n_recall must be a whole number"),
        ("er(n_recall=1, n_recall=2)", "er was given its option 'n_recall' twice in the expression 'er(n_recall=1, n_recall=2)'"),
        ("grace(er(), beta=1e400)", "'1e400' in the expression 'grace(er(), beta=1e400)' is not a finite number"),
    ],
)
def test_mistakes_are_told(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_method(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["3", "'er'", "[1, 2]", "1 + 2", "3 + er()", "er(64, n_recall=3)"],
    ids=["number", "text", "list", "sum of numbers", "number plus method", "option twice"],
)
def test_what_is_not_a_method_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_method(text)


@pytest.mark.parametrize("text", ["3", "er + er", "'a'", "a.b", "a[0]", "-a", "", "split-"])
def test_what_is_not_a_call_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_call(text)


@pytest.mark.parametrize(
    ("text", "longer"),
    [
        ("split-digits", "split-digits(epochs=3)"),
        ("split-digits()", "split-digits(epochs=3)"),
        (" split-digits(tasks=5) ", "split-digits(tasks=5, epochs=3)"),
        ("split-digits(5, classes='0-3',)", "split-digits(5, classes='0-3', epochs=3)"),
    ],
)
def test_an_option_can_be_added(text: str, longer: str) -> None:
    assert with_option(text, "epochs", 3) == longer
    call = parse_call(text)
    assert parse_call(longer) == Call(call.name, call.args, call.kwargs | {"epochs": 3})
    with pytest.raises(UserError, match="gives epochs already; leave that or --epochs out"):
        with_option(longer, "epochs", 3)


def test_nearest_names() -> None:
    assert nearest("rehearsal_of_all", methods.names()) == ""
    assert nearest("mnist", methods.names()) == "", "what is no misspelling is not guessed at"
    assert nearest("resnet8", ["resnet18", "mlp"]) == "; did you mean 'resnet18'?"
    assert nearest("qqqq", ["resnet18", "mlp"]) == ""
    assert normal(" ER-ACE ") == normal("er_ace") == "er_ace"


@pytest.mark.parametrize(
    ("written", "meant"),
    {
        "replay": "er()",
        "Experience-Replay(n_recall=3)": "er(n_recall=3)",
        "naive": "sgd()",
        "finetune": "sgd()",
        "cumulative(offline_epochs=3)": "joint(offline_epochs=3)",
        "der++": "derpp()",
        "DER++(alpha=0.3)": "derpp(alpha=0.3)",
        "grace(der++)": "grace(derpp())",
        "replay + ewc++ + si": "er() + ewc_pp() + si()",
        "replay() + pull_zero(words='der++')": "er() + pull_zero(words='der++')",
    }.items(),
)
def test_what_others_call_a_method_is_understood_and_recorded_under_its_name_here(written: str, meant: str) -> None:
    assert repr(parse_method(written)) == meant
    assert methods.get("replay") is ER
    assert "replay" not in methods.names()


def test_a_method_of_one_s_own_comes_before_an_alias() -> None:
    methods.register("replay")(Same)
    try:
        assert methods.get("replay") is Same
        assert repr(parse_method("replay(er())")) == "replay(er())"
    finally:
        del methods.loaded["replay"], methods._name_of[Same]
        methods.register("same")(Same)  # for the fixture
    assert set(methods.aliases.values()) <= set(methods.written)
    assert not set(methods.aliases) & set(methods.written)


def test_an_option_without_annotation_takes_what_is_written() -> None:
    def plain(shape: int, hidden=32, deep: int = 1):  # type: ignore[no-untyped-def]
        return shape, hidden, deep

    registry = Registry("net", "gracecl.nets")
    registry.register("plain")(plain)
    assert spec.construct(registry, parse_call("plain(hidden='x')"), 1) == (1, "x", 1)
    assert spec.construct(registry, parse_call("plain(64)"), 1) == (1, 64, 1)
    with pytest.raises(UserError, match="plain: deep must be a whole number, not 'x'"):
        spec.construct(registry, parse_call("plain(deep='x')"), 1)


def test_an_argument_that_no_expression_could_show_is_refused() -> None:
    class Hidden(ER):
        def __init__(self, hidden=3) -> None:  # type: ignore[no-untyped-def]
            super().__init__()
            self.hidden = hidden

    methods.register("hidden")(Hidden)
    try:
        with pytest.raises(
            UserError, match=r"hidden: hidden is an argument of __init__ and not a field, so no run could record it"
        ):
            parse_method("hidden(hidden=7)")
    finally:
        del methods.loaded["hidden"], methods._name_of[Hidden]


def test_an_annotation_that_cannot_be_read_is_one_sentence() -> None:
    def plain(width: NoSuchName = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    registry = Registry("net", "gracecl.nets")
    registry.register("plain")(plain)
    with pytest.raises(UserError, match=r"cannot read the annotations of .*plain \(name 'NoSuchName' is not defined\); import"):
        spec.construct(registry, parse_call("plain(width=2)"))


# Registries.


def test_a_registry_lists_the_files_without_importing_them() -> None:
    registry = Registry("method", "gracecl.methods")
    assert {"er", "grace", "joint", "mose", "sgd"} <= set(registry.names())
    assert registry.loaded == {}
    for name, line in registry.summaries().items():
        assert line, name
        assert (methods.get(name).__doc__ or "").startswith(line)
        assert methods.name_of(methods.get(name)) == name


def test_a_thing_registered_outside_is_found_and_listed() -> None:
    registry = Registry("method", "gracecl.methods")
    registry.register("My-Own")(Pull)
    assert registry.get("my_own") is registry.get("MY-OWN") is Pull
    assert "my_own" in registry.names()
    assert registry.summaries()["my_own"].startswith("A penalty")
    with pytest.raises(UserError, match="did you mean 'my_own'"):
        registry.get("my-owm")


# Sums.


def engine(method: Method, taps: int = 2) -> Engine:
    inputs = Images((1, 2, 2))
    with rng.torch_seed(0, "net"):
        net = nets.build("mlp(width=6, depth=2)", inputs, 4, taps)
    return Engine(method, net, Memories(10, Images((1, 2, 2))), augmentation="none", optimizer="sgd(lr=0.1)")


def learn(learner: Engine, steps: int = 3) -> list[LossTable]:
    choice = np.random.default_rng(0)
    tables = []
    for _ in range(steps):
        x = torch.from_numpy(choice.integers(0, 256, (5, 1, 2, 2), dtype=np.uint8))
        tables.append(learner.learn(StreamBatch(x, choice.integers(0, 4, 5))).table)
    return tables


def test_a_sum_adds_the_rows_of_the_part_and_lets_it_observe() -> None:
    """er + penalty: the left one's rows as they were, the part's row beside them, in the objective and in the gradient."""
    plain, both = engine(parse_method("er(n_recall=3)")), engine(parse_method("er(n_recall=3) + pull-zero(strength=0.5)"))
    weight = both.net.classifier.weight.detach().clone()
    [a], [b] = learn(plain, 1), learn(both, 1)
    assert b.keys() - a.keys() == {"penalty/pull"}
    for row in a:
        assert torch.equal(a[row], b[row])
    assert b["penalty/pull"].tolist() == pytest.approx([0.5 * layer.square().sum().item() for layer in weight], rel=1e-6)
    difference = both.net.classifier.weight.grad - plain.net.classifier.weight.grad
    torch.testing.assert_close(difference, 2 * 0.5 * weight, rtol=1e-4, atol=1e-6)
    assert both.method.right.steps == 1
    # The left one is the learner: the memory is its.
    assert len(both.memories.replay) == 5


def test_alpha_leaves_a_penalty_alone() -> None:
    learner = engine(parse_method("grace(er(n_recall=3) + pull_zero(), beta=0)"))
    plain = engine(parse_method("er(n_recall=3) + pull_zero()"))
    learner.method.feedback.controller.weights = lambda accuracy: torch.tensor([2.0, 3.0])
    [a], [b] = learn(learner, 1), learn(plain, 1)
    assert torch.equal(a["penalty/pull"], b["penalty/pull"])
    assert torch.equal(a["ce/all"], b["ce/all"] * torch.tensor([2.0, 3.0]))


def test_an_addition_stands_in_a_sum_once() -> None:
    """Refused at once: the rows of most begin with the second task."""
    with pytest.raises(UserError, match="pull_zero is added twice"):
        parse_method("er() + pull_zero() + pull_zero(strength=2)")
    with pytest.raises(UserError, match="si is added twice"):
        parse_method("mkd(er() + si()) + si()")


@pytest.mark.parametrize(
    ("text", "clash"),
    [
        ("mkd(er()) + pull_too()", "target 'mkd'"),
        ("er() + pull_zero() + pull_too()", "loss row 'penalty/pull'"),
        ("mkd(mkd(er()), strength=1)", "target 'mkd'"),
        ("grace(ema(grace(er())))", "loss row 'entropy'"),
        ("grace(grace(er(), beta=0), beta=0)", "loss row 'log/H'"),
    ],
)
def test_two_parts_with_one_key_clash(text: str, clash: str) -> None:
    """Of two values one would be lost."""
    with pytest.raises(UserError, match=f"two of its parts define the {clash}"):
        learn(engine(parse_method(text)), 1)


@pytest.mark.parametrize(
    "text",
    [
        "sgd() + er()",
        "derpp() + sgd()",
        "er() + joint()",
        "er() + derpp()",
        "er() + mose()",
        "er() + agem()",
        "er() + scr()",
        "er() + ema()",
    ],
)
def test_a_learner_cannot_be_added_to_another(text: str) -> None:
    with pytest.raises(UserError, match="on the right of \\+ stand additions"):
        parse_method(text)


def test_a_sum_in_python_is_the_sum_in_text() -> None:
    assert describe(ER(3) + Pull(2.0)) == describe(parse_method("er(3) + pull_zero(2.0)"))
    with pytest.raises(UserError, match="stand additions"):
        ER() + 3


def test_the_stronger_boundary_wins() -> None:
    """A wrapper or sum needs task marks as much as the neediest inside."""
    needs = {
        "er()": "unused",
        "er() + pull_zero()": "unused",
        "grace(er())": "used",
        "lode()": "required",
        "grace(lode())": "required",
    }
    needs |= {"same(lode())": "required", "lode() + pull_zero()": "required", "same(grace(er()))": "used"}
    assert {text: parse_method(text).chain.traits.boundaries for text in needs} == needs


def test_who_wants_all_taps() -> None:
    wants = {"er()": False, "mose()": True, "grace(er())": True, "er() + pull_zero()": False, "mose() + pull_zero()": True}
    assert {text: parse_method(text).chain.traits.all_taps for text in wants} == wants


def test_constructing_from_a_registry_checks_arguments() -> None:
    inputs = Images((1, 2, 2))
    with pytest.raises(UserError, match="did you mean 'width'"):
        nets.build("mlp(widht=3)", inputs, 4)
    with pytest.raises(UserError, match="unknown net 'resnet19'; did you mean 'resnet18'"):
        nets.build("resnet19", inputs, 4)
    assert spec.construct(methods, Call("er", (3,), {})).n_recall == 3
