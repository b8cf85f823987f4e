"""Where data sets and their decoded copies live."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gracecl.files import without_nul

CACHE_NAME = ".gracecl-cache"


def user_cache() -> Path:
    """Return the system's folder for files that programs can make again."""
    if sys.platform == "darwin":
        home = Path.home() / "Library" / "Caches"
    else:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "gracecl"


def data_root(root: str | Path | None = None) -> Path:
    """Return `root`, else $GRACECL_DATA, else a folder in the user's cache."""
    chosen = root or os.environ.get("GRACECL_DATA") or user_cache() / "data"
    return without_nul(chosen).expanduser().resolve()


def only_below_data(path: str | Path) -> bool:
    """Whether a path means one below the data's folder: it is relative, and the working folder has no such file."""
    place = without_nul(path).expanduser()
    return not place.is_absolute() and not place.exists()


def placed(path: str | Path, root: str | Path | None = None) -> Path:
    """Return where a path leads: from the working folder, else from that of the data, so that it is the same on all machines."""
    place = without_nul(path).expanduser()
    below = data_root(root) / place
    return below if only_below_data(place) and below.exists() else place.resolve()


def cache_folder(root: Path) -> Path:
    """Return a folder beside the data if it is writable, so that all users of the data share it; else the user's
    own.
    """
    beside = root / CACHE_NAME
    nearest = next(path for path in (beside, *beside.parents) if path.exists())
    return beside if os.access(nearest, os.W_OK | os.X_OK) else user_cache() / "decoded"
