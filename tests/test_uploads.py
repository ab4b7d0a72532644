import os
import resource
import stat
import tracemalloc
from collections.abc import AsyncIterator
from functools import partial
from hashlib import sha256
from pathlib import Path

import anyio
import pytest

from roadmatch.errors import StorageFull, StoreUnavailable
from roadmatch.jobs.uploads import FolderUploads, Upload, Uploads, open_uploads
from tests.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

DATA = bytes(range(256)) * 20_000  # more than is written at a time


@pytest.fixture
def uploads(tmp_path: Path) -> FolderUploads:
    """An empty folder of uploads that leaves no room to others."""
    return FolderUploads(tmp_path / "uploads", spare=0)


@pytest.fixture(params=["folder", "bucket"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Uploads:
    """An empty place for uploads: a folder, and a bucket."""
    if request.param == "folder":
        return FolderUploads(tmp_path / "uploads", spare=0)
    server: S3Server = request.getfixturevalue("s3")
    return open_uploads(f"s3://{server.bucket()}/shop", tmp_path)


def contents(uploads: Uploads, key: str) -> bytes | None:
    with uploads.at_hand(key, lambda: False):
        file = uploads.folder / key
        return file.read_bytes() if file.is_file() else None


async def chunks(data: bytes, size: int = 65_536) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def write(uploads: Uploads, data: bytes, size: int = 65_536) -> Upload:
    return anyio.run(lambda: uploads.write(chunks(data, size)))


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "uploads").iterdir())


@pytest.mark.parametrize("size", [1, 1_000_000, 1_000_001, len(DATA)])
def test_what_was_sent_is_kept_whole_under_its_key(either: Uploads, size: int) -> None:
    data = DATA[:70_000] if size == 1 else DATA
    upload = write(either, data, size)
    assert contents(either, upload.key) == data
    assert (upload.size, upload.sha256) == (len(data), sha256(data).hexdigest())
    either.delete(upload.key)
    either.delete(upload.key)
    assert contents(either, upload.key) is None


def test_a_file_is_for_its_owner_only(uploads: FolderUploads) -> None:
    assert stat.S_IMODE(uploads.path(write(uploads, b"x").key).stat().st_mode) == 0o600


def test_equal_uploads_have_their_own_keys_and_an_empty_one_is_one(either: Uploads) -> None:
    first, second, empty = write(either, b"x"), write(either, b"x"), write(either, b"")
    assert len({first.key, second.key, empty.key}) == 3
    assert first.sha256 == second.sha256
    assert contents(either, empty.key) == b""


def test_a_name_that_is_no_key_is_not_at_hand(either: Uploads) -> None:
    assert contents(either, "gone") is None


def test_an_upload_that_breaks_off_leaves_nothing_behind(uploads: FolderUploads, tmp_path: Path) -> None:
    async def breaking() -> AsyncIterator[bytes]:
        yield DATA
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        anyio.run(lambda: uploads.write(breaking()))
    assert files(tmp_path) == []


def test_a_cancelled_upload_leaves_nothing_behind(uploads: FolderUploads, tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield DATA
        assert len(files(tmp_path)) == 1
        await anyio.sleep(60)

    async def cancelled() -> bool:
        with anyio.move_on_after(0.2) as scope:
            await uploads.write(endless())
        return scope.cancelled_caught

    assert anyio.run(cancelled)
    assert files(tmp_path) == []


def test_an_archive_is_never_in_memory_as_a_whole(uploads: FolderUploads) -> None:
    async def much() -> AsyncIterator[bytes]:
        for _ in range(1_000):
            yield bytes(65_536)

    tracemalloc.start()
    upload = anyio.run(lambda: uploads.write(much()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert upload.size == 65_536_000
    assert peak < 6_000_000


def test_what_cannot_fit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    read: list[str] = []

    async def watched() -> AsyncIterator[bytes]:
        read.append("x")
        yield b"x"

    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    for uploads, expected in (
        (FolderUploads(tmp_path / "uploads", spare=2 * free), 0),
        (FolderUploads(tmp_path / "uploads", spare=0), 2 * free),
    ):
        with pytest.raises(StorageFull, match="no room left for the upload"):
            anyio.run(partial(uploads.write, watched(), expected=expected))
    assert files(tmp_path) == read == []


def test_a_disk_that_fills_up_on_the_way_is_said_and_leaves_nothing_behind(
    uploads: FolderUploads, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_500_000, before[1]))
    try:
        with pytest.raises(StorageFull) as raised:
            write(uploads, DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) not in str(raised.value)
    assert files(tmp_path) == []


def test_a_folder_that_is_gone_is_said(uploads: FolderUploads, tmp_path: Path) -> None:
    (tmp_path / "uploads").rmdir()
    with pytest.raises(StoreUnavailable, match="cannot be used: No such file"):
        write(uploads, b"x")


@pytest.mark.parametrize("key", ["", "../roadmatch.db", "0" * 31, "0" * 33, "0" * 32 + ".part", "G" * 32])
def test_what_is_no_key_leads_nowhere(uploads: FolderUploads, key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        uploads.path(key)
    with pytest.raises(ValueError, match="not a key"):
        uploads.delete(key)


def test_a_sweep_deletes_old_files_that_no_job_needs_and_nothing_else(uploads: FolderUploads, tmp_path: Path) -> None:
    needed, done, young = (write(uploads, b"x").key for _ in range(3))
    folder = tmp_path / "uploads"
    (folder / f"{'a' * 32}.part").write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"x")
    for path in folder.iterdir():
        if path.name != young:
            os.utime(path, (1, 1))
    assert uploads.sweep({needed}, older_than_s=60) == 2
    assert files(tmp_path) == sorted([needed, young, "notes.txt"])
    assert uploads.sweep(set(), older_than_s=60) == 1
    assert done not in files(tmp_path)
