"""What gracecl costs, as ratios measured side by side: `python -m benchmarks`. One module per part, each with `rows(quick)`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import Row
from gracecl.errors import UserError
from gracecl.registry import nearest

PARTS = {
    "steps": "a step against the same arithmetic written by hand; the tapped net against the plain one; augmentation",
    "passes": "evaluation and class means against one forward",
    "inference": "a frozen trunk by layout, batch and backend; scoring passes with as many images at once as caches hold",
    "memory": "time and bytes of the memory as it grows",
    "shards": "streams from shards and memories on disk or of JPEG bytes against RAM; peak bytes with data larger than memory",
    "runs": "recording and checkpoints; two runs side by side",
    "processes": "one learner in two processes of one thread against one process of two threads; a memory spread over them",
    "cluster": "a Ray cluster of this machine against jobs, the command's part of a run (extra gracecl[ray])",
    "pages": "report of 5,000 runs, and its page in a browser (chromium and the extra gracecl[browser])",
    "startup": "how soon the command answers",
    "roofline": "arithmetic per second against a large matrix product",
    "avalanche": "Avalanche's replay against ours (needs the extra gracecl[avalanche])",
    "methods": "every method's step against bare passes over as many images",
    "authors": "MOSE's step against its authors' own program (needs a checkout of it, --mose PATH)",
    "closed": "closed forms that predict after every batch, against the trunk's own passes (needs gracecl[efficientnet])",
    "serving": "a prediction while another thread learns, against an idle learner",
    "tabular": "predict and learn on rows of numbers against river (extra gracecl[river]) and scikit-learn, accuracy beside time",
    "choices": "layouts, precisions, compilation, optimizers, threads and allocators against the defaults",
}
TEXTS = {
    "shrinkage": "accuracy of closed forms by the number of images, and what choosing λ from the sums costs (needs cifar100.feat)",
    "profile": "where the time of a step goes, by operation",
    "gpus": "what the paper's main table would take on 8, 64 and 512 GPUs, from FLOPs",
    "cost": "seconds per step as a model, and what the paper's tables would cost here and on GPUs",
}
DEFAULT = ("steps", "passes", "memory", "runs", "startup", "roofline", "methods", "avalanche")


def chosen(names: Iterable[str], mose: Path | None = None) -> list[str]:
    """The parts that were asked for, or all that have aims; what needs an extra only if it is there.

    `mose` is the checkout of the authors' program, which is checked before anything is measured.
    """
    names = list(dict.fromkeys(names))
    known = PARTS | TEXTS
    for name in names:
        if name not in known:
            raise UserError(f"unknown part '{name}'{nearest(name, known)} (known: {', '.join(known)})")
    if "authors" in names:
        from benchmarks import authors

        authors.check(mose)
    elif mose is not None:
        raise UserError(
            "--mose is for the part 'authors', which is not among those asked for; write: python -m benchmarks authors --mose PATH"
        )
    if names:
        return names
    from benchmarks import avalanche

    return [name for name in DEFAULT if name != "avalanche" or avalanche.installed()]


def rows(part: str, quick: bool, mose: Path | None = None) -> Iterator[Row]:
    module = importlib.import_module(f"benchmarks.{part}")
    yield from module.rows(quick, mose) if part == "authors" else module.rows(quick)


def text(part: str, quick: bool) -> str:
    """Markdown of a part that is more than ratios."""
    module = importlib.import_module(f"benchmarks.{part}")
    return str(module.text(quick))


def write(path: Path, measured: Iterable[Row]) -> None:
    """A list of rows; each also says on which machine and with which versions it was measured."""
    from benchmarks.machine import machine, versions

    where = {"machine": machine(), "versions": versions()}
    content = [asdict(row) | {"met": row.met} | where for row in measured]
    try:
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error}); choose another --json") from None
