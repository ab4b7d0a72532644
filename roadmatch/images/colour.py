"""Decoded pixels of any mode, depth and profile -> sRGB, on white."""

import hashlib
import io
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageCms

_PROFILE_BYTES = 4_000_000  # larger than any real profile; with the cache below it bounds the memory that profiles hold


def flatten(image: Image.Image, depth: int, inverted: bool) -> Image.Image:
    """The picture in mode L, RGB or CMYK, 8 bits a sample, what is transparent composited on white.

    depth is the bits per sample of the file, inverted says that its samples are the wrong way round.
    """
    if image.mode.startswith("I") or image.mode == "F":
        image = _eight_bits(image, depth)
    elif "transparency" in image.info:
        _scale_transparency(image, depth)
    if inverted:
        image = ImageChops.invert(image)
    if image.has_transparency_data:
        return _on_white(image)
    if image.mode in ("L", "RGB", "CMYK"):
        return image
    return image.convert("L" if image.mode == "1" else "RGB")


def _on_white(image: Image.Image) -> Image.Image:
    opaque = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    layer = image.convert(opaque + "A")
    canvas = Image.new(opaque, image.size, "white")
    canvas.paste(layer.convert(opaque), mask=layer.getchannel("A"))
    return canvas


def _scale_transparency(image: Image.Image, depth: int) -> None:
    """Bring a PNG's transparent colour, written in the file's depth, to the 8 bits that its pixels have by now."""
    transparent = image.info["transparency"]
    if image.mode == "L" and isinstance(transparent, int):
        image.info["transparency"] = transparent * 255 // (2**depth - 1) & 255
    elif image.mode == "RGB" and isinstance(transparent, tuple):
        image.info["transparency"] = tuple(sample >> max(0, depth - 8) & 255 for sample in transparent)


def _eight_bits(image: Image.Image, depth: int) -> Image.Image:
    """Grey of more than 8 bits, scaled: a plain convert would clip nearly all of it to white."""
    samples = np.asarray(image)
    if not image.mode.startswith("I;"):
        return Image.fromarray(_stretched(samples.astype(np.float32)))
    grey = Image.fromarray((samples >> max(0, depth - 8)).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(samples == transparent, 0, 255).astype(np.uint8)))
    return grey


def _stretched(samples: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(H, W) numbers without a stated range -> 0 to 255: from 0 to the first of 1, 255 and 65,535 that holds them all,
    otherwise from the lowest to the highest. What is not finite counts as the lowest (NaN) or its end of the range."""
    finite = samples[np.isfinite(samples)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low >= 0 and high <= 65_535:
        low, high = 0.0, next(top for top in (1.0, 255.0, 65_535.0) if high <= top)
    filled = np.nan_to_num(samples, nan=low, posinf=high, neginf=low)
    scaled = (filled - np.float32(low)) * np.float32(255 / ((high - low) or 1))
    return (scaled + np.float32(0.5)).clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class _Profile:
    """An ICC profile, told apart by its hash."""

    digest: bytes
    data: bytes = field(compare=False, repr=False)


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """A picture of mode L, RGB or CMYK -> sRGB, by its embedded profile where that can be used."""
    if profile and len(profile) <= _PROFILE_BYTES:
        transform = _transform(_Profile(hashlib.sha256(profile).digest(), profile), image.mode)
        if transform is not None:
            return transform.apply(image)
    return image if image.mode == "RGB" else image.convert("RGB")


@lru_cache(maxsize=16)
def _transform(profile: _Profile, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The way from a profile to sRGB; None where it is no way (unusable, another colour space) or changes nothing."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile.data))
        target = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        transform = ImageCms.ImageCmsTransform(source, target, mode, "RGB")
        probe = _probe(mode)
        moved = np.asarray(transform.apply(probe), np.int16) - np.asarray(probe.convert("RGB"), np.int16)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    return None if mode != "CMYK" and np.abs(moved).max() <= 1 else transform


def _probe(mode: str) -> Image.Image:
    """4,913 colours spread over the whole cube (every grey for mode L): a profile that leaves them is sRGB."""
    if mode == "L":
        return Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    steps = np.linspace(0, 255, 17).astype(np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(1, -1, 3)
    return Image.fromarray(cube).convert(mode)
