"""Import jobs for benchmarks: a data folder, workers in processes of their own, and what a job took."""

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import bindparam, select

from app.settings import environment_of_a_child
from roadmatch import bundle as bundles
from roadmatch.gallery import galleries
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.jobs import queue
from roadmatch.jobs.queue import ENDED, Job, Kind, State
from roadmatch.store.database import Database, open_database
from roadmatch.store.tables import jobs

LOOK_S = 0.05
_PATIENCE_S = 1_800.0
_STOP_S = 30.0
_state_of = select(jobs.c.state).where(jobs.c.id == bindparam("job"))


@dataclass(frozen=True, eq=False)
class Place:
    """A data folder and its database, as service and workers use them."""

    data: Path
    bundle: Path
    database: Database
    url: str

    def gallery(self, name: str, keep: Keep = Keep.ORIGINAL) -> Gallery:
        """A new one of the bundle."""
        bundle = bundles.read(self.bundle)
        assert bundle.operating_points is not None
        return galleries.create(
            self.database, name, bundle=bundle.id, rule=bundle.operating_points.default_rule, keep=keep
        )

    def queued(self, gallery: Gallery, archive: Path) -> str:
        """A job that imports a zip -> its id. The zip is linked to, and not sent: it is what comes then that counts."""
        uploads = self.data / "uploads"
        uploads.mkdir(exist_ok=True)
        key = secrets.token_hex(16)
        (uploads / key).symlink_to(archive)
        source = {"kind": "zip", "labels": None, "upload": key}
        return queue.submit(self.database, Kind.IMPORT, gallery.id, gallery.name, source).id

    def state(self, job: str) -> State:
        """Where a job is, for little."""
        row = self.database.look(_state_of, {"job": job})
        assert row is not None
        return State(row[0])

    def followed(self, ids: Sequence[str], meanwhile: Callable[[], object] = lambda: time.sleep(LOOK_S)) -> "Span":
        """What jobs did, and the time from the first one's start to the last one's end.

        meanwhile: is called while they run, again and again. Raises RuntimeError where one of them did not go well.
        """
        end = time.monotonic() + _PATIENCE_S
        while all(self.state(job) is State.QUEUED for job in ids):
            _give_up_after(end)
            time.sleep(LOOK_S / 10)
        started = time.perf_counter()
        while not all(self.state(job) in ENDED for job in ids):
            _give_up_after(end)
            meanwhile()
        taken = time.perf_counter() - started
        ended = [queue.get(self.database, job) for job in ids]
        for job in ended:
            if job.state is not State.SUCCEEDED or job.failed:
                raise RuntimeError(f"job {job.id} has {job.state}, and {job.failed} entries failed: {job.error}")
        return Span(taken, ended)


@dataclass(frozen=True)
class Span:
    """Jobs at their end, and the seconds that they took together."""

    seconds: float
    jobs: Sequence[Job]

    @property
    def per_s(self) -> float:
        """Entries a second."""
        return sum(job.position for job in self.jobs) / self.seconds


@contextmanager
def place(data: Path, bundle_folder: Path, url: str = "") -> Iterator[Place]:
    """An opened data folder, made if it is not there. url: of its database; empty: SQLite in the folder."""
    data.mkdir(parents=True, exist_ok=True)
    url = url or f"sqlite:///{(data / 'roadmatch.db').absolute()}"
    with closing(open_database(url)) as database:
        yield Place(data, bundle_folder, database, url)


@contextmanager
def workers(at: Place, count: int, cpus: int, command: Sequence[str] = ()) -> Iterator[list[int]]:
    """So many `python -m worker` with so many threads each -> their process ids. command: what starts them."""
    settings = {"DATA": at.data, "DATABASE": at.url, "BUNDLES": at.bundle, "CPUS": cpus}
    environment = environment_of_a_child() | {f"ROADMATCH_{name}": str(value) for name, value in settings.items()}
    arguments = [*command, sys.executable, "-m", "worker"]
    processes = [subprocess.Popen(arguments, env=environment) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _give_up_after(end: float) -> None:
    if time.monotonic() > end:
        raise RuntimeError(f"jobs have not ended in {_PATIENCE_S:g} s")
