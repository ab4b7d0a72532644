"""A rule, its threshold for every gallery size, and the evidence for it."""

import math
import re
from functools import cached_property
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from roadmatch.errors import UnknownRule, UnsupportedRule

Share = Annotated[float, Field(ge=0, le=1)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Rate(_Record):
    """A share of searches, with its 95 % bounds where the evidence gives them."""

    value: Share
    low: Share | None = None
    high: Share | None = None


class Evidence(_Record):
    """What a point reached on searches that took no part in fitting its threshold.

    The bundle's score, one of a few, was chosen on all of them.
    """

    what: str
    pictures: int
    gallery_size: int
    searches_with_match: int
    searches_without_match: int
    recall: Rate
    false_match_rate: Rate
    precision: Rate
    match_share: Share
    distractors: int = 0
    """Things of which nothing is stored; their searches are none of those without a match, which are held-out ones."""
    distractor_match_rate: Rate | None = None
    """Their share that was answered `match`."""


class AppliedThreshold(_Record):
    """The threshold of a point in a gallery of a given size."""

    value: float
    gallery_size: int
    """The size it holds for: the gallery's own, rounded up to a power of two so that it does not creep."""
    extrapolated: bool
    """Whether that size lies beyond what the evidence can show by itself."""


class OperatingPoint(_Record):
    """A rule with its thresholds on the score, item i for a gallery of 2**i, and the evidence."""

    rule: str
    stated_false_match_rate: Share | None
    """The rate that the rule promises, where it promises one."""
    match_share: Share | None = None
    supported: bool
    least_rate: Share | None = None
    """Where unsupported: the least rate that the evidence could show."""
    thresholds: tuple[float, ...] = ()
    shown_up_to: int = 0
    """The largest gallery size whose threshold asks for no lesser rate than the pairs of pictures can show."""
    evidence: Evidence | None = None
    shifted: Evidence | None = None
    """The same on copies of other strengths than those that were fitted; no bounds are claimed."""

    @model_validator(mode="after")
    def _supported_points_are_whole(self) -> Self:
        if self.supported and not (self.thresholds and self.evidence):
            raise ValueError(f"operating point {self.rule} is called supported but has no thresholds or no evidence")
        return self

    def threshold(self, gallery_size: int) -> AppliedThreshold:
        """The threshold for a gallery of so many items; an empty one counts as one item. Raises UnsupportedRule."""
        step = (max(gallery_size, 1) - 1).bit_length()
        if step >= len(self.thresholds):
            largest = 2 ** (len(self.thresholds) - 1)
            raise UnsupportedRule(
                f"{self.rule} can be shown in galleries of up to {largest} items: choose another rule"
            )
        return AppliedThreshold(
            value=self.thresholds[step], gallery_size=2**step, extrapolated=2**step > self.shown_up_to
        )


class Curves(_Record):
    """Shares of all fitting searches at or above a score, for what is expected in a gallery of any size."""

    scores: tuple[float, ...]
    """Ascending."""
    pair_rate: tuple[Annotated[float, Field(gt=0, le=1)], ...]
    """Share of the non-matching (query, picture) pairs at or above each score."""
    found: tuple[Share, ...]
    """Share of the searches whose picture is there that give it at least this score."""

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        return np.array(self.scores), np.log(np.array(self.pair_rate)), np.array(self.found)

    def expected_false_match_rate(self, threshold: float, gallery_size: int) -> float:
        """1-(1-f)^N with f the pair rate at the threshold: searches without a match that are answered `match`."""
        scores, log_rate, _ = self._arrays
        pair_rate = 0.0 if threshold > scores[-1] else math.exp(float(np.interp(threshold, scores, log_rate)))
        return -math.expm1(gallery_size * math.log1p(-min(pair_rate, 1 - 1e-12)))

    def expected_recall(self, threshold: float) -> float:
        """Share of searches whose picture is there that reach the threshold."""
        scores, _, found = self._arrays
        return float(np.interp(threshold, scores, found, right=0.0))


class OperatingPoints(_Record):
    """All points of a bundle, fitted for one embedder, background and score."""

    format: int = 1
    model: str
    """sha256 of what the scores depend on; a bundle refuses points fitted for another model."""
    default_rule: str
    curves: Curves
    points: tuple[OperatingPoint, ...]

    def point(self, rule: str) -> OperatingPoint:
        """The supported point of this rule. Raises UnknownRule, UnsupportedRule."""
        found = next((point for point in self.points if point.rule == rule), None)
        if found is None:
            self._refuse_what_cannot_be_shown(rule)
            known = ", ".join(point.rule for point in self.points if point.supported)
            raise UnknownRule(f"the bundle has no operating point {rule!r}: use one of {known}")
        if not found.supported:
            least = "" if found.least_rate is None else f"; the least rate it can show is {found.least_rate:.3g}"
            raise UnsupportedRule(f"the bundle's evidence cannot show {rule}{least}: calibrate on more pictures")
        return found

    def _refuse_what_cannot_be_shown(self, rule: str) -> None:
        asked = re.fullmatch(r"false_match_rate<=(0?\.\d+|\d+e-\d+)", rule)
        pictures = max((point.evidence.pictures for point in self.points if point.evidence), default=0)
        if asked and pictures and float(asked[1]) < 3 / pictures:
            raise UnsupportedRule(
                f"the bundle's evidence cannot show {rule}; the least rate that {pictures} pictures can show is "
                f"{3 / pictures:.2g}: calibrate on more"
            )


def promise(points: OperatingPoints, point: OperatingPoint, gallery_size: int, self_check: float | None) -> str:
    """The promise in words: what was measured, and what is expected in a gallery of this many images."""
    evidence = point.evidence
    if evidence is None:
        raise ValueError(f"{point.rule} has no evidence")
    false, recall = evidence.false_match_rate, evidence.recall
    measured = (
        f"On {evidence.what}, {evidence.pictures} pictures not used for fitting, "
        f"{_percent(false.value)}{_bounds(false)} of searches without a match in a gallery of {evidence.gallery_size} "
        f"were answered `match`{_distractors(evidence)}, and {_percent(recall.value)} of those with one were found."
    )
    applied = point.threshold(gallery_size)
    expected = points.curves.expected_false_match_rate(applied.value, gallery_size)
    found = points.curves.expected_recall(applied.value)
    here = (
        f"Here, with {gallery_size} image{'' if gallery_size == 1 else 's'}, about {_percent(expected)} is expected, "
        f"and about {_percent(found)} found"
    )
    if applied.extrapolated:
        here += f" (extrapolated: the evidence reaches to {point.shown_up_to} images)"
    if self_check is not None:
        here += f"; the gallery's own images suggest at most {_percent(self_check)}"
    return f"{measured} {here}. Other kinds of pictures need their own calibration."


def _distractors(evidence: Evidence) -> str:
    rate = evidence.distractor_match_rate
    return "" if rate is None else f" ({_percent(rate.value)} of those of {evidence.distractors} distractors)"


def _bounds(rate: Rate) -> str:
    if rate.low is None or rate.high is None:
        return ""
    return f" (95 %: {_percent(rate.low)} to {_percent(rate.high)})"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.1f} %"
