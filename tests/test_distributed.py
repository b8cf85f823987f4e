"""A tapped net and its feedback under DistributedDataParallel: two processes with images of their own."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import gracecl
from gracecl.functional.losses import cross_entropy

WORLD = 2
STEPS = 4
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed")


class Body(nn.Module):
    """Four blocks and a head of its own, which no tap depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6 if i == 0 else 12, 12), nn.ReLU()) for i in range(4)))
        self.head = nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def make() -> gracecl.nets.tapped.TappedNet:
    torch.manual_seed(0)
    return gracecl.tap(Body(), classes=4, example=torch.zeros(1, 6))


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all processes together."""
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(0, 4, (8 * WORLD,), generator=generator)
    return torch.eye(6)[y] + torch.randn(len(y), 6, generator=generator), y


def train(net: nn.Module, feedback: gracecl.Feedback, rank: int, world: int) -> dict[str, Any]:
    """Some steps on this process's share of the images; α and γ of each, and the weights at the end."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(STEPS):
        x, y = (part.chunk(world)[rank] for part in images(step))
        out = net(x)
        optimizer.zero_grad()
        feedback(out.logits, cross_entropy(out.logits, y), y).backward()
        optimizer.step()
        feedback.observe_past(net, *(part.chunk(world)[rank] for part in images(100)))
    weights = [value.detach().clone() for value in net.parameters()]
    return {"weights": weights, "history": feedback.history, "accuracy": feedback.accuracy}


OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
"""of DistributedDataParallel"""
CONTROLLER = "paper(beta=0.5, adaptive=True)"


def process(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    for name, options in OPTIONS.items():
        net = DistributedDataParallel(make(), **options)
        torch.save(train(net, gracecl.Feedback(4, CONTROLLER), rank, WORLD), folder / f"{name}-{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_have_one_net_and_one_feedback(tmp_path: Path) -> None:
    """The weights stay equal, and so do α and γ; together they make the steps of one process that has all the images."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(process, (port, tmp_path), nprocs=WORLD)
    for name in OPTIONS:
        check_equal(*(torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False) for rank in range(WORLD)))


def check_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    for one, other in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(one, other)
    for name in ("alpha", "gamma", "H"):
        assert (first["history"][name] == second["history"][name]).all(), name
    assert torch.equal(first["accuracy"], second["accuracy"])
    assert (first["history"]["alpha"][1:] != 1).any()
    alone = train(make(), gracecl.Feedback(4, CONTROLLER), 0, 1)
    for name in ("alpha", "gamma", "H"):
        of_both, of_one = (torch.from_numpy(run["history"][name]) for run in (first, alone))
        torch.testing.assert_close(of_both, of_one, rtol=1e-4, atol=1e-5)
    for one, other in zip(first["weights"], alone["weights"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_process_may_learn_by_itself(tmp_path: Path) -> None:
    """Without synchronisation nobody waits for a process that makes no calls."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(lone_process, (port,), nprocs=WORLD)


def lone_process(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    if rank == 0:
        train(make(), gracecl.Feedback(4, synchronise=False), 0, 1)
    distributed.destroy_process_group()
