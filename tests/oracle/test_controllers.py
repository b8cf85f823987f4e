"""Feedback rules, alone and closed into a loop with something that learns, and feedback in a loop of one's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gracecl
from gracecl import controllers as rules
from gracecl.controllers import Controller, Signals
from gracecl.controllers.feedback import Feedback
from gracecl.controllers.posterior import Strength
from gracecl.core import NO_TASK, StreamBatch
from gracecl.errors import UserError
from gracecl.functional.losses import cross_entropy, entropy
from gracecl.registry import controllers
from gracecl.registry.spec import parse_method
from gracecl.testing import feed, next_batch, toy_engine, toy_stream

UNKNOWN = torch.full((4,), torch.nan)


def some_logits(seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sharpness = scale * torch.tensor([0.3, 0.8, 1.5, 3.0])[:, None, None]
    return (sharpness * torch.randn(4, 20, 6, generator=generator)).requires_grad_()


# The contract.


@pytest.mark.parametrize("name", [name for name in controllers.names() if name != "forgetting"])
def test_a_rule_gives_one_alpha_and_one_gamma_per_layer_and_moves_nothing(name: str) -> None:
    rule = rules.build(name, adaptive=True)
    signals = Signals(some_logits(), torch.tensor([0.4, 0.5, 0.7, 0.9]), torch.arange(20) % 6)
    first, second = rule(signals), rule(signals)
    for values, again in zip(first, second, strict=True):
        assert values.shape == (4,)
        assert values.isfinite().all()
        assert torch.equal(values, again)
    alpha = first[0]
    expected = [math.exp(math.tanh(-s)) for s in ((np.array([0.4, 0.5, 0.7, 0.9]) - 0.625) / np.std([0.4, 0.5, 0.7, 0.9]))]
    assert alpha.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", controllers.names())
def test_nothing_known_about_the_past_means_alpha_is_one(name: str) -> None:
    for rule, accuracy in ((rules.build(name, adaptive=True), UNKNOWN), (rules.build(name), torch.tensor([0.1, 0.2, 0.3, 0.9]))):
        alpha, _ = rule(Signals(some_logits(), accuracy, torch.arange(20) % 6))
        assert alpha.tolist() == [1.0] * 4


def test_forgetting_weighs_layers_by_what_they_lost() -> None:
    """A running mean of the difference between two mean cross-entropies, then a softmax over the layers, all by loops."""
    rule, rate, temperature = rules.build("forgetting(rate=0.25, temperature=0.7, adaptive=True)"), 0.25, 0.7
    running = [0.0] * 4
    for step in range(3):
        logits, labels = some_logits(step), torch.arange(20) % 6
        past = torch.arange(20) >= (20 if step == 1 else 13 - step)  # the second step replays nothing
        signals = Signals(logits, UNKNOWN, labels, past=past)
        weight = [math.exp(value / temperature) for value in running]
        alpha, gamma = rule(signals)
        assert alpha.tolist() == pytest.approx([4 * value / sum(weight) for value in weight], rel=1e-5)
        assert gamma.tolist() == [0.0] * 4
        rule.after_step(signals)
        if not past.any():
            continue
        for layer in range(4):
            of_kind: dict[bool, list[float]] = {True: [], False: []}
            for image in range(20):
                z = logits[layer, image].tolist()
                of_kind[bool(past[image])].append(math.log(sum(map(math.exp, z))) - z[image % 6])
            difference = sum(of_kind[True]) / len(of_kind[True]) - sum(of_kind[False]) / len(of_kind[False])
            running[layer] += rate * (difference - running[layer])
    again = rules.build("forgetting(rate=0.25, temperature=0.7, adaptive=True)")
    again.load_state_dict(rule.state_dict())
    assert torch.equal(again(signals)[0], rule(signals)[0])
    assert rules.build("forgetting", adaptive=False)(signals)[0].tolist() == [1.0] * 4


def test_forgetting_sees_which_images_grace_replays_and_acts_on_them_alone() -> None:
    engine, stream = (
        toy_engine("grace(mose(n_recall=4), strength='forgetting(rate=1.0)', alpha_on='ce_past')", taps=4),
        toy_stream(),
    )
    feed(engine, stream, until=8)
    batch, out = next_batch(engine, stream)
    signals = engine.method.signals(out, batch)
    ce = torch.stack([F.cross_entropy(layer, batch.y, reduction="none") for layer in out.logits.detach()])
    new = torch.zeros(len(batch), dtype=torch.bool)
    for block in batch.blocks.values():
        for view in range(block.views):
            new[block.view(view).start : block.view(view).start + block.from_stream] = True
    assert 0 < new.sum() < len(batch)
    torch.testing.assert_close(signals.forgetting, ce[:, ~new].mean(dim=1) - ce[:, new].mean(dim=1))
    with torch.no_grad():
        engine.method.after_step(out, batch)
    plain, weighted = engine.method.inner.chain.losses(out, batch), engine.chain.losses(out, batch)
    alpha = 4 * torch.softmax(signals.forgetting / 0.5, dim=0)
    torch.testing.assert_close(weighted["ce/balanced"], alpha * plain["ce/balanced"])
    assert torch.equal(weighted["ce/new"], plain["ce/new"])
    assert not weighted["entropy"].any()


def test_forgetting_needs_to_know_which_images_are_old() -> None:
    with pytest.raises(UserError, match="only grace"):
        Feedback(4, "forgetting")(some_logits(), torch.ones(4), torch.arange(20) % 6)


def test_a_rule_of_your_own_is_ten_lines() -> None:
    @controllers.register("threshold")
    @dataclass(eq=False, repr=False)
    class Threshold(Controller):
        """Full strength for layers above some entropy, none below."""

        nats: float = 1.0
        """entropy above which a layer is regularised"""

        def strengths(self, signals: Signals) -> Tensor:
            return self.beta * (signals.entropy.detach() > self.nats)

    try:
        h = entropy(some_logits())
        assert h.min() < 1.2 < h.max()
        engine = toy_engine("grace(er(), strength='threshold(nats=1.2)', beta=0.5)", taps=4)
        data = toy_stream().data
        outcome = engine.learn(StreamBatch(data.train_x[:3], data.train_y[:3], task=0))
        expected = [0.5 if value > 1.2 else 0.0 for value in outcome.table["log/H"].tolist()]
        assert outcome.table["log/gamma"].tolist() == expected
        _, gamma = Feedback(4, "threshold(nats=1.2, beta=2.0)").controller(Signals(some_logits(), UNKNOWN))
        assert gamma.tolist() == [2.0 if value > 1.2 else 0.0 for value in h.tolist()]
    finally:
        controllers._name_of.pop(controllers.loaded.pop("threshold"))


def test_options_in_the_expression_win_over_those_of_grace() -> None:
    rule = parse_method("grace(er(), strength='bayes(tau=0.5, beta=0.1)', beta=0.2, adaptive=False)").controller()
    assert (rule.beta, rule.tau, rule.adaptive) == (0.1, 0.5, False)
    rule = parse_method("grace(er(), strength='paper(beta=0.1)', entropy_mode='cpr', attached=True)").controller()
    assert (rule.beta, rule.entropy_mode, rule.attached) == (0.1, "cpr", True)
    engine = toy_engine("grace(er(), strength='bayes(beta=0.1)', beta=0)", taps=4)
    data = toy_stream().data
    assert "entropy" in engine.learn(StreamBatch(data.train_x[:3], data.train_y[:3], task=0)).table
    assert repr(rules.build("bayes(tau=0.5)")) == "bayes(tau=0.5)"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("grace(er(), strength='bayess')", "did you mean 'bayes'"),
        ("grace(er(), strength='pi(goal=1)')", "no option 'goal'"),
        ("grace(er(), strength='pi(target=2.0)')", "pi: target must be between 0 and 1, not 2.0"),
        ("grace(er(), strength='bayes(tau=0)')", "bayes: tau must be above 0, not 0"),
        ("grace(er(), strength='bayes', entropy_mode='cpr')", "readings of strength='paper'"),
        ("grace(er(), refresh_every=-1)", "grace: refresh_every must be at least 0, not -1"),
    ],
)
def test_a_bad_rule_is_refused_at_once(expression: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(expression)


# The rules.


def test_bayes_is_the_posterior_mean_at_the_relative_entropies() -> None:
    logits = some_logits()
    h = entropy(logits).double()
    z = (h - h.mean()) / h.std(correction=0)
    _, gamma = rules.build("bayes(tau=0.5, beta=0.01)")(Signals(logits, UNKNOWN))
    expected = 0.01 * Strength(c=-1.0, tau=0.5).posterior(z.detach()).mean
    torch.testing.assert_close(gamma.double(), expected, rtol=1e-4, atol=1e-8)
    assert gamma.argsort().tolist() == h.argsort().tolist(), "c = -1 grows with entropy"
    _, other = rules.build("bayes(c=1)")(Signals(logits, UNKNOWN))
    assert other.argsort().tolist() == h.argsort(descending=True).tolist()


@pytest.mark.parametrize("mode", ["alg1", "cpr", "target", "deviation", "cpr_literal", "uniform", "none"])
def test_the_slope_of_a_reading_s_term_is_its_derivative_by_the_layer_s_own_entropy(mode: str) -> None:
    """Other layers have no part in it: the mean entropy that `deviation` compares with is a constant."""
    rule, signals, weights = (
        rules.build(f"paper(beta=0.3, entropy_mode='{mode}')"),
        Signals(some_logits(), UNKNOWN),
        torch.arange(1.0, 5),
    )
    _, gamma = rule(signals)
    [found] = torch.autograd.grad((weights * rule.term(signals, gamma)).sum(), signals.entropy)
    torch.testing.assert_close(found, weights * rule.slope(signals, gamma))
    if mode == "deviation":
        h = signals.entropy.detach()
        torch.testing.assert_close(found, weights * 0.3 * 2 * (h - h.mean()))


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("classes", [None, torch.arange(6) < 4])
def test_balance_makes_the_entropy_gradient_a_fixed_share_of_the_cross_entropy_gradient(
    summed: bool, classes: Tensor | None
) -> None:
    logits, y = some_logits(), torch.arange(20) % 6
    accuracy = torch.tensor([0.4, 0.5, 0.7, 0.9])
    alpha, gamma = rules.build("balance(share=0.03, limit=1e9, adaptive=True)")(
        Signals(logits, accuracy, y, classes, summed=summed)
    )
    [of_entropy] = torch.autograd.grad((gamma * entropy(logits, classes)).sum() * (20 if summed else 1), logits)
    [of_cross_entropy] = torch.autograd.grad((alpha * cross_entropy(logits, y)).sum(), logits)
    shares = of_entropy.flatten(1).norm(dim=1) / of_cross_entropy.flatten(1).norm(dim=1)
    assert shares.tolist() == pytest.approx([0.03] * 4, rel=1e-4)
    with pytest.raises(UserError, match="needs the labels"):
        rules.build("balance")(Signals(logits, accuracy))
    _, flat = rules.build("balance(limit=0.5)")(Signals(torch.zeros(4, 20, 6), accuracy, y))
    assert flat.tolist() == [0.5] * 4, "the entropy of a flat head has no gradient"


@pytest.mark.parametrize("target", [0.2, 0.8])
def test_pi_drives_every_layer_to_the_target(target: float) -> None:
    """Four heads that start far apart and whose cross-entropy pulls them to certainty."""
    logits = some_logits().detach().clone().requires_grad_()
    y = torch.arange(20) % 6
    feedback = Feedback(4, f"pi(target={target}, beta=0.05, limit=1000.0)")
    optimizer = torch.optim.SGD([logits], lr=2.0)
    for _ in range(3000):
        optimizer.zero_grad()
        feedback(logits, cross_entropy(logits, y)).backward()
        optimizer.step()
    reached = entropy(logits) / math.log(6)
    assert reached.tolist() == pytest.approx([target] * 4, abs=0.02)
    assert np.abs(feedback.history["H"][0] / math.log(6) - target).max() > 0.1


@pytest.mark.parametrize("summed", [False, True])
def test_pi_measures_the_entropy_against_that_of_a_head_that_knows_nothing(summed: bool) -> None:
    rule, flat = rules.build("pi(target=0.25, proportional=1.0, integral=0.0, beta=1.0)"), torch.zeros(4, 20, 6)
    for classes in (None, torch.arange(6) < 4):
        _, gamma = rule(Signals(flat, UNKNOWN, classes=classes, summed=summed))
        assert gamma.tolist() == pytest.approx([1 - 0.25] * 4), "a flat head is as uncertain as one can be among these classes"


def test_pi_stops_adding_up_at_its_limit() -> None:
    rule = rules.build("pi(target=0.0, proportional=0.0, integral=1.0, limit=5.0, beta=1.0)")
    certain, flat = torch.zeros(4, 20, 6), torch.zeros(4, 20, 6)
    certain[..., 0] = 50.0
    for _ in range(100):
        rule.after_step(Signals(flat, UNKNOWN))
    assert rule(Signals(certain, UNKNOWN))[1].tolist() == [5.0] * 4
    state = rule.state_dict()
    again = rules.build(repr(rule))
    again.load_state_dict(state)
    assert torch.equal(again(Signals(certain, UNKNOWN))[1], rule(Signals(certain, UNKNOWN))[1])


@pytest.mark.parametrize(("proportional", "most"), [(10, 925), (0, 1000)])
@pytest.mark.parametrize("sign", [1, -1])
def test_pi_adds_nothing_up_while_its_strength_is_at_the_limit(sign: int, proportional: int, most: int) -> None:
    """Of the largest error the proportional term alone makes 7.5 of 100, so the sum is at its end with 925, not with 1,000."""
    rule = rules.build(f"pi(target={0.25 if sign > 0 else 0.75}, proportional={proportional})")
    layers = torch.zeros(4, 20, 6)
    if sign < 0:
        layers[..., 0] = 50.0
    for _ in range(1500):
        rule.after_step(Signals(layers, UNKNOWN))
    assert rule.state_dict()["sum"].tolist() == pytest.approx([sign * most] * 4, abs=0.76)
    assert rule(Signals(layers, UNKNOWN))[1].tolist() == pytest.approx([sign * 0.5] * 4)
    before = rule.state_dict()["sum"].clone()
    rule.after_step(Signals(50 * torch.eye(6)[0].expand(4, 20, 6) - layers, UNKNOWN))
    assert (sign * rule.state_dict()["sum"] < sign * before).all(), "it comes back with the first step the other way"


def test_pi_survives_a_step_that_overflowed() -> None:
    """Half precision skips such a step; the sum must not be lost with it."""
    rule, flat = rules.build("pi"), torch.zeros(4, 20, 6)
    rule.after_step(Signals(flat, UNKNOWN))
    before = rule.state_dict()["sum"].clone()
    broken = flat.clone()
    broken[1] = torch.nan
    rule.after_step(Signals(broken, UNKNOWN))
    after = rule.state_dict()["sum"]
    assert after.isfinite().all()
    assert after[1] == before[1]
    assert (after[[0, 2, 3]] > before[[0, 2, 3]]).all()


def test_pi_is_its_equation_step_by_step() -> None:
    """Up to the limit of γ, where the sum stays, and back at once."""
    rule, total = rules.build("pi(target=0.5, proportional=2.0, integral=0.1, limit=4.98, beta=0.5)"), 0.0
    certain, flat = torch.zeros(4, 20, 6), torch.zeros(4, 20, 6)
    certain[..., 0] = 50.0
    for step in range(230):
        logits, error = (flat, 0.5) if step < 200 else (certain, -0.5)
        expected = 0.5 * max(-4.98, min(4.98, 2.0 * error + 0.1 * total))
        assert rule(Signals(logits, UNKNOWN))[1].tolist() == pytest.approx([expected] * 4, abs=1e-5), step
        rule.after_step(Signals(logits, UNKNOWN))
        total += 0.0 if 2.0 * error + 0.1 * total >= 4.98 else error
    assert total == 40 - 30 * 0.5


# A loop of one's own.


class Net(nn.Module):
    """Four exits, BatchNorm and dropout, nothing of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(8, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        logits = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            logits.append(head(x))
        return torch.stack(logits)


def test_the_objective_is_the_papers_and_it_logs_itself() -> None:
    feedback = gracecl.Feedback(layers=4, controller="paper(adaptive=True)")
    feedback.accuracy = torch.tensor([0.62, 0.71, 0.83, 0.86])
    logits, y = some_logits(), torch.arange(20) % 6
    ce = cross_entropy(logits, y)
    loss = feedback(logits, ce)
    h = entropy(logits).detach().double().numpy()
    gamma = 0.005 * np.exp(np.tanh((h - h.mean()) / h.std()))
    alpha = [2.42674, 1.54806, 0.52038, 0.45021]
    expected = float((np.array(alpha) * ce.detach().numpy() + gamma * h).sum())
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    [slope] = torch.autograd.grad(loss, logits)
    strengths = torch.tensor(gamma)
    [wanted] = torch.autograd.grad((torch.tensor(alpha) * cross_entropy(logits, y) + strengths * entropy(logits)).sum(), logits)
    torch.testing.assert_close(slope, wanted.float(), rtol=1e-4, atol=1e-7)
    feedback(logits, cross_entropy(logits, y))
    assert set(feedback.history) == {"loss", "H", "z", "gamma", "alpha", "sigma_H"}
    assert feedback.history["gamma"].shape == (2, 4)
    assert feedback.history["gamma"][0].tolist() == pytest.approx(gamma.tolist(), rel=1e-4)


def test_a_long_history_is_whole_and_tells_how_the_gradients_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gracecl.controllers.feedback.FETCH_EVERY", 3)
    feedback, y = Feedback(4, "paper(adaptive=True)"), torch.arange(20) % 6
    feedback.accuracy = torch.tensor([0.4, 0.5, 0.7, 0.9])
    expected = []
    for number in range(8):
        logits = some_logits(number)
        feedback(logits, cross_entropy(logits, y), y if number % 2 else None)
        expected.append(entropy(logits).tolist())
        if number == 4:
            assert len(feedback.history["H"]) == 5
    np.testing.assert_allclose(feedback.history["H"], expected, rtol=1e-6)
    [of_entropy] = torch.autograd.grad((torch.tensor(feedback.history["gamma"][-1]) * entropy(logits)).sum(), logits)
    alpha = torch.tensor(feedback.history["alpha"][-1])
    assert len(set(alpha.tolist())) == 4
    [of_cross_entropy] = torch.autograd.grad((alpha * cross_entropy(logits, y)).sum(), logits)
    ratio = of_entropy.flatten(1).norm(dim=1) / of_cross_entropy.flatten(1).norm(dim=1)
    assert feedback.history["gradient_ratio"].shape == (4, 4)
    np.testing.assert_allclose(feedback.history["gradient_ratio"][-1], ratio, rtol=1e-4)


@pytest.mark.parametrize("as_array", [False, True])
def test_observing_the_past_gives_each_layer_s_accuracy_and_leaves_the_net_alone(as_array: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    net.layers[1].eval()  # a mode of its own must survive
    x, y = torch.randn(50, 8), torch.arange(50) % 6
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    feedback = Feedback(4)
    accuracy = feedback.observe_past(net, x, y.numpy() if as_array else y, batch=7)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training
    assert net.layers[0].training
    assert not net.layers[1].training
    net.eval()
    expected = [(logits.argmax(dim=1) == y).float().mean().item() for logits in net(x)]
    assert accuracy.tolist() == pytest.approx(expected)
    assert feedback.accuracy.tolist() == pytest.approx(expected)


def test_a_loop_of_five_lines_learns_and_alpha_moves() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    net = gracecl.tap(model, classes=6, example=torch.randn(2, 8))
    feedback = gracecl.Feedback(layers=net.layers, controller="paper(adaptive=True)")
    centres = 2 * torch.randn(6, 8)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(200):
        y = torch.randint(0, 3 if step < 100 else 6, (16,))
        x = centres[y] + 0.3 * torch.randn(16, 8)
        out = net(x)
        loss = feedback(out.logits, cross_entropy(out.logits, y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 99:
            past = torch.randint(0, 3, (60,))
            feedback.observe_past(net, centres[past] + torch.randn(60, 8), past)
    history = feedback.history
    assert history["loss"][-10:].mean() < 0.5 * history["loss"][:10].mean()
    assert (history["alpha"][:100] == 1).all()
    assert len(np.unique(feedback.accuracy.numpy())) == 1 or not np.allclose(history["alpha"][100:], 1)


def test_feedback_goes_on_from_a_state() -> None:
    logits, y = some_logits(), torch.arange(20) % 6
    one = Feedback(4, "pi")
    one.accuracy = torch.tensor([0.1, 0.2, 0.3, 0.9])
    one(logits, cross_entropy(logits, y))
    two = Feedback(4, "pi")
    two.load_state_dict(one.state_dict())
    assert one(logits, cross_entropy(logits, y)).item() == two(logits, cross_entropy(logits, y)).item()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Feedback(0), "at least one tapped layer"),
        (lambda: Feedback(4, "nonsense"), "unknown controller"),
        (lambda: Feedback(3)(torch.zeros(4, 2, 6), torch.zeros(3)), "logits \\[3 layers"),
        (lambda: Feedback(4)(torch.zeros(4, 0, 6), torch.zeros(4)), "logits \\[4 layers"),
        (lambda: Feedback(4)(torch.zeros(4, 2, 6), torch.zeros(())), "one loss per tapped layer"),
        (lambda: Feedback(4).observe_past(Net(), torch.zeros(3, 8), [0, 1]), "as many labels"),
        (lambda: Feedback(4).observe_past(Net(), torch.zeros(0, 8), []), "at least one"),
        (lambda: Feedback(4).observe_past(nn.Linear(8, 6), torch.zeros(3, 8), [0, 1, 2]), "a net that gives logits \\[4 layers"),
        (lambda: Feedback(3).observe_past(Net(), torch.zeros(3, 8), [0, 1, 2]), "a net that gives logits \\[3 layers"),
    ],
)
def test_bad_input_is_told_in_a_sentence(act, message: str) -> None:
    with pytest.raises(UserError, match=message):
        act()


# Without task marks.


def test_without_task_marks_alpha_is_renewed_every_so_many_steps() -> None:
    data = toy_stream().data
    for every, expected in ((4, [False] * 4 + [True] * 6), (0, [False] * 10)):
        engine = toy_engine(f"grace(er(), refresh_every={every})", taps=4)
        known = []
        for step in range(10):
            rows = np.arange(3 * step, 3 * step + 3)
            table = engine.learn(StreamBatch(data.train_x[torch.from_numpy(rows)], data.train_y[rows], task=NO_TASK)).table
            known.append(not bool((table["log/alpha"] == 1).all()))
        assert known == expected


def test_with_task_marks_alpha_is_renewed_at_their_ends_alone() -> None:
    data = toy_stream().data
    engine = toy_engine("grace(er(), refresh_every=2)", taps=4)
    for step in range(6):
        rows = np.arange(3 * step, 3 * step + 3)
        table = engine.learn(StreamBatch(data.train_x[torch.from_numpy(rows)], data.train_y[rows], task=0)).table
        assert table["log/alpha"].tolist() == [1.0] * 4
