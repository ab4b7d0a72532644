from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.gallery.self_check import (
    LEAST_IMAGES,
    Calibration,
    SelfCheck,
    SelfChecks,
    at_least,
    self_check,
    share_bounds,
    verdict,
)
from roadmatch.scoring import ScoreRule
from tests import oracles
from tests.generations import RULE, Image, generation_of, unit

CHECK = SelfCheck(100, 1, 0.01, 0.0, 0.05)


def by_the_definition(images: list[Image], labels: Mapping[str, str | None], rule: ScoreRule, threshold: float) -> int:
    living = [image for image in images if image.alive]
    answered = 0
    for query in living:
        others = [
            oracles.score_of_pair(query.vector.tolist(), query.b, other.vector.tolist(), other.b, rule.beta, rule.gamma)
            for other in living
            if other.item != query.item
            and not (labels.get(query.item) is not None and labels.get(query.item) == labels.get(other.item))
        ]
        answered += max(others, default=-np.inf) >= threshold
    return answered


@settings(deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans()), max_size=30),
    st.lists(st.sampled_from([None, "cat", "dog"]), min_size=7, max_size=7),
)
def test_the_share_is_that_of_searching_every_image_among_the_other_items(
    seed: int, layout: list[tuple[int, int, bool]], names: list[str | None]
) -> None:
    rng = np.random.default_rng(seed)
    pictures, levels = unit(rng, 5, 12), np.round(rng.uniform(0, 0.6, 5), 4)
    images = [
        Image(f"item{item}", f"image{n:02}", pictures[picture], float(levels[picture]), alive)
        for n, (picture, item, alive) in enumerate(layout)
    ]
    labels = {f"item{n}": name for n, name in enumerate(names[:-1])}
    generation = generation_of(images)
    tie = oracles.score_of_pair(
        pictures[0].tolist(), float(levels[0]), pictures[1].tolist(), float(levels[1]), RULE.beta, RULE.gamma
    )
    for threshold in (tie, round(tie + 1e-6, 6), 0.3):
        check = self_check(generation, labels, RULE, threshold, seed=1)
        if generation.items < 2:
            assert (check.searched, check.rate) == (0, None)
        else:
            assert check.searched == generation.images
            assert check.answered_match == by_the_definition(images, labels, RULE, threshold)
            assert check.rate == check.answered_match / check.searched


def test_look_alike_pictures_do_not_fit_and_random_ones_do() -> None:
    rng = np.random.default_rng(0)
    apart = [Image(f"item{n}", f"image{n}", vector) for n, vector in enumerate(unit(rng, 4200, 64))]
    common = unit(rng, 64)
    alike = [replace(image, vector=(v := common + 0.2 * image.vector) / np.linalg.norm(v)) for image in apart[:600]]
    fits = self_check(generation_of(apart[:600]), {}, ScoreRule(), 0.8, seed=1)
    does_not = self_check(generation_of(alike), {}, ScoreRule(), 0.8, seed=1)
    assert (fits.searched, does_not.searched) == (500, 500)
    assert verdict(fits, 0.01) is Calibration.FITS
    assert verdict(does_not, 0.01) is Calibration.DOES_NOT_FIT
    # With one label for all of them they are right matches of each other, and nothing is wrong.
    labelled = self_check(generation_of(alike), {image.item: "one" for image in alike}, ScoreRule(), 0.8, seed=1)
    assert labelled.answered_match == 0
    # Larger than one block of rows: the only other picture of a pair may be in another block.
    pairs = [*apart, replace(apart[10], item="twin", id="twin")]
    twins = self_check(generation_of(pairs), {}, ScoreRule(), 0.999, sample=len(pairs), seed=1)
    assert twins.answered_match == 2


def test_the_sample_depends_on_the_seed_and_not_on_the_order_of_arrival() -> None:
    rng = np.random.default_rng(1)
    images = [Image(f"item{n}", f"image{n}", vector) for n, vector in enumerate(unit(rng, 200, 4))]
    first = self_check(generation_of(images), {}, ScoreRule(), 0.95, sample=40, seed=3)
    assert first.searched == 40
    assert first == self_check(generation_of(images[::-1]), {}, ScoreRule(), 0.95, sample=40, seed=3)
    others = {
        self_check(generation_of(images), {}, ScoreRule(), 0.95, sample=40, seed=n).answered_match for n in range(9)
    }
    assert len(others) > 1


@pytest.mark.parametrize("stated", [0.001, 0.01, 0.05])
@pytest.mark.parametrize("searched", [LEAST_IMAGES, 101, 500])
def test_the_verdict_turns_where_chance_no_longer_explains_it(searched: int, stated: float) -> None:
    def judged(answered: int) -> Calibration:
        return verdict(SelfCheck(searched, answered, answered / searched, 0, 1), stated)

    turn = next(n for n in range(searched + 1) if judged(n) is Calibration.DOES_NOT_FIT)
    assert turn / searched > 3 * stated
    assert oracles.binomial_tail(turn // 2, searched // 2, 3 * stated) < 0.05
    assert (
        oracles.binomial_tail((turn - 1) // 2, searched // 2, 3 * stated) >= 0.05 or (turn - 1) / searched <= 3 * stated
    )
    assert all(judged(n) is Calibration.DOES_NOT_FIT for n in range(turn, searched + 1))


def test_one_pair_of_like_pictures_condemns_no_small_gallery() -> None:
    for searched in range(LEAST_IMAGES, 200):
        assert verdict(SelfCheck(searched, 2, 2 / searched, 0, 1), 0.01) is Calibration.FITS
    assert verdict(SelfCheck(14, 1, 1 / 14, 0, 1), 0.01) is Calibration.NOT_CHECKED


def test_too_few_images_or_no_stated_rate_are_not_checked() -> None:
    assert verdict(SelfCheck(LEAST_IMAGES - 1, 19, 1.0, 0.8, 1), 0.01) is Calibration.NOT_CHECKED
    assert verdict(SelfCheck(LEAST_IMAGES, 20, 1.0, 0.8, 1), 0.01) is Calibration.DOES_NOT_FIT
    assert verdict(SelfCheck(100, 90, 0.9, 0.8, 1), None) is Calibration.NOT_CHECKED
    assert verdict(SelfCheck(0, 0, None, 0, 1), 0.01) is Calibration.NOT_CHECKED
    assert verdict(SelfCheck(100, 100, 1.0, 0.9, 1), 0.5) is Calibration.FITS  # three times one half is no bound


@given(st.integers(1, 60), st.integers(0, 60), st.floats(0, 1))
def test_a_binomial_tail_is_the_sum_of_its_terms(trials: int, count: int, share: float) -> None:
    assert at_least(count, trials, share) == pytest.approx(oracles.binomial_tail(count, trials, share), abs=1e-9)


@given(st.integers(1, 60), st.integers(0, 60))
def test_bounds_leave_a_fortieth_on_each_side(trials: int, count: int) -> None:
    count = min(count, trials)
    low, high = share_bounds(count, trials)
    assert low <= count / trials <= high
    assert count == 0 or oracles.binomial_tail(count, trials, low) == pytest.approx(0.025, abs=1e-6)
    assert count == trials or 1 - oracles.binomial_tail(count + 1, trials, high) == pytest.approx(0.025, abs=1e-6)
    assert (low == 0) == (count == 0)
    assert (high == 1) == (count == trials)


def test_bounds_of_a_known_case() -> None:
    assert share_bounds(0, 10) == pytest.approx((0, 0.30850), abs=1e-5)
    assert share_bounds(5, 10) == pytest.approx((0.18709, 0.81291), abs=1e-5)
    assert share_bounds(0, 0) == (0, 1)


def test_a_check_is_due_at_first_when_the_size_changes_and_a_minute_after_any_change() -> None:
    rng = np.random.default_rng(2)
    images = [Image(f"item{n}", f"image{n}", vector) for n, vector in enumerate(unit(rng, 130, 4))]
    checks, at_100 = SelfChecks(), generation_of(images[:100])
    changed = replace(at_100, seq=10)
    assert checks.latest(1) is None
    assert checks.is_due(1, at_100, 0.5, 1000.0)
    checks.record(1, at_100, 0.5, CHECK, now_s=1000.0, took_s=0.1)
    assert checks.latest(1) == CHECK
    assert not checks.is_due(1, at_100, 0.5, 9999.0)
    assert not checks.is_due(1, changed, 0.5, 1059.0)
    assert checks.is_due(1, changed, 0.5, 1060.0)
    assert not checks.is_due(1, replace(changed, images=109), 0.5, 1003.0)
    assert checks.is_due(1, replace(changed, images=110), 0.5, 1003.0)
    assert checks.is_due(1, replace(changed, images=90), 0.5, 1003.0)
    assert checks.is_due(1, at_100, 0.6, 1003.0)
    assert checks.is_due(2, at_100, 0.5, 1000.0)
    checks.drop(1)
    assert checks.latest(1) is None


def test_checking_takes_a_twentieth_of_the_time_at_most() -> None:
    generation = generation_of([Image("a", "a1", np.array([1, 0], np.float32))])
    checks = SelfChecks()
    checks.record(1, generation, 0.5, CHECK, now_s=1000.0, took_s=10.0)
    assert not checks.is_due(1, replace(generation, seq=10, images=50), 0.6, 1199.0)
    assert checks.is_due(1, replace(generation, seq=10, images=50), 0.6, 1200.0)
