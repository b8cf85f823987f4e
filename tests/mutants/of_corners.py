"""Errors that show only in corners: classes that come back, second ticks, statistics of degenerate values."""

from __future__ import annotations

from mutant import of, within

RETURNING = "oracle/test_returning_classes.py"

CORNERS = [
    # A class comes back together with new ones.
    *of("methods/bic.py", RETURNING, within("BiC.fitted", ("set(progress.seen) - set(self.old)", "progress.current"))),
    *of(
        "methods/ssil.py",
        RETURNING,
        within("SSIL.losses", ("batch.seen & ~self.old", "batch.current")),
        within("SSIL.end_task", ("label not in known", "True")),
    ),
    *of(
        "methods/il2a.py",
        RETURNING,
        within(
            "IL2A.remember",
            (
                "self.factors[:, label] = F.pad(root, (0, 0, 0, max(0, -missing)))",
                "if label not in self.old: self.factors[:, label] = F.pad(root, (0, 0, 0, max(0, -missing)))",
            ),
            (
                "self.factors[:, label] = F.pad(root, (0, 0, 0, max(0, -missing)))",
                "self.factors[:, label, : root.shape[1]] = root",
            ),
            ("[] if label in self.old else [label]", "[label]"),
        ),
    ),
    *of("methods/onpro.py", RETURNING, within("OnPro.prototype_feedback", ("new.progress.seen", "new.progress.old"))),
    *of("methods/er_ace.py", RETURNING, within("ERACE.allowed", ("batch.seen", "batch.old"))),
    *of("methods/aser.py", RETURNING, within("ASER.recall", ("new.progress.seen", "new.progress.current"))),
    *of(
        "methods/replay.py",
        RETURNING,
        within("Replay.before_eval", ("progress.seen", "progress.old"), ("progress.seen", "progress.current")),
    ),
    *of(
        "methods/mose.py",
        RETURNING,
        within("MOSE.before_eval", ("progress.seen", "progress.old"), ("progress.seen", "progress.current")),
    ),
    *of(
        "methods/scr.py",
        RETURNING,
        within("SCR.known_means", ("progress.seen", "progress.old"), ("progress.seen", "progress.current")),
    ),
    *of(
        "methods/grace.py",
        RETURNING,
        within("memory_means", ("progress.seen", "progress.old"), ("progress.seen", "progress.current")),
    ),
    # Streams without task marks.
    *of(
        "methods/base.py",
        RETURNING,
        within("Chain.tick", ("progress.tick(every)", "progress.tick(every) and progress.step < every")),
    ),
    *of("methods/ocm.py", RETURNING, within("OCM.traits", ('"every"', "None"))),
    *of("methods/co2l.py", RETURNING, within("Co2L.traits", ('"every"', "None"))),
    *of("methods/icarl.py", RETURNING, within("ICaRL.traits", ('"every"', "None"))),
    *of("methods/lwf.py", RETURNING, within("LwF.traits", ('"every"', "None"))),
    *of("methods/quadratic.py", RETURNING, within("QuadraticPenalty.traits", ('"every"', "None"))),
    *of(
        "methods/online_lora.py",
        RETURNING,
        within(
            "OnlineLoRA.fold",
            ("rng.uniform(-adapter.bound, adapter.bound, adapter.down.shape)", "rng.uniform(0, adapter.bound, adapter.down.shape)"),
        ),
    ),
    # Values that are missing, equal or better when they are low.
    *of(
        "functional/statistics.py",
        "oracle/test_statistics.py",
        within("paired", ("math.isnan(mean)", "False"), ("math.copysign(math.inf, mean)", "math.inf")),
    ),
    *of(
        "lab/report/compare.py",
        "test_compare.py",
        within(
            "compare",
            ("holm([difference.wilcoxon for difference in differences])", "[difference.wilcoxon for difference in differences]"),
        ),
        within("over_settings", ("HIGHER_IS_BETTER.get(metric, False)", "HIGHER_IS_BETTER.get(metric, True)")),
    ),
    *of(
        "lab/studies/beside_paper.py",
        "test_study_files.py",
        within("_order", ('-1 if HIGHER_IS_BETTER.get(OURS.get(metric, ""), False) else 1', "-1")),
    ),
    # Nested methods.
    *of("methods/base.py", "oracle/test_spec.py", within("Chain._joined", ("inner.keys() & own.keys()", "set()"))),
]
