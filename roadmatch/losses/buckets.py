"""The steps and straight lines of the upper bound, summed without a comparison of every pair of scores.

Positives t and knees t + knee, in order, are the edges of buckets; what lies above an edge is a sum over the buckets
above it, and what lies below a score is a sum over the edges below it. Beyond its knee the upper bound has a straight
line instead of the sigmoid; 1 - sigmoid(x) is the sum over k = 1, 2... of (-1)^(k-1) e^(-k x), whose terms are
products of one part for the score and one for the edge.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from roadmatch.losses.ap_lists import Ascending, Lists
from roadmatch.losses.approximations import UpperBound
from roadmatch.losses.exact import column_parts

_EXACT = 23.0
"""Terms of the sum are taken until they are below e^-23, 1e-10."""


@dataclass(frozen=True, eq=False)
class Buckets:
    """R lists with up to p positives each.

    edges (R, 2 p): positives and knees, ascending, moved up by a rounding where only what is above them counts.
    step, knee (R, p): where each positive and its knee stand among the edges. knees (R, p) ascending.
    knees_below (R, 2 p + 1): how many knees are not above each bucket.
    """

    how: UpperBound
    edges: Tensor
    step: Tensor
    knee: Tensor
    knees: Tensor
    knees_below: Tensor

    @staticmethod
    def of(positives: Ascending, how: UpperBound) -> "Buckets":
        """The buckets of the positives of each list."""
        infinity = torch.full_like(positives.scores, torch.inf)
        knees = positives.scores + how.knee_at
        steps = torch.nextafter(positives.scores, infinity) if how.published else positives.scores
        edges, order = torch.cat([steps, torch.nextafter(knees, infinity)], 1).sort(dim=1, stable=True)
        place = torch.empty_like(order).scatter_(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        count = knees.shape[1]
        is_knee = (order >= count).long()
        below = torch.nn.functional.pad(is_knee.cumsum(1), (1, 0))
        return Buckets(how, edges, place[:, :count], place[:, count:], knees, below)

    def of_scores(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """scores (R, n) -> the bucket of each, how many knees are below, and e^(-(score - the last) / temperature)."""
        scores = scores.double()
        bucket = torch.searchsorted(self.edges, scores, right=True)
        knees_below = self.knees_below.gather(1, bucket)
        last = self.knees.gather(1, (knees_below - 1).clamp_min_(0))
        return bucket, knees_below, torch.exp((last - scores).clamp_max_(0) / self.how.temperature)

    @property
    def signs(self) -> list[float]:
        """Of the terms of 1 - sigmoid from the knee on, times what each has lost at the knee: k = 1, 2..."""
        decay = self.how.knee_at / self.how.temperature
        return [(-1) ** (k - 1) * math.exp(-k * decay) for k in range(1, math.ceil(_EXACT / decay) + 1)]


@dataclass(frozen=True, eq=False)
class Above:
    """Of the negatives above each positive (R, p) float64: what they count beside the sigmoid, and its slope."""

    count: Tensor
    slope: Tensor


def above_positives(lists: Lists, buckets: Buckets) -> Above:
    """lists, their buckets -> what the negatives count beside sigmoid(x / temperature) over the whole range of x."""
    counts = torch.zeros_like(torch.nn.functional.pad(buckets.edges, (0, 1)))
    sums, tails = torch.zeros_like(counts), [torch.zeros_like(buckets.knees) for _ in buckets.signs]
    for scores in column_parts(lists):
        _fill(buckets, scores, torch.ones_like(scores, dtype=torch.float64), counts, sums, tails)
    _fill(buckets, lists.apart_scores, -lists.real.double(), counts, sums, tails)
    how = buckets.how
    higher, total = _from_above(counts)[:, 1:], _from_above(sums)[:, 1:]
    beyond = higher.gather(1, buckets.knee)
    line = how.slope * (total.gather(1, buckets.knee) - beyond * buckets.knees)
    count = 0.5 * higher.gather(1, buckets.step) + line + beyond * (how.at_knee - 1 + how.jump)
    slope = how.slope * beyond
    for k, (sign, tail) in enumerate(zip(buckets.signs, tails, strict=True), start=1):
        rest = _decayed(tail.flip(1), -buckets.knees.flip(1), k / how.temperature).flip(1)
        count += sign * rest
        slope -= sign * k / how.temperature * rest
    return Above(count, slope)


def slopes_below(scores: Tensor, buckets: Buckets, weights: Tensor) -> Tensor:
    """scores (R, n), weights (R, p) of the positives -> (R, n) float64: their sum of slopes beside the sigmoid's."""
    how = buckets.how
    _, below, decay = buckets.of_scores(scores)
    result = how.slope * torch.nn.functional.pad(weights.cumsum(1), (1, 0)).gather(1, below)
    power = torch.ones_like(decay)
    for k, sign in enumerate(buckets.signs, start=1):
        power *= decay
        rest = torch.nn.functional.pad(_decayed(weights, buckets.knees, k / how.temperature), (1, 0))
        result.addcmul_(power, rest.gather(1, below), value=-sign * k / how.temperature)
    return result


def _fill(buckets: Buckets, scores: Tensor, weights: Tensor, counts: Tensor, sums: Tensor, tails: list[Tensor]) -> None:
    """scores, weights (R, n) -> added to counts and sums (R, 2 p + 1) and to each power's tail above knees (R, p)."""
    bucket, below, decay = buckets.of_scores(scores)
    counts.scatter_add_(1, bucket, weights)
    sums.scatter_add_(1, bucket, weights * scores)
    knee = (below - 1).clamp_min_(0)
    power = weights * (below > 0)
    for tail in tails:
        power *= decay
        tail.scatter_add_(1, knee, power)


def _from_above(values: Tensor) -> Tensor:
    return values.flip(1).cumsum(1).flip(1)


def _decayed(values: Tensor, places: Tensor, rate: float) -> Tensor:
    """values (R, p) at ascending places (R, p) -> (R, p): the sum of those up to each times e^(-rate * space)."""
    exponent = rate * places
    return torch.exp(torch.logcumsumexp(values.clamp_min(0).log() + exponent, 1) - exponent)
