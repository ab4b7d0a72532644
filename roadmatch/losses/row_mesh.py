"""Smooth ranks of many positives a list, by one particle mesh a list: O(N + G log G) for G nodes, whatever p is."""

import torch
from torch import Tensor

from roadmatch.losses.ap_lists import Ascending, Lists, Ranked, loss_of_ranks, with_positives
from roadmatch.losses.approximations import Sigmoid, UpperBound
from roadmatch.losses.buckets import Buckets, above_positives, slopes_below
from roadmatch.losses.mesh import Curve, Grid, deposit, grid_over, interpolated, sigmoid_sums, slope_sums, spread

_AT_ONCE = 1 << 18
"""Scores or nodes at a time."""
_STEPS = 24
"""Of a grid, a temperature, at most."""
_SCORE_NS, _NODE_NS = 40, 110
"""Measured on a CPU, forward and backward: what a score of a list and a node of its grid cost here..."""
_SIGMOID_NS, _UPPER_BOUND_NS = 1.3, 2.7
"""... and what it costs to compare a positive with a score instead (positives_only)."""
_MOST = 1 << 22
"""Comparisons of one list that are held at once at most."""


def nodes_of(scores: Tensor, temperature: float) -> int:
    """About how many nodes the grid of these scores has, at most."""
    low, high = scores.aminmax()
    return int(_STEPS * float(high - low) / temperature) + 4


def lists_at_once(scores: int, nodes: int) -> int:
    """How many lists of so many scores on a grid of so many nodes to rank in one go."""
    return max(1, _AT_ONCE // max(scores, nodes))


def from_positives(scores: int, nodes: int, how: Sigmoid | UpperBound) -> float:
    """The number of positives a list from which this costs less than to compare them with its scores.

    It is 250 and 120 for B = 1000 at temperature 0.01, and twice that for B = 500.
    """
    compared = _SIGMOID_NS if isinstance(how, Sigmoid) else _UPPER_BOUND_NS
    return min((_SCORE_NS + _NODE_NS * nodes / scores) / compared, _MOST / scores)


def ranked_by_sigmoid(lists: Lists, how: Sigmoid, *, slopes: bool) -> Ranked:
    """Ranks of sigmoids among positives and negatives."""
    positives = Ascending.of(lists)
    mesh = _Mesh(lists, positives, how.temperature)
    rank = 0.5 + mesh.at_positives(mesh.sums(mesh.positive))
    loss, by_rank, by_negatives = loss_of_ranks(rank, mesh.at_positives(mesh.sums(mesh.negative)), positives.real)
    if not slopes:
        return Ranked(loss, None)
    pull, push = mesh.slopes(mesh.weighted(by_rank)), mesh.slopes(mesh.weighted(by_negatives))
    of_positives = (
        mesh.at_positives(pull)
        - by_rank * mesh.at_positives(mesh.slopes(mesh.positive))
        - by_negatives * mesh.at_positives(mesh.slopes(mesh.negative))
    )
    return Ranked(loss, with_positives(lists, mesh.at_scores(push), positives.columns, of_positives * positives.real))


def ranked_by_upper_bound(lists: Lists, how: UpperBound, *, slopes: bool) -> Ranked:
    """True ranks among positives, and the upper bound's among negatives (UpperBound)."""
    positives = Ascending.of(lists)
    mesh = _Mesh(lists, positives, how.temperature)
    buckets = Buckets.of(positives, how)
    above = above_positives(lists, buckets)
    negatives = mesh.at_positives(mesh.sums(mesh.negative)) + above.count
    rank = _tied_ranks(positives) if how.published else positives.rank
    loss, _, by_negatives = loss_of_ranks(rank, negatives, positives.real)
    if not slopes:
        return Ranked(loss, None)
    of_positives = -by_negatives * (mesh.at_positives(mesh.slopes(mesh.negative)) + above.slope)
    gradient = mesh.at_scores(mesh.slopes(mesh.weighted(by_negatives)))
    width = lists_at_once(len(gradient), 1)
    for into, scores in zip(torch.split(gradient, width, 1), torch.split(lists.scores, width, 1), strict=True):
        into += slopes_below(scores, buckets, by_negatives)
    return Ranked(loss, with_positives(lists, gradient, positives.columns, of_positives))


class _Mesh:
    """The grid of some lists, and what stands on its nodes (R, G)."""

    def __init__(self, lists: Lists, positives: Ascending, temperature: float) -> None:
        self._scores, self._positives, self._temperature = lists.scores, positives, temperature
        self._grid: Grid = grid_over(float(lists.scores.min()), float(lists.scores.max()), temperature)
        every, apart = deposit(self._grid, lists.scores), lists.apart_scores
        self.negative = spread(every - deposit(self._grid, apart, lists.real.double()))
        self.positive = self.weighted(positives.real)

    def weighted(self, weights: Tensor) -> Tensor:
        """weights (R, p) -> positives on the nodes (R, G)."""
        return spread(deposit(self._grid, self._positives.scores, weights))

    def sums(self, nodal: Tensor) -> Tensor:
        return sigmoid_sums(self._grid, nodal, self._temperature)

    def slopes(self, nodal: Tensor) -> Tensor:
        return slope_sums(self._grid, nodal, self._temperature)

    def at_positives(self, values: Tensor) -> Tensor:
        """values (R, G) -> (R, p) float64."""
        return interpolated(self._grid, values, self._positives.scores)

    def at_scores(self, values: Tensor) -> Tensor:
        """values (R, G) -> (R, N) of the scores' type."""
        if len(values) > 1:
            return interpolated(self._grid, values, self._scores).to(self._scores.dtype)
        result = torch.empty_like(self._scores)
        Curve(self._grid, values[0], self._scores.dtype).read_into(result[0], self._scores[0])
        return result


def _tied_ranks(positives: Ascending) -> Tensor:
    """(R, p) float64: how many positives are at least as high as each."""
    upwards = positives.real.flip(1).cumsum(1).flip(1)
    return upwards.gather(1, torch.searchsorted(positives.scores, positives.scores))
