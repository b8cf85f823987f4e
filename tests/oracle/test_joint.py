"""The bounds and replay between them: fine-tuning, experience replay and joint training, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from gracecl import nets, rng
from gracecl.core import MEMORY_SOURCE, NO_TASK, Batch, StreamBatch, Taps
from gracecl.data import Data, from_arrays
from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import evaluate
from gracecl.functional.losses import cross_entropy
from gracecl.inputs import Images
from gracecl.memory import Memories
from gracecl.methods.base import Method
from gracecl.methods.er import ER
from gracecl.methods.joint import Joint
from gracecl.methods.sgd import SGD
from gracecl.registry.spec import parse_method
from gracecl.streams.split import split
from gracecl.testing import feed

SHAPE = (3, 4, 4)


def noisy_data(n: int, classes: int, seed: int = 0) -> Data:
    choice = np.random.default_rng(seed)
    x = choice.integers(0, 256, (n, 4, 4, 3), dtype=np.uint8)
    y = np.arange(n) % classes
    return from_arrays(x, y, x[:classes], y[:classes])


def blobs(per_class: int, classes: int = 4) -> Data:
    """Bright images in which each class lights up a corner of its own: easy to learn and easy to forget."""
    choice = np.random.default_rng(0)
    y = np.tile(np.arange(classes), per_class)
    x = choice.integers(130, 200, (len(y), 4, 4, 3), dtype=np.uint8)
    for label in range(classes):
        row, column = 2 * (label // 2), 2 * (label % 2)
        x[y == label, row : row + 2, column : column + 2] += 50
    return from_arrays(x, y, x, y)


def make_engine(
    method: Method | str,
    memory: int = 0,
    classes: int = 4,
    augmentation: str = "tau",
    optimizer: str = "adam(lr=0.001, weight_decay=0.0001)",
    net: str = "mlp(width=12)",
    seed: int = 0,
) -> Engine:
    method = parse_method(method) if isinstance(method, str) else method
    with rng.torch_seed(0, "net"):
        tapped = nets.build(net, Images(SHAPE), classes, taps=1)
    return Engine(method, tapped, Memories(memory, Images(SHAPE)), augmentation=augmentation, optimizer=optimizer, seed=seed)


def same_weights(a: Engine, b: Engine) -> bool:
    theirs = b.net.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.net.state_dict().items())


# bounds.md section 8.


@pytest.mark.parametrize("augmentation", ["tau", "full"])
@pytest.mark.parametrize("reduction", ["concat", "sum_of_means"])
def test_replay_without_memory_is_fine_tuning_to_the_bit(augmentation: str, reduction: str) -> None:
    stream = split(noisy_data(24, 4), 0, tasks=2, batch=5)
    tuned, replayed = make_engine(SGD(), augmentation=augmentation), make_engine(ER(reduction=reduction), augmentation=augmentation)
    feed(tuned, stream)
    feed(replayed, stream)
    assert same_weights(tuned, replayed)
    assert not same_weights(tuned, make_engine(SGD()))


@pytest.mark.parametrize("tasks", [1, 2])
def test_joint_without_a_second_batch_is_fine_tuning_in_random_order(tasks: int) -> None:
    """joint(n_recall=0) ends with the weights of sgd that is fed the same shuffled images by hand, whatever the tasks were."""
    data = noisy_data(22, 4)
    joint = make_engine(Joint(n_recall=0))
    stream = joint.as_seen(split(data, 3, tasks=tasks, batch=5))
    feed(joint, stream)
    order = stream.order.tolist()
    assert sorted(order) == list(range(22))
    by_hand = make_engine(SGD())
    for start in range(0, 22, 5):
        images = np.array(order[start : start + 5])
        by_hand.learn(
            StreamBatch(
                data.train_x[torch.from_numpy(images)],
                data.train_y[images],
                task=NO_TASK,
                sources=np.arange(start, start + len(images)),
            )
        )
    assert same_weights(joint, by_hand)
    assert len(stream) == 5


def test_joint_spends_what_replay_spends() -> None:
    """10 + 64 images in every step of joint, and of ER once its memory has 64; joint keeps nothing."""
    stream = split(noisy_data(120, 4), 0, tasks=2, batch=10)
    replay, joint = make_engine(ER(), memory=100), make_engine(Joint(), memory=100)
    assert [outcome.images for outcome in feed(replay, stream)] == [10, 20, 30, 40, 50, 60, 70, 74, 74, 74, 74, 74]
    assert [outcome.images for outcome in feed(joint, joint.as_seen(stream))] == [74] * 12
    assert len(joint.memories.replay) == 0


def test_offline_training_is_whole_epochs() -> None:
    engine = make_engine("joint(offline_epochs=3, offline_batch=8)")
    stream = engine.as_seen(split(noisy_data(20, 4), 0, tasks=2, batch=5))
    assert [outcome.images for outcome in feed(engine, stream)] == [8, 8, 4] * 3
    for epoch in stream.order.reshape(3, 20):
        assert sorted(epoch.tolist()) == list(range(20))


def accuracies(engine: Engine, data: Data) -> list[float]:
    return evaluate(engine, data.test_x, data.test_y, data.test_y // 2).accuracy["linear_last"]


def test_fine_tuning_forgets_replay_less_and_joint_training_not() -> None:
    """Two tasks of two classes: fine-tuning loses the first task; fine-tuning < replay <= joint on average."""
    data, found = blobs(40), []
    for method in ("sgd", "er(n_recall=20)", "joint(n_recall=20)"):
        net = "mlp(width=32, depth=1)"
        engine = make_engine(method, memory=40, augmentation="none", optimizer="sgd(lr=0.1)", net=net)
        feed(engine, engine.as_seen(split(data, 2, tasks=2, batch=10)))
        found.append(np.array(accuracies(engine, data)))
    tuned, replay, joint = found
    assert tuned[0] < 5
    assert tuned[1] > 70
    assert min(replay) > 90
    assert tuned.mean() < replay.mean() <= joint.mean()


# er.md section 8.


@dataclass(eq=False, repr=False)
class SpyER(ER):
    """ER that keeps its last batch."""

    def after_step(self, out: Taps, batch: Batch) -> None:
        self.last = batch


def after_one_replay(reduction: str, b: int, recalled: int) -> Engine:
    """An engine that stored one batch and then learned from a second one, with its gradients still there."""
    engine = make_engine(SpyER(recalled, reduction), memory=50, augmentation="none", optimizer="sgd(lr=0.0)")
    data = noisy_data(40, 4)
    for rows in (slice(0, 20), slice(20, 20 + b)):
        engine.learn(StreamBatch(data.train_x[rows], data.train_y[rows]))
    return engine


def gradient(engine: Engine, rows: Iterable[int]) -> list[Tensor]:
    """Of the mean cross-entropy on some rows of the last batch, computed apart."""
    batch, picked = engine.method.last, torch.tensor(list(rows))
    loss = cross_entropy(engine.net(batch.x[picked]).logits, batch.y[picked]).sum()
    return list(torch.autograd.grad(loss, trained(engine)))


def trained(engine: Engine) -> list[Tensor]:
    return [*engine.net.backbone.parameters(), *engine.net.classifier.parameters()]


@pytest.mark.parametrize(("b", "recalled"), [(5, 12), (8, 8)])
def test_gradients_of_the_two_reductions(b: int, recalled: int) -> None:
    """concat: (B g_stream + R g_memory) / (B + R); sum of means: g_stream + g_memory; with B = R the second is twice the first."""
    concat, summed = (after_one_replay(reduction, b, recalled) for reduction in ("concat", "sum_of_means"))
    np.testing.assert_array_equal(concat.method.last.sources, summed.method.last.sources)
    is_memory = concat.method.last.sources >= MEMORY_SOURCE
    assert (~is_memory[:b]).all()
    assert is_memory[b:].all()
    assert len(is_memory) == b + recalled
    of_stream, of_memory = gradient(concat, range(b)), gradient(concat, range(b, b + recalled))
    for got, both, s, m in zip(trained(concat), trained(summed), of_stream, of_memory, strict=True):
        torch.testing.assert_close(got.grad, (b * s + recalled * m) / (b + recalled), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(both.grad, s + m, rtol=1e-4, atol=1e-6)
        if b == recalled:
            torch.testing.assert_close(both.grad, 2 * got.grad, rtol=1e-4, atol=1e-6)


def test_the_two_reductions_go_through_the_net_together_or_apart() -> None:
    """concat is one forward, hence one BatchNorm batch; the sum of means is two. The first step has an empty memory."""
    forwards = {}
    for reduction in ("concat", "sum_of_means"):
        sizes = forwards[reduction] = []
        engine = make_engine(SpyER(6, reduction), memory=50)
        engine.net.backbone.register_forward_hook(lambda module, inputs, out, sizes=sizes: sizes.append(len(inputs[0])))
        data = noisy_data(25, 4)
        for rows in (slice(0, 20), slice(20, 25)):
            engine.learn(StreamBatch(data.train_x[rows], data.train_y[rows]))
    assert forwards == {"concat": [20, 5 + 6], "sum_of_means": [20, 5, 6]}


@pytest.mark.parametrize("reduction", ["concat", "sum_of_means"])
def test_replay_of_more_than_is_stored_is_the_whole_memory(reduction: str) -> None:
    engine = after_one_replay(reduction, 5, 64)
    slots = engine.method.last.sources[5:] - MEMORY_SOURCE
    assert sorted(slots.tolist()) == list(range(20))


def test_a_batch_does_not_replay_itself() -> None:
    """The draw comes before the batch is stored: at the first step only the stream's images are seen."""
    engine = make_engine(SpyER(), memory=50, augmentation="none")
    data = noisy_data(12, 4)
    assert engine.learn(StreamBatch(data.train_x, data.train_y)).images == 12
    assert len(engine.memories.replay) == 12


def test_memory_content_depends_on_the_seed_alone() -> None:
    """Not on the method, the number of images replayed, the net or the optimizer: comparisons are paired."""
    stream = split(noisy_data(40, 4), 0, tasks=2, batch=10)

    def content(expression: str, seed: int = 0, **options: str) -> Tensor:
        engine = make_engine(expression, memory=15, seed=seed, **options)
        feed(engine, stream)
        return engine.memories.replay.images

    first = content("er(n_recall=3)")
    assert torch.equal(first, content("er(n_recall=10, reduction='sum_of_means')"))
    assert torch.equal(first, content("mose(n_recall=6)"))
    assert torch.equal(first, content("grace(er(n_recall=1))", optimizer="sgd(lr=0.5)", net="mlp(width=3)"))
    assert not torch.equal(first, content("er(n_recall=3)", seed=1))


def test_images_are_stored_as_they_came() -> None:
    """Bit for bit, un-augmented, and not tied to the caller's tensor."""
    data = noisy_data(20, 4)
    engine = make_engine(ER(), memory=20, augmentation="full")
    x = data.train_x.clone()
    for start in (0, 10):
        engine.learn(StreamBatch(x[start : start + 10], data.train_y[start : start + 10]))
    x.zero_()
    assert torch.equal(engine.memories.replay.images, data.train_x)


def test_later_epochs_are_not_stored_again() -> None:
    stream = split(noisy_data(20, 4), 0, tasks=2, batch=5, epochs=2)
    engine = make_engine(ER(), memory=50)
    feed(engine, stream)
    memory = engine.memories.replay
    assert memory.offered == len(memory) == 20
    assert len(torch.unique(memory.images[:20].flatten(1), dim=0)) == 20
