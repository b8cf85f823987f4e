"""mirrored: what predictions are made of, that training does not change, and the rule `linear_votes` that `best` predicts by."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gracecl.engine.engine import Engine
from gracecl.engine.evaluate import evaluate, seen_scores
from gracecl.errors import UserError
from gracecl.registry import spec
from gracecl.testing import TOY_SHAPE, feed, toy_data, toy_engine, toy_stream


def trained(method: str, until: int = 8) -> Engine:
    engine = toy_engine(method)
    feed(engine, toy_stream(), until=until)
    return engine


def of_views(engine: Engine, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean features and logits of images and of their mirror images, column after column reversed by hand."""
    net = engine.net.eval()
    order = torch.arange(TOY_SHAPE[-1] - 1, -1, -1)
    with torch.no_grad():
        one, other = (net(net.inputs.normalise(x)) for x in (images, images[..., order]))
    return (one.features + other.features) / 2, (one.logits + other.logits) / 2


def test_outputs_are_the_mean_over_the_image_and_its_mirror_image() -> None:
    engine, images = trained("mirrored(er(n_recall=4))"), toy_data().test_x
    _, logits = of_views(engine, images)
    [(_, out)] = engine.ready_to_predict().sweep(images)
    torch.testing.assert_close(out.logits, logits)
    assert not torch.allclose(out.logits, engine.net(engine.net.inputs.normalise(images)).logits, atol=1e-3)


def test_class_means_are_of_mirrored_images_too() -> None:
    engine = trained("mirrored(mose(n_recall=4))")
    engine.ready_to_predict()
    memory, label = engine.memories.replay, engine.progress.seen[0]
    features, _ = of_views(engine, memory[memory.slots_of(label)])
    expected = F.normalize(F.normalize(features, dim=-1).mean(dim=1), dim=-1)
    torch.testing.assert_close(engine.method.inner.means[:, label], expected)


def test_training_is_that_of_the_inner_method() -> None:
    plain, mirrored = trained("mose(n_recall=4)", 12), trained("mirrored(mose(n_recall=4))", 12)
    mirrored.ready_to_predict()
    for one, other in zip(plain.net.state_dict().values(), mirrored.net.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert not mirrored.net.mirrored


def test_both_looks_are_counted() -> None:
    engine, images = trained("mirrored(er())"), toy_data().test_x
    before = engine.net.meter.forward
    list(engine.ready_to_predict().sweep(images))
    assert engine.net.meter.forward - before == 2 * len(images)


def test_a_method_that_predicts_by_another_net_is_refused() -> None:
    with pytest.raises(UserError, match="predicts by another"):
        toy_engine("mirrored(gdumb())")


def test_votes_are_the_mean_softmax_of_the_layers_among_the_classes_met() -> None:
    engine, images = trained("mose(n_recall=4, inference='linear_votes')"), toy_data().test_x
    seen = list(engine.progress.seen)
    assert len(seen) < engine.net.classes
    [(_, out)] = engine.ready_to_predict().sweep(images)
    scores, columns = seen_scores(engine.chain, out, engine.progress, "linear_votes")
    assert columns.tolist() == seen
    expected = torch.stack([layer[:, seen].softmax(dim=1) for layer in out.logits]).mean(dim=0)
    torch.testing.assert_close(scores.exp(), expected)
    assert not torch.allclose(scores.exp(), out.logits.mean(dim=0)[:, seen].softmax(dim=1), atol=1e-4), "else it tells nothing"
    stream = toy_stream()
    x, y, tasks = stream.test_images(seen)
    [(_, out)] = engine.ready_to_predict().sweep(x)
    guess = seen_scores(engine.chain, out, engine.progress, "linear_votes")[0].argmax(dim=1)
    right = torch.tensor(seen)[guess].numpy() == y
    found = evaluate(engine, x, y, tasks).accuracy["linear_votes"]
    assert found == pytest.approx([100 * right[tasks == task].mean() for task in range(len(found))])


SPELLED = (
    "mirrored(ema(multi_update(mose(views=2, n_recall={block}, contrast=0.0, inference='linear_votes'), updates={updates}, "
    "lr_factor={rate}), momentum={momentum}, within_task=0.3))"
)


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("best()", {"block": 64, "updates": 4, "rate": 5.0, "momentum": 0.99}),
        ("best(cost=0.25)", {"block": 32, "updates": 4, "rate": 2.5, "momentum": 0.99}),
        ("best(cost=1)", {"block": 128, "updates": 8, "rate": 5.0, "momentum": 0.995}),
        ("best(cost=0.1)", {"block": 13, "updates": 4, "rate": 1.0, "momentum": 0.99}),
    ],
)
def test_best_is_what_its_page_says(written: str, options: dict[str, float]) -> None:
    best, spelled = trained(written, 5), trained(SPELLED.format(**options), 5)
    for one, other in zip(best.net.state_dict().values(), spelled.net.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert best.chain.rule == spelled.chain.rule == "linear_votes"
    [(_, one)], [(_, other)] = (engine.ready_to_predict().sweep(toy_data().test_x) for engine in (best, spelled))
    assert torch.equal(one.logits, other.logits)
    assert repr(best.method) == written
    assert repr(best.method.inner) == repr(spelled.method.inner)


def test_best_takes_a_cost_or_a_learner() -> None:
    assert repr(spec.parse_method("best(er())")) == "best(er())"
    assert repr(spec.parse_method("best(cost=0.5)")) == "best()"
    with pytest.raises(UserError, match="a cost or a learner, not both"):
        spec.parse_method("best(er(), cost=1.0)")
    with pytest.raises(UserError, match=r"cost must be between 0\.1 and 4"):
        spec.parse_method("best(cost=0)")
