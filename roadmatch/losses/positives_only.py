"""Smooth ranks of few positives a list, compared with every score of it: R x p x N sums and nothing larger."""

import torch
from torch import Tensor

from roadmatch.losses.ap_lists import Lists, Ranked, loss_of_ranks, with_positives
from roadmatch.losses.approximations import Sigmoid, UpperBound

_AT_ONCE = 1 << 19
"""Comparisons held at a time: 2 MiB each of a few float32, and the calls for them cost little beside them."""


def lists_at_once(positives: int, scores: int) -> int:
    """How many lists of this many positives and scores to rank in one go."""
    return max(1, _AT_ONCE // (positives * scores))


def ranked_by_sigmoid(lists: Lists, how: Sigmoid, *, slopes: bool) -> Ranked:
    """Ranks of sigmoids among positives and negatives."""
    positive, real, differences = _differences(lists)
    share = differences.mul_(1 / how.temperature).sigmoid_()  # (R, p, N)
    among = torch.sigmoid((positive[:, None, :] - positive[:, :, None]) / how.temperature) * real[:, None, :]
    loss, by_rank, by_negatives = loss_of_ranks(0.5 + among.sum(2, dtype=torch.float64), _total(share), real.double())
    if not slopes:
        return Ranked(loss, None)
    slope = torch.addcmul(share, share, share, value=-1, out=share)
    among_slope = (among * (1 - among)).double() / how.temperature
    by_negatives /= how.temperature
    of_positives = (by_rank[:, None, :] @ among_slope)[:, 0] - by_rank * among_slope.sum(2)
    return Ranked(loss, _gradient(lists, slope, by_negatives, of_positives - by_negatives * _total(slope)))


def ranked_by_upper_bound(lists: Lists, how: UpperBound, *, slopes: bool) -> Ranked:
    """True ranks among positives, and the upper bound's among negatives (UpperBound)."""
    positive, real, differences = _differences(lists)
    step = torch.gt if how.published else torch.ge
    total = step(differences, 0).sum(2) * 0.5
    beyond = (differences - how.knee_at).clamp_min_(0)  # (R, p, N)
    total = total + how.slope * _total(beyond)
    share = differences.clamp_(max=how.knee_at).mul_(1 / how.temperature).sigmoid_()
    total += _total(share)
    on_line = beyond.sign_()
    if how.jump:
        total += how.jump * _total(on_line)
    loss, _, by_negatives = loss_of_ranks(_true_ranks(positive, real, how), total, real.double())
    if not slopes:
        return Ranked(loss, None)
    slope = torch.addcmul(share, share, share, value=-1, out=share).mul_(1 / how.temperature)
    end = how.at_knee * (1 - how.at_knee) / how.temperature  # the clamped ones hold this instead of the line's slope
    slope = slope.add_(on_line, alpha=how.slope - end)
    return Ranked(loss, _gradient(lists, slope, by_negatives, -by_negatives * _total(slope)))


def _differences(lists: Lists) -> tuple[Tensor, Tensor, Tensor]:
    """Positive scores (R, p), which are real (R, p), and how far every negative is above each (R, p, N)."""
    positive, real = lists.apart_scores[:, : lists.positives], lists.real[:, : lists.positives]
    negative = lists.scores.scatter(1, lists.apart, -torch.inf)  # counts nothing in any sum
    return positive, real, negative[:, None, :] - positive[:, :, None]


def _true_ranks(positive: Tensor, real: Tensor, how: UpperBound) -> Tensor:
    """positive, real (R, p) -> (R, p) float64."""
    other, one = positive[:, None, :], positive[:, :, None]
    above = other > one
    if how.published:
        return ((other >= one) & real[:, None, :]).sum(2).double()
    before = torch.ones(positive.shape[1], positive.shape[1], dtype=torch.bool, device=positive.device).tril(-1)
    return 1 + ((above | ((other == one) & before)) & real[:, None, :]).sum(2).double()


def _total(terms: Tensor) -> Tensor:
    """(R, p, N) -> (R, p) float64."""
    return terms.sum(2).double()


def _gradient(lists: Lists, slope: Tensor, by_negatives: Tensor, of_positives: Tensor) -> Tensor:
    gradient = (by_negatives.to(slope.dtype)[:, None, :] @ slope)[:, 0]
    return with_positives(lists, gradient, lists.apart[:, : lists.positives], of_positives)
