"""Recall at k, made smooth: the surrogate that RS@k trains with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roadmatch.losses.pairs import Pairs

_BLOCK = 1 << 18
"""Comparisons that are held at a time: they stay near the processor."""


@dataclass(frozen=True)
class RecallAtK:
    """One minus smoothed recall, mean over k and over the queries that have positives (Patel et al., 2022).

    Rank of a positive p: r = 1 + sum over the other candidates j of sigmoid((s_j - s_p) / temperature). Recall at k:
    min(k, sum over positives of sigmoid((k - r) / rank_temperature)) / min(k, positives). A perfect ranking is no zero
    loss: its first positive counts a half at k = 1. published: as in the published code, where the pairs left out, an
    image with itself, take part in the ranks, which are one too high, and no k is above the number of candidates.
    Raises ValueError for temperatures that are not positive, and for no k or one below 1.
    """

    ks: tuple[int, ...] = (1, 2, 4, 8, 16)
    temperature: float = 0.01
    rank_temperature: float = 1.0
    published: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0 or not self.rank_temperature > 0:
            raise ValueError(f"temperatures {self.temperature} and {self.rank_temperature}: they have to be positive")
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"recall at {self.ks}: give ks of 1 and above")

    def __call__(self, pairs: Pairs) -> Tensor:
        """pairs -> () loss."""
        if len(pairs.positives) == 0:
            return pairs.nothing()
        left_out = pairs.left_out[:0] if self.published else pairs.left_out
        ranks: Tensor = _Ranks.apply(pairs.similarity, pairs.positives, left_out, self.temperature)
        ks = ranks.new_tensor([min(k, pairs.shape[1]) if self.published else k for k in self.ks])
        within = torch.sigmoid((ks - ranks[:, None]) / self.rank_temperature)  # (P, K)
        rows = pairs.positives // pairs.shape[1]
        found = within.new_zeros(pairs.shape[0], len(ks)).index_add(0, rows, within)
        asked = pairs.positives_per_query > 0
        recall = torch.minimum(found, ks) / torch.minimum(pairs.positives_per_query[:, None], ks)
        return 1 - recall[asked].mean()


class _Ranks(torch.autograd.Function):
    """Smoothed ranks of the positives among their query's candidates, a block of positives at a time."""

    @staticmethod
    def forward(ctx: Any, similarity: Tensor, positives: Tensor, left_out: Tensor, temperature: float) -> Tensor:
        """similarity (Q, N), positives (P,), left_out (L,) -> ranks (P,)."""
        scores = similarity
        if len(left_out):  # behind all others, where they add nothing
            scores = similarity.flatten().index_fill(0, left_out, -torch.inf).view_as(similarity)
        ctx.save_for_backward(scores, positives)
        ctx.temperature = temperature
        ranks = [torch.sigmoid(ahead).sum(dim=1) for _, ahead in _comparisons(scores, positives, temperature)]
        return torch.cat(ranks) + 0.5  # a positive is its own equal: it has counted a half, and the best rank is 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        scores, positives = ctx.saved_tensors
        result, own = torch.zeros_like(scores), []
        weights = torch.split(gradient / ctx.temperature, _rows_at_a_time(scores))
        for (rows, ahead), weight in zip(_comparisons(scores, positives, ctx.temperature), weights, strict=True):
            share = torch.sigmoid(ahead)
            slope = share * (1 - share) * weight[:, None]
            result.index_add_(0, rows, slope)
            own.append(slope.sum(dim=1))
        result.view(-1).index_add_(0, positives, -torch.cat(own))
        return result, None, None, None


def _comparisons(scores: Tensor, positives: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows (R,) of some positives, and how far each candidate is ahead of them (R, N), in temperatures."""
    columns = scores.shape[1]
    for block in torch.split(positives, _rows_at_a_time(scores)):
        rows = block // columns
        yield rows, (scores[rows] - scores.view(-1)[block][:, None]) / temperature


def _rows_at_a_time(scores: Tensor) -> int:
    return max(1, _BLOCK // scores.shape[1])
