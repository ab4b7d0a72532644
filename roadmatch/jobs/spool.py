"""A folder of this process's own, for files that lie elsewhere and are read by position."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from roadmatch.blobs import disk_failures
from roadmatch.blobs.keys import is_key, new_key
from roadmatch.errors import StorageFull

_FULL = "no room left for a copy of the upload: free some, and the job goes on"


class Spool:
    """Its folder is there while something lies in it, locked; what killed processes left is deleted at the start."""

    def __init__(self, root: Path, *, spare: int = 200_000_000) -> None:
        """root: where each process has its folder. spare: bytes of the disk that are left to others.

        Raises StoreUnavailable.
        """
        self.folder = root / new_key()
        self._spare = spare
        with failures():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in root.iterdir():
                if is_key(folder.name):
                    _delete_if_dead(folder)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The folder is there in the block, and no sweep of another process touches it. Raises StoreUnavailable."""
        with failures():
            lock = _locked(self.folder)
        try:
            yield
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(lock)

    def check_room(self, needed: int) -> None:
        """Raises StorageFull where so many bytes do not fit, StoreUnavailable."""
        with failures():
            disk = os.statvfs(self.folder)
        if disk.f_bavail * disk.f_frsize < needed + self._spare:
            raise StorageFull(_FULL)


def _locked(folder: Path) -> int:
    """Make the folder and lock it -> a descriptor, which is open as long as this process lives or does not close it."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # a sweep may come between: then once more
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return descriptor
            os.close(descriptor)


def _delete_if_dead(folder: Path) -> None:
    with suppress(FileNotFoundError):  # deleted by another's start
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:  # its process lives
            pass
        finally:
            os.close(descriptor)


failures = partial(disk_failures, "copies of uploads", _FULL)
