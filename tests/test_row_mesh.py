"""Many positives a list, on a mesh."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roadmatch.losses import positives_only, row_mesh
from roadmatch.losses.ap_lists import Lists, Ranked, lists_per_query, loss_of_ranks
from roadmatch.losses.approximations import Sigmoid, UpperBound
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.pairs import Pairs, pairs_of_similarity
from roadmatch.losses.rank_ap import RankAP, Scope
from tests.loss_oracles import published_smooth_ap, published_sup_ap, upper_bound_loss
from tests.test_positives_only import Largest, Published, scores_of_batch

WAYS = [Sigmoid(0.02), UpperBound(0.02), UpperBound(0.02, knee=0.02), Sigmoid(0.001), UpperBound(0.001)]

AT_THE_KNEE = UpperBound(0.02, knee=0.125, published=True)
"""Scores on a lattice of eighths are where this one jumps."""


def both_ways(lists: Lists, how: Sigmoid | UpperBound) -> tuple[Ranked, Ranked]:
    """On a mesh, and by comparison of each positive with every score."""
    if isinstance(how, Sigmoid):
        return (
            row_mesh.ranked_by_sigmoid(lists, how, slopes=True),
            positives_only.ranked_by_sigmoid(lists, how, slopes=True),
        )
    return (
        row_mesh.ranked_by_upper_bound(lists, how, slopes=True),
        positives_only.ranked_by_upper_bound(lists, how, slopes=True),
    )


def masked(rows: int, columns: int, seed: int) -> Pairs:
    """Lists of unlike numbers of positives and of pairs left out, overlapping; float64."""
    random = torch.Generator().manual_seed(seed)
    share = torch.linspace(0.02, 0.6, rows)[:, None]
    relevant = torch.rand(rows, columns, generator=random) < share
    relevant[0] = torch.arange(columns) == 3
    noise = torch.randn(rows, columns, generator=random, dtype=torch.float64)
    counted = torch.rand(rows, columns, generator=random) < 0.9
    counted[0] = True
    return pairs_of_similarity((0.15 * noise + 0.1 * relevant).clamp(-1, 1), relevant, counted)


@pytest.mark.parametrize("how", WAYS)
def test_the_mesh_and_the_comparison_of_every_pair_agree(how: Sigmoid | UpperBound) -> None:
    pairs = masked(6, 300, seed=1)
    ((_, lists),) = lists_per_query(pairs, pairs.similarity, lambda _: 6)
    mesh, compared = both_ways(lists, how)
    torch.testing.assert_close(mesh.loss, compared.loss, atol=1e-8, rtol=1e-7)
    assert mesh.gradient is not None
    assert compared.gradient is not None
    for one, other in zip(mesh.gradient, compared.gradient, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 99), st.sampled_from([*WAYS, AT_THE_KNEE]), st.sampled_from(["lattice", "equal", "one"]))
def test_they_agree_on_ties(seed: int, how: Sigmoid | UpperBound, kind: str) -> None:
    pairs = masked(3, 24, seed)
    scores = (pairs.similarity * 8).round() / 8
    if kind != "lattice":
        scores = torch.full_like(scores, 0.3 if kind == "equal" else 1.0)
    ((_, lists),) = lists_per_query(pairs, scores, lambda _: 3)
    mesh, compared = both_ways(lists, how)
    torch.testing.assert_close(mesh.loss, compared.loss, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize(
    ("published", "how"),
    [(published_smooth_ap, Sigmoid(published=True)), (published_sup_ap, UpperBound(published=True))],
)
def test_the_published_arithmetic_is_met_on_a_mesh(published: Published, how: Sigmoid | UpperBound) -> None:
    similarity, relevant = scores_of_batch(60, 6)
    reference = similarity.double().requires_grad_()
    wanted = published(reference, relevant)
    wanted.backward()
    pairs = pairs_of_similarity(similarity, relevant)
    ((rows, lists),) = lists_per_query(pairs, similarity, lambda _: 60)
    mesh, _ = both_ways(lists, how)
    assert mesh.loss.mean().item() == pytest.approx(wanted.item(), abs=1e-6)
    assert mesh.gradient is not None
    assert reference.grad is not None
    gradient = torch.zeros_like(similarity).index_copy_(0, rows, mesh.gradient) / 60
    assert (gradient - reference.grad).norm() <= 1e-5 * reference.grad.norm()


def test_ties_count_as_published_on_a_mesh() -> None:
    relevant = scores_of_batch(12, 3)[1]
    similarity = (torch.rand(12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 8).round() / 8
    pairs = pairs_of_similarity(similarity, relevant)
    ((_, lists),) = lists_per_query(pairs, similarity, lambda _: 12)
    mesh, _ = both_ways(lists, UpperBound(published=True))
    assert mesh.loss.mean().item() == pytest.approx(published_sup_ap(similarity, relevant).item(), abs=1e-8)


@pytest.mark.parametrize("how", [Sigmoid(0.01), UpperBound(0.01)])
def test_a_near_zero_loss_keeps_its_digits(how: Sigmoid | UpperBound) -> None:
    random = torch.Generator().manual_seed(2)
    relevant = torch.arange(400)[None] < 60
    scores = 0.1 * torch.rand(1, 400, generator=random, dtype=torch.float64) + 0.16 * relevant
    pairs = pairs_of_similarity(scores, relevant)
    ((_, lists),) = lists_per_query(pairs, scores, lambda _: 1)
    mesh, compared = both_ways(lists, how)
    assert 0 < compared.loss.item() < 1e-3
    assert mesh.loss.item() == pytest.approx(compared.loss.item(), rel=1e-6)


def test_a_sum_a_little_below_zero_counts_as_no_negative() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    assert [float(part) for part in loss_of_ranks(one, -1e-9 * one, one)] == [0, 0, 1]


def test_the_cheaper_way_is_taken_by_the_number_of_positives() -> None:
    assert row_mesh.from_positives(1000, 2700, UpperBound()) == pytest.approx(120, rel=0.1)
    assert row_mesh.from_positives(1000, 2700, Sigmoid()) == pytest.approx(260, rel=0.1)
    assert row_mesh.from_positives(100_000, 10**9, Sigmoid()) < 50, "so many comparisons do not fit"
    similarity = mixed()[0]
    for how in (Sigmoid(), UpperBound()):
        least = row_mesh.from_positives(1500, row_mesh.nodes_of(similarity, 0.01), how)
        assert 20 < least < 400, "so both ways are in the test below"


def mixed() -> tuple[Tensor, Tensor]:
    """Two queries of 20 positives and one of 400, among 1500; float32."""
    random = torch.Generator().manual_seed(3)
    relevant = torch.zeros(3, 1500, dtype=torch.bool)
    for row, positives in enumerate((20, 400, 20)):
        relevant[row, torch.randperm(1500, generator=random)[:positives]] = True
    return 0.2 * torch.randn(3, 1500, generator=random).clamp(-3, 3) + 0.1 * relevant, relevant


@pytest.mark.parametrize("how", [Sigmoid(), UpperBound()])
def test_queries_with_few_and_many_positives_make_one_loss(how: Sigmoid | UpperBound) -> None:
    similarity, relevant = mixed()
    source = similarity.clone().requires_grad_()
    with Largest() as largest:
        loss = PairLoss(RankAP(Scope.PER_QUERY, how)).of_similarity(source, relevant)
        loss.backward()
    assert largest.elements < 400 * 1500, "the many were not compared with every score"
    losses, gradients = [], []
    for row in range(3):
        pairs = pairs_of_similarity(similarity[row : row + 1].double(), relevant[row : row + 1])
        ((_, lists),) = lists_per_query(pairs, pairs.similarity, lambda _: 1)
        compared = both_ways(lists, how)[1]
        losses.append(compared.loss.item() / 3)
        assert compared.gradient is not None
        gradients.append(compared.gradient / 3)
    assert loss.item() == pytest.approx(sum(losses), abs=1e-6)
    assert source.grad is not None
    assert (source.grad - torch.cat(gradients)).norm() <= 1e-5 * torch.cat(gradients).norm()


def test_a_long_list_is_counted_part_by_part() -> None:
    random = torch.Generator().manual_seed(4)
    scores = torch.rand(1, 300_000, generator=random, dtype=torch.float64) * 1.8 - 0.9
    numbers = torch.tensor([[5, 150_000, 299_999, 7]])
    mesh, compared = both_ways(Lists(scores, numbers, torch.ones(1, 4, dtype=torch.bool), 3), UpperBound())
    assert mesh.loss.item() == pytest.approx(compared.loss.item(), abs=1e-9)
    assert mesh.gradient is not None
    assert compared.gradient is not None
    assert (mesh.gradient - compared.gradient).norm() <= 1e-6 * compared.gradient.norm()


def test_the_global_upper_bound_is_that_of_one_list() -> None:
    similarity, relevant = scores_of_batch(24, 4)
    counted = ~torch.eye(24, dtype=torch.bool)
    loss = PairLoss(RankAP(Scope.GLOBAL, UpperBound(0.02))).of_similarity(similarity, relevant, counted)
    wanted = upper_bound_loss(
        similarity[counted].tolist(), relevant[counted].tolist(), 0.02, 100.0, UpperBound(0.02).knee_at
    )
    assert loss.item() == pytest.approx(wanted, abs=1e-6)
