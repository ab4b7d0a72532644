"""The compose form as it runs: its own commands as plain processes, behind a real nginx, on PostgreSQL and Redis."""

import io
import json
import re
import signal
import socket
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.bundles import edited, picture
from tests.stack import ROOT, Stack, nginx_folder

VARIABLES = {"POSTGRES_PASSWORD": "p" * 24, "REDIS_PASSWORD": "r" * 24}
ZIP = {"Content-Type": "application/zip"}
WORKERS = ("worker-1", "worker-2")
COUNT = 600
SLOW_S = 2.0
"""What a body may be silent for, here."""
IMPORTS = "/v1/galleries/g/imports"
SEARCH = "/v1/galleries/g/search"


def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def archive(count: int, side: int = 24) -> bytes:
    held = io.BytesIO()
    data = [picture(number, side=side) for number in range(50)]
    with zipfile.ZipFile(held, "w") as zipped:
        for number in range(count):
            zipped.writestr(f"{number}.png", data[number % 50])
    return held.getvalue()


def fetch_nginx() -> None:
    """Skips the test where there is none to be had."""
    if nginx_folder(ROOT / ".cache") is None:
        pytest.skip("no nginx is installed, and apt-get and dpkg are not there to fetch Debian's")


def is_listening(port: str) -> bool:
    with closing(socket.socket()) as asked:
        return asked.connect_ex(("127.0.0.1", int(port))) == 0


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """nginx alone: the service that it stands before does not answer."""
    fetch_nginx()
    stack = Stack(tmp_path_factory.mktemp("nginx"), VARIABLES, {})
    try:
        stack.start("nginx")
        until(lambda: is_listening(stack.ports["8080"]))
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def address(nginx: Stack) -> str:
    """Where it listens."""
    return f"http://127.0.0.1:{nginx.ports['8080']}"


def test_nginx_finds_nothing_to_say_about_its_configuration(tmp_path: Path) -> None:
    fetch_nginx()
    stack = Stack(tmp_path, VARIABLES, {})
    said = subprocess.run(
        [*stack.command("nginx")[:3], "-t", "-c", stack.render_nginx()],
        env=stack.environment("nginx"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0
    assert "warn" not in said.stderr
    assert "emerg" not in said.stderr


def test_a_service_that_does_not_answer_is_a_problem_that_says_when_to_come_again(address: str) -> None:
    answer = httpx.post(f"{address}{SEARCH}", files={"image": b"x"})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["code"] == "service-unavailable"


@pytest.mark.parametrize(
    "path", ["/metrics", "//metrics", "/%6detrics", "/v1/../metrics", "/docs", "/openapi.json", "/"]
)
def test_what_is_not_for_everybody_is_not_there(nginx: Stack, path: str) -> None:
    with socket.create_connection(("127.0.0.1", int(nginx.ports["8080"])), 10) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 404")


def test_a_body_beyond_the_limit_is_refused_by_its_head_and_archives_have_a_limit_of_their_own(nginx: Stack) -> None:
    for path, megabytes, status in ((SEARCH, 68, b"413"), (IMPORTS, 10_000, b"503"), (IMPORTS, 10_600, b"413")):
        with socket.create_connection(("127.0.0.1", int(nginx.ports["8080"])), 10) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {megabytes}000000\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(64).startswith(b"HTTP/1.1 " + status), path


def test_nginx_is_healthy_by_its_own_check_and_ends_well(nginx: Stack) -> None:
    assert nginx.is_healthy("nginx")
    status, share = nginx.stop("nginx")
    assert status == 0
    assert share < 1
    nginx.start("nginx")
    until(lambda: is_listening(nginx.ports["8080"]))


# --- all of it


@pytest.fixture(scope="module")
def stack(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every service that needs no profile, healthy; the app and both workers find an empty database at once."""
    own = {"ROADMATCH_BUNDLES": str(bundle), "ROADMATCH_CPUS": "1"}
    given = {"app": own, "worker": own, "nginx": {"NGINX_BODY_TIMEOUT": f"{SLOW_S:.0f}s"}}
    stack = Stack(tmp_path_factory.mktemp("stack"), VARIABLES, given)
    try:
        stack.start("postgres")
        stack.start("redis")
        stack.make_role()
        stack.wait_until_healthy("postgres", "redis")
        stack.start("app")
        for worker in WORKERS:
            stack.start(worker, "worker")
        if nginx_folder(ROOT / ".cache") is not None:
            stack.start("nginx")
        stack.wait_until_healthy(*list(stack.processes)[2:])
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[httpx.Client]:
    """What asks through nginx, where there is one; there is a gallery with an item."""
    port = stack.ports["8080" if "nginx" in stack.processes else "8000"]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        client.post("/v1/galleries", json={"name": "g"}).raise_for_status()
        client.put("/v1/galleries/g/items/known", files={"image": picture(7)}).raise_for_status()
        yield client


def job(client: httpx.Client, address: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(address).raise_for_status().json()
    return found


def found(client: httpx.Client) -> list[str]:
    answer = client.post(SEARCH, files={"image": edited(picture(7))}).raise_for_status()
    return [match["item"] for match in answer.json()["matches"]]


@pytest.mark.faults
def test_an_item_that_was_sent_through_nginx_is_found_through_it(client: httpx.Client) -> None:
    assert found(client) == ["known"]
    assert client.post(SEARCH, files={"image": b"no picture"}).headers["Content-Type"] == "application/problem+json"


@pytest.mark.faults
def test_an_import_is_followed_through_nginx_as_it_goes(client: httpx.Client) -> None:
    answer = client.post(IMPORTS, content=archive(400), headers=ZIP)
    assert answer.status_code == 202, answer.text
    with client.stream("GET", f"{answer.headers['Location']}/events") as events:
        assert events.headers["Content-Type"].startswith("text/event-stream")
        lines = [(time.monotonic(), line) for line in events.iter_lines() if line.startswith("data:")]
    seen = [(at_s, json.loads(line[5:])) for at_s, line in lines]
    assert seen[-1][1]["state"] == "succeeded"
    assert seen[-1][1]["done"] == 400
    assert len(seen) > 2
    assert seen[-1][0] - seen[0][0] > 0.4  # the first came while the job was at work


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_in_an_import_leaves_it_to_the_other_and_nothing_is_lost_or_doubled(
    stack: Stack, client: httpx.Client
) -> None:
    client.post("/v1/galleries", json={"name": "whole"}).raise_for_status()
    stack.processes["worker-2"].send_signal(signal.SIGSTOP)  # so that the first one takes the job
    answer = client.post("/v1/galleries/whole/imports", content=archive(COUNT), headers=ZIP)
    address = answer.headers["Location"]
    until(lambda: job(client, address)["done"] > 0)
    stack.processes["worker-1"].kill()
    stack.processes.pop("worker-1").wait()
    stack.processes["worker-2"].send_signal(signal.SIGCONT)
    assert 0 < job(client, address)["done"] < COUNT
    assert found(client)[:1] == ["known"]
    until(lambda: job(client, address)["state"] == "succeeded", 200)  # its lease ends first
    ended = job(client, address)
    assert (ended["done"] + ended["unchanged"], ended["failed"]) == (COUNT, 0)
    gallery = client.get("/v1/galleries/whole").json()
    assert (gallery["items"], gallery["images"], gallery["seq"]) == (COUNT, COUNT, COUNT)
    stack.start("worker-1", "worker")  # as the restart policy does
    stack.wait_until_healthy("worker-1")


@pytest.mark.faults
def test_slow_senders_are_cut_by_nginx_and_searches_go_on(stack: Stack, client: httpx.Client) -> None:
    fetch_nginx()
    head = f"POST {SEARCH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=B\r\n"
    with ThreadPoolExecutor(60) as senders:
        slow = [senders.submit(_cut_after, stack.ports["8080"], head) for _ in range(60)]
        time.sleep(0.3)
        app = httpx.get(f"http://127.0.0.1:{stack.ports['8000']}/metrics").text
        assert "roadmatch_admitted_requests 0.0" in app  # none of them holds a place
        for _ in range(5):
            assert found(client)[:1] == ["known"]
    assert all(SLOW_S - 0.5 < each.result() < SLOW_S + 5 for each in slow)


def _cut_after(port: str, head: str) -> float:
    with socket.create_connection(("127.0.0.1", int(port)), 20) as connection:
        connection.sendall(f"{head}Content-Length: 100000\r\n\r\n--B\r\n".encode())
        began = time.monotonic()
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""
        return time.monotonic() - began


@pytest.mark.faults
def test_a_large_upload_is_answered_through_nginx_before_it_has_all_come(client: httpx.Client) -> None:
    answer = client.post("/v1/galleries/not-there/imports", content=b"x" * 30_000_000, headers=ZIP)
    assert answer.status_code == 404
    assert answer.json()["code"] == "gallery-not-found"


@pytest.mark.faults
def test_a_name_that_is_not_ours_is_refused_and_a_page_of_ours_is_not(stack: Stack, client: httpx.Client) -> None:
    assert client.get("/v1/galleries", headers={"Host": "evil.example"}).status_code == 403
    own = "localhost:8080"
    assert client.get("/v1/galleries", headers={"Host": own, "Origin": f"http://{own}"}).status_code == 200
    assert client.get("/v1/galleries", headers={"Origin": "http://evil.example"}).status_code == 403
    scraped = httpx.get(f"http://127.0.0.1:{stack.ports['8000']}/metrics", headers={"Host": "app:8000"})
    assert "roadmatch_job_entries_total" in scraped.text


@pytest.mark.faults
def test_redis_and_postgresql_want_their_passwords(stack: Stack) -> None:
    with socket.create_connection(("127.0.0.1", int(stack.ports["6379"])), 5) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(100).startswith(b"-NOAUTH")
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(stack.database_url.replace("postgres@", "roadmatch:wrong@"))
    assert not [name for name in stack.processes if re.search("p{24}|r{24}", stack.log(name))]


@pytest.mark.faults
def test_all_of_it_ends_well_in_its_grace_period(stack: Stack, client: httpx.Client) -> None:
    found(client)
    for name in [name for name in ("nginx", *WORKERS, "app", "redis", "postgres") if name in stack.processes]:
        status, share = stack.stop(name)
        assert (name, status) == (name, 0), stack.log(name)[-2000:]
        assert share < 1, name
    assert "Traceback" not in "".join(stack.log(name) for name in ("app", *WORKERS))
