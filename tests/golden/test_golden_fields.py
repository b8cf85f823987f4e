"""Every stored array is read by a golden test, or is listed here with the reason why none needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
MADE_BY = "what the inputs were drawn with"
NOT_READ: dict[str, dict[str, str]] = {
    "adversarial_replay": {"g": "the stream's gradient; `theta_v` is compared, which is the weights less lr · g"},
    "aser": dict.fromkeys(("upd_eval_x", "upd_eval_y"), "what `upd_eval_slots` and the step's own images put together"),
    **{name: {"seed": MADE_BY} for name in ("acil", "air", "choice", "foal", "gacl", "randumb", "ranpac", "slda")},
    "der": {"x_clean": "the image as it is stored, which no loss sees"},
    "ema": {"n_bn_stats": "the length of a part of the flat state"},
    "ewc": dict.fromkeys(
        (f"theta{task}_{part}" for task in (2, 3) for part in ("W1", "b1", "W2", "b2")), "`theta2` and `theta3` in parts"
    ),
    "ewc_pp": {"lr": "the recorded weights are taken as they are"},
    "fecam": {
        "seed": MADE_BY,
        "y_test": "labels; predictions are compared with predictions",
        **dict.fromkeys(("plain_distances", "plain_pred"), "inverses of singular matrices by pinv, of features that are not unit"),
        **dict.fromkeys(
            ("common_cov_0", "common_cov_1", "common_distances", "common_pred"), "the total covariance of each task, mixed by task"
        ),
    },
    "klda": {"seed": MADE_BY}
    | dict.fromkeys(
        (f"halves_{name}" for name in ("ensemble_pred", "ensemble_probs", "means", "precision", "scatter", "scores")),
        "deviations from means that move, which depends on the batches",
    ),
    "lode": {"x_clean": "the image as it is stored, which no loss sees"},
    "mose": {"aug/crop_theta": "`aug/crop_params` as a matrix", "eval/y": "labels; predictions are compared with predictions"},
    "online_lora": dict.fromkeys(("in_c1_H_ids", "in_c2_H_ids"), "numbers of the entries whose images are read"),
    "scr": {"ncm_y": "labels; predictions are compared with predictions"},
}
NOTING = """
import json, sys
import numpy as np
import pytest
read = {}
get = np.lib.npyio.NpzFile.__getitem__
def noting(file, field):
    read.setdefault(file.fid.name, set()).add(field)
    return get(file, field)
np.lib.npyio.NpzFile.__getitem__ = noting
code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--ignore", sys.argv[2], sys.argv[1]])
print(json.dumps({"code": int(code), "read": {name: sorted(fields) for name, fields in read.items()}}))
"""


@pytest.mark.exhaustive
def test_every_stored_array_is_read_or_listed() -> None:
    words = [sys.executable, "-c", NOTING, str(HERE), str(Path(__file__))]
    told = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert told["code"] == 0
    read = {Path(name).stem: set(fields) for name, fields in told["read"].items()}
    unread = {}
    for path in sorted(HERE.glob("*.npz")):
        with np.load(path) as file:
            unread[path.stem] = set(file.files) - read.get(path.stem, set())
    assert {name: fields for name, fields in unread.items() if fields} == {name: set(why) for name, why in NOT_READ.items()}
