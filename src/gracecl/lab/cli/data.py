"""`gracecl data`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gracecl.errors import UserError
from gracecl.terminal import print_out


def data(
    action: Literal["get", "check", "pack"],
    name: str,
    dest: Path | None = None,
    /,
    data: Path | None = None,
    url: str | None = None,
    test: str | None = None,
    size: int | None = None,
) -> None:
    """Download a data set's official archive, verify what is there by its content, or pack it into shards.

    Args:
        action: get downloads, checks and unpacks; check says what is missing; pack writes shards, of which streams read single
            images, so that a data set need not fit into memory: split-shards(path='DEST')
        name: 'gracecl list datasets' prints them; check also takes a folder of shards; pack also takes a folder of images, or tar
            archives in WebDataset's layout: a path, a folder of them, or a pattern in quotes
        dest: pack: the folder to write; what was interrupted goes on when the command is given again
        data: folder of the data sets (default: $GRACECL_DATA)
        url: get: a mirror of the official file
        test: pack: archives with the test images (default: a fifth of each class is held out)
        size: pack: pixels a side (default: those of the first image)
    """
    from gracecl import data as datasets

    if (action == "pack") != (dest is not None):
        raise UserError("gracecl data pack needs SOURCE and DEST" if action == "pack" else f"gracecl data {action} takes one name")
    if action != "pack" and (test is not None or size is not None):
        raise UserError("--test and --size are options of 'gracecl data pack'; leave them out")
    if action == "get":
        print_out(datasets.get(name, data, url=url))
    elif dest is not None:
        print_out(datasets.pack(name, dest, data=data, test=test, size=size))
    elif problems := datasets.check(name, data):
        raise UserError(f"{name} is not complete: " + "; ".join(problems))
    else:
        print_out(f"{name}: complete")
