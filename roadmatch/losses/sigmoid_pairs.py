"""Each pair by itself, as a decision between match and no match: the loss of SigLIP."""

from math import log

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from roadmatch.losses.pairs import Pairs


class SigmoidPairs(nn.Module):
    """-1/Q sum over pairs of log sigmoid(z (scale s + bias)), z = 1 for positives and -1 for negatives.

    Zhai et al., 2023, equation 1 and algorithm 1. Scale and bias are learned: hand the parameters to the optimizer.
    The sum is over pairs and is divided by the number of queries, so it grows with the candidates, as in the paper.
    Pairs left out count on neither side; queries without positives count through their negatives.
    """

    def __init__(self, scale: float = 10.0, bias: float = -10.0) -> None:
        """scale: initial factor of the similarities; bias: initial addend, low as most pairs are negative.

        Raises ValueError unless the scale is positive.
        """
        super().__init__()
        if not scale > 0:
            raise ValueError(f"scale {scale}: it has to be positive")
        self.log_scale = nn.Parameter(torch.tensor(log(scale)))
        self.bias = nn.Parameter(torch.tensor(float(bias)))

    def forward(self, pairs: Pairs) -> Tensor:
        """pairs -> () loss."""
        logits = (pairs.similarity * self.log_scale.exp() + self.bias).flatten()
        others = torch.cat((pairs.positives, pairs.left_out))
        negatives = softplus(logits).index_fill(0, others, 0).sum()
        return (softplus(-logits[pairs.positives]).sum() + negatives) / max(pairs.shape[0], 1)
