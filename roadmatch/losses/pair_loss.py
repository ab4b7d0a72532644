"""A loss over the pairs of a batch, put together from terms."""

from collections.abc import Callable

from torch import Tensor, nn

from roadmatch.losses.pairs import Pairs, pairs_of_labels, pairs_of_similarity

Term = Callable[[Pairs], Tensor]
"""Pairs -> () loss. A term with parameters is an nn.Module, and the loss that holds it hands them to the optimizer."""


class PairLoss(nn.Module):
    """The weighted sum of terms, all on the same similarities."""

    def __init__(self, *terms: Term, weights: tuple[float, ...] | None = None) -> None:
        """weights: of the terms, 1 each by default. Raises ValueError unless there are as many as terms."""
        super().__init__()
        self.weights = (1.0,) * len(terms) if weights is None else weights
        if not terms or len(self.weights) != len(terms):
            raise ValueError(f"{len(terms)} terms and {len(self.weights)} weights")
        self.terms = terms
        self.modules_of_terms = nn.ModuleList(term for term in terms if isinstance(term, nn.Module))

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        reference: Tensor | None = None,
        reference_labels: Tensor | None = None,
        ids: Tensor | None = None,
        reference_ids: Tensor | None = None,
    ) -> Tensor:
        """embeddings (B, D) unit length, labels (B,) int -> () loss; the rest as in pairs_of_labels."""
        return self.of_pairs(pairs_of_labels(embeddings, labels, reference, reference_labels, ids, reference_ids))

    def of_similarity(self, similarity: Tensor, relevant: Tensor, counted: Tensor | None = None) -> Tensor:
        """similarity (Q, N), relevant (Q, N) bool -> () loss; counted as in pairs_of_similarity."""
        return self.of_pairs(pairs_of_similarity(similarity, relevant, counted))

    def of_pairs(self, pairs: Pairs) -> Tensor:
        """pairs -> () loss."""
        first, *others = (weight * term(pairs) for weight, term in zip(self.weights, self.terms, strict=True))
        return sum(others, first)
