"""A process that has everything loaded and carries out each command in a copy of itself, on a disk that may fail.

A line of JSON in: the command, the folder, after which of its writing calls the process ends, for how many bytes there is room,
and where to keep what would survive a power cut. A line of JSON out: how it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any


def main() -> None:
    from gracecl.files import replacing
    from gracecl.lab import cli
    from gracecl.lab.report import figures
    from gracecl.lab.runs import jobs, result, run

    def picture(run: object, path: Path) -> bool:
        """A file that is written as pictures are, without drawing one."""
        with replacing(Path(path)) as beside:
            beside.write_bytes(b"picture")
        return True

    for name in ("accuracy_matrix", "layer_curves", "loss_curves", "comparison"):
        setattr(figures, name, picture)
    run.commit = lambda: None  # two processes of their own for each run
    with contextlib.redirect_stdout(io.StringIO()):  # so that no copy has to load anything, nor to train before it is copied
        cli.call(["list", "nets"])
        config, _ = result.configuration("er", stream="split-digits(size=8, classes='0-3', tasks=2)", net="mlp(width=4)")
        run.learner_and_stream(replace(config, device="cpu"))
        jobs.cores()
    disk = ctypes.CDLL(None)
    for line in sys.stdin:
        order = json.loads(line)
        notes = Path(order["notes"])
        child = os.fork()
        if child == 0:
            out = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            if order["survivors"]:
                watch_power(Path(order["folder"]), Path(order["survivors"]))
            disk.arm(order["folder"].encode(), ctypes.c_long(order["end_at"]), ctypes.c_long(order["room"]))
            code = cli.call(order["command"])
            calls, written = disk.count_calls(), disk.count_bytes()
            disk.arm(b"", ctypes.c_long(0), ctypes.c_long(-1))
            sys.stderr.write(f"\n{json.dumps([calls, written])}\n")
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def watch_power(folder: Path, survivors: Path) -> None:
    """Keeps, at each sync and each rename, what a power cut would leave: `NUMBER-synced` and `NUMBER-named`.

    Of a file only what was synced is left, in both. In the first, names too are those of folders that were synced; in the second
    every name is as it was last, which is what most file systems come to by themselves sooner than the content.
    """
    contents: dict[int, bytes] = {}
    names: dict[Path, dict[str, int]] = {}
    fsync, replace = os.fsync, os.replace
    taken, held = 0, []

    def take() -> None:
        nonlocal taken
        taken += 1
        synced, named = survivors / f"{taken:03}-synced", survivors / f"{taken:03}-named"

        def rebuild(place: Path) -> None:
            for name, inode in names.get(place, {}).items():
                target = synced / (place / name).relative_to(folder)
                if inode in contents:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(contents[inode])
                elif (place / name) in names:
                    target.mkdir(parents=True, exist_ok=True)
                    rebuild(place / name)

        synced.mkdir()
        rebuild(folder)
        for file in folder.rglob("*"):
            target = named / file.relative_to(folder)
            if file.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(contents.get(file.stat().st_ino, b""))

    def note_sync(handle: int) -> None:
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            names[path] = {item.name: item.stat().st_ino for item in path.iterdir()}
        else:
            contents[os.fstat(handle).st_ino] = path.read_bytes()
            held.append(os.dup(handle))  # so that no other file gets its number
        take()

    def note_rename(source: Any, target: Any, **options: Any) -> None:
        replace(source, target, **options)
        take()

    os.fsync, os.replace = note_sync, note_rename  # type: ignore[assignment]
    survivors.mkdir(parents=True)


if __name__ == "__main__":
    main()
