"""Ranked-list metrics by their definitions: orders written out, one loop each."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, permutations, product
from statistics import fmean


def pessimistic_order(similarity: Sequence[float], relevant: Sequence[bool]) -> list[bool]:
    """Relevance in ranked order, negatives before positives of the same score."""
    return [flag for _, flag in sorted((-score, flag) for score, flag in zip(similarity, relevant, strict=True))]


def all_orders(similarity: Sequence[float], relevant: Sequence[bool]) -> Iterator[list[bool]]:
    """Relevance in every ranked order that equal scores allow."""
    pairs = sorted(zip(similarity, relevant, strict=True), key=lambda pair: -pair[0])
    tied = [[flag for _, flag in group] for _, group in groupby(pairs, key=lambda pair: pair[0])]
    for parts in product(*(permutations(flags) for flags in tied)):
        yield [flag for part in parts for flag in part]


def ordered_ap(order: Sequence[bool]) -> float:
    """Mean precision at the relevant places of a ranked list."""
    found, precisions = 0, []
    for place, flag in enumerate(order, start=1):
        if flag:
            found += 1
            precisions.append(found / place)
    return fmean(precisions)


def ordered_ap_at_r(order: Sequence[bool]) -> float:
    """Precision at the relevant ones of the first R places, summed, over R."""
    r, found, total = sum(order), 0, 0.0
    for place, flag in enumerate(order[:r], start=1):
        if flag:
            found += 1
            total += found / place
    return total / r


def ordered_r_precision(order: Sequence[bool]) -> float:
    """Share of relevant ones in the first R places."""
    r = sum(order)
    return sum(order[:r]) / r


def ordered_recall(order: Sequence[bool], k: int) -> float:
    """1 if any of the first k places is relevant."""
    return float(any(order[:k]))


def grouped_ap(similarity: Sequence[float], relevant: Sequence[bool]) -> float:
    """Sum over thresholds, descending, of precision x gain in recall."""
    positives, before, total = sum(relevant), 0, 0.0
    for threshold in sorted(set(similarity), reverse=True):
        answered = [flag for score, flag in zip(similarity, relevant, strict=True) if score >= threshold]
        total += sum(answered) / len(answered) * (sum(answered) - before) / positives
        before = sum(answered)
    return total


def gap_at_k(similarity: Sequence[Sequence[float]], relevance: Sequence[Sequence[bool]], k: int) -> float:
    """Pessimistic gAP of each row's k best, negatives first, over all positives."""
    kept: list[tuple[float, bool]] = []
    for row, flags in zip(similarity, relevance, strict=True):
        kept += sorted(zip(row, flags, strict=True), key=lambda pair: (-pair[0], pair[1]))[:k]
    found, total = 0, 0.0
    for place, (_, flag) in enumerate(sorted(kept, key=lambda pair: (-pair[0], pair[1])), start=1):
        if flag:
            found += 1
            total += found / place
    return total / sum(sum(flags) for flags in relevance)


def pair_list(
    query_labels: Sequence[int],
    gallery_labels: Sequence[int],
    similarity: Sequence[Sequence[float]],
    *,
    unimodal: bool,
    without_distractors: bool = False,
) -> tuple[list[float], list[bool]]:
    """Scores and relevance of all pairs that count, one by one."""
    scores, relevant = [], []
    for i, label in enumerate(query_labels):
        others = [j for j in range(len(gallery_labels)) if not (unimodal and i == j)]
        if without_distractors and not any(gallery_labels[j] == label for j in others):
            continue
        scores += [similarity[i][j] for j in others]
        relevant += [gallery_labels[j] == label for j in others]
    return scores, relevant


def best_interleaving(similarity: Sequence[Sequence[float]], relevance: Sequence[Sequence[bool]]) -> float:
    """Highest AP of one list of all pairs that keeps each row's own order: every prefix of every row is tried."""
    lists = [pessimistic_order(row, flags) for row, flags in zip(similarity, relevance, strict=True)]

    @cache
    def best(taken: tuple[int, ...]) -> float:
        """Highest sum of precisions over a list of so many entries of each row."""
        found = sum(sum(flags[:count]) for flags, count in zip(lists, taken, strict=True))
        return max(
            (
                best((*taken[:at], count - 1, *taken[at + 1 :])) + lists[at][count - 1] * found / sum(taken)
                for at, count in enumerate(taken)
                if count
            ),
            default=0.0,
        )

    return best(tuple(map(len, lists))) / sum(map(sum, relevance))
