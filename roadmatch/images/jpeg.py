"""JPEG: what a file will cost, and the segments that its pixels depend on."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from roadmatch.errors import UnreadableImage
from roadmatch.images.limits import Limits
from roadmatch.images.trimmed import Trimmed

_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # not stuffing (00), padding (FF) or a restart (D0 to D7)
_SEGMENTS = 4096  # 20 MB are 305 full segments
_SOI, _EOI, _SOS, _APP1, _APP2, _COM = 0xD8, 0xD9, 0xDA, 0xE1, 0xE2, 0xFE
_FRAMES_READ = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive; no lossless, hierarchical or arithmetic coding
_FRAMES_OTHER = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_KEPT_APPLICATION = (0xE0, 0xEE)  # JFIF and Adobe: the decoder takes the colour space from them


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of every JPEG segment up to the end-of-image marker, in the decoder's own reading."""
    position = 2
    for _ in range(_SEGMENTS):
        found = _MARKER.search(data, position)
        if found is None:
            raise UnreadableImage("JPEG is a picture that does not end: send the whole file")
        marker, start, position = data[found.start() + 1], found.start(), found.end()
        if marker == _EOI:
            yield marker, start, position
            return
        if marker < 0xC0 or marker == _SOI:
            # The decoder skips these without a length in one state and fails in another: no walk agrees with it.
            raise UnreadableImage(f"JPEG holds the marker 0x{marker:02x}, which no picture has: save it anew")
        length = int.from_bytes(data[position : position + 2], "big")
        position += length
        if length < 2 or position > len(data):
            raise UnreadableImage("JPEG is a picture that does not end: send the whole file")
        yield marker, start, position
    raise UnreadableImage(f"JPEG has over {_SEGMENTS} segments: save it anew")


@dataclass(frozen=True)
class JpegWalk:
    """What a walk over the segments found; places are byte offsets."""

    header: list[tuple[int, int, int]]  # segments before the first scan
    first_scan: int
    end: int
    scans: int
    scan_pixels: int  # pixels x scans x components of the scan
    components: int  # of the picture


def walk_jpeg(data: bytes, limits: Limits) -> JpegWalk:
    """Measure a JPEG without decoding it; the size is checked as soon as it is met."""
    header: list[tuple[int, int, int]] = []
    pixels = components = first_scan = scans = scan_pixels = end = 0
    for marker, start, end in _segments(data):
        if marker in _FRAMES_OTHER:
            raise UnreadableImage("JPEG is lossless, hierarchical or arithmetic coded: save it as a baseline JPEG")
        if marker in _FRAMES_READ:
            height, width, components = struct.unpack_from(">HHB", data, start + 5)
            limits.check_size(width, height)
            pixels = width * height
        if marker == _SOS:
            first_scan = first_scan or start
            scans += 1
            scan_pixels += pixels * data[start + 4]  # times the components in this scan
            limits.check_scans(scans, scan_pixels)
        if not scans:
            header.append((marker, start, end))
    if not scans or not pixels:
        raise UnreadableImage("JPEG holds no picture: send another file")
    return JpegWalk(header, first_scan, end, scans, scan_pixels, components)


def trim_jpeg(data: bytes, limits: Limits) -> Trimmed:
    """The segments that decode to pixels, up to the end of the image; EXIF and ICC profile apart."""
    walk = walk_jpeg(data, limits)
    kept, exif, profile, adobe = [data[:2]], b"", [], False
    for marker, start, end in walk.header:
        if marker == _APP1 and not exif and data.startswith(b"Exif\0\0", start + 4):
            exif = data[start + 4 : end]
        elif marker == _APP2 and data.startswith(b"ICC_PROFILE\0", start + 4):
            profile.append(data[start + 16 : end])
        elif marker in _KEPT_APPLICATION or not (0xE0 <= marker <= 0xEF or marker == _COM):
            kept.append(data[start:end])
            adobe = adobe or (marker == 0xEE and data.startswith(b"Adobe", start + 4))
    kept.append(data[walk.first_scan : walk.end])
    # Pillow takes every CMYK JPEG for an inverted one, which only Adobe's are.
    inverted = walk.components == 4 and not adobe
    return Trimmed(b"".join(kept), frames=1, exif=exif, icc=_joined_profile(profile), inverted=inverted)


def _joined_profile(parts: list[bytes]) -> bytes:
    """The ICC profile from its numbered parts (number, count, bytes); empty where one is missing."""
    parts = sorted(part for part in parts if len(part) > 2)
    if not parts or [part[0] for part in parts] != list(range(1, parts[0][1] + 1)):
        return b""
    return b"".join(part[2:] for part in parts)
