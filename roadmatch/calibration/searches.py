"""Held-out searches: embeddings with the picture each one shows, and their scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

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
    evidence that it does not give. Distractors are queries of other units, of which no image is stored: their only
    search is one without a match.
    """

    what: str
    """The evidence in words, as in "edited copies of photographs"."""
    queries: Vector  # (Q, D)
    query_unit: Units  # (Q,)
    gallery: Vector  # (N, D)
    gallery_unit: Units  # (N,)
    distractors: Vector | None = None  # (S, D)
    distractor_unit: Units = field(default_factory=lambda: np.empty(0, np.int64))  # (S,)

    def __post_init__(self) -> None:
        if not np.array_equal(np.unique(self.query_unit), self.units):
            raise ValueError("every unit needs queries and gallery images: leave out those that lack either")
        if len(self.distractor_unit) != (0 if self.distractors is None else len(self.distractors)):
            raise ValueError("each distractor needs its unit")
        if np.isin(self.distractor_unit, self.units).any():
            raise ValueError("a unit with gallery images has no distractors: its queries have a match")

    @property
    def units(self) -> Units:
        """The distinct units with a match, ascending (U,)."""
        return np.unique(self.gallery_unit)

    def only(self, units: Units) -> "Searches":
        """The searches among these units alone, and all distractors."""
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
    """Scores of all (query, gallery image) pairs, distractors among the queries, with units numbered from 0."""

    scores: Floats  # (Q, N)
    ceiling: float  # no pair of these pictures can score more, not even one that is like no background with itself
    query_unit: Units  # (Q,)
    gallery_unit: Units  # (N,)

    @property
    def units(self) -> int:
        """How many units there are, those of distractors among them."""
        return int(max(self.gallery_unit.max(), self.query_unit.max())) + 1

    @cached_property
    def is_stored(self) -> NDArray[np.bool_]:
        """Which units have gallery images, so that their searches have a match (units,)."""
        return np.bincount(self.gallery_unit, minlength=self.units) > 0

    @property
    def stored(self) -> int:
        """How many units have gallery images."""
        return int(self.is_stored.sum())

    @property
    def held_out(self) -> "Scored":
        """The searches of stored units alone, which are held out in turn."""
        return self if self.stored == self.units else self.only(np.flatnonzero(self.is_stored))

    @property
    def distractors(self) -> "Scored":
        """The searches of distractors alone, their units numbered anew."""
        asked = ~self.is_stored[self.query_unit]
        number = np.unique(self.query_unit[asked], return_inverse=True)[1]
        return Scored(self.scores[asked], self.ceiling, number, self.gallery_unit)

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
        units = searches.units
        asked, query_unit = searches.queries, np.searchsorted(units, searches.query_unit)
        if searches.distractors is not None:
            number = np.unique(searches.distractor_unit, return_inverse=True)[1]
            asked = np.concatenate([asked, searches.distractors])
            query_unit = np.concatenate([query_unit, len(units) + number])
        return Similarities(
            _cosine(asked, searches.gallery),
            _levels(asked, background, ks),
            _levels(searches.gallery, background, ks),
            query_unit,
            np.searchsorted(units, searches.gallery_unit),
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
