"""The loss of pairs beyond a margin, against loops and against the library that has it twice."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import ContrastiveLoss, ThresholdConsistentMarginLoss

from roadmatch.losses.margins import Margins, Reduction
from roadmatch.losses.pair_loss import PairLoss
from tests import other_loss_oracles as oracles
from tests.other_loss_oracles import Batch, Matrix, batch_of, batches

MEANS: dict[Reduction, Callable[[Matrix], float]] = {
    Reduction.VIOLATING: oracles.violating_mean,
    Reduction.PER_QUERY: oracles.per_query_mean,
    Reduction.ALL_PAIRS: oracles.all_pairs_mean,
}


def expected(batch: Batch, term: Margins, similarity: Matrix | None = None) -> float:
    given = batch.similarity.tolist() if similarity is None else similarity
    near, far = oracles.margin_sides(given, batch.relevant, batch.counted, term.positive, term.negative)
    mean = MEANS[term.reduction]
    return term.positive_weight * mean(near) + term.negative_weight * mean(far)


def test_a_batch_worked_by_hand() -> None:
    similarity = torch.tensor([[0.8, 0.7, 0.2], [0.95, 0.1, 0.9]])
    relevant = torch.tensor([[True, False, False], [True, True, False]])
    # short of .9: .1 | 0, .8; above .6: .1, 0 | .3
    for reduction, loss in (
        (Reduction.VIOLATING, 0.9 / 2 + 0.4 / 2),
        (Reduction.PER_QUERY, (0.1 + 0.4) / 2 + (0.05 + 0.3) / 2),
        (Reduction.ALL_PAIRS, 0.9 / 3 + 0.4 / 3),
    ):
        term = PairLoss(Margins(0.9, 0.6, reduction))
        assert term.of_similarity(similarity, relevant).item() == pytest.approx(loss, abs=1e-6)


@given(batches(), st.sampled_from(Reduction), st.sampled_from([(1.0, 1.0), (2.0, 0.0), (0.0, 0.5)]))
@settings(deadline=None, max_examples=60)
def test_it_is_the_loop_for_every_batch(batch: Batch, reduction: Reduction, weights: tuple[float, float]) -> None:
    term = Margins(0.85, 0.35, reduction, *weights)
    embeddings = batch.embeddings.requires_grad_()
    loss = PairLoss(term)(embeddings, batch.labels)
    loss.backward()
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected(batch, term), abs=1e-12)
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()


@pytest.mark.parametrize("reduction", Reduction)
def test_its_gradient_is_the_slope_of_the_loop(reduction: Reduction) -> None:
    batch, term = batch_of([0, 1, 0, 2, 1, 0], 3), Margins(0.85, 0.1, reduction, 1.5, 0.5)
    similarity = batch.similarity.requires_grad_()
    loss = PairLoss(term).of_similarity(similarity, torch.tensor(batch.relevant), torch.tensor(batch.counted))
    (gradient,) = torch.autograd.grad(loss, similarity)
    slopes = oracles.slopes(lambda moved: expected(batch, term, moved), similarity.detach())
    torch.testing.assert_close(gradient, slopes, atol=1e-9, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_the_librarys_two_names_for_it_give_the_same_number(seed: int) -> None:
    batch = batch_of([0, 0, 1, 1, 2, 2, 3, 3, 3], seed)
    ours = PairLoss(Margins(0.9, 0.2))(batch.embeddings, batch.labels).item()
    calibration = ContrastiveLoss(0.9, 0.2, distance=CosineSimilarity())
    assert ours == pytest.approx(calibration(batch.embeddings, batch.labels).item(), abs=1e-12)
    consistent = ThresholdConsistentMarginLoss(margin_plus=0.9, margin_minus=0.2)
    assert ours == pytest.approx(consistent(batch.embeddings, batch.labels).item(), abs=1e-12)


@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize("labels", [[0], [0, 0, 0], [0, 1, 2]])
def test_sides_that_nothing_violates_add_a_zero_that_is_connected(reduction: Reduction, labels: list[int]) -> None:
    embeddings = batch_of(labels, 0).embeddings.requires_grad_()
    loss = PairLoss(Margins(-1.0, 1.0, reduction))(embeddings, torch.tensor(labels))
    loss.backward()
    assert loss.item() == 0
    assert embeddings.grad is not None
    assert not embeddings.grad.any()


def test_a_pair_at_its_margin_does_not_violate_it() -> None:
    similarity, relevant = torch.tensor([[0.5, 0.25, 0.5, 0.75]]), torch.tensor([[True, True, False, False]])
    assert PairLoss(Margins(0.5, 0.5)).of_similarity(similarity, relevant).item() == 0.5


def test_weights_and_margins_that_mean_nothing_are_refused() -> None:
    for term in ((float("nan"), 0.5), (0.9, float("inf")), (0.9, 0.5, Reduction.VIOLATING, -1.0)):
        with pytest.raises(ValueError, match="margins"):
            Margins(*term)
    with pytest.raises(ValueError, match="weights 0, 0"):
        Margins(positive_weight=0, negative_weight=0)
