"""How much better one query's AP looks in batches than over all of them, with what it can be at most."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roadmatch.metrics.retrieval import average_precision
from roadmatch.metrics.ties import Bools, Floats, Scores, harmonic_steps

Ints = NDArray[np.int64]

_ALL_ORDERS = 12
"""Up to so many batches the worst order is found exactly, over all 2^12 sets of earlier batches."""
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Gap:
    """The gap of one query; the bounds are proven where every batch that has a positive ranks it perfectly."""

    measured: float  # mean AP of the batches minus AP of the whole; may be negative
    bound: float  # Eq. 8
    calibrated_bound: float  # Eq. 9; not always the lower one
    batches: int
    without_positive: int  # of them: their AP is undefined, they are in no mean
    imperfect: int  # of them: with an AP below 1, so that the bounds' premise fails


@dataclass(frozen=True)
class _Counts:
    """Items of each batch, or of the batches before: positives, negatives, and who keeps (breaks) the margins."""

    positives: Ints
    negatives: Ints
    kept: Ints  # positives with a score of at least alpha
    broken: Ints  # negatives with a score above beta

    def before(self, earlier: Ints) -> "_Counts":
        """earlier (S, K) 0 or 1 -> sums over those batches (S, 1)."""
        return _Counts(*(earlier @ each[:, None] for each in (self.positives, self.negatives, self.kept, self.broken)))

    def at_worst(self) -> "_Counts":
        """Sums over the batches before each place (K,): fewest positives and most negatives that any order has."""

        def fewest(each: Ints) -> Ints:
            return np.concatenate([[0], np.cumsum(np.sort(each))[:-1]])

        return _Counts(fewest(self.positives), -fewest(-self.negatives), fewest(self.kept), -fewest(-self.broken))


def decomposability_gap(
    scores: Scores, relevant: Bools, batches: int | Ints, *, alpha: float = 0.9, beta: float = 0.6
) -> Gap:
    """scores (N,), relevant (N,) of one query, batches: their size in the order given, or (N,) the batch of each item.

    Ramzi et al., 2021, Eq. 6, 8 and 9. The bounds hold for the worst order of the batches only, and are maximised over
    it: few positives and many negatives come first, which for batches of one size is the order of their positives.
    Beyond 12 batches, Eq. 8 of unlike sizes and Eq. 9 are bounded from above instead, by what each place could have
    before it at worst. Ties count against us. ValueError without a positive, or for margins that do not part.
    """
    if not len(scores) == len(relevant) or not np.isfinite(scores).all():
        raise ValueError(f"{len(scores)} scores and {len(relevant)} relevances must be as many, and numbers")
    if not alpha > beta:
        raise ValueError(f"alpha must be above beta, not {alpha} and {beta}")
    batch = _numbered(batches, len(scores))
    whole = average_precision(scores, relevant)
    within = np.array([
        average_precision(scores[batch == at], relevant[batch == at]) for at in np.unique(batch[relevant])
    ])  # fmt: skip
    count = int(batch.max()) + 1

    def by_batch(which: Bools) -> Ints:
        return np.bincount(batch[which], minlength=count)

    counts = _Counts(
        by_batch(relevant),
        by_batch(~relevant),
        by_batch(relevant & (scores >= alpha)),
        by_batch(~relevant & (scores > beta)),
    )
    least = _over_all_orders(counts) if count <= _ALL_ORDERS else _at_worst(counts)
    bound, calibrated = (1 - total / int(relevant.sum()) for total in least)
    return Gap(
        measured=float(within.mean()) - whole,
        bound=bound,
        calibrated_bound=calibrated,
        batches=count,
        without_positive=count - len(within),
        imperfect=int((within < 1 - _ROUNDING).sum()),
    )


def _numbered(batches: int | Ints, items: int) -> Ints:
    if isinstance(batches, int):
        if batches < 1:
            raise ValueError(f"a batch holds one item or more, not {batches}")
        return np.arange(items) // batches
    if len(batches) != items:
        raise ValueError(f"batches names {len(batches)} items of {items}")
    return np.unique(batches, return_inverse=True)[1]


def _juxtaposed(positives: Ints, ahead: Ints, negatives: Ints) -> Floats:
    """Sum of (ahead + k) / (ahead + k + negatives) over k = 1..positives, elementwise."""
    return positives - negatives * harmonic_steps(ahead + negatives, positives)


def _over_all_orders(counts: _Counts) -> tuple[float, float]:
    """The least sums of precisions that Eq. 8 and Eq. 9 have over the orders of K batches: a path over their sets."""
    batches = len(counts.positives)
    bit = 1 << np.arange(batches)
    before = counts.before((np.arange(1 << batches)[:, None] & bit > 0).astype(np.int64))  # (2^K, 1) each
    missed = counts.positives - counts.kept
    eq8 = _juxtaposed(counts.positives, before.positives, before.negatives)  # (2^K, K)
    eq9 = _juxtaposed(counts.kept, before.kept, before.broken)
    eq9 = eq9 + _juxtaposed(missed, counts.kept + before.positives, before.negatives)
    return _shortest_path(eq8), _shortest_path(eq9)


def _shortest_path(cost: Floats) -> float:
    """cost (2^K, K) of adding a batch to a set -> the least sum on the way from no batch to all of them."""
    least = np.full(len(cost), np.inf)
    least[0] = 0
    bit = 1 << np.arange(cost.shape[1])
    for earlier in range(len(cost) - 1):
        free = (earlier & bit) == 0
        then = earlier | bit[free]
        least[then] = np.minimum(least[then], least[earlier] + cost[earlier, free])
    return float(least[-1])


def _at_worst(counts: _Counts) -> tuple[float, float]:
    """No more than what `_over_all_orders` gives, for any number of batches.

    Before the batch with the j-th positive there are no fewer batches when these have the fewest positives, and no more
    negatives when they have the most. A positive that breaks the margin is put at the place that is worst for it.
    """
    before = counts.at_worst()
    eq8 = _juxtaposed(np.sort(counts.positives), before.positives, before.negatives).sum()
    eq9 = _juxtaposed(np.sort(counts.kept), before.kept, before.broken).sum()
    pairs, times = np.unique(np.stack([counts.kept, counts.positives - counts.kept]), axis=1, return_counts=True)
    kept, missed = pairs[:, :, None]
    at_place = _juxtaposed(missed, kept + before.positives, before.negatives)  # (pairs, K)
    return float(eq8), float(eq9 + times @ at_place.min(axis=1))
