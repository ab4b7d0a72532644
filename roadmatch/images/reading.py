"""Bytes -> a decoded picture -> the square of pixels that the network sees."""

import io
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from roadmatch.errors import ImageError, ImageTooLarge, UnreadableImage
from roadmatch.images.colour import flatten, to_srgb
from roadmatch.images.containers import Format, recognise
from roadmatch.images.limits import Limits
from roadmatch.images.trimmed import Trimmed
from roadmatch.images.upright import Box, orientation_of, stored_box, upright

# Pictures are decoded on as many threads as there are requests already; Pillow has no argument for it.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

_DEFAULT_LIMITS = Limits()
_MOST_HALVINGS = 3  # what a JPEG decoder can do
_RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}
_JPEG_QUALITY = 90
_PNG_COLOURS = 256  # drawings have few colours: PNG keeps them sharp, and small


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes the network's pixels: the bundle's one rule, used on every path."""

    size: int  # side of the square that the network sees, pixels
    resize: int  # the shorter side is resized to this, then the centre is cropped to size
    reduce_to: int  # decoding may halve the picture (up to 3 times) while the shorter side stays >= this
    interpolation: str  # "bicubic", "bilinear" or "lanczos"

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize:
            raise ValueError(f"size is {self.size}: it has to be from 1 to resize ({self.resize})")
        if self.reduce_to < 1:
            raise ValueError(f"reduce_to is {self.reduce_to}: at least 1 is needed")
        if self.interpolation not in _RESAMPLING:
            raise ValueError(f"interpolation is {self.interpolation!r}: one of {', '.join(_RESAMPLING)} is needed")


@dataclass(frozen=True)
class Picture:
    """A decoded picture, and what its file said."""

    rgb: Image.Image  # mode RGB, sRGB, upright, without metadata
    format: str  # "jpeg", "png", "webp", "gif", "bmp", "tiff" or "avif"
    width: int  # upright, as stored, before any reduction
    height: int
    frames: int  # frames or pages; of a GIF or TIFF at least so many


@dataclass(frozen=True)
class _Opened:
    """A file whose size is known; the pixels of a JPEG are not decoded yet."""

    image: ImageFile
    trimmed: Trimmed
    orientation: int  # EXIF, 1 to 8
    stored_size: tuple[int, int]
    upright_size: tuple[int, int]


def decode(data: bytes, *, reduce_to: int | None = None, limits: Limits = _DEFAULT_LIMITS) -> Picture:
    """The first picture in a file, in sRGB, upright, on white where it is transparent.

    With reduce_to it is halved up to three times while its shorter side stays at least that long: a JPEG in its
    decoder, which is what makes this fast, any other by averaging. Raises UnsupportedImage, UnreadableImage and
    ImageTooLarge, and nothing else on any bytes.
    """
    limits.check_bytes(len(data))
    known = recognise(data)
    with _refused(known):
        opened = _open(known, data, limits)
        flat = _reduced(opened, 1 << _halvings(min(opened.image.size), reduce_to))
        rgb = upright(to_srgb(flat, _profile(opened)), opened.orientation)
        rgb.info = {}  # an encoder would write comments and profiles from it
        frames = opened.trimmed.frames or int(getattr(opened.image, "n_frames", 1))
        return Picture(rgb, known.name, *opened.upright_size, frames)


def decode_square(
    data: bytes,
    choose: Callable[[int, int], Box],
    size: int,
    *,
    interpolation: str = "bicubic",
    limits: Limits = _DEFAULT_LIMITS,
) -> Image.Image:
    """One part of a picture as size x size pixels, mode RGB, in sRGB, upright, on white where it is transparent.

    choose: width and height of the upright picture -> (left, top, right, bottom) of the part, pixels. It is called
    before anything is decoded that the part decides on: the picture is halved up to three times while the part stays
    at least size pixels long both ways. Raises as decode, and what choose raises.
    """
    limits.check_bytes(len(data))
    known = recognise(data)
    with _refused(known):
        opened = _open(known, data, limits)
    chosen = choose(*opened.upright_size)
    with _refused(known):
        box = stored_box(chosen, opened.orientation, opened.stored_size)
        factor = 1 << _halvings(min(box[2] - box[0], box[3] - box[1]), size)
        part, place = _cut_out(_reduced(opened, factor), box, factor)
        square = to_srgb(part, _profile(opened)).resize((size, size), _RESAMPLING[interpolation], box=place)
        rgb = upright(square, opened.orientation)
        rgb.info = {}
        return rgb


def network_pixels(picture_rgb: Image.Image, rule: Preprocessing) -> NDArray[np.uint8]:
    """(size, size, 3) pixels, C-contiguous: the shorter side resized to rule.resize, and the centre of that.

    Only the centre is computed, in one step, so neither the longer side nor the crop is rounded to whole pixels.
    """
    if picture_rgb.mode != "RGB":
        raise ValueError(f"picture is in mode {picture_rgb.mode}: RGB is needed")
    width, height = picture_rgb.size
    side = min(width, height) * rule.size / rule.resize
    left, top = (width - side) / 2, (height - side) / 2
    square = picture_rgb.resize(
        (rule.size, rule.size), _RESAMPLING[rule.interpolation], box=(left, top, left + side, top + side)
    )
    return np.array(square)


def read_pixels(
    data: bytes, rule: Preprocessing, limits: Limits = _DEFAULT_LIMITS
) -> tuple[NDArray[np.uint8], Picture]:
    """(size, size, 3) pixels of a file under a bundle's rule, and the picture they come from; raises as decode."""
    picture = decode(data, reduce_to=rule.reduce_to, limits=limits)
    return network_pixels(picture.rgb, rule), picture


def reencode(data: bytes, *, longest_side: int | None = None, limits: Limits = _DEFAULT_LIMITS) -> tuple[bytes, str]:
    """A file anew for handing out: (bytes, media type), without metadata, at most longest_side pixels long.

    JPEG of quality 90, or PNG where the picture is no JPEG and has at most 256 colours. Raises as decode.
    """
    if longest_side is not None and longest_side < 1:
        raise ValueError(f"longest_side is {longest_side}: at least 1 is needed")
    picture = decode(data, reduce_to=longest_side, limits=limits)
    rgb = picture.rgb
    if longest_side is not None and max(rgb.size) > longest_side:
        width, height = (max(1, round(side * longest_side / max(rgb.size))) for side in rgb.size)
        rgb = rgb.resize((width, height), Image.Resampling.LANCZOS)
    encoded = io.BytesIO()
    if picture.format != "jpeg" and rgb.getcolors(_PNG_COLOURS) is not None:
        rgb.save(encoded, "PNG")
        return encoded.getvalue(), "image/png"
    rgb.save(encoded, "JPEG", quality=_JPEG_QUALITY)
    return encoded.getvalue(), "image/jpeg"


@contextmanager
def _refused(known: Format) -> Iterator[None]:
    """Whatever goes wrong within, as an ImageError."""
    try:
        yield
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageTooLarge("picture has far too many pixels: send a smaller copy") from error
    except Exception as error:  # the decoders raise nearly everything on some broken file
        raise UnreadableImage(f"{known.name.upper()} cannot be decoded ({_reason(error)}): save it anew") from error


def _open(known: Format, data: bytes, limits: Limits) -> _Opened:
    trimmed = known.trim(data, limits)
    image = known.decoder(io.BytesIO(trimmed.data))
    width, height = image.size
    limits.check_size(width, height)
    if not isinstance(image, JpegImageFile):  # which can still be told to reduce; a PNG's EXIF may be at its end
        image.load()
    orientation = orientation_of(trimmed.exif or image.info.get("exif"))
    upright_size = (height, width) if orientation >= 5 else (width, height)
    return _Opened(image, trimmed, orientation, (width, height), upright_size)


def _reduced(opened: _Opened, factor: int) -> Image.Image:
    """The whole picture as it is stored, flattened and smaller by the factor."""
    given = _draft(opened.image, factor)
    opened.image.load()
    flat = flatten(opened.image, opened.trimmed.depth, opened.trimmed.inverted)
    return flat.reduce(factor // given) if given < factor else flat


def _profile(opened: _Opened) -> bytes:
    profile = opened.trimmed.icc or opened.image.info.get("icc_profile")
    return profile if isinstance(profile, bytes) else b""


def _cut_out(reduced: Image.Image, box: Box, factor: int) -> tuple[Image.Image, Box]:
    """The whole pixels that hold a box of the unreduced picture, and where in them it lies."""
    left, top, right, bottom = (side / factor for side in box)
    corner = math.floor(left), math.floor(top)
    part = reduced.crop((*corner, math.ceil(right), math.ceil(bottom)))
    return part, (left - corner[0], top - corner[1], right - corner[0], bottom - corner[1])


def _halvings(shorter_side: float, reduce_to: int | None) -> int:
    """The largest h of 0 to 3 with shorter_side / 2^h >= reduce_to."""
    if reduce_to is None:
        return 0
    return max((h for h in range(_MOST_HALVINGS + 1) if shorter_side >= reduce_to << h), default=0)


def _draft(image: ImageFile, factor: int) -> int:
    """Have a JPEG decoder reduce by at most this factor; returns the factor that it took (1: none)."""
    if factor == 1 or not isinstance(image, JpegImageFile):
        return 1
    width, height = image.size
    drafted = image.draft(None, (width // factor, height // factor))
    if drafted is None:
        return 1
    given = round(width / drafted[1][2])
    assert factor % given == 0, f"asked to reduce by {factor}, the decoder took {given}"
    return given


def _reason(error: Exception) -> str:
    """A decoder's complaint as one short line."""
    if isinstance(error, struct.error | IndexError | EOFError | MemoryError):
        return "out of memory" if isinstance(error, MemoryError) else "it ends too early"
    text = " ".join("".join(sign if sign.isprintable() else " " for sign in str(error)).split())
    return text[:120] or type(error).__name__
