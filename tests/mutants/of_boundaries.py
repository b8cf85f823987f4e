"""Errors in where tasks begin: the detectors, their place in the loop, and how guesses are measured."""

from __future__ import annotations

from mutant import of, within

ADWIN = "oracle/test_adwin.py"
RUNS = "test_boundaries.py"

BOUNDARIES = [
    *of(
        "detectors/adwin.py",
        ADWIN,
        within("Adwin.update", ("any(alarms)", "alarms[-1]")),
        within(
            "Adwin.add",
            ("self.mean > before", "self.mean < before"),
            ("changed and (rose or not self.rising)", "changed and rose"),
            ("self.width > self.grace_period", "self.width > 0"),
        ),
        within(
            "Adwin.insert",
            ("self.width * (value - self.mean) ** 2 / (self.width + 1)", "(value - self.mean) ** 2"),
            ("len(row) <= self.max_buckets", "len(row) < self.max_buckets"),
            ("((first - second) / 2**i) ** 2 * 2**i / 2", "((first - second) / 2**i) ** 2 * 2**i"),
        ),
        within("Adwin.drop_oldest", ("spread + between", "spread")),
        within(
            "Adwin.has_cut",
            ("math.log(2 * math.log(self.width) / self.delta)", "math.log(math.log(self.width) / self.delta)"),
            ("2 * inverse * self.variance / self.width", "2 * inverse * self.variance / (self.width - 1)"),
            ("2 / 3 * inverse * confidence", "inverse * confidence"),
        ),
    ),
    *of("detectors/every.py", RUNS, within("Every.begins", ("progress.step % self.n == 0", "(progress.step + 1) % self.n == 0"))),
    *of("detectors/novelty.py", RUNS, within("Novelty.begins", ("set(progress.seen)", "set(progress.current)"))),
    *of(
        "engine/boundaries.py",
        RUNS,
        within(
            "placed",
            ("~(predicted or predict(engine, batch)).right", "(predicted or predict(engine, batch)).right"),
            ("progress.task + begins", "progress.task + 1"),
        ),
    ),
    *of(
        "functional/boundaries.py",
        "oracle/test_boundary_metrics.py",
        within("matched", ("begin <= guess < end", "begin < guess < end"), ("begin <= guess < end", "begin <= guess <= end")),
    ),
    *of(
        "lab/report/measures.py",
        "oracle/test_boundary_metrics.py",
        within("own_boundaries", ('record["step"] + 1', 'record["step"]')),
        within("guessed_boundaries", ('record["step"] + 1', 'record["step"]')),
        within("of_boundaries", ("len(found.delays(true))", "len(found.first)")),
    ),
]
