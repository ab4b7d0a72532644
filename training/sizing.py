"""What there is to train on, and the sizes of a run that follow from it."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from roadmatch.errors import ImageError, RoadmatchError
from roadmatch.images import decode
from training.data import splits
from training.data.layouts import images_of
from training.data.manifest import DataError, Manifest, Split
from training.data.splits import FEWEST
from training.recipe import Data, Layout, Mode

_LOOKED_AT = 64  # images, spread over all, whose size and format are looked at
_VALIDATION, _TEST = 0.15, 0.25
_TESTED = 24  # test classes to aim at: FEWEST of them, whatever the hash does
_SEEDS = 10
_ENOUGH = 6  # classes: two to train on, two to choose the model by, two to test on
PER_CLASS = 4  # as in the papers
_FULL = 128  # images of a batch below which more of a class are taken
_BATCH = {Mode.LINEAR: 512, Mode.WHOLE: 256}  # four times as much adds .005 gAP; a GPU holds 256 in chunks
_STEPS = {Mode.LINEAR: 300, Mode.WHOLE: 3000}
_MOST_EPOCHS = {Mode.LINEAR: 500, Mode.WHOLE: 100}
_FEWEST_EPOCHS = 5
_SIDE, _STEP = 224, 32  # pixels: what the default network was trained with, and what sides are a multiple of


class InitError(RoadmatchError):
    """Images that no recipe can be written for."""


@dataclass(frozen=True)
class Seen:
    """What there is to train on."""

    manifest: Manifest  # with splits
    data: Data
    given: bool  # the split is that of the manifest
    formats: dict[str, int]  # of those looked at
    side: int  # median of their shorter sides, pixels
    unreadable: int

    @property
    def training(self) -> list[int]:
        """Images of each training class, ascending."""
        return sorted(Counter(label for label in self.manifest.only(Split.TRAIN).labels if label).values())


@dataclass(frozen=True)
class Sizes:
    """What follows from what was seen."""

    mode: Mode
    per_class: int
    batch: int
    chunk: int | None
    epochs: int
    side: int | None  # None: the network's own


def look(source: Path) -> Seen:
    """Counts classes and images, puts them into splits, and looks into some. Raises InitError and DataError."""
    real = source.resolve()
    if real.is_dir():
        data = Data(layout=Layout.FOLDER, root=real)
    elif real.suffix.lower() in (".csv", ".parquet"):
        data = Data(layout=Layout.MANIFEST, root=real.parent, manifest=real)
    else:
        raise InitError(f"{source} is no folder, and no CSV or Parquet manifest: give one of these")
    images = images_of(data)
    _refuse_hopeless(images, source)
    given = not images.of(Split.TRAIN).all()
    data, images = _split(data, images)
    formats, sides, unreadable = _inside(images)
    if not sides:
        raise InitError(f"none of {unreadable} images of {source} that were looked at can be read: check the files")
    return Seen(images, data, given, dict(formats.most_common()), round(statistics.median(sides)), unreadable)


def sizes(seen: Seen, *, gpu: bool) -> Sizes:
    """Batch from the classes, per_class from the median class, epochs from the number of images."""
    mode = Mode.WHOLE if gpu else Mode.LINEAR
    counts = seen.training
    median = max(2, int(statistics.median(counts)))
    per_class = min(median, max(PER_CLASS, _FULL // len(counts)))
    classes = min(len(counts), _BATCH[mode] // per_class)
    batch = per_class * max(2, classes)
    epochs = math.ceil(_STEPS[mode] * batch / sum(counts))
    side = None if seen.side >= _SIDE else max(2 * _STEP, seen.side // _STEP * _STEP)
    return Sizes(
        mode=mode,
        per_class=per_class,
        batch=batch,
        chunk=64 if gpu and batch > 64 else None,
        epochs=min(max(epochs, _FEWEST_EPOCHS), _MOST_EPOCHS[mode]),
        side=side,
    )


def _refuse_hopeless(images: Manifest, source: Path) -> None:
    classes = images.classes
    if len(classes) < 2:
        named = f"one class ({classes[0]})" if classes else "no class"
        raise InitError(f"{source} has {named}: images of several classes are needed, a sub-folder or label for each")
    if not _pairs(images):
        raise InitError(f"every class of {source} has one image: give some a second one, or there is nothing to match")


def _split(data: Data, images: Manifest) -> tuple[Data, Manifest]:
    """Shares and seed of a split that works, and the images in it.

    Without validation where classes are few; with more of them to test on where that makes enough to calibrate with.
    """
    pairs = _pairs(images)
    chosen = pairs >= 2 * FEWEST and not images.of(Split.TEST).any()
    test = round(min(0.5, max(_TEST, _TESTED / pairs)), 2) if chosen else _TEST
    for validation in (_VALIDATION, 0.0):
        first: tuple[int, Manifest] | None = None
        for seed, drawn in _working(images, validation, test):
            enough = not chosen or _pairs(drawn.only(Split.TEST)) >= FEWEST
            first = (seed, drawn) if enough or first is None else first
            if enough:
                break
        if first is not None:
            shares = {"validation": validation, "test": test, "split_seed": first[0]}
            return data.model_copy(update=shares), first[1]
    raise InitError(
        f"{pairs} classes have two images or more, too few to train and to test on: {_ENOUGH} or more are needed"
    )


def _working(images: Manifest, validation: float, test: float) -> Iterator[tuple[int, Manifest]]:
    """Seeds whose split gives each part what it needs, and the images so split."""
    seeds = list(range(_SEEDS))
    while seeds:
        seed = seeds.pop(0)
        try:
            drawn = splits.split(images, validation=validation, test=test, seed=seed)
        except DataError as error:  # which has tried a thousand seeds, and names one that would do
            advised = re.search(r"split_seed: (\d+) would do", str(error))
            seeds = [int(advised[1])] if advised else []
            continue
        if _pairs(drawn.only(Split.TRAIN)):
            yield seed, drawn


def _pairs(images: Manifest) -> int:
    """Classes of two images or more."""
    return sum(count > 1 for count in Counter(label for label in images.labels if label).values())


def _inside(images: Manifest) -> tuple[Counter[str], list[int], int]:
    """Formats and shorter sides of some images, and how many of them cannot be read."""
    formats, sides, unreadable = Counter[str](), list[int](), 0
    for n in range(0, len(images), max(1, math.ceil(len(images) / _LOOKED_AT))):
        try:
            picture = decode(images.file(n).read_bytes(), reduce_to=64)
        except (ImageError, OSError):
            unreadable += 1
            continue
        formats[picture.format] += 1
        sides.append(min(picture.width, picture.height))
    return formats, sides, unreadable
