"""AP in batches against AP of the whole."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from roadmatch.metrics import decomposability
from roadmatch.metrics.decomposability import decomposability_gap
from tests.more_metric_oracles import Batch, calibrated_bound, juxtaposed_bound, pessimistic_ap

Query = tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]


def batches_of(query: Query) -> list[Batch]:
    scores, relevant, batch = query
    return [(scores[batch == at].tolist(), relevant[batch == at].tolist()) for at in np.unique(batch)]


def drawn(seed: int, most_batches: int = 5, size: int | None = None, perfect: bool = True) -> Query:
    """A query whose positives are above its negatives in each batch, if perfect."""
    random = np.random.default_rng(seed)
    sizes = [size or int(random.integers(1, 7)) for _ in range(random.integers(1, most_batches + 1))]
    batch = np.repeat(np.arange(len(sizes)), sizes)
    relevant = random.random(len(batch)) < random.uniform(0.2, 0.8)
    relevant[0] = True
    scores = random.uniform(0.3, 1, len(batch))
    if perfect:
        for at in range(len(sizes)):
            own, best = batch == at, -np.sort(-scores[batch == at])
            scores[own & relevant] = best[: (own & relevant).sum()]
            scores[own & ~relevant] = best[(own & relevant).sum() :]
    return scores, relevant, batch


def test_two_batches_worked_by_hand() -> None:
    # .9+ .8- | .7+ .5-: both perfect; the whole is + - + -, with AP (1 + 2/3) / 2.
    found = decomposability_gap(np.array([0.9, 0.8, 0.7, 0.5]), np.array([True, False, True, False]), 2)
    assert found.measured == pytest.approx(1 - (1 + 2 / 3) / 2)
    assert found.bound == pytest.approx(found.measured)  # one batch after the other is the worst case, and is the case
    # The kept positive (.9) is beaten by the broken negative (.8) at worst where its batch comes second: 1/2.
    # The missed one (.7) has a negative and a positive before it at worst: (1 + 1) / (1 + 1 + 1).
    assert found.calibrated_bound == pytest.approx(1 - (1 + 2 / 3) / 2)
    assert (found.batches, found.without_positive, found.imperfect) == (2, 0, 0)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32 - 1))
def test_it_agrees_with_the_loops_over_all_orders_and_lies_below_both_bounds(seed: int) -> None:
    query = drawn(seed)
    found = decomposability_gap(*query, alpha=0.8, beta=0.6)
    within = [pessimistic_ap(*batch) for batch in batches_of(query) if any(batch[1])]
    assert found.measured == pytest.approx(np.mean(within) - pessimistic_ap(*(part.tolist() for part in query[:2])))
    assert found.bound == pytest.approx(juxtaposed_bound(batches_of(query)), abs=1e-12)
    assert found.calibrated_bound == pytest.approx(calibrated_bound(batches_of(query), 0.8, 0.6), abs=1e-12)
    assert found.measured <= min(found.bound, found.calibrated_bound) + 1e-12
    assert found.imperfect == 0
    assert found.without_positive == sum(not any(batch[1]) for batch in batches_of(query))


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 4]))
def test_bounds_of_many_batches_are_no_lower_and_equal_for_batches_of_one_size(seed: int, size: int | None) -> None:
    query = drawn(seed, size=size)
    exact = decomposability_gap(*query, alpha=0.8, beta=0.6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decomposability, "_ALL_ORDERS", 0)
        rough = decomposability_gap(*query, alpha=0.8, beta=0.6)
    assert rough.bound >= exact.bound - 1e-12
    assert rough.calibrated_bound >= exact.calibrated_bound - 1e-12
    if size:
        assert rough.bound == pytest.approx(exact.bound, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_items_and_the_names_of_batches_do_not_matter(seed: int) -> None:
    query = drawn(seed, perfect=False)
    order = np.random.default_rng(seed).permutation(len(query[0]))
    again = decomposability_gap(query[0][order], query[1][order], 90 - 7 * query[2][order])
    found = decomposability_gap(*query)
    assert (found.measured, found.bound, found.calibrated_bound) == pytest.approx(
        (again.measured, again.bound, again.calibrated_bound)
    )


def test_a_given_order_of_batches_may_have_a_lower_bound_than_the_gap() -> None:
    """Why the bounds are maximised over the order: unlike numbers of positives, the fewer second."""
    scores, relevant = np.array([0.8, 0.7, 0.6, 0.9, 0.85, 0.84]), np.array([True, True, False, True, False, False])
    found = decomposability_gap(scores, relevant, 3)
    as_given = 1 - pessimistic_ap([5, 4, 3, 2, 1, 0], relevant.tolist())
    assert as_given < found.measured <= found.bound


def test_well_kept_margins_leave_no_gap() -> None:
    relevant = np.array([True, False, False, True, True, False])
    for kept, broken in ((0.95, 0.5), (0.9, 0.6)):  # a score at its margin keeps it
        found = decomposability_gap(np.where(relevant, kept, broken), relevant, 3)
        assert (found.measured, found.calibrated_bound) == pytest.approx((0, 0))
        assert found.bound == pytest.approx(1 - (1 + 2 / 4 + 3 / 5) / 3)


def test_hundreds_of_batches_are_bounded() -> None:
    random = np.random.default_rng(1)
    relevant = random.random(60 * 300) < 0.02
    scores = np.where(relevant, random.uniform(0.7, 1, len(relevant)), random.uniform(-0.2, 0.65, len(relevant)))
    found = decomposability_gap(scores, relevant, 60)
    assert found.batches == 300
    assert 0 <= found.measured <= found.calibrated_bound <= found.bound < 1


def test_batches_by_size_follow_the_order_and_the_last_may_be_smaller() -> None:
    scores, relevant, _ = drawn(5, perfect=False)
    scores, relevant = np.tile(scores, 3)[:11], np.tile(relevant, 3)[:11]
    by_name = decomposability_gap(scores, relevant, np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]))
    assert decomposability_gap(scores, relevant, 4) == by_name


def test_batches_that_break_the_premise_are_counted() -> None:
    found = decomposability_gap(np.array([0.9, 0.8, 0.5, 0.5]), np.array([True, False, True, False]), 2)
    assert found.imperfect == 1  # ties count against us


def test_what_is_undefined_or_wrong_is_an_error() -> None:
    scores, relevant = np.array([0.9, 0.1]), np.array([True, False])
    wrong: list[tuple[Any, ...]] = [
        (scores, relevant[:1], 1, "must be as many"),
        (np.array([np.nan, 0.1]), relevant, 1, "must be as many, and numbers"),
        (scores, relevant, 0, "one item or more, not 0"),
        (scores, relevant, np.array([0]), "names 1 items of 2"),
        (scores, ~relevant & relevant, 1, "undefined without a"),
    ]
    for *arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            decomposability_gap(*arguments)
    with pytest.raises(ValueError, match="alpha must be above beta"):
        decomposability_gap(scores, relevant, 1, alpha=0.6, beta=0.6)
