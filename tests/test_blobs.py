"""roadmatch.blobs: pictures in a folder and in a bucket."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from roadmatch.blobs import Blobs, FolderBlobs, open_blobs
from roadmatch.errors import BlobMissing, StorageFull, StoreUnavailable
from tests.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

Open = Callable[[], Blobs]


@pytest.fixture(params=["folder", "bucket"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens one empty place for pictures again and again: a folder, and a bucket."""
    if request.param == "folder":
        return lambda: FolderBlobs(tmp_path / "blobs")
    server: S3Server = request.getfixturevalue("s3")
    address = f"s3://{server.bucket()}/shop/test"
    return lambda: open_blobs(address, tmp_path / "unused")


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def make_old(path: Path, seconds: float) -> None:
    at = path.stat().st_mtime - seconds
    os.utime(path, (at, at))


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 50_000])
def test_what_is_put_is_read(opened: Open, data: bytes) -> None:
    blobs = opened()
    key = blobs.put(data)
    assert blobs.read(key) == data
    assert opened().read(key) == data
    assert blobs.put(data) != key  # the same bytes again are another blob: each has one owner


def test_a_deleted_blob_is_gone_and_may_be_deleted_again(opened: Open) -> None:
    blobs = opened()
    key, other = blobs.put(b"picture"), blobs.put(b"other")
    blobs.delete(key)
    blobs.delete(key)
    assert list(blobs.keys_older_than(-1)) == [other]
    with pytest.raises(BlobMissing):
        blobs.read(key)


@pytest.mark.parametrize("key", ["", ".", "../../etc/passwd", "a" * 31, "a" * 33, "A" * 32, "a" * 32 + "\n", "/" * 32])
def test_a_key_cannot_leave_its_place(opened: Open, key: str) -> None:
    blobs = opened()
    for use in (blobs.read, blobs.delete):
        with pytest.raises(ValueError, match="not a key"):
            use(key)


def test_threads_put_at_once(opened: Open) -> None:
    blobs = opened()
    keys: list[str] = []
    threads = [threading.Thread(target=lambda: keys.extend(blobs.put(b"x") for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 80
    assert set(blobs.keys_older_than(-1)) == set(keys)


def test_files_are_for_their_owner_only_and_none_is_left_over(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    key = blobs.put(b"picture")
    (file,) = files(tmp_path)
    assert file == tmp_path / "blobs" / key[:2] / key[2:4] / key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "blobs").stat().st_mode) == 0o700


def test_blobs_are_listed_once_they_are_old(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    young, old = blobs.put(b"young"), blobs.put(b"old")
    make_old(next(tmp_path.rglob(old)), 100)
    assert set(blobs.keys_older_than(50)) == {old}
    assert set(blobs.keys_older_than(0)) == {young, old}


def test_leftovers_of_killed_writes_are_deleted_once_they_are_old(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    key = blobs.put(b"picture")
    leftover = next(tmp_path.rglob(key)).with_suffix(".part")
    leftover.write_bytes(b"half a pic")
    foreign = leftover.with_name("notes.txt")
    foreign.write_text("not ours")
    assert list(blobs.keys_older_than(0)) == [key]
    assert blobs.delete_temporaries(50) == 0
    make_old(leftover, 100)
    assert blobs.delete_temporaries(50) == 1
    assert {path.name for path in files(tmp_path)} == {key, "notes.txt"}


def test_a_write_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from roadmatch.blobs import FolderBlobs
from roadmatch.errors import StorageFull

blobs = FolderBlobs(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    blobs.put(bytes(300_000))
except StorageFull as error:
    assert "\\n" not in str(error) and sys.argv[1] not in str(error), error
    print(blobs.put(bytes(50_000)))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    (file,) = files(tmp_path)
    assert file.name == done.stdout.strip()
    assert issubclass(StorageFull, StoreUnavailable)


def test_a_write_killed_in_the_middle_leaves_no_blob(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from roadmatch.blobs import FolderBlobs

os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
blobs = FolderBlobs(Path(sys.argv[1]))
for level in (tuple(f"{i:02x}" for i in range(256))):
    (Path(sys.argv[1]) / level).mkdir()
blobs._make_folders = lambda folder: folder.mkdir()
blobs.put(b"picture")
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    blobs = FolderBlobs(tmp_path)
    assert list(blobs.keys_older_than(0)) == []
    assert blobs.delete_temporaries(0) == 1
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable):
        FolderBlobs(tmp_path / "file")
    blobs = FolderBlobs(tmp_path / "blobs")
    (tmp_path / "blobs").rmdir()
    with pytest.raises(StoreUnavailable):
        blobs.put(b"picture")
