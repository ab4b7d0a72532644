"""Search: the items of a generation that match a query, and those that just do not."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from roadmatch.gallery.replica import Generation
from roadmatch.scoring import DECIMALS, ScoreRule, Vector, fold_query, score, similarity
from roadmatch.vectors.faiss import Rows, candidates, product_error

_MOST_CANDIDATES = 4_096
"""Above this a full scan is cheaper than a heap."""
_SCORED_AT_A_TIME = 1_024
_FEW = 16
"""Scored at a time beside as many rows as are wanted: most searches need no second portion."""
_ROUNDING = 2e-6
"""A score is off the folded product less beta*b(query) by two roundings to 6 decimals and that of b to float32."""


class Decision(StrEnum):
    """The verdict."""

    MATCH = "match"
    NO_MATCH = "no_match"


@dataclass(frozen=True)
class Query:
    """vector: (D,) float32, unit length. b: level of the background, roadmatch.scoring."""

    vector: Vector
    b: float


@dataclass(frozen=True)
class Hit:
    """An item with its best image; margin is score - threshold."""

    item: str
    image: str
    similarity: float
    score: float
    margin: float


@dataclass(frozen=True)
class Answer:
    """What a search found: matches and near misses best first, together at most top_k.

    best_score: of the best item; None in an empty gallery. matches_truncated: whether more items match than are shown.
    gallery_size: items at `seq`; gallery_images: their images, each of them one more chance to be wrong.
    """

    decision: Decision
    threshold: float
    best_score: float | None
    matches: tuple[Hit, ...]
    near_misses: tuple[Hit, ...]
    matches_truncated: bool
    seq: int
    gallery_size: int
    gallery_images: int


@dataclass(frozen=True)
class Comparison:
    """Two pictures, one asked and one taken as a gallery's image; margin is score - threshold."""

    decision: Decision
    similarity: float
    score: float
    margin: float


def search(
    generation: Generation, queries: Sequence[Query], rule: ScoreRule, *, threshold: float, top_k: int
) -> list[Answer]:
    """One answer per query, all of the same generation; an item's score is that of its best image.

    The threshold is rounded like a score, so that the shown numbers explain the decision. Equal scores are ordered by
    item id, then image id. Raises ValueError for top_k < 1 or another dimension than the gallery's.
    """
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}: ask for at least one item")
    threshold = round(threshold, DECIMALS)
    return [_answer(generation, query, rule, threshold, top_k) for query in queries]


def compare(query: Query, picture: Query, rule: ScoreRule, *, threshold: float) -> Comparison:
    """The very numbers that a search with this query gives for a gallery's image with this picture's embedding."""
    alike = similarity(query.vector, picture.vector[None])
    reached = float(score(alike, query.b, picture.b, rule)[0])
    margin = _margin(reached, round(threshold, DECIMALS))
    return Comparison(Decision.MATCH if margin >= 0 else Decision.NO_MATCH, float(alike[0]), reached, margin)


@dataclass(frozen=True)
class _Best:
    """An item by its best image."""

    item: str
    image: str
    similarity: float
    score: float


_Ranking = dict[int, tuple[float, str, str, float]]
"""By item number, its best image: (-score, item id, image id, similarity), the least first."""


def _answer(generation: Generation, query: Query, rule: ScoreRule, threshold: float, top_k: int) -> Answer:
    if generation.images == 0:
        return Answer(Decision.NO_MATCH, threshold, None, (), (), False, generation.seq, generation.items, 0)
    if query.vector.shape != (generation.dimension,):
        raise ValueError(f"a query of shape {query.vector.shape} in a gallery of {generation.dimension} dimensions")
    best = _best_items(generation, query, rule, threshold, top_k)
    shown = [_hit(item, threshold) for item in best[:top_k]]
    matches = tuple(hit for hit in shown if hit.margin >= 0)
    return Answer(
        decision=Decision.MATCH if matches else Decision.NO_MATCH,
        threshold=threshold,
        best_score=shown[0].score,
        matches=matches,
        near_misses=tuple(shown[len(matches) :]),
        matches_truncated=len(best) > top_k and best[top_k].score >= threshold,
        seq=generation.seq,
        gallery_size=generation.items,
        gallery_images=generation.images,
    )


def _best_items(generation: Generation, query: Query, rule: ScoreRule, threshold: float, top_k: int) -> list[_Best]:
    """The best top_k items, best first, and one more if there is one that matches."""
    folded = fold_query(query.vector, rule)
    wanted = (top_k + 1) * -(-generation.images // generation.items)  # rows, if all items had equally many
    k = 64 + 8 * wanted  # the sketch's order is not exact, and a longer list costs less than another scan
    while k <= _MOST_CANDIDATES:
        found = candidates(generation.vectors, generation.sketches, folded, k)
        left_out = np.append(found.highest, found.ceiling) - rule.beta * query.b + _ROUNDING
        ranking: _Ranking = {}
        start = 0
        while start < len(found.rows):
            end = min(start + _FEW + wanted, len(found.rows))
            _rank(ranking, generation, query, rule, found.rows[start:end])
            best = _first(ranking, top_k + 1)
            if left_out[end] < _needed(best, threshold, top_k):
                return best
            start = end
        if found.ceiling == -np.inf:
            return best
        k *= 8
    ranking = {}
    _rank(ranking, generation, query, rule, _rows_in_reach(generation, folded, top_k + 1))
    return _first(ranking, top_k + 1)


def _needed(best: Sequence[_Best], threshold: float, top_k: int) -> float:
    """Every row that was not looked at must score below this for the best items to be the answer."""
    if len(best) < top_k:
        return -np.inf
    last = best[top_k - 1].score
    truncated = len(best) > top_k and best[top_k].score >= threshold
    return last if truncated else min(last, threshold)


def _rows_in_reach(generation: Generation, folded: Vector, items: int) -> Rows:
    """Rows that can be among the best images of so many best items, from one scan of all products."""
    if items >= generation.items:
        return np.flatnonzero(generation.alive)
    reached = np.where(generation.alive, generation.vectors @ folded, -np.inf)
    best = np.full(int(generation.item_numbers.max()) + 1, -np.inf)
    np.maximum.at(best, generation.item_numbers, reached)
    last = np.partition(best, -items)[-items]
    return np.flatnonzero(reached >= last - 2 * product_error(folded) - 2 * _ROUNDING)


def _rank(ranking: _Ranking, generation: Generation, query: Query, rule: ScoreRule, rows: Rows) -> None:
    """Score the living of these rows exactly and enter them."""
    rows = rows[generation.alive[rows]]
    for start in range(0, len(rows), _SCORED_AT_A_TIME):
        some = rows[start : start + _SCORED_AT_A_TIME]
        alike = similarity(query.vector, generation.vectors[some, : generation.dimension])
        scores = score(alike, query.b, generation.b[some], rule)
        numbers = generation.item_numbers[some]
        for row, number, s, r in zip(some.tolist(), numbers.tolist(), alike.tolist(), scores.tolist(), strict=True):
            entry = (-r, generation.item_ids[number], generation.image_ids[row], s)
            if number not in ranking or entry < ranking[number]:
                ranking[number] = entry


def _first(ranking: _Ranking, items: int) -> list[_Best]:
    return [_Best(item, image, s, -negated) for negated, item, image, s in heapq.nsmallest(items, ranking.values())]


def _hit(best: _Best, threshold: float) -> Hit:
    return Hit(best.item, best.image, best.similarity, best.score, _margin(best.score, threshold))


def _margin(reached: float, threshold: float) -> float:
    """Both are rounded, so the margin is 0 or more exactly where the score reaches the threshold."""
    return round(reached - threshold, DECIMALS) + 0.0
