"""Errors in budgets, streams with a speed, rankings, and the line under tables."""

from __future__ import annotations

from mutant import of, within

BUDGETED = "test_budgets.py"

BUDGETS = [
    *of(
        "functional/budgets.py",
        BUDGETED,
        within("updates_before", ("math.floor(step * per_step)", "math.ceil(step * per_step)")),
        within("updates_at", ("step + 1", "step + 2")),
        within("learned_batches", ("math.ceil(batches / complexity)", "math.floor(batches / complexity)")),
        within("model_version", ("(batch + 1) / complexity", "batch / complexity")),
        within("FINEST", ("6", "5")),
    ),
    *of(
        "engine/cost.py",
        BUDGETED,
        within("flops", ("2 * backward", "backward")),
        within("StepCost.update", ("self.step - self.beside", "self.step")),
    ),
    *of(
        "engine/footprint.py",
        BUDGETED,
        within(
            "bytes_by_part",
            ('found["labels"] += _size(store["labels"])', "pass"),
            ('name.startswith("extras.")', "False"),
            ('"teachers" if nets else "statistics"', '"statistics"'),
        ),
    ),
    *of(
        "engine/allotment.py",
        BUDGETED,
        within("slots_within", ("limit - cost.fixed", "limit"), ("limit < cost.fixed", "limit <= cost.fixed")),
        within("allot", ("steps if budget.method is None and not budget.per else 1", "1")),
        within("_updates", ("per_step - cost.beside", "per_step"), ("per_step >= cost.step", "per_step > cost.step")),
        within("_fit_images", ("3 * cost.per_image", "2 * cost.per_image"), ("total / evaluations", "total")),
        within("_bytes", ("reference.fixed + memory * reference.slot", "reference.fixed")),
    ),
    *of(
        "engine/engine.py",
        BUDGETED,
        within(
            "Engine._may_store",
            ("not self.memories.replay.attributes", "True"),
            ("updates_before(self.progress.step, self.updates_per_step) > 0", "True"),
        ),
        within("Engine.learn", ("islice(self.plans(new), self._updates_allowed)", "self.plans(new)")),
    ),
    *of(
        "streams/paced.py",
        BUDGETED,
        within("paced", ("learned[1:] - 1", "learned[1:]"), ("int(mark) + 1", "int(mark)"), ("complexity <= 1", "complexity < 1")),
    ),
    *of(
        "streams/delayed.py",
        BUDGETED,
        within("delayed", ("np.arange(len(stream)) + delay", "np.arange(len(stream)) + delay - 1")),
    ),
    *of(
        "functional/statistics.py",
        "test_rankings.py",
        within(
            "kendall",
            ("float((signs[0] ** 2).sum()) * float((signs[1] ** 2).sum())", "float(len(signs[0])) ** 2"),
            ("signs[0] * signs[1]", "signs[0]"),
        ),
    ),
    *of(
        "lab/studies/rankings.py",
        "test_rankings.py",
        within("Protocol.rank", ("self.mean(other) > self.mean(method)", "self.mean(other) >= self.mean(method)")),
    ),
    *of(
        "lab/report/terms.py",
        "test_terms.py",
        within("_streams", ("len(expressions) > 1", "len(expressions) > 2"), ("len(found) > 1", "len(found) > 2")),
        within("_seeds", ("own == seeds[0]", "len(own) == len(seeds[0])")),
    ),
    *of(
        "lab/tuning/search.py",
        "test_terms.py",
        within("check_apart", ("_numbers(picked) & _numbers(others)", "_numbers(picked) == _numbers(others)")),
    ),
]
