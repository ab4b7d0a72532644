"""A model's figures over the pairs that count, for similarities and for normalised scores."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roadmatch.metrics.global_ap import global_average_precision
from roadmatch.metrics.normalisation import background_levels, normalised
from roadmatch.metrics.opis import THRESHOLDS, Utilities, opis
from roadmatch.metrics.retrieval import matrix_retrieval_metrics
from roadmatch.metrics.thresholds import Curves, Fit, Grid
from roadmatch.scoring import ScoreRule, Vector

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Figures = dict[str, float]

PRECISION = 0.9
_GRID = Grid(-2, 2, 8001)  # a normalised score may leave the range of similarities
_FALSE_ACCEPTS = (0.1, 0.01)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Images of some classes, each of which asks the others: scores (N, N), labels (N,), counted (N, N)."""

    scores: NDArray[np.float32]
    labels: Ints
    counted: Bools

    @property
    def relevant(self) -> Bools:
        """(N, N), the diagonal too."""
        return np.asarray(self.labels[:, None] == self.labels)


@dataclass(frozen=True, eq=False)
class Images:
    """Embeddings (N, D), classes and vendors (N,), and the embeddings' background levels (N,)."""

    vectors: Vector
    labels: Ints
    vendors: Ints
    levels: Floats

    @staticmethod
    def of(vectors: Vector, labels: Ints, vendors: Ints, which: Ints, background: Ints, rule: ScoreRule) -> "Images":
        """vectors (M, D) of all images, of which `which` are taken."""
        levels = background_levels(vectors[which], vectors[background], rule.k)
        return Images(vectors[which], labels[which], vendors[which], levels)

    def pairs(self, rule: ScoreRule | None, *, across: bool) -> Pairs:
        """rule: None for similarities. across: pairs of one vendor do not count."""
        similarity = self.vectors @ self.vectors.T
        scores = similarity if rule is None else normalised(similarity, self.levels, self.levels, rule)
        counted = self.vendors[:, None] != self.vendors if across else ~np.eye(len(self.vectors), dtype=bool)
        return Pairs(scores.astype(np.float32), self.labels, counted)


def judged(test: Pairs, validation: Pairs) -> Figures:
    """The figures of the test classes; the shared thresholds are fitted on the validation classes.

    P at R@P90, the precision that is reached in the test, is missing where nothing is accepted.
    """
    lists = matrix_retrieval_metrics(test.scores, test.relevant, test.counted, ks=(1,))
    fitting, curves = curves_of(validation), curves_of(test)
    best, sure = fitting.step_of_highest_f1(Fit.PER_QUERY), fitting.step_of_precision(PRECISION)
    figures = {
        "R@1": lists.recall_at[1],
        "mAP": lists.mean_average_precision,
        "gAP": global_average_precision(test.scores, test.relevant, test.counted),
        "F1g": float(curves.f1[best] / curves.queries),
        "F1q": curves.best_f1 / curves.queries,
        "R@P90": 0.0 if sure is None else float(curves.true[sure] / curves.relevant),
        "OPIS": opis(utilities(test)).value,
    }
    reached = None if sure is None else curves.precision(sure)
    return figures if reached is None else figures | {"P at R@P90": reached}


def curves_of(pairs: Pairs) -> Curves:
    """Counts at each threshold of a fine grid."""
    return Curves.of(_GRID.steps(pairs.scores), pairs.relevant, pairs.counted, _GRID.count)


def utilities(pairs: Pairs) -> Utilities:
    """As `roadmatch.metrics.opis.class_utilities`, of scores and of the pairs that count."""
    matching, other = pairs.relevant & pairs.counted, ~pairs.relevant & pairs.counted
    low, high = (float(np.quantile(pairs.scores[other], 1 - rate)) for rate in _FALSE_ACCEPTS)
    thresholds = np.linspace(low, high, THRESHOLDS)
    sensitivity = _accepted_share(pairs, matching, thresholds)
    specificity = 1 - _accepted_share(pairs, other, thresholds)
    total = sensitivity + specificity
    return Utilities(thresholds, 2 * sensitivity * specificity / np.where(total > 0, total, 1), 0)


def _accepted_share(pairs: Pairs, counted: Bools, thresholds: Floats) -> Floats:
    """(C, T) share of each class's pairs that reach each threshold."""
    which = np.unique(pairs.labels, return_inverse=True)[1]
    bins = len(thresholds) + 1
    row, column = np.nonzero(counted)
    reached = np.searchsorted(thresholds, pairs.scores[row, column].astype(np.float64), side="right")
    counts = np.bincount(which[row] * bins + reached, minlength=(which.max() + 1) * bins).reshape(-1, bins)
    reaching = np.cumsum(counts[:, :0:-1], axis=1)[:, ::-1]
    return np.asarray(reaching / counts.sum(axis=1, keepdims=True))
