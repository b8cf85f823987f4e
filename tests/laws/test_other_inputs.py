"""The laws on what is not an image: every learner on vectors, a few on dicts of tensors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gracecl.engine.evaluate import evaluate
from gracecl.errors import UserError
from gracecl.inputs import TensorTree
from gracecl.lab.catalogue import LEARNERS
from gracecl.memory import Memory
from gracecl.nets import Backbone, ModuleBackbone
from gracecl.nets.mlp import mlp
from gracecl.registry.spec import parse_method
from gracecl.streams.iid import shuffled
from gracecl.testing import (
    METHOD_LAWS,
    TOY_PARTS,
    TOY_VECTORS,
    PhraseNet,
    ToyKind,
    check_backbone,
    check_memory,
    check_method,
    check_stream,
    feed,
    resumes_exactly,
    toy_engine,
    toy_stream,
)

SMALLER = {"size=500": "size=20", "projections=500": "projections=20"}


def shorter(method: str) -> str:
    for large, small in SMALLER.items():
        method = method.replace(large, small)
    return method


def needs_images(method: str) -> bool:
    """Whether it says so, or works on transformers alone, of which the one by name takes images."""
    chain = parse_method(method).chain
    return chain.traits.attention or any(part.traits.images for part in chain.parts)


FOR_IMAGES = [method for method in LEARNERS if needs_images(method)]
ON_VECTORS = [shorter(method) for method in LEARNERS if method not in FOR_IMAGES]
ON_PARTS = ["er()", "derpp()", "scr()", "grace(er())", "slda()", "er() + ewc()", "icarl()", "agem()"]
ALWAYS = {
    "vectors": ("classes_may_arrive",),
    "parts": ("class_numbers_do_not_matter", "learns_single_images_and_single_classes", "classes_may_arrive"),
}
"""laws in `make test-all`, beside a short one of exact resume in `make test`"""
CASES = [*((method, "vectors") for method in ON_VECTORS), *((method, "parts") for method in ON_PARTS)]


@pytest.mark.parametrize(
    ("method", "kind", "law"),
    [
        pytest.param(method, kind, law, marks=pytest.mark.slow if law in ALWAYS[kind] else pytest.mark.exhaustive)
        for method, kind in CASES
        for law in METHOD_LAWS
    ],
)
def test_method(method: str, kind: ToyKind, law: str) -> None:
    METHOD_LAWS[law](method, kind=kind)


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_it_resumes_exactly_in_the_second_task(method: str, kind: ToyKind) -> None:
    resumes_exactly(method, stops=[9], until=12, kind=kind)


@pytest.mark.parametrize("method", FOR_IMAGES)
def test_a_method_for_images_is_refused_in_one_sentence(method: str) -> None:
    with pytest.raises(UserError, match=r"float32 \[batch, 8\]") as error:
        toy_engine(method, kind="vectors")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["vectors", "parts"])
def test_replay_learns_the_toy_problem(kind: ToyKind) -> None:
    """So that the laws look at a learner that learns: most examples of all tasks are told apart with memory, fewer without."""
    stream, accuracy = toy_stream(kind=kind), []
    for memory in (0, 54):
        engine = toy_engine("er(n_recall=20, mem_iters=20)", memory=memory, optimizer="adam(lr=0.01)", kind=kind)
        feed(engine, stream)
        result = evaluate(engine, stream.data.test_x, stream.data.test_y, stream.test_task)
        accuracy.append(np.mean(result.accuracy[engine.chain.rule]))
    assert accuracy[0] < 50 < 70 < accuracy[1]


# The other nouns.


@pytest.mark.parametrize("kind", ["vectors", "parts"])
def test_stream(kind: ToyKind) -> None:
    check_stream(toy_stream(kind=kind))
    check_stream(shuffled(toy_stream(kind=kind), 5))


@pytest.mark.parametrize("kind", ["vectors", "parts"])
def test_memory(kind: ToyKind) -> None:
    check_memory(Memory, kind=kind)


@pytest.mark.parametrize("part", ["ids", "mask", "numbers"])
def test_a_memory_that_mixes_up_one_part_is_found(part: str) -> None:
    class Mixed(Memory):
        def add(self, generator, x, labels, *more, **kept):  # type: ignore[no-untyped-def]
            turned = {name: leaf.flip(1) if name == part else leaf for name, leaf in x.parts.items()}
            return super().add(generator, TensorTree(turned), labels, *more, **kept)

    with pytest.raises(AssertionError, match="a slot's label is not its image's"):
        check_memory(Mixed, kind="parts")


def tapped(model: nn.Module, taps: int) -> Backbone:
    return ModuleBackbone(model, None, taps, False, TOY_PARTS.seen(1, torch.zeros))


@pytest.mark.parametrize("taps", [1, 4])
def test_backbone(taps: int) -> None:
    check_backbone(partial(mlp, at_most=False, width=8, depth=4), taps, inputs=TOY_VECTORS)
    check_backbone(lambda _, taps: tapped(PhraseNet(), taps), taps, inputs=TOY_PARTS)


def test_a_net_that_leaves_a_part_out_is_found() -> None:
    class Deaf(PhraseNet):
        def forward(self, ids: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
            h: Tensor = nn.Sequential(*self.blocks)(self.words(ids).mean(dim=1))
            return h

    with pytest.raises(AssertionError, match=r"no finite gradient reaches backbone.model.numbers"):
        check_backbone(lambda _, taps: tapped(Deaf(), taps), inputs=TOY_PARTS)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UserError, match="one of images, vectors, parts, not 'sounds'"):
        check_method("er()", kind="sounds")  # type: ignore[arg-type]
