"""Which classes are trained on, which choose the best model, and which test it."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from training.data.manifest import DataError, Manifest, Split

FEWEST = 20
"""Test classes of two images or more that operating points need."""
_SEEDS_TRIED = 1000
_FEWEST = 2  # classes with a pair of images that an evaluation needs: a right match, and one to be confused with


def split(manifest: Manifest, *, validation: float, test: float, seed: int) -> Manifest:
    """The manifest with class-disjoint splits drawn from its training images, where it has none of its own.

    test: share of the classes, drawn if there are no test images; validation: share of the classes that are left for
    training then, drawn if there are no validation images; 0 draws none. A class goes by a hash of the seed and its
    label, and an image without a class by one of its path, so that other classes and the order change nothing.
    Raises DataError where too few classes fall into a split.
    """
    shares = {
        which: share
        for which, share in ((Split.TEST, test), (Split.VALIDATION, validation))
        if share > 0 and not manifest.of(which).any()
    }
    if not manifest.of(Split.TRAIN).any():
        raise DataError("no image is in the split train: there is nothing to train on")
    drawn = _drawn(manifest, shares, seed)
    lack = _lack(drawn, shares)
    if lack is None:
        return drawn
    seeds = (other for other in range(_SEEDS_TRIED) if _lack(_drawn(manifest, shares, other), shares) is None)
    good = next(seeds, None)
    mend = "more classes or other shares are needed" if good is None else f"data.split_seed: {good} would do"
    raise DataError(f"split seed {seed} {lack}: {mend}")


def uniform(purpose: str, seed: int, key: str) -> float:
    """A number in [0, 1) that depends on nothing else; each purpose has its own, so that shares do not disturb it."""
    return int.from_bytes(hashlib.sha256(f"{purpose} {seed} {key}".encode()).digest()[:6]) / 2**48


def _drawn(manifest: Manifest, shares: Mapping[Split, float], seed: int) -> Manifest:
    def placed(key: str) -> Split:
        return next((which for which, share in shares.items() if uniform(which, seed, key) < share), Split.TRAIN)

    known: dict[str, Split] = {}  # classes are few, images many
    splits = []
    for given, label, path in zip(manifest.splits, manifest.labels, manifest.paths, strict=True):
        key = f"class {label}" if label else f"image {path}"
        if given is Split.TRAIN and key not in known:
            known[key] = placed(key)
        splits.append(known[key] if given is Split.TRAIN else given)
    return replace(manifest, splits=tuple(splits))


def _lack(drawn: Manifest, shares: Mapping[Split, float]) -> str | None:
    """What a drawn split lacks to be evaluated, or the rest to be trained on; None if nothing."""
    for which in shares:
        here = drawn.of(which)
        images = Counter(label for label, inside in zip(drawn.labels, here, strict=True) if inside and label)
        pairs = sum(count > 1 for count in images.values())
        if pairs < _FEWEST:
            return f"puts {pairs} classes of two images or more into {which}, and {_FEWEST} are needed"
    left = len(drawn.only(Split.TRAIN).classes) if shares else _FEWEST
    return f"leaves {left} classes for training, and {_FEWEST} are needed" if left < _FEWEST else None
