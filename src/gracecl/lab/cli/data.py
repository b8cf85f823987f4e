"""`gracecl data`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gracecl.errors import UserError
from gracecl.terminal import print_out


def data(
    action: Literal["get", "check"],
    name: str,
    /,
    data: Path | None = None,
    url: str | None = None,
) -> None:
    """Download a data set's official archive, or verify what is there by its content.

    Args:
        action: get downloads, checks and unpacks; check says what is missing
        name: 'gracecl list datasets' prints them
        data: folder of the data sets (default: $GRACECL_DATA)
        url: a mirror of the official file
    """
    from gracecl import data as datasets

    if action == "get":
        print_out(datasets.get(name, data, url=url))
    elif problems := datasets.check(name, data):
        raise UserError(f"{name} is not complete: " + "; ".join(problems))
    else:
        print_out(f"{name}: complete")
