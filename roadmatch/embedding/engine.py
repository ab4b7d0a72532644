"""What every engine promises, and the check that it keeps it."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from roadmatch.errors import BundleCorrupt
from roadmatch.scoring import Vector

Pixels = NDArray[np.uint8]

_SQUARED_LENGTH_TOLERANCE = 1e-3


class Engine(Protocol):
    """Runs an embedder; safe to call from many threads."""

    @property
    def dimension(self) -> int:
        """D."""
        ...

    def embed(self, pixels: Pixels, *, busy: bool = False) -> Vector:
        """pixels (H, W, 3) uint8 -> unit float32 (D,), the caller's own. Raises BundleCorrupt where it is none.

        busy: the cores have other work, so this picture should not spread over all of them.
        """
        ...


def checked_pixels(pixels: Pixels, size: int) -> Pixels:
    """pixels (size, size, 3) uint8 -> the same in C order. Raises ValueError."""
    if pixels.shape != (size, size, 3) or pixels.dtype != np.uint8:
        raise ValueError(f"pixels must be ({size}, {size}, 3) uint8, not {pixels.shape} {pixels.dtype}")
    return np.ascontiguousarray(pixels)


def checked_vector(vector: Vector) -> Vector:
    """vector (D,) -> the same. One product tells NaN, infinity and a vanished feature from a unit vector."""
    squared_length = float(vector @ vector)
    if not abs(squared_length - 1) <= _SQUARED_LENGTH_TOLERANCE:
        raise BundleCorrupt(f"the embedder gave a vector of squared length {squared_length:.6g} instead of 1")
    return vector
