"""Retrospective adversarial replay against slow loops, and the invariants of its attack."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gracecl.core import Batch, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.errors import UserError
from gracecl.methods import adversarial_replay
from gracecl.methods.adversarial_replay import AdversarialReplay
from gracecl.nets.scoring import gradient, step_ahead
from gracecl.registry.spec import parse_method
from gracecl.testing import assert_same, engine_untouched, feed, next_batch, toy_engine, toy_stream

SGD = "sgd(lr=0.05)"
PLAIN = "mlp(width=12, depth=3)"


def middle(method: str = "adversarial_replay(n_recall=5)", **options: str) -> tuple[Engine, Batch]:
    """An engine in its second task, and the batch of its next step, attacked."""
    engine = toy_engine(method, optimizer=SGD, **options)
    feed(engine, toy_stream(), until=9)
    batch, _ = next_batch(engine, toy_stream())
    return engine, batch


def colours(engine: Engine, x: Tensor) -> Tensor:
    return engine.net.inputs.restore(x)


# One step.


def literal_attack(engine: Engine, u: Tensor, x: Tensor, y: Tensor, rate: float) -> Tensor:
    """The attack by the text, on a net without BatchNorm: image by image, gradients of the mean over all by hand-made loops."""
    method, net = engine.method, toy_engine(repr(engine.method), net=PLAIN).net
    net.load_state_dict(engine.net.state_dict())
    F.cross_entropy(net(x).logits[-1], y).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
    mean, std = net.inputs.mean, net.inputs.std
    moved = []
    with torch.no_grad():
        nearest = []
        for image in u:
            distances = [float((net(image[None]).features[-1] - net(other[None]).features[-1]).norm()) for other in x]
            nearest.append(int(np.argmin(distances)))
    for image, target in zip(u, nearest, strict=True):
        goal = net(x[target][None]).features[-1].detach()
        original = image[None] * std + mean
        d, m = original.clamp(0, 1), torch.zeros_like(original)
        for _ in range(method.attack_steps):
            d = d.detach().requires_grad_()
            ((net((d - mean) / std).features[-1] - goal) ** 2).mean().backward()
            assert d.grad is not None
            m = method.momentum * m + d.grad / max(float(d.grad.abs().sum()), 1e-12)
            step = method.radius if method.step_size is None else method.step_size
            d = d.detach() - step * m.sign()
            d = torch.minimum(torch.maximum(d, original - method.radius), original + method.radius).clamp(0, 1)
        moved.append((d - mean) / std)
    return torch.cat(moved).detach()


@pytest.mark.parametrize(
    "options", ["", "attack_steps=4, step_size=0.01", "attack_steps=3, momentum=0.3, radius=0.05", "attack_steps=0"]
)
def test_attack_against_a_plain_loop(options: str) -> None:
    engine, batch = middle(f"adversarial_replay(n_recall=5, {options})", net=PLAIN)
    new = batch.rows("new")
    expected = literal_attack(engine, batch.x[batch.rows("replay")], batch.x[new], batch.y[new], rate=0.05)
    ours = batch.x[batch.rows("adversarial")]
    # A slope of almost nothing may have either sign.
    assert ((ours - expected).abs() > 1e-5).float().mean() < 0.02


def test_step_against_a_plain_loop() -> None:
    """Three means with their weights, each block in a forward of its own, from the images that the engine assembled."""
    engine = toy_engine("adversarial_replay(n_recall=5, beta=0.3)", optimizer=SGD)
    feed(engine, toy_stream(), until=9)
    other = toy_engine("adversarial_replay(n_recall=5, beta=0.3)")
    other.load_state_dict(engine.state_dict())
    net, seen = other.net.train(), []
    losses = engine.method.losses
    engine.method.losses = lambda out, batch: seen.append(batch) or losses(out, batch)
    feed(engine, toy_stream(), until=10)
    (batch,) = seen
    parts = {}
    for block in ("new", "replay", "adversarial"):
        rows = batch.rows(block)
        parts[block] = F.cross_entropy(net(batch.x[rows]).logits[-1], batch.y[rows])
    (parts["new"] + 0.7 * parts["replay"] + 0.3 * parts["adversarial"]).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
    for name, value in net.state_dict().items():
        torch.testing.assert_close(engine.net.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_without_weight_it_is_replay_of_other_classes() -> None:
    """β = 0, and any β with no step of attack, in a net without BatchNorm."""
    one, two, three = (
        toy_engine(f"adversarial_replay({options})", optimizer=SGD, net=PLAIN)
        for options in ("beta=0", "beta=0.6, attack_steps=0", "beta=1, attack_steps=0")
    )
    for engine in (one, two, three):
        engine.augmentation = ()
        feed(engine, toy_stream())
    for engine in (two, three):
        for name, value in one.net.state_dict().items():
            torch.testing.assert_close(engine.net.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    batch, _ = next_batch(prepared_engine("adversarial_replay(beta=0)"), toy_stream())
    assert list(batch.blocks) == ["new", "replay"]


def prepared_engine(method: str) -> Engine:
    engine = toy_engine(method, optimizer=SGD)
    feed(engine, toy_stream(), until=9)
    return engine


def test_all_weight_trains_on_the_attacked_images_alone() -> None:
    engine, batch = middle("adversarial_replay(n_recall=5, beta=1)")
    table = engine.chain.losses(engine.update.forward(batch), batch)
    assert float(table["ce/replay"].detach()) == 0
    assert float(table["ce/adversarial"].detach()) > 0


# The attack.


@pytest.mark.parametrize(
    "options", ["", "random_start=True, attack_steps=5", "radius=0.2, step_size=0.15, attack_steps=3", "mix=True"]
)
def test_pixels_stay_within_the_radius_and_the_range(options: str) -> None:
    engine, batch = middle(f"adversarial_replay(n_recall=5, {options})")
    u, d = (colours(engine, batch.x[batch.rows(block)]) for block in ("replay", "adversarial"))
    if "mix" in options:
        drawn = batch.rng("mix")
        share, order = drawn.random(), torch.from_numpy(drawn.permutation(len(u)))
        assert torch.equal(batch.blocks["adversarial"].found["other"], batch.y[batch.rows("replay")][order])
        u = share * u + (1 - share) * u[order]
    assert float((d - u).abs().max()) <= engine.method.radius + 1e-6
    assert d.min() >= -1e-6
    assert d.max() <= 1 + 1e-6


@pytest.mark.parametrize("options", ["radius=0", "step_size=0.0", "attack_steps=0"])
def test_nothing_moves_without_radius_step_or_steps(options: str) -> None:
    engine, batch = middle(f"adversarial_replay(n_recall=5, {options})")
    u, d = (colours(engine, batch.x[batch.rows(block)]) for block in ("replay", "adversarial"))
    torch.testing.assert_close(d, u.clamp(0, 1), rtol=0, atol=1e-6)


def test_images_come_nearer_to_their_targets() -> None:
    """The distance falls over the steps: a sign mistake would push it up."""
    engine, batch = middle("adversarial_replay(n_recall=5)", net=PLAIN)
    method, new = engine.method, batch.rows("new")
    u, x = batch.x[batch.rows("replay")], batch.x[new]
    ahead = step_ahead(engine.net, gradient(engine.net, x, batch.y[new], "frozen"), 0.05)
    distances = []
    for steps in range(6):
        method.attack_steps, method.step_size, method.radius = steps, 0.001, 0.1
        d = method.attack(u, x, ahead, np.random.default_rng(0))
        goal = method.look(x[method.match(u, x, ahead)], ahead)
        distances.append(float(F.mse_loss(method.look(d, ahead), goal).detach()))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.9 * distances[0]


@pytest.mark.parametrize("on", ["features", "logits"])
def test_match_is_the_nearest_neighbour(on: str) -> None:
    engine, batch = middle(f"adversarial_replay(n_recall=8, match_on='{on}')", net=PLAIN)
    u, x = batch.x[batch.rows("replay")], batch.x[batch.rows("new")]
    with torch.no_grad():
        of_u, of_x = (getattr(engine.net(images), on)[-1] for images in (u, x))
    brute = [int(np.argmin([float((a - b).norm()) for b in of_x])) for a in of_u]
    assert engine.method.match(u, x, {}).tolist() == brute
    assert engine.method.match(u, x[:1], {}).tolist() == [0] * len(u)


def test_labels_are_those_of_memory_and_none_of_them_is_in_the_batch() -> None:
    engine, batch = middle("adversarial_replay(n_recall=50)")
    replay, attacked, new = (set(batch.y[batch.rows(block)].tolist()) for block in ("replay", "adversarial", "new"))
    assert torch.equal(batch.y[batch.rows("replay")], batch.y[batch.rows("adversarial")])
    assert replay == attacked
    assert not replay & new
    memory = engine.memories.replay
    eligible = sum(label not in new for label in memory.labels[: len(memory)].tolist())
    assert batch.blocks["replay"].images == eligible


def test_mixed_labels_are_shares_of_two() -> None:
    engine, batch = middle("adversarial_replay(n_recall=5, mix=True)")
    share = float(batch.blocks["adversarial"].found["share"])
    assert 0 <= share <= 1
    rows = batch.rows("adversarial")
    with torch.no_grad():
        out = engine.update.forward(batch)
    log_p = F.log_softmax(out.logits[-1][rows], dim=-1)
    loss = 0.0
    others = batch.blocks["adversarial"].found["other"].tolist()
    for row, (own, other) in enumerate(zip(batch.y[rows].tolist(), others, strict=True)):
        loss -= share * float(log_p[row, own]) + (1 - share) * float(log_p[row, other])
    table = engine.chain.losses(out, batch)
    assert float(table["ce/adversarial"]) == pytest.approx(0.4 * loss / len(log_p), rel=1e-5)
    batch.blocks["adversarial"].found["share"] = torch.tensor(1.0)
    plain = 0.4 * F.cross_entropy(out.logits[-1][rows], batch.y[rows])
    assert float(engine.chain.losses(out, batch)["ce/adversarial"]) == pytest.approx(float(plain), rel=1e-5)


@pytest.mark.parametrize("net", ["mlp(width=12, depth=4, norm=True)", "resnet18(width=2)"])
def test_the_attack_leaves_weights_gradients_and_statistics_alone(net: str) -> None:
    engine, batch = middle(net=net)
    with engine_untouched(engine, "the attack"):
        engine.update.prepare(batch)
    assert not batch.x.requires_grad


def test_it_begins_with_the_first_image_of_another_class() -> None:
    engine = toy_engine("adversarial_replay()")
    image = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    tables = [engine.learn(StreamBatch(image, np.array(labels))) for labels in ([0, 0], [0, 0], [1, 1], [0, 1])]
    assert [sorted(row for row in outcome.table if row.startswith("ce")) for outcome in tables if outcome] == [
        ["ce/new"],
        ["ce/new"],
        ["ce/adversarial", "ce/new", "ce/replay"],
        ["ce/new"],
    ]


@pytest.mark.parametrize(
    ("optimizer", "option", "rate"), [(SGD, "", 0.05), ("adam(lr=0.01)", "", 0.1), (SGD, "virtual_lr=0.3", 0.3)]
)
def test_rate_of_the_virtual_step(optimizer: str, option: str, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rates = toy_engine(f"adversarial_replay({option})", optimizer=optimizer), []
    monkeypatch.setattr(
        adversarial_replay, "step_ahead", lambda net, direction, rate: rates.append(rate) or step_ahead(net, direction, rate)
    )
    feed(engine, toy_stream(), until=9)
    assert set(rates) == {rate}


def test_cost() -> None:
    """The specification's count with h'(t) taken once, and the stream's batch once more: its gradient is not reused."""
    engine = prepared_engine("adversarial_replay(n_recall=7)")
    stream = toy_stream()
    while not (outcome := feed(engine, stream, until=engine.progress.step + 1)[0]) or outcome.images != 3 + 2 * 7:
        assert engine.progress.step < len(stream)
    b, r, s = 3, 7, 2
    assert outcome.forward == (b + (b + r) + s * r + r + r + r) + b
    assert outcome.backward == (b + s * r + 2 * r) + b


def test_memory_is_the_reservoir() -> None:
    engines = [toy_engine(method) for method in ("adversarial_replay()", "er()")]
    for engine in engines:
        feed(engine, toy_stream())
    assert_same(engines[0].memories.state_dict(), engines[1].memories.state_dict(), "memory")


def test_bad_options_are_refused() -> None:
    for options in ("beta=1.1", "radius=-0.1", "attack_steps=-1"):
        with pytest.raises(UserError, match="adversarial_replay: "):
            parse_method(f"adversarial_replay({options})")
    assert AdversarialReplay().traits.boundaries == "unused"
