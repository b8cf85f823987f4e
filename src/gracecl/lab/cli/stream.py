"""`gracecl stream`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gracecl.lab.cli.values import with_plugins
from gracecl.terminal import print_out


@with_plugins
def stream(
    action: Literal["show"],
    expression: str,
    /,
    out: Path | None = None,
    seed: int = 0,
    data: Path | None = None,
    plugin: tuple[str, ...] = (),
) -> None:
    """Draw a stream before anything is learned from it: classes over time, evaluation marks, images per class.

    Args:
        action: show says what the stream is and writes its picture
        expression: of the stream, such as "si-blurry-cifar100(tasks=5)"; 'gracecl list streams' prints the families
        out: file of the picture, .png, .svg or .pdf (default: stream.png)
        seed: of the stream
        data: folder of the data sets (default: $GRACECL_DATA)
        plugin: modules or files that register more
    """
    import numpy as np

    from gracecl import streams
    from gracecl.functional.metrics import blind_shift

    shown = streams.stream(expression, seed=seed, data=data)
    streams.check_evaluations(shown)
    place = Path("stream.png") if out is None else out
    shown.plot(place)
    print_out(repr(shown))
    shift = blind_shift(shown.labels(shown.order), np.diff(shown.ends, prepend=0))
    if shift is not None:
        print_out(f"from {shift} batches on, labels alone do not say what comes: --near-future {max(shift, 1)}")
    print_out(str(place))
