"""What thresholds reach on searches that took no part in fitting them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import hypot, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from roadmatch.calibration.rules import other_scores
from roadmatch.calibration.searches import Floats, Scored, Units
from roadmatch.operating_points import Rate

_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Judged:
    """Searches of one group of stored units among themselves, judged at a threshold, by unit; and of distractors."""

    searches: Floats  # (U,)
    right: Floats  # (U,) of the searches whose unit is there: best accepted image is of that unit
    wrong: Floats  # (U,) of the same: best accepted image is of another unit
    false: Floats  # (U,) of the searches whose unit is held out: answered `match`
    pairs: Floats  # (U, U) accepted pairs of a query's unit with another unit
    distractors: Floats = field(default_factory=lambda: np.zeros(0))  # (D,) searches of each unit of distractors
    distractors_matched: Floats = field(default_factory=lambda: np.zeros(0))  # (D,) of these: answered `match`

    @staticmethod
    def of(scored: Scored, threshold: float) -> "Judged":
        """scored with U stored units -> judged; a score at the threshold is accepted."""
        lost, scored = scored.distractors, scored.held_out
        best = scored.scores.argmax(axis=1)
        accepted = scored.scores.max(axis=1) >= threshold
        is_right = scored.gallery_unit[best] == scored.query_unit
        rows, columns = np.nonzero(scored.scores >= threshold)
        pairs = np.zeros((scored.units, scored.units))
        np.add.at(pairs, (scored.query_unit[rows], scored.gallery_unit[columns]), 1)
        np.fill_diagonal(pairs, 0)

        def by_unit(outcome: Floats | NDArray[np.bool_]) -> Floats:
            return np.bincount(scored.query_unit, outcome, minlength=scored.units).astype(np.float64)

        return Judged(
            by_unit(np.ones(len(best))),
            by_unit(accepted & is_right),
            by_unit(accepted & ~is_right),
            by_unit(other_scores(scored) >= threshold),
            pairs,
            np.bincount(lost.query_unit).astype(np.float64),
            np.bincount(lost.query_unit, lost.scores.max(axis=1) >= threshold).astype(np.float64),
        )


@dataclass(frozen=True)
class Rates:
    """Rates per search over all groups, with 95 % bounds from a bootstrap over units."""

    recall: Rate
    false_match_rate: Rate
    precision: Rate
    searches: int
    distractors: int
    distractor_match_rate: Rate | None
    """None without distractors."""


def rates(
    groups: Sequence[Judged],
    match_share: float,
    random: np.random.Generator,
    resamples: int,
    threshold_variance: float = 0.0,
) -> Rates:
    """Pool the groups. Units are drawn anew within each group, for queries and gallery alike.

    The bootstrap gives the variance; Wilson's interval at the sample size of that variance gives the bounds, so that a
    rate of 0 in n units has the upper bound it ought to have. A resampled gallery holds fewer different images, so the
    false matches of a resample follow its accepted pairs, which keep their mean, and not its searches.
    `threshold_variance` is added to the recall's: folds are judged at thresholds a little other than the shipped one.
    """
    units = sum(len(group.searches) for group in groups)
    whole = sum((_sums(group, np.ones((1, len(group.searches)))) for group in groups), np.zeros((1, 5)))
    drawn = sum((_sums(group, bootstrap(len(group.searches), resamples, random)) for group in groups), np.zeros((1, 5)))
    searches, right, wrong, false, pairs = whole[0]
    per_pair = false / pairs if pairs else 0.0
    recall, mistaken, false_rate = right / searches, wrong / searches, false / searches
    drawn_recall, drawn_wrong = drawn[:, 1] / drawn[:, 0], drawn[:, 2] / drawn[:, 0]
    drawn_false = _without_double_draws(per_pair * drawn[:, 4] / drawn[:, 0], groups, per_pair / searches)
    found = _rate(recall, float(np.var(drawn_recall)) + threshold_variance, units)
    mistakes = _rate(mistaken, float(np.var(drawn_wrong)), units, rare=True)
    false_matches = _rate(false_rate, float(np.var(drawn_false)), units, rare=True)
    precision = _precision(found, mistakes, false_matches, match_share)
    return Rates(found, false_matches, precision, int(searches), *_of_distractors(groups, units))


def bootstrap(units: int, resamples: int, random: np.random.Generator) -> Floats:
    """How often each unit is drawn in each resample (B, U)."""
    return random.multinomial(units, np.full(units, 1 / units), size=resamples).astype(np.float64)


def folds(units: int, count: int, random: np.random.Generator) -> list[Units]:
    """The units in so many groups of like size, drawn at random."""
    return [np.sort(group) for group in np.array_split(random.permutation(units), count)]


def _of_distractors(groups: Sequence[Judged], stored: int) -> tuple[int, Rate | None]:
    """How many units of distractors there are, and their rate.

    Its bounds are those of as many samples as there are units of them, or stored units if these are fewer: all of them
    meet the same few images.
    """
    searches = sum(float(group.distractors.sum()) for group in groups)
    units = sum(len(group.distractors) for group in groups)
    if not units:
        return 0, None
    matched = sum(float(group.distractors_matched.sum()) for group in groups)
    return units, _rate(matched / searches, 0.0, min(units, stored))


def _sums(group: Judged, weights: Floats) -> Floats:
    """weights (B, U) -> (B, 5) sums of searches, right, wrong, false and accepted pairs."""
    return np.stack(
        [
            weights @ group.searches,
            weights @ group.right,
            weights @ group.wrong,
            weights @ group.false,
            np.einsum("bu,uv,bv->b", weights, group.pairs, weights, optimize=True),
        ],
        axis=1,
    )


def _precision(recall: Rate, wrong: Rate, false: Rate, match_share: float) -> Rate:
    """Share of `match` answers that are right; its bounds are those of the wrong answers (MOVER: Zou, Donner, 2008)."""
    right = match_share * recall.value

    def bound(mistakes: float) -> float:
        return round(right / (right + mistakes), 6) if right + mistakes > 0 else 1.0

    mistakes = match_share * wrong.value + (1 - match_share) * false.value
    if wrong.low is None or wrong.high is None or false.low is None or false.high is None:
        return Rate(value=bound(mistakes))
    less = hypot(match_share * (wrong.value - wrong.low), (1 - match_share) * (false.value - false.low))
    more = hypot(match_share * (wrong.high - wrong.value), (1 - match_share) * (false.high - false.value))
    return Rate(value=bound(mistakes), low=bound(mistakes + more), high=bound(max(0.0, mistakes - less)))


def _without_double_draws(drawn: Floats, groups: Sequence[Judged], per_pair: float) -> Floats:
    """The resampled rates with the variance that pairs of units have, which drawing both sides triples (Owen, 2007)."""
    together = (group.pairs + group.pairs.T for group in groups)
    of_pairs = per_pair**2 * sum(float(np.sum(np.triu(pairs) ** 2)) for pairs in together)
    variance = float(np.var(drawn))
    if variance == 0:
        return drawn
    return np.asarray(drawn.mean() + (drawn - drawn.mean()) * sqrt(max(variance - 2 * of_pairs, of_pairs) / variance))


def _rate(share: float, variance: float, units: int, *, rare: bool = False) -> Rate:
    """rare: of events so few that their own variance says little; then there are no more samples than units."""
    size = share * (1 - share) / variance if variance > 0 and 0 < share < 1 else float(units)
    low, high = wilson(share, min(size, units) if rare else size)
    return Rate(value=round(share, 6), low=round(low, 6), high=round(high, 6))


def wilson(share: float, size: float) -> tuple[float, float]:
    """Wilson's 95 % interval for a share seen in a sample of this (effective) size."""
    centre = (share + _Z**2 / (2 * size)) / (1 + _Z**2 / size)
    half = _Z / (1 + _Z**2 / size) * sqrt(share * (1 - share) / size + _Z**2 / (4 * size**2))
    return max(0.0, centre - half), min(1.0, centre + half)
