"""Exact ranks with the gradient of a black box (Vlastelica, 2020; for ranks: Rolinek et al., 2020)."""

import torch
from torch import Tensor

from roadmatch.losses.ap_lists import Ascending, Lists, Ranked, loss_of_ranks, with_positives
from roadmatch.losses.approximations import BlackBox
from roadmatch.losses.exact import column_parts, negatives_from


def ranked_by_black_box(lists: Lists, how: BlackBox, *, slopes: bool) -> Ranked:
    """A rank's gradient is (rank of the moved scores - rank) / strength; scores move by strength * dloss/drank.

    As in the published code, a positive's rank among positives is a constant to the loss, so that positives alone
    move, and always up: negatives change their ranks where one overtakes them.
    """
    positives = Ascending.of(lists)
    edges = positives.scores - how.margin
    negatives = negatives_from(lists, edges)
    loss, _, by_total = loss_of_ranks(positives.rank, negatives, positives.real)
    if not slopes:
        return Ranked(loss, None)
    moved, order = (edges + how.strength * by_total).sort(dim=1, stable=True)
    ranks = _ranks(positives.real)  # padding stays where it is, the lowest
    after = torch.empty_like(edges).scatter_(1, order, negatives_from(lists, moved) + ranks)
    gradient = _overtaken(lists, edges, moved, ranks) / how.strength
    return Ranked(loss, with_positives(lists, gradient, positives.columns, (after - negatives - ranks) / how.strength))


def _ranks(real: Tensor) -> Tensor:
    """real (R, p), of ascending scores -> (R, p): how many positives each is the lowest of."""
    return real.flip(1).cumsum(1).flip(1)


def _overtaken(lists: Lists, edges: Tensor, moved: Tensor, ranks: Tensor) -> Tensor:
    """(R, N) of the lists' type: by how many positives each score is passed."""
    parts = [
        _above(moved, ranks, scores) - _above(edges, ranks, scores)
        for scores in (part.double() for part in column_parts(lists))
    ]
    return torch.cat(parts, 1).to(lists.scores.dtype)


def _above(edges: Tensor, ranks: Tensor, scores: Tensor) -> Tensor:
    """edges, ranks (R, p), scores (R, n) -> (R, n): how many positives are above each."""
    upwards = torch.nn.functional.pad(ranks, (0, 1))
    return upwards.gather(1, torch.searchsorted(edges, scores, right=True))
