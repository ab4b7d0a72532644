"""Embeddings ordered by label, so that few blocks of their similarity matrix hold all positives."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roadmatch.metrics.ties import Bools, Counts, Scores

Rows = tuple[int, int]
"""The first row and the one behind the last."""


@dataclass(frozen=True)
class Block:
    """Queries x gallery images of one matrix product; upper: only pairs (i, j) with i < j count."""

    queries: Rows
    gallery: Rows
    upper: bool


@dataclass(frozen=True)
class OrderedPairs:
    """Queries that have a positive, by label; then those that have none (distractors).

    Where the queries are the gallery, the two are one array: item i is row i and column i of the matrix.
    """

    queries: Scores  # (Q, D)
    gallery: Scores  # (N, D)
    first: Counts  # (Q,) a query's positives, with itself, are the gallery images from here
    last: Counts  # (Q,) to before here
    answerable: int  # queries that have a positive
    unimodal: bool

    @property
    def positives(self) -> int:
        """Ordered pairs (query, gallery image) with the same label, without self matches."""
        return int((self.last - self.first).sum()) - (self.answerable if self.unimodal else 0)

    @property
    def negatives(self) -> int:
        """Ordered pairs with different labels."""
        pairs = len(self.queries) * (len(self.gallery) - int(self.unimodal))
        return pairs - self.positives

    @property
    def repeats(self) -> int:
        """How often each counted pair stands in the list of all pairs: (i, j) also counts for (j, i)."""
        return 2 if self.unimodal else 1

    def phases(self, block: int) -> Iterator[Iterator[Block]]:
        """Blocks of about block x block pairs; the queries without a positive come in after the first phase.

        Unimodal: each unordered pair once, of answerable items, then answerable x distractor, then distractors.
        """
        answerable, rest = (0, self.answerable), (self.answerable, len(self.queries))
        if self.unimodal:
            parts = [(answerable, answerable, True), (answerable, rest, False), (rest, rest, True)]
        else:
            gallery = (0, len(self.gallery))
            parts = [(answerable, gallery, False), (rest, gallery, False)]
        return (_blocks(queries, gallery, block, upper) for queries, gallery, upper in parts)

    def totals(self, running: Sequence[Counts]) -> tuple[Counts, Counts]:
        """Running counts of negatives after each phase -> those without distractor queries, those of all."""
        if self.unimodal:  # a distractor's own row is left out, its column stays
            return running[0] + running[1], 2 * running[2]
        return running[0], running[1]

    def scores(self, block: Block, buffer: Scores) -> Scores:
        """The block's similarities, in the buffer: the same product, so the same bits, whenever it is asked for."""
        queries, gallery = self.queries[slice(*block.queries)], self.gallery[slice(*block.gallery)]
        out = buffer[: len(queries) * len(gallery)].reshape(len(queries), len(gallery))
        return np.matmul(queries, gallery.T, out=out)

    def positive_positions(self, block: Block) -> NDArray[np.intp]:
        """Where the block's positives are, as positions in the flattened block."""
        (top, bottom), (left, right) = block.queries, block.gallery
        first, last = self.first[top:bottom], self.last[top:bottom]
        if block.upper:
            first = np.maximum(first, np.arange(top, bottom) + 1)
        first = np.maximum(first, left)
        counts = np.maximum(np.minimum(last, right) - first, 0)
        start = np.arange(bottom - top) * (right - left) + first - left
        return np.repeat(start - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def ordered_pairs(
    queries: Scores, query_labels: ArrayLike, gallery: Scores | None = None, gallery_labels: ArrayLike | None = None
) -> OrderedPairs:
    """queries (Q, D), labels (Q,), gallery (N, D), labels (N,) -> the pairs in order; no gallery: the queries are it.

    Labels are ints or strings, float32 or float64 embeddings need not be of unit length. ValueError for what does not
    fit together, for NaN or infinite embeddings, and where no query has a positive.
    """
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels go together: one of them is missing")
    asked = _checked_labels(query_labels, queries, "queries")
    if gallery is None or gallery_labels is None:
        return _unimodal(queries, _codes(asked, asked)[0])
    stored = _checked_labels(gallery_labels, gallery, "gallery")
    if gallery.dtype != queries.dtype or gallery.shape[1] != queries.shape[1]:
        shapes = f"{queries.dtype} {queries.shape} and {gallery.dtype} {gallery.shape}"
        raise ValueError(f"queries and gallery need one type and dimension, not {shapes}")
    return _rectangular(queries, gallery, *_codes(asked, stored))


def _unimodal(items: Scores, label: Counts) -> OrderedPairs:
    lone = np.bincount(label)[label] == 1
    order = np.lexsort((label, lone))
    grouped = label[order][: _answerable(lone)]
    ordered = items[order]
    return OrderedPairs(ordered, ordered, *_ranges(grouped, grouped, len(items)), len(grouped), True)


def _rectangular(queries: Scores, gallery: Scores, asked: Counts, stored: Counts) -> OrderedPairs:
    without = ~np.isin(asked, stored)
    order, gallery_order = np.lexsort((asked, without)), np.argsort(stored, kind="stable")
    answerable = _answerable(without)
    ranges = _ranges(asked[order][:answerable], stored[gallery_order], len(queries))
    return OrderedPairs(queries[order], gallery[gallery_order], *ranges, answerable, False)


def _answerable(without: Bools) -> int:
    if without.all():
        raise ValueError("undefined without a positive pair: no query shares its label with another image")
    return int(np.count_nonzero(~without))


def _ranges(asked: Counts, stored: Counts, queries: int) -> tuple[Counts, Counts]:
    """Ascending labels -> where each query's stand among those stored (Q,), empty for the queries that are left."""
    first, last = np.zeros(queries, np.int64), np.zeros(queries, np.int64)
    first[: len(asked)] = np.searchsorted(stored, asked, side="left")
    last[: len(asked)] = np.searchsorted(stored, asked, side="right")
    return first, last


def _blocks(queries: Rows, gallery: Rows, block: int, upper: bool) -> Iterator[Block]:
    for rows in _cuts(queries, block):
        for columns in _cuts(gallery, block):
            if not upper or columns[0] >= rows[0]:
                yield Block(rows, columns, upper and columns == rows)


def _cuts(rows: Rows, block: int) -> list[Rows]:
    """Equal parts of at most so many rows."""
    start, end = rows
    parts = -(-(end - start) // block)
    bounds = [start + (end - start) * part // max(parts, 1) for part in range(parts + 1)]
    return list(pairwise(bounds))


def _codes(query_labels: np.ndarray, gallery_labels: np.ndarray) -> tuple[Counts, Counts]:
    """Both labels as numbers; ints are not taken for the strings that spell them."""
    if (query_labels.dtype.kind == "U") != (gallery_labels.dtype.kind == "U"):
        raise ValueError(f"labels are {query_labels.dtype} for queries, {gallery_labels.dtype} for the gallery")
    _, codes = np.unique(np.concatenate([query_labels, gallery_labels]), return_inverse=True)
    return codes[: len(query_labels)], codes[len(query_labels) :]


def _checked_labels(labels: ArrayLike, embeddings: Scores, name: str) -> np.ndarray:
    labels = np.asarray(labels)
    if embeddings.ndim != 2 or embeddings.dtype not in (np.float32, np.float64):
        raise ValueError(f"{name} must be float32 or float64 (rows, D), not {embeddings.dtype} {embeddings.shape}")
    if labels.shape != (len(embeddings),) or labels.dtype.kind not in "biuU":
        raise ValueError(f"{name} need {len(embeddings)} int or string labels, not {labels.dtype} {labels.shape}")
    if not np.isfinite(embeddings).all():
        raise ValueError(f"{name} hold NaN or infinite values")
    return labels
