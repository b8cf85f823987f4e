"""Evaluation against loops over single images: every rule, tasks of unequal size, classes not met, calibration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gracecl.engine.evaluate import evaluate
from gracecl.testing import feed, toy_data, toy_engine, toy_stream

BINS = 15


def softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def mean(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def test_evaluation_is_the_loops() -> None:
    engine, data = toy_engine("mose(n_recall=4)"), toy_data()
    feed(engine, toy_stream(), until=9)
    seen, tasks = list(engine.progress.seen), np.where(data.test_y == 0, 0, np.where(data.test_y < 4, 2, 3))
    assert 1 < len(seen) < engine.net.classes
    found = evaluate(engine, data.test_x, data.test_y, tasks)

    net = engine.net.eval()
    means = engine.method.means
    rules: dict[str, list[list[float]]] = {}
    with torch.no_grad():
        for image in data.test_x:
            out = net(net.inputs.normalise(image[None]))
            linear = [[float(layer[0, label]) for label in seen] for layer in out.logits]
            ncm = []
            for layer in range(4):
                f = out.features[layer, 0] / out.features[layer, 0].norm()
                ncm.append([-float(((f - means[layer, label]) ** 2).sum()) for label in seen])
            scores = {"linear_last": linear[-1], "linear_mean": mean(linear), "ncm_last": ncm[-1], "ncm_mean": mean(ncm)}
            scores["linear_votes"] = [math.log(p) for p in mean([softmax(layer) for layer in linear])]
            scores |= {f"{family}_{tap + 1}": rows[tap] for family, rows in (("linear", linear), ("ncm", ncm)) for tap in range(4)}
            for rule, row in scores.items():
                rules.setdefault(rule, []).append(row)

    assert found.accuracy.keys() == rules.keys()
    met = [place for place, label in enumerate(data.test_y.tolist()) if label in seen]
    for rule, rows in rules.items():
        right = [seen[row.index(max(row))] == label for row, label in zip(rows, data.test_y.tolist(), strict=True)]
        expected = [100 * np.mean([right[place] for place in np.flatnonzero(tasks == task)]) for task in (0, 2, 3)]
        assert found.accuracy[rule][1] is None, "a task without images"
        assert [found.accuracy[rule][task] for task in (0, 2, 3)] == pytest.approx(expected)
        if not rule.endswith(("_last", "_mean", "_votes")) or rule.startswith("ncm"):
            assert rule not in found.ece
            continue
        chances = [softmax(rows[place]) for place in met]
        own = [chance[seen.index(int(data.test_y[place]))] for chance, place in zip(chances, met, strict=True)]
        assert found.nll[rule] == pytest.approx(-sum(map(math.log, own)) / len(own), rel=1e-5)
        gap = [0.0] * BINS
        for chance, place in zip(chances, met, strict=True):
            gap[math.ceil(max(chance) * BINS) - 1] += right[place] - max(chance)
        assert found.ece[rule] == pytest.approx(sum(map(abs, gap)) / len(met), rel=1e-5)
    assert len({tuple(found.accuracy[rule][2:]) for rule in rules}) > 2, "else it tells rules not apart"
