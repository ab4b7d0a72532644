"""One job from where it stands to its end, chunk by chunk.

A chunk is read and decoded while the one before it is embedded. Its items, its failed entries and the job's position
are one transaction under the claim's fence: a kill at any moment costs a chunk's work, and no entry is doubled or lost.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice

from sqlalchemy import Connection

from roadmatch.embedding import Encoder
from roadmatch.errors import (
    GalleryChanged,
    GalleryNotFound,
    ImageError,
    LeaseLost,
    StorageFull,
    StoreUnavailable,
    code_of,
)
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore, Item, NewImage, Outcome, Put, Wanted, spelt
from roadmatch.gallery.pictures import Pictures, pictures_of_write
from roadmatch.jobs import queue
from roadmatch.jobs.decoding import Decoded, Decoders
from roadmatch.jobs.queue import Claim, Failure, Job, Kind, Progress, State
from roadmatch.jobs.sources import Entry, EntryFailed, Places, SourceError, counted, entries
from roadmatch.jobs.uploads import FolderUploads, Uploads
from roadmatch.scoring import Vector

log = logging.getLogger("roadmatch.jobs")

MOST_ENTRIES, _MOST_BYTES = 64, 64_000_000
"""Of a chunk: what is in memory of a job, and what a kill costs."""
_MOST_UNCHANGED = 1_000
"""Entries of a chunk that were only looked at: what is looked at again after a kill, some tenths of a second."""
_DELETED_AT_ONCE = 500
_SLICE_S = 5.0
"""So long a job goes on before it makes room for one that has had less."""
_PAUSE_S = 5.0
"""So long a job waits that could not be written, before it goes back to the queue."""
_PATIENCE_S = 60.0
"""So long a chunk tries again where the database is locked or gone."""
LONGEST_CHUNK_S = 1_800.0
"""A tar of 300 GB is read through in this time to the place where its job stood; every other wait has its own limit."""
_GOODBYE_S = 10.0


@dataclass(frozen=True, eq=False)
class Runner:
    """What jobs need. encoders: by bundle id. decoders: makes the children that decode for a bundle.

    stop: set when this process shall end; the job then goes back to the queue after its chunk. chunk_s: seconds in
    which each chunk has to be committed; after them the job goes back as failed once, and give_up is called, which
    ends the process where there is one to start it anew: a thread that hangs can be ended in no other way.
    uploads: where they are kept, if not in the folder of `places`.
    """

    store: GalleryStore
    encoders: dict[str, Encoder]
    decoders: Callable[[Encoder], AbstractContextManager[Decoders]]
    places: Places
    cpus: int
    stop: threading.Event = field(default_factory=threading.Event)
    lease_s: float = queue.LEASE_S
    chunk_s: float = LONGEST_CHUNK_S
    give_up: Callable[[], None] = lambda: None
    trace: Callable[[str], None] = lambda _moment: None
    uploads: Uploads | None = None

    def run(self, claim: Claim) -> None:
        """Work on a job until it ends, is cancelled, is another's turn, or this process stops."""
        with _heartbeat(self, claim) as alive:
            try:
                state, error = self._read_and_work(claim, alive)
                if state is State.QUEUED:
                    queue.release(self.store.database, claim)
                else:
                    queue.finish(self.store.database, claim, state, error)
                    self._forget_upload(claim.job)
            except LeaseLost as lost:
                log.warning("%s", lost)
            except StoreUnavailable as error:
                log.warning("job %s: %s", claim.job.id, error)
                self._give_back_later(claim)
            except Exception:  # a mistake of ours: it may go better the next time, and is given up after three
                log.exception("job %s", claim.job.id)
                with suppress(StoreUnavailable, LeaseLost):
                    queue.release(self.store.database, claim, failed=True)

    def _give_back_later(self, claim: Claim) -> None:
        """A full disk may have room again in a while; where the database is gone, the lease runs out by itself."""
        self.stop.wait(_PAUSE_S)
        with suppress(StoreUnavailable, LeaseLost):
            queue.release(self.store.database, claim)

    def _forget_upload(self, job: Job) -> None:
        """Nobody reads it any more; where it cannot be deleted, the sweep does."""
        if "upload" in job.source:
            with suppress(StoreUnavailable, ValueError):
                self._uploads().delete(job.source["upload"])

    def _uploads(self) -> Uploads:
        return self.uploads or FolderUploads(self.places.uploads)

    def _read_and_work(self, claim: Claim, alive: "_Alive") -> tuple[State, str | None]:
        """Work on it with its upload at hand, for at least as long as it took to get that."""
        if "upload" not in claim.job.source:
            return self._work(claim, alive, _SLICE_S)
        started = time.monotonic()
        with self._uploads().at_hand(claim.job.source["upload"], partial(self._given_up, alive)) as whole:
            if not whole:
                return (State.CANCELLED if alive.cancel.is_set() else State.QUEUED), None
            return self._work(claim, alive, max(_SLICE_S, time.monotonic() - started))

    def _given_up(self, alive: "_Alive") -> bool:
        """Asked at each block of the upload, so the job moves on."""
        alive.moved = time.monotonic()
        return alive.cancel.is_set() or self.stop.is_set()

    def _work(self, claim: Claim, alive: "_Alive", slice_s: float) -> tuple[State, str | None]:
        try:
            gallery = _gallery_of(self, claim.job)
            chunks = self._deletions if claim.job.kind is Kind.DELETE else self._imports
            with closing(chunks(claim, gallery)) as committed:
                return self._until_end(claim, alive, committed, slice_s)
        except (GalleryNotFound, GalleryChanged, SourceError) as error:
            return State.FAILED, str(error)

    def _until_end(
        self, claim: Claim, alive: "_Alive", chunks: Iterator[Job], slice_s: float
    ) -> tuple[State, str | None]:
        started = time.monotonic()
        for job in chunks:
            alive.moved = time.monotonic()
            if job.cancel or alive.cancel.is_set():
                return State.CANCELLED, None
            if self.stop.is_set():
                return State.QUEUED, None
            if time.monotonic() - started > slice_s and queue.others_turn(self.store.database, claim, job.position):
                return State.QUEUED, None
        return State.SUCCEEDED, None

    def _deletions(self, claim: Claim, gallery: Gallery) -> Generator[Job, None, None]:
        at = claim.job.position
        with entries(claim.job.source, self.places, at) as found:
            while some := list(islice(found, _DELETED_AT_ONCE)):
                ids = [entry.item_id for entry in some if isinstance(entry, Entry)]
                failed = [entry for entry in some if isinstance(entry, Failure)]
                wanted = list(dict.fromkeys(ids))
                job = self._committed(partial(_delete, self, claim, gallery, at, wanted, len(ids), failed))
                at = job.position
                yield job

    def _imports(self, claim: Claim, gallery: Gallery) -> Generator[Job, None, None]:
        encoder, at = self.encoders[gallery.bundle], claim.job.position
        if claim.job.total is None:
            total = counted(claim.job.source, self.places)
            if total is not None:
                queue.count(self.store.database, claim, total)
        with (
            entries(claim.job.source, self.places, at) as found,
            self.decoders(encoder) as decoders,
            ThreadPoolExecutor(1, "decoding") as ahead,
            ThreadPoolExecutor(self.cpus, "embedding") as embedding,
        ):
            read = _Reader(self, gallery, found, decoders)
            coming = ahead.submit(read.next_chunk)
            while (chunk := coming.result()) is not None:
                coming = ahead.submit(read.next_chunk)
                with pictures_of_write(self.store.blobs, self.store.trace) as pictures:
                    if gallery.keep is Keep.ORIGINAL:
                        pictures.begin(one.data for one in chunk.decoded)
                    vectors = list(
                        embedding.map(lambda one: encoder.encode_pixels(one.decoded.pixels, busy=True), chunk.decoded)
                    )
                    self.trace("embedded")
                    wanted = [one.wanted(vector, b) for one, (vector, b) in zip(chunk.decoded, vectors, strict=True)]
                    job = self._committed(partial(_put, self, claim, gallery, at, wanted, chunk, pictures))
                at = job.position
                yield job

    def _committed(self, write: Callable[[], Job]) -> Job:
        """Write a chunk, in spite of a database that is away for a while."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                job = write()
            except StorageFull:
                raise
            except StoreUnavailable:
                if time.monotonic() > end or self.stop.is_set():
                    raise
                self.stop.wait(1.0)
            else:
                self.trace("chunk_committed")
                return job


@dataclass(frozen=True, eq=False)
class _Picture:
    """An entry whose picture was decoded."""

    entry: Entry
    data: bytes
    sha256: str
    decoded: Decoded

    def wanted(self, vector: Vector, b: float) -> Wanted:
        image = NewImage(
            self.data, self.sha256, self.decoded.format, self.decoded.width, self.decoded.height, vector, b
        )
        return Wanted(self.entry.item_id, self.entry.label, self.entry.metadata, [image])


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Entries in a row: decoded ones to be embedded, and what needs no embedding."""

    decoded: list[_Picture]
    unchanged: int
    failures: list[Failure]


@dataclass(eq=False)
class _Reader:
    """Takes entries, chunk by chunk: their bytes, what is unchanged of them, and the pixels of the rest."""

    runner: Runner
    gallery: Gallery
    found: Iterator[Entry | Failure]
    decoders: Decoders

    def next_chunk(self) -> _Chunk | None:
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
        decoded = []
        for (entry, data, digest), result in zip(fresh, self.decoders.decode([one[1] for one in fresh]), strict=True):
            if isinstance(result, ImageError):
                failures.append(_failure(entry, result))
            else:
                decoded.append(_Picture(entry, data, digest, result))
        return _Chunk(decoded, unchanged, failures)

    def _read(self) -> tuple[list[tuple[Entry, bytes, str]], list[Failure]]:
        taken: list[tuple[Entry, bytes, str]] = []
        failures: list[Failure] = []
        size = 0
        while len(taken) + len(failures) < MOST_ENTRIES and size < _MOST_BYTES:
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
                taken.append((entry, data, sha256(data).hexdigest()))
        return taken, failures

    def _changed(self, taken: Sequence[tuple[Entry, bytes, str]]) -> list[tuple[Entry, bytes, str]]:
        """Those that are not in the gallery as they are."""
        there = items.get_many(self.runner.store, self.gallery, [entry.item_id for entry, _, _ in taken])
        return [one for one in taken if not _is_there(there.get(one[0].item_id), one[0], one[2], self.gallery.keep)]


class _Alive:
    """What the heartbeat and the work tell each other."""

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.moved = time.monotonic()


@contextmanager
def _heartbeat(runner: Runner, claim: Claim) -> Iterator[_Alive]:
    """The lease is extended in the block, however long a chunk takes, up to the runner's chunk_s."""
    alive, ended = _Alive(), threading.Event()

    def beat() -> None:
        while not ended.wait(min(runner.lease_s / 3, runner.chunk_s)):
            if time.monotonic() - alive.moved > runner.chunk_s:
                _give_up(runner, claim)
                return
            try:
                if queue.renew(runner.store.database, claim, lease_s=runner.lease_s):
                    alive.cancel.set()
            except LeaseLost:
                return  # the next chunk's commit finds out
            except StoreUnavailable as error:
                log.warning("job %s: %s", claim.job.id, error)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield alive
    finally:
        ended.set()
        thread.join()


def _give_up(runner: Runner, claim: Claim) -> None:
    """The job goes to another process, as one that failed once."""
    log.error("job %s: no chunk within %g s: it goes back to the queue", claim.job.id, runner.chunk_s)
    late = threading.Timer(_GOODBYE_S, runner.give_up)  # where the database hangs, too
    late.daemon = True
    late.start()
    with suppress(StoreUnavailable, LeaseLost):
        queue.release(runner.store.database, claim, failed=True)
    late.cancel()
    runner.give_up()


def _put(
    runner: Runner,
    claim: Claim,
    gallery: Gallery,
    at: int,
    wanted: Sequence[Wanted],
    chunk: _Chunk,
    pictures: Pictures,
) -> Job:
    """The chunk's one transaction. at: the job's position before it."""
    moved: list[Job] = []

    def also(connection: Connection, puts: Sequence[Put]) -> None:
        unchanged = chunk.unchanged + sum(put.outcome is Outcome.UNCHANGED for put in puts)
        done = len(puts) + chunk.unchanged - unchanged
        progress = Progress(done, unchanged, chunk.failures)
        moved.append(queue.advance(connection, claim, progress, at=at, lease_s=runner.lease_s))

    items.put_many(runner.store, gallery, wanted, also, pictures)
    return moved[-1]


def _delete(
    runner: Runner,
    claim: Claim,
    gallery: Gallery,
    at: int,
    wanted: Sequence[str],
    count: int,
    failed: Sequence[Failure],
) -> Job:
    """An item that is not there is as it shall be. count: entries with an id, repeated ones too."""
    moved: list[Job] = []

    def also(connection: Connection, deleted: Sequence[str]) -> None:
        progress = Progress(len(deleted), count - len(deleted), failed)
        moved.append(queue.advance(connection, claim, progress, at=at, lease_s=runner.lease_s))

    items.delete_many(runner.store, gallery, wanted, also)
    return moved[-1]


def _gallery_of(runner: Runner, job: Job) -> Gallery:
    """Raises GalleryNotFound, also where another gallery has the name by now; GalleryChanged without its bundle."""
    gallery = galleries.get(runner.store.database, job.gallery)
    if gallery.id != job.gallery_id:
        raise GalleryNotFound(f"gallery {job.gallery} was deleted since the job was sent")
    if gallery.bundle not in runner.encoders:
        raise GalleryChanged(
            f"bundle {gallery.bundle} is not loaded by this worker: add its folder to ROADMATCH_BUNDLES"
        )
    return gallery


def _is_there(item: Item | None, entry: Entry, digest: str, keep: Keep) -> bool:
    return (
        item is not None
        and [image.sha256 for image in item.images] == [digest]
        and (item.label, spelt(item.metadata)) == (entry.label, spelt(entry.metadata))
        and not (keep is Keep.ORIGINAL and item.images[0].blob is None)
    )


def _failure(entry: Entry, error: ImageError) -> Failure:
    return Failure(entry.position, entry.name, code_of(error), str(error))
