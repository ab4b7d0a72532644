"""Batches for the losses, and the same losses computed without a mesh: slow forms to be exact or fast against."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from roadmatch.losses.global_ap import global_sigmoid_ap
from roadmatch.losses.pairs import pairs_of_labels

_SATURATED = 40.0
"""Temperatures from a score to another beyond which a sigmoid is 0 or 1 to 4e-18."""
_WORK = 1 << 21


@dataclass(frozen=True, eq=False)
class Batch:
    """embeddings (B, D) float32 unit length, labels (B,)."""

    embeddings: Tensor
    labels: Tensor

    @property
    def similarity(self) -> Tensor:
        """(B, B), the same bits on both sides of the diagonal."""
        product = self.embeddings @ self.embeddings.T
        return (product + product.T) / 2

    @property
    def apart(self) -> Tensor:
        """(B, B): all but images with themselves."""
        return ~torch.eye(len(self.labels), dtype=torch.bool)

    @property
    def relevant(self) -> Tensor:
        """(B, B)."""
        return (self.labels[:, None] == self.labels) & self.apart


def random_batch(size: int, dimension: int, per_class: int = 4, seed: int = 0) -> Batch:
    """Embeddings that know nothing."""
    made = torch.Generator().manual_seed(seed)
    return Batch(normalize(torch.randn(size, dimension, generator=made)), torch.arange(size) // per_class)


def overlapping_batch(size: int, dimension: int, per_class: int = 4, seed: int = 0, noise: float = 2.0) -> Batch:
    """Embeddings in training: classes lie in super-classes, and positives reach down among the negatives."""
    made = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) // per_class
    above = torch.randn(-(-size // (16 * per_class)), dimension, generator=made)[labels // 16]
    centre = torch.randn(size // per_class + 1, dimension, generator=made)[labels]
    each = torch.randn(size, dimension, generator=made) * torch.rand(size, 1, generator=made)
    return Batch(normalize(above + centre + noise * each), labels)


def nearly_solved_batch(size: int, dimension: int, temperature: float) -> Batch:
    """An overlapping batch with so little noise that the loss is between 2e-5 and 6e-5."""
    low, high = 0.0, 2.0
    for _ in range(40):
        noise = (low + high) / 2
        batch = overlapping_batch(size, dimension, noise=noise)
        loss = global_sigmoid_ap(pairs_of_labels(batch.embeddings, batch.labels), temperature).item()
        if 2e-5 <= loss <= 6e-5:
            return batch
        low, high = (noise, high) if loss < 2e-5 else (low, noise)
    raise RuntimeError(f"no noise gives a nearly solved batch at temperature {temperature:g}")


def exact_global_ap(similarity: Tensor, relevant: Tensor, temperature: float) -> tuple[float, Tensor]:
    """similarity (B, B), relevant (B, B), both symmetric -> gSAP's loss and its gradient (B, B), in float64.

    Every positive is compared with every pair, the diagonal left out; comparisons that are 0 or 1 to 4e-18 are counted.
    Only the pairs above the diagonal are gone through, each for two.
    """
    row, column = np.triu_indices(len(similarity), 1)
    scores = similarity.numpy()[row, column].astype(np.float64)
    positive = relevant.numpy()[row, column]
    order = np.argsort(scores)
    loss, gradient = _of_ordered(torch.from_numpy(scores[order]), torch.from_numpy(positive[order]), temperature)
    whole = np.zeros(similarity.shape)
    whole[row[order], column[order]] = whole[column[order], row[order]] = gradient.numpy()
    return loss, torch.from_numpy(whole)


def _of_ordered(scores: Tensor, positive: Tensor, temperature: float) -> tuple[float, Tensor]:
    """scores (n,) ascending float64, each for two pairs -> loss, gradient by pair (n,)."""
    count = 2 * int(positive.sum())
    positives_from = torch.cat([positive.flip(0).cumsum(0).flip(0), positive.new_zeros(1, dtype=torch.int64)])
    asked = positive.nonzero()[:, 0]
    gradient, loss = torch.zeros_like(scores), 0.0
    for some, first, last in _windows(scores, asked, temperature):
        compared = torch.sigmoid((scores[first:last] - scores[some, None]) / temperature)  # (asked, window)
        among = positive[first:last]
        above = len(scores) - last
        a = 2 * (compared[:, among].sum(1) + positives_from[last]) + 0.5  # 1/2 of itself is counted as its own 1
        n = 2 * (compared[:, ~among].sum(1) + above - positives_from[last])
        loss += 2 * (n / (a + n)).sum().item() / count
        by_positive, by_negative = -n / (a + n) ** 2 / count, a / (a + n) ** 2 / count
        slopes = compared * (1 - compared) / temperature
        slopes *= torch.where(among, by_positive[:, None], by_negative[:, None])
        # Two pairs ask, and each compares itself with the two of a score: a pair's gradient is that of one of them.
        gradient[first:last] += 2 * slopes.sum(0)
        gradient[some] -= 2 * slopes.sum(1)
    return loss, gradient


def _windows(scores: Tensor, asked: Tensor, temperature: float) -> Iterator[tuple[Tensor, int, int]]:
    """asked (P,) -> a few neighbours among them, with the range of scores that are not saturated for any of them."""
    low = torch.searchsorted(scores, scores[asked] - _SATURATED * temperature).tolist()
    high = torch.searchsorted(scores, scores[asked] + _SATURATED * temperature, right=True).tolist()
    start = 0
    while start < len(asked):
        end = start + 1
        while end < len(asked) and (end + 1 - start) * (high[end] - low[start]) <= _WORK:
            end += 1
        yield asked[start:end], low[start], high[end - 1]
        start = end


def dense_global_ap(similarity: Tensor, relevant: Tensor, apart: Tensor, temperature: float, asked: int) -> None:
    """gSAP forward and backward by comparing `asked` of the positives with all pairs, float32, in bounded memory.

    The common form: sigmoids of all differences of a few positives at a time, computed again in the backward pass.
    """
    scores = similarity.detach().flatten().requires_grad_()
    positives, counted = relevant.flatten(), apart.flatten()
    total = scores.new_zeros(())
    for chunk in positives.nonzero()[:asked, 0].split(4):
        total = total + checkpoint(_dense_share, scores, chunk, positives, counted, temperature, use_reentrant=False)
    total.backward()


def _dense_share(scores: Tensor, asked: Tensor, positives: Tensor, counted: Tensor, temperature: float) -> Tensor:
    compared = torch.sigmoid((scores - scores[asked, None]) / temperature)
    a = 0.5 + (compared * positives).sum(1)
    b = 0.5 + (compared * counted).sum(1)
    return (a / b).sum()
