"""Spreads the embeddings out: each is pushed away from its nearest neighbour."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from roadmatch.losses.pairs import Pairs
from roadmatch.losses.precision import product

_BLOCK = 1 << 22
"""Similarities that are held at a time."""


@dataclass(frozen=True)
class KoLeo:
    """-mean over queries of log(|x - nearest other| + epsilon), in Euclidean length.

    Kozachenko and Leonenko's estimate of entropy (Sablayrolles et al., 2019, section 3.2). With negatives_only the
    nearest negative is meant (SSCD: Pizzi et al., 2022). epsilon bounds the loss for equal embeddings, which get no
    gradient, for nothing says where to push them. Queries without a neighbour are left out. It is a regulariser: give
    it a small weight beside a loss. Similarities as they are near 1 say too little of so small lengths, so embeddings
    are needed. Raises ValueError for a bare similarity matrix, and unless epsilon is positive.
    """

    negatives_only: bool = False
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon {self.epsilon}: it has to be positive")

    def __call__(self, pairs: Pairs) -> Tensor:
        """pairs -> () loss; holds no Q x N tensor of its own."""
        if pairs.queries is None:
            raise ValueError("KoLeo needs embeddings, not a similarity matrix")
        candidates = pairs.queries if pairs.candidates is None else pairs.candidates
        found, nearest = self._nearest(pairs, pairs.queries.detach(), candidates.detach())
        if len(nearest) == 0:
            return pairs.nothing()
        length = torch.linalg.vector_norm(pairs.queries[found] - candidates[nearest], dim=1)
        logarithms: Tensor = (length + self.epsilon).log()
        return -logarithms.mean()

    def _nearest(self, pairs: Pairs, queries: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """The queries that have a neighbour, and the number of the nearest, both (R,)."""
        hidden = torch.cat((pairs.positives, pairs.left_out)).sort()[0] if self.negatives_only else pairs.left_out
        found, nearest = [hidden[:0]], [hidden[:0]]
        for first, rows in _blocks(queries, candidates, hidden):
            highest, place = rows.max(dim=1)
            seen = (highest > -torch.inf).nonzero()[:, 0]
            found.append(seen + first)
            nearest.append(place[seen])
        return torch.cat(found), torch.cat(nearest)


def _blocks(queries: Tensor, candidates: Tensor, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
    """First query and similarities (rows, N) of some queries at a time, -inf at the pairs that are hidden."""
    columns = len(candidates)
    firsts = range(0, len(queries) if columns else 0, max(1, _BLOCK // max(columns, 1)))
    ends = torch.tensor([first * columns for first in (*firsts, len(queries))], device=hidden.device)
    cuts = torch.searchsorted(hidden, ends).tolist()
    for first, low, high in zip(firsts, cuts[:-1], cuts[1:], strict=True):
        rows = product(queries[first : first + firsts.step], candidates)
        rows.view(-1)[hidden[low:high] - first * columns] = -torch.inf
        yield first, rows
