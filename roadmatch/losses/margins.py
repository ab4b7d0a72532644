"""Pairs on the wrong side of a margin: ROADMAP's calibration loss, and TCM, which is the same loss."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import isfinite

import torch
from torch import Tensor

from roadmatch.losses.pairs import Pairs


class Reduction(Enum):
    """What the excess over a margin is averaged over, for the positive and for the negative pairs alike."""

    VIOLATING = auto()  # the pairs beyond the margin: TCM, and the published code of ROADMAP
    PER_QUERY = auto()  # each query's pairs, then the queries that have any: L_calibr of the ROADMAP paper
    ALL_PAIRS = auto()  # all pairs: TCM without its indicators


@dataclass(frozen=True)
class Margins:
    """positive_weight * mean [positive - s]+ of positives + negative_weight * mean [s - negative]+ of negatives.

    The calibration loss of ROADMAP (Ramzi et al., 2021, section 3.2) and the threshold-consistent margin loss (TCM,
    Zhang et al., 2024, with negative=0.5). A weight of 0 gives the one-sided forms. A side without pairs, or without
    pairs beyond the margin, adds zero. Raises ValueError for margins and weights that are not finite, for a negative
    weight, and where both weights are 0.
    """

    positive: float = 0.9
    negative: float = 0.6
    reduction: Reduction = Reduction.VIOLATING
    positive_weight: float = 1.0
    negative_weight: float = 1.0

    def __post_init__(self) -> None:
        weights = (self.positive_weight, self.negative_weight)
        if not all(map(isfinite, (self.positive, self.negative, *weights))) or min(weights) < 0 or max(weights) == 0:
            raise ValueError(f"margins {self.positive}, {self.negative} with weights {weights[0]}, {weights[1]}")

    def __call__(self, pairs: Pairs) -> Tensor:
        """pairs -> () loss."""
        sides: list[tuple[float, Callable[[Margins, Pairs], Tensor]]] = [
            (self.positive_weight, Margins._of_positives),
            (self.negative_weight, Margins._of_negatives),
        ]
        first, *second = (weight * side(self, pairs) for weight, side in sides if weight)
        return sum(second, first)

    def _of_positives(self, pairs: Pairs) -> Tensor:
        short = (self.positive - pairs.similarity.flatten()[pairs.positives]).relu()  # (P,)
        rows = pairs.positives // max(pairs.shape[1], 1)
        by_query = short.new_zeros(pairs.shape[0]).index_add(0, rows, short)
        return self._mean(by_query, pairs.positives_per_query, short)

    def _of_negatives(self, pairs: Pairs) -> Tensor:
        others = torch.cat((pairs.positives, pairs.left_out))
        excess = (pairs.similarity.flatten() - self.negative).relu().index_fill(0, others, 0)
        return self._mean(excess.view(pairs.shape).sum(1), pairs.negatives_per_query, excess)

    def _mean(self, by_query: Tensor, pairs_by_query: Tensor, beyond: Tensor) -> Tensor:
        """by_query (Q,) sums, pairs_by_query (Q,), beyond: how far each pair is beyond the margin -> () mean."""
        if self.reduction is Reduction.PER_QUERY:
            return (by_query / pairs_by_query.clamp(min=1)).sum() / (pairs_by_query > 0).sum().clamp(min=1)
        counted = pairs_by_query.sum() if self.reduction is Reduction.ALL_PAIRS else beyond.count_nonzero()
        return by_query.sum() / counted.clamp(min=1)
