"""A worker that needs no broker: it asks the database for jobs, one after the other."""

import logging
import os
import signal
import threading
import time
from contextlib import AbstractContextManager
from functools import partial

from roadmatch import bundle as bundles
from roadmatch.blobs import open_blobs
from roadmatch.embedding import Encoder, open_encoder
from roadmatch.errors import StoreError
from roadmatch.gallery.items import GalleryStore
from roadmatch.jobs import queue
from roadmatch.jobs.decoding import Decoders
from roadmatch.jobs.fetch import fetcher
from roadmatch.jobs.run import Runner
from roadmatch.jobs.sources import Places
from roadmatch.jobs.uploads import open_uploads
from roadmatch.store.database import open_database
from worker.settings import Settings

log = logging.getLogger("roadmatch.worker")
_LOOK_S = 1.0
"""So often an idle worker looks for a job."""


def open_runner(settings: Settings) -> Runner:
    """What the worker works with. Raises RoadmatchError, OSError."""
    loaded = [bundles.read(folder) for folder in settings.bundles]
    settings.data.mkdir(parents=True, exist_ok=True)
    database = open_database(settings.database_url)
    trace = _failpoint(settings.failpoint)
    blobs = open_blobs(settings.blobs, settings.data / "pictures")
    uploads = open_uploads(settings.blobs, settings.data)
    return Runner(
        store=GalleryStore(database, blobs, trace),
        encoders={one.id: open_encoder(one, device=settings.device, cpus=settings.threads) for one in loaded},
        decoders=partial(_decoders, settings.threads),
        places=Places(uploads.folder, settings.import_folders, fetcher(settings.hosts) if settings.hosts else None),
        cpus=settings.threads,
        give_up=partial(os._exit, 70),  # what started this worker starts another
        trace=trace,
        uploads=uploads,
    )


def work(settings: Settings, *, listen: bool = False, idle_s: float | None = None) -> None:
    """Jobs, one after the other, and a look for them each second, until SIGTERM or SIGINT.

    listen: look at each byte on stdin, too, and end where it ends: the service that started this one is gone.
    idle_s: end after so long without a job. Raises RoadmatchError, OSError.
    """
    os.nice(settings.nice)
    runner = open_runner(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: runner.stop.set())
    woken = threading.Event()
    if listen:
        threading.Thread(target=_listen, args=(woken, runner.stop), daemon=True).start()
    busy = time.monotonic()
    while not runner.stop.is_set() and (idle_s is None or time.monotonic() - busy < idle_s):
        if run_next(runner):
            busy = time.monotonic()
        else:
            woken.wait(_LOOK_S)
            woken.clear()
    runner.store.database.close()


def run_next(runner: Runner) -> bool:
    """Work on the next job -> whether there was one."""
    try:
        claim = queue.claim(runner.store.database, lease_s=runner.lease_s)
    except StoreError as error:
        log.warning("%s", error)
        return False
    if claim is None:
        return False
    runner.run(claim)
    return True


def _listen(woken: threading.Event, stop: threading.Event) -> None:
    while os.read(0, 4096):
        woken.set()
    stop.set()
    woken.set()


def _decoders(count: int, encoder: Encoder) -> AbstractContextManager[Decoders]:
    return Decoders(encoder.bundle.manifest.preprocessing, count)


def _failpoint(setting: str) -> "partial[None]":
    moment, _, count = setting.partition("@")
    left = [int(count) if count.isdigit() else 1]
    return partial(_reached, moment, left)


def _reached(moment: str, left: list[int], reached: str) -> None:
    """`moment@n`: the nth time kills this process, without any goodbye."""
    if reached == moment:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
