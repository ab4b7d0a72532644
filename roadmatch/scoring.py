"""Similarity and score, one function each, for search, compare and calibration alike."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Scores = NDArray[np.float64]

DECIMALS = 6
"""Similarities and scores are rounded to so many decimals before they are compared and before they are shown."""
_LANES = 16
"""Index vectors are padded to a multiple of this: 513 dimensions are several times slower than 528 in FAISS."""


@dataclass(frozen=True)
class ScoreRule:
    """score = similarity - beta*b(query) - gamma*b(image), b the mean of the k highest background similarities.

    Symmetric or query-side normalisation by a background set; beta = gamma = 0 is plain similarity.
    """

    beta: float = 0.0
    gamma: float = 0.0
    k: int = 1


def similarity(query: Vector, vectors: Vector) -> Scores:
    """query (D,), vectors (N, D), unit float32 -> cosine (N,), float64, rounded.

    The sum over D runs in the same order for every row, so a pair's similarity does not depend on what else is asked:
    a matrix product would group the terms by shape and could decide a tie at the threshold in two ways.
    """
    products = np.asarray(vectors, np.float64, order="C") * np.asarray(query, np.float64)
    rounded: Scores = np.round(products.sum(axis=1), DECIMALS) + 0.0  # never -0.0
    return rounded


def background_level(vector: Vector, background: Vector, k: int) -> float:
    """vector (D,), background (N, D), unit -> b, the mean of the k highest similarities; 0 without a background."""
    if len(background) == 0:
        return 0.0
    if len(background) > k:
        # float32 products choose whose exact similarity is worth its time; two of them err by less than the slack.
        # One thread does them in 0.1 ms, where a matrix product may wait milliseconds for its others.
        rough = np.vecdot(background, vector)
        background = background[rough >= np.partition(rough, -k)[-k] - len(vector) * 2.0**-22]
    highest = np.sort(similarity(vector, background))[-k:]
    return float(np.round(highest.mean(), DECIMALS))


def score(similarity: Scores | float, b_query: float, b_image: Scores | float, rule: ScoreRule) -> Scores:
    """What the threshold is applied to, rounded: similarity (N,), b_image (N,) -> (N,) float64."""
    return np.round(np.asarray(similarity) - rule.beta * b_query - rule.gamma * np.asarray(b_image), DECIMALS) + 0.0


def folded_width(dimension: int) -> int:
    """Length of an index vector for embeddings of this dimension: room for b, padded."""
    return -(-(dimension + 1) // _LANES) * _LANES


def fold(vectors: Vector, b: Scores) -> Vector:
    """vectors (N, D), b (N,) -> [x, b(x), 0...] (N, W): what an index stores; it depends on no fitted number."""
    folded = np.zeros((len(vectors), folded_width(vectors.shape[1])), np.float32)
    folded[:, : vectors.shape[1]] = vectors
    folded[:, vectors.shape[1]] = b
    return folded


def fold_query(query: Vector, rule: ScoreRule) -> Vector:
    """query (D,) -> [q, -gamma, 0...] (W,): its product with a folded vector is score + beta*b(query)."""
    folded = np.zeros(folded_width(len(query)), np.float32)
    folded[: len(query)] = query
    folded[len(query)] = -rule.gamma
    return folded
