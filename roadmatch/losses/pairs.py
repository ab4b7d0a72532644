"""The pairs of a batch: their similarities, and which of them belong together."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from roadmatch.losses.precision import in_full, product


@dataclass(frozen=True, eq=False)
class Pairs:
    """Q queries and N candidates. A pair has a number, row * N + column, so no mask of Q x N is ever held.

    positives (P,) int64, ascending: the pairs that belong together. left_out (L,) int64, ascending: the pairs that
    are neither positive nor negative, as an image with itself. queries (Q, D), candidates (N, D): float32 or float64;
    candidates is None where the queries are compared with each other, and both are None where a matrix was given.
    """

    shape: tuple[int, int]
    positives: Tensor
    left_out: Tensor
    queries: Tensor | None = None
    candidates: Tensor | None = None
    given: Tensor | None = None

    @cached_property
    def similarity(self) -> Tensor:
        """(Q, N) float32 or float64; made when a loss first asks for it."""
        if self.queries is None:
            assert self.given is not None
            return self.given
        return product(self.queries, self.queries if self.candidates is None else self.candidates)

    @property
    def matrix_made(self) -> bool:
        """Whether the similarities are in memory already."""
        return self.queries is None or "similarity" in self.__dict__

    @property
    def source(self) -> Tensor:
        """What gradients go to: the queries' embeddings, or the given matrix."""
        source = self.given if self.queries is None else self.queries
        assert source is not None
        return source

    @cached_property
    def positives_per_query(self) -> Tensor:
        """(Q,) int64."""
        return _count_rows(self.positives, self.shape)

    @cached_property
    def negatives_per_query(self) -> Tensor:
        """(Q,) int64."""
        return self.shape[1] - self.positives_per_query - _count_rows(self.left_out, self.shape)

    def nothing(self) -> Tensor:
        """() zero that is connected to the embeddings: the loss of a batch that says nothing."""
        zero = self.source.sum() * 0
        return zero if self.candidates is None else zero + self.candidates.sum() * 0


def pairs_of_labels(
    embeddings: Tensor,
    labels: Tensor,
    reference: Tensor | None = None,
    reference_labels: Tensor | None = None,
    ids: Tensor | None = None,
    reference_ids: Tensor | None = None,
) -> Pairs:
    """embeddings (B, D) unit length, labels (B,) int -> pairs of equal labels are positive.

    reference (N, D), reference_labels (N,): what the embeddings are compared with, as a memory; None: each other.
    ids (B,), reference_ids (N,) int: a pair of equal ids is an image with itself and is left out; without a reference
    that is every image's pair with itself, ids or not. Raises ValueError for shapes that do not fit and for values
    that are not finite.
    """
    if reference is None and (reference_labels is not None or reference_ids is not None):
        raise ValueError("reference_labels and reference_ids need a reference")
    queries = _checked(embeddings, labels, "embeddings")
    columns, column_labels, candidates = len(queries), labels, None
    if reference is not None:
        if reference_labels is None:
            raise ValueError("a reference needs reference_labels")
        candidates = _checked(reference, reference_labels, "reference").to(queries.dtype)
        if candidates.shape[1] != queries.shape[1]:
            raise ValueError(f"embeddings of {queries.shape[1]} dimensions and a reference of {candidates.shape[1]}")
        columns, column_labels = len(candidates), reference_labels
    positives = _equal(labels, column_labels, columns)
    left_out = _same_image(labels, columns, ids, reference_ids, square=reference is None)
    return Pairs((len(queries), columns), without(positives, left_out), left_out, queries, candidates)


def pairs_of_similarity(similarity: Tensor, relevant: Tensor, counted: Tensor | None = None) -> Pairs:
    """similarity (Q, N), relevant (Q, N) bool -> pairs; counted (Q, N) bool: all others are left out.

    For two sides of one kind each, as images and texts, the relevance is the identity. A diagonal of images with
    themselves has to be left out by `counted`. Raises ValueError as pairs_of_labels does.
    """
    if similarity.ndim != 2 or similarity.shape != relevant.shape:
        raise ValueError(f"similarities {tuple(similarity.shape)} and relevance {tuple(relevant.shape)} are no pair")
    if counted is not None and counted.shape != relevant.shape:
        raise ValueError(f"counted is {tuple(counted.shape)} beside {tuple(relevant.shape)}")
    _refuse_not_finite(similarity, "similarities")
    relevant = relevant.bool()
    kept = relevant if counted is None else relevant & counted.bool()
    left_out = relevant.new_empty(0, dtype=torch.int64) if counted is None else _numbers(~counted.bool())
    shape = (similarity.shape[0], similarity.shape[1])
    return Pairs(shape, _numbers(kept), left_out, given=in_full(similarity))


def without(numbers: Tensor, others: Tensor) -> Tensor:
    """numbers (P,), others (L,), both ascending -> the numbers that are not among the others."""
    if len(others) == 0:
        return numbers
    place = torch.searchsorted(others, numbers).clamp_(max=len(others) - 1)
    return numbers[others[place] != numbers]


def _equal(left: Tensor, right: Tensor, columns: int) -> Tensor:
    """left (Q,), right (N,) -> numbers of the pairs that are equal, ascending."""
    left, right = left.long(), right.long()
    order = torch.argsort(right, stable=True)
    ordered = right[order]
    first = torch.searchsorted(ordered, left)
    counts = torch.searchsorted(ordered, left, right=True) - first
    rows = torch.arange(len(left), device=left.device).repeat_interleave(counts)
    within = torch.arange(len(rows), device=left.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return rows * columns + order[first.repeat_interleave(counts) + within]


def _same_image(
    labels: Tensor, columns: int, ids: Tensor | None, reference_ids: Tensor | None, *, square: bool
) -> Tensor:
    if square:
        ids = torch.arange(columns, device=labels.device) if ids is None else ids
        reference_ids = ids
    if (ids is None) != (reference_ids is None):
        raise ValueError("ids and reference_ids come together")
    if ids is None or reference_ids is None:
        return torch.empty(0, dtype=torch.int64, device=labels.device)
    if ids.is_floating_point() or reference_ids.is_floating_point():
        raise ValueError(f"ids are {ids.dtype} and {reference_ids.dtype}: integers are needed")
    if len(ids) != len(labels) or len(reference_ids) != columns:
        raise ValueError(f"{len(ids)} ids and {len(reference_ids)} reference_ids for {len(labels)} x {columns} pairs")
    return _equal(ids, reference_ids, columns)


def _checked(embeddings: Tensor, labels: Tensor, name: str) -> Tensor:
    if embeddings.ndim != 2 or labels.ndim != 1 or len(embeddings) != len(labels):
        raise ValueError(f"{name} {tuple(embeddings.shape)} and labels {tuple(labels.shape)} do not fit")
    if labels.is_floating_point():
        raise ValueError(f"labels are {labels.dtype}: integers are needed")
    if not embeddings.is_floating_point():
        raise ValueError(f"{name} are {embeddings.dtype}: floating point is needed")
    _refuse_not_finite(embeddings, name)
    return in_full(embeddings)


def _refuse_not_finite(values: Tensor, name: str) -> None:
    if values.numel() and not torch.isfinite(values.detach().sum()) and not torch.isfinite(values.detach()).all():
        raise ValueError(f"{name} hold NaN or infinities: look for them before the loss")


def _numbers(mask: Tensor) -> Tensor:
    return mask.flatten().nonzero()[:, 0]


def _count_rows(numbers: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.bincount(numbers // max(shape[1], 1), minlength=shape[0])
