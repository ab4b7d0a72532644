"""A gallery's images in memory, kept level with the database by its change log."""

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from roadmatch.errors import GalleryNotFound, LogGap
from roadmatch.scoring import Scores, Vector, fold, folded_width
from roadmatch.store import log
from roadmatch.store.database import Database
from roadmatch.vectors.faiss import Sketch, sketch

_ENTRIES = 5_000
"""So many log entries, or rows of a snapshot, are held at a time."""
_FIRST_ROOM = 256
_LEAST_SKETCH = 2_048
"""Rows not in a sketch are read as float32; from this many on they are sketched."""
_MOST_SKETCH = 65_536
"""Rows of one sketch: what a refresh sketches at most at a time."""

_Image = tuple[str, str, bytes, float]
"""image id, item id, vector (float32, little-endian), b."""


@dataclass(frozen=True, eq=False)
class Generation:
    """A gallery as it was at `seq`; nothing in it changes, whatever comes and goes meanwhile.

    Row n is one image: vectors (N, W) folded for embeddings of `dimension` numbers, b (N,), image_ids[n], and its item
    item_ids[item_numbers[n]]. Rows that are not alive (N,) are of images that are gone. The id lists may be longer than
    what belongs to this generation. items: with at least one image alive; images: alive.
    """

    seq: int
    dimension: int
    vectors: Vector
    sketches: tuple[Sketch, ...]
    b: Scores
    image_ids: Sequence[str]
    item_numbers: NDArray[np.int64]
    item_ids: Sequence[str]
    alive: NDArray[np.bool_]
    items: int
    images: int


class Replica:
    """One gallery in one bundle; safe to use from many threads."""

    def __init__(self, database: Database, gallery_id: int, bundle: str) -> None:
        self._database, self._gallery_id, self._bundle = database, gallery_id, bundle
        self._refreshing = threading.Lock()
        self._begun = self._finished = 0  # numbers of refreshes
        self._rows: _Rows | None = None
        self._seq = 0
        self._generation: Generation | None = None

    def current(self, newest: int | None = None) -> Generation:
        """All that was committed before the call; raises GalleryNotFound, LogGap, StoreUnavailable.

        newest: the gallery's seq, if the caller has just read it. Then all that was committed before that is enough,
        and a replica that stands there need not look again.
        """
        begun, generation = self._begun, self._generation
        if generation is not None and generation.seq == newest:
            return generation
        with self._refreshing:
            if self._generation is not None and self._finished > begun:
                return self._generation  # read by another thread, which began after this call
            self._begun += 1
            self._refresh()
            if self._generation is None or self._generation.seq != self._seq:
                self._generation = self._pin()
            self._finished = self._begun
            return self._generation

    def _refresh(self) -> None:
        if self._rows is not None:
            try:
                self._read_tail()
                return
            except LogGap:
                self._rows = None
        self._open()
        self._read_tail()

    def _open(self) -> None:
        rows = _Rows()
        with self._database.read(snapshot=True) as connection:
            snapshot = log.snapshot(connection, self._gallery_id, self._bundle)
            images = iter(snapshot.rows)
            while batch := list(islice(images, _ENTRIES)):
                rows.add(batch, room=snapshot.images + snapshot.images // 4)
        self._rows, self._seq, self._generation = rows, snapshot.seq, None

    def _read_tail(self) -> None:
        while True:
            with self._database.read() as connection:
                entries = log.follow(connection, self._gallery_id, self._seq, self._bundle, limit=_ENTRIES)
            if entries:
                self._apply(entries)
            if len(entries) < _ENTRIES:
                return

    def _apply(self, entries: Sequence[log.Entry]) -> None:
        assert self._rows is not None
        rows, self._rows = self._rows, None  # a failure in the middle leaves nothing half-applied behind
        rows.add(
            [
                (entry.image_id, entry.item_id, entry.vector, entry.b)
                for entry in entries
                if entry.item_id is not None and entry.vector is not None and entry.b is not None
            ]
        )
        for entry in entries:
            if entry.kind is log.Kind.REMOVE:
                rows.remove(entry.image_id)
        self._rows, self._seq = rows, entries[-1].seq

    def _pin(self) -> Generation:
        assert self._rows is not None
        if self._rows.mostly_dead():
            self._rows = self._rows.compacted()
        return self._rows.pin(self._seq)


class Replicas:
    """The replicas of a process, each opened when first asked for.

    All of them stay in memory until their gallery is gone: there is no bound on how much that is.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._replicas: dict[tuple[int, str], Replica] = {}

    def current(self, gallery_id: int, bundle: str, newest: int | None = None) -> Generation:
        """The newest generation of a gallery, or that of `newest`; raises GalleryNotFound, LogGap, StoreUnavailable."""
        with self._lock:
            replica = self._replicas.get((gallery_id, bundle))
            if replica is None:
                replica = self._replicas[gallery_id, bundle] = Replica(self._database, gallery_id, bundle)
        try:
            return replica.current(newest)
        except GalleryNotFound:
            self.drop(gallery_id)
            raise

    def drop(self, gallery_id: int) -> None:
        """Let go of a gallery that was deleted; no harm if it is not here."""
        with self._lock:
            self._replicas = {key: replica for key, replica in self._replicas.items() if key[0] != gallery_id}

    def keep_only(self, gallery_ids: Collection[int]) -> None:
        """Let go of all galleries but these."""
        with self._lock:
            self._replicas = {key: replica for key, replica in self._replicas.items() if key[0] in gallery_ids}


class _Rows:
    """Rows that grow into spare room behind every pinned view; one thread at a time.

    What a pinned generation can see is never written again: new rows lie behind its end, and the mask of the living is
    copied before it changes. The two lists of ids only grow.
    """

    def __init__(self) -> None:
        self._dimension = self._count = 0
        self._vectors = np.empty((0, 0), np.float32)
        self._b = np.empty(0)
        self._item_numbers = np.empty(0, np.int64)
        self._alive = np.empty(0, np.bool_)
        self._alive_is_pinned = False
        self._image_ids: list[str] = []
        self._item_ids: list[str] = []
        self._row_of: dict[str, int] = {}  # of the images that are alive
        self._number_of: dict[str, int] = {}
        self._images_of: list[int] = []  # by item number, alive
        self._items = 0
        self._sketches: list[Sketch] = []

    def add(self, images: Sequence[_Image], room: int = 0) -> None:
        """Append rows; room: how many there will be in the end, where that is known."""
        if not images:
            return
        vectors = np.frombuffer(b"".join(image[2] for image in images), "<f4").reshape(len(images), -1)
        self._append(
            [image[0] for image in images],
            [image[1] for image in images],
            fold(vectors, np.array([image[3] for image in images])),
            np.array([image[3] for image in images]),
            vectors.shape[1],
            room,
        )

    def remove(self, image_id: str) -> None:
        row = self._row_of.pop(image_id, None)
        if row is None:
            return  # it came and went between two refreshes
        if self._alive_is_pinned:
            self._alive, self._alive_is_pinned = self._alive.copy(), False
        self._alive[row] = False
        number = int(self._item_numbers[row])
        self._images_of[number] -= 1
        self._items -= self._images_of[number] == 0

    def mostly_dead(self) -> bool:
        """Whether more than a quarter of the rows is dead."""
        return 4 * (self._count - len(self._row_of)) > self._count

    def compacted(self) -> "_Rows":
        """The living rows anew."""
        rows = _Rows()
        living = np.flatnonzero(self._alive[: self._count])
        for start in range(0, len(living), _ENTRIES):
            some = living[start : start + _ENTRIES]
            rows._append(
                [self._image_ids[row] for row in some],
                [self._item_ids[number] for number in self._item_numbers[some]],
                self._vectors[some],
                self._b[some],
                self._dimension,
                room=len(living) + len(living) // 4,
            )
        return rows

    def pin(self, seq: int) -> Generation:
        """A view of what is here now."""
        self._sketch()
        self._alive_is_pinned = True
        return Generation(
            seq=seq,
            dimension=self._dimension,
            vectors=self._vectors[: self._count],
            sketches=tuple(self._sketches),
            b=self._b[: self._count],
            image_ids=self._image_ids,
            item_numbers=self._item_numbers[: self._count],
            item_ids=self._item_ids,
            alive=self._alive[: self._count],
            items=self._items,
            images=len(self._row_of),
        )

    def _append(
        self, image_ids: Sequence[str], item_ids: Iterable[str], folded: Vector, b: Scores, dimension: int, room: int
    ) -> None:
        end = self._count + len(image_ids)
        self._dimension = dimension
        if end > len(self._alive):
            self._make_room(max(end + end // 4, room, 2 * len(self._alive), _FIRST_ROOM))
        numbers = [self._number(item_id) for item_id in item_ids]
        for number in numbers:
            self._items += self._images_of[number] == 0
            self._images_of[number] += 1
        self._vectors[self._count : end] = folded
        self._b[self._count : end] = b
        self._item_numbers[self._count : end] = numbers
        self._row_of.update(zip(image_ids, range(self._count, end), strict=True))
        self._image_ids.extend(image_ids)
        self._count = end

    def _number(self, item_id: str) -> int:
        number = self._number_of.setdefault(item_id, len(self._item_ids))
        if number == len(self._item_ids):
            self._item_ids.append(item_id)
            self._images_of.append(0)
        return number

    def _make_room(self, rows: int) -> None:
        """Move to larger arrays; the pinned views keep the old ones. Memory that is never written is never taken."""
        vectors = np.empty((rows, folded_width(self._dimension)), np.float32)
        b, item_numbers, alive = np.empty(rows), np.empty(rows, np.int64), np.ones(rows, np.bool_)
        if self._count:
            vectors[: self._count] = self._vectors[: self._count]
            b[: self._count] = self._b[: self._count]
            item_numbers[: self._count] = self._item_numbers[: self._count]
            alive[: self._count] = self._alive[: self._count]
        self._vectors, self._b, self._item_numbers, self._alive = vectors, b, item_numbers, alive

    def _sketch(self) -> None:
        """Sketch the rows behind the last sketch when there are enough, together with sketches that are no larger.

        So a gallery that grows by single images has few sketches, and every row is sketched a few times only.
        """
        first = self._sketches[-1].first + len(self._sketches[-1]) if self._sketches else 0
        if self._count - first < _LEAST_SKETCH:
            return
        while self._sketches and len(self._sketches[-1]) <= min(
            self._count - first, _MOST_SKETCH - (self._count - first)
        ):
            first = self._sketches.pop().first
        for start in range(first, self._count, _MOST_SKETCH):
            self._sketches.append(sketch(self._vectors[start : min(start + _MOST_SKETCH, self._count)], start))
