"""Wrong verdicts, and how many of them the rule's bounds allow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from app.verdict import Rate
from demo.photographs import DemoError
from demo.questions import Asked

_QUANTILE = 0.99
_SIGMAS = 1.96
"""Half the width of a 95 % interval."""


@dataclass(frozen=True)
class Tally:
    """Wrong verdicts of one kind, of how many on how many photographs, and the most that the bounds allow."""

    kind: str
    wrong: int
    questions: int
    photographs: int
    rate: float
    """The highest that the rule's bounds allow, per search."""
    allowed: int

    @property
    def holds(self) -> bool:
        """Whether there are no more than allowed."""
        return self.wrong <= self.allowed

    @property
    def line(self) -> str:
        """For people."""
        sign = "" if self.holds else "  MORE THAN ALLOWED"
        return (
            f"{self.kind}: {self.wrong} of {self.questions} searches with {self.photographs} photographs; "
            f"at the bound of {100 * self.rate:.2g} % a search, 99 of 100 such trials have at most {self.allowed}{sign}"
        )


def tallies(asked: Sequence[Asked]) -> list[Tally]:
    """False matches and misses against the bounds that the answers state. Raises DemoError where they state none."""
    stated = next((one.verdict.stated_rate for one in asked if one.verdict.stated_rate is not None), None)
    if stated is None:
        raise DemoError("the answers state no rate: use a gallery with a rule")
    evidence = stated.evidence
    false_matches, recall = evidence.false_match_rate, evidence.recall
    if false_matches.high is None or recall.low is None or false_matches.low is None or recall.high is None:
        raise DemoError("the rule's rates have no bounds: use a bundle that is calibrated on copies")
    misses = Rate(value=1 - recall.value, low=1 - recall.high, high=1 - recall.low)
    return [
        _tally(
            "false matches",
            "false match",
            [one for one in asked if one.question.item is None],
            false_matches,
            evidence.searches_without_match,
        ),
        _tally(
            "misses",
            "missed",
            [one for one in asked if one.question.item is not None],
            misses,
            evidence.searches_with_match,
        ),
    ]


def _tally(kind: str, wrong: str, asked: Sequence[Asked], rate: Rate, searches: int) -> Tally:
    photographs = len({one.question.photograph for one in asked})
    assert rate.high is not None
    return Tally(
        kind,
        sum(one.wrong == wrong for one in asked),
        len(asked),
        photographs,
        rate.high,
        allowed(rate, searches, len(asked), photographs),
    )


def allowed(rate: Rate, searches: int, asked: int, photographs: int) -> int:
    """Wrong verdicts that come with probability 0.99 or more at the rate's upper bound.

    Searches with copies of one photograph are not independent, and how little they are worth stands in the rate itself:
    its bounds were drawn by resampling whole photographs, and of n independent searches they would be
    2 * 1.96 * sqrt(p * (1 - p) / n) apart. The n at which they are as far apart as stated, over the searches that there
    were, is what one search of ours is worth. At worst all copies of a photograph share one fate, so the searches are
    worth no fewer than the photographs. The quantile is taken among so many independent trials, each standing for
    asked / worth searches.
    """
    assert rate.low is not None
    assert rate.high is not None
    apart = rate.high - rate.low
    independent = rate.value * (1 - rate.value) * (2 * _SIGMAS / apart) ** 2 if apart else searches
    worth = min(asked, max(photographs, round(asked * independent / searches)))
    return math.floor(quantile(worth, rate.high) * asked / worth)


def quantile(trials: int, rate: float) -> int:
    """The least k with P(X <= k) >= 0.99, X binomial: `trials` independent trials, each true at `rate`."""
    total = 0.0
    for k in range(trials):
        total += math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k)
        if total >= _QUANTILE:
            return k
    return trials
