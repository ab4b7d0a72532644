"""What would spoil a run or its figures, found before it starts."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roadmatch.errors import ImageError
from roadmatch.images import Limits, decode
from training.data.duplicates import SIDE, WORDS, Hashes, nearest, perceptual_hash
from training.data.manifest import DataError, Manifest, Split
from training.data.splits import FEWEST
from training.data.tables import in_a_line
from training.recipe import Batch, Sampler, SmallClasses

MOST_LEAKED = 0.01  # share of an evaluated split that may be in another, byte for byte: published data sets have a few
_SHOWN = 3  # names in a line
_AT_ONCE = 1024  # files that are waited for: what is remembered of one is 64 bytes
_LIMITS = Limits()


@dataclass(frozen=True)
class Findings:
    """What was found, a line each: errors that a run would fail on or be worthless with, and warnings."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Looked:
    """What is remembered of the images: (N, 32) sha256, (N, 4) perceptual hashes, and why some cannot be read."""

    sha256: NDArray[np.uint8]
    hashes: Hashes
    unreadable: dict[int, str]


def check(
    manifest: Manifest,
    batch: Batch,
    *,
    near_duplicates: bool,
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> Findings:
    """Reads every image once and looks at the classes.

    near_duplicates: look for near copies in two splits, beside exact ones. threads: 0 for all cores. progress is told
    how many images have been read. Memory is that of the files that are being decoded and 64 bytes an image.
    """
    looked = _look(manifest, near_duplicates, threads or len(os.sched_getaffinity(0)), progress or (lambda _: None))
    errors, warnings = list[str](), list[str]()
    if looked.unreadable:
        shown = _some(f"{manifest.paths[n]} ({why})" for n, why in looked.unreadable.items())
        errors.append(
            f"{_of(looked.unreadable, len(manifest))} images cannot be read: {shown}: save them anew or take them out"
        )
    errors += _too_few(manifest.only(Split.TRAIN), batch)
    errors += _classes_in_two_splits(manifest)
    warnings += _alone(manifest, batch)
    warnings += _known_distractors(manifest, looked)
    for first, second in combinations(Split, 2):
        exact, near = _copies(manifest, looked, first, second)
        share = len(exact) / max(1, int(manifest.of(second).sum()))
        (errors if share > MOST_LEAKED and first is Split.TRAIN else warnings).extend(
            _told(manifest, exact, first, second, "copies")
        )
        warnings += _told(manifest, near, first, second, "near copies")
    return Findings(tuple(errors), tuple(warnings))


def refuse(findings: Findings) -> None:
    """Raises DataError with the first error and how many there are; nothing where there is none."""
    if findings.errors:
        more = f" (and {len(findings.errors) - 1} more errors)" if len(findings.errors) > 1 else ""
        raise DataError(findings.errors[0] + more)


def _look(manifest: Manifest, near_duplicates: bool, threads: int, progress: Callable[[int], None]) -> _Looked:
    sha256, hashes = np.zeros((len(manifest), 32), np.uint8), np.zeros((len(manifest), WORDS), np.uint64)
    unreadable: dict[int, str] = {}
    with ThreadPoolExecutor(threads, "checks") as pool:
        for start in range(0, len(manifest), _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, len(manifest)))
            seen = pool.map(lambda n: _seen(manifest.file(n), near_duplicates), numbers)
            for n, (digest, own, why) in zip(numbers, seen, strict=True):
                sha256[n], hashes[n] = np.frombuffer(digest, np.uint8), own
                if why:
                    unreadable[n] = why
            progress(numbers.stop)
    return _Looked(sha256, hashes, unreadable)


def _seen(path: Path, near_duplicates: bool) -> tuple[bytes, Hashes, str]:
    """sha256 and hash of a file, and why it cannot be read; of such a file both are zero, and so like nothing."""
    nothing = np.zeros(WORDS, np.uint64)
    try:
        _LIMITS.check_bytes(path.stat().st_size)  # before so much is held in memory
        data = path.read_bytes()
        rgb = decode(data, reduce_to=SIDE, limits=_LIMITS).rgb
    except ImageError as error:
        return bytes(32), nothing, str(error)
    except OSError as error:
        return bytes(32), nothing, in_a_line(error.strerror or error)
    return hashlib.sha256(data).digest(), perceptual_hash(rgb) if near_duplicates else nothing, ""


def _too_few(training: Manifest, batch: Batch) -> list[str]:
    """What keeps batches from being made of the training images."""
    images = Counter(label for label in training.labels if label)
    least = {SmallClasses.FEWER: 1, SmallClasses.REPEAT: 1, SmallClasses.LEAVE_OUT: batch.per_class}[
        batch.small_classes
    ]
    usable = sum(count >= least for count in images.values())
    wanted = batch.size // batch.per_class
    if len(images) < 2:
        return [f"the training split has {len(images)} classes: two or more are needed"]
    if usable < 2:
        some = f"{usable} of {len(images)} training classes have the {batch.per_class} images of batch.per_class"
        return [f"{some}: set batch.small_classes to fewer or repeat"]
    if usable < wanted:
        needs = f"batch.size {batch.size} with {batch.per_class} per class needs {wanted} classes"
        most = usable * batch.per_class
        return [f"{needs}, and the training split has {usable}: set batch.size to {most} or less"]
    if max(images.values()) < 2 and batch.small_classes is not SmallClasses.REPEAT:
        return ["every training class has one image, so that there are no pairs: set batch.small_classes to repeat"]
    if batch.sampler is Sampler.HIERARCHICAL and len(set(training.categories)) < 2:
        return ["batch.sampler is hierarchical, and the training images have no two categories: set it to classes"]
    return []


def _alone(manifest: Manifest, batch: Batch) -> list[str]:
    """Classes with one image, where a second would be a right match: in training, and in splits with a gallery."""
    found = []
    for split in Split:
        if manifest.is_closed(split) and split is not Split.TRAIN:
            continue
        inside = manifest.only(split)
        images = Counter(label for label in inside.labels if label)
        single = sorted(label for label, count in images.items() if count == 1)
        if single and not (split is Split.TRAIN and batch.small_classes is SmallClasses.REPEAT):
            found.append(
                f"{_of(single, len(images))} classes of {split} have one image and so no right match: {_some(single)}"
            )
    return found


def few_to_test(manifest: Manifest) -> list[str]:
    """What to say of a test split that no threshold can come of; a run may be for its figures alone."""
    images = Counter(label for label in manifest.only(Split.TEST).labels if label)
    tested = sum(count > 1 for count in images.values())
    if not images or tested >= FEWEST:
        return []
    needed = f"{FEWEST} are needed for a threshold: without them there is `export --no-calibration`"
    return [f"the test split has {tested} classes of two images or more, and {needed}"]


def _known_distractors(manifest: Manifest, looked: _Looked) -> list[str]:
    """Images of no class that are, byte for byte, images of one in the same split."""
    found = []
    for split in (Split.VALIDATION, Split.TEST):
        numbers = np.flatnonzero(manifest.of(split))
        labelled = {looked.sha256[n].tobytes(): int(n) for n in numbers if manifest.labels[n]}
        pairs = [
            (int(n), labelled[key])
            for n in numbers
            if not manifest.labels[n] and n not in looked.unreadable and (key := looked.sha256[n].tobytes()) in labelled
        ]
        if pairs:
            shown = _some(f"{manifest.paths[ours]} = {manifest.paths[theirs]}" for ours, theirs in pairs)
            found.append(
                f"{len(pairs):,} unlabelled images of {split} are copies of labelled ones: {shown}: label them"
            )
    return found


def _classes_in_two_splits(manifest: Manifest) -> list[str]:
    """Classes that training shares with a split that has a gallery of its own, and so tests unseen classes."""
    found = []
    trained = set(manifest.only(Split.TRAIN).classes)
    for split in (Split.VALIDATION, Split.TEST):
        both = sorted(trained & set(manifest.only(split).classes))
        if both and not manifest.is_closed(split):
            found.append(
                f"{_of(both, len(trained))} training classes are in {split}, too, whose figures would be too good: "
                f"{_some(both)}: put each class into one split (for known classes, set is_gallery of {split} to false)"
            )
    return found


def _copies(
    manifest: Manifest, looked: _Looked, first: Split, second: Split
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of numbers (of `second`, of `first`) of exact and of near copies, one for each image of `second`.

    A near copy of the same class is what a query of a closed split looks for, and no finding.
    """
    ours, theirs = np.flatnonzero(manifest.of(second)), np.flatnonzero(manifest.of(first))
    known = {looked.sha256[n].tobytes(): int(n) for n in theirs[::-1] if n not in looked.unreadable}
    exact = [(int(n), known[key]) for n in ours if (key := looked.sha256[n].tobytes()) in known]
    wanted = manifest.is_closed(first) or manifest.is_closed(second)
    labels = manifest.numbers if wanted else np.full(len(manifest), -1)
    found = nearest(looked.hashes[ours], looked.hashes[theirs], labels[ours], labels[theirs])
    taken = {n for n, _ in exact}
    near = [(int(n), int(theirs[at])) for n, at in zip(ours, found, strict=True) if at >= 0 and n not in taken]
    return exact, near


def _told(manifest: Manifest, pairs: list[tuple[int, int]], first: Split, second: Split, what: str) -> list[str]:
    if not pairs:
        return []
    shown = _some(f"{manifest.paths[ours]} = {manifest.paths[theirs]}" for ours, theirs in pairs)
    total = int(manifest.of(second).sum())
    return [f"{_of(pairs, total)} images of {second} are {what} of images of {first}: {shown}: keep one of each"]


def _of(found: Iterable[object], total: int) -> str:
    return f"{len(list(found)):,} of {total:,}"


def _some(names: Iterable[str]) -> str:
    """The first few, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN:,} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
