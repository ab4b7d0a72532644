"""Slow textbook definitions, one loop each, for the tests to compare with."""

import math
from collections.abc import Sequence


def rounded_dot(left: Sequence[float], right: Sequence[float]) -> float:
    """The cosine of two unit vectors, term by term, rounded to 6 decimals."""
    total = 0.0
    for x, y in zip(left, right, strict=True):
        total += float(x) * float(y)
    return round(total, 6)


def score_of_pair(
    query: Sequence[float], b_query: float, image: Sequence[float], b_image: float, beta: float, gamma: float
) -> float:
    """similarity - beta*b(query) - gamma*b(image), rounded to 6 decimals."""
    return round(rounded_dot(query, image) - beta * b_query - gamma * b_image, 6)


def background_mean(vector: Sequence[float], background: Sequence[Sequence[float]], k: int) -> float:
    """The mean of the k highest similarities, rounded to 6 decimals; 0 without a background."""
    highest = sorted((rounded_dot(vector, other) for other in background), reverse=True)[:k]
    return round(sum(highest) / len(highest), 6) if highest else 0.0


def ranked_items(
    query: Sequence[float],
    b_query: float,
    images: Sequence[tuple[str, str, Sequence[float], float]],
    beta: float,
    gamma: float,
) -> list[tuple[float, str, str]]:
    """(score, item, image) of every item's best image, best first; images: (item, image, vector, b).

    Equal scores are ordered by item, then image.
    """
    scored = sorted(
        (-score_of_pair(query, b_query, vector, b, beta, gamma), item, image) for item, image, vector, b in images
    )
    best: dict[str, tuple[float, str, str]] = {}
    for negated, item, image in scored:
        best.setdefault(item, (-negated, item, image))
    return list(best.values())


def binomial_tail(count: int, trials: int, share: float) -> float:
    """Probability of at least `count` successes, summed term by term."""
    return sum(math.comb(trials, n) * share**n * (1 - share) ** (trials - n) for n in range(count, trials + 1))


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x), without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def smoothed_ap_loss(scores: Sequence[float], positive: Sequence[bool], temperature: float) -> float:
    """1 - smoothed AP of one list: the mean over positives of their rank among positives / their rank among all."""
    total, positives = 0.0, [n for n, wanted in enumerate(positive) if wanted]
    for i in positives:
        among, overall = 1.0, 1.0
        for j, score in enumerate(scores):
            if j != i:
                above = sigmoid((score - scores[i]) / temperature)
                overall += above
                among += above if positive[j] else 0
        total += (overall - among) / overall  # 1 - among / overall, without cancelling
    return total / len(positives)
