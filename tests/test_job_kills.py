"""kill -9 of whoever works on a job, at any moment: nothing is lost, doubled or left running."""

import io
import os
import random
import signal
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from sqlalchemy import select, update

from roadmatch import bundle as bundles
from roadmatch.blobs import FolderBlobs
from roadmatch.embedding import open_encoder
from roadmatch.gallery import galleries
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore
from roadmatch.jobs import queue
from roadmatch.jobs.chunks import MOST_ENTRIES
from roadmatch.jobs.decoding import Decoded, Decoders
from roadmatch.jobs.queue import Job, Kind
from roadmatch.store.database import open_database
from roadmatch.store.tables import jobs
from tests import job_oracle, job_worker
from tests.job_worker import JobWorker, until
from tests.service import Served, start
from tests.test_celery import Redis

SEED = 20_261_129
IMPORT, KILLS = 2_000, 40
MOMENTS = {"embedded": 2, "blob_written": MOST_ENTRIES + 1, "before_commit": 2, "after_commit": 1, "chunk_committed": 1}
"""Where the code lets itself be killed, and the first time that comes after progress."""
SETS = ("a", "b")
"""Folders of the same names with different pictures: importing them in turn replaces everything."""
WITHOUT_PROGRESS = 2
"""A job is given up when its worker died three times at one entry, so no third kill comes before it gets on."""


@cache
def photo(seed: int) -> bytes:
    """A small JPEG of coarse blotches, unlike that of any other seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC).save(held, "JPEG", quality=85)
    return held.getvalue()


def photos(count: int, first: int) -> dict[str, bytes]:
    """By name, pictures that no other `first` brings."""
    return {f"{number:05}.jpg": photo(first + number) for number in range(count)}


def hashes(pictures: Mapping[str, bytes]) -> dict[str, str]:
    """What the oracle expects of them."""
    return {name: sha256(data).hexdigest() for name, data in pictures.items()}


@dataclass(eq=False)
class Place:
    """A data folder with one gallery, and a job after another on it."""

    data: Path
    bundle: Path
    pictures: Path
    store: GalleryStore
    gallery: Gallery
    settings: dict[str, object]
    sent: dict[str, dict[str, str]]
    sent_jobs: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Entries of each job."""
        return len(self.sent[SETS[0]])

    def submit(self) -> Job:
        """The next import, which replaces what the one before brought."""
        name = SETS[len(self.sent_jobs) % 2]
        source = {"kind": "folder", "folder": str(self.pictures / name)}
        job = queue.submit(self.store.database, Kind.IMPORT, self.gallery.id, self.gallery.name, source)
        self.sent_jobs.append(job.id)
        return job

    def newest(self) -> Job:
        """The job that was submitted last, as it is now."""
        return queue.get(self.store.database, self.sent_jobs[-1])

    def keep_busy(self) -> Job:
        """See whether the job has ended; then all must be as it shall be, and the next one is sent."""
        job = self.newest()
        if job.state in queue.ENDED:
            self.check()
            return self.submit()
        return job

    def chunks(self) -> int:
        """Chunks that were committed, of all jobs."""
        return (len(self.sent_jobs) - 1) * -(-self.count // MOST_ENTRIES) + -(-self.newest().position // MOST_ENTRIES)

    def check(self) -> None:
        """The newest job has ended as it shall, and the gallery holds what it brought."""
        job_oracle.check_job(self.newest(), self.count)
        job_oracle.check(self.store, self.gallery, self.sent[SETS[(len(self.sent_jobs) - 1) % 2]])

    def worker(self, name: object, **settings: object) -> JobWorker:
        """A new worker on this place."""
        moments = self.data.parent / f"moments-{name}"
        return job_worker.start(self.data, self.bundle, moments, **(self.settings | settings))  # type: ignore[arg-type]


@contextmanager
def place_of(folder: Path, bundle: Path, url: str, count: int, **settings: object) -> Iterator[Place]:
    """A place in a folder. url: of its database. settings: of its workers."""
    data, pictures = folder / "data", folder / "photos"
    data.mkdir()
    sent: dict[str, dict[str, str]] = {}
    for number, name in enumerate(SETS):
        made = photos(count, number * 1_000_000)
        sent[name] = hashes(made)
        (pictures / name).mkdir(parents=True)
        for file, content in made.items():
            (pictures / name / file).write_bytes(content)
    database = open_database(url)
    store = GalleryStore(database, FolderBlobs(data / "pictures"))
    gallery = galleries.create(database, "g", bundle=bundles.read(bundle).id, rule="max_f1", keep=Keep.ORIGINAL)
    given = {"database": url, "import_folders": pictures} | settings
    yield Place(data, bundle, pictures, store, gallery, given, sent)
    database.close()


@dataclass
class Figures:
    """What a series of kills came to."""

    kills: int = 0
    running: int = 0  # met a job at work
    again: int = 0  # chunks that were embedded twice
    stuck: int = 0  # kills in a row without progress


def kill_once(place: Place, figures: Figures, moment: str | None, rng: random.Random) -> None:
    """A worker's life up to its kill: at a moment with its number, or 0.05 to 2 s after its claim."""
    before = place.chunks()
    fence = fence_of(place)
    worker = place.worker(figures.kills, failpoint=moment or "")
    try:
        if moment is None:
            until(lambda: fence_of(place) > fence)
            until(lambda: figures.stuck < WITHOUT_PROGRESS or place.chunks() > before)
            end = time.monotonic() + rng.uniform(0.05, 2.0)
            while time.monotonic() < end:
                place.keep_busy()
                time.sleep(0.005)
        else:
            until(lambda: place.keep_busy() is not None and worker.process.poll() is not None)
            assert worker.process.returncode == -signal.SIGKILL
        children = psutil.Process(worker.process.pid).children() if moment is None else []
    finally:
        worker.kill()
    psutil.wait_procs(children, 10)
    assert not [child for child in children if child.is_running()], "a decoding child outlived its worker"
    committed = place.chunks() - before
    figures.stuck = 0 if committed else figures.stuck + 1
    again = worker.count("embedded") - committed
    assert 0 <= again <= 1, f"{again} chunks were embedded for nothing"
    figures.again += again
    figures.running += place.newest().state == queue.State.RUNNING
    figures.kills += 1


def fence_of(place: Place) -> tuple[int, int]:
    """Grows with each claim, and with each job."""
    with place.store.database.read() as connection:
        fence = connection.scalar(select(jobs.c.fence).where(jobs.c.id == place.sent_jobs[-1]))
    return len(place.sent_jobs), fence or 0


def plan_of(kills: int, at_each: int, rng: random.Random) -> list[str | None]:
    """So many kills at any moment and so many at each of the named ones, in any order."""
    named = [f"{moment}@{n + rng.randint(0, 1)}" for moment, n in MOMENTS.items() for _ in range(at_each)]
    plan: list[str | None] = [*named, *[None] * kills]
    rng.shuffle(plan)
    return plan


def kill_series(place: Place, plan: Sequence[str | None], rng: random.Random) -> Figures:
    """A worker's life after another, with jobs all the time; then the job that is left ends."""
    figures = Figures()
    place.submit()
    started = time.monotonic()
    try:
        for moment in plan:
            kill_once(place, figures, moment, rng)
        last = place.worker("last")
        until(lambda: place.newest().state in queue.ENDED)
        assert last.stop() == 0
        place.check()
        encoder = open_encoder(bundles.read(place.bundle), cpus=1)
        expected = place.sent[SETS[(len(place.sent_jobs) - 1) % 2]]
        job_oracle.check(place.store, place.gallery, expected, encoder=encoder)
    except BaseException as error:
        error.add_note(f"seed {SEED}, {figures}, {len(place.sent_jobs)} jobs in {place.data.parent}")
        raise
    print(f"{figures}, {len(place.sent_jobs)} jobs, {time.monotonic() - started:.0f} s")
    return figures


@pytest.mark.faults
def test_a_few_kills_of_a_worker_lose_and_double_nothing(bundle: Path, tmp_path: Path, sqlite_url: str) -> None:
    with place_of(tmp_path, bundle, sqlite_url, 3 * MOST_ENTRIES) as place:
        figures = kill_series(place, [None, f"blob_written@{MOST_ENTRIES + 9}"], random.Random(SEED))
        assert figures.running > 0


@pytest.mark.faults
@pytest.mark.timeout(1_800)
def test_forty_kills_of_a_worker_lose_and_double_nothing(bundle: Path, tmp_path: Path, sqlite_url: str) -> None:
    rng = random.Random(SEED)
    with place_of(tmp_path, bundle, sqlite_url, IMPORT) as place:
        figures = kill_series(place, plan_of(KILLS, 2, rng), rng)
    assert figures.running > KILLS // 2


@pytest.mark.faults
@pytest.mark.timeout(1_800)
def test_forty_kills_of_celery_workers_on_postgresql_lose_and_double_nothing(
    bundle: Path, tmp_path: Path, postgres_url: str
) -> None:
    rng = random.Random(SEED)
    redis = Redis(tmp_path)
    try:
        with place_of(tmp_path, bundle, postgres_url, IMPORT, kind="celery", broker=redis.url) as place:
            figures = kill_series(place, plan_of(KILLS, 2, rng), rng)
    finally:
        redis.stop()
    assert figures.running > KILLS // 2


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_job_of_a_killed_worker_goes_on_when_its_lease_has_run_out(
    bundle: Path, tmp_path: Path, sqlite_url: str
) -> None:
    with place_of(tmp_path, bundle, sqlite_url, IMPORT // 2, lease_s=queue.LEASE_S) as place:
        place.submit()
        first = place.worker("first")
        until(lambda: place.newest().position > 0)
        first.kill()
        killed, position = time.monotonic(), place.newest().position
        second = place.worker("second")
        until(lambda: place.newest().position > position)
        assert queue.LEASE_S - 10 < time.monotonic() - killed < queue.LEASE_S + 5
        until(lambda: place.newest().state in queue.ENDED)
        assert second.stop() == 0
        place.check()


# Decoding children


def test_a_picture_whose_decoding_child_is_killed_is_decoded_by_another(bundle: Path) -> None:
    rule = bundles.read(bundle).manifest.preprocessing
    with Decoders(rule, 1) as decoders, ThreadPoolExecutor(1) as thread:
        (before,) = decoders.decode([photo(1)])
        (child,) = [one for one in psutil.Process().children() if "-P" in one.cmdline()]
        child.suspend()
        outcome = thread.submit(decoders.decode, [photo(1)])
        time.sleep(0.2)  # the picture is with the child
        child.kill()
        (after,) = outcome.result(30)
    assert isinstance(before, Decoded)
    assert isinstance(after, Decoded)
    assert np.array_equal(before.pixels, after.pixels)


def kill_children(place: Place, every_s: float, rng: random.Random) -> int:
    """kill -9 of a decoding child now and then, until the job has ended -> how many were killed."""
    place.submit()
    worker = place.worker("one")
    killed = 0
    try:
        until(lambda: place.newest().position > 0)
        while place.newest().state not in queue.ENDED:
            children = psutil.Process(worker.process.pid).children()
            if children:
                os.kill(rng.choice(children).pid, signal.SIGKILL)
                killed += 1
            time.sleep(rng.uniform(0.5, 1.5) * every_s)
        assert worker.stop() == 0
        assert worker.count("embedded") == place.chunks()
    finally:
        worker.kill()
    place.check()
    return killed


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_job_does_not_notice_that_its_decoding_children_are_killed(
    bundle: Path, tmp_path: Path, sqlite_url: str
) -> None:
    with place_of(tmp_path, bundle, sqlite_url, 3 * IMPORT, cpus=2) as place:
        killed = kill_children(place, 0.8, random.Random(SEED))
    print(f"{killed} children killed")
    assert killed >= 5


# The whole embedded service


def send(served: Served, pictures: Mapping[str, bytes]) -> str:
    """Import them as a zip -> the job's id."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as zipped:
        for name, content in pictures.items():
            zipped.writestr(name, content)
    headers = {"Content-Type": "application/zip"}
    answer = httpx.post(f"{served.url}/v1/galleries/g/imports", content=held.getvalue(), headers=headers, timeout=30)
    return str(answer.raise_for_status().json()["id"])


def kill_service(served: Served, *, worker_too: bool) -> None:
    """kill -9 of the service; worker_too: and of its worker in the same moment, or else that one ends by itself."""
    workers = [child for child in psutil.Process(served.process.pid).children() if "worker" in child.cmdline()]
    served.process.kill()
    for worker in workers if worker_too else ():
        worker.kill()
    served.kill()
    assert not psutil.wait_procs(workers, 20)[1], "a worker outlived its service"


def let_go(store: GalleryStore) -> None:
    """End the lease of the killed worker, which would take half a minute of every round."""
    with store.database.write() as connection:
        connection.execute(update(jobs).where(jobs.c.state == queue.State.RUNNING).values(lease_until=0.0))


def kill_service_rounds(folder: Path, bundle: Path, count: int, rounds: int, seed: int) -> None:
    """An import, and a service that is killed so often before it ends; half of the times together with its worker."""
    rng = random.Random(seed)
    pictures = photos(count, 0)
    data = folder / "data"
    served = start(data, bundle, nice=0)
    httpx.post(f"{served.url}/v1/galleries", json={"name": "g"}).raise_for_status()
    job_id = send(served, pictures)
    database = open_database(f"sqlite:///{data / 'roadmatch.db'}")
    store = GalleryStore(database, FolderBlobs(data / "pictures"))
    try:
        for number in range(rounds):
            begun = queue.get(database, job_id).position
            assert begun < count, f"the job has ended before kill {number + 1}: it needs more entries"
            until(lambda begun=begun: queue.get(database, job_id).position > begun)  # type: ignore[misc]
            time.sleep(rng.uniform(0.0, 0.4))
            worker_too = number % 2 == 0
            kill_service(served, worker_too=worker_too)
            if worker_too:
                let_go(store)
            served = start(data, bundle, nice=0)
        until(lambda: queue.get(database, job_id).state in queue.ENDED)
        told = httpx.get(f"{served.url}/v1/jobs/{job_id}").raise_for_status().json()
        job_oracle.check_job(told, count)
        assert served.stop() == 0
        job_oracle.check(store, galleries.get(database, "g"), hashes(pictures))
        assert list((data / "uploads").iterdir()) == []
    finally:
        served.kill()
        database.close()


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_service_that_is_killed_with_its_worker_goes_on_with_its_jobs(bundle: Path, tmp_path: Path) -> None:
    kill_service_rounds(tmp_path, bundle, 3 * IMPORT, 8, SEED)
