"""A split's searches: who asks, who answers, and their scores in blocks of rows."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roadmatch.metrics.normalisation import background_levels
from roadmatch.scoring import ScoreRule, Vector
from training.data.manifest import Manifest, Split
from training.judging.embedded import Embeddings

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]

_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Levels:
    """A score rule and what it takes off each search and each stored image."""

    queries: NDArray[np.float64]  # (Q,)
    gallery: NDArray[np.float64]  # (N,)

    @staticmethod
    def of(task: "Task", background: Vector, rule: ScoreRule) -> "Levels":
        """background (M, D). ValueError for one of fewer than k."""
        levels = background_levels(np.concatenate([task.queries, task.gallery]), background, rule.k)
        return Levels(rule.beta * levels[: len(task.queries)], rule.gamma * levels[len(task.queries) :])


@dataclass(frozen=True)
class Rows:
    """Some queries against the gallery and one column more, which no query counts."""

    numbers: Ints  # (R,) of the queries
    scores: Floats  # (R, N + 1)
    relevant: Bools  # (R, N + 1)
    own: Ints  # (R,) the column of the query itself, the last one where it is not in the gallery

    @property
    def counted(self) -> Bools:
        """(R, N + 1) false for the query itself and in the last column."""
        counted = np.ones(self.scores.shape, bool)
        counted[:, -1] = False
        counted[np.arange(len(self.own)), self.own] = False
        return counted


@dataclass(frozen=True, eq=False)
class Task:
    """Q queries and N gallery images of the manifest, with their embeddings (unit vectors) and labels.

    A label below 0 is that of one image alone. Memory is that of the embeddings and of a block of rows.
    """

    manifest: Manifest
    query_numbers: Ints  # (Q,)
    gallery_numbers: Ints  # (N,)
    queries: Vector  # (Q, D)
    gallery: Vector  # (N, D)

    @staticmethod
    def of(embeddings: Embeddings, split: Split) -> "Task":
        """The searches of a split, as the manifest says who asks and who answers. Raises RunError, DataError."""
        manifest = embeddings.trained.manifest
        queries, gallery = manifest.queries(split), manifest.gallery(split)
        return Task(manifest, queries, gallery, embeddings.of(queries), embeddings.of(gallery))

    @property
    def query_labels(self) -> Ints:
        """(Q,)."""
        return self.manifest.numbers[self.query_numbers]

    @property
    def gallery_labels(self) -> Ints:
        """(N,)."""
        return self.manifest.numbers[self.gallery_numbers]

    @property
    def own(self) -> Ints:
        """(Q,) where each query is in the gallery; N where it is not."""
        place = np.full(len(self.manifest), len(self.gallery_numbers))
        place[self.gallery_numbers] = np.arange(len(self.gallery_numbers))
        return np.asarray(place[self.query_numbers], np.int64)

    @property
    def unimodal(self) -> bool:
        """Whether every image asks all the others."""
        return np.array_equal(self.query_numbers, self.gallery_numbers)

    @property
    def apart(self) -> bool:
        """Whether no query is in the gallery."""
        return not np.isin(self.query_numbers, self.gallery_numbers).any()

    @property
    def known(self) -> Bools:
        """(Q,) which queries have a right match."""
        labels, count = np.unique(self.gallery_labels, return_counts=True)
        stored = dict(zip(labels.tolist(), count.tolist(), strict=True))
        others = np.array([stored.get(label, 0) for label in self.query_labels.tolist()], np.int64)
        return np.asarray(others - (self.own < len(self.gallery_numbers)) > 0)

    @property
    def images(self) -> int:
        """How many different images take part."""
        return len(np.union1d(self.query_numbers, self.gallery_numbers))

    def labelled(self) -> tuple[Vector, Ints]:
        """Embeddings (M, D) and classes (M,) of all images that belong to a class, each once."""
        numbers = np.concatenate([self.query_numbers, self.gallery_numbers])
        first = np.unique(numbers, return_index=True)[1]
        vectors = np.concatenate([self.queries, self.gallery])[first]
        labels = self.manifest.numbers[numbers[first]]
        return vectors[labels >= 0], labels[labels >= 0]

    def rows(self, which: Ints | None = None, levels: Levels | None = None) -> Iterator[Rows]:
        """Blocks of the queries `which` (R,), all of them if None: similarities, less the levels where given."""
        which = np.arange(len(self.queries)) if which is None else which
        size = max(1, _PAIRS_AT_ONCE // (len(self.gallery) + 1))
        own, asked, stored = self.own, self.query_labels, np.append(self.gallery_labels, np.iinfo(np.int64).min)
        for at in range(0, len(which), size):
            some = which[at : at + size]
            scores = np.full((len(some), len(self.gallery) + 1), -1, np.float32)
            np.matmul(self.queries[some], self.gallery.T, out=scores[:, :-1])
            if levels is not None:
                scores[:, :-1] -= levels.queries[some, None] + levels.gallery
            yield Rows(some, scores, asked[some, None] == stored, own[some])
