"""TIFF: what its first page will cost, and the tags that its pixels depend on."""

import struct
from dataclasses import dataclass, replace

from roadmatch.errors import UnreadableImage
from roadmatch.images.jpeg import walk_jpeg
from roadmatch.images.limits import Limits
from roadmatch.images.trimmed import Trimmed

_PAGES = 1000
_PARTS = 65_536  # strips or tiles
_COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32773, 32946)  # none, CCITT, LZW, JPEG, deflate, PackBits
_WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC, _PART_ROWS = 256, 257, 258, 259, 262, 278
_STRIPS, _STRIP_BYTES, _TILE_WIDTH, _TILE_LENGTH, _TILES, _TILE_BYTES = 273, 279, 322, 323, 324, 325
_KEPT = {
    *(_WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC, _PART_ROWS),
    *(_STRIPS, _STRIP_BYTES, _TILE_WIDTH, _TILE_LENGTH, _TILES, _TILE_BYTES),
    *(266, 274, 277, 284),  # fill order, orientation, samples per pixel, planes
    *(292, 293, 317, 320),  # CCITT options, predictor, palette
    *(338, 339, 347, 529, 530, 531, 532, 34675),  # extra samples, sample format, JPEG tables, YCbCr, ICC
}


@dataclass(frozen=True)
class _Directory:
    """The tags of one TIFF page, first of each kind."""

    data: bytes
    order: str  # "<" or ">"
    entries: dict[int, bytes]

    def numbers(self, tag: int) -> tuple[int, ...]:
        """The whole numbers under a tag; empty where it is missing."""
        if tag not in self.entries:
            return ()
        kind, count = struct.unpack_from(f"{self.order}HI", self.entries[tag], 2)
        letter = {1: "B", 3: "H", 4: "I"}.get(kind)
        if letter is None or count > 4 * _PARTS:
            raise UnreadableImage(f"TIFF has a broken or too long tag {tag}: save it anew")
        where, place = self.entries[tag], 8
        if count * struct.calcsize(letter) > 4:
            where, place = self.data, struct.unpack_from(f"{self.order}I", where, 8)[0]
        return struct.unpack_from(f"{self.order}{count}{letter}", where, place)

    def number(self, tag: int, otherwise: int) -> int:
        """The first number under a tag."""
        return (*self.numbers(tag), otherwise)[0]


def trim_tiff(data: bytes, limits: Limits) -> Trimmed:
    """The file with a new directory at its end: one page, and only the tags that pixels depend on."""
    order = "<" if data[:2] == b"II" else ">"
    (first,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, first)
    entries: dict[int, bytes] = {}
    for start in range(first + 2, first + 2 + 12 * count, 12):
        (tag,) = struct.unpack_from(f"{order}H", data, start)
        if tag in _KEPT:
            entries.setdefault(tag, data[start : start + 12])
    page = _Directory(data, order, entries)
    _check(page, limits)
    padding = b"\0" * (len(data) % 2)
    directory = struct.pack(f"{order}H", len(entries)) + b"".join(entries[tag] for tag in sorted(entries)) + bytes(4)
    moved = data[:4] + struct.pack(f"{order}I", len(data) + len(padding)) + data[8:] + padding + directory
    depth = page.number(_BITS, 1)
    # Pillow turns white-is-zero round at 8 bits and below, but not above.
    inverted = depth > 8 and page.number(_PHOTOMETRIC, 1) == 0
    return Trimmed(moved, frames=_count_pages(data, order, first), depth=depth, inverted=inverted)


def _check(page: _Directory, limits: Limits) -> None:
    width, height = page.number(_WIDTH, 0), page.number(_LENGTH, 0)
    limits.check_size(width, height)
    compression = page.number(_COMPRESSION, 1)
    if compression not in _COMPRESSIONS:
        raise UnreadableImage(f"TIFF has compression {compression}, which is not read: save it with LZW or deflate")
    if {_STRIPS, _TILES} <= page.entries.keys() or {_STRIP_BYTES, _TILE_BYTES} <= page.entries.keys():
        raise UnreadableImage("TIFF has both strips and tiles: save it anew")
    starts = page.numbers(_STRIPS) or page.numbers(_TILES)
    sizes = page.numbers(_STRIP_BYTES) or page.numbers(_TILE_BYTES)
    if len(starts) > _PARTS:
        raise UnreadableImage(f"TIFF has over {_PARTS} strips or tiles: save it with larger ones")
    tile = page.number(_TILE_WIDTH, 1) * page.number(_TILE_LENGTH, 1)
    if tile > limits.pixels or tile * len(starts) > 4 * limits.pixels:  # tiles overlap the edge; planes have their own
        raise UnreadableImage("TIFF has tiles far larger than its picture: save it anew")
    if any(start + size > len(page.data) for start, size in zip(starts, sizes, strict=False)):
        raise UnreadableImage("TIFF is a picture that does not end: send the whole file")
    if compression == 7:
        _check_jpegs(page.data, starts, sizes, limits)


def _check_jpegs(data: bytes, starts: tuple[int, ...], sizes: tuple[int, ...], limits: Limits) -> None:
    """Each strip or tile is a JPEG of its own: together they may cost what one JPEG may."""
    if len(sizes) != len(starts) or min(sizes, default=0) < 1 or sum(sizes) > len(data):
        raise UnreadableImage("TIFF has JPEG strips of unknown length: save it with LZW or deflate")
    any_height = replace(limits, shortest_side=1)
    scan_pixels = 0
    for start, size in zip(starts, sizes, strict=True):
        scan_pixels += walk_jpeg(data[start : start + size], any_height).scan_pixels
        limits.check_scans(1, scan_pixels)


def _count_pages(data: bytes, order: str, first: int) -> int:
    """How many pages the chain of directories has, a broken or endless chain counted as far as it goes."""
    pages: set[int] = set()
    position = first
    try:
        while position and position not in pages and len(pages) < _PAGES:
            pages.add(position)
            (count,) = struct.unpack_from(f"{order}H", data, position)
            (position,) = struct.unpack_from(f"{order}I", data, position + 2 + 12 * count)
    except struct.error:
        pass
    return len(pages)
