"""Where a benchmark ran."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gracecl import __version__
from gracecl.lab.runs.jobs import cores
from gracecl.lab.runs.run import commit


def machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "architecture": platform.machine(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str | None]:
    return {
        "gracecl": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
    }


def processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
