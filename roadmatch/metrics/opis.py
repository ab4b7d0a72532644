"""How differently the classes fare at one threshold: the operating-point inconsistency score, and its tail form."""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roadmatch.metrics.thresholds import Grid
from roadmatch.metrics.ties import Floats, Scores

Ints = NDArray[np.int64]

THRESHOLDS = 101
_FINE = Grid(count=40001)
_PAIRS_AT_ONCE = 1 << 21
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Utilities:
    """What each class gets at each threshold of a range: harmonic mean of its two rates of right decisions."""

    thresholds: Floats  # (T,) ascending, equally spaced
    utility: Floats  # (C, T)
    left_out: int  # classes with less than two images: they have no matching pair


@dataclass(frozen=True)
class Inconsistency:
    """0: every class fares alike. The number says nothing without its range."""

    value: float
    low: float  # similarity range
    high: float
    classes: int
    left_out: int


def class_utilities(
    embeddings: Scores,
    classes: ArrayLike,
    *,
    false_accept_rates: tuple[float, float] = (1e-2, 1e-1),
    similarity_range: tuple[float, float] | None = None,
) -> Utilities:
    """embeddings (N, D) unit length, classes (N,) -> utilities at 101 thresholds.

    A class's pairs are those of its images (match) and those of one of its images with another class's (no match). The
    range is where the share of accepted non-matching pairs of all classes falls from the second to the first rate, to
    5e-5, or the range given, which makes two models comparable at the same similarities. Rows are worked on in blocks.
    ValueError for less than two classes with two images, or an empty range.
    """
    single = np.promote_types(embeddings.dtype, np.float32)  # half types are too coarse for similarities
    embeddings = embeddings.astype(single, copy=False)
    names, which = np.unique(np.asarray(classes), return_inverse=True)
    images = np.bincount(which)
    counted = images >= 2
    if counted.sum() < 2:
        raise ValueError(f"OPIS compares classes: {counted.sum()} of {len(names)} have two images or more")
    low, high = similarity_range or _range(embeddings, which, false_accept_rates)
    if not low < high:
        raise ValueError(f"the range of thresholds is empty: {low} to {high}")
    thresholds = np.linspace(low, high, THRESHOLDS)
    matches, others = _accepted(embeddings, which, thresholds)
    sensitivity = matches[counted] / (images * (images - 1))[counted, None]
    specificity = 1 - others[counted] / (images * (len(which) - images))[counted, None]
    total = sensitivity + specificity
    utility = 2 * sensitivity * specificity / np.where(total > 0, total, 1)
    return Utilities(thresholds, utility, int((~counted).sum()))


def opis(utilities: Utilities) -> Inconsistency:
    """Mean over the range of the classes' variance in utility (Zhang et al., 2024, arXiv 2307.04047)."""
    mean = utilities.utility.mean(axis=0)
    return _over_range(utilities, ((utilities.utility - mean) ** 2).mean(axis=0))


def opis_tail(utilities: Utilities, eps: float = 0.1) -> Inconsistency:
    """Mean over the range of the squared gap between the best and the worst eps of the classes at each threshold.

    Our reading of the paper's epsilon-OPIS, whose formula we have not seen: compare it with itself only.
    """
    if not 0 < eps <= 0.5:
        raise ValueError(f"eps must lie in (0, 0.5], not {eps}")
    ordered = np.sort(utilities.utility, axis=0)
    some = ceil(eps * len(ordered) - _ROUNDING)
    return _over_range(utilities, (ordered[-some:].mean(axis=0) - ordered[:some].mean(axis=0)) ** 2)


def _over_range(utilities: Utilities, squared: Floats) -> Inconsistency:
    low, high = float(utilities.thresholds[0]), float(utilities.thresholds[-1])
    value = float(np.trapezoid(squared, utilities.thresholds)) / (high - low)
    return Inconsistency(value, low, high, len(utilities.utility), utilities.left_out)


def _range(embeddings: Scores, which: Ints, rates: tuple[float, float]) -> tuple[float, float]:
    """The lowest thresholds of a fine grid that accept no more than these shares of the non-matching pairs."""
    strict, loose = rates
    if not 0 < strict < loose < 1:
        raise ValueError(f"false accept rates must ascend between 0 and 1, not {rates}")
    counts = np.zeros(_FINE.count, np.int64)
    for rows in _blocks(len(which)):
        different = which[rows, None] != which
        counts += np.bincount(_FINE.steps(embeddings[rows] @ embeddings.T)[different], minlength=_FINE.count)
    share = np.cumsum(counts[::-1])[::-1] / counts.sum()
    if share[-1] > strict:
        raise ValueError(f"{share[-1]:.2g} of the non-matching pairs have a similarity of 1: no threshold has {strict}")
    low, high = (float(_FINE.values[np.argmax(share <= rate)]) for rate in (loose, strict))
    return low, high


def _accepted(embeddings: Scores, which: Ints, thresholds: Floats) -> tuple[Floats, Floats]:
    """-> (C, T) accepted pairs of each class, ordered: with itself, without self matches, and with the others."""
    bins = len(thresholds) + 1
    counts = np.zeros(2 * (which.max() + 1) * bins, np.int64)
    for rows in _blocks(len(which)):
        reached = np.searchsorted(thresholds, (embeddings[rows] @ embeddings.T).astype(np.float64), side="right")
        same = which[rows, None] == which
        at = (2 * which[rows, None] + same) * bins + reached
        counts += np.bincount(at[np.arange(len(which)) != rows[:, None]], minlength=len(counts))
    reaching = np.cumsum(counts.reshape(-1, 2, bins)[:, :, :0:-1], axis=2)[:, :, ::-1]
    return reaching[:, 1].astype(np.float64), reaching[:, 0].astype(np.float64)


def _blocks(images: int) -> list[Ints]:
    size = max(1, _PAIRS_AT_ONCE // images)
    return [np.arange(at, min(at + size, images)) for at in range(0, images, size)]
