"""The highest gAP that given per-query rankings allow, and how far a model is from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roadmatch.metrics.ties import Bools, Scores

Ints = NDArray[np.int64]

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Blocks:
    """Every positive with the negatives that stand directly before it in its query's list, best first."""

    query: Ints  # (P,) ascending
    length: Ints  # (P,) the positive and its negatives

    @staticmethod
    def of(similarity: Scores, relevant: Bools, own: Ints | None = None) -> "Blocks":
        """similarity (Q, N), relevant (Q, N), own (Q,) column of the query itself -> blocks; ties count against us.

        What follows a query's last positive is left out: it goes below every positive and costs nothing.
        """
        if similarity.shape != relevant.shape:
            raise ValueError(f"similarity is {similarity.shape} and relevant {relevant.shape}: they must be alike")
        if not np.isfinite(similarity).all():
            raise ValueError("a similarity is not a number")
        if own is not None and (len(own) != len(similarity) or own.min(initial=0) < 0):
            raise ValueError(f"own must name a column for each of the {len(similarity)} queries")
        rows = [
            _lengths(similarity[row], relevant[row], None if own is None else int(own[row]))
            for row in range(len(similarity))
        ]
        counts = [len(lengths) for lengths in rows]
        return Blocks(np.repeat(np.arange(len(rows)), counts), np.concatenate([*rows, np.zeros(0, np.int64)]))

    @staticmethod
    def joined(parts: Sequence["Blocks"], queries: Sequence[int]) -> "Blocks":
        """Blocks of consecutive groups of so many queries as one: for matrices that are not held whole."""
        first = np.cumsum([0, *queries])
        query = np.concatenate([part.query + at for part, at in zip(parts, first[:-1], strict=True)])
        return Blocks(query, np.concatenate([part.length for part in parts]))


@dataclass(frozen=True)
class Ceiling:
    """The true ceiling lies between `value`, which an interleaving of the lists reaches, and `bound`."""

    value: float
    bound: float

    def efficiency(self, gap: float) -> float:
        """gAP / C in [0, 1]. ValueError for a gAP above the bound: it is that of other lists or another tie policy."""
        return gap / self.above(gap)

    def above(self, gap: float) -> float:
        """C, or the gAP itself where it beats both of our orders: it is an interleaving, too."""
        if not 0 <= gap <= self.bound + _ROUNDING:
            raise ValueError(f"gAP {gap} lies outside 0 to the ceiling's bound {self.bound}")
        return max(self.value, gap)


@dataclass(frozen=True)
class Decomposition:
    """What a difference of two gAP comes from; the two parts add up to it."""

    rank: float
    consistency: float


def ceiling(similarity: Scores, relevant: Bools, own: Ints | None = None) -> Ceiling:
    """similarity (Q, N), relevant (Q, N), own (Q,) -> the highest gAP over all interleavings of the queries' lists.

    Each query keeps its own order ("Global Average Precision for Representation Learning", appendix "Computing C").
    ValueError without a relevant pair.
    """
    return ceiling_of(Blocks.of(similarity, relevant, own))


def ceiling_of(blocks: Blocks) -> Ceiling:
    """The better of Sidney's rule (1975) and the greedy schedule, with the bound that spreads segments evenly."""
    if len(blocks.length) == 0:
        raise ValueError("the ceiling is undefined without a relevant pair")
    start = np.flatnonzero(np.append(True, np.diff(blocks.query) != 0))
    segments, items = _segments(blocks.length, start)
    by_rule = np.argsort(-segments[_in_segment(segments)] / items[_in_segment(segments)], kind="stable")
    by_greed = np.argsort(_running_longest(blocks, start), kind="stable")
    best = max(_average_precision(blocks.length[order]) for order in (by_rule, by_greed))
    return Ceiling(best, _bound(segments, items))


def decompose(gap: float, ceiling: Ceiling, other_gap: float, other_ceiling: Ceiling) -> Decomposition:
    """gAP minus the other's gAP = mean efficiency * difference of C + mean C * difference of efficiency (Eq. 12)."""
    efficiency, other = ceiling.efficiency(gap), other_ceiling.efficiency(other_gap)
    highest, other_highest = ceiling.above(gap), other_ceiling.above(other_gap)
    return Decomposition(
        (efficiency + other) / 2 * (highest - other_highest), (highest + other_highest) / 2 * (efficiency - other)
    )


def _lengths(similarity: Scores, relevant: Bools, own: int | None) -> Ints:
    """similarity (N,), relevant (N,) -> (P,) how much further down each positive is than the one before it."""
    others = np.ones(len(similarity), bool)
    if own is not None:
        others[own] = False
    positives = -np.sort(-similarity[relevant & others])
    negatives = np.sort(similarity[~relevant & others])
    before = len(negatives) - np.searchsorted(negatives, positives, side="left")
    return np.diff(before, prepend=0) + 1


def _segments(length: Ints, start: Ints) -> tuple[Ints, Ints]:
    """length (P,), start (Q,) of chains -> positives and items of each segment, merged until densities do not rise.

    Pool adjacent violators; in whole numbers, so that equal densities are equal.
    """
    starts = set(start.tolist())
    positives: list[int] = []
    items: list[int] = []
    chain = 0  # where the current chain begins among the segments
    for at, one in enumerate(length.tolist()):
        if at in starts:
            chain = len(items)
        count, size = 1, one
        while len(items) > chain and count * items[-1] > positives[-1] * size:
            count, size = count + positives.pop(), size + items.pop()
        positives.append(count)
        items.append(size)
    return np.array(positives, np.int64), np.array(items, np.int64)


def _in_segment(positives: Ints) -> Ints:
    """positives (S,) of segments -> (P,) the segment of each block."""
    return np.repeat(np.arange(len(positives)), positives)


def _running_longest(blocks: Blocks, start: Ints) -> Ints:
    """(P,) longest block so far in the chain: sorting by it appends the shortest of the blocks that come next."""
    room = int(blocks.length.max()) + 1
    chain = _in_segment(np.diff(start, append=len(blocks.length)))
    return np.maximum.accumulate(blocks.length + chain * room) - chain * room


def _average_precision(length: Ints) -> float:
    """length (P,) of blocks in the order of the list -> AP."""
    return float(np.mean(np.arange(1, len(length) + 1) / np.cumsum(length)))


def _bound(positives: Ints, items: Ints) -> float:
    """positives (S,), items (S,) -> AP when each segment's positives are spread evenly over its items.

    At no depth can an interleaving hold more; as depths are whole numbers, those of the spread are rounded up.
    """
    order = np.argsort(-positives / items, kind="stable")
    positives, items = positives[order], items[order]
    segment = _in_segment(positives)
    number = np.arange(1, len(segment) + 1)
    within = number - (np.cumsum(positives) - positives)[segment]
    depth = (np.cumsum(items) - items)[segment] - (-within * items[segment] // positives[segment])
    return float(np.mean(number / depth))
