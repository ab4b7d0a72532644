"""Average precision of all pairs in one list (gAP), over a given similarity matrix."""

from dataclasses import dataclass

import numpy as np

from roadmatch.metrics.ties import Bools, Scores, Ties, groups_of, precisions


@dataclass(frozen=True)
class GlobalAP:
    """gAP with and without the queries that have no positive (distractor queries), and what was counted."""

    gap: float
    gap_without_distractors: float
    queries: int
    distractor_queries: int
    positive_pairs: int
    negative_pairs: int

    @property
    def relative_drop(self) -> float:
        """The share of the gAP without distractor queries that they cost."""
        return (self.gap_without_distractors - self.gap) / self.gap_without_distractors


def global_average_precision(
    similarity: Scores, relevance: Bools, mask: Bools | None = None, ties: Ties = Ties.PESSIMISTIC
) -> float:
    """similarity (Q, N), relevance (Q, N), mask (Q, N) of the pairs that count -> gAP in [0, 1] (micro-AP).

    AP of one list of all pairs that count; queries without a positive stay in through their negatives. For queries
    that are their own gallery the mask leaves out the diagonal. The result does not depend on the order of pairs.
    ValueError without a positive pair, for NaN, and for other shapes or types.
    """
    counted = checked_mask(similarity, relevance, mask)
    return _average_precision(similarity, relevance, counted, ties)


def global_average_precision_at_k(similarity: Scores, relevance: Bools, k: int, mask: Bools | None = None) -> float:
    """similarity, relevance, mask (Q, N) -> gAP over each query's k best only; the denominator is all positives.

    Another number than gAP: what a search that returns k results can show (DISC21 asks for k = 10). Ties are
    pessimistic, at the cut, too. ValueError as for gAP, and for k < 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    counted = checked_mask(similarity, relevance, mask)
    positives = int(np.count_nonzero(relevance & counted))
    if not positives:
        raise ValueError("gAP is undefined without a positive pair")
    kept = np.zeros(similarity.shape, np.bool_)
    for query, row in enumerate(similarity):
        kept[query, _best(row, relevance[query], np.flatnonzero(counted[query]), k)] = True
    if not (relevance & kept).any():
        return 0.0
    groups = groups_of(similarity[relevance & kept], similarity[kept & ~relevance])
    return float(precisions(groups, Ties.PESSIMISTIC).sum() / positives)


def global_average_precision_with_distractors(
    similarity: Scores, relevance: Bools, mask: Bools | None = None, ties: Ties = Ties.PESSIMISTIC
) -> GlobalAP:
    """similarity, relevance, mask (Q, N) -> gAP over all queries and over those with a positive, the rest left out.

    ValueError as for gAP.
    """
    counted = checked_mask(similarity, relevance, mask)
    positive = relevance & counted
    answerable = np.asarray(positive.any(axis=1))
    positives = int(np.count_nonzero(positive))
    return GlobalAP(
        gap=_average_precision(similarity, relevance, counted, ties),
        gap_without_distractors=_average_precision(similarity, relevance, counted & answerable[:, None], ties),
        queries=len(similarity),
        distractor_queries=int(np.count_nonzero(~answerable)),
        positive_pairs=positives,
        negative_pairs=int(np.count_nonzero(counted)) - positives,
    )


def checked_mask(similarity: Scores, relevance: Bools, mask: Bools | None) -> Bools:
    """The mask, all true without one; ValueError for what is no pair of matrices, and for NaN where it counts."""
    if similarity.ndim != 2 or similarity.dtype.kind != "f":
        raise ValueError(f"similarity must be float (Q, N), not {similarity.dtype} {similarity.shape}")
    for name, matrix in (("relevance", relevance), ("mask", mask)):
        if matrix is not None and (matrix.shape != similarity.shape or matrix.dtype != np.bool_):
            raise ValueError(f"{name} must be bool {similarity.shape}, not {matrix.dtype} {matrix.shape}")
    counted = np.ones(similarity.shape, np.bool_) if mask is None else mask
    if np.isnan(similarity, where=counted, out=np.zeros(similarity.shape, np.bool_)).any():
        raise ValueError("similarity holds NaN")
    return counted


def _average_precision(similarity: Scores, relevance: Bools, counted: Bools, ties: Ties) -> float:
    positives = similarity[relevance & counted]
    if not len(positives):
        raise ValueError("gAP is undefined without a positive pair")
    groups = groups_of(positives, similarity[counted & ~relevance])
    return float(precisions(groups, ties).sum() / len(positives))


def _best(similarity: Scores, relevant: Bools, counted: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k best of the entries that count, negatives before positives of the same score."""
    if len(counted) > k:  # so that few are sorted
        counted = counted[similarity[counted] >= np.partition(similarity[counted], -k)[-k]]
    order = np.lexsort((relevant[counted], -similarity[counted]))
    return np.asarray(counted[order[:k]])
