"""Runs on a machine that fails, and what came of each fault.

`python tests/faults/machine.py` tries every kind of fault and prints the table; with `SOURCE=DIR` on the code of another folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from safetensors.numpy import load_file

HERE = Path(__file__).parent
Outcome = Literal["identical", "refused", "silent", "traceback", "lost"]
Count = Callable[[str, Outcome], None]
"""notes what came of a fault of some kind"""
GOOD: tuple[Outcome, ...] = ("identical", "refused")
"""the same results, or one sentence with everything that was there still in its place"""
RUN = [
    "er", "--stream", "split-digits(size=8, classes='0-3', tasks=2)", "--net", "mlp(width=4)", "--memory", "10", "--steps", "9",
    "--eval-every", "4", "--checkpoint-every", "3", "--device", "cpu", "--threads", "1",
]  # fmt: skip
LEFT_OVER = (".part", ".lock")
"""what a killed process may leave, and nobody needs"""
RESULTS = ("metrics.jsonl", "accuracy.json", "summary.json")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    text: str
    calls: int = 0
    """that wrote"""
    bytes: int = 0

    @property
    def sentence(self) -> bool:
        """One sentence and no more, as a refused command says it."""
        complaints = [line for line in self.text.splitlines() if line.startswith("gracecl: ")]
        return self.code == 2 and len(complaints) == 1 and "Traceback" not in self.text


@dataclass
class Machine:
    """Commands in a process that has everything loaded, one at a time."""

    place: Path
    process: subprocess.Popen[str]
    reference: dict[str, bytes] = field(default_factory=dict)
    """the results of the run that nothing disturbed"""

    def __call__(self, *command: str | Path, folder: Path, end_at: int = 0, room: int = -1, survivors: Path | None = None) -> Ended:
        notes = self.place / "notes"
        order = {"command": list(map(str, command)), "folder": str(folder), "end_at": end_at, "room": room, "notes": str(notes)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order | {"survivors": str(survivors) if survivors else ""}) + "\n")
        self.process.stdin.flush()
        code, text = json.loads(self.process.stdout.readline()), notes.read_text(encoding="utf-8", errors="replace")
        last = text.rstrip().rpartition("\n")[2]
        calls, written = json.loads(last) if last.startswith("[") else (0, 0)
        return Ended(code, text, calls, written)

    def run(self, out: Path, end_at: int = 0, room: int = -1, survivors: Path | None = None) -> Ended:
        """The run of this module, below a folder."""
        out.mkdir(parents=True, exist_ok=True)
        return self("run", *RUN, "--out", out, folder=out, end_at=end_at, room=room, survivors=survivors)

    def fresh(self) -> Path:
        """A folder that is empty."""
        return Path(tempfile.mkdtemp(dir=self.place)).resolve()

    def judge(self, out: Path, ended: Ended, last: Ended | None = None) -> Outcome:
        """What came of a run that went on after a fault: `ended` is the command after it, `last` the one in which it happened."""
        if any("Traceback" in end.text for end in (ended, last) if end):
            return "traceback"
        if ended.code == 0:
            return "identical" if results(out) == self.reference else "silent"
        return "refused" if ended.sentence else "lost"


def results(out: Path) -> dict[str, bytes]:
    """What the run below a folder found, apart from times, and the numbers in its last checkpoint."""
    found = {}
    for file in out.rglob("checkpoint.safetensors"):
        found |= {f"tensor {name}": value.tobytes() for name, value in load_file(file).items()}
    for name in RESULTS:
        for file in out.rglob(name):
            data = file.read_bytes()
            if name == "summary.json":
                with contextlib.suppress(ValueError, AttributeError):
                    values = json.loads(data)
                    data = json.dumps({key: values.get(key) for key in ("metrics", "per_tap", "finished", "steps")}).encode()
            found[name] = data
    return found


@contextlib.contextmanager
def machine(place: Path, source: Path | None = None) -> Iterator[Machine]:
    library = place / "failing_disk.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "failing_disk.c", "-ldl"], check=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LD_PRELOAD": str(library)}
    if source is not None:
        environment["PYTHONPATH"] = str(source / "src")
    with subprocess.Popen(
        [sys.executable, HERE / "server.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        made = Machine(place, process)
        out = made.fresh()
        assert made.run(out).code == 0
        made.reference = results(out)
        yield made
        assert process.stdin is not None
        process.stdin.close()


# Each kind of fault: what came of every one that was tried.


def kills(made: Machine, every: int = 1) -> Iterator[Outcome]:
    """`kill -9` at every call that writes, syncs, renames, cuts or removes; then the same command again."""
    whole = made.run(made.fresh())
    for at in range(1, whole.calls + 1, every):
        out = made.fresh()
        broken = made.run(out, end_at=at)
        assert broken.code == -9, (at, broken)
        yield made.judge(out, made.run(out))
        shutil.rmtree(out)


def full_disks(made: Machine, every: int = 1) -> Iterator[Outcome]:
    """No room after so many bytes, at sizes all over those that the run writes; then there is room again."""
    whole = made.run(made.fresh())
    for room in range(0, whole.bytes, whole.bytes * every // 50):
        out = made.fresh()
        full = made.run(out, room=room)
        after = made.run(out)
        told = full.sentence or full.code == 0
        yield made.judge(out, after, full) if told else "traceback" if "Traceback" in full.text else "silent"
        shutil.rmtree(out)


def power_cuts(made: Machine, kind: Literal["synced", "named"], every: int = 1) -> Iterator[Outcome]:
    """Only what was synced survives, at every moment of the run at which that changes; then the same command again."""
    out, survivors = made.fresh(), made.place / f"survivors-{kind}"
    assert made.run(out, survivors=survivors).code == 0
    for image in sorted(survivors.glob(f"*-{kind}"))[::every]:
        shutil.rmtree(out)
        shutil.copytree(image, out)
        yield made.judge(out, made.run(out))
    shutil.rmtree(survivors)


Damage = Callable[[bytes], bytes]


def flipped(at: int, bit: int) -> Damage:
    """One bit is another, at a place counted modulo the length."""
    return lambda data: data[: at % len(data)] + bytes([data[at % len(data)] ^ 1 << bit]) + data[at % len(data) + 1 :]


def header_flipped(at: int, bit: int) -> Damage:
    """One bit of a safetensors file is another before its tensors begin: in the length of the header, or in the header."""
    return lambda data: flipped(at % (8 + int.from_bytes(data[:8], "little")), bit)(data)


def cut(at: int) -> Damage:
    """Only so many bytes are left, counted modulo the length."""
    return lambda data: data[: at % len(data)]


@dataclass
class Damaged:
    """A file of a run that is stopped in its middle, or of a finished one, is not what was written."""

    made: Machine
    stopped: Path
    finished: Path

    @classmethod
    def prepare(cls, made: Machine) -> Damaged:
        stopped, finished = made.fresh(), made.fresh()
        assert made.run(finished).code == 0
        at = 10
        while not list(stopped.rglob("checkpoint.safetensors")):
            shutil.rmtree(stopped)
            assert made.run(stopped, end_at=at).code == -9
            at += 3
        return cls(made, stopped, finished)

    def resume(self, name: str, damage: Damage) -> Outcome:
        """`gracecl resume` of the run that was stopped."""
        return self._try(self.stopped, name, damage, "resume")

    def report(self, name: str, damage: Damage) -> Outcome:
        """`gracecl report` of the finished one, and what it shows of it."""
        return self._try(self.finished, name, damage, "report")

    def _try(self, origin: Path, name: str, damage: Damage, verb: str) -> Outcome:
        out = self.made.place / "damaged"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(origin, out)
        (file,) = out.rglob(name)
        whole = file.read_bytes()
        file.write_bytes(damage(whole))
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and not path.name.endswith(LEFT_OVER)}
        ended = self.made(verb, out, folder=out)
        if ended.code == 2 and ended.sentence:
            kept = all(path.is_file() and path.read_bytes() == data for path, data in before.items())
            return "refused" if kept else "lost"
        if "Traceback" in ended.text:
            return "traceback"
        if verb == "resume":
            return self.made.judge(out, ended)
        shown = (out / "report.md").read_text().partition("| seeds")[2] if (out / "report.md").is_file() else ""
        if ended.code == 0 and shown == self._shown():
            return "identical"
        return "silent" if ended.code == 0 else "lost"

    def _shown(self) -> str:
        if not hasattr(self, "_reported"):
            assert self.made("report", self.finished, folder=self.finished).code == 0
            self._reported = (self.finished / "report.md").read_text().partition("| seeds")[2]
        return self._reported


CHECKPOINT = "checkpoint.safetensors"
RESUMED = ("config.json", "metrics.jsonl", CHECKPOINT)
REPORTED = ("config.json", "metrics.jsonl", "summary.json", "timing.json")


def random_damages(number: int, seed: int) -> Iterator[Damage]:
    draw = random.Random(seed)
    for count in range(number):
        at = draw.randrange(1 << 30)
        yield flipped(at, draw.randrange(8)) if count % 3 else cut(at)


def random_flips(number: int, seed: int) -> Iterator[Damage]:
    draw = random.Random(seed)
    for _ in range(number):
        yield header_flipped(draw.randrange(1 << 30), draw.randrange(8))


def table(counts: dict[str, Counter[str]]) -> str:
    heads = ["fault", "tried", *GOOD, "silent", "traceback", "lost"]
    rows = [[kind, str(sum(found.values())), *(str(found[head]) for head in heads[2:])] for kind, found in counts.items()]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    source = Path(os.environ["SOURCE"]).resolve() if "SOURCE" in os.environ else None
    every = int(os.environ.get("EVERY", "1"))
    with tempfile.TemporaryDirectory() as place, machine(Path(place), source) as made:
        counts = {
            "kill -9 at a writing call": Counter(kills(made, every)),
            "disk full": Counter(full_disks(made, every)),
            "power cut, names and content as synced": Counter(power_cuts(made, "synced", every)),
            "power cut, content as synced": Counter(power_cuts(made, "named", every)),
        }
        damaged = Damaged.prepare(made)
        for name in RESUMED:
            counts[f"{name} damaged, resume"] = Counter(damaged.resume(name, damage) for damage in random_damages(60 // every, 1))
        flips = random_flips(200 // every, 3)
        counts[f"{CHECKPOINT} with a flipped bit in its header, resume"] = Counter(
            damaged.resume(CHECKPOINT, flip) for flip in flips
        )
        for name in REPORTED:
            counts[f"{name} damaged, report"] = Counter(damaged.report(name, damage) for damage in random_damages(60 // every, 2))
    sys.stdout.write(table(counts) + "\n")


if __name__ == "__main__":
    main()
