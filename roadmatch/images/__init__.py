"""Bytes -> RGB pixels; the only place that decodes.

    bytes -> containers: which format, is it inside the limits, cut to its first picture
          -> reading:    decode (reduced), upright, then the bundle's resize and crop
          -> colour:     any mode, depth or profile -> sRGB on white

Every refusal is an ImageError whose class says what kind it is; nothing else is raised on any bytes.
"""

from roadmatch.images.limits import Limits
from roadmatch.images.reading import (
    Picture,
    Preprocessing,
    decode,
    decode_square,
    network_pixels,
    read_pixels,
    reencode,
)
from roadmatch.images.upright import Box

__all__ = [
    "Box",
    "Limits",
    "Picture",
    "Preprocessing",
    "decode",
    "decode_square",
    "network_pixels",
    "read_pixels",
    "reencode",
]
