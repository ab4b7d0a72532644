"""training.data.splits: classes are drawn into splits by a hash, and given splits stay."""

import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.manifest import DataError, Manifest, Row, Split, of_rows
from training.data.splits import split, uniform

seeds = st.integers(0, 1000)


def manifest(rows: list[Row]) -> Manifest:
    return of_rows(Path("/data"), rows, lambda n: f"row {n}")


def classes(count: int, images: int = 2) -> list[Row]:
    return [Row(f"{name}/{n}.jpg", f"class {name}") for name in range(count) for n in range(images)]


def split_of(given: Manifest) -> dict[str, Split]:
    return dict(zip(given.paths, given.splits, strict=True))


@settings(max_examples=30, deadline=None)
@given(seeds, st.randoms())
def test_classes_are_in_one_split_each_whatever_other_classes_and_order_there_are(seed: int, random: Random) -> None:
    rows = classes(80)
    drawn = split(manifest(rows), validation=0.3, test=0.3, seed=seed)
    parts = [set(drawn.only(which).classes) for which in Split]
    assert sum(map(len, parts)) == 80
    assert all(parts)
    more = [*rows, *(Row(f"more/{n}.jpg", f"new {n // 2}") for n in range(40))]
    mixed = split(manifest(random.sample(more, len(more))), validation=0.3, test=0.3, seed=seed)
    assert split_of(mixed).items() >= split_of(drawn).items()


@settings(max_examples=8, deadline=None)
@given(seeds, st.floats(0.1, 0.5), st.floats(0.1, 0.5))
def test_shares_of_classes_are_those_asked_for(seed: int, validation: float, test: float) -> None:
    drawn = split(manifest(classes(2000)), validation=validation, test=test, seed=seed)
    for which, total, share in (
        (Split.TEST, 2000, test),
        (Split.VALIDATION, 2000 - len(drawn.only(Split.TEST).classes), validation),
    ):
        deviation = math.sqrt(total * share * (1 - share))
        assert abs(len(drawn.only(which).classes) - total * share) < 5 * deviation


def test_a_share_does_not_change_what_another_draws() -> None:
    given = manifest(classes(200))
    few, many = (split(given, validation=0.2, test=share, seed=5) for share in (0.1, 0.4))
    assert set(few.only(Split.TEST).classes) < set(many.only(Split.TEST).classes)
    chosen = set(few.only(Split.VALIDATION).classes)
    assert chosen - set(many.only(Split.TEST).classes) == set(many.only(Split.VALIDATION).classes)
    assert uniform("test", 0, "class a") != uniform("validation", 0, "class a")


def test_given_splits_are_kept_and_the_missing_one_comes_from_training() -> None:
    rows = [*classes(40), *(Row(f"test/{n}.jpg", f"unseen {n // 2}", Split.TEST) for n in range(8))]
    drawn = split(manifest(rows), validation=0.3, test=0.5, seed=0)
    assert drawn.only(Split.TEST).paths == tuple(f"test/{n}.jpg" for n in range(8))
    assert 0 < len(drawn.only(Split.VALIDATION).classes) < 25
    given = manifest([*rows, Row("v.jpg", "v", Split.VALIDATION)])
    assert split(given, validation=0.3, test=0.5, seed=0).splits == given.splits


def test_nothing_is_drawn_for_a_share_of_nothing() -> None:
    given = manifest(classes(3))
    assert split(given, validation=0, test=0, seed=0).splits == given.splits


def test_images_without_a_class_are_spread_one_by_one() -> None:
    rows = [*classes(40), *(Row(f"noise/{n}.jpg", "") for n in range(100))]
    drawn = split(manifest(rows), validation=0.3, test=0.3, seed=0)
    noise = [which for path, which in split_of(drawn).items() if path.startswith("noise")]
    assert all(noise.count(which) > 10 for which in Split)


def test_a_seed_that_leaves_a_split_without_two_pairs_is_refused_and_another_named() -> None:
    given = manifest(classes(8))
    refused, named = 0, set[int]()
    for seed in range(20):
        try:
            drawn = split(given, validation=0.3, test=0.3, seed=seed)
            assert all(len(drawn.only(which).classes) >= 2 for which in Split)
        except DataError as error:
            refused += 1
            named.add(int(str(error).split("data.split_seed: ")[1].split()[0]))
    assert 0 < refused < 20
    assert len(named) == 1
    split(given, validation=0.3, test=0.3, seed=named.pop())


def test_too_few_classes_for_any_seed_say_so() -> None:
    with pytest.raises(DataError, match=r"puts 0 classes of two images or more into test.*more classes"):
        split(manifest(classes(9, images=1)), validation=0, test=0.5, seed=0)
    with pytest.raises(DataError, match=r"leaves . classes for training, and 2 are needed: more classes"):
        split(manifest(classes(3)), validation=0, test=0.9, seed=0)
