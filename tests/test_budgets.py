"""Budgets of FLOPs and bytes, and streams with a speed: the arithmetic, what a learner then does, and whole runs."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import gracecl, only_run
from gracecl import checkpoint
from gracecl.data import from_arrays
from gracecl.engine.allotment import Allotment, allot, slots_within
from gracecl.engine.cost import StepCost, bytes_kept, dry_run, flops, forward_flops
from gracecl.engine.engine import Engine
from gracecl.engine.footprint import bytes_by_part
from gracecl.engine.loop import Log, Loop
from gracecl.engine.prequential import predict
from gracecl.errors import UserError
from gracecl.files import sizes_in
from gracecl.functional.budgets import complexity, learned_batches, model_version, updates_at, updates_before
from gracecl.lab.runs.run import Interrupted, RunConfig, learner_and_stream, run
from gracecl.registry import quantity
from gracecl.registry.options import run_name
from gracecl.streams import Stream, stream
from gracecl.streams.paced import paced
from stopping import StopAfter

STREAM = "split-digits(size=8, classes='0-3', tasks=2)"
NET = "mlp(width=16, depth=4)"
OPTIONS: dict[str, Any] = {"stream": STREAM, "net": NET, "memory": 40, "device": "cpu", "checkpoint_every": 5}
F = Fraction(560_000_000)
"""FLOPs of an image's forward pass in the worked examples"""
IMAGES = {"er": (74, 74), "sgd": (10, 10), "mir": (184, 84), "mose": (384, 384)}


def cost(step: Any = 1, *, beside: Any = 0, updates: Any = 1, fixed: int = 0, slot: int = 0) -> StepCost:
    return StepCost(F, Fraction(step), Fraction(beside), Fraction(updates), fixed, slot)


def worked(method: str) -> Fraction:
    return Fraction(flops(F, *IMAGES[method]))


def allotted(own: StepCost, references: dict[str, StepCost] | None = None, **options: Any) -> Allotment:
    """What a learner of this cost gets."""
    given = {"method": "mine()", "trains": "stream", "memory": 1000, "steps": 100, "evaluations": 5}
    given |= {name: options.pop(name) for name in list(options) if name in given}
    return allot(options, lambda method: own if method is None else (references or {})[method], **given)


# Amounts as text.


@pytest.mark.parametrize(
    ("text", "option", "number", "method", "per"),
    [
        ("2G/step", "budget", 2 * 10**9, None, "step"),
        ("500G", "budget", 500 * 10**9, None, ""),
        (" 1.5 T / step ", "budget", 15 * 10**11, None, "step"),
        ("7", "budget", 7, None, ""),
        ("er()/step", "budget", 1, "er()", "step"),
        ("0.5 * er(n_recall=32)", "budget", Fraction(1, 2), "er(n_recall=32)", ""),
        ("grace(er())", "pace", 1, "grace(er())", ""),
        ("2GFLOPs/batch", "pace", 2 * 10**9, None, "batch"),
        ("4MB", "bytes", 4 * 10**6, None, ""),
        ("512KiB", "bytes", 512 * 1024, None, ""),
        ("3 kB", "bytes", 3000, None, ""),
    ],
)
def test_amounts_are_read(text: str, option: str, number: Any, method: str | None, per: str) -> None:
    assert quantity.parse(text, option) == quantity.Quantity(Fraction(number), method, per)


@pytest.mark.parametrize("text", ["", "0", "-2G", "2Q/step", "2G/second", "0 * er()", "2e400"])
def test_what_is_no_amount_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r"--budget is an amount above 0 such as 2G/step"):
        RunConfig("er()", **OPTIONS, budget=text)


def test_an_amount_is_shown_with_three_digits_and_a_prefix() -> None:
    assert [quantity.shown(n, "FLOP") for n in (124.32e9, 999, 0, 1000)] == ["124 GFLOP", "999 FLOP", "0 FLOP", "1 kFLOP"]


# Budgets of FLOPs.


def test_flops_of_the_worked_steps() -> None:
    """A backward pass counts as two forward passes."""
    assert {name: float(worked(name)) / 1e9 for name in IMAGES} == {"er": 124.32, "sgd": 16.8, "mir": 197.12, "mose": 645.12}


def test_updates_of_the_worked_budget() -> None:
    """In 100 steps at ER's price: SGD 740, ER 100, MIR 63, MOSE 19, spread evenly and a function of the step."""
    budget = worked("er")
    made = {name: updates_before(100, budget / worked(name)) for name in IMAGES}
    assert made == {"er": 100, "sgd": 740, "mir": 63, "mose": 19}
    for name in IMAGES:
        each = [updates_at(step, budget / worked(name)) for step in range(100)]
        assert sum(each) == made[name]
        assert max(each) - min(each) <= 1


def test_a_budget_limits_updates_and_never_adds_any() -> None:
    """What a step takes beside its updates comes off first; a method that is cheap enough is left alone."""
    budget = "124.32G/step"
    assert allotted(cost(worked("mir")), budget=budget).updates == Fraction(74 * 3, 184 + 2 * 84)
    assert allotted(cost(worked("er")), budget=budget) == Allotment()
    assert allotted(cost(worked("sgd")), budget=budget) == Allotment()
    assert allotted(cost(100, beside=20, updates=4), budget="60/step").updates == 2
    assert allotted(cost(100), budget="5000").updates == Fraction(1, 2), "a total is shared out over 100 steps"
    assert allotted(cost(100), {"er()": cost(80)}, budget="0.5 * er()").updates == Fraction(2, 5)
    assert allotted(cost(100), {"er()": cost(80)}, budget="er()/step").updates == Fraction(4, 5)


def test_a_budget_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="makes no updates that could be left out"):
        allotted(cost(100, beside=100, updates=0), budget="60/step")
    with pytest.raises(UserError, match="not one update in 100 steps"):
        allotted(cost(100), budget="0.9/step")
    with pytest.raises(UserError, match="not one update"):
        allotted(cost(100, beside=70), budget="60/step")
    with pytest.raises(UserError, match=r"gdumb\(\) computes nothing while the stream passes"):
        allotted(cost(100), {"gdumb()": cost(0)}, budget="gdumb()")


def test_fits_share_what_the_steps_were_allowed() -> None:
    """100 steps of 30 image passes each (forward, and backward twice) are 1,000 images; five fits get 200 each."""
    own = cost(0, updates=0)
    assert allotted(own, budget=f"{30 * int(F)}/step", trains="evaluation").fit_images == 200
    assert allotted(own, budget=f"{3000 * int(F)}", trains="evaluation").fit_images == 200
    with pytest.raises(UserError, match="not one image before each of 5 evaluations"):
        allotted(own, budget="1/step", trains="evaluation")


# Budgets of bytes.


def test_slots_of_the_worked_bytes() -> None:
    """At the bytes of ER with 1,000 images, DER++ with its logits of 100 classes keeps 885."""
    net = 4 * 11_220_132
    er, derpp = cost(fixed=net, slot=3072 + 8), cost(fixed=net, slot=3072 + 8 + 400)
    whole = er.fixed + 1000 * er.slot
    assert whole == 47_960_528
    assert slots_within(Fraction(whole), derpp, 1000) == 885
    assert allotted(derpp, {"er()": er}, bytes="er()").memory == 885
    assert allotted(er, bytes=str(whole)).memory == 1000
    assert allotted(er, bytes=str(whole - 1)).memory == 999
    assert allotted(er, bytes="1GB").memory == 1000, "a limit is no gift"
    assert allotted(cost(fixed=net), bytes=str(net)).memory == 1000, "what keeps no image has no slots to lose"
    assert net // er.slot == 14_571, "images that one teacher is worth"
    with pytest.raises(UserError, match=r"keeps 44.9 MB without any image in its memory, and --bytes allows 44 MB"):
        allotted(er, bytes="44MB")


def test_bytes_are_counted_by_part() -> None:
    """Of a state made by hand, as a checkpoint holds it: every part has a size of its own."""
    one = np.zeros(1, np.uint8)

    def sized(count: int) -> Any:
        return np.repeat(one, count)

    net = {"classifier.weight": sized(100), "backbone.running": sized(20), "extras.head.weight": sized(3)}
    store = {"images": {"a": sized(1000), "b": sized(200)}, "labels": sized(40), "attributes": {"logits": sized(5)}, "offered": 7}
    state = {
        "memories": {"replay": store, "second": {"images": sized(1), "labels": sized(1), "attributes": {}}},
        "net": net,
        "optimizer": {"state": {0: {"exp_avg": sized(50), "step": sized(4)}}, "param_groups": [{"lr": 0.1}]},
        "method": [
            {"teacher": {"copy": {"classifier.weight": sized(100), "other": sized(6)}, "classes": sized(8)}},
            {"sums": sized(9)},
        ],
    }
    assert bytes_by_part(state) == {
        "images": 1201,
        "labels": 41,
        "values": 5,
        "net": 120,
        "extras": 3,
        "optimizer": 54,
        "teachers": 106,
        "statistics": 17,
    }


def learned(method: str, steps: int = 40, **options: Any) -> Engine:
    engine, order = learner_and_stream(RunConfig(method, **OPTIONS | options))
    for step in range(steps):
        engine.learn(order.batch(step))
    return engine


def hand_count(engine: Engine) -> dict[str, int]:
    """The net's own entries, and Adam's two moments and a counter for each weight that gets gradients; projectors get none."""
    trained = [4 * value.numel() for name, value in engine.net.named_parameters() if not name.startswith("projector")]
    entries = [value.nbytes for value in engine.net.state_dict().values()]
    return {"net": sum(entries), "optimizer": 2 * sum(trained) + 4 * len(trained), "extras": 0}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["er()", "derpp()", "sgd(classes='current') + lwf()", "mkd(er())"])
def test_bytes_kept_equal_a_count_by_hand(method: str) -> None:
    """40 images of 8 × 8 bytes with labels of 8, DER++'s logits of 4 classes, LwF's teacher with its flag of each class, MKD's
    average.
    """
    engine = learned(method)
    expected = {"images": 40 * 64, "labels": 40 * 8, "values": 0, "teachers": 0, "statistics": 0} | hand_count(engine)
    net = expected["net"]
    own: dict[str, dict[str, int]] = {
        "derpp()": {"values": 40 * 4 * 4},
        "sgd(classes='current') + lwf()": {"images": 0, "labels": 0, "teachers": net, "statistics": 4},
        "mkd(er())": {"teachers": net},
    }
    assert bytes_kept(engine) == expected | own.get(method, {})


def test_bytes_of_a_closed_form_are_its_sums() -> None:
    """SLDA keeps a mean and a count per class and one covariance, and no optimizer ever ran."""
    engine = learned("slda()", steps=5)
    found = bytes_kept(engine)
    assert found["images"] == found["optimizer"] == found["teachers"] == 0
    width = engine.net.backbone.width
    assert found["statistics"] >= 8 * width * width


def test_modules_that_methods_add_are_counted_apart() -> None:
    engine = learned("scr()", steps=1)
    found, state = bytes_kept(engine), engine.net.state_dict()
    of_scr = [value.nbytes for name, value in state.items() if name.startswith("extras.")]
    assert of_scr
    assert (found["extras"], found["net"]) == (sum(of_scr), sum(value.nbytes for value in state.values()) - sum(of_scr))


# What a learner does with fewer updates.


def test_a_limited_learner_updates_at_some_steps_and_stores_at_all() -> None:
    """At u = 2/3 no update comes at step 0 and every third after; before the first, nothing is stored."""
    engine, order = learner_and_stream(RunConfig("er()", **OPTIONS))
    engine.updates_per_step = Fraction(2, 3)
    made, held = [], []
    for step in range(6):
        before = engine.net.meter.forward
        outcome = engine.learn(order.batch(step))
        made.append(0 if outcome is None else outcome.updates)
        held.append(engine.memories.replay.offered)
        assert (engine.net.meter.forward > before) == bool(made[-1]), "a step without update computes nothing"
    assert made == [0, 1, 1, 0, 1, 1]
    assert held == [0, 10, 20, 30, 40, 50]
    assert engine.progress.step == 6


def test_values_that_only_an_update_gives_keep_images_out() -> None:
    """DER++ stores the logits of its update beside an image; without one the image would stand there with zeros."""
    engine, order = learner_and_stream(RunConfig("derpp()", **OPTIONS))
    engine.updates_per_step = Fraction(1, 2)
    for step in range(6):
        engine.learn(order.batch(step))
    assert engine.memories.replay.offered == 30
    assert bool((engine.memories.replay.attributes["logits"][:30] != 0).flatten(1).any(dim=1).all())


def test_several_updates_of_a_step_are_cut_to_what_is_allowed() -> None:
    engine, order = learner_and_stream(RunConfig("er(mem_iters=4)", **OPTIONS))
    engine.updates_per_step = Fraction(5, 2)
    made = [engine.learn(order.batch(step)) for step in range(4)]
    assert [outcome.updates for outcome in made if outcome is not None] == [2, 3, 2, 3]


@pytest.mark.slow
def test_a_dry_run_measures_a_full_memory_and_moves_nothing_of_the_run() -> None:
    """ER with 10 new and 64 drawn images, of which the memory holds 40; MIR scores those before and after a virtual step."""
    costs = {
        method: dry_run(*learner_and_stream(RunConfig(method, **OPTIONS))) for method in ("sgd()", "er()", "mir(10)", "slda()")
    }
    f = costs["er()"].per_image
    assert {method: found.step / f for method, found in costs.items()} == {
        "sgd()": 10 * 3,
        "er()": 50 * 3,
        "mir(10)": (10 + 2 * 40 + 20) + 2 * (10 + 20),
        "slda()": 10,
    }
    assert [found.updates for found in costs.values()] == [1, 1, 1, 0]
    assert (costs["slda()"].beside, costs["er()"].beside, costs["er()"].slot) == (10 * f, 0, 64 + 8)


# Streams with a speed, and labels that come late.


def test_batches_and_versions_of_the_worked_complexities() -> None:
    expected = {
        "1": (list(range(10)), list(range(10))),
        "2": ([0, 2, 4, 6, 8], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
        "4/3": ([0, 1, 2, 4, 5, 6, 8, 9], [0, 1, 2, 2, 3, 4, 5, 5, 6, 7]),
        "5/2": ([0, 2, 5, 7], [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]),
        "3": ([0, 3, 6, 9], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]),
    }
    for text, (trained, versions) in expected.items():
        assert learned_batches(10, Fraction(text)).tolist() == trained
        assert [model_version(batch, Fraction(text)) for batch in range(10)] == versions
        literal = [max(j for j in range(11) if j * Fraction(text) // 1 <= batch) for batch in range(10)]
        assert literal == versions


def test_a_complexity_is_a_fraction_of_at_most_sixths() -> None:
    """RWalk in its paper: 1309.11 to 657.93 GFLOP are 2; MIR and MOSE at ER's pace."""
    assert complexity(Fraction("1309.11"), Fraction("657.93")) == 2
    assert complexity(worked("mir"), worked("er")) == Fraction(8, 5)
    assert complexity(worked("mose"), worked("er")) == Fraction(26, 5)
    assert complexity(Fraction(17), Fraction(6)) == Fraction(17, 6)
    assert complexity(Fraction(15), Fraction(7)) == Fraction(13, 6)
    assert allotted(cost(250), {"er()": cost(50)}, pace="2 * er()").complexity == Fraction(5, 2)
    assert allotted(cost(250), pace="100/batch").complexity == Fraction(5, 2)


def numbered(tasks: int = 2, batches: int = 10, size: int = 4) -> Stream:
    """A stream whose images hold their own number."""
    images = tasks * batches * size
    x = torch.arange(images, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous().numpy()
    y = np.repeat(np.arange(tasks), batches * size)
    return stream(from_arrays(x, y, x, y), tasks=tasks, batch=size, order="natural")


@pytest.mark.parametrize("text", ["2", "4/3", "5/2", "3"])
def test_a_paced_stream_shows_every_batch_to_the_model_that_would_predict_it(text: str) -> None:
    """Arrivals of learned batch j are the batches i with v(i) = j, whole and in order."""
    whole, c = numbered(), Fraction(text)
    made = paced(whole, c)
    trained = [batch for batch in learned_batches(len(whole), c).tolist() if model_version(len(whole), c) > 0][: len(made)]
    for step, batch in enumerate(trained):
        assert np.array_equal(made.batch(step).x, whole.batch(batch).x)
        assert made.batch(step).task == whole.batch(batch).task
        own = [number for number in range(len(whole)) if min(model_version(number, c), len(made) - 1) == step]
        x, labels = made.arrivals(step)
        assert np.array_equal(x, torch.cat([whole.batch(number).x for number in own]))
        assert np.array_equal(labels, np.concatenate([whole.batch(number).labels for number in own]))
    assert [int(mark) for mark in made.marks] == [model_version(int(mark) + 1, c) - 1 for mark in whole.marks]
    assert made.marks[-1] == len(made) - 1
    assert made.hash == whole.hash, "it is the same stream, of which less is learned"


class Recording(Log):
    """Keeps what was predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def write(self, lines: list[dict[str, Any]]) -> None:
        self.lines += [line for line in lines if line["kind"] == "prequential"]


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 2])
def test_stale_models_predict_what_arrives(late: int) -> None:
    """Against a literal loop: at C = 5/2 every batch is predicted by a copy of the model of its version; and so are late labels."""
    c, made = Fraction(5, 2), config("er()", steps=24, stream=f"delayed({STREAM}, {late})")
    engine, order = learner_and_stream(made, allotted=Allotment(complexity=c))
    whole, log = learner_and_stream(config("er()", steps=24 + late))[1], Recording()
    Loop(engine, order.batch, steps=len(order), log=log, test=order, prequential=True).run()
    learner, _ = learner_and_stream(made)
    models = [copy.deepcopy(learner)]
    for step in range(len(order)):
        learner.learn(order.batch(step))
        models.append(copy.deepcopy(learner))
    expected: list[int] = []
    for batch in range(24 + late):
        version = model_version(max(batch - late, 0), c)
        expected += predict(models[min(version, len(order) - 1)], whole.batch(batch)).predictions.tolist()
    assert [guess for line in log.lines for guess in line["predictions"]] == expected
    assert [line["step"] for line in log.lines] == list(range(len(order)))


def test_a_learner_that_keeps_up_has_the_stream_itself() -> None:
    whole = numbered()
    assert paced(whole, Fraction(1)) is whole
    assert paced(whole, Fraction(5, 6)) is whole
    x, labels = whole.arrivals(3)
    assert np.array_equal(x, whole.batch(3).x)
    assert np.array_equal(labels, whole.batch(3).labels)


def test_tasks_too_short_for_a_learner_are_named() -> None:
    with pytest.raises(UserError, match="tasks of 10 batches are too short"):
        paced(numbered(), Fraction(25))


def test_late_labels_are_predicted_before_they_come() -> None:
    """At delay 2 the untrained model predicts batches 0 to 2, the model of batch 0 predicts batch 3, and so on."""
    whole = numbered()
    late = stream(whole.data, family="delayed(split(tasks=2, batch=4), 2)")
    drained = stream(whole.data, family="delayed(split(tasks=2, batch=4), 2, drain=True)")
    for made in (late, drained):
        asked = [made.arrivals(step).x[:, 0, 0, 0].tolist() for step in range(len(made))]
        batches = [whole.batch(step).x[:, 0, 0, 0].tolist() for step in range(20)]
        assert asked[0] == [image for batch in batches[:3] for image in batch]
        assert asked[1:18] == batches[3:]
        assert asked[18:] == [[], []][: len(made) - 18]


# Whole runs.


def config(method: str, **options: Any) -> RunConfig:
    return RunConfig(method, **OPTIONS | options)


def engine_state(folder: Path) -> dict[str, Any]:
    return checkpoint.load(folder / "checkpoint.safetensors")["trainer"]["engine"]  # type: ignore[no-any-return]


def test_options_left_out_leave_a_run_its_name() -> None:
    settings = vars(config("er()"))
    older = {name: value for name, value in settings.items() if name not in ("budget", "bytes", "pace")}
    assert run_name(settings) == run_name(older)
    assert run_name(settings | {"pace": "er()"}) != run_name(settings)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"budget": "er()"}, {"pace": "er()"}, {"bytes": "er()"}, {"budget": "1T", "pace": "2 * er()"}])
def test_limits_that_are_wide_enough_change_nothing(limit: dict[str, str], tmp_path: Path) -> None:
    """Bit for bit: the record, and the bytes of every weight."""
    one, other = run(config("er()"), tmp_path / "free"), run(config("er()", **limit), tmp_path / "limited")
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    nets = [engine_state(folder)["net"] for folder in (one, other)]
    assert all(torch.equal(nets[0][name], nets[1][name]) for name in nets[0])


@pytest.mark.slow
def test_half_the_pace_learns_every_second_batch(tmp_path: Path) -> None:
    """The weights are those of a learner that is given every second batch and nothing else."""
    folder = run(config("er()", pace="0.5 * er()"), tmp_path)
    assert json.loads((folder / "config.json").read_text())["allotted"] == {"complexity": "2"}
    engine, order = learner_and_stream(config("er()"))
    positions = iter(range(10**6))
    for step in range(0, len(order), 2):
        batch = order.batch(step)
        engine.learn(replace(batch, sources=np.array([next(positions) for _ in batch.labels]), last_of_task=False))
    net = engine_state(folder)["net"]
    assert all(torch.equal(value, net[name]) for name, value in engine.net.state_dict().items())


LIMITED: list[dict[str, str]] = [{"method": "derpp()", "budget": "er()"}, {"method": "mir()", "pace": "er()"}]
LIMITED += [{"method": "derpp()", "bytes": "er()"}, {"method": "gdumb(epochs=20)", "budget": "er()"}]


@pytest.mark.slow
@pytest.mark.parametrize("options", LIMITED, ids=lambda options: " ".join(options.values()))
def test_a_limited_run_that_is_interrupted_ends_with_the_same_bytes(options: dict[str, str], tmp_path: Path) -> None:
    whole = run(config(**options), tmp_path / "whole")
    for step in (7, 21):
        with pytest.raises(Interrupted):
            run(config(**options), tmp_path / "parts", watch=StopAfter(step))
    parts = run(config(**options), tmp_path / "parts")
    assert (whole / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    for name in ("summary.json", "accuracy.json"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    timing = [json.loads((folder / "timing.json").read_text()) for folder in (whole, parts)]
    counted = ("images", "forward", "backward", "fit_images", "flops", "bytes", "bytes_images", "steps")
    assert [timing[0][name] for name in counted] == [timing[1][name] for name in counted]


@pytest.mark.slow
def test_limited_runs_stay_within_their_limits(tmp_path: Path) -> None:
    """In FLOPs the whole run, in bytes the learner at its end; GDumb's fits share what the steps were allowed."""
    er = run(config("er()"), tmp_path)
    spent = json.loads((er / "timing.json").read_text())
    for method in ("derpp()", "gdumb(epochs=50)"):
        found = json.loads((run(config(method, budget="er()"), tmp_path) / "timing.json").read_text())
        assert 0.6 * spent["flops"] < found["flops"] <= 1.05 * spent["flops"], method  # ER's first steps draw fewer images
    found = json.loads((run(config("derpp()", bytes="er()"), tmp_path) / "timing.json").read_text())
    assert spent["bytes"] - 88 < found["bytes"] <= spent["bytes"]
    assert found["bytes_images"] == 64 * 32, "40 slots of 72 bytes hold 32 of 88 with the logits of four classes"


@pytest.mark.slow
def test_a_checkpoint_tells_its_bytes_without_being_read(tmp_path: Path) -> None:
    folder = run(config("mkd(derpp())", steps=30), tmp_path)
    engine, _ = learner_and_stream(config("mkd(derpp())"))
    engine.load_state_dict(engine_state(folder))
    assert bytes_by_part(sizes_in(folder / "checkpoint.safetensors", "trainer")["engine"]) == bytes_kept(engine)
    assert sizes_in(folder / "config.json", "trainer") is None


@pytest.mark.slow
def test_flops_are_counted_without_moving_the_net() -> None:
    engine, _ = learner_and_stream(config("er()", net="resnet18(width=8)", stream="split-digits(size=16, tasks=5)"))
    before = {name: value.clone() for name, value in engine.net.state_dict().items()}
    assert forward_flops(engine) > 0
    assert engine.net.training
    assert all(torch.equal(value, before[name]) for name, value in engine.net.state_dict().items())


@pytest.mark.slow
def test_the_command_takes_limits_and_refuses_impossible_ones(tmp_path: Path) -> None:
    small = ["--stream", STREAM, "--net", NET, "--memory", "40", "--device", "cpu", "--steps", "40", "--out", tmp_path]
    said = gracecl("run", "slda()", "--budget", "10/step", *small)
    assert said.code == 2
    assert "it makes no updates that could be left out" in said.err
    said = gracecl("run", "er()", "--bytes", "1kB", *small)
    assert said.code == 2
    assert "without any image in its memory" in said.err
    said = gracecl("run", "er()", "--pace", "fast", *small)
    assert said.code == 2
    assert "Traceback" not in said.err
    assert gracecl("run", "er()", "--budget", "0.5 * er()", *small).code == 0
    assert json.loads((only_run(tmp_path) / "config.json").read_text())["budget"] == "0.5 * er()"
