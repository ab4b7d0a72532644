"""The orientation that a camera wrote into EXIF, undone on pictures and on boxes."""

import struct

from PIL import Image

Box = tuple[float, float, float, float]  # left, top, right, bottom, pixels

_UPRIGHT = {  # EXIF orientation -> what undoes it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """A picture as it is stored -> as it is meant to be seen."""
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def stored_box(box: Box, orientation: int, size: tuple[int, int]) -> Box:
    """A box of the upright picture -> the same pixels in the picture as it is stored, which has this size."""
    (width, height), (left, top, right, bottom) = size, box
    if orientation >= 5:
        left, top, right, bottom = top, left, bottom, right
    if orientation in (2, 3, 7, 8):
        left, right = width - right, width - left
    if orientation in (3, 4, 6, 7):
        top, bottom = height - bottom, height - top
    return left, top, right, bottom


def orientation_of(exif: object) -> int:
    """The orientation 1 to 8 in an EXIF block; 1 where there is none or it is broken.

    Pillow's own reader parses every tag, and warns or fails on blocks that real cameras write.
    """
    if not isinstance(exif, bytes):
        return 1
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(f"{order}HH", tiff, entry)
            if tag == 0x0112:
                (value,) = struct.unpack_from(f"{order}I" if kind == 4 else f"{order}H", tiff, entry + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
