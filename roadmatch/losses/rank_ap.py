"""Average precision as a loss: over which list, and how its ranks are made smooth."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from roadmatch.losses import positives_only, row_mesh
from roadmatch.losses.ap_lists import Lists, Ranked, lists_per_query, one_list, without_lowest
from roadmatch.losses.approximations import Approximation, BlackBox, Sigmoid, SoftBins, Step, UpperBound
from roadmatch.losses.black_box import ranked_by_black_box
from roadmatch.losses.exact import lists_at_once, ranked_by_step
from roadmatch.losses.global_ap import global_sigmoid_ap
from roadmatch.losses.pairs import Pairs, without
from roadmatch.losses.soft_bins import ranked_by_soft_bins


class Scope(Enum):
    """What is one list: a query's pairs, or all pairs."""

    PER_QUERY = "per query"
    GLOBAL = "global"


@dataclass(frozen=True)
class RankAP:
    """1 - AP of the list of all pairs, or the mean over queries with a positive of 1 - AP of the query's list.

    drop in [0, 1): the share of negatives, lowest first, that a global list is without (gSAP's alpha). Raises
    ValueError for a drop per query and for the published arithmetic on a global list, which has none.
    """

    scope: Scope
    approximation: Approximation
    drop: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop is {self.drop}: a share in [0, 1) is needed")
        if self.scope is Scope.PER_QUERY and self.drop:
            raise ValueError(f"drop is {self.drop}: only a global list drops negatives")
        if self.scope is Scope.GLOBAL and _is_published(self.approximation):
            raise ValueError("the published arithmetic is per query: there is none for a global list")

    def __call__(self, pairs: Pairs) -> Tensor:
        """pairs -> () loss in [0, 1]; without a positive pair 0, connected to the embeddings."""
        if _is_published(self.approximation):
            pairs = _with_themselves(pairs)
        if len(pairs.positives) == 0:
            return pairs.nothing()
        if self.scope is Scope.GLOBAL and isinstance(self.approximation, Sigmoid):
            return global_sigmoid_ap(pairs, self.approximation.temperature, self.drop)
        loss: Tensor = _Loss.apply(pairs.similarity, lambda scores, slopes: self._ranked(pairs, scores, slopes))
        return loss

    def _ranked(self, pairs: Pairs, scores: Tensor, slopes: bool) -> tuple[Tensor, Tensor | None]:
        """scores (Q, N) -> () loss, (Q, N) gradient."""
        if self.scope is Scope.PER_QUERY:
            return _mean_over_queries(pairs, scores, self.approximation, slopes)
        numbers, lists = None, one_list(pairs, scores)
        if self.drop:
            numbers, lists = without_lowest(lists, self.drop)
        ranked = _of_lists(lists, self.approximation, slopes=slopes, mesh=True)
        gradient = ranked.gradient
        if gradient is not None and numbers is not None:
            gradient = scores.new_zeros(1, scores.numel()).index_copy_(1, numbers, gradient)
        return ranked.loss[0], None if gradient is None else gradient.view(scores.shape)


def _mean_over_queries(pairs: Pairs, scores: Tensor, how: Approximation, slopes: bool) -> tuple[Tensor, Tensor | None]:
    """scores (Q, N) -> () loss, (Q, N) gradient."""
    queries = int((pairs.positives_per_query > 0).sum())
    loss = scores.new_zeros((), dtype=torch.float64)
    gradient = None
    least, fits = 0.0, lambda _: lists_at_once(pairs.shape[1])
    if isinstance(how, Sigmoid | UpperBound):
        least, fits = _cheapest(scores, how)
    for rows, lists in lists_per_query(pairs, scores, fits):
        ranked = _of_lists(lists, how, slopes=slopes, mesh=lists.positives >= least)
        loss += ranked.loss.sum() / queries
        if ranked.gradient is not None:
            gradient = torch.zeros_like(scores) if gradient is None else gradient
            gradient.index_copy_(0, rows, ranked.gradient.div_(queries))
    return loss, gradient


def _cheapest(scores: Tensor, how: Sigmoid | UpperBound) -> tuple[float, Callable[[int], int]]:
    """scores (Q, N) -> from how many positives on to use the mesh, and how many lists of so many to take at once."""
    nodes = row_mesh.nodes_of(scores, how.temperature)
    least = row_mesh.from_positives(scores.shape[1], nodes, how)

    def fits(positives: int) -> int:
        if positives < least:
            return positives_only.lists_at_once(positives, scores.shape[1])
        return row_mesh.lists_at_once(scores.shape[1], nodes)

    return least, fits


def _of_lists(lists: Lists, how: Approximation, *, slopes: bool, mesh: bool) -> Ranked:
    """mesh: rather than comparing every positive with every score."""
    match how:
        case Sigmoid():
            ranked_by_sigmoid = row_mesh.ranked_by_sigmoid if mesh else positives_only.ranked_by_sigmoid
            return ranked_by_sigmoid(lists, how, slopes=slopes)
        case UpperBound():
            ranked_by_upper_bound = row_mesh.ranked_by_upper_bound if mesh else positives_only.ranked_by_upper_bound
            return ranked_by_upper_bound(lists, how, slopes=slopes)
        case SoftBins():
            return ranked_by_soft_bins(lists, how, slopes=slopes)
        case BlackBox():
            return ranked_by_black_box(lists, how, slopes=slopes)
        case Step():
            return ranked_by_step(lists)


def _is_published(how: Approximation) -> bool:
    return isinstance(how, Sigmoid | UpperBound) and how.published


def _with_themselves(pairs: Pairs) -> Pairs:
    """Pairs where every query is a positive of its own. Raises ValueError unless they are of a batch with itself."""
    diagonal = torch.arange(pairs.shape[0], device=pairs.left_out.device) * (pairs.shape[1] + 1)
    square, left_out = pairs.shape[0] == pairs.shape[1], len(pairs.left_out) > 0
    if square and not left_out and len(without(diagonal, pairs.positives)) == 0:
        return pairs
    if not square or not torch.equal(pairs.left_out, diagonal):
        raise ValueError("the published arithmetic needs a batch with itself, of which the diagonal alone is left out")
    positives = torch.cat([pairs.positives, diagonal]).sort().values
    return Pairs(pairs.shape, positives, pairs.left_out[:0], given=pairs.similarity)


Evaluate = Callable[[Tensor, bool], tuple[Tensor, Tensor | None]]
"""(Q, N) scores, whether the gradient is wanted -> () loss, (Q, N) gradient or None where it is zero or not wanted."""


class _Loss(torch.autograd.Function):
    """The gradient is found beside the loss, from the same comparisons, and is scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, similarity: Tensor, evaluate: Evaluate) -> Tensor:
        loss, gradient = evaluate(similarity, ctx.needs_input_grad[0])
        ctx.shape = similarity.shape
        ctx.save_for_backward(*(() if gradient is None else (gradient,)))
        return loss.to(similarity.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        if not ctx.saved_tensors:
            return upstream.new_zeros(()).expand(ctx.shape), None
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None
