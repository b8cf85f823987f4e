"""Notes of what a method computes while an engine steps."""

from __future__ import annotations

from gracecl.core import Batch, Taps
from gracecl.engine.engine import Engine


def note_batch_losses(engine: Engine) -> list[list[float]]:
    """Return a list that gets the loss of each batch that `online_lora` compares, update after update."""
    noted: list[list[float]] = []
    after_step = engine.method.after_step

    def note(out: Taps, batch: Batch) -> None:
        noted.append(engine.method.loss_of_each_batch(out, batch).mean(dim=0).tolist())
        after_step(out, batch)

    engine.method.after_step = note
    return noted
