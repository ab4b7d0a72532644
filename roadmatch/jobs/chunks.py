"""A job's entries in chunks, read and decoded ahead of who embeds them.

The chunks come in the order of their entries. While one decoder is long at a picture, the others go on with those
behind it, and who embeds has the chunks before it: as many as fit into the memory that may wait.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256

from roadmatch.errors import ImageError, code_of
from roadmatch.gallery import items
from roadmatch.gallery.items import Item, NewImage, Wanted, spelt
from roadmatch.jobs.decoding import Decoded, Decoders
from roadmatch.jobs.queue import Failure
from roadmatch.jobs.sources import Entry, EntryFailed
from roadmatch.scoring import Vector

MOST_ENTRIES, _MOST_BYTES = 64, 64_000_000
"""Of a chunk: what a kill costs."""
_MOST_AHEAD, _MOST_AHEAD_BYTES = 2_000, 32_000_000
"""Another chunk is read while less than this waits, entries and bytes of files and pixels. Where a job changes hands,
whoever has it next reads them anew."""
_MOST_UNCHANGED = 1_000
"""Entries of a chunk that were only looked at: what is looked at again after a kill, some tenths of a second."""

Held = Callable[[Sequence[str]], dict[str, Item]]
"""Ids of items -> those that the gallery has."""


@dataclass(frozen=True, eq=False)
class Picture:
    """An entry whose picture was decoded."""

    entry: Entry
    data: bytes
    sha256: str
    decoded: Decoded

    def wanted(self, vector: Vector, b: float) -> Wanted:
        """The item that it becomes with its embedding."""
        image = NewImage(
            self.data, self.sha256, self.decoded.format, self.decoded.width, self.decoded.height, vector, b
        )
        return Wanted(self.entry.item_id, self.entry.label, self.entry.metadata, [image])


@dataclass(frozen=True, eq=False)
class Chunk:
    """Entries in a row: decoded ones to be embedded, and what needs no embedding."""

    decoded: list[Picture]
    unchanged: int
    failures: list[Failure]


@dataclass(frozen=True, eq=False)
class _File:
    """An entry whose bytes were read."""

    entry: Entry
    data: bytes
    sha256: str


@dataclass(frozen=True, eq=False)
class _Begun:
    """A chunk whose pictures are being decoded. outcomes: of the files, in their order, as soon as they are there."""

    files: list[_File]
    outcomes: Iterator[Decoded | ImageError]
    unchanged: int
    failures: list[Failure]
    bytes: int

    @property
    def entries(self) -> int:
        return len(self.files) + self.unchanged + len(self.failures)

    def finished(self) -> Chunk:
        """The chunk, when its last picture is decoded. Raises what Decoders.decode does."""
        decoded, failures = [], list(self.failures)
        for file, outcome in zip(self.files, self.outcomes, strict=True):
            if isinstance(outcome, ImageError):
                failures.append(Failure(file.entry.position, file.entry.name, code_of(outcome), str(outcome)))
            else:
                decoded.append(Picture(file.entry, file.data, file.sha256, outcome))
        return Chunk(decoded, self.unchanged, failures)


@contextmanager
def chunks(
    found: Iterator[Entry | Failure], decoders: Decoders, held: Held, *, keeps_files: bool
) -> Iterator[Iterator[Chunk]]:
    """The chunks of what is found; after the block nothing more is read, but decoders finish what they were given.

    held: asked about each chunk for what is unchanged in it, on another thread. keeps_files: an item whose file is not
    kept counts as changed. The iterator raises what reading and `held` raise, and what Decoders.decode does.
    """
    ahead = _Ahead(_Reader(found, decoders, held, keeps_files))
    with ThreadPoolExecutor(1, "reading") as thread:
        try:
            yield ahead.finished(thread.submit(ahead.read).result)
        finally:
            ahead.close()


class _Ahead:
    """The chunks that wait, between the thread that reads and the one that embeds."""

    def __init__(self, reader: "_Reader") -> None:
        self._reader = reader
        self._waiting: deque[_Begun | None] = deque()
        self._entries = self._bytes = 0
        self._moved = threading.Condition()

    def read(self) -> None:
        """Read chunk after chunk while there is room, until the last or close."""
        try:
            while (chunk := self._reader.next_chunk()) is not None:
                if not self._put(chunk):
                    break
        finally:
            with self._moved:
                self._waiting.append(None)
                self._moved.notify_all()

    def finished(self, raise_its_error: Callable[[], None]) -> Iterator[Chunk]:
        """Each chunk when it is decoded; at the end what made reading end."""
        while (chunk := self._take()) is not None:
            yield chunk.finished()
        raise_its_error()

    def close(self) -> None:
        """Read no more, also not the rest of a chunk: fetched pictures may be long in coming."""
        self._reader.closed.set()
        with self._moved:
            self._moved.notify_all()

    def _put(self, chunk: _Begun) -> bool:
        with self._moved:
            self._waiting.append(chunk)
            self._entries += chunk.entries
            self._bytes += chunk.bytes
            self._moved.notify_all()
            self._moved.wait_for(self._has_room)
            return not self._reader.closed.is_set()

    def _has_room(self) -> bool:
        return self._reader.closed.is_set() or (self._entries < _MOST_AHEAD and self._bytes < _MOST_AHEAD_BYTES)

    def _take(self) -> _Begun | None:
        with self._moved:
            self._moved.wait_for(lambda: self._waiting)
            chunk = self._waiting.popleft()
            if chunk is not None:
                self._entries -= chunk.entries
                self._bytes -= chunk.bytes
                self._moved.notify_all()
            return chunk


@dataclass(frozen=True, eq=False)
class _Reader:
    """Takes entries, chunk by chunk: their bytes and what is unchanged of them; the rest it has decoded."""

    found: Iterator[Entry | Failure]
    decoders: Decoders
    held: Held
    keeps_files: bool
    closed: threading.Event = field(default_factory=threading.Event)

    def next_chunk(self) -> _Begun | None:
        """None behind the last entry. The unchanged make no chunks of 64: a commit takes longer than their looks."""
        unchanged = 0
        while True:
            taken, failures = self._read()
            fresh = self._changed(taken)
            unchanged += len(taken) - len(fresh)
            if fresh or failures or not taken or unchanged >= _MOST_UNCHANGED:
                break
        if not (fresh or failures or unchanged):
            return None
        outcomes = self.decoders.begin([file.data for file in fresh])
        size = sum(len(file.data) + self.decoders.bytes_of_pixels for file in fresh)
        return _Begun(fresh, outcomes, unchanged, failures, size)

    def _read(self) -> tuple[list[_File], list[Failure]]:
        taken: list[_File] = []
        failures: list[Failure] = []
        size = 0
        while len(taken) + len(failures) < MOST_ENTRIES and size < _MOST_BYTES and not self.closed.is_set():
            entry = next(self.found, None)
            if entry is None:
                break
            if isinstance(entry, Failure):
                failures.append(entry)
                continue
            try:
                data = entry.read()
                items.check(Wanted(entry.item_id, entry.label, entry.metadata, ()))
            except EntryFailed as error:
                failures.append(Failure(entry.position, entry.name, error.code, str(error)))
            except ValueError as error:
                failures.append(Failure(entry.position, entry.name, "invalid-item", str(error)))
            else:
                size += len(data)
                taken.append(_File(entry, data, sha256(data).hexdigest()))
        return taken, failures

    def _changed(self, taken: Sequence[_File]) -> list[_File]:
        """Those that are not in the gallery as they are."""
        there = self.held([file.entry.item_id for file in taken])
        return [file for file in taken if not self._is_there(there.get(file.entry.item_id), file)]

    def _is_there(self, item: Item | None, file: _File) -> bool:
        return (
            item is not None
            and [image.sha256 for image in item.images] == [file.sha256]
            and (item.label, spelt(item.metadata)) == (file.entry.label, spelt(file.entry.metadata))
            and not (self.keeps_files and item.images[0].blob is None)
        )
