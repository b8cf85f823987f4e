"""Inputs of any kind: vectors, sequences, ids with a mask, images of any shape and type; what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import gracecl
from gracecl import nets, streams
from gracecl.engine.engine import Engine
from gracecl.engine.recipe import Recipe
from gracecl.errors import UserError
from gracecl.inputs import Images, Inputs, Parts, TensorTree, inputs_of, leaves, plain, restored, same_rows, tree_of, write_rows
from gracecl.memory import Memories, Memory
from gracecl.registry.spec import parse_method
from gracecl.testing import assert_same, feed

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(60, 8))
LABELS = np.arange(60) % 6
IDS = {"ids": RNG.integers(0, 20, (60, 7)), "mask": RNG.random((60, 7)) < 0.8}
IDS["mask"][:, 0] = True


class Reader(nn.Module):
    """A tiny transformer over ids with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, src_key_padding_mask=~mask)
        return h


def texts(rows: slice = slice(None)) -> dict[str, Any]:
    return {name: part[rows] for name, part in IDS.items()}


def text_data() -> gracecl.data.Data:
    return gracecl.from_arrays(texts(), LABELS, texts(slice(20)), LABELS[:20], tasks=3)


def text_engine(method: str, data: gracecl.data.Data) -> Engine:
    torch.manual_seed(0)
    net = nets.tap(Reader(), classes=6, example=texts(slice(2)), embedding=8)
    net.inputs = data.inputs
    return Engine(parse_method(method), net, Memories(12, data.inputs), augmentation="none")


# A tree is handled as a tensor is.


def test_a_tree_is_indexed_joined_and_written_as_a_tensor() -> None:
    tree = tree_of({"a": torch.arange(6).view(3, 2), "b": (torch.arange(3.0), torch.tensor([True, False, True]))})
    picked = tree[torch.tensor([2, 0])]
    assert picked["a"].tolist() == [[4, 5], [0, 1]]
    assert plain(tree[1:])["b"][0].tolist() == [1.0, 2.0]
    joined = torch.cat([tree, picked])
    assert len(joined) == 5
    assert torch.equal(joined[:3], tree)
    assert not torch.equal(joined[:2], picked)
    write_rows(tree, torch.tensor([1]), picked[:1])
    assert tree["a"].tolist() == [[0, 1], [4, 5], [4, 5]]
    assert [place for place, _ in leaves(tree)] == ["['a']", "['b'][0]", "['b'][1]"]
    assert same_rows(tree, tree).tolist() == [[True, False, False], [False, True, True], [False, True, True]]


@pytest.mark.parametrize(
    "inputs",
    [
        Inputs((8,)),
        Inputs((7, 3), torch.float16),
        Images((12, 5, 9), dtype=torch.uint16),
        Parts({"ids": Inputs((7,), torch.int64), "more": Parts([Inputs((2,)), Images((1, 4, 4))])}),
    ],
    ids=["vector", "half", "images", "tree"],
)
def test_a_memory_keeps_what_it_was_given_in_its_own_types(inputs: Inputs) -> None:
    """Filled, saved and restored; each slot holds one of the examples, with its label."""
    batch = tree_of(plain(inputs.blank(20)))
    for _, leaf in leaves(batch):
        leaf.copy_((torch.arange(20).view(-1, *[1] * (leaf.ndim - 1)) % 251).to(leaf.dtype).expand_as(leaf))
    memory, again = Memory(6, inputs), Memory(6, inputs)
    memory.add(np.random.default_rng(0), batch, np.arange(20))
    again.load_state_dict(memory.state_dict())
    for (_, kept), (_, other), (_, given) in zip(leaves(memory.images), leaves(again.images), leaves(batch), strict=True):
        assert kept.dtype == given.dtype
        assert torch.equal(kept, other)
        assert torch.equal(kept, given[torch.from_numpy(memory.labels)])
    assert restored(inputs.saved()) == inputs


def test_images_of_any_type_look_the_same_to_the_net() -> None:
    """Bytes, 16 bits and floating point of one picture, with 12 channels that are not square."""
    raw = torch.from_numpy(RNG.integers(0, 256, (4, 12, 5, 9), np.uint8))
    mean, std = [0.4] * 12, [0.2] * 12
    wanted = (raw.float() / 255 - 0.4) / 0.2
    for dtype, images in ((torch.uint8, raw), (torch.uint16, (raw.int() * 257).to(torch.uint16)), (torch.float32, raw / 255)):
        torch.testing.assert_close(Images((12, 5, 9), mean, std, dtype).normalise(images), wanted, rtol=1e-5, atol=1e-5)


# What learns.


@pytest.mark.parametrize(
    "method", ["er(n_recall=4)", "grace(derpp(n_recall=4))", "er(n_recall=4) + ewc()", "gss(n_recall=4)", "slda()"]
)
def test_ids_with_a_mask_are_learned_and_resumed_exactly(method: str) -> None:
    data = text_data()
    stream = streams.stream(data, tasks=3, batch=5)
    whole, first, second = (text_engine(method, data) for _ in range(3))
    feed(whole, stream)
    feed(first, stream, until=7)
    second.load_state_dict(first.state_dict())
    feed(second, stream)
    assert_same(second.state_dict(), whole.state_dict(), f"{method}, resumed")


class GRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.gru(x)[1][-1]
        return last


@pytest.mark.parametrize(
    ("x", "net"),
    [(VECTORS, None), (RNG.normal(size=(60, 5, 3)), GRU), (IDS, Reader)],
    ids=["vectors", "sequences", "ids with a mask"],
)
def test_a_learner_takes_any_input_and_goes_on_exactly_after_a_load(x: Any, net: Any, tmp_path: Path) -> None:
    """Built by its first batch, and again by the file."""

    def rows(start: int) -> Any:
        return {name: part[start : start + 6] for name, part in x.items()} if isinstance(x, dict) else x[start : start + 6]

    torch.manual_seed(0)
    module = {} if net is None else {"net": net()}
    learner = gracecl.Learner("derpp(n_recall=6)", memory=12, device="cpu", **{"net": "mlp(width=8)"} | module)
    for start in range(0, 30, 6):
        learner.learn(rows(start), LABELS[start : start + 6])
    learner.save(tmp_path / "learner")
    again = gracecl.Learner.load(tmp_path / "learner", device="cpu", **{} if net is None else {"net": net()})
    assert again.inputs == learner.inputs
    for start in range(30, 60, 6):
        assert learner.learn(rows(start), LABELS[start : start + 6]) == again.learn(rows(start), LABELS[start : start + 6])
    assert_same(again.engine.state_dict(), learner.engine.state_dict(), "the learner that was loaded")
    assert learner.predict(rows(0)).tolist() == again.predict(rows(0)).tolist()


def test_the_default_augmentation_is_for_images_alone() -> None:
    vectors = Recipe(method="er()", net="mlp(width=8)").build(Inputs((8,)), 6)
    images = Recipe(method="er()", net="mlp(width=8)").build(Images((1, 16, 16)), 6)
    assert (len(vectors.augmentation), len(images.augmentation)) == (0, 2)


def test_a_function_of_one_s_own_makes_the_views() -> None:
    """Two views of a step differ, the same step gives the same views, and the function sees what the net sees."""
    seen: list[Tensor] = []

    def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(x)
        return x + torch.randn(x.shape, generator=generator)

    def engine() -> Engine:
        torch.manual_seed(0)
        net = nets.build("mlp(width=8)", Inputs((8,)), 6, taps=1)
        return Engine(parse_method("scr(n_recall=4)"), net, Memories(12, Inputs((8,))), augmentation=jitter)

    data = gracecl.from_arrays(VECTORS, LABELS, VECTORS, LABELS, tasks=3)
    stream = streams.stream(data, tasks=3, batch=5)
    one, two = engine(), engine()
    feed(one, stream, until=4)
    feed(two, stream, until=4)
    assert_same(one.state_dict(), two.state_dict(), "the same step")
    assert all(x.dtype == torch.float32 and x.shape[1:] == (8,) for x in seen)


def test_a_view_of_another_shape_is_refused() -> None:
    net = nets.build("mlp(width=8)", Inputs((8,)), 6, taps=1)
    engine = Engine(parse_method("er()"), net, Memories(12, Inputs((8,))), augmentation=lambda x, generator: x[:1])
    stream = streams.stream(gracecl.from_arrays(VECTORS, LABELS, VECTORS, LABELS), batch=5)
    with pytest.raises(UserError, match=r"augment= returned .* takes \(x, generator\) and returns what has the shape of x"):
        feed(engine, stream, until=1)


# What is refused.


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("mose()", "mose shows images mirrored"),
        ("best()", "mose shows images mirrored"),
        ("ocm()", "turns images by 90 degrees"),
        ("mirrored(er())", "looks at images and their mirror images"),
        ("gdumb()", "cutmix=0"),
        ("rar()", "rar shows images through RandAugment, unless augmentation='run'"),
        ("adversarial_replay()", "moves pixels"),
    ],
)
def test_a_method_for_images_says_so_before_it_learns(method: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        Recipe(method=method, net="mlp(width=8)").build(Inputs((8,)), 6)
    assert "float32 [batch, 8]" in str(error.value)


@pytest.mark.parametrize(
    ("net", "inputs", "words"),
    [
        ("resnet18(width=4)", Inputs((8,)), r"takes images .* the inputs are float32 \[batch, 8\]; use mlp"),
        ("mlp(width=4)", Inputs((8,), torch.int64), "takes floating point, and the inputs are int64"),
        ("mlp(width=4)", Parts({"a": Inputs((8,))}), "takes one tensor, and the inputs are a dict of a: float32"),
    ],
)
def test_a_net_for_other_inputs_is_refused(net: str, inputs: Inputs, words: str) -> None:
    with pytest.raises(UserError, match=words):
        nets.build(net, inputs, 6)


def test_an_augmentation_of_images_is_refused_for_vectors() -> None:
    with pytest.raises(UserError, match="views of images, and the inputs are float32"):
        Recipe(method="er()", net="mlp(width=8)", augment="simclr").build(Inputs((8,)), 6)


SPEC = Parts({"ids": Inputs((7,), torch.int64), "mask": Inputs((7,), torch.bool)})


@pytest.mark.parametrize(
    ("inputs", "x", "words"),
    [
        (SPEC, {"ids": IDS["ids"]}, "must be a dict with the names 'ids', 'mask', not the names 'ids'"),
        (SPEC, {"ids": IDS["ids"], "masks": IDS["mask"]}, "not the names 'ids', 'masks'"),
        (SPEC, IDS["ids"], "must be a dict .* not a ndarray"),
        (SPEC, {"ids": IDS["ids"].astype(float), "mask": IDS["mask"]}, r"x\['ids'\] must be int64, not float64"),
        (SPEC, {"ids": IDS["ids"][:, :3], "mask": IDS["mask"]}, r"x\['ids'\] must have the shape \[batch, 7\], not \[60, 3\]"),
        (SPEC, {"ids": IDS["ids"][:3], "mask": IDS["mask"]}, "different lengths"),
        (Inputs((2,)), [[1.0, 2.0], [3.0]], "uneven parts"),
        (Inputs((2,)), [[1.0, 2.0], [3.0, float("nan")]], "x has NaN or infinity in row 1"),
        (Inputs((2,)), np.zeros((0, 2)), "empty"),
        (Inputs((2,)), [["a", "b"]], "must be numbers"),
        (Inputs((2,)), None, "not missing"),
        (Images((1, 2, 2)), np.zeros((3, 1, 2, 2)), "must be uint8"),
        (Parts([Inputs((2,)), Inputs((2,))]), (np.zeros((3, 2)),), "tuple of 2"),
    ],
)
def test_bad_inputs_are_refused_in_one_sentence(inputs: Inputs, x: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        inputs.read(x)
    assert "\n" not in str(error.value)


# Arrays as data.


def test_arrays_of_any_kind_are_data() -> None:
    sequences = RNG.normal(size=(6, 5, 3))
    data = gracecl.from_arrays(sequences, LABELS[:6], sequences, LABELS[:6], images=False)
    assert data.inputs == Inputs((5, 3))
    assert data.train_x.dtype == torch.float32
    pair = (RNG.normal(size=(6, 2)), RNG.integers(0, 256, (6, 3, 4, 5), np.uint8))
    both = gracecl.from_arrays(pair, LABELS[:6], pair, LABELS[:6])
    assert isinstance(both.train_x, TensorTree)
    assert both.inputs == Parts([Inputs((2,)), Images((3, 4, 5))])
    deep = RNG.integers(0, 65536, (6, 6, 5, 12)).astype(np.uint16)
    images = gracecl.from_arrays(deep, LABELS[:6], deep, LABELS[:6])
    assert (images.inputs.dtype, images.shape) == (torch.uint16, (12, 6, 5))
    np.testing.assert_allclose(images.mean, (deep / 65535).mean((0, 1, 2)))
    np.testing.assert_allclose(images.std, (deep / 65535).std((0, 1, 2)))


def test_labels_may_be_of_any_hashable_kind() -> None:
    names = np.array(["tulip", "rose", "rose", "aster"])
    x = RNG.normal(size=(4, 2))
    data = gracecl.from_arrays(x, names, x, names)
    assert (data.class_names, data.train_y.tolist()) == (("aster", "rose", "tulip"), [2, 1, 1, 0])
    own = gracecl.from_arrays(x, names, x, names, class_names=["rose", "aster", "tulip", "iris"])
    assert (own.classes, own.train_y.tolist()) == (4, [2, 0, 0, 1])
    tuples = gracecl.from_arrays(x, [(1, 2), (0, 1), (0, 1), (1, 2)], x, [(0, 1)] * 4)
    assert (tuples.class_names, tuples.train_y.tolist()) == (("(0, 1)", "(1, 2)"), [1, 0, 0, 1])
    with pytest.raises(UserError, match="'rose' is not one of the 2 class_names"):
        gracecl.from_arrays(x, names, x, names, class_names=["aster", "tulip"])
    with pytest.raises(UserError, match="cannot be hashed"):
        gracecl.from_arrays(x, np.array([[], {}, {}, {}], object), x, names)
    with pytest.raises(UserError, match="missing labels"):
        gracecl.from_arrays(x, ["a", None, "b", "a"], x, names)


def test_a_fingerprint_tells_types_and_names_apart() -> None:
    prints = [
        gracecl.from_arrays(x, LABELS[:4], x, LABELS[:4]).fingerprint
        for x in (
            {"a": np.zeros((4, 2), np.int64)},
            {"b": np.zeros((4, 2), np.int64)},
            {"a": np.zeros((4, 2), np.int32)},
            np.zeros((4, 2), np.int64),
            (np.zeros((4, 2), np.int64),),
        )
    ]
    assert len(set(prints)) == len(prints)
    assert inputs_of({"a": np.zeros((4, 2))}) == Parts({"a": Inputs((2,))})


# Datasets of PyTorch.


class Pairs(Dataset[Any]):
    """A map-style dataset of given items."""

    def __init__(self, items: list[Any], classes: list[str] | None = None) -> None:
        self.items = items
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


def pictures(count: int, mode: str = "RGB") -> list[Any]:
    shape = (4, 5, 3) if mode == "RGB" else (4, 5)
    return [(Image.fromarray(RNG.integers(0, 256, shape, np.uint8)), number % 2) for number in range(count)]


def test_a_dataset_of_pictures_is_that_of_its_arrays() -> None:
    items = pictures(6)
    data = gracecl.from_torch(Pairs(items, ["cat", "dog"]), Pairs(items[:2]))
    arrays = np.stack([np.asarray(picture) for picture, _ in items])
    labels = np.array([label for _, label in items])
    same = gracecl.from_arrays(arrays, labels, arrays[:2], labels[:2])
    assert (data.fingerprint, data.inputs, data.class_names) == (same.fingerprint, same.inputs, ("cat", "dog"))
    assert gracecl.from_torch(Pairs(pictures(2, "L")), Pairs(pictures(2, "L"))).shape == (1, 4, 5)


def test_entries_of_dicts_are_parts_and_labels_may_be_names() -> None:
    items = [
        {"ids": row, "mask": mask, "kind": "ab"[number % 2]} for number, (row, mask) in enumerate(zip(*IDS.values(), strict=True))
    ]
    data = gracecl.from_torch(Pairs(items), Pairs(items[:4]), label="kind")
    assert data.inputs == Parts({"ids": Inputs((7,), torch.int64), "mask": Inputs((7,), torch.bool)})
    assert torch.equal(data.train_x, tree_of({name: torch.from_numpy(part) for name, part in IDS.items()}))
    assert (data.class_names, data.test_y.tolist()) == (("a", "b"), [0, 1, 0, 1])
    alone = gracecl.from_torch(Pairs([{"x": VECTORS[n], "label": n % 2} for n in range(4)]), Pairs([(VECTORS[0], 1)]))
    assert alone.inputs == Inputs((8,))


def test_floats_are_images_where_their_values_are() -> None:
    inside = [(torch.rand(3, 4, 5), 0), (torch.rand(3, 4, 5), 1)]
    outside = [(image - 0.5, label) for image, label in inside]
    data = gracecl.from_torch(Pairs(inside), Pairs(inside))
    assert isinstance(data.inputs, Images)
    stacked = torch.stack([image for image, _ in inside])
    torch.testing.assert_close(data.inputs.normalise(data.train_x).mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    assert torch.equal(data.train_x, stacked)
    assert gracecl.from_torch(Pairs(outside), Pairs(inside)).inputs == Inputs((3, 4, 5))


def test_what_does_not_fit_into_memory_lies_in_a_mapped_file(tmp_path: Path) -> None:
    items = [((torch.full((4,), float(n)), np.array([n, n])), n % 2) for n in range(10)]
    small, large = (gracecl.from_torch(Pairs(items), Pairs(items), in_memory=limit, folder=tmp_path) for limit in (1 << 20, 8))
    assert small.fingerprint == large.fingerprint
    assert len(list(tmp_path.glob("*.npy"))) == 4


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Pairs([]), "the dataset is empty"),
        ({"train": 1}, r"the dataset is a dict; give one of its parts, such as dataset\['train'\]"),
        (iter([1]), "map-style datasets"),
        (Pairs([1, 2]), "item 0 of the dataset is a int and no pair"),
        (Pairs([{"a": 1, "b": 2}]), "entries 'a', 'b'; say which is the label with label="),
        (Pairs([{"label": 0}]), "item 0 of the dataset has no entry beside the label 'label'"),
        (Pairs([{"x": [1.0], "note": "text", "label": 0}]), r"item 0 of the dataset\['note'\] is a str and no numbers"),
        (Pairs([([[1, 2], [3]], 0)]), "item 0 of the dataset is a list of uneven parts; pad"),
        (Pairs([(np.zeros(3), 0), (np.zeros(4), 1)]), r"item 1 of the dataset must have the shape \[batch, 3\], not \[1, 4\]"),
        (Pairs([(np.zeros(3), 0), (np.full(3, np.nan), 1)]), "item 1 of the dataset has NaN"),
        (Pairs([("text", 0)]), "make numbers of it in the dataset's transform"),
        (Pairs([(np.zeros(3), 0.5)]), "labels must be whole numbers from 0, texts"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_a_sentence(dataset: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        gracecl.from_torch(dataset, Pairs([(np.zeros(3), 0)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept_and_seen_in_single(dtype: torch.dtype) -> None:
    inputs = Inputs((4,), dtype)
    assert inputs.blank(2).dtype == dtype
    assert inputs.normalise(torch.ones(2, 4, dtype=dtype)).dtype == torch.float32
