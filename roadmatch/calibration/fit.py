"""Fit: the score of a bundle, and its operating points with evidence from searches not used for fitting."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roadmatch.calibration.evidence import Judged, bootstrap, folds, rates
from roadmatch.calibration.rules import Fit, Rule, false_match_rate, max_f1, precision
from roadmatch.calibration.searches import Floats, Scored, Searches, Similarities, Units
from roadmatch.operating_points import Curves, Evidence, OperatingPoint, OperatingPoints, Rate
from roadmatch.scoring import DECIMALS, ScoreRule, Vector

DEFAULT_RULE = false_match_rate(0.01)
RULES = (DEFAULT_RULE, false_match_rate(0.05), precision(0.95, match_share=0.5), max_f1(match_share=0.5))
SCORES = (
    ScoreRule(),
    *(ScoreRule(beta, gamma, k) for k in (1, 5, 30) for beta in (0.3, 0.5, 0.7) for gamma in (0.0, beta)),
)
_EVEN = 0.5
"""The match share at which precision is stated for rules that name none."""


@dataclass(frozen=True)
class Calibration:
    """How a fit is done: the rules, the folds of units, the resamples, and the seed of both."""

    rules: tuple[Rule, ...] = RULES
    default: Rule = DEFAULT_RULE
    folds: int = 5
    resamples: int = 1000
    seed: int = 1


def choose_score(
    searches: Searches, background: Vector, how: Calibration, candidates: Sequence[ScoreRule] = SCORES
) -> tuple[ScoreRule, dict[ScoreRule, float]]:
    """The score with the highest cross-fitted recall at the default rule, and the recall of each candidate.

    Every candidate sees the same folds and resamples. Of equal ones the first, the simplest, is taken.
    """
    similarities = Similarities.of(searches, background, sorted({rule.k for rule in candidates}))
    recall = {}
    for rule in candidates:
        judged = cross_fit(similarities.scored(rule), (how.default,), how)[how.default.name].groups
        recall[rule] = sum(group.right.sum() for group in judged) / sum(group.searches.sum() for group in judged)
    return max(recall, key=lambda rule: recall[rule]), recall


def calibrate(
    searches: Searches,
    background: Vector,
    score: ScoreRule,
    model: str,
    how: Calibration,
    shifted: Searches | None = None,
) -> OperatingPoints:
    """searches among U units and those of distractors, background (n, D) -> the operating points of a bundle.

    The shipped thresholds are fitted on all units; the evidence is cross-fitted: thresholds fitted on the other folds
    are judged on a fold's searches among themselves. `shifted` are the same units' searches with other copies, judged
    at the thresholds of the same folds. ValueError for fewer units than folds can hold.
    """
    scored = Similarities.of(searches, background, [score.k]).scored(score)
    shifted_scored = shifted and Similarities.of(shifted, background, [score.k]).scored(score)
    if scored.stored < 4 * how.folds:
        raise ValueError(f"{scored.stored} pictures are too few for {how.folds} folds: give at least {4 * how.folds}")
    fit = _fit(scored, how)
    size = fold_size(scored.stored, how)
    shown = [
        rule
        for rule in how.rules
        if rule.least_rate(scored.stored) is None and np.isfinite(threshold_for(rule, fit, size))
    ]
    judged = cross_fit(scored, shown, how)
    judged_shifted = cross_fit(scored, shown, how, judge_on=shifted_scored) if shifted_scored else {}
    points = tuple(
        _point(rule, fit, how, searches, judged.get(rule.name), shifted, judged_shifted.get(rule.name))
        for rule in how.rules
    )
    return OperatingPoints(model=model, default_rule=how.default.name, curves=_curves(fit), points=points)


def _fit(scored: Scored, how: Calibration) -> Fit:
    random, weights = np.random.default_rng([how.seed, 1]), np.empty((how.resamples, scored.units))
    for kind in (scored.is_stored, ~scored.is_stored):
        if kind.any():
            weights[:, kind] = bootstrap(int(kind.sum()), how.resamples, random)
    return Fit.of(scored, weights)


@dataclass(frozen=True)
class CrossFitted:
    """A rule's folds, each judged at the threshold that the others fitted."""

    groups: list[Judged]
    thresholds: list[float]


def cross_fit(
    scored: Scored, rules: Sequence[Rule], how: Calibration, judge_on: Scored | None = None
) -> dict[str, CrossFitted]:
    """Each fold's searches among themselves, at the thresholds that the other folds fitted.

    judge_on: other searches of the same stored units.
    """
    judged = {rule.name: CrossFitted([], []) for rule in rules}
    for fold in _folds(scored, how):
        fit = _fit(scored.only(np.setdiff1d(np.arange(scored.units), fold)), how)
        group = scored.only(fold) if judge_on is None else judge_on.only(fold[scored.is_stored[fold]])
        for rule in rules:
            threshold = threshold_for(rule, fit, fold_size(scored.stored, how))
            judged[rule.name].groups.append(Judged.of(group, threshold))
            judged[rule.name].thresholds.append(threshold)
    return judged


def _folds(scored: Scored, how: Calibration) -> list[Units]:
    """The units in folds that are alike in stored units and in distractors."""
    random = np.random.default_rng([how.seed, 2])
    kinds = [np.flatnonzero(kind) for kind in (scored.is_stored, ~scored.is_stored)]
    parts = [[kind[part] for part in folds(len(kind), how.folds, random)] for kind in kinds]
    return [np.concatenate(fold) for fold in zip(*parts, strict=True)]


def fold_size(stored: int, how: Calibration) -> int:
    """Stored units of the largest fold: the one gallery size that the evidence speaks of."""
    return -(-stored // how.folds)


def threshold_for(rule: Rule, fit: Fit, gallery_size: int) -> float:
    """The threshold that a point of this fit applies in a gallery of this size; infinite where it has none."""
    thresholds = rule.thresholds(fit)
    step = int(np.ceil(np.log2(max(gallery_size, 1))))
    return thresholds[step] if step < len(thresholds) else np.inf


def _point(
    rule: Rule,
    fit: Fit,
    how: Calibration,
    searches: Searches,
    judged: CrossFitted | None,
    shifted: Searches | None,
    judged_shifted: CrossFitted | None,
) -> OperatingPoint:
    if judged is None:
        return OperatingPoint(
            rule=rule.name,
            stated_false_match_rate=rule.false_match_rate,
            supported=False,
            least_rate=rule.least_rate(fit.units),
        )
    return OperatingPoint(
        rule=rule.name,
        stated_false_match_rate=rule.false_match_rate,
        match_share=rule.match_share,
        supported=True,
        thresholds=rule.thresholds(fit),
        shown_up_to=rule.shown_up_to(fit),
        evidence=_evidence(rule, fit, how, searches, judged),
        shifted=_without_bounds(_evidence(rule, fit, how, shifted, judged_shifted))
        if shifted and judged_shifted
        else None,
    )


def _evidence(rule: Rule, fit: Fit, how: Calibration, searches: Searches, judged: CrossFitted) -> Evidence:
    share = _EVEN if rule.match_share is None else rule.match_share
    gallery_size = fold_size(len(searches.units), how)
    shipped = fit.found_at(threshold_for(rule, fit, gallery_size))
    threshold_variance = float(np.mean([(fit.found_at(threshold) - shipped) ** 2 for threshold in judged.thresholds]))
    reached = rates(judged.groups, share, np.random.default_rng([how.seed, 3]), how.resamples, threshold_variance)
    return Evidence(
        what=searches.what,
        pictures=len(searches.units),
        gallery_size=gallery_size,
        searches_with_match=reached.searches,
        searches_without_match=reached.searches,
        recall=reached.recall,
        false_match_rate=reached.false_match_rate,
        precision=reached.precision,
        match_share=share,
        distractors=reached.distractors,
        distractor_match_rate=reached.distractor_match_rate,
    )


def _without_bounds(evidence: Evidence) -> Evidence:
    bare = {name: Rate(value=rate.value) for name, rate in evidence if isinstance(rate, Rate)}
    return evidence.model_copy(update=bare)


def _curves(fit: Fit) -> Curves:
    def rounded(values: Floats, digits: int) -> tuple[float, ...]:
        return tuple(float(f"{value:.{digits}g}") for value in values)

    grid = np.round(fit.tail.grid, DECIMALS)
    first = np.unique(grid, return_index=True)[1]
    return Curves(
        scores=rounded(grid[first], 9), pair_rate=rounded(fit.tail.rate[first], 4), found=rounded(fit.found[first], 4)
    )
