"""Errors in closed forms: sums, solutions, choices of λ, maps and the papers' presets."""

from __future__ import annotations

from mutant import of, within

FOUND_IN = "oracle/test_closed.py golden/test_golden_closed.py test_merging.py"

CLOSED = [
    *of(
        "functional/sums.py",
        FOUND_IN,
        within(
            "Sums.add",
            ("weight.sqrt()[:, None] * apart", "weight[:, None] * apart"),
            ("h - means[:, member]", "h"),
            ("rows[..., start:stop].transpose(1, 2)", "rows[..., :COLUMNS].transpose(1, 2)"),
            (
                "self.scatter[:, label].baddbmm_(own.transpose(1, 2), own)",
                "self.scatter[:, number].baddbmm_(own.transpose(1, 2), own)",
            ),
        ),
        within(
            "Sums.merge",
            ("(weight[:, None] * apart).transpose(1, 2) @ apart", "apart.transpose(1, 2) @ apart"),
            ("weight[:, None, None] * apart[..., None] * apart[..., None, :]", "apart[..., None] * apart[..., None, :]"),
            ("some if numbers is None else numbers[some]", "some"),
        ),
        within(
            "Sums._take_in",
            ("(counts / after)[:, None] * apart", "(before / after)[:, None] * apart"),
            ("before * counts / after", "counts"),
        ),
        within(
            "Sums.within",
            ("self.scatter.sum(dim=1)", "self.scatter.mean(dim=1)"),
            ("self.scatter.tril() + self.scatter.tril(-1).transpose(1, 2)", "self.scatter"),
            ("self.scatter.tril(-1)", "self.scatter.tril()"),
        ),
        within("Sums.gram", ("self.within + self.class_sums @ self.means", "self.within")),
    ),
    *of(
        "functional/closed_forms.py",
        FOUND_IN,
        within("nearest_means", ("-means.square().sum(dim=1, keepdim=True) / 2", "-means.square().sum(dim=1, keepdim=True)")),
        within(
            "oas",
            ("(freedom + 1) * (energy - variance.square() / size)", "freedom * (energy - variance.square() / size)"),
            ("energy + variance.square()", "energy"),
        ),
        within(
            "shrunk",
            ("(1 - share)[:, None, None] * covariance", "covariance"),
            ("torch.where(variance > 0, variance, 1.0)", "variance"),
        ),
        within(
            "discriminant",
            ("-solved.overlaps.diagonal(dim1=1, dim2=2)[:, None] / 2", "-solved.overlaps.diagonal(dim1=1, dim2=2)[:, None]"),
            ("(sums.counts[sums.met] / sums.images).log()", "(sums.images / sums.counts[sums.met]).log()"),
        ),
        within("class_weights", ("weights * counts.sum() / (weights * counts).sum()", "weights")),
        within(
            "Ridge.__init__",
            ("means - self.center", "means"),
            ("weigh * counts", "counts"),
            (
                "(weigh[:, None, None] * sums.scatter[:, sums.met]).sum(dim=1) if each_class else sums.within",
                "sums.within",
            ),
        ),
        within(
            "Ridge.scale",
            ("min(len(self.sums), self.means.shape[1])", "len(self.sums)"),
            ("torch.where(scale > 0, scale, 1.0)", "scale"),
        ),
        within("Ridge.solved", ("torch.diag(1 / self.mass)", "torch.diag(self.mass)")),
        within(
            "Ridge.at",
            ("self.intercept * self.mass / self.mass.sum()", "self.mass / self.mass.sum()"),
            (
                "self.intercept * self.mass / self.mass.sum() - self.center.transpose(1, 2) @ weight",
                "self.intercept * self.mass / self.mass.sum()",
            ),
        ),
        within(
            "Ridge.evidence",
            ("(n - self.intercept) * self.unexplained(inner).log()", "n * self.unexplained(inner).log()"),
            ("self.mass.log().sum()", "0"),
            ("self.means.shape[1] * ridge.log()", "0"),
        ),
        within("Ridge.unexplained", ("trace - self.intercept * self.mass.square().sum() / n", "trace")),
        within(
            "Ridge.fit_and_freedom",
            ("values + 2 * ridges", "values + ridges"),
            ("self.intercept + (values / (values + ridges)).sum(dim=2)", "(values / (values + ridges)).sum(dim=2)"),
            ("n - self.intercept * self.mass.square().sum() / n", "n"),
        ),
        within("Ridge.generalised_cross_validation", ("(1 - freedom / n).square()", "(1 - freedom / n)")),
        within(
            "by_descent",
            ("torch.where(upwards, 0.5, -0.5)", "0.5"),
            ("above < below", "above > below"),
            ("found < least", "found > least"),
            ("lower(-1.0).any()", "False"),
        ),
        within("held_out_errors", ("gram @ solution - 2 * wanted", "gram @ solution - wanted")),
        within(
            "raised",
            ("off_diagonal * mean[..., None, None] * (1 - identity)", "off_diagonal * mean[..., None, None]"),
            ("covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)", "covariance.diagonal(dim1=-2, dim2=-1).sum(dim=-1)"),
        ),
        within("correlation", ("covariance.diagonal(dim1=-2, dim2=-1).sqrt()", "covariance.diagonal(dim1=-2, dim2=-1)")),
    ),
    *of(
        "methods/closed.py",
        f"{FOUND_IN} oracle/test_ranpac.py",
        within(
            "Closed.attach",
            ("(2 * drawn - 1) / math.sqrt(width)", "drawn / math.sqrt(width)"),
            ("2 * math.pi * torch.rand(layers, 1, size, dtype=torch.float64)", "torch.rand(layers, 1, size, dtype=torch.float64)"),
        ),
        within(
            "Closed.chosen",
            ("features[-1:]", "features[:1]", 1),
            ("features.mean(dim=0, keepdim=True)", "features.sum(dim=0, keepdim=True)"),
            ("features.sqrt()", "features.square()"),
        ),
        within(
            "Closed.mapped",
            ("(2 * self.gammas).sqrt()", "self.gammas.sqrt()"),
            ("math.sqrt(2 / projected.shape[-1])", "math.sqrt(1 / projected.shape[-1])"),
            ('projected.relu() if self.map == "relu" else projected.sigmoid()', "projected.sigmoid()"),
            ("z.repeat_interleave(self.members, dim=0)", "z.repeat(self.members, 1, 1)[: len(self.projection)].flip(0)"),
        ),
        within(
            "Closed.add",
            ("z.shape[-1] * z.var(dim=(1, 2), correction=0)", "z.var(dim=(1, 2), correction=0)"),
            ("HELD_OUT_EVERY - 1", "0"),
        ),
        within(
            "Closed.stale",
            ("STALE_SHARE * min(images, size)", "STALE_SHARE * images"),
            ("STALE_SHARE * min(images, size)", "STALE_SHARE * size"),
            ("images - self.solved_at >= max(1, enough)", "images - self.solved_at > max(1, enough)"),
            ("bool(unknown.any())", "False"),
        ),
        within(
            "Closed.renew",
            ("self.share * ridge.scale", "self.share"),
            ("self.images >= 2 * self.chosen_at", "self.images >= self.chosen_at"),
            ("self.solved_at = self.images", "self.solved_at = len(self.sums)"),
        ),
        within("Closed.before_eval", ("not self.temperature and self.stale", "self.stale")),
        within(
            "Closed.calibrate",
            ("DECAY * self.log_losses", "self.log_losses"),
            ("self.recent.known[y].nonzero().squeeze(1)", "torch.arange(len(y))"),
        ),
        within("Closed.covariance", ("images - len(self.sums.met)", "images")),
        within("Closed.merge", ("self.held_out.merge(other.held_out, numbers)", "pass"), ("self.forget_solution()", "pass")),
        within("Closed.solve", ("self.ridge(self.all_sums)", "self.ridge(self.sums)")),
        within("Closed.rules", ("scores / TEMPERATURES.to(scores.device)[best][:, None, None]", "scores")),
        within("Closed.rules", ("of_each.logsumexp(dim=1)", "of_each.sum(dim=1)")),
    ),
    *of(
        "nets/closed_rule.py",
        "oracle/test_replay.py",
        within(
            "closed_rule",
            ("torch.zeros_like(nothing.bias)", "nothing.bias"),
            ("sums.within / sums.images", "sums.within"),
            ("sums.images - len(sums.met)", "sums.images"),
            ("forms.Ridge(sums, intercept=True)", "forms.Ridge(sums, intercept=False)"),
        ),
    ),
    *of("nets/identity.py", "oracle/test_nets.py", within("Identity.forward", ("x.flatten(1)", "x.flatten(1).relu()"))),
    *of(
        "nets/pixels.py",
        "test_pixels.py",
        within("meant", ("expected(net) or OF_THE_DATA", "OF_THE_DATA")),
        within("_name_of", ("value * 3", "value")),
        within("_of_transformers", ('known["image_std"]', 'known["image_mean"]')),
    ),
    *of(
        "merging.py",
        "test_merging.py",
        within("merge", ("mine.images_seen += other.images_seen", "pass"), ("not same_trunk(a, b)", "False")),
        within("same_trunk", ("torch.equal(value, two[name].to(value.device))", "True")),
    ),
    *of("methods/acil.py", FOUND_IN, within("ACIL.closed", ('"relu"', '"sigmoid"'), ("False", "True"))),
    *of("methods/gacl.py", FOUND_IN, within("GACL.closed", ('"relu"', '"sigmoid"'), ("False", "True"))),
    *of("methods/air.py", FOUND_IN, within("AIR.closed", ("self.weights", '"none"'))),
    *of("methods/foal.py", FOUND_IN, within("FOAL.closed", ('"mean"', '"last"'), ('"layer"', '"none"'))),
    *of("methods/klda.py", FOUND_IN, within("KLDA.closed", ("self.members", "1"), ('"rff"', '"relu"'))),
    *of("methods/ncm.py", FOUND_IN, within("NCM.closed", ("self.score", '"euclidean"'), ("self.norm", '"none"'))),
    *of("methods/randumb.py", FOUND_IN, within("RanDumb.closed", ('"rff"', '"relu"'), ("self.priors", '"uniform"'))),
    *of(
        "methods/ranpac.py",
        "oracle/test_ranpac.py",
        within("RanPAC.closed", ('"relu"', '"sigmoid"'), ("False", "True"), ('"evidence"', '"gcv"'), ('"each"', '"last"')),
    ),
    *of(
        "methods/slda.py",
        "oracle/test_slda.py golden/test_golden_closed.py",
        within("SLDA.closed", ("self.shrink_to", '"variance"'), ("self.priors", '"uniform"'), ('"each"', '"last"')),
        within("AsPublished.add", ("number / (number + 1)", "(number + 1) / (number + 1)")),
    ),
    *of(
        "methods/fecam.py",
        FOUND_IN,
        within("FeCAM.powered", ("z.clamp(min=0) ** self.beta", "z")),
        within(
            "FeCAM.covariances",
            ("(count - 1).clamp(min=1)", "count"),
            ("(count * own + self.few * shared) / (count + self.few)", "own"),
            ("torch.where(count > 1, mixed, shared)", "mixed"),
        ),
        within("FeCAM.distances", ("range(self.rounds)", "range(1)"), ("F.normalize(variances, dim=-1)", "variances")),
        within(
            "FeCAM.before_eval",
            ("self.powered(self.plain.means[:, self.sums.met])", "self.sums.means[:, self.sums.met]"),
            ("means if self.unit else F.normalize(means, dim=-1)", "F.normalize(means, dim=-1)"),
        ),
        within("FeCAM.merge", ("self.plain.merge(other.plain, numbers)", "pass")),
        within("FeCAM.rules", ("self.whitening.transpose(2, 3)", "self.whitening")),
    ),
]
