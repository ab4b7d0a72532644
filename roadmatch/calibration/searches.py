"""Held-out searches: embeddings with the picture each one shows, and their scores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from roadmatch.scoring import DECIMALS, ScoreRule, Vector

Floats = NDArray[np.float64]
Units = NDArray[np.int64]


@dataclass(frozen=True)
class Searches:
    """Queries and gallery images (unit vectors) with the unit each belongs to.

    A unit is what is independent of all others: one picture with its edited copies, or one class. A query's right
    match is a gallery image of its own unit; every unit has queries and gallery images. The search without a match is
    the same search with the query's unit held out. Raises ValueError for a unit that lacks either: it would count as
    evidence that it does not give.
    """

    what: str
    """The evidence in words, as in "edited copies of photographs"."""
    queries: Vector  # (Q, D)
    query_unit: Units  # (Q,)
    gallery: Vector  # (N, D)
    gallery_unit: Units  # (N,)

    def __post_init__(self) -> None:
        if not np.array_equal(np.unique(self.query_unit), self.units):
            raise ValueError("every unit needs queries and gallery images: leave out those that lack either")

    @property
    def units(self) -> Units:
        """The distinct units, ascending (U,)."""
        return np.unique(self.gallery_unit)

    def only(self, units: Units) -> "Searches":
        """The searches among these units alone."""
        asked, stored = np.isin(self.query_unit, units), np.isin(self.gallery_unit, units)
        return replace(
            self,
            queries=self.queries[asked],
            query_unit=self.query_unit[asked],
            gallery=self.gallery[stored],
            gallery_unit=self.gallery_unit[stored],
        )


@dataclass(frozen=True)
class Scored:
    """Scores of all (query, gallery image) pairs, with units numbered 0..U-1."""

    scores: Floats  # (Q, N)
    ceiling: float  # no pair of these pictures can score more, not even one that is like no background with itself
    query_unit: Units  # (Q,)
    gallery_unit: Units  # (N,)

    @property
    def units(self) -> int:
        """How many units there are."""
        return int(self.gallery_unit.max()) + 1

    def only(self, units: Units) -> "Scored":
        """The searches among these units alone, numbered anew in the order given."""
        number = np.full(self.units, -1)
        number[units] = np.arange(len(units))
        asked, stored = number[self.query_unit] >= 0, number[self.gallery_unit] >= 0
        scores = self.scores[np.ix_(asked, stored)]
        return Scored(scores, self.ceiling, number[self.query_unit[asked]], number[self.gallery_unit[stored]])


@dataclass(frozen=True)
class Similarities:
    """Similarities of all pairs and background levels for each k: what every score rule is computed from."""

    pairs: Floats  # (Q, N)
    b_query: dict[int, Floats]  # k -> (Q,)
    b_gallery: dict[int, Floats]  # k -> (N,)
    query_unit: Units
    gallery_unit: Units

    @staticmethod
    def of(searches: Searches, background: Vector, ks: Sequence[int]) -> "Similarities":
        """searches, background (n, D) -> similarities. A matrix product: a fit does not hang on the seventh decimal."""
        return Similarities(
            _cosine(searches.queries, searches.gallery),
            _levels(searches.queries, background, ks),
            _levels(searches.gallery, background, ks),
            np.searchsorted(searches.units, searches.query_unit),
            np.searchsorted(searches.units, searches.gallery_unit),
        )

    def scored(self, rule: ScoreRule) -> Scored:
        """The scores under a rule."""
        b_query, b_gallery = self.b_query[rule.k], self.b_gallery[rule.k]
        scores = np.round(self.pairs - rule.beta * b_query[:, None] - rule.gamma * b_gallery, DECIMALS)
        ceiling = 1 - rule.beta * b_query.min() - rule.gamma * b_gallery.min()
        return Scored(scores, float(ceiling), self.query_unit, self.gallery_unit)


def _cosine(one: Vector, other: Vector) -> Floats:
    return np.round(one.astype(np.float64) @ other.astype(np.float64).T, DECIMALS)


def _levels(vectors: Vector, background: Vector, ks: Sequence[int]) -> dict[int, Floats]:
    if len(background) < max(ks):
        raise ValueError(f"the background has {len(background)} pictures, fewer than k = {max(ks)}")
    highest = -np.sort(-_cosine(vectors, background), axis=1)
    return {k: np.round(highest[:, :k].mean(axis=1), DECIMALS) for k in ks}
