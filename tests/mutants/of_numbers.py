"""Errors in pure arithmetic: random numbers, losses, augmentation, metrics, statistics, theory, and what a report reads."""

from __future__ import annotations

from mutant import of, within

AUGMENT = "oracle/test_augment.py"
TURNED = "oracle/test_rotation_contrast.py"
EDITS = "oracle/test_rand_augment.py"
METRICS = "oracle/test_metrics.py"
STATISTICS = "oracle/test_statistics.py"
THEORY = "test_theory.py"

NUMBERS = [
    *of(
        "rng.py",
        "oracle/test_rng.py",
        within(
            "key",
            ("_word(part) if isinstance(part, str) else int(part) & _MASK", "_word(str(part))"),
            ("_mix((state + _GOLDEN + word) & _MASK)", "_mix((_GOLDEN + word) & _MASK) ^ state"),
        ),
        within(
            "uniform",
            ("(bits >> np.uint64(11)) * 2.0**-53", "(bits >> np.uint64(11)) * 2.0**-52"),
            ("rows[:, None] + columns[None, :]", "rows[:, None] ^ columns[None, :]"),
        ),
        within("torch_seed", ("generator.set_state(state)", "generator.get_state()")),
        within(
            "Reseeded.__call__", ('self._start["state"]["key"][0] = key(*parts)', 'self._start["state"]["key"][0] += key(*parts)')
        ),
    ),
    # Losses that several methods share.
    *of(
        "functional/losses.py",
        "oracle/test_losses.py golden/test_golden_mose.py golden/test_golden_lwf.py golden/test_golden_onpro.py "
        "golden/test_golden_ocm.py golden/test_golden_lucir.py oracle/test_icarl.py golden/test_golden_co2l.py",
        within("contrast", ("(count > 0).sum()", "(count >= 0).sum()")),
        within("entropy", ("(p * log_p).sum(dim=-1)", "(p * log_p).mean(dim=-1)")),
        within("distillation", ("p * (log_p - log_q)", "p * (log_q - log_p)")),
        within("info_nce_of_pairs", ("sum_of_diagonals(terms, half) / (2 * half)", "sum_of_diagonals(terms, half) / half")),
        within("info_nce", ("same / same.sum(dim=1, keepdim=True)", "same")),
        within("margin_ranking", ("margin - own + best", "margin + own - best")),
        within(
            "asymmetric_contrast", ("(of_each * is_anchor).mean(dim=-1)", "(of_each * is_anchor).sum(dim=-1) / is_anchor.sum()")
        ),
        within("binary_cross_entropy", ("(each * classes).sum(dim=-1)", "(each * classes).mean(dim=-1)")),
        within(
            "frobenius_distance",
            ("torch.linalg.vector_norm(a - b, dim=(1, 2))", "torch.linalg.vector_norm(a - b, dim=(1, 2)) ** 2"),
        ),
    ),
    *of(
        "functional/losses.py",
        "golden/test_golden_pcr.py oracle/test_pcr.py",
        within(
            "proxy_contrast",
            (
                "cross_entropy(full_precision(similarity) + log_count, y) + log_count[y].mean()",
                "cross_entropy(full_precision(similarity) + log_count, y)",
            ),
        ),
    ),
    *of(
        "functional/losses.py",
        "golden/test_golden_gdumb.py oracle/test_gdumb.py",
        within(
            "mixed_cross_entropy",
            ("(1 - share) * cross_entropy(logits, other, classes)", "share * cross_entropy(logits, other, classes)"),
        ),
    ),
    # Pixels and augmentation.
    *of(
        "inputs.py",
        AUGMENT,
        within("Images.__init__", ("1 / (FULL[dtype] * self.std)", "1 / self.std"), ("-self.mean / self.std", "-self.mean")),
        within("Images.restore", ("x * self.std + self.mean", "x * self.std")),
    ),
    *of(
        "images/augment.py",
        AUGMENT,
        within("apply", ("u[:, used : used + operation.draws]", "u[:, : operation.draws]")),
        within("Mirror.__call__", ("return x.flip(-1)", "return x.flip(-2)")),
        within("Flip.__call__", ("u[:, 0] < self.p", "u[:, 0] > self.p")),
        within("Grey.__call__", ("u[:, 0] < self.p", "u[:, 0] > self.p")),
        within(
            "ResizedCrop.__call__",
            ("self.high - self.low", "self.high"),
            ("math.log(16 / 9)", "math.log(4 / 3)"),
            ("fits.argmax(axis=1)", "fits.shape[1] - 1 - fits[:, ::-1].argmax(axis=1)"),
            ("np.where(found, w[rows, first], width)", "np.where(found, w[rows, first], 1)"),
            (
                "crop(x, w, h, window_offset(u[:, -2], w, width), window_offset(u[:, -1], h, height))",
                "crop(x, w, h, window_offset(u[:, -1], w, width), window_offset(u[:, -2], h, height))",
            ),
        ),
        within(
            "PadCrop.__call__",
            ("inputs.black", "torch.zeros_like(inputs.black)"),
            ("2 * self.pad + 1", "2 * self.pad"),
            ("corner[:, 0, None]", "corner[:, 1, None]"),
        ),
        within(
            "ColourJitter.__call__",
            ("2 * u[touched, 1:] - 1", "u[touched, 1:]"),
            ("[self.brightness, self.contrast, self.saturation]", "[self.contrast, self.brightness, self.saturation]"),
            ("spread[:, 3] * self.hue", "spread[:, 3]"),
        ),
        within(
            "ColourJitter.__call__.jitter",
            ("(inputs.restore(some) * factor[:, 0]).clamp(0, 1)", "inputs.restore(some) * factor[:, 0]"),
            ("grey.mean(dim=(-2, -1), keepdim=True)", "grey"),
            (
                "torch.lerp(luminance(some).expand_as(some), some, factor[:, 2])",
                "torch.lerp(luminance(some).expand_as(some), some, factor[:, 1])",
            ),
            ("(some - inputs.mean) / inputs.std", "some - inputs.mean"),
        ),
        within(
            "luminance",
            (
                "0.299 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]",
                "0.299 * x[:, 2:3] + 0.587 * x[:, 1:2] + 0.114 * x[:, 0:1]",
            ),
        ),
        within(
            "window_sizes",
            (
                "np.rint(np.sqrt(pixels * aspect)), np.rint(np.sqrt(pixels / aspect))",
                "np.rint(np.sqrt(pixels / aspect)), np.rint(np.sqrt(pixels * aspect))",
            ),
        ),
        within("window_offset", ("np.floor(u * (2 * room + 1)) - room", "np.floor(u * (room + 1))")),
        within(
            "crop",
            (
                'F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)',
                'F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)',
            ),
            ("F.affine_grid(theta, list(x.shape), align_corners=False)", "F.affine_grid(theta, list(x.shape), align_corners=True)"),
        ),
        within(
            "shift_hue",
            ("(blue - red) / safe", "(red - blue) / safe"),
            (
                "torch.tensor([5.0, 3.0, 1.0], device=rgb.device, dtype=rgb.dtype)",
                "torch.tensor([1.0, 3.0, 5.0], device=rgb.device, dtype=rgb.dtype)",
            ),
            ("sector.gather(1, strongest[:, None])[:, 0] / 6 + turn", "sector.gather(1, strongest[:, None])[:, 0] / 6 - turn"),
        ),
        within(
            "mix",
            (
                "torch.lerp(other, one, torch.from_numpy(share).to(x).view(-1, *[1] * (x.ndim - 1)))",
                "torch.lerp(one, other, torch.from_numpy(share).to(x).view(-1, *[1] * (x.ndim - 1)))",
            ),
        ),
        within("unlike_pairs", ("labels[first] != labels[second]", "first != second")),
        within("central_shares", ("(share < low) | (share > high)", "share < low")),
        within("pair_number", ("low * (2 * n - low - 1)", "low * (2 * n - low + 1)")),
        within("AUGMENTATIONS", ("ResizedCrop(0.6, 1.0)", "ResizedCrop(0.3, 1.0)")),
        within("NORMALISATIONS", ("((0.5,), (0.5,))", "((0.5,), (0.25,))")),
    ),
    *of(
        "images/augment.py",
        TURNED,
        within("Rotate.__call__", ("torch.rot90(x, self.quarters, (-2, -1))", "torch.rot90(x, self.quarters, (-1, -2))")),
        within("TurnHalves.__call__", ("half.flip(-2, -1)", "half.flip(-1)"), ("x.shape[-1] // 2", "(x.shape[-1] + 1) // 2")),
        within(
            "ROTATIONS",
            (
                "((False, False), (False, True), (True, True), (True, False))",
                "((False, False), (True, False), (True, True), (False, True))",
            ),
        ),
        within(
            "Blend.__call__",
            (
                "torch.lerp(x, inputs.normalise(self.others).to(x), torch.from_numpy(self.share).to(x).view(-1, 1, 1, 1))",
                "torch.lerp(inputs.normalise(self.others).to(x), x, torch.from_numpy(self.share).to(x).view(-1, 1, 1, 1))",
            ),
        ),
    ),
    *of(
        "images/rand_augment.py",
        EDITS,
        within(
            "RandAugment.apply",
            ("(high - low) * self.magnitude / 30", "(high - low) * self.magnitude / 31"),
            ("x.shape[-1] / MADE_FOR", "MADE_FOR / x.shape[-1]"),
        ),
        within("RandAugment.__call__", ("np.argsort(order)", "order")),
        within(
            "autocontrast",
            ("((x - low) * (255 / (high - low).clamp(min=1))).floor()", "((x - low) * (255 / (high - low).clamp(min=1))).round()"),
        ),
        within("equalise", ("below + step // 2", "below")),
        within("invert", ("return 255 - x", "return 256 - x")),
        within("posterise", ("max(1, int(value))", "max(1, round(value))")),
        within("solarise", ("torch.where(x < value, x, 255 - x)", "torch.where(x <= value, x, 255 - x)")),
        within(
            "add_and_solarise",
            ("solarise((x + value).clamp(0, 255).floor(), 128, u)", "solarise((x + value).clamp(0, 255).floor(), 127, u)"),
        ),
        within("blend", ("degenerate + value * (x - degenerate)", "degenerate + value * (x - degenerate) + 0.5")),
        within(
            "grey_of",
            (
                "19595 * x[:, 0:1] + 38470 * x[:, 1:2] + 7471 * x[:, 2:3] + 32768",
                "19595 * x[:, 0:1] + 38470 * x[:, 1:2] + 7471 * x[:, 2:3]",
            ),
        ),
        within("colour", ("blend(grey_of(x).expand_as(x), x, value)", "blend(x, grey_of(x).expand_as(x), value)")),
        within("contrast", ("grey_of(x).mean(dim=(1, 2, 3), keepdim=True) + 0.5", "grey_of(x).mean(dim=(1, 2, 3), keepdim=True)")),
        within("brightness", ("torch.zeros_like(x)", "torch.full_like(x, 255)")),
        within("sharpness", ("kernel[1, 1] = 5", "kernel[1, 1] = 4")),
        within(
            "rotate", ("-np.radians(value)", "np.radians(value)"), ("height / 2 + sin * width / 2", "height / 2 - sin * width / 2")
        ),
        within("shear_x", ("(one, value * sign(u), zero)", "(one, -value * sign(u), zero)")),
        within("shear_y", ("(value * sign(u), one, zero)", "(-value * sign(u), one, zero)")),
        within("shift_x", ("(one, zero, value * sign(u))", "(one, zero, -value * sign(u))")),
        within("shift_y", ("(zero, one, value * sign(u))", "(zero, one, -value * sign(u))")),
        within("sign", ("np.where(u[:, 0] < 0.5, 1.0, -1.0)", "np.where(u[:, 0] < 0.5, -1.0, 1.0)")),
        within("moved", ("np.arange(width)[None, None, :] + 0.5", "np.arange(width)[None, None, :]")),
        within(
            "cut_out",
            ("u[:, axis] * size - value / 2", "u[:, axis] * size - value"),
            ("left + math.floor(value)", "left + math.ceil(value)"),
        ),
    ),
    # Metrics of a run.
    *of(
        "functional/metrics.py",
        METRICS,
        within("acc", ("float(a[-1].mean())", "float(np.diagonal(a).mean())")),
        within("aia", ("aaa(seen_rows(a))", "aaa(list(_square(a)))")),
        within("forgetting", ("a[j:-1, j].max()", "a[j, j]"), ("a[j:-1, j].max()", "a[j:, j].max()")),
        within(
            "forgetting_mose", ("range(len(a))", "range(max(1, len(a) - 1))"), ("a[j:, j].max() - a[-1, j]", "a[j, j] - a[-1, j]")
        ),
        within("bwt", ("a[-1, j] - a[j, j]", "a[j, j] - a[-1, j]"), ("range(len(a) - 1)", "range(len(a))")),
        within("learning_acc", ("np.diagonal(_square(a))", "_square(a)[-1:]")),
        within(
            "seen_rows",
            ("[row[: t + 1] for t, row in enumerate(_square(a))]", "[row[: t + 2] for t, row in enumerate(_square(a))]"),
        ),
        within("aaa", ("[_mean(row) for row in evaluations]", "[value for row in evaluations for value in np.asarray(row)]")),
        within(
            "min_acc",
            ("len(row) > j + 1", "len(row) > j"),
            ("np.min([row[j] for row in rows if len(row) > j + 1])", "np.mean([row[j] for row in rows if len(row) > j + 1])"),
        ),
        within(
            "wc_acc",
            ("share * last[-1] + (1.0 - share) * min_acc(evaluations)", "(1.0 - share) * last[-1] + share * min_acc(evaluations)"),
        ),
        within("ece", ("correct - confidence", "np.abs(correct - confidence)"), ("p.argmax(axis=1)", "p.argmin(axis=1)")),
        within(
            "_bin_of",
            ('np.searchsorted(inner_edges, confidence, side="left")', 'np.searchsorted(inner_edges, confidence, side="right")'),
            ("np.linspace(0.0, 1.0, bins + 1)", "np.linspace(0.0, 1.0, bins)"),
        ),
        within("nll", ("p[np.arange(len(y)), y]", "p.max(axis=1)"), ("np.finfo(np.float32)", "np.finfo(np.float64)")),
    ),
    *of(
        "functional/metrics.py",
        f"{METRICS} test_sheet.py test_compare.py",
        within("HIGHER_IS_BETTER", ("name not in LOWER_IS_BETTER", "name in LOWER_IS_BETTER")),
        within("LOWER_IS_BETTER", ('"forgetting"', '"bwt"'), ('"ece"', '"acc"')),
    ),
    # Statistics over seeds.
    *of(
        "functional/statistics.py",
        STATISTICS,
        within("FEWEST_SEEDS", ("3", "2")),
        within("CONFIDENCE", ("0.95", "0.9")),
        within("POWER", ("0.8", "0.9")),
        within("summarise", ("array.std(ddof=1)", "array.std()"), ("t_quantile(n) * std / math.sqrt(n)", "t_quantile(n) * std")),
        within(
            "t_quantile",
            ("stdtrit(n - 1, (1.0 + CONFIDENCE) / 2.0)", "stdtrit(n, (1.0 + CONFIDENCE) / 2.0)"),
            ("(1.0 + CONFIDENCE) / 2.0", "CONFIDENCE"),
        ),
        within(
            "paired",
            ("summarise(first - second)", "summarise(second - first)"),
            ("std / math.sqrt(n)", "std"),
            ("2.0 * float(stdtr(n - 1, -t))", "float(stdtr(n - 1, -t))"),
            ("stdtr(n - 1, -t)", "stdtr(n, -t)"),
            (
                "mean / std if std else (math.copysign(math.inf, mean) if mean else 0.0)",
                "mean / (std / math.sqrt(n)) if std else (math.copysign(math.inf, mean) if mean else 0.0)",
            ),
        ),
        within(
            "signed_rank",
            ("array[array != 0]", "array[array >= 0]"),
            ("rankdata(np.abs(array))", "rankdata(array)"),
            ("chances[: total + 1]", "chances[:total]"),
            (
                "2.0 * float(min(chances[: total + 1].sum(), chances[total:].sum()))",
                "float(min(chances[: total + 1].sum(), chances[total:].sum()))",
            ),
        ),
        within(
            "holm",
            ("len(order) - rank", "len(order)"),
            ("max(largest, min(1.0, (len(order) - rank) * value))", "max(0.0, min(1.0, (len(order) - rank) * value))"),
            (
                "((value, place) for place, value in enumerate(p) if not math.isnan(value))",
                "((value, place) for place, value in enumerate(p))",
            ),
        ),
        within(
            "power",
            ("abs(effect) * math.sqrt(n)", "abs(effect) * n"),
            ("nct.sf(threshold, n - 1, shift)", "nct.sf(threshold, n, shift)"),
        ),
        within("seeds_to_tell", ("abs(points) / difference.std", "abs(points) / difference.std**2")),
        within(
            "ranking",
            ("-table if higher_is_better else table", "table"),
            ("settings * ((mean_ranks - (methods + 1) / 2) ** 2).sum()", "((mean_ranks - (methods + 1) / 2) ** 2).sum()"),
            ("settings * (methods - 1)", "settings * methods"),
            ("chdtrc(methods - 1, between / within)", "chdtrc(methods, between / within)"),
            (
                "float(studentized_range.ppf(CONFIDENCE, methods, math.inf)) / math.sqrt(2)",
                "float(studentized_range.ppf(CONFIDENCE, methods, math.inf))",
            ),
            ("methods * (methods + 1)", "methods * (methods - 1)"),
        ),
    ),
    # The paper's theorems.
    *of(
        "lab/theory/bounds.py",
        THEORY,
        within("between", ("end[name] - value", "end[name]")),
        within("difference", ("end[name] - value", "value - end[name]")),
        within("norm", ("math.sqrt(inner(vector, vector))", "inner(vector, vector)")),
        within("fractions", ("index / (points - 1)", "index / points")),
        within(
            "Objective.values",
            ("(terms[1:] - self.target) ** 2", "(terms[1:] - self.target).abs()"),
            ("self.weight * deviation", "deviation"),
        ),
        within("Objective.gradient", ("terms[0] if factors is None else (factors.to(terms) * terms).sum()", "terms[0]")),
        within("Objective.slopes", ("factor * gradient", "gradient")),
        within(
            "Objective.curvature",
            ("2 * self.weight * float((first[1:] ** 2).sum())", "self.weight * float((first[1:] ** 2).sum())"),
            ("norm(difference(start, end)) ** 2", "norm(difference(start, end))"),
        ),
        within("Objective._factors", ("2 * self.weight * (terms[1:] - self.target)", "self.weight * (terms[1:] - self.target)")),
        within(
            "gaussian_kl",
            ("float((moved.double() ** 2).sum()) / (2 * v)", "float((moved.double() ** 2).sum()) / v"),
            ("ratio - 1 - math.log(ratio)", "ratio - 1 + math.log(ratio)"),
            ("posterior[name] / prior[name]", "prior[name] / posterior[name]"),
        ),
        within(
            "printed_kl",
            ("min(prior[name] for name in start)", "max(prior[name] for name in start)"),
            ("kappa / 2 * norm(difference(start, end)) ** 2", "kappa * norm(difference(start, end)) ** 2"),
            (
                "kappa / 2 * norm(difference(start, end)) ** 2 + gaussian_kl(start, start, prior, posterior)",
                "kappa / 2 * norm(difference(start, end)) ** 2",
            ),
        ),
        within("complexity", ("math.sqrt(samples)", "samples"), ("2 * (samples - 1)", "2 * samples")),
        within(
            "choice_cost",
            ("math.pi**2 * rung**2", "math.pi**2 * rung"),
            ("math.log(math.pi**2 * rung**2 / 6) + math.log(families)", "math.log(math.pi**2 * rung**2 / 6)"),
        ),
        within("PacBayes.bound", ("self.kl + self.cost", "self.kl")),
        within("PacBayes.bound_printed_kl", ("self.kl_printed + self.cost", "self.kl + self.cost")),
        within("PacBayes.bound_objective", ("self.training_deviation + self.test_deviation", "self.training_deviation")),
        within("PacBayes.objective", ("self.test_deviation", "self.training_deviation")),
        within("Segment.stationary", ("STATIONARY * self.gradient_before", "self.gradient_before")),
        within(
            "measure_segment",
            (
                "min(objective.curvature(before, after, at) for at in fractions(points))",
                "max(objective.curvature(before, after, at) for at in fractions(points))",
            ),
            ("inner(last.total, moved) - inner(first.total, moved)", "inner(last.total, moved)"),
            ("objective.values(before)", "objective.values(after)"),
            (
                "map(max, zip(first.entropies, *inside, last.entropies, strict=True))",
                "map(min, zip(first.entropies, *inside, last.entropies, strict=True))",
            ),
        ),
        within(
            "largest_gradient",
            (
                "max(norm(objective.gradient(between(start, end, at))) for at in fractions(points))",
                "min(norm(objective.gradient(between(start, end, at))) for at in fractions(points))",
            ),
        ),
        within("ForgettingBound.by_distance", ("self.steepness * self.distance", "self.chord_steepness * self.distance")),
        within(
            "ForgettingBound.by_path",
            ("math.fsum(segment.length for segment in self.segments)", "max(segment.length for segment in self.segments)"),
        ),
        within("ForgettingBound.corrected", ("part.gradient_before + part.gradient_after", "part.gradient_before")),
        within("ForgettingBound.printed", ("part.risk_gradient + self._entropy_cost(part)", "part.risk_gradient")),
        within("ForgettingBound.second_form", ("2 * self._entropy_cost(part)", "self._entropy_cost(part)")),
        within("ForgettingBound.entropy_lipschitz", ("max(c) ** 2", "max(c)")),
        within(
            "ForgettingBound._entropy_cost",
            ("2 * self.weight * self.entropy_lipschitz", "self.weight * self.entropy_lipschitz"),
            ("math.sqrt(segment.deviation)", "segment.deviation"),
        ),
        within(
            "ForgettingBound._over_convexity",
            ("all(mu > 0 for mu in mus)", "any(mu > 0 for mu in mus)"),
            (
                "(top / mu for top, mu in zip(numerators, mus, strict=True))",
                "(top * mu for top, mu in zip(numerators, mus, strict=True))",
            ),
        ),
    ),
    *of(
        "lab/theory/measure.py",
        THEORY,
        within(
            "LabelledImages._missing", ("1 - chances.gather(1, y[:, None])[:, 0]", "-chances.gather(1, y[:, None])[:, 0].log()")
        ),
        within("LabelledImages._wrong", ("chances.argmax(dim=1) != y", "chances.argmax(dim=1) == y")),
        within("LabelledImages._part.part", ("terms * (len(y) / len(self.y))", "terms")),
        within("target_entropies", ("found[-LAST_ROWS:]", "found[:LAST_ROWS]")),
        within(
            "fold",
            ("torch.rsqrt(variance + eps)", "torch.rsqrt(variance)"),
            (
                'found.pop(f"{name}.bias", torch.zeros_like(mean)) - mean * scale',
                'found.pop(f"{name}.bias", torch.zeros_like(mean)) - mean',
            ),
        ),
        within("variances", ("square if square > NO_SCALE else 1.0", "square")),
        within("drawn", ("math.sqrt(spread[name])", "spread[name]")),
        within(
            "choose_noise", ("STEP_DOWN ** (1 - rung)", "STEP_DOWN ** (-rung)"), ("kl + choice_cost(rung, len(FAMILIES))", "kl")
        ),
        within(
            "NoiseSearch.tolerated",
            ("self.error + TOLERATED", "TOLERATED"),
            ("min(stood, key=lambda noise: noise.kl, default=None)", "max(stood, key=lambda noise: noise.kl, default=None)"),
        ),
        within(
            "PacBayesTask.measure",
            ("float(np.std(errors, ddof=1)) / math.sqrt(len(errors))", "float(np.std(errors, ddof=1))"),
            ("choice_cost(noise.rung, len(FAMILIES))", "choice_cost(noise.rung)"),
            ("test.values(after)", "training.values(after)"),
        ),
        within(
            "forgetting_of_all_pairs",
            ("max(steepness, last)", "last"),
            ("population.values(thetas[new]).total", "population.values(thetas[new]).risk"),
            ("segments[old:new]", "segments[old - 1 : new]"),
        ),
        within("_samples", ("np.unique(stream.order[_positions(stream, ends, number)])", "stream.order")),
    ),
    *of(
        "lab/theory/sharpness.py",
        "oracle/test_sharpness.py",
        within("sharpness", ("sum(both) / 2 - here", "both[0] - here"), ("sum(rises) / len(rises)", "max(rises)")),
        within("direction", ("radius * value.norm()", "radius")),
        within(
            "mean_cross_entropy",
            (
                'float(F.cross_entropy(taps.logits.flatten(0, 1), y.repeat(net.layers), reduction="sum")) / net.layers',
                'float(F.cross_entropy(taps.logits.flatten(0, 1), y.repeat(net.layers), reduction="sum"))',
            ),
        ),
    ),
    # What a report reads out of a record.
    *of(
        "lab/report/runs.py",
        "test_report.py",
        within("Run.matrix", ('record["task_end"] and rule in record["accuracy"]', 'rule in record["accuracy"]')),
        within("Run.seen", ('_numbers(record["accuracy"][rule])[: record["task"] + 1]', '_numbers(record["accuracy"][rule])')),
        within(
            "measure",
            (
                "{name: metric(rows) for name, metric in ANYTIME_METRICS.items()}",
                "{name: metric(rows[-1:]) for name, metric in ANYTIME_METRICS.items()}",
            ),
        ),
        within("_by_step", ('record.get("task_end", True) or not earlier.get("task_end", False)', "True")),
    ),
    *of(
        "lab/report/kept.py",
        "test_keep.py",
        within("KeptRun.read", ("seal == f'{Digest().add(body)}\"}}'.encode()", "True")),
        within("_split", ('"" if folder in known else folder', "folder")),
        within("find_line", ("line.folder == name", "True")),
    ),
    *of("lab/report/keep.py", "test_keep.py", within("thinned", ('entry["step"] % every == 0', 'entry["step"] % every == 1'))),
    *of("lab/report/runs.py", "test_keep.py", within("_each_once", ("places |= {folder: folder for folder in folders}", "pass"))),
    *of(
        "lab/report/groups.py",
        "test_report.py test_compare.py",
        within("Group.minus", ("[run for run in self.runs if _pair_key(run) in theirs]", "self.runs[: len(theirs)]")),
        within(
            "_pair_key",
            ('run.config["seed"], run.config["stream"], run.config.get("stream_hash")', 'run.config["seed"], run.config["stream"]'),
        ),
        within("Group.cost", ("sum(costs) / len(costs)", "sum(costs)")),
    ),
    *of(
        "lab/report/compare.py",
        "test_compare.py",
        within("compare", ("holm([difference.p for difference in differences])", "[difference.p for difference in differences]")),
        within("Comparison.verdict", ("self.corrected >= 1 - CONFIDENCE", "self.corrected >= CONFIDENCE")),
        within("Comparison.sentence", ("self.difference.mean > 0", "self.difference.mean < 0")),
        within("Comparison.seeds_needed", ("self.difference.mean", "1.0")),
    ),
]
