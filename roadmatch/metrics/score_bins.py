"""Bins of equal width that hold every score a set of embeddings can have."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roadmatch.metrics.ordered_pairs import Block, OrderedPairs
from roadmatch.metrics.ties import Counts, Scores

BINS = 2**20
_MOST = 2**21
"""Beyond it float32 cannot tell two neighbouring bins from each other."""
_LEAST_RANGE = 1e-30
CHUNK = 2**16
"""Scores that are taken together, so that what is made of them stays in the cache."""
_CHUNK_ROWS = 256


@dataclass(frozen=True)
class ScoreBins:
    """Bin 0 is for what does not count (`sunk`); a higher score is never in a lower bin."""

    bins: int
    scale: float
    """Bins per unit of similarity."""

    @property
    def size(self) -> int:
        """Numbers of bins run from 0 to below this."""
        return self.bins + 4

    @property
    def sunk(self) -> float:
        """A score below all that can occur, in bin 0."""
        return -(self.bins / 2 + 1.5) / self.scale

    def index(self, scores: Scores, scaled: Scores, out: NDArray[np.intp]) -> None:
        """scores (n,) -> out (n,), the bin of each; scaled (n,) is room of the scores' type."""
        np.multiply(scores, scores.dtype.type(self.scale), out=scaled)
        np.add(scaled, scores.dtype.type(self.bins / 2 + 2), out=scaled)
        out[:] = scaled  # truncates; all are positive

    def of(self, scores: Scores) -> NDArray[np.intp]:
        """scores (n,) -> the bin of each (n,)."""
        out = np.empty(scores.shape, np.intp)
        self.index(scores, np.empty_like(scores), out)
        return out


def score_bins(pairs: OrderedPairs, bins: int) -> ScoreBins:
    """Bins for the pairs' scores: none exceeds the product of the greatest lengths (Cauchy-Schwarz), but for rounding.

    Room for the rounding is left, so a score of 1.0000002 stays inside and none needs to be held against a limit.
    ValueError for another number of bins than 2 to 2**21 and for embeddings whose products do not fit their type.
    """
    if not 2 <= bins <= _MOST:
        raise ValueError(f"bins must be 2 to {_MOST}, not {bins}")
    rounding = 4 * (pairs.queries.shape[1] + 4) * float(np.finfo(pairs.queries.dtype).eps)
    limit = _greatest_length(pairs.queries) * _greatest_length(pairs.gallery) * (1 + rounding)
    if limit > float(np.finfo(pairs.queries.dtype).max) / 4:
        raise ValueError(f"embeddings are too long for {pairs.queries.dtype} products: up to {limit:.3g}")
    return ScoreBins(bins, bins / 2 / max(limit, _LEAST_RANGE))


def negatives_in_chunks(pairs: OrderedPairs, block: Block, scores: Scores, sunk: float) -> Iterator[Scores]:
    """The block's scores, which are changed, a cacheful at a time: all but its negatives sunk below every score."""
    flat = scores.reshape(-1)
    flat[pairs.positive_positions(block)] = sunk
    if block.upper:
        np.copyto(scores, sunk, where=np.tri(len(scores), dtype=np.bool_))
    return (flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK))


def _greatest_length(embeddings: Scores) -> float:
    squares = [
        np.square(embeddings[start : start + _CHUNK_ROWS], dtype=np.float64).sum(axis=1).max()
        for start in range(0, len(embeddings), _CHUNK_ROWS)
    ]
    return float(np.sqrt(max(squares)))


def counts_from_above(histogram: Counts) -> Counts:
    """histogram (bins,) -> entries in higher bins (bins,)."""
    total: Counts = np.cumsum(histogram[::-1])[::-1] - histogram
    return total
