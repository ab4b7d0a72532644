"""Slow textbook definitions of the losses that are not of average precision, one loop each, and batches to try."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import sigmoid

Matrix = Sequence[Sequence[float]]
Marks = Sequence[Sequence[bool]]


def margin_sides(similarity: Matrix, relevant: Marks, counted: Marks, positive: float, negative: float) -> list[Matrix]:
    """For positives and for negatives: how far each pair of each query is beyond its margin."""
    sides: list[Matrix] = []
    for side, sign, margin in ((True, 1, positive), (False, -1, negative)):
        sides.append(
            [
                [max(0.0, sign * (margin - s)) for s, r, c in zip(*row, strict=True) if c and r == side]
                for row in zip(similarity, relevant, counted, strict=True)
            ]
        )
    return sides


def violating_mean(side: Matrix) -> float:
    """Over the pairs beyond the margin."""
    beyond = [excess for row in side for excess in row if excess > 0]
    return sum(beyond) / len(beyond) if beyond else 0.0


def per_query_mean(side: Matrix) -> float:
    """Over each query's pairs, then over the queries that have any."""
    means = [sum(row) / len(row) for row in side if row]
    return sum(means) / len(means) if means else 0.0


def all_pairs_mean(side: Matrix) -> float:
    """Over all pairs."""
    pairs = [excess for row in side for excess in row]
    return sum(pairs) / len(pairs) if pairs else 0.0


def recall_loss(
    similarity: Matrix,
    relevant: Marks,
    counted: Marks,
    ks: Sequence[int],
    temperature: float,
    rank_temperature: float,
    published: bool,
) -> float:
    """Equations of RS@k, query by query; published: every candidate has a rank, and no k is above their number."""
    recalls = []
    for scores, right, seen in zip(similarity, relevant, counted, strict=True):
        positives = [p for p in range(len(scores)) if right[p] and seen[p]]
        others = [j for j in range(len(scores)) if published or seen[j]]
        if not positives:
            continue
        for k in (min(k, len(scores)) if published else k for k in ks):
            found = 0.0
            for p in positives:
                rank = 1 + sum(sigmoid((scores[j] - scores[p]) / temperature) for j in others if j != p)
                found += sigmoid((k - rank) / rank_temperature)
            recalls.append(min(found, k) / min(k, len(positives)))
    return 1 - sum(recalls) / len(recalls) if recalls else 0.0


def sigmoid_pairs_loss(similarity: Matrix, relevant: Marks, counted: Marks, scale: float, bias: float) -> float:
    """The pseudocode of SigLIP with a mask."""
    total = 0.0
    for scores, right, seen in zip(similarity, relevant, counted, strict=True):
        for s, r, c in zip(scores, right, seen, strict=True):
            if c:
                total -= math.log(sigmoid((1 if r else -1) * (scale * s + bias)))
    return total / len(similarity)


def koleo_loss(queries: Matrix, candidates: Matrix, allowed: Marks, epsilon: float) -> float:
    """Kozachenko and Leonenko's sum over the queries that have a neighbour."""
    logarithms = []
    for query, row in zip(queries, allowed, strict=True):
        lengths = [math.dist(query, other) for other, taken in zip(candidates, row, strict=True) if taken]
        if lengths:
            logarithms.append(math.log(min(lengths) + epsilon))
    return -sum(logarithms) / len(logarithms) if logarithms else 0.0


def info_nce_loss(similarity: Matrix, relevant: Marks, counted: Marks, temperature: float) -> float:
    """-log of each positive's share of itself and the query's negatives."""
    terms = []
    for scores, right, seen in zip(similarity, relevant, counted, strict=True):
        weights = [math.exp(s / temperature) for s in scores]
        others = sum(w for w, r, c in zip(weights, right, seen, strict=True) if c and not r)
        terms += [-math.log(w / (w + others)) for w, r, c in zip(weights, right, seen, strict=True) if c and r]
    return sum(terms) / len(terms)


def triplet_loss(similarity: Matrix, relevant: Marks, counted: Marks, margin: float) -> float:
    """Mean over the triplets that are not yet right by the margin."""
    beyond = []
    for scores, right, seen in zip(similarity, relevant, counted, strict=True):
        places = [j for j in range(len(scores)) if seen[j]]
        for p in (j for j in places if right[j]):
            beyond += [max(0.0, scores[n] - scores[p] + margin) for n in places if not right[n]]
    return sum(beyond) / max(1, sum(excess > 0 for excess in beyond))


def multi_similarity_loss(
    similarity: Matrix, relevant: Marks, counted: Marks, alpha: float, beta: float, base: float
) -> float:
    """Equation 15 of the multi-similarity paper over all pairs."""
    total = 0.0
    for scores, right, seen in zip(similarity, relevant, counted, strict=True):
        near = sum(math.exp(-alpha * (s - base)) for s, r, c in zip(scores, right, seen, strict=True) if c and r)
        far = sum(math.exp(beta * (s - base)) for s, r, c in zip(scores, right, seen, strict=True) if c and not r)
        total += math.log1p(near) / alpha + math.log1p(far) / beta
    return total / len(similarity)


def arc_face_loss(embeddings: Matrix, labels: Sequence[int], weights: Matrix, margin: float, scale: float) -> float:
    """Cross entropy with the margin, in radians, added to the angle of an image's own class."""
    total = 0.0
    for x, label in zip(embeddings, labels, strict=True):
        angles = [math.acos(cosine(x, w)) for w in weights]
        logits = [scale * math.cos(angle + margin * (c == label)) for c, angle in enumerate(angles)]
        total += math.log(sum(math.exp(logit) for logit in logits)) - logits[label]
    return total / len(labels)


def proxy_anchor_loss(embeddings: Matrix, labels: Sequence[int], proxies: Matrix, margin: float, alpha: float) -> float:
    """Equation 4 of the proxy anchor paper."""
    near, far, present = 0.0, 0.0, 0
    for c, proxy in enumerate(proxies):
        cosines = [cosine(x, proxy) for x in embeddings]
        own = [s for s, label in zip(cosines, labels, strict=True) if label == c]
        present += bool(own)
        near += math.log1p(sum(math.exp(-alpha * (s - margin)) for s in own))
        far += math.log1p(
            sum(math.exp(alpha * (s + margin)) for s, label in zip(cosines, labels, strict=True) if label != c)
        )
    return near / present + far / len(proxies)


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """Of vectors of any length."""
    return sum(x * y for x, y in zip(left, right, strict=True)) / (math.hypot(*left) * math.hypot(*right))


def slopes(loss: Callable[[Matrix], float], at: Tensor, step: float = 1e-6) -> Tensor:
    """Central differences of an oracle in each entry of a matrix."""
    result = torch.zeros_like(at)
    for place in range(at.numel()):
        ends = []
        for sign in (1, -1):
            moved = at.clone()
            moved.view(-1)[place] += sign * step
            ends.append(loss(moved.tolist()))
        result.view(-1)[place] = (ends[0] - ends[1]) / (2 * step)
    return result


@dataclass(frozen=True)
class Batch:
    """embeddings (B, D) float64 unit length, labels (B,)."""

    embeddings: Tensor
    labels: Tensor

    @property
    def similarity(self) -> Tensor:
        return self.embeddings @ self.embeddings.T

    @property
    def relevant(self) -> list[list[bool]]:
        return [[one == other for other in self.labels.tolist()] for one in self.labels.tolist()]

    @property
    def counted(self) -> list[list[bool]]:
        """All but an image with itself."""
        return [[i != j for j in range(len(self.labels))] for i in range(len(self.labels))]

    @property
    def masked(self) -> tuple[Matrix, Marks, Marks]:
        """What the oracles take."""
        return self.similarity.tolist(), self.relevant, self.counted


def batch_of(labels: Sequence[int], seed: int, *, directions: int | None = None, dimensions: int = 4) -> Batch:
    """Random directions; with `directions`, only so many different ones, so that images are equal."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(directions or len(labels), dimensions, generator=generator, dtype=torch.float64)
    drawn /= drawn.norm(dim=1, keepdim=True)
    if directions:
        drawn = drawn[torch.randint(directions, (len(labels),), generator=generator)]
    return Batch(drawn, torch.tensor(labels))


def batches() -> st.SearchStrategy[Batch]:
    """Classes of any size in any order: lone ones, a single one; and equal images."""
    labels = st.lists(st.integers(0, 3), min_size=1, max_size=9)
    return st.builds(
        lambda labels, seed, directions: batch_of(labels, seed, directions=directions),
        labels,
        st.integers(0, 10_000),
        st.sampled_from([None, None, 1, 3]),
    )
