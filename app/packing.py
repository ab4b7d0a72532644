"""A local folder as a stream of tar, file by file."""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

LARGEST_PICTURE = 20_000_000
"""Bytes; the service takes no larger one, so none is sent."""
_BLOCK = 512
_JUNK = ("__macosx", "thumbs.db", "desktop.ini")


class Folder:
    """A folder's files in the order of their names, at every reading the same; hidden ones and junk are left out."""

    def __init__(self, folder: Path) -> None:
        self.refused: list[tuple[str, str]] = []
        """Paths that the last reading could not send, each with the reason."""
        self._folder = folder

    def measure(self) -> tuple[int, int]:
        """How many files there are, and about how many bytes of tar they make. Raises OSError."""
        self.refused = []
        count = size = 0
        for entry in self._files():
            count += 1
            size += _BLOCK + _padded(entry.stat().st_size)
        return count, size + 2 * _BLOCK

    def tar(self) -> Iterator[bytes]:
        """The archive; a file is in memory while it is sent. Raises OSError where a folder cannot be read."""
        self.refused = []
        for entry in self._files():
            data = self._read(entry)
            if data is not None:
                header = tarfile.TarInfo(self._name(entry))
                header.size = len(data)  # read before it is stated: the file may be growing
                yield header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
                yield data
                yield bytes(_padded(len(data)) - len(data))
        yield bytes(2 * _BLOCK)

    def _files(self) -> Iterator["os.DirEntry[str]"]:
        levels = [iter(_sorted(self._folder))]  # and no recursion: folders may be deeper than Python's stack
        while levels:
            entry = next(levels[-1], None)
            if entry is None:
                levels.pop()
            elif entry.name.startswith(".") or entry.name.lower() in _JUNK:
                continue
            elif entry.is_dir(follow_symlinks=False):
                levels.append(iter(_sorted(entry.path)))
            elif entry.is_file():
                yield entry
            else:
                linked = "a link to a folder: import that folder by itself" if entry.is_dir() else "no file"
                self._refuse(entry, f"it is {linked}")

    def _read(self, entry: "os.DirEntry[str]") -> bytes | None:
        try:
            with Path(entry.path).open("rb") as opened:
                data = opened.read(min(os.fstat(opened.fileno()).st_size, LARGEST_PICTURE) + 1)
        except OSError as error:
            self._refuse(entry, f"it cannot be read: {error.strerror}")
            return None
        if len(data) > LARGEST_PICTURE:
            self._refuse(entry, f"it has more than {LARGEST_PICTURE // 1_000_000} MB: make a smaller copy")
            return None
        return data

    def _refuse(self, entry: "os.DirEntry[str]", reason: str) -> None:
        self.refused.append((self._name(entry), reason))

    def _name(self, entry: "os.DirEntry[str]") -> str:
        return Path(entry.path).relative_to(self._folder).as_posix()


def _sorted(folder: Path | str) -> list["os.DirEntry[str]"]:
    with os.scandir(folder) as found:
        return sorted(found, key=lambda entry: entry.name)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
