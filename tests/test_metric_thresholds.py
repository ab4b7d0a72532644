"""One threshold for all queries, fitted on some classes and judged on others."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from roadmatch.metrics import thresholds
from roadmatch.metrics.thresholds import (
    Fit,
    Grid,
    SharedThreshold,
    fitting_half,
    shared_threshold,
    shared_threshold_of_matrix,
)
from roadmatch.metrics.ties import Bools, Scores
from tests.more_metric_oracles import counts_at, f1, lowest_with_precision, mean_f1

COARSE = Grid(count=21)
Rows = list[tuple[list[float], list[bool]]]


def rows_of(similarity: Scores, relevant: Bools, which: Bools, own: NDArray[np.int64] | None) -> Rows:
    rows = []
    for query in np.flatnonzero(which):
        keep = np.ones(similarity.shape[1], bool)
        if own is not None:
            keep[own[query]] = False
        rows.append((similarity[query, keep].tolist(), relevant[query, keep].tolist()))
    return rows


def agrees(found: SharedThreshold, fitting: Rows, evaluation: Rows, grid: Grid, least: float, fit: Fit) -> None:
    """Compare with the loops; a threshold that is as good as the loops' lowest one is as right, to rounding."""
    values = grid.values.tolist()

    def measure(threshold: float) -> float:
        return mean_f1(fitting, threshold) if fit is Fit.PER_QUERY else f1(*counts_at(fitting, threshold))

    best = max(map(measure, values))
    assert measure(found.threshold_f1) == pytest.approx(best, abs=1e-12)
    assert all(measure(value) < best + 1e-12 for value in values if value < found.threshold_f1)
    assert found.f1g == pytest.approx(mean_f1(evaluation, found.threshold_f1), abs=1e-12)
    with_relevant = [row for row in evaluation if any(row[1])]
    own_best = [max(mean_f1([row], value) for value in values) for row in with_relevant]
    assert found.f1q == pytest.approx(np.mean(own_best), abs=1e-12)
    assert (found.evaluation_queries, found.evaluation_without) == (
        len(with_relevant),
        len(evaluation) - len(with_relevant),
    )
    assert found.threshold_precision == lowest_with_precision(fitting, values, least)
    if found.threshold_precision is None:
        assert (found.recall_at_precision, found.precision_reached) == (0, None)
    else:
        true, accepted, positives = counts_at(evaluation, found.threshold_precision)
        assert found.recall_at_precision == pytest.approx(true / positives)
        assert found.precision_reached == (pytest.approx(true / accepted) if accepted else None)


def embedded(classes: int, images: int, noise: float = 0.7, dimension: int = 16, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), images)
    vectors = random.normal(size=(classes, dimension))[labels] + noise * random.normal(size=(len(labels), dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels


# Worked by hand


def test_two_classes_worked_by_hand() -> None:
    fits = fitting_half([0, 1])
    fitting, evaluation = ([0.9, 0.5, 0.1], [True, False, True]), ([0.8, 0.6, 0.2], [True, True, False])
    order = [fitting, evaluation] if fits[0] else [evaluation, fitting]
    found = shared_threshold_of_matrix(
        np.array([row[0] for row in order]),
        np.array([row[1] for row in order]),
        [0, 1],
        precision=1,
        grid=COARSE,
    )
    assert found.threshold_f1 == -1  # F1 of all three is .8, of the best one alone 2/3
    assert found.f1g == pytest.approx(0.8)
    assert found.f1q == 1
    assert found.threshold_precision == 0.6  # the lowest of the grid above .5
    assert (found.recall_at_precision, found.precision_reached) == (1, 1)


def test_the_grid_has_4001_exact_steps_and_a_score_at_a_threshold_is_accepted() -> None:
    grid = Grid()
    assert (len(grid.values), grid.values[0], grid.values[-1]) == (4001, -1, 1)
    assert grid.values[3800] == 0.9
    assert grid.steps(grid.values).tolist() == list(range(4001))
    below = np.nextafter(grid.values[1:], -2)
    assert grid.steps(below).tolist() == list(range(4000))
    assert grid.steps(np.array([-1.001, 1.001])).tolist() == [0, 4000]


@pytest.mark.parametrize("wrong", [1.1, -1.1, np.nan, np.inf])
def test_scores_outside_the_grid_are_an_error(wrong: float) -> None:
    with pytest.raises(ValueError, match="outside the grid"):
        Grid().steps(np.array([0.5, wrong]))
    assert wrong != 1.1 or Grid(0, 2).steps(np.array([wrong])).tolist() == [2200]


@pytest.mark.parametrize("wrong", [{"count": 1}, {"low": 1.0, "high": 1.0}])
def test_a_grid_without_two_thresholds_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a grid needs two thresholds"):
        Grid(**wrong)


# The split


@given(st.lists(st.integers(0, 50), min_size=2, max_size=80).filter(lambda drawn: len(set(drawn)) > 1), st.integers())
@settings(deadline=None, max_examples=60)
def test_the_halves_share_no_class_and_hang_on_nothing_but_the_classes(classes: list[int], seed: int) -> None:
    fits = fitting_half(classes, seed)
    fitting = {name for name, fit in zip(classes, fits, strict=True) if fit}
    evaluation = {name for name, fit in zip(classes, fits, strict=True) if not fit}
    assert not fitting & evaluation
    assert len(fitting) == len(set(classes)) // 2
    again = fitting_half(sorted(classes), seed)
    assert fitting == {name for name, fit in zip(sorted(classes), again, strict=True) if fit}


def test_the_split_is_the_same_for_every_run_and_differs_with_the_seed() -> None:
    words = ["ash", "elm", "fir", "oak", "yew", "box"]
    assert fitting_half(words).tolist() == [True, True, False, False, False, True]
    assert len({tuple(fitting_half(words, seed).tolist()) for seed in range(10)}) > 3


def test_one_class_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="1 classes cannot be split"):
        fitting_half([3, 3])


# Against the loops


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from(Fit), st.booleans())
def test_a_matrix_agrees_with_the_loops(seed: int, least: float, fit: Fit, leave_out: bool) -> None:
    random = np.random.default_rng(seed)
    queries, items = int(random.integers(2, 8)), int(random.integers(8, 12))
    classes = np.append([0, 1], random.integers(0, 4, queries - 2))
    similarity = np.round(random.uniform(-1, 1, (queries, items)), int(random.integers(1, 4)))
    relevant = random.random((queries, items)) < random.uniform(0.1, 0.6)
    own = random.permutation(items)[:queries] if leave_out else None
    halves = fitting_half(classes)
    fitting, evaluation = (rows_of(similarity, relevant, which, own) for which in (halves, ~halves))
    ask = {"own": own, "precision": least, "fit": fit, "grid": COARSE}
    if not all(any(any(hits) for _, hits in half) for half in (fitting, evaluation)):
        with pytest.raises(ValueError, match="F1 is undefined"):
            shared_threshold_of_matrix(similarity, relevant, classes, **ask)  # type: ignore[arg-type]
    else:
        found = shared_threshold_of_matrix(similarity, relevant, classes, **ask)  # type: ignore[arg-type]
        agrees(found, fitting, evaluation, COARSE, least, fit)


@pytest.mark.parametrize("pairs_at_once", [1, 300, 1 << 21])
def test_embeddings_agree_with_the_loops_in_blocks_of_any_size(
    pairs_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "_PAIRS_AT_ONCE", pairs_at_once)
    vectors, labels = embedded(classes=9, images=3)
    labels[-2:] = [100, 101]  # two classes with one image
    found = shared_threshold(vectors, labels, grid=COARSE, precision=0.8)
    similarity = (vectors.astype(np.float64) @ vectors.T.astype(np.float64)).clip(-1, 1)
    halves, relevant, own = fitting_half(labels), labels[:, None] == labels, np.arange(len(labels))
    fitting, evaluation = (rows_of(similarity, relevant, which, own) for which in (halves, ~halves))
    assert found.evaluation_without + found.fitting_without == 3  # the third image of the last class is alone, too
    agrees(found, fitting, evaluation, COARSE, 0.8, Fit.PER_QUERY)


def test_embeddings_and_their_matrix_agree() -> None:
    vectors, labels = embedded(classes=20, images=4)
    own = np.arange(len(labels))
    of_matrix = shared_threshold_of_matrix(vectors @ vectors.T, labels[:, None] == labels, labels, own=own)
    assert shared_threshold(vectors, labels) == of_matrix
    assert of_matrix != shared_threshold_of_matrix(vectors @ vectors.T, labels[:, None] == labels, labels)


def test_a_self_match_may_hold_anything() -> None:
    vectors, labels = embedded(classes=6, images=4)
    similarity, own = vectors @ vectors.T, np.arange(24)
    expected = shared_threshold_of_matrix(similarity, labels[:, None] == labels, labels, own=own)
    np.fill_diagonal(similarity, np.nan)
    assert shared_threshold_of_matrix(similarity, labels[:, None] == labels, labels, own=own) == expected


def test_embeddings_in_half_precision_are_multiplied_in_single() -> None:
    vectors, labels = embedded(classes=20, images=4)
    half = vectors.astype(np.float16)
    assert shared_threshold(half, labels) == shared_threshold(half.astype(np.float32), labels)


# What it means


def test_a_threshold_never_sure_enough_is_none_and_has_no_recall() -> None:
    similarity, relevant = np.array([[0.9, 0.5], [0.9, 0.5]]), np.array([[False, True], [False, True]])
    found = shared_threshold_of_matrix(similarity, relevant, [0, 1])
    assert (found.threshold_precision, found.recall_at_precision, found.precision_reached) == (None, 0, None)


def test_the_lowest_sure_threshold_is_taken_where_precision_is_not_monotone() -> None:
    row, hits = [0.9, 0.8, 0.7, 0.6, 0.5], [True, False, True, True, True]
    found = shared_threshold_of_matrix(np.array([row, row]), np.array([hits, hits]), [0, 1], precision=0.8)
    assert found.threshold_precision == -1  # 4 of 5, though 1 of 2 at .8
    assert found.recall_at_precision == 1


def test_offsets_of_the_queries_leave_their_own_best_f1_and_lower_that_of_the_shared_threshold() -> None:
    random = np.random.default_rng(5)
    classes = np.repeat(np.arange(40), 2)
    relevant = random.random((80, 60)) < 0.1
    similarity = np.clip(0.15 * random.normal(size=(80, 60)) + 0.5 * relevant, -0.7, 0.7)
    relevant[:, 0] = True
    level = shared_threshold_of_matrix(similarity, relevant, classes)
    uneven = shared_threshold_of_matrix(similarity + random.uniform(-0.3, 0.3, (80, 1)), relevant, classes)
    assert uneven.f1q == pytest.approx(level.f1q, abs=0.01)
    assert uneven.f1g < level.f1g - 0.1
    assert uneven.recall_at_precision < level.recall_at_precision - 0.1
    assert level.f1g <= level.f1q


def test_wrong_arguments_are_errors() -> None:
    similarity, relevant = np.array([[0.9, 0.5], [0.9, 0.5]]), np.array([[False, True], [False, True]])
    for precision in (0.0, 1.1, np.nan):
        with pytest.raises(ValueError, match="precision must lie"):
            shared_threshold_of_matrix(similarity, relevant, [0, 1], precision=precision)
    with pytest.raises(ValueError, match="must be alike"):
        shared_threshold_of_matrix(similarity, relevant[:1], [0, 1])
    for own in (np.array([0]), np.array([0, -1])):
        with pytest.raises(ValueError, match="own must name"):
            shared_threshold_of_matrix(similarity, relevant, [0, 1], own=own)


def test_memory_is_bounded_by_the_block_and_not_by_the_matrix() -> None:
    vectors, labels = embedded(classes=1000, images=4, dimension=8)
    tracemalloc.start()
    shared_threshold(vectors, labels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4000 * 4000 * 8
