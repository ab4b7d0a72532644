"""Edited copies of a photograph: the nine edits by which the default bundle is calibrated."""

import io
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps

Range = tuple[float, float]
Edit = Callable[[Image.Image, "Strength", np.random.Generator], bytes]

LONG_SIDE = 640  # px; larger photographs are reduced to it first, so that nine copies cost tens of milliseconds
QUALITY = 90  # of the JPEG, where the edit is not the quality itself
WORDS = ("sale", "today", "summer", "see", "more", "best", "of", "photo", "news", "our", "shop", "holiday", "new", "by")


@dataclass(frozen=True)
class Strength:
    """The ranges from which each edit draws evenly; both ends the same fix the value."""

    crop: Range  # area of the cut-out window as a share of the picture's
    jpeg: Range  # quality, 1 to 95
    blur: Range  # standard deviation as a share of the long side
    text: Range  # height of the bar as a share of the picture's
    rotate: Range  # degrees, to either side
    colour: Range  # brightness, contrast and saturation each times 1 + or - this
    resize: Range  # by how much the sides are divided, before the picture is enlarged again
    strong_crop: Range  # area, as in crop
    strong_jpeg: Range


FITTING = Strength(
    crop=(0.6, 0.75),
    jpeg=(30, 30),
    blur=(0.003, 0.006),
    text=(0.14, 0.2),
    rotate=(10, 10),
    colour=(0.2, 0.4),
    resize=(5, 5),
    strong_crop=(0.5, 0.5),
    strong_jpeg=(40, 40),
)
SHIFTED = Strength(
    crop=(0.4, 0.6),
    jpeg=(15, 15),
    blur=(0.007, 0.01),
    text=(0.24, 0.3),
    rotate=(20, 20),
    colour=(0.4, 0.5),
    resize=(7, 7),
    strong_crop=(0.36, 0.36),
    strong_jpeg=(25, 25),
)


def copies(image: Image.Image, seed: int, strength: Strength = FITTING) -> dict[str, bytes]:
    """RGB picture -> the JPEG file of each of the nine edits, by name; the same seed gives the same bytes.

    A picture of more than 640 px is reduced to 640 px first. The flip has no strength.
    ValueError for another mode than RGB: what becomes of transparent parts is for the caller to say.
    """
    if image.mode != "RGB":
        raise ValueError(f"an RGB picture is needed, not {image.mode}")
    reduced = image.copy()
    reduced.thumbnail((LONG_SIDE, LONG_SIDE), Image.Resampling.BICUBIC)
    return {name: edit(reduced, strength, generator(seed, name)) for name, edit in EDITS.items()}


def generator(seed: int, name: str) -> np.random.Generator:
    """The edit's own random numbers, so that one more edit does not change the others."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def crop(image: Image.Image, strength: Strength, random: np.random.Generator) -> bytes:
    return to_jpeg(window(image, random.uniform(*strength.crop), random))


def jpeg(image: Image.Image, strength: Strength, random: np.random.Generator) -> bytes:
    return to_jpeg(image, random.uniform(*strength.jpeg))


def blur(image: Image.Image, strength: Strength, random: np.random.Generator) -> bytes:
    radius = random.uniform(*strength.blur) * max(image.size)
    return to_jpeg(image.filter(ImageFilter.GaussianBlur(radius)))


def flip(image: Image.Image, _strength: Strength, _random: np.random.Generator) -> bytes:
    return to_jpeg(ImageOps.mirror(image))


def text(image: Image.Image, strength: Strength, random: np.random.Generator) -> bytes:
    """A bar across the picture, at its top or bottom, black with white words or white with black ones."""
    width, height = image.size
    bar = max(1, round(random.uniform(*strength.text) * height))
    top = 0 if random.random() < 0.5 else height - bar
    ground, ink = ("black", "white") if random.random() < 0.5 else ("white", "black")
    font = built_in_font(max(6, round(0.6 * bar)))
    words = " ".join(random.permutation(WORDS))
    result = image.copy()
    draw = ImageDraw.Draw(result)
    draw.rectangle((0, top, width, top + bar - 1), fill=ground)
    draw.text((0.2 * bar, top + bar / 2), words, fill=ink, font=font, anchor="lm")
    return to_jpeg(result)


def rotate(image: Image.Image, strength: Strength, random: np.random.Generator) -> bytes:
    """Turned on a canvas that grows with it: nothing is cut off, which is the crop's part.

    The corners are white, as an editor's canvas is and as transparent parts are shown.
    """
    degrees = random.uniform(*strength.rotate) * random.choice((-1, 1))
    return to_jpeg(image.rotate(degrees, Image.Resampling.BILINEAR, expand=True, fillcolor="white"))


def colour(image: Image.Image, strength: Strength, random: np.random.Generator) -> bytes:
    return to_jpeg(recoloured(image, strength, random))


def resize(image: Image.Image, strength: Strength, random: np.random.Generator) -> bytes:
    divisor = random.uniform(*strength.resize)
    small = image.resize([max(1, round(side / divisor)) for side in image.size], Image.Resampling.BICUBIC)
    return to_jpeg(small.resize(image.size, Image.Resampling.BICUBIC))


def strong(image: Image.Image, strength: Strength, random: np.random.Generator) -> bytes:
    """Cropped, flipped, recoloured and saved small, all at once."""
    cut = window(image, random.uniform(*strength.strong_crop), random)
    changed = ImageOps.mirror(recoloured(cut, strength, random))
    return to_jpeg(changed, random.uniform(*strength.strong_jpeg))


EDITS: Mapping[str, Edit] = {
    edit.__name__: edit for edit in (crop, jpeg, blur, flip, text, rotate, colour, resize, strong)
}


def window(image: Image.Image, share: float, random: np.random.Generator) -> Image.Image:
    """A window of the picture's shape with `share` of its area, anywhere in it."""
    width, height = (max(1, round(math.sqrt(share) * side)) for side in image.size)
    left = int(random.integers(image.width - width + 1))
    top = int(random.integers(image.height - height + 1))
    return image.crop((left, top, left + width, top + height))


def recoloured(image: Image.Image, strength: Strength, random: np.random.Generator) -> Image.Image:
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        change = random.uniform(*strength.colour) * random.choice((-1, 1))
        image = enhance(image).enhance(1 + change)
    return image


def to_jpeg(image: Image.Image, quality: float = QUALITY) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=round(quality))
    return file.getvalue()


@lru_cache(maxsize=64)
def built_in_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, so that copies do not depend on the fonts of the machine."""
    return ImageFont.load_default(size)
