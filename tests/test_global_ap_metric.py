import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.metrics.global_ap import (
    GlobalAP,
    global_average_precision,
    global_average_precision_at_k,
    global_average_precision_with_distractors,
)
from roadmatch.metrics.retrieval import average_precision, matrix_retrieval_metrics
from roadmatch.metrics.ties import Bools, Scores, Ties
from tests import metric_oracles as oracle

seeds = st.integers(0, 2**32 - 1)
ties_policies = st.sampled_from(list(Ties))


def drawn(seed: int, step: float = 0.125) -> tuple[Scores, Bools, Bools]:
    """Similarity in steps, relevance and mask (6, 9); the first query has a positive that counts."""
    rng = np.random.default_rng(seed)
    similarity = np.round(rng.uniform(-1, 1, (6, 9)) / step) * step
    relevance, mask = rng.random((6, 9)) < 0.2, rng.random((6, 9)) < 0.8
    relevance[0, 0] = mask[0, 0] = True
    return similarity, relevance, mask


def test_a_case_by_hand_with_a_distractor_query() -> None:
    similarity = np.array([[0.9, 0.3], [0.8, 0.1], [0.2, 0.5]])
    relevance = np.array([[True, False], [False, False], [False, True]])
    result = global_average_precision_with_distractors(similarity, relevance)
    assert result.gap == pytest.approx((1 + 2 / 3) / 2)
    assert result == GlobalAP(result.gap, 1.0, queries=3, distractor_queries=1, positive_pairs=2, negative_pairs=4)
    assert result.relative_drop == pytest.approx(1 / 6)


@settings(deadline=None, max_examples=40)
@given(seeds, ties_policies)
def test_all_pairs_that_count_are_one_list(seed: int, ties: Ties) -> None:
    similarity, relevance, mask = drawn(seed)
    gap = global_average_precision(similarity, relevance, mask, ties)
    assert gap == average_precision(similarity[mask], relevance[mask], ties)
    if ties is Ties.PESSIMISTIC:
        order = oracle.pessimistic_order(similarity[mask].tolist(), relevance[mask].tolist())
        assert gap == pytest.approx(oracle.ordered_ap(order), abs=1e-13)
    everything = np.ones(mask.shape, np.bool_)
    unmasked = global_average_precision(similarity, relevance, ties=ties)
    assert unmasked == global_average_precision(similarity, relevance, everything, ties)


@settings(deadline=None, max_examples=40)
@given(seeds, ties_policies)
def test_the_order_of_pairs_does_not_change_one_bit(seed: int, ties: Ties) -> None:
    similarity, relevance, mask = drawn(seed)
    order = np.random.default_rng(seed).permutation(similarity.size)
    moved = similarity.reshape(-1)[order].reshape(9, 6)
    relevant, counted = (flags.reshape(-1)[order].reshape(9, 6) for flags in (relevance, mask))
    assert global_average_precision(moved, relevant, counted, ties) == (
        global_average_precision(similarity, relevance, mask, ties)
    )


@settings(deadline=None, max_examples=40)
@given(seeds)
def test_tie_policies_are_ordered_and_agree_without_ties(seed: int) -> None:
    for step, tied in ((0.25, True), (1e-9, False)):
        similarity, relevance, mask = drawn(seed, step)
        low, grouped, mean = (global_average_precision(similarity, relevance, mask, ties) for ties in Ties)
        assert low <= min(grouped, mean) + 1e-13
        assert tied or low == pytest.approx(grouped, abs=1e-14) == pytest.approx(mean, abs=1e-14)


@settings(deadline=None, max_examples=40)
@given(seeds, ties_policies)
def test_distractor_queries_stay_in_through_their_negatives(seed: int, ties: Ties) -> None:
    similarity, relevance, mask = drawn(seed)
    relevance[3] = False
    result = global_average_precision_with_distractors(similarity, relevance, mask, ties)
    answerable = (relevance & mask).any(axis=1)
    assert result.gap == global_average_precision(similarity, relevance, mask, ties)
    assert result.gap_without_distractors == global_average_precision(
        similarity[answerable], relevance[answerable], mask[answerable], ties
    )
    assert result.distractor_queries == np.count_nonzero(~answerable) > 0
    assert result.gap <= result.gap_without_distractors
    assert 0 <= result.relative_drop < 1


@settings(deadline=None, max_examples=60)
@given(seeds, st.integers(1, 10))
def test_the_k_best_of_each_query_are_judged_against_all_positives(seed: int, k: int) -> None:
    similarity, relevance, mask = drawn(seed)
    rows = [row[counted].tolist() for row, counted in zip(similarity, mask, strict=True)]
    flags = [row[counted].tolist() for row, counted in zip(relevance, mask, strict=True)]
    limited = global_average_precision_at_k(similarity, relevance, k, mask)
    assert limited == pytest.approx(oracle.gap_at_k(rows, flags, k), abs=1e-13)
    if k >= 9:
        assert limited == global_average_precision(similarity, relevance, mask)


def test_no_positive_among_the_k_best_is_worth_nothing() -> None:
    assert global_average_precision_at_k(np.array([[0.5, 0.5]]), np.array([[True, False]]), 1) == 0.0


def test_increasing_maps_of_single_lists_change_gap_but_not_the_mean_of_lists() -> None:
    rng = np.random.default_rng(0)
    relevance = rng.random((20, 40)) < 0.1
    similarity = rng.standard_normal((20, 40)) + 3 * relevance
    moved = similarity + rng.uniform(-3, 3, (20, 1))
    assert matrix_retrieval_metrics(moved, relevance) == matrix_retrieval_metrics(similarity, relevance)
    assert global_average_precision(moved, relevance) < 0.8 * global_average_precision(similarity, relevance)


def test_what_is_undefined_or_no_matrix_is_an_error() -> None:
    similarity, relevance, mask = drawn(0)
    nothing = np.zeros(mask.shape, np.bool_)
    for without in (
        lambda: global_average_precision(similarity, nothing),
        lambda: global_average_precision(similarity, relevance, nothing),
        lambda: global_average_precision_at_k(similarity, nothing, 1),
        lambda: global_average_precision_with_distractors(similarity, nothing),
    ):
        with pytest.raises(ValueError, match="without a positive pair"):
            without()
    with pytest.raises(ValueError, match="k must be at least 1, not 0"):
        global_average_precision_at_k(similarity, relevance, 0)
    with pytest.raises(ValueError, match=r"float \(Q, N\), not float64 \(9,\)"):
        global_average_precision(similarity[0], relevance[0])
    with pytest.raises(ValueError, match="not int64"):
        global_average_precision(np.ones((6, 9), np.int64), relevance)
    with pytest.raises(ValueError, match=r"relevance must be bool \(6, 9\), not bool \(9, 6\)"):
        global_average_precision(similarity, relevance.T)
    with pytest.raises(ValueError, match="mask must be bool"):
        global_average_precision(similarity, relevance, mask.astype(np.int8))


def test_nan_is_an_error_only_where_it_counts() -> None:
    similarity, relevance, mask = drawn(1)
    value = global_average_precision(similarity, relevance, mask)
    similarity[~mask] = np.nan
    assert global_average_precision(similarity, relevance, mask) == value
    with pytest.raises(ValueError, match="NaN"):
        global_average_precision(similarity, relevance)
