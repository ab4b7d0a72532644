"""Smoothed average precision of one list of all pairs, at the cost of a pass over their scores.

Every rank is a sum of sigmoids over the whole list, so all of them come from one particle mesh: O(pairs + G log G) for
a grid of G nodes, however many pairs are positive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roadmatch.losses.mesh import (
    Curve,
    Grid,
    deposit_into,
    grid_over,
    interpolated,
    sigmoid_sums,
    slope_sums,
    spread,
)
from roadmatch.losses.pairs import Pairs
from roadmatch.losses.score_blocks import Block, Blocks, OfMatrix, OfRows, OfThemselves

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes that hold rows of the list."""


def global_sigmoid_ap(pairs: Pairs, temperature: float, drop: float = 0.0) -> Tensor:
    """pairs -> () loss in [0, 1): 1 - (1/P) sum over positives i of a_i / b_i.

    a_i = 1 + the sum over other positives j of sigmoid((s_j - s_i) / temperature), b_i the same over all pairs (gSAP,
    Eq. 3). drop in [0, 1): the share of negatives, lowest first, that are left out (the paper's alpha). Embeddings
    whose similarities were not made yet are taken block by block, and no matrix is made. Without a positive the loss is
    zero and connected to the embeddings. Raises ValueError for another drop or temperature.
    """
    if not 0 <= drop < 1:
        raise ValueError(f"drop is {drop}: a share in [0, 1) is needed")
    if len(pairs.positives) == 0:
        return pairs.nothing()
    named = torch.cat([pairs.positives, pairs.left_out])
    if pairs.matrix_made or drop > 0:
        floor = _lowest_kept(pairs, drop) if drop > 0 else None
        loss: Tensor = _OfMatrix.apply(pairs.similarity, named, len(pairs.positives), temperature, floor)
    else:
        loss = _OfEmbeddings.apply(pairs.queries, pairs.candidates, named, len(pairs.positives), temperature)
    return loss


@dataclass(frozen=True, eq=False)
class Ranks:
    """What the backward pass needs of a list. scores (m,) float64: of the named pairs, the `count` positives first.

    above_positive, above_negative (P,) float64: how much of the list's positives (1 for itself included) and of its
    negatives is above each positive. nodal (2, G): positives and negatives on the grid. total: positives of all
    processes. floor: negatives below it do not count.
    """

    grid: Grid
    temperature: float
    scores: Tensor
    count: int
    total: int
    above_positive: Tensor
    above_negative: Tensor
    nodal: Tensor
    floor: float | None = None

    @property
    def share(self) -> Tensor:
        """() float64: this process's part of the loss."""
        return (self.above_negative / (self.above_positive + self.above_negative)).sum() / self.total


def ranks(
    blocks: Blocks,
    named: int,
    count: int,
    grid: Grid,
    temperature: float,
    *,
    like: Tensor,
    floor: float | None = None,
    reduce: Reduce = lambda tensor: tensor,
) -> Ranks:
    """One pass over the scores. named: number of named pairs. like: tells the device. reduce: see Reduce."""
    scores = like.new_empty(named, dtype=torch.float64)
    once, twice = (like.new_zeros((4, grid.nodes), dtype=torch.float64) for _ in range(2))
    for block in blocks:
        found = block.scores()
        scores[block.members] = found[block.places].double()
        deposit_into(once if block.weight == 1 else twice, grid, found, _kept(found, floor))
    everything = once.add_(twice, alpha=2)
    positive, taken = torch.zeros_like(twice), twice.zero_()
    deposit_into(positive, grid, scores[:count])
    deposit_into(taken, grid, scores, _kept(scores, floor))
    nodal = reduce(spread(torch.stack([positive, everything - taken], dim=1)))  # (2, G)
    above = interpolated(grid, sigmoid_sums(grid, nodal, temperature), scores[None, :count].expand(2, -1))
    total = int(reduce(torch.tensor(float(count), dtype=torch.float64, device=like.device)))
    # A positive's own share of the sum is exactly one half: what is spread is read off with the same weights.
    return Ranks(grid, temperature, scores, count, total, above[0] + 0.5, above[1].clamp_(min=0), nodal, floor)


def send_gradients(
    blocks: Blocks, ranks: Ranks, upstream: float, dtype: torch.dtype, reduce: Reduce = lambda tensor: tensor
) -> None:
    """Every block takes its gradient: the derivative of the sums themselves, not of what the mesh makes of them."""
    curve, on_named = _pulls(ranks, upstream, dtype, reduce)
    for block in blocks:
        _send(block, curve, on_named[block.members], ranks.floor)


def _pulls(ranks: Ranks, upstream: float, dtype: torch.dtype, reduce: Reduce) -> tuple[Curve, Tensor]:
    """The gradient as a function of a negative's score, and that of each named pair (m,)."""
    grid, temperature, positives = ranks.grid, ranks.temperature, ranks.scores[: ranks.count]
    place = ranks.above_positive + ranks.above_negative
    scale = upstream / ranks.total / place.square()
    # How the loss changes with the sums over positives and over negatives.
    by_sum = torch.stack([-ranks.above_negative * scale, ranks.above_positive * scale])  # (2, P)
    pulling = torch.stack([_spread_of(grid, positives, weights) for weights in by_sum])
    pull = slope_sums(grid, reduce(pulling), temperature)  # (2, G): on a positive, on a negative
    density = interpolated(grid, slope_sums(grid, ranks.nodal, temperature), positives.expand(2, -1))  # (2, P)
    on_named = torch.zeros_like(ranks.scores)
    on_named[: ranks.count] = interpolated(grid, pull[:1], positives[None])[0] - (by_sum * density).sum(0)
    return Curve(grid, pull[1], dtype), on_named.to(dtype)


def embedding_bounds(queries: Tensor, candidates: Tensor | None) -> tuple[float, float]:
    """queries (Q, D), candidates (N, D) or none -> no similarity is outside (Cauchy and Schwarz, and rounding)."""
    longest = queries.norm(dim=1).max()
    other = longest if candidates is None else candidates.norm(dim=1).max()
    bound = 1.0001 * (longest * other).item()
    return -bound, bound


def _send(block: Block, curve: Curve, on_named: Tensor, floor: float | None) -> None:
    scores = block.scores()
    kept = _kept(scores, floor)
    gradient = scores if block.ours else torch.empty_like(scores)
    curve.read_into(gradient, scores)
    if kept is not None:
        gradient *= kept
    gradient[block.places] = on_named
    block.take(gradient)


def _spread_of(grid: Grid, scores: Tensor, weights: Tensor) -> Tensor:
    moments = scores.new_zeros((4, grid.nodes))
    deposit_into(moments, grid, scores, weights)
    return spread(moments[:, None])[0]


def _kept(scores: Tensor, floor: float | None) -> Tensor | None:
    return None if floor is None else scores >= floor


def _lowest_kept(pairs: Pairs, drop: float) -> float | None:
    """The lowest negative's score that stays when the share `drop` of the lowest is left out; ties with it stay."""
    scores = pairs.similarity.detach().flatten().clone()
    scores[pairs.positives] = scores[pairs.left_out] = torch.inf
    negatives = len(scores) - len(pairs.positives) - len(pairs.left_out)
    dropped = int(drop * negatives)
    return float(scores.kthvalue(dropped + 1).values) if dropped else None


class _OfMatrix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, similarity: Tensor, named: Tensor, count: int, temperature: float, floor: float | None
    ) -> Tensor:
        low, high = similarity.aminmax()
        grid = grid_over(low.item(), high.item(), temperature)
        blocks = OfMatrix(similarity, named)
        ctx.ranks = ranks(blocks, len(named), count, grid, temperature, like=similarity, floor=floor)
        ctx.save_for_backward(similarity, named)
        loss: Tensor = ctx.ranks.share.to(similarity.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        similarity, named = ctx.saved_tensors
        blocks = OfMatrix(similarity, named)
        send_gradients(blocks, ctx.ranks, upstream.item(), similarity.dtype)
        return blocks.gradients[0], None, None, None, None


class _OfEmbeddings(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, candidates: Tensor | None, named: Tensor, count: int, temperature: float
    ) -> Tensor:
        grid = grid_over(*embedding_bounds(queries, candidates), temperature)
        blocks = _blocks(queries, candidates, named)
        ctx.ranks = ranks(blocks, len(named), count, grid, temperature, like=queries)
        ctx.save_for_backward(queries, candidates, named)
        loss: Tensor = ctx.ranks.share.to(queries.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        queries, candidates, named = ctx.saved_tensors
        blocks = _blocks(queries, candidates, named, ctx.needs_input_grad[:2])
        send_gradients(blocks, ctx.ranks, upstream.item(), queries.dtype)
        return *blocks.gradients, None, None, None


def _blocks(
    queries: Tensor, candidates: Tensor | None, named: Tensor, wanted: tuple[bool, bool] = (True, True)
) -> Blocks:
    return OfThemselves(queries, named) if candidates is None else OfRows(queries, candidates, named, wanted)
