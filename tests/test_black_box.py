"""Exact ranks with a black box's gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.losses.approximations import BlackBox
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.rank_ap import RankAP, Scope
from tests.loss_oracles import black_box


def gradient_of(scores: list[list[float]], relevant: list[list[bool]], how: BlackBox, scope: Scope) -> torch.Tensor:
    source = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    PairLoss(RankAP(scope, how)).of_similarity(source, torch.tensor(relevant)).backward()
    assert source.grad is not None
    return source.grad


def test_a_case_worked_by_hand() -> None:
    # The positive is third of three: its slope is 1 / 3^2, which moves it by 9 * 0.2 / 9 = 0.2 past the second alone.
    gradient = gradient_of([[0.9, 0.5, 0.4]], [[False, False, True]], BlackBox(9 * 0.2, 0.0), Scope.PER_QUERY)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 1.0, -1.0]], dtype=torch.float64) / (9 * 0.2))


def test_the_margin_asks_for_more_than_the_right_order() -> None:
    scores, relevant = torch.tensor([[0.51, 0.5]]), torch.tensor([[True, False]])
    losses = [
        PairLoss(RankAP(Scope.PER_QUERY, BlackBox(4.0, margin))).of_similarity(scores, relevant).item()
        for margin in (0.0, 0.02)
    ]
    assert losses == [0.0, 0.5]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=2, max_size=14, unique_by=lambda x: x[0]),
    st.sampled_from([0.05, 0.5, 4.0]),
    st.sampled_from(list(Scope)),
)
def test_the_gradient_is_that_of_ranks_found_by_sorting(
    items: list[tuple[int, bool]], strength: float, scope: Scope
) -> None:
    scores, relevant = [0.00137 * number for number, _ in items], [hit for _, hit in items]
    relevant[0] = True
    loss, wanted = black_box(scores, relevant, strength, 0.0301)
    gradient = gradient_of([scores], [relevant], BlackBox(strength, 0.0301), scope)
    assert gradient[0].tolist() == pytest.approx(wanted, abs=1e-12)
    assert sum(wanted) == pytest.approx(0, abs=1e-9), "what positives gain negatives lose"
    assert -1e-12 <= loss < 1


def test_queries_of_unlike_numbers_of_positives_share_the_gradient_evenly() -> None:
    random = torch.Generator().manual_seed(0)
    relevant = [[number < positives for number in range(12)] for positives in (1, 3, 6)]
    noise = torch.rand(3, 12, generator=random, dtype=torch.float64)
    scores = (0.3 * noise - 0.1 * torch.tensor(relevant)).tolist()
    gradient = gradient_of(scores, relevant, BlackBox(6.0), Scope.PER_QUERY)
    assert gradient[1].any()
    assert gradient[2].any()
    for row in range(3):
        wanted = black_box(scores[row], relevant[row], 6.0, 0.02)[1]
        assert gradient[row].tolist() == pytest.approx([slope / 3 for slope in wanted], abs=1e-12)
