import contextlib
import dataclasses
import gzip
import http.client
import json
import re
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from app.main import create_app
from app.service import Service
from roadmatch.gallery.replica import Generation, Replicas
from tests.bundles import picture
from tests.postgres import PostgresServer
from tests.service import Served, open_here, running
from tests.test_api import assert_problem, put

RECEIVE_S = 3.0
PLACES = 2
SEARCH = "/v1/galleries/g/search"


@pytest.fixture(scope="module")
def served(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A process with two places, bodies of 1 MB at most, and little patience."""
    data = tmp_path_factory.mktemp("served") / "data"
    with running(data, bundle, cpus=1, queue=PLACES - 1, receive_s=RECEIVE_S, body_mb=1) as served:
        httpx.post(f"{served.url}/v1/galleries", json={"name": "g"}).raise_for_status()
        yield served


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(create_app(service)) as client:
        client.post("/v1/galleries", json={"name": "g"})
        yield client


class Wire:
    """A connection on which a test sends what it likes."""

    def __init__(self, served: Served) -> None:
        self._socket = socket.create_connection(("127.0.0.1", served.port), timeout=20)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self, method: str = "POST") -> tuple[int, dict[str, str], Any]:
        """status, headers, JSON body; read to its end as its length says."""
        response = http.client.HTTPResponse(self._socket, method=method)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, json.loads(response.read())

    def receives(self, wanted: bytes) -> bool:
        """Whether this comes, in an answer without a length."""
        came = b""
        while wanted not in came and (more := self._socket.recv(65_536)):
            came += more
        return wanted in came

    def is_closed(self) -> bool:
        """Whether the other side closes before long."""
        self._socket.settimeout(RECEIVE_S + 2)
        try:
            return self._socket.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


def head(length: int | None, path: str = SEARCH, method: str = "POST", **more: str) -> bytes:
    """A request's head; length None: chunked."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: multipart/form-data; boundary=BB"]
    lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def form(data: bytes, name: str = "image", filename: str = "x.png") -> bytes:
    """A multipart body with one file."""
    part = f'--BB\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n\r\n'.encode()
    return part + data + b"\r\n--BB--\r\n"


def metric(served: Served, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", httpx.get(f"{served.url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def inside(served: Served) -> float:
    return metric(served, "roadmatch_admitted_requests")


def wait_until_inside(served: Served, count: int) -> None:
    deadline = time.monotonic() + 5
    while inside(served) != count:
        assert time.monotonic() < deadline, f"{inside(served)} requests inside, not {count}"
        time.sleep(0.01)


def assert_whole_problem(answer: tuple[int, dict[str, str], Any], status: int) -> None:
    found, headers, problem = answer
    assert found == status == problem["status"]
    assert headers["content-type"] == "application/problem+json"
    assert headers["x-request-id"]
    assert set(problem) == {"type", "title", "status", "code", "detail"}


# --- admission


def test_a_full_service_refuses_at_once_before_the_body_and_serves_again_when_there_is_room(served: Served) -> None:
    body = form(picture(1))
    refused = metric(served, "roadmatch_refused_requests_total")
    with Wire(served) as first, Wire(served) as second, Wire(served) as third:
        for holder in (first, second):
            holder.send(head(len(body)) + body[:100])
        wait_until_inside(served, PLACES)
        started = time.monotonic()
        third.send(head(900_000))  # and nothing of its body
        answer = third.answer()
        assert time.monotonic() - started < 1.0
        assert_whole_problem(answer, 503)
        assert int(answer[1]["retry-after"]) >= 1
        assert answer[1]["connection"] == "close"
        assert third.is_closed()
        for path in ("/livez", "/readyz", "/v1/galleries/g", "/metrics"):
            started = time.monotonic()
            assert httpx.get(served.url + path).status_code == 200
            assert time.monotonic() - started < 1.0
        assert metric(served, "roadmatch_refused_requests_total") == refused + 1
        for holder in (first, second):
            holder.send(body[100:])
            assert holder.answer()[0] == 200
    wait_until_inside(served, 0)
    with Wire(served) as fourth:
        fourth.send(head(len(body)) + body)
        assert fourth.answer()[0] == 200


def test_a_refused_client_that_sends_its_whole_body_first_still_reads_the_answer(served: Served) -> None:
    with Wire(served) as first, Wire(served) as second:
        for holder in (first, second):
            holder.send(head(500) + b"-")
        wait_until_inside(served, PLACES)
        for _ in range(3):
            with Wire(served) as third:
                third.send(head(20_000_000) + bytes(20_000_000))  # more than the buffers in between hold
                assert_whole_problem(third.answer(), 503)
    wait_until_inside(served, 0)


def test_requests_beyond_the_places_are_refused_and_all_others_answered(served: Served) -> None:
    data = picture(1)

    def search(_: int) -> int:
        return httpx.post(served.url + SEARCH, files={"image": data}).status_code

    with ThreadPoolExecutor(12) as threads:
        statuses = list(threads.map(search, range(60)))
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) > 0
    wait_until_inside(served, 0)


def test_a_body_that_trickles_is_given_up_at_the_deadline(served: Served) -> None:
    with Wire(served) as slow:
        slow.send(head(10_000) + form(b"")[:50])
        started = time.monotonic()
        stop = threading.Event()

        def trickle() -> None:
            while not stop.wait(0.1):
                try:
                    slow.send(b"x")
                except OSError:
                    return

        sender = threading.Thread(target=trickle)
        sender.start()
        answer = slow.answer()
        took = time.monotonic() - started
        stop.set()
        sender.join()
        assert_whole_problem(answer, 408)
        assert RECEIVE_S - 0.1 <= took < RECEIVE_S + 2
        assert slow.is_closed()
    wait_until_inside(served, 0)


def test_a_head_that_does_not_arrive_ends_the_connection(served: Served) -> None:
    started = time.monotonic()
    with Wire(served) as silent, Wire(served) as slow, Wire(served) as second:
        slow.send(head(10)[:40])
        second.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert second.answer("GET")[0] == 200
        second.send(b"GET /livez HTT")
        for connection in (silent, slow, second):
            assert connection.is_closed()
    assert time.monotonic() - started < RECEIVE_S + 2


def test_two_hundred_clients_that_leave_free_their_places_threads_and_files(served: Served) -> None:
    process = psutil.Process(served.process.pid)
    body = form(picture(1))
    with ThreadPoolExecutor(PLACES) as together:  # until every thread that there will be has its files
        list(together.map(lambda _: httpx.post(served.url + SEARCH, files={"image": picture(1)}), range(20)))
    before = (process.num_threads(), process.num_fds())
    for number in range(200):
        with Wire(served) as leaver:
            whole = head(len(body)) + body
            leaver.send(whole[: (len(whole), len(whole) - 1, 400, 120)[number % 4]])
    wait_until_inside(served, 0)
    deadline = time.monotonic() + 5
    most = before[1] + 4  # a reader of the database that was not needed before; 200 clients would leave hundreds
    while process.num_fds() > most and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.num_fds() <= most
    assert process.num_threads() <= before[0] + 2
    assert httpx.post(served.url + SEARCH, files={"image": picture(1)}).status_code == 200


# --- bodies


def test_a_body_that_is_declared_too_large_is_refused_without_being_sent(served: Served) -> None:
    for length in (1_000_001, 5_000_000_000):
        with Wire(served) as wire:
            wire.send(head(length))
            answer = wire.answer()
            assert_whole_problem(answer, 413)
            assert wire.is_closed()
    assert httpx.post(served.url + SEARCH, files={"image": bytes(3_000_000)}).status_code == 413
    assert httpx.post(f"{served.url}/v1/galleries", content=bytes(1_000_001)).status_code == 413


def test_a_chunked_body_is_refused_when_it_has_become_too_large(served: Served) -> None:
    with Wire(served) as wire:
        begun = form(b"")[:-10]
        wire.send(head(None) + b"%x\r\n" % len(begun) + begun + b"\r\n")
        for _ in range(11):
            wire.send(b"%x\r\n" % 100_000 + bytes(100_000) + b"\r\n")
        assert_whole_problem(wire.answer(), 413)
        assert wire.is_closed()
    wait_until_inside(served, 0)


def test_a_compressed_body_is_refused(served: Served, client: TestClient) -> None:
    body = gzip.compress(form(picture(1)))
    with Wire(served) as wire:
        wire.send(head(len(body), Content_Encoding="gzip") + body)
        assert_whole_problem(wire.answer(), 415)
    for coding in ("gzip", "br", "identity, gzip", "x"):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        assert_problem(client.post("/v1/galleries", content=b"{}", headers=headers), 415)
    headers = {"content-encoding": "identity", "content-type": "application/json"}
    assert_problem(client.post("/v1/galleries", content=b"{}", headers=headers), 422)


def test_a_form_in_a_charset_that_takes_long_to_decode_is_refused(client: TestClient) -> None:
    body = b'--BB\r\nContent-Disposition: form-data; name="rule"\r\n\r\n-' + b"b" * 60_000 + b"\r\n--BB--\r\n"
    started = time.process_time()
    for charset in ("punycode", "utf-7", "UTF-16", '"idna"'):
        headers = {"content-type": f"multipart/form-data; boundary=BB; charset={charset}"}
        assert_problem(client.post(SEARCH, content=body, headers=headers), 415)
    assert time.process_time() - started < 0.5
    headers = {"content-type": "multipart/form-data; boundary=BB; charset=UTF-8"}
    assert client.post(SEARCH, content=form(picture(1)), headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("multipart/form-data", form(b"x"), 400),
        ("multipart/form-data; boundary=", form(b"x"), 400),
        ("multipart/form-data; boundary=CC", form(b"x"), 400),
        ("multipart/form-data; boundary=BB", form(b"x")[:-20], 422),
        ("multipart/form-data; boundary=BB", b"", 422),
        ("multipart/form-data; boundary=BB", b"--BB\r\nContent-Disposition: form-data\r\n\r\nx\r\n--BB--\r\n", 400),
        ("multipart/form-data; boundary=" + "B" * 5_000, form(b"x"), 400),
        ("application/json", b'{"image": "x"}', 422),
        ("application/x-www-form-urlencoded", b"image=x", 422),
        ("image/png", picture(1), 422),
        ("", form(b"x"), 422),
        ("\x01", form(b"x"), 422),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bodies_that_are_no_form_are_refused(client: TestClient, content_type: str, body: bytes, status: int) -> None:
    assert_problem(client.post(SEARCH, content=body, headers={"content-type": content_type}), status)


def test_a_form_of_fifteen_hundred_parts_is_refused(client: TestClient) -> None:
    field = b'--BB\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n'
    file = b'--BB\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n1\r\n'
    headers = {"content-type": "multipart/form-data; boundary=BB"}
    assert_problem(client.post(SEARCH, content=field * 100 + b"--BB--\r\n", headers=headers), 400)
    for part in (field, file):
        started = time.process_time()
        assert_problem(client.post(SEARCH, content=part * 1_500 + b"--BB--\r\n", headers=headers), 400)
        assert time.process_time() - started < 1.0


def test_what_stands_behind_a_form_is_neither_read_nor_slow(client: TestClient) -> None:
    headers = {"content-type": "multipart/form-data; boundary=BB"}
    started = time.process_time()
    answer = client.post(SEARCH, content=form(picture(1)) + b"-" * 1_000_000, headers=headers)
    assert answer.status_code in (200, 400)
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    "filename", ["../../etc/passwd", "..\\..\\x", "", "a\0b", "x" * 1_000, "\u202egnp.exe", "a\\", "\N{CAT FACE}"]
)
def test_file_names_are_not_used_for_anything(client: TestClient, service: Service, filename: str) -> None:
    before = {path for path in service.settings.data.rglob("*") if path.is_file()}
    headers = {"content-type": "multipart/form-data; boundary=BB"}
    body = form(picture(1), filename=filename)
    answer = client.put("/v1/galleries/g/items/named", content=body, headers=headers)
    assert answer.status_code in (200, 201)
    made = {path for path in service.settings.data.rglob("*") if path.is_file()} - before
    assert all(re.fullmatch(r"[0-9a-f]{32}|roadmatch\.db(-wal|-shm)?", path.name) for path in made)
    if filename:
        assert filename not in client.get("/v1/galleries/g/items/named").text
    client.delete("/v1/galleries/g/items/named")


# --- errors of every kind


def test_what_is_no_http_is_answered_with_a_problem(served: Served) -> None:
    for garbage in (
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        head(5, Transfer_Encoding="chunked") + b"0\r\n\r\n",
    ):
        with Wire(served) as wire:
            wire.send(garbage)
            assert_whole_problem(wire.answer(), 400)
            assert wire.is_closed()


def test_addresses_and_methods_that_there_are_not_are_problems(client: TestClient) -> None:
    for path in ("/nope", "/v1", "/v1/galleries/g/nope", "/v1/../etc/passwd", "/v1/galleries/g/items/a/"):
        assert_problem(client.get(path, follow_redirects=False), 404, "not-found")
    assert_problem(client.post("/nope", content=b"x" * 1000), 404, "not-found")
    answer = client.delete("/livez")
    assert_problem(answer, 405, "method-not-allowed")
    assert answer.headers["allow"] == "GET"
    for path, allowed in (
        ("/v1/galleries", "GET, POST"),
        ("/v1/galleries/g", "DELETE, GET, PATCH"),
        ("/v1/galleries/g/items/a", "DELETE, GET, PUT"),
    ):
        for method in ("OPTIONS", "TRACE", "HEAD"):
            answer = client.request(method, path)
            assert answer.status_code == 405
            assert answer.headers["allow"] == allowed


def test_every_answer_has_a_request_id_the_callers_own_if_it_is_harmless(client: TestClient) -> None:
    def of(answer: Response) -> str:
        return str(answer.headers["x-request-id"])

    assert of(client.get("/livez", headers={"X-Request-ID": "abc-1.2_3"})) == "abc-1.2_3"
    assert of(client.get("/nope", headers={"X-Request-ID": "abc"})) == "abc"
    own = set()
    for odd in ("", "a b", "x" * 65, "a;b", "<img>", "a\tb"):
        given = of(client.get("/livez", headers={"X-Request-ID": odd}))
        assert re.fullmatch("[0-9a-f]{16}", given)
        own.add(given)
    assert len(own) == 6
    assert client.get("/livez").headers["x-content-type-options"] == "nosniff"


class BrokenReplicas(Replicas):
    """Fails as nobody expected."""

    def current(self, *_given: Any, **_named: Any) -> Generation:
        raise ZeroDivisionError("a secret in /etc/passwd")


def test_an_unexpected_failure_is_a_problem_without_its_cause_and_is_logged_under_its_id(
    service: Service, client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    broken = dataclasses.replace(service, replicas=BrokenReplicas(service.database))
    answer = TestClient(create_app(broken)).post(
        SEARCH, files={"image": picture(1)}, headers={"X-Request-ID": "find-me"}
    )
    detail = assert_problem(answer, 500)
    assert "secret" not in answer.text
    assert "log" in detail
    assert answer.headers["x-request-id"] == "find-me"
    assert "find-me" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert client.post(SEARCH, files={"image": picture(1)}).status_code == 200


# --- the database


def test_a_locked_database_is_a_503_and_leaves_nothing_half_written(service: Service, client: TestClient) -> None:
    client.post("/v1/galleries", json={"name": "locked"})
    gallery = "/v1/galleries/locked"
    for item in ("a", "b"):
        put(client, gallery, item, 1, 2)
    before = client.get(gallery).json()
    kept = set(service.store.blobs.keys_older_than(-1))
    other = sqlite3.connect(service.settings.data / "roadmatch.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    image = {"image": picture(3)}
    writes: list[Callable[[], Response]] = [
        lambda: client.put(f"{gallery}/items/a", files=image),
        lambda: client.put(f"{gallery}/items/new", files=image),
        lambda: client.post(f"{gallery}/items", files=image, headers={"Idempotency-Key": "k"}),
        lambda: client.post(f"{gallery}/items/b/images", files=image),
        lambda: client.delete(f"{gallery}/items/b"),
        lambda: client.patch(gallery, json={"rule": "max_f1"}),
        lambda: client.post("/v1/galleries", json={"name": "other"}),
        lambda: client.delete(gallery),
    ]
    started = time.monotonic()
    crowd: list[Callable[[], Response]] = [lambda: client.put(f"{gallery}/items/crowd", files=image)] * 35
    crowd += [lambda: client.delete(f"{gallery}/items/b")] * 20  # together more than the framework has threads
    with ThreadPoolExecutor(len(writes + crowd)) as threads:
        waiting = [threads.submit(write) for write in writes + crowd]
        time.sleep(1.0)
        reading = time.monotonic()
        assert client.get("/readyz").status_code == 200
        assert client.post(f"{gallery}/search", files={"image": picture(1)}).json()["decision"] == "match"
        assert time.monotonic() - reading < 1.0
        answers = [future.result() for future in waiting]
    assert time.monotonic() - started < 8.0
    for answer in answers:
        assert_problem(answer, 503, "store-unavailable")
        assert int(answer.headers["retry-after"]) >= 1
    other.execute("ROLLBACK")
    other.close()
    assert client.get(gallery).json() == before
    assert set(service.store.blobs.keys_older_than(-1)) == kept
    assert_problem(client.get("/v1/galleries/other"), 404)
    assert [write().status_code for write in writes] == [200, 201, 201, 200, 204, 200, 201, 204]


def test_a_database_that_is_gone_is_a_503_and_is_used_again_when_it_is_back(
    tmp_path: Path, bundle: Path, postgres_url: str, postgres_server: PostgresServer
) -> None:
    service = open_here(tmp_path / "data", bundle, database=postgres_url)
    with TestClient(create_app(service)) as client:
        client.post("/v1/galleries", json={"name": "g"})
        put(client, "/v1/galleries/g", "a", 1)
        assert client.post(SEARCH, files={"image": picture(1)}).json()["decision"] == "match"
        kept = set(service.store.blobs.keys_older_than(-1))
        pair = {"query": picture(1), "picture": picture(1)}
        asked: list[Callable[[], Response]] = [
            lambda: client.get("/readyz"),
            lambda: put(client, "/v1/galleries/g", "b", 2),
            lambda: client.post(SEARCH, files={"image": picture(1)}),
            lambda: client.get("/v1/galleries/g/items/a"),
            lambda: client.delete("/v1/galleries/g/items/a"),
            lambda: client.post("/v1/compare", files=pair, data={"gallery": "g"}),
        ]
        postgres_server.stop()
        try:
            for ask in asked:
                started = time.monotonic()
                answer = ask()
                assert time.monotonic() - started < 5.0
                assert_problem(answer, 503, "store-unavailable")
                assert int(answer.headers["retry-after"]) >= 1
            assert client.get("/livez").status_code == 200
        finally:
            postgres_server.start()
        assert client.get("/readyz").status_code == 200
        assert set(service.store.blobs.keys_older_than(-1)) == kept
        assert client.get("/v1/galleries/g").json()["items"] == 1
        assert put(client, "/v1/galleries/g", "b", 2).status_code == 201
        assert client.post(SEARCH, files={"image": picture(2)}).json()["matches"][0]["item"] == "b"


# Other sites' pages


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_a_form_that_another_sites_page_sends_is_refused(served: Served, origin: str) -> None:
    own = f"http://127.0.0.1:{served.port}"
    answer = httpx.post(f"{served.url}{SEARCH}", files={"image": picture(1)}, headers={"Origin": origin})
    assert answer.status_code == 403
    assert "the page of another site" in answer.json()["detail"]
    assert httpx.post(f"{served.url}{SEARCH}", files={"image": picture(1)}, headers={"Origin": own}).status_code == 200


def test_a_name_that_is_made_to_stand_for_this_machine_is_refused(served: Served) -> None:
    for host, status in (("evil.example", 403), ("", 403), ("localhost", 200), ("LOCALHOST:80", 200), ("[::1]:8", 200)):
        answer = httpx.get(f"{served.url}/v1/galleries", headers={"Host": host})
        assert answer.status_code == status, host
    assert "ROADMATCH_HOSTS" in httpx.get(f"{served.url}/livez", headers={"Host": "evil.example"}).json()["detail"]


def test_more_names_can_be_allowed(bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path / "data", bundle, hosts="match.example, other.example") as served:
        for host, status in (("Match.Example:443", 200), ("127.0.0.1", 200), ("evil.example", 403)):
            assert httpx.get(f"{served.url}/livez", headers={"Host": host}).status_code == status, host


# Heads without end


def test_a_head_without_end_is_given_up(served: Served) -> None:
    with Wire(served) as one, Wire(served) as many:
        one.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ")
        many.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n")
        for wire, part in ((one, b"a" * 65_536), (many, b"A: b\r\n" * 10_000)):
            with contextlib.suppress(OSError):  # it hangs up while more is sent
                for _ in range(100):
                    wire.send(part)
                pytest.fail("megabytes of a head were taken")
    assert httpx.get(f"{served.url}/livez").status_code == 200


def test_what_comes_behind_a_chunked_body_is_no_header(served: Served) -> None:
    body = form(picture(1))
    with Wire(served) as wire:
        wire.send(
            f"POST {SEARCH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            f"Content-Type: multipart/form-data; boundary=BB\r\n\r\n{len(body):x}\r\n".encode()
        )
        wire.send(body + b"\r\n0\r\nX-Request-Id: from-a-trailer\r\nContent-Encoding: gzip\r\n\r\n")
        status, headers, _ = wire.answer()
    assert status == 200
    assert headers["x-request-id"] != "from-a-trailer"


@pytest.mark.faults
def test_a_dripping_body_is_given_up_before_the_deadline(bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path / "data", bundle, receive_s=60) as served, Wire(served) as wire:
        wire.send(head(1_000_000) + form(b"")[:60])
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 8:
                wire.send(b"a")
                time.sleep(0.2)
        assert wire.answer()[0] == 408
        assert time.monotonic() - began < 20
