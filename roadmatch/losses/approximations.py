"""How a rank is made smooth: the approximations that an average precision can be built on."""

import math
from dataclasses import dataclass

_LOW = 1e-2
"""The share of its rise that the sigmoid has left at the knee of the upper bound (ROADMAP, section 3.1)."""
_PUBLISHED_KNEE = 0.05
_PUBLISHED_OFFSET = 1.44


@dataclass(frozen=True)
class Sigmoid:
    """Every step is a sigmoid (Smooth-AP: Brown et al., 2020; gSAP over one list of all pairs).

    temperature: in units of similarity; 1e-4 to 5e-2 are useful. published: a query's pair with itself is one of
    its positives, as in the published Smooth-AP; per query only.
    """

    temperature: float = 0.01
    published: bool = False

    def __post_init__(self) -> None:
        _refuse_unless(0 < self.temperature < math.inf, f"temperature is {self.temperature}: above 0 is needed")


@dataclass(frozen=True)
class UpperBound:
    """Never less than the exact loss (SupAP: ROADMAP, Ramzi et al., 2021, eq. 4).

    A positive's rank among positives is the true one and has no gradient; ties are broken, so that it is 1, 2, 3... A
    negative that is t above a positive counts sigmoid(t / temperature), from t = 0 on half a unit more, and beyond
    `knee` it goes on as a straight line of this slope, without a jump. knee: temperature * ln(99) by default, where
    the sigmoid is at 0.99; at least the temperature.

    published: the arithmetic of the published code. A query's pair with itself is one of its positives; tied
    positives all count; t = 0 has no half unit; the knee is 0.05 by default and the line begins at 1.44, below the
    sigmoid's end. It is not an upper bound at ties; per query only.
    """

    temperature: float = 0.01
    slope: float = 100.0
    knee: float | None = None
    published: bool = False

    def __post_init__(self) -> None:
        _refuse_unless(0 < self.temperature < math.inf, f"temperature is {self.temperature}: above 0 is needed")
        _refuse_unless(0 <= self.slope < math.inf, f"slope is {self.slope}: it cannot fall")
        knee = self.knee_at
        _refuse_unless(self.temperature <= knee < math.inf, f"knee is {knee}: below the temperature {self.temperature}")

    @property
    def knee_at(self) -> float:
        """Where the straight line begins."""
        if self.knee is not None:
            return self.knee
        return _PUBLISHED_KNEE if self.published else self.temperature * math.log((1 - _LOW) / _LOW)

    @property
    def at_knee(self) -> float:
        """The sigmoid at the knee."""
        return 1 / (1 + math.exp(-self.knee_at / self.temperature))

    @property
    def jump(self) -> float:
        """What the line begins above the sigmoid's end: 0, or below 0 as published."""
        return _PUBLISHED_OFFSET - self.at_knee - 0.5 if self.published else 0.0


@dataclass(frozen=True)
class SoftBins:
    """Scores are shared between the two bins around them (FastAP: Cakir et al., 2019; SoftBinAP: Revaud et al., 2019).

    bins: their centres stand evenly from -1 to 1, both included. SoftBinAP has 20; FastAP's 10 are the spaces between
    11 centres.
    """

    bins: int = 20

    def __post_init__(self) -> None:
        _refuse_unless(self.bins >= 2, f"bins is {self.bins}: at least 2 are needed")


@dataclass(frozen=True)
class BlackBox:
    """The exact ranks, and as their gradient how they change when scores are moved along the loss's (Rolinek, 2020).

    strength: lambda, how far they are moved. margin: negatives are ranked half of it too high and positives half of it
    too low.
    """

    strength: float = 4.0
    margin: float = 0.02

    def __post_init__(self) -> None:
        _refuse_unless(0 < self.strength < math.inf, f"strength is {self.strength}: above 0 is needed")
        _refuse_unless(0 <= self.margin < math.inf, f"margin is {self.margin}: 0 or more is needed")


@dataclass(frozen=True)
class Step:
    """The exact ranks, with no gradient; a negative tied with a positive counts against it."""


Approximation = Sigmoid | UpperBound | SoftBins | BlackBox | Step


def _refuse_unless(right: bool, message: str) -> None:
    if not right:
        raise ValueError(message)
