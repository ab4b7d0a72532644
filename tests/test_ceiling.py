"""The highest gAP that the queries' own rankings allow."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.metrics.ceiling import Blocks, Ceiling, ceiling, ceiling_of, decompose
from roadmatch.metrics.ties import Bools, Scores
from tests.more_metric_oracles import best_interleaving, pessimistic_ap

Lists = list[list[int]]


def matrices(lists: Lists) -> tuple[Scores, Bools]:
    """Lists of 0 and 1, best first, as similarity and relevance; shorter ones are filled with lower negatives."""
    width = max(map(len, lists))
    similarity = np.tile(-np.arange(width, dtype=np.float64), (len(lists), 1))
    relevant = np.zeros((len(lists), width), bool)
    for row, entries in enumerate(lists):
        relevant[row, : len(entries)] = entries
    return similarity, relevant


def small_instances(count: int, seed: int) -> list[Lists]:
    random = np.random.default_rng(seed)
    drawn: list[Lists] = []
    while len(drawn) < count:
        lists = [
            (random.random(random.integers(2, 8)) < random.uniform(0.1, 0.7)).astype(int).tolist()
            for _ in range(random.integers(2, 5))
        ]
        if sum(map(sum, lists)):
            drawn.append(lists)
    return drawn


def test_two_lists_worked_by_hand() -> None:
    # 1 0 1 and 0 1: the hit at once, then 0 1 twice: hits at 1, 3 and 5.
    found = ceiling(*matrices([[1, 0, 1], [0, 1]]))
    assert found.value == pytest.approx((1 + 2 / 3 + 3 / 5) / 3)
    assert found.bound == found.value


def test_a_bad_block_is_taken_for_what_follows_it() -> None:
    # By density 0 0 1 1 1 is one segment of 3 in 5 and goes before 0 1; greedily 0 1 would go first.
    found = ceiling(*matrices([[0, 0, 1, 1, 1], [0, 1]]))
    assert found.value == pytest.approx(best_interleaving([[0, 0, 1, 1, 1], [0, 1]]))
    assert found.value == pytest.approx((1 / 3 + 2 / 4 + 3 / 5 + 4 / 7) / 4)


def test_greed_helps_where_the_rule_is_not_optimal() -> None:
    # The rule puts 0 0 1 1 0 1 before 0 1, as half of either is hits; better is 0 1 first.
    lists = [[0, 0, 1, 1, 0, 1], [0, 0], [0, 1]]
    found = ceiling(*matrices(lists))
    assert found.value == pytest.approx((1 / 2 + 2 / 5 + 3 / 6 + 4 / 8) / 4)
    assert found.value == pytest.approx(best_interleaving(lists))
    assert found.value > (1 / 3 + 2 / 4 + 3 / 6 + 4 / 8) / 4  # as the rule has it


@pytest.mark.parametrize("seed", range(3))
def test_400_small_instances_equal_the_exhaustive_search_and_never_pass_the_bound(seed: int) -> None:
    equal = 0
    for lists in small_instances(400, seed):
        found, best = ceiling(*matrices(lists)), best_interleaving(lists)
        assert found.value <= best + 1e-12
        assert best <= found.bound + 1e-12
        equal += found.value > best - 1e-12
    assert equal >= 380


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_model_with_these_rankings_has_a_higher_gap(data: st.DataObject) -> None:
    queries, items = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 6))
    score = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
    similarity = np.array(data.draw(st.lists(st.lists(score, min_size=items, max_size=items), min_size=queries,
                                             max_size=queries)))  # fmt: skip
    relevant = np.array(data.draw(st.lists(st.lists(st.booleans(), min_size=items, max_size=items), min_size=queries,
                                           max_size=queries)))  # fmt: skip
    relevant[0, 0] = True
    found = ceiling(similarity, relevant)
    gap = pessimistic_ap(similarity.ravel().tolist(), relevant.ravel().tolist())
    assert gap <= found.bound + 1e-12
    assert 0 <= found.efficiency(gap) <= 1
    assert found.value <= found.bound + 1e-12


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_increasing_maps_of_each_query_leave_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    similarity, relevant = random.random((4, 9)), random.random((4, 9)) < 0.4
    relevant[0, 0] = True
    mapped = random.random((4, 1)) * similarity**3 + random.random((4, 1))
    assert ceiling(similarity, relevant) == ceiling(mapped, relevant)


def test_self_matches_are_left_out_by_index() -> None:
    random = np.random.default_rng(1)
    similarity, relevant = random.random((5, 5)), random.random((5, 5)) < 0.5
    others = ~np.eye(5, dtype=bool)
    without = ceiling(similarity[others].reshape(5, 4), relevant[others].reshape(5, 4))
    assert ceiling(similarity, relevant, own=np.arange(5)) == without
    assert ceiling(similarity, relevant) != without


def test_equal_scores_within_a_query_count_against_us() -> None:
    found = ceiling(np.array([[0.5, 0.5, 0.1]]), np.array([[True, False, False]]))
    assert found.value == 0.5


def test_queries_without_a_positive_cost_nothing() -> None:
    with_one = matrices([[1, 0, 1], [0, 0, 0]])
    assert ceiling(*with_one) == ceiling(*matrices([[1, 0, 1]]))


def test_parts_of_the_queries_add_up() -> None:
    random = np.random.default_rng(2)
    similarity, relevant = random.random((7, 20)), random.random((7, 20)) < 0.2
    parts = [Blocks.of(similarity[rows], relevant[rows]) for rows in (slice(0, 1), slice(1, 2), slice(2, 7))]
    assert ceiling_of(Blocks.joined(parts, [1, 1, 5])) == ceiling(similarity, relevant)


def test_the_parts_of_a_difference_add_up_and_change_sign_with_the_models() -> None:
    random = np.random.default_rng(3)
    relevant = random.random((6, 30)) < 0.3
    models = [random.random((6, 30)) + 0.3 * relevant, random.random((6, 30)) + 0.5 * random.random((6, 1))]
    gaps = [pessimistic_ap(model.ravel().tolist(), relevant.ravel().tolist()) for model in models]
    ceilings = [ceiling(model, relevant) for model in models]
    there = decompose(gaps[0], ceilings[0], gaps[1], ceilings[1])
    back = decompose(gaps[1], ceilings[1], gaps[0], ceilings[0])
    assert there.rank + there.consistency == pytest.approx(gaps[0] - gaps[1], abs=1e-12)
    assert (back.rank, back.consistency) == pytest.approx((-there.rank, -there.consistency), abs=1e-12)


def test_a_shift_of_one_query_is_all_consistency() -> None:
    random = np.random.default_rng(4)
    relevant = random.random((4, 25)) < 0.2
    similarity = random.random((4, 25)) + 0.4 * relevant
    shifted = similarity + np.array([[0.0], [0.0], [0.0], [-2.0]])
    gaps = [pessimistic_ap(model.ravel().tolist(), relevant.ravel().tolist()) for model in (similarity, shifted)]
    parts = decompose(gaps[0], ceiling(similarity, relevant), gaps[1], ceiling(shifted, relevant))
    assert parts.rank == 0
    assert parts.consistency == pytest.approx(gaps[0] - gaps[1])
    assert gaps[0] > gaps[1]


def test_a_decomposition_adds_up_where_a_model_beats_both_of_our_orders() -> None:
    parts = decompose(0.52, Ceiling(0.5, 0.55), 0.3, Ceiling(0.6, 0.6))
    assert parts.rank + parts.consistency == pytest.approx(0.22)
    assert Ceiling(0.5, 0.55).efficiency(0.52) == 1


def test_a_gap_above_the_bound_is_an_error() -> None:
    found = ceiling(*matrices([[1, 0, 1], [0, 1]]))
    with pytest.raises(ValueError, match="outside 0 to the ceiling's bound"):
        found.efficiency(0.9)
    with pytest.raises(ValueError, match="outside"):
        found.efficiency(-0.1)


def test_what_is_undefined_or_unlike_is_an_error() -> None:
    similarity = np.array([[0.5, 0.1]])
    with pytest.raises(ValueError, match="undefined without a relevant pair"):
        ceiling(similarity, np.zeros((1, 2), bool))
    with pytest.raises(ValueError, match="must be alike"):
        ceiling(similarity, np.ones((2, 2), bool))
    with pytest.raises(ValueError, match="not a number"):
        ceiling(np.array([[np.nan, 0.1]]), np.ones((1, 2), bool))
    for own in (np.array([-1]), np.array([0, 1])):
        with pytest.raises(ValueError, match="own must name a column"):
            ceiling(similarity, np.ones((1, 2), bool), own)


def test_thousands_of_queries_take_seconds() -> None:
    random = np.random.default_rng(5)
    classes = np.repeat(np.arange(400), 6)
    vectors = random.normal(size=(2400, 32)) + 1.5 * random.normal(size=(400, 32))[classes]
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    begun = time.process_time()
    found = ceiling(vectors @ vectors.T, classes[:, None] == classes, np.arange(2400))
    assert time.process_time() - begun < 3
    assert found.bound - found.value < 1e-4
