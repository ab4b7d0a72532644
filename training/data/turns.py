"""Who has a turn in which step of an epoch: shares dealt out evenly, and categories paired."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def dealt(shares: Numbers, steps: int, random: np.random.Generator) -> list[Numbers]:
    """shares (K,), each from 1 to steps -> for each of K as many different steps as it has shares, at random.

    No two steps get numbers of shares that differ by more than one: all are dealt from a shuffled deck of the steps,
    and a new one is begun where it ends.
    """
    hands: list[Numbers] = [np.empty(0, np.int64)] * len(shares)
    deck = random.permutation(steps)
    for player in random.permutation(len(shares)):
        needed = int(shares[player])
        hand, deck = deck[:needed], deck[needed:]
        if len(hand) < needed:
            fresh = random.permutation(steps)
            had = np.isin(fresh, hand)
            fresh = np.concatenate([fresh[~had], fresh[had]])
            more = needed - len(hand)
            hand, deck = np.concatenate([hand, fresh[:more]]), fresh[more:]
        hands[player] = hand
    return hands


def paired(turns: Numbers) -> list[tuple[int, int]]:
    """turns (K,) with K >= 2 -> pairs of different numbers below K, in which k comes at least turns[k] times.

    Each possible pair is among them, unless that alone were more than the turns need. Beyond that, whoever needs most
    turns is paired with whom it has met least of those that still need some.
    """
    left, met = turns.copy(), np.zeros((len(turns), len(turns)), np.int64)
    pairs: list[tuple[int, int]] = []

    def meet(one: int, other: int) -> None:
        pairs.append((one, other))
        met[one, other] += 1
        met[other, one] += 1
        left[[one, other]] -= 1

    if len(turns) * (len(turns) - 1) <= max(int(turns.sum()), 2 * int(turns.max())):
        for one, other in combinations(range(len(turns)), 2):
            meet(one, other)
    while left.max() > 0:
        one = int(left.argmax())
        best_first = np.lexsort((-left, met[one], left <= 0))
        meet(one, int(next(other for other in best_first if other != one)))
    return pairs
