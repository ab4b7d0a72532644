"""Where the scores of a batch come from, block by block, so that a matrix of all pairs need not exist."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from roadmatch.losses.precision import full_precision

_ROWS = 192
"""Rows at a time: products of this height run at full speed, and their scores are a small part of the matrix."""


@dataclass(frozen=True, eq=False)
class Block:
    """scores () -> (n,), the same bits each time. weight: for how many pairs of the list each of them stands.

    members (m,), places (m,): named pairs whose scores are here, by their position among the named and in the block.
    take: receives the gradient (n,) of one pair at each place. ours: whether the scores may be written over.
    """

    scores: Callable[[], Tensor]
    take: Callable[[Tensor], None]
    weight: int
    members: Tensor
    places: Tensor
    ours: bool = True


class Blocks(Protocol):
    """A source of scores. After each block has taken its gradient, `gradients` are those of what it was made from."""

    def __iter__(self) -> Iterator[Block]:
        """The blocks, each pair of the list in one of them."""
        ...

    @property
    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Of the matrix, or of queries and candidates."""
        ...


@dataclass(eq=False)
class OfMatrix:
    """One block: similarity (Q, N). named (m,): pair numbers."""

    similarity: Tensor
    named: Tensor
    _gradient: Tensor | None = None

    def __iter__(self) -> Iterator[Block]:
        all_named = torch.arange(len(self.named), device=self.named.device)
        yield Block(lambda: self.similarity.reshape(-1), self._take, 1, all_named, self.named, ours=False)

    def _take(self, gradient: Tensor) -> None:
        self._gradient = gradient

    @property
    def gradients(self) -> tuple[Tensor, None]:
        """(Q, N)."""
        assert self._gradient is not None
        return self._gradient.view(self.similarity.shape), None


@dataclass(eq=False)
class OfRows:
    """Some rows at a time: queries (Q, D) against candidates (N, D). wanted: whose gradients."""

    queries: Tensor
    candidates: Tensor
    named: Tensor
    wanted: tuple[bool, bool] = (True, True)
    _scratch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._scratch = self.queries.new_empty(min(_ROWS, len(self.queries)) * len(self.candidates))

    def __iter__(self) -> Iterator[Block]:
        width, number_of = len(self.candidates), self.named // len(self.candidates) // _ROWS
        for number, members in enumerate(_members(number_of, -(-len(self.queries) // _ROWS))):
            rows = slice(number * _ROWS, (number + 1) * _ROWS)
            yield Block(self._scores(rows), self._take(rows), 1, members, self.named[members] - rows.start * width)

    def _scores(self, rows: slice) -> Callable[[], Tensor]:
        return lambda: _product_into(self._scratch, self.queries[rows], self.candidates)

    def _take(self, rows: slice) -> Callable[[Tensor], None]:
        def take(gradient: Tensor) -> None:
            by_row = gradient.view(-1, len(self.candidates))
            with full_precision(gradient.device):
                if self.wanted[0]:
                    self.gradients[0][rows].addmm_(by_row, self.candidates)
                if self.wanted[1]:
                    self.gradients[1].addmm_(by_row.T, self.queries[rows])

        return take

    @cached_property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """(Q, D) and (N, D); made when a block first takes its own."""
        return torch.zeros_like(self.queries), torch.zeros_like(self.candidates)


@dataclass(eq=False)
class OfThemselves:
    """embeddings (B, D) against each other: a pair and its mirror image have one score, so half of them are made.

    A square on the diagonal holds both; the block to the right of it stands for the one below it, too.
    """

    embeddings: Tensor
    named: Tensor
    _scratch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._scratch = self.embeddings.new_empty(min(_ROWS, len(self.embeddings)) * len(self.embeddings))

    def __iter__(self) -> Iterator[Block]:
        size = len(self.embeddings)
        one, other = self.named // size, self.named % size
        across = one // _ROWS != other // _ROWS
        row = torch.where(across, torch.minimum(one, other), one)
        column = torch.where(across, torch.maximum(one, other), other)
        number_of = 2 * (row // _ROWS) + across
        for number, members in enumerate(_members(number_of, 2 * -(-size // _ROWS))):
            rows = slice(number // 2 * _ROWS, min((number // 2 + 1) * _ROWS, size))
            columns = slice(rows.stop, size) if number % 2 else rows
            width = columns.stop - columns.start
            if width:
                places = (row[members] - rows.start) * width + column[members] - columns.start
                weight = 1 + number % 2
                yield Block(self._scores(rows, columns), self._take(rows, columns), weight, members, places)

    def _scores(self, rows: slice, columns: slice) -> Callable[[], Tensor]:
        return lambda: _product_into(self._scratch, self.embeddings[rows], self.embeddings[columns])

    def _take(self, rows: slice, columns: slice) -> Callable[[Tensor], None]:
        def take(gradient: Tensor) -> None:
            by_row = gradient.view(rows.stop - rows.start, -1)
            with full_precision(gradient.device):
                self.gradients[0][rows].addmm_(by_row, self.embeddings[columns], alpha=2)
                if columns is not rows:
                    self.gradients[0][columns].addmm_(by_row.T, self.embeddings[rows], alpha=2)

        return take

    @cached_property
    def gradients(self) -> tuple[Tensor, None]:
        """(B, D); made when a block first takes its own."""
        return torch.zeros_like(self.embeddings), None


def _members(number_of: Tensor, blocks: int) -> Sequence[Tensor]:
    """number_of (m,): the block of each named pair -> for every block the positions of its pairs."""
    sizes: list[int] = torch.bincount(number_of, minlength=blocks).tolist()
    return torch.split(torch.argsort(number_of, stable=True), sizes)


def _product_into(scratch: Tensor, queries: Tensor, candidates: Tensor) -> Tensor:
    scores = scratch[: len(queries) * len(candidates)]
    with full_precision(scratch.device):
        torch.mm(queries, candidates.T, out=scores.view(len(queries), -1))
    return scores
