"""Pictures in a zip or a tar, streamed: nothing is extracted, and no size that an archive states is trusted."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Generator
from itertools import count
from pathlib import Path
from typing import BinaryIO, cast

from roadmatch.jobs import zips
from roadmatch.jobs.entry import (
    MOST_BYTES,
    MOST_ENTRIES,
    Broken,
    EntryFailed,
    Found,
    SourceError,
    check_size,
    inner_path,
    is_junk,
    of_path,
    refuse_nested,
    shown,
)

MOST_RATIO, FREE_BYTES = 100, 64_000_000
"""An archive may unpack to 100 times its size, photographs do to 1.0; so many bytes are free, for drawings of one
colour."""
MOST_UNPACKED = 200_000_000_000
"""Bytes: a million pictures of 200 KB, and hours of reading."""
_MOST_HEADER = 1_000_000
_CHUNK = 65_536
_TAR_ERRORS = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    gzip.BadGzipFile,
    RecursionError,
    ValueError,
    OverflowError,
)


def zip_members(path: Path, labels: str | None) -> Generator[Found | Broken, None, None]:
    """The pictures of a zip in the order of its directory; raises SourceError."""
    with path.open("rb") as listing, path.open("rb") as contents:
        directory = zips.find_directory(listing)
        unpacked, packed = zips.check(listing, directory, MOST_ENTRIES), path.stat().st_size
        check_unpacked(unpacked, packed)
        for record in zips.records(listing, directory):
            if not record.is_folder:
                found = _zip_member(contents, record, labels)
                if found is not None:
                    yield found


def _zip_member(contents: BinaryIO, record: zips.Record, labels: str | None) -> Found | Broken | None:
    try:
        path = inner_path(record.name)
        if is_junk(path):
            return None
        zips.check_readable(record)
        refuse_nested(path)
        check_size(record.size)
    except EntryFailed as error:
        return Broken(shown(record.name), error.code, error.detail)
    return of_path(path, labels, lambda: zips.read(contents, record))


def check_unpacked(unpacked: int, packed: int) -> None:
    """Raises SourceError for an archive of `packed` bytes that holds more than any with pictures does."""
    if unpacked > min(MOST_RATIO * packed + FREE_BYTES, MOST_UNPACKED):
        raise SourceError(
            f"the archive unpacks to over {unpacked / 1e6:,.0f} MB from {packed / 1e6:,.1f}: "
            "no archive of pictures does, so it is not read"
        )


def tar_members(path: Path, labels: str | None) -> Generator[Found | Broken, None, None]:
    """The pictures of a tar or tar.gz in its order; where it breaks off, one Broken stands last. Raises SourceError."""
    with path.open("rb") as raw:
        packed = path.stat().st_size
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        contents = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if zipped else cast(BinaryIO, raw)
        stream = _Forward(contents, lambda unpacked: check_unpacked(unpacked, packed))
        yield from _tar_members(stream, labels)


def _tar_members(stream: "_Forward", labels: str | None) -> Generator[Found | Broken, None, None]:
    tar = _opened(stream)
    for number in count():
        try:
            member = _next_member(tar, stream)
        except EntryFailed as error:
            yield Broken("the archive's end", error.code, error.detail)
            return
        if member is None:
            return
        if number == MOST_ENTRIES:
            raise SourceError(f"the archive has more than {MOST_ENTRIES:,} members: split it")
        found = None if member.isdir() else _tar_member(tar, stream, member, labels)
        if found is not None:
            yield found


def _opened(stream: "_Forward") -> tarfile.TarFile:
    stream.allowed = _MOST_HEADER
    try:
        return _Streamed(fileobj=stream)
    except _TAR_ERRORS as error:
        raise SourceError("the upload is no tar or tar.gz that can be read: send it again") from error


def _next_member(tar: tarfile.TarFile, stream: "_Forward") -> tarfile.TarInfo | None:
    """The next member, None at the end. Raises EntryFailed where the archive has no end."""
    stream.allowed = _MOST_HEADER
    try:
        member = tar.next()
    except _TAR_ERRORS as error:
        raise EntryFailed("archive-cut", "the archive breaks off or is broken here: send it again") from error
    if member is None and (not stream.last or stream.last.strip(b"\0")):  # the mark of an end is a block of zeros
        raise EntryFailed("archive-cut", "the archive breaks off or is broken here: send it again")
    return member


def _tar_member(
    tar: tarfile.TarFile, stream: "_Forward", member: tarfile.TarInfo, labels: str | None
) -> Found | Broken | None:
    try:
        path = inner_path(member.name)
        if is_junk(path):
            return None
        if not member.isreg() or member.issparse():
            raise EntryFailed("not-a-file", "it is a link or a device, no file: pack the picture itself")
        refuse_nested(path)
        check_size(member.size)
    except EntryFailed as error:
        return Broken(shown(member.name), error.code, error.detail)
    return of_path(path, labels, lambda: _read_tar(tar, stream, member))


def _read_tar(tar: tarfile.TarFile, stream: "_Forward", member: tarfile.TarInfo) -> bytes:
    stream.allowed = MOST_BYTES + _CHUNK
    try:
        contents = tar.extractfile(member)
        data = contents.read(member.size) if contents else b""
    except _TAR_ERRORS as error:
        raise EntryFailed("broken-member", "the archive is broken here: send it again") from error
    if len(data) < member.size:
        raise EntryFailed("broken-member", "the archive breaks off in it: send it again")
    return data


class _Streamed(tarfile.TarFile):
    """A tar that forgets what is behind: members and global headers of a long one are more than memory."""

    members: list[tarfile.TarInfo]
    pax_headers: dict[str, str]

    def next(self) -> tarfile.TarInfo | None:
        """The next member, None where there is none that can be read."""
        member = super().next()
        self.members.clear()
        self.pax_headers.clear()
        return member


class _Forward(io.RawIOBase):
    """A file that is only read on, for tarfile: what it holds is counted and each step of it bounded.

    A header may say that it is gigabytes long, or that the next one lies before it; tarfile believes both.
    """

    def __init__(self, contents: BinaryIO, check: Callable[[int], None]) -> None:
        super().__init__()
        self.allowed = 0
        self.last = b""
        self._contents, self._check, self._place = contents, check, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """Forward."""
        return True

    def tell(self) -> int:
        """The place, in bytes of the unpacked archive."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read on to a place. Raises ValueError for one that lies behind."""
        if whence != io.SEEK_SET or offset < self._place:
            raise ValueError("a tar is read forward")
        while self._place < offset and self._next(min(offset - self._place, _CHUNK)):
            pass
        return self._place

    def read(self, size: int = -1) -> bytes:
        """The next bytes. Raises ValueError where they are more than this step may take."""
        self.allowed -= size
        if size < 0 or self.allowed < 0:
            raise ValueError("a header or member of a tar is larger than any is")
        self.last = self._next(size)
        return self.last

    def _next(self, size: int) -> bytes:
        data = self._contents.read(size)
        self._place += len(data)
        self._check(self._place)
        return data
