"""How well a threshold on the best score tells queries of known identities from those of unknown ones."""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roadmatch.metrics.ties import Bools, Floats

Ints = NDArray[np.int64]

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Figures:
    """Shares in [0, 1]."""

    auroc: float  # a known query scores higher than an unknown one; equal scores count half
    tnr: float  # unknown queries that are rejected
    baks: float  # mean over known identities of their queries that are accepted with the right identity
    baus: float  # mean over unknown identities of their queries that are rejected


@dataclass(frozen=True)
class OpenSet:
    """Figures at each data set's own threshold: over the queries of all data sets, and the data sets' mean."""

    pooled: Figures
    mean: Figures
    data_sets: tuple[str, ...]  # ascending
    thresholds: tuple[float, ...]  # of each data set
    figures: tuple[Figures, ...]  # of each data set


@dataclass(frozen=True)
class _Queries:
    score: Floats
    known: Bools
    right: Bools
    identity: Ints
    threshold: Floats

    def only(self, which: Bools) -> "_Queries":
        return _Queries(
            self.score[which], self.known[which], self.right[which], self.identity[which], self.threshold[which]
        )

    def figures(self) -> Figures:
        accepted = self.score >= self.threshold
        return Figures(
            auroc(self.score[self.known], self.score[~self.known]),
            float((~accepted[~self.known]).mean()),
            _balanced(accepted[self.known] & self.right[self.known], self.identity[self.known]),
            _balanced(~accepted[~self.known], self.identity[~self.known]),
        )


def open_set(
    score: Floats,
    predicted: ArrayLike,
    identity: ArrayLike,
    known: Bools,
    data_set: ArrayLike | None = None,
    *,
    true_positive_rate: float = 0.95,
) -> OpenSet:
    """score (Q,) of the best gallery image, predicted (Q,) its identity, identity (Q,), known (Q,), data_set (Q,).

    Each data set has the highest threshold that accepts so many of its known queries, right or wrong, and is judged at
    it: in-sample, as WildlifeReID-10k defines it. Identities of different data sets are different. Pooled AUROC ranks
    the raw scores of all data sets in one list. ValueError for a data set that lacks known or unknown queries, and for
    an identity that is both.
    """
    score, known = np.asarray(score, np.float64), np.asarray(known, bool)
    predicted, identity = np.asarray(predicted), np.asarray(identity)
    names, which = np.unique(np.asarray([""] * len(score) if data_set is None else data_set), return_inverse=True)
    if not len(score) == len(predicted) == len(identity) == len(known) == len(which):
        raise ValueError("score, predicted, identity, known and data_set must be of one length")
    if not np.isfinite(score).all():
        raise ValueError("a score is not a number")
    number = np.unique(np.stack([which, np.unique(identity, return_inverse=True)[1]]), axis=1, return_inverse=True)[1]
    if both := set(number[known].tolist()) & set(number[~known].tolist()):
        raise ValueError(f"identity {identity[number == min(both)].tolist()[0]!r} is both known and unknown")
    thresholds: list[float] = []
    for at, name in enumerate(names.tolist()):
        here = which == at
        if known[here].all() or not known[here].any():
            raise ValueError(
                f"open-set figures are undefined for data set {name!r}: it needs known and unknown queries"
            )
        thresholds.append(threshold_at(score[here & known], true_positive_rate))
    queries = _Queries(score, known, predicted == identity, number, np.array(thresholds)[which])
    figures = tuple(queries.only(which == at).figures() for at in range(len(names)))
    return OpenSet(queries.figures(), _mean(figures), tuple(map(str, names.tolist())), tuple(thresholds), figures)


def auroc(known: Floats, unknown: Floats) -> float:
    """known (Q,), unknown (Q,) scores -> share of the pairs in which the known one is higher; equal ones count half."""
    if len(known) == 0 or len(unknown) == 0:
        raise ValueError("AUROC is undefined without known and unknown queries")
    order = np.sort(unknown)
    below = np.searchsorted(order, known, "left") + np.searchsorted(order, known, "right")
    return float(below.mean() / (2 * len(unknown)))


def threshold_at(known: Floats, true_positive_rate: float) -> float:
    """known (Q,) scores -> the highest threshold that at least this share of them reaches."""
    if not 0 < true_positive_rate <= 1:
        raise ValueError(f"true positive rate must lie in (0, 1], not {true_positive_rate}")
    needed = ceil(true_positive_rate * len(known) - _ROUNDING)
    return float(-np.sort(-known)[needed - 1])


def _balanced(right: Bools, identity: Ints) -> float:
    which = np.unique(identity, return_inverse=True)[1]
    return float((np.bincount(which, right) / np.bincount(which)).mean())


def _mean(figures: tuple[Figures, ...]) -> Figures:
    def over(name: str) -> float:
        return float(np.mean([getattr(one, name) for one in figures]))

    return Figures(over("auroc"), over("tnr"), over("baks"), over("baus"))
