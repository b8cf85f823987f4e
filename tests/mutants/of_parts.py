"""Errors in what learners are put together from: the engine, nets, memories, feedback rules, streams and data."""

from __future__ import annotations

from mutant import REGULARISERS, of, within

NETS = "oracle/test_nets.py golden/test_golden_mose.py"

PARTS = [
    # Frozen trunks: vectors that are read as a forward pass reads them, batches by the size of maps, files of features.
    *of(
        "nets/module.py",
        "test_inference.py",
        within("Reader.read", ("standardised * self.norm.weight + self.norm.bias", "standardised * self.norm.weight")),
        within("Reader.standardised", ("pooled.shape[1:]", "pooled.shape")),
    ),
    *of(
        "nets/vit.py",
        "test_inference.py",
        within("ViT.read_vectors", ("value * scale + shift", "value * scale")),
        within("ViT.trunk_vectors", ("self.norm(last)", "last")),
    ),
    *of(
        "nets/batches.py",
        "test_inference.py",
        within(
            "batch_for",
            ("CACHED_BYTES * len(example) // largest", "CACHED_BYTES // largest"),
            ("1 << fitting.bit_length() - 1", "1 << fitting.bit_length()"),
            ("(*given, output)", "(output,)"),
        ),
    ),
    *of(
        "nets/inference.py",
        "test_inference.py",
        within("Inference.__call__", ("self.compute(some)[:count]", "self.compute(some)[-count:]")),
        within("convolutions_with_norms", ("runs[name] == 1", "runs[name] >= 1")),
        within("digest_of_trunk", ("id(value) not in of_taps", "True")),
    ),
    *of(
        "data/features.py",
        "data/test_features.py",
        within("FeatureWriter.begin", ("self.done * self.row", "0")),
        within("FeatureWriter._head", ("data.add(digest.encode())", "data")),
        within("FeatureFile.compare", ("str(self._digest_of_labels) != self.about['labels_digest']", "False")),
    ),
    # The engine: what a step is made of, and how a learner predicts.
    *of(
        "engine/update.py",
        REGULARISERS,
        within("Update.__call__.after_backward", ("total(penalties)", "2 * total(penalties)")),
    ),
    *of(
        "engine/update.py",
        "oracle/test_engine.py oracle/test_grace.py",
        within(
            "observations",
            ("logits.argmax(dim=-1)", "logits.argmin(dim=-1)"),
            ('{"log/H": entropy(logits), "log/accuracy": right}', '{"log/H": 2 * entropy(logits), "log/accuracy": right}'),
        ),
    ),
    *of(
        "methods/base.py",
        "laws/test_hooks.py",
        within(
            "Chain.losses",
            ('self._joined("loss row", table, made[part])', "made[part]"),
            ("part.adjust(table, out, batch)", "table"),
        ),
        within("Chain.after_batch", ("new if rest is None else rest", "new")),
        within("Chain.__init__", ("not part.traits.moves_weights", "part.traits.moves_weights")),
        within("Chain.end_task", ("part.end_task(memories, progress) or {}", "{}")),
    ),
    *of(
        "methods/base.py",
        "oracle/test_grace.py oracle/test_lwf.py",
        within("Chain.tick", ("progress.tick(every)", "not progress.tick(every)")),
    ),
    *of(
        "methods/state.py",
        "laws/test_hooks.py",
        within("restored", ("type(now)(kept) if isinstance(now, tuple) else list(kept)", "kept")),
    ),
    *of(
        "core.py",
        "oracle/test_multi_update.py oracle/test_der.py",
        within(
            "Batch.keep",
            ("torch.from_numpy(block.stream)", "torch.arange(len(own))"),
            ("slice(block.start, block.start + block.from_stream)", "slice(block.start + 1, block.start + 1 + block.from_stream)"),
        ),
    ),
    *of(
        "engine/engine.py",
        "oracle/test_engine.py oracle/test_ccil.py oracle/test_ssil.py",
        within("Engine._set_rates", ('group["lr"] = plan.rate * full', 'group["lr"] = full')),
        within(
            "Engine.learn",
            (
                "replace(self.progress, step=self.progress.step + 1, first_of_task=False)",
                "replace(self.progress, step=self.progress.step + 1, first_of_task=True)",
            ),
        ),
        within("Engine.meet", ("tuple(seen | met)", "tuple(met | seen)")),
    ),
    *of(
        "engine/assemble.py",
        "oracle/test_engine.py",
        within(
            "assemble",
            (
                'rng.key(seed, "augment", progress.step, repeat, place, number)',
                'rng.key(seed, "augment", progress.step, repeat, place)',
            ),
            ('rng.key(seed, "augment", progress.step, repeat, place, number)', 'rng.key(seed, "augment", repeat, place, number)'),
        ),
    ),
    *of(
        "engine/fit.py",
        "oracle/test_gdumb.py golden/test_golden_gdumb.py",
        within("Fit.step", ('group["lr"] = part * full', 'group["lr"] = full')),
        within("Fit._clip", ("clip(params, self.max_norm)", "clip(params, 1e9)")),
        within("Fit.plan", ('rng.generator(self.seed, "shuffle", epoch)', 'rng.generator(self.seed, "shuffle")')),
        within("Fit.trained_on", ("epochs * self.images + batches * self.batch", "self.at * self.batch")),
    ),
    *of(
        "engine/evaluate.py",
        "oracle/test_evaluate.py",
        within(
            "rule_scores",
            ("by_layer[-1], by_layer.mean(dim=0)", "by_layer[0], by_layer.mean(dim=0)"),
            ("by_layer.mean(dim=0)", "by_layer.amax(dim=0)"),
            ("by_layer.log_softmax(dim=-1)", "by_layer"),
            ("enumerate(by_layer, start=1)", "enumerate(by_layer.flip(0), start=1)"),
        ),
        within(
            "evaluate",
            ("100 * float(r) / int(n)", "100 * float(r) / int(size.max())"),
            ("scores.argmax(dim=1)", "scores.argmin(dim=1)"),
            ("known = target >= 0", "known = target >= -1"),
            ("metrics.ece(p, target[known])", "metrics.nll(p, target[known])"),
            ("scores.softmax(dim=1)", "scores.sigmoid()"),
        ),
    ),
    *of(
        "core.py",
        "oracle/test_losses.py oracle/test_grace.py golden/test_golden_mose.py golden/test_golden_der.py",
        within("total", ("torch.stack(losses).sum()", "torch.stack(losses).mean()")),
    ),
    *of(
        "core.py",
        "oracle/test_mirrored.py",
        within(
            "Taps.mean",
            ("(one.features + other.features) / 2", "one.features"),
            ("(one.logits + other.logits) / 2", "one.logits + other.logits"),
        ),
    ),
    *of(
        "core.py",
        "oracle/test_controllers.py oracle/test_grace.py",
        within("Batch.from_memory", ("self.sources >= MEMORY_SOURCE", "self.sources < MEMORY_SOURCE")),
        within("Progress.tick", ("(self.step + 1) % every", "self.step % every")),
    ),
    *of("core.py", "oracle/test_lucir.py oracle/test_lode.py", within("Batch.old", ("self.seen & ~self.current", "self.seen"))),
    *of(
        "engine/evaluate.py",
        "oracle/test_mirrored.py",
        within(
            "rule_scores",
            (
                "by_layer.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(by_layer))",
                "by_layer.log_softmax(dim=-1).logsumexp(dim=0)",
            ),
        ),
    ),
    # Nets.
    *of(
        "nets/affine.py",
        "oracle/test_lpr.py",
        within(
            "Affine.rows",
            ("x.new_ones(*x.shape[:-1], 1)", "x.new_zeros(*x.shape[:-1], 1)"),
            ("x.shape[-2] // images", "x.shape[-2]"),
        ),
        within(
            "second_moments",
            ("total / len(images)", "total"),
            ("in_mode(net, training=False)", "in_mode(net, training=True)"),
            ("net.meter.count(forward=len(images))", "net.meter.count(forward=0)"),
        ),
        within("second_moments.add", ("sums[name] + product if name in sums else product", "product")),
    ),
    *of(
        "nets/resnet.py",
        NETS,
        within(
            "Conv3x3.taps",
            ("3 * down[:, None, :, None] + across[None, :, None, :]", "down[:, None, :, None] + 3 * across[None, :, None, :]"),
        ),
        within(
            "BasicBlock.forward",
            ("self.shortcut(x)", "2 * self.shortcut(x)"),
            ("F.relu(self.norm1(self.conv1(x)), inplace=True)", "self.norm1(self.conv1(x))"),
        ),
        within("BasicBlock.__init__", ("stride == 1 and inputs == outputs", "False")),
        within("separable_down", ("Conv3x3(inputs, inputs, 2, groups=inputs)", "Conv3x3(inputs, inputs, 1, groups=inputs)")),
        within(
            "Gate.forward",
            ("F.relu(self.norm(self.look(x)), inplace=True)", "self.norm(self.look(x))"),
            ("enlarge(coarse, x.shape[-2], x.shape[-1]).sigmoid_()", "enlarge(coarse, x.shape[-2], x.shape[-1]).tanh_()"),
        ),
        within(
            "enlarge",
            (
                'F.interpolate(maps, (height, width), mode="bilinear", align_corners=False)',
                'F.interpolate(maps, (height, width), mode="bilinear", align_corners=True)',
            ),
        ),
        within(
            "line_weights",
            (
                'F.interpolate(points[None], larger, mode="linear", align_corners=False)',
                'F.interpolate(points[None], larger, mode="linear", align_corners=True)',
            ),
        ),
        within(
            "ResNet18.__init__",
            (
                "zip([width, *widths], widths, [1, 2, 2, 2], strict=False)",
                "zip([width, *widths], widths, [2, 2, 2, 2], strict=False)",
            ),
            (
                'nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")',
                'nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")',
            ),
            ("taps > 1", "taps > 0"),
        ),
        within(
            "ResNet18.forward",
            ("self.gates[tap](x)", "x"),
            ("side.mean(dim=(2, 3))", "side.amax(dim=(2, 3))"),
            ("number - self.first_tap", "number"),
        ),
    ),
    *of(
        "nets/resnet.py",
        "oracle/test_heads.py",
        within(
            "ResNet18.drop_last_relu",
            ("block.last_relu = False", "block.last_relu = True"),
            ("last[-1] = nn.Identity()", "last[-1] = nn.ReLU()"),
        ),
    ),
    *of(
        "nets/mlp.py",
        "oracle/test_nets.py oracle/test_heads.py",
        within(
            "MLP.forward",
            ("x, torch.relu(x)", "x, torch.sigmoid(x)"),
            ("outputs[-self.layers :]", "outputs[: self.layers]"),
            ("x if self.last_relu else before", "x"),
            ("norm(x[:, :, None, None]).flatten(1)", "x + 0"),
        ),
    ),
    *of(
        "nets/tapped.py",
        "oracle/test_nets.py",
        within("StackedLinear.__init__", ("max(inputs, 1) ** -0.5", "max(outputs, 1) ** -0.5")),
        within("BatchNorm.forward", ("x.shape[0] * x.shape[2] * x.shape[3]", "x.shape[0]")),
        within("TappedNet.sweep", ("in_mode(self, training=False)", "in_mode(self, training=True)")),
        within(
            "StackedLinear.forward",
            (
                "torch.addmm(self.bias.squeeze(0), x.squeeze(0), self.weight.squeeze(0))",
                "torch.mm(x.squeeze(0), self.weight.squeeze(0))",
            ),
            ("torch.baddbmm(self.bias, x, self.weight)", "torch.bmm(x, self.weight)"),
        ),
    ),
    *of(
        "nets/growth.py",
        "test_growth.py",
        within(
            "Growth.padded",
            ("value.new_zeros", "value.new_ones"),
            ("new.tensor_split(blocks, axis)", "new.tensor_split(blocks, axis)[::-1]"),
            ("[part for both in parts for part in both]", "[value, new]"),
        ),
        within(
            "Growth._entries",
            ('rng.generator(self.seed, "new class", name, label)', 'rng.generator("new class", name, label)'),
            ('rng.generator(self.seed, "new class", name, label)', 'rng.generator(self.seed, "new class", name)'),
            ("-bound", "0 * bound"),
        ),
    ),
    *of(
        "nets/tapped.py",
        "oracle/test_mirrored.py",
        within("TappedNet.predict", ("self(x.flip(-1))", "self(x.flip(-2))")),
        within("TappedNet.sweep", ("len(x) * (1 + self.mirrored)", "len(x)")),
    ),
    *of(
        "nets/tapped.py",
        "oracle/test_trunk.py",
        within(
            "TappedNet.parameter_groups",
            ("[(self.backbone.trunk_lr, of_trunk), (1.0, others)]", "[(self.backbone.trunk_lr, others), (1.0, of_trunk)]"),
        ),
        within("Backbone.train", ("module.eval()", "module.train()")),
    ),
    *of(
        "functional/optim.py",
        "oracle/test_trunk.py",
        within("build", ('made["lr"] *= factor', 'made["lr"] = factor')),
        within("adam", ("(beta1, beta2)", "(beta2, beta1)")),
        within(
            "adamw",
            (
                "torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), fused=True)",
                "torch.optim.Adam(params, lr=lr, weight_decay=weight_decay, betas=(beta1, beta2), fused=True)",
            ),
        ),
        within(
            "sgd",
            (
                "torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)",
                "torch.optim.SGD(params, lr=lr, momentum=weight_decay, weight_decay=momentum, fused=True)",
            ),
        ),
    ),
    *of(
        "functional/optim.py",
        "test_objects.py",
        within("_cosine", ("min(step / steps, 1)", "step / steps"), ("(1 - lowest)", "1")),
        within("_linear", ("min(step / steps, 1)", "step / steps")),
        within("_warmup", ("step + 1", "step")),
        within("_drop", ("step >= place", "step > place")),
        within("_made", ('made["lr"] *= factor', 'made["lr"] = factor')),
    ),
    *of(
        "engine/schedule.py",
        "test_objects.py",
        within("Schedule.advance", ('group["lr"] = rate', "pass")),
    ),
    *of(
        "nets/heads.py",
        "oracle/test_heads.py golden/test_golden_lucir.py",
        within("CosineHead.forward", ("self.scale * self.cosine(x)", "self.cosine(x)")),
        within("CosineHead.cosine", ("unit(self.weight, self.epsilon, dim=1)", "self.weight")),
        within(
            "CosineHead.imprint",
            ("(norms * like).sum(dim=1) / like.sum()", "norms.mean(dim=1)"),
            ("directions.any(dim=-1)[:, None]", "directions.any(dim=-1)[:, None] | True"),
        ),
        within("HeldRows.put_back", ("torch.where(moving, value, before)", "torch.where(moving, before, value)")),
    ),
    *of(
        "nets/sharing.py",
        "test_processes.py",
        within("_norm_of_all", ("var * (total / (total - 1))", "var")),
        within("features_of_all", ("len(x) < LEAST * processes.count()", "len(x) < processes.count()")),
        within("_Gather.backward", ("gradient[:, ctx.own]", "gradient[:, ctx.own] / processes.count()")),
        within(
            "_BatchNorm.forward",
            ("count * (var + mean.square())", "count * var"),
            ("sums[1] / total - mean.square()", "sums[1] / total"),
        ),
        within(
            "_BatchNorm.backward",
            ("scale.square() * sums[0] / ctx.total", "scale * sums[0] / ctx.total"),
            ("scale * sums[1] / ctx.total - slope * ctx.mean.double()", "scale * sums[1] / ctx.total"),
            ("(ctx.var.double() + ctx.eps).rsqrt()", "ctx.var.double().rsqrt()"),
        ),
    ),
    *of(
        "nets/class_means.py",
        "oracle/test_nets.py golden/test_golden_mose.py oracle/test_mose.py oracle/test_scr.py",
        within(
            "class_means",
            ("F.normalize(taps.features, dim=-1)", "taps.features"),
            ("F.normalize(sums, dim=-1)", "sums"),
            ("not present[label]", "present[label]"),
            (
                'rng.generator("direction of a class without images", rank)',
                'rng.generator("direction of a class without images", label)',
            ),
        ),
        within(
            "nearest_mean",
            ("F.normalize(features, dim=-1)", "features"),
            (
                "2 * (F.normalize(features, dim=-1) @ means.transpose(1, 2)) - 2",
                "2 * (F.normalize(features, dim=-1) @ means.transpose(1, 2)) + 2",
            ),
        ),
    ),
    *of(
        "nets/scoring.py",
        "golden/test_golden_mir.py oracle/test_scoring.py",
        within("step_ahead", ("weights[name].detach() - rate * value", "weights[name].detach() + rate * value")),
        within(
            "loss_of_each",
            (
                "cross_entropy_of_each(outputs(net, x, weights, normalisation).logits, y).sum(dim=0)",
                "cross_entropy_of_each(outputs(net, x, weights, normalisation).logits, y).mean(dim=0)",
            ),
        ),
        within("gradient", ("cross_entropy(taps.logits, y).sum()", "cross_entropy(taps.logits, y).mean()")),
        within("gradients_of_groups", ('name.startswith("classifier.")', 'not name.startswith("classifier.")')),
        within("features_of", ("taps.features[-1]", "taps.features[0]")),
        within("scoring", ("buffer.copy_(before)", "before.copy_(buffer)")),
    ),
    *of(
        "nets/scoring.py",
        "oracle/test_mir.py oracle/test_dvc.py oracle/test_scoring.py",
        within("rate_ahead", ("RATE_WITHOUT_SGD if of_sgd is None else of_sgd", "RATE_WITHOUT_SGD")),
        within("RATE_WITHOUT_SGD", ("0.1", "1.0")),
    ),
    *of(
        "nets/correction.py",
        "oracle/test_correction.py golden/test_golden_bic.py",
        within("Correction.objective", ("penalty * self.shift**2", "penalty / 2 * self.shift**2")),
        within("fit_correction", ("[0.0, 2 * penalty]", "[0.0, penalty]")),
        within(
            "Correction.__call__",
            ("scale * logits + shift", "scale * (logits + shift)"),
            (
                "torch.where(self.classes, scale * logits + shift, logits)",
                "torch.where(~self.classes, scale * logits + shift, logits)",
            ),
        ),
    ),
    *of(
        "nets/probe.py",
        "oracle/test_co2l.py",
        within(
            "logistic_regression",
            (
                'LogisticRegression(C=inverse_strength, class_weight="balanced", max_iter=1000)',
                'LogisticRegression(C=1 / inverse_strength, class_weight="balanced", max_iter=1000)',
            ),
            (
                'LogisticRegression(C=inverse_strength, class_weight="balanced", max_iter=1000)',
                "LogisticRegression(C=inverse_strength, class_weight=None, max_iter=1000)",
            ),
            ("[torch.zeros_like(part), part]", "[part, torch.zeros_like(part)]"),
        ),
        within("LinearProbe.__init__", ("-torch.inf", "0.0"), ("enumerate(held)", "enumerate(sorted(held))")),
    ),
    *of(
        "nets/teacher.py",
        "oracle/test_ema.py oracle/test_cls_er.py golden/test_golden_ema.py",
        within(
            "Average.update",
            ("get_ema_multi_avg_fn(momentum)", "get_ema_multi_avg_fn(1 - momentum)"),
            ("self._counters", "self._counters[:0]"),
        ),
        within(
            "Average.__init__",
            (
                "[pair for pair in self._pairs if pair[0].is_floating_point()]",
                "[pair for pair in self._pairs if pair[0].requires_grad]",
            ),
        ),
    ),
    *of(
        "nets/teacher.py",
        "oracle/test_lwf.py oracle/test_icarl.py oracle/test_co2l.py",
        within("frozen_copy", ("twin.requires_grad_(False).eval()", "twin.requires_grad_(False).train()")),
        within(
            "Teacher.renew",
            ("self.classes[list(knows)] = True", "self.classes[list(knows)] = False"),
            ("frozen_copy(self.net).train(self.training)", "self.net"),
        ),
    ),
    *of(
        "nets/flat.py",
        REGULARISERS,
        within(
            "FlatParameters.by_layer",
            (
                "[part.sum() for part in torch.split(values, self.sizes)]",
                "[part.mean() for part in torch.split(values, self.sizes)]",
            ),
            ("values.sum()", "values.mean()"),
        ),
        within("first_taps", ("found[id(trainable[name])] = tap", "found[id(trainable[name])] = net.layers - 1")),
    ),
    *of(
        "nets/vit.py",
        "oracle/test_vit.py",
        within("ViT.__init__", ("(tap + 1) * depth // taps - 1", "tap * depth // taps")),
        within(
            "ViT.class_tokens",
            (
                "torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.pos_embed",
                "torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1)",
            ),
            ("class_tokens.append(x[:, 0])", "class_tokens.append(x[:, -1])"),
        ),
        within("ViT.forward", ("[*self.tap_norms, self.norm]", "[self.norm, *self.tap_norms]")),
        within(
            "Attention.forward",
            (
                "query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)",
                "key, query, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)",
            ),
        ),
        within(
            "TransformerBlock.forward", ("self.attn(self.norm1(x))", "self.attn(x)"), ("self.mlp(self.norm2(x))", "self.mlp(x)")
        ),
        within("Perceptron.forward", ("F.gelu(self.fc1(x))", "F.relu(self.fc1(x))")),
        within("INITIAL_SPREAD", ("0.02", "0.04")),
        within("NORM_EPSILON", ("1e-6", "1e-3")),
        within(
            "resized_positions",
            (
                'F.interpolate(maps, grid, mode="bicubic", align_corners=False, antialias=True)',
                'F.interpolate(maps, grid, mode="bicubic", align_corners=False, antialias=False)',
            ),
            ("positions[:, :1].float()", "0 * positions[:, :1].float()"),
        ),
    ),
    *of(
        "nets/weights.py",
        "oracle/test_vit.py",
        within("vision_transformer", ('("query", "key", "value")', '("key", "query", "value")')),
    ),
    *of(
        "nets/trunk.py",
        "oracle/test_trunk.py",
        within(
            "LowRankLinear.forward",
            (
                "self.scale * F.linear(F.linear(x, self.down), self.matrix_up(self.up))",
                "F.linear(F.linear(x, self.down), self.matrix_up(self.up))",
            ),
        ),
        within("TrunkOptions.apply", ("self.lora_alpha / self.lora", "self.lora_alpha")),
        within(
            "LowRankLinear.matrix_up", ("up[0], up.new_zeros(up.shape[1], 0), up[1]", "up[0], up[1], up.new_zeros(up.shape[1], 0)")
        ),
        within("LowRankLinear.bound", ("self.in_features**-0.5", "self.in_features**-1.0")),
    ),
    *of(
        "nets/trunk.py",
        "oracle/test_online_lora.py",
        within("LowRankLinear.change", ("self.scale * (self.matrix_up(up) @ down)", "self.matrix_up(up) @ down")),
    ),
    *of(
        "nets/module.py",
        "oracle/test_tap.py",
        within(
            "Reader.pool",
            ("output.flatten(2).mean(dim=2)", "output.flatten(2).amax(dim=2)"),
            ("output.flatten(1, -2).mean(dim=1)", "output.flatten(1, -2)[:, 0]"),
            ('output[:, 0] if self.kind == "class" else output', 'output[:, -1] if self.kind == "class" else output'),
        ),
        within("Reader.forward", ("self.norm(pooled)", "pooled")),
        within("evenly_spaced", ("math.ceil((number + 1) * len(places) / taps)", "(number + 1) * len(places) // taps")),
    ),
    # Memories.
    *of(
        "memory/__init__.py",
        "oracle/test_memory.py oracle/test_icarl.py",
        within("Memories.reserve", ("self.replay.capacity - slots", "self.replay.capacity")),
        within("Memories.scratch", ("self.beyond_budget += slots", "self.beyond_budget = 1")),
    ),
    *of(
        "memory/reservoir.py",
        "oracle/test_memory.py",
        within(
            "Memory.choose",
            ("rng.integers(0, order + 1)", "rng.integers(0, order + 2)"),
            ("chosen[:free] = order[:free]", "chosen[:free] = order[:free][::-1]"),
            ("enumerate(chosen.tolist())", "reversed(list(enumerate(chosen.tolist())))"),
        ),
        within(
            "Memory.draw",
            ("self._by_task.keys() - {except_task}", "self._by_task.keys()"),
            ("self._by_label.keys() - set(except_labels)", "set(except_labels)"),
        ),
        within(
            "Memory.put",
            ("self.attributes[name][where] = 0", "self.attributes[name][where] += 0"),
            ("self.filled = max(self.filled, max(places) + 1)", "self.filled += len(places)"),
        ),
        within(
            "Buckets.move",
            ("bucket[hole] = last", "bucket.insert(hole, last)"),
            ("self.place[last] = hole", "self.place[last] = self.place[slot] + 1"),
        ),
        within("Buckets.draw", ("picks - ends[which]", "(picks - ends[which]) // 2")),
        within("distinct", ("rng.permutation(among)[:n]", "np.arange(n)")),
    ),
    *of(
        "memory/reservoir.py",
        "oracle/test_heads.py",
        within("Buckets.draw_by_key", ("rng.integers(0, len(buckets), n)", "rng.integers(0, len(buckets), n) // 2")),
    ),
    *of(
        "memory/on_disk.py",
        "test_stores.py",
        within("DiskMemory.write", ("self._changed[slots] = True", "pass")),
        within("DiskMemory.checkpointing", ("self._generation += 1", "pass"), ("self._apply(slots, content)", "pass")),
        within("DiskMemory._apply", ("begin + slot * size", "slot * size"), ("self._changed[slots] = False", "pass")),
        within("_checks", ("zlib.crc32(row, int(before))", "zlib.crc32(row)")),
    ),
    *of(
        "memory/compressed.py",
        "test_stores.py",
        within("JpegRows.read", ("pixels.transpose(2, 0, 1)", "pixels.transpose(2, 1, 0)")),
        within("JpegMemory.write", ("compressed(image, self.quality)", "compressed(image, QUALITY)")),
        within("JpegMemory.load_images", ("content[begin:end]", "content[:end]")),
    ),
    *of(
        "memory/in_group.py",
        "test_sharded_memory.py",
        within("GroupRows._own", ("slots % self.count == self.rank", "slots % self.count == 0")),
        within(
            "GroupRows.pieces",
            ("READS + zlib.crc32(asked.tobytes())", "READS"),
            ("self._own(asked)", "self._own(numbers[: len(asked)])"),
        ),
        within("GroupRows.read", ("found[start : start + len(piece)] = piece", "found[: len(piece)] = piece")),
        within("ShardedMemory.send_images", ("self.images[: self.filled]", "self.images")),
    ),
    *of(
        "data/shards.py",
        "data/test_shards.py",
        within("ShardRows.read", ("divmod(number, self.of_each)", "divmod(number, self.of_each + 1)")),
        within("_OpenShard.read_into", ("zlib.crc32(row) != check[0]", "False"), ("self._checks + 8 * place", "self._checks")),
    ),
    *of(
        "rows.py",
        "data/test_shards.py",
        within("Rows.index_select", ("self.chosen[index.cpu().numpy()]", "index.cpu().numpy()")),
    ),
    *of(
        "engine/read_ahead.py",
        "data/test_shards.py",
        within("ReadAhead.__call__", ("step + AHEAD + 1", "step + AHEAD")),
    ),
    *of(
        "memory/class_balanced.py",
        "oracle/test_gdumb.py oracle/test_held_out.py",
        within(
            "add_balanced",
            ("held[label] >= memory.capacity // len(held)", "held[label] > memory.capacity // len(held)"),
            ("max(held, key=held.__getitem__)", "min(held, key=held.__getitem__)"),
        ),
        within("place_in_class", ("np.arange(len(labels)) - np.searchsorted(grouped, grouped)", "np.arange(len(labels))")),
    ),
    *of(
        "memory/held_out.py",
        "oracle/test_held_out.py",
        within("HeldOut.share", ("self.memory.capacity // max(classes, 1)", "self.memory.capacity // max(classes - 1, 1)")),
        within(
            "HeldOut.rows",
            ("np.flatnonzero(place < share)", "np.flatnonzero(place <= share)"),
            ("held + place_in_class(new.labels)", "place_in_class(new.labels)"),
            ("np.flatnonzero(place == 0)[: self.memory.capacity - len(self.memory)]", "np.flatnonzero(place == 0)"),
        ),
        within(
            "HeldOut.add",
            ("rng.permutation(size)", "np.arange(size)"),
            (
                "place_in_class(memory.labels[order]) >= self.share(len(new.progress.seen))",
                "place_in_class(memory.labels[order]) > self.share(len(new.progress.seen))",
            ),
        ),
        within(
            "HeldOut.balanced",
            ("place_in_class(labels) < max(1, self.share(classes))", "place_in_class(labels) <= max(1, self.share(classes))"),
        ),
    ),
    *of(
        "inputs.py",
        "oracle/test_held_out.py test_inputs.py",
        within(
            "same_rows",
            ("(a[:, None] == b).flatten(2).all(dim=2)", "(a[:, None] == b).flatten(2).any(dim=2)"),
            ("torch.stack(same).all(dim=0)", "torch.stack(same).any(dim=0)"),
        ),
        within("Inputs.normalise", ("x.float()", "x")),
        within("write_rows", ("leaf.dtype == torch.uint16", "False")),
    ),
    *of(
        "memory/herding.py",
        "oracle/test_icarl.py",
        within(
            "herd",
            ("F.normalize(features, dim=1)", "features"),
            ("F.normalize(unit.mean(dim=0), dim=0)", "unit.mean(dim=0)"),
            ("missing + mean - unit[best].squeeze(0)", "missing - unit[best].squeeze(0)"),
            ("free[best] = -torch.inf", "free[best] = -0.1"),
        ),
    ),
    *of(
        "memory/gss.py",
        "golden/test_golden_gss.py oracle/test_gss.py",
        within(
            "similarity",
            (
                "(gradients @ others.T / norms.clamp(min=SMALLEST_NORMS)).amax(dim=1)",
                "(gradients @ others.T / norms.clamp(min=SMALLEST_NORMS)).mean(dim=1)",
            ),
        ),
        within(
            "replacement_chance",
            ("(slot + 1) / np.where(total > 0, total, 1)", "(item + 1) / np.where(total > 0, total, 1)"),
            ("(item + 1) + (slot + 1)", "item + slot + 1"),
        ),
        within(
            "victim_weights",
            ("(scores - scores.min()) / (scores.max() - scores.min() + SPREAD_FLOOR)", "scores / (scores.max() + SPREAD_FLOOR)"),
        ),
        within("draw_victims", ("weights / weights.sum()", "weights[::-1] / weights.sum()")),
        within("draw_groups", ("min(at_most, filled // size)", "min(at_most, filled // size + 1)")),
    ),
    *of(
        "memory/knn_shapley.py",
        "golden/test_golden_aser.py oracle/test_aser.py",
        within("shapley_values", ("k * rank", "rank"), ("steps.flip(1).cumsum(dim=1).flip(1)", "steps.cumsum(dim=1)")),
        within(
            "adversarial_values",
            ("cooperative.amax(dim=0)", "cooperative.mean(dim=0)"),
            ("adversarial.amin(dim=0)", "adversarial.amax(dim=0)"),
            (
                "(cooperative.mean(dim=0) if len(cooperative) else nothing) - adversarial.mean(dim=0)",
                "(cooperative.mean(dim=0) if len(cooperative) else nothing) + adversarial.mean(dim=0)",
            ),
            ("-adversarial.sum(dim=0)", "adversarial.sum(dim=0)"),
        ),
        within("balanced_draws", ("place // per_class == draw", "place // per_class <= draw")),
        within("exchanges", ("values.argsort(descending=True, stable=True)", "values.argsort(stable=True)")),
    ),
    # Feedback.
    *of(
        "controllers/base.py",
        "oracle/test_controllers.py oracle/test_grace.py",
        within("Controller.weights", ("-self.relative_accuracy(accuracy)", "self.relative_accuracy(accuracy)")),
        within("spread", ("len(values) - unbiased", "len(values) - 1")),
        within("Controller.term", ("gamma * signals.entropy", "-gamma * signals.entropy")),
        within("Signals.entropy", ("self._per_image * entropy(self.logits, self._classes)", "entropy(self.logits, self._classes)")),
        within("Signals.widest", ("self._classes.sum().log()", "self._classes.numel()")),
        within(
            "Signals.forgetting",
            ("(past, 1 - past)", "(1 - past, past)"),
            ("(of_each * weight).sum(dim=1) / weight.sum()", "(of_each * weight).mean(dim=1)"),
        ),
        within(
            "Signals.pull",
            ("p * (log_p + h)", "p * log_p"),
            (
                "logits.softmax(dim=-1) - F.one_hot(self.labels, p.shape[-1])",
                "logits.softmax(dim=-1) + F.one_hot(self.labels, p.shape[-1])",
            ),
            ("self._per_image * of_entropy", "of_entropy"),
        ),
        within("Controller.relative_accuracy", ("self.accuracy_floor", "self.sigma_floor")),
        within(
            "relative", ("precise - precise.mean()", "precise"), ("torch.where(std < LEAST_SPREAD, torch.zeros_like(z), z)", "z")
        ),
    ),
    *of(
        "controllers/paper.py",
        "oracle/test_grace.py oracle/test_controllers.py",
        within(
            "Paper.strengths",
            ("self.beta * torch.exp(torch.tanh(z))", "self.beta * torch.exp(z)"),
            ("torch.exp(torch.tanh(-z))", "torch.exp(torch.tanh(z))"),
            ("-self.beta * torch.exp(torch.tanh(z))", "self.beta * torch.exp(torch.tanh(z))"),
            ("torch.exp(torch.tanh(z)) - 1", "torch.exp(torch.tanh(z))"),
            ("torch.full_like(z, self.beta)", "torch.ones_like(z)"),
            ("h if self.attached else h.detach()", "h"),
        ),
        within("Paper.term", ("self._distance(signals) ** 2", "self._distance(signals).abs()")),
        within("Paper.slope", ("2 * gamma * self._distance(signals)", "gamma * self._distance(signals)")),
        within("Paper._distance", ("signals.entropy.detach()", "signals.entropy")),
    ),
    *of(
        "controllers/balance.py",
        "oracle/test_controllers.py",
        within(
            "Balance.strengths",
            ("self.share * self.weights(signals.accuracy).to(signals.pull)", "self.share"),
            (
                "self.share * self.weights(signals.accuracy).to(signals.pull) / signals.pull.clamp(min=1e-12)",
                "self.share * self.weights(signals.accuracy).to(signals.pull) * signals.pull.clamp(min=1e-12)",
            ),
            ("self.limit", "1.0"),
        ),
    ),
    *of(
        "controllers/integral.py",
        "oracle/test_controllers.py",
        within(
            "ProportionalIntegral.strengths",
            ("self._unlimited(self._error(signals)).clamp(-self.limit, self.limit)", "self._unlimited(self._error(signals))"),
            ("self.beta", "1.0"),
        ),
        within(
            "ProportionalIntegral._unlimited",
            ("self.proportional * error + self.integral * self._sum.to(error)", "self.integral * self._sum.to(error)"),
            ("self.proportional * error + self.integral * self._sum.to(error)", "self.proportional * error"),
        ),
        within(
            "ProportionalIntegral.after_step",
            ("error.masked_fill(winds_up, 0.0)", "error"),
            ("(gamma.abs() >= self.limit) & (gamma * self.integral * error > 0)", "gamma.abs() >= self.limit"),
            ("self._error(signals).nan_to_num(nan=0.0)", "self._error(signals)"),
        ),
        within(
            "ProportionalIntegral._error",
            ("signals.entropy.detach() / widest", "signals.entropy.detach()"),
            ("signals.entropy.detach() / widest - self.target", "self.target - signals.entropy.detach() / widest"),
        ),
    ),
    *of(
        "controllers/forgetting.py",
        "oracle/test_controllers.py",
        within(
            "Forgetting.__call__",
            (
                "len(accuracy) * torch.softmax(difference / self.temperature, dim=0)",
                "torch.softmax(difference / self.temperature, dim=0)",
            ),
            ("difference / self.temperature", "difference * self.temperature"),
        ),
        within(
            "Forgetting.after_step",
            ("before.lerp(latest, self.rate)", "latest.lerp(before, self.rate)"),
            ("latest.isfinite()", "latest.isfinite() | True"),
        ),
        within("Forgetting.strengths", ("torch.zeros_like(signals.accuracy)", "torch.ones_like(signals.accuracy)")),
    ),
    *of(
        "controllers/bayes.py",
        "oracle/test_controllers.py",
        within(
            "Bayes.strengths",
            ("self.relative(h)", "h"),
            ("self.beta * self.model.posterior(self.relative(h)).mean", "self.model.posterior(self.relative(h)).mean"),
        ),
        within(
            "Bayes.model", ("Strength(self.c, self.sigma, self.tau, self.mu0)", "Strength(-self.c, self.sigma, self.tau, self.mu0)")
        ),
    ),
    *of(
        "controllers/posterior.py",
        "oracle/test_bayes.py",
        within("Posterior.mean", ("self.m + self.s**2 / 2", "self.m")),
        within("Strength.centre", ("2 * precision * v", "precision * v"), ("self.tau**2 * precision", "precision")),
        within("Strength.at_rest.variance", ("2 * max(m - self.centre, 0.0)", "max(m - self.centre, 0.0)")),
        within(
            "Strength.elbo",
            ("0.5 - math.log(self.tau)", "0.5"),
            ("self._fit(m, s**2, self._pull(d)) + torch.log(s)", "self._fit(m, s**2, self._pull(d))"),
        ),
        within("Strength.gradient", ("by_m, by_log_s / s", "by_m, by_log_s")),
        within("Strength.monte_carlo_elbo", ("likelihood + prior - log_normal(log_gamma - m, s)", "likelihood + prior")),
        within("Strength.map", ("inverse / self.sigma**2", "inverse")),
        within("Strength._pull", ("self.c / self.sigma**2", "self.c / self.sigma")),
        within(
            "Strength._fit", ("variance + (m - self.centre) ** 2", "(m - self.centre) ** 2"), ("2 * self.sigma**2", "self.sigma**2")
        ),
        within(
            "Strength._derivatives",
            ("inverse_square / self.sigma**2", "inverse_square"),
            ("linear - 2.0 * square", "linear - square"),
            ("4.0 * square - linear", "2.0 * square - linear"),
            ("2.0 * curvature + variance * (linear - 8.0 * square)", "curvature + variance * (linear - 8.0 * square)"),
        ),
        within("inverse_moments", ("2.0 * (variance - m)", "variance - 2.0 * m")),
        within("log_normal", ("-((deviation / spread) ** 2) / 2", "-((deviation / spread) ** 2)")),
    ),
    *of(
        "controllers/feedback.py",
        "oracle/test_controllers.py",
        within(
            "Feedback.__call__",
            ("alpha * losses + self.controller.term(signals, gamma)", "losses + self.controller.term(signals, gamma)"),
            (
                "(alpha * losses + self.controller.term(signals, gamma)).sum()",
                "(alpha * losses + self.controller.term(signals, gamma)).mean()",
            ),
            ("self.controller.after_step(signals)", "pass"),
        ),
        within(
            "Feedback.observe_past",
            ("counted[:-1] / counted[-1]", "counted[:-1]"),
            ("in_mode(net, training=False)", "in_mode(net, training=True)"),
        ),
        within(
            "Feedback.gradient_ratio",
            (
                "self.controller.slope(signals, gamma).detach().abs() * signals.pull / alpha",
                "self.controller.slope(signals, gamma).detach().abs() * signals.pull",
            ),
        ),
    ),
    # Streams.
    *of(
        "streams/__init__.py",
        "oracle/test_streams.py",
        within(
            "cut_into_batches", ("np.minimum(np.arange(size, length + size, size), length)", "np.arange(size, length + size, size)")
        ),
        within("Stream.ends_task", ("self.task_of_step[step + 1]", "self.task_of_step[step - 1]")),
        within(
            "Stream.cut",
            ("np.append(self.marks[self.marks < steps], steps - 1)", "self.marks[self.marks < steps]"),
            ("self.ends[steps - 1]", "self.ends[steps]"),
        ),
        within("Stream.batch", ("self.ends[step - 1]", "self.ends[step - 1] + 1")),
        within(
            "Stream.hash",
            (
                "(self.order, self.ends, self.task_of_step, self.marks, self.test_task)",
                "(self.order, self.ends, self.task_of_step, self.marks)",
            ),
        ),
        within("Stream.test_images", ("np.isin(tasks, met)", "np.isin(data.test_y, list(seen))")),
    ),
    *of(
        "streams/split.py",
        "oracle/test_streams.py",
        within(
            "split",
            ("task_of_class[members] = task", "task_of_class[np.sort(members)] = tasks - 1 - task"),
            ('rng.generator(seed, "stream order", task, epoch)', 'rng.generator(seed, "stream order", task)'),
            ('rng.generator(seed, "stream order", task, epoch)', 'rng.generator(0, "stream order", task, epoch)'),
            ("np.full(len(batches), epoch == 0)", "np.full(len(batches), True)"),
            ("cut_into_batches(len(images), batch, used)", "cut_into_batches(len(images), batch)"),
            ("np.diff(steps, append=tasks)", "np.diff(steps)"),
            ("steps if marked else np.full_like(steps, NO_TASK)", "steps"),
            ("task_of_class[data.test_y]", "data.test_y % tasks"),
        ),
        within(
            "some_of_each",
            ('rng.generator(seed, "images of a class", label).permutation(len(of_class))', "np.arange(len(of_class))"),
        ),
        within("class_order", ('rng.generator(order, "class order").permutation(classes)', "np.arange(classes)[::-1]")),
    ),
    *of(
        "streams/iid.py",
        "oracle/test_streams.py",
        within(
            "shuffled",
            ("np.diff(stream.ends, prepend=0).max()", "np.diff(stream.ends, prepend=0)[0]"),
            ("np.arange(1, len(ends) + 1)", "np.arange(len(ends))"),
            ("second[step * extra : (step + 1) * extra]", "second[:extra]"),
        ),
        within(
            "endless",
            ('rng.generator(seed, "iid pass", number)', 'rng.generator(seed, "iid pass")'),
            ("-(-length // len(images))", "length // len(images)"),
        ),
        within("without_tasks", ("np.arange(1, stream.tasks + 1) * steps", "np.arange(1, stream.tasks + 1) * (steps - 1)")),
        within("offline", ("epoch * len(images)", "epoch")),
    ),
    # Data.
    *of(
        "data/splits.py",
        "data/test_data_arrays.py data/test_data_folder.py",
        within(
            "held_out",
            ("fraction * len(rows)", "(1 - fraction) * len(rows)"),
            ("min(max(count, 1), len(rows) - 1)", "max(count, 1)"),
            ("min(max(count, 1), len(rows) - 1)", "min(count, len(rows) - 1)"),
            ('f"{seed}:{key}"', 'f"{key}"'),
        ),
    ),
    *of(
        "data/dataset.py",
        "data/test_data_arrays.py",
        within(
            "channel_statistics",
            ("counts @ values**2 / pixels - mean**2", "counts @ values**2 / pixels"),
            ("counts @ values / pixels", "counts @ values / len(images)"),
            ("std[std == 0] = 255", "std[std == 0] = 1"),
        ),
    ),
    *of(
        "data/arrays.py",
        "data/test_data_arrays.py",
        within("_as_pixels", ("np.rint(array * 255)", "np.floor(array * 255)")),
        within("_images", ("array.transpose(0, 3, 1, 2)", "array.transpose(0, 3, 2, 1)")),
    ),
    *of(
        "data/pixels.py",
        "data/test_data_load.py data/test_data_folder.py",
        within(
            "centre",
            ("round(height * margin), round(width * margin)", "height, width"),
            ("tall * image.width >= wide * image.height", "tall * image.width <= wide * image.height"),
            ("round((image.width - width) / 2), round((image.height - height) / 2)", "0, 0"),
        ),
    ),
]
