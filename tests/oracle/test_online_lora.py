"""Online-LoRA against a slow program that follows its algorithm box, and its invariants."""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracecl import Learner, nets
from gracecl.core import NO_TASK, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.engine.recipe import Recipe
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.online_lora import LossWindow, OnlineLoRA, surprise_of_prediction
from gracecl.nets.trunk import LowRankLinear
from gracecl.testing import TOY_SHAPE, TOY_TRANSFORMER, assert_same, feed, resumes_exactly, toy_engine, toy_stream
from noting import note_batch_losses

VIT = TOY_TRANSFORMER
EASY = "mean_below=100.0, variance_below=100.0"
"""thresholds below which every loss of these tests lies: a full window is a plateau as soon as a peak allows it"""


def build(method: str, taps: int | None = None, memory: int = 12, net: str = VIT, optimizer: str = "adam(lr=0.001)") -> Engine:
    """Without augmentation, so that a slow program sees the same images."""
    recipe = Recipe(method=method, net=net, memory=memory, taps=taps, augment="none", optimizer=optimizer, device="cpu")
    return recipe.build(Images(TOY_SHAPE), 6)


def factors(net: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in net.named_parameters() if name.endswith((".down", ".up"))}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def copies(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


# The whole algorithm.


class SlowProgram:
    """The algorithm box, an image and a batch at a time, on a copy of the net; only a new pair's A comes from the learner."""

    def __init__(self, engine: Engine) -> None:
        self.net, self.method = copy.deepcopy(engine.net), engine.method
        self.capacity = engine.memories.replay.capacity
        self.learner_factors = factors(engine.net)
        self.trained = [value for value in self.net.parameters() if value.requires_grad]
        self.adam = torch.optim.Adam(self.trained, lr=self.method.lr)
        self.hard: list[tuple[Tensor, Tensor]] = []
        self.window: list[float] = []
        self.omega: dict[str, Tensor] | None = None
        self.peak, self.last, self.k = True, (0.0, 0.0), 0

    def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        """Summed over the taps, to be trained on; and the mean over them, to be looked at."""
        of_taps = [F.cross_entropy(tap, y) for tap in self.net(self.net.inputs.normalise(x)).logits]
        return sum(of_taps), statistics.fmean(value.item() for value in of_taps)

    def step(self, x: Tensor, y: Tensor) -> None:
        entries = [(x, y), *self.hard]
        losses = [self.loss(*entry) for entry in entries]
        looked_at = [value for _, value in losses]
        self.window = [*self.window, sum(looked_at)][-self.method.window :]
        objective = sum(value for value, _ in losses)
        if self.omega is not None:
            pull = sum((self.omega[name] * value**2).sum() for name, value in factors(self.net).items())
            objective = objective + self.method.strength / 2 * pull
        self.adam.zero_grad()
        objective.backward()
        self.adam.step()
        mean, variance = statistics.fmean(self.window), statistics.pvariance(self.window)
        if not self.peak and mean > self.last[0] + self.last[1] ** 0.5:
            self.peak = True
        low = mean < self.method.mean_below and variance < self.method.variance_below
        if low and self.peak and len(self.window) == self.method.window and self.hard:
            self.k, self.last, self.peak = self.k + 1, (mean, variance), False
            self.consolidate()
        self.hard, held = [], 0
        for entry in sorted(range(len(entries)), key=lambda entry: looked_at[entry], reverse=True):
            size = len(entries[entry][1])
            if len(self.hard) < self.method.n_hard and held + size <= self.capacity:
                self.hard.append(entries[entry])
                held += size

    def consolidate(self) -> None:
        own = factors(self.net)
        found = {name: torch.zeros_like(value) for name, value in own.items()}
        for x, _ in self.hard:
            for image in x:
                logits = self.net(self.net.inputs.normalise(image[None])).logits[:, 0]
                score = sum(F.cross_entropy(tap[None], tap.argmax()[None]) for tap in logits)
                gradients = torch.autograd.grad(score, list(own.values()), allow_unused=True)
                for name, gradient in zip(own, gradients, strict=True):
                    found[name] += 0 if gradient is None else gradient**2 / len(x)
        self.omega = found if self.k == 1 else {name: found[name] / self.k + (1 - 1 / self.k) * self.omega[name] for name in found}
        with torch.no_grad():
            for name, down in own.items():
                if not name.endswith(".down"):
                    continue
                up, weight = own[name.replace(".down", ".up")], self.net.get_parameter(name.replace(".down", ".weight"))
                rank, dim = up.shape[2], up.shape[1]
                weight[:dim] += up[0] @ down[:rank]
                weight[2 * dim :] += up[1] @ down[rank:]
                down.copy_(self.learner_factors[name])
                up.zero_()
        for value in own.values():
            self.adam.state.pop(value, None)


@pytest.mark.parametrize("taps", [1, 4])
def test_every_step_is_that_of_the_slow_program(taps: int) -> None:
    """Weights, importances, hard batches and consolidations; the memory has room for three of four batches."""
    options = "n_hard=4, lr=0.003, strength=500.0, window=3, mean_below=9.0, variance_below=0.6"
    engine, stream = build(f"online_lora({options})", taps, memory=11), toy_stream()
    slow = SlowProgram(engine)
    fired = []
    for step in range(len(stream)):
        batch = stream.batch(step)
        before = engine.method.consolidated
        engine.learn(StreamBatch(batch.x, batch.labels, task=batch.task, sources=batch.sources))
        slow.step(batch.x, torch.from_numpy(batch.labels))
        if engine.method.consolidated > before:
            fired.append(step)
        assert engine.method.consolidated == slow.k, f"step {step}"
        memory = engine.memories.replay
        assert len(memory) == sum(len(y) for _, y in slow.hard) <= 11
        assert torch.equal(memory.images[: len(memory)], torch.cat([x for x, _ in slow.hard]))
        assert memory.labels[: len(memory)].tolist() == torch.cat([y for _, y in slow.hard]).tolist()
        for name, value in slow.net.named_parameters():
            assert torch.allclose(engine.net.get_parameter(name), value, rtol=1e-3, atol=2e-5), f"{name} after step {step}"
    assert len(fired) > 1
    assert len(slow.hard) == 3
    values = engine.method.flat.scatter(engine.method.importance)
    for name, expected in slow.omega.items():
        torch.testing.assert_close(values[engine.net.get_parameter(name)], expected, rtol=1e-2, atol=1e-7)
    heads = [values[parameter] for parameter in engine.net.classifier.parameters()]
    assert not any(head.any() for head in heads)


def test_with_no_hard_batches_it_fine_tunes_adapters() -> None:
    """λ and the detector have no part in it then: the steps are those of sgd() on vit(lora=4) with its Adam."""
    one = build(f"online_lora(n_hard=0, lr=0.002, {EASY})", taps=1)
    two = build("sgd()", taps=1, net=VIT.replace("heads=2", "heads=2, lora=4"), optimizer="adam(lr=0.002)")
    two.net.load_state_dict(one.net.state_dict())
    for engine in (one, two):
        feed(engine, toy_stream())
    assert_same(one.net.state_dict(), two.net.state_dict(), "online_lora without hard batches")
    assert one.method.consolidated == 0
    assert len(one.memories.replay) == 0


# Adapters.


def test_at_the_start_the_net_is_the_frozen_transformer() -> None:
    plain, adapted = build("sgd()", taps=1), build("online_lora()", taps=1)
    x = torch.randn(5, *TOY_SHAPE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(adapted.net(x).logits, plain.net(x).logits)


def test_number_of_trained_weights() -> None:
    """Of ViT-B/16: 12 · 2 · 2 · 768 · 4 = 147,456 in the adapters, and 768 C + C in the head. Here with other sizes."""
    dim, depth, rank, classes = 8, 4, 3, 6
    engine = build(f"online_lora(rank={rank})", taps=1)
    in_adapters = sum(value.numel() for value in engine.method.names)
    assert in_adapters == depth * 2 * 2 * dim * rank
    learns = sum(value.numel() for name, value in engine.net.named_parameters() if value.requires_grad and "projector" not in name)
    assert learns == in_adapters + dim * classes + classes


def test_only_adapters_and_head_move_between_consolidations() -> None:
    engine = build("online_lora()", taps=1)
    before = copies(engine.net)
    feed(engine, toy_stream())
    assert engine.method.consolidated == 0
    assert changed(before, copies(engine.net)) == {*factors(engine.net), "classifier.weight", "classifier.bias"}
    assert all(value.grad is None for name, value in engine.net.named_parameters() if not value.requires_grad)


def consolidated(monkeypatch: pytest.MonkeyPatch, at: set[int], until: int, method: str = "online_lora(n_hard=2)") -> Engine:
    """A learner that consolidates after the given steps."""
    engine = build(method)
    monkeypatch.setattr(LossWindow, "add", lambda window, loss, ready: engine.progress.step in at)
    feed(engine, toy_stream(), until)
    return engine


def test_folding_keeps_the_function_and_begins_a_new_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = consolidated(monkeypatch, {4}, until=8)
    method, before = engine.method, copies(engine.net)
    x = 3 * torch.randn(20, *TOY_SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for value in method.names:
            value.mul_(20)  # so that there is something to fold
        once = engine.net(x).logits
        method.fold(np.random.default_rng(0))
        torch.testing.assert_close(engine.net(x).logits, once, rtol=0, atol=1e-5)
        flat = copy.deepcopy(engine.net)
        for name, value in factors(flat).items():
            if name.endswith(".up"):
                value.zero_()
        torch.testing.assert_close(flat(x).logits, once, rtol=0, atol=1e-5)
    after = copies(engine.net)
    weights = {name for name in before if name.endswith("qkv.weight")}
    assert changed(before, after) == {*factors(engine.net), *weights}
    for name in weights:
        rows = len(before[name]) // 3
        assert torch.equal(after[name][rows : 2 * rows], before[name][rows : 2 * rows]), "keys are not adapted"
    for name, value in factors(engine.net).items():
        assert bool(value.any()) == name.endswith(".down")
        assert value.abs().max() <= 8**-0.5
        assert value not in method.adam.state
    assert {value for value, moments in method.adam.state.items() if moments} == set(engine.net.classifier.parameters())


def test_a_new_pair_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = consolidated(monkeypatch, {4}, until=5)
    before = copies(engine.net)
    feed(engine, toy_stream(), until=8)
    assert set(factors(engine.net)) <= changed(before, copies(engine.net))


@pytest.mark.parametrize("fused", [True, False])
def test_change_of_a_layer(fused: bool) -> None:
    """What the factors add to the weights is what the adapter adds to the output."""
    layer = LowRankLinear(nn.Linear(5, 6), rank=2, scale=0.7, fused=fused)
    with torch.no_grad():
        layer.up.normal_(generator=torch.Generator().manual_seed(0))
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
        whole = F.linear(x, layer.weight + layer.change(layer.down, layer.up), layer.bias)
        torch.testing.assert_close(layer(x), whole)
        slow = torch.zeros(6, 5)
        for out in range(6):
            part = out // 2 if fused else 0  # query, key, value of two outputs each
            for column in range(5):
                for r in range(2):
                    if not fused:
                        slow[out, column] += 0.7 * layer.up[0, out, r] * layer.down[r, column]
                    elif part != 1:
                        which = part // 2
                        slow[out, column] += 0.7 * layer.up[which, out % 2, r] * layer.down[2 * which + r, column]
        torch.testing.assert_close(layer.change(layer.down, layer.up), slow)


# Importance and penalty.


def test_importance_is_the_mean_of_all_that_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    original = OnlineLoRA.squared_gradients

    def spy(self: OnlineLoRA, batch: object) -> Tensor:
        found.append(original(self, batch))
        return found[-1]

    monkeypatch.setattr(OnlineLoRA, "squared_gradients", spy)
    engine = consolidated(monkeypatch, {3, 6, 7, 11}, until=14)
    assert len(found) == engine.method.consolidated == 4
    torch.testing.assert_close(engine.method.importance, torch.stack(found).mean(dim=0))
    assert (engine.method.importance >= 0).all()
    assert engine.method.importance.any()


def test_penalty_is_that_of_the_layer_where_a_factor_acts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks, four taps: each layer has the two factors of its own block."""
    engine = build("online_lora(n_hard=2, strength=30.0)", taps=4)
    monkeypatch.setattr(LossWindow, "add", lambda window, loss, ready: engine.progress.step == 4)
    outcomes = feed(engine, toy_stream(), until=8)
    assert ["penalty/online_lora" in outcome.table for outcome in outcomes] == [False] * 5 + [True] * 3
    omega = engine.method.flat.scatter(engine.method.importance)
    batch = toy_stream().batch(8)
    [outcome] = [engine.learn(StreamBatch(batch.x, batch.labels))]
    again = build("online_lora(n_hard=2, strength=30.0)", taps=4)
    monkeypatch.setattr(LossWindow, "add", lambda window, loss, ready: again.progress.step == 4)
    feed(again, toy_stream(), until=8)
    for block in range(4):
        own = [name for name in factors(again.net) if f"blocks.{block}." in name]
        expected = sum((omega[engine.net.get_parameter(name)] * again.net.get_parameter(name).square()).sum() for name in own)
        assert len(own) == 2
        assert outcome.table["penalty/online_lora"][block].item() == pytest.approx(15 * expected.item(), rel=1e-5)


@pytest.mark.parametrize("method", ["online_lora(n_hard=2, strength=0.0)", "online_lora(n_hard=2)"])
def test_no_penalty_without_strength_or_importance(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    engine = consolidated(monkeypatch, {4}, until=6, method=method)
    engine.method.importance.zero_()
    batch = toy_stream().batch(6)
    row = engine.learn(StreamBatch(batch.x, batch.labels)).table.get("penalty/online_lora")
    assert (row is None) == ("strength" in method)
    assert row is None or not row.any()


def test_surprise() -> None:
    """-log of the largest probability of each layer, summed; of one image, that at its argmax."""
    logits = torch.randn(3, 1, 6, generator=torch.Generator().manual_seed(0))
    expected = sum(-layer.softmax(dim=-1)[0, layer[0].argmax()].log() for layer in logits)
    torch.testing.assert_close(surprise_of_prediction(logits), expected)


# The detector.


def fires(losses: list[float], **options: float) -> list[int]:
    window = LossWindow(5, options.get("mean_below", 6.0), options.get("variance_below", 0.1), whole=True)
    return [step for step, loss in enumerate(losses) if window.add(loss, ready=True)]


def test_a_constant_loss_fires_once() -> None:
    assert fires([3.0] * 40) == [4]
    assert fires([7.0] * 40) == []


def test_it_fires_again_only_after_a_peak() -> None:
    """The mean must rise above the last one by its spread, and then settle."""
    assert fires([3.0] * 10 + [2.0] * 10) == [4]
    assert fires([3.0] * 10 + [5.0] * 10) == [4, 14]
    assert fires([3.0] * 10 + [9.0] * 10 + [3.0] * 10) == [4, 24]
    last = [3.0, 3.4, 3.0, 3.4, 3.0]
    limit = statistics.fmean(last) + statistics.pvariance(last) ** 0.5
    assert fires(last + [limit - 0.01] * 9) == [4]
    assert fires(last + [limit + 0.01] * 9) == [4, 9]


def test_a_restless_loss_does_not_fire() -> None:
    assert fires([2.0, 4.0] * 20) == []
    assert fires([2.0, 4.0] * 20, variance_below=1.1)


def test_nothing_fires_before_it_is_ready() -> None:
    window = LossWindow(5, 6.0, 0.1, whole=True)
    assert not any(window.add(3.0, ready=False) for _ in range(10))
    assert window.add(3.0, ready=True)


def test_without_any_memory_it_never_consolidates() -> None:
    engine = build(f"online_lora({EASY})", memory=0)
    feed(engine, toy_stream())
    assert engine.method.consolidated == 0
    assert engine.method.losses_seen.peak


def test_no_task_marks_are_needed() -> None:
    """With marks and without, the same steps."""
    one, two = (build(f"online_lora(n_hard=2, {EASY})") for _ in range(2))
    stream = toy_stream()
    feed(one, stream)
    for step in range(len(stream)):
        batch = stream.batch(step)
        two.learn(replace(batch, task=NO_TASK))
    assert_same(one.net.state_dict(), two.net.state_dict(), "online_lora without marks")
    assert OnlineLoRA().traits.boundaries == "unused"
    assert one.method.consolidated > 0


# Costs, the memory, and what is refused.


def test_images_are_counted() -> None:
    """A step: 1 + |H| batches forward and backward; a consolidation: |H| more of each."""
    engine = build(f"online_lora(n_hard=2, window=4, {EASY})")
    outcomes = feed(engine, toy_stream(), until=5)
    assert [outcome.forward for outcome in outcomes] == [3, 6, 9, 9 + 6, 9]
    assert [outcome.backward for outcome in outcomes] == [3, 6, 9, 9 + 6, 9]
    assert [outcome.images for outcome in outcomes] == [3, 6, 9, 9, 9]


def test_hard_batches_are_those_with_the_largest_losses() -> None:
    """Never more than n_hard, in the order of their losses, with the newest where its loss puts it."""
    engine, stream = build("online_lora(n_hard=2, lr=0.01)"), toy_stream()
    entered: list[bool] = []
    latest = note_batch_losses(engine)
    for step in range(len(stream)):
        batch = stream.batch(step)
        before = engine.memories.replay.images[: len(engine.memories.replay)].clone()
        engine.learn(StreamBatch(batch.x, batch.labels, task=batch.task))
        losses, memory = latest[-1], engine.memories.replay
        entries = [batch.x, *(before.split(3) if len(before) else ())]
        order = sorted(range(len(entries)), key=lambda entry: -losses[entry])[:2]
        assert torch.equal(memory.images[: len(memory)], torch.cat([entries[entry] for entry in order]))
        entered.append(0 in order)
    assert True in entered[2:]
    assert False in entered


def test_batches_of_other_sizes() -> None:
    """A learner of one's own is given what comes; a batch that does not fit is not kept, and the others are."""
    learner = Learner(
        f"online_lora(n_hard=3, {EASY})", classes=6, shape=TOY_SHAPE, memory=10, net=VIT, augment="none", device="cpu"
    )
    generator = np.random.default_rng(0)
    for size in (4, 1, 11, 5, 2, 3, 8):
        learner.learn(generator.integers(0, 256, (size, *TOY_SHAPE), dtype=np.uint8), generator.integers(0, 6, size))
        memory, sizes = learner.engine.memories.replay, learner.method.sizes
        assert sum(sizes) == len(memory) <= 10
        assert len(sizes) <= 3
        assert memory.composition() == {
            int(k): int(n) for k, n in zip(*np.unique(memory.labels[: len(memory)], return_counts=True), strict=True)
        }
    assert learner.method.consolidated


def test_a_batch_that_is_too_large_costs_no_other_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its loss: H is what it was, and a batch that is left out for want of room lets a smaller one in."""
    engine, generator = build("online_lora(n_hard=3)", memory=10), np.random.default_rng(0)
    losses = iter([[5.0], [4.0, 5.0], [9.0, 5.0, 4.0], [8.0, 5.0, 4.0], [1.0, 8.0, 5.0]])
    monkeypatch.setattr(OnlineLoRA, "loss_of_each_batch", lambda self, out, batch: torch.tensor([next(losses)]))
    monkeypatch.setattr(engine.method, "losses", lambda out, batch: {"ce/new": out.logits.mean(dim=(1, 2))})
    sizes = []
    for size in (4, 5, 11, 2, 1):
        x = torch.from_numpy(generator.integers(0, 256, (size, *TOY_SHAPE), dtype=np.uint8))
        engine.learn(StreamBatch(x, generator.integers(0, 6, size)))
        sizes.append(list(engine.method.sizes))
    assert sizes == [[4], [4, 5], [4, 5], [2, 4], [2, 4, 1]]


@pytest.mark.parametrize("net", ["mlp(width=8, depth=4)", "resnet18(width=2)"])
def test_a_net_without_attention_is_refused(net: str) -> None:
    with pytest.raises(UserError, match=r"vit\(\.\.\.\)"):
        build("online_lora()", net=net)


def test_adapters_of_the_net_are_refused() -> None:
    with pytest.raises(UserError, match="leave lora out"):
        build("online_lora()", net=VIT.replace("heads=2", "heads=2, lora=2"))


@pytest.mark.parametrize("bad", [{"rank": 0}, {"window": 0}, {"n_hard": -1}, {"strength": -1.0}, {"lr": 0.0}])
def test_bad_options_are_told(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        OnlineLoRA(**bad)


def test_separate_queries_and_values() -> None:
    """A transformer of another make, whose projections are layers of their own, with keys left alone."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, h: Tensor) -> Tensor:
            return h + F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h = x.flatten(1, 2)
            for layer in self.layers:
                h = layer(h)
            return h.mean(dim=1)

    torch.manual_seed(0)
    backbone = nets.ModuleBackbone(Model(), ["layers.0", "layers.1"], 2, False, (1, *TOY_SHAPE))
    net = nets.TappedNet(backbone, 6, Images(TOY_SHAPE))
    method = OnlineLoRA(n_hard=2, window=3, mean_below=100.0, variance_below=100.0)
    engine = Engine(method, net, Memories(12, Images(TOY_SHAPE)), augmentation="none")
    before = copies(net)
    feed(engine, toy_stream(), until=4)
    assert method.consolidated == 1
    assert len(method.adapters) == 4
    after = copies(net)
    assert {name for name in changed(before, after) if name.endswith("weight") and "layers" in name} == {
        f"backbone.model.layers.{n}.{part}.weight" for n in range(2) for part in ("query", "value")
    }


# As the authors' program does it.


def test_the_program_consolidates_from_the_first_step_on() -> None:
    engine = build(f"online_lora(n_hard=2, reference=True, {EASY})")
    feed(engine, toy_stream(), until=1)
    assert engine.method.consolidated == 1
    assert not engine.method.importance.any()
    assert not engine.method.of_adapters(lambda factor: factor).any()


def test_resumes_in_reference_mode() -> None:
    resumes_exactly(f"online_lora(n_hard=2, reference=True, {EASY})")


# Under GRACE.


def test_grace_weighs_both_rows_and_the_detector_sees_the_losses_themselves() -> None:
    method = f"online_lora(n_hard=2, {EASY})"
    engine = toy_engine(f"grace({method})", taps=4)
    stream = toy_stream()
    feed(engine, stream, until=8)
    batch = stream.batch(8)
    table = engine.learn(StreamBatch(batch.x, batch.labels, task=batch.task, sources=batch.sources)).table
    alpha = table["log/alpha"]
    assert (alpha != 1).any()
    assert "entropy" in table
    plain = (table["ce/new"] + table["ce/hard"]) / alpha
    assert engine.method.inner.losses_seen.values[-1] == pytest.approx(plain.mean().item(), rel=1e-5)
