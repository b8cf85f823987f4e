"""Decoded once: used again, never when stale, made again when damaged, mapped when large, done without when it must."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import layouts
import numpy as np
import pytest

from gracecl.data import cache, load
from gracecl.data.cifar10 import Cifar10
from gracecl.data.locations import cache_folder, data_root, user_cache
from gracecl.errors import UserError
from gracecl.files import file_digests

resource = pytest.importorskip("resource", reason="limits the size of files as only Unix can")


@pytest.fixture
def reads(tmp_path, monkeypatch):
    """A small CIFAR-10 and the list that grows whenever its files are read."""
    layouts.cifar10(tmp_path)
    seen = []
    original = Cifar10.read

    def read(self, folder):
        seen.append(folder)
        return original(self, folder)

    monkeypatch.setattr(Cifar10, "read", read)
    return seen


def entry_of(tmp_path):
    return next((tmp_path / ".gracecl-cache").glob("cifar10-32px-*"))


def test_the_second_time_comes_from_the_cache(tmp_path, reads):
    first, second = load("cifar10", tmp_path), load("cifar10", tmp_path)
    assert len(reads) == 1
    assert first.fingerprint == second.fingerprint
    assert first.class_names == second.class_names
    assert [path.name for path in (tmp_path / ".gracecl-cache").iterdir()] == [entry_of(tmp_path).name]
    load("cifar10", tmp_path, size=20)
    assert len(reads) == 2


@pytest.mark.parametrize("change", ["touched", "replaced"])
def test_a_stale_entry_is_not_used(tmp_path, reads, change):
    before = load("cifar10", tmp_path)
    file = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    if change == "touched":
        os.utime(file, ns=(1, 1))
    else:
        shutil.copy(tmp_path / "cifar-10-batches-py" / "data_batch_2", file)
    after = load("cifar10", tmp_path)
    assert len(reads) == 2
    assert (before.fingerprint == after.fingerprint) == (change == "touched")
    assert len(list((tmp_path / ".gracecl-cache").iterdir())) == 1


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: flip(entry / "train_x.npy"),
        lambda entry: flip(entry / "test_y.npy"),
        lambda entry: os.truncate(entry / "test_x.npy", 1000),
        lambda entry: (entry / "train_x.npy").write_bytes(b""),
        lambda entry: (entry / "train_y.npy").unlink(),
        lambda entry: (entry / "entry.json").write_text("{"),
        lambda entry: (entry / "entry.json").write_text("[]"),
        lambda entry: (entry / "entry.json").write_text(
            json.dumps({**json.loads((entry / "entry.json").read_text()), "arrays": {}})
        ),
    ],
)
def test_a_damaged_entry_is_made_again(tmp_path, reads, damage):
    before = load("cifar10", tmp_path)
    damage(entry_of(tmp_path))
    assert load("cifar10", tmp_path).fingerprint == before.fingerprint
    assert len(reads) == 2
    load("cifar10", tmp_path)
    assert len(reads) == 2


@pytest.mark.parametrize("mmap_bytes", [0, None], ids=["mapped", "read"])
def test_no_flipped_bit_of_an_entry_reaches_the_data(tmp_path, reads, mmap_bytes):
    """In every file and at places all over it, whether the arrays are mapped or read."""
    before = load("cifar10", tmp_path, mmap_bytes=mmap_bytes)
    damages = 0
    for file in sorted(entry_of(tmp_path).iterdir()):
        size = file.stat().st_size
        for at in np.random.default_rng(0).integers(0, size, 5):
            content = bytearray(file.read_bytes())
            content[at] ^= 1 << int(at) % 8
            (tmp_path / "flipped").write_bytes(content)
            os.replace(tmp_path / "flipped", file)  # the old one may be mapped
            damages += file.suffix == ".npy"
            after = load("cifar10", tmp_path, mmap_bytes=mmap_bytes)
            assert (after.fingerprint, after.class_names) == (before.fingerprint, before.class_names), (file.name, at)
    assert len(reads) > damages, "each was found, and the entry made again; in entry.json some bytes are blanks"


def test_a_mapped_array_is_compared_once_per_process(tmp_path, reads, monkeypatch):
    calls = []
    monkeypatch.setattr(cache, "file_digests", lambda path: calls.append(path) or file_digests(path))
    for _ in range(3):
        load("cifar10", tmp_path, mmap_bytes=0)
    assert len(calls) == 2 * 4, "when they were written, and once after"


def test_chunks_are_digested_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("gracecl.files.CHUNK_BYTES", 1000)
    (tmp_path / "file").write_bytes(bytes(2500))
    before = file_digests(tmp_path / "file")
    flip(tmp_path / "file")
    after = file_digests(tmp_path / "file")
    assert [one == two for one, two in zip(before, after, strict=True)] == [True, True, False]


def test_pickles_in_the_cache_are_not_loaded(tmp_path, reads):
    load("cifar10", tmp_path)
    np.save(entry_of(tmp_path) / "train_x.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert load("cifar10", tmp_path).shape == (3, 32, 32)
    assert len(reads) == 2


def is_mapped(tensor):
    """Whether the system says that the tensor's memory is a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith("_x.npy")
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_large_arrays_are_mapped_and_stay_as_they_are_on_disk(tmp_path, monkeypatch):
    layouts.cifar10(tmp_path)
    held = load("cifar10", tmp_path)
    assert not is_mapped(held.train_x)
    monkeypatch.setenv("GRACECL_MMAP_BYTES", "1e5")
    mapped = load("cifar10", tmp_path)
    assert is_mapped(mapped.train_x)
    assert not is_mapped(mapped.test_x)
    assert mapped.fingerprint == held.fingerprint
    assert load("cifar10", tmp_path, classes="0-3").classes == 4
    mapped.train_x[:] = 0
    assert load("cifar10", tmp_path, mmap_bytes=10**9).fingerprint == held.fingerprint
    assert is_mapped(load("cifar10", tmp_path, mmap_bytes=0).test_x)
    monkeypatch.setenv("GRACECL_MMAP_BYTES", "plenty")
    with pytest.raises(UserError, match="GRACECL_MMAP_BYTES"):
        load("cifar10", tmp_path)


@contextmanager
def largest_file(size):
    """Writes beyond `size` fail as they do on a full disk: with an OSError in the middle of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_the_cache_only(tmp_path, reads, caplog):
    with largest_file(100_000), caplog.at_level(logging.WARNING):
        data = load("cifar10", tmp_path, size=31)
    assert "going on without" in caplog.text
    assert data.shape == (3, 31, 31)
    assert list((tmp_path / ".gracecl-cache").iterdir()) == []
    assert load("cifar10", tmp_path, size=31).fingerprint == data.fingerprint
    assert len(reads) == 2


def test_a_folder_that_cannot_be_made_costs_the_cache_only(tmp_path, reads, caplog):
    (tmp_path / ".gracecl-cache").write_text("a file in the way")
    (tmp_path / ".gracecl-cache").chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert load("cifar10", tmp_path).classes == 10
    assert "going on without" in caplog.text


@pytest.mark.parametrize("locks", [True, False])
def test_abandoned_drafts_are_swept(tmp_path, reads, monkeypatch, locks):
    """At once by whoever is alone in the folder; where no lock tells that, after a day."""
    if not locks:
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError))
    load("cifar10", tmp_path)
    entry = entry_of(tmp_path)
    old, new = (entry.with_name(f".{entry.name}-{name}") for name in ("old", "new"))
    old.mkdir()
    new.mkdir()
    os.utime(old, (1, time.time() - 90_000))
    flip(entry / "train_x.npy")
    load("cifar10", tmp_path)
    assert not old.exists()
    assert new.exists() == (not locks)


def test_several_at_once(tmp_path, reads, monkeypatch):
    """One decodes, the others wait for it."""
    quick = Cifar10.read

    def slow(self, folder):
        time.sleep(0.2)
        return quick(self, folder)

    monkeypatch.setattr(Cifar10, "read", slow)
    prints = []
    threads = [threading.Thread(target=lambda: prints.append(load("cifar10", tmp_path).fingerprint)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(prints) == 4
    assert len(set(prints)) == 1
    assert len(reads) == 1
    assert len(list((tmp_path / ".gracecl-cache").iterdir())) == 1


def test_places(tmp_path, monkeypatch):
    assert data_root() == (user_cache() / "data").resolve()
    monkeypatch.setenv("GRACECL_DATA", str(tmp_path / "there"))
    assert data_root() == tmp_path / "there"
    assert data_root("~/here").is_absolute()
    assert cache_folder(tmp_path) == tmp_path / ".gracecl-cache"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cache_folder(tmp_path) == user_cache() / "decoded"
