"""Memories on disk and of JPEG bytes: the slots of one in RAM, exact resume whatever ends the process, bytes that are counted."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gracecl as library
from commands import gracecl, only_run
from gracecl import Learner, UserError
from gracecl.inputs import Images, Inputs, Parts, leaves, loaded
from gracecl.memory import Memories, Memory, on_disk
from gracecl.memory.on_disk import DiskMemory
from gracecl.testing import toy_stream
from waiting import wait_until

IMAGES = Images((3, 8, 8))
PARTS = Parts({"ids": Inputs((3,), torch.int64), "mask": Inputs((2, 2)), "deep": Images((1, 2, 2), dtype=torch.uint16)})
RUN = ("run", "er(n_recall=5)", "--net", "mlp(width=8)", "--augment", "none", "--memory", "60", "--checkpoint-every", "7")
STREAM = ("--stream", "split-digits(size=8, tasks=5, batch=10)", "--steps", "120")


def batch(inputs: Inputs, step: int, count: int = 10) -> Any:
    generator = torch.Generator().manual_seed(step)
    made = inputs.blank(count)
    for _, leaf in leaves(made):
        leaf.copy_(torch.randint(0, 200, leaf.shape, generator=generator).to(leaf.dtype))
    return made


def offer(memory: Memory, steps: range) -> None:
    for step in steps:
        memory.add(np.random.default_rng(step), batch(memory.inputs, step), np.arange(10) % 4, step // 5)


def same(one: Memory, other: Memory) -> bool:
    slots = np.arange(len(one))
    images = all(torch.equal(a, b) for (_, a), (_, b) in zip(leaves(one[slots]), leaves(other[slots]), strict=True))
    return images and np.array_equal(one.labels, other.labels) and one.offered == other.offered


@pytest.mark.parametrize("inputs", [IMAGES, PARTS])
@pytest.mark.parametrize("file", [None, "memory/replay"])
def test_a_memory_on_disk_is_the_one_in_ram(inputs: Inputs, file: str | None, tmp_path: Path) -> None:
    ram, disk = Memory(25, inputs), DiskMemory(25, inputs, file=tmp_path / file if file else None)
    for part in (range(4), range(4, 30)):
        offer(ram, part)
        offer(disk, part)
        assert same(ram, disk)
        again, other = DiskMemory(25, inputs), Memory(25, inputs)
        again.load_state_dict(disk.state_dict())
        other.load_state_dict(disk.state_dict())
        assert same(ram, again)
        assert same(ram, other)
    assert torch.equal(next(leaves(loaded(disk.examples.images)))[1], next(leaves(ram.examples.images))[1])


@pytest.mark.parametrize("inputs", [IMAGES, PARTS])
@pytest.mark.parametrize("moment", ["before the journal", "before the checkpoint", "before the file", "in the file", "after it"])
def test_the_last_checkpoint_is_exact_wherever_the_process_ends(
    inputs: Inputs, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies while it writes its second checkpoint; another one loads the last that is in its place, and goes on."""
    ram, disk = Memory(25, inputs), DiskMemory(25, inputs, file=tmp_path / "replay")
    for memory in (ram, disk):
        offer(memory, range(6))
    with disk.checkpointing():
        saved = deepcopy(disk.state_dict())
    end = 6
    for memory in (ram, disk):
        offer(memory, range(6, 12))
    if moment == "before the journal":
        monkeypatch.setattr(on_disk, "save_file", _dies)
    if moment == "before the file":
        monkeypatch.setattr(DiskMemory, "_apply", _dies)
    if moment == "in the file":
        monkeypatch.setattr(os, "fsync", _dies_at_the_memory(tmp_path / "replay"))
    try:
        with disk.checkpointing():
            if moment == "before the checkpoint":
                raise KeyboardInterrupt
            saved, end = deepcopy(disk.state_dict()), 12
    except KeyboardInterrupt:
        pass
    monkeypatch.undo()
    for memory in (ram, disk) if moment == "after it" else ():
        offer(memory, range(12, 15))  # which the file does not see
    expected, resumed = Memory(25, inputs), DiskMemory(25, inputs, file=tmp_path / "replay")
    offer(expected, range(end))
    resumed.load_state_dict(saved)
    assert same(expected, resumed)
    for memory in (expected, resumed):
        offer(memory, range(end, 40))
    with resumed.checkpointing():
        saved = resumed.state_dict()
    last = DiskMemory(25, inputs, file=tmp_path / "replay")
    last.load_state_dict(saved)
    assert same(expected, last)
    assert len(list(tmp_path.glob("*.journal"))) == 1


def _dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def _dies_at_the_memory(file: Path) -> Any:
    synced = os.fsync

    def fsync(handle: int) -> None:
        if os.fstat(handle).st_ino == file.stat().st_ino:
            raise KeyboardInterrupt
        synced(handle)

    return fsync


def test_a_checkpoint_that_fails_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    ram, disk = Memory(25, IMAGES), DiskMemory(25, IMAGES, file=tmp_path / "replay")
    for step in range(3):
        offer(ram, range(step * 4, step * 4 + 4))
        offer(disk, range(step * 4, step * 4 + 4))
        if step == 1:
            with pytest.raises(OSError, match="full"), disk.checkpointing():
                raise OSError("the disk is full")
        else:
            with disk.checkpointing():
                saved = disk.state_dict()
    again = DiskMemory(25, IMAGES, file=tmp_path / "replay")
    again.load_state_dict(saved)
    assert same(ram, again)


@pytest.mark.parametrize("damage", ["file", "journal", "no journal"])
def test_damage_is_noticed(damage: str, tmp_path: Path) -> None:
    disk = DiskMemory(25, IMAGES, file=tmp_path / "replay")
    for part in (range(6), range(6, 12)):
        offer(disk, part)
        with disk.checkpointing():
            saved = disk.state_dict()
    [journal] = tmp_path.glob("*.journal")
    broken = tmp_path / "replay" if damage == "file" else journal
    content = bytearray(broken.read_bytes())
    unchanged = next(slot for slot in range(25) if slot not in on_disk.load_file(journal)["slots"])
    content[unchanged * IMAGES.bytes + 5 if damage == "file" else -1] ^= 1
    broken.write_bytes(content)
    if damage == "no journal":
        journal.unlink()
    with pytest.raises(UserError, match="are not the memory that the checkpoint was written with"):
        DiskMemory(25, IMAGES, file=tmp_path / "replay").load_state_dict(saved)


def test_a_checksum_is_of_all_parts() -> None:
    one = batch(PARTS, 0)
    for place, leaf in leaves(one):
        other = batch(PARTS, 0)
        dict(leaves(other))[place].copy_((leaf.to(torch.int64) + 1).to(leaf.dtype))
        assert (on_disk._checks(one) != on_disk._checks(other)).all()


def test_a_checkpoint_holds_what_changed_and_not_the_memory(tmp_path: Path) -> None:
    disk = DiskMemory(500, IMAGES, file=tmp_path / "replay")
    offer(disk, range(50))
    with disk.checkpointing():
        pass
    offer(disk, range(50, 52))
    with disk.checkpointing():
        saved = disk.state_dict()
    [journal] = tmp_path.glob("*.journal")
    assert journal.stat().st_size < 25 * IMAGES.bytes
    assert sum(value.nbytes for value in saved["images"].values() if isinstance(value, np.ndarray)) == 8 * 500
    assert saved["images"]["on_disk"] == 500 * IMAGES.bytes


def test_jpeg_keeps_fewer_bytes_and_nearly_the_images(tmp_path: Path) -> None:
    inputs = Images((3, 64, 64))
    smooth = torch.nn.functional.interpolate(torch.rand(12, 3, 4, 4) * 255, 64, mode="bicubic").clamp(0, 255).to(torch.uint8)
    kept = {}
    for quality in (50, 95):
        memory = Memories(10, inputs, store=f"jpeg(quality={quality})").replay
        memory.add(np.random.default_rng(0), smooth, np.arange(12) % 3)
        again = Memories(10, inputs, store=f"jpeg(quality={quality})").replay
        again.load_state_dict(memory.state_dict())
        assert same(memory, again)
        ram = Memory(10, inputs)
        ram.add(np.random.default_rng(0), smooth, np.arange(12) % 3)
        error = (memory[np.arange(10)].float() - ram[np.arange(10)].float()).abs().mean()
        assert 0 < error < 4
        assert np.array_equal(memory.labels, ram.labels)
        kept[quality] = memory.state_dict()["images"]["jpeg"].nbytes
    assert kept[50] < kept[95] < 10 * inputs.bytes / 3
    blank = Memories(3, inputs, store="jpeg").replay
    assert not blank[np.arange(3)].any()
    assert len(blank.state_dict()["images"]["sizes"]) == 0


def test_stores_that_do_not_exist_or_do_not_fit() -> None:
    for store, sentence in {
        "dsik": r"unknown store 'dsik'; did you mean 'disk'\?",
        "jpeg(quality=0)": "quality must be",
        "disk(path='x')": "disk has no option 'path'",
    }.items():
        with pytest.raises(UserError, match=sentence):
            Learner("er", classes=4, shape=(1, 8, 8), net="mlp(width=4)", store=store)
    with pytest.raises(UserError, match="a memory of JPEG bytes holds grey or RGB images of bytes"):
        Learner("er", classes=4, inputs=Inputs((5,)), net="mlp(width=4)", augment="none", store="jpeg")


@pytest.mark.parametrize(
    "method", ["er", "scr", pytest.param("gdumb", marks=pytest.mark.slow), pytest.param("er() + ewc()", marks=pytest.mark.slow)]
)
def test_a_learner_on_disk_learns_what_one_in_ram_learns(method: str, tmp_path: Path) -> None:
    stream = toy_stream()
    options: dict[str, Any] = {"classes": 6, "shape": (1, 8, 8), "net": "mlp(width=12)", "memory": 12, "device": "cpu"}
    ram, disk = (Learner(method, **options, store=store).fit(stream) for store in ("ram", "disk"))
    disk.save(tmp_path / "disk")
    again = Learner.load(tmp_path / "disk", device="cpu")
    assert again.recipe.store == "disk"
    for learner in (disk, again):
        assert all(torch.equal(a, b) for a, b in zip(ram.engine.net.parameters(), learner.engine.net.parameters(), strict=True))
        assert learner.evaluate(stream).overall == ram.evaluate(stream).overall


@pytest.mark.slow
@pytest.mark.parametrize("method", ["agem", "ocm", "icarl", "gss", "aser", "co2l", "er() + mas()", "lpr(er())", "bic", "mose"])
def test_every_way_to_use_a_memory_takes_compressed_images(method: str) -> None:
    stream = toy_stream()
    options: dict[str, Any] = {"classes": 6, "shape": (1, 8, 8), "memory": 24, "device": "cpu"}
    net = "vit(width=8, depth=1, patch=4)" if method == "online_lora" else "resnet18(width=4)"
    Learner(method, **options, net=net, store="jpeg").fit(stream).evaluate(stream)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The record of a run with its memory in RAM."""
    out = tmp_path_factory.mktemp("ram")
    assert gracecl(*RUN, *STREAM, "--out", out).code == 0
    return (only_run(out) / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_run_on_disk_has_the_record_of_one_in_ram(undisturbed: bytes, tmp_path: Path) -> None:
    assert gracecl(*RUN, *STREAM, "--store", "disk", "--out", tmp_path).code == 0
    assert (only_run(tmp_path) / "metrics.jsonl").read_bytes() == undisturbed
    assert (only_run(tmp_path) / "memory" / "replay").stat().st_size == 60 * 64
    assert gracecl("export", only_run(tmp_path), tmp_path / "net.safetensors").code == 0


def _came_to(process: subprocess.Popen[bytes], out: Path, checkpoint: int) -> bool:
    """Whether a run has written so many checkpoints, or has ended."""
    written = (int(file.stem.partition("-")[2]) for file in out.rglob("replay-*.journal"))
    return process.poll() is not None or max(written, default=0) >= checkpoint


@pytest.mark.slow
def test_a_run_on_disk_that_is_killed_goes_on_exactly(undisturbed: bytes, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(library.__file__).parent.parent)}
    command = [sys.executable, "-m", "gracecl", *RUN, *STREAM, "--store", "disk", "--out", str(tmp_path)]
    for saved in (1, 3, 6):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(partial(_came_to, process, tmp_path, saved), 120)
        process.kill()
        process.wait()
    assert gracecl(*RUN, *STREAM, "--store", "disk", "--out", tmp_path).code == 0
    assert (only_run(tmp_path) / "metrics.jsonl").read_bytes() == undisturbed
