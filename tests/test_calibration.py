"""From held-out searches to thresholds that keep what they promise."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import hypot
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from roadmatch import bundle as bundles
from roadmatch.calibration import Calibration, Searches, calibrate, choose_score
from roadmatch.calibration.evidence import Judged, Rates, bootstrap, folds, rates, wilson
from roadmatch.calibration.fit import cross_fit
from roadmatch.calibration.rules import Fit, Rule, false_match_rate, max_f1, precision
from roadmatch.calibration.searches import Floats, Scored, Similarities
from roadmatch.calibration.tail import fit_tail
from roadmatch.errors import UnknownRule, UnsupportedRule
from roadmatch.operating_points import OperatingPoint, OperatingPoints, Rate, promise
from roadmatch.scoring import ScoreRule, Vector
from training.default_bundle.__main__ import EMBEDDINGS
from training.default_bundle.calibrate import HOW, Embedded

PLAIN = ScoreRule()


@lru_cache
def stored() -> tuple[Searches, Vector]:
    """The photographs and copies that the default bundle was calibrated on, and its background."""
    embedded = Embedded.load(EMBEDDINGS)
    return embedded.searches(embedded.copies), bundles.read(bundles.default_bundle_folder()).background


def made_up(units: int, copies: int = 4, noise: float = 0.6, dimension: int = 24, seed: int = 0) -> Searches:
    """Units that are random directions, and copies with noise on them."""
    random = np.random.default_rng(seed)
    gallery = random.normal(size=(units, dimension))
    gallery /= np.linalg.norm(gallery, axis=1, keepdims=True)
    queries = np.repeat(gallery, copies, axis=0) + noise / np.sqrt(dimension) * random.normal(
        size=(units * copies, dimension)
    )
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    numbers = np.arange(units)
    return Searches(
        "made-up directions",
        queries.astype(np.float32),
        np.repeat(numbers, copies),
        gallery.astype(np.float32),
        numbers,
    )


def with_distractors(searches: Searches, count: int) -> Searches:
    """The searches, and one query each of so many other units."""
    others = made_up(count, copies=1, seed=1)
    return replace(searches, distractors=others.queries, distractor_unit=10_000 + others.query_unit)


def nothing(dimension: int = 24) -> Vector:
    return np.eye(dimension, dtype=np.float32)[:1]


def scored(searches: Searches) -> Scored:
    return Similarities.of(searches, nothing(searches.queries.shape[1]), [1]).scored(PLAIN)


def weights(units: int, resamples: int = 200, seed: int = 3) -> Floats:
    return bootstrap(units, resamples, np.random.default_rng(seed))


# Worked by hand


def test_three_units_worked_by_hand() -> None:
    scores = np.array([[0.9, 0.2, 0.1], [0.6, 0.5, 0.4], [0.3, 0.7, 0.8], [0.1, 0.2, 0.3]])
    judged = Judged.of(Scored(scores, 1.0, np.array([0, 1, 2, 2]), np.arange(3)), 0.5)
    assert judged.searches.tolist() == [1, 1, 2]
    assert judged.right.tolist() == [1, 0, 1]  # the second query's best is unit 0, the fourth finds nothing
    assert judged.wrong.tolist() == [0, 1, 0]
    assert judged.false.tolist() == [0, 1, 1]  # with their own unit held out: .2, .6, .7 and .2
    assert judged.pairs.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0]]


def test_a_score_at_the_threshold_is_accepted() -> None:
    one = Scored(np.array([[0.5, 0.4]]), 1.0, np.array([0]), np.arange(2))
    assert Judged.of(one, 0.5).right.tolist() == [1, 0]
    assert Judged.of(one, 0.500001).right.tolist() == [0, 0]


def test_precision_falls_with_the_share_of_searches_that_have_a_match() -> None:
    judged = Judged(np.full(100, 100.0), np.full(100, 90.0), np.zeros(100), np.full(100, 10.5), np.zeros((100, 100)))
    at_half = rates([judged], 0.5, np.random.default_rng(0), 50).precision.value
    at_tenth = rates([judged], 0.1, np.random.default_rng(0), 50).precision.value
    assert at_half == pytest.approx(0.9 / (0.9 + 0.105), abs=1e-6)
    assert at_half == pytest.approx(0.895, abs=1e-3)
    assert at_tenth == pytest.approx(0.09 / (0.09 + 0.0945), abs=1e-6)  # a half, with the same answers


@pytest.mark.parametrize(
    ("share", "size", "low", "high"), [(0.0, 100, 0.0, 0.0370), (0.5, 100, 0.4038, 0.5962), (0.9, 50, 0.7864, 0.9565)]
)
def test_wilsons_interval_has_its_tabled_values(share: float, size: int, low: float, high: float) -> None:
    assert wilson(share, size) == pytest.approx((low, high), abs=1e-4)


def test_a_distractor_worked_by_hand() -> None:
    """Units 0 and 1 are stored; 2 and 3 ask, the latter twice, and nothing of theirs is there."""
    scores = np.array([[0.9, 0.6], [0.2, 0.8], [0.7, 0.1], [0.1, 0.6], [0.2, 0.3]])
    some = Scored(scores, 1.0, np.array([0, 1, 2, 3, 3]), np.arange(2))
    judged = Judged.of(some, 0.5)
    assert judged.searches.tolist() == [1, 1]
    assert judged.right.tolist() == [1, 1]
    assert judged.wrong.tolist() == [0, 0]
    assert judged.false.tolist() == [1, 0]
    assert judged.distractors.tolist() == [1, 2]
    assert judged.distractors_matched.tolist() == [1, 1]
    found = rates([judged], 0.5, np.random.default_rng(0), 50)
    assert (found.searches, found.distractors) == (2, 2)
    assert found.recall.value == 1
    assert found.false_match_rate.value == pytest.approx(1 / 2)
    assert found.distractor_match_rate is not None
    assert found.distractor_match_rate.value == pytest.approx(2 / 3, abs=1e-6)
    assert found.distractor_match_rate.low == pytest.approx(wilson(2 / 3, 2)[0], abs=1e-6)


def test_distractors_count_no_more_than_the_stored_units_that_they_meet() -> None:
    few, many = (
        rates([Judged.of(scored(with_distractors(made_up(20), count)), 0.9)], 0.5, np.random.default_rng(0), 50)
        for count in (20, 200)
    )
    assert (few.distractors, many.distractors) == (20, 200)
    assert few.distractor_match_rate == many.distractor_match_rate  # none matched


# The tail of the non-matching pairs


def pair_rate(some: Scored, threshold: float) -> float:
    """Straight from the definition."""
    others = [
        some.scores[q, g]
        for q, g in product(range(some.scores.shape[0]), range(some.scores.shape[1]))
        if some.query_unit[q] != some.gallery_unit[g]
    ]
    return float(np.mean([score >= threshold for score in others]))


def test_the_tail_counts_pairs_where_there_are_enough_of_them() -> None:
    some = scored(made_up(60))
    tail = fit_tail(some, weights(60))
    counted = tail.rate >= 0.02
    for threshold, rate in zip(tail.grid[counted][::9], tail.rate[counted][::9], strict=True):
        assert rate == pytest.approx(pair_rate(some, threshold), abs=1e-12)


def test_the_tail_falls_to_nothing_at_the_ceiling_and_its_bound_lies_above_it() -> None:
    some = scored(made_up(60))
    tail = fit_tail(some, weights(60))
    assert (np.diff(tail.grid) > 0).all()
    assert (np.diff(tail.rate) <= 0).all()
    assert (np.diff(tail.upper) <= 0).all()
    assert (tail.upper >= tail.rate - 1e-12).all()
    assert tail.grid[-1] > some.ceiling
    assert tail.rate[-1] <= 1e-12
    assert tail.upper[0] > tail.rate[0] * 1.01


def test_pairs_of_distractors_are_counted_in_the_tail() -> None:
    some = scored(with_distractors(made_up(60), 30))
    tail = fit_tail(some, np.ones((200, 90)))
    counted = tail.rate >= 0.02
    for threshold, rate in zip(tail.grid[counted][::9], tail.rate[counted][::9], strict=True):
        assert rate == pytest.approx(pair_rate(some, threshold), abs=1e-12)
    assert tail.least_shown == pytest.approx(3 / (60 * 59 / 2 + 60 * 30))


def test_few_pairs_show_no_small_rates() -> None:
    assert fit_tail(scored(made_up(60)), weights(60)).least_shown == pytest.approx(3 / (60 * 59 / 2))


def test_a_gallery_of_copies_of_one_thing_gives_thresholds_that_nothing_reaches() -> None:
    alike = np.tile(np.eye(8, dtype=np.float32)[0], (40, 1))
    one_thing = Searches("one picture", alike, np.arange(40), alike, np.arange(40))
    how = Calibration((false_match_rate(0.2),), false_match_rate(0.2))
    point = calibrate(one_thing, nothing(8), PLAIN, "m", how).point("false_match_rate<=0.2")
    assert min(point.thresholds) > 1
    assert point.evidence is not None
    assert point.evidence.recall.value == 0


# Rules


@given(st.integers(0, 1000), st.sampled_from([0.01, 0.05, 0.2]))
@settings(max_examples=12, deadline=None)
def test_thresholds_bound_the_rate_and_grow_with_the_gallery(seed: int, rate: float) -> None:
    fit = Fit.of(scored(made_up(50, seed=seed)), weights(50))
    thresholds = false_match_rate(rate).thresholds(fit)
    assert list(thresholds) == sorted(thresholds)
    for step, threshold in enumerate(thresholds):
        at = int(np.searchsorted(fit.tail.grid, threshold))
        assert 1 - (1 - fit.tail.upper[at]) ** (2.0**step) <= rate * (1 + 1e-6)
        if at > 0:  # and no less strict threshold would do
            assert 1 - (1 - fit.tail.upper[at - 1]) ** (2.0**step) > rate * (1 - 1e-6)


def test_the_conservative_threshold_is_stricter_than_the_one_that_just_fulfils_the_rule() -> None:
    fit = Fit.of(scored(made_up(80)), weights(80))
    just = fit.tail.grid[np.argmax(1 - (1 - fit.tail.rate) ** 64 <= 0.05)]
    assert false_match_rate(0.05).thresholds(fit)[6] > just


def test_precision_keeps_its_lower_bound_and_gives_up_where_none_is_sure_enough() -> None:
    fit = Fit.of(scored(made_up(80, noise=0.9)), weights(80))
    thresholds = precision(0.95, 0.5).thresholds(fit)
    assert 0 < len(thresholds) < 31
    for step, threshold in enumerate(thresholds):
        at = int(np.searchsorted(fit.tail.grid, threshold))
        false = 1 - (1 - fit.tail.upper[at]) ** (2.0**step)
        right = 0.5 * fit.found_low[at]
        assert right / (right + (0.5 * (1 - fit.found_low[at]) + 0.5) * false) >= 0.95 - 1e-9


def test_max_f1_is_the_best_of_all_thresholds() -> None:
    fit = Fit.of(scored(made_up(60)), weights(60))
    chosen = max_f1(0.5).thresholds(fit)[5]

    def f1(at: int) -> float:
        right = 0.5 * fit.found[at]
        wrong = (0.5 * (1 - fit.found[at]) + 0.5) * (1 - (1 - fit.tail.rate[at]) ** 32)
        return float(2 * right / (right + wrong + 0.5))

    assert f1(int(np.searchsorted(fit.tail.grid, chosen))) == pytest.approx(max(map(f1, range(len(fit.tail.grid)))))


@pytest.mark.parametrize("noise", [2.5, 8.0])
def test_a_model_that_cannot_keep_a_rule_has_it_unsupported(noise: float) -> None:
    points = calibrate(made_up(80, noise=noise), nothing(), PLAIN, "m", quick(precision(0.95, 0.5), max_f1(0.5)))
    for point in points.points:
        assert not point.supported or point.threshold(16).value < 1
    with pytest.raises(UnsupportedRule, match="calibrate on more pictures"):
        points.point("precision>=0.95")


def test_every_unit_needs_queries_and_gallery_images() -> None:
    searches = made_up(30)
    asking = searches.query_unit > 0
    with pytest.raises(ValueError, match="every unit needs queries and gallery images"):
        Searches("x", searches.queries[asking], searches.query_unit[asking], searches.gallery, searches.gallery_unit)
    with pytest.raises(ValueError, match="every unit needs queries and gallery images"):
        Searches("x", searches.queries, searches.query_unit, searches.gallery[1:], searches.gallery_unit[1:])


def test_distractors_are_of_units_that_are_not_stored() -> None:
    searches = made_up(30)
    with pytest.raises(ValueError, match="each distractor needs its unit"):
        replace(searches, distractors=searches.queries[:2], distractor_unit=np.array([70]))
    with pytest.raises(ValueError, match="each distractor needs its unit"):
        replace(searches, distractor_unit=np.array([70]))
    with pytest.raises(ValueError, match="has no distractors"):
        replace(searches, distractors=searches.queries[:2], distractor_unit=np.array([70, 3]))


# Evidence


def test_a_folds_threshold_does_not_depend_on_its_own_scores() -> None:
    how = quick(false_match_rate(0.1))
    some = scored(made_up(60))
    before = cross_fit(some, how.rules, how)["false_match_rate<=0.1"].thresholds
    fold = folds(60, how.folds, np.random.default_rng([how.seed, 2]))[2]
    own = np.isin(some.query_unit, fold)
    changed = replace(some, scores=np.where(own[:, None], some.scores - 0.5, some.scores))
    after = cross_fit(changed, how.rules, how)["false_match_rate<=0.1"].thresholds
    assert before[2] == after[2]
    assert all(old != new for fold, (old, new) in enumerate(zip(before, after, strict=True)) if fold != 2)


def test_a_lone_pair_of_units_is_not_counted_three_times() -> None:
    """Each of 100 units has one accepted pair with its neighbour: the variance is that of 100 independent events."""
    units = 200
    pairs = np.zeros((units, units))
    for one in range(0, units, 2):
        pairs[one, one + 1] = 1
    false = pairs.sum(axis=1)
    group = Judged(np.full(units, 10.0), np.full(units, 9.0), np.zeros(units), false, pairs)
    rate = rates([group], 0.5, np.random.default_rng(0), 4000).false_match_rate
    low, high = wilson(100 / 2000, min(units, 0.05 * 0.95 / (100 / 2000**2)))
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=2e-4)


def test_other_thresholds_in_the_folds_widen_the_bounds_of_recall() -> None:
    group = Judged(np.full(50, 10.0), np.tile([7.0, 9.0], 25), np.zeros(50), np.zeros(50), np.zeros((50, 50)))
    narrow = rates([group], 0.5, np.random.default_rng(0), 500).recall
    wide = rates([group], 0.5, np.random.default_rng(0), 500, threshold_variance=0.03**2).recall
    assert wide.low is not None
    assert narrow.low is not None
    assert wide.value == narrow.value
    assert wide.low < narrow.low - 0.02


def test_each_fold_has_its_share_of_stored_units_and_of_distractors() -> None:
    how = quick(false_match_rate(0.1))
    groups = cross_fit(scored(with_distractors(made_up(60), 33)), how.rules, how)[how.default.name].groups
    assert {(len(group.searches), len(group.distractors)) for group in groups} == {(12, 6), (12, 7)}


def test_a_folds_threshold_does_not_depend_on_its_own_distractors() -> None:
    how = quick(false_match_rate(0.1))
    some = scored(with_distractors(made_up(60), 30))
    before = cross_fit(some, how.rules, how)[how.default.name].thresholds
    one = some.query_unit == 60  # the first distractor
    changed = replace(some, scores=np.where(one[:, None], 0.97, some.scores))
    after = cross_fit(changed, how.rules, how)[how.default.name].thresholds
    assert sum(old == new for old, new in zip(before, after, strict=True)) == 1


# Points


def quick(*rules: Rule) -> Calibration:
    return Calibration(rules, rules[0], resamples=100)


def points_of(units: int = 80, *rules: Rule) -> OperatingPoints:
    return calibrate(made_up(units), nothing(), PLAIN, "m", quick(*(rules or (false_match_rate(0.1),))))


def test_a_rule_that_so_few_pictures_cannot_show_is_unsupported_and_names_the_least_rate() -> None:
    points = points_of(80, false_match_rate(0.05), false_match_rate(0.01))
    assert points.point("false_match_rate<=0.05").supported
    with pytest.raises(UnsupportedRule, match=r"least rate it can show is 0\.0375: calibrate on more pictures"):
        points.point("false_match_rate<=0.01")
    with pytest.raises(UnknownRule, match=r"use one of false_match_rate<=0\.05"):
        points.point("false_match_rate<=0.2")
    with pytest.raises(UnsupportedRule, match=r"the least rate that 80 pictures can show is 0\.037"):
        points.point("false_match_rate<=0.02")


def test_distractors_show_no_lesser_rate_and_are_stated_by_themselves() -> None:
    points = calibrate(
        with_distractors(made_up(80), 220), nothing(), PLAIN, "m", quick(*map(false_match_rate, (0.05, 0.01)))
    )
    assert [point.supported for point in points.points] == [True, False]
    evidence = points.points[0].evidence
    assert evidence is not None
    assert (evidence.pictures, evidence.distractors, evidence.gallery_size) == (80, 220, 16)
    assert (evidence.searches_with_match, evidence.searches_without_match) == (320, 320)
    assert " of those of 220 distractors)" in promise(points, points.points[0], 16, None)


def test_distractors_of_another_kind_do_not_water_a_promise_down() -> None:
    """These resemble nothing that is stored, so of all searches together hardly any would be mistaken."""
    searches, rule = made_up(80), false_match_rate(0.1)
    strange = with_distractors(searches, 200)
    assert strange.distractors is not None
    away = replace(strange, distractors=-np.abs(strange.distractors) * np.sign(searches.gallery.mean(axis=0)))
    alone, beside = (calibrate(some, nothing(), PLAIN, "m", quick(rule)).points[0] for some in (searches, away))
    for size in (1, 16, 256):
        assert beside.threshold(size).value >= alone.threshold(size).value
    assert alone.evidence is not None
    assert beside.evidence is not None
    assert beside.evidence.false_match_rate.value <= alone.evidence.false_match_rate.value


def test_shifted_searches_are_judged_without_distractors() -> None:
    rule, shifted = false_match_rate(0.1), made_up(80, noise=1.5)
    points = calibrate(with_distractors(made_up(80), 40), nothing(), PLAIN, "m", quick(rule), shifted=shifted)
    evidence = points.points[0].shifted
    assert evidence is not None
    assert (evidence.searches_with_match, evidence.distractors) == (320, 0)


def test_distractors_that_are_like_what_is_stored_raise_the_threshold() -> None:
    searches, rule = made_up(80), false_match_rate(0.1)
    alike = replace(searches, distractors=searches.queries[::4], distractor_unit=1000 + np.arange(80))
    alone, beside = (calibrate(some, nothing(), PLAIN, "m", quick(rule)).points[0] for some in (searches, alike))
    assert beside.threshold(16).value > alone.threshold(16).value + 0.01
    assert beside.evidence is not None
    assert beside.evidence.distractor_match_rate is not None
    assert beside.evidence.false_match_rate.high is not None
    assert beside.evidence.distractor_match_rate.value > beside.evidence.false_match_rate.value


def test_too_few_pictures_for_the_folds_are_refused() -> None:
    with pytest.raises(ValueError, match="19 pictures are too few for 5 folds"):
        points_of(19)


def test_the_gallery_size_is_rounded_up_to_a_power_of_two() -> None:
    point = points_of().point("false_match_rate<=0.1")
    assert [point.threshold(size).gallery_size for size in (0, 1, 2, 3, 4, 5, 1000)] == [1, 1, 2, 4, 4, 8, 1024]
    assert point.threshold(5).value == point.threshold(8).value < point.threshold(9).value


def test_galleries_beyond_the_evidence_are_called_extrapolated() -> None:
    point = points_of(80).point("false_match_rate<=0.1")
    assert point.shown_up_to == 64  # 1-(1-f)^N = 0.1 asks for f = 3/(80*79/2) at about N = 110
    assert not point.threshold(64).extrapolated
    assert point.threshold(65).extrapolated


def test_every_picture_testifies_once_and_never_on_a_threshold_that_it_helped_to_fit() -> None:
    groups = folds(83, 5, np.random.default_rng(1))
    assert sorted(np.concatenate(groups).tolist()) == list(range(83))
    assert {len(group) for group in groups} == {16, 17}
    evidence = points_of(83).point("false_match_rate<=0.1").evidence
    assert evidence is not None
    assert (evidence.pictures, evidence.gallery_size, evidence.searches_with_match) == (83, 17, 83 * 4)


def test_copies_of_other_strengths_are_reported_apart_and_without_bounds() -> None:
    points = calibrate(made_up(80), nothing(), PLAIN, "m", quick(false_match_rate(0.1)), shifted=made_up(80, noise=1.5))
    point = points.point("false_match_rate<=0.1")
    assert point.evidence is not None
    assert point.shifted is not None
    assert point.shifted.recall.value < point.evidence.recall.value
    assert point.shifted.recall.low is None
    assert point.evidence.recall.low is not None


def test_the_score_is_normalised_where_that_finds_more() -> None:
    """Half of the queries come with a haze that the background shows, too: its level tells how much of it they have."""
    random = np.random.default_rng(5)
    clear = made_up(120, copies=2, noise=0.5)
    haze = np.zeros(24)
    haze[0] = 1.0

    def hazy(vectors: Vector | Floats, much: Floats) -> Vector:
        mixed = vectors + much[:, None] * haze
        return np.asarray(mixed / np.linalg.norm(mixed, axis=1, keepdims=True), np.float32)

    searches = Searches(
        "hazy directions",
        hazy(clear.queries, random.uniform(0, 2, len(clear.queries))),
        clear.query_unit,
        hazy(clear.gallery, random.uniform(0, 2, 120)),
        clear.gallery_unit,
    )
    background = hazy(random.normal(size=(40, 24)) / 5, random.uniform(0, 2, 40))
    how = quick(false_match_rate(0.1))
    candidates = [PLAIN, ScoreRule(0.5, 0.5, 5)]
    chosen, recall = choose_score(searches, background, how, candidates)
    assert chosen == candidates[1]
    assert recall[candidates[1]] > recall[PLAIN] + 0.05
    assert choose_score(clear, background, how, [PLAIN, PLAIN])[0] == PLAIN


def test_what_is_expected_grows_with_the_gallery_and_falls_with_the_threshold() -> None:
    curves = points_of().curves
    assert curves.expected_false_match_rate(0.6, 10) < curves.expected_false_match_rate(0.6, 100) < 1
    assert curves.expected_false_match_rate(0.7, 10) < curves.expected_false_match_rate(0.6, 10)
    assert curves.expected_false_match_rate(1.1, 10**9) == 0
    assert curves.expected_recall(0.5) > curves.expected_recall(0.9)
    assert curves.expected_recall(1.1) == 0
    middle, between = (curves.scores[-100] + curves.scores[-101]) / 2, curves.pair_rate[-101:-99]
    assert curves.expected_false_match_rate(middle, 1) == pytest.approx(np.sqrt(between[0] * between[1]), rel=1e-3)
    rate = curves.pair_rate[-100]
    assert curves.expected_false_match_rate(curves.scores[-100], 50) == pytest.approx(1 - (1 - rate) ** 50)


def test_a_supported_point_without_thresholds_is_no_point() -> None:
    with pytest.raises(ValidationError, match="is called supported but has no thresholds"):
        OperatingPoint(rule="x", stated_false_match_rate=None, supported=True)


def test_the_promise_says_the_figures_of_its_point() -> None:
    points = points_of()
    point = points.point("false_match_rate<=0.1")
    assert point.evidence is not None
    text = promise(points, point, 200, 0.034)
    assert text.startswith("On made-up directions, 80 pictures not used for fitting, ")
    assert f"{100 * point.evidence.recall.value:.1f} % of those with one were found" in text
    assert "in a gallery of 16 were answered `match`" in text
    assert "Here, with 200 images, about " in text
    assert "extrapolated: the evidence reaches to 64 images" in text
    assert "the gallery's own images suggest at most 3.4 %" in text


# The default bundle


def test_the_default_bundles_points_follow_from_the_stored_embeddings() -> None:
    searches, background = stored()
    bundle = bundles.read(bundles.default_bundle_folder())
    assert bundle.operating_points is not None
    again = calibrate(searches, background, bundle.manifest.score, bundle.model, HOW)
    for made, shipped in zip(again.points, bundle.operating_points.points, strict=True):
        assert made.thresholds == pytest.approx(shipped.thresholds, abs=1e-5)
        assert made.evidence == shipped.evidence
    assert again.curves.pair_rate == pytest.approx(bundle.operating_points.curves.pair_rate, rel=1e-3)


def test_the_default_bundle_was_calibrated_on_enough_pictures() -> None:
    points = bundles.read(bundles.default_bundle_folder()).operating_points
    assert points is not None
    evidence = points.point(points.default_rule).evidence
    assert points.default_rule == "false_match_rate<=0.01"
    assert evidence is not None
    assert evidence.pictures + len(stored()[1]) >= 500
    assert evidence.searches_without_match == 9 * evidence.pictures


HALVINGS = 100


class Halving:
    """What one half of the photographs states, and what the other half then shows."""

    def __init__(self, seed: int) -> None:
        searches, background = stored()
        random = np.random.default_rng([7, seed])
        order = random.permutation(len(searches.units))
        fitted, other = np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])
        self.rate = 3 / len(fitted)
        rules = (false_match_rate(self.rate), precision(0.95, 0.5))
        score = bundles.read(bundles.default_bundle_folder()).manifest.score
        how = Calibration(rules, rules[0], resamples=200, seed=seed)
        points = calibrate(searches.only(fitted), background, score, "half", how).points
        rest = Similarities.of(searches.only(other), background, [score.k]).scored(score)
        self.stated, self.seen = [], []
        for point in points:
            assert point.evidence is not None
            self.stated.append(point.evidence)
            groups = [rest.only(fold) for fold in folds(rest.units, how.folds, random)]
            judged = [Judged.of(group, point.threshold(group.units).value) for group in groups]
            self.seen.append(rates(judged, 0.5, random, 200))
        whole = Judged.of(rest, points[0].threshold(rest.units - 1).value)
        self.whole: Rates = rates([whole], 0.5, random, 200)


def agree(stated: Rate, seen: Rate) -> bool:
    """Whether a rate lies in the stated bounds, allowing for its own sampling error (Newcombe, 1998, method 10)."""
    assert stated.low is not None
    assert stated.high is not None
    assert seen.low is not None
    assert seen.high is not None
    below = hypot(stated.value - stated.low, seen.high - seen.value)
    above = hypot(stated.high - stated.value, seen.value - seen.low)
    return stated.value - below <= seen.value <= stated.value + above


@pytest.fixture(scope="module")
def halvings() -> list[Halving]:
    """Cheap enough for every run: half a minute on two cores, if numpy's threads do not wait for each other there."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        return list(pool.map(Halving, range(HALVINGS), chunksize=10))


@pytest.mark.parametrize("rule", [0, 1], ids=["false_match_rate", "precision"])
@pytest.mark.parametrize("name", ["recall", "false_match_rate", "precision"])
def test_the_truth_on_the_other_half_lies_in_the_stated_bounds(halvings: list[Halving], rule: int, name: str) -> None:
    inside = sum(agree(getattr(half.stated[rule], name), getattr(half.seen[rule], name)) for half in halvings)
    assert 90 <= inside <= 99, inside


def test_the_conservative_false_match_rule_holds_on_the_other_half(halvings: list[Halving]) -> None:
    found = [half.whole.false_match_rate for half in halvings]
    holds = sum(rate.low is not None and rate.low <= half.rate for rate, half in zip(found, halvings, strict=True))
    assert holds >= 90
    assert np.mean([rate.value for rate in found]) <= halvings[0].rate * 0.75  # it is conservative, not just met
    assert np.mean([half.whole.recall.value for half in halvings]) > 0.7  # and of use


def test_embeddings_are_stored_where_the_tests_find_them() -> None:
    assert EMBEDDINGS.is_relative_to(Path(__file__).parent)
