"""GRACE against the printed reference values and literal formulas, option by option, alone and around real methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from common import steps_of
from torch import Tensor

from gracecl import nets, rng
from gracecl.controllers import Signals, relative
from gracecl.controllers.feedback import Feedback
from gracecl.core import Batch, Block, LossTable, Planning, Progress, StreamBatch, Taps, total
from gracecl.data import Data, from_arrays
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.functional.losses import cross_entropy, entropy
from gracecl.inputs import Images
from gracecl.lab.runs.recorder import Recorder
from gracecl.lab.runs.trainer import Trainer
from gracecl.memory import Memories
from gracecl.methods.base import Method
from gracecl.methods.er import ER
from gracecl.methods.grace import Grace, layer_accuracies
from gracecl.methods.mose import MOSE
from gracecl.nets.tapped import TappedNet
from gracecl.registry.spec import parse_method
from gracecl.streams.split import split
from gracecl.testing import feed, toy_engine, toy_stream

SHAPE = (3, 2, 2)
INPUTS = Images(SHAPE, (0.0,) * 3, (1 / 255,) * 3)
"""leaves bytes as they are, so that an image's number can be read back from a step's pixels"""

H = (3.2, 2.6, 1.7, 1.2)
BETA = 0.005
GAMMA = (2.37996, 1.64688, 0.57942, 0.42734)
GAMMA_UNBIASED = (2.26104, 1.55545, 0.61535, 0.45100)
A = (0.62, 0.71, 0.83, 0.86)
ALPHA = (2.42674, 1.54806, 0.52038, 0.45021)


def make_net(layers: int = 4, classes: int = 4) -> TappedNet:
    with rng.torch_seed(0, "net"):
        return nets.build("mlp(width=6, depth=4)", INPUTS, classes, taps=layers)


def make_engine(method: Method | str, memory: int = 20, layers: int = 4, classes: int = 4, augmentation: str = "tau") -> Engine:
    method = parse_method(method) if isinstance(method, str) else method
    return Engine(method, make_net(layers, classes), Memories(memory, Images(SHAPE)), augmentation=augmentation)


def attached(grace: Grace, layers: int = 4, classes: int = 100) -> Grace:
    grace.attach(make_net(layers, classes), Memories(20, Images(SHAPE)))
    return grace


def numbered(classes: int, per_class: int) -> Data:
    """Images that carry their number in two bytes; the first three bytes differ by class as well, so that heads can learn."""
    y = np.tile(np.arange(classes), per_class)
    x = np.zeros((len(y), 2, 2, 3), np.uint8)
    x[:, 0, 0, 0], x[:, 0, 0, 1] = np.arange(len(y)) % 256, np.arange(len(y)) // 256
    x[np.arange(len(y)), 1, y % 2, y // 2 % 3] = 255
    return from_arrays(x, y, x[: 3 * classes], y[: 3 * classes])


def number(pixels: Tensor) -> list[int]:
    return (pixels[:, 0, 0, 0].double() + 256 * pixels[:, 1, 0, 0].double()).round().long().tolist()


def two_level(h: float, classes: int = 100) -> list[float]:
    """Logits (a, 0, 0, …) whose softmax has entropy h, by halving."""

    def entropy_at(a: float) -> float:
        first, rest = math.exp(a), classes - 1
        p, q = first / (first + rest), 1 / (first + rest)
        return -p * math.log(p) - rest * q * math.log(q)

    low, high = 0.0, 40.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy_at(middle) > h else (low, middle)
    return [low] + [0.0] * (classes - 1)


def logits_of(entropies: tuple[float, ...]) -> Tensor:
    """[L, 1, 100] in double precision."""
    return torch.tensor([[two_level(h)] for h in entropies], dtype=torch.float64)


def one_image(classes: int = 100, step: int = 1) -> Batch:
    progress = Progress(step, 0, False, tuple(range(classes)), tuple(range(classes)))
    return Batch(torch.zeros(1, *SHAPE), np.array([0]), np.array([0]), {"all": Block(0, 1, 1, 1, (0,))}, progress, classes, seed=0)


def taps(logits: Tensor) -> Taps:
    return Taps(torch.zeros(*logits.shape[:2], 6, dtype=logits.dtype), logits, lambda features: features)


def table_of(grace: Grace, entropies: tuple[float, ...] = H) -> LossTable:
    return attached(grace, len(entropies)).losses(taps(logits_of(entropies)), one_image())


def scores(values: tuple[float, ...], correction: int = 0) -> list[float]:
    """(value - mean) / std, literally."""
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - correction))
    return [(v - mean) / std for v in values]


# Reference values of grace.md 3.2.


@pytest.mark.parametrize(("unbiased", "expected"), [(False, GAMMA), (True, GAMMA_UNBIASED)])
def test_gamma_reference_values(unbiased: bool, expected: tuple[float, ...]) -> None:
    table = table_of(Grace(ER(), unbiased=unbiased))
    assert table["log/H"].tolist() == pytest.approx(H, abs=1e-9)
    assert (table["log/gamma"] / BETA).tolist() == pytest.approx(expected, abs=5e-6)
    assert table["entropy"].tolist() == pytest.approx([BETA * g * h for g, h in zip(expected, H, strict=True)], abs=1e-7)


def test_alpha_reference_values() -> None:
    """Through the real boundary: heads whose accuracies on the memory are exactly 62, 71, 83 and 86 of 100."""
    engine = make_engine("grace(er())", memory=100, classes=2)
    engine.memories.replay.add(np.random.default_rng(0), torch.zeros(100, *SHAPE, dtype=torch.uint8), np.zeros(100, np.int64), 0)
    net, memory = engine.net, engine.memories.replay
    # Image i has brightness i; head l answers 0 where the brightness is below 100 A_l.
    memory.images[:] = torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        for layer in net.backbone.hidden:
            layer.weight[0, 0] = 1
        net.classifier.weight[:, 0, 1] = 1
        net.classifier.bias[:, 0, 1] = torch.tensor([0.5 - 100 * a for a in A])
    engine.task_open = True
    engine.end_task()
    assert engine.method.feedback.accuracy.tolist() == list(A), "in double precision: single moves α by 2e-7"
    assert engine.task_values["A"] == list(A)
    assert engine.task_values["s"] == pytest.approx(scores(A), rel=1e-12)
    assert engine.task_values["alpha"] == pytest.approx(ALPHA, abs=5e-6)
    assert engine.task_values["alpha"] == pytest.approx([math.exp(math.tanh(-s)) for s in scores(A)], rel=1e-12)


@pytest.mark.parametrize("strength", ["paper", "bayes", "pi", "balance", "forgetting"])
def test_double_accuracies_leave_losses_in_single_precision(strength: str) -> None:
    """Whatever the rule makes of them: a row in double would cost time, and some devices have none."""
    engine = toy_engine(f"grace(er(n_recall=6), strength='{strength}')", taps=4)
    outcomes = feed(engine, toy_stream(), until=9)
    assert engine.method.feedback.accuracy.dtype == torch.float64
    assert engine.method.feedback.accuracy.isfinite().all()
    assert {value.dtype for value in outcomes[-1].table.values()} == {torch.float32}


def test_factors_are_bounded() -> None:
    """With four layers |z| is at most √3, so every factor lies in [0.391, 2.558]; the extreme is one layer against three."""
    for extreme, unbiased, low, high in ((math.sqrt(3), False, 0.391, 2.558), (1.5, True, 0.404, 2.472)):
        rule = Grace(ER(), unbiased=unbiased).controller()
        assert rule.relative(torch.tensor([0.0, 0, 0, 1], dtype=torch.float64)).abs().max().item() == pytest.approx(
            extreme, rel=1e-9
        )
        one_high, one_low = (Signals(logits_of(values), torch.full((4,), torch.nan)) for values in ((1, 1, 1, 2), (2, 2, 2, 1)))
        assert (rule.strengths(one_high) / BETA).max().item() == pytest.approx(high, abs=5e-4)
        assert (rule.strengths(one_low) / BETA).min().item() == pytest.approx(low, abs=5e-4)
        random = torch.rand(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for values in random:
            assert rule.relative(values).abs().max() <= extreme + 1e-9


# Entropy modes, grace.md 3.3 #1 and #18.

LITERAL: dict[str, Callable[[float], float]] = {
    "alg1": lambda z: BETA * math.exp(math.tanh(z)),
    "cpr": lambda z: -BETA * math.exp(math.tanh(-z)),
    "target": lambda z: BETA * (math.exp(math.tanh(z)) - 1),
    "cpr_literal": lambda z: -BETA * math.exp(math.tanh(z)),
    "uniform": lambda z: BETA,
}


def slopes(grace: Grace, entropies: tuple[float, ...] = H) -> list[float]:
    """dR/dH_l of the entropy row: H_l depends on layer l's logits alone, so it is the ratio of two gradients at them."""
    logits = logits_of(entropies).requires_grad_()
    table = attached(grace, len(entropies)).losses(taps(logits), one_image())
    [of_term] = torch.autograd.grad(table["entropy"].sum(), logits, retain_graph=True)
    [of_entropy] = torch.autograd.grad(entropy(logits).sum(), logits)
    return ((of_term * of_entropy).sum(dim=(1, 2)) / of_entropy.square().sum(dim=(1, 2))).tolist()


@pytest.mark.parametrize("mode", LITERAL)
def test_entropy_modes_are_their_formulas(mode: str) -> None:
    """The row is the factor times H, and the gradient acts with the same factor: γ is a constant."""
    grace = Grace(ER(), entropy_mode=mode)
    expected = [LITERAL[mode](z) for z in scores(H)]
    assert table_of(grace)["entropy"].tolist() == pytest.approx([f * h for f, h in zip(expected, H, strict=True)], rel=1e-7)
    assert slopes(grace) == pytest.approx(expected, rel=1e-7)


def test_deviation_mode_is_the_squared_distance_from_the_mean() -> None:
    """β Σ (H - sg(mean))²: the mean is not moved by the gradient."""
    mean = sum(H) / 4
    grace = Grace(ER(), entropy_mode="deviation")
    assert table_of(grace)["entropy"].tolist() == pytest.approx([BETA * (h - mean) ** 2 for h in H], rel=1e-7)
    assert slopes(grace) == pytest.approx([2 * BETA * (h - mean) for h in H], rel=1e-7)


def test_no_term_in_mode_none_or_without_beta() -> None:
    for grace in (Grace(ER(), entropy_mode="none"), Grace(ER(), beta=0.0)):
        table = table_of(grace)
        assert "entropy" not in table
        assert table["log/gamma"].tolist() == [0, 0, 0, 0]
        assert table["log/H"].tolist() == pytest.approx(H, abs=1e-9)


def test_target_is_alg1_minus_uniform() -> None:
    rows = {mode: table_of(Grace(ER(), entropy_mode=mode))["entropy"] for mode in ("target", "alg1", "uniform")}
    torch.testing.assert_close(rows["target"], rows["alg1"] - rows["uniform"], rtol=1e-12, atol=1e-15)
    assert rows["target"][0] > 0
    assert rows["target"][3] < 0


def test_beta_scales_the_term() -> None:
    torch.testing.assert_close(table_of(Grace(ER(), beta=0.5))["entropy"], 100 * table_of(Grace(ER()))["entropy"])


def test_attached_gamma_has_the_printed_derivative() -> None:
    """#11: dR/dH_k = γ_k + Σ_l γ_l sech²(z_l) H_l (δ_lk - 1/L - z_l z_k / L) / σ, and the printed values of both readings."""
    z, sigma = scores(H), math.sqrt(sum((h - sum(H) / 4) ** 2 for h in H) / 4)
    gamma = [BETA * math.exp(math.tanh(v)) for v in z]
    closed = [
        gamma[k] + sum(gamma[i] / math.cosh(z[i]) ** 2 * H[i] * ((i == k) - 1 / 4 - z[i] * z[k] / 4) / sigma for i in range(4))
        for k in range(4)
    ]
    assert slopes(Grace(ER(), attached=True)) == pytest.approx(closed, rel=1e-6)
    assert [round(value, 4) for value in slopes(Grace(ER(), attached=True))] == [0.0067, 0.0162, 0.0014, 0.0009]
    assert [round(value, 4) for value in slopes(Grace(ER()))] == [0.0119, 0.0082, 0.0029, 0.0021]


# Where the spread vanishes, #9.


@pytest.mark.parametrize(
    "entropies", [(1.5, 1.5, 1.5, 1.5), (2.0,), (1.5, 1.5, 1.5, 1.5 + 1e-9)], ids=["equal", "one layer", "nearly"]
)
@pytest.mark.parametrize("unbiased", [False, True])
def test_layers_that_agree_have_z_zero(entropies: tuple[float, ...], unbiased: bool) -> None:
    table = table_of(Grace(ER(), unbiased=unbiased), entropies)
    assert table["log/z"].tolist() == [0] * len(entropies)
    assert table["log/gamma"].tolist() == pytest.approx([BETA] * len(entropies), rel=1e-12)
    assert slopes(Grace(ER(), unbiased=unbiased), entropies) == pytest.approx([BETA] * len(entropies), rel=1e-6)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_heads_that_are_equally_good_have_z_zero_in_single_precision(layers: int) -> None:
    """Any share of right answers out of 30, the same in every layer."""
    for right in range(31):
        z = relative(torch.full((layers,), right / 30))
        assert z.tolist() == [0.0] * layers, right


def test_a_spread_just_above_the_limit_counts_in_full() -> None:
    values = torch.tensor([0, 0, 0, 4e-8], dtype=torch.float64)
    assert relative(values).tolist() == pytest.approx(scores((0, 0, 0, 4e-8)), rel=1e-9)


@pytest.mark.parametrize("entropies", [(2.0,), (1.5, 1.5, 1.5, 1.5)], ids=["one layer", "equal"])
def test_attached_gamma_is_plain_beta_where_layers_agree(entropies: tuple[float, ...]) -> None:
    """The root of a spread of 0 has no derivative; it must not turn the gradient into NaN."""
    assert slopes(Grace(ER(), attached=True), entropies) == pytest.approx([BETA] * len(entropies), rel=1e-6)


@pytest.mark.parametrize("floor", [0.05, 0.5, 2.0])
def test_sigma_floor_limits_the_division(floor: float) -> None:
    mean = sum(H) / 4
    sigma = math.sqrt(sum((h - mean) ** 2 for h in H) / 4)  # 0.78
    expected = [(h - mean) / max(sigma, floor) for h in H]
    assert table_of(Grace(ER(), sigma_floor=floor))["log/z"].tolist() == pytest.approx(expected, rel=1e-7)
    assert table_of(Grace(ER(), sigma_floor=floor), (1.0, 1.0))["log/z"].tolist() == [0, 0]


def test_sigma_is_recorded() -> None:
    mean = sum(H) / 4
    assert table_of(Grace(ER()))["log/sigma_H"].tolist() == pytest.approx([math.sqrt(sum((h - mean) ** 2 for h in H) / 4)] * 4)


# Which rows: α and entropy, on a real step of MOSE.


@dataclass
class Step:
    engine: Engine
    new: StreamBatch
    batch: Batch
    out: Taps
    inner: LossTable


@pytest.fixture(scope="module")
def step() -> Step:
    """A batch of the second task as the engine assembles it for MOSE, with random logits."""
    engine = make_engine("mose(n_recall=20)", memory=30, classes=6)
    for task, _ in steps_of(engine, numbered(6, 8), batch=6):
        if task == 1 and engine.memories.replay.count(task=1) >= 6:
            break
    x = torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    new = StreamBatch(x, np.array([3, 4, 5]), np.array([900, 901, 902]), progress=engine.progress)
    plan = next(engine.chain.plans(new, engine.memories, Planning(np.random.default_rng(0), engine.augmentation)))
    batch = engine.assemble(plan, new, 0)
    choice = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(4, len(batch), 6, generator=choice)
    out = Taps(torch.randn(4, len(batch), 6, generator=choice), logits, engine.net.projector)
    inner = {row: value.detach() for row, value in engine.chain.losses(out, batch).items()}
    assert set(inner) == {"sc", "ce/new", "ce/balanced", "rsd"}
    assert all((value[:3] != 0).all() for value in inner.values())
    return Step(engine, new, batch, out, inner)


GIVEN_ALPHA = torch.tensor([2.0, 3.0, 5.0, 7.0])


def around(step: Step, alpha: Tensor = GIVEN_ALPHA, **options: object) -> Grace:
    """GRACE around the step's own method, with α as given."""
    grace = Grace(step.engine.method, **options)
    grace.feedback = Feedback(4, grace.controller())
    grace.feedback.controller.weights = lambda accuracy: alpha
    return grace


@pytest.mark.parametrize(
    ("alpha_on", "touched"),
    [
        ("ce", {"ce/new", "ce/balanced"}),
        ("ce_new", {"ce/new"}),
        ("ce_past", {"ce/balanced"}),
        ("all", {"sc", "ce/new", "ce/balanced", "rsd"}),
    ],
)
def test_alpha_acts_on_its_rows_and_on_no_other(step: Step, alpha_on: str, touched: set[str]) -> None:
    grace = around(step, alpha_on=alpha_on)
    table = grace.chain.losses(step.out, step.batch)
    for row, value in step.inner.items():
        expected = value * GIVEN_ALPHA if row in touched else value
        torch.testing.assert_close(table[row], expected, rtol=1e-6, atol=0)
    ones = around(step, torch.ones(4)).losses(step.out, step.batch)
    for row in ("entropy", "log/H", "log/gamma", "log/z"):
        assert torch.equal(table[row], ones[row])
    objective = sum(table[row].sum().item() for row in (*step.inner, "entropy"))
    assert total(table).item() == pytest.approx(objective, rel=1e-6)


def test_alpha_on_the_entropy_alone(step: Step) -> None:
    """α γ H, and the inner method's rows as they are."""
    table, ones = (
        around(step, alpha, alpha_on="entropy").chain.losses(step.out, step.batch) for alpha in (GIVEN_ALPHA, torch.ones(4))
    )
    for row, value in step.inner.items():
        assert torch.equal(table[row], value)
    torch.testing.assert_close(table["entropy"], GIVEN_ALPHA * ones["entropy"], rtol=1e-6, atol=0)


def test_the_entropy_of_the_last_layer_alone(step: Step) -> None:
    whole, last = (around(step, entropy_layers=layers).losses(step.out, step.batch)["entropy"] for layers in ("all", "last"))
    assert (whole != 0).all()
    assert last.tolist() == [0.0, 0.0, 0.0, whole[-1].item()]


def test_entropies_summed_over_the_images(step: Step) -> None:
    """Strengths are those of the means, since z has no scale; the term is as many times as large as there are images."""
    mean, summed = (around(step, entropy_sum=choice).losses(step.out, step.batch) for choice in (False, True))
    torch.testing.assert_close(summed["log/gamma"], mean["log/gamma"])
    torch.testing.assert_close(summed["entropy"], len(step.batch) * mean["entropy"], rtol=1e-5, atol=0)
    deviation = [
        around(step, entropy_mode="deviation", entropy_sum=choice).losses(step.out, step.batch) for choice in (False, True)
    ]
    torch.testing.assert_close(deviation[1]["entropy"], len(step.batch) ** 2 * deviation[0]["entropy"], rtol=1e-4, atol=0)


def test_the_entropy_of_features_as_printed(step: Step) -> None:
    """softmax(h_l) of the features themselves, over all of them."""
    table = around(step, entropy_of="features").losses(step.out, step.batch)
    rows, width = list(range(len(step.batch))), step.out.features.shape[-1]
    h = entropy_by_loop(step.out.features, rows, list(range(width)))
    assert table["log/H"].tolist() == pytest.approx(h, rel=1e-5)
    gamma = [BETA * math.exp(math.tanh(z)) for z in scores(tuple(h))]
    assert table["entropy"].tolist() == pytest.approx([g * value for g, value in zip(gamma, h, strict=True)], rel=1e-4)
    assert "log/gradient_ratio" not in table


def test_features_have_no_classes_and_no_cross_entropy() -> None:
    with pytest.raises(UserError, match="features, not classes; use classes='all'"):
        Grace(ER(), entropy_of="features", classes="seen")
    with pytest.raises(UserError, match="'balance' compares what the heads put out; use entropy_of='head'"):
        Grace(ER(), entropy_of="features", strength="balance")


def entropy_by_loop(logits: Tensor, rows: list[int], classes: list[int]) -> list[float]:
    values = []
    for layer in logits.tolist():
        terms = []
        for row in rows:
            weights = [math.exp(layer[row][c]) for c in classes]
            terms.append(-sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights))
        values.append(sum(terms) / len(terms))
    return values


@pytest.mark.parametrize("entropy_on", ["all", "new", "stream"])
def test_entropy_is_taken_on_the_chosen_images(step: Step, entropy_on: str) -> None:
    """all rows of the forward; block N with its four views; or the raw and mirrored stream images, 2b rows of block N."""
    batch, block = step.batch, step.batch.blocks["new"]
    rows = {
        "all": list(range(len(batch))),
        "new": list(range(4 * block.images)),
        "stream": [*range(3), *range(block.images, block.images + 3)],
    }[entropy_on]
    got = around(step, entropy_on=entropy_on).losses(step.out, batch)["log/H"].tolist()
    assert got == pytest.approx(entropy_by_loop(step.out.logits, rows, list(range(6))), rel=1e-5)
    assert len({*map(len, ([0] * len(batch), [0] * 4 * block.images, [0] * 6))}) == 3


def test_stream_rows_are_the_raw_and_mirrored_stream_images(step: Step) -> None:
    rows = step.batch.stream_rows
    assert len(rows) == 2 * len(step.new)
    raw = INPUTS.normalise(step.new.x)
    torch.testing.assert_close(step.batch.x[rows], torch.cat([raw, raw.flip(-1)]), rtol=0, atol=1e-4)
    assert step.batch.labels[rows.numpy()].tolist() == [3, 4, 5, 3, 4, 5]
    assert step.batch.sources[rows.numpy()].tolist() == [900, 901, 902] * 2


def test_stream_rows_of_er_are_the_stream_images() -> None:
    """One random view: there is no raw one, so the augmented stream images stand for themselves."""
    for augmentation in ("tau", "none"):
        engine = make_engine("grace(er(n_recall=5), entropy_on='stream')", augmentation=augmentation)
        for _ in steps_of(engine, numbered(4, 4)):
            pass
        x = torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8)
        new = StreamBatch(x, np.array([0, 1, 2]), np.array([900, 901, 902]), progress=engine.progress)
        batch = engine.assemble(engine.plan(new), new, 0)
        assert len(batch) == 8
        assert batch.sources[batch.stream_rows.numpy()].tolist() == [900, 901, 902]


@pytest.mark.parametrize(("classes", "columns"), [("all", [0, 1, 2, 3, 4, 5]), ("seen", [0, 1, 4])])
def test_entropy_is_taken_over_the_chosen_classes(step: Step, classes: str, columns: list[int]) -> None:
    progress = Progress(1, 1, False, (4, 0, 1), (4,))
    batch = Batch(
        step.batch.x, step.batch.labels % 2, step.batch.sources, {"all": Block(0, len(step.batch), 1, 3, ())}, progress, 6, 0
    )
    table = attached(Grace(ER(), classes=classes), 4, 6).losses(step.out, batch)
    assert table["log/H"].tolist() == pytest.approx(entropy_by_loop(step.out.logits, list(range(len(batch))), columns), rel=1e-5)


# α from the past.


def accuracies_by_loop(net: TappedNet, images: Tensor, labels: np.ndarray) -> list[float]:
    """Counted one by one, argmax over all outputs, in evaluation mode."""
    net.eval()
    with torch.no_grad():
        logits = net(net.inputs.normalise(images)).logits.tolist()
    net.train()
    right = [sum(row.index(max(row)) == label for row, label in zip(layer, labels.tolist(), strict=True)) for layer in logits]
    return [count / len(labels) for count in right]


def literal_alpha(accuracies: list[float]) -> list[float]:
    if len(set(accuracies)) == 1:
        return [1.0] * len(accuracies)
    return [math.exp(math.tanh(-s)) for s in scores(tuple(accuracies))]


@pytest.mark.parametrize("source", ["buffer", "heldout"])
def test_alpha_follows_the_accuracies_on_the_past(source: str) -> None:
    """1 during the first task; then e^tanh(-s) of accuracies counted image by image at the boundary, fixed through the task."""
    engine = make_engine(f"grace(er(n_recall=8), val_source='{source}')", memory=40)
    used = {0: [], 1: []}
    expected = None
    for task, outcome in steps_of(engine, numbered(4, 30), batch=12):
        used[task].append(outcome.table["log/alpha"].tolist())
        if task == 0 and len(used[0]) == 5:  # the last step of the task: 60 images in batches of 12
            store = engine.memories["replay" if source == "buffer" else "heldout"]
            accuracies = accuracies_by_loop(engine.net, store.images[: len(store)], store.labels[: len(store)])
            expected = literal_alpha(accuracies)
    assert used[0] == [[1.0] * 4] * 5
    assert len(used[1]) == 5
    for alpha in used[1]:
        assert alpha == pytest.approx(expected, rel=1e-5)
    assert engine.method.feedback.accuracy.tolist() == pytest.approx(accuracies)
    assert expected != [1.0] * 4


@pytest.mark.parametrize("source", ["buffer", "heldout"])
def test_past_without_the_newest_task(source: str) -> None:
    """α stays 1 until two tasks are done; then it follows the accuracies on all but the task that ended last."""
    engine = make_engine(f"grace(er(n_recall=8), past_tasks='finished', val_source='{source}')", memory=60, classes=6)
    alphas: dict[int, list[list[float]]] = {0: [], 1: [], 2: []}
    expected = None
    for task, outcome in steps_of(engine, numbered(6, 30), tasks=3, batch=12):
        alphas[task].append(outcome.table["log/alpha"].tolist())
        if task == 1 and len(alphas[1]) == 5:
            store = engine.memories["replay" if source == "buffer" else "heldout"]
            older = np.flatnonzero(store.tasks[: len(store)] == 0)
            accuracies = accuracies_by_loop(engine.net, store.images[torch.from_numpy(older)], store.labels[older])
            expected = literal_alpha(accuracies)
    assert alphas[0] + alphas[1] == [[1.0] * 4] * 10
    assert len(alphas[2]) == 5
    assert expected != [1.0] * 4
    for alpha in alphas[2]:
        assert alpha == pytest.approx(expected, rel=1e-5)


def test_past_without_the_newest_task_on_the_test_images(tmp_path: Path) -> None:
    engine, data = make_engine("grace(er(n_recall=8), val_source='test_oracle', past_tasks='finished')"), numbered(4, 10)
    recorder = Recorder(tmp_path / "metrics.jsonl")
    trainer = Trainer(engine, engine.as_seen(split(data, 0, tasks=2, batch=4)), recorder)
    for _ in range(10):
        trainer.step()
    first = np.flatnonzero(data.test_y < 2)
    expected = accuracies_by_loop(engine.net, data.test_x[torch.from_numpy(first)], data.test_y[first])
    assert engine.method.feedback.accuracy.tolist() == pytest.approx(expected)
    recorder.close()


def test_past_accuracy_by_class_means() -> None:
    """The nearest mean of the memory's unit features among the classes met, layer by layer, counted image by image."""
    engine = make_engine("grace(er(n_recall=8), past_head='ncm')", memory=40, classes=6)
    for task, _ in steps_of(engine, numbered(4, 30), batch=12):
        if task == 1:
            break
    memory, net = engine.memories.replay, engine.net
    engine.method.look_back(engine.memories, engine.progress)
    net.eval()
    with torch.no_grad():
        features = net(net.inputs.normalise(memory.images[: len(memory)])).features.double()
    net.train()
    found = []
    for layer in features:
        unit = layer / layer.norm(dim=1, keepdim=True)
        means = {label: unit[memory.labels[: len(memory)] == label].mean(dim=0) for label in engine.progress.seen}
        means = {label: mean / mean.norm() for label, mean in means.items()}
        nearest = [min(means, key=lambda label, image=image: float((image - means[label]).norm())) for image in unit]
        found.append(np.mean(np.array(nearest) == memory.labels[: len(memory)]))
    assert engine.method.feedback.accuracy.tolist() == pytest.approx(found, abs=1e-6)


def test_past_accuracy_by_the_votes_of_the_other_layers() -> None:
    """For each layer, the class of largest summed softmax of the others among the classes met, counted image by image."""
    engine = make_engine("grace(er(n_recall=8), past_head='others')", memory=40, classes=6)
    for task, _ in steps_of(engine, numbered(4, 30), batch=12):
        if task == 1:
            break
    memory, net, seen = engine.memories.replay, engine.net, list(engine.progress.seen)
    with torch.no_grad():  # a head that is sure of itself: sums of logits and of softmax differ, and so do all and all others
        net.classifier.weight[-1] *= 30
    engine.method.look_back(engine.memories, engine.progress)
    net.eval()
    with torch.no_grad():
        logits = net(net.inputs.normalise(memory.images[: len(memory)])).logits.double()
    net.train()
    found = []
    for left_out in range(len(logits)):
        right = 0
        for image in range(len(memory)):
            sums = dict.fromkeys(seen, 0.0)
            for layer in range(len(logits)):
                if layer == left_out:
                    continue
                total = sum(math.exp(logits[layer, image, label] - logits[layer, image].max()) for label in seen)
                for label in seen:
                    sums[label] += math.exp(logits[layer, image, label] - logits[layer, image].max()) / total
            right += max(sums, key=lambda label: sums[label]) == memory.labels[image]
        found.append(right / len(memory))
    assert len(set(found)) > 1
    assert engine.method.feedback.accuracy.tolist() == pytest.approx(found, abs=1e-6)


def test_the_two_floors_are_apart() -> None:
    """Each limits the division of its own z-score and leaves the other's alone."""
    h, accuracy = torch.tensor(H), torch.tensor(A)
    plain = Grace(ER()).controller()
    floored = Grace(ER(), accuracy_floor=0.5).controller()
    assert torch.equal(floored.relative(h), plain.relative(h))
    expected = [math.exp(math.tanh(-(a - sum(A) / 4) / 0.5)) for a in A]
    assert floored.weights(accuracy).tolist() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(Grace(ER(), sigma_floor=5.0).controller().weights(accuracy), plain.weights(accuracy))


def test_layer_accuracies_are_the_loop() -> None:
    net, data = make_net(), numbered(4, 10)
    assert layer_accuracies(net, data.train_x, data.train_y).tolist() == pytest.approx(
        accuracies_by_loop(net, data.train_x, data.train_y)
    )


def test_without_adaptation_alpha_stays_one_but_accuracies_are_known() -> None:
    engine = make_engine("grace(er(n_recall=8), adaptive=False)")
    tables = [outcome.table for _, outcome in steps_of(engine, numbered(4, 8))]
    assert all(table["log/alpha"].tolist() == [1.0] * 4 for table in tables)
    assert torch.isfinite(engine.method.feedback.accuracy).all()


def test_without_memory_alpha_stays_one() -> None:
    engine = make_engine("grace(sgd())")
    tables = [outcome.table for _, outcome in steps_of(engine, numbered(4, 8))]
    engine.end_task()
    assert tables[-1]["log/alpha"].tolist() == [1.0] * 4


@dataclass(eq=False, repr=False)
class SpyER(ER):
    """ER that keeps the numbers of the images it replayed."""

    def after_step(self, out: Taps, batch: Batch) -> None:
        [block] = batch.blocks.values()
        self.__dict__.setdefault("replayed", []).append(number(batch.x[block.from_stream :]))


def test_heldout_images_are_within_the_budget_and_never_replayed() -> None:
    """Replay and held-out slots add up to M, no image is in both, and none that is held out at any time is replayed at any time."""
    engine = make_engine(Grace(SpyER(n_recall=20), val_source="heldout"), memory=40, augmentation="none")
    replay, heldout = engine.memories.replay, engine.memories["heldout"]
    assert (replay.capacity, heldout.capacity) == (36, 4)
    aside, offered = set(), 0
    for _ in steps_of(engine, numbered(4, 60), batch=12):
        offered += 12
        held, kept = (number(store.images[: len(store)]) for store in (heldout, replay))
        assert not set(held) & set(kept)
        assert len(set(held)) == len(held)
        aside |= set(held)
        assert replay.offered + heldout.offered == offered
    assert (len(replay), len(heldout)) == (36, 4)
    assert len(aside) > 4  # the held-out store is a reservoir of its own, overwritten as the stream goes on
    replayed = {image for step in engine.method.inner.replayed for image in step}
    assert len(replayed) > 60
    assert not replayed & aside
    assert 0.04 < heldout.offered / offered < 0.18


def test_a_tenth_of_the_images_is_held_out() -> None:
    engine, data = make_engine("grace(er(), val_source='heldout')"), numbered(4, 1000)
    new = engine.meet(StreamBatch(data.train_x, data.train_y, task=0))
    engine.chain.after_batch(engine.memories, new)
    assert engine.memories["heldout"].offered == pytest.approx(400, abs=60)  # three standard deviations
    assert engine.memories.replay.offered == 4000 - engine.memories["heldout"].offered


def test_without_task_marks_alpha_is_renewed_by_the_clock() -> None:
    engine, data = make_engine("grace(er(n_recall=8), refresh_every=6)"), numbered(4, 60)
    looked = []
    engine.method.look_back = lambda memories, progress: looked.append(progress.step)  # type: ignore[method-assign]
    for start in range(0, 200, 10):
        engine.learn(StreamBatch(data.train_x[start : start + 10], data.train_y[start : start + 10]))
    assert looked == [5, 11, 17]


def test_a_memory_without_slots_cannot_hold_anything_out() -> None:
    with pytest.raises(UserError, match="larger --memory"):
        make_engine("grace(er(), val_source='heldout')", memory=0)


def test_test_oracle_uses_the_test_images_of_the_tasks_so_far(tmp_path: Path) -> None:
    engine = make_engine("grace(er(n_recall=8), val_source='test_oracle')")
    data = numbered(4, 10)
    recorder = Recorder(tmp_path / "metrics.jsonl")
    trainer = Trainer(engine, engine.as_seen(split(data, 0, tasks=2, batch=4)), recorder)
    for _ in range(5):  # the first task: 20 images
        trainer.step()
    first = np.flatnonzero(data.test_y < 2)
    expected = accuracies_by_loop(engine.net, data.test_x[torch.from_numpy(first)], data.test_y[first])
    assert engine.method.feedback.accuracy.tolist() == pytest.approx(expected)
    assert engine.task_values["alpha"] == pytest.approx(literal_alpha(expected), rel=1e-5)
    recorder.close()


def test_test_oracle_is_refused_without_test_images() -> None:
    engine = make_engine("grace(er(n_recall=8), val_source='test_oracle')")
    with pytest.raises(UserError, match="needs a stream with test images"):
        for _ in steps_of(engine, numbered(4, 4)):
            pass


# The ratio of gradients, closed form against autograd.


def test_gradient_ratio_is_autograds() -> None:
    choice = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(4, 9, 6, generator=choice, dtype=torch.float64)).requires_grad_()
    y = torch.randint(0, 6, (9,), generator=choice)
    gamma, alpha = torch.tensor([0.01, -0.02, 0.03, 0.0]), torch.tensor([2.0, 0.5, 1.0, 1.5])
    [of_entropy] = torch.autograd.grad((gamma * entropy(logits)).sum(), logits)
    [of_cross_entropy] = torch.autograd.grad((alpha * cross_entropy(logits, y)).sum(), logits)
    expected = of_entropy.flatten(1).norm(dim=1) / of_cross_entropy.flatten(1).norm(dim=1)
    ratio = gamma.abs() * Signals(logits, torch.full((4,), torch.nan), y).pull / alpha
    torch.testing.assert_close(ratio, expected, rtol=1e-6, atol=1e-12)


def test_gradient_ratio_of_the_estimates_in_the_specification() -> None:
    """grace.md 3.5: two-level softmax over 100 classes, |dH| / |dCE| = 0.2, 2.3, 6.1, 9.1, 11.5."""
    for p, expected in ((0.1, 0.2), (0.5, 2.3), (0.9, 6.1), (0.99, 9.1), (0.999, 11.5)):
        logits = torch.zeros(1, 1, 100, dtype=torch.float64)
        logits[0, 0, 0] = math.log(99 * p / (1 - p))
        ratio = Signals(logits, torch.full((1,), torch.nan), torch.tensor([0])).pull.item()
        assert ratio == pytest.approx(expected, abs=0.06)


def test_gradient_ratio_is_recorded_every_hundred_steps() -> None:
    grace = attached(Grace(ER()))
    logits = logits_of(H)
    rows = {number: grace.losses(taps(logits), one_image(step=number)) for number in (0, 1, 99, 100)}
    assert ["log/gradient_ratio" in rows[number] for number in (0, 1, 99, 100)] == [True, False, False, True]
    expected = rows[100]["log/gamma"] * Signals(logits, torch.ones(4), torch.tensor([0])).pull
    torch.testing.assert_close(rows[100]["log/gradient_ratio"], expected)


# Nothing else changes.


def trained(expression: str) -> dict[str, Tensor]:
    """The weights after two tasks."""
    engine = make_engine(expression)
    for _ in steps_of(engine, numbered(4, 4)):
        pass
    return engine.net.state_dict()


@pytest.mark.parametrize("inner", ["er(n_recall=6)", "mose(n_recall=8)"])
def test_without_feedback_it_is_the_inner_method_to_the_bit(inner: str) -> None:
    """β = 0 (or no entropy mode) and α = 1 give the inner method's weights after two tasks; with either feedback they differ."""
    plain = trained(inner)
    for options in ("beta=0, adaptive=False", "entropy_mode='none', adaptive=False"):
        same = trained(f"grace({inner}, {options})")
        assert all(torch.equal(value, same[name]) for name, value in plain.items()), options
    for options in ("adaptive=False", "beta=0"):
        other = trained(f"grace({inner}, {options})")
        assert not all(torch.equal(value, other[name]) for name, value in plain.items()), options


def test_deviation_without_beta_is_the_inner_method_to_the_bit() -> None:
    plain, same = trained("mose(n_recall=8)"), trained("grace(mose(n_recall=8), beta=0, entropy_mode='deviation', adaptive=False)")
    assert all(torch.equal(value, same[name]) for name, value in plain.items())


def test_a_method_without_cross_entropy_is_told_so() -> None:
    @dataclass(eq=False, repr=False)
    class Quiet(Method):
        def losses(self, out: Taps, batch: Batch) -> LossTable:
            return {"sc": out.logits.square().mean(dim=(1, 2)), "log/x": torch.zeros(4)}

    for alpha_on in ("ce", "ce_new"):
        with pytest.raises(UserError, match="has no loss row for alpha_on"):
            next(steps_of(make_engine(Grace(Quiet(), alpha_on=alpha_on)), numbered(4, 4)))
    engine = make_engine(Grace(Quiet(), alpha_on="all"))
    next(steps_of(engine, numbered(4, 4)))


def test_options_that_do_not_fit_the_inner_method_are_told() -> None:
    with pytest.raises(UserError, match="has no loss row for alpha_on='ce_new'"):
        next(steps_of(make_engine("grace(er(), alpha_on='ce_new')"), numbered(4, 4)))
    with pytest.raises(UserError, match="has no loss row for alpha_on='ce_past'"):
        next(steps_of(make_engine("grace(er(), alpha_on='ce_past')"), numbered(4, 4)))
    with pytest.raises(UserError, match="no block of new images"):
        next(steps_of(make_engine("grace(er(), entropy_on='new')"), numbered(4, 4)))


@pytest.mark.parametrize("option", ["alpha_on='ce_new'", "entropy_on='new'"])
def test_er_with_two_forwards_has_a_block_of_new_images_from_the_start(option: str) -> None:
    steps = list(steps_of(make_engine(f"grace(er(reduction='sum_of_means'), {option})"), numbered(4, 4)))
    assert all({"ce/new", "entropy"} <= outcome.table.keys() for _, outcome in steps)
    assert all(("ce/replay" in outcome.table) == (number > 0) for number, (_, outcome) in enumerate(steps))


def test_alpha_and_accuracies_are_in_the_checkpoint() -> None:
    engine = make_engine("grace(er(n_recall=8))", memory=40)
    for _ in steps_of(engine, numbered(4, 10)):
        pass
    restored = attached(Grace(ER()), 4, 4)
    restored.load_state_dict(engine.method.state_dict())
    assert torch.equal(restored.feedback.accuracy, engine.method.feedback.accuracy)
    assert restored.feedback.controller.weights(restored.feedback.accuracy).tolist() == engine.task_values["alpha"]


def test_the_default_is_the_papers_system() -> None:
    grace = Grace()
    assert isinstance(grace.inner, MOSE)
    assert (grace.beta, grace.entropy_mode, grace.alpha_on, grace.val_source) == (0.005, "alg1", "ce", "buffer")
    assert (grace.entropy_on, grace.classes, grace.unbiased, grace.attached) == ("all", "all", False, False)
    assert grace.chain.rule == "ncm_mean"
