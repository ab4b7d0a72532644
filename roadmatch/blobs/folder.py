"""Pictures as files of a folder."""

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from roadmatch.blobs.keys import checked, is_key, new_key
from roadmatch.errors import BlobMissing, StorageFull, StoreUnavailable

_TEMPORARY = re.compile(r"[0-9a-f]{32}\.part")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FolderBlobs:
    """Blobs as files of a folder, two levels of folders deep, readable by their owner only."""

    def __init__(self, folder: Path) -> None:
        """folder: made if it is not there; raises StoreUnavailable."""
        self._folder = folder
        with _failures():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, data: bytes) -> str:
        """Keep the bytes, durably -> their key, 128 random bits in hex; raises StorageFull, StoreUnavailable."""
        key = new_key()
        self.put_as(key, data)
        return key

    def put_as(self, key: str, data: bytes) -> None:
        """Keep the bytes under the key that they had elsewhere, durably; raises StorageFull, StoreUnavailable."""
        path = self._path(key)
        temporary = path.with_suffix(".part")
        with _failures():
            self._make_folders(path.parent)
            try:
                _write(temporary, data)
                temporary.replace(path)
                _fsync_folder(path.parent)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                    path.unlink(missing_ok=True)
                raise

    def read(self, key: str) -> bytes:
        """The bytes of a key; raises BlobMissing, StoreUnavailable."""
        with _failures():
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError as error:
                raise BlobMissing(f"the kept picture {key} is not in its folder") from error

    def delete(self, key: str) -> None:
        """Delete the bytes of a key, if they are there; raises StoreUnavailable."""
        with _failures():
            self._path(key).unlink(missing_ok=True)

    def keys_older_than(self, seconds: float) -> Iterator[str]:
        """Keys that were put at least so long ago, in no particular order."""
        return (path.name for path in self._files_older_than(seconds) if is_key(path.name))

    def delete_temporaries(self, seconds: float) -> int:
        """Delete what writes left unfinished at least so long ago -> how many."""
        count = 0
        for path in self._files_older_than(seconds):
            if _TEMPORARY.fullmatch(path.name):
                with _failures():
                    path.unlink(missing_ok=True)
                count += 1
        return count

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key[2:4] / checked(key, "a blob")

    def _make_folders(self, folder: Path) -> None:
        """folder: of the second level; a new one outlasts a power cut only once its parent is synced."""
        for level in (folder.parent, folder):
            try:
                level.mkdir(mode=0o700)
            except FileExistsError:
                continue
            _fsync_folder(level.parent)

    def _files_older_than(self, seconds: float) -> Iterator[Path]:
        youngest = time.time() - seconds
        with _failures():
            for folder in self._folder.glob("[0-9a-f][0-9a-f]/[0-9a-f][0-9a-f]"):
                for path in folder.iterdir():
                    with suppress(FileNotFoundError):  # renamed or deleted meanwhile
                        if path.stat().st_mtime <= youngest:
                            yield path


@contextmanager
def disk_failures(folder: str, full: str) -> Iterator[None]:
    """Failures of a disk as errors of ours, without paths. folder: what is in it; full: what to say without room."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(full) from error
        raise StoreUnavailable(f"the folder of the {folder} cannot be used: {error.strerror}") from error


_failures = partial(disk_failures, "pictures", "no room left for pictures: free some and try again")


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
