"""The digits that scikit-learn carries: the data set that needs no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from gracecl.data.arrays import from_arrays
from gracecl.data.dataset import Data
from gracecl.data.pixels import resized
from gracecl.data.splits import held_out
from gracecl.errors import UserError
from gracecl.machine import check_room
from gracecl.registry import datasets

SIZE = 16
TEST_FRACTION = 0.2


@datasets.register("digits")
def digits(root: Path, size: int | None) -> Data:
    """Handwritten digits: 1,797 grey images, 8 px enlarged to 16, 10 classes; comes with scikit-learn, no download.

    Its grey levels 0 … 16 become 0 … 255. The original has no split of its own that is used today; a fifth of each
    class, chosen by a fixed rule, is for testing.
    """
    rows = np.loadtxt(file_of_scikit_learn("digits.csv.gz"), delimiter=",", dtype=np.int64)  # 64 grey levels, then the digit
    grey, labels = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), rows[:, -1]
    side = size or SIZE
    check_room(len(grey) * side**2, f"{len(grey)} images of {side} × {side} pixels", "use a smaller size")
    images = np.stack([resized(image[None], (side, side)) for image in grey]).transpose(0, 2, 3, 1)
    test = held_out([str(row) for row in range(len(labels))], labels, TEST_FRACTION, seed=0)
    return from_arrays(images[~test], labels[~test], images[test], labels[test], name="digits", tasks=5)


def file_of_scikit_learn(name: str) -> Path:
    """Find the file without importing the package, which takes two seconds."""
    package = find_spec("sklearn")
    folders = package.submodule_search_locations if package else None
    files = [file for folder in folders or () if (file := Path(folder) / "datasets" / "data" / name).is_file()]
    if not files:
        raise UserError(f"scikit-learn, which carries the digits, is not installed or lacks {name}; install it again")
    return files[0]
