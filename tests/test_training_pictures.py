"""Training pictures: the random part, its decoding at a reduced size, orientation, mirroring, colours."""

import io
import re
from collections.abc import Callable

import numpy as np
import pytest
import skimage.data
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from roadmatch.errors import UnreadableImage, UnsupportedImage
from roadmatch.images import decode, decode_square
from training.data.pictures import augmented, random_part, recoloured
from training.recipe import Augment

PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket")
WHOLE = Augment(crop_area=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)


def photograph(name: str, size: tuple[int, int] = (901, 675)) -> Image.Image:
    return Image.fromarray(getattr(skimage.data, name)()).resize(size, Image.Resampling.LANCZOS)


def encoded(image: Image.Image, kind: str = "JPEG", orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    return file.getvalue()


def always(box: tuple[int, int, int, int]) -> Callable[[int, int], tuple[int, int, int, int]]:
    return lambda width, height: box


def difference(one: Image.Image | NDArray[np.uint8], other: Image.Image | NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))


def cut_from_the_whole(data: bytes, box: tuple[int, int, int, int], size: int) -> Image.Image:
    """The textbook way: everything decoded, cropped, resized with antialiasing."""
    return decode(data).rgb.crop(box).resize((size, size), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize("box", [(0, 0, 901, 675), (103, 51, 103 + 449, 51 + 600), (400, 200, 625, 425)])
def test_reduced_decoding_changes_little(name: str, box: tuple[int, int, int, int]) -> None:
    """From the largest reduction that keeps the part at 112 px: on average under 2.5 levels of 255 from the whole."""
    data = encoded(photograph(name))
    apart = difference(decode_square(data, always(box), 112), cut_from_the_whole(data, box, 112))
    assert apart.mean() < 2.5
    assert np.quantile(apart, 0.99) < 16


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_without_reduction_it_is_crop_and_resize(kind: str) -> None:
    data, box = encoded(photograph("coffee"), kind), (101, 50, 320, 270)
    assert difference(decode_square(data, always(box), 112), cut_from_the_whole(data, box, 112)).max() <= 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_part_is_chosen_in_the_upright_picture(kind: str, orientation: int) -> None:
    """For every orientation, with and without reduction, whatever remains at the picture's end."""
    data, seen = encoded(photograph("astronaut", (453, 337)), kind, orientation), []

    def choose(width: int, height: int) -> tuple[int, int, int, int]:
        seen.append((width, height))
        return width - 300, 10, width, 310

    for size in (40, 200):
        square = decode_square(data, choose, size)
        width, height = seen[-1]
        assert (width, height) == decode(data).rgb.size
        apart = difference(square, cut_from_the_whole(data, (width - 300, 10, width, 310), size))
        assert apart.mean() < 3.5


def test_only_as_much_is_decoded_as_the_part_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JPEG's decoder is asked for the greatest reduction that leaves the part at least size pixels long."""
    asked: list[tuple[int, int]] = []
    own = JpegImageFile.draft

    def noted(image: JpegImageFile, mode: str | None, size: tuple[int, int] | None) -> object:
        assert size is not None
        asked.append((image.size[0] // size[0], image.size[1] // size[1]))
        return own(image, mode, size)

    monkeypatch.setattr(JpegImageFile, "draft", noted)
    data = encoded(photograph("rocket", (1800, 1600)))
    for side, factor in ((223, None), (447, None), (448, 2), (895, 2), (896, 4), (1600, 4)):
        asked.clear()
        decode_square(data, always((0, 0, side, side)), 224)
        assert asked == ([] if factor is None else [(factor, factor)])


def test_colours_and_transparency_are_those_of_serving() -> None:
    drawing = Image.new("RGBA", (300, 200), (200, 30, 40, 0))
    drawing.paste((10, 120, 30, 255), (100, 0, 300, 200))
    data = encoded(drawing, "PNG")
    square = np.asarray(decode_square(data, always((0, 0, 300, 200)), 90))
    assert (square[:, :25] == 255).all()
    assert (square[:, 35:] == (10, 120, 30)).all()


@given(st.integers(16, 4000), st.integers(16, 4000), st.integers(0, 1000))
def test_a_part_lies_inside_the_picture_and_has_the_area_and_shape(width: int, height: int, seed: int) -> None:
    augment = Augment(crop_area=(0.2, 0.6), crop_ratio=(0.75, 1.3333))
    left, top, right, bottom = random_part(width, height, augment, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    across, down = right - left, bottom - top
    rounding = 1 + 2 / min(across, down)
    assert 0.75 / rounding <= across / down <= 1.3333 * rounding
    if max(width, height) < 1.5 * min(width, height):  # else no part of this shape may be so large
        assert 0.2 / rounding**2 <= across * down / (width * height) <= 0.6 * rounding**2


def test_parts_are_spread_over_the_picture_and_the_ranges() -> None:
    random, augment = np.random.default_rng(0), Augment(crop_area=(0.1, 0.5), crop_ratio=(0.5, 2.0))
    boxes = np.array([random_part(1000, 1000, augment, random) for _ in range(2000)])
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    areas = across * down / 1e6
    assert areas.mean() == pytest.approx(0.3, abs=0.02)
    assert np.log(across / down).mean() == pytest.approx(0, abs=0.04)
    room = boxes[:, :2] / (1000 - np.stack([across, down], 1))
    np.testing.assert_allclose(room.mean(0), 0.5, atol=0.03)


def test_where_no_drawn_part_fits_the_largest_of_the_shape_is_taken() -> None:
    augment = Augment(crop_area=(1.0, 1.0), crop_ratio=(1.0, 1.0))
    assert random_part(400, 100, augment, np.random.default_rng(0)) == (150, 0, 250, 100)


def test_the_same_generator_gives_the_same_picture_and_another_one_another() -> None:
    data, augment = encoded(photograph("chelsea")), Augment(jitter=0.4)
    pictures = [augmented(data, augment, 64, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert difference(pictures[0], pictures[2]).mean() > 1
    assert pictures[0].shape == (64, 64, 3)
    assert pictures[0].dtype == np.uint8


def test_flip_mirrors_as_often_as_it_says() -> None:
    data = encoded(photograph("rocket", (300, 300)), "PNG")
    plain = augmented(data, WHOLE, 64, np.random.default_rng(0))
    often = WHOLE.model_copy(update={"flip": 0.3})
    random = np.random.default_rng(0)
    flipped = 0
    for _ in range(200):
        picture = augmented(data, often, 64, random)
        mirrored = np.array_equal(picture, plain[:, ::-1])
        assert mirrored or np.array_equal(picture, plain)
        flipped += mirrored
    assert 40 <= flipped <= 80


def test_jitter_changes_brightness_contrast_and_saturation_within_its_range() -> None:
    """Read off the result: the mean, the spread of grey against it, the colourfulness against that."""

    def measures(image: Image.Image) -> NDArray[np.float64]:
        grey, rgb = np.asarray(image.convert("L"), np.float64), np.asarray(image, np.float64)
        return np.array([grey.mean(), grey.std() / grey.mean(), np.ptp(rgb, axis=-1).mean() / grey.std()])

    image, random = photograph("coffee", (64, 64)).point(lambda level: 80 + level * 0.3), np.random.default_rng(0)
    factors = np.array([measures(recoloured(image, 0.2, random)) for _ in range(200)]) / measures(image)
    np.testing.assert_allclose(factors.min(0), 0.8, atol=0.04)  # levels are whole numbers
    np.testing.assert_allclose(factors.max(0), 1.2, atol=0.04)  # levels are whole numbers
    grey = Image.new("RGB", (8, 8), (90, 90, 90))
    assert np.ptp(np.asarray(recoloured(grey, 0.2, random)), axis=-1).max() == 0


def test_the_interpolation_is_the_one_asked_for() -> None:
    data = encoded(photograph("rocket"))
    one, other = (
        augmented(data, WHOLE, 64, np.random.default_rng(0), interpolation=kind) for kind in ("bicubic", "bilinear")
    )
    assert difference(one, other).mean() > 0.2


def test_what_is_no_picture_is_refused() -> None:
    with pytest.raises(UnsupportedImage):
        augmented(b"GIF? no", WHOLE, 64, np.random.default_rng(0))
    with pytest.raises(UnreadableImage):
        augmented(encoded(photograph("coffee"))[:5000], WHOLE, 64, np.random.default_rng(0))


def test_a_fault_of_the_caller_is_not_taken_for_a_broken_picture() -> None:
    def wrong(width: int, height: int) -> tuple[int, int, int, int]:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match=re.escape("a bug")):
        decode_square(encoded(photograph("coffee")), wrong, 64)
