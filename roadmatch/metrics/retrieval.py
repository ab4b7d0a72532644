"""Metrics of each query's own ranked list: AP, R-precision, AP@R, Recall@k, and their means over queries."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from roadmatch.metrics.ordered_pairs import OrderedPairs, ordered_pairs
from roadmatch.metrics.ties import Bools, Counts, Floats, Scores, TiedGroups, Ties, groups_of, hits, precisions

KS = (1, 10, 100, 1000)
_SCORES_AT_ONCE = 2**24
_MOST_QUERIES = 1024


@dataclass(frozen=True)
class RetrievalMetrics:
    """Means over the queries that have a positive; the others are left out, for them nothing is defined."""

    recall_at: dict[int, float]
    """Share of the queries with at least one positive among their k best."""
    r_precision: float
    mean_average_precision: float
    mean_average_precision_at_r: float
    queries: int
    queries_without_positive: int


def average_precision(similarity: Scores, relevant: Bools, ties: Ties = Ties.PESSIMISTIC) -> float:
    """similarity (N,), relevant (N,) -> AP in [0, 1], non-interpolated: the mean precision at the relevant entries.

    ValueError without a relevant entry, for NaN, and for other shapes or types; so for the metrics below.
    """
    groups = _one_list(similarity, relevant)
    return float(precisions(groups, ties).sum() / groups.positives.sum())


def average_precision_at_r(similarity: Scores, relevant: Bools, ties: Ties = Ties.PESSIMISTIC) -> float:
    """similarity (N,), relevant (N,) -> precision summed over relevant entries among the R best, / R, their number.

    Musgrave et al., "A Metric Learning Reality Check", 2020. ValueError for Ties.GROUPED, too.
    """
    groups = _one_list(similarity, relevant)
    relevant_entries = groups.positives.sum()
    return float(precisions(groups, ties, relevant_entries).sum() / relevant_entries)


def r_precision(similarity: Scores, relevant: Bools, ties: Ties = Ties.PESSIMISTIC) -> float:
    """similarity (N,), relevant (N,) -> share of relevant entries among the R best, R their number.

    ValueError for Ties.GROUPED, too.
    """
    groups = _one_list(similarity, relevant)
    relevant_entries = groups.positives.sum()
    return float(hits(groups, ties, relevant_entries).sum() / relevant_entries)


def recall_at_k(similarity: Scores, relevant: Bools, k: int, ties: Ties = Ties.PESSIMISTIC) -> float:
    """similarity (N,), relevant (N,) -> 1 if any of the k best is relevant, else 0; a probability with Ties.EXPECTED.

    The hit rate of metric learning, not the share of relevant entries that are found. ValueError for Ties.GROUPED and
    for k < 1, too.
    """
    return float(_any_hit(_one_list(similarity, relevant), np.array([0]), k, ties)[0])


def retrieval_metrics(
    queries: Scores,
    query_labels: ArrayLike,
    gallery: Scores | None = None,
    gallery_labels: ArrayLike | None = None,
    *,
    ks: Sequence[int] = KS,
    ties: Ties = Ties.PESSIMISTIC,
    block: int | None = None,
) -> RetrievalMetrics:
    """queries (Q, D), labels (Q,), gallery (N, D), labels (N,) -> means over the queries' lists, best first.

    No gallery: the queries are it, and self matches are left out by index. Holds block x N similarities at a time; the
    default takes 64 MiB of float32. ValueError: see ordered_pairs, and for Ties.GROUPED, a k or a block below 1.
    """
    pairs = ordered_pairs(queries, query_labels, gallery, gallery_labels)
    if block is None:
        block = min(max(_SCORES_AT_ONCE // len(pairs.gallery), 1), _MOST_QUERIES)
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}")
    tally = _Tally(tuple(ks), ties)
    for lists in _lists_in_blocks(pairs, block):
        tally.add(lists)
    return tally.metrics(len(pairs.queries))


def matrix_retrieval_metrics(
    similarity: Scores,
    relevance: Bools | Callable[[int], Bools],
    mask: Bools | None = None,
    *,
    ks: Sequence[int] = KS,
    ties: Ties = Ties.PESSIMISTIC,
) -> RetrievalMetrics:
    """similarity (Q, N), relevance (Q, N) or query -> (N,), mask (Q, N) of what counts -> means over the lists.

    For relevance that no label tells (several labels, cross-modal pairs). ValueError where no query has a positive,
    for NaN where it counts, other shapes or types, Ties.GROUPED and a k below 1.
    """
    tally = _Tally(tuple(ks), ties)
    for query, row in enumerate(similarity):
        relevant = relevance(query) if callable(relevance) else relevance[query]
        counted = np.ones(row.shape, np.bool_) if mask is None else mask[query]
        if relevant.shape != row.shape or counted.shape != row.shape or counted.dtype != np.bool_:
            described = f"relevance {relevant.shape}, mask {counted.dtype} {counted.shape}"
            raise ValueError(f"query {query}: {row.shape} entries, {described}")
        if (relevant & counted).any():
            tally.add([_one_list(row[counted], relevant[counted])])
    return tally.metrics(len(similarity))


class _Tally:
    """Sums over the lists that came by."""

    def __init__(self, ks: tuple[int, ...], ties: Ties) -> None:
        self._ks, self._ties = ks, ties
        self._queries = 0
        self._sums = np.zeros(3 + len(ks))

    def add(self, lists: Sequence[TiedGroups]) -> None:
        """The groups of some queries' lists."""
        sizes = np.array([len(groups.positives) for groups in lists])
        first = np.cumsum(sizes) - sizes
        together = TiedGroups(
            *(
                np.concatenate([getattr(groups, name) for groups in lists])
                for name in ("positives", "negatives", "positives_above", "negatives_above")
            )
        )
        relevant = np.add.reduceat(together.positives, first)
        each = np.repeat(relevant, sizes)
        self._sums += [
            (hits(together, self._ties, each) / each).sum(),
            (precisions(together, self._ties) / each).sum(),
            (precisions(together, self._ties, each) / each).sum(),
            *(_any_hit(together, first, k, self._ties).sum() for k in self._ks),
        ]
        self._queries += len(lists)

    def metrics(self, queries: int) -> RetrievalMetrics:
        """The means, out of so many queries."""
        if not self._queries:
            raise ValueError("undefined without a positive: no query has one")
        r_precision, mean, at_r, *recalls = (self._sums / self._queries).tolist()
        recall_at = dict(zip(self._ks, recalls, strict=True))
        return RetrievalMetrics(recall_at, r_precision, mean, at_r, self._queries, queries - self._queries)


def _lists_in_blocks(pairs: OrderedPairs, block: int) -> Iterator[list[TiedGroups]]:
    """Lists of the queries that have a positive; of an unimodal pair, item i is row i and column i."""
    for top in range(0, pairs.answerable, block):
        bottom = min(top + block, pairs.answerable)
        lists = []
        for query, row in enumerate(pairs.queries[top:bottom] @ pairs.gallery.T, start=top):
            positive = row[pairs.first[query] : pairs.last[query]].copy()
            row[pairs.first[query] : pairs.last[query]] = -np.inf  # below every finite score
            lists.append(
                groups_of(np.delete(positive, query - pairs.first[query]) if pairs.unimodal else positive, row)
            )
        yield lists


def _one_list(similarity: Scores, relevant: Bools) -> TiedGroups:
    if similarity.ndim != 1 or similarity.dtype.kind != "f":
        raise ValueError(f"similarity must be float (N,), not {similarity.dtype} {similarity.shape}")
    if relevant.shape != similarity.shape or relevant.dtype != np.bool_:
        raise ValueError(f"relevant must be bool {similarity.shape}, not {relevant.dtype} {relevant.shape}")
    if np.isnan(similarity).any():
        raise ValueError("similarity holds NaN")
    return groups_of(similarity[relevant], similarity[~relevant])


def _any_hit(groups: TiedGroups, first: Counts, k: int, ties: Ties) -> Floats:
    """Groups of some lists, the index of each one's first (Q,) -> probability that its k best hold a positive (Q,)."""
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    ahead, negatives = groups.negatives_above[first], groups.negatives[first]
    if ties is Ties.GROUPED:
        raise ValueError(f"{ties} is not defined for the best k: choose another of {list(Ties)}")
    if ties is Ties.PESSIMISTIC:
        return np.asarray(ahead + negatives < k, np.float64)
    entries = groups.entries[first]
    missed = [_all_negative(int(n), int(t), k - int(a)) for n, t, a in zip(negatives, entries, ahead, strict=True)]
    return 1 - np.array(missed)


def _all_negative(negatives: int, entries: int, places: int) -> float:
    """Probability that the first `places` of a tied group are all negatives, the order being random."""
    drawn = np.arange(min(places, negatives + 1))  # one more than there are is impossible: a factor of 0
    return float(np.prod((negatives - drawn) / (entries - drawn)))
