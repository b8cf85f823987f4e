"""MOSE against numbers that its authors' program computed: network, views, losses, gradients, optimizer, inference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gracecl import nets
from gracecl.core import Batch, Block, Planning, Progress, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import rule_scores
from gracecl.images import augment
from gracecl.images.augment import Grey, Mirror
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.mose import MOSE

GOLDEN = np.load(Path(__file__).with_name("mose.npz"))
WIDTH, CLASSES = int(GOLDEN["meta"][0]), int(GOLDEN["meta"][1])
IDENTITY = Images((3, 32, 32), (0.0,) * 3, (1 / 255,) * 3)
"""normalises bytes to themselves: the stored images are normalised already"""


def our_name(theirs: str) -> str:
    """Their parameter's name in our net; stacked heads are handled apart."""
    part, _, rest = theirs.partition(".")
    if part in ("conv1", "bn1"):
        return f"backbone.stem.{'0' if part == 'conv1' else '1'}.{rest}"
    if part.startswith("layer"):
        return f"backbone.stages.{int(part[5:]) - 1}.{rest}".replace(".bn", ".norm")
    if part == "attention_layers":
        number, kind, tail = rest.split(".", 2)
        return f"backbone.gates.{number}." + (f"look.{tail.removeprefix('op.')}" if kind == "0" else f"norm.{tail}")
    if part == "feature_alignment_layer":
        return f"backbone.chains.{rest}".replace(".op.", ".")
    assert part == "final_addaption_layer", theirs
    return f"extras.adaptation.{rest}"


HEADS = {"linear": "classifier", "simclr": "projector"}


def ours(state: dict[str, torch.Tensor], theirs: str) -> np.ndarray:
    """The entry of our state (or gradients) that their name stands for, in their shape."""
    part, _, rest = theirs.partition(".")
    if part in HEADS:
        number, kind = rest.split(".")
        value = state[f"{HEADS[part]}.{kind}"][int(number)]
        return (value.T if kind == "weight" else value[0]).numpy()
    return state[our_name(theirs)].numpy()


def build(dtype: torch.dtype = torch.float32) -> Engine:
    net = nets.build(f"resnet18(width={WIDTH})", IDENTITY, CLASSES)
    engine = Engine(MOSE(), net, Memories(0, Images((3, 32, 32))))
    state = net.state_dict()
    for name in GOLDEN.files:
        if name.startswith("w/"):
            part, _, rest = name[2:].partition(".")
            value = torch.from_numpy(GOLDEN[name])
            if part in HEADS:
                number, kind = rest.split(".")
                state[f"{HEADS[part]}.{kind}"][int(number)] = value.T if kind == "weight" else value
            else:
                state[our_name(name[2:])].copy_(value)
    net.load_state_dict(state)
    net.to(dtype)
    return engine


def batch(case: str, dtype: torch.dtype = torch.float32) -> Batch:
    """The stored images as a batch: block N, and block K where the task is a later one."""
    later = case == "later/"
    n, k = len(GOLDEN["y_new"]) // 4, len(GOLDEN["y_cat"]) // 4
    parts = ["new", "cat"] if later else ["new"]
    x = torch.from_numpy(np.concatenate([GOLDEN[f"x_{part}"] for part in parts])).to(dtype)
    y = np.concatenate([GOLDEN[f"y_{part}"] for part in parts])
    blocks = {"new": Block(0, n, 4, n, (0, 1))}
    if later:
        blocks["balanced"] = Block(4 * n, k, 4, 0, (0, 1))
    progress = Progress(step=1, task=1 if later else 0, seen=tuple(GOLDEN["seen_classes"]), current=tuple(GOLDEN["new_classes"]))
    return Batch(x, y, np.arange(len(y)), blocks, progress, CLASSES, seed=0)


def close(value: np.ndarray, golden: np.ndarray, tolerance: float = 1e-5) -> None:
    """Tolerance V: relative to the largest stored magnitude, or to 1."""
    np.testing.assert_allclose(value, golden, rtol=0, atol=tolerance * max(1.0, float(np.abs(golden).max())))


@pytest.fixture(params=["later/", "first/"])
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_weight_is_mapped() -> None:
    theirs = sum(GOLDEN[name].size for name in GOLDEN.files if name.startswith("w/"))
    assert theirs == sum(value.numel() for value in build().net.state_dict().values())


def test_taps(case: str) -> None:
    out = build().net(batch(case).x)
    close(out.features.detach().numpy(), GOLDEN[f"{case}features"])
    close(out.embedding.detach().numpy(), GOLDEN[f"{case}projections"])
    close(out.logits.detach().numpy(), GOLDEN[f"{case}logits"])


@pytest.mark.parametrize(("dtype", "where"), [(torch.float32, ""), (torch.float64, "f64/")])
def test_losses(case: str, dtype: torch.dtype, where: str) -> None:
    engine = build(dtype)
    b = batch(case, dtype)
    table = {row: value.detach().numpy() for row, value in engine.chain.losses(engine.net(b.x), b).items()}
    cross_entropy = sum(value for row, value in table.items() if row.startswith("ce"))
    computed = {
        "sc": table["sc"],
        "rsd": table["rsd"],
        "ce": cross_entropy,
        "total": sum(value.sum() for value in table.values()),
    }
    if case == "later/":
        computed |= {"ce_all": table["ce/balanced"] / 2, "ce_new": table["ce/new"]}
    for name, value in computed.items():
        close(value, GOLDEN[f"{case}{where}{name}"], tolerance=1e-8 if where else 1e-5)


def test_two_optimizer_steps(case: str) -> None:
    """Gradients and their norms, BatchNorm statistics, weights after one and two steps of Adam: through the engine's own update."""
    engine = build()
    table = engine.update(batch(case))
    close(
        sum(value.sum().item() for row, value in table.items() if not row.startswith("log/")),
        GOLDEN[f"{case}total"],
    )
    gradients = {name: value.grad for name, value in engine.net.named_parameters()}
    for name in GOLDEN.files:
        if name.startswith(f"{case}grad/"):
            golden = GOLDEN[name]
            np.testing.assert_allclose(ours(gradients, name.split("/", 2)[2]), golden, rtol=0, atol=5e-5 * np.abs(golden).max())
        if name.startswith(f"{case}bn/"):
            close(ours(engine.net.state_dict(), name.split("/", 2)[2]), GOLDEN[name])
    for name, norm in zip(GOLDEN[f"{case}gradnorm_names"], GOLDEN[f"{case}gradnorm"], strict=True):
        np.testing.assert_allclose(np.linalg.norm(ours(gradients, str(name))), norm, rtol=5e-5, atol=1e-6)
    check_adam(engine, case, "adam1", 1e-6)
    table = engine.update(batch(case))
    total = sum(value.sum().item() for row, value in table.items() if not row.startswith("log/"))
    np.testing.assert_allclose(total, GOLDEN[f"{case}total_step2"], rtol=1e-4)
    check_adam(engine, case, "adam2", 5e-6)


RATE = 1e-3
"""of Adam, in the origin's runs"""


def check_adam(engine: Engine, case: str, field: str, tolerance: float) -> None:
    state = engine.net.state_dict()
    for name in GOLDEN.files:
        if name.startswith(f"{case}{field}/"):
            theirs = name.split("/", 2)[2]
            # Where the first gradient is nearly 0, a step of Adam is the sign of rounding: see the origin's notes.
            gradient = GOLDEN[f"{case}grad/{theirs}"] + 1e-4 * GOLDEN[f"w/{theirs}"]
            sure = np.abs(gradient) >= 1e-5
            difference = np.abs(ours(state, theirs) - GOLDEN[name])
            assert sure.mean() > 0.5
            # The weights that the first step moved by the sign of rounding change the second gradient, a thousandth at most.
            rounding = 0 if field == "adam1" else RATE * 1e-3 * np.abs(gradient).max() / np.abs(gradient[sure])
            assert np.all(difference[sure] <= tolerance + rounding), theirs
            assert np.median(difference[sure]) <= tolerance, theirs
            assert difference.max() <= (2e-3 if field == "adam1" else 4e-3), theirs


def test_inference() -> None:
    engine = build()
    x, y = torch.from_numpy(GOLDEN["eval/buffer_x"]), GOLDEN["eval/buffer_y"]
    memories, seen = Memories(len(y), Images((3, 32, 32))), tuple(int(label) for label in GOLDEN["eval/seen"])
    memories.replay.images = torch.zeros_like(x)  # numbers of the program's own, not bytes
    memories.replay.add(np.random.default_rng(0), x, y)
    engine.method.before_eval(engine.net, memories, Progress(seen=seen))
    close(engine.method.means[:, list(seen)].numpy(), GOLDEN["eval/class_means"])
    [(_, out)] = engine.net.sweep(torch.from_numpy(GOLDEN["eval/x"]))
    close(out.features.numpy(), GOLDEN["eval/features"])
    close(out.logits.numpy(), GOLDEN["eval/logits"])
    every = torch.arange(engine.net.classes)
    guess = {rule: scores.argmax(dim=1).numpy() for rule, scores in rule_scores(engine.chain, out, every).items()}
    for expert in range(4):
        np.testing.assert_array_equal(guess[f"ncm_{expert + 1}"], GOLDEN["eval/ncm_pred"][expert])
    np.testing.assert_array_equal(guess["ncm_mean"], GOLDEN["eval/ncm_pred_mean"])
    np.testing.assert_array_equal(guess["ncm_last"], GOLDEN["eval/ncm_pred"][-1])
    np.testing.assert_array_equal(guess["linear_last"], GOLDEN["eval/linear_pred_last"])
    np.testing.assert_array_equal(guess["linear_mean"], GOLDEN["eval/linear_pred_mean"])


def test_views() -> None:
    x = torch.from_numpy(GOLDEN["aug/x"])
    n, (height, width) = len(x), x.shape[-2:]
    none = np.zeros((n, 0))
    doubled = torch.cat([x, augment.apply((Mirror(),), x, none, IDENTITY)])
    np.testing.assert_array_equal(doubled.numpy(), GOLDEN["aug/flip_doubled"])
    grey = Grey(1.0)(x, np.zeros((n, 1)), IDENTITY)
    np.testing.assert_allclose(grey.numpy(), np.repeat(GOLDEN["aug/grey"], 3, axis=1), rtol=0, atol=1e-6)
    w, h, fits = augment.window_sizes(GOLDEN["aug/crop_area_fraction"], GOLDEN["aug/crop_aspect"], height, width)
    # The program shares the batch's valid candidates out in order; ours has its own candidates for each image.
    np.testing.assert_array_equal(np.stack([w[fits], h[fits]], axis=1)[:n], GOLDEN["aug/crop_wh_pixels"])
    across, down, x_offset, y_offset = GOLDEN["aug/crop_params"].T
    cropped = augment.crop(x, across * width, down * height, x_offset, y_offset)
    np.testing.assert_allclose(cropped.numpy(), GOLDEN["aug/crop_out"], rtol=0, atol=1e-5)


def test_balanced_block_size() -> None:
    """How many new images the block K begins with, as the hook `plans` chooses them."""
    n_recall, b = int(GOLDEN["meta"][2]), int(GOLDEN["meta"][3])
    new, seen = tuple(GOLDEN["new_classes"].tolist()), tuple(GOLDEN["seen_classes"].tolist())
    old = np.array([label for label in seen if label not in new] * n_recall)
    memories = Memories(len(old), Images((1, 1, 1)))
    memories.replay.add(np.random.default_rng(0), torch.zeros(len(old), 1, 1, 1, dtype=torch.uint8), old, task=0)
    labels = np.resize(np.array(new), b)
    incoming = StreamBatch(
        torch.zeros(b, 1, 1, 1, dtype=torch.uint8), labels, np.arange(b), progress=Progress(9, 1, False, seen, new)
    )
    plan = next(MOSE(n_recall=n_recall).plans(incoming, memories, Planning(np.random.default_rng(0))))
    assert len(plan["balanced"].stream) == int(GOLDEN["n_K"])
    assert len(plan["balanced"].slots) == min(n_recall - int(GOLDEN["n_K"]), MOSE.per_class * len(seen))


def test_decay_is_added_to_the_gradient() -> None:
    """With L2-style decay, a weight whose gradient is zero still makes a full step of Adam towards 0."""
    engine = build()
    weight = torch.nn.init.constant_(engine.net.classifier.weight, -0.5)
    for parameter in engine.net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    np.testing.assert_allclose(weight.detach().numpy(), -0.5 + 1e-3, rtol=1e-5)
