import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from app.job_events import MOST_STREAMS, events
from app.main import create_app
from app.routes.jobs import JobView
from app.service import Service
from roadmatch.errors import StoreUnavailable
from roadmatch.jobs import queue
from roadmatch.jobs.queue import Claim, Failure, Progress, State
from roadmatch.store.database import Database, open_database
from tests.bundles import picture
from tests.service import Served, open_here, running
from tests.test_api import assert_problem
from tests.test_gate import Wire, assert_whole_problem, head, inside, wait_until_inside

IMPORTS = "/v1/galleries/g/imports"
ITEMS = "/v1/galleries/g/items"
ZIP = {"content-type": "application/zip"}
RECEIVE_S = 2.0


@pytest.fixture
def service(tmp_path: Path, bundle: Path, database_url: str) -> Service:
    """A service of its own for each test, on either database."""
    return open_here(tmp_path / "data", bundle, database=database_url)


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    """What asks it; there is a gallery g."""
    with TestClient(create_app(service)) as client:
        client.post("/v1/galleries", json={"name": "g"})
        yield client


@pytest.fixture
def light(tmp_path: Path, bundle: Path) -> Iterator[tuple[TestClient, Service]]:
    """A service on SQLite that may import a folder, for what no database sees."""
    service = open_here(tmp_path / "data", bundle, import_folders=(tmp_path / "srv",))
    (tmp_path / "srv" / "shop").mkdir(parents=True)
    with TestClient(create_app(service)) as client:
        client.post("/v1/galleries", json={"name": "g"})
        yield client, service


@pytest.fixture(scope="module")
def served(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A process with one place for searches, small bodies and archives of 40 MB at most."""
    data = tmp_path_factory.mktemp("served") / "data"
    with running(data, bundle, cpus=1, queue=0, body_mb=1, import_mb=40, receive_s=RECEIVE_S, workers=0) as served:
        httpx.post(f"{served.url}/v1/galleries", json={"name": "g"}).raise_for_status()
        yield served


@pytest.fixture
def database(served: Served) -> Iterator[Database]:
    """The database of the process, for a worker's part."""
    (file,) = (Path(psutil.Process(served.process.pid).cwd()) / "data").glob("*.db")
    database = open_database(f"sqlite:///{file}")
    yield database
    database.close()


def send(client: TestClient, data: bytes = b"PK archive", query: str = "", **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer: Response = client.post(f"{IMPORTS}{query}", content=data, headers=ZIP | named)
    return answer


def advance(database: Database, claim: Claim, **counts: Any) -> None:
    with database.write() as connection:
        queue.advance(connection, claim, Progress(**counts))


def claimed(database: Database) -> Claim:
    claim = queue.claim(database)
    assert claim is not None
    return claim


def uploads(service: Service) -> list[Path]:
    return list((service.settings.data / "uploads").iterdir())


# --- sending


def test_an_import_is_a_job_with_an_address_and_its_bytes_wait_for_a_worker(
    client: TestClient, service: Service
) -> None:
    answer = send(client, b"PK" + bytes(3_000_000), "?labels=folder&priority=7")
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert answer.headers["retry-after"] == "1"
    assert client.get(answer.headers["location"]).json() == job
    assert JobView.model_validate(job, extra="forbid").state is State.QUEUED
    assert (job["kind"], job["gallery"], job["source"], job["priority"]) == ("import", "g", "zip", 7)
    assert (job["position"], job["total"], job["cancel_requested"]) == (0, None, False)
    source = claimed(service.database).job.source
    assert {name: source[name] for name in ("kind", "labels")} == {"kind": "zip", "labels": "folder"}
    assert (service.uploads.folder / source["upload"]).read_bytes() == b"PK" + bytes(3_000_000)
    assert source["upload"] not in json.dumps(job)


def test_the_content_type_says_what_the_body_is(light: tuple[TestClient, Service]) -> None:
    client, service = light
    for content_type, kind in (
        ("application/zip", "zip"),
        ("application/x-tar", "tar"),
        ("application/gzip", "tar"),
        ("text/csv; charset=utf-8", "csv"),
        ("application/jsonl", "jsonl"),
        ("Application/X-NDJSON", "jsonl"),
    ):
        answer = send(client, b"x", content_type=content_type)
        assert (answer.status_code, answer.json()["source"]) == (202, kind)
        assert claimed(service.database).job.source["labels"] is None


def test_imports_that_cannot_be_are_refused_and_leave_nothing(light: tuple[TestClient, Service]) -> None:
    client, service = light
    for content_type in ("application/x-rar", "multipart/form-data; boundary=BB", "", "x" * 300):
        assert "application/zip" in assert_problem(send(client, content_type=content_type), 415)
    assert "the body is empty" in assert_problem(send(client, b""), 422)
    assert_problem(client.post("/v1/galleries/none/imports", content=b"x", headers=ZIP), 404, "gallery-not-found")
    for query in ("labels=x", "priority=101", "priority=x", "nonsense=1", "labels=folder&labels=folder"):
        assert query.partition("=")[0] in assert_problem(send(client, b"x", f"?{query}"), 422)
    assert "manifest" in assert_problem(send(client, b"x", "?labels=folder", content_type="text/csv"), 422)
    for key in ("a b", "x" * 129, ""):
        assert_problem(send(client, Idempotency_Key=key), 422)
    assert client.get("/v1/jobs").json()["jobs"] == []
    assert uploads(service) == []


def test_a_folder_is_imported_only_where_it_is_allowed(light: tuple[TestClient, Service], tmp_path: Path) -> None:
    client, service = light
    allowed = tmp_path / "srv"
    (tmp_path / "srv-secret").mkdir()
    (allowed / "way-out").symlink_to(tmp_path / "srv-secret")
    (allowed / "inside").symlink_to(allowed / "shop")

    def ask(**body: Any) -> Response:
        answer: Response = client.post(IMPORTS, json=body)
        return answer

    answer = ask(folder=f"{allowed}/inside/../shop/", labels="folder")
    assert (answer.status_code, answer.json()["source"]) == (202, "folder")
    assert claimed(service.database).job.source == {"kind": "folder", "folder": f"{allowed}/shop", "labels": "folder"}
    assert ask(folder=str(allowed)).status_code == 202
    assert ask(folder=f"{allowed}/inside").status_code == 202
    refusals = {
        assert_problem(ask(folder=folder), 422)
        for folder in (
            "/",
            "/etc",
            "/nothing-there",
            f"{allowed}/..",
            f"{allowed}/../srv-secret",
            f"{allowed}-secret",
            f"{allowed}/way-out",
            "shop",
            f"{allowed}/\0",
            "file:///etc",
        )
    }
    assert len(refusals) == 1, "what is there must not be told from what is not"
    assert "ROADMATCH_IMPORT_FOLDERS" in refusals.pop()
    assert "is not there" in assert_problem(ask(folder=f"{allowed}/none"), 422)
    assert_problem(ask(), 422)
    assert "extra" in assert_problem(ask(folder=str(allowed), extra=1), 422)
    assert_problem(client.post(IMPORTS, content=b"{", headers={"content-type": "application/json"}), 422)
    huge = json.dumps({"folder": "x" * 70_000})
    assert_problem(client.post(IMPORTS, content=huge, headers={"content-type": "application/json"}), 413)


def test_a_repeat_with_its_key_is_the_same_job_and_another_request_is_refused(
    client: TestClient, service: Service
) -> None:
    first = send(client, Idempotency_Key="k1")
    again = send(client, Idempotency_Key="k1")
    assert (again.status_code, again.json()) == (202, first.json())
    assert again.headers["location"] == first.headers["location"]
    assert len(uploads(service)) == 1
    client.post("/v1/galleries", json={"name": "other"})
    for other in (
        send(client, b"PK another", Idempotency_Key="k1"),
        send(client, query="?labels=folder", Idempotency_Key="k1"),
        send(client, query="?priority=1", Idempotency_Key="k1"),
        send(client, Idempotency_Key="k1", content_type="application/x-tar"),
        client.post("/v1/galleries/other/imports", content=b"PK archive", headers=ZIP | {"Idempotency-Key": "k1"}),
        client.request("DELETE", ITEMS, json={"ids": ["a"]}, headers={"Idempotency-Key": "k1"}),
    ):
        assert first.json()["id"] in assert_problem(other, 422, "idempotency-mismatch")
    assert len(uploads(service)) == 1
    assert send(client).json()["id"] != send(client).json()["id"]
    assert len(client.get("/v1/jobs").json()["jobs"]) == 3


def test_of_ten_parallel_repeats_one_makes_the_job(client: TestClient, service: Service) -> None:
    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(lambda _: send(client, Idempotency_Key="k"), range(10)))
    found = {answer.json()["id"] for answer in answers if answer.status_code == 202}
    assert {answer.status_code for answer in answers} <= {202, 503}  # more at a time than there are places
    assert len(found) == len(client.get("/v1/jobs").json()["jobs"]) == len(uploads(service)) == 1


def test_many_items_are_deleted_by_a_job(client: TestClient, service: Service) -> None:
    answer = client.request("DELETE", f"{ITEMS}?priority=-3", json={"ids": ["a", "b", "a"]})
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (job["kind"], job["source"], job["total"], job["priority"]) == ("delete", "ids", 3, -3)
    assert claimed(service.database).job.source == {"kind": "ids", "ids": ["a", "b", "a"]}
    many = [f"item-{number}" for number in range(100_000)]
    job = client.request("DELETE", ITEMS, json={"ids": many}).json()
    assert job["total"] == 100_000
    source = claimed(service.database).job.source
    assert source.keys() == {"kind", "upload"}
    assert (service.uploads.folder / source["upload"]).read_text().splitlines() == many
    for ids in ([], ["a/b"], ["x" * 129], [*many, "one-more"], "a", [1], None):
        assert_problem(client.request("DELETE", ITEMS, json={"ids": ids}), 422)
    assert_problem(client.request("DELETE", ITEMS), 422)
    assert_problem(client.request("DELETE", ITEMS, content=b'["' + b"a" * 16_000_000 + b'"]'), 413)
    assert_problem(client.request("DELETE", "/v1/galleries/none/items", json={"ids": ["a"]}), 404)


def test_an_upload_stays_as_long_as_its_job_needs_it(light: tuple[TestClient, Service]) -> None:
    client, service = light
    queued, running_, ended, lost = (send(client).json()["id"] for _ in range(4))
    files = {queue.get(service.database, job).source["upload"]: job for job in (queued, running_, ended, lost)}
    client.post(f"/v1/jobs/{ended}/cancel")
    claimed(service.database)
    client.post(f"/v1/jobs/{lost}/cancel")
    for path in uploads(service):
        os.utime(path, (1, 1))
    young = send(client).json()["id"]
    client.post(f"/v1/jobs/{young}/cancel")
    assert service.sweep_uploads() == 2
    assert {files.get(path.name, "young") for path in uploads(service)} == {queued, running_, "young"}


# --- looking


def test_jobs_are_listed_from_the_newest_in_pages_by_gallery_and_state(client: TestClient) -> None:
    client.post("/v1/galleries", json={"name": "other"})
    jobs = [send(client).json()["id"] for _ in range(5)]
    other = client.post("/v1/galleries/other/imports", content=b"x", headers=ZIP).json()["id"]
    client.post(f"/v1/jobs/{jobs[1]}/cancel")

    def listed(**query: str) -> list[str]:
        found: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            page = client.get("/v1/jobs", params={"limit": "2", **query, **cursor}).json()
            found += [job["id"] for job in page["jobs"]]
            assert len(page["jobs"]) <= 2
            if page["next_cursor"] is None:
                return found
            cursor = {"cursor": page["next_cursor"]}

    assert set(listed()) == {*jobs, other}
    assert listed() == sorted(listed(), reverse=True)
    assert set(listed(gallery="g")) == set(jobs)
    assert listed(gallery="g", state="cancelled") == [jobs[1]]
    assert listed(gallery="none") == []
    for query in ("state=lost", "gallery=a/b", "cursor=x", "limit=0", "limit=1001"):
        assert_problem(client.get(f"/v1/jobs?{query}"), 422)


def test_a_job_shows_what_became_of_its_entries_and_why_some_failed(client: TestClient, service: Service) -> None:
    job = send(client).json()["id"]
    claim = claimed(service.database)
    queue.count(service.database, claim, 20)
    broken = [Failure(number, f"a/{number}.jpg", "unreadable-image", "it is broken") for number in (1, 4, 12)]
    advance(service.database, claim, done=10, unchanged=2, failures=broken)
    shown = client.get(f"/v1/jobs/{job}").json()
    counts = [shown[name] for name in ("position", "total", "done", "unchanged", "failed")]
    assert (shown["state"], counts) == ("running", [15, 20, 10, 2, 3])
    assert shown["started_at"].endswith("Z")
    first = client.get(f"/v1/jobs/{job}/failures?limit=2").json()
    assert first["failures"][1] == {
        "position": 4,
        "name": "a/4.jpg",
        "code": "unreadable-image",
        "detail": "it is broken",
    }
    second = client.get(f"/v1/jobs/{job}/failures?limit=2&cursor={first['next_cursor']}").json()
    assert ([one["position"] for one in second["failures"]], second["next_cursor"]) == ([12], None)
    assert_problem(client.get(f"/v1/jobs/{job}/failures?cursor=eA"), 422)
    queue.finish(service.database, claim, State.FAILED, "the archive is cut off")
    ended = client.get(f"/v1/jobs/{job}").json()
    assert (ended["state"], ended["error"]) == ("failed", "the archive is cut off")
    for address in ("", "/failures", "/events"):
        assert_problem(client.get(f"/v1/jobs/none{address}"), 404, "job-not-found")
        assert_problem(client.get(f"/v1/jobs/..%2F{address}", follow_redirects=False), 404)


def test_a_job_is_cancelled_at_once_or_by_its_worker_and_one_that_ended_is_not(
    client: TestClient, service: Service
) -> None:
    queued = send(client).json()["id"]
    answer = client.post(f"/v1/jobs/{queued}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert client.post(f"/v1/jobs/{queued}/cancel").json() == answer.json()
    running_ = send(client).json()["id"]
    claim = claimed(service.database)
    answer = client.post(f"/v1/jobs/{running_}/cancel")
    assert (answer.json()["state"], answer.json()["cancel_requested"]) == ("running", True)
    queue.finish(service.database, claim, State.SUCCEEDED)
    assert running_ in assert_problem(client.post(f"/v1/jobs/{running_}/cancel"), 409, "job-finished")
    assert_problem(client.post("/v1/jobs/none/cancel"), 404, "job-not-found")


# --- following


def told(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: name, data."""
    return [(name, json.loads(data)) for name, data in re.findall(r"^event: (\w+)\ndata: (.*)\n\n", text, re.MULTILINE)]


def test_a_followed_job_tells_counts_rate_and_time_left_and_ends_with_it(light: tuple[TestClient, Service]) -> None:
    client, service = light
    job = send(client).json()["id"]
    claim = claimed(service.database)
    queue.count(service.database, claim, 200)
    answers: list[Response] = []
    follower = threading.Thread(target=lambda: answers.append(client.get(f"/v1/jobs/{job}/events")))
    follower.start()
    for _ in range(2):
        time.sleep(0.7)
        advance(service.database, claim, done=49, failures=[])
        advance(service.database, claim, unchanged=1)
    time.sleep(0.7)
    queue.finish(service.database, claim, State.CANCELLED)
    follower.join(10)
    (answer,) = answers
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    found = told(answer.text)
    assert [name for name, _ in found] == ["progress"] * (len(found) - 1) + ["end"]
    first, *_, before, last = [data for _, data in found]
    assert (first["position"], first["rate"], first["seconds_left"]) == (0, None, None)
    assert [before[name] for name in ("state", "position", "done", "unchanged", "total")] == [
        "running",
        100,
        98,
        2,
        200,
    ]
    assert 30 < before["rate"] < 110
    assert before["seconds_left"] == pytest.approx(100 / before["rate"], rel=0.05)
    assert (last["state"], last["position"]) == ("cancelled", 100)
    assert told(client.get(f"/v1/jobs/{job}/events").text) == [("end", {**last, "rate": None, "seconds_left": None})]


def test_a_silent_job_is_a_comment_now_and_then_and_a_database_that_is_away_ends_nothing(
    light: tuple[TestClient, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = light
    job = queue.get(service.database, send(client).json()["id"])

    async def follow() -> list[bytes]:
        found = []
        async for part in events(service, job, poll_s=0.01, heartbeat_s=0.05):
            found.append(part)
            service.stopping = len(found) == 4
        return found

    reads: list[bool] = []
    read = service.database.read

    def away_at_first() -> Any:
        reads.append(len(reads) > 2)
        if not reads[-1]:
            raise StoreUnavailable("the database is away: try again")
        return read()

    monkeypatch.setattr(service.database, "read", away_at_first)

    first, *rest = anyio.run(follow)
    assert first.startswith(b"event: progress\n")
    assert rest == [b": still there\n\n"] * 3
    assert any(reads)


def test_those_who_follow_are_bounded_and_leave_their_places_when_they_go(served: Served, database: Database) -> None:
    job = httpx.post(served.url + IMPORTS, content=b"x", headers=ZIP).json()["id"]
    claim = claimed(database)
    address = f"/v1/jobs/{job}/events"
    request = f"GET {address} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with contextlib.ExitStack() as open_:
        followers = [open_.enter_context(Wire(served)) for _ in range(MOST_STREAMS)]
        for follower in followers:
            follower.send(request)
            assert follower.receives(b"event: progress")
        refused = httpx.get(served.url + address)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["code"] == "service-unavailable"
        assert httpx.get(f"{served.url}/livez").status_code == 200
    deadline = time.monotonic() + 5
    while True:  # until those who left have been noticed
        with httpx.stream("GET", served.url + address) as answer:
            if answer.status_code == 200:
                break
        assert time.monotonic() < deadline
    with httpx.stream("GET", served.url + address) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: progress"
        advance(database, claim, done=1)
        began = time.monotonic()
        assert any('"position":1' in line for line in lines)
        assert time.monotonic() - began < 1.5
    queue.finish(database, claim, State.SUCCEEDED)
    assert httpx.get(served.url + address).text.startswith("event: end\n")


def test_those_who_follow_do_not_hold_up_the_end_of_the_service(bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path / "data", bundle, shutdown_s=20) as served:
        httpx.post(f"{served.url}/v1/galleries", json={"name": "g"})
        job = httpx.post(served.url + IMPORTS, content=b"x", headers=ZIP).json()["id"]
        with httpx.stream("GET", f"{served.url}/v1/jobs/{job}/events") as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: progress"
            began = time.monotonic()
            assert served.stop() == 0
            assert time.monotonic() - began < 5
            assert [line for line in lines if line.startswith("event")] == []


# --- large bodies


def test_archives_have_a_limit_of_their_own(served: Served) -> None:
    for length in (40_000_001, 5_000_000_000_000):
        with Wire(served) as wire:
            wire.send(head(length, IMPORTS).replace(b"multipart/form-data; boundary=BB", b"application/zip"))
            assert_whole_problem(wire.answer(), 413)
            assert wire.is_closed()
    before = psutil.Process(served.process.pid).memory_info().rss
    answer = httpx.post(served.url + IMPORTS, content=bytes(39_000_000), headers=ZIP)
    assert answer.status_code == 202
    assert psutil.Process(served.process.pid).memory_info().rss - before < 20_000_000
    chunked = (bytes(100_000) for _ in range(401))
    assert httpx.post(served.url + IMPORTS, content=chunked, headers=ZIP).status_code == 413
    assert httpx.post(f"{served.url}/v1/galleries", content=bytes(1_000_001)).status_code == 413
    folder = Path(psutil.Process(served.process.pid).cwd()) / "data" / "uploads"
    assert not list(folder.glob("*.part"))


def test_archives_do_not_take_the_places_of_searches(served: Served) -> None:
    one = head(1_000_000, IMPORTS).replace(b"multipart/form-data; boundary=BB", b"application/zip")
    with contextlib.ExitStack() as open_:
        senders = [open_.enter_context(Wire(served)) for _ in range(4)]
        for sender in senders:
            sender.send(one + bytes(200_000))
        wait_until_inside(served, 4)
        answer = httpx.post(f"{served.url}/v1/galleries/g/search", files={"image": picture(1)})
        assert answer.status_code == 200
        refused = httpx.post(served.url + IMPORTS, content=b"x", headers=ZIP)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        for sender in senders:
            sender.send(bytes(800_000))
            assert sender.answer()[0] == 202
    wait_until_inside(served, 0)
    assert inside(served) == 0


def test_a_deletion_of_many_takes_a_place_and_one_without_a_body_takes_none(served: Served) -> None:
    with Wire(served) as search:
        search.send(head(500) + b"-")
        wait_until_inside(served, 1)
        assert httpx.request("DELETE", f"{served.url}{ITEMS}", json={"ids": ["a"]}).status_code == 503
        assert httpx.delete(f"{served.url}{ITEMS}/none").status_code == 404
    wait_until_inside(served, 0)
    assert httpx.request("DELETE", f"{served.url}{ITEMS}", json={"ids": ["a"]}).status_code == 202


def test_an_archive_may_take_longer_than_other_bodies_as_long_as_it_goes_on(served: Served) -> None:
    one = head(900_000, IMPORTS).replace(b"multipart/form-data; boundary=BB", b"application/zip")
    with Wire(served) as steady, Wire(served) as silent, Wire(served) as dripping:
        began = time.monotonic()
        for sender in (steady, silent, dripping):
            sender.send(one)
        silent.send(bytes(600_000))  # so far ahead that only its silence can be held against it
        for _ in range(9):
            time.sleep(0.4)
            steady.send(bytes(100_000))
            with contextlib.suppress(OSError):
                dripping.send(bytes(100))
        assert steady.answer()[0] == 202
        assert time.monotonic() - began > RECEIVE_S + 1
        for sender in (silent, dripping):
            assert_whole_problem(sender.answer(), 408)
            assert time.monotonic() - began < RECEIVE_S + 4
    wait_until_inside(served, 0)


def test_a_client_that_leaves_in_the_middle_leaves_nothing(served: Served) -> None:
    folder = Path(psutil.Process(served.process.pid).cwd()) / "data" / "uploads"
    before = set(folder.iterdir())
    one = head(1_000_000, IMPORTS).replace(b"multipart/form-data; boundary=BB", b"application/zip")
    for _ in range(5):
        with Wire(served) as leaver:
            leaver.send(one + bytes(500_000))
            wait_until_inside(served, 1)
        wait_until_inside(served, 0)
    assert set(folder.iterdir()) == before
    assert "Traceback" not in served.errors()


def test_metrics_tell_what_is_in_the_queue(client: TestClient, service: Service) -> None:
    assert 'roadmatch_jobs{state="queued"} 0.0' in client.get("/metrics").text
    client.request("DELETE", ITEMS, json={"ids": ["a", "b"]})
    claim = queue.claim(service.database)
    assert claim is not None
    client.request("DELETE", ITEMS, json={"ids": ["c"]})
    with service.database.write() as connection:
        queue.advance(connection, claim, Progress(done=1, unchanged=1))
    text = client.get("/metrics").text
    for line in (
        'roadmatch_jobs{state="running"} 1.0',
        'roadmatch_jobs{state="queued"} 1.0',
        'roadmatch_job_entries_total{outcome="unchanged"} 1.0',
    ):
        assert line in text
    age = re.search(r"^roadmatch_oldest_queued_job_seconds (\S+)$", text, re.MULTILINE)
    assert age is not None
    assert 0 <= float(age[1]) < 60


def test_metrics_come_without_the_queue_while_the_database_is_away(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: Database) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(queue, "load", away)
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert "roadmatch_requests" in answer.text
    assert "roadmatch_jobs" not in answer.text
