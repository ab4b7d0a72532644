"""Small pictures inside of a page."""

import base64
import io
from pathlib import Path

from roadmatch.errors import ImageError
from roadmatch.images import decode
from training.data.manifest import DataError

SIDE = 112
"""The longer one, pixels."""
_QUALITY = 70


def thumbnail(file: Path) -> str:
    """A small JPEG of a file as a data URI, without metadata. Raises DataError."""
    try:
        picture = decode(file.read_bytes(), reduce_to=SIDE).rgb
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
    except ImageError as error:
        raise DataError(f"{file}: {error}") from error
    picture.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
