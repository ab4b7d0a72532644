import shutil
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psycopg
import pytest
from sqlalchemy import make_url

from tests.bundles import edited, picture
from tests.postgres import PostgresServer
from tests.service import Served, refused, running

ROUNDS = 40


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def pair(
    request: pytest.FixtureRequest, bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of two processes on one database and one data folder."""
    database = ""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE pair")
        database = make_url(server.url()).set(database="pair").render_as_string(hide_password=False)
    data = tmp_path_factory.mktemp("pair") / "data"
    with (
        running(data, bundle, cpus=1, database=database) as first,
        running(data, bundle, cpus=1, database=database) as second,
        httpx.Client(base_url=first.url) as one,
        httpx.Client(base_url=second.url) as other,
    ):
        yield one, other


@pytest.fixture
def two(pair: tuple[httpx.Client, httpx.Client]) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """The pair with an empty gallery g."""
    pair[0].post("/v1/galleries", json={"name": "g"}).raise_for_status()
    yield pair
    pair[1].delete("/v1/galleries/g").raise_for_status()


def add(client: httpx.Client, item: str, seed: int) -> None:
    client.put(f"/v1/galleries/g/items/{item}", files={"image": picture(seed, side=48)}).raise_for_status()


def found(client: httpx.Client, seed: int) -> list[str]:
    """Items that match the picture, best first."""
    answer = client.post("/v1/galleries/g/search", files={"image": picture(seed, side=48)})
    answer.raise_for_status()
    return [match["item"] for match in answer.json()["matches"]]


def test_each_of_two_processes_finds_at_once_what_the_other_has_acknowledged(
    two: tuple[httpx.Client, httpx.Client],
) -> None:
    for number in range(ROUNDS):
        writer, reader = two if number % 2 else two[::-1]
        add(writer, f"i{number}", number)
        assert found(reader, number)[:1] == [f"i{number}"]
        if number % 4 == 3:
            gone = number - 2
            writer.delete(f"/v1/galleries/g/items/i{gone}").raise_for_status()
            assert f"i{gone}" not in found(reader, gone)
            assert f"i{gone}" not in found(writer, gone)
        if number % 10 == 9:
            add(writer, "changing", 1_000 + number)
            assert found(reader, 1_000 + number)[:1] == ["changing"]
            assert "changing" not in found(reader, 990 + number)
    sizes = {client.get("/v1/galleries/g").json()["items"] for client in two}
    assert sizes == {ROUNDS - ROUNDS // 4 + 1}


def test_a_deleted_item_is_in_no_search_that_began_after_its_delete(two: tuple[httpx.Client, httpx.Client]) -> None:
    one, other = two
    for number in range(12):
        add(one, f"i{number}", number)
    deleted_at: dict[int, float] = {}
    failures: list[str] = []
    done = threading.Event()

    def search() -> None:
        with httpx.Client(base_url=other.base_url) as own:
            while not done.is_set():
                for number in range(12):
                    began = time.monotonic()
                    if f"i{number}" in found(own, number) and began > deleted_at.get(number, float("inf")):
                        failures.append(f"i{number} came back")

    searchers = [threading.Thread(target=search) for _ in range(2)]
    for searcher in searchers:
        searcher.start()
    for number in range(12):
        one.delete(f"/v1/galleries/g/items/i{number}").raise_for_status()
        deleted_at[number] = time.monotonic()
        time.sleep(0.02)
    time.sleep(0.1)
    done.set()
    for searcher in searchers:
        searcher.join()
    assert failures == []


def test_a_gallery_deleted_and_made_again_by_one_process_is_new_to_the_other(
    two: tuple[httpx.Client, httpx.Client],
) -> None:
    one, other = two
    add(one, "old", 1)
    assert found(other, 1) == ["old"]
    one.delete("/v1/galleries/g").raise_for_status()
    assert other.post("/v1/galleries/g/search", files={"image": picture(1)}).status_code == 404
    one.post("/v1/galleries", json={"name": "g"}).raise_for_status()
    assert found(other, 1) == []
    add(other, "new", 2)
    assert found(one, 2) == ["new"]


# --- stopping and starting


def test_sigterm_lets_requests_in_flight_finish_and_ends_with_0(bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path / "data", bundle) as served:
        httpx.post(f"{served.url}/v1/galleries", json={"name": "g"}).raise_for_status()
        half_sent = half_a_put(served, "late")
        pictures = [[("image", picture(100 * number + k)) for k in range(20)] for number in range(4)]
        with ThreadPoolExecutor(4) as threads:
            others = [threads.submit(slow_put, served, n, files) for n, files in enumerate(pictures)]
            while "admitted_requests 5.0" not in httpx.get(f"{served.url}/metrics").text:
                assert not any(other.done() for other in others), "too fast to be caught in flight"
            stop_with_five_in_flight(served, half_sent)
            assert [other.result() for other in others] == [201] * 4
        assert served.errors() == ""
        served.stop()
    with running(tmp_path / "data", bundle) as again:
        items = httpx.get(f"{again.url}/v1/galleries/g/items").json()["items"]
        assert sorted(item["id"] for item in items) == ["i0", "i1", "i2", "i3", "late"]


def stop_with_five_in_flight(served: Served, half_sent: tuple[socket.socket, bytes]) -> None:
    started = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    wait_until_refused(served)
    assert served.process.poll() is None
    connection, rest = half_sent
    connection.sendall(rest)
    assert connection.recv(100).startswith(b"HTTP/1.1 201")
    connection.close()
    assert served.process.wait(20) == 0
    assert time.monotonic() - started < 20


def half_a_put(served: Served, item: str) -> tuple[socket.socket, bytes]:
    """A request whose second half is still to be sent."""
    head = b'--BB\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
    body = head + picture(77) + b"\r\n--BB--\r\n"
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    lines = [f"PUT /v1/galleries/g/items/{item} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: multipart/form-data; boundary=BB", "", ""]
    connection.sendall("\r\n".join(lines).encode() + body[:500])
    return connection, body[500:]


def slow_put(served: Served, number: int, files: list[tuple[str, bytes]]) -> int:
    return httpx.put(f"{served.url}/v1/galleries/g/items/i{number}", files=files, timeout=20).status_code


def wait_until_refused(served: Served) -> None:
    """Until nobody can connect any more."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", served.port), timeout=1).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    raise AssertionError("the service still accepts connections")


def test_sigterm_does_not_wait_for_ever_for_a_client_that_sends_no_more(bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path / "data", bundle, shutdown_s=1, receive_s=60) as served:
        httpx.post(f"{served.url}/v1/galleries", json={"name": "g"}).raise_for_status()
        connection, _ = half_a_put(served, "never")
        time.sleep(0.2)
        started = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - started < 5
        connection.close()


def test_ctrl_c_ends_it_in_order(bundle: Path, tmp_path: Path) -> None:
    with running(tmp_path / "data", bundle) as served:
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(20) in (0, 130)
        assert served.errors() == ""
        served.stop()


def test_a_second_start_on_the_same_data_finds_all(bundle: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, bundle) as served:
        client = httpx.Client(base_url=served.url)
        client.post("/v1/galleries", json={"name": "g"}).raise_for_status()
        for number in range(10):
            add(client, f"i{number}", number)
        client.delete("/v1/galleries/g/items/i3")
        asked = {"image": edited(picture(5, side=48))}
        before = client.post("/v1/galleries/g/search", files=asked).json()
        listed = client.get("/v1/galleries/g/items").json()
        served.stop()
        client.close()
    for _ in range(2):
        with running(data, bundle) as served, httpx.Client(base_url=served.url) as client:
            after = client.post("/v1/galleries/g/search", files=asked).json()
            assert after == before
            assert client.get("/v1/galleries/g/items").json() == listed
            assert found(client, 3) == []
            url = listed["items"][0]["images"][0]["url"]
            assert client.get(url).status_code == 200


# --- refusing to start


def test_a_bundle_with_one_changed_byte_is_refused_by_the_name_of_the_file(bundle: Path, tmp_path: Path) -> None:
    files = sorted(path.name for path in bundle.iterdir() if path.name != "manifest.json")
    assert "embedder.onnx" in files
    for name in files:
        copy = tmp_path / "copy"
        shutil.copytree(bundle, copy)
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        ended = refused(tmp_path / "data", copy)
        assert ended.returncode == 1
        assert one_line(ended.stderr)
        assert name in ended.stderr
        assert ended.stdout == ""
        shutil.rmtree(copy)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"bundels": "x"}, "ROADMATCH_BUNDELS"),
        ({"queue": "-1"}, "ROADMATCH_QUEUE"),
        ({"receive_s": "nan"}, "ROADMATCH_RECEIVE_S"),
        ({"host": "0.0.0.0"}, "ROADMATCH_ALLOW_OPEN"),
        ({"host": "::"}, "ROADMATCH_ALLOW_OPEN"),
        ({"host": ""}, "ROADMATCH"),
        ({"database": "mysql://root:hidden@x/y"}, "mysql"),
        ({"database": "postgresql://root:hidden@127.0.0.1:1/y"}, "database"),
        ({"bundles": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_one_line(
    bundle: Path, tmp_path: Path, settings: dict[str, str], told: str
) -> None:
    ended = refused(tmp_path / "data", bundle, **settings)
    assert ended.returncode == 1
    assert one_line(ended.stderr)
    assert told in ended.stderr
    assert "hidden" not in ended.stderr


def test_a_port_in_use_is_one_line_and_leaves_the_other_process_alone(bundle: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = refused(tmp_path / "data", bundle, port=port)
        assert ended.returncode == 1
        assert one_line(ended.stderr)
        assert str(port) in ended.stderr


def test_files_that_are_no_database_are_one_line(bundle: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "roadmatch.db").write_bytes(b"this is no database" * 100)
    ended = refused(data, bundle)
    assert ended.returncode == 1
    assert one_line(ended.stderr)
    assert (data / "roadmatch.db").read_bytes() == b"this is no database" * 100


def test_a_database_of_a_newer_version_is_one_line(bundle: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data, bundle) as served:
        served.stop()
    with sqlite3.connect(data / "roadmatch.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    ended = refused(data, bundle)
    assert ended.returncode == 1
    assert one_line(ended.stderr)


def one_line(text: str) -> bool:
    return text.startswith("roadmatch: ") and text.count("\n") == 1 and text.endswith("\n")
