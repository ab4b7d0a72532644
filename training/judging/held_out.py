"""Which images of a run testify to a threshold, and which are the background: the first were not trained on."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.data.manifest import Manifest, Split
from training.data.splits import uniform

Ints = NDArray[np.int64]

MOST_CLASSES = 500
MOST_QUERIES = 4
"""Of a class: more of them hang together, and all pairs are held in memory."""
MOST_DISTRACTORS = 1000
BACKGROUND_IMAGES = (120, 1000)


@dataclass(frozen=True)
class HeldOut:
    """Numbers of the images of classes that were not trained on: stored, asking, and belonging to none of them."""

    stored: Ints  # (U,) one of each class
    asking: Ints  # (Q,)
    distractors: Ints  # (S,)


def held_out(manifest: Manifest, seed: int) -> HeldOut:
    """The test classes that are in no other split, each with a stored image and one or more that ask; seeded."""
    test = manifest.of(Split.TEST)
    elsewhere = {label for label, here in zip(manifest.labels, test, strict=True) if not here}
    by_class = defaultdict[str, list[int]](list)
    for n in sorted(np.flatnonzero(test).tolist(), key=lambda n: uniform("calibration", seed, manifest.paths[n])):
        by_class[manifest.labels[n]].append(n)
    closed = manifest.is_closed(Split.TEST)  # then its images are each other's gallery here
    stored, asking, distractors = list[int](), list[int](), by_class.pop("", [])
    names = sorted(set(by_class) - elsewhere, key=lambda label: uniform("calibration", seed, label))
    for label in names:
        answers = [n for n in by_class[label] if closed or manifest.is_gallery[n]]
        asks = [n for n in by_class[label] if manifest.is_query[n]]
        kept = next((n for n in answers if set(asks) - {n}), None)
        if kept is None or len(stored) == MOST_CLASSES:
            distractors += asks[:MOST_QUERIES] if kept is None else []
            continue
        stored.append(kept)
        asking += [n for n in asks if n != kept][:MOST_QUERIES]
    distractors = [n for n in distractors if manifest.is_query[n]][:MOST_DISTRACTORS]
    return HeldOut(*(np.array(numbers, np.int64) for numbers in (stored, asking, distractors)))


def background_numbers(manifest: Manifest, left_out: frozenset[str], seed: int = 0) -> Ints:
    """(n,) training images in a seeded order, one of each class before a second of any: 120 to 1,000, one a class.

    left_out: labels of which none is taken.
    """
    order = sorted(
        np.flatnonzero(manifest.of(Split.TRAIN)).tolist(), key=lambda n: uniform("background", seed, manifest.paths[n])
    )
    place, seen = list[tuple[int, int]](), defaultdict[str, int](int)
    for n in order:
        label = manifest.labels[n]
        if label not in left_out:
            place.append((seen[label] if label else 0, n))
            seen[label] += 1
    least, most = BACKGROUND_IMAGES
    wanted = min(most, max(least, len(seen)))
    return np.array([n for _, n in sorted(place, key=lambda one: one[0])[:wanted]], np.int64)
