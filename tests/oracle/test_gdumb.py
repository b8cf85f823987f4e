"""GDumb against slow loops: the sampler's invariants, a fit against plain training, and what a fit leaves alone."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gracecl import Learner, checkpoint, rng
from gracecl.core import Ints, StreamBatch
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import evaluate
from gracecl.errors import UserError
from gracecl.inputs import Images
from gracecl.lab.runs.run import Interrupted, RunConfig, resume, run
from gracecl.lab.runs.watch import Follower, Watch
from gracecl.memory import Memory
from gracecl.memory.class_balanced import add_balanced
from gracecl.methods.gdumb import GDumb, cut, paste
from gracecl.testing import TOY_SHAPE, assert_same, engine_untouched, feed, fit_steps, toy_data, toy_engine, toy_stream
from stopping import StopAfter

SHORT = "gdumb(epochs=6, batch=4)"


def numbered(first: int, count: int) -> torch.Tensor:
    """Images that can be told apart."""
    return torch.arange(first, first + count).view(-1, 1, 1, 1).expand(-1, *TOY_SHAPE).to(torch.uint8)


def offer(labels: list[int], memory: int, batch: int = 3, method: str = "gdumb()") -> Engine:
    engine = toy_engine(method, memory=memory)
    for start in range(0, len(labels), batch):
        some = np.array(labels[start : start + batch])
        engine.learn(StreamBatch(numbered(start, len(some)), some))
    return engine


def kept(engine: Engine) -> dict[int, list[int]]:
    """class -> numbers of the images it holds."""
    memory = engine.memories.replay
    found: dict[int, list[int]] = {}
    for slot in range(len(memory)):
        found.setdefault(int(memory.labels[slot]), []).append(int(memory.images[slot, 0, 0, 0]))
    return {label: sorted(numbers) for label, numbers in found.items()}


# The sampler.


def literal_sizes(labels: list[int], capacity: int) -> list[dict[int, int]]:
    """Bucket sizes after each image, by the text of the algorithm."""
    sizes: dict[int, int] = {}
    history = []
    for y in labels:
        quota = capacity // max(1, len(sizes))
        if y not in sizes or sizes[y] < quota:
            if sum(sizes.values()) == capacity:
                largest = max(sizes.values())
                victim = next(label for label, size in sizes.items() if size == largest)
                sizes[victim] -= 1
            sizes[y] = sizes.get(y, 0) + 1
        history.append(dict(sizes))
    return history


@pytest.mark.parametrize("seed", range(6))
def test_bucket_sizes_are_those_of_the_algorithm(seed: int) -> None:
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 25))
    labels = generator.integers(0, 6, 120).tolist() if seed % 2 else np.repeat(generator.permutation(6), 20).tolist()
    engine = offer(labels, capacity, batch=1 + seed)
    memory = engine.memories.replay
    expected = {label: size for label, size in literal_sizes(labels, capacity)[-1].items() if size}
    assert {label: len(numbers) for label, numbers in kept(engine).items()} == expected
    assert memory.composition() == dict(sorted(expected.items()))
    assert len(memory) <= capacity
    assert all(labels[number] == label for label, numbers in kept(engine).items() for number in numbers)
    stored = [number for numbers in kept(engine).values() for number in numbers]
    assert len(stored) == len(set(stored))


def test_one_class_fills_the_memory_with_its_first_images() -> None:
    for seen in (5, 12, 30):
        assert kept(offer([2] * seen, 12)) == {2: list(range(min(12, seen)))}


def test_the_last_class_keeps_its_first_images_and_new_classes_get_a_slot_at_once() -> None:
    labels = [0] * 20 + [1]
    assert kept(offer(labels, 12))[1] == [20]
    assert len(kept(offer(labels, 12))[0]) == 11
    assert kept(offer([0] * 20 + [1] * 20, 12))[1] == list(range(20, 26))


def test_shares_are_equal_once_every_class_had_enough_arrivals() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 3], 30)).tolist()
    assert {len(numbers) for numbers in kept(offer([0, 1, 2, 3, *labels], 20)).values()} == {5}
    assert all(len(numbers) >= 5 for numbers in kept(offer([0, 1, 2, 3, *labels], 23)).values())


def test_a_bucket_at_its_share_shrinks_only_for_a_new_class() -> None:
    engine = offer([0] * 6 + [1] * 6, 12)
    before = kept(engine)
    engine.learn(StreamBatch(numbered(100, 9), np.array([0, 1] * 4 + [0])))
    assert kept(engine) == before
    engine.learn(StreamBatch(numbered(200, 1), np.array([2])))
    assert sum(map(len, kept(engine).values())) == 12
    assert kept(engine)[2] == [200]


def test_the_victim_is_uniform_over_the_largest_class() -> None:
    """The largest class loses one of its ten images; each is the victim about as often."""
    lost = np.zeros(10, np.int64)
    for seed in range(400):
        memory = Memory(10, Images(TOY_SHAPE))
        add_balanced(memory, rng.generator("store", seed), numbered(0, 11), np.array([0] * 10 + [1]))
        (missing,) = set(range(11)) - set(memory.images[:, 0, 0, 0].tolist())
        lost[missing] += 1
    chi_square = ((lost - 40.0) ** 2 / 40).sum()
    assert chi_square < 27.9  # p = 0.001 at 9 degrees of freedom


def test_the_memory_does_not_depend_on_the_net() -> None:
    engines = [toy_engine("gdumb()"), toy_engine("gdumb(epochs=1)", net="mlp(width=3)"), toy_engine("grace(gdumb())", taps=4)]
    for engine in engines:
        feed(engine, toy_stream())
    assert all(torch.equal(engine.memories.replay.images, engines[0].memories.replay.images) for engine in engines)


# The learner.


def literal_fit(engine: Engine, method: GDumb) -> nn.Module:
    """Plain training from the engine's first weights on its memory, batches taken one by one in the fit's order."""
    net = copy.deepcopy(engine.net).train()
    memory, seed = engine.memories.replay, rng.key(engine.seed, "fit", engine.progress.step)
    optimizer = torch.optim.SGD(net.parameters(), lr=method.lr, momentum=method.momentum, weight_decay=method.weight_decay)
    seen = list(engine.progress.seen)
    for epoch in range(method.epochs):
        if epoch < 2:
            rate = method.lr * (0.1, 1)[epoch]
        else:
            start = 2
            while start * 2 <= epoch:
                start *= 2
            rate = method.lr_min + (method.lr - method.lr_min) * (1 + math.cos(math.pi * (epoch - start) / start)) / 2
        order = rng.generator(seed, "shuffle", epoch).permutation(len(memory))
        while len(order):
            slots, order = order[: method.batch], order[method.batch :]
            x = (memory.images[torch.from_numpy(slots)].float() / 255 - 0.5) / 0.25
            y = torch.tensor([seen.index(label) for label in memory.labels[slots]])
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            F.cross_entropy(net(x).logits[-1][:, seen], y).backward()
            square = sum(float((value.grad**2).sum()) for value in net.parameters() if value.grad is not None)
            for value in net.parameters():
                if value.grad is not None:
                    value.grad *= min(1.0, method.max_norm / (math.sqrt(square) + 1e-6))
            optimizer.step()
    return net


@pytest.mark.parametrize("max_norm", [10.0, 0.3])
def test_a_fit_is_plain_training_from_the_first_weights(max_norm: float) -> None:
    method = GDumb(epochs=7, batch=5, cutmix=0.0, max_norm=max_norm, weight_decay=0.01)
    engine = toy_engine(repr(method), net="mlp(width=12, depth=2)", memory=12)
    engine.augmentation = ()
    feed(engine, toy_stream(), until=10)
    expected = literal_fit(engine, method).state_dict()
    fitted = engine.ready_to_predict().state_dict()
    assert fitted.keys() == expected.keys()
    for name, value in fitted.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    assert not torch.equal(fitted["classifier.weight"], engine.net.state_dict()["classifier.weight"])


def test_every_image_once_in_an_epoch_in_another_order_each() -> None:
    engine = toy_engine(SHORT, memory=10)
    feed(engine, toy_stream())
    engine.get_ready()
    orders = []
    while fit := engine.unfinished_fit:
        if fit.at % fit.per_epoch == 0:
            orders.append([])
        orders[-1] += fit.plan()["all"].slots.tolist()
        engine.step_fit(fit)
    assert [sorted(order) for order in orders] == [list(range(10))] * 6
    assert len({tuple(order) for order in orders}) == 6


def test_learning_rates_of_the_specification() -> None:
    method = GDumb()
    trace = [0.005, 0.05, 0.05, 0.02525, 0.05, 0.04275, 0.02525, 0.00775]
    assert [method.rate_in(epoch) for epoch in range(8)] == pytest.approx(trace, abs=5e-6)
    assert all(method.rate_in(start) == pytest.approx(0.05) for start in (2, 4, 8, 16, 128))
    assert method.rate_in(255) == pytest.approx(0.0005 + 0.0495 * (1 + math.cos(math.pi * 127 / 128)) / 2)


def test_two_queries_agree_and_an_earlier_one_changes_nothing() -> None:
    data, stream = toy_data(), toy_stream()
    asked, quiet = toy_engine(SHORT), toy_engine(SHORT)
    feed(asked, stream, until=5)
    first = evaluate(asked, data.test_x, data.test_y, stream.test_task)
    net = asked.ready_to_predict()
    assert evaluate(asked, data.test_x, data.test_y, stream.test_task) == first
    assert asked.ready_to_predict() is net
    feed(asked, stream)
    feed(quiet, stream)
    assert_same(asked.ready_to_predict().state_dict(), quiet.ready_to_predict().state_dict(), "the fit after an earlier one")


def test_a_fit_leaves_the_learner_and_every_random_stream_alone() -> None:
    engine = toy_engine("gdumb(epochs=3)", net="resnet18(width=2)")
    feed(engine, toy_stream(), until=4)
    with engine_untouched(engine, "a fit"):
        engine.ready_to_predict()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_learner_predicts_wherever_it_is_asked(mode: type[torch.no_grad]) -> None:
    data = toy_data()
    guesses: list[Ints] = []
    for where in (mode, torch.enable_grad):
        learner = Learner(SHORT, classes=6, shape=TOY_SHAPE, memory=12, net="mlp(width=12)", device="cpu")
        learner.learn(data.train_x[:40], data.train_y[:40])
        with where():
            guesses.append(learner.predict(data.test_x))
        learner.learn(data.train_x[40:], data.train_y[40:])
    assert np.array_equal(*guesses)
    assert set(guesses[0]) <= set(data.train_y[:40].tolist())


def test_it_learns() -> None:
    data = toy_data()
    learner = Learner("gdumb(epochs=32, cutmix=0)", classes=6, shape=TOY_SHAPE, memory=30, net="mlp(width=32)", augment="none")
    learner.learn(data.train_x, data.train_y)
    assert (learner.predict(data.test_x) == data.test_y).mean() > 0.9


# CutMix.


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.97, 1.0])
def test_mixed_part_of_the_pixels_is_what_the_labels_say(share: float) -> None:
    x = torch.rand(5, 2, 9, 7)
    order = torch.tensor([1, 2, 3, 4, 0])
    for centre in range(7):
        (top, bottom), (left, right) = cut(9, share, centre), cut(7, share, 6 - centre)
        mixed, own = paste(x, order, (top, bottom, left, right))
        assert float((mixed != x).float().mean()) == pytest.approx(1 - own)
        assert torch.equal(torch.where(mixed != x, x[order], x), mixed)
    if share == 1.0:
        assert own == 1.0
        assert torch.equal(mixed, x)


def test_cutmix_comes_as_often_as_asked_and_its_loss_has_two_labels() -> None:
    engine = toy_engine("gdumb(epochs=200, cutmix=0.5)", memory=12)
    feed(engine, toy_stream())
    engine.get_ready()
    fit = engine.unfinished_fit
    assert fit is not None
    mixed, shares = 0, set()
    for fit.at in range(200):
        batch = engine.assemble_fit(fit)
        [block] = batch.blocks.values()
        if "share" not in block.found:
            continue
        mixed += 1
        with torch.no_grad():
            out = fit.net(batch.x)
        seen = list(engine.progress.seen)
        log_p = F.log_softmax(out.logits[-1][:, seen], dim=-1)
        share = float(block.found["share"])
        plain = engine.assemble(fit.plan(), engine._nothing(), fit.at, fit.seed)
        pasted = (batch.x != plain.x).any(dim=1).any(dim=0)  # where any image of the batch changed
        assert share == pytest.approx(1 - float(pasted.float().mean()))
        shares.add(share)
        loss = 0.0
        for row, (own, other) in enumerate(zip(batch.y.tolist(), block.found["other"].tolist(), strict=True)):
            loss -= share * float(log_p[row, seen.index(own)]) + (1 - share) * float(log_p[row, seen.index(other)])
        assert float(engine.chain.losses(out, batch)["ce/all"]) == pytest.approx(loss / len(batch), rel=1e-5)
    assert 70 < mixed < 130
    assert len(shares) > 5


# Feedback.


def test_grace_acts_inside_the_fit() -> None:
    engine = toy_engine("grace(gdumb(epochs=4))", taps=4)
    stream = toy_stream()
    feed(engine, stream)
    assert engine.method.feedback.accuracy.isnan().all()
    for outcome in fit_steps(engine, 4):
        assert {"ce/all", "entropy"} <= outcome.table.keys()
        assert outcome.table["log/alpha"].tolist() == [1.0] * 4
        expected = outcome.table["log/gamma"] * outcome.table["log/H"]
        torch.testing.assert_close(outcome.table["entropy"], expected)
    plain, strong = toy_engine("gdumb(epochs=4)", taps=4), toy_engine("grace(gdumb(epochs=4), beta=1)", taps=4)
    for other in (plain, strong):
        feed(other, stream)
    trained = [other.ready_to_predict().state_dict()["classifier.weight"] for other in (plain, strong, engine)]
    assert not torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[1], trained[2])


def test_ema_around_it_predicts_with_the_fitted_net() -> None:
    plain, averaged = toy_engine(SHORT), toy_engine(f"ema({SHORT})")
    for engine in (plain, averaged):
        feed(engine, toy_stream())
    assert_same(averaged.ready_to_predict().state_dict(), plain.ready_to_predict().state_dict(), "ema(gdumb())")


# A run.

STREAM = "split-digits(size=8, classes='0-3', tasks=2)"


def config(method: str = "gdumb(epochs=5)") -> RunConfig:
    return RunConfig(method, net="mlp(width=8)", memory=40, stream=STREAM, device="cpu", checkpoint_every=7, eval_every=20)


class StopInFit(StopAfter):
    """Presses Ctrl-C at a step of the fit after a step of the stream."""

    def __init__(self, step: int, fit_step: int) -> None:
        super().__init__(step)
        self.fit_step = fit_step

    def advance(self) -> None:
        fit = self.trainer.engine.unfinished_fit
        if fit is not None and fit.at == self.fit_step:
            super().advance()


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gdumb(epochs=5)", "grace(gdumb(epochs=5))"])
def test_a_run_stopped_in_the_middle_of_a_fit_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    whole = run(config(method), tmp_path / "whole")
    ends = [line["step"] for line in lines(whole) if line["kind"] == "eval"]
    assert ends == [line["step"] for line in lines(whole) if line["kind"] == "fit"] == [19, 28, 39, 57]
    for step, fit_step in ((29, 0), (29, 7), (58, 14)):
        with pytest.raises(Interrupted, match=f"step {step} of 58 and step {fit_step} of 15 of the fit"):
            run(config(method), tmp_path / "stopped", watch=StopInFit(step, fit_step))
    (folder,) = (file.parent for file in (tmp_path / "stopped").rglob("config.json"))
    saved = checkpoint.load(folder / "checkpoint.safetensors")
    assert saved["trainer"]["engine"]["fit"]["at"] == 14
    resume(folder)
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (folder / "accuracy.json").read_bytes() == (whole / "accuracy.json").read_bytes()
    states = [checkpoint.load(place / "checkpoint.safetensors")["trainer"]["engine"] for place in (folder, whole)]
    assert_same(*states, "the engine at the end")
    timings = [json.loads((place / "timing.json").read_text()) for place in (folder, whole)]
    assert [timing["fit_images"] for timing in timings] == [4 * 5 * 40] * 2


def test_a_run_killed_after_the_evaluation_makes_it_again_once(tmp_path: Path) -> None:
    """The last checkpoint is in the middle of the fit, but the record already has its end and the evaluation."""
    whole = run(config(), tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(config(), tmp_path / "killed", watch=StopInFit(29, 7))
    (folder,) = (file.parent for file in (tmp_path / "killed").rglob("config.json"))
    record = (whole / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(record) if b'"kind":"eval","step":28' in line)
    (folder / "metrics.jsonl").write_bytes(b"".join(record[: last + 1]))
    resume(folder)
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


class Looks(Follower):
    """Notes what a progress line would say."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def advance(self) -> None:
        self.said.append(str(self.progress()))


def test_progress_says_where_the_fit_is(tmp_path: Path) -> None:
    watch = Looks()
    run(config(), tmp_path, watch=watch)
    during = [line for line in watch.said if "fit" in line]
    assert len(during) == 4 * 15
    assert "step 29 of 58" in during[15 + 6]
    assert "fit 6 of 15, " in during[15 + 6]
    assert "fit" not in watch.said[-1]
    assert "test " in watch.said[-1]


def test_cost_is_counted_apart(tmp_path: Path) -> None:
    """Nothing on the stream; epochs × memory images, forward and backward, before each evaluation."""
    folder = run(config(), tmp_path)
    timing = json.loads((folder / "timing.json").read_text())
    assert (timing["images"], timing["forward"], timing["backward"]) == (0, 0, 0)
    assert timing["fit_images"] == 4 * 5 * 40
    assert [line["images"] for line in lines(folder) if line["kind"] == "fit"] == [5 * 40] * 4


def test_a_trainer_steps_once_through_everything(tmp_path: Path) -> None:
    """Stream steps, and for each evaluation every step of its fit; a watch is told after each."""
    counted: list[int] = []

    class Counting(Watch):
        def advance(self) -> None:
            counted.append(1)

    run(config(), tmp_path, watch=Counting())
    assert len(counted) == 58 + 4 * 15


def test_bad_options_are_refused() -> None:
    for options in ("epochs=0", "batch=0", "cutmix=1.5", "cutmix_alpha=0"):
        with pytest.raises(UserError, match="gdumb: "):
            toy_engine(f"gdumb({options})")
