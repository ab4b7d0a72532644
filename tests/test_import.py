"""Imports from end to end: the service, its worker process, and the command line."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.bundles import picture
from tests.service import Served, start

ROOT = Path(__file__).parents[1]
COUNT = 30
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def archive() -> bytes:
    """A zip of thirty pictures and one that is none."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as zipped:
        for number in range(COUNT):
            zipped.writestr(f"shop/{number:02}.png", picture(number, side=32))
        zipped.writestr("shop/notes.txt", "not a picture")
    return held.getvalue()


@pytest.fixture
def served(tmp_path: Path, bundle: Path) -> Iterator[Served]:
    """A running service with an empty gallery."""
    service = start(tmp_path / "data", bundle)
    httpx.post(f"{service.url}/v1/galleries", json={"name": "g"}).raise_for_status()
    yield service
    service.stop()


def send(service: Served, archive: bytes, **headers: str) -> dict[str, Any]:
    answer = httpx.post(
        f"{service.url}/v1/galleries/g/imports",
        params={"labels": "folder"},
        content=archive,
        headers={"Content-Type": "application/zip", **headers},
    )
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    assert answer.headers["Location"] == f"/v1/jobs/{job['id']}"
    return job


def ended(service: Served, job_id: str) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE_S
    while True:
        job: dict[str, Any] = httpx.get(f"{service.url}/v1/jobs/{job_id}").raise_for_status().json()
        if job["state"] not in ("queued", "running"):
            return job
        assert time.monotonic() < end, job
        time.sleep(0.1)


def worker_of(service: Served) -> psutil.Process:
    end = time.monotonic() + PATIENCE_S
    while True:
        for child in psutil.Process(service.process.pid).children():
            if "worker" in child.cmdline():
                return child
        assert time.monotonic() < end
        time.sleep(0.02)


def decision(service: Served, number: int) -> str:
    files = {"image": picture(number, side=32)}
    answer = httpx.post(f"{service.url}/v1/galleries/g/search", files=files).raise_for_status().json()
    return str(answer["matches"][0]["item"]) if answer["matches"] else ""


def test_an_archive_goes_in_and_is_found(served: Served, archive: bytes) -> None:
    job = ended(served, send(served, archive)["id"])
    assert (job["state"], job["done"], job["failed"], job["total"]) == ("succeeded", COUNT, 1, COUNT + 1)
    assert decision(served, 7) == "shop-07.png" or decision(served, 7).startswith("shop-07.png-")
    failures = httpx.get(f"{served.url}/v1/jobs/{job['id']}/failures").json()["failures"]
    assert [one["name"] for one in failures] == ["shop/notes.txt"]


def test_the_upload_is_gone_when_its_job_has_ended(served: Served, archive: bytes, tmp_path: Path) -> None:
    ended(served, send(served, archive)["id"])
    time.sleep(0.2)
    assert list((tmp_path / "data" / "uploads").iterdir()) == []


@pytest.mark.faults
def test_a_killed_worker_costs_nothing_but_time(served: Served, archive: bytes, tmp_path: Path) -> None:
    job = send(served, archive)
    worker_of(served).send_signal(signal.SIGKILL)
    with _database(tmp_path / "data") as connection:  # the lease would run out in half a minute
        connection.execute("UPDATE jobs SET lease_until = 0 WHERE state = 'running'")
    done = ended(served, job["id"])
    assert (done["done"], done["failed"]) == (COUNT, 1)
    listed = httpx.get(f"{served.url}/v1/galleries/g/items", params={"limit": 1000}).json()["items"]
    assert len(listed) == COUNT


def _database(data: Path) -> Any:
    import sqlite3
    from contextlib import closing

    return closing(sqlite3.connect(data / "roadmatch.db", isolation_level=None, timeout=10))


def test_a_service_that_is_stopped_takes_its_worker_with_it_and_goes_on_later(
    tmp_path: Path, bundle: Path, archive: bytes
) -> None:
    service = start(tmp_path / "data", bundle)
    httpx.post(f"{service.url}/v1/galleries", json={"name": "g"}).raise_for_status()
    job = send(service, archive)
    worker = worker_of(service)
    assert service.stop() == 0
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    again = start(tmp_path / "data", bundle)
    try:
        assert ended(again, job["id"])["done"] == COUNT
    finally:
        again.stop()


def test_a_worker_ends_with_a_service_that_is_killed(tmp_path: Path, bundle: Path, archive: bytes) -> None:
    service = start(tmp_path / "data", bundle)
    httpx.post(f"{service.url}/v1/galleries", json={"name": "g"}).raise_for_status()
    send(service, archive)
    worker = worker_of(service)
    service.kill()
    worker.wait(20)


def test_a_service_without_workers_leaves_jobs_to_others(tmp_path: Path, bundle: Path, archive: bytes) -> None:
    service = start(tmp_path / "data", bundle, workers=0)
    try:
        httpx.post(f"{service.url}/v1/galleries", json={"name": "g"}).raise_for_status()
        job = send(service, archive)
        time.sleep(1.5)
        assert psutil.Process(service.process.pid).children() == []
        state = httpx.get(f"{service.url}/v1/jobs/{job['id']}").json()["state"]
        assert state == "queued"
        cancelled = httpx.post(f"{service.url}/v1/jobs/{job['id']}/cancel").json()
        assert cancelled["state"] == "cancelled"
    finally:
        service.stop()


def test_the_command_line_imports_a_folder_and_says_what_failed(served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.png").write_bytes(picture(number, side=32))
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    command = [sys.executable, "-m", "app.cli", "import", str(folder), "--gallery", "new", "--url", served.url]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "broken.png" in done.stdout + done.stderr
    (folder / "broken.png").unlink()
    done = subprocess.run([*command, "--json"], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout.splitlines()[-1])
    assert (job["state"], job["unchanged"]) == ("succeeded", 5)
