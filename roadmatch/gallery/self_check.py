"""Whether a gallery's own images, without any labels, contradict the rate that its rule states."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from roadmatch.gallery.replica import Generation
from roadmatch.scoring import ScoreRule, fold_query, score, similarity
from roadmatch.vectors.faiss import Rows, product_error

LEAST_IMAGES = 20
"""With fewer images searched, one pair of like pictures among them would decide."""
TOO_OFTEN = 3.0
"""A sound gallery's own images are answered `match` up to 2.6 times as often as new pictures are (measured)."""
_CHANCE = 0.05
_TAIL = 0.025
_QUERIES_AT_A_TIME = 64
_ROWS_AT_A_TIME = 4_096
_ROUNDING = 2e-6
_LEAST_WAIT_S = 60.0
_MOST_SHARE = 0.05
_GROWTH = 0.1


class Calibration(StrEnum):
    """What the self-check says about a rule in a gallery."""

    FITS = "fits"
    DOES_NOT_FIT = "does_not_fit"
    NOT_CHECKED = "not_checked"


@dataclass(frozen=True)
class SelfCheck:
    """So many stored images were searched among the other items, and so many were answered `match`.

    rate: their share, an upper estimate of the false-match rate here; None when none was searched. low, high: its 95 %
    bounds (Clopper-Pearson).
    """

    searched: int
    answered_match: int
    rate: float | None
    low: float
    high: float


def self_check(
    generation: Generation,
    labels: Mapping[str, str | None],
    rule: ScoreRule,
    threshold: float,
    *,
    sample: int = 500,
    seed: int,
) -> SelfCheck:
    """Search a seeded sample of the images among the images of the other items.

    labels: by item id; items of the same label are right matches of each other and do not count. A gallery with fewer
    than two items has nothing to search. Threads may go on searching: the work is cut into products of a few ms.
    """
    rows = _sampled(generation, sample, seed)
    groups = _groups(generation, labels)
    answered = 0
    for start in range(0, len(rows), _QUERIES_AT_A_TIME):
        some = rows[start : start + _QUERIES_AT_A_TIME]
        answered += int(_answered_match(generation, some, groups, rule, threshold).sum())
    low, high = share_bounds(answered, len(rows))
    return SelfCheck(len(rows), answered, answered / len(rows) if len(rows) else None, low, high)


def verdict(check: SelfCheck, stated_rate: float | None) -> Calibration:
    """Whether the gallery contradicts a stated false-match rate; not checked without one or under LEAST_IMAGES.

    It does when the share is above 3 times the stated rate and chance does not explain it: at 3 times the stated rate,
    so many would come with a probability under 0.05. Likeness is mutual, so matches come in pairs, and two images are
    counted as one trial.
    """
    if stated_rate is None or check.rate is None or check.searched < LEAST_IMAGES:
        return Calibration.NOT_CHECKED
    allowed = min(TOO_OFTEN * stated_rate, 1.0)
    if check.rate <= allowed:
        return Calibration.FITS
    by_chance = at_least(check.answered_match // 2, check.searched // 2, allowed)
    return Calibration.DOES_NOT_FIT if by_chance < _CHANCE else Calibration.FITS


def at_least(count: int, trials: int, share: float) -> float:
    """Binomial probability of at least so many of the trials, each with this chance."""
    if count <= 0:
        return 1.0
    if count > trials:
        return 0.0
    if share in (0.0, 1.0):
        return share
    logs = [
        math.lgamma(trials + 1) - math.lgamma(n + 1) - math.lgamma(trials - n + 1)
        + n * math.log(share) + (trials - n) * math.log1p(-share)
        for n in range(count, trials + 1)
    ]  # fmt: skip
    return min(1.0, math.fsum(math.exp(term) for term in logs))


def share_bounds(count: int, trials: int) -> tuple[float, float]:
    """95 % bounds of a share (Clopper and Pearson, 1934); (0, 1) without trials."""
    low = _crossing(lambda share: at_least(count, trials, share) - _TAIL) if count > 0 else 0.0
    high = _crossing(lambda share: at_least(count + 1, trials, share) - (1 - _TAIL)) if count < trials else 1.0
    return low, high


@dataclass(frozen=True)
class _Last:
    threshold: float
    seq: int
    images: int
    at_s: float
    took_s: float
    check: SelfCheck


class SelfChecks:
    """The newest self-check of each gallery, and when the next is due; the caller has the clock and the thread."""

    def __init__(self) -> None:
        self._last: dict[int, _Last] = {}

    def latest(self, gallery_id: int) -> SelfCheck | None:
        """The newest check; None before the first."""
        last = self._last.get(gallery_id)
        return None if last is None else last.check

    def is_due(self, gallery_id: int, generation: Generation, threshold: float, now_s: float) -> bool:
        """Whether to check again.

        At once for a gallery without a check or with another threshold, and when it grew or shrank by a tenth; after a
        minute when it changed at all. Never so soon that checking takes more than a twentieth of the time.
        """
        last = self._last.get(gallery_id)
        if last is None:
            return True
        if now_s - last.at_s < last.took_s / _MOST_SHARE:
            return False
        if threshold != last.threshold or abs(generation.images - last.images) >= max(1.0, _GROWTH * last.images):
            return True
        return generation.seq != last.seq and now_s - last.at_s >= _LEAST_WAIT_S

    def record(
        self,
        gallery_id: int,
        generation: Generation,
        threshold: float,
        check: SelfCheck,
        *,
        now_s: float,
        took_s: float,
    ) -> None:
        """Keep a check that was made of this generation."""
        self._last[gallery_id] = _Last(threshold, generation.seq, generation.images, now_s, took_s, check)

    def drop(self, gallery_id: int) -> None:
        """Forget a gallery that was deleted."""
        self._last.pop(gallery_id, None)


def _sampled(generation: Generation, sample: int, seed: int) -> Rows:
    """Rows of living images in a random order that depends on their ids, not on when they came."""
    if generation.items < 2:
        return np.empty(0, np.int64)
    living = sorted(np.flatnonzero(generation.alive).tolist(), key=generation.image_ids.__getitem__)
    chosen = np.random.default_rng(seed).permutation(len(living))[:sample]
    return np.array(living, np.int64)[chosen]


def _groups(generation: Generation, labels: Mapping[str, str | None]) -> NDArray[np.int64]:
    """What each row is a picture of (N,): rows of one group are right matches of each other."""
    numbers: dict[tuple[str, str | None], int] = {}
    of_item = []
    for item in generation.item_ids[: int(generation.item_numbers.max(initial=-1)) + 1]:
        label = labels.get(item)
        key = ("item", item) if label is None else ("label", label)
        of_item.append(numbers.setdefault(key, len(numbers)))
    return np.array(of_item, np.int64)[generation.item_numbers]


def _answered_match(
    generation: Generation, rows: Rows, groups: NDArray[np.int64], rule: ScoreRule, threshold: float
) -> NDArray[np.bool_]:
    """rows (Q,) -> whether the best score among the other groups reaches the threshold (Q,)."""
    queries = generation.vectors[rows, : generation.dimension]
    folded = np.stack([fold_query(query, rule) for query in queries])
    error = product_error(folded[0]) * 1.01 + _ROUNDING
    needed = threshold + rule.beta * generation.b[rows]  # (Q,) on the folded product
    answered = np.zeros(len(rows), np.bool_)
    for start in range(0, len(generation.vectors), _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        products = folded @ generation.vectors[part].T  # (Q, N)
        others = generation.alive[part] & (groups[rows][:, None] != groups[part])
        above = products - needed[:, None]
        answered |= (others & (above >= error)).any(axis=1)
        for query in np.flatnonzero(~answered):  # float32 does not decide what is as near as its error
            near = start + np.flatnonzero(others[query] & (np.abs(above[query]) < error))
            if len(near):
                answered[query] = _reaches(generation, int(rows[query]), near, rule, threshold)
    return answered


def _reaches(generation: Generation, row: int, near: Rows, rule: ScoreRule, threshold: float) -> bool:
    alike = similarity(
        generation.vectors[row, : generation.dimension], generation.vectors[near, : generation.dimension]
    )
    return bool((score(alike, float(generation.b[row]), generation.b[near], rule) >= threshold).any())


def _crossing(rising: Callable[[float], float]) -> float:
    """Where a rising function of a share crosses zero."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
