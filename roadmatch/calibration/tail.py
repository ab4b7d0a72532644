"""The tail of the non-matching pairs: how often two different things score this high, with its upper bound."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roadmatch.calibration.searches import Floats, Scored
from roadmatch.scoring import DECIMALS

_KEPT = 0.06
"""Share of the non-matching pairs, the highest, that the tail describes."""
_STEPS = 400
_ANCHOR_PAIRS = 60
"""Beyond the score that so many pairs of units reach, the tail goes on by its form."""
_LONE = 3**0.5
_LEAST_RATE = 1e-12
_LEAST_DECAY = 1e-3
_ONE_SIDED = 0.95


@dataclass(frozen=True)
class Tail:
    """Share of non-matching pairs at or above each score of an ascending grid, which ends above the highest score."""

    grid: Floats  # (T,)
    rate: Floats  # (T,) estimate
    upper: Floats  # (T,) its upper 95 % bound, at no score below that at a stricter one
    least_shown: float  # the least rate that so many independent pairs of units can show


def fit_tail(scored: Scored, weights: Floats) -> Tail:
    """scored with U units, weights (B, U) bootstrap counts of units -> the tail.

    Units are drawn for queries and gallery alike, so a pair counts by the product of its units' weights. Up to the
    anchor pairs are counted. Beyond it few pairs of units are left, and the tail goes on from the rate at the anchor as
    a power of the distance to the ceiling (a generalised Pareto tail with a known end point; its exponent is the
    reciprocal of the mean of -log(1 - y), y being the share of the way to the ceiling). An exponential tail, which
    knows no ceiling, is several times too high where few pairs are left: benchmarks.tail.
    Every resample has its own rate and exponent; the bound is their quantile. Beyond the anchor the few pairs share no
    units, and a lone pair drawn by both of its units varies three times as much as one that is counted (the pigeonhole
    bootstrap, Owen, 2007): the exponent's deviations are divided by the root of three.
    """
    pairs = _HighestPairs.of(scored)
    everything = np.ones((1, scored.units))
    at = max(int(np.searchsorted(-pairs.unit_pairs(scored.units), -_ANCHOR_PAIRS, side="right")) - 1, 0)
    anchor = pairs.grid[at]
    room = max(scored.ceiling - anchor, 10**-DECIMALS)
    counted, resampled = pairs.rates(everything)[0], pairs.rates(weights)
    decay = float(pairs.mean_decay(anchor, room, everything)[0])
    drawn_decays = np.nan_to_num(pairs.mean_decay(anchor, room, weights), nan=decay)
    decays = decay + (drawn_decays - decay) / _LONE

    steps = np.geomspace(1, (_LEAST_RATE / counted[at]) ** decay, _STEPS)  # of the way to the ceiling
    beyond = np.unique(np.round(np.append(anchor + room * (1 - steps), scored.ceiling + 10**-DECIMALS), DECIMALS))
    left = np.clip(1 - (beyond - anchor) / room, 0, 1)
    grid = np.concatenate([pairs.grid[:at], beyond])
    rate = np.concatenate([counted[:at], counted[at] * left ** (1 / decay)])
    drawn = np.hstack([resampled[:, :at], resampled[:, at, None] * left ** (1 / decays[:, None])])
    upper = np.maximum(np.quantile(drawn, _ONE_SIDED, axis=0), rate)
    return Tail(
        grid,
        np.maximum(rate, _LEAST_RATE),
        np.maximum.accumulate(upper[::-1])[::-1],
        3 / _unit_pairs(scored),
    )


def heavier(one: Tail, other: Tail) -> Tail:
    """The higher of two at each score that both describe."""
    grid = np.union1d(one.grid, other.grid)
    grid = grid[grid >= max(one.grid[0], other.grid[0])]
    ats = [(each, np.searchsorted(each.grid, grid, side="right") - 1) for each in (one, other)]
    return Tail(
        grid,
        np.max([each.rate[at] for each, at in ats], axis=0),
        np.max([each.upper[at] for each, at in ats], axis=0),
        max(one.least_shown, other.least_shown),
    )


def _unit_pairs(scored: Scored) -> float:
    """Pairs of different units, of which one at least is stored."""
    return scored.stored * ((scored.stored - 1) / 2 + scored.units - scored.stored)


@dataclass(frozen=True)
class _HighestPairs:
    """The highest-scoring non-matching pairs, as steps of a grid, by the units they join."""

    grid: Floats  # (T,) ascending
    scores: Floats  # (P,) descending
    step: NDArray[np.int64]  # (P,) the highest grid step that the pair reaches
    one: NDArray[np.int64]  # (P,) unit of the query
    other: NDArray[np.int64]  # (P,) unit of the gallery image
    queries: Floats  # (U,) queries of each unit
    stored: Floats  # (U,) gallery images of each unit

    @staticmethod
    def of(scored: Scored) -> "_HighestPairs":
        different = scored.query_unit[:, None] != scored.gallery_unit
        rows, columns = np.nonzero(different)
        values = scored.scores[rows, columns]
        cut = len(values) - max(1, int(_KEPT * len(values)))
        least = np.partition(values, cut)[cut]
        best = np.flatnonzero(values >= least)  # ties at the cut are kept, or the rate there would be too low
        best = best[np.argsort(-values[best], kind="stable")]
        values, kept = values[best], len(best)
        ranks = np.unique(np.geomspace(1, kept, _STEPS).astype(np.int64)) - 1
        grid = np.unique(values[ranks])
        return _HighestPairs(
            grid,
            values,
            np.searchsorted(grid, values, side="right") - 1,
            scored.query_unit[rows[best]],
            scored.gallery_unit[columns[best]],
            np.bincount(scored.query_unit, minlength=scored.units).astype(np.float64),
            np.bincount(scored.gallery_unit, minlength=scored.units).astype(np.float64),
        )

    def rates(self, weights: Floats) -> Floats:
        """weights (B, U) -> (B, T) share of the weighted pairs of different units at or above each grid score."""
        rates = np.empty((len(weights), len(self.grid)))
        for row, weight in enumerate(weights):
            at_step = np.bincount(self.step, weight[self.one] * weight[self.other], minlength=len(self.grid))
            own = np.sum(weight**2 * self.queries * self.stored)
            everything = np.dot(weight, self.queries) * np.dot(weight, self.stored) - own
            rates[row] = np.cumsum(at_step[::-1])[::-1] / everything
        return rates

    def unit_pairs(self, units: int) -> Floats:
        """(T,) how many unordered pairs of units have a pair at or above each grid score."""
        joined = np.minimum(self.one, self.other) * units + np.maximum(self.one, self.other)
        _, first = np.unique(joined, return_index=True)  # the scores descend: the first is the pair's highest
        at_step = np.bincount(self.step[first], minlength=len(self.grid))
        return np.cumsum(at_step[::-1])[::-1].astype(np.float64)

    def mean_decay(self, anchor: float, room: float, weights: Floats) -> Floats:
        """weights (B, U) -> (B,) mean of -log(1 - y) over the pairs above the anchor, y their share of the room."""
        above = int(np.searchsorted(-self.scores, -anchor, side="right"))
        products = weights[:, self.one[:above]] * weights[:, self.other[:above]]
        share = np.clip((self.scores[:above] - anchor) / room, 0, 1 - 1e-9)
        with np.errstate(invalid="ignore"):
            mean = products @ -np.log1p(-share) / products.sum(axis=1)
        return np.asarray(np.maximum(mean, _LEAST_DECAY), np.float64)
