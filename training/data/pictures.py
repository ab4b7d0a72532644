"""Training pictures: a random part of a file, decoded no larger than needed, perhaps mirrored and recoloured."""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from roadmatch.images import Box, decode_square
from training.recipe import Augment

_TRIES = 10  # at a part that lies inside the picture, as in torchvision's RandomResizedCrop


def augmented(
    data: bytes, augment: Augment, size: int, random: np.random.Generator, *, interpolation: str = "bicubic"
) -> NDArray[np.uint8]:
    """(size, size, 3) pixels of a file: a random part of it, resized, mirrored and recoloured as `augment` says.

    The same generator state gives the same pixels. Raises ImageError for a file that is no picture.
    """
    square = decode_square(
        data,
        lambda width, height: random_part(width, height, augment, random),
        size,
        interpolation=interpolation,
    )
    if random.random() < augment.flip:
        square = ImageOps.mirror(square)
    if augment.jitter:
        square = recoloured(square, augment.jitter, random)
    return np.array(square)


def random_part(width: int, height: int, augment: Augment, random: np.random.Generator) -> Box:
    """A box in whole pixels: share of the picture uniform in crop_area, logarithm of width / height in crop_ratio.

    Where none of ten draws lies inside the picture, it is the largest centred part whose shape is in crop_ratio.
    """
    low, high = augment.crop_ratio
    for _ in range(_TRIES):
        area = width * height * random.uniform(*augment.crop_area)
        ratio = math.exp(random.uniform(math.log(low), math.log(high)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 1 <= across <= width and 1 <= down <= height:
            left, top = int(random.integers(width - across + 1)), int(random.integers(height - down + 1))
            return left, top, left + across, top + down
    ratio = min(max(width / height, low), high)
    across, down = max(1, min(width, round(height * ratio))), max(1, min(height, round(width / ratio)))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def recoloured(image: Image.Image, most: float, random: np.random.Generator) -> Image.Image:
    """Brightness, contrast and saturation, in random order, each times a factor of 1 - most to 1 + most."""
    changes = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for change in random.permutation(len(changes)):
        image = changes[change](image).enhance(1 + random.uniform(-most, most))
    return image
