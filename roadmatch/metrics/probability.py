"""From score to the probability of a match."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from sklearn.isotonic import IsotonicRegression

from roadmatch.metrics.ties import Bools, Floats, Scores


@dataclass(frozen=True)
class MatchProbability:
    """A rising map in straight pieces; below the first and above the last knot it is flat.

    ValueError for knots that are not that.
    """

    scores: tuple[float, ...]  # ascending
    probabilities: tuple[float, ...]  # in [0, 1], never falling

    def __post_init__(self) -> None:
        if not self.scores or len(self.scores) != len(self.probabilities):
            raise ValueError(f"{len(self.scores)} scores and {len(self.probabilities)} probabilities make no map")
        if not np.isfinite(self.scores).all() or (np.diff(self.scores) <= 0).any():
            raise ValueError("the scores of the knots must be numbers in ascending order")
        if not (np.diff([0.0, *self.probabilities, 1.0]) >= 0).all():
            raise ValueError("the probabilities of the knots must not fall and must lie in [0, 1]")

    def of(self, scores: ArrayLike) -> Floats:
        """scores of any shape -> probabilities. ValueError for a score that is not a number."""
        asked = np.asarray(scores, np.float64)
        if np.isnan(asked).any():
            raise ValueError("a score is not a number")
        return np.asarray(np.interp(asked, self.scores, self.probabilities))

    def as_lists(self) -> dict[str, list[float]]:
        """What `from_lists` takes, for JSON."""
        return {"scores": list(self.scores), "probabilities": list(self.probabilities)}

    @staticmethod
    def from_lists(scores: Sequence[float], probabilities: Sequence[float]) -> "MatchProbability":
        """The map that `as_lists` wrote."""
        return MatchProbability(tuple(scores), tuple(probabilities))


def fit_probability(scores: Scores, matches: Bools, match_share: float | None = None) -> MatchProbability:
    """scores (P,), matches (P,) -> the rising map with the least squared error (isotonic regression).

    A probability hangs on how common matches are: that of the sample, or `match_share`, to which the sample is then
    weighted. ValueError without matches or without others.
    """
    if len(scores) != len(matches) or not np.isfinite(scores).all():
        raise ValueError(f"{len(scores)} scores and {len(matches)} outcomes must be as many, and the scores numbers")
    count = int(np.count_nonzero(matches))
    if not 0 < count < len(matches):
        raise ValueError(f"a probability needs matches and others: {count} of {len(matches)} pairs match")
    if match_share is not None and not 0 < match_share < 1:
        raise ValueError(f"match_share must lie between 0 and 1, not {match_share}")
    share = count / len(matches) if match_share is None else match_share
    weights = np.where(matches, share / count, (1 - share) / (len(matches) - count))
    fitted = IsotonicRegression(y_min=0, y_max=1).fit(scores.astype(np.float64), matches.astype(np.float64), weights)
    probabilities = np.clip(np.maximum.accumulate(fitted.y_thresholds_), 0, 1)  # never falling, in the last digit too
    return MatchProbability(tuple(fitted.X_thresholds_.tolist()), tuple(probabilities.tolist()))
