"""The numbers of the GRACE paper, and how its rows are written here.

`tables.json` holds every number of its results tables (Wu, Wang, Huang, Dynamic Feedback Engines: Layer-Wise Control for
Self-Regulating Continual Learning, 2025), one record each, transcribed from the paper's LaTeX source, with notes on the source's
oddities. Read them before comparing: all rows but MOSE's and GRACE's are copied by the paper from others, in settings that are
partly not known.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

EXPRESSIONS = {
    "AGEM": "agem()",
    "ER": "er()",
    "MIR": "mir()",
    "GSS": "gss()",
    "ASER": "aser()",
    "ER-AML": "er_aml()",
    "GDumb": "gdumb()",
    "SCR": "scr()",
    "OCM": "ocm()",
    "OnPro": "onpro()",
    "GSA": "gsa()",
    "DER++": "derpp()",
    "IL2A": "il2a()",
    "Co2L": "co2l()",
    "LUCIR": "lucir()",
    "CCIL": "ccil()",
    "BiC": "bic()",
    "SSIL": "ssil()",
    "MOSE": "mose()",
    "GRACE": "grace(mose())",
    "EWC++": "sgd() + ewc_pp()",
    "PCR": "pcr()",
    "LODE (DER++)": "lode(derpp())",
    "EMA (DER++)": "ema(derpp())",
    "EMA (RAR)": "ema(rar(er(), iterations=3, augmentation='run'))",
    "Online-LoRA": "online_lora()",
    "CPR": "sgd() + cpr()",
}
"""Row -> method. The first twenty are those of the main tables, the next six of CUB-200 alone; CPR is what the paper takes its
entropy term from, and has no numbers there."""
ACCURACY = {"table": "main_accuracy", "dataset": "Split CIFAR-100", "buffer_size": 1000}
"""the column that other results are compared with"""


@cache
def tables() -> dict[str, Any]:
    """Load the whole file: source, conventions, tables with their notes, records."""
    text = (resources.files(__name__) / "tables.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def records(**where: Any) -> list[dict[str, Any]]:
    """Return the records with these field values, such as `records(table="cub200", metric="A_Final")`."""
    return [record for record in tables()["records"] if all(record.get(name) == value for name, value in where.items())]


def accuracies() -> dict[str, float]:
    """Return {row: final accuracy in percent} on Split CIFAR-100 in ten tasks with a memory of 1,000 images."""
    return {record["method"]: record["mean"] for record in records(**ACCURACY)}
