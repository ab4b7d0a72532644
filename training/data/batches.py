"""Whose images make each batch: some of every class in turn, so that an epoch reaches every class and image."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roadmatch.errors import RoadmatchError
from training.data.turns import dealt, paired
from training.recipe import Batch, Sampler, SmallClasses

Numbers = NDArray[np.int64]

_EPOCH, _STEP = 2, 3  # keep these random numbers apart from each other and from the augmentation's


class BatchError(RoadmatchError):
    """Batches that the training images cannot fill."""


@dataclass(frozen=True)
class _Part:
    """What a batch takes of a class: images of it in the epoch's order, round and round."""

    number: int
    start: int
    count: int


class Batches:
    """Batches of `size` images, of size / per_class classes, per_class images of each; a pure function of a seed.

    In each epoch every class and every image comes at least once. A class of n images comes ceil(n / per_class)
    times, its last share filled up from its others; what is missing in the last batches is drawn anew instead of
    leaving them short, so that every batch is as hard as any other and can be parted equally among processes.
    Images without a class (label below 0) are in no batch. Classes of fewer than per_class images come with

    - fewer: what there is; the batch is filled up to size with further classes, the last of which may be cut (where
      the split has no further ones, it stays smaller);
    - repeat: the same images again until there are per_class;
    - leave_out: nothing.

    The hierarchical sampler takes half of a batch's classes from each of two categories. Each pair of categories
    comes in each epoch, unless that were more batches than the images fill; beyond that, a category comes as often
    as its classes need, with the others as evenly as their sizes allow.
    """

    def __init__(
        self, labels: Numbers, categories: Numbers, batch: Batch, *, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        """labels (N,), categories (N,); rank of world processes gets its part of each batch. Raises BatchError."""
        if not 0 <= rank < world:
            raise ValueError(f"rank is {rank} of {world} processes: 0 to {world - 1} is needed")
        if batch.size % world:
            raise BatchError(
                f"batch.size {batch.size} cannot be parted equally among {world} processes: set it to a multiple of "
                f"{math.lcm(world, batch.per_class)}"
            )
        self._batch, self._seed, self._rank, self._world = batch, seed, rank, world
        self._images = np.flatnonzero(labels >= 0)
        self._class_of, counts = _compact(labels[self._images])
        if batch.small_classes is SmallClasses.LEAVE_OUT:
            kept = counts[self._class_of] >= batch.per_class
            self._images = self._images[kept]
            self._class_of, counts = _compact(labels[self._images])
        self._counts = counts  # (K,) images of each class
        self._firsts = np.cumsum(counts) - counts  # (K,) where its images begin, sorted by class
        whole = batch.small_classes is not SmallClasses.FEWER
        self._takes = np.full_like(counts, batch.per_class) if whole else np.minimum(counts, batch.per_class)
        self._shares = -(-counts // batch.per_class)
        _refuse_few_classes(len(counts), batch)
        self._rooms = self._rooms_of(categories[self._images])
        self._plan = self._planned()
        self._refuse_unfit()

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self._plan)

    def epoch(self, number: int, first: int = 0) -> Iterator[Numbers]:
        """This rank's image numbers of each step of an epoch, from the step `first` on."""
        if not 0 <= first <= len(self):
            raise ValueError(f"first is {first}: an epoch has the steps 0 to {len(self) - 1}")
        random = np.random.default_rng((_EPOCH, self._seed, number))
        shuffled = random.permutation(len(self._images))
        order = self._images[shuffled[np.argsort(self._class_of[shuffled], kind="stable")]]
        plan = [self._plan[place] for place in random.permutation(len(self._plan))]
        due = self._due(plan, random)
        for step in range(first, len(plan)):
            drawn = np.random.default_rng((_STEP, self._seed, number, step))
            parts = self._filled(plan[step], due[step], drawn)
            numbers = np.concatenate([self._numbers(parts[place], order) for place in drawn.permutation(len(parts))])
            part = len(numbers) // self._world
            yield numbers[self._rank * part : (self._rank + 1) * part]

    def _rooms_of(self, categories: Numbers) -> list[Numbers]:
        """The classes of each category; all in one where batches do not look at categories."""
        if self._batch.sampler is Sampler.CLASSES:
            return [np.arange(len(self._counts))]
        by_class = np.argsort(self._class_of, kind="stable")
        own = categories[by_class][self._firsts]
        if (categories != own[self._class_of]).any():
            raise BatchError(
                "a class has images of two categories: give each one category, or set batch.sampler to classes"
            )
        return [np.flatnonzero(own == category) for category in np.unique(own)]

    def _planned(self) -> list[tuple[int, ...]]:
        """The categories of each batch of an epoch, in no particular order."""
        classes = self._batch.size // self._batch.per_class
        most = [max(int(self._shares[room].max()), 1) for room in self._rooms]
        if self._batch.sampler is Sampler.CLASSES:
            return [(0,)] * max(-(-int(self._shares.sum()) // classes), most[0])
        _refuse_small_categories([len(room) for room in self._rooms], self._batch)
        half = [min(len(room), classes // 2) for room in self._rooms]
        turns = [-(-int(self._shares[room].sum()) // few) for room, few in zip(self._rooms, half, strict=True)]
        return [*paired(np.maximum(turns, most))]

    def _refuse_unfit(self) -> None:
        """Raise BatchError where a batch could hold no positive pair, or could not be parted equally."""
        for rooms in set(self._plan):
            takes = np.concatenate([self._takes[self._rooms[room]] for room in rooms])
            if takes.max() < 2:
                raise BatchError(
                    f"{_where(self._batch)} has only classes of one image, and a positive pair needs two: give them "
                    "more images, or set batch.small_classes to repeat"
                )
            if self._world > 1 and takes.sum() < self._batch.size:
                raise BatchError(
                    f"{_where(self._batch)} gives {takes.sum()} images a batch, and {self._world} processes need "
                    f"batch.size, {self._batch.size}: set batch.small_classes to repeat, or batch.size lower"
                )

    def _due(self, plan: Sequence[tuple[int, ...]], random: np.random.Generator) -> list[list[_Part]]:
        """The shares that are dealt to each step."""
        due: list[list[_Part]] = [[] for _ in plan]
        for room, classes in enumerate(self._rooms):
            steps = np.array([step for step, rooms in enumerate(plan) if room in rooms])
            for number, hand in zip(classes, dealt(self._shares[classes], len(steps), random), strict=True):
                for share, step in enumerate(steps[hand]):
                    start = share * self._batch.per_class
                    due[step].append(_Part(int(number), start, int(self._takes[number])))
        return due

    def _filled(self, rooms: tuple[int, ...], due: list[_Part], random: np.random.Generator) -> list[_Part]:
        """A batch: what is due, up to its number of classes from each category, then up to its size."""
        parts = list(due)
        for room, slots in zip(rooms, self._slots(rooms), strict=True):
            free = self._free([room], parts)
            missing = slots - (len(self._rooms[room]) - len(free))
            parts += [self._drawn(number, random) for number in random.permutation(free)[:missing]]
        missing = self._batch.size - sum(part.count for part in parts)
        further: list[int] = random.permutation(self._free(rooms, parts)).tolist() if missing else []
        if max(part.count for part in parts) < 2:
            further.sort(key=lambda number: bool(self._takes[number] < 2))  # one with a pair first
        for number in further:
            part = self._drawn(number, random, missing)
            parts.append(part)
            missing -= part.count
            if not missing:
                break
        return parts

    def _slots(self, rooms: tuple[int, ...]) -> tuple[int, ...]:
        """How many classes of each category; where one has fewer, filling the batch up makes that good."""
        classes = self._batch.size // self._batch.per_class
        return (classes,) if len(rooms) == 1 else (classes - classes // 2, classes // 2)

    def _free(self, rooms: Iterable[int], parts: Sequence[_Part]) -> Numbers:
        """The classes of these categories that have no part in the batch."""
        classes = np.concatenate([self._rooms[room] for room in rooms])
        return classes[~np.isin(classes, [part.number for part in parts])]

    def _drawn(self, number: int, random: np.random.Generator, most: int | None = None) -> _Part:
        take = int(self._takes[number])
        return _Part(int(number), int(random.integers(self._counts[number])), take if most is None else min(take, most))

    def _numbers(self, part: _Part, order: Numbers) -> Numbers:
        places = (part.start + np.arange(part.count)) % self._counts[part.number]
        numbers: Numbers = order[self._firsts[part.number] + places]
        return numbers


def _compact(labels: Numbers) -> tuple[Numbers, Numbers]:
    """(N,) labels -> (N,) numbers of the classes without gaps, (K,) images of each."""
    _, class_of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return class_of.astype(np.int64), counts.astype(np.int64)


def _where(batch: Batch) -> str:
    return "the training split" if batch.sampler is Sampler.CLASSES else "a pair of categories of the training split"


def _refuse_few_classes(classes: int, batch: Batch) -> None:
    least = f" of at least {batch.per_class} images" if batch.small_classes is SmallClasses.LEAVE_OUT else ""
    if classes < 2:
        raise BatchError(
            f"the training split has {('no class', 'one class')[classes]}{least}: a batch needs two, so give it more"
        )
    if classes * batch.per_class < batch.size:
        raise BatchError(
            f"batch.size {batch.size} with {batch.per_class} per class needs {batch.size // batch.per_class} classes, "
            f"and the training split has {classes}{least}: set batch.size to {classes * batch.per_class} or less"
        )


def _refuse_small_categories(sizes: list[int], batch: Batch) -> None:
    if len(sizes) < 2:
        raise BatchError("batch.sampler is hierarchical, and the training split has one category: set it to classes")
    fewest = sum(sorted(sizes)[:2])
    if fewest * batch.per_class < batch.size:
        raise BatchError(
            f"batch.size {batch.size} with {batch.per_class} per class needs {batch.size // batch.per_class} classes "
            f"of any two categories, and the smallest two have {fewest}: set batch.size to "
            f"{fewest * batch.per_class} or less, or batch.sampler to classes"
        )
