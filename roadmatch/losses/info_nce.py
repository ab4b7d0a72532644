"""InfoNCE over the pairs of a batch, in the memory of their similarities."""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from roadmatch.losses.pairs import Pairs


@dataclass(frozen=True)
class InfoNCE:
    """-log of a positive's share among itself and its query's negatives, mean over positive pairs.

    With similarities p and n over the temperature, -log(e^p / (e^p + sum of e^n)) = log(1 + e^(lse(n) - p)), whose sum
    is the same for all positives of a query: libraries that form each positive with each negative need the cube of the
    batch. NTXent (Chen et al., 2020, eq. 1) and InfoNCE (Oord et al., 2018, eq. 4) are this loss.
    Raises ValueError for a temperature that is not positive.
    """

    temperature: float = 0.07

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is {self.temperature}: a positive number is needed")

    def __call__(self, pairs: Pairs) -> Tensor:
        """pairs -> () loss; 0 without a positive pair, and a query without negatives adds 0."""
        queries = pairs.positives // max(pairs.shape[1], 1)
        asked = pairs.negatives_per_query[queries] > 0  # for the others the share is 1, and a gradient would be NaN
        if not asked.any():
            return pairs.nothing()
        scaled = (pairs.similarity / self.temperature).flatten()
        negatives = scaled.index_fill(0, torch.cat((pairs.positives, pairs.left_out)), -torch.inf)
        rows, row_of = queries[asked].unique(return_inverse=True)
        below = negatives.view(pairs.shape)[rows].logsumexp(1)[row_of]
        return nn.functional.softplus(below - scaled[pairs.positives[asked]]).sum() / len(queries)
