"""The learner at the end of a run, exported for other programs."""

from __future__ import annotations

from pathlib import Path

from gracecl.errors import UserError
from gracecl.exporting import export
from gracecl.files import Written
from gracecl.lab.report.runs import PUT_BACK, read_run
from gracecl.lab.runs.run import MEMORY, Work, learner_and_stream, load_checkpoint


def export_run(folder: Path, file: Path, rule: str | None = None) -> str:
    """Export the learner at the end of a run, in the format of the file's name; return what was written, in a
    sentence.
    """
    work = Work.begun(folder)
    saved = folder / "checkpoint.safetensors"
    if not work.finished or not saved.exists():
        raise UserError(f"{folder} has no finished run with its weights; 'gracecl resume' finishes one, 'gracecl keep' keeps none")
    state, ended_with = load_checkpoint(saved, work.config), read_run(folder).record
    if ended_with is not None and Written.of(state["record"]) != ended_with:
        raise UserError(f"{saved} is not the checkpoint that the run ended with; {PUT_BACK}")
    with work.own_code():
        engine, _ = learner_and_stream(work.as_begun(), work.data_root, allotted=work.allotted, folder=folder / MEMORY)
        engine.load_state_dict(state["trainer"]["engine"])
        return export(engine, file, rule, {"method": work.config.method, "net": work.config.net})
