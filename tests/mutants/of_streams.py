"""Errors in the laws of streams: families, wrappers, which test images an evaluation looks at."""

from __future__ import annotations

from mutant import of, within

FAMILIES, DOMAINS = "oracle/test_stream_families.py", "oracle/test_stream_domains.py"

STREAMS = [
    *of(
        "streams/__init__.py",
        FAMILIES,
        within(
            "Stream.test_images",
            ("np.searchsorted(self.marks, len(self) - 1 if step is None else step)", "np.searchsorted(self.marks, len(self) - 1)"),
            ("np.ones(len(tasks), bool)", "np.isin(data.test_y, list(seen))"),
            ("np.isin(data.test_y, list(seen))", "np.isin(tasks, list(seen))", 1),
        ),
        within("Stream.beyond_the_order", ("getattr(self, name) != value", "False")),
        within("Stream.classes_of_task", ("members[self.test_task, self.data.test_y] = True", "members[:] = True")),
        within("Family.__call__", ("self.inside, data, seed", "self.inside, data, 0")),
        within("_with_whole_paths", ("call.kwargs | paths", "call.kwargs")),
    ),
    *of(
        "streams/parts.py",
        FAMILIES,
        within("draws", ("rng.key(seed, purpose)", "rng.key(seed)")),
        within("smallest", ("draws(seed, purpose, images)", "-draws(seed, purpose, images)")),
        within("deal", ("given[open_places] + share", "share")),
        within("in_tasks", ("task_of_step if marked else np.full_like(task_of_step, NO_TASK)", "task_of_step")),
        within("in_tasks", ("np.diff(task_of_step, append=len(parts))", "np.diff(task_of_step)")),
        within(
            "in_one_order",
            ("-(-np.arange(1, tasks + 1) * len(order) // tasks)", "np.arange(1, tasks + 1) * (len(order) - tasks) // tasks"),
        ),
        within("reaching", ("np.searchsorted(ends, positions)", 'np.searchsorted(ends, positions, "right")')),
    ),
    *of("streams/iid.py", FAMILIES, within("iid", ('rng.generator(seed, "iid order")', 'rng.generator(0, "iid order")'))),
    *of(
        "streams/i_blurry.py",
        FAMILIES,
        within(
            "i_blurry",
            ("ordered[number:]", "ordered", 2),
            ("data.classes * disjoint / 100", "data.classes * (100 - disjoint) / 100"),
            ("blur / 100", "blur / 100 / tasks"),
            ('rng.generator(seed, "stray images").permutation(len(strays))', "np.arange(len(strays))"),
        ),
        within("in_random_order", ('rng.generator(seed, "stream order", task, 0)', 'rng.generator(seed, "stream order", task, 1)')),
    ),
    *of(
        "streams/si_blurry.py",
        FAMILIES,
        within("cut", ("generator.integers(0, len(things), tasks - 1)", "generator.integers(0, len(things) + 1, tasks - 1)")),
        within(
            "exchanged",
            ("np.minimum(drawn, have)", "np.minimum(np.array(drawn), number)"),
            ("leave += deal(number - int(leave.sum()), have - leave)", "pass"),
            ("np.repeat(np.arange(tasks), leave)", "np.repeat(np.arange(tasks), leave[::-1])"),
        ),
        within("si_blurry", ("np.searchsorted(there, home[data.test_y])", "home[data.test_y]")),
    ),
    *of(
        "streams/gaussian.py",
        FAMILIES,
        within("gaussian", ("np.arange(data.classes) + 0.5", "(np.arange(data.classes) + 0.5) / 2")),
        within(
            "arrival_times",
            ("sigma * bell", "sigma**2 * bell"),
            ("np.floor(periods * chance[:, 1])", "np.floor(periods * chance[:, 0])"),
        ),
    ),
    *of(
        "streams/gradual.py",
        FAMILIES,
        within("sigmoid_shares", ("-4 * place", "-2 * place"), ("min(left, right)", "max(left, right)")),
        within(
            "blended",
            ("right_now or used_left == len(left)", "right_now"),
            ("len(left) * len(mixed) // (len(left) + len(right))", "len(mixed) // 2"),
            ("taken += left[used_left:].tolist()", "pass"),
        ),
        within(
            "linear_shares",
            ("beta * task - 1", "beta * task"),
            ("beta * (task + 1) + 1", "beta * (task + 1)"),
            ("rise[:, 0] = fall[:, -1] = 1", "fall[:, -1] = 1"),
            ("weights / weights.sum(axis=1, keepdims=True)", "weights"),
        ),
        within("fading_times", ("chance[own] * reached[-1]", "chance[own]")),
    ),
    *of(
        "streams/repeat.py",
        FAMILIES,
        within(
            "slot_table",
            ("table[::-1]", "table"),
            ("left[generator.permutation(classes)[:rest]] += 1", "left[:rest] += 2"),
            ("left -= row", "pass"),
        ),
        within("images_of_slots", ("own[used : used + more]", "own[:more]")),
        within("first_experiences", ("weights / weights.sum()", "weights + (1 - weights.sum()) / experiences")),
        within(
            "sampled_table",
            ("number > begin", "number >= begin - 1"),
            ("comes[comes.any(axis=1)]", "comes"),
        ),
        within(
            "sampled_images",
            (
                'rng.generator(seed, "images of an experience", label, number)',
                'rng.generator(seed, "images of an experience", label)',
            ),
        ),
    ),
    *of(
        "streams/longtail.py",
        FAMILIES,
        within(
            "tail_counts",
            ("max(classes - 1, 1)", "classes"),
            ("np.floor(largest * (1 / ratio) ** share)", "np.rint(largest * (1 / ratio) ** share)"),
        ),
        within(
            "longtail",
            ("channel_statistics(images.numpy())", "(data.mean, data.std)"),
            (
                "wanted[ordered] = tail_counts(int(counts.max()), data.classes, ratio, shape)",
                "wanted[:] = tail_counts(int(counts.max()), data.classes, ratio, shape)",
            ),
        ),
    ),
    *of(
        "streams/noisy.py",
        FAMILIES,
        within(
            "wrong_labels",
            ("possible[label] & (np.arange(len(possible)) != label)", "possible[label]"),
            ("np.searchsorted(others, label) % len(others)", "np.searchsorted(others, label) - 1"),
        ),
        within(
            "noisy",
            ("np.ones((1, stream.data.classes), bool) if across else members", "members"),
            (
                "replace(stream, data=replace(stream.data, train_y=labels), clean_y=clean)",
                "replace(stream, data=replace(stream.data, train_y=labels), clean_y=labels)",
            ),
        ),
    ),
    *of(
        "streams/delayed.py",
        FAMILIES,
        within(
            "delayed",
            ("stream.marks - delay", "stream.marks"),
            ("len(stream) - delay", "len(stream)"),
            ("stream.marks[:-1] - delay", "stream.marks[:-1]"),
        ),
    ),
    *of(
        "streams/domain.py",
        DOMAINS,
        within(
            "DomainStream.inputs",
            ("self.views[domain](pixels[rows], images[rows])", "self.views[domain](pixels[rows], items[rows])"),
            ("self.views[domain](pixels[rows], images[rows])", "self.views[domain](pixels[rows], np.flatnonzero(rows))"),
        ),
        within("DomainStream.labels", ("items % len(self.data.train_y)", "items // len(self.views)")),
        within(
            "DomainStream.beyond_the_order",
            ("super().beyond_the_order | {'views': self.views}", "super().beyond_the_order"),
        ),
        within(
            "views_of",
            ("(number + (not identity)) * 180 / tasks", "(number + (not identity)) * 360 / tasks"),
            ("Permuted(seed, number)", "Permuted(0, number)"),
        ),
        within(
            "seen_tests",
            ("rows + TEST_IMAGES", "rows"),
            ("np.tile(data.test_y[rows], len(views))", "np.repeat(data.test_y[rows], len(views))"),
        ),
        within("of_folders", ("data.train_domain == number", "data.train_domain != number")),
    ),
    *of("data/domains.py", DOMAINS, within("from_domains", ("number[labels]", "labels"))),
    *of(
        "streams/views.py",
        DOMAINS,
        within("Rotated.__call__", ("self.degrees", "-self.degrees", 2)),
        within("Permuted.order", ("self.domain", "0")),
        within("Corrupted.__call__", ("rng.generator(self.seed, self.name, number)", "rng.generator(self.seed, self.name, row)")),
        within("Corrupted.strength", ("self.severity - 1", "self.severity - 2")),
        within(
            "gaussian_noise",
            ("deviation * generator.standard_normal(x.shape)", "deviation**2 * generator.standard_normal(x.shape)"),
        ),
        within("shot_noise", ("generator.poisson(x * scale) / scale", "generator.poisson(x * scale) / scale**1.1")),
        within("impulse_noise", ("share / 2", "share / 4")),
        within(
            "speckle_noise",
            ("x * deviation * generator.standard_normal(x.shape)", "deviation * generator.standard_normal(x.shape)"),
        ),
        within("defocus_blur", ("radius**2", "radius**2 + 1"), ("2 * alias**2", "20 + alias**2")),
        within("glass_blur", ("x[:, row, column] = there", "pass")),
        within(
            "zoom_blur",
            ("1 + len(factors)", "len(factors)"),
            ("0.01 * np.arange(round(100 * (largest - 1)) + 1)", "0.01 * np.arange(round(100 * (largest - 1)))"),
        ),
        within("fog", ("brightest + amount", "1 + amount")),
        within("brightness", ("value + more", "value * (1 + more)")),
        within("contrast", ("(1, 2)", "(0, 1, 2)")),
        within("saturate", ("factor * saturation + more", "factor * (saturation + more)")),
        within("pixelate", ("int(width * share)", "round(width * share)")),
        within("enlarged", ("centre - centre / factor", "centre / factor - centre")),
        within("plasma", ("wobble / decay", "wobble")),
        within("blurred", ("(0, deviation, deviation)", "(0, deviation, 0)")),
    ),
    *of(
        "streams/timed.py",
        DOMAINS,
        within(
            "timed",
            ('np.argsort(taken, kind="stable")', "np.argsort(-taken.astype(np.int64))"),
            ('np.searchsorted(begins, when, side="right")', "np.searchsorted(begins, when)"),
            ("taken[part[0]]", "taken[part[-1]]"),
        ),
    ),
    *of("streams/task.py", FAMILIES, within("task", ("replace(stream, masked=True)", "stream"))),
    *of("streams/picture.py", FAMILIES, within("classes_over_time", ("counts.sum(axis=0)", "counts.sum()"))),
    *of("engine/evaluate.py", FAMILIES, within("evaluate", ("scores.masked_fill(~allowed, -math.inf)", "scores"))),
]
