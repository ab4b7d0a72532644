"""True ranks, counted."""

import torch
from torch import Tensor

from roadmatch.losses.ap_lists import Ascending, Lists, Ranked, loss_of_ranks

_AT_ONCE = 1 << 18
"""Scores counted at a time."""


def lists_at_once(scores: int) -> int:
    """How many lists of so many scores to rank in one go."""
    return max(1, _AT_ONCE // scores)


def column_parts(lists: Lists) -> list[Tensor]:
    """The scores of lists, so many columns at a time that what is made beside them stays small."""
    return list(torch.split(lists.scores, lists_at_once(len(lists.scores)), dim=1))


def ranked_by_step(lists: Lists) -> Ranked:
    """True ranks; a negative tied with a positive is above it."""
    positives = Ascending.of(lists)
    negatives = negatives_from(lists, positives.scores)
    return Ranked(loss_of_ranks(positives.rank, negatives, positives.real)[0], None)


def negatives_from(lists: Lists, edges: Tensor) -> Tensor:
    """edges (R, p) float64 ascending -> (R, p) float64: how many negatives are at least as high as each."""
    counts = edges.new_zeros(len(edges), edges.shape[1] + 1)
    for scores in column_parts(lists):
        _count_into(counts, edges, scores, counts.new_ones(scores.shape))
    _count_into(counts, edges, lists.apart_scores, -lists.real.double())
    return counts.flip(1).cumsum(1).flip(1)[:, 1:]


def _count_into(counts: Tensor, edges: Tensor, scores: Tensor, weights: Tensor) -> None:
    """Scores (R, n) are added to the counts (R, p + 1) of those between one edge and the next."""
    counts.scatter_add_(1, torch.searchsorted(edges, scores.double(), right=True), weights)
