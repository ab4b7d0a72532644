import random
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.metrics.retrieval import (
    RetrievalMetrics,
    average_precision,
    average_precision_at_r,
    matrix_retrieval_metrics,
    r_precision,
    recall_at_k,
    retrieval_metrics,
)
from roadmatch.metrics.ties import Scores, Ties, groups_of, harmonic_steps, hits
from tests import metric_oracles as oracle

Entries = list[tuple[float, bool]]
entries = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0]), st.booleans()), min_size=1, max_size=7
).filter(lambda drawn: any(flag for _, flag in drawn))


def arrays(drawn: Entries) -> tuple[Scores, np.ndarray]:
    return np.array([score for score, _ in drawn]), np.array([flag for _, flag in drawn])


def by_policy(drawn: Entries, of_order: Callable[[Sequence[bool]], float], ties: Ties) -> float:
    similarity, relevant = zip(*drawn, strict=True)
    if ties is Ties.PESSIMISTIC:
        return of_order(oracle.pessimistic_order(similarity, relevant))
    return fmean(map(of_order, oracle.all_orders(similarity, relevant)))


def test_a_case_by_hand_under_each_tie_policy() -> None:
    similarity = np.array([0.9, 0.5, 0.5, 0.5, 0.2])
    relevant = np.array([True, True, False, False, True])
    assert average_precision(similarity, relevant) == pytest.approx((1 + 2 / 4 + 3 / 5) / 3)
    assert average_precision(similarity, relevant, Ties.GROUPED) == pytest.approx((1 + 2 / 4 + 3 / 5) / 3)
    expected = (1 + (2 / 2 + 2 / 3 + 2 / 4) / 3 + 3 / 5) / 3
    assert average_precision(similarity, relevant, Ties.EXPECTED) == pytest.approx(expected)
    assert r_precision(similarity, relevant) == pytest.approx(1 / 3)
    assert r_precision(similarity, relevant, Ties.EXPECTED) == pytest.approx((1 + 2 / 3) / 3)
    assert average_precision_at_r(similarity, relevant) == pytest.approx(1 / 3)
    assert recall_at_k(similarity, relevant, 1) == 1.0
    assert recall_at_k(similarity[1:], relevant[1:], 2) == 0.0
    assert recall_at_k(similarity[1:], relevant[1:], 2, Ties.EXPECTED) == pytest.approx(2 / 3)


@settings(deadline=None, max_examples=60)
@given(entries, st.sampled_from([Ties.PESSIMISTIC, Ties.EXPECTED]), st.integers(1, 9))
def test_each_metric_agrees_with_the_orders_written_out(drawn: Entries, ties: Ties, k: int) -> None:
    similarity, relevant = arrays(drawn)
    for ours, oracles in (
        (average_precision, oracle.ordered_ap),
        (average_precision_at_r, oracle.ordered_ap_at_r),
        (r_precision, oracle.ordered_r_precision),
    ):
        assert ours(similarity, relevant, ties) == pytest.approx(by_policy(drawn, oracles, ties), abs=1e-13)
    recall = by_policy(drawn, lambda order: oracle.ordered_recall(order, k), ties)
    assert recall_at_k(similarity, relevant, k, ties) == pytest.approx(recall, abs=1e-13)


@settings(deadline=None, max_examples=60)
@given(entries)
def test_grouped_ties_are_thresholds(drawn: Entries) -> None:
    similarity, relevant = zip(*drawn, strict=True)
    ours = average_precision(*arrays(drawn), Ties.GROUPED)
    assert ours == pytest.approx(oracle.grouped_ap(similarity, relevant), abs=1e-13)


def test_grouped_average_precision_is_scikit_learns() -> None:
    from sklearn.metrics import average_precision_score

    rng = np.random.default_rng(0)
    relevant = rng.random(5000) < 0.1
    for step in (0.0, 0.01, 0.25):
        similarity = rng.standard_normal(5000) + relevant
        similarity = np.round(similarity / step) * step if step else similarity
        theirs = average_precision_score(relevant, similarity)
        assert average_precision(similarity, relevant, Ties.GROUPED) == pytest.approx(theirs, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(entries, st.randoms(use_true_random=False), st.sampled_from(list(Ties)))
def test_the_order_of_entries_does_not_change_one_bit(drawn: Entries, shuffle: random.Random, ties: Ties) -> None:
    shuffled = shuffle.sample(drawn, len(drawn))
    assert average_precision(*arrays(drawn), ties) == average_precision(*arrays(shuffled), ties)


def test_sums_over_long_runs_of_equal_scores_stay_exact() -> None:
    for start in (0, 5, 31, 32, 33, 1000, 10**6):
        for terms in (0, 1, 3, 40, 100_000):
            exact = np.sum(1 / (start + np.arange(terms, 0, -1, dtype=np.longdouble)))
            ours = harmonic_steps(np.array([start]), np.array([terms]))[0]
            assert ours == pytest.approx(float(exact), rel=2e-14, abs=1e-17)
    assert harmonic_steps(np.array([30, 31, 10**9]), np.array([1, 1, 1])).tolist() == [1 / 31, 1 / 32, 1 / (10**9 + 1)]
    everything = np.zeros(100_000)
    relevant = np.arange(100_000) < 30_000
    order = oracle.pessimistic_order(everything.tolist(), relevant.tolist())
    assert average_precision(everything, relevant) == pytest.approx(oracle.ordered_ap(order), abs=1e-13)
    assert recall_at_k(everything, relevant, 2, Ties.EXPECTED) == pytest.approx(1 - 0.7 * 69_999 / 99_999, abs=1e-12)


def test_what_is_undefined_or_no_list_is_an_error() -> None:
    similarity, none = np.array([0.5, 0.4]), np.zeros(2, np.bool_)
    with pytest.raises(ValueError, match="without a positive"):
        average_precision(similarity, none)
    with pytest.raises(ValueError, match="NaN"):
        average_precision(np.array([0.5, np.nan]), ~none)
    with pytest.raises(ValueError, match=r"float \(N,\), not int64"):
        average_precision(np.array([1, 2]), ~none)
    with pytest.raises(ValueError, match="float"):
        average_precision(similarity[None], ~none[None])
    with pytest.raises(ValueError, match="not int64"):
        average_precision(similarity, np.array([1, 0]))
    with pytest.raises(ValueError, match=r"not bool \(3,\)"):
        average_precision(similarity, np.ones(3, np.bool_))
    with pytest.raises(ValueError, match="k must be at least 1, not 0"):
        recall_at_k(similarity, ~none, 0)


def test_grouped_ties_are_refused_where_a_cut_would_split_a_group() -> None:
    similarity, relevant = np.array([0.5, 0.4]), np.ones(2, np.bool_)
    for ours in (
        lambda: r_precision(similarity, relevant, Ties.GROUPED),
        lambda: average_precision_at_r(similarity, relevant, Ties.GROUPED),
        lambda: recall_at_k(similarity, relevant, 1, Ties.GROUPED),
        lambda: hits(groups_of(similarity, similarity), Ties.GROUPED, 1),
        lambda: retrieval_metrics(np.eye(2), [1, 1], ties=Ties.GROUPED),
    ):
        with pytest.raises(ValueError, match=r"GROUPED is not defined for the best k"):
            ours()


def numbers(metrics: RetrievalMetrics) -> list[float]:
    return [
        *metrics.recall_at.values(),
        metrics.r_precision,
        metrics.mean_average_precision,
        metrics.mean_average_precision_at_r,
        metrics.queries,
        metrics.queries_without_positive,
    ]


def lattice(rng: np.random.Generator, rows: int, dimension: int = 6) -> np.ndarray:
    """Embeddings whose float32 products are exact, with many ties (rows, D)."""
    return (rng.integers(-2, 3, (rows, dimension)) / 4).astype(np.float32)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.booleans(), st.sampled_from([Ties.PESSIMISTIC, Ties.EXPECTED]))
def test_means_over_queries_are_those_of_the_single_lists(seed: int, classes: int, alone: bool, ties: Ties) -> None:
    rng = np.random.default_rng(seed)
    queries, gallery = lattice(rng, 9), lattice(rng, 12)
    asked, stored = rng.integers(0, classes + 1, 9), rng.integers(0, classes, 12)
    if alone:
        gallery, stored = queries, asked
    lists = []
    for i, query in enumerate(queries):
        counted = np.array([not (alone and i == j) for j in range(len(gallery))])
        relevant = (stored == asked[i])[counted]
        if relevant.any():
            lists.append((np.array([float(query @ other) for other in gallery])[counted], relevant))
    given_gallery = () if alone else (gallery, stored)
    if not lists:
        with pytest.raises(ValueError, match="without a positive"):
            retrieval_metrics(queries, asked, *given_gallery)
        return
    ours = retrieval_metrics(queries, asked, *given_gallery, ks=(1, 3), ties=ties, block=1 + seed % 10)
    assert ours.queries == len(lists)
    assert ours.queries_without_positive == 9 - len(lists)
    assert ours.mean_average_precision == pytest.approx(fmean(average_precision(*one, ties) for one in lists))
    assert ours.mean_average_precision_at_r == pytest.approx(fmean(average_precision_at_r(*one, ties) for one in lists))
    assert ours.r_precision == pytest.approx(fmean(r_precision(*one, ties) for one in lists))
    for k in (1, 3):
        assert ours.recall_at[k] == pytest.approx(fmean(recall_at_k(*one, k, ties) for one in lists))
    matrix = queries @ gallery.T
    mask = ~np.eye(9, dtype=np.bool_) if alone else None
    relevance = asked[:, None] == stored
    for way in (relevance, lambda query: relevance[query]):
        theirs = matrix_retrieval_metrics(matrix, way, mask, ks=(1, 3), ties=ties)
        assert numbers(theirs) == pytest.approx(numbers(ours), abs=1e-12)


def test_labels_may_be_strings_and_queries_without_a_positive_are_left_out() -> None:
    queries = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
    gallery = np.array([[1, 0], [0, 1]], np.float32)
    metrics = retrieval_metrics(queries, ["car", "cat", "dog"], gallery, ["car", "car"], ks=(1,))
    assert metrics == RetrievalMetrics({1: 1.0}, 1.0, 1.0, 1.0, queries=1, queries_without_positive=2)


def test_a_duplicate_of_a_query_is_no_self_match() -> None:
    items = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    assert retrieval_metrics(items, [1, 1, 2], ks=(1,)).recall_at == {1: 1.0}
    assert retrieval_metrics(items, [1, 2, 1], ks=(1,)).recall_at == {1: 0.0}  # the tied stranger comes first


@pytest.mark.parametrize("per_query", [True, False])
def test_increasing_maps_of_single_lists_change_no_metric_of_them(per_query: bool) -> None:
    rng = np.random.default_rng(3)
    similarity, relevance = rng.random((8, 30)), rng.random((8, 30)) < 0.2
    slopes = rng.uniform(0.1, 3, (8, 1)) if per_query else 2.0
    before = matrix_retrieval_metrics(similarity, relevance)
    after = matrix_retrieval_metrics(np.exp(slopes * similarity) - slopes, relevance)
    assert before == after


def test_wrong_arguments_are_named() -> None:
    items, labels = np.eye(4, dtype=np.float32), [1, 1, 2, 2]
    with pytest.raises(ValueError, match="block must be at least 1, not 0"):
        retrieval_metrics(items, labels, block=0)
    with pytest.raises(ValueError, match="k must be at least 1, not -1"):
        retrieval_metrics(items, labels, ks=(1, -1))
    with pytest.raises(ValueError, match="no query has one"):
        matrix_retrieval_metrics(items, np.zeros((4, 4), np.bool_))
    with pytest.raises(ValueError, match=r"query 0: \(4,\) entries, relevance \(3,\)"):
        matrix_retrieval_metrics(items, np.ones((4, 3), np.bool_))
    with pytest.raises(ValueError, match="mask int64"):
        matrix_retrieval_metrics(items, np.ones((4, 4), np.bool_), np.ones((4, 4), np.int64))
