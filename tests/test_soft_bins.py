"""Average precision of soft histograms."""

import pytest
import torch

from roadmatch.losses.approximations import SoftBins
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.rank_ap import RankAP, Scope
from tests.loss_oracles import soft_bins_loss


def loss_of(scores: list[float], relevant: list[bool], bins: int) -> float:
    loss = PairLoss(RankAP(Scope.PER_QUERY, SoftBins(bins)))
    return loss.of_similarity(torch.tensor([scores], dtype=torch.float64), torch.tensor([relevant])).item()


def test_a_case_worked_by_hand() -> None:
    # Bins at -1, 0, 1. The positive at 0.5 is half in the highest, the negative at 0 wholly in the middle one:
    # precision 1 at the top for half of it, and 1 of 2 at the middle for the other half.
    assert loss_of([0.5, 0.0], [True, False], 3) == pytest.approx(1 - (0.5 * 1 + 0.5 * 0.5))


def test_scores_at_the_ends_and_beyond_belong_to_the_last_bins() -> None:
    scores, relevant = [1.0, 1.0000002, -1.0, -1.5, 0.3], [True, False, True, False, False]
    assert loss_of(scores, relevant, 11) == pytest.approx(soft_bins_loss(scores, relevant, 11), abs=1e-12)


def test_bins_without_a_score_add_nothing() -> None:
    assert loss_of([0.95, -0.95], [True, False], 41) == 0
    assert loss_of([-0.95, 0.95], [True, False], 41) == pytest.approx(0.5)


def test_scores_beyond_the_ends_get_no_gradient_and_those_at_the_ends_do() -> None:
    scores = torch.tensor([[1.0, -0.2, 1.1, 0.93]], dtype=torch.float64, requires_grad=True)
    relevant = torch.tensor([[False, True, False, True]])
    PairLoss(RankAP(Scope.PER_QUERY, SoftBins(11))).of_similarity(scores, relevant).backward()
    assert scores.grad is not None
    assert scores.grad[0, 2] == 0
    assert scores.grad[0, 0] > 0
    assert scores.grad[0, 3] < 0


def test_a_long_list_is_counted_part_by_part() -> None:
    random = torch.Generator().manual_seed(0)
    scores = torch.rand(600, 700, generator=random, dtype=torch.float64) * 2 - 1
    relevant = torch.rand(600, 700, generator=random) < 0.01
    scores.requires_grad_()
    flat = scores.detach().reshape(1, -1).repeat(2, 1).requires_grad_()
    loss = PairLoss(RankAP(Scope.GLOBAL, SoftBins())).of_similarity(scores, relevant)
    twice = PairLoss(RankAP(Scope.PER_QUERY, SoftBins())).of_similarity(flat, relevant.reshape(1, -1).repeat(2, 1))
    assert loss.item() == pytest.approx(twice.item(), abs=1e-12)
    torch.autograd.backward([loss, twice])
    assert scores.grad is not None
    assert flat.grad is not None
    torch.testing.assert_close(scores.grad.view(-1), flat.grad.sum(0))
