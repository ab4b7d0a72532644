"""One threshold for all queries, fitted on half of the classes and judged on the other half."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from hashlib import sha256
from operator import add

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roadmatch.metrics.ties import Bools, Floats, Scores

Ints = NDArray[np.int64]
Rows = Callable[[Ints], tuple[Scores, Bools]]

_PAIRS_AT_ONCE = 1 << 21
_ROUNDING = 2e-3
"""Embeddings that were kept in half precision are off unit length by so much."""


@dataclass(frozen=True)
class Grid:
    """Equally spaced thresholds; a similarity at a threshold is accepted. Scores of another range need another grid."""

    low: float = -1.0
    high: float = 1.0
    count: int = 4001

    def __post_init__(self) -> None:
        if self.count < 2 or not self.low < self.high:
            raise ValueError(f"a grid needs two thresholds or more in ascending order, not {self}")

    @property
    def values(self) -> Floats:
        """The thresholds, ascending (T,)."""
        whole = self.count - 1
        return (self.low * whole + (self.high - self.low) * np.arange(self.count)) / whole  # 0.9 is then 0.9

    def steps(self, similarity: Scores) -> Ints:
        """similarity of any shape -> index of the highest threshold that it reaches. ValueError outside the grid."""
        least, most = float(similarity.min()), float(similarity.max())
        if not (least >= self.low - _ROUNDING and most <= self.high + _ROUNDING):
            raise ValueError(f"similarities from {least} to {most} lie outside the grid {self.low} to {self.high}")
        values = self.values
        exact = similarity.astype(np.float64)
        guess = ((exact - self.low) * ((self.count - 1) / (self.high - self.low))).astype(np.int64)
        guess = np.clip(guess, 0, self.count - 1)
        guess -= exact < values[guess]  # the product may be one step off by rounding
        guess += exact >= np.append(values, np.inf)[guess + 1]
        return np.maximum(guess, 0)


GRID = Grid()


class Fit(Enum):
    """Which F1 the shared threshold maximises on the fitting classes."""

    PER_QUERY = "mean of the queries' F1"
    POOLED = "F1 of all pairs"


@dataclass(frozen=True)
class Curves:
    """Counts and F1 of a group of queries at each threshold of a grid; groups add up."""

    true: Ints  # (T,) accepted relevant pairs
    accepted: Ints  # (T,)
    f1: Floats  # (T,) sum over the queries that have a relevant item
    best_f1: float  # sum over the same of each one's highest
    relevant: int  # pairs
    queries: int  # with a relevant item
    without: int  # queries without one: F1 is undefined for them, their accepted pairs count

    @staticmethod
    def of(steps: Ints, relevant: Bools, other: Bools, count: int) -> "Curves":
        """steps (Q, N) on a grid of so many, relevant (Q, N), other (Q, N) false where a pair is left out -> curves."""
        accepted = _reaching(steps, other, count)
        true = _reaching(steps, relevant & other, count)
        some = true[:, 0] > 0
        f1 = 2 * true[some] / (accepted[some] + true[some, :1])
        best = float(f1.max(axis=1).sum())
        queries = int(some.sum())
        return Curves(
            true.sum(axis=0),
            accepted.sum(axis=0),
            f1.sum(axis=0),
            best,
            int(true[:, 0].sum()),
            queries,
            len(some) - queries,
        )

    def __add__(self, more: "Curves") -> "Curves":
        return Curves(
            self.true + more.true,
            self.accepted + more.accepted,
            self.f1 + more.f1,
            self.best_f1 + more.best_f1,
            self.relevant + more.relevant,
            self.queries + more.queries,
            self.without + more.without,
        )

    def precision(self, at: int) -> float | None:
        """Pooled precision at a step of the grid; none where nothing is accepted."""
        return float(self.true[at] / self.accepted[at]) if self.accepted[at] else None

    def step_of_highest_f1(self, fit: Fit) -> int:
        """The lowest of the thresholds with the highest F1."""
        pooled = 2 * self.true / (self.accepted + self.relevant)
        return int(np.argmax(self.f1 if fit is Fit.PER_QUERY else pooled))

    def step_of_precision(self, least: float) -> int | None:
        """The lowest threshold with at least this pooled precision, which has the highest recall; it may not exist.

        Precision is not monotone: a higher threshold may fall short again.
        """
        reached = self.true / np.maximum(self.accepted, 1) >= least
        return int(np.argmax(reached)) if reached.any() else None


@dataclass(frozen=True)
class SharedThreshold:
    """What one threshold reaches on the evaluation classes."""

    threshold_f1: float
    f1g: float  # mean of the queries' F1 at that threshold
    f1q: float  # the same with each query's own best threshold
    least_precision: float
    threshold_precision: float | None  # none: no threshold has the precision on the fitting classes
    recall_at_precision: float  # of all relevant pairs; 0 where there is no threshold
    precision_reached: float | None  # at that threshold on the evaluation classes; none where nothing is accepted
    evaluation_queries: int
    evaluation_without: int  # queries without a relevant item: left out of F1, their accepted pairs count
    fitting_queries: int
    fitting_without: int


def fitting_half(classes: ArrayLike, seed: int = 0) -> Bools:
    """classes (N,) numbers or words -> (N,) true where the class is for fitting.

    Classes are ordered by a seeded hash of their name, the first half of them fits: every model sees the same split of
    the same classes. ValueError for less than two classes.
    """
    names, which = np.unique(np.asarray(classes), return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"{len(names)} classes cannot be split in halves")
    hashed = [sha256(f"{seed}:{name}".encode()).digest() for name in names.tolist()]
    fits = np.zeros(len(names), bool)
    fits[sorted(range(len(names)), key=hashed.__getitem__)[: len(names) // 2]] = True
    return fits[which]


def shared_threshold(
    embeddings: Scores,
    classes: ArrayLike,
    *,
    precision: float = 0.9,
    fit: Fit = Fit.PER_QUERY,
    grid: Grid = GRID,
    seed: int = 0,
) -> SharedThreshold:
    """embeddings (N, D) unit length, classes (N,) -> F1g, F1q, R@P of one threshold for all ("Thresholding protocol").

    Each image asks all the others, whatever their half, so that both halves see the gallery that is served: precision
    hangs on its size ("Global Average Precision for Representation Learning", C.3). Rows are worked on in blocks.
    ValueError where a half has no relevant pair.
    """
    single = np.promote_types(embeddings.dtype, np.float32)  # half types are too coarse for similarities
    embeddings = embeddings.astype(single, copy=False)
    number = np.unique(np.asarray(classes), return_inverse=True)[1]

    def rows(which: Ints) -> tuple[Scores, Bools]:
        return embeddings[which] @ embeddings.T, number[which, None] == number

    own = np.arange(len(embeddings))
    return _judged(rows, fitting_half(classes, seed), own, len(embeddings), precision, fit, grid)


def shared_threshold_of_matrix(
    similarity: Scores,
    relevant: Bools,
    query_classes: ArrayLike,
    *,
    own: Ints | None = None,
    precision: float = 0.9,
    fit: Fit = Fit.PER_QUERY,
    grid: Grid = GRID,
    seed: int = 0,
) -> SharedThreshold:
    """similarity (Q, N), relevant (Q, N), query_classes (Q,), own (Q,) column of the query itself -> as above."""
    if similarity.shape != relevant.shape:
        raise ValueError(f"similarity is {similarity.shape} and relevant {relevant.shape}: they must be alike")
    if own is not None and (len(own) != len(similarity) or own.min(initial=0) < 0):
        raise ValueError(f"own must name a column for each of the {len(similarity)} queries")

    def rows(which: Ints) -> tuple[Scores, Bools]:
        return similarity[which], relevant[which]

    return _judged(rows, fitting_half(query_classes, seed), own, similarity.shape[1], precision, fit, grid)


def _judged(
    rows: Rows, fits: Bools, own: Ints | None, width: int, precision: float, fit: Fit, grid: Grid
) -> SharedThreshold:
    if not 0 < precision <= 1:
        raise ValueError(f"precision must lie in (0, 1], not {precision}")
    fitting = _curves(rows, np.flatnonzero(fits), own, width, grid)
    evaluation = _curves(rows, np.flatnonzero(~fits), own, width, grid)
    for half, what in ((fitting, "fitting"), (evaluation, "evaluation")):
        if half.relevant == 0:
            raise ValueError(f"F1 is undefined: the queries of the {what} classes have no relevant item")
    best, sure = fitting.step_of_highest_f1(fit), fitting.step_of_precision(precision)
    return SharedThreshold(
        threshold_f1=float(grid.values[best]),
        f1g=float(evaluation.f1[best] / evaluation.queries),
        f1q=evaluation.best_f1 / evaluation.queries,
        least_precision=precision,
        threshold_precision=None if sure is None else float(grid.values[sure]),
        recall_at_precision=0.0 if sure is None else float(evaluation.true[sure] / evaluation.relevant),
        precision_reached=None if sure is None else evaluation.precision(sure),
        evaluation_queries=evaluation.queries,
        evaluation_without=evaluation.without,
        fitting_queries=fitting.queries,
        fitting_without=fitting.without,
    )


def _curves(rows: Rows, which: Ints, own: Ints | None, width: int, grid: Grid) -> Curves:
    def of(block: Ints) -> Curves:
        similarity, relevant = rows(block)
        other = np.ones(similarity.shape, bool)
        if own is not None:
            other[np.arange(len(block)), own[block]] = False
        steps = grid.steps(np.where(other, similarity, grid.low))
        return Curves.of(steps, relevant, other, grid.count)

    size = max(1, _PAIRS_AT_ONCE // max(width, grid.count))
    return reduce(add, (of(which[at : at + size]) for at in range(0, len(which), size)))


def _reaching(steps: Ints, counted: Bools, count: int) -> Ints:
    """steps (Q, N), counted (Q, N) -> (Q, T) how many counted pairs of each query reach each threshold."""
    of_query = steps + count * np.arange(len(steps))[:, None]
    at_step = np.bincount(of_query[counted], minlength=len(steps) * count).reshape(-1, count)
    return np.cumsum(at_step[:, ::-1], axis=1)[:, ::-1]
