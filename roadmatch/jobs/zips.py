"""Reading a zip by its directory, in memory of 16 bytes a member.

Python's zipfile builds half a kilobyte for each member before anything can be checked, unpacks bzip2 and LZMA without
a bound, and in the versions that are run here (3.11) takes members that overlap, a zip bomb of any ratio.
Source of the format: APPNOTE 6.3.10, 4.3 and 4.5.3.
"""

import stat
import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from roadmatch.jobs.entry import MOST_BYTES, EntryFailed, SourceError

_RECORD = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_STORED, _DEFLATED = 0, 8
_ENCRYPTED = 0x1 | 0x20 | 0x40 | 0x2000  # encrypted, patched, strongly encrypted, masked
_UTF8 = 0x800
_32 = 0xFFFFFFFF
_LONGEST_COMMENT = 0xFFFF
_CHUNK = 65_536


@dataclass(frozen=True)
class Directory:
    """Where the records lie, in bytes from the file's start. shift: bytes that stand before the zip's own start."""

    start: int
    end: int
    shift: int


@dataclass(frozen=True, slots=True)
class Record:
    """What the directory says of a member; offset: of its header in the file, packed and size in bytes."""

    name: str
    offset: int
    packed: int
    size: int
    crc: int
    method: int
    flags: int
    mode: int

    @property
    def is_folder(self) -> bool:
        """Whether it stands for a folder."""
        return self.name.endswith("/") and not self.size


def find_directory(file: BinaryIO) -> Directory:
    """Look at the zip's end. Raises SourceError for what is no whole zip."""
    length = file.seek(0, 2)
    tail_start = file.seek(max(0, length - _END.size - _LONGEST_COMMENT))
    tail = file.read()
    place = tail.rfind(b"PK\5\6")
    if place < 0 or len(tail) - place < _END.size:
        raise SourceError("the upload is no whole zip, it has no directory at its end: send it again")
    _, disk, first_disk, _, _, size, offset, _ = _END.unpack_from(tail, place)
    end = tail_start + place
    end, disk, first_disk, size, offset = _find_directory64(file, end) or (end, disk, first_disk, size, offset)
    if disk or first_disk:
        raise SourceError("the zip is one part of several: send it as one")
    start = end - size
    if start < offset:
        raise SourceError("the zip's directory is broken: send it again")
    return Directory(start, end, start - offset)


def _find_directory64(file: BinaryIO, end: int) -> tuple[int, int, int, int, int] | None:
    if end < _LOCATOR.size + _END64.size:
        return None
    file.seek(end - _LOCATOR.size - _END64.size)
    data = file.read(_LOCATOR.size + _END64.size)
    if data[:4] != b"PK\6\6" or data[_END64.size : _END64.size + 4] != b"PK\6\7":
        return None
    _, _, _, _, disk, first_disk, _, _, size, offset = _END64.unpack_from(data)
    return end - _LOCATOR.size - _END64.size, disk, first_disk, size, offset


def records(file: BinaryIO, directory: Directory) -> Iterator[Record]:
    """What the directory lists, in its order. Raises SourceError where it is broken."""
    file.seek(directory.start)
    left = directory.end - directory.start
    while left > 0:
        head = file.read(_RECORD.size) if left >= _RECORD.size else b""
        if len(head) < _RECORD.size or head[:4] != b"PK\1\2":
            raise SourceError("the zip's directory is broken: send it again")
        fields = _RECORD.unpack(head)
        lengths = fields[12], fields[13], fields[14]
        variable = file.read(sum(lengths))
        left -= _RECORD.size + sum(lengths)
        if left < 0 or len(variable) < sum(lengths):
            raise SourceError("the zip's directory is broken: send it again")
        yield _record(fields, variable[: lengths[0]], variable[lengths[0] : lengths[0] + lengths[1]], directory.shift)


def _record(fields: tuple[int, ...], name: bytes, extra: bytes, shift: int) -> Record:
    flags, method, crc, mode = fields[5], fields[6], fields[9], fields[17] >> 16
    size, packed, offset = _large(extra, fields[11], fields[10], fields[18])
    return Record(_text(name, flags), offset + shift, packed, size, crc, method, flags, mode)


def _large(extra: bytes, *values: int) -> list[int]:
    """Sizes and offset, those that take more than 32 bits from the extra field. Raises SourceError."""
    if _32 not in values:
        return list(values)
    wide = iter(struct.unpack(f"<{len(found) // 8}Q", found) if (found := _zip64(extra)) else ())
    try:
        return [next(wide) if value == _32 else value for value in values]
    except StopIteration as error:
        raise SourceError("the zip's directory is broken: send it again") from error


def _zip64(extra: bytes) -> bytes:
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            found = extra[4 : 4 + length]
            return found[: len(found) // 8 * 8]
        extra = extra[4 + length :]
    return b""


def _text(name: bytes, flags: int) -> str:
    """A name, as UTF-8 also where the archive does not say so: many programs forget to."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("utf-8", "backslashreplace") if flags & _UTF8 else name.decode("cp437")


def check(file: BinaryIO, directory: Directory, most: int) -> int:
    """Look through the whole directory -> bytes that its members unpack to, as it says.

    Raises SourceError for more than `most` members, and for such that share bytes.
    """
    starts, ends, unpacked = array("Q"), array("Q"), 0
    for record in records(file, directory):
        if len(starts) == most:
            raise SourceError(f"the zip has more than {most:,} members: split it")
        end = record.offset + _LOCAL.size + record.packed
        if end > directory.start:
            raise SourceError("the zip's directory names bytes that the zip does not have: send it again")
        starts.append(record.offset)
        ends.append(end)
        unpacked += record.size
    begin, finish = np.frombuffer(starts, np.uint64), np.frombuffer(ends, np.uint64)
    order = np.argsort(begin, kind="stable")
    if (begin[order][1:] < finish[order][:-1]).any():
        raise SourceError("members of the zip share their bytes: no archive of pictures does, so it is not read")
    return unpacked


def check_readable(record: Record) -> None:
    """Raises EntryFailed for a member that is no file, or is packed in a way that is not read."""
    if stat.S_IFMT(record.mode) not in (0, stat.S_IFREG):
        raise EntryFailed("not-a-file", "it is a link or a device, no file: pack the picture itself")
    if record.flags & _ENCRYPTED:
        raise EntryFailed("encrypted-member", "it is encrypted: pack the pictures without a password")
    if record.method not in (_STORED, _DEFLATED):
        raise EntryFailed("unsupported-member", "its compression is not read: pack the pictures with Deflate or none")


def read(file: BinaryIO, record: Record) -> bytes:
    """The bytes of a member, at most MOST_BYTES, by its checksum those that were packed. Raises EntryFailed."""
    file.seek(record.offset)
    head = file.read(_LOCAL.size)
    if len(head) < _LOCAL.size or head[:4] != b"PK\3\4":
        raise _broken()
    fields = _LOCAL.unpack(head)
    file.seek(record.offset + _LOCAL.size + fields[9] + fields[10])
    most = min(record.size, MOST_BYTES)
    try:
        data = (_inflated if record.method == _DEFLATED else _stored)(file, record.packed, most)
    except zlib.error as error:
        raise _broken() from error
    if len(data) != record.size or zlib.crc32(data) != record.crc:
        raise _broken()
    return data


def _stored(file: BinaryIO, packed: int, most: int) -> bytes:
    return file.read(min(packed, most + 1))


def _inflated(file: BinaryIO, packed: int, most: int) -> bytes:
    """At most one byte more than `most`: by it a member that states too few is known."""
    decoder, data = zlib.decompressobj(-15), bytearray()
    while packed and not decoder.eof and len(data) <= most:
        chunk = file.read(min(packed, _CHUNK))
        packed -= len(chunk)
        data += decoder.decompress(chunk, most + 1 - len(data))
        if not chunk:
            break
    return bytes(data)


def _broken() -> EntryFailed:
    return EntryFailed("broken-member", "it is broken, or not what the zip's directory says: pack it again")
