"""Smoothed recall at k, against loops and against the arithmetic of the published code."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roadmatch.losses import recall
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.recall import RecallAtK
from tests import other_loss_oracles as oracles
from tests.oracles import sigmoid
from tests.other_loss_oracles import Batch, Matrix, batch_of, batches


def expected(batch: Batch, term: RecallAtK, similarity: Matrix | None = None) -> float:
    given = batch.similarity.tolist() if similarity is None else similarity
    settings = (term.ks, term.temperature, term.rank_temperature, term.published)
    return oracles.recall_loss(given, batch.relevant, batch.counted, *settings)


def loss_of(batch: Batch, term: RecallAtK, similarity: Tensor) -> Tensor:
    return PairLoss(term).of_similarity(similarity, torch.tensor(batch.relevant), torch.tensor(batch.counted))


def test_a_ranking_worked_by_hand() -> None:
    similarity, relevant = torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[True, False, True]])
    loss = PairLoss(RecallAtK((1, 2))).of_similarity(similarity, relevant).item()
    at_1, at_2 = sigmoid(0) + sigmoid(-2), (sigmoid(1) + sigmoid(-1)) / 2  # the positives have ranks 1 and 3
    assert loss == pytest.approx(1 - (at_1 + at_2) / 2, abs=1e-4)


def test_the_published_form_has_the_query_above_everything() -> None:
    similarity = torch.tensor([[1.0, 0.9, 0.5], [0.9, 1.0, 0.4], [0.5, 0.4, 1.0]])
    labels = torch.tensor([0, 0, 1])
    relevant, counted = labels[:, None] == labels, ~torch.eye(3, dtype=torch.bool)
    ours = PairLoss(RecallAtK((1,))).of_similarity(similarity, relevant, counted).item()
    published = PairLoss(RecallAtK((1,), published=True)).of_similarity(similarity, relevant, counted).item()
    assert ours == pytest.approx(1 - sigmoid(0), abs=1e-3)
    assert published == pytest.approx(1 - sigmoid(-1), abs=1e-3)


@given(batches(), st.sampled_from([0.01, 0.3]), st.sampled_from([0.7, 20.0]), st.booleans())
@settings(deadline=None, max_examples=100)
def test_it_is_the_loop_for_every_batch(
    batch: Batch, temperature: float, rank_temperature: float, published: bool
) -> None:
    term = RecallAtK((1, 2, 16), temperature, rank_temperature, published)
    embeddings = batch.embeddings.requires_grad_()
    loss = PairLoss(term)(embeddings, batch.labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected(batch, term), abs=1e-10)
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()


@pytest.mark.parametrize("published", [False, True])
def test_its_gradient_is_the_slope_of_the_loop(published: bool) -> None:
    batch, term = batch_of([0, 1, 0, 2, 1, 0], 3), RecallAtK((1, 2, 4), 0.2, 1.0, published)
    similarity = batch.similarity.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(batch, term, similarity), similarity)
    slopes = oracles.slopes(lambda moved: expected(batch, term, moved), similarity.detach())
    torch.testing.assert_close(gradient, slopes, atol=1e-8, rtol=0)


def test_it_does_not_depend_on_how_many_comparisons_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, term = batch_of([0, 1, 0, 2, 1, 0, 2, 2], 5), RecallAtK(temperature=0.1)
    results = []
    for block in (1, 8 * 3, 1 << 20):
        monkeypatch.setattr(recall, "_BLOCK", block)
        similarity = batch.similarity.requires_grad_()
        loss = loss_of(batch, term, similarity)
        results.append((loss.detach(), *torch.autograd.grad(loss, similarity)))
    assert len({loss.item() for loss, _ in results}) == 1
    for _, gradient in results[1:]:
        torch.testing.assert_close(gradient, results[0][1], atol=1e-14, rtol=0)


def test_a_tie_counts_a_half_and_left_out_scores_nothing() -> None:
    similarity = torch.tensor([[0.5, 0.5, 0.9]])
    relevant, counted = torch.tensor([[True, False, False]]), torch.tensor([[True, True, False]])
    loss = PairLoss(RecallAtK((1,))).of_similarity(similarity, relevant, counted).item()
    assert loss == pytest.approx(1 - 1 / (1 + math.exp(0.5)), abs=1e-6)  # the rank is one and a half


def test_no_more_is_found_than_can_be() -> None:
    loss = PairLoss(RecallAtK((1,), rank_temperature=1e3))  # so that each of the eight counts nearly a half
    assert loss.of_similarity(torch.rand(2, 8), torch.ones(2, 8, dtype=torch.bool)).item() == 0


def test_a_batch_without_positives_gives_a_connected_zero() -> None:
    embeddings = batch_of([0, 1, 2], 0).embeddings.requires_grad_()
    loss = PairLoss(RecallAtK())(embeddings, torch.arange(3))
    loss.backward()
    assert loss.item() == 0
    assert embeddings.grad is not None
    assert not embeddings.grad.any()


def test_temperatures_and_ks_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="temperatures 0 and 1"):
        RecallAtK(temperature=0)
    with pytest.raises(ValueError, match=r"temperatures 0.01 and -1"):
        RecallAtK(rank_temperature=-1)
    for ks in ((), (1, 0)):
        with pytest.raises(ValueError, match="recall at"):
            RecallAtK(ks)
