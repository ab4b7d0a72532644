"""gAP between two sure bounds, in one pass over the products and in memory that no number of positives changes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roadmatch.metrics.ordered_pairs import ordered_pairs
from roadmatch.metrics.score_bins import BINS, CHUNK, ScoreBins, counts_from_above, negatives_in_chunks, score_bins
from roadmatch.metrics.streaming import BLOCK
from roadmatch.metrics.ties import Counts, Scores, Ties, precisions, tied_groups

_ROUNDING = 1e-12
"""The bounds are this much wider than their sums, which are of float64 numbers."""


@dataclass(frozen=True)
class Bounded:
    """A number that lies from `lower` to `upper`; the estimate takes each bin's entries in random order."""

    lower: float
    estimate: float
    upper: float


@dataclass(frozen=True)
class EstimatedGlobalAP:
    """gAP with and without the queries that have no positive, and what was counted."""

    gap: Bounded
    gap_without_distractors: Bounded
    queries: int
    distractor_queries: int
    positive_pairs: int
    negative_pairs: int


def estimated_global_average_precision(
    queries: Scores,
    query_labels: ArrayLike,
    gallery: Scores | None = None,
    gallery_labels: ArrayLike | None = None,
    *,
    ties: Ties = Ties.PESSIMISTIC,
    bins: int = BINS,
    block: int = BLOCK,
) -> EstimatedGlobalAP:
    """queries (Q, D), labels (Q,), gallery (N, D), labels (N,) -> gAP to about one part in the number of bins.

    As streaming_global_average_precision, with histograms instead of scores: whole numbers, so that the order of rows
    matters only as far as it changes a product's last bit. The bounds hold for the tie policy: in each bin the upper
    one puts the positives first, the lower one the negatives.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}")
    pairs = ordered_pairs(queries, query_labels, gallery, gallery_labels)
    buffer = np.empty(block * block, pairs.queries.dtype)
    histograms = _Histograms(score_bins(pairs, bins), pairs.queries.dtype)
    running = []
    for phase in pairs.phases(block):
        for each in phase:
            scores = pairs.scores(each, buffer)
            histograms.add_positives(scores.reshape(-1)[pairs.positive_positions(each)])
            for chunk in negatives_in_chunks(pairs, each, scores, histograms.bins.sunk):
                histograms.add_negatives(chunk)
        running.append(histograms.negatives.copy())
    without, everything = (
        _bounded(pairs.repeats * histograms.positives, negatives, ties) for negatives in pairs.totals(running)
    )
    distractors = len(pairs.queries) - pairs.answerable
    return EstimatedGlobalAP(everything, without, len(pairs.queries), distractors, pairs.positives, pairs.negatives)


class _Histograms:
    """Positives and negatives per bin."""

    def __init__(self, bins: ScoreBins, dtype: np.dtype) -> None:
        self.bins = bins
        self.positives = np.zeros(bins.size, np.int64)
        self.negatives = np.zeros(bins.size, np.int64)
        self._scaled = np.empty(CHUNK, dtype)
        self._index = np.empty(CHUNK, np.intp)

    def add_positives(self, scores: Scores) -> None:
        """scores (P,)."""
        np.add.at(self.positives, self.bins.of(scores), 1)

    def add_negatives(self, scores: Scores) -> None:
        """scores (n,), n up to a chunk."""
        index = self._index[: len(scores)]
        self.bins.index(scores, self._scaled[: len(scores)], index)
        np.add.at(self.negatives, index, 1)


def _bounded(positives: Counts, negatives: Counts, ties: Ties) -> Bounded:
    """Histograms (bins,) -> bounds and estimate of the AP."""
    filled: NDArray[np.intp] = np.flatnonzero(positives)[::-1]
    counts, above = positives[filled], counts_from_above(negatives)[filled]
    mixed = tied_groups(counts, above, above + negatives[filled])
    first = tied_groups(counts, above, above)
    lower, estimate, upper = (
        float(precisions(groups, policy).sum() / counts.sum())
        for groups, policy in ((mixed, Ties.PESSIMISTIC), (mixed, Ties.EXPECTED), (first, ties))
    )
    return Bounded(max(lower - _ROUNDING, 0.0), estimate, min(upper + _ROUNDING, 1.0))
