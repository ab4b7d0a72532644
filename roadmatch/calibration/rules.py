"""Rules and the threshold that each one takes for a gallery of a given size."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roadmatch.calibration.searches import Floats, Scored
from roadmatch.calibration.tail import Tail, fit_tail, heavier

_ONE_SIDED = 0.05
_SOME = 0.01
"""A threshold that finds a lesser share of the matches is of no use, however sure."""
_TOO_MANY = 0.5
"""A threshold at which most searches without a match are answered `match` decides nothing."""
GALLERY_STEPS = 31
"""Thresholds are fitted for galleries of 1, 2, 4 ... 2**30 items."""


@dataclass(frozen=True)
class Fit:
    """What rules are applied to: the tail of non-matching pairs and the scores of matches, on one grid."""

    tail: Tail
    found: Floats  # (T,) share of the searches whose unit is there that give it at least this score
    found_low: Floats  # (T,) its lower 95 % bound
    units: int

    def found_at(self, threshold: float) -> float:
        """Share of the searches whose unit is there that reach the threshold."""
        at = int(np.searchsorted(self.tail.grid, threshold))
        return float(self.found[at]) if at < len(self.found) else 0.0

    @staticmethod
    def of(scored: Scored, weights: Floats) -> "Fit":
        """scored with U units, weights (B, U) bootstrap counts -> fit.

        The tail is the heavier of those with and without distractors: some of a kind that is mistaken less would water
        the promise down.
        """
        tail = fit_tail(scored, weights)
        if scored.stored < scored.units:
            scored, weights = scored.held_out, weights[:, scored.is_stored]
            tail = heavier(fit_tail(scored, weights), tail)
        own = own_scores(scored)
        steps = np.searchsorted(tail.grid, own, side="right")  # how many grid scores each query reaches
        width = len(tail.grid) + 1
        counts = np.bincount(scored.query_unit * width + steps, minlength=scored.units * width).reshape(-1, width)
        by_unit = np.cumsum(counts[:, :0:-1], axis=1)[:, ::-1]  # (U, T) queries of each unit at or above each score
        queries = np.bincount(scored.query_unit, minlength=scored.units)
        resampled = (weights @ by_unit) / (weights @ queries)[:, None]
        return Fit(tail, by_unit.sum(axis=0) / queries.sum(), np.quantile(resampled, _ONE_SIDED, axis=0), scored.units)


def own_scores(scored: Scored) -> Floats:
    """Score of each query with the best gallery image of its own unit (Q,)."""
    own = scored.query_unit[:, None] == scored.gallery_unit
    return np.asarray(np.where(own, scored.scores, -np.inf).max(axis=1))


def other_scores(scored: Scored) -> Floats:
    """Score of each query with the best gallery image of another unit (Q,)."""
    own = scored.query_unit[:, None] == scored.gallery_unit
    return np.asarray(np.where(own, -np.inf, scored.scores).max(axis=1))


@dataclass(frozen=True)
class Rule:
    """A named condition on the rates, with the thresholds that fulfil it."""

    name: str
    thresholds: Callable[[Fit], tuple[float, ...]]
    """The threshold for galleries of 1, 2, 4 ... items, as far as there is one."""
    false_match_rate: float | None = None
    match_share: float | None = None

    def least_rate(self, units: int) -> float | None:
        """The least false-match rate that so many independent searches without a match can show, if this is less."""
        if self.false_match_rate is None or self.false_match_rate >= 3 / units:
            return None
        return 3 / units

    def shown_up_to(self, fit: Fit) -> int:
        """The largest gallery, a power of two, whose threshold asks for no lesser rate than three pairs show."""
        steps = np.searchsorted(fit.tail.grid, self.thresholds(fit))
        shown = fit.tail.upper[np.minimum(steps, len(fit.tail.grid) - 1)] >= fit.tail.least_shown
        steps_shown = len(shown) if shown.all() else int(np.argmin(shown))
        return 2 ** (steps_shown - 1) if steps_shown else 0


def false_match_rate(rate: float) -> Rule:
    """At most this share of the searches without a match is answered `match`, by the upper 95 % bound."""

    def thresholds(fit: Fit) -> tuple[float, ...]:
        return tuple(_first(fit, fit.tail.upper <= wanted) for wanted in _pair_rate(rate))

    return Rule(f"false_match_rate<={rate:g}", thresholds, false_match_rate=rate)


def precision(least: float, match_share: float) -> Rule:
    """At least this share of `match` answers is right, by the lower 95 % bound, at a stated share of matches.

    The scan goes down from the surest threshold; galleries in which not even that one is sure enough get none.
    """

    def thresholds(fit: Fit) -> tuple[float, ...]:
        chosen: list[float] = []
        some = int(np.count_nonzero(fit.found_low >= _SOME))
        for size in _SIZES if some else ():
            right, wrong = _answers(fit.found_low[:some], _per_search(fit.tail.upper[:some], size), match_share)
            share = right / (right + wrong)
            surest = int(np.argmax(share))
            if share[surest] < least:
                break  # nor in any larger gallery
            failures = np.flatnonzero(share[:surest] < least)
            chosen.append(float(fit.tail.grid[failures[-1] + 1 if len(failures) else 0]))
        return tuple(chosen)

    return Rule(f"precision>={least:g}", thresholds, match_share=match_share)


def max_f1(match_share: float) -> Rule:
    """The highest F1 of the decision at a stated share of matches; an estimate, no bound."""

    def thresholds(fit: Fit) -> tuple[float, ...]:
        chosen: list[float] = []
        for size in _SIZES:
            right, wrong = _answers(fit.found, _per_search(fit.tail.rate, size), match_share)
            best = int(np.argmax(2 * right / (right + wrong + match_share)))
            if _per_search(fit.tail.rate[best], size) > _TOO_MANY:
                break  # in so large a gallery the best F1 is that of accepting nearly everything
            chosen.append(float(fit.tail.grid[best]))
        return tuple(chosen)

    return Rule("max_f1", thresholds, match_share=match_share)


_SIZES = 2.0 ** np.arange(GALLERY_STEPS)


def _pair_rate(rate: float) -> Floats:
    """The share of pairs that gives this rate per search: 1-(1-f)^N = rate, for every gallery size."""
    return np.asarray(-np.expm1(np.log1p(-rate) / _SIZES))


def _per_search(pair_rate: Floats | float, size: float) -> Floats:
    return np.asarray(-np.expm1(size * np.log1p(-np.minimum(pair_rate, 1 - 1e-12))))


def _answers(found: Floats, false_match_rate: Floats, match_share: float) -> tuple[Floats, Floats]:
    """Shares of all searches that are answered `match` rightly and wrongly; a missed match may be mistaken, too."""
    right = match_share * found
    return right, (match_share * (1 - found) + 1 - match_share) * false_match_rate


def _first(fit: Fit, holds: Floats) -> float:
    if not holds.any():
        raise ValueError("no threshold fulfils the rule, not even one above every score: is a score not a number?")
    return float(fit.tail.grid[int(np.argmax(holds))])
