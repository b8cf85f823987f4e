"""Feedback inside Avalanche's and Lightning's own loops: with nothing to feed back it is plain deep supervision, step for step."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gracecl
from benchmarks.avalanche import load_torchvision
from gracecl.core import Taps
from gracecl.errors import UserError
from gracecl.functional.losses import cross_entropy
from gracecl.integrations.exits import LastExit, Past, find_exit

NEUTRAL = "paper(beta=0.0, adaptive=False)"
"""α = 1, γ = 0: what is left is the sum of all heads' losses"""
PAPER = "paper(adaptive=True)"
"""α that follows the past"""


def make_net() -> gracecl.nets.tapped.TappedNet:
    torch.manual_seed(0)
    body = nn.Sequential(*(nn.Sequential(nn.Linear(6 if i == 0 else 24, 24), nn.ReLU()) for i in range(4)))
    return gracecl.tap(body, classes=4, example=torch.randn(2, 6))


def blobs(n: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 4
    return torch.eye(6)[y] * 3 + torch.randn(n, 6, generator=generator), y


def deep_supervision(batches: list[tuple[Tensor, Tensor]]) -> gracecl.nets.tapped.TappedNet:
    """The loop that neutral feedback must amount to, by hand."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(net(x).logits, y).sum().backward()
        optimizer.step()
    return net


def assert_close(net: nn.Module, other: nn.Module) -> None:
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name)


# What both need.


def test_the_last_exit_is_a_classifier_that_remembers_its_taps() -> None:
    exits = LastExit(make_net())
    x, _ = blobs()
    assert torch.equal(exits(x), exits.net(x).logits[-1])
    assert isinstance(exits.taps, Taps)
    assert exits.taps.logits.shape == (4, 60, 4)
    copied = copy.deepcopy(exits)  # Avalanche's teachers do this between steps
    assert copied.taps is None
    assert torch.equal(copied(x), exits(x))


def test_the_exit_is_found_or_asked_for() -> None:
    exits = LastExit(make_net())
    assert find_exit(nn.Sequential(nn.Identity(), exits)) is exits
    with pytest.raises(UserError, match=r"Linear has 0 of them"):
        find_exit(nn.Linear(2, 2))
    with pytest.raises(UserError, match="at least one input"):
        Past(0)


def test_the_past_is_a_uniform_sample() -> None:
    """Every one of 30 inputs is among 10 kept ones a third of the time, whatever came together."""
    kept = np.zeros(30)
    for seed in range(600):
        past = Past(10, seed)
        for rows in np.array_split(np.arange(30), 7):
            past.show(torch.from_numpy(rows)[:, None].float(), torch.from_numpy(rows))
        x, y = past.sample()
        assert torch.equal(x[:, 0].long(), y)
        assert len(set(y.tolist())) == 10
        kept[y.numpy()] += 1
    assert np.abs(kept / 600 - 1 / 3).max() < 5 * np.sqrt(2 / 9 / 600)
    assert Past(3).sample() is None
    again = Past(10, 599)
    again.load_state_dict(past.state_dict())
    for other in (past, again):
        other.show(torch.zeros(5, 1), torch.full((5,), 99))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(past.sample(), again.sample(), strict=True))


# Lightning.


@pytest.fixture
def lightning() -> Iterator[Any]:
    module = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield module


def lightning_module(lightning: Any, output: str = "tensor") -> Any:
    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = LastExit(make_net())

        def training_step(self, batch: Any, number: int) -> Any:
            x, y = batch
            loss = F.cross_entropy(self.model(x), y)
            return loss if output == "tensor" else {"loss": loss, "other": 1}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Classifier()


def fit(lightning: Any, module: Any, callback: Any, epochs: int = 2) -> None:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    loader = DataLoader(TensorDataset(*blobs()), batch_size=10)
    lightning.Trainer(callbacks=[callback], max_epochs=epochs, accelerator="cpu", **quiet).fit(module, loader)


@pytest.mark.parametrize("output", ["tensor", "dict"])
def test_neutral_feedback_in_lightning_is_deep_supervision(lightning: Any, output: str) -> None:
    from gracecl.integrations.lightning import GraceCallback

    module = lightning_module(lightning, output)
    own = module.training_step.__func__
    fit(lightning, module, GraceCallback(NEUTRAL))
    x, y = blobs()
    assert_close(module.model.net, deep_supervision([*zip(x.split(10), y.split(10), strict=True)] * 2))
    assert module.training_step.__func__ is own, "the module is its own again"


def test_feedback_in_lightning_sets_alpha_at_the_end_of_epochs_and_is_saved(lightning: Any) -> None:
    from gracecl.integrations.lightning import GraceCallback

    module, callback = lightning_module(lightning), GraceCallback(PAPER)
    fit(lightning, module, callback)
    history = callback.feedback.history
    assert history["alpha"].shape == (12, 4)
    assert (history["alpha"][:6] == 1).all()
    assert (history["gamma"] > 0).all()
    x, y = callback.past.sample()
    module.eval()
    expected = [(logits.argmax(dim=1) == y).float().mean().item() for logits in module.model.net(x).logits]
    assert callback.feedback.accuracy.tolist() == pytest.approx(expected)
    again = GraceCallback(PAPER)
    again.load_state_dict(callback.state_dict())
    fit(lightning, lightning_module(lightning), again, epochs=1)
    assert torch.equal(again.past.sample()[1][:60], callback.past.sample()[1][:60])
    assert not (again.feedback.history["alpha"][0] == 1).all() or len(set(expected)) == 1


def test_feedback_in_lightning_every_so_many_steps(lightning: Any) -> None:
    from gracecl.integrations.lightning import GraceCallback

    callback = GraceCallback(past=20, refresh_every=4)
    seen = []
    callback._look_back = lambda module: seen.append(callback.past.offered)
    fit(lightning, lightning_module(lightning), callback)
    assert seen == [40, 80, 120]


def test_what_a_checkpoint_held_is_restored_once(lightning: Any) -> None:
    from gracecl.integrations.lightning import GraceCallback

    callback = GraceCallback()
    fit(lightning, lightning_module(lightning), callback)
    again = GraceCallback(PAPER)
    again.load_state_dict(callback.state_dict())
    for _ in range(2):
        before = again.feedback.accuracy if again.feedback else callback.feedback.accuracy
        fit(lightning, lightning_module(lightning), again, epochs=1)
        alpha = again.feedback.controller.weights(before)
        np.testing.assert_allclose(again.feedback.history["alpha"][-6:], alpha.expand(6, 4), rtol=1e-6)


def test_a_fit_that_failed_leaves_the_module_its_own_step(lightning: Any) -> None:
    from gracecl.integrations.lightning import GraceCallback

    module = lightning_module(lightning)
    own = module.training_step.__func__
    with pytest.raises(UserError, match="in one call"):
        fit(lightning, module, GraceCallback(labels=lambda batch: batch[1][:3]))
    assert module.training_step.__func__ is own


def test_lightning_batches_of_another_form_are_asked_about(lightning: Any) -> None:
    from gracecl.integrations.lightning import second

    with pytest.raises(UserError, match=r"batches \(x, y\)"):
        second({"image": torch.zeros(1)})


def test_a_module_that_optimises_by_itself_is_refused(lightning: Any) -> None:
    """The callback adds to the returned loss, which nobody would go down."""
    from gracecl.integrations.lightning import GraceCallback

    module = lightning_module(lightning)
    module.automatic_optimization = False
    x, y = blobs()
    trainer = lightning.Trainer(
        max_epochs=1, callbacks=[GraceCallback()], logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with pytest.raises(UserError, match=r"automatic_optimization=False.*gracecl\.Feedback"):
        trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=20))


# What feedback does unless it is told otherwise.


def test_alpha_stays_one_unless_it_is_asked_for(lightning: Any) -> None:
    """Evidence: the paper's α lowers accuracy, γ alone does not; grace(...) stays the paper's."""
    from gracecl.integrations.lightning import GraceCallback

    net, (x, y) = make_net(), blobs()
    for controller, moves in (("paper", False), ("bayes", False), (PAPER, True)):
        feedback = gracecl.Feedback(4, controller)
        feedback.accuracy = torch.tensor([0.1, 0.2, 0.3, 0.9])
        out = net(x)
        feedback(out.logits, cross_entropy(out.logits, y), y)
        assert bool((feedback.history["alpha"] != 1).any()) == moves
        assert (feedback.history["gamma"] > 0).all()
    assert GraceCallback()._controller == "paper"
    assert gracecl.Learner("grace(er())", classes=4, net="mlp").method.controller().adaptive


# Avalanche.


@pytest.fixture
def avalanche() -> Iterator[Any]:
    if importlib.util.find_spec("avalanche") is None:
        pytest.skip("Avalanche is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_torchvision()
        import avalanche.benchmarks
        import avalanche.training

        yield avalanche


def experiences(avalanche: Any) -> Any:
    x, y = blobs()
    data = TensorDataset(x, y)
    data.targets = y.tolist()
    return avalanche.benchmarks.nc_benchmark(data, data, n_experiences=2, task_labels=False, seed=0, shuffle=False).train_stream


def strategy(avalanche: Any, name: str, plugins: list[Any], **options: Any) -> Any:
    exits = LastExit(make_net())
    return getattr(avalanche.training, name)(
        model=exits,
        optimizer=torch.optim.SGD(exits.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=10,
        plugins=plugins,
        evaluator=None,
        **options,
    )


def test_neutral_feedback_in_avalanche_is_deep_supervision(avalanche: Any) -> None:
    from gracecl.integrations.avalanche import GracePlugin

    batches: list[tuple[Tensor, Tensor]] = []

    class Watch(avalanche.training.plugins.SupervisedPlugin):
        def before_forward(self, strategy: Any, **kwargs: Any) -> None:
            batches.append((strategy.mb_x.clone(), strategy.mb_y.clone()))

    trained = strategy(avalanche, "Naive", [GracePlugin(NEUTRAL), Watch()])
    for experience in experiences(avalanche):
        trained.train(experience, shuffle=False)
    assert len(batches) == 6
    assert_close(trained.model.net, deep_supervision(batches))


@pytest.mark.parametrize(
    ("name", "options"), [("Replay", {"mem_size": 20}), ("EWC", {"ewc_lambda": 5.0}), ("LwF", {"alpha": 1.0, "temperature": 2.0})]
)
def test_avalanche_s_strategies_with_and_without_feedback(avalanche: Any, name: str, options: dict[str, Any]) -> None:
    """Both learn; feedback changes the steps, its α after the first experience; the strategy's own terms stay in the loss."""
    from gracecl.integrations.avalanche import GracePlugin

    plugin, final = GracePlugin(PAPER, past=30), {}
    for key, plugins in (("without", []), ("with", [plugin])):
        torch.manual_seed(0)
        trained = strategy(avalanche, name, plugins, train_epochs=80, **options)
        for experience in experiences(avalanche):
            trained.train(experience)
        final[key] = trained.model.net.state_dict()
        x, y = blobs()
        last = y >= 2
        assert (trained.model(x[last]).argmax(dim=1) == y[last]).float().mean() > 0.6
    assert any(not torch.equal(value, final["without"][name]) for name, value in final["with"].items())
    history = plugin.feedback.history
    assert (history["gamma"] > 0).all()
    assert (history["alpha"][: 80 * 3] == 1).all(), "the first experience has 80 epochs of 3 batches"
    assert plugin.feedback.accuracy.isfinite().all()


def test_avalanche_s_penalty_stays(avalanche: Any) -> None:
    """With EWC the loss of a later experience is the feedback's objective plus EWC's own penalty."""
    from gracecl.integrations.avalanche import GracePlugin

    seen: list[float] = []

    class Watch(avalanche.training.plugins.SupervisedPlugin):
        def after_backward(self, strategy: Any, **kwargs: Any) -> None:
            logits = strategy.model.taps.logits
            seen.append(strategy.loss.item() - cross_entropy(logits, strategy.mb_y).sum().item())

    trained = strategy(avalanche, "EWC", [GracePlugin(NEUTRAL), Watch()], ewc_lambda=1000.0)
    for experience in experiences(avalanche):
        trained.train(experience, shuffle=False)
    assert seen[:4] == pytest.approx([0.0] * 4, abs=1e-5)
    assert seen[-1] > 1e-4


def test_a_strategy_that_looks_at_something_else_last_is_named(avalanche: Any) -> None:
    from gracecl.integrations.avalanche import GracePlugin

    class Looks(avalanche.training.plugins.SupervisedPlugin):
        def after_forward(self, strategy: Any, **kwargs: Any) -> None:
            strategy.model(strategy.mb_x)

    trained = strategy(avalanche, "Naive", [GracePlugin(), Looks()])
    with pytest.raises(UserError, match="Naive's model is not the one that gave mb_output"):
        trained.train(experiences(avalanche)[0])


@pytest.mark.parametrize("name", ["DER", "ER_ACE"])
def test_a_strategy_with_a_loop_of_its_own_is_refused(avalanche: Any, name: str) -> None:
    from gracecl.integrations.avalanche import GracePlugin

    trained = strategy(avalanche, name, [GracePlugin()])
    with pytest.raises(UserError, match=f"{name} has a training_epoch of its own"):
        trained.train(experiences(avalanche)[0])


def test_a_model_without_an_exit_is_named(avalanche: Any) -> None:
    from gracecl.integrations.avalanche import GracePlugin

    model = nn.Linear(6, 4)
    naive = avalanche.training.Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        plugins=[GracePlugin()],
        evaluator=None,
    )
    with pytest.raises(UserError, match="LastExit"):
        naive.train(experiences(avalanche)[0])


@pytest.mark.skipif(importlib.util.find_spec("avalanche") is not None, reason="Avalanche is installed")
def test_without_avalanche_one_sentence_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"pip install 'gracecl\[avalanche\]'"):
        importlib.import_module("gracecl.integrations.avalanche")
