"""What a run trains on or embeds: pictures decoded in the background, or features that are there already."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roadmatch.errors import ImageError
from roadmatch.images import Preprocessing, read_pixels
from training.data.manifest import DataError, Manifest
from training.data.pictures import augmented
from training.recipe import Augment

_AHEAD = 2  # batches being loaded while one is worked on: one to take next, one so that no thread waits for its end
_AUGMENTATION = 1  # keeps these random numbers apart from the batches', which have the same seed


class Examples(Protocol):
    """Images by number, with their classes, and what the network is given for them."""

    labels: NDArray[np.int64]  # (N,), below 0 where an image belongs to no class
    categories: NDArray[np.int64]  # (N,)

    def __len__(self) -> int: ...

    def batches(self, wanted: Iterable[NDArray[np.int64]], *, epoch: int) -> AbstractContextManager[Iterator[Tensor]]:
        """For each array of image numbers their inputs, in the same order, loaded ahead in the background.

        `wanted` is read a few batches ahead. Leaving the context ends all background work. Raises DataError.
        """


class Pictures:
    """The pictures of a manifest, augmented or as evaluation and serving see them: uint8 (B, H, W, 3).

    Threads load them, since decoding and resizing run without Python's lock: there is nothing to start, to share or
    to leave behind, and any number of them gives the same pixels, as what is random about a picture is drawn from
    (seed, epoch, its number) alone; for the second time in the same batch, from that and the 1, and so on.
    """

    def __init__(
        self, manifest: Manifest, *, augment: Augment | None, preprocessing: Preprocessing, seed: int, threads: int
    ) -> None:
        """augment: None gives evaluation's pixels. threads: 0 for as many as this process has cores."""
        if threads < 0:
            raise ValueError(f"threads is {threads}: at least 0 is needed")
        self.labels, self.categories = manifest.numbers, manifest.category_numbers
        self._manifest, self._augment, self._preprocessing, self._seed = manifest, augment, preprocessing, seed
        self._threads = threads or len(os.sched_getaffinity(0))

    def __len__(self) -> int:
        return len(self._manifest)

    @contextmanager
    def batches(self, wanted: Iterable[NDArray[np.int64]], *, epoch: int) -> Iterator[Iterator[Tensor]]:
        """As Examples.batches; a picture that cannot be read raises DataError with its file when its turn comes."""
        threads = ThreadPoolExecutor(self._threads, thread_name_prefix="pictures")
        loaded = self._loaded(threads, wanted, epoch)
        try:
            yield loaded
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
            loaded.close()

    def _loaded(
        self, threads: ThreadPoolExecutor, wanted: Iterable[NDArray[np.int64]], epoch: int
    ) -> Generator[Tensor]:
        coming: deque[_Coming] = deque()
        for numbers in wanted:
            coming.append(self._begin(threads, numbers, epoch))
            if len(coming) > _AHEAD:
                yield coming.popleft().arrived()
        while coming:
            yield coming.popleft().arrived()

    def _begin(self, threads: ThreadPoolExecutor, numbers: NDArray[np.int64], epoch: int) -> "_Coming":
        size = self._preprocessing.size
        pixels = torch.empty((len(numbers), size, size, 3), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        rows = pixels.numpy()
        return _Coming(
            pixels,
            [
                threads.submit(self._load, rows[row], int(number), showing, epoch)
                for row, (number, showing) in enumerate(zip(numbers, showings(numbers), strict=True))
            ],
        )

    def _load(self, row: NDArray[np.uint8], number: int, showing: int, epoch: int) -> None:
        file = self._manifest.file(number)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from error
        try:
            row[:] = self._pixels(data, (_AUGMENTATION, self._seed, epoch, number, showing))
        except ImageError as error:
            raise DataError(f"{file}: {error}") from error

    def _pixels(self, data: bytes, drawn_from: Sequence[int]) -> NDArray[np.uint8]:
        rule = self._preprocessing
        if self._augment is None:
            return read_pixels(data, rule)[0]
        random = np.random.default_rng(drawn_from)
        return augmented(data, self._augment, rule.size, random, interpolation=rule.interpolation)


@dataclass(frozen=True)
class _Coming:
    """A batch that is being loaded."""

    pixels: Tensor
    rows: list[Future[None]]

    def arrived(self) -> Tensor:
        for row in self.rows:
            row.result()
        return self.pixels


class Features:
    """Stored features of frozen layers: float32 (B, F), at once."""

    def __init__(self, features: Tensor, labels: NDArray[np.int64], categories: NDArray[np.int64]) -> None:
        """features (N, F), labels (N,), categories (N,)."""
        if not len(features) == len(labels) == len(categories):
            raise ValueError(f"{len(features)} features, {len(labels)} labels, {len(categories)} categories")
        self.labels, self.categories, self._features = labels, categories, features

    def __len__(self) -> int:
        return len(self._features)

    @contextmanager
    def batches(self, wanted: Iterable[NDArray[np.int64]], *, epoch: int) -> Iterator[Iterator[Tensor]]:
        """As Examples.batches; the epoch changes nothing."""
        del epoch
        yield (self._features[torch.from_numpy(numbers)] for numbers in wanted)


def showings(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """(B,) image numbers -> (B,) how often each came before in the same array, so that repeats are no copies."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    first = np.searchsorted(ordered, ordered)
    counted = np.empty(len(numbers), np.int64)
    counted[order] = np.arange(len(numbers)) - first
    return counted
