"""Batches: coverage of every class and image, no class twice, the policies, the categories, ranks, resuming."""

import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from training.data.batches import BatchError, Batches
from training.data.turns import dealt, paired
from training.recipe import Batch, Sampler, SmallClasses

Numbers = NDArray[np.int64]
POLICIES = st.sampled_from(list(SmallClasses))


def labels_of(counts: list[int], unlabelled: int = 3) -> Numbers:
    """Labels with gaps, in no order, of classes of these sizes, and some images without a class."""
    labels = np.concatenate([np.repeat(np.arange(len(counts)) * 7 + 2, counts), -1 - np.arange(unlabelled)])
    return np.random.default_rng(len(labels)).permutation(labels).astype(np.int64)


def batches(counts: list[int], size: int, per_class: int, **rest: Any) -> Batches:
    seed, rank, world = rest.pop("seed", 0), rest.pop("rank", 0), rest.pop("world", 1)
    labels = labels_of(counts)
    batch = Batch(size=size, per_class=per_class, **rest)
    return Batches(labels, np.zeros_like(labels), batch, seed=seed, rank=rank, world=world)


@st.composite
def settings_of_a_split(draw: st.DrawFn) -> tuple[list[int], int, int, SmallClasses]:
    """(sizes of classes, batch size, per class, policy) that make batches."""
    per_class, policy = draw(st.integers(2, 5)), draw(POLICIES)
    counts = draw(st.lists(st.integers(1, 23), min_size=2, max_size=14))
    counts[:2] = [max(count, per_class) for count in counts[:2]]
    usable = sum(count >= per_class for count in counts) if policy is SmallClasses.LEAVE_OUT else len(counts)
    return counts, per_class * draw(st.integers(2, usable)), per_class, policy


@settings(max_examples=150, deadline=None)
@given(settings_of_a_split(), st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_an_epoch_is_whole(split: tuple[list[int], int, int, SmallClasses], seed: int, number: int) -> None:
    """Every image of every class that is not left out; batches full, of different classes, with a positive pair."""
    counts, size, per_class, policy = split
    labels = labels_of(counts)
    drawn = batches(counts, size, per_class, small_classes=policy, seed=seed)
    epoch = list(drawn.epoch(number))
    assert len(epoch) == len(drawn)
    own = Counter(labels.tolist())
    left_out = {label for label, count in own.items() if label < 0 or (policy == "leave_out" and count < per_class)}
    reached = set(np.concatenate(epoch).tolist())
    assert reached == {n for n, label in enumerate(labels.tolist()) if label not in left_out}
    smallest = min(size, sum(min(count, per_class) for count in counts)) if policy == "fewer" else size
    for batch in epoch:
        assert len(batch) == smallest
        held = Counter(labels[batch].tolist())
        assert len(held) >= size // per_class
        assert max(held.values()) >= 2
        cut = sum(held[label] < min(per_class, own[label]) for label in held)
        assert cut <= (policy == "fewer")  # the last class that fills a batch up
        assert max(held.values()) <= per_class
        if policy == "repeat":
            assert set(held.values()) == {per_class}
        repeats = Counter(batch.tolist())
        for image, times in repeats.items():
            assert times <= (math.ceil(per_class / own[int(labels[image])]) if policy == "repeat" else 1)


@settings(max_examples=50, deadline=None)
@given(settings_of_a_split(), st.integers(0, 100))
def test_an_epoch_is_no_longer_than_its_images_need(split: tuple[list[int], int, int, SmallClasses], seed: int) -> None:
    counts, size, per_class, policy = split
    kept = [count for count in counts if policy != "leave_out" or count >= per_class]
    shares = [math.ceil(count / per_class) for count in kept]
    steps = max(math.ceil(sum(shares) / (size // per_class)), *shares)
    assert len(batches(counts, size, per_class, small_classes=policy, seed=seed)) == steps


@settings(max_examples=50, deadline=None)
@given(settings_of_a_split(), st.integers(0, 100), st.integers(0, 5), st.data())
def test_a_resumed_epoch_goes_on_as_it_would_have(
    split: tuple[list[int], int, int, SmallClasses], seed: int, number: int, data: st.DataObject
) -> None:
    counts, size, per_class, policy = split

    def made() -> Batches:
        return batches(counts, size, per_class, small_classes=policy, seed=seed)

    whole = list(made().epoch(number))
    first = data.draw(st.integers(0, len(whole)))
    resumed = list(made().epoch(number, first))
    assert len(resumed) == len(whole) - first
    for one, other in zip(whole[first:], resumed, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100), st.sampled_from([2, 3, 4]), POLICIES)
def test_the_ranks_parts_joined_are_the_batch_of_one_process(seed: int, world: int, policy: SmallClasses) -> None:
    counts = [4, 5, 9, 1, 2, 3, 7, 12, 4, 4, 6, 8]
    alone = list(batches(counts, 24, 4, small_classes=policy, seed=seed).epoch(3))
    ranks = [
        list(batches(counts, 24, 4, small_classes=policy, seed=seed, rank=rank, world=world).epoch(3))
        for rank in range(world)
    ]
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert {len(part) for part in parts} == {24 // world}
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_epochs_and_seeds_differ() -> None:
    counts = [8] * 12

    def drawn(seed: int, number: int) -> bytes:
        return np.concatenate(list(batches(counts, 24, 4, seed=seed).epoch(number))).tobytes()

    assert drawn(0, 0) == drawn(0, 0)
    assert len({drawn(seed, number) for seed in range(3) for number in range(3)}) == 9


def test_classes_meet_others_in_each_epoch() -> None:
    """Which classes share a batch is drawn anew: over few epochs each class meets each other, about equally often."""
    counts, met = [12] * 12, np.zeros((12, 12))
    labels = labels_of(counts)
    drawn = batches(counts, 16, 4)
    for number in range(40):
        for batch in drawn.epoch(number):
            there = np.unique(labels[batch]) // 7
            met[np.ix_(there, there)] += 1
    others = met[~np.eye(12, dtype=bool)]
    assert others.min() > 0.5 * others.mean()
    assert others.max() < 1.5 * others.mean()


def test_one_large_class_takes_nobody_else_s_turn() -> None:
    """It comes in every batch, once; the others fill the batches up."""
    labels = labels_of([40, 4, 4, 4])
    drawn = batches([40, 4, 4, 4], 8, 4)
    assert len(drawn) == 10
    for batch in drawn.epoch(0):
        assert Counter(labels[batch].tolist())[2] == 4


def test_a_batch_of_lone_images_is_given_a_pair() -> None:
    labels = labels_of([1] * 30 + [2])
    drawn = batches([1] * 30 + [2], 8, 4)
    for number in range(5):
        for batch in drawn.epoch(number):
            assert max(Counter(labels[batch].tolist()).values()) == 2


# categories


def hierarchical(counts: dict[int, list[int]], **rest: Any) -> tuple[Batches, Numbers, Numbers]:
    """Batches, labels and categories of classes of these sizes."""
    flat = [(category, count) for category, sizes in counts.items() for count in sizes]
    labels = np.repeat(np.arange(len(flat)), [count for _, count in flat]).astype(np.int64)
    categories = np.array([category for category, _ in flat])[labels].astype(np.int64)
    small = rest.pop("small_classes", SmallClasses.FEWER)
    batch = Batch(size=rest.pop("size", 16), per_class=4, sampler=Sampler.HIERARCHICAL, small_classes=small)
    return Batches(labels, categories, batch, seed=rest.pop("seed", 0), **rest), labels, categories


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(-3, 50), st.lists(st.integers(2, 20), min_size=4, max_size=9), min_size=2, max_size=7),
    POLICIES,
    st.integers(0, 100),
)
def test_hierarchical_batches_hold_two_categories_and_reach_all(
    counts: dict[int, list[int]], policy: SmallClasses, seed: int
) -> None:
    counts = {category: [*sizes, 4, 5] for category, sizes in counts.items()}
    drawn, labels, categories = hierarchical(counts, seed=seed, small_classes=policy)
    epoch = list(drawn.epoch(1))
    assert len(epoch) == len(drawn)
    own = Counter(labels.tolist())
    reached = set(np.concatenate(epoch).tolist())
    assert reached == {n for n, label in enumerate(labels.tolist()) if policy != "leave_out" or own[label] >= 4}
    for batch in epoch:
        assert len(batch) == 16
        assert len(set(categories[batch].tolist())) == 2
        held: defaultdict[int, set[int]] = defaultdict(set)
        for image in batch:
            held[int(categories[image])].add(int(labels[image]))
        if policy != "fewer":
            assert [len(classes) for classes in held.values()] == [2, 2]
        assert min(len(classes) for classes in held.values()) >= 2


def test_every_pair_of_categories_comes_in_every_epoch() -> None:
    drawn, _, categories = hierarchical({category: [8] * (4 + category) for category in range(6)})
    for number in range(3):
        met = {tuple(np.unique(categories[batch])) for batch in drawn.epoch(number)}
        assert len(met) == 15


def test_many_categories_do_not_make_an_epoch_of_all_their_pairs() -> None:
    drawn, _, _ = hierarchical({category: [4, 4] for category in range(60)})
    assert len(drawn) == 30


def test_a_small_category_is_joined_by_more_classes_of_the_other() -> None:
    drawn, labels, _ = hierarchical({0: [4], 1: [4] * 9}, size=32, small_classes=SmallClasses.REPEAT)
    assert all(len(np.unique(labels[batch])) == 8 for batch in drawn.epoch(0))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(0, 20), st.integers(0, 1000))
def test_shares_are_dealt_evenly(shares: list[int], more: int, seed: int) -> None:
    steps = max(shares) + more
    hands = dealt(np.array(shares), steps, np.random.default_rng(seed))
    assert [len(set(hand.tolist())) for hand in hands] == shares
    load = np.bincount(np.concatenate(hands), minlength=steps)
    assert len(load) == steps
    assert load.max() - load.min() <= 1


@given(st.lists(st.integers(0, 40), min_size=2, max_size=12))
def test_pairs_give_everybody_the_turns_they_need(turns: list[int]) -> None:
    pairs = paired(np.array(turns))
    had = np.bincount(np.array(pairs, int).ravel(), minlength=len(turns))
    assert (had >= turns).all()
    assert all(one != other for one, other in pairs)
    shortest = max(math.ceil(sum(turns) / 2), *turns)
    assert len(pairs) <= 2 * shortest + 1


def test_categories_of_one_size_meet_equally_often() -> None:
    met = Counter(tuple(sorted(pair)) for pair in paired(np.full(6, 50)))
    assert len(met) == 15
    assert max(met.values()) - min(met.values()) <= 1


# refusals


@pytest.mark.parametrize(
    ("counts", "given", "text"),
    [
        (
            [4] * 12,
            {"size": 128},
            (
                "batch.size 128 with 4 per class needs 32 classes, and the training split has 12: "
                "set batch.size to 48 or less"
            ),
        ),
        (
            [4] * 12 + [3] * 30,
            {"size": 128, "small_classes": "leave_out"},
            (
                "batch.size 128 with 4 per class needs 32 classes, and the training split has 12 of at least 4 images: "
                "set batch.size to 48 or less"
            ),
        ),
        ([9], {"size": 8}, "the training split has one class: a batch needs two, so give it more"),
        ([], {"size": 8}, "the training split has no class: a batch needs two, so give it more"),
        (
            [3, 3, 4],
            {"size": 8, "small_classes": "leave_out"},
            "the training split has one class of at least 4 images: a batch needs two, so give it more",
        ),
        (
            [1] * 9,
            {"size": 8},
            (
                "the training split has only classes of one image, and a positive pair needs two: "
                "give them more images, or set batch.small_classes to repeat"
            ),
        ),
        (
            [4] * 9,
            {"size": 8, "world": 3},
            "batch.size 8 cannot be parted equally among 3 processes: set it to a multiple of 12",
        ),
        (
            [3, 3, 2],
            {"size": 12, "world": 2},
            (
                "the training split gives 8 images a batch, and 2 processes need batch.size, 12: "
                "set batch.small_classes to repeat, or batch.size lower"
            ),
        ),
        (
            [4] * 9,
            {"size": 8, "sampler": "hierarchical"},
            "batch.sampler is hierarchical, and the training split has one category: set it to classes",
        ),
    ],
)
def test_what_cannot_be_filled_is_refused_with_the_mend(counts: list[int], given: dict[str, Any], text: str) -> None:
    with pytest.raises(BatchError) as refused:
        batches(counts, per_class=4, **given)
    assert str(refused.value) == text


def test_the_mend_of_too_large_a_batch_works() -> None:
    assert len(batches([4] * 12, 48, 4)) == 1


def test_small_categories_are_refused_with_the_mend() -> None:
    counts = {0: [4], 1: [4, 4], 2: [4] * 9}
    with pytest.raises(BatchError, match="needs 4 classes of any two categories, and the smallest two have 3: set bat"):
        hierarchical(counts)
    drawn, _, _ = hierarchical(counts, size=12)
    assert all(len(batch) == 12 for batch in drawn.epoch(0))


def test_categories_of_lone_images_are_refused() -> None:
    with pytest.raises(BatchError, match="a pair of categories of the training split has only classes of one image"):
        hierarchical({0: [1] * 4, 1: [1] * 4, 2: [4] * 40})


def test_a_class_of_two_categories_is_refused() -> None:
    labels = np.repeat(np.arange(6), 4).astype(np.int64)
    categories = labels % 2
    categories[0] = 1
    batch = Batch(size=8, per_class=4, sampler=Sampler.HIERARCHICAL)
    with pytest.raises(BatchError, match="a class has images of two categories"):
        Batches(labels, categories, batch, seed=0)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank} of {world}"):
        batches([4, 4], 8, 4, rank=rank, world=world)


@pytest.mark.parametrize("first", [-1, 2])
def test_a_step_outside_the_epoch_is_refused(first: int) -> None:
    with pytest.raises(ValueError, match=f"first is {first}"):
        list(batches([4, 4], 8, 4).epoch(0, first))
