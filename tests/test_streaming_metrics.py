import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.metrics import streaming
from roadmatch.metrics.estimate import EstimatedGlobalAP, estimated_global_average_precision
from roadmatch.metrics.global_ap import GlobalAP, global_average_precision_with_distractors
from roadmatch.metrics.ordered_pairs import ordered_pairs
from roadmatch.metrics.retrieval import average_precision
from roadmatch.metrics.score_bins import score_bins
from roadmatch.metrics.streaming import streaming_global_average_precision
from roadmatch.metrics.ties import Scores, Ties
from tests import metric_oracles as oracle

seeds = st.integers(0, 2**32 - 1)
ties_policies = st.sampled_from(list(Ties))
blocks = st.sampled_from([1, 2, 5, 7, 64, 2048])


def lattice(rng: np.random.Generator, rows: int, dtype: type = np.float32, dimension: int = 4) -> Scores:
    """Embeddings whose products are exact, in whatever order BLAS sums them, with many ties (rows, D)."""
    return np.asarray(rng.integers(-2, 3, (rows, dimension)) / 4, dtype)


def fine_lattice(rng: np.random.Generator, rows: int, dimension: int = 64) -> Scores:
    """Nearly unit embeddings in steps of 2**-11: exact float32 products, hardly a tie (rows, D)."""
    vectors = rng.standard_normal((rows, dimension))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(np.round(vectors * 2**11) / 2**11, np.float32)


def drawn(seed: int, alone: bool, dtype: type = np.float32) -> tuple[Any, ...]:
    """Queries, labels, gallery and labels, some lone, or the first two; at least one pair is positive."""
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(1, 9))
    queries, labels = lattice(rng, 11, dtype), rng.integers(0, classes + 3, 11)
    if alone:
        labels[4] = labels[7]
        return queries, labels
    gallery, stored = lattice(rng, 13, dtype), rng.integers(0, classes, 13)
    stored[5] = labels[4]
    return queries, labels, gallery, stored


def dense(given_pairs: tuple[Any, ...], ties: Ties) -> GlobalAP:
    """From the whole matrix."""
    queries, labels, gallery, stored = (*given_pairs, *given_pairs)[:4]
    mask = np.ones((len(queries), len(gallery)), np.bool_)
    if len(given_pairs) == 2:
        np.fill_diagonal(mask, False)
    matrix = np.asarray(queries, np.float64) @ np.asarray(gallery, np.float64).T
    return global_average_precision_with_distractors(matrix, labels[:, None] == stored, mask, ties)


@settings(deadline=None, max_examples=80)
@given(seeds, st.booleans(), st.sampled_from([np.float32, np.float64]), ties_policies, blocks)
def test_in_blocks_it_is_bit_for_bit_the_gap_of_the_whole_matrix(
    seed: int, alone: bool, dtype: type, ties: Ties, block: int
) -> None:
    given_pairs = drawn(seed, alone, dtype)
    assert streaming_global_average_precision(*given_pairs, ties=ties, block=block) == dense(given_pairs, ties)


@settings(deadline=None, max_examples=40)
@given(seeds, st.booleans(), blocks)
def test_it_is_the_average_precision_of_all_pairs_written_out(seed: int, alone: bool, block: int) -> None:
    given_pairs = drawn(seed, alone)
    queries, labels, gallery, stored = (*given_pairs, *given_pairs)[:4]
    matrix = (queries @ gallery.T).tolist()
    ours = streaming_global_average_precision(*given_pairs, block=block)
    for without, gap in ((False, ours.gap), (True, ours.gap_without_distractors)):
        pairs = oracle.pair_list(labels, stored, matrix, unimodal=alone, without_distractors=without)
        assert gap == pytest.approx(oracle.ordered_ap(oracle.pessimistic_order(*pairs)), abs=1e-13)
        if not without:
            assert ours.positive_pairs == sum(pairs[1])
            assert ours.negative_pairs == len(pairs[1]) - sum(pairs[1])


@settings(deadline=None, max_examples=40)
@given(seeds, st.booleans(), ties_policies, blocks)
def test_the_order_of_rows_does_not_change_one_bit(seed: int, alone: bool, ties: Ties, block: int) -> None:
    given_pairs = drawn(seed, alone)
    rng = np.random.default_rng(seed)
    asked = rng.permutation(11)
    stored = rng.permutation(13) if not alone else asked
    shuffled = [each[stored if at >= 2 else asked] for at, each in enumerate(given_pairs)]
    assert streaming_global_average_precision(*shuffled, ties=ties, block=block) == (
        streaming_global_average_precision(*given_pairs, ties=ties)
    )


@pytest.mark.parametrize("alone", [True, False])
def test_thousands_of_scores_in_several_blocks_agree_with_scikit_learn(alone: bool) -> None:
    from sklearn.metrics import average_precision_score

    rng = np.random.default_rng(5)
    for embeddings in (fine_lattice(rng, 700), np.round(fine_lattice(rng, 700) * 32) / 32):
        labels = rng.integers(0, 60, 700)
        given_pairs = (
            (embeddings, labels) if alone else (embeddings[:300], labels[:300], embeddings[300:], labels[300:])
        )
        queries, asked, gallery, stored = (*given_pairs, *given_pairs)[:4]
        counted = ~np.eye(700, dtype=np.bool_) if alone else np.ones((300, 400), np.bool_)
        theirs = average_precision_score((asked[:, None] == stored)[counted], (queries @ gallery.T)[counted])
        ours = streaming_global_average_precision(*given_pairs, ties=Ties.GROUPED, block=128)
        assert ours.gap == pytest.approx(theirs, abs=1e-12)


def test_strings_label_as_numbers_do() -> None:
    given_pairs = drawn(1, alone=False)
    named = [np.array([f"class {one}" for one in each]) if each.ndim == 1 else each for each in given_pairs]
    assert streaming_global_average_precision(*named) == streaming_global_average_precision(*given_pairs)


def test_close_scores_are_settled_in_several_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    given_pairs = drawn(2, alone=False)
    whole = streaming_global_average_precision(*given_pairs)
    monkeypatch.setattr(streaming, "_SORTED_AT_ONCE", 10)
    assert streaming_global_average_precision(*given_pairs, block=3) == whole


def test_two_passes_see_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    items = rng.standard_normal((300, 70)).astype(np.float32)
    pairs = ordered_pairs(items, rng.integers(0, 40, 300))
    buffer = np.empty(64 * 64, np.float32)
    for phase in pairs.phases(64):
        for block in phase:
            first = pairs.scores(block, buffer).copy()
            buffer[:] = np.nan
            assert np.array_equal(pairs.scores(block, buffer), first)


def test_equal_scores_of_equal_embeddings_on_either_side_tie() -> None:
    """Every pair of one block has the same score: a last bit that differs between passes would show as 1 or 0."""
    items = np.tile(fine_lattice(np.random.default_rng(0), 1, 512), (300, 1))
    labels = np.arange(300) // 2
    pessimistic = streaming_global_average_precision(items, labels, block=100)
    positives, pairs = 300, 300 * 299
    expected = np.mean(np.arange(1, positives + 1) / (np.arange(1, positives + 1) + pairs - positives))
    assert pessimistic.gap == pytest.approx(expected, abs=1e-13)
    grouped = streaming_global_average_precision(items, labels, ties=Ties.GROUPED, block=100)
    assert grouped.gap == pytest.approx(positives / pairs, abs=1e-15)


@settings(deadline=None, max_examples=60)
@given(seeds, st.booleans(), ties_policies, blocks, st.sampled_from([2, 16, 2**20]))
def test_the_estimates_bounds_hold_the_exact_value(seed: int, alone: bool, ties: Ties, block: int, bins: int) -> None:
    given_pairs = drawn(seed, alone)
    exact = dense(given_pairs, ties)
    ours = estimated_global_average_precision(*given_pairs, ties=ties, bins=bins, block=block)
    for bounded, value in (
        (ours.gap, exact.gap),
        (ours.gap_without_distractors, exact.gap_without_distractors),
    ):
        assert bounded.lower < value
        assert value < bounded.upper or bounded.upper == 1
        assert bounded.lower <= bounded.estimate <= bounded.upper
    assert (ours.queries, ours.distractor_queries) == (exact.queries, exact.distractor_queries)
    assert (ours.positive_pairs, ours.negative_pairs) == (exact.positive_pairs, exact.negative_pairs)


def test_the_upper_bound_holds_for_tied_positives_as_one_threshold() -> None:
    query, gallery = np.ones((1, 1), np.float32), np.array([[1.0], [0.5], [0.5]], np.float32)
    ours = estimated_global_average_precision(query, [1], gallery, [2, 1, 1], ties=Ties.GROUPED)
    assert ours.gap.lower == pytest.approx((1 / 2 + 2 / 3) / 2, abs=1e-11)
    assert 0 < ours.gap.upper - 2 / 3 < 1e-11


@settings(deadline=None, max_examples=20)
@given(seeds)
def test_bounds_are_reached_by_the_best_and_the_worst_order_inside_bins(seed: int) -> None:
    given_pairs = drawn(seed, alone=False)
    ours = estimated_global_average_precision(*given_pairs, bins=2)
    scores, relevant = oracle.pair_list(
        given_pairs[1], given_pairs[3], (given_pairs[0] @ given_pairs[2].T).tolist(), unimodal=False
    )
    limit = score_bins(ordered_pairs(*given_pairs), 2)
    coarse = limit.of(np.array(scores, np.float32)).astype(np.float64)
    worst = average_precision(coarse, np.array(relevant))
    best = average_precision(coarse + 0.5 * np.array(relevant), np.array(relevant))
    middle = average_precision(coarse, np.array(relevant), Ties.EXPECTED)
    assert ours.gap.lower == pytest.approx(worst, abs=1e-11)
    assert ours.gap.upper == pytest.approx(best, abs=1e-11)
    assert ours.gap.estimate == pytest.approx(middle, abs=1e-11)


def test_the_estimate_is_close_for_real_scores() -> None:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((100, 64))
    labels = np.repeat(np.arange(100), 8)
    items = centres[labels] + 1.2 * rng.standard_normal((800, 64))
    items = (items / np.linalg.norm(items, axis=1, keepdims=True)).astype(np.float32)
    exact = streaming_global_average_precision(items, labels).gap
    ours = estimated_global_average_precision(items, labels).gap
    assert 0.1 < exact < 0.9
    assert ours.lower <= exact <= ours.upper
    assert ours.upper - ours.lower < 1e-3
    assert ours.estimate == pytest.approx(exact, abs=3e-5)


def test_scores_beyond_one_and_lengths_beside_one_stay_in_the_bins() -> None:
    rng = np.random.default_rng(0)
    items = fine_lattice(rng, 60)
    labels = np.arange(60) // 3
    unit = streaming_global_average_precision(items, labels)
    for factor in (2.0**-40, 2.0**12, 1.0):
        scaled = items * np.float32(factor)
        assert streaming_global_average_precision(scaled, labels) == unit
        ours = estimated_global_average_precision(scaled, labels).gap
        assert ours.lower <= unit.gap <= ours.upper
    same = np.full((4, 3), np.sqrt(1 / 3), np.float32) * np.float32(1.0000002)
    bins = score_bins(ordered_pairs(same, [1, 1, 2, 2]), 2**20)
    assert float((same @ same.T).max()) > 1
    assert 0 < bins.of((same @ same.T).reshape(-1)).max() < bins.size
    assert bins.of(np.array([bins.sunk], np.float32)) == 0
    long = np.ones((2, 4096), np.float32)
    furthest = 2**19 / score_bins(ordered_pairs(long, [1, 1]), 2**20).scale
    assert furthest >= 4096 * (1 + 4096 * 2**-24)  # float32 sums of 4096 terms may err by so much
    for extreme in ([-1.0, 0.0], [1.0, 0.0]):
        opposite = np.array([[1.0, 0.0], extreme], np.float32)
        assert score_bins(ordered_pairs(opposite, [1, 1]), 2**20).of(opposite @ opposite[1]).min() > 0


def test_all_embeddings_zero_are_all_tied() -> None:
    items, labels = np.zeros((6, 3), np.float32), [1, 1, 2, 2, 3, 3]
    assert streaming_global_average_precision(items, labels, ties=Ties.GROUPED).gap == pytest.approx(6 / 30)
    ours = estimated_global_average_precision(items, labels, ties=Ties.GROUPED).gap
    assert ours.lower < 6 / 30 < ours.upper == 1.0


@pytest.mark.parametrize("metric", [streaming_global_average_precision, estimated_global_average_precision])
@pytest.mark.parametrize("tied", [False, True])
def test_the_matrix_is_never_held(metric: Any, tied: bool) -> None:
    rng = np.random.default_rng(0)
    peaks = []
    for count in (2500, 5000):
        items = np.ones((count, 8), np.float32) if tied else rng.standard_normal((count, 8)).astype(np.float32)
        tracemalloc.start()
        result: GlobalAP | EstimatedGlobalAP = metric(items, np.arange(count) // 4, block=256)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert result.positive_pairs == 3 * count
    assert peaks[1] - peaks[0] < 0.05 * (5000**2 - 2500**2) * 4


@pytest.mark.parametrize("metric", [streaming_global_average_precision, estimated_global_average_precision])
def test_what_is_undefined_or_does_not_fit_is_an_error(metric: Any) -> None:
    items, labels = np.eye(4, dtype=np.float32), np.array([1, 1, 2, 2])
    for arguments, message in (
        ((items, [1, 2, 3, 4]), "without a positive pair"),
        ((items, labels, items, labels + 5), "without a positive pair"),
        ((items[:0], labels[:0]), "without a positive pair"),
        ((items, labels, items), "gallery and gallery_labels go together"),
        ((items, labels[:3]), r"queries need 4 int or string labels, not int64 \(3,\)"),
        ((items, labels / 2), "int or string labels, not float64"),
        ((items, labels, items, labels.astype(str)), "labels are int64 for queries, <U21 for the gallery"),
        ((items, labels, items[:, :3], labels), r"one type and dimension, not float32 \(4, 4\) and float32 \(4, 3\)"),
        ((items, labels, items.astype(np.float64), labels), "one type and dimension"),
        ((items.astype(np.float16), labels), "float32 or float64"),
        ((items[0], labels), "float32 or float64"),
        ((items * np.float32(np.nan), labels), "queries hold NaN or infinite values"),
        ((items, labels, np.full((4, 4), np.inf, np.float32), labels), "gallery hold NaN"),
        ((items * np.float32(1e19), labels), "too long for float32"),
    ):
        with pytest.raises(ValueError, match=message):
            metric(*arguments)
    with pytest.raises(ValueError, match="block must be at least 1, not 0"):
        metric(items, labels, block=0)


def test_bins_have_limits() -> None:
    items, labels = np.eye(4, dtype=np.float32), [1, 1, 2, 2]
    for bins in (1, 2**21 + 1):
        with pytest.raises(ValueError, match=f"bins must be 2 to 2097152, not {bins}"):
            estimated_global_average_precision(items, labels, bins=bins)
