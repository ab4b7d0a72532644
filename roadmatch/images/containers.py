"""File formats: which one it is, whether it is inside the limits, and the part that its first picture needs.

The decoders are handed that part only. Everything else a file can hold (comments, EXIF, thumbnails, later frames and
pages, whatever follows the end) costs time, raises warnings or carries somebody else's bytes, and no pixel depends on
it. Each walk is bounded in steps, so no file keeps it busy.
"""

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from roadmatch.errors import UnreadableImage, UnsupportedImage
from roadmatch.images.jpeg import trim_jpeg
from roadmatch.images.limits import Limits
from roadmatch.images.tiff import trim_tiff
from roadmatch.images.trimmed import Trimmed


@dataclass(frozen=True)
class Format:
    """A format that is read: its name, its cut and its one decoder."""

    name: str
    matches: Callable[[bytes], object]
    trim: Callable[[bytes, Limits], Trimmed]
    decoder: type[ImageFile]  # called directly: Image.open would try other plug-ins, and MPO on a JPEG


def recognise(data: bytes) -> Format:
    """The format by magic bytes, whatever the file is called; UnsupportedImage for any other."""
    for known in FORMATS:
        if known.matches(data):
            return known
    names = ", ".join(known.name.upper() for known in FORMATS)
    raise UnsupportedImage(f"not one of the picture formats that are read ({names}): convert it to one of these")


# PNG

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS = 65_536  # 20 MB of 8 kB chunks, the usual size, are 2,500
_PNG_ANIMATION = (b"acTL", b"fcTL", b"fdAT")


def _trim_png(data: bytes, limits: Limits) -> Trimmed:
    """Everything but the animation, up to the end chunk: the first picture is what a still viewer shows."""
    width, height, depth = struct.unpack_from(">IIB", data, 16)
    limits.check_size(width, height)
    kept, frames, position = [data[:8]], 1, 8
    for _ in range(_PNG_CHUNKS):
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if end > len(data):
            break
        if kind not in _PNG_ANIMATION:
            kept.append(data[position:end])
        elif kind == b"acTL" and length >= 4:
            frames = max(1, int.from_bytes(data[position + 8 : position + 12], "big"))
        if kind == b"IEND":
            return Trimmed(b"".join(kept), frames=frames, depth=depth)
        position = end
    else:
        raise UnreadableImage(f"PNG has over {_PNG_CHUNKS} chunks: save it anew")
    raise UnreadableImage("PNG is a picture that does not end: send the whole file")


# GIF

_GIF_STEPS = 200_000  # 20 MB are 80,000 full blocks
_GIF_FRAMES = 10_000  # counted at most


def _gif_blocks(data: bytes, position: int) -> Iterator[tuple[int, int, int]]:
    """(kind, start, end) of every extension (0x21) and frame (0x2c), while they are whole and few."""
    steps = 0
    while position < len(data) and data[position] != 0x3B:
        kind, start = data[position], position
        if kind == 0x2C:
            flags = data[position + 9]
            position += 11 + (3 << (flags & 7) + 1 if flags & 128 else 0)
        elif kind == 0x21:
            position += 2
        else:  # bytes between blocks are skipped, as the decoder does
            position, steps = position + 1, steps + 1
            if steps > _GIF_STEPS:
                return
            continue
        while data[position]:
            position, steps = position + 1 + data[position], steps + 1
            if steps > _GIF_STEPS:
                return
        position += 1
        yield kind, start, position


def _trim_gif(data: bytes, limits: Limits) -> Trimmed:
    """The first frame with its palette and its transparent colour; later frames are counted while that is cheap."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    limits.check_size(width, height)
    screen = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0)
    control, frame, frames = b"", b"", 0
    try:
        for kind, start, end in _gif_blocks(data, screen):
            if kind == 0x2C:
                frames += 1
                frame = frame or data[start:end]
                if frames == _GIF_FRAMES:
                    break
            elif not frame and data[start + 1] == 0xF9 and end - start == 8:
                # Only "is transparent" is kept: a disposal would have the decoder fill a canvas of its own.
                control = b"\x21\xf9\x04" + bytes([data[start + 3] & 1, 0, 0, data[start + 6], 0])
    except IndexError:  # cut within a block: the frames before it are whole
        pass
    if not frame:
        raise UnreadableImage("GIF has no whole frame: send the whole file")
    left, top, frame_width, frame_height = struct.unpack_from("<HHHH", frame, 1)
    limits.check_size(max(width, left + frame_width), max(height, top + frame_height))
    return Trimmed(data[:screen] + control + frame + b";", frames=frames)


# BMP


def _is_bmp(data: bytes) -> bool:
    """Two letters are no magic, so the size of the second header has to be one that exists."""
    return data[:2] == b"BM" and data[14:18] in [struct.pack("<I", size) for size in (12, 40, 52, 56, 64, 108, 124)]


def _trim_bmp(data: bytes, limits: Limits) -> Trimmed:
    (header,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header == 12 else "<ii", data, 18)
    limits.check_size(width, abs(height))  # a negative height says that the rows go down
    if header >= 40 and struct.unpack_from("<I", data, 30)[0] in (1, 2):
        # Pillow decodes these in Python, at a microsecond a run.
        raise UnreadableImage("BMP is run-length coded: save it uncompressed or as PNG")
    return Trimmed(data, frames=1)


# WebP and AVIF

_AVIF_EXIF = re.compile(rb"(infe.{8}(?:..)?)Exif", re.DOTALL)


def _is_avif(data: bytes) -> bool:
    """AVIF by its major brand, or by a compatible one under the container's own brand (HEIC shares that one)."""
    if data[4:8] != b"ftyp":
        return False
    brands = data[16 : min(int.from_bytes(data[:4], "big"), 256)]
    return data[8:12] in (b"avif", b"avis") or (data[8:12] in (b"mif1", b"msf1") and b"avif" in brands)


def _trim_avif(data: bytes, _: Limits) -> Trimmed:
    """The file with its EXIF item renamed: an AVIF's orientation is a property, and Pillow fails on broken EXIF."""
    return Trimmed(_AVIF_EXIF.sub(rb"\1skip", data))


def _untrimmed(data: bytes, _: Limits) -> Trimmed:
    return Trimmed(data)


FORMATS = (
    Format("jpeg", lambda data: data.startswith(b"\xff\xd8\xff"), trim_jpeg, JpegImageFile),
    Format("png", lambda data: data.startswith(_PNG_MAGIC), _trim_png, PngImageFile),
    Format("webp", lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP", _untrimmed, WebPImageFile),
    Format("gif", lambda data: data[:6] in (b"GIF87a", b"GIF89a"), _trim_gif, GifImageFile),
    Format("bmp", _is_bmp, _trim_bmp, BmpImageFile),
    Format("tiff", lambda data: data[:4] in (b"II*\0", b"MM\0*"), trim_tiff, TiffImageFile),
    Format("avif", _is_avif, _trim_avif, AvifImageFile),
)
