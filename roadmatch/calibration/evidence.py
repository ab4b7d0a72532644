"""What thresholds reach on searches that took no part in fitting them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """Searches of one group of units among themselves, judged at a threshold, by unit."""

    searches: Floats  # (U,) of the units that are there; none of a distractor's
    right: Floats  # (U,) of the searches whose unit is there: best accepted image is of that unit
    wrong: Floats  # (U,) of the same: best accepted image is of another unit
    false: Floats  # (U,) of the searches whose unit is held out, and of distractors: answered `match`
    pairs: Floats  # (U, U) accepted pairs of a query's unit with another unit
    distractors: Floats  # (U,) searches of units of which nothing is stored

    @property
    def is_stored(self) -> NDArray[np.bool_]:
        """(U,) which units are there."""
        return self.searches > 0

    @property
    def without_match(self) -> Floats:
        """(U,) searches without a match: those of the others are asked once more, with their unit held out."""
        return self.searches + self.distractors

    @staticmethod
    def of(scored: Scored, threshold: float) -> "Judged":
        """scored with U units -> judged; a score at the threshold is accepted."""
        best = scored.scores.argmax(axis=1)
        accepted = scored.scores.max(axis=1) >= threshold
        is_right = scored.gallery_unit[best] == scored.query_unit
        rows, columns = np.nonzero(scored.scores >= threshold)
        pairs = np.zeros((scored.units, scored.units))
        np.add.at(pairs, (scored.query_unit[rows], scored.gallery_unit[columns]), 1)
        np.fill_diagonal(pairs, 0)

        is_there = scored.is_stored[scored.query_unit]

        def by_unit(outcome: NDArray[np.bool_]) -> Floats:
            return np.bincount(scored.query_unit, outcome, minlength=scored.units).astype(np.float64)

        return Judged(
            by_unit(is_there),
            by_unit(accepted & is_right),
            by_unit(accepted & ~is_right & is_there),
            by_unit(other_scores(scored) >= threshold),
            pairs,
            by_unit(~is_there),
        )


@dataclass(frozen=True)
class Rates:
    """Rates per search over all groups, with 95 % bounds from a bootstrap over units."""

    recall: Rate
    false_match_rate: Rate
    precision: Rate
    with_match: int
    without_match: int
    distractors: int
    distractor_match_rate: Rate | None
    """The false-match rate of distractors alone; None without any."""


def rates(
    groups: Sequence[Judged],
    match_share: float,
    random: np.random.Generator,
    resamples: int,
    threshold_variance: float = 0.0,
) -> Rates:
    """Pool the groups, distractors and held-out searches alike. Units are drawn anew within each group, for queries and
    gallery alike.

    The bootstrap gives the variance; Wilson's interval at the sample size of that variance gives the bounds, so that a
    rate of 0 in n units has the upper bound it ought to have. A resampled gallery holds fewer different images, so the
    false matches of a resample follow its accepted pairs, which keep their mean, and not its searches.
    `threshold_variance` is added to the recall's: folds are judged at thresholds a little other than the shipped one.
    """
    units, stored = sum(len(group.searches) for group in groups), sum(int(group.is_stored.sum()) for group in groups)
    whole = _Sums.over(groups, lambda group: np.ones((1, len(group.searches))))
    drawn = _Sums.over(groups, lambda group: bootstrap_of(group.is_stored, resamples, random))
    per_pair = float(whole.false[0] / whole.pairs[0]) if whole.pairs[0] else 0.0
    drawn_false = _without_double_draws(
        per_pair * drawn.pairs / drawn.without_match, groups, per_pair / float(whole.without_match[0])
    )
    found = _rate(whole.share(whole.right), float(np.var(drawn.right / drawn.searches)) + threshold_variance, stored)
    mistakes = _rate(whole.share(whole.wrong), float(np.var(drawn.wrong / drawn.searches)), stored, rare=True)
    false_rate = float(whole.false[0] / whole.without_match[0])
    false_matches = _rate(false_rate, float(np.var(drawn_false)), units, rare=True)
    return Rates(
        found,
        false_matches,
        _precision(found, mistakes, false_matches, match_share),
        int(whole.searches[0]),
        int(whole.without_match[0]),
        units - stored,
        _of_distractors(groups),
    )


def bootstrap(units: int, resamples: int, random: np.random.Generator) -> Floats:
    """How often each unit is drawn in each resample (B, U)."""
    return random.multinomial(units, np.full(units, 1 / units), size=resamples).astype(np.float64)


def bootstrap_of(is_stored: NDArray[np.bool_], resamples: int, random: np.random.Generator) -> Floats:
    """The same, with as many stored units and as many distractors in each resample as there are."""
    drawn = np.empty((resamples, len(is_stored)))
    for kind in (is_stored, ~is_stored):
        if kind.any():
            drawn[:, kind] = bootstrap(int(kind.sum()), resamples, random)
    return drawn


def folds(units: int, count: int, random: np.random.Generator) -> list[Units]:
    """The units in so many groups of like size, drawn at random."""
    return [np.sort(group) for group in np.array_split(random.permutation(units), count)]


@dataclass(frozen=True)
class _Sums:
    """Sums over all groups, for each resample (B,)."""

    searches: Floats
    right: Floats
    wrong: Floats
    without_match: Floats
    false: Floats
    pairs: Floats

    @staticmethod
    def over(groups: Sequence[Judged], weights_of: Callable[[Judged], Floats]) -> "_Sums":
        """weights_of: a group of U units -> (B, U) how often each is drawn."""
        return _Sums(*np.sum([_weighted(group, weights_of(group)) for group in groups], axis=0))

    def share(self, outcome: Floats) -> float:
        """Of the searches with a match, in the first resample."""
        return float(outcome[0] / self.searches[0])


def _weighted(group: Judged, weights: Floats) -> Floats:
    """weights (B, U) -> (6, B) sums in the order of _Sums."""
    by_unit = np.stack([group.searches, group.right, group.wrong, group.without_match, group.false])
    pairs = np.einsum("bu,uv,bv->b", weights, group.pairs, weights, optimize=True)
    return np.vstack([by_unit @ weights.T, pairs])


def _of_distractors(groups: Sequence[Judged]) -> Rate | None:
    """Wilson's bounds at the number of their units, of which each is one event at best."""
    asked = sum(float(group.distractors.sum()) for group in groups)
    if not asked:
        return None
    matched = sum(float(group.false[~group.is_stored].sum()) for group in groups)
    return _rate(matched / asked, 0.0, sum(int((~group.is_stored).sum()) for group in groups))


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
