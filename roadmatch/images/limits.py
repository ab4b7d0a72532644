"""What a picture may be at most (and at least) to be read."""

import math
from dataclasses import dataclass, fields

from roadmatch.errors import ImageTooLarge, UnreadableImage

# Above this many pixels Pillow itself warns (Image.MAX_IMAGE_PIXELS); staying below it leaves that guard as it is,
# for everybody in the process, and keeps its warning from ever being raised here.
_MOST_PIXELS = 89_478_485


@dataclass(frozen=True)
class Limits:
    """Checked on the file's header, before anything is decoded.

    The costliest JPEG inside the defaults takes under two seconds of one core (measured): 0.31 s for a gigapixel of
    scans of one component, 0.03 s for a megabyte, and 0.7 s for 50 megapixels once they are unpacked.
    """

    bytes: int = 20_000_000  # of the file
    pixels: int = 50_000_000  # width x height
    shortest_side: int = 16  # pixels
    longest_side: int = 16_384  # pixels
    jpeg_scans: int = 100  # a usual progressive JPEG has about 10
    jpeg_scan_pixels: int = 1_500_000_000  # pixels x scans x components of the scan: 14 a pixel are usual

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) < 1:
                raise ValueError(f"{limit.name} is {getattr(self, limit.name)}: at least 1 is needed")
        if self.pixels > _MOST_PIXELS:
            raise ValueError(f"pixels is {self.pixels}: at most {_MOST_PIXELS} can be allowed")

    def check_bytes(self, count: int) -> None:
        """Raise UnreadableImage for an empty file and ImageTooLarge for one of too many bytes."""
        if not count:
            raise UnreadableImage("the file is empty: send a picture")
        if count > self.bytes:
            raise ImageTooLarge(
                f"file is {_millions(count)} MB; at most {self.bytes / 1e6:g} are read: send a smaller copy"
            )

    def check_size(self, width: int, height: int) -> None:
        """Raise ImageTooLarge for too many pixels or too long a side, UnreadableImage for too short a side."""
        size = f"picture is {width} x {height}"
        if width * height > self.pixels:
            raise ImageTooLarge(
                f"{size} = {_millions(width * height)} megapixels; "
                f"at most {self.pixels / 1e6:g} are read: send a smaller copy"
            )
        if max(width, height) > self.longest_side:
            raise ImageTooLarge(f"{size} pixels; sides of at most {self.longest_side} are read: send a smaller copy")
        if min(width, height) < self.shortest_side:
            raise UnreadableImage(f"{size} pixels; sides of at least {self.shortest_side} are read: send a larger copy")

    def check_scans(self, scans: int, scan_pixels: int) -> None:
        """Raise UnreadableImage for a JPEG whose scans would take too long."""
        if scans > self.jpeg_scans or scan_pixels > self.jpeg_scan_pixels:
            raise UnreadableImage(
                f"JPEG of over {scans - 1} scans takes too long to decode: save it as a baseline JPEG"
            )


def _millions(count: int) -> str:
    """Millions with one decimal, rounded up: what is over a limit never reads as equal to it."""
    return f"{math.ceil(count / 1e5) / 10:g}"
