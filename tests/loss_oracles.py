"""Ranking losses from their definitions, one loop each in float64, for the tests to compare with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.oracles import sigmoid

Row = Sequence[float]
Relevant = Sequence[bool]
OfList = Callable[[Row, Relevant], float]


def step_loss(scores: Row, relevant: Relevant) -> float:
    """1 - AP of the list in order, negatives before positives where they tie."""
    found, total = 0, 0.0
    for place, (_, hit) in enumerate(sorted(zip(scores, relevant, strict=True), key=lambda x: (-x[0], x[1])), start=1):
        if hit:
            found += 1
            total += found / place
    return 1 - total / found


def sigmoid_loss(scores: Row, relevant: Relevant, temperature: float) -> float:
    """Smooth-AP's loss of one list (Brown et al., 2020, eq. 6)."""
    total = 0.0
    positives = [i for i, hit in enumerate(relevant) if hit]
    for i in positives:
        among = 1 + sum(sigmoid((scores[j] - scores[i]) / temperature) for j in positives if j != i)
        whole = 1 + sum(sigmoid((scores[j] - scores[i]) / temperature) for j in range(len(scores)) if j != i)
        total += among / whole
    return 1 - total / len(positives)


def step_bound(t: float, temperature: float, slope: float, knee: float) -> float:
    """ROADMAP's H-, eq. 4, continuous at the knee."""
    if t < 0:
        return sigmoid(t / temperature)
    if t <= knee:
        return sigmoid(t / temperature) + 0.5
    return slope * (t - knee) + sigmoid(knee / temperature) + 0.5


def upper_bound_loss(scores: Row, relevant: Relevant, temperature: float, slope: float, knee: float) -> float:
    """SupAP's loss of one list, with true ranks 1, 2, 3... among the positives."""
    total = 0.0
    ranked = sorted((i for i, hit in enumerate(relevant) if hit), key=lambda i: -scores[i])
    for rank, i in enumerate(ranked, start=1):
        negatives = sum(
            step_bound(scores[j] - scores[i], temperature, slope, knee) for j, hit in enumerate(relevant) if not hit
        )
        total += rank / (rank + negatives)
    return 1 - total / len(ranked)


def soft_bins_loss(scores: Row, relevant: Relevant, bins: int) -> float:
    """1 - sum over bins of (share of positives in it) * (positives in it or above) / (all in it or above)."""
    width = 2 / (bins - 1)
    result, positives_above, above = 0.0, 0.0, 0.0
    for number in reversed(range(bins)):
        shares = [max(0.0, 1 - abs(min(1.0, max(-1.0, s)) - (-1 + number * width)) / width) for s in scores]
        positives = sum(share for share, hit in zip(shares, relevant, strict=True) if hit)
        positives_above += positives
        above += sum(shares)
        if above > 0:
            result += positives * positives_above / above
    return 1 - result / sum(relevant)


def black_box(scores: Row, relevant: Relevant, strength: float, margin: float) -> tuple[float, list[float]]:
    """1 - AP of the scores with a margin, and its gradient (Rolinek et al., 2020, algorithm 1 and section 3.3)."""
    moved = [s - margin / 2 if hit else s + margin / 2 for s, hit in zip(scores, relevant, strict=True)]

    def ranks(values: Row) -> list[int]:
        order = sorted(range(len(values)), key=lambda i: (-values[i], relevant[i]))
        return [order.index(i) + 1 for i in range(len(values))]

    before, count = ranks(moved), sum(relevant)
    loss, by_rank = 1.0, [0.0] * len(scores)
    for i, hit in enumerate(relevant):
        if hit:
            among = 1 + sum(relevant[j] and before[j] < before[i] for j in range(len(scores)))
            loss -= among / before[i] / count
            by_rank[i] = among / before[i] ** 2 / count
    after = ranks([s + strength * slope for s, slope in zip(moved, by_rank, strict=True)])
    return loss, [(new - old) / strength for new, old in zip(after, before, strict=True)]


def mean_over_queries(
    similarity: Sequence[Row], relevant: Sequence[Relevant], counted: Sequence[Relevant], of_list: OfList
) -> float:
    """The mean over rows with a positive of the loss of what is counted in the row."""
    losses = []
    for row in zip(similarity, relevant, counted, strict=True):
        kept = [(s, hit) for s, hit, there in zip(*row, strict=True) if there]
        if any(hit for _, hit in kept):
            losses.append(of_list([s for s, _ in kept], [hit for _, hit in kept]))
    return sum(losses) / len(losses)


def of_all_pairs(
    similarity: Sequence[Row], relevant: Sequence[Relevant], counted: Sequence[Relevant], of_list: OfList
) -> float:
    """The loss of one list of all that is counted."""
    kept = [
        (s, hit)
        for row in zip(similarity, relevant, counted, strict=True)
        for s, hit, there in zip(*row, strict=True)
        if there
    ]
    return of_list([s for s, _ in kept], [hit for _, hit in kept])


def published_smooth_ap(similarity: Tensor, target: Tensor, temperature: float = 0.01) -> Tensor:
    """similarity (B, B), target (B, B) bool -> () loss by the published arithmetic, a query its own positive."""
    return _published(similarity, target, lambda above: _published_sigmoid(above, temperature))


def published_sup_ap(
    similarity: Tensor, target: Tensor, temperature: float = 0.01, slope: float = 100.0, knee: float = 0.05
) -> Tensor:
    """The same for SupAP, with offset 1.44: branch after branch in place, as published, but it runs backward."""

    def step(above: Tensor) -> Tensor:
        positive = target[:, None, :].expand_as(above)
        higher, beyond = above > 0, above > knee
        line, curve, rest = ~positive & beyond, ~positive & higher & ~beyond, ~positive & ~higher
        stepped = above.clone()
        stepped[curve] = 0.5 + _published_sigmoid(above[curve], temperature)
        stepped[line] = slope * (above[line] - knee) + 1.44
        stepped[rest] = _published_sigmoid(above[rest], temperature)
        stepped[positive] = torch.heaviside(above[positive].detach(), above.new_ones(()))
        return stepped

    return _published(similarity, target, step)


def _published_sigmoid(above: Tensor, temperature: float) -> Tensor:
    return 1 / (1 + torch.exp((-above / temperature).clamp(-50, 50)))


def _published(similarity: Tensor, target: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
    """The B x B x B way: ranks[q, i] = 1 + the sum over j other than i of step(s_qj - s_qi)."""
    relevant = target.to(similarity.dtype)
    others = 1 - torch.eye(len(similarity), dtype=similarity.dtype)
    stepped = step(similarity[:, None, :] - similarity[:, :, None]) * others
    whole = stepped.sum(2) + 1
    among = ((stepped * (relevant - 1 + others)).sum(2) + relevant) * relevant  # i and j of one class are q's, too
    return 1 - ((among / whole).sum(1) / relevant.sum(1)).mean()
