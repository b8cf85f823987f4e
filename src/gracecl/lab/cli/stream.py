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
    from gracecl import streams

    shown = streams.stream(expression, seed=seed, data=data)
    streams.check_evaluations(shown)
    place = Path("stream.png") if out is None else out
    shown.plot(place)
    print_out(repr(shown))
    print_out(str(place))
