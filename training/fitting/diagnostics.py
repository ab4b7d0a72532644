"""What the papers look at while a network trains, of one batch's embeddings."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roadmatch.metrics.decomposability import decomposability_gap
from training.recipe import Beside, Loss

MOST = 2048  # images looked at: all pairs of them take 16 MiB
_BINS = 40
_QUERIES = 32  # for the gap, which is slow
_ROADMAP = (0.9, 0.6)  # its margins, where the losses have none
_TEMPERATURE = 0.01


@dataclass(frozen=True)
class Looks:
    """At which temperature and margins a batch is looked at."""

    temperature: float = _TEMPERATURE
    positive: float = _ROADMAP[0]
    negative: float = _ROADMAP[1]

    @staticmethod
    def of(loss: Loss, beside: tuple[Beside, ...] = ()) -> "Looks":
        """Those of the first loss that has them, else gSAP's temperature and ROADMAP's margins."""
        losses = (loss, *(other.loss for other in beside))

        def first(name: str, default: float) -> float:
            return float(next((getattr(each, name) for each in losses if hasattr(each, name)), default))

        return Looks(first("temperature", _TEMPERATURE), first("positive", _ROADMAP[0]), first("negative", _ROADMAP[1]))


@dataclass(frozen=True)
class Diagnosis:
    """Of the first images of a batch, up to MOST; None where the batch has no such pair."""

    images: int
    unsaturated_in_all_pairs: float | None
    """Mean number of other pairs whose similarity is within 4 temperatures of a positive pair's: what gSAP moves by
    (gSAP, Figure on saturation); 1 means that hardly anything does."""
    unsaturated_in_own_list: float | None
    """The same among the pairs of the positive's own query: what Smooth-AP moves by."""
    violating_positives: float | None
    """Share of positive pairs below the positive margin."""
    violating_negatives: float | None
    """Share of negative pairs above the negative margin."""
    decomposability_gap: float | None
    """Mean AP in halves of the batch minus AP in all of it (Ramzi et al., 2021, eq. 6), mean of up to 32 queries."""
    positives: tuple[int, ...]
    negatives: tuple[int, ...]
    """Pairs in 40 equal bins of the similarity from -1 to 1."""


def diagnose(embeddings: Tensor, labels: Tensor, looks: Looks) -> Diagnosis:
    """embeddings (B, D) unit length, labels (B,) int."""
    embeddings, labels = embeddings[:MOST].float(), labels[:MOST]
    similarity = embeddings @ embeddings.T  # (B, B)
    others = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    same = (labels[:, None] == labels) & others
    positive, negative = similarity[same], similarity[~same & others]
    reach = 4 * looks.temperature
    return Diagnosis(
        images=len(labels),
        unsaturated_in_all_pairs=_mean(_near(similarity[others].sort().values, positive, reach) - 1),
        unsaturated_in_own_list=_mean(_near_in_rows(similarity, same, others, reach)),
        violating_positives=_mean(positive < looks.positive),
        violating_negatives=_mean(negative > looks.negative),
        decomposability_gap=_gap_of_halves(similarity, same, others),
        positives=_histogram(positive),
        negatives=_histogram(negative),
    )


def _near(ordered: Tensor, values: Tensor, reach: float) -> Tensor:
    """ordered (..., N) ascending, values (..., P) -> (..., P) how many of them are less than `reach` away."""
    above = torch.searchsorted(ordered, (values + reach).contiguous())
    return above - torch.searchsorted(ordered, (values - reach).contiguous(), right=True)


def _near_in_rows(similarity: Tensor, same: Tensor, others: Tensor, reach: float) -> Tensor:
    """(P,) for each positive pair, how many others of its row are near; a row's own pair is put out of reach."""
    ordered = similarity.masked_fill(~others, torch.inf).sort(dim=1).values
    return (_near(ordered, similarity, reach) - 1)[same]


def _gap_of_halves(similarity: Tensor, same: Tensor, others: Tensor) -> float | None:
    queries = torch.nonzero(same.any(dim=1)).flatten()
    if not len(queries):
        return None
    chosen = queries[torch.linspace(0, len(queries) - 1, min(_QUERIES, len(queries)), device=queries.device).long()]
    gaps = []
    for query in chosen.tolist():
        rest = others[query]
        scores, relevant = similarity[query, rest].cpu().numpy(), same[query, rest].cpu().numpy()
        gaps.append(decomposability_gap(scores, relevant, np.arange(len(scores), dtype=np.int64) % 2).measured)
    return float(np.mean(gaps))


def _histogram(values: Tensor) -> tuple[int, ...]:
    counts = torch.histc(values.cpu().clamp(-1, 1), _BINS, -1, 1)
    return tuple(int(count) for count in counts.tolist())


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None
