"""The nine edits that make the copies of a calibration."""

import io

import numpy as np
import pytest
from PIL import Image

from training.default_bundle.copies import EDITS, FITTING, SHIFTED, copies

NAMES = ["crop", "jpeg", "blur", "flip", "text", "rotate", "colour", "resize", "strong"]


def picture(width: int = 320, height: int = 200) -> Image.Image:
    """Smooth in both directions and different in each quarter, with fine noise on top."""
    down, right = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(0).integers(0, 40, (height, width))
    planes = [120 * right / width + noise, 200 * down / height + noise, 100 + 50 * np.sin(right / 9) + noise]
    return Image.fromarray(np.stack(planes, axis=2).clip(0, 255).astype(np.uint8))


def opened(file: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(file))
    assert image.format == "JPEG"
    image.load()
    return image


def difference(a: Image.Image, b: Image.Image) -> float:
    """Mean absolute difference of the pixels, 0 to 255."""
    return float(np.abs(np.asarray(a, dtype=float) - np.asarray(b, dtype=float)).mean())


def detail(image: Image.Image) -> float:
    """Mean absolute step between neighbours."""
    return float(np.abs(np.diff(np.asarray(image.convert("L"), dtype=float))).mean())


def test_there_are_nine_named_edits_and_each_gives_a_jpeg_that_differs_from_the_picture() -> None:
    made = copies(picture(), seed=1)
    assert list(made) == list(EDITS) == NAMES
    assert len(set(made.values())) == 9
    for name, file in made.items():
        assert opened(file).mode == "RGB"
        assert difference(opened(file).resize((320, 200)), picture()) > 1, name


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    assert copies(picture(), seed=1) == copies(picture(), seed=1)
    made = [copies(picture(), seed) for seed in range(6)]
    drawn = [name for name in NAMES if len({copy[name] for copy in made}) > 1]
    assert drawn == ["crop", "blur", "text", "rotate", "colour", "strong"]  # the other three have nothing to draw


def test_the_picture_itself_is_left_as_it_was() -> None:
    image = picture(1000, 500)
    copies(image, seed=1)
    assert image.size == (1000, 500)
    assert difference(image, picture(1000, 500)) == 0


def test_the_shifted_edits_are_harder_and_only_the_flip_stays() -> None:
    fitting, shifted = copies(picture(), seed=3), copies(picture(), seed=3, strength=SHIFTED)
    assert [name for name in NAMES if fitting[name] == shifted[name]] == ["flip"]
    for name in ("blur", "resize"):
        assert detail(opened(shifted[name])) < detail(opened(fitting[name]))
    for name in ("crop", "strong"):
        assert opened(shifted[name]).width < opened(fitting[name]).width
    assert len(shifted["jpeg"]) < len(fitting["jpeg"])
    assert opened(shifted["rotate"]).height > opened(fitting["rotate"]).height
    assert SHIFTED.colour[0] >= FITTING.colour[1]
    assert SHIFTED.text[0] > FITTING.text[1]


def test_large_pictures_are_reduced_to_640_and_small_ones_are_not_enlarged() -> None:
    assert opened(copies(picture(1600, 1000), seed=1)["jpeg"]).size == (640, 400)
    assert opened(copies(picture(40, 64), seed=1)["jpeg"]).size == (40, 64)


@pytest.mark.parametrize("seed", range(5))
def test_crops_keep_their_share_of_the_area_and_the_pictures_shape(seed: int) -> None:
    made = copies(picture(), seed)
    cut = opened(made["crop"])
    assert 0.6 * 320 * 200 * 0.98 <= cut.width * cut.height <= 0.75 * 320 * 200 * 1.02
    assert cut.width / cut.height == pytest.approx(320 / 200, rel=0.01)
    assert opened(made["strong"]).size == (226, 141)  # half of 320 x 200


def test_the_flip_is_the_mirror_image() -> None:
    flipped = opened(copies(picture(), seed=1)["flip"])
    assert difference(flipped.transpose(Image.Transpose.FLIP_LEFT_RIGHT), picture()) < 10


def test_a_rotated_picture_is_whole_on_a_white_canvas() -> None:
    black = Image.new("RGB", (320, 200), "black")
    turned = opened(copies(black, seed=1)["rotate"])
    assert turned.width > 320
    assert turned.height > 200
    assert turned.getpixel((1, 1)) == (255, 255, 255)
    dark = (np.asarray(turned.convert("L")) < 128).sum()
    assert dark == pytest.approx(320 * 200, rel=0.02)


def test_the_text_bar_covers_its_share_with_both_ground_and_ink() -> None:
    grey = Image.new("RGB", (320, 200), (128, 128, 128))
    at_top = set()
    for seed in range(6):
        values = np.asarray(opened(copies(grey, seed)["text"]).convert("L"), dtype=float)
        rows = (np.abs(values - 128) > 60).mean(axis=1) > 0.5
        assert 0.14 * 200 - 1 <= rows.sum() <= 0.2 * 200 + 1
        assert rows[0] != rows[-1]
        at_top.add(bool(rows[0]))
        assert values[rows].min() < 60
        assert values[rows].max() > 195
    assert at_top == {True, False}


def test_a_picture_of_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="RGB picture is needed, not RGBA"):
        copies(picture().convert("RGBA"), seed=1)
