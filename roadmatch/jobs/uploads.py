"""Uploaded archives and manifests: kept as they arrive, until no job needs them."""

import errno
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread

from roadmatch.blobs import bucket_of, disk_failures
from roadmatch.blobs.keys import checked, is_key, new_key

T = TypeVar("T")
_PART = ".part"
_BLOCK = 1_000_000
"""Bytes that are written at a time: each write is a thread's turn."""
_SYNC_EVERY = 64_000_000
"""Bytes: the last fsync of an archive, for which its sender waits, has no more than this to do."""


@dataclass(frozen=True)
class Upload:
    """What was written: its key, the sha256 of its bytes in hex, how many there are."""

    key: str
    sha256: str
    size: int


class Uploads(Protocol):
    """Where uploads are kept, under random keys."""

    @property
    def folder(self) -> Path:
        """Where those lie that are at hand, each under its key."""

    async def write(self, chunks: AsyncIterator[bytes], *, expected: int = 0) -> Upload:
        """Keep what comes, durably; what is not complete leaves nothing behind.

        expected: bytes that are announced. Raises StorageFull, also before anything came where it cannot fit,
        StoreUnavailable, and what `chunks` raises.
        """

    def at_hand(self, key: str, given_up: Callable[[], bool]) -> AbstractContextManager[bool]:
        """In the block a file of `folder` is the upload, if it is kept at all -> False where it was given up.

        given_up: asked now and then while it is fetched. Raises StorageFull, StoreUnavailable.
        """

    def delete(self, key: str) -> None:
        """Delete the bytes of a key, if they are there; raises StoreUnavailable."""

    def sweep(self, known: Set[str], older_than_s: float) -> int:
        """Delete what no job needs and what was left unfinished -> how many; raises StoreUnavailable.

        known: keys that jobs need, asked for before this. older_than_s: age below which an upload stays, because its
        job is committed after it.
        """


def open_uploads(address: str, data: Path) -> Uploads:
    """Uploads in the bucket of that address, or in the data folder where it is empty. Raises StoreUnavailable.

    The bucket is one that pictures are in: it was tried out.
    """
    if not address:
        return FolderUploads(data / "uploads")
    from roadmatch.jobs.bucket_uploads import BucketUploads  # needs a package that few have

    return BucketUploads(bucket_of(address), data / "spool")


class FolderUploads:
    """Files of a folder under random keys, readable by their owner only."""

    def __init__(self, folder: Path, *, spare: int = 200_000_000) -> None:
        """folder: made if it is not there; spare: bytes of its disk that are left to the database and the pictures.

        Raises StoreUnavailable.
        """
        self.folder = folder
        self._spare = spare
        with _failures():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def write(self, chunks: AsyncIterator[bytes], *, expected: int = 0) -> Upload:
        """Keep what comes, durably; raises StorageFull, StoreUnavailable, and what `chunks` raises."""
        key = new_key()
        file = await _in_a_thread(partial(_File, self.path(key), self._spare, expected))
        try:
            held = bytearray()
            async for chunk in chunks:
                held += chunk
                if len(held) >= _BLOCK:
                    await _in_a_thread(partial(file.add, held))
                    held = bytearray()
            await _in_a_thread(partial(file.add, held))
            await _in_a_thread(file.finish)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _in_a_thread(file.abandon)
            raise
        return Upload(key, file.digest.hexdigest(), file.size)

    def path(self, key: str) -> Path:
        """Where the bytes of a key lie. Raises ValueError for what is no key."""
        return self.folder / checked(key, "an upload")

    @contextmanager
    def at_hand(self, key: str, given_up: Callable[[], bool]) -> Iterator[bool]:  # noqa: ARG002
        """It is there already."""
        yield True

    def delete(self, key: str) -> None:
        """Delete the bytes of a key, if they are there; raises StoreUnavailable."""
        with _failures():
            self.path(key).unlink(missing_ok=True)

    def sweep(self, known: Set[str], older_than_s: float) -> int:
        """Delete what no job needs and what was left unfinished -> how many; raises StoreUnavailable."""
        youngest, count = time.time() - older_than_s, 0
        with _failures():
            for path in self.folder.iterdir():
                ours = is_key(path.name.removesuffix(_PART))
                with suppress(FileNotFoundError):  # renamed or deleted meanwhile
                    if ours and path.name not in known and path.stat().st_mtime <= youngest:
                        path.unlink()
                        count += 1
        return count


class _File:
    """A file that is being written; whole under its name only once it is finished."""

    def __init__(self, path: Path, spare: int, expected: int) -> None:
        self.digest = hashlib.sha256()
        self.size = self._synced = 0
        self._path, self._part, self._spare = path, path.with_name(path.name + _PART), spare
        with _failures():
            self._check_room(expected)
            self._opened = open(self._part, "xb", buffering=0, opener=partial(os.open, mode=0o600))  # noqa: SIM115

    def add(self, data: bytes | bytearray) -> None:
        self.digest.update(data)
        with _failures():
            left = memoryview(data)
            while left:
                left = left[self._opened.write(left) :]
            self.size += len(data)
            if self.size - self._synced >= _SYNC_EVERY:
                os.fdatasync(self._opened.fileno())
                self._synced = self.size
                self._check_room(0)

    def finish(self) -> None:
        with _failures():
            os.fsync(self._opened.fileno())
            self._part.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            self._opened.close()

    def abandon(self) -> None:
        with suppress(OSError):
            self._opened.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)

    def _check_room(self, needed: int) -> None:
        disk = os.statvfs(self._path.parent)
        if disk.f_bavail * disk.f_frsize < needed + self._spare:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_failures = partial(disk_failures, "uploads", "no room left for the upload: free some, or send it in parts")


async def _in_a_thread(work: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(work)
