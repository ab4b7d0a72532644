"""Exact gAP from embeddings, in blocks: the matrix of all similarities is never held."""

import numpy as np
from numpy.typing import ArrayLike

from roadmatch.metrics.global_ap import GlobalAP
from roadmatch.metrics.ordered_pairs import OrderedPairs, ordered_pairs
from roadmatch.metrics.score_bins import BINS, CHUNK, ScoreBins, counts_from_above, negatives_in_chunks, score_bins
from roadmatch.metrics.ties import Counts, Scores, Ties, precisions, tied_groups

BLOCK = 2048
_SORTED_AT_ONCE = 2**21


def streaming_global_average_precision(
    queries: Scores,
    query_labels: ArrayLike,
    gallery: Scores | None = None,
    gallery_labels: ArrayLike | None = None,
    *,
    ties: Ties = Ties.PESSIMISTIC,
    block: int = BLOCK,
) -> GlobalAP:
    """queries (Q, D), labels (Q,), gallery (N, D), labels (N,) -> gAP of all Q x N pairs, with and without distractors.

    No gallery: the queries are it; self matches are left out by index and each unordered pair is computed once.
    Memory grows with block**2 and with the number of positive pairs, which are kept; time is little above that of the
    products. Ties are those of the computed products, and BLAS may round the same two vectors differently in another
    place of a block: unit embeddings in steps of 2**-11 (float32; 2**-26 float64) have exact products, and then
    no order of the rows changes one bit. ValueError: see ordered_pairs, and for a block below 1.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}")
    pairs = ordered_pairs(queries, query_labels, gallery, gallery_labels)
    buffer = np.empty(block * block, pairs.queries.dtype)
    distinct, counts = np.unique(_positives(pairs, block, buffer), return_counts=True)
    counter = _Counter(distinct, score_bins(pairs, BINS))
    running = []
    for phase in pairs.phases(block):
        for each in phase:
            for chunk in negatives_in_chunks(pairs, each, pairs.scores(each, buffer), counter.bins.sunk):
                counter.add(chunk)
        running.append(counter.counts())
    above, reaching = zip(*running, strict=True)
    positives = pairs.repeats * counts[::-1]
    without, everything = (
        float(precisions(tied_groups(positives, *negatives), ties).sum() / pairs.positives)
        for negatives in zip(pairs.totals(above), pairs.totals(reaching), strict=True)
    )
    distractors = len(pairs.queries) - pairs.answerable
    return GlobalAP(everything, without, len(pairs.queries), distractors, pairs.positives, pairs.negatives)


class _Counter:
    """How many negatives reach each distinct score of the positives, as they come by.

    Most scores lie in a bin without a positive and are settled by the bin alone; the rest are kept until sorted.
    """

    def __init__(self, distinct: Scores, bins: ScoreBins) -> None:
        self.bins = bins
        self._distinct = distinct
        self._own_bin = bins.of(distinct)
        self._hot = np.zeros(bins.size, np.bool_)
        self._hot[self._own_bin] = True
        self._histogram = np.zeros(bins.size, np.int64)
        self._close_above = np.zeros(len(distinct), np.int64)
        self._close_reaching = np.zeros(len(distinct), np.int64)
        self._close: list[Scores] = []
        self._waiting = 0
        self._scaled = np.empty(CHUNK, distinct.dtype)
        self._index = np.empty(CHUNK, np.intp)
        self._is_close = np.empty(CHUNK, np.bool_)

    def add(self, negatives: Scores) -> None:
        """negatives (n,), n up to a chunk."""
        size = len(negatives)
        index, is_close = self._index[:size], self._is_close[:size]
        self.bins.index(negatives, self._scaled[:size], index)
        np.add.at(self._histogram, index, 1)
        np.take(self._hot, index, out=is_close, mode="clip")  # nothing to clip; without it numpy copies
        self._close.append(negatives[is_close])
        self._waiting += len(self._close[-1])
        if self._waiting >= _SORTED_AT_ONCE:
            self._settle()

    def counts(self) -> tuple[Counts, Counts]:
        """Negatives above, and at or above, each distinct score so far, best first (U,) each."""
        self._settle()
        cold = counts_from_above(np.where(self._hot, 0, self._histogram))[self._own_bin]
        return (cold + self._close_above)[::-1], (cold + self._close_reaching)[::-1]

    def _settle(self) -> None:
        close = np.sort(np.concatenate([*self._close, self._distinct[:0]]))
        self._close_above += len(close) - np.searchsorted(close, self._distinct, side="right")
        self._close_reaching += len(close) - np.searchsorted(close, self._distinct, side="left")
        self._close, self._waiting = [], 0


def _positives(pairs: OrderedPairs, block: int, buffer: Scores) -> Scores:
    """Similarities of the positive pairs (P,), from the very blocks whose negatives are counted later."""
    found = []
    for phase in pairs.phases(block):
        for each in phase:
            positions = pairs.positive_positions(each)
            if len(positions):
                found.append(pairs.scores(each, buffer).reshape(-1)[positions])
    return np.concatenate(found)
