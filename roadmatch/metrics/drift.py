"""Whether the scores seen live are still those that the thresholds were fitted on."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from roadmatch.metrics.ties import Floats, Scores

BINS = 10
LEAST_SCORES = 100
"""So many live scores show a shift of half a standard deviation in nine of ten checks against 2,000 of the calibration,
in two of three against as few."""
SIGNIFICANCE = 0.01
"""Of a hundred checks without drift about one is reported at most, whatever the sizes of the samples."""
MODERATE, LARGE = 0.1, 0.25
"""The customary marks; the index of a shift by d standard deviations is about d squared, so these are .3 and .5."""
_NO_COUNT = 0.5
_TERMS = 100


class Verdict(Enum):
    """What to do about it: nothing; look at it; calibrate anew."""

    TOO_FEW = "too few live scores to tell"
    STABLE = "no drift is shown, or one too small to matter"
    MODERATE = "the scores have shifted"
    LARGE = "the scores have shifted so far that the thresholds no longer stand for their rates"


@dataclass(frozen=True)
class Drift:
    """The verdict and its figures, which there are unless the scores are too few."""

    verdict: Verdict
    stability_index: float | None  # population stability index, 0 for like distributions
    greatest_gap: float | None  # of the distribution functions: Kolmogorov and Smirnov's statistic
    p_value: float | None  # of so great a gap between samples of one distribution
    calibration: int
    live: int


def check_drift(calibration: Scores, live: Scores) -> Drift:
    """calibration (N,), live (M,) scores of one kind, say the best of each search -> verdict.

    A drift must be both shown (the two-sample test, which knows the sizes) and large enough to matter (the index, which
    does not). Too few live scores are no error: a service starts with none. ValueError for a calibration sample that is
    too small or has one value only, and for scores that are not numbers.
    """
    if len(calibration) < LEAST_SCORES:
        raise ValueError(f"{len(calibration)} scores of the calibration are too few: {LEAST_SCORES} are needed")
    if not (np.isfinite(calibration).all() and np.isfinite(live).all()):
        raise ValueError("a score is not a number")
    if len(live) < LEAST_SCORES:
        return Drift(Verdict.TOO_FEW, None, None, None, len(calibration), len(live))
    index = stability_index(calibration, live)
    gap = greatest_gap(calibration, live)
    p_value = p_value_of_gap(gap, len(calibration), len(live))
    verdict = Verdict.STABLE
    if p_value < SIGNIFICANCE and index >= MODERATE:
        verdict = Verdict.LARGE if index >= LARGE else Verdict.MODERATE
    return Drift(verdict, index, gap, p_value, len(calibration), len(live))


def stability_index(calibration: Scores, live: Scores, bins: int = BINS) -> float:
    """calibration (N,), live (M,) -> sum of (live - expected) * log(live / expected) over the calibration's deciles.

    Half a score is added to every bin, so that an empty one counts much and not infinitely. Deciles that coincide are
    one. ValueError for a calibration sample of one value.
    """
    edges = np.unique(np.quantile(calibration.astype(np.float64), np.arange(1, bins) / bins))
    if np.ptp(calibration) == 0:
        raise ValueError(f"the stability index is undefined: every score of the calibration is {calibration[0]}")
    expected, seen = (_shares(scores, edges) for scores in (calibration, live))
    return float(np.sum((seen - expected) * np.log(seen / expected)))


def greatest_gap(one: Scores, other: Scores) -> float:
    """one (N,), other (M,) -> the greatest difference of their distribution functions, in [0, 1]."""
    places = np.unique(np.concatenate([one, other]))
    below = [np.searchsorted(np.sort(scores), places, side="right") / len(scores) for scores in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def p_value_of_gap(gap: float, one: int, other: int) -> float:
    """The asymptotic p-value with Stephens' correction (1970); it errs to the safe side where scores are tied."""
    size = np.sqrt(one * other / (one + other))
    scaled = (size + 0.12 + 0.11 / size) * gap
    if scaled < 0.2:  # the series needs ever more terms, and its sum is 1 to 12 digits
        return 1.0
    k = np.arange(1, _TERMS + 1)
    return float(np.clip(2 * np.sum((-1.0) ** (k - 1) * np.exp(-2 * (k * scaled) ** 2)), 0, 1))


def _shares(scores: Scores, edges: Floats) -> Floats:
    counts = np.bincount(np.searchsorted(edges, scores, side="right"), minlength=len(edges) + 1) + _NO_COUNT
    return np.asarray(counts / counts.sum())
