"""Errors in the methods, at least one for every equation of each."""

from __future__ import annotations

from mutant import REGULARISERS, method, of, within

METHODS = [
    *method(
        "adversarial_replay",
        within(
            "AdversarialReplay.losses",
            (
                '(1 - self.beta) * cross_entropy(logits["replay"], y["replay"])',
                'self.beta * cross_entropy(logits["replay"], y["replay"])',
            ),
        ),
        within(
            "AdversarialReplay.attack",
            ("direction.sign()", "direction"),
            ("slope.abs().sum(dim=(1, 2, 3), keepdim=True)", "slope.square().sum(dim=(1, 2, 3), keepdim=True)"),
        ),
    ),
    *method(
        "agem",
        within(
            "project",
            ("(product < 0) & (square >= SMALLEST_SQUARE)", "(product > 0) & (square >= SMALLEST_SQUARE)"),
            (
                "g - product / square.clamp(min=SMALLEST_SQUARE) * reference",
                "g + product / square.clamp(min=SMALLEST_SQUARE) * reference",
            ),
        ),
    ),
    *method("agem", within("AGEM.after_backward", ("allowed + reference if self.add_reference else allowed", "allowed"))),
    *method(
        "aser",
        within("ASER.sample_size", ("3 * capacity // (4 * classes)", "capacity // classes")),
        within("ASER.recall", ("scores.topk(wanted)", "(-scores).topk(wanted)")),
        within(
            "is_minority",
            (
                "(stored[None, :] == labels[:, None]).sum(axis=1) / len(stored) < share",
                "(stored[None, :] == labels[:, None]).sum(axis=1) / len(stored) > share",
            ),
        ),
    ),
    *method(
        "bic",
        within("BiC.losses", ("(1 - past) * on_labels", "on_labels"), ("past * on_teacher", "on_teacher")),
        within("BiC.rules", ("self.correction(out.logits)", "out.logits")),
    ),
    *method(
        "ccil",
        within("CCIL.losses", ("weight * self.temperature**2", "weight")),
        within("CCIL.weight", ("len(progress.seen)", "len(progress.old)")),
        within("CCIL.plan", ("self.later_rate if new.progress.task > 0 else 1.0", "1.0")),
    ),
    *method(
        "cls_er",
        within(
            "CLSER.prepare",
            (
                "cross_entropy_of_each(stable, y) < cross_entropy_of_each(plastic, y)",
                "cross_entropy_of_each(stable, y) > cross_entropy_of_each(plastic, y)",
            ),
        ),
        within(
            "CLSER.after_step",
            ("1 / (self.steps + 1)", "1 / self.steps"),
            ("plastic < self.plastic_rate", "plastic > self.plastic_rate"),
        ),
    ),
    *method(
        "co2l",
        within(
            "Co2L.losses",
            ("self.temperature / self.base_temperature * contrast", "contrast"),
            (
                'relation_distillation(z, batch.targets["co2l"], self.relation_temperature, self.teacher_temperature)',
                'relation_distillation(z, batch.targets["co2l"], self.teacher_temperature, self.relation_temperature)',
            ),
        ),
    ),
    *of(
        "methods/cpr.py",
        REGULARISERS,
        within(
            "CPR.losses",
            ("widest - entropy(logits, batch.seen if seen else None)", "widest + entropy(logits, batch.seen if seen else None)"),
        ),
    ),
    *method(
        "der",
        within("DER.losses", ("self.alpha", "self.alpha / 2", 2)),
        within("DER.after_step", ("batch.keep(logits=out.logits)", "batch.keep(logits=out.logits * 2)")),
    ),
    *method(
        "derpp",
        within(
            "DERpp.losses",
            (
                "self.beta * cross_entropy(out.logits[:, replay], batch.y[replay], classes)",
                "cross_entropy(out.logits[:, replay], batch.y[replay], classes)",
            ),
        ),
        tests="golden/test_golden_der.py oracle/test_der.py",
    ),
    *method(
        "dvc",
        within(
            "DVC.terms", ("-self.mi_weight * spread / 3", "-self.mi_weight * spread"), ("2 * logits.shape[-1]", "logits.shape[-1]")
        ),
        within(
            "DVC.interference",
            (
                "head_gradients(then, labels) - head_gradients(now, labels)",
                "head_gradients(now, labels) - head_gradients(then, labels)",
            ),
        ),
    ),
    *method(
        "ema",
        within(
            "EMA.momentum_now",
            ("self.steps <= warm_up", "self.steps < warm_up"),
            ("self.within_task * warm_up", "self.within_task * self.steps"),
            ("min(self.momentum, 1 - 1 / max(1.0, self.within_task * warm_up))", "1 - 1 / max(1.0, self.within_task * warm_up)"),
        ),
    ),
    *method(
        "er",
        within("ER.plan", ("replace(recalled, stream=stream)", "recalled")),
        tests="oracle/test_replay.py oracle/test_rar.py",
    ),
    *method(
        "er_ace",
        within("ERACE.allowed", ("present | ~batch.seen", "present | batch.seen")),
        within("ERACE.losses", ('len(y) / len(batch) if self.reduction == "concat" else 1.0', "1.0")),
    ),
    *method(
        "er_aml",
        within("ERAML.losses", ("self.gamma * self.temperature / BASE_TEMPERATURE", "self.gamma")),
        within("draw_pairs", ("positive >= itself", "positive > itself")),
        within(
            "ERAML.triplet",
            (
                "F.pairwise_distance(anchors, positive) - F.pairwise_distance(anchors, negative) + TRIPLET_MARGIN",
                "F.pairwise_distance(anchors, positive) - F.pairwise_distance(anchors, negative) - TRIPLET_MARGIN",
            ),
        ),
    ),
    *of(
        "methods/ewc.py",
        REGULARISERS,
        within("EWC._mean_square", ("self.average(x, score, torch.square, labels)", "self.average(x, score, torch.abs, labels)")),
        within("EWC.distance", ("super().distance() + self.lowest", "super().distance()")),
        within("EWC._for_class.score", ("log_p.detach() / 2", "log_p.detach()")),
    ),
    *of(
        "methods/ewc_on.py",
        REGULARISERS,
        within("EWCOnline.remember", ("self.decay * self.importance + fisher", "self.importance + self.decay * fisher")),
    ),
    *of(
        "methods/ewc_pp.py",
        REGULARISERS,
        within(
            "EWCpp.after_backward",
            (
                "(1 - self.new_share) * self.running + self.new_share * self.squares / self.refresh",
                "self.new_share * self.running + (1 - self.new_share) * self.squares / self.refresh",
            ),
        ),
        within("EWCpp.rescaled", ("self.running - among.min()", "self.running")),
    ),
    *of(
        "methods/si.py",
        REGULARISERS,
        within("SI", ('rectify: Literal["sum", "increment"] = "sum"', 'half = True; rectify: Literal["sum", "increment"] = "sum"')),
        within(
            "SI.after_step",
            (
                'self.path -= torch.where(moved == 0, moved, batch.targets["si/gradient"] * moved)',
                'self.path += torch.where(moved == 0, moved, batch.targets["si/gradient"] * moved)',
            ),
        ),
        within("SI.consolidate", ("(weights - self.anchor).square() + self.damping", "(weights - self.anchor).square()")),
    ),
    *of(
        "methods/mas.py",
        REGULARISERS,
        within("MAS.consolidate", ("seen[list(progress.seen)] = True", "seen[:] = True")),
        within("MAS.sensitivity", ("torch.abs", "torch.square")),
    ),
    *of(
        "methods/quadratic.py",
        REGULARISERS,
        within("QuadraticPenalty.losses", ("self.strength / 2 if self.half else self.strength", "self.strength")),
        within("MeasuredAtTaskEnd.average", ("of_each(value).sum(dim=0)", "of_each(value.sum(dim=0))")),
    ),
    *method(
        "gdumb",
        within(
            "GDumb.prepare",
            ("torch.tensor(share, device=batch.x.device)", "torch.tensor(0.5, device=batch.x.device)"),
            ("(height, width)", "(width, height)"),
        ),
        within("cut", ("math.sqrt(1 - share)", "1 - share")),
        within(
            "GDumb.rate_in",
            (
                "(self.lr - self.lr_min) * (1 + math.cos(math.pi * (epoch - cycle) / cycle)) / 2",
                "(self.lr - self.lr_min) * (1 + math.cos(math.pi * (epoch - cycle) / cycle))",
            ),
        ),
    ),
    *method(
        "gsa",
        within(
            "GSA.weights", ("2 * torch.sigmoid(up / down - 1)", "torch.sigmoid(up / down - 1)"), ("count - probability", "count")
        ),
        within("GSA.plans", ("self.n_recall * (seen - met)", "self.n_recall * met")),
    ),
    *method(
        "grace",
        within("Grace.adjust", ("alpha * value if row in chosen else value", "value if row in chosen else value")),
        within("Grace.past", ("np.flatnonzero(~newest)", "np.flatnonzero(newest)")),
        within(
            "Grace.entropy_row",
            ("[torch.zeros_like(term[:-1]), term[-1:]]", "[term[:1], torch.zeros_like(term[1:])]"),
            ('alpha * term if self.alpha_on == "entropy" else term', "term"),
        ),
        within("layer_accuracies", ("in_double(right) / len(labels)", "in_double(right)")),
        within("Grace.scores", ("-torch.inf", "0.0")),
        within(
            "votes_of_others",
            ("own.sum(dim=0) - own", "own.sum(dim=0)"),
            ("full_precision(logits[:, :, seen]).softmax(dim=-1)", "full_precision(logits[:, :, seen])"),
            ("full_precision(logits[:, :, seen]).softmax(dim=-1)", "logits.softmax(dim=-1)[:, :, seen]"),
        ),
        within(
            "Grace.after_batch",
            ("rng.random(len(new)) < HELDOUT_SHARE", "rng.random(len(new)) < 2 * HELDOUT_SHARE"),
            ("new.select(np.flatnonzero(~aside))", "new"),
        ),
        within("Grace.traits", ('"refresh_every"', "None")),
    ),
    *method(
        "gss",
        within(
            "GSS.after_batch",
            ("similarity(whole, groups).cpu()[0] >= self.threshold", "similarity(whole, groups).cpu()[0] < self.threshold"),
        ),
    ),
    *method(
        "icarl",
        within("ICaRL.losses", ("batch.seen & ~self.teacher.classes", "batch.seen")),
        within("ICaRL.choose_exemplars", ("len(progress.seen)", "len(progress.current)")),
    ),
    *method(
        "il2a",
        within(
            "IL2A.semantic_logits",
            ("self.spread / 2 * (along - own).square().sum(dim=2)", "self.spread * (along - own).square().sum(dim=2)"),
        ),
        within("IL2A.ask_teacher", ("times / self.n_prototypes", "times / len(times)")),
        within(
            "IL2A.losses",
            (
                "full_precision(torch.cat([out.logits, self.pairs(out.features)], dim=-1)) / self.temperature",
                "full_precision(torch.cat([out.logits, self.pairs(out.features)], dim=-1))",
            ),
        ),
    ),
    *method("joint", within("Joint.reordered", ("shuffled(stream, self.n_recall)", "stream"))),
    *method(
        "lode",
        within("LODE.inter_weight", ("self.rho / progress.task", "self.rho / (progress.task + 1)")),
        within("decoupled", ("logits.masked_fill(old, -torch.inf)", "logits.masked_fill(~old, -torch.inf)")),
    ),
    *method(
        "lpr",
        within(
            "LPR.refresh",
            ("positions**self.position_power", "positions"),
            ("self.strength / positions**self.position_power * moments", "moments / positions**self.position_power"),
            (
                "identity + self.strength / positions**self.position_power * moments",
                "identity * 2 + self.strength / positions**self.position_power * moments",
            ),
            ("self.age = 0", "self.age = 1"),
        ),
        within("LPR.after_backward", ("inverse @ layer.matrix(gradient)", "inverse @ inverse @ layer.matrix(gradient)")),
        within(
            "LPR.after_step",
            ("before + inverse @ (layer.matrix(torch.Tensor.detach) - before)", "inverse @ layer.matrix(torch.Tensor.detach)"),
        ),
        within(
            "LPR.prepare",
            ("self.age >= self.refresh_every", "self.age > self.refresh_every"),
            ("np.arange(n) * len(memory) // n", "np.arange(n)"),
        ),
    ),
    *method(
        "lucir",
        within(
            "LUCIR.strength",
            (
                "self.less_forget * math.sqrt(len(progress.old) / len(progress.current))",
                "self.less_forget * len(progress.old) / len(progress.current)",
            ),
        ),
        within("LUCIR.losses", ("batch.old[batch.y]", "batch.current[batch.y]")),
        within("LUCIR.after_step", ("batch.current", "batch.seen")),
    ),
    *method("lwf", within("LwF.losses", ("self.strength * self.temperature**2", "self.strength"))),
    *method(
        "mir",
        within("MIR.recall", ("after - before", "before - after")),
        within(
            "MIR.losses_around_the_step",
            (
                "torch.minimum(now, memory.attributes[BEST_LOSS][torch.from_numpy(slots).to(device)])",
                "torch.maximum(now, memory.attributes[BEST_LOSS][torch.from_numpy(slots).to(device)])",
            ),
        ),
    ),
    *method(
        "mkd",
        within(
            "MKD.losses",
            ("self.strength * self.temperature**2", "self.strength"),
            ("rows = batch.supervised", "rows = slice(None)"),
        ),
        within(
            "MKD.eval_net",
            ('0.5 if self.predict == "mean" else 0.0', '1.0 if self.predict == "mean" else 0.0'),
            ("own.copy_(slow).lerp_(fast, share)", "own.copy_(fast).lerp_(slow, share / 2)"),
            ("frozen_copy(self.net)", "frozen_copy(self.teacher.copy)"),
        ),
        within(
            "MKD.attach",
            ("torch.ones(net.layers) / net.layers", "torch.ones(net.layers)"),
            ("torch.eye(net.layers)[-1]", "torch.eye(net.layers)[0]"),
            ("module.momentum = 0.0", "module.momentum = 0.1"),
        ),
        within("MKD.prepare", ("self.teacher.start_over()", "pass")),
        within("MKD.after_step", ("1 - self.teacher_rate", "self.teacher_rate")),
        within(
            "MKD.prepare",
            ("self.net.meter.count(forward=len(batch))", "self.net.meter.count(forward=0)"),
            ("RandAugment(self.harder, self.magnitude)", "RandAugment(1, self.magnitude)"),
            ("RandAugment(self.harder, self.magnitude)", "RandAugment(self.harder)"),
        ),
    ),
    *method(
        "mirrored",
        within(
            "Mirrored.eval_net",
            ("net.mirrored = True", "net.mirrored = False"),
            ("copy.copy(net)", "net"),
        ),
    ),
    *method(
        "votes",
        within("Votes.traits", ("Traits(all_taps=True)", "Traits()")),
        within("Votes.rule", ("'linear_votes'", "'linear_last'")),
    ),
    *method(
        "best",
        within("BLOCK", ("128", "64")),
        within("HORIZON", ("25", "24")),
        within("TASK", ("0.3", "0.5")),
        within("Best.__post_init__", ("self.cost != Best.cost", "False")),
        within("Best.__repr__", ("self.cost == Best.cost", "False"), ("not self.by_cost", "False")),
        within(
            "learner_at",
            ("round(BLOCK * cost)", "BLOCK"),
            ("max(FEWEST, VIEWS * round(UPDATES * cost / VIEWS))", "VIEWS * round(UPDATES * cost / VIEWS)"),
            ("VIEWS * round(UPDATES * cost / VIEWS)", "round(UPDATES * cost / VIEWS)"),
            ("min(RATE * cost, FASTEST)", "FASTEST"),
            ("min(RATE * cost, FASTEST)", "RATE * cost"),
        ),
        tests="oracle/test_mirrored.py",
    ),
    *method(
        "mose",
        within(
            "MOSE.plans",
            ("self.n_recall * len(current)", "self.n_recall"),
            ("min(self.n_recall - n_new, self.per_class * len(progress.seen))", "self.n_recall - n_new"),
        ),
        within(
            "MOSE.losses",
            (
                "self.balanced_weight * cross_entropy(out.logits[:, balanced], batch.y[balanced])",
                "cross_entropy(out.logits[:, balanced], batch.y[balanced])",
            ),
        ),
        within(
            "MOSE.plans",
            ("(Mirror(), *planning.augment)", "(*planning.augment, Mirror())"),
            ("(four[0], four[3])", "(four[0], four[1])"),
            ("(four[2],)", "(four[0],)"),
        ),
        within(
            "MOSE.losses",
            (
                "self.contrast * supervised_contrast(out.embedding, batch.y, self.temperature)",
                "supervised_contrast(out.embedding, batch.y, self.temperature)",
            ),
        ),
    ),
    *method(
        "multi_update",
        within("snake_group", ("groups - 1 - column if row % 2 else column", "column")),
        within(
            "MultiUpdate.part_of",
            ("turn // groups", "turn % groups"),
            ("min(parts, images)", "parts"),
            ("slice(0)", "slice(None)"),
            ("snake_group(place, groups) == turn % groups", "snake_group(place, groups) == turn // groups"),
        ),
        within("MultiUpdate.shares", ("self.updates // fewer", "self.updates")),
        within(
            "MultiUpdate.plans",
            ("cycle(enumerate(turns))", "enumerate(turns)"),
            ("self.lr_factor * plan.rate", "self.lr_factor"),
            ("self.lr_factor * plan.rate", "plan.rate"),
        ),
    ),
    *method(
        "ocm",
        within(
            "OCM.projections_kept",
            ('pseudo_labels(self.labels_of("replay", batch), batch.classes)', 'pseudo_labels(self.labels_of("replay", batch), 1)'),
        ),
        within("OCM.losses", ("self.teacher.classes", "batch.seen")),
    ),
    *of(
        "methods/rotation_contrast.py",
        "golden/test_golden_ocm.py oracle/test_rotation_contrast.py",
        within(
            "RotationContrast.contrasts", ('2 * table["sc/new"]', 'table["sc/new"]'), ("self.scale if replayed else 1.0", "1.0")
        ),
    ),
    *method(
        "online_lora",
        within("OnlineLoRA.losses", ("self.strength / 2", "self.strength")),
        within("OnlineLoRA.consolidate", ("share * self.squared_gradients(batch)", "self.squared_gradients(batch)")),
        within("LossWindow.add", ("self.last_variance**0.5", "self.last_variance")),
    ),
    *method(
        "onpro",
        within("OnPro.losses", ('1 - mixed["share"]', 'mixed["share"]')),
        within("OnPro.after_step", ("(raw[-1] + augmented[-1]) / 2", "raw[-1]")),
        within(
            "pair_probabilities",
            (
                "1 / np.maximum(np.linalg.norm(proto[one] - proto[other], axis=1), SMALLEST_DISTANCE)",
                "np.maximum(np.linalg.norm(proto[one] - proto[other], axis=1), SMALLEST_DISTANCE)",
            ),
        ),
    ),
    *method("pcr", within("PCR.plan", ("((), planning.augment)", "(planning.augment, planning.augment)"))),
    *method(
        "rar",
        within("RAR.plans", ("range(self.iterations)", "range(1)")),
        within(
            "RAR.adjust",
            (
                '(("ce/new", self.stream_weight), ("ce/replay", self.memory_weight))',
                '(("ce/new", self.memory_weight), ("ce/replay", self.stream_weight))',
            ),
        ),
    ),
    *method(
        "replay",
        within("Replay.recalled", ("limit * len(new.progress.seen)", "limit")),
        within("Replay.plans", ("range(self.mem_iters)", "range(1)")),
        within(
            "Replay.rules",
            (
                "nearest_mean(out.features, self.means).masked_fill(~self.predictable, -torch.inf)",
                "nearest_mean(out.features, self.means)",
            ),
        ),
        within("Replay.rule", ('f"{self.inference}_last"', 'f"{self.inference}_mean"')),
    ),
    *method(
        "scr",
        within("SCR.after_backward", ("parameter.grad *= REVIEW_SCALE", "parameter.grad *= 1")),
        within("SCR.losses", ("self.projected(out)", "out.features")),
    ),
    *method(
        "sgd",
        within("SGD.losses", ("cross_entropy(out.logits, batch.y, self.spanned(batch))", "cross_entropy(out.logits, batch.y)")),
        tests="oracle/test_lwf.py oracle/test_joint.py",
    ),
    *method(
        "ssil",
        within(
            "SSIL.losses",
            (
                "share * cross_entropy(out.logits[:, rows], batch.y[rows], rivals[rows])",
                "cross_entropy(out.logits[:, rows], batch.y[rows], rivals[rows])",
            ),
            ("torch.where(self.old[batch.y][:, None], self.old, new)", "torch.where(self.old[batch.y][:, None], new, self.old)"),
            ("weight * self.temperature**2", "weight"),
        ),
    ),
]
