"""What is left of a file once it is cut down to its first picture."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Trimmed:
    """The part of a file that its first picture needs, and what the decoder does not say about it."""

    data: bytes
    frames: int | None = None  # None: the decoder knows
    exif: bytes = b""  # beside what the decoder finds
    icc: bytes = b""  # beside what the decoder finds
    depth: int = 8  # bits per sample in the file
    inverted: bool = False  # the decoder gives the samples the wrong way round
