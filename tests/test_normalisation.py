"""Scores less what a background set scores: applied, judged and fitted."""

from functools import lru_cache

import numpy as np
import pytest

from roadmatch import bundle as bundles
from roadmatch.metrics.normalisation import (
    CANDIDATES,
    PLAIN,
    How,
    Trial,
    background_levels,
    fit_normalisation,
    loss_in_recall,
    normalised,
    trial,
)
from roadmatch.metrics.ties import Floats
from roadmatch.scoring import ScoreRule, Vector
from tests.more_metric_oracles import recall_at_precision
from tests.oracles import background_mean, rounded_dot, score_of_pair
from training.default_bundle.__main__ import EMBEDDINGS
from training.default_bundle.calibrate import Embedded

QUICK = How(resamples=100)
SOME = [rule for rule in CANDIDATES if rule.k == 5 and rule.beta < 0.7]


def unit(vectors: Floats) -> Vector:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def made_up(classes: int, noise: float, hub: float, seed: int = 0, dimension: int = 24) -> Trial:
    """Four images of each class; with a hub they and the background lean to one side, some more than others."""
    random = np.random.default_rng(seed)
    spread = 1 / np.sqrt(np.arange(1, dimension + 1)) if hub else np.ones(dimension)
    lean = hub * np.eye(dimension)[0]
    labels = np.repeat(np.arange(classes), 4)
    centres = random.normal(size=(classes, dimension)) * spread + lean
    images = unit(centres[labels] + noise * random.normal(size=(len(labels), dimension)) * spread)
    background = unit(random.normal(size=(60, dimension)) * spread + lean)
    return trial(images, labels, images, labels, background, own=np.arange(len(labels)))


@lru_cache
def photographs() -> Trial:
    """Two edits of each photograph against the photographs, with the background of the default bundle."""
    embedded = Embedded.load(EMBEDDINGS)
    count, _, dimension = embedded.copies.shape
    queries = embedded.copies[:, :2].reshape(-1, dimension)
    background = bundles.read(bundles.default_bundle_folder()).background
    return trial(queries, np.repeat(np.arange(count), 2), embedded.pictures, np.arange(count), background)


@pytest.mark.parametrize("rule", [ScoreRule(0.5, 0.0, 3), ScoreRule(0.5, 0.5, 3), ScoreRule(1.0, 0.2, 1), PLAIN])
def test_scores_are_those_of_search_pair_by_pair(rule: ScoreRule) -> None:
    random = np.random.default_rng(1)
    queries, images, background = (unit(random.normal(size=(count, 8))) for count in (4, 6, 10))
    b_query, b_image = (background_levels(side, background, rule.k) for side in (queries, images))
    similarity = np.array([[rounded_dot(query.tolist(), image.tolist()) for image in images] for query in queries])
    found = normalised(similarity, b_query, b_image, rule)
    for i, query in enumerate(queries.tolist()):
        for j, image in enumerate(images.tolist()):
            levels = (background_mean(side, background.tolist(), rule.k) for side in (query, image))
            b_q, b_i = levels
            assert found[i, j] == pytest.approx(score_of_pair(query, b_q, image, b_i, rule.beta, rule.gamma), abs=2e-6)


def test_a_loss_is_the_recall_of_plain_similarity_less_that_of_the_rule_each_at_its_own_threshold() -> None:
    random = np.random.default_rng(2)
    labels = np.repeat(np.arange(8), 3)
    b = np.round(random.random(24), 6)
    trials = Trial(
        np.round(random.uniform(-1, 1, (24, 24)) + 0.8 * (labels[:, None] == labels), 6),
        {1: b},
        {1: b},
        labels,
        labels,
        ~np.eye(24, dtype=bool),
    )
    rule = ScoreRule(0.5, 0.25, 1)

    def recall(beta: float, gamma: float) -> float:
        pairs = [
            (round(float(trials.similarity[i, j] - beta * b[i] - gamma * b[j]), 6), bool(labels[i] == labels[j]))
            for i in range(24)
            for j in range(24)
            if i != j
        ]
        return recall_at_precision(pairs, 0.5)

    assert recall(0.5, 0.25) != recall(0, 0)
    found = loss_in_recall(trials, rule, How(precision=0.5))
    assert found.value == pytest.approx(recall(0, 0) - recall(0.5, 0.25))


def test_the_bound_is_that_of_resampled_classes() -> None:
    trials = made_up(60, 0.7, 0.0)
    rule = ScoreRule(0.5, 0.0, 5)
    found = loss_in_recall(trials, rule, How(resamples=200))
    random = np.random.default_rng(9)
    losses = []
    for _ in range(200):
        drawn = random.choice(60, 60)
        rows = np.concatenate([np.flatnonzero(trials.query_class == which) for which in drawn])
        recalls = []
        for scores in (trials.similarity, normalised(trials.similarity, trials.b_query[5], trials.b_image[5], rule)):
            kept = trials.other[rows]
            hits = (trials.query_class[rows, None] == trials.image_class)[kept]
            best_first = np.argsort(-scores[rows][kept])
            true = np.cumsum(hits[best_first])
            sure = true / np.arange(1, len(true) + 1) >= 0.9
            recalls.append(true[sure].max(initial=0) / hits.sum())
        losses.append(recalls[0] - recalls[1])
    assert found.upper == pytest.approx(float(np.quantile(losses, 0.95)), abs=0.015)
    assert found.value < found.upper


def test_plain_similarity_loses_nothing_against_itself() -> None:
    found = loss_in_recall(made_up(20, 0.6, 0.0), PLAIN)
    assert (found.value, found.upper) == (0, 0)


@pytest.mark.faults
def test_on_photographs_the_fitted_rule_costs_held_out_classes_no_more_than_a_hundredth_in_19_of_20_splits() -> None:
    kept = gained = 0
    for seed in range(20):
        shuffled = np.random.default_rng(seed).permutation(482)
        fitted = fit_normalisation(photographs().only(shuffled[:241]), QUICK, SOME)
        loss = loss_in_recall(photographs().only(shuffled[241:]), fitted.rule, QUICK)
        kept += loss.upper <= 0.01
        gained += fitted.rule != PLAIN and loss.value < 0
    assert kept >= 19
    assert gained >= 5


def test_where_images_like_all_others_a_rule_is_fitted_and_helps_held_out_classes() -> None:
    trials = made_up(100, 0.5, 1.0)
    fitted = fit_normalisation(trials.only(np.arange(50)), QUICK)
    assert fitted.rule != PLAIN
    assert fitted.loss == loss_in_recall(trials.only(np.arange(50)), fitted.rule, QUICK)
    assert loss_in_recall(trials.only(np.arange(50, 100)), fitted.rule, QUICK).upper <= 0.01


def test_where_the_background_says_nothing_there_is_mostly_no_rule() -> None:
    fitted = [fit_normalisation(made_up(50, 0.6, 0.0, seed), QUICK) for seed in range(6)]
    none = [one for one in fitted if one.rule == PLAIN]
    assert len(none) >= 4
    assert all((one.loss.value, one.loss.upper) == (0, 0) for one in none)


def test_a_rule_that_costs_recall_is_refused_and_of_equal_ones_the_first_is_taken() -> None:
    trials = made_up(60, 0.5, 1.0)
    helps, harms = ScoreRule(0.5, 0.0, 5), ScoreRule(-2.0, 0.0, 5)
    assert fit_normalisation(trials, QUICK, [harms]).rule == PLAIN
    assert fit_normalisation(trials, QUICK, [harms, helps]).rule == helps
    assert fit_normalisation(trials, QUICK, [helps, ScoreRule(0.5, 0.0, 5)]).rule is helps
    assert fit_normalisation(trials, QUICK, [ScoreRule(0.0, 0.0, 5)]).rule == PLAIN  # harmless, and of no use
    assert fit_normalisation(trials, QUICK, []).rule == PLAIN


def test_self_matches_are_left_out_by_index() -> None:
    trials = made_up(20, 0.6, 0.5)
    rule = ScoreRule(0.5, 0.5, 5)
    with_own = Trial(**(vars(trials) | {"other": np.ones_like(trials.other)}))
    assert loss_in_recall(with_own, rule) != loss_in_recall(trials, rule)
    changed = trials.similarity.copy()
    np.fill_diagonal(changed, changed.min())
    without = Trial(**(vars(trials) | {"similarity": changed}))
    assert loss_in_recall(without, PLAIN).value == 0
    assert loss_in_recall(without, rule).value == pytest.approx(loss_in_recall(trials, rule).value)


def test_a_trial_of_some_classes_has_their_images_alone() -> None:
    trials = made_up(6, 0.6, 0.5)
    some = trials.only([1, 4])
    assert some.similarity.shape == some.other.shape == (8, 8)
    assert set(some.query_class.tolist()) == set(some.image_class.tolist()) == {1, 4}
    assert some.b_query[5].tolist() == trials.b_query[5][[4, 5, 6, 7, 16, 17, 18, 19]].tolist()
    assert not some.other.diagonal().any()


def test_what_is_undefined_or_wrong_is_an_error() -> None:
    random = np.random.default_rng(1)
    few = unit(random.normal(size=(4, 8)))
    with pytest.raises(ValueError, match="has 4 vectors, fewer than k = 5"):
        background_levels(few, few, 5)
    with pytest.raises(ValueError, match="levels for k in \\[1, 5, 30\\], not 3"):
        loss_in_recall(made_up(6, 0.6, 0.5), ScoreRule(0.5, 0.0, 3))
    lone = Trial(**(vars(made_up(6, 0.6, 0.5)) | {"query_class": np.arange(24) + 100}))
    with pytest.raises(ValueError, match="no query of class 100 has an image of it"):
        loss_in_recall(lone, PLAIN)
