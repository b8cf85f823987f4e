"""What the paper computes: which runs make up its tables, and how many images go through the net in each of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """Images of a step after the first task, with 10 new ones and 64 replayed, and what comes at the end of a task."""

    learned: int = 0
    scored: int = 0
    """forward only: by a teacher, or to choose what to replay"""
    scored_per_class: int = 0
    """as many more for each class met"""
    epochs: int = 0
    """over the memory at the end of a task, in batches of 16"""
    sweeps: int = 0
    """forwards over the memory at the end of a task"""
    taps: int = 1


# Counted from each method's paper and program. Left out: that the first task is cheaper, what the end of a task does to few images
# or to ready features (BiC's correction, Co2L's linear layer), losses and penalties.
METHODS = {
    "AGEM": Method(74),
    "ER": Method(74),
    "MIR": Method(74, 512),  # 256 candidates, before and after a virtual step
    "GSS": Method(189),  # 74, and gradients of 110 to 120 for the choice of what to keep
    "ASER": Method(74, 30, scored_per_class=8),  # two candidates per class, in four sets
    "ER-AML": Method(94),
    "GDumb": Method(epochs=256),
    "SCR": Method(148, sweeps=1),
    "OCM": Method(2432, 1088),
    "OnPro": Method(2560),
    "GSA": Method(192),
    "DER++": Method(138),
    "IL2A": Method(114, 114),
    "Co2L": Method(148, 148, sweeps=1),
    "LUCIR": Method(74, 74),
    "CCIL": Method(74, 74),
    "BiC": Method(74, 74),
    "SSIL": Method(74, 74),
    "MOSE": Method(384, sweeps=1, taps=4),
    "GRACE": Method(384, sweeps=2, taps=4),
}


@dataclass(frozen=True)
class DataSet:
    name: str
    learned: int
    tested: int
    classes: int
    side: int
    tasks: int = 10


CIFAR100 = DataSet("CIFAR-100", 50_000, 10_000, 100, 32)
TINY = DataSet("Tiny-ImageNet", 100_000, 10_000, 200, 64)


@dataclass(frozen=True)
class PaperTable:
    name: str
    data: DataSet
    methods: tuple[str, ...]
    memories: tuple[int, ...]
    batches: tuple[int, ...] = (10,)
    variants: int = 1


FEW = ("OCM", "OnPro", "GSA", "MOSE", "GRACE")
TABLES = (
    PaperTable("accuracy and forgetting", CIFAR100, tuple(METHODS), (1_000, 2_000, 5_000)),
    PaperTable("accuracy and forgetting", TINY, tuple(METHODS), (2_000, 4_000, 10_000)),
    PaperTable("the same, MOSE and GRACE alone", CIFAR100, ("MOSE", "GRACE"), (1_000, 2_000, 5_000)),
    PaperTable("the same, MOSE and GRACE alone", TINY, ("MOSE", "GRACE"), (2_000, 4_000, 10_000)),
    PaperTable("small memories", CIFAR100, FEW, (200, 500)),
    PaperTable("small memories", TINY, FEW, (500, 1_000)),
    PaperTable("ablation", CIFAR100, ("GRACE",), (1_000,), variants=3),
    PaperTable("training cost", CIFAR100, ("ER", "SCR", "MOSE", "GRACE"), (5_000,)),
    PaperTable("batch sizes", CIFAR100, ("GRACE",), (1_000,), batches=(1, 5, 10, 20)),
)
NOT_MODELLED = "CUB-200 (12 methods on ViT-B/16 at 224 × 224) is not modelled: no such net is measured here."


@dataclass(frozen=True)
class Work:
    """Of one run."""

    steps: float
    learned: float
    """images"""
    scored: float
    """images: in the steps, over the memory, and of the tests after each task on all classes met"""


def work(method: Method, data: DataSet, memory: int, batch: int = 10) -> Work:
    half_way = (data.tasks + 1) / (2 * data.tasks)  # share of the classes met, averaged over the tasks
    steps, epochs = data.learned / batch, data.tasks * method.epochs * memory
    scored = steps * (method.scored + method.scored_per_class * data.classes * half_way)
    swept = data.tasks * (method.sweeps * memory + data.tested * half_way)
    return Work(steps if method.learned else epochs / 16, steps * method.learned + epochs, scored + swept)
