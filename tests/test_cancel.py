"""Jobs that are cancelled at every moment of their lives: they end soon, what went in stays, and nothing follows."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import update

from roadmatch import bundle as bundles
from roadmatch.blobs import FolderBlobs
from roadmatch.embedding import open_encoder
from roadmatch.errors import JobFinished
from roadmatch.gallery import galleries
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore
from roadmatch.jobs import chunks, queue
from roadmatch.jobs.chunks import MOST_ENTRIES
from roadmatch.jobs.decoding import Decoders
from roadmatch.jobs.queue import Job, Kind, State
from roadmatch.jobs.run import Runner
from roadmatch.jobs.sources import Places
from roadmatch.store.database import open_database
from roadmatch.store.tables import jobs
from tests.bundles import picture
from tests.job_oracle import check, check_no_orphans
from tests.service import Served, environment, running

ROOT = Path(__file__).parents[1]
SEED = 20_261_129
CHUNK, FEW = 8, 35
"""Entries of a chunk and of a job, where a test makes them few."""
MANY, CANCELS = 4 * MOST_ENTRIES + 20, 100
SOON_S = 5.0
"""So long after a cancel a job that somebody works on has ended, on a machine that has nothing else to do."""
PATIENCE_S = 40.0
PAUSING = """
import os, signal
from dataclasses import replace
from roadmatch.jobs import chunks, queue
from worker.plain import open_runner
from worker.settings import Settings

embedded, chunks.MOST_ENTRIES = [], 8

def trace(moment):
    if moment == "embedded":
        embedded.append(moment)
        if len(embedded) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)

runner = replace(open_runner(Settings.read()), trace=trace)
runner.run(queue.claim(runner.store.database))
runner.store.database.close()
"""
"""A worker that is paused, as by a machine out of breath, between its second chunk's embedding and its commit."""


@cache
def photo(number: int) -> bytes:
    return picture(number, side=32)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of few pictures, which are read in the order of their names."""
    return written(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def many_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of some real chunks of pictures."""
    return written(tmp_path_factory.mktemp("many"), MANY)


def written(folder: Path, count: int) -> Path:
    for number in range(count):
        (folder / f"{number:03}.png").write_bytes(photo(number))
    return folder


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of few pictures has several chunks."""
    monkeypatch.setattr(chunks, "MOST_ENTRIES", CHUNK)


def expected(count: int) -> dict[str, str]:
    """The first so many entries, as they are in a gallery."""
    return {f"{number:03}.png": sha256(photo(number)).hexdigest() for number in range(count)}


@pytest.fixture
def runner(database_url: str, bundle: Path, photos: Path, tmp_path: Path) -> Iterator[Runner]:
    """A runner on a database of either kind."""
    encoder = open_encoder(bundles.read(bundle), cpus=1)
    with closing(open_database(database_url)) as database:
        yield Runner(
            store=GalleryStore(database, FolderBlobs(tmp_path / "data" / "pictures")),
            encoders={encoder.bundle.id: encoder},
            decoders=lambda encoder: Decoders(encoder.bundle.manifest.preprocessing, 1),
            places=Places(tmp_path / "uploads", (photos,)),
            cpus=1,
        )


@pytest.fixture
def gallery(runner: Runner) -> Gallery:
    """An empty gallery of the runner's bundle."""
    return galleries.create(
        runner.store.database, "g", bundle=next(iter(runner.encoders)), rule="max_f1", keep=Keep.ORIGINAL
    )


def submitted(runner: Runner, gallery: Gallery, photos: Path) -> Job:
    source = {"kind": "folder", "folder": str(photos), "labels": None}
    return queue.submit(runner.store.database, Kind.IMPORT, gallery.id, gallery.name, source)


def with_trace(runner: Runner, trace: Callable[[str], None]) -> Runner:
    return Runner(**{**vars(runner), "trace": trace})


def run_next(runner: Runner) -> bool:
    claim = queue.claim(runner.store.database)
    if claim is not None:
        runner.run(claim)
    return claim is not None


def end_lease(runner: Runner) -> None:
    """It would end by itself in half a minute."""
    with runner.store.database.write() as connection:
        connection.execute(update(jobs).values(lease_until=0).where(jobs.c.state == State.RUNNING))


def assert_cancelled(runner: Runner, gallery: Gallery, job_id: str, done: int) -> None:
    """Cancelled with so many items, which are there and counted, and no picture of any other."""
    job = queue.get(runner.store.database, job_id)
    assert (job.state, job.cancel) == (State.CANCELLED, True)
    assert (job.position, job.done, job.unchanged, job.failed) == (done, done, 0, 0)
    assert job.finished_at is not None
    check(runner.store, gallery, expected(done), grace_s=-1)


def test_a_job_that_waits_is_cancelled_at_once_and_again_without_effect(
    runner: Runner, gallery: Gallery, photos: Path
) -> None:
    job = submitted(runner, gallery, photos)
    first = queue.cancel(runner.store.database, job.id)
    assert first.state is State.CANCELLED
    assert queue.cancel(runner.store.database, job.id) == first
    assert not run_next(runner)
    assert_cancelled(runner, gallery, job.id, 0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("moment", ["embedded", "chunk_committed"])
def test_a_job_that_is_worked_on_ends_with_its_chunk(
    runner: Runner, gallery: Gallery, photos: Path, moment: str
) -> None:
    cancelled: list[Job] = []
    job = submitted(runner, gallery, photos)

    def trace(reached: str) -> None:
        if reached == moment and not cancelled:
            cancelled.append(queue.cancel(runner.store.database, job.id))
            queue.cancel(runner.store.database, job.id)

    assert run_next(with_trace(runner, trace))
    assert cancelled[0].state is State.RUNNING
    assert_cancelled(runner, gallery, job.id, CHUNK if moment == "embedded" else 2 * CHUNK)


@pytest.mark.usefixtures("small_chunks")
def test_a_cancel_after_the_last_chunk_or_the_end_leaves_a_job_that_has_succeeded(
    runner: Runner, gallery: Gallery, photos: Path
) -> None:
    job = submitted(runner, gallery, photos)
    left = [FEW]

    def trace(reached: str) -> None:
        if reached == "chunk_committed":
            left[0] -= CHUNK
            if left[0] <= 0:
                queue.cancel(runner.store.database, job.id)

    assert run_next(with_trace(runner, trace))
    ended = queue.get(runner.store.database, job.id)
    assert (ended.state, ended.done) == (State.SUCCEEDED, FEW)
    with pytest.raises(JobFinished, match="has succeeded already"):
        queue.cancel(runner.store.database, job.id)
    check(runner.store, gallery, expected(FEW))


@pytest.mark.parametrize(
    "cancels", ["while it has the lease", pytest.param("when its lease has ended", marks=pytest.mark.faults)]
)
def test_a_worker_that_is_paused_across_a_cancel_writes_nothing_more(
    runner: Runner, gallery: Gallery, photos: Path, bundle: Path, tmp_path: Path, database_url: str, cancels: str
) -> None:
    job = submitted(runner, gallery, photos)
    settings = {"database": database_url, "import_folders": photos, "cpus": 1, "nice": 0}
    variables = environment(tmp_path / "data", bundle, **settings)
    paused = subprocess.Popen([sys.executable, "-c", PAUSING], cwd=ROOT, env=variables, stderr=subprocess.PIPE)
    try:
        until(lambda: psutil.Process(paused.pid).status() == psutil.STATUS_STOPPED)
        if cancels == "while it has the lease":
            assert queue.cancel(runner.store.database, job.id).state is State.RUNNING
            end_lease(runner)
            assert not run_next(runner)  # another worker's claim ends it
        else:
            end_lease(runner)
            assert queue.cancel(runner.store.database, job.id).state is State.CANCELLED
        assert queue.get(runner.store.database, job.id).state is State.CANCELLED
        paused.send_signal(signal.SIGCONT)
        _, told = paused.communicate(timeout=PATIENCE_S)
    finally:
        paused.kill()
        paused.wait()
    assert paused.returncode == 0
    assert b"is another worker's, or was ended" in told
    assert_cancelled(runner, gallery, job.id, CHUNK)


def until(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


# At random moments, over HTTP, with two workers


class Cancelling:
    """A service and two workers beside it, whose jobs are cancelled; `runner` reads its database.

    The service's own workers would not do: it waits ever longer before it starts one in the place of a dead one.
    """

    def __init__(
        self, served: Served, start_worker: Callable[[], "subprocess.Popen[bytes]"], runner: Runner, photos: Path
    ) -> None:
        self._start_worker, self._workers = start_worker, [start_worker() for _ in range(2)]
        self._served, self._runner, self._photos = served, runner, photos
        self._rng = random.Random(SEED)
        self.ended: dict[str, tuple[Job, int]] = {}
        self.took_s: list[float] = []

    def one(self, number: int) -> str:
        """Send a job, cancel it some time later, in some way -> how it ended."""
        name = f"g{number}"
        self._ask("POST", "/v1/galleries", json={"name": name})
        job_id = self._ask("POST", f"/v1/galleries/{name}/imports", json={"folder": str(self._photos)}).json()["id"]
        way = self._rng.choice(["once", "once", "twice", "killed"])
        reached = self._rng.randrange(-MOST_ENTRIES, MANY + MOST_ENTRIES)
        until(lambda: reached <= 0 or self._job(job_id).position >= min(reached, MANY))
        time.sleep(self._rng.uniform(0, 0.2))
        answer = self._ask("POST", f"/v1/jobs/{job_id}/cancel")
        assert answer.status_code in (200, 409), answer.text
        if way == "twice":
            assert self._ask("POST", f"/v1/jobs/{job_id}/cancel").status_code in (200, 409)
        if way == "killed":
            self._kill_a_worker()
        cancelled = time.monotonic()
        until(lambda: self._job(job_id).finished_at is not None)
        if way != "killed":
            self.took_s.append(time.monotonic() - cancelled)
        self._judge(name, self._job(job_id), answer)
        return f"{answer.json()['state'] if answer.is_success else 'ended'} {way} -> {self._job(job_id).state}"

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.kill()
            worker.wait()

    def check(self) -> None:
        """All are as they were when they ended: nobody wrote any more."""
        for name, (job, seq) in self.ended.items():
            assert queue.get(self._runner.store.database, job.id) == job
            gallery = galleries.get(self._runner.store.database, name)
            assert gallery.seq == seq == job.done
            check(self._runner.store, gallery, expected(job.done))
        check_no_orphans(self._runner.store, 3600)

    def _judge(self, name: str, job: Job, answer: httpx.Response) -> None:
        assert job.state in (State.CANCELLED, State.SUCCEEDED)
        assert job.position == job.done + job.unchanged + job.failed
        assert (job.unchanged, job.failed) == (0, 0)
        if answer.status_code == 409 or job.state is State.SUCCEEDED:
            assert (job.state, job.done) == (State.SUCCEEDED, MANY)
        else:
            told: dict[str, Any] = answer.json()
            assert told["position"] <= job.position <= told["position"] + MOST_ENTRIES
            assert told["state"] != "cancelled" or job.position == told["position"]
        self.ended[name] = job, galleries.get(self._runner.store.database, name).seq

    def _kill_a_worker(self) -> None:
        """As the kernel does it, and as an operator does, there is another one soon."""
        killed = self._workers.pop(0)
        killed.kill()
        killed.wait()
        end_lease(self._runner)
        self._workers.append(self._start_worker())

    def _job(self, job_id: str) -> Job:
        return queue.get(self._runner.store.database, job_id)

    def _ask(self, method: str, address: str, **content: Any) -> httpx.Response:
        return httpx.request(method, self._served.url + address, timeout=10, **content)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_hundred_jobs_cancelled_at_random_moments_end_soon_and_for_good(
    runner: Runner, many_photos: Path, bundle: Path, tmp_path: Path, database_url: str
) -> None:
    settings = {"database": database_url, "import_folders": many_photos, "nice": 0, "cpus": 1}
    variables = environment(tmp_path / "data", bundle, **settings)

    def start_worker() -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-m", "worker"], cwd=ROOT, env=variables)

    ends: dict[str, int] = {}
    with (
        running(tmp_path / "data", bundle, **settings, workers=0) as served,
        closing(Cancelling(served, start_worker, runner, many_photos)) as cancelling,
    ):
        for end in map(cancelling.one, range(CANCELS)):
            ends[end] = ends.get(end, 0) + 1
        time.sleep(1.0)
        cancelling.check()
    print(f"{ends}, {median(cancelling.took_s):.2f} s in the median, {max(cancelling.took_s):.2f} s at most")
    assert median(cancelling.took_s) < SOON_S
    assert sum(count for end, count in ends.items() if "running" in end and "-> cancelled" in end) > CANCELS / 4
    assert any("-> succeeded" in end for end in ends)
