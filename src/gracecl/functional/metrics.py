"""Every number a report prints, by name, as a pure function.

Six libraries compute six different "forgettings" from one matrix, so each definition here has its own name, its formula
and its citation. Notation: ``a`` is the accuracy matrix in percent, ``a[t, j]`` the accuracy on task j after training
task t (rows are time), T its size; the formulas count from 1. Entries with j > t (tasks not trained yet) may be NaN or
numbers: they are never used, so zeros, NaN or real values there give the same result. A NaN among the used entries (an
evaluation that was not made) makes the metric NaN; an empty matrix gives NaN.

The any-time metrics take a list of evaluations in the order of time, each one the accuracies on the tasks seen at that
moment, so its length says which task was being trained; `seen_rows` makes such a list of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Evaluations = Sequence[npt.ArrayLike]


# --- from the accuracy matrix ---------------------------------------------------------------------------------------


def acc(a: npt.ArrayLike) -> float:
    """Final average accuracy: (1/T) Σ_j a[T, j].

    Lopez-Paz and Ranzato, Gradient Episodic Memory for Continual Learning, NeurIPS 2017.
    """
    a = _square(a)
    return float(a[-1].mean()) if len(a) else math.nan


def aia(a: npt.ArrayLike) -> float:
    """Average incremental accuracy: (1/T) Σ_t (1/t) Σ_{j≤t} a[t, j].

    Rebuffi et al., iCaRL: Incremental Classifier and Representation Learning, CVPR 2017 (there over classes; the same
    number when tasks have equally many test images).
    """
    return aaa(seen_rows(a))


def forgetting(a: npt.ArrayLike) -> float:
    """The literature's forgetting: (1/(T−1)) Σ_{j<T} ( max_{j≤t<T} a[t, j] − a[T, j] ).

    Chaudhry et al., Riemannian Walk for Incremental Learning, ECCV 2018. Negative when old tasks improved; with one
    task nothing can be forgotten: 0.
    """
    a = _square(a)
    if len(a) == 1:
        return 0.0
    return _mean([a[j:-1, j].max() - a[-1, j] for j in range(len(a) - 1)])


def forgetting_mose(a: npt.ArrayLike) -> float:
    """Forgetting as MOSE's program prints it: (1/T) Σ_j ( max_{j≤t≤T} a[t, j] − a[T, j] ). Never negative.

    Yan et al., Orchestrate Latent Expertise, CVPR 2024 (official code). It divides by T although the last task's term
    is zero by construction: (T−1)/T times `forgetting` when no old task is at its best at the end.
    """
    a = _square(a)
    return _mean([a[j:, j].max() - a[-1, j] for j in range(len(a))])


def bwt(a: npt.ArrayLike) -> float:
    """Backward transfer: (1/(T−1)) Σ_{j<T} ( a[T, j] − a[j, j] ). Negative means forgetting. With one task: 0.

    Lopez-Paz and Ranzato, Gradient Episodic Memory for Continual Learning, NeurIPS 2017.
    """
    a = _square(a)
    if len(a) == 1:
        return 0.0
    return _mean([a[-1, j] - a[j, j] for j in range(len(a) - 1)])


def learning_acc(a: npt.ArrayLike) -> float:
    """Learning accuracy, how well a task is learnt when it is new: (1/T) Σ_j a[j, j].

    Riemer et al., Learning to Learn without Forgetting by Maximizing Transfer and Minimizing Interference, ICLR 2019.
    """
    return _mean(np.diagonal(_square(a)))


def seen_rows(a: npt.ArrayLike) -> list[Array]:
    """The matrix as a list of evaluations: row t cut to the tasks seen by then. `aaa(seen_rows(a))` is `aia(a)`."""
    return [row[: t + 1] for t, row in enumerate(_square(a))]


# --- from the any-time evaluations ----------------------------------------------------------------------------------


def aaa(evaluations: Evaluations) -> float:
    """Average any-time accuracy: (1/N) Σ_n (1/k_n) Σ_{j≤k_n} a_n[j], over N evaluations, k_n tasks seen at the n-th.

    Caccia et al., New Insights on Reducing Abrupt Representation Change in Online Continual Learning, ICLR 2022.
    """
    return _mean([_mean(row) for row in evaluations])


def min_acc(evaluations: Evaluations) -> float:
    """Average minimum accuracy of the earlier tasks: (1/(k−1)) Σ_{j<k} min_n a_n[j], k the task of the last evaluation.

    De Lange et al., Continual Evaluation for Lifelong Learning: Identifying the Stability Gap, ICLR 2023. The minimum
    is over the evaluations made after task j; the one at its very end does not count. With one task there is no
    earlier one, and its last accuracy is returned.
    """
    rows = [np.asarray(row, dtype=np.float64) for row in evaluations]
    if not rows:
        return math.nan
    last_task = len(rows[-1]) - 1
    if last_task == 0:
        return float(rows[-1][0])
    return _mean([np.min([row[j] for row in rows if len(row) > j + 1]) for j in range(last_task)])


def wc_acc(evaluations: Evaluations) -> float:
    """Worst-case accuracy at the last evaluation, in task k: (1/k) a[k] + (1 − 1/k) min_acc.

    De Lange et al., ICLR 2023; used for online learning by Soutif-Cormerais et al., A Comprehensive Empirical
    Evaluation on Online Continual Learning, ICCV workshops 2023.
    """
    if not len(evaluations):
        return math.nan
    last = np.asarray(evaluations[-1], dtype=np.float64)
    share = 1.0 / len(last)
    return float(share * last[-1] + (1.0 - share) * min_acc(evaluations))


MATRIX_METRICS: dict[str, Callable[[npt.ArrayLike], float]] = {
    "acc": acc,
    "aia": aia,
    "forgetting": forgetting,
    "forgetting_mose": forgetting_mose,
    "bwt": bwt,
    "learning_acc": learning_acc,
}
"""what one accuracy matrix gives"""

ANYTIME_METRICS: dict[str, Callable[[Evaluations], float]] = {"aaa": aaa, "min_acc": min_acc, "wc_acc": wc_acc}
"""what a list of evaluations gives"""

HIGHER_IS_BETTER: dict[str, bool] = {
    "acc": True,
    "aia": True,
    "forgetting": False,
    "forgetting_mose": False,
    "bwt": True,
    "learning_acc": True,
    "aaa": True,
    "min_acc": True,
    "wc_acc": True,
    "ece": False,
    "nll": False,
}
"""the direction of each metric"""


# --- from predicted probabilities -----------------------------------------------------------------------------------


def ece(probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = 15) -> float:
    """Expected calibration error of the predicted class: Σ_m (|B_m|/n) |accuracy(B_m) − confidence(B_m)|, a fraction.

    B_m holds the images whose largest probability lies in (m/bins, (m+1)/bins].
    Guo et al., On Calibration of Modern Neural Networks, ICML 2017; Naeini et al., AAAI 2015.
    """
    p, y = _probabilities(probabilities, labels)
    confidence = p.max(axis=1)
    correct = p.argmax(axis=1) == y
    inner_edges = np.linspace(0.0, 1.0, bins + 1)[1:-1]
    member = np.searchsorted(inner_edges, confidence, side="left")
    gap = np.bincount(member, weights=correct - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(y))


def nll(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Negative log-likelihood of the labels in nats: −(1/n) Σ_i ln p_i[y_i].

    A probability of exactly zero (underflow) counts as the smallest normal float32, 87.3 nats, so that one image cannot
    make a run infinite.
    """
    p, y = _probabilities(probabilities, labels)
    of_label = p[np.arange(len(y)), y]
    return float(-np.log(np.maximum(of_label, np.finfo(np.float32).tiny)).mean())


# --- checks ---------------------------------------------------------------------------------------------------------


def _square(a: npt.ArrayLike) -> Array:
    matrix = np.asarray(a, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"an accuracy matrix is square [tasks, tasks], got shape {matrix.shape}")
    return matrix


def _mean(values: npt.ArrayLike) -> float:
    """The mean, NaN (without numpy's warning) when there is nothing to average."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()) if array.size else math.nan


def _probabilities(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[Array, npt.NDArray[Any]]:
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if p.ndim != 2 or y.shape != p.shape[:1] or not len(y):
        raise ValueError(f"expected probabilities [images, classes] and labels [images], got {p.shape} and {y.shape}")
    return p, y
