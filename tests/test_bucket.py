"""Pictures and uploads in an S3 bucket: what is not the same as in a folder, and both machines of a whole import."""

import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import httpx
import pytest

from app.cli import main
from app.settings import Settings, SettingsError
from roadmatch.blobs import Blobs, bucket, bucket_of, open_blobs
from roadmatch.blobs import s3 as blobs_in_s3
from roadmatch.errors import RoadmatchError, StorageFull, StoreUnavailable
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Keep
from roadmatch.gallery.items import GalleryStore, NewImage
from roadmatch.gallery.sweep import sweep
from roadmatch.jobs import bucket_uploads
from roadmatch.jobs.bucket_uploads import BucketUploads
from roadmatch.jobs.spool import Spool
from roadmatch.jobs.uploads import Upload, Uploads
from roadmatch.store.database import open_database
from tests.bundles import picture
from tests.s3 import S3Server, s3, s3_server
from tests.service import Served, environment, start

__all__ = ["s3", "s3_server"]

PICTURES = 12
PATIENCE_S = 60.0


@pytest.fixture
def address(s3: S3Server) -> str:
    """The address of an empty bucket."""
    return f"s3://{s3.bucket()}/shop"


@pytest.fixture
def blobs(address: str, tmp_path: Path) -> Blobs:
    """An empty bucket for pictures."""
    return open_blobs(address, tmp_path / "unused")


@pytest.fixture
def uploads(address: str, tmp_path: Path) -> BucketUploads:
    """An empty bucket for uploads."""
    return BucketUploads(bucket_of(address), tmp_path / "spool", spare=0)


async def once(*data: bytes) -> AsyncIterator[bytes]:
    for one in data:
        yield one


def write(uploads: Uploads, *data: bytes) -> Upload:
    return anyio.run(lambda: uploads.write(once(*data)))


# The start


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "404 NoSuchBucket"),
        ({"AWS_ALLOW_HTTP": "false"}, "only AWS_ALLOW_HTTP=true allows"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "does not answer"),
        ({"AWS_ACCESS_KEY_ID": None}, "no credentials were found"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_one_line_at_the_start(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], said: str
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
    with pytest.raises(StoreUnavailable, match=said) as raised:
        open_blobs("s3://no-such-bucket/shop", tmp_path)
    assert "look at ROADMATCH_BLOBS and the AWS_ variables" in str(raised.value)
    assert_says_nothing_secret(raised.value, s3)


def test_refused_credentials_are_one_line_at_the_start(address: str, s3: S3Server, tmp_path: Path) -> None:
    with s3.strict(), pytest.raises(StoreUnavailable, match="403 InvalidAccessKeyId") as raised:
        open_blobs(address, tmp_path)
    assert_says_nothing_secret(raised.value, s3)


def assert_says_nothing_secret(error: RoadmatchError, s3: S3Server) -> None:
    said = str(error)
    assert "\n" not in said
    for secret in s3.environment.values():
        assert secret == "true" or secret not in said


def test_a_service_with_a_wrong_bucket_does_not_start(
    s3: S3Server, tmp_path: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", str(tmp_path / "data"), "--bundle", str(bundle), "--blobs", "s3://no-such-bucket"]
    assert main(["serve", *given]) == 1
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert "404 NoSuchBucket: look at ROADMATCH_BLOBS" in line
    assert out == ""


@pytest.mark.parametrize(
    "value", ["s3:bucket", "https://key:secret@host/bucket", "s3://UPPER", "s3://x", "s3://ab/../c"]
)
def test_an_address_that_is_none_is_refused_without_being_shown(value: str) -> None:
    with pytest.raises(SettingsError, match="ROADMATCH_BLOBS: this is no address of a bucket") as raised:
        Settings.read({}, blobs=value)
    assert value not in str(raised.value)


def test_without_its_library_the_mend_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for name in ("roadmatch.blobs.bucket", "roadmatch.blobs.s3"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(StoreUnavailable, match=r"obstore is not installed: pip install 'roadmatch\[s3\]'"):
        open_blobs("s3://bucket", tmp_path)


# Pictures


def test_pictures_and_uploads_lie_below_their_prefix(
    blobs: Blobs, uploads: Uploads, s3: S3Server, address: str
) -> None:
    picture, upload = blobs.put(b"x"), write(uploads, b"y")
    listed = s3.store(bucket_of(address).bucket).list().collect()
    assert {one["path"] for one in listed} == {f"shop/pictures/{picture}", f"shop/uploads/{upload.key}"}


def test_a_picture_is_never_put_over_another(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    first = blobs.put(b"first")
    keys = iter([first, "0" * 32])
    monkeypatch.setattr(bucket, "new_key", lambda: next(keys))
    assert blobs.put(b"second") == "0" * 32
    assert blobs.read(first) == b"first"


def test_a_bucket_that_is_gone_is_unavailable_and_not_a_lost_picture(blobs: Blobs, s3: S3Server, address: str) -> None:
    key = blobs.put(b"x")
    blobs.delete(key)
    httpx.delete(f"{s3.url}/{bucket_of(address).bucket}").raise_for_status()
    for use in (lambda: blobs.read(key), lambda: blobs.put(b"x"), lambda: list(blobs.keys_older_than(0))):
        with pytest.raises(StoreUnavailable, match="404 NoSuchBucket"):
            use()


@pytest.mark.parametrize("answer", ["507 <Code>InsufficientStorage</Code>", "403 <Code>QuotaExceeded</Code>"])
def test_a_bucket_without_room_is_full(address: str, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    with answering(int(answer[:3]), answer[4:].encode()) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(StorageFull, match="bucket of the pictures has no room left"):
            bucket.BucketBlobs(bucket_of(address)).put(b"x")


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_bucket_that_does_not_answer_is_unavailable_in_time(
    address: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert blobs_in_s3._RETRY_S + max(bucket._TIMEOUT_S, bucket_uploads._TIMEOUT_S) < 10
    monkeypatch.setattr(blobs_in_s3, "_RETRY_S", 0.1)
    monkeypatch.setattr(bucket, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(bucket_uploads, "_TIMEOUT_S", 0.3)
    blobs, uploads = bucket.BucketBlobs(bucket_of(address)), BucketUploads(bucket_of(address), tmp_path)
    key, other = blobs.put(b"x"), blobs.put(b"y")
    uses: list[Callable[[], object]] = [
        lambda: blobs.put(b"x"),
        lambda: blobs.read(key),
        lambda: blobs.delete(key),
        lambda: list(blobs.keys_older_than(0)),
        lambda: write(uploads, b"x"),
        lambda: uploads.sweep(set(), 0),
    ]
    with s3.frozen():
        for use in uses:
            started = time.monotonic()
            with pytest.raises(StoreUnavailable, match="does not answer"):
                use()
            assert time.monotonic() - started < 2.0
    assert blobs.read(other) == b"y"


def test_more_keys_than_a_page_holds_are_listed(blobs: Blobs, s3: S3Server, address: str) -> None:
    store = s3.store(bucket_of(address).bucket)
    keys = {f"{number:032x}" for number in range(1_001)}
    for key in keys:
        store.put(f"shop/pictures/{key}", b"")
    store.put("shop/pictures/notes.txt", b"not ours")
    assert set(blobs.keys_older_than(-1)) == keys
    assert list(blobs.keys_older_than(60)) == []


def test_a_sweep_deletes_pictures_that_no_row_names(
    sqlite_url: str, blobs: Blobs, make_image: Callable[[object], NewImage]
) -> None:
    with closing(open_database(sqlite_url)) as database:
        store = GalleryStore(database, blobs)
        gallery = galleries.create(database, "g", bundle="small@0123456789ab", rule="max_f1", keep=Keep.ORIGINAL)
        put = items.put(store, gallery, "item", label=None, metadata={}, images=[make_image(1)])
        orphan = blobs.put(b"orphan")
        assert sweep(store, grace_s=60) == 0
        assert sweep(store, grace_s=-1) == 1
    assert list(blobs.keys_older_than(-1)) == [put.item.images[0].blob] != [orphan]


# Uploads


def test_an_upload_that_breaks_off_or_is_cancelled_leaves_nothing_in_the_bucket(
    uploads: BucketUploads, s3: S3Server, address: str
) -> None:
    begun = []

    async def half() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(1_000_000)
        begun.append(await anyio.to_thread.run_sync(s3.unfinished, name))

    async def breaking() -> AsyncIterator[bytes]:
        async for block in half():
            yield block
        raise ConnectionResetError

    async def endless(scope: anyio.CancelScope) -> AsyncIterator[bytes]:
        async for block in half():
            yield block
        scope.cancel()
        await anyio.sleep(60)

    async def cancelled() -> None:
        with anyio.CancelScope() as scope:
            await uploads.write(endless(scope))

    name = bucket_of(address).bucket
    with pytest.raises(ConnectionResetError):
        anyio.run(lambda: uploads.write(breaking()))
    anyio.run(cancelled)
    assert begun == [1, 1]
    assert s3.unfinished(name) == 0
    assert s3.store(name).list().collect() == []


def test_an_upload_that_fails_on_the_way_says_so(uploads: BucketUploads, s3: S3Server, address: str) -> None:
    async def losing() -> AsyncIterator[bytes]:
        yield bytes(1_000_000)
        await anyio.to_thread.run_sync(httpx.delete, f"{s3.url}/{bucket_of(address).bucket}")
        for _ in range(50):
            yield bytes(1_000_000)

    with pytest.raises(StoreUnavailable, match="404 NoSuchBucket"):
        anyio.run(lambda: uploads.write(losing()))


def test_an_upload_and_its_copy_are_never_in_memory_as_a_whole(address: str, s3: S3Server, tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
import anyio
from roadmatch.blobs import bucket_of
from roadmatch.jobs.bucket_uploads import BucketUploads

async def much():
    for _ in range(1500):
        yield bytes(65_536)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

async def one():
    yield b"x"

uploads = BucketUploads(bucket_of(sys.argv[1]), Path(sys.argv[2]))
anyio.run(uploads.write, one())
before = peak()
upload = anyio.run(uploads.write, much())
with uploads.at_hand(upload.key, lambda: False):
    assert (uploads.folder / upload.key).stat().st_size == upload.size == 98_304_000
print(peak() - before)
"""
    command = [sys.executable, "-c", code, address, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64_000_000


def test_a_sweep_deletes_uploads_that_no_job_needs(uploads: BucketUploads) -> None:
    needed, done = (write(uploads, b"x").key for _ in range(2))
    assert uploads.sweep({needed}, older_than_s=60) == 0
    assert uploads.sweep({needed}, older_than_s=-1) == 1
    with uploads.at_hand(needed, lambda: False):
        assert [path.name for path in uploads.folder.iterdir()] == [needed]
    with uploads.at_hand(done, lambda: False):
        assert list(uploads.folder.iterdir()) == []


# Copies


def test_a_copy_is_there_only_as_long_as_it_is_needed(uploads: BucketUploads, tmp_path: Path) -> None:
    upload = write(uploads, b"x")
    with uploads.at_hand(upload.key, lambda: False) as whole:
        assert whole
        assert (uploads.folder / upload.key).read_bytes() == b"x"
    with uploads.at_hand(upload.key, lambda: True) as whole:
        assert not whole
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_copy_that_does_not_fit_is_not_begun(uploads: BucketUploads, address: str, tmp_path: Path) -> None:
    upload, disk = write(uploads, b"x"), os.statvfs(tmp_path)
    full = BucketUploads(bucket_of(address), tmp_path / "spool", spare=2 * disk.f_bavail * disk.f_frsize)
    with pytest.raises(StorageFull, match="no room left for a copy"), full.at_hand(upload.key, lambda: False):
        pass
    assert list((tmp_path / "spool").iterdir()) == []


def test_copies_of_killed_processes_are_deleted_at_the_next_start_and_no_others(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from roadmatch.jobs.spool import Spool

spool = Spool(Path(sys.argv[1]))
with spool.opened():
    (spool.folder / "copy").write_bytes(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == -signal.SIGKILL
    (dead,) = tmp_path.iterdir()
    assert (dead / "copy").exists()
    living = Spool(tmp_path)
    with living.opened():
        Spool(tmp_path)
        assert list(tmp_path.iterdir()) == [living.folder]


# Two machines


class Elsewhere:
    """A service without workers and a worker that shares its database and its bucket, and no folder."""

    def __init__(self, tmp_path: Path, bundle: Path, address: str) -> None:
        self.folder, self.bundle = tmp_path / "elsewhere", bundle
        self.shared = {"database": f"sqlite:///{tmp_path / 'shared.db'}", "blobs": address}

    def service(self, data: Path) -> Served:
        served = start(data, self.bundle, workers=0, **self.shared)
        httpx.post(f"{served.url}/v1/galleries", json={"name": "g"}).raise_for_status()
        return served

    @contextmanager
    def worker(self) -> Iterator["subprocess.Popen[bytes]"]:
        given = environment(self.folder, self.bundle, **self.shared)
        process = subprocess.Popen([sys.executable, "-m", "worker"], env=given, cwd=self.folder.parent)
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0


def archive() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as zipped:
        for number in range(PICTURES):
            zipped.writestr(f"{number:02}.png", picture(number, side=32))
    return held.getvalue()


def send(url: str) -> str:
    return str(send_archive(url).raise_for_status().json()["id"])


def send_archive(url: str) -> httpx.Response:
    headers = {"Content-Type": "application/zip"}
    return httpx.post(f"{url}/v1/galleries/g/imports", content=archive(), headers=headers, timeout=30)


def put(url: str) -> httpx.Response:
    files = {"image": picture(1, side=32)}
    return httpx.put(f"{url}/v1/galleries/g/items/one", files=files, timeout=30)


def ended(url: str, job_id: str) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE_S
    while True:
        job: dict[str, Any] = httpx.get(f"{url}/v1/jobs/{job_id}").raise_for_status().json()
        if job["state"] not in ("queued", "running"):
            return job
        assert time.monotonic() < end, job
        time.sleep(0.1)


def test_a_worker_elsewhere_imports_what_the_service_was_sent(
    address: str, s3: S3Server, tmp_path: Path, bundle: Path
) -> None:
    elsewhere = Elsewhere(tmp_path, bundle, address)
    service = elsewhere.service(tmp_path / "data")
    try:
        with elsewhere.worker():
            job = ended(service.url, send(service.url))
            assert (job["state"], job["done"], job["failed"]) == ("succeeded", PICTURES, 0)
        asked = {"image": picture(7, side=32)}
        found = httpx.post(f"{service.url}/v1/galleries/g/search", files=asked).json()["matches"][0]
        kept = httpx.get(f"{service.url}/v1/galleries/g/images/{found['image']}").raise_for_status()
        assert kept.headers["content-type"].startswith("image/")
    finally:
        assert service.stop() == 0
    names = [one["path"] for one in s3.store(bucket_of(address).bucket).list().collect()]
    assert len([name for name in names if name.startswith("shop/pictures/")]) == PICTURES
    assert [name for name in names if name.startswith("shop/uploads/")] == []
    for data in (tmp_path / "data", tmp_path / "elsewhere"):
        assert [path for path in data.rglob("*") if path.is_file() and not path.name.startswith(".")] == []


@pytest.mark.faults
def test_while_the_bucket_is_away_writes_are_503_and_the_job_waits_and_goes_on(
    address: str, s3: S3Server, tmp_path: Path, bundle: Path
) -> None:
    elsewhere = Elsewhere(tmp_path, bundle, address)
    service = elsewhere.service(tmp_path / "data")
    try:
        with elsewhere.worker() as worker:
            assert ended(service.url, send(service.url))["done"] == PICTURES
            worker.send_signal(signal.SIGSTOP)
            job_id = send(service.url)
            with s3.frozen():
                worker.send_signal(signal.SIGCONT)
                for use in (put, send_archive):
                    started = time.monotonic()
                    answer = use(service.url)
                    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1"), answer.text
                    assert time.monotonic() - started < 10
                assert httpx.get(f"{service.url}/v1/jobs/{job_id}").json()["state"] in ("queued", "running")
            assert ended(service.url, job_id)["unchanged"] == PICTURES
            assert worker.poll() is None
    finally:
        service.stop()
