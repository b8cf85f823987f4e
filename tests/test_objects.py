"""Objects in place of expressions: methods, nets, optimizers and schedules of one's own, and how they are recorded."""

from __future__ import annotations

import copy
import functools
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import gracecl
from commands import gracecl as command
from gracecl import Callback, Learner, StopTraining, UserError
from gracecl.core import Batch, LossTable, Taps
from gracecl.engine.live import is_expressible
from gracecl.engine.loop import TrainingState
from gracecl.functional import optim
from gracecl.functional.losses import cross_entropy
from gracecl.methods.er import ER
from gracecl.methods.ewc import EWC
from gracecl.methods.grace import Grace
from gracecl.registry import objects, spec
from gracecl.testing import toy_stream

TOY: dict[str, Any] = {"classes": 6, "shape": (1, 8, 8), "memory": 20, "augment": "none", "device": "cpu"}
RUN: dict[str, Any] = {
    "stream": "split-digits(size=8, tasks=5, per_class=10, batch=4)",
    "memory": 20,
    "augment": "none",
    "device": "cpu",
    "threads": 1,
}
MLP = {"net": "mlp(width=8)"}


@dataclass(eq=False, repr=False)
class Doubled(ER):
    """Not registered anywhere."""

    factor: float = 2.0

    def losses(self, out: Taps, batch: Batch) -> LossTable:
        return {"ce/all": self.factor * cross_entropy(out.logits, batch.y)}


class Features(nn.Module):
    """A net of one's own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x.flatten(1)).relu())  # type: ignore[no-any-return]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 1e-3)


def same(one: Learner, two: Learner) -> bool:
    return all(map(torch.equal, one.net.state_dict().values(), two.net.state_dict().values()))


# Methods.


def test_a_method_that_is_not_registered_learns_as_the_object_it_is() -> None:
    method = Doubled(n_recall=4)
    learner = Learner(method, **TOY, **MLP)
    assert learner.method is method
    plain = Learner("er(n_recall=4)", **TOY, **MLP)
    batch = toy_stream().batch(0)
    ours, theirs = (it.learn(batch.x, batch.labels)["ce/all"][0] for it in (learner, plain))
    assert ours == pytest.approx(2 * theirs)


def test_an_object_learns_to_the_same_bits_as_its_expression() -> None:
    made = Learner(Grace(ER(n_recall=4) + EWC()), **TOY, **MLP).fit(toy_stream())
    assert made.recipe.method == "grace(er(n_recall=4) + ewc())"
    assert same(made, Learner("grace(er(n_recall=4) + ewc())", **TOY, **MLP).fit(toy_stream()))


def test_two_learners_do_not_share_a_method() -> None:
    method = ER()
    Learner(method, **TOY, **MLP)
    for used in (method, Grace(method), copy.deepcopy(method)):
        with pytest.raises(UserError, match="is the method of another learner, whose state it holds; make another object"):
            Learner(used, **TOY, **MLP)


def with_hook() -> ER:
    method = ER()
    method.losses = lambda out, batch: {"ce/all": 3 * cross_entropy(out.logits, batch.y)}  # type: ignore[method-assign]
    return method


@pytest.mark.parametrize(
    ("make", "expressible"),
    [(ER, True), (lambda: ER() + EWC(), True), (Doubled, False), (lambda: Grace(Doubled()), False), (with_hook, False)],
)
def test_only_a_method_that_its_expression_names_is_written_as_one(make: Callable[[], Any], expressible: bool) -> None:
    assert is_expressible(make()) == expressible


def test_a_run_of_an_object_is_that_of_its_text(tmp_path: Path) -> None:
    method = ER(n_recall=4)
    first = gracecl.run(method, out=tmp_path, **RUN, **MLP)
    assert gracecl.run("er(n_recall=4)", out=tmp_path, **RUN, **MLP).folder == first.folder
    assert not method.in_use, "a run has a copy, so that it can be called again"


# Nets.


def net_of(kind: str) -> Any:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU())
    return {
        "module": lambda: model,
        "factory": lambda: Features,
        "lambda": lambda: lambda: Features(8),
        "tapped": lambda: gracecl.tap(model, at=["2", "4"], classes=6, example=(1, 1, 8, 8)),
        "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 7)),
    }[kind]()


WIDTHS = {"module": (1, 12), "factory": (1, 16), "lambda": (1, 8), "tapped": (2, 12), "one layer": (1, 7)}


@pytest.mark.parametrize("kind", WIDTHS)
def test_a_module_of_one_s_own_is_a_net(kind: str) -> None:
    learner = Learner("er", net=net_of(kind), **TOY).fit(toy_stream())
    assert (learner.net.layers, learner.net.width) == WIDTHS[kind]
    assert all(weight.grad is not None for weight in learner.net.backbone.parameters() if weight.requires_grad)
    assert len(learner.predict(toy_stream().data.test_x)) == len(toy_stream().data.test_x)


def test_a_module_s_output_is_its_last_tap_and_blocks_are_tapped_before_it() -> None:
    learner = Learner("grace(er())", net=Features(), **TOY)
    assert learner.net.backbone.names == ("one", "")
    batch = toy_stream().batch(0)
    x = learner.inputs.normalise(batch.x)
    features = learner.net(x).features[-1]
    assert torch.allclose(features, learner.net.backbone.model(x))  # type: ignore[operator]


class Empty(Features):
    def __len__(self) -> int:
        return 0


def test_a_module_that_counts_as_false_is_a_net() -> None:
    assert Learner("er", net=Empty(), **TOY).net.width == 16


class Text(nn.Module):
    """Takes its inputs by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.map = nn.Embedding(30, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        words = self.embed(ids) * mask[..., None]
        return self.map(words.sum(dim=1) / mask.sum(dim=1, keepdim=True))  # type: ignore[no-any-return]


def test_a_module_takes_the_parts_of_its_input_by_name() -> None:
    x, y = {"ids": torch.arange(24).view(6, 4), "mask": torch.ones(6, 4)}, ["rose", "tulip"] * 3
    learner = Learner("er", net=Text(), optimizer=lambda params: torch.optim.AdamW(params, 0.1), memory=10, device="cpu")
    learner.fit([{**x, "labels": y}] * 20 + [(x, y)] * 20)
    assert learner.predict(x).tolist() == y


@pytest.mark.parametrize("classes", [None, 2])
def test_the_heads_of_a_module_grow(classes: int | None) -> None:
    net: Any = Features() if classes is None else gracecl.tap(Features(), classes=classes, example=(1, 64))
    learner = Learner("er", net=net, memory=20, augment="none", device="cpu")
    for batch in toy_stream():
        learner.learn(batch.x, [f"class {label}" for label in batch.labels])
    assert learner.net.classes == 6
    assert set(learner.predict(toy_stream().data.test_x)) <= {f"class {label}" for label in range(6)}


def test_a_forward_leaves_nothing_for_the_garbage_collector() -> None:
    net = gracecl.tap(Features(), classes=3, example=(1, 64))

    def passed() -> weakref.ref[Tensor]:
        out = net(torch.randn(2, 64)).logits
        return weakref.ref(out)

    gc.disable()
    try:
        assert passed()() is None
    finally:
        gc.enable()


def test_a_module_is_trained_in_place_and_seeds_leave_it_alone() -> None:
    module = Features()
    before = module.one.weight.detach().clone()
    learners = [Learner("er", net=copy.deepcopy(module), seed=seed, **TOY) for seed in (0, 1)]
    assert all(torch.equal(learner.net.backbone.model.one.weight, before) for learner in learners)  # type: ignore[union-attr]
    Learner("er", net=module, **TOY).fit(toy_stream())
    assert not torch.equal(module.one.weight, before)
    made = [Learner("er", net=Features, seed=seed, **TOY).net.backbone.model.one.weight for seed in (0, 1)]  # type: ignore[union-attr]
    assert not torch.equal(*made)


def test_a_run_leaves_the_module_as_it_was() -> None:
    module = Features()
    before = copy.deepcopy(module.state_dict())
    gracecl.run("er", net=module, **RUN, steps=5)
    assert all(map(torch.equal, before.values(), module.state_dict().values()))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"net": 3}, "net is an expression .*, not a int"),
        ({"net": lambda: 3}, "returns a int; let it return a"),
        ({"net": nn.Linear(5, 5)}, "Linear does not take inputs of the shape"),
        ({"net": lambda: gracecl.tap(Features(), classes=4, example=(1, 64))}, "tapped for 4 classes and the learner has 6"),
        ({"optimizer": lambda params: 3}, "returns a torch.optim.Optimizer, not a int"),
        ({"optimizer": adamw(Features().parameters())}, "optimizer is a function that makes one, not a AdamW made already"),
        ({"optimizer": lambda params: adamw(Features().parameters())}, "trains none of the learner's weights"),
        ({"scheduler": lambda optimizer: 3}, "returns a torch.optim.lr_scheduler, not a int"),
        ({"scheduler": lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau, which waits for a metric"),
        ({"scheduler": lambda _: lr_scheduler.StepLR(adamw(Features().parameters()), 3)}, "made for another optimizer"),
        ({"scheduler": "cosin(steps=3)"}, "unknown scheduler 'cosin'; did you mean 'cosine'"),
        ({"scheduler": "cosine(steps=0)"}, "steps must be at least 1"),
        ({"scheduler": "drop(at=[0])"}, "at is a list of steps"),
        ({"scheduler_step": "epoch"}, "scheduler_step must be one of step, task"),
    ],
)
def test_an_object_of_another_kind_is_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Learner("er", **TOY | MLP | options)


# Optimizers and schedules.


def test_an_optimizer_of_one_s_own_makes_the_steps_of_its_expression() -> None:
    own = Learner("er", optimizer=lambda params: torch.optim.SGD(params, 0.05, fused=True), **TOY, **MLP).fit(toy_stream())
    assert same(own, Learner("er", optimizer="sgd(lr=0.05)", **TOY, **MLP).fit(toy_stream()))


def test_an_optimizer_of_one_s_own_keeps_the_trunk_s_rate() -> None:
    net = "mlp(width=8, trunk_lr=0.1)"
    own = Learner("er", net=net, optimizer=lambda params: torch.optim.SGD(params, 0.05, fused=True), **TOY)
    assert own.engine.full_rates == Learner("er", net=net, optimizer="sgd(lr=0.05)", **TOY).engine.full_rates
    with pytest.raises(UserError, match=r"learn at 2 rates .* has 1 groups"):
        Learner("er", net=net, optimizer=lambda groups: adamw([p for group in groups for p in group["params"]]), **TOY)


def rates(learner: Learner) -> list[float]:
    """The learning rate of each update of the toy stream."""
    found: list[float] = []
    optimizer = learner.engine.optimizer
    optimizer.register_step_pre_hook(lambda *_: found.append(optimizer.param_groups[0]["lr"]))
    learner.fit(toy_stream())
    return found


def test_a_scheduler_is_stepped_after_each_batch() -> None:
    learner = Learner("er", optimizer="sgd(lr=1.0)", scheduler=lambda o: lr_scheduler.StepLR(o, 2, 0.5), **TOY, **MLP)
    assert rates(learner)[:5] == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_scheduler_may_go_by_tasks() -> None:
    options: dict[str, Any] = {"optimizer": "sgd(lr=1.0)", "scheduler_step": "task", **TOY, **MLP}
    stream, found = toy_stream(), rates(Learner("er", scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.5), **options))
    assert found == [0.5 ** int(task) for task in stream.task_of_step]


def test_the_rate_of_a_plan_multiplies_that_of_the_schedule() -> None:
    make = functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)
    learner = Learner("multi_update(er(), updates=2, lr_factor=3.0)", optimizer="sgd(lr=0.1)", scheduler=make, **TOY, **MLP)
    plain = Learner("multi_update(er(), updates=2, lr_factor=3.0)", optimizer="sgd(lr=0.1)", **TOY, **MLP)
    factors = [one / two for one, two in zip(rates(learner), rates(plain), strict=True)]
    assert factors == pytest.approx([0.5 ** (update // 4) for update in range(len(factors))])


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("cosine(steps=2)", [1.0, 0.5, 0.0, 0.0]),
        ("cosine(steps=2, lowest=0.5)", [1.0, 0.75, 0.5, 0.5]),
        ("linear(steps=4)", [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("linear(steps=2, lowest=0.2)", [1.0, 0.6, 0.2, 0.2]),
        ("warmup(steps=4)", [0.25, 0.5, 0.75, 1.0, 1.0]),
        ("drop(at=[1, 3])", [1.0, 0.1, 0.1, 0.01]),
        ("drop(at=[2], factor=0.5)", [1.0, 1.0, 0.5]),
    ],
)
def test_schedules_by_expression(expression: str, wanted: list[float]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    schedule, found = optim.scheduler(expression)(optimizer), []
    for _ in wanted:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])
def test_a_copied_learner_has_a_schedule_of_its_own(copied: Callable[[Learner], Learner]) -> None:
    learner = Learner("er", scheduler="cosine(steps=30)", **TOY, **MLP)
    other = copied(learner)
    assert same(other.fit(toy_stream()), learner.fit(toy_stream()))
    assert other.engine.full_rates == learner.engine.full_rates


SCHEDULERS: dict[str, Any] = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [3, 9], 0.5),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 10)], [4]
    ),
    "expression": "cosine(steps=15)",
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedule_is_resumed_exactly(kind: str, tmp_path: Path) -> None:
    class StopAt(Callback):
        def on_step(self, state: TrainingState) -> None:
            if state.step == 5:
                raise StopTraining

    scheduler = SCHEDULERS[kind]
    options: dict[str, Any] = {"optimizer": "sgd(lr=0.1, momentum=0.5)", "scheduler": scheduler, **TOY, **MLP}
    whole = Learner("er", **options).fit(toy_stream())
    Learner("er", **options).fit(toy_stream(), callbacks=[StopAt()]).save(tmp_path / "it")
    given = {} if isinstance(scheduler, str) else {"scheduler": scheduler}
    again = Learner.load(tmp_path / "it", **given).fit(toy_stream(), start=5)
    assert again.engine.full_rates == whole.engine.full_rates != [0.1]
    assert same(again, whole)


def test_a_run_with_a_schedule_has_a_folder_of_its_own_and_is_taken_from_the_command(tmp_path: Path) -> None:
    plain = gracecl.RunConfig(method="er()", device="cpu")
    assert plain.folder(tmp_path) != gracecl.RunConfig(method="er()", device="cpu", scheduler="cosine(steps=5)").folder(tmp_path)
    options = ("--stream", RUN["stream"], "--memory", "20", "--net", "mlp(width=8)", "--augment", "none", "--steps", "6")
    said = command("run", "er", *options, "--scheduler", "cosine(steps=5)", "--out", tmp_path)
    assert said.code == 0
    [config] = [json.loads(file.read_text()) for file in tmp_path.rglob("config.json")]
    assert config["scheduler"] == "cosine(steps=5)"


# Recording, and asking again.


def learner_of_objects() -> Learner:
    return Learner(Doubled(n_recall=4), net=Features(), optimizer=adamw, **TOY)


def negative(x: Tensor, generator: Any) -> Tensor:
    return -x


def test_views_of_one_s_own_are_recorded_and_asked_for_again(tmp_path: Path) -> None:
    options: dict[str, Any] = TOY | MLP | {"augment": negative}
    learner = Learner("er", **options).fit(toy_stream())
    assert not same(learner, Learner("er", **TOY, **MLP).fit(toy_stream()))
    assert objects.is_opaque(learner.recipe.augment)
    learner.save(tmp_path / "it")
    with pytest.raises(UserError, match=r"its augment as an object \(test_objects\.negative@"):
        Learner.load(tmp_path / "it")
    assert same(Learner.load(tmp_path / "it", augment=negative).fit(toy_stream()), learner.fit(toy_stream()))


def test_a_learner_of_objects_is_loaded_with_them(tmp_path: Path) -> None:
    learner = learner_of_objects()
    for batch in toy_stream().cut(8):
        learner.learn(batch.x, batch.labels)
    learner.save(tmp_path / "it")
    again = Learner.load(tmp_path / "it", method=Doubled(n_recall=4), net=Features(), optimizer=adamw)
    assert same(again, learner)
    for batch in toy_stream():
        learner.learn(batch.x, batch.labels)
        again.learn(batch.x, batch.labels)
    assert same(again, learner)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {},
            r"was given its method as an object \(doubled\(n_recall=4\)@[0-9a-f]{12}\), which no file holds; load it .*method=…",
        ),
        ({"method": Doubled(n_recall=4), "optimizer": adamw}, r"its net as an object .*Features@"),
        (
            {"method": Doubled(n_recall=5), "net": Features(), "optimizer": adamw},
            "saved with the method doubled.*say accept_changes",
        ),
        ({"method": Doubled(n_recall=4), "net": Features(8), "optimizer": adamw}, "saved with the net"),
        ({"method": Doubled(n_recall=4), "net": Features(), "optimizer": lambda p: adamw(p)}, "saved with the optimizer"),
    ],
)
def test_a_learner_of_objects_asks_for_them_again(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    learner_of_objects().save(tmp_path / "it")
    with pytest.raises(UserError, match=sentence):
        Learner.load(tmp_path / "it", **given)


def test_a_change_that_is_meant_is_accepted(tmp_path: Path) -> None:
    learner_of_objects().save(tmp_path / "it")
    given: dict[str, Any] = {"method": Doubled(n_recall=5), "net": Features(), "optimizer": adamw}
    again = Learner.load(tmp_path / "it", **given, accept_changes=True)
    assert again.method is given["method"]
    again.save(tmp_path / "it")
    Learner.load(tmp_path / "it", **given | {"method": Doubled(n_recall=5), "net": Features()})


@pytest.mark.slow
def test_a_run_of_objects_is_continued_from_python_alone(tmp_path: Path) -> None:
    class StopAt(Callback):
        def on_step(self, state: TrainingState) -> None:
            if state.step == 7:
                raise StopTraining("for now")

    given: dict[str, Any] = {"net": Features, "optimizer": adamw, "scheduler": functools.partial(lr_scheduler.StepLR, step_size=3)}
    whole = gracecl.run(Doubled(), out=tmp_path / "whole", **given, **RUN)
    begun = gracecl.run(Doubled(), out=tmp_path / "begun", callbacks=[StopAt()], **given, **RUN)
    assert begun.folder is not None
    said = command("resume", begun.folder)
    assert said.code == 2
    assert "was given its method as an object (doubled()@" in said.sentence
    assert "continue it from Python: call gracecl.run as it was called, with method= and out=" in said.sentence
    again = gracecl.run(Doubled(), out=tmp_path / "begun", **given, **RUN)
    assert again.folder == begun.folder
    assert whole.folder is not None
    assert (again.folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()
    config = json.loads((again.folder / "config.json").read_text())
    assert all(objects.is_opaque(config[name]) for name in ("method", "net", "optimizer", "scheduler"))
    assert command("report", tmp_path / "whole").code == 0
    assert command("compare", "doubled", config["method"], "--runs", tmp_path / "whole").code == 2


def test_other_source_options_closures_and_weights_are_other_runs() -> None:
    def place(**changes: Any) -> str:
        from gracecl.engine.live import Live

        return str(Live.take({"method": "er", **changes}, weights=True)[0])

    def rate(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda params: torch.optim.SGD(params, lr)

    assert place(optimizer=rate(0.1)) == place(optimizer=rate(0.1)) != place(optimizer=rate(0.2))
    net = Features()
    assert place(net=net) == place(net=copy.deepcopy(net)) != place(net=Features())
    assert place(net=Features) == place(net=Features) != place(net=lambda: Features(8))
    assert place(method=Doubled()) == place(method=Doubled()) != place(method=Doubled(factor=3.0))
    one, two = lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.Adam(p, 0.1)
    assert place(optimizer=one) != place(optimizer=two)


def test_a_digest_looks_into_everything_once_and_ends() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    deep: list[Any] = []
    for number in range(5000):
        deep = [number, deep]
    assert objects.digest(endless) == objects.digest(endless)
    assert objects.digest(deep) == objects.digest(deep) != objects.digest([0, deep])
    many = [functools.partial(adamw, number) for number in range(50)]
    found = {objects.digest([*many[:number], functools.partial(adamw, -1), *many[number + 1 :]]) for number in range(50)}
    assert len(found) == 50, "each counts, wherever it stands"


def test_code_without_source_has_a_digest_of_what_it_was_compiled_to() -> None:
    def made(text: str) -> str:
        space: dict[str, Any] = {"__name__": "nowhere"}
        exec(text, space)  # as an interactive line is
        return objects.digest(space["f"])

    assert made("def f(x): return x + 1") == made("def f(x): return x + 1") != made("def f(x): return x + 2")
    assert made("class f:\n  def g(self): return 1") != made("class f:\n  def g(self): return 2")


def test_an_opaque_text_is_no_expression() -> None:
    with pytest.raises(UserError, match="stands for an object that a program gave"):
        spec.parse_method("doubled()@0123456789ab")
