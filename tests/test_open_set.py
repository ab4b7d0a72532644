"""Known and unknown identities told apart by the best score."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.metrics.open_set import auroc, open_set, threshold_at
from tests.more_metric_oracles import mean_of_means, share_won

scores = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=1, max_size=12)


def drawn(seed: int, queries: int = 60) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    known = random.random(queries) < 0.6
    known[:4] = [True, False, True, False]
    identity = np.where(known, random.integers(0, 6, queries), random.integers(6, 10, queries))
    return {
        "score": np.round(random.random(queries) + 0.3 * known, 1),
        "predicted": np.where(random.random(queries) < 0.7, identity, random.integers(0, 6, queries)),
        "identity": identity,
        "known": known,
        "data_set": np.array(["sea", "sea", "land", "land", *random.choice(["sea", "land"], queries - 4)]),
    }


def test_worked_by_hand() -> None:
    found = open_set(
        np.array([0.9, 0.8, 0.7, 0.2, 0.75, 0.1]),
        ["a", "a", "b", "b", "a", "b"],
        ["a", "b", "b", "b", "x", "y"],
        np.array([True, True, True, True, False, False]),
        true_positive_rate=0.75,
    )
    assert found.thresholds == (0.7,)  # three of the four known queries reach it, right or wrong
    assert found.pooled.auroc == pytest.approx(6 / 8)
    assert found.pooled.tnr == 0.5
    assert found.pooled.baks == pytest.approx((1 + 1 / 3) / 2)  # b: once mistaken for a, once rejected
    assert found.pooled.baus == 0.5
    assert found.pooled == found.mean == found.figures[0]


@settings(deadline=None, max_examples=60)
@given(scores, scores)
def test_auroc_agrees_with_the_pairs(known: list[float], unknown: list[float]) -> None:
    assert auroc(np.array(known), np.array(unknown)) == pytest.approx(share_won(known, unknown))


@settings(deadline=None, max_examples=60)
@given(scores, st.sampled_from([0.05, 0.3, 0.5, 0.95, 1.0]))
def test_the_threshold_is_the_highest_that_enough_known_queries_reach(known: list[float], rate: float) -> None:
    threshold = threshold_at(np.array(known), rate)
    assert sum(score >= threshold for score in known) >= rate * len(known) - 1e-9
    assert sum(score > threshold for score in known) < rate * len(known)


def test_a_rate_that_is_whole_in_queries_needs_no_more() -> None:
    assert threshold_at(np.arange(100.0), 0.95) == 5
    assert threshold_at(np.arange(100.0), 0.55) == 45  # .55 * 100 is 55.00000000000001


@pytest.mark.parametrize("seed", range(5))
def test_data_sets_are_judged_at_their_own_thresholds(seed: int) -> None:
    queries = drawn(seed)
    found = open_set(**queries)
    rows = list(zip(*(queries[name].tolist() for name in queries), strict=True))
    figures = []
    accepted_rows = []
    for name, threshold in zip(found.data_sets, found.thresholds, strict=True):
        here = [row for row in rows if row[4] == name]
        assert threshold == threshold_at(np.array([row[0] for row in here if row[3]]), 0.95)
        judged = [(*row, row[0] >= threshold) for row in here]
        accepted_rows += judged
        figures.append(loops(judged))
    assert found.data_sets == ("land", "sea")
    for one, expected in zip(found.figures, figures, strict=True):
        assert (one.auroc, one.tnr, one.baks, one.baus) == pytest.approx(expected)
    mean = found.mean
    assert (mean.auroc, mean.tnr, mean.baks, mean.baus) == pytest.approx(tuple(np.mean(figures, axis=0)))
    pooled = found.pooled
    assert (pooled.auroc, pooled.tnr, pooled.baks, pooled.baus) == pytest.approx(loops(accepted_rows))


def loops(judged: list[Any]) -> tuple[float, float, float, float]:
    """AUROC, TNR, BAKS, BAUS of rows (score, predicted, identity, known, data set, accepted)."""
    known, unknown = [row for row in judged if row[3]], [row for row in judged if not row[3]]
    return (
        share_won([row[0] for row in known], [row[0] for row in unknown]),
        sum(not row[5] for row in unknown) / len(unknown),
        mean_of_means([(row[4], row[2]) for row in known], [row[5] and row[1] == row[2] for row in known]),
        mean_of_means([(row[4], row[2]) for row in unknown], [not row[5] for row in unknown]),
    )


def test_the_order_of_queries_does_not_matter() -> None:
    queries = drawn(7)
    order = np.random.default_rng(1).permutation(60)
    assert open_set(**queries) == open_set(**{name: values[order] for name, values in queries.items()})


def test_one_identity_in_two_data_sets_is_two() -> None:
    found = open_set(
        np.array([0.9, 0.9, 0.1, 0.9, 0.1, 0.1]),
        ["a", "a", "a", "a", "a", "a"],
        ["a", "a", "x", "a", "x", "x"],
        np.array([True, True, False, True, False, False]),
        ["sea", "land", "sea", "land", "land", "land"],
    )
    assert found.pooled.baks == 1
    # in one data set the same name must be one of the two
    assert open_set(np.array([0.9, 0.1, 0.9, 0.1]), list("aaaa"), list("abba"),
                    np.array([True, False, True, False]), list("sstt")).pooled.auroc == 1  # fmt: skip


def test_what_is_undefined_or_wrong_is_an_error() -> None:
    queries = drawn(3)
    lacking = queries | {"data_set": np.where(queries["known"], "sea", "land")}
    with pytest.raises(ValueError, match="undefined for data set 'land'"):
        open_set(**lacking)
    with pytest.raises(ValueError, match="undefined for data set ''"):
        open_set(np.array([0.5]), [1], [1], np.array([True]))
    with pytest.raises(ValueError, match="one length"):
        open_set(**(queries | {"known": queries["known"][1:]}))
    with pytest.raises(ValueError, match="not a number"):
        open_set(**(queries | {"score": queries["score"] * np.nan}))
    with pytest.raises(ValueError, match="identity 'a' is both known and unknown"):
        open_set(np.array([0.5, 0.4]), ["a", "a"], ["a", "a"], np.array([True, False]))
    with pytest.raises(ValueError, match="true positive rate must lie"):
        open_set(**queries, true_positive_rate=0)
    with pytest.raises(ValueError, match="AUROC is undefined"):
        auroc(np.array([0.5]), np.array([]))
