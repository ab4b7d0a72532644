"""Slow textbook definitions, one loop each, of what is measured at thresholds and beside them."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, permutations

Row = Sequence[float]
Matrix = Sequence[Row]
Flags = Sequence[bool]


def f1(true: int, accepted: int, relevant: int) -> float:
    """Harmonic mean of precision and recall, 0 where nothing right is accepted."""
    if true == 0:
        return 0.0
    precision, recall = true / accepted, true / relevant
    return 2 * precision * recall / (precision + recall)


def counts_at(rows: Sequence[tuple[Row, Flags]], threshold: float) -> tuple[int, int, int]:
    """True, accepted and relevant pairs of these lists."""
    pairs = [(score, hit) for scores, hits in rows for score, hit in zip(scores, hits, strict=True)]
    accepted = [hit for score, hit in pairs if score >= threshold]
    return sum(accepted), len(accepted), sum(hit for _, hit in pairs)


def mean_f1(rows: Sequence[tuple[Row, Flags]], threshold: float) -> float:
    """Mean over the lists that have a relevant entry."""
    values = [f1(*counts_at([row], threshold)) for row in rows if any(row[1])]
    return sum(values) / len(values)


def lowest_with_precision(rows: Sequence[tuple[Row, Flags]], grid: Row, least: float) -> float | None:
    """The first threshold from below whose pooled precision is enough."""
    for threshold in grid:
        true, accepted, _ = counts_at(rows, threshold)
        if accepted and true / accepted >= least:
            return threshold
    return None


def share_won(known: Row, unknown: Row) -> float:
    """Share of the pairs in which the known one is higher, equal ones half."""
    won = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in known for b in unknown)
    return won / (len(known) * len(unknown))


def mean_of_means(identities: Sequence[object], outcomes: Flags) -> float:
    """Mean over identities of the share of true outcomes."""
    means = []
    for identity in set(identities):
        own = [outcome for name, outcome in zip(identities, outcomes, strict=True) if name == identity]
        means.append(sum(own) / len(own))
    return sum(means) / len(means)


def class_utility(similarity: Matrix, classes: Sequence[int], which: int, threshold: float) -> float:
    """Harmonic mean of the shares of a class's matching pairs accepted and of its other pairs rejected."""
    matching, others = [], []
    for i in range(len(classes)):
        for j in range(i):
            inside = (classes[i] == which) + (classes[j] == which)
            if inside == 2:
                matching.append(similarity[i][j] >= threshold)
            elif inside == 1:
                others.append(similarity[i][j] < threshold)
    sensitivity, specificity = sum(matching) / len(matching), sum(others) / len(others)
    return 0.0 if sensitivity * specificity == 0 else 2 / (1 / sensitivity + 1 / specificity)


def mean_over(thresholds: Row, values: Row) -> float:
    """Trapezoids over the range, divided by its length."""
    area = sum(
        (thresholds[i + 1] - thresholds[i]) * (values[i] + values[i + 1]) / 2 for i in range(len(thresholds) - 1)
    )
    return area / (thresholds[-1] - thresholds[0])


def pessimistic_ap(scores: Row, relevant: Flags) -> float:
    """Mean precision at the relevant entries, equal scores with the irrelevant ones first."""
    ranked = [hit for _, hit in sorted(zip(scores, relevant, strict=True), key=lambda pair: (-pair[0], pair[1]))]
    precisions = [sum(ranked[: at + 1]) / (at + 1) for at, hit in enumerate(ranked) if hit]
    return sum(precisions) / len(precisions)


Batch = tuple[Row, Flags]


def juxtaposed_bound(batches: Sequence[Batch]) -> float:
    """One minus AP of the batches one after the other, each with its positives first; of the worst order (Eq. 8)."""

    def ap(order: Sequence[Batch]) -> float:
        ranked = [hit for _, hits in order for hit in sorted(hits, reverse=True)]
        return pessimistic_ap([-float(at) for at in range(len(ranked))], ranked)

    return 1 - min(ap(order) for order in permutations(batches))


def calibrated_bound(batches: Sequence[Batch], alpha: float, beta: float) -> float:
    """The bound that knows who keeps the margins, term by term; of the worst order (Eq. 9)."""

    def total(order: Sequence[Batch]) -> float:
        value = 0.0
        kept = broken = positives = items = 0  # of the batches before
        for scores, hits in order:
            entries = list(zip(scores, hits, strict=True))
            good = sum(hit and score >= alpha for score, hit in entries)
            bad = sum(hit and score < alpha for score, hit in entries)
            for k in range(1, good + 1):
                value += (k + kept) / (k + kept + broken)
            for k in range(1, bad + 1):
                value += (k + good + positives) / (k + good + items)
            kept += good
            broken += sum(not hit and score > beta for score, hit in entries)
            positives += good + bad
            items += len(entries)
        return value

    count = sum(sum(hits) for _, hits in batches)
    return 1 - min(total(order) for order in permutations(batches)) / count


def best_interleaving(lists: Sequence[Sequence[int]]) -> float:
    """The highest AP of all ways to merge lists of 0 and 1 that keep each list's order."""

    @cache
    def rest(taken: tuple[int, ...]) -> float:
        depth = sum(taken)
        found = sum(sum(entries[:n]) for entries, n in zip(lists, taken, strict=True))
        best = 0.0
        for which, entries in enumerate(lists):
            if taken[which] < len(entries):
                hit = entries[taken[which]]
                after = (*taken[:which], taken[which] + 1, *taken[which + 1 :])
                best = max(best, hit * (found + 1) / (depth + 1) + rest(after))
        return best

    return rest((0,) * len(lists)) / sum(map(sum, lists))


def isotonic(scores: Row, outcomes: Row, weights: Row) -> dict[float, float]:
    """The rising fit at each distinct score: the highest over starts of the lowest over ends of the weighted mean."""
    places = sorted(set(scores))

    def mean(low: float, high: float) -> float:
        within = [
            (outcome, weight)
            for score, outcome, weight in zip(scores, outcomes, weights, strict=True)
            if low <= score <= high
        ]
        return sum(outcome * weight for outcome, weight in within) / sum(weight for _, weight in within)

    return {
        place: max(min(mean(low, high) for high in places if high >= place) for low in places if low <= place)
        for place in places
    }


def stability_index(calibration: Row, live: Row, edges: Row) -> float:
    """Population stability index over bins that begin at the edges, half a score added to each bin."""

    def shares(scores: Row) -> list[float]:
        ends = [-math.inf, *edges, math.inf]
        counts = [sum(low <= score < high for score in scores) + 0.5 for low, high in pairwise(ends)]
        return [count / sum(counts) for count in counts]

    return sum((b - a) * math.log(b / a) for a, b in zip(shares(calibration), shares(live), strict=True))


def recall_at_precision(pairs: Sequence[tuple[float, bool]], least: float) -> float:
    """The highest recall of all thresholds at which so many accepted pairs are right."""
    best = 0.0
    for threshold, _ in pairs:
        accepted = [hit for score, hit in pairs if score >= threshold]
        if sum(accepted) / len(accepted) >= least:
            best = max(best, sum(accepted) / sum(hit for _, hit in pairs))
    return best
