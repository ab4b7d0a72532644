"""Losses of pytorch-metric-learning, called as ours are."""

from collections.abc import Callable

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.distances import CosineSimilarity
from torch import Tensor, nn

from roadmatch.losses.pairs import Pairs, pairs_of_labels
from roadmatch.losses.precision import full_precision, product

Indices = tuple[Tensor, ...]
"""What the library takes: anchors, positives, anchors, negatives; or anchors, positives, negatives."""


def contrastive(positive: float = 1.0, negative: float = 0.5) -> "Adapted":
    """[positive - s]+ and [s - negative]+, each the mean over the pairs beyond its margin (Chopra et al., 2005)."""
    return Adapted(losses.ContrastiveLoss(positive, negative, distance=_Cosine()), pair_indices)


def triplet(margin: float = 0.1) -> "Adapted":
    """[s_negative - s_positive + margin]+, mean over the triplets above 0 (Schroff et al., 2015); all are formed."""
    return Adapted(losses.TripletMarginLoss(margin, distance=_Cosine()), triplet_indices)


def multi_similarity(alpha: float = 2.0, beta: float = 50.0, base: float = 0.5) -> "Adapted":
    """Multi-similarity loss (Wang et al., 2019), of all pairs: its mining of pairs is not part of it."""
    return Adapted(losses.MultiSimilarityLoss(alpha, beta, base, distance=_Cosine()), pair_indices)


def arc_face(classes: int, dimensions: int, margin_degrees: float = 28.6, scale: float = 64.0) -> "Adapted":
    """ArcFace (Deng et al., 2019); one weight per class, which the optimizer has to be given."""
    return Adapted(losses.ArcFaceLoss(classes, dimensions, margin_degrees, scale, distance=_Cosine()), classes=classes)


def proxy_anchor(classes: int, dimensions: int, margin: float = 0.1, alpha: float = 32.0) -> "Adapted":
    """Proxy anchor loss (Kim et al., 2020); one proxy per class, which the optimizer has to be given."""
    return Adapted(losses.ProxyAnchorLoss(classes, dimensions, margin, alpha, distance=_Cosine()), classes=classes)


def pair_indices(pairs: Pairs) -> Indices:
    """pairs -> queries and candidates of the positives, queries and candidates of the negatives."""
    negative = torch.ones(pairs.shape[0] * pairs.shape[1], dtype=torch.bool, device=pairs.positives.device)
    negative[pairs.positives] = False
    negative[pairs.left_out] = False
    of_positives, of_negatives = (
        (numbers // pairs.shape[1], numbers % pairs.shape[1]) for numbers in (pairs.positives, negative.nonzero()[:, 0])
    )
    return of_positives + of_negatives


def triplet_indices(pairs: Pairs) -> Indices:
    """pairs -> query, positive and negative of every triplet; the library would form a cube of the batch for them."""
    rows, positives, _, negatives = pair_indices(pairs)
    counts = pairs.negatives_per_query
    of_each = counts[rows]
    starts = (counts.cumsum(0) - counts)[rows]
    within = torch.arange(int(of_each.sum()), device=rows.device)
    within = within - (of_each.cumsum(0) - of_each - starts).repeat_interleave(of_each)
    return rows.repeat_interleave(of_each), positives.repeat_interleave(of_each), negatives[within]


class Adapted(nn.Module):
    """Another's loss under our call, in float32 or float64 whatever the network uses, and checked.

    Parameters of the loss are this module's. A batch without anything to compare gives zero, connected to the graph;
    the library counts a batch of at most one positive and one negative pair, a query and two references, as such.
    """

    def __init__(
        self, loss: nn.Module, indices: Callable[[Pairs], Indices] | None = None, *, classes: int | None = None
    ) -> None:
        """loss: of pytorch-metric-learning. indices: for one of pairs or triplets. classes: for one with a weight each.

        Raises ValueError unless just one of the two is given.
        """
        super().__init__()
        if (indices is None) == (classes is None):
            raise ValueError("a loss compares pairs or has classes: give indices or classes")
        self.loss, self.indices, self.classes = loss, indices, classes

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        reference: Tensor | None = None,
        reference_labels: Tensor | None = None,
        ids: Tensor | None = None,
        reference_ids: Tensor | None = None,
    ) -> Tensor:
        """embeddings (B, D), labels (B,) int -> () loss; the rest as in pairs_of_labels.

        Raises ValueError as that does, for labels outside the classes, for a reference where the loss has classes, and
        for a loss that is not finite.
        """
        pairs = pairs_of_labels(embeddings, labels, reference, reference_labels, ids, reference_ids)
        if len(embeddings) == 0:
            return pairs.nothing()
        with full_precision(embeddings.device):
            if self.classes is None:
                loss = self._of_pairs(pairs, labels, reference_labels)
            else:
                loss = self._of_classes(pairs, labels.long(), self.classes)
        if not torch.isfinite(loss.detach()):
            raise ValueError(f"{type(self.loss).__name__} is {float(loss)}: its settings do not suit the embeddings")
        return loss + pairs.nothing()

    def _of_pairs(self, pairs: Pairs, labels: Tensor, reference_labels: Tensor | None) -> Tensor:
        assert self.indices is not None
        loss: Tensor = self.loss(pairs.queries, labels, self.indices(pairs), pairs.candidates, reference_labels)
        return loss

    def _of_classes(self, pairs: Pairs, labels: Tensor, classes: int) -> Tensor:
        if pairs.candidates is not None:
            raise ValueError(f"{type(self.loss).__name__} compares with its classes: it takes no reference")
        if labels.min() < 0 or labels.max() >= classes:
            wrong = int(labels.min() if labels.min() < 0 else labels.max())
            raise ValueError(f"label {wrong} and {classes} classes: number the classes of the training set from 0")
        loss: Tensor = self.loss(pairs.queries, labels)
        return loss


class _Cosine(CosineSimilarity):  # type: ignore[misc]  # it has no types
    """The library's similarity, in full precision backwards too."""

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """query_emb (Q, D), ref_emb (N, D) -> (Q, N)."""
        return product(query_emb, ref_emb)
