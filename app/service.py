"""The service's parts, put together, and what routes ask of them."""

import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeVar

import anyio
import anyio.to_thread

from app.broker import Broker
from app.metrics import Metrics
from app.settings import Settings, SettingsError
from app.workers import Workers
from roadmatch import bundle as bundles
from roadmatch.blobs import open_blobs
from roadmatch.bundle import Bundle
from roadmatch.embedding import Encoded, Encoder, open_encoder
from roadmatch.errors import BundleNotFound, GalleryNotFound, RoadmatchError
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery
from roadmatch.gallery.items import GalleryStore, NewImage
from roadmatch.gallery.replica import Generation, Replicas
from roadmatch.gallery.search import Answer, Query, search
from roadmatch.gallery.self_check import Calibration, SelfCheck, SelfChecks, self_check, verdict
from roadmatch.gallery.sweep import sweep
from roadmatch.jobs import queue
from roadmatch.jobs.uploads import Uploads, open_uploads
from roadmatch.operating_points import OperatingPoint, OperatingPoints
from roadmatch.store.database import Database, open_database

T = TypeVar("T")
log = logging.getLogger("roadmatch.service")
_SELF_CHECK_SEED = 1
_UPLOAD_GRACE_S = 600.0
"""An upload is there before the row of its job, by less than this."""
_GOODBYE_S = 5.0
_SPARE = 2
"""So many more pictures are worked on than there are cores: each waits now and then for a lock or for memory."""


@dataclass(eq=False)
class Service:
    """One process of the service; `close` ends it."""

    settings: Settings
    database: Database
    store: GalleryStore
    encoders: dict[str, Encoder]
    metrics: Metrics
    replicas: Replicas
    cores: anyio.CapacityLimiter
    writers: anyio.CapacityLimiter
    health: anyio.CapacityLimiter
    uploads: Uploads
    workers: Workers
    broker: Broker | None
    watchers: anyio.CapacityLimiter
    watched: int = 0
    stopping: bool = False
    _checks: dict[str, SelfChecks] = field(default_factory=lambda: defaultdict(SelfChecks))
    _asked: set[tuple[str, str]] = field(default_factory=set)
    _seen: dict[str, Gallery] = field(default_factory=dict)  # by name, as last searched
    _ended: threading.Event = field(default_factory=threading.Event)
    _house: threading.Thread | None = None

    @property
    def default_bundle(self) -> str:
        """Id of the bundle that new galleries get."""
        return next(iter(self.encoders))

    def encoder(self, bundle: str) -> Encoder:
        """Raises BundleNotFound."""
        encoder = self.encoders.get(bundle)
        if encoder is None:
            loaded = ", ".join(self.encoders)
            raise BundleNotFound(
                f"bundle {bundle} is not loaded: add its folder to ROADMATCH_BUNDLES (loaded: {loaded})"
            )
        return encoder

    def points(self, bundle: str) -> OperatingPoints:
        """The operating points of a loaded bundle. Raises BundleNotFound."""
        points = self.encoder(bundle).bundle.operating_points
        assert points is not None  # an uncalibrated bundle is refused at the start
        return points

    async def on_a_core(self, work: Callable[[], T]) -> T:
        """Run work that computes, in a thread, a few more at a time than there are cores."""
        return await anyio.to_thread.run_sync(work, limiter=self.cores)

    async def on_a_writer(self, work: Callable[[], T]) -> T:
        """Run work that waits for the database's locks, in a thread that nothing else waits for."""
        return await anyio.to_thread.run_sync(work, limiter=self.writers)

    async def on_a_watcher(self, work: Callable[[], T]) -> T:
        """Run a look at a job that somebody follows, in a thread that nothing else waits for."""
        return await anyio.to_thread.run_sync(work, limiter=self.watchers)

    def wake(self) -> None:
        """A job is in the queue: tell the workers. One that hears nothing looks for itself."""
        self.workers.wake()
        if self.broker is not None:
            self.broker.wake_up()

    def encode_here(self, bundle: str, data: bytes) -> Encoded:
        """A picture's embedding, made in this thread. Raises ImageError, BundleNotFound."""
        encoded = self.encoder(bundle).encode(data, busy=self.cores.borrowed_tokens > 1)
        self.metrics.encoded.inc()
        return encoded

    def new_image(self, bundle: str, data: bytes) -> NewImage:
        """A picture ready to be stored. Raises ImageError, BundleNotFound."""
        encoded = self.encode_here(bundle, data)
        return NewImage(
            data=data,
            sha256=sha256(data).hexdigest(),
            format=encoded.format,
            width=encoded.width,
            height=encoded.height,
            vector=encoded.vector,
            b=encoded.b,
        )

    def encode_for(self, name: str, data: bytes) -> tuple[Gallery, Encoded]:
        """A picture as a gallery's bundle embeds it, and the gallery as it is afterwards, so that `seq` is fresh.

        Raises GalleryNotFound, ImageError, BundleNotFound.
        """
        known = self._seen.get(name) or galleries.get(self.database, name)
        encoded = self.encode_here(known.bundle, data)
        try:
            gallery = self._seen[name] = galleries.again(self.database, known)
        except GalleryNotFound:
            self.forget(known)  # deleted by another process
            raise
        return gallery, encoded if gallery.bundle == known.bundle else self.encode_here(gallery.bundle, data)

    def generation(self, gallery: Gallery, *, fresh: bool = False) -> Generation:
        """All that was committed to the gallery before now; fresh: before `gallery` was read, which spares a look."""
        return self.replicas.current(gallery.id, gallery.bundle, gallery.seq if fresh else None)

    def search(
        self,
        gallery: Gallery,
        queries: list[Encoded],
        *,
        rule: str | None,
        threshold: float | None,
        top_k: int,
        fresh: bool = False,
    ) -> tuple[OperatingPoint | None, list[Answer]]:
        """Answers of one generation, by the rule (the gallery's own if none) or by the caller's threshold.

        A rule's threshold is that for the number of images: an item's score is that of its best one.
        """
        generation = self.generation(gallery, fresh=fresh)
        point = None if threshold is not None else self.points(gallery.bundle).point(rule or gallery.rule)
        applied = point.threshold(generation.images).value if point is not None else threshold
        assert applied is not None
        if point is not None:
            self._asked.add((gallery.name, point.rule))
        score = self.encoder(gallery.bundle).bundle.manifest.score
        asked = [Query(query.vector, query.b) for query in queries]
        answers = search(generation, asked, score, threshold=applied, top_k=top_k)
        for answer in answers:
            self.metrics.searched(answer)
        return point, answers

    def calibration(self, gallery: Gallery, point: OperatingPoint, images: int) -> tuple[Calibration, SelfCheck | None]:
        """What the gallery's newest self-check says of a rule."""
        self._asked.add((gallery.name, point.rule))
        check = self._checks[point.rule].latest(gallery.id)
        if check is None:
            return Calibration.NOT_CHECKED, None
        return verdict(check, self.stated_rate(gallery.bundle, point, images)), check

    def stated_rate(self, bundle: str, point: OperatingPoint, images: int) -> float:
        """The false-match rate that a rule promises among so many images, or else the one to be expected."""
        if point.stated_false_match_rate is not None:
            return point.stated_false_match_rate
        threshold = point.threshold(images).value
        return self.points(bundle).curves.expected_false_match_rate(threshold, max(images, 1))

    def forget(self, gallery: Gallery) -> None:
        """Let go of what is in memory of a deleted gallery."""
        self.replicas.drop(gallery.id)
        self._seen.pop(gallery.name, None)
        for checks in list(self._checks.values()):  # another thread may be making one
            checks.drop(gallery.id)

    def check_galleries(self) -> None:
        """Make the self-checks that are due, of every gallery and rule that somebody asked for."""
        for name, rule in sorted(self._asked):
            try:
                self._check(name, rule)
            except GalleryNotFound:
                self._asked.discard((name, rule))
            except RoadmatchError as error:
                log.warning("self-check of gallery %s: %s", name, error)

    def _check(self, name: str, rule: str) -> None:
        gallery = galleries.get(self.database, name)
        generation = self.generation(gallery)
        threshold = self.points(gallery.bundle).point(rule).threshold(generation.images).value
        checks, started = self._checks[rule], time.monotonic()
        if not checks.is_due(gallery.id, generation, threshold, started):
            return
        labels = items.labels(self.store, gallery)
        score = self.encoder(gallery.bundle).bundle.manifest.score
        check = self_check(generation, labels, score, threshold, seed=_SELF_CHECK_SEED)
        now = time.monotonic()
        checks.record(gallery.id, generation, threshold, check, now_s=now, took_s=now - started)

    def start_keeping_house(self) -> None:
        """On a thread of its own, until the service ends."""
        self._house = threading.Thread(target=self.keep_house, name="housekeeping", daemon=True)
        self._house.start()

    def keep_house(self) -> None:
        """Until the service ends: self-checks and cancelled jobs each second, a sweep of orphans each hour."""
        swept = 0.0
        while not self._ended.wait(1.0):
            try:
                self.check_galleries()
                queue.end_cancelled(self.database)
                if time.monotonic() - swept >= self.settings.sweep_s:
                    swept = time.monotonic()
                    sweep(self.store, grace_s=self.settings.sweep_s)
                    self.sweep_uploads()
            except RoadmatchError as error:
                log.warning("housekeeping: %s", error)
            except Exception:
                log.exception("housekeeping")  # a fault here must not end it for good

    def sweep_uploads(self) -> int:
        """Delete uploads that no job needs any more -> how many. Raises StoreUnavailable."""
        needed = queue.uploads_needed(self.database)
        return self.uploads.sweep(needed, older_than_s=max(_UPLOAD_GRACE_S, self.settings.sweep_s))

    def close(self) -> None:
        """Let go of everything."""
        self._ended.set()
        if self._house is not None:
            self._house.join(_GOODBYE_S)  # or a connection that it holds outlives the database's end
        self.workers.stop()
        if self.broker is not None:
            self.broker.close()
        self.database.close()


def open_service(settings: Settings) -> Service:
    """Verify the bundles, open the database and the pictures. Raises RoadmatchError, OSError."""
    loaded = [bundles.read(folder) for folder in settings.bundles]
    for bundle in loaded:
        _check_calibrated(bundle)
    settings.data.mkdir(parents=True, exist_ok=True)
    encoders = {bundle.id: open_encoder(bundle, device=settings.device, cpus=settings.threads) for bundle in loaded}
    try:
        database = open_database(settings.database_url)
    except ValueError as error:
        raise SettingsError(f"ROADMATCH_DATABASE: {error}") from error
    blobs = open_blobs(settings.blobs, settings.data / "pictures")
    store = GalleryStore(database, blobs, failpoint(settings.failpoint))
    service = Service(
        settings=settings,
        database=database,
        store=store,
        encoders=encoders,
        metrics=Metrics(),
        replicas=Replicas(database),
        cores=anyio.CapacityLimiter(settings.threads + _SPARE),
        writers=anyio.CapacityLimiter(settings.threads + settings.queue),
        health=anyio.CapacityLimiter(2),
        uploads=open_uploads(settings.blobs, settings.data),
        workers=Workers(settings, database),
        broker=Broker(settings.broker) if settings.broker else None,
        watchers=anyio.CapacityLimiter(4),
    )
    service.start_keeping_house()
    return service


def _check_calibrated(bundle: Bundle) -> None:
    if bundle.operating_points is None:
        raise BundleNotFound(f"bundle {bundle.id} in {bundle.folder} has no operating points: calibrate it first")


def failpoint(setting: str) -> Callable[[str], None]:
    """`moment@n` -> a trace that kills this process, without any goodbye, at the nth such moment."""
    moment, _, count = setting.partition("@")
    left = int(count) if count.isdigit() else 1
    lock = threading.Lock()

    def trace(reached: str) -> None:
        nonlocal left
        if reached != moment:
            return
        with lock:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return trace
