"""One job from where it stands to its end, chunk by chunk.

A chunk's items, its failed entries and the job's position are one transaction under the claim's fence: a kill at any
moment costs a chunk's work, and no entry is doubled or lost.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from sqlalchemy import Connection

from roadmatch.embedding import Encoder
from roadmatch.errors import (
    GalleryChanged,
    GalleryNotFound,
    LeaseLost,
    StorageFull,
    StoreUnavailable,
)
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore, Outcome, Put, Wanted
from roadmatch.gallery.pictures import Pictures, pictures_of_write
from roadmatch.jobs import queue
from roadmatch.jobs.chunks import Chunk, chunks
from roadmatch.jobs.decoding import Decoders
from roadmatch.jobs.queue import Claim, Failure, Job, Kind, Progress, State
from roadmatch.jobs.sources import Entry, Places, SourceError, counted, entries
from roadmatch.jobs.uploads import FolderUploads, Uploads

log = logging.getLogger("roadmatch.jobs")

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
            work = self._deletions if claim.job.kind is Kind.DELETE else self._imports
            with closing(work(claim, gallery)) as committed:
                return self._until_end(claim, alive, committed, slice_s)
        except (GalleryNotFound, GalleryChanged, SourceError) as error:
            return State.FAILED, str(error)

    def _until_end(
        self, claim: Claim, alive: "_Alive", committed: Iterator[Job], slice_s: float
    ) -> tuple[State, str | None]:
        started = time.monotonic()
        for job in committed:
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
        held = partial(items.get_many, self.store, gallery)
        if claim.job.total is None:
            total = counted(claim.job.source, self.places)
            if total is not None:
                queue.count(self.store.database, claim, total)
        with (
            entries(claim.job.source, self.places, at) as found,
            self.decoders(encoder) as decoders,
            chunks(found, decoders, held, keeps_files=gallery.keep is Keep.ORIGINAL) as ready,
            ThreadPoolExecutor(self.cpus, "embedding") as embedding,
        ):
            for chunk in ready:
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
    chunk: Chunk,
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
