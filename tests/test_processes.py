"""Several processes that learn as one: the losses of one process, checkpoints for any number of processes, a process that dies."""

from __future__ import annotations

import os
import shutil
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F

from commands import gracecl, only_run, records
from gracecl import Learner, processes
from gracecl.errors import UserError
from gracecl.inputs import loaded
from gracecl.lab.runs.group import summary
from gracecl.lab.runs.run import Interrupted, RunConfig, Work
from gracecl.nets import sharing
from stopping import StopAfter

WORLD = 2
STEPS, HALF = 50, 25
METHODS = ("er", "derpp", "scr", "mose", "grace(mose())", "best", "slda")
WITHOUT_MEMORY = "slda"
CLOSE = 1e-5
LOGGED_CLOSE = 1e-3
"""of what is recorded and no loss: entropies as deviations from their mean, divided by a small spread"""
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed")


def blocks(dropout: float = 0.0) -> nn.Module:
    """Four blocks with BatchNorm, and without the kinks of ReLU, at which rounding becomes a step of the gradient."""

    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.Tanh(), nn.Dropout(dropout))

    return nn.Sequential(block(3, 6), block(6, 8), block(8, 8), block(8, 8))


def with_dropout() -> nn.Module:
    return blocks(0.5)


def learner(method: str, **more: Any) -> Learner:
    options = {"net": blocks, "optimizer": "sgd(lr=0.0025)", "classes": 8, "shape": (3, 16, 16), "memory": 40, "device": "cpu"}
    return Learner(method, **options | more)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Four tasks of two classes each; 11 images, which two processes cannot share equally."""
    rng = np.random.default_rng(0)
    prototypes = rng.integers(0, 256, (8, 3, 16, 16))
    for step in range(STEPS):
        task = step * 4 // STEPS
        y = rng.integers(2 * task, 2 * task + 2, 11)
        noise = rng.integers(0, 256, (11, 3, 16, 16))
        yield (0.6 * prototypes[y] + 0.4 * noise).astype(np.uint8), y, task


def learned(one: Learner, first: int = 0, last: int = STEPS) -> list[dict[str, list[float]]]:
    return [one.learn(x, y, task) for x, y, task in list(batches())[first:last]]


def close(found: list[dict[str, list[float]]], wanted: list[dict[str, list[float]]]) -> None:
    assert len(found) == len(wanted)
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.keys() == other.keys()
        for row, values in one.items():
            within = LOGGED_CLOSE if row.startswith("log/") else CLOSE
            np.testing.assert_allclose(values, other[row], rtol=within, atol=within, err_msg=f"{row} at step {step}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def process(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    found: dict[str, Any] = {"ram": {}, "memory": {}}
    x, y, _ = next(batches())
    for method in METHODS:
        one = learner(method, store="sharded")
        losses = learned(one, last=HALF)
        if method == "er":
            one.save(folder / "after_half_of_two.safetensors")
        losses += learned(one, HALF)
        images = one.net.meter.forward
        probabilities = one.predict_proba(x) if method != WITHOUT_MEMORY else one.predict(x)
        found[method] = losses, weights(one), images, probabilities
        found["memory"][method] = content(one)
        if method != WITHOUT_MEMORY:
            found["ram"][method] = learned(one := learner(method), last=HALF)
        if method == "er":
            if rank == 0:  # by itself, and the other does not wait for it
                one.save(folder / "after_half.safetensors")
                one.predict(x)
            found["ram"][method] += learned(one, HALF, HALF + 3)
    found["continued"] = learned(Learner.load(folder / "of_one.safetensors", net=blocks), HALF)
    local = learner("er", sharing="local_norm")
    found["local"] = learned(local, last=8), weights(local)
    for given in (x, folder / "lone.safetensors"):
        one = learner("scr", store="sharded")
        learned(one, last=2)
        lone = one.save if isinstance(given, Path) else one.predict
        with pytest.raises(UserError) as error:
            lone(given) if rank == 0 else one.learn(x, y)
        found.setdefault("lone", []).append(str(error.value))
    processes.PATIENCE = 0.05
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        time.sleep(rank)
        one.predict(x)
        found["said"] = [str(one.message) for one in said]
    for name, refused in {"dropout": learner("er", net=with_dropout), "batches": learner("er")}.items():
        with pytest.raises(UserError) as error:
            refused.learn(x, y if name == "dropout" else np.full_like(y, rank))
        found[name] = str(error.value)
    found["alone"] = learned(learner("er", sharing="off"), last=4) if rank == 0 else []
    torch.save(found, folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def content(one: Learner) -> tuple[Tensor, np.ndarray]:
    """Return the images that a learner keeps, slot after slot, and their labels."""
    images, labels, _ = one.engine.memories.replay.examples
    return loaded(images), labels


def weights(one: Learner) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in one.net.state_dict().values()])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    """Of every term and layer at every step, with a memory spread over them; they are the bits of a memory in each process. Either
    goes on from the other's checkpoint.
    """
    alone = {method: learner(method, store="sharded") for method in METHODS}
    losses = {}
    for method, one in alone.items():
        losses[method] = learned(one, last=HALF)
        if method == "er":
            one.save(tmp_path / "of_one.safetensors")
        losses[method] += learned(one, HALF)
    multiprocessing.spawn(process, (free_port(), tmp_path), nprocs=WORLD)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(WORLD))
    for method, one in alone.items():
        found, of_first, _, predicted = first[method]
        _, of_second, images, _ = second[method]
        close(found, losses[method])
        assert torch.equal(of_first, of_second), f"{method}: the processes have one net"
        assert images == one.net.meter.forward, "a process counts the images of all"
        for of_two, of_one in zip(first["memory"][method], content(one), strict=True):
            np.testing.assert_array_equal(of_two, of_one)
        x = next(batches())[0]
        wanted = one.predict_proba(x) if method != WITHOUT_MEMORY else one.predict(x)
        np.testing.assert_allclose(predicted, wanted, atol=1e-3)
    close(first["continued"], losses["er"][HALF:])
    for method, of_ram in first["ram"].items():
        assert of_ram == first[method][0][: len(of_ram)]
    for name in ("after_half", "after_half_of_two"):
        close(learned(Learner.load(tmp_path / f"{name}.safetensors", net=blocks), HALF), losses["er"][HALF:])
    for of_first, of_second in zip(first["lone"], second["lone"], strict=True):
        assert of_first.startswith("one process reads images of the memory that the others do not")
        assert "or one of them made another call that needs all" in of_second
    assert not (tmp_path / "lone.safetensors").exists()
    assert first["said"][0].startswith(
        "this process waits for the others to read the same images of the memory; with store='sharded'"
    )
    assert torch.equal(first["local"][1], second["local"][1])
    assert first["local"][0][1] != losses["er"][1], "each process has its own batch statistics"
    assert "draws random numbers in training" in first["dropout"]
    assert "were given different batches" in first["batches"]
    close(first["alone"], losses["er"][:4])


MORTAL = '''
import os, signal
from torch import nn
from gracecl.lab.runs import run
from gracecl.nets import ModuleBackbone
from gracecl.registry import nets

if os.environ.get("RANK") == "0":
    run.SECONDS_BETWEEN_CHECKPOINTS = 0.0  # by the clock of the first process each step is to be saved

class Mortal(nn.Module):
    """Its second process dies in the ninth training pass."""
    passes = 0
    def forward(self, x):
        Mortal.passes += self.training
        if Mortal.passes == 9 and os.environ.get("RANK") == "1" and os.path.exists(os.environ["DEADLY"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return x

@nets.register("mortal")
def mortal(shape, taps, at_most):
    """A net that dies."""
    block = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.Tanh())
    module = nn.Sequential(Mortal(), block(shape[0], 4), block(4, 4))
    return ModuleBackbone(module, None, taps, at_most, (1, *shape))
'''
SETTINGS: dict[str, Any] = {
    "stream": "split-digits(size=8, classes='0-3', tasks=2)",
    "net": "mortal",
    "memory": 20,
    "augment": "none",
    "optimizer": "sgd(lr=0.01)",
    "steps": 16,
    "checkpoint_every": 5,
}
SHARDED = ("--store", "sharded")
OPTIONS = [text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_process_that_dies_leaves_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sentence says so; one and four processes continue what two began, and two what one began, with the record of one alone.
    Memories are spread over the processes, and once they are in each.
    """
    plugin, deadly = tmp_path / "mortal.py", tmp_path / "deadly"
    plugin.write_text(MORTAL)
    deadly.touch()
    monkeypatch.setenv("DEADLY", str(deadly))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = RunConfig(method="er", device="cpu", **SETTINGS)
    whole = Work.new(config, tmp_path / "whole", plugins=(str(plugin),)).run(threads=1)
    said = gracecl(
        "run", "er", *OPTIONS, "--device", "cpu", "--plugin", plugin, "--out", tmp_path / "two", "--nproc", "2", *SHARDED
    )
    assert said.code == 2, said.err
    assert said.err.count("process 2 of 2 was ended by SIGKILL, and the others with it; continue with the same command") == 1
    assert not {"Traceback", "Terminating"} & set((said.err + capfd.readouterr().err).split())
    deadly.unlink()
    two = only_run(tmp_path / "two")
    assert not (two / "summary.json").exists()
    shutil.copytree(tmp_path / "two", tmp_path / "four")
    assert gracecl("resume", two).code == 0
    one = Work.new(config, tmp_path / "one", plugins=(str(plugin),))
    with pytest.raises(Interrupted):
        one.run(StopAfter(7), threads=1)
    for count, out in ((2, tmp_path / "one"), (4, tmp_path / "four")):
        said = gracecl("resume", out, "--nproc", str(count))
        assert said.code == 0, said.err
        assert f'"processes": {count}' in (only_run(out) / "config.json").read_text()
    for folder in (two, one.folder, only_run(tmp_path / "four")):
        assert same_record(records(folder), records(whole))


def same_record(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    """Return whether two records have the same lines, with losses that are close."""
    assert [(line["kind"], line["step"]) for line in found] == [(line["kind"], line["step"]) for line in wanted]
    steps = [[line["rows"] for line in lines if line["kind"] == "step"] for lines in (found, wanted)]
    close(*steps)
    return [line["accuracy"] for line in found if line["kind"] == "eval"] == [
        line["accuracy"] for line in wanted if line["kind"] == "eval"
    ]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.linear(x), self.linear(x).tanh()])


def test_the_shares_of_two_processes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features and gradients of each process's images, where nothing is sent; few images are not shared."""
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: None)
    torch.manual_seed(0)
    net, x, towards = TwoLayers(), torch.randn(5, 3, requires_grad=True), torch.randn(2, 5, 4)
    learned = [*net.linear.parameters(), x]

    def result(features: Tensor) -> list[Tensor]:
        return [features, *torch.autograd.grad((features * towards[:, : features.shape[1]]).sum(), learned)]

    parts = []
    for rank in range(2):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        parts.append(result(sharing.features_of_all(net, x, "exact")))
        with sharing.alone():
            assert torch.equal(sharing.features_of_all(net, x, "exact"), net(x))
        assert torch.equal(sharing.features_of_all(net, x[:3], "exact"), net(x[:3]))
        assert torch.equal(sharing.features_of_all(net, x, "off"), net(x))
        (features := sharing.features_of_all(net, x, "exact")).sum().backward()
        assert features.shape == (2, 5, 4)
        assert net.unused.weight.grad is None
    for one, other, whole in zip(*parts, result(net(x)), strict=True):
        torch.testing.assert_close(one + other, whole)
        assert not torch.equal(one, whole)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("affine", [True, False])
def test_the_norm_of_all_processes_is_batch_norm(affine: bool) -> None:
    """Values, gradients and running statistics."""
    torch.manual_seed(0)
    x = 3 + torch.randn(5, 2, 3, 3, dtype=torch.float64)
    scale, shift = (torch.randn(2, dtype=torch.float64) if affine else None for _ in range(2))
    towards = torch.randn_like(x)
    found = []
    for norm in (sharing._norm_of_all, F.batch_norm):
        inputs = [value.clone().requires_grad_() for value in (x, scale, shift) if value is not None]
        mean, var = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        y = norm(inputs[0], mean, var, *(inputs[1:] or (None, None)), True, 0.3, 1e-3)
        found.append([y, mean, var, *torch.autograd.grad((y * towards).sum(), inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("er() + ewc()", {}, "ewc was not shown to learn in several processes what it learns in one; use one process"),
        ("er", {"compile": True}, "compile is for one process"),
        ("er", {"store": "disk"}, "a memory on disk belongs to one process"),
        ("er", {"store": "sharded", "sharing": "off"}, "and with sharing='off' each learns by itself; use --store ram"),
    ],
)
def test_what_a_group_refuses(method: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(UserError, match=words):
        learner(method, **options)
    monkeypatch.setattr(processes, "count", lambda: 1)
    if method != "er":
        learner(method)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc", "0"], "--nproc must be between 1 and 1024, not 0"),
        (["--nproc", "2", "--jobs", "2"], "with --nproc runs go one after the other on this machine; leave --jobs out"),
    ],
)
def test_what_the_command_refuses(options: list[str], words: str, tmp_path: Path) -> None:
    said = gracecl("run", "er", "--stream", "split-digits", "--out", tmp_path, *options)
    assert said.code == 2
    assert words in said.sentence


def test_one_message_for_all_processes() -> None:
    """A refusal before what it led to elsewhere, and the cause of a crash before those who lost a process."""
    lost = ("crashed", "Traceback … distributed.all_reduce(whole) … Connection closed by peer")
    assert summary({0: lost, 1: ("refused", "the disk is full")}) == ("refused", "the disk is full")
    assert summary({0: lost, 1: ("crashed", "out of memory")}) == ("crashed", "out of memory")
    assert summary({0: ("finished", ""), 1: ("finished", "")}) == ("finished", "")
