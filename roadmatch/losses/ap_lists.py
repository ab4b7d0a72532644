"""Lists of scores with the places of their positives: what an average precision is of."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from roadmatch.losses.pairs import Pairs


@dataclass(frozen=True, eq=False)
class Lists:
    """R lists of N scores each, every one with a positive.

    scores (R, N). apart (R, p + l) int64: the columns of what is no negative, first of up to p positives, then of what
    is left out. real (R, p + l) bool: the others pad a list, stand before its positives and repeat one of them.
    """

    scores: Tensor
    apart: Tensor
    real: Tensor
    positives: int

    @property
    def apart_scores(self) -> Tensor:
        """(R, p + l)."""
        return self.scores.gather(1, self.apart)


@dataclass(frozen=True, eq=False)
class Ranked:
    """loss (R,) float64: 1 - AP of each list. gradient (R, N): of each list's loss, where it was asked for."""

    loss: Tensor
    gradient: Tensor | None


@dataclass(frozen=True, eq=False)
class Ascending:
    """The positives of each list from the lowest up, padding first.

    scores (R, p) float64, padding as low as the lowest; columns (R, p); real (R, p) float64: 1, padding 0;
    rank (R, p) float64: the place among the positives, from p down to 1.
    """

    scores: Tensor
    columns: Tensor
    real: Tensor
    rank: Tensor

    @staticmethod
    def of(lists: Lists) -> "Ascending":
        """Tied positives keep their order: each has a rank of its own."""
        columns, real = lists.apart[:, : lists.positives], lists.real[:, : lists.positives]
        scores = lists.scores.gather(1, columns).double()
        scores, order = torch.where(real, scores, scores.amin(1, keepdim=True)).sort(dim=1, stable=True)
        rank = torch.arange(lists.positives, 0, -1, device=scores.device, dtype=torch.float64).expand_as(scores)
        return Ascending(scores, columns.gather(1, order), real.gather(1, order).double(), rank)


def loss_of_ranks(rank: Tensor, negatives: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rank among positives, negatives above, real (R, p) float64 -> loss (R,), its slopes in rank and negatives.

    1 - AP is the mean of negatives / (rank + negatives); as 1 - mean(rank / ...) a loss near 0 would be lost.
    """
    negatives = negatives.clamp_min(0)  # an interpolated sum may be a little below
    total = rank + negatives
    share = real / (real.sum(1, keepdim=True) * total)
    return (share * negatives).sum(1), -share * negatives / total, share * rank / total


def with_positives(lists: Lists, gradient: Tensor, columns: Tensor, of_positives: Tensor) -> Tensor:
    """gradient (R, N) as of negatives -> the whole; columns and of_positives (R, p), padding 0."""
    gradient.scatter_(1, lists.apart, 0.0)
    return gradient.scatter_add_(1, columns, of_positives.to(gradient.dtype))


def lists_per_query(pairs: Pairs, scores: Tensor, fits: Callable[[int], int]) -> Iterator[tuple[Tensor, Lists]]:
    """pairs, scores (Q, N) -> the queries (R,) and lists of all queries with a positive, like numbers together.

    fits: how many lists of up to p positives to take at once.
    """
    counts, left_counts = pairs.positives_per_query, _count_rows(pairs)
    order = counts.argsort(stable=True)
    sizes: list[int] = counts[order].tolist()
    starts, left_starts = counts.cumsum(0) - counts, left_counts.cumsum(0) - left_counts
    for start, stop in _runs(sizes, fits):
        rows = order[start:stop]
        apart, real = _places(pairs.positives, starts[rows], counts[rows], sizes[stop - 1])
        if len(pairs.left_out):
            least = int(left_counts[rows].max())
            left, left_real = _places(pairs.left_out, left_starts[rows], left_counts[rows], least)
            left = torch.where(left_real, left, apart[:, -1:])
            apart, real = torch.cat([apart, left], 1), torch.cat([real, left_real], 1)
        yield rows, Lists(scores[rows], apart % pairs.shape[1], real, sizes[stop - 1])


def one_list(pairs: Pairs, scores: Tensor) -> Lists:
    """pairs, scores (Q, N) -> one list of all pairs."""
    apart = torch.cat([pairs.positives, pairs.left_out])[None]
    return Lists(scores.reshape(1, -1), apart, torch.ones_like(apart, dtype=torch.bool), len(pairs.positives))


def without_lowest(lists: Lists, drop: float) -> tuple[Tensor, Lists]:
    """One list -> the numbers kept (K,) and their list: without what was left out and this share of its negatives.

    Ties with the lowest that stays stay, too.
    """
    negative = torch.ones_like(lists.scores[0], dtype=torch.bool)
    negative[lists.apart[0]] = False
    numbers = negative.nonzero()[:, 0]
    dropped = int(drop * len(numbers))
    if dropped:
        scores = lists.scores[0][numbers]
        numbers = numbers[scores >= scores.kthvalue(dropped + 1).values]
    numbers = torch.cat([lists.apart[0, : lists.positives], numbers])
    apart = torch.arange(lists.positives, device=numbers.device)[None]
    real = lists.real[:, : lists.positives]
    return numbers, Lists(lists.scores[:, numbers], apart, real, lists.positives)


def _count_rows(pairs: Pairs) -> Tensor:
    return torch.bincount(pairs.left_out // max(pairs.shape[1], 1), minlength=pairs.shape[0])


def _runs(sizes: list[int], fits: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """sizes: ascending -> (start, stop) of the lists to take at once; lists of size 0 are not taken."""
    start = bisect_left(sizes, 1)
    while start < len(sizes):
        stops = range(start + 2, len(sizes) + 1)  # more lists, and longer ones: once too many, always too many
        first = start
        taken = bisect_left(stops, True, key=lambda stop: stop - first > fits(sizes[stop - 1]))
        yield start, start + 1 + taken
        start += 1 + taken


def _places(numbers: Tensor, starts: Tensor, counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """numbers (P,), starts (R,), counts (R,) -> (R, width) numbers of each row at its end, and which are real."""
    place = torch.arange(width, device=numbers.device) + (starts + counts - width)[:, None]
    real = place >= starts[:, None]
    return numbers[torch.where(real, place, starts[:, None]).clamp_(max=len(numbers) - 1)], real
