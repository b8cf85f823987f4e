"""votes: heads at all tapped layers, trained by the inner method, and the rule that predicts."""

from __future__ import annotations

import pytest
import torch

from gracecl.engine.evaluate import seen_scores
from gracecl.errors import UserError
from gracecl.testing import feed, toy_data, toy_engine, toy_stream


def test_it_is_the_inner_method_on_all_taps() -> None:
    """er() alone has one head; with votes it learns as er() does with four."""
    voting, four, one = toy_engine("votes(er(n_recall=4))"), toy_engine("er(n_recall=4)", taps=4), toy_engine("er(n_recall=4)")
    assert (voting.net.layers, four.net.layers, one.net.layers) == (4, 4, 1)
    for engine in (voting, four):
        feed(engine, toy_stream(), until=8)
    for own, other in zip(voting.net.state_dict().values(), four.net.state_dict().values(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    "method", ["votes(er())", "mirrored(votes(er()))", "votes(multi_update(er()))", "votes(er(inference='ncm'))"]
)
def test_its_rule_is_the_learner_s(method: str) -> None:
    assert toy_engine(method).chain.rule == "linear_votes"


def test_predictions_are_those_of_the_mean_softmax() -> None:
    engine = toy_engine("votes(er(n_recall=4))")
    feed(engine, toy_stream(), until=8)
    seen = list(engine.progress.seen)
    net = engine.ready_to_predict()
    [(_, out)] = net.sweep(toy_data().test_x)
    expected = out.logits[..., seen].softmax(dim=-1).mean(dim=0).argmax(dim=1)
    scores, columns = seen_scores(engine.chain, out, engine.progress, engine.chain.rule)
    assert columns.tolist() == seen
    assert torch.equal(scores.argmax(dim=1), expected)
    last = out.logits[-1][:, seen].argmax(dim=1)
    assert not torch.equal(last, expected), "else it tells nothing"


def test_a_method_that_predicts_by_another_net_is_refused() -> None:
    with pytest.raises(UserError, match="net of its own"):
        toy_engine("votes(gdumb())")
