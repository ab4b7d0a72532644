"""Average precision of soft histograms: its cost does not depend on the number of positives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from roadmatch.losses.ap_lists import Lists, Ranked
from roadmatch.losses.approximations import SoftBins
from roadmatch.losses.exact import column_parts


@dataclass(frozen=True, eq=False)
class _Shares:
    """below (R, n): the bin under each score. above (R, n): its share of the next bin, the rest is its own."""

    below: Tensor
    above: Tensor
    inside: Tensor

    @staticmethod
    def of(scores: Tensor, bins: int) -> "_Shares":
        place = (scores.double() + 1) * ((bins - 1) / 2)
        below = place.floor().clamp_(0, bins - 2)
        above = place - below
        return _Shares(below.long(), above.clamp(0, 1), (above >= 0) & (above <= 1))


def ranked_by_soft_bins(lists: Lists, how: SoftBins, *, slopes: bool) -> Ranked:
    """Precision at a bin is of all that is in it or above (FastAP, eq. 9; SoftBinAP, eq. 9)."""
    parts = column_parts(lists)
    every = sum(_histogram(part, None, how.bins) for part in parts)
    apart, real = lists.apart_scores, lists.real.double()
    positive = _histogram(apart[:, : lists.positives], real[:, : lists.positives], how.bins)
    negative = every - _histogram(apart, real, how.bins)
    loss, of_positive, of_negative = _loss_of_histograms(positive, negative)
    if not slopes:
        return Ranked(loss, None)
    gradient = torch.cat([_slopes(part, of_negative, how.bins) for part in parts], 1)
    of_positives = _slopes(apart[:, : lists.positives], of_positive, how.bins) * lists.real[:, : lists.positives]
    gradient.scatter_(1, lists.apart, 0.0)
    return Ranked(loss, gradient.scatter_add_(1, lists.apart[:, : lists.positives], of_positives))


def _histogram(scores: Tensor, weights: Tensor | None, bins: int) -> Tensor:
    """scores (R, n), weights (R, n) or 1 -> (R, bins) float64."""
    shares = _Shares.of(scores, bins)
    weights = torch.ones_like(shares.above) if weights is None else weights
    upper = shares.above * weights
    counts = upper.new_zeros(len(scores), bins).scatter_add_(1, shares.below, weights - upper)
    return counts.scatter_add_(1, shares.below + 1, upper)


def _loss_of_histograms(positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """positive, negative (R, bins) -> loss (R,), its slopes in both (R, bins)."""
    negatives = _from_above(negative)
    total = negatives + _from_above(positive)
    total = torch.where(total > 0, total, 1.0)  # nothing stands there: 0 / 1
    number = positive.sum(1, keepdim=True)
    worse = positive * negatives / total
    of_positive = (negatives / total - (worse / total).cumsum(1)) / number
    of_negative = (positive * (total - negatives) / total**2).cumsum(1) / number
    return worse.sum(1) / number[:, 0], of_positive, of_negative


def _from_above(histogram: Tensor) -> Tensor:
    return histogram.flip(1).cumsum(1).flip(1)


def _slopes(scores: Tensor, of_bins: Tensor, bins: int) -> Tensor:
    """scores (R, n), of_bins (R, bins) -> (R, n) of the scores' type; 0 outside of [-1, 1]."""
    shares = _Shares.of(scores, bins)
    table = of_bins.diff(dim=1) * ((bins - 1) / 2)
    return (table.gather(1, shares.below) * shares.inside).to(scores.dtype)
