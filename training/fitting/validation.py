"""How well the network does on the classes that choose the best model."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from roadmatch.errors import RoadmatchError
from roadmatch.metrics.retrieval import retrieval_metrics
from roadmatch.metrics.streaming import streaming_global_average_precision
from training.data.loading import Examples
from training.data.manifest import Manifest, Split
from training.fitting.processes import Process

Numbers = NDArray[np.int64]
_AT_ONCE = 64  # images in the network


class ValidationError(RoadmatchError):
    """Embeddings that cannot be judged."""


@dataclass(frozen=True)
class Judgement:
    """gAP chooses the best model; the others are for the reader."""

    gap: float
    gap_without_distractors: float
    mean_average_precision: float
    recall_at_1: float
    queries: int
    images: int


@dataclass(frozen=True, eq=False)
class Judged:
    """Which images of a manifest ask and which answer; no gallery: the queries are it."""

    queries: Numbers
    gallery: Numbers | None

    @staticmethod
    def of(manifest: Manifest) -> "Judged | None":
        """Those of the validation split; None where no query has a right match.

        No image is searched for itself: where queries and gallery overlap, a query that is in the gallery does not
        ask, and if all are, the gallery's images ask each other.
        """
        queries, gallery = manifest.queries(Split.VALIDATION), manifest.gallery(Split.VALIDATION)
        outside = np.setdiff1d(queries, gallery)
        alone = not len(outside)
        labels, stored = manifest.numbers[gallery if alone else outside], manifest.numbers[gallery]
        _, counts = np.unique(labels[labels >= 0], return_counts=True)
        if not len(queries) or not ((counts > 1).any() if alone else np.isin(labels, stored).any()):
            return None
        return Judged(gallery, None) if alone else Judged(outside, gallery)

    @property
    def images(self) -> Numbers:
        """(N,) all that are embedded, queries first."""
        return self.queries if self.gallery is None else np.concatenate([self.queries, self.gallery])


def judge(network: nn.Module, examples: Examples, judged: Judged, process: Process) -> Judgement:
    """Embeds the images, each process a part of them; the first judges them, and every process has its judgement.

    network: not wrapped. Raises ValidationError for embeddings that are not finite, and what loading raises.
    """
    embeddings = embed(network, examples, judged.images, process)
    asking, images = len(judged.queries), len(judged.images)
    means = [0.0] * 4
    if process.first:
        means = _means(embeddings.cpu().numpy(), examples.labels[judged.images], asking, judged.gallery is None)
    gap, without, mean_average_precision, recall = process.as_the_first_has(means)
    return Judgement(gap, without, mean_average_precision, recall, asking, images)


def _means(embeddings: NDArray[np.float32], labels: Numbers, asking: int, among_themselves: bool) -> list[float]:
    """gAP with and without distractor queries, mAP and R@1."""
    rest = () if among_themselves else (embeddings[asking:], labels[asking:])
    try:
        gap = streaming_global_average_precision(embeddings[:asking], labels[:asking], *rest)
        lists = retrieval_metrics(embeddings[:asking], labels[:asking], *rest, ks=(1,))
    except ValueError as error:
        raise ValidationError(f"validation: {error}: lower optimizer.learning_rate") from error
    return [gap.gap, gap.gap_without_distractors, lists.mean_average_precision, lists.recall_at[1]]


@torch.no_grad()
def embed(network: nn.Module, examples: Examples, numbers: Numbers, process: Process) -> Tensor:
    """numbers (N,) -> embeddings (N, D) float32 on the process's device, in evaluation mode; every process has all."""
    training = network.training
    network.eval()
    mine = numbers[process.rank :: process.world]
    # a process without an image of its own embeds one all the same, and learns the width
    wanted = [mine[start : start + _AT_ONCE] for start in range(0, len(mine), _AT_ONCE)] or [numbers[:1]]
    with examples.batches(wanted, epoch=0) as coming:
        found = [network(inputs.to(process.device)).float() for inputs in coming]
    network.train(training)
    return process.gathered(torch.cat(found)[: len(mine)], len(numbers))
