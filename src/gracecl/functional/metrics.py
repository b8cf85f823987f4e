"""Every number a report prints, by name, as a pure function.

Six libraries compute six different "forgettings" from one matrix, so each definition here has its own name, its formula
and its citation. Notation: ``a`` is the accuracy matrix in percent, ``a[t, j]`` the accuracy on task j after training
task t (rows are time), T its size; the formulas count from 1. Entries with j > t (tasks not trained yet) may be NaN or
numbers: they are never used, so zeros, NaN or real values there give the same result. A NaN among the used entries (an
evaluation that was not made) makes the metric NaN; an empty matrix gives NaN.

The any-time metrics take a list of evaluations in the order of time, each one the accuracies on the tasks seen at that
moment, so its length says which task was being trained; `seen_rows` makes such a list of a matrix.

The prequential ones take what was predicted before it was learned, item by item: labels and predictions, whole numbers
from 0, with NO_PREDICTION where there was none, which counts as wrong. They give fractions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Evaluations = Sequence[npt.ArrayLike]
Batching = int | npt.ArrayLike
"""items in every batch, or in each of them"""

NO_PREDICTION = -1
"""stands where nothing was predicted yet"""
BINS = 15
"""of probabilities, for calibration"""
TOLERANCE = 5.0
"""points below its accuracy before a boundary at which a task counts as recovered"""


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


def relative_forgetting(a: npt.ArrayLike, per_old_task: bool = False) -> float:
    """The part of its best accuracy that a task lost: (1/T) Σ_{j<T} ( max_{j≤t≤T} a[t, j] − a[T, j] ) / max_{j≤t≤T} a[t, j].

    Wang et al., Improving Plasticity in Online Continual Learning via Collaborative Learning (CCL-DC), CVPR 2024 (official
    code). It divides by T although there are T−1 terms; `per_old_task` divides by T−1. A best accuracy of 0 counts as 1.
    """
    a = _square(a)
    if len(a) < 2:
        return 0.0 if len(a) else math.nan
    best = np.array([a[j:, j].max() for j in range(len(a) - 1)])
    lost = (best - a[-1, :-1]) / np.where(best == 0, 1.0, best)
    return float(lost.sum() / (len(lost) if per_old_task else len(a)))


def intransigence(a: npt.ArrayLike, joint: npt.ArrayLike) -> float:
    """What is missing from a model trained jointly on the tasks so far: (1/T) Σ_k ( a*_k − a[k, k] ). Negative is better than it.

    Chaudhry et al., Riemannian Walk for Incremental Learning, ECCV 2018. `joint[k]` is that model's accuracy on task k.
    """
    own = np.diagonal(_square(a))
    return _mean(_as_long(joint, len(own), "joint") - own)


def forward_transfer(a: npt.ArrayLike, untrained: npt.ArrayLike) -> float:
    """What earlier tasks bring to one not trained yet: (1/(T−1)) Σ_{j≥2} ( a[j−1, j] − b_j ), b of the untrained net.

    Lopez-Paz and Ranzato, Gradient Episodic Memory for Continual Learning, NeurIPS 2017. The one metric that uses entries
    above the diagonal. Where classes not met are never predicted, these are 0 by construction; leave them NaN, and so is this.
    """
    a = _square(a)
    return _mean(np.diagonal(a, offset=1) - _as_long(untrained, len(a), "untrained")[1:])


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


def a_auc(accuracies: npt.ArrayLike) -> float:
    """Area under the any-time curve: the plain mean of accuracies measured every n images, without one at the start.

    Koh et al., Online Continual Learning on Class Incremental Blurry Task Configuration with Anytime Inference, ICLR 2022.
    There each is the accuracy over all test images of the classes met (`accuracy_by_image`), not the mean over tasks.
    """
    return _mean(accuracies)


def accuracy_by_image(right: npt.ArrayLike, images: npt.ArrayLike) -> float:
    """Σ right / Σ images over tasks or classes: large ones count for more than in the mean of their accuracies."""
    total = float(np.sum(images))
    return float(np.sum(right)) / total if total else math.nan


@dataclass(frozen=True)
class Gap:
    """How far an old task falls when the next one begins, and whether it comes back."""

    boundary: int
    """number of the task that ended, from 1"""
    task: int
    """the old task, from 0"""
    before: float
    low: float
    end: float
    """accuracy when the next task ended, too"""
    to_low: int
    """evaluations until the lowest one"""
    to_recover: int | None
    """evaluations until it was back, None if it never was"""
    at: int
    """number of the evaluation at the boundary, from 0"""

    @property
    def depth(self) -> float:
        return self.before - self.low

    @property
    def regained(self) -> float:
        return self.end - self.low


def stability_gaps(evaluations: Evaluations, tolerance: float = 0.0) -> list[Gap]:
    """The gap of every old task at every boundary: the lowest accuracy until the next task ends, against that at the boundary.

    After De Lange et al., Continual Evaluation for Lifelong Learning: Identifying the Stability Gap, ICLR 2023; depth and
    recovery are ours. A task has recovered at the first evaluation from the lowest on that is within `tolerance` of where it was.
    What is between evaluations is not seen: say how often was evaluated.
    """
    rows = [np.asarray(row, dtype=np.float64) for row in evaluations]
    ends = [n for n, row in enumerate(rows) if n + 1 == len(rows) or len(rows[n + 1]) > len(row)]
    gaps = []
    for number, (begin, end) in enumerate(pairwise(ends), start=1):
        for task in range(len(rows[begin])):
            after = np.array([row[task] for row in rows[begin + 1 : end + 1]])
            before, lowest = float(rows[begin][task]), int(after.argmin())
            back = np.flatnonzero(after[lowest:] >= before - tolerance)
            recovered = lowest + int(back[0]) + 1 if len(back) else None
            gaps.append(Gap(number, task, before, float(after[lowest]), float(after[-1]), lowest + 1, recovered, begin))
    return gaps


def mean_depth(gaps: Sequence[Gap]) -> float:
    """Of gaps over all boundaries and old tasks; NaN without any."""
    return _mean([gap.depth for gap in gaps])


# --- prequential: predict, then learn -------------------------------------------------------------------------------


def right(labels: npt.ArrayLike, predictions: npt.ArrayLike) -> Array:
    """1 where the prediction is the label, else 0."""
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    if labels.shape != predictions.shape or labels.ndim != 1:
        raise ValueError(f"expected as many predictions as labels, got shapes {predictions.shape} and {labels.shape}")
    correct: Array = np.equal(labels, predictions).astype(np.float64)
    return correct


def prequential_acc(correct: npt.ArrayLike, fading: float = 1.0) -> Array:
    """Accuracy after each item: S_i / B_i with S_i = e_i + a S_{i−1}, B_i = 1 + a B_{i−1}; a = 1 is the mean of all so far.

    Gama, Sebastião and Rodrigues, On Evaluating Stream Learning Algorithms, Machine Learning 2013. A fading factor a below 1
    remembers about 1/(1−a) items. Sums go from left to right in double precision, so that a resumed record gives the same bits.
    """
    if not 0 < fading <= 1:
        raise ValueError(f"a fading factor is above 0 and at most 1, not {fading}")
    values, total, weight = [], 0.0, 0.0
    for one in np.asarray(correct, dtype=np.float64).tolist():
        total, weight = one + fading * total, 1.0 + fading * weight
        values.append(total / weight)
    return np.array(values)


def sliding_acc(correct: npt.ArrayLike, window: int) -> Array:
    """Accuracy over the last `window` items, or as many as there are, after each item."""
    reached = np.concatenate([[0.0], np.cumsum(np.asarray(correct, dtype=np.float64))])
    last = np.arange(1, len(reached))
    first = np.maximum(last - window, 0)
    values: Array = (reached[last] - reached[first]) / (last - first)
    return values


def tumbling_acc(correct: npt.ArrayLike, window: int) -> Array:
    """Accuracy of each `window` items, one after the other; the last may have fewer."""
    correct = np.asarray(correct, dtype=np.float64)
    return np.array([correct[start : start + window].mean() for start in range(0, len(correct), window)])


def known_labels(items: int, batch: Batching = 1, shift: int = 0) -> Ints:
    """How many labels are known when each item is predicted: those before its own batch, or before the one `shift` earlier.

    `batch` is the size of every batch, or the size of each.
    """
    sizes = np.full(-(-items // batch), batch) if isinstance(batch, int) else np.asarray(batch, np.int64)
    starts = np.concatenate([np.zeros(shift, np.int64), np.cumsum(sizes) - sizes])[: len(sizes)]
    known: Ints = np.repeat(starts, sizes)[:items]
    return known


def no_change(labels: npt.ArrayLike, batch: Batching = 1, shift: int = 0) -> Ints:
    """Blind baseline: the last label that is known (`known_labels`), for all items of a batch alike."""
    labels = np.asarray(labels, np.int64)
    known = known_labels(len(labels), batch, shift)
    return np.where(known == 0, NO_PREDICTION, labels[known - 1])


def running_majority(labels: npt.ArrayLike, batch: Batching = 1, shift: int = 0) -> Ints:
    """Blind baseline: the label that came most often among those known, of several the one met first."""
    return window_mode(labels, len(np.asarray(labels)) + 1, batch, shift)


def window_mode(labels: npt.ArrayLike, window: int, batch: Batching = 1, shift: int = 0) -> Ints:
    """Blind baseline: the most frequent of the last `window` labels known, of several the one met first; 1 is `no_change`."""
    labels = np.asarray(labels, np.int64)
    classes, first, numbers = np.unique(labels, return_index=True, return_inverse=True)
    by_arrival = np.argsort(first)
    counted = np.argsort(by_arrival)[numbers]  # classes by arrival: the first of several maxima is the one met first
    known, which = np.unique(known_labels(len(labels), batch, shift), return_inverse=True)
    counts, modes = np.zeros(len(classes), np.int64), []
    for before, now in pairwise([0, *known.tolist()]):
        gone = counted[max(0, before - window) : max(0, now - window)]
        counts += np.bincount(counted[before:now], minlength=len(counts)) - np.bincount(gone, minlength=len(counts))
        modes.append(classes[by_arrival[counts.argmax()]] if now else NO_PREDICTION)
    return np.array(modes, np.int64)[which]


def blind_acc(labels: npt.ArrayLike, batch: Batching = 1, shift: int = 0, windows: Sequence[int] = (1, 10, 100)) -> float:
    """The best that is right of `window_mode` at several windows and of `running_majority`, on batches from `shift` on."""
    labels = np.asarray(labels, np.int64)
    sizes = [batch] * shift if isinstance(batch, int) else list(np.asarray(batch)[:shift])
    asked = slice(int(sum(sizes)), None)
    guesses = [window_mode(labels, window, batch, shift) for window in (*windows, len(labels) + 1)]
    return max(_mean(right(labels[asked], guess[asked])) for guess in guesses)


def blind_shift(labels: npt.ArrayLike, batch: Batching = 1) -> int | None:
    """The first of the shifts 0, 1, 2, 4, … at which no blind predictor beats the most frequent label of the stream; None without.

    Al Kader Hammoud et al., ICCV 2023: from there on `near_future_acc` cannot be had from labels that follow one another.
    """
    labels = np.asarray(labels, np.int64)
    batches = -(-len(labels) // batch) if isinstance(batch, int) else len(np.asarray(batch))
    chance = _mean(right(labels, oracle_majority(labels)))
    shift = 0
    while shift < batches:
        if blind_acc(labels, batch, shift) <= chance:
            return shift
        shift = max(1, 2 * shift)
    return None


def oracle_majority(labels: npt.ArrayLike) -> Ints:
    """The most frequent label of the whole stream, everywhere: what no learner could know."""
    labels = np.asarray(labels, np.int64)
    return np.full_like(labels, Counter(labels.tolist()).most_common(1)[0][0]) if len(labels) else labels


def better_than(accuracy: float, chance: float) -> float:
    """(p₀ − p_e) / (1 − p_e): 0 is chance, 1 all right; NaN where chance leaves nothing to be won."""
    return (accuracy - chance) / (1 - chance) if chance < 1 else math.nan


def kappa(labels: npt.ArrayLike, predictions: npt.ArrayLike) -> float:
    """Cohen's κ, agreement beyond that of independent labels and predictions: p_e = Σ_c P(label c) P(prediction c)."""
    correct = right(labels, predictions)
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    if not len(labels):
        return math.nan
    classes = np.unique(labels)
    chance = sum(float(np.mean(labels == label) * np.mean(predictions == label)) for label in classes)
    return better_than(float(correct.mean()), chance)


def kappa_temporal(labels: npt.ArrayLike, predictions: npt.ArrayLike, batch: Batching = 1) -> float:
    """κ against `no_change`: below 0 is worse than saying the last label again.

    Žliobaitė et al., Evaluation Methods and Decision Theory for Classification of Streaming Data with Temporal Dependence,
    Machine Learning 2015.
    """
    return better_than(_mean(right(labels, predictions)), _mean(right(labels, no_change(labels, batch))))


def kappa_majority(labels: npt.ArrayLike, predictions: npt.ArrayLike, batch: Batching = 1) -> float:
    """κ against `running_majority` (κ_M): below 0 is worse than saying the most frequent label."""
    return better_than(_mean(right(labels, predictions)), _mean(right(labels, running_majority(labels, batch))))


def near_future_acc(right_of: npt.ArrayLike, images: npt.ArrayLike, shift: int = 0) -> float:
    """Accuracy on batch t + S of the model that has learned the batches before t, over all images; S = 0 is prequential.

    Al Kader Hammoud et al., Rapid Adaptation in Online Continual Learning: Are We Evaluating It Right?, ICCV 2023.
    `right_of[t, b]` is how many of the `images[b]` of batch b the model gets right that has learned t batches.
    """
    table, sizes = np.asarray(right_of, dtype=np.float64), np.asarray(images, dtype=np.float64)
    batch = np.arange(shift, len(sizes))
    return accuracy_by_image(table[batch - shift, batch], sizes[batch])


def delayed_acc(right_of: npt.ArrayLike, images: npt.ArrayLike, delay: int) -> float:
    """Accuracy where labels are late: batch t is predicted by the model that has learned the batches before t − d.

    Csaba et al., Label Delay in Online Continual Learning, NeurIPS 2024. Without its first d batches it is `near_future_acc`.
    """
    table, sizes = np.asarray(right_of, dtype=np.float64), np.asarray(images, dtype=np.float64)
    batch = np.arange(len(sizes))
    return accuracy_by_image(table[np.maximum(batch - delay, 0), batch], sizes)


def information_retention(right: npt.ArrayLike, images: npt.ArrayLike) -> Array:
    """Accuracy of the last model on the newest test images, on the newest two periods, …, on all; the last value is the retention.

    Al Kader Hammoud et al., ICCV 2023; Cai et al., Online Continual Learning with Natural Distribution Shifts (CLOC), ICCV 2021.
    Both lists are in the order of time.
    """
    newest_first = slice(None, None, -1)
    values: Array = np.cumsum(np.asarray(right, np.float64)[newest_first]) / np.cumsum(np.asarray(images, np.float64)[newest_first])
    return values


# --- task-incremental, and which class is taken for which -----------------------------------------------------------


def masked_predictions(scores: npt.ArrayLike, tasks: npt.ArrayLike, classes_of_task: npt.ArrayLike) -> Ints:
    """The best class among those of each image's task: `classes_of_task[t, c]` is True where class c belongs to task t."""
    allowed = np.asarray(classes_of_task, bool)[np.asarray(tasks)]
    best: Ints = np.where(allowed, np.asarray(scores, dtype=np.float64), -np.inf).argmax(axis=1)
    return best


def task_found(predictions: npt.ArrayLike, tasks: npt.ArrayLike, classes_of_task: npt.ArrayLike) -> float:
    """The share of images whose predicted class belongs to their task. No class-incremental accuracy is above it."""
    return _mean(np.asarray(classes_of_task, bool)[np.asarray(tasks), np.asarray(predictions)])


def confusion_matrix(labels: npt.ArrayLike, predictions: npt.ArrayLike, classes: int) -> Ints:
    """[classes, classes] how many images of each class (row) were taken for each (column); without a prediction, for none."""
    labels, predictions = np.asarray(labels, np.int64), np.asarray(predictions, np.int64)
    made = predictions != NO_PREDICTION
    counts = np.bincount(labels[made] * classes + predictions[made], minlength=classes * classes)
    return counts.reshape(classes, classes).astype(np.int64)


MATRIX_METRICS: dict[str, Callable[[npt.ArrayLike], float]] = {
    "acc": acc,
    "aia": aia,
    "forgetting": forgetting,
    "forgetting_mose": forgetting_mose,
    "bwt": bwt,
    "learning_acc": learning_acc,
    "relative_forgetting": relative_forgetting,
}
"""what one accuracy matrix gives"""

ANYTIME_METRICS: dict[str, Callable[[Evaluations], float]] = {"aaa": aaa, "min_acc": min_acc, "wc_acc": wc_acc}
"""what a list of evaluations gives"""

ABOUT = {
    "ece": "expected calibration error at the end, a fraction",
    "nll": "negative log-likelihood at the end, in nats",
    "brier": "Brier score at the end, from 0 to 2",
    "a_auc": "area under the any-time curve: the mean of accuracies over all images, at equal distances",
    "gap_depth": "stability gap: how far an old task falls after a task has ended, mean over boundaries and old tasks",
    "gap_recovered": f"percent of these falls after which the task came back, to {TOLERANCE:g} points",
    "retention": "information retention: percent right of all test images by the last model",
    "intransigence": "what is missing from the last model of a joint run on the same stream, mean over tasks when each was new",
    "forward_transfer": "accuracy on a task before it is trained, above that of a guess, mean over tasks; domains alone",
    "masked_acc": "final average accuracy among the classes of each image's task (task-incremental)",
    "task_found": "percent of images taken for a class of their task, mean over tasks at the end",
    "prequential": "percent right of the stream's images, each predicted before it was learned",
    "majority": "percent right by always saying the label that came most often so far; knows no image",
    "no_change": "percent right by saying the last label again; knows no image",
    "kappa": "Cohen's κ of the prequential predictions: 0 is chance, 1 all right",
    "kappa_majority": "κ against the most frequent label: below 0 is worse than saying that",
    "kappa_temporal": "κ against the last label: below 0 is worse than saying that again",
    "near_future": "percent right of images that came so many steps later",
    "near_future_blind": "percent right so many steps ahead by labels alone",
    "boundaries_found": "percent of the stream's own boundaries after which the learner began a task before the next one",
    "boundary_delay": "steps from a boundary of the stream to the task that the learner began there, mean over those found",
    "false_alarms": "tasks that the learner began without a boundary of the stream",
}
"""what the other metrics of a run are"""

NOT_PERCENT = (
    "relative_forgetting",
    "ece",
    "nll",
    "brier",
    "kappa",
    "kappa_majority",
    "kappa_temporal",
    "boundary_delay",
    "false_alarms",
)
LOWER_IS_BETTER = (
    "forgetting",
    "forgetting_mose",
    "relative_forgetting",
    "gap_depth",
    "intransigence",
    "ece",
    "nll",
    "brier",
    "boundary_delay",
    "false_alarms",
)
HIGHER_IS_BETTER = {name: name not in LOWER_IS_BETTER for name in (*MATRIX_METRICS, *ANYTIME_METRICS, *ABOUT)}
"""the direction of each metric"""


# --- from predicted probabilities -----------------------------------------------------------------------------------


def ece(probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error of the predicted class, a fraction: `Σ_m (|B_m|/n) |accuracy(B_m) − confidence(B_m)|`.

    B_m holds the images whose largest probability lies in (m/bins, (m+1)/bins].
    Guo et al., On Calibration of Modern Neural Networks, ICML 2017; Naeini et al., AAAI 2015.
    """
    p, y = _probabilities(probabilities, labels)
    confidence = p.max(axis=1)
    correct = p.argmax(axis=1) == y
    gap = np.bincount(_bin_of(confidence, bins), weights=correct - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(y))


def calibration_bins(probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS) -> Array:
    """[3, bins] how many images have their largest probability in each bin, how many of them are right, and the sum of it.

    Sums of such tables, over tasks or over time, give the calibration of all their images (`ece_of_bins`).
    """
    p, y = _probabilities(probabilities, labels)
    confidence = p.max(axis=1)
    correct = p.argmax(axis=1) == y
    member = _bin_of(confidence, bins)
    return np.stack([np.bincount(member, weights=one, minlength=bins) for one in (np.ones(len(y)), correct, confidence)])


def ece_of_bins(table: npt.ArrayLike) -> float:
    """The expected calibration error of the images counted in a table of `calibration_bins`, or in a sum of several."""
    count, correct, confidence = np.asarray(table, dtype=np.float64)
    return float(np.abs(correct - confidence).sum() / count.sum()) if count.sum() else math.nan


def brier(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Brier score: (1/n) Σ_i Σ_c (p_i[c] − [y_i = c])², from 0 to 2. A proper score: only the true probabilities are best.

    Brier, Verification of Forecasts Expressed in Terms of Probability, Monthly Weather Review 1950.
    """
    p, y = _probabilities(probabilities, labels)
    wrong = p.copy()
    wrong[np.arange(len(y)), y] -= 1
    return float((wrong**2).sum() / len(y))


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


def _bin_of(confidence: Array, bins: int) -> Ints:
    """The bin m of each probability, (m/bins, (m+1)/bins]."""
    inner_edges = np.linspace(0.0, 1.0, bins + 1)[1:-1]
    member: Ints = np.searchsorted(inner_edges, confidence, side="left")
    return member


def _as_long(values: npt.ArrayLike, tasks: int, what: str) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (tasks,):
        raise ValueError(f"{what} is one accuracy for each of {tasks} tasks, got shape {array.shape}")
    return array


def _mean(values: npt.ArrayLike) -> float:
    """The mean, NaN (without numpy's warning) when there is nothing to average."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()) if array.size else math.nan


def _probabilities(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[Array, npt.NDArray[Any]]:
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if p.ndim != 2 or y.shape != p.shape[:1] or not len(y):
        raise ValueError(f"expected probabilities [images, classes] and labels [images], got {p.shape} and {y.shape}")
    return p, y
