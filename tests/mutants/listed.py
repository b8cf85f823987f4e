"""Single errors that tests must find, each a text of the source and what stands there instead: at least one for every equation.

A line is `(what stands there, what stands there instead)`. The tests of a method are its oracle and golden files unless named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "gracecl"
TESTS = Path(__file__).parents[1]
Change = tuple[str, str]


@dataclass(frozen=True)
class Mutant:
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    """where it is found, below `tests/`"""

    def changed(self, source: Path) -> str:
        """The text of the file with the error in it."""
        text = (source / self.file).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} holds {self.before!r} {text.count(self.before)} times, not once")
        return text.replace(self.before, self.after)

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.before.split())}  ->  {' '.join(self.after.split())}"


def of(file: str, tests: str, *changes: Change) -> list[Mutant]:
    """Several errors in one file that the same tests find."""
    return [Mutant(file, before, after, tuple(tests.split())) for before, after in changes]


def method(name: str, *changes: Change, tests: str = "") -> list[Mutant]:
    """Errors in the file of a method."""
    own = (f"golden/test_golden_{name}.py", f"oracle/test_{name}.py")
    return of(f"methods/{name}.py", tests or " ".join(file for file in own if (TESTS / file).exists()), *changes)


REGULARISERS = "golden/test_golden_regularisers.py oracle/test_regularisers.py"

MUTANTS = [
    # The engine: what a step is made of.
    *of(
        "engine/update.py",
        REGULARISERS,
        ("total(penalties).backward()", "(2 * total(penalties)).backward()"),
    ),
    *of(
        "engine/engine.py",
        "oracle/test_engine.py oracle/test_ccil.py oracle/test_ssil.py",
        ('group["lr"] = part * full', 'group["lr"] = full'),
        ("first_of_task=False)", "first_of_task=True)"),
        ("seen=tuple(seen | met)", "seen=tuple(met | seen)"),
    ),
    *of(
        "engine/assemble.py",
        "oracle/test_engine.py",
        (
            'rng.key(seed, "augment", progress.step, repeat, place, number)',
            'rng.key(seed, "augment", progress.step, repeat, place)',
        ),
    ),
    *of(
        "engine/fit.py",
        "oracle/test_gdumb.py golden/test_golden_gdumb.py",
        ('group["lr"] = part * full', 'group["lr"] = full'),
        ("norm = clip(params, self.max_norm)", "norm = clip(params, 1e9)"),
    ),
    *of(
        "core.py",
        "oracle/test_losses.py oracle/test_grace.py golden/test_golden_mose.py golden/test_golden_der.py",
        ("torch.stack(rows).sum() if len(rows) > 1", "torch.stack(rows).mean() if len(rows) > 1"),
    ),
    *of(
        "nets/flat.py",
        REGULARISERS,
        ("return torch.stack([part.sum() for part", "return torch.stack([part.mean() for part"),
    ),
    *of(
        "nets/class_means.py",
        "golden/test_golden_mose.py oracle/test_mose.py oracle/test_scr.py",
        ("sums += member @ F.normalize(taps.features, dim=-1)", "sums += member @ taps.features"),
        ("return 2 * (F.normalize(features, dim=-1)", "return 2 * (features"),
    ),
    *of(
        "nets/scoring.py",
        "golden/test_golden_mir.py oracle/test_scoring.py",
        ("weights[name].detach() - rate * value", "weights[name].detach() + rate * value"),
    ),
    *of(
        "nets/correction.py",
        "oracle/test_correction.py golden/test_golden_bic.py",
        ("penalty * self.shift**2", "penalty / 2 * self.shift**2"),
        ("ridge = z.new_tensor([0.0, 2 * penalty])", "ridge = z.new_tensor([0.0, penalty])"),
    ),
    *of(
        "memory/reservoir.py",
        "oracle/test_memory.py",
        ("rng.integers(0, order + 1)", "rng.integers(0, order + 2)"),
        ("chosen[:free] = order[:free]", "chosen[:free] = order[:free][::-1]"),
    ),
    *of(
        "memory/gss.py",
        "golden/test_golden_gss.py oracle/test_gss.py",
        (".amax(dim=1).clamp(-1, 1)", ".mean(dim=1).clamp(-1, 1)"),
        ("(slot + 1) / np.where(total > 0", "(item + 1) / np.where(total > 0"),
    ),
    *of(
        "memory/knn_shapley.py",
        "golden/test_golden_aser.py oracle/test_aser.py",
        ("* rank.clamp(max=k) / (k * rank)", "* rank.clamp(max=k) / rank"),
        ("cooperative.amax(dim=0) if len", "cooperative.mean(dim=0) if len"),
    ),
    # Losses that several methods share.
    *of(
        "functional/losses.py",
        "oracle/test_losses.py golden/test_golden_mose.py golden/test_golden_lwf.py golden/test_golden_onpro.py "
        "golden/test_golden_ocm.py golden/test_golden_lucir.py oracle/test_icarl.py golden/test_golden_co2l.py",
        ("count > 0).sum().clamp(min=1)", "count >= 0).sum().clamp(min=1)"),
        ("return -(p * log_p).sum(dim=-1).mean(dim=-1)", "return -(p * log_p).mean(dim=-1).mean(dim=-1)"),
        ("p * (log_p - log_q) if measure", "p * (log_q - log_p) if measure"),
        ("return sum_of_diagonals(terms, half) / (2 * half)", "return sum_of_diagonals(terms, half) / half"),
        ("(same / same.sum(dim=1, keepdim=True))", "same"),
        ("(margin - own + best).relu()", "(margin + own - best).relu()"),
        ("return (of_each * is_anchor).mean(dim=-1)", "return (of_each * is_anchor).sum(dim=-1) / is_anchor.sum()"),
        ("(each * classes).sum(dim=-1).mean(dim=-1)", "(each * classes).mean(dim=-1).mean(dim=-1)"),
        (
            "norm: Tensor = torch.linalg.vector_norm(a - b, dim=(1, 2))",
            "norm: Tensor = torch.linalg.vector_norm(a - b, dim=(1, 2)) ** 2",
        ),
    ),
    *of(
        "functional/losses.py",
        "golden/test_golden_pcr.py oracle/test_pcr.py",
        ("full_precision(similarity) + log_count, y) + log_count[y].mean()", "full_precision(similarity) + log_count, y)"),
    ),
    *of(
        "functional/losses.py",
        "golden/test_golden_gdumb.py oracle/test_gdumb.py",
        (
            "return share * cross_entropy(logits, y, classes) + (1 - share)",
            "return share * cross_entropy(logits, y, classes) + share",
        ),
    ),
    # Feedback.
    *of(
        "controllers/base.py",
        "oracle/test_controllers.py oracle/test_grace.py",
        ("torch.exp(torch.tanh(-self.relative_accuracy(accuracy)))", "torch.exp(torch.tanh(self.relative_accuracy(accuracy)))"),
        ("max(1, len(values) - unbiased)", "max(1, len(values) - 1)"),
        ("return gamma * signals.entropy", "return -gamma * signals.entropy"),
    ),
    *of(
        "controllers/paper.py",
        "oracle/test_grace.py oracle/test_controllers.py",
        (
            'case "alg1":\n                return self.beta * torch.exp(torch.tanh(z))',
            'case "alg1":\n                return self.beta * torch.exp(z)',
        ),
        ("return -self.beta * torch.exp(torch.tanh(-z))", "return -self.beta * torch.exp(torch.tanh(z))"),
        ("self.beta * (torch.exp(torch.tanh(z)) - 1)", "self.beta * torch.exp(torch.tanh(z))"),
        ("return gamma * self._distance(signals) ** 2", "return gamma * self._distance(signals).abs()"),
    ),
    *method(
        "grace",
        ("row: alpha * value if row in chosen", "row: value if row in chosen"),
        ("older = np.flatnonzero(~newest)", "older = np.flatnonzero(newest)"),
    ),
    # Methods.
    *method(
        "adversarial_replay",
        ("(1 - self.beta) * cross_entropy(logits", "self.beta * cross_entropy(logits"),
        ("* direction.sign()", "* direction"),
        ("self.momentum * direction + slope / slope.abs()", "self.momentum * direction + slope / slope.square()"),
    ),
    *method(
        "agem",
        ("(product < 0) & (square", "(product > 0) & (square"),
        ("without = g - product / square", "without = g + product / square"),
    ),
    *method(
        "aser",
        ("min(n_c, max(1, 3 * capacity // (4 * classes)))", "min(n_c, max(1, capacity // classes))"),
        ("scores.topk(wanted).indices", "(-scores).topk(wanted).indices"),
        ("/ len(stored) < share)", "/ len(stored) > share)"),
    ),
    *method(
        "bic",
        ('"ce/all": (1 - past) * on_labels', '"ce/all": on_labels'),
        ('"kd/old": past * on_teacher', '"kd/old": on_teacher'),
        ('{"linear": self.correction(out.logits)}', '{"linear": out.logits}'),
    ),
    *method(
        "ccil",
        ("weight * self.temperature**2 * divergence", "weight * divergence"),
        ("(len(progress.seen) / len(progress.current)) ** self.power", "(len(progress.old) / len(progress.current)) ** self.power"),
        ("return self.later_rate if progress.task > 0 else 1.0", "return 1.0"),
    ),
    *method(
        "cls_er",
        ("cross_entropy_of_each(stable, y) < cross", "cross_entropy_of_each(stable, y) > cross"),
        ("early = 1 - 1 / (self.steps + 1)", "early = 1 - 1 / self.steps"),
        ("if plastic < self.plastic_rate:", "if plastic > self.plastic_rate:"),
    ),
    *method(
        "co2l",
        ("self.temperature / self.base_temperature * contrast", "contrast"),
        ("self.relation_temperature, self.teacher_temperature)", "self.teacher_temperature, self.relation_temperature)"),
    ),
    *of("methods/cpr.py", REGULARISERS, ("self.beta * (widest - entropy", "self.beta * (widest + entropy")),
    *method(
        "der",
        ("self.alpha * logit_distance", "self.alpha / 2 * logit_distance"),
        (
            'out.logits.detach()[:, batch.blocks["new"].view(0)]).transpose(0, 1)}',
            'out.logits.detach()[:, batch.blocks["new"].view(0)]).transpose(0, 1) * 2}',
        ),
    ),
    *method("derpp", ("self.beta * cross_entropy(out", "cross_entropy(out"), tests="golden/test_golden_der.py oracle/test_der.py"),
    *method(
        "dvc",
        ("-self.mi_weight * spread / 3", "-self.mi_weight * spread"),
        (
            "head_gradients(then, labels) - head_gradients(now, labels)",
            "head_gradients(now, labels) - head_gradients(then, labels)",
        ),
        ("/ (2 * logits.shape[-1])", "/ logits.shape[-1]"),
    ),
    *method("ema", ("or self.steps <= warm_up", "or self.steps < warm_up")),
    *method(
        "er",
        ('return {"all": replace(recalled, stream=stream)}', 'return {"all": recalled}'),
        tests="oracle/test_replay.py oracle/test_rar.py",
    ),
    *method(
        "er_ace",
        ("return present | ~batch.seen if self.keep_unseen", "return present | batch.seen if self.keep_unseen"),
        ('share = len(y) / len(batch) if self.reduction == "concat" else 1.0', "share = 1.0"),
    ),
    *method(
        "er_aml",
        ("self.gamma * self.temperature / BASE_TEMPERATURE * distance", "self.gamma * distance"),
        ("positive += positive >= itself", "positive += positive > itself"),
        ("+ TRIPLET_MARGIN", "- TRIPLET_MARGIN"),
    ),
    *of(
        "methods/ewc.py",
        REGULARISERS,
        ("return self.average(x, score, torch.square, labels)", "return self.average(x, score, torch.abs, labels)"),
        ("return super().distance() + self.lowest", "return super().distance()"),
        ("log_p * (log_p.detach() / 2).exp()  # √p", "log_p * log_p.detach().exp()  # √p"),
    ),
    *of(
        "methods/ewc_on.py",
        REGULARISERS,
        ("self.decay * self.importance + fisher", "self.importance + self.decay * fisher"),
    ),
    *of(
        "methods/ewc_pp.py",
        REGULARISERS,
        ("(1 - self.new_share) * self.running + self.new_share", "self.new_share * self.running + (1 - self.new_share)"),
        ("(self.running - among.min()) / (among", "self.running / (among"),
    ),
    *of(
        "methods/si.py",
        REGULARISERS,
        ('    rectify: Literal["sum", "increment"] = "sum"', '    half = True\n    rectify: Literal["sum", "increment"] = "sum"'),
        ("self.path -= torch.where", "self.path += torch.where"),
        (".square() + self.damping)", ".square())"),
    ),
    *of(
        "methods/mas.py",
        REGULARISERS,
        ("seen[list(progress.seen)] = True", "seen[:] = True"),
        ("(logits * classes).square().sum(), torch.abs)", "(logits * classes).square().sum(), torch.square)"),
    ),
    *of(
        "methods/quadratic.py",
        REGULARISERS,
        ("self.strength / 2 if self.half else self.strength", "self.strength"),
        ("sums[name] += of_each(value).sum(dim=0)", "sums[name] += of_each(value.sum(dim=0))"),
    ),
    *method(
        "gdumb",
        ('block.found["share"] = torch.tensor(share', 'block.found["share"] = torch.tensor(0.5'),
        ("for n in (height, width))", "for n in (width, height))"),
        ("half = int(length * math.sqrt(1 - share)) // 2", "half = int(length * (1 - share)) // 2"),
        ("(epoch - cycle) / cycle)) / 2", "(epoch - cycle) / cycle))"),
    ),
    *method(
        "gsa",
        ("2 * torch.sigmoid(up / down - 1)", "torch.sigmoid(up / down - 1)"),
        ("self.n_recall * (seen - met) // seen", "self.n_recall * met // seen"),
        ("pull = count - probability", "pull = count"),
    ),
    *method("gss", (">= self.threshold:", "< self.threshold:")),
    *method(
        "icarl",
        ("batch.seen & ~self.teacher.classes)", "batch.seen)"),
        ("share = memory.capacity // len(progress.seen)", "share = memory.capacity // len(progress.current)"),
    ),
    *method(
        "il2a",
        ("self.spread / 2 * (along - own)", "self.spread * (along - own)"),
        ("times / self.n_prototypes", "times / len(times)"),
        ("self.pairs(out.features)], dim=-1)) / self.temperature", "self.pairs(out.features)], dim=-1))"),
    ),
    *method("joint", ("return shuffled(stream, self.n_recall)", "return stream")),
    *method(
        "lode",
        ("self.rho / progress.task", "self.rho / (progress.task + 1)"),
        ("rest = logits.masked_fill(old, -torch.inf)", "rest = logits.masked_fill(~old, -torch.inf)"),
    ),
    *method(
        "lucir",
        ("math.sqrt(len(progress.old) / len(progress.current))", "len(progress.old) / len(progress.current)"),
        ("images=batch.old[batch.y])", "images=batch.current[batch.y])"),
        ("self.held.put_back(moving=batch.current)", "self.held.put_back(moving=batch.seen)"),
    ),
    *method("lwf", ("self.strength * self.temperature**2 * divergence", "self.strength * divergence")),
    *method(
        "mir",
        ("(after - before).topk(wanted)", "(before - after).topk(wanted)"),
        ("now = torch.minimum(now,", "now = torch.maximum(now,"),
    ),
    *method(
        "mkd",
        ("self.strength * self.temperature**2 * self.layer_weight", "self.strength * self.layer_weight"),
        ('share = 0.5 if self.predict == "mean" else 0.0', 'share = 1.0 if self.predict == "mean" else 0.0'),
    ),
    *method("mirrored", ("net.mirrored = True", "net.mirrored = False")),
    *method(
        "mose",
        ("min(self.n_recall * len(current) // len(progress.seen), b)", "min(self.n_recall // len(progress.seen), b)"),
        ("self.balanced_weight * cross_entropy", "cross_entropy"),
        ("min(self.n_recall - n_new, self.per_class * len(progress.seen))", "self.n_recall - n_new"),
        ("return (), (Mirror(),), augment, (Mirror(), *augment)", "return (), (Mirror(),), augment, (*augment, Mirror())"),
    ),
    *method("multi_update", ("return groups - 1 - column if row % 2 else column", "return column")),
    *method(
        "ocm",
        ('self.labels_of("replay", batch), batch.classes))', 'self.labels_of("replay", batch), 1))'),
        ("self.teacher.classes)", "batch.seen)"),
    ),
    *of(
        "methods/rotation_contrast.py",
        "golden/test_golden_ocm.py oracle/test_rotation_contrast.py",
        ("info_nce_of_pairs(terms) + 2 *", "info_nce_of_pairs(terms) +"),
        ("self.scale if replayed else 1.0", "1.0"),
    ),
    *method(
        "online_lora",
        ("self.strength / 2 * self.flat", "self.strength * self.flat"),
        ("share * self.squared_gradients(batch) + (1 - share)", "self.squared_gradients(batch) + (1 - share)"),
        ("self.last_mean + self.last_variance**0.5", "self.last_mean + self.last_variance"),
    ),
    *method(
        "onpro",
        ('mixed["other"], 1 - mixed["share"])', 'mixed["other"], mixed["share"])'),
        ("self.proto = (raw[-1] + augmented[-1]) / 2", "self.proto = raw[-1]"),
        ("closeness = 1 / np.maximum(", "closeness = np.maximum("),
    ),
    *method("pcr", ("return (), augment", "return augment, augment")),
    *method(
        "ranpac",
        ("torch.relu(features.double() @ self.projection)", "features.double() @ self.projection"),
        ("add_(self.ridges()[:, None])", "sub_(self.ridges()[:, None])"),
        ("(gram @ solution - 2 * wanted)", "(gram @ solution - wanted)"),
    ),
    *method(
        "rar",
        ("return self.iterations * self.inner.repeats", "return self.inner.repeats"),
        (
            '("ce/new", self.stream_weight), ("ce/replay", self.memory_weight)',
            '("ce/new", self.memory_weight), ("ce/replay", self.stream_weight)',
        ),
    ),
    *method(
        "scr",
        ("parameter.grad *= REVIEW_SCALE", "parameter.grad *= 1"),
        (
            "supervised_contrast(self.projected(out), batch.y, self.temperature)",
            "supervised_contrast(out.features, batch.y, self.temperature)",
        ),
    ),
    *method(
        "sgd",
        (
            'return {"ce/all": cross_entropy(out.logits, batch.y, self.spanned(batch))}',
            'return {"ce/all": cross_entropy(out.logits, batch.y)}',
        ),
        tests="oracle/test_lwf.py oracle/test_joint.py",
    ),
    *method(
        "slda",
        ("(weigh_by / (weigh_by + 1))", "(weigh_by / weigh_by.clamp(min=1))"),
        ("(1 - self.shrinkage) * covariance + self.shrinkage * identity", "covariance + self.shrinkage * identity"),
        ("-(means * self.weight).sum(dim=1, keepdim=True) / 2", "-(means * self.weight).sum(dim=1, keepdim=True)"),
    ),
    *method(
        "ssil",
        ("share * cross_entropy(out", "cross_entropy(out"),
        ("torch.where(self.old[batch.y][:, None], self.old, new)", "torch.where(self.old[batch.y][:, None], new, self.old)"),
        ("weight * self.temperature**2 * divergence", "weight * divergence"),
    ),
]
