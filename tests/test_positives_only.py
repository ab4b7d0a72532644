"""Comparing few positives with every score of their list."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from roadmatch.losses.ap_lists import Lists, lists_per_query
from roadmatch.losses.approximations import Approximation, Sigmoid, UpperBound
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.pairs import pairs_of_similarity
from roadmatch.losses.positives_only import lists_at_once, ranked_by_sigmoid
from roadmatch.losses.rank_ap import RankAP, Scope
from tests.loss_oracles import published_smooth_ap, published_sup_ap, sigmoid_loss

Published = Callable[[Tensor, Tensor], Tensor]

PUBLISHED: list[tuple[Published, Approximation]] = [
    (published_smooth_ap, Sigmoid(published=True)),
    (published_sup_ap, UpperBound(published=True)),
]


def scores_of_batch(size: int, per_class: int) -> tuple[Tensor, Tensor]:
    """Overlapping classes: similarity (B, B) float32, relevance with the diagonal."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(size) // per_class
    centres = normalize(torch.randn(size, 64, generator=random), dim=1)
    embeddings = normalize(centres[labels] + 1.6 * normalize(torch.randn(size, 64, generator=random), dim=1), dim=1)
    return embeddings @ embeddings.T, labels[:, None] == labels


def ours(similarity: Tensor, relevant: Tensor, how: Approximation) -> Tensor:
    counted = ~torch.eye(len(relevant), dtype=torch.bool)
    return PairLoss(RankAP(Scope.PER_QUERY, how)).of_similarity(similarity, relevant, counted)


@pytest.mark.parametrize(("published", "how"), PUBLISHED)
def test_the_published_arithmetic_is_met_in_float32(published: Published, how: Approximation) -> None:
    similarity, relevant = scores_of_batch(60, 4)
    reference = similarity.double().requires_grad_()
    wanted = published(reference, relevant)
    wanted.backward()
    source = similarity.requires_grad_()
    loss = ours(source, relevant, how)
    loss.backward()
    assert 0.05 < wanted.item() < 0.95
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert source.grad is not None
    assert reference.grad is not None
    assert (source.grad - reference.grad).norm() <= 1e-6 * reference.grad.norm()


@pytest.mark.parametrize(("published", "how"), PUBLISHED)
def test_ties_count_as_published(published: Published, how: Approximation) -> None:
    relevant = scores_of_batch(12, 3)[1]
    similarity = (torch.rand(12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 8).round() / 8
    assert ours(similarity, relevant, how).item() == pytest.approx(published(similarity, relevant).item(), abs=1e-9)


def test_a_score_at_the_published_knee_is_not_yet_on_the_line() -> None:
    similarity = torch.tensor([[1.0, 0.25, 0.375], [0.25, 1.0, 0.0], [0.375, 0.0, 1.0]], dtype=torch.float64)
    relevant = torch.tensor([[True, True, False], [True, True, False], [False, False, True]])
    wanted = published_sup_ap(similarity, relevant, 0.02, knee=0.125).item()
    assert ours(similarity, relevant, UpperBound(0.02, knee=0.125, published=True)).item() == pytest.approx(wanted)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, in elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("how", [Sigmoid(), UpperBound(), Sigmoid(published=True), UpperBound(published=True)])
def test_no_tensor_is_of_the_size_of_all_comparisons(how: Approximation) -> None:
    similarity, relevant = scores_of_batch(400, 8)
    source = similarity.requires_grad_()
    with Largest() as largest:
        ours(source, relevant, how).backward()
    assert 400**2 <= largest.elements <= 1 << 19 < 400 * 8 * 400


def test_lists_are_taken_together_so_that_comparisons_stay_few() -> None:
    assert lists_at_once(4, 1000) * 4 * 1000 <= 1 << 19
    assert lists_at_once(1000, 1000) == 1
    similarity, relevant = scores_of_batch(40, 4)
    relevant[0, 4:30] = True
    pairs = pairs_of_similarity(similarity, relevant)
    lists = list(lists_per_query(pairs, similarity, lambda positives: max(1, 40 // positives)))
    assert sorted(int(row) for rows, _ in lists for row in rows) == list(range(40))
    assert [(len(rows), taken.positives) for rows, taken in lists] == [(10, 4)] * 3 + [(9, 4), (1, 30)]


def test_padding_counts_nothing() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.45, 0.1]], dtype=torch.float64)
    plain = Lists(scores, torch.tensor([[1, 3]]), torch.tensor([[True, True]]), 2)
    padded = Lists(scores, torch.tensor([[1, 1, 1, 3]]), torch.tensor([[False, False, True, True]]), 4)
    one, other = (ranked_by_sigmoid(lists, Sigmoid(0.1), slopes=True) for lists in (plain, padded))
    assert one.loss.item() == pytest.approx(sigmoid_loss(scores[0].tolist(), [False, True, False, True], 0.1))
    torch.testing.assert_close(one.loss, other.loss)
    torch.testing.assert_close(one.gradient, other.gradient)
