"""What a ranked list is worth when entries share a score, summed without ranking them one by one."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Scores = NDArray[np.floating[Any]]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Bools = NDArray[np.bool_]

_DIRECT = 32
"""Harmonic numbers up to this one come from a table; beyond it four terms of the series err by less than 1e-17."""
_HARMONIC: Floats = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, _DIRECT + 1))])


class Ties(Enum):
    """In which order entries with the same score stand."""

    PESSIMISTIC = "negatives first"
    GROUPED = "all at once, as one threshold: scikit-learn's average precision"
    EXPECTED = "the mean over every order"


@dataclass(frozen=True)
class TiedGroups:
    """The distinct scores that positives have (U,): entries of each list that have this score, entries above it."""

    positives: Counts
    negatives: Counts
    positives_above: Counts
    negatives_above: Counts

    @property
    def above(self) -> Counts:
        """Entries of either kind above each group (U,)."""
        return self.positives_above + self.negatives_above

    @property
    def entries(self) -> Counts:
        """Entries of either kind in each group (U,)."""
        return self.positives + self.negatives


def tied_groups(positives: Counts, negatives_above: Counts, negatives_reaching: Counts) -> TiedGroups:
    """Counts at the distinct scores of one list's positives, best first (U,) -> groups.

    positives have the score, negatives_above are above it, negatives_reaching at or above it.
    """
    positives_above = np.cumsum(positives) - positives
    return TiedGroups(positives, negatives_reaching - negatives_above, positives_above, negatives_above)


def groups_of(positives: Scores, negatives: Scores) -> TiedGroups:
    """Scores of one list's positives (P,) and negatives (N,), in any order -> groups.

    ValueError without a positive, where no metric of ranks is defined.
    """
    if not len(positives):
        raise ValueError("undefined without a positive: no entry is relevant")
    distinct, counts = np.unique(positives, return_counts=True)
    contenders = np.sort(negatives[negatives >= distinct[0]])
    reaching = len(contenders) - np.searchsorted(contenders, distinct, side="left")
    above = len(contenders) - np.searchsorted(contenders, distinct, side="right")
    return tied_groups(*(np.asarray(each[::-1], np.int64) for each in (counts, above, reaching)))


def precisions(groups: TiedGroups, ties: Ties, places: ArrayLike | None = None) -> Floats:
    """Sum of the precision at each positive of each group (U,); with places, only at ranks up to that many.

    The sums over ranks are harmonic numbers, so equal scores by the million cost no more than one.
    ValueError for places with Ties.GROUPED: a cut through a tied group leaves no group.
    """
    if ties is Ties.GROUPED:
        _refuse_cut(places)
        above = groups.positives_above + groups.positives
        return np.asarray(groups.positives * (above / (groups.above + groups.entries)), np.float64)
    if ties is Ties.PESSIMISTIC:
        ahead = groups.negatives_above + groups.negatives
        taken = _taken(groups, ties, places)
        behind: Floats = taken - ahead * harmonic_steps(groups.positives_above + ahead, taken)
        return behind
    # The entry at place j of a group is a positive in p of t orders, with (j-1)(p-1)/(t-1) more before it on average.
    taken = _taken(groups, ties, places)
    slope = (groups.positives - 1) / np.maximum(groups.entries - 1, 1)
    rest = groups.positives_above + 1 - slope - slope * groups.above
    total = slope * taken + rest * harmonic_steps(groups.above, taken)
    expected: Floats = groups.positives / groups.entries * total
    return expected


def hits(groups: TiedGroups, ties: Ties, places: ArrayLike) -> Floats:
    """Positives of each group at ranks up to places (U,), the mean of them with Ties.EXPECTED.

    ValueError with Ties.GROUPED: a cut through a tied group leaves no group.
    """
    taken = _taken(groups, ties, places).astype(np.float64)
    return taken if ties is Ties.PESSIMISTIC else taken * (groups.positives / groups.entries)


def harmonic_steps(start: Counts, terms: Counts) -> Floats:
    """1/(start+1) + ... + 1/(start+terms), elementwise, to 2e-14 of it (Euler-Maclaurin about start + 1/2).

    A single term, the rule in a list without ties, is exact.
    """
    end = start + terms
    early = _HARMONIC[np.minimum(end, _DIRECT)] - _HARMONIC[np.minimum(start, _DIRECT)]
    low, high = np.maximum(start, _DIRECT) + 0.5, np.maximum(end, _DIRECT) + 0.5
    total = early + np.log1p((high - low) / low) + _series(high) - _series(low)
    return np.where(terms == 1, 1 / (start + 1), total)


def _series(x: Floats) -> Floats:
    square = 1 / (x * x)
    series: Floats = square * (1 / 24 - square * (7 / 960 - square * (31 / 8064 - square * (127 / 30720))))
    return series


def _taken(groups: TiedGroups, ties: Ties, places: ArrayLike | None) -> Counts:
    """How many of a group stand at ranks up to places: of all its entries, or of positives behind tied negatives."""
    if ties is Ties.PESSIMISTIC:
        most, ahead = groups.positives, groups.above + groups.negatives
    elif ties is Ties.EXPECTED:
        most, ahead = groups.entries, groups.above
    else:
        _refuse_cut(places)
        return groups.positives
    return most if places is None else np.clip(np.asarray(places) - ahead, 0, most)


def _refuse_cut(places: ArrayLike | None) -> None:
    if places is not None:
        raise ValueError(f"{Ties.GROUPED} is not defined for the best k: choose another of {list(Ties)}")
