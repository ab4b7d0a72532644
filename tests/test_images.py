"""Bytes -> RGB pixels: every kind of file gets its answer, and every way of writing a picture the same pixels."""

import io
import struct
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import EpsImagePlugin, Image, ImageCms, ImageFile, PngImagePlugin

from roadmatch.errors import ImageError, ImageTooLarge, UnreadableImage, UnsupportedImage
from roadmatch.images import Limits, Preprocessing, decode, network_pixels, read_pixels, reencode
from roadmatch.images.colour import to_srgb
from tests.hostile_pictures import (
    HEIGHT,
    WIDTH,
    chunk,
    display_p3,
    encoded,
    hostile_pictures,
    photo,
    png,
    segments_without,
    tiff,
    with_jpeg_size,
    with_repeated_scan,
)

RULE = Preprocessing(size=224, resize=256, reduce_to=512, interpolation="bicubic")
REFUSALS: dict[object, type[ImageError]] = {413: ImageTooLarge, 415: UnsupportedImage, 422: UnreadableImage}
PICTURES = hostile_pictures()
TAKEN = sorted(name for name, file in PICTURES.items() if file.expect == "ok")
REFUSED = sorted(set(PICTURES) - set(TAKEN))


def seen(name: str) -> NDArray[np.int16]:
    """(224, 224, 3) what the network sees of a file, as signed numbers."""
    return read_pixels(PICTURES[name].data, RULE)[0].astype(np.int16)


def whole(data: bytes) -> NDArray[np.int16]:
    """(H, W, 3) all pixels of a file."""
    return np.asarray(decode(data).rgb).astype(np.int16)


def unlike(one: NDArray[np.int16], other: NDArray[np.int16]) -> float:
    """Mean absolute difference in levels."""
    return float(np.abs(one - other).mean())


# Which files are taken


@pytest.mark.parametrize("name", TAKEN)
def test_a_picture_that_can_be_read_is_read_within_two_seconds(name: str) -> None:
    start = time.process_time()
    pixels, picture = read_pixels(PICTURES[name].data, RULE)
    assert time.process_time() - start < 2
    assert pixels.shape == (224, 224, 3)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable  # torch warns about arrays that are not
    assert picture.rgb.mode == "RGB"
    assert not picture.rgb.info


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_read_is_refused_with_its_class_at_once(name: str) -> None:
    file = PICTURES[name]
    start = time.process_time()
    with pytest.raises(ImageError) as refusal:
        read_pixels(file.data, RULE)
    assert time.process_time() - start < (0.05 if file.expect in (413, 415) else 0.5)
    assert type(refusal.value) is REFUSALS[file.expect]
    text = str(refusal.value)
    assert text.isprintable()
    assert ": " in text  # what is wrong: the mend
    assert "/" not in text
    assert "0x7f" not in text  # no address of an object


def test_the_refusal_of_a_large_picture_names_its_size_and_the_mend() -> None:
    with pytest.raises(ImageTooLarge) as refusal:
        decode(PICTURES["bomb_120mp.png"].data)
    expected = "picture is 12000 x 10000 = 120 megapixels; at most 50 are read: send a smaller copy"
    assert str(refusal.value) == expected


def test_a_file_of_too_many_bytes_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(ImageTooLarge, match=r"file is 0\.1 MB; at most 0\.001 are read"):
        decode(b"neither read nor named" * 100, limits=Limits(bytes=1000))


def test_limits_can_be_set_lower_but_not_past_what_is_safe() -> None:
    with pytest.raises(ImageTooLarge):
        decode(PICTURES["good.jpg"].data, limits=Limits(pixels=WIDTH * HEIGHT - 1))
    assert decode(PICTURES["good.jpg"].data, limits=Limits(pixels=WIDTH * HEIGHT)).width == WIDTH
    with pytest.raises(UnreadableImage):
        decode(PICTURES["good_progressive.jpg"].data, limits=Limits(jpeg_scans=9))
    with pytest.raises(ValueError, match="at most 89478485"):
        Limits(pixels=100_000_000)
    with pytest.raises(ValueError, match="longest_side is 0"):
        Limits(longest_side=0)


def test_the_costliest_scans_inside_the_limits_take_under_two_seconds() -> None:
    noise = np.random.default_rng(5).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    plain = encoded(Image.fromarray(noise), "JPEG", progressive=True, subsampling=0, quality=50)
    costly = with_repeated_scan(plain, 9, 89)  # 99 scans of dense corrections, 16 MB
    assert len(costly) < 20_000_000
    start = time.process_time()
    decode(costly)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", ["jpeg_arithmetic.jpg", "jpeg_lossless.jpg"])
def test_a_kind_of_jpeg_that_is_not_read_is_named(name: str) -> None:
    with pytest.raises(UnreadableImage, match="arithmetic coded: save it as a baseline JPEG"):
        decode(PICTURES[name].data)


def test_walking_20_megabytes_of_jpeg_takes_no_time() -> None:
    noise = np.random.default_rng(5).integers(0, 255, 19_000_000, dtype=np.uint8)  # no FF, so no marker in it
    good = PICTURES["good.jpg"].data
    start = time.process_time()
    with pytest.raises(UnreadableImage, match="does not end"):
        decode(good[:-2] + noise.tobytes())
    assert time.process_time() - start < 0.1  # 0.01 s where nothing else runs


def test_no_ghostscript_is_started_for_postscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called, fake = tmp_path / "called", tmp_path / "gs"
    fake.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for name in ("eps.eps", "eps_named.jpg"):
        with pytest.raises(UnsupportedImage):
            decode(PICTURES[name].data)
    assert not called.exists()
    with pytest.raises(subprocess.CalledProcessError), Image.open(io.BytesIO(PICTURES["eps.eps"].data)) as eps:
        eps.load()
    assert called.exists(), "the fake is not what Pillow would have started"


def test_reading_leaves_pillow_as_it_is_for_everybody_else() -> None:
    assert Image.MAX_IMAGE_PIXELS == 89_478_485
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


# The same picture, whatever wrote it


@pytest.mark.parametrize("name", [name for name in TAKEN if name.startswith("good_")])
def test_every_way_of_writing_the_picture_gives_the_same_pixels(name: str) -> None:
    _, picture = read_pixels(PICTURES[name].data, RULE)
    assert (picture.width, picture.height) == (WIDTH, HEIGHT)
    # A palette of 256 colours is off by 8 levels; a mirrored or inverted picture, or a later frame, by over 50.
    assert unlike(seen(name), seen("good.jpg")) < (9 if name.endswith(".gif") else 3)


@pytest.mark.parametrize(
    ("name", "kind", "frames"),
    [
        ("good.jpg", "jpeg", 1),
        ("good_mpo.jpg", "jpeg", 1),
        ("good_apng.png", "png", 4),
        ("good_anim.gif", "gif", 5),
        ("good_frames_100k.gif", "gif", 10_000),
        ("good_cut_later.gif", "gif", 1),
        ("good_anim.webp", "webp", 5),
        ("good_multi.tiff", "tiff", 4),
        ("good_anim.avif", "avif", 5),
        ("good_bmp.bmp", "bmp", 1),
    ],
)
def test_format_and_frames_are_told_as_far_as_they_are_cheap_to_know(name: str, kind: str, frames: int) -> None:
    picture = decode(PICTURES[name].data)
    assert (picture.format, picture.frames) == (kind, frames)


def test_grey_of_more_than_eight_bits_is_scaled_and_not_clipped() -> None:
    expected = seen("gray8.png")
    for name in ("gray16.png", "gray16.tiff", "gray32.tiff", "gray_float.tiff"):
        assert np.abs(seen(name) - expected).max() <= 1, name


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.array([0, 0.5, 1], np.float32), [0, 128, 255]),
        (np.array([0, 100, 255], np.float32), [0, 100, 255]),
        (np.array([0, 25_700, 65_535], np.float32), [0, 100, 255]),
        (np.array([-10, 0, 10], np.float32), [0, 128, 255]),
        (np.array([0, 1e9, 2e9], np.float32), [0, 128, 255]),
        (np.array([np.nan, np.inf, 1], np.float32), [0, 255, 255]),
        (np.array([np.nan, np.nan, np.nan], np.float32), [0, 0, 0]),
        (np.array([7e5, 7e5, 7e5], np.float32), [0, 0, 0]),
        (np.array([0, 25_700, 65_535], np.int32), [0, 100, 255]),
        (np.array([-100, 0, 100], np.int32), [0, 128, 255]),
    ],
)
def test_numbers_without_a_stated_range_are_spread_over_the_usual_one_that_holds_them(
    samples: NDArray[np.float32], expected: list[int]
) -> None:
    image = Image.fromarray(np.repeat(np.repeat(samples[None], 32, 0), 32, 1))
    pixels = whole(encoded(image, "TIFF"))
    assert np.abs(pixels[0, ::32, 0] - expected).max() <= 1


def test_white_is_zero_at_16_bits_is_turned_round() -> None:
    samples = np.linspace(0, 65_535, 64 * 64).astype("<u2")
    tags = {256: (3, [64]), 257: (3, [64]), 258: (3, [16]), 259: (3, [1]), 262: (3, [1]), 273: (4, [-1])}
    tags |= {277: (3, [1]), 278: (3, [64]), 279: (4, [8192])}
    black_is_zero = whole(tiff(tags, samples.tobytes()))
    white_is_zero = whole(tiff(tags | {262: (3, [0])}, samples.tobytes()))
    assert black_is_zero[0, 0, 0] == 0
    assert np.array_equal(white_is_zero, 255 - black_is_zero)


def test_twelve_bits_are_scaled_from_twelve_bits() -> None:
    tags = {256: (3, [64]), 257: (3, [64]), 258: (3, [12]), 259: (3, [1]), 262: (3, [1]), 273: (4, [-1])}
    tags |= {277: (3, [1]), 278: (3, [64]), 279: (4, [6144])}
    assert np.array_equal(whole(tiff(tags, b"\x80\x08\x00" * 2048)), np.full((64, 64, 3), 128))


@pytest.mark.parametrize("name", ["rgba.png", "la.png", "alpha.gif", "alpha.webp", "alpha.avif"])
def test_what_is_transparent_is_white(name: str) -> None:
    pixels = whole(PICTURES[name].data)
    assert pixels[:, : WIDTH // 2 - 8].min() >= 254
    opaque = whole(PICTURES["good_png.png"].data)[:, WIDTH // 2 + 8 :]
    if name == "la.png":
        opaque = opaque @ np.array([0.299, 0.587, 0.114])[:, None] * np.ones(3)
    if name != "alpha.gif":  # 216 colours
        assert unlike(pixels[:, WIDTH // 2 + 8 :], opaque) < 4


def test_what_is_half_transparent_is_half_white() -> None:
    image = Image.new("RGBA", (32, 32), (200, 100, 0, 128))
    assert np.abs(whole(encoded(image, "PNG"))[5, 5] - [227, 177, 127]).max() <= 1


def test_a_palettes_transparent_colours_are_composited() -> None:
    image = Image.new("P", (32, 32))
    image.putpalette([10, 20, 30, 100, 100, 100, 50, 60, 70])
    image.paste(1, (8, 0, 16, 32))
    image.paste(2, (16, 0, 32, 32))
    row = whole(encoded(image, "PNG", transparency=bytes([0, 128, 255])))[0]
    assert row[4].tolist() == [255, 255, 255]
    assert np.abs(row[12] - 177).max() <= 1
    assert row[20].tolist() == [50, 60, 70]


@pytest.mark.parametrize(
    ("depth", "colour", "row", "transparent", "expected"),
    [
        (2, 0, b"\x1b" * 8, b"\0\3", [0, 85, 170, 255]),  # samples 0 1 2 3; 3 is white either way
        (2, 0, b"\x1b" * 8, b"\0\1", [0, 255, 170, 255]),
        (4, 0, b"\x0f\x5a" * 8, b"\0\5", [0, 255, 255, 170]),
        (8, 0, b"\0\7\x80\xff" * 8, b"\0\7", [0, 255, 128, 255]),
        (16, 0, b"\0\0\1\7\1\x08\x80\0" * 8, b"\1\7", [0, 255, 1, 128]),
        (8, 2, (bytes(3) + b"\7" * 3 + b"\x08" * 3 + b"\x80" * 3) * 8, b"\0\7" * 3, [0, 255, 8, 128]),
        (16, 2, (bytes(6) + b"\7\1" * 3 + b"\x08\0" * 3 + b"\x80\0" * 3) * 8, b"\7\1" * 3, [0, 255, 8, 128]),
    ],
)
def test_a_png_colour_declared_transparent_is_white_at_every_depth(
    depth: int, colour: int, row: bytes, transparent: bytes, expected: list[int]
) -> None:
    data = png(32, 16, depth, colour, (b"\0" + row) * 16, chunk(b"tRNS", transparent))
    assert whole(data)[3, :4, 0].tolist() == expected


# Colour profiles


def p3_as_srgb(colour: tuple[int, int, int]) -> NDArray[np.float64]:
    """A Display P3 colour in sRGB, by the matrices of CSS Color 4."""
    to_xyz = [[0.4865709, 0.2656677, 0.1982173], [0.2289746, 0.6917385, 0.0792869], [0.0, 0.0451134, 1.0439444]]
    to_srgb = [
        [3.2404542, -1.5371385, -0.4985314],
        [-0.9692660, 1.8760108, 0.0415560],
        [0.0556434, -0.2040259, 1.0572252],
    ]
    value = np.array(colour) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    out = (np.array(to_srgb) @ np.array(to_xyz) @ linear).clip(0, 1)
    return np.asarray(np.where(out <= 0.0031308, out * 12.92, 1.055 * out ** (1 / 2.4) - 0.055) * 255)


@pytest.mark.parametrize("colour", [(200, 120, 60), (60, 180, 90), (90, 80, 200), (128, 128, 128), (255, 0, 0)])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_a_wide_gamut_profile_is_brought_to_srgb(colour: tuple[int, int, int], kind: str) -> None:
    data = encoded(Image.new("RGB", (32, 32), colour), kind, icc_profile=display_p3(), lossless=True)
    assert np.abs(whole(data)[9, 9] - p3_as_srgb(colour)).max() <= 2


def test_a_jpegs_profile_is_joined_from_its_parts_and_used() -> None:
    padded = display_p3() + bytes(70_000)  # more than one segment
    data = encoded(Image.new("RGB", (32, 32), (200, 120, 60)), "JPEG", quality=100, icc_profile=padded)
    assert data.count(b"ICC_PROFILE\0") == 2
    assert np.abs(whole(data)[9, 9] - p3_as_srgb((200, 120, 60))).max() <= 3
    one_part_missing = data.replace(b"ICC_PROFILE\0\2\2", b"ICC_PROFILE\0\3\2")
    assert np.abs(whole(one_part_missing)[9, 9] - [200, 120, 60]).max() <= 3


def cmyk_profile() -> bytes:
    """A printer profile whose only ink is cyan: Lab (50, 0, -50) where it is full, black where any other ink is."""
    header, same = bytearray(128), bytes(range(256))
    struct.pack_into(">4s4s4s4s", header, 8, b"\x02\x40\0\0", b"prtr", b"CMYK", b"Lab ")
    header[36:40] = b"acsp"
    struct.pack_into(">3I", header, 68, 0xF6D6, 0x10000, 0xD32D)
    corners = [bytes([0, 128, 128])] * 16  # cyan changes slowest
    corners[0], corners[8] = bytes([255, 128, 128]), bytes([128, 128, 78])
    unit = struct.pack(">9I", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + unit + same * 4 + b"".join(corners) + same * 3
    white = b"XYZ " + bytes(4) + struct.pack(">3I", 0xF6D6, 0x10000, 0xD32D)
    name = b"desc" + bytes(4) + struct.pack(">I", 5) + b"cyan\0" + bytes(78 + 1)
    bodies = {b"desc": name, b"wtpt": white, b"A2B0": table}
    place, index, out = 128 + 4 + 12 * len(bodies), struct.pack(">I", len(bodies)), b""
    for kind, body in bodies.items():
        index += struct.pack(">4sII", kind, place + len(out), len(body))
        out += body + bytes(-len(body) % 4)
    struct.pack_into(">I", header, 0, place + len(out))
    return bytes(header) + index + out


def test_cmyk_goes_by_its_profile_where_it_has_one() -> None:
    cyan = Image.new("CMYK", (32, 32), (255, 0, 0, 0))
    for kind in ("JPEG", "TIFF"):
        options = {"quality": 100} if kind == "JPEG" else {}
        with_profile = whole(encoded(cyan, kind, icc_profile=cmyk_profile(), **options))[9, 9]
        assert np.abs(with_profile - [54, 122, 205]).max() <= 3, with_profile  # Lab (50, 0, -50)
        assert np.abs(whole(encoded(cyan, kind, **options))[9, 9] - [0, 255, 255]).max() <= 3
        paper = encoded(Image.new("CMYK", (32, 32)), kind, icc_profile=cmyk_profile(), **options)
        assert whole(paper).min() >= 253


def test_a_profile_that_says_srgb_or_cannot_be_used_changes_no_pixel() -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    plain = whole(PICTURES["good_png.png"].data)
    for profile in (
        srgb,
        bytes(3000),
        b"not a profile",
        display_p3()[:200],
        cmyk_profile(),
        display_p3() + bytes(4_000_000),
    ):
        if len(profile) < 1_000_000:  # Pillow reads no longer one from a PNG
            assert np.array_equal(whole(encoded(photo(), "PNG", icc_profile=profile)), plain)
        assert np.array_equal(whole(encoded(photo(), "TIFF", icc_profile=profile)), plain)
    assert to_srgb(photo(), srgb) is photo()  # not even copied
    grey = whole(PICTURES["gray8.png"].data)
    assert np.array_equal(whole(encoded(photo().convert("L"), "PNG", icc_profile=display_p3())), grey)


# Reduction, resize and crop


@pytest.mark.parametrize(
    ("size", "reduce_to", "expected"),
    [
        ((800, 600), 512, (800, 600)),
        ((1024, 1024), 512, (512, 512)),
        ((1023, 1023), 512, (1023, 1023)),
        ((2049, 1025), 512, (1025, 513)),
        ((4000, 3000), 512, (1000, 750)),
        ((4000, 3000), 100, (500, 375)),  # no more than 3 times
        ((40, 33), 4, (5, 5)),
        ((40, 31), 4, (10, 8)),
        ((40, 33), 100, (40, 33)),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_decoding_halves_while_the_shorter_side_stays_long_enough(
    size: tuple[int, int], reduce_to: int, expected: tuple[int, int], kind: str
) -> None:
    options = {"compression": "tiff_lzw"} if kind == "TIFF" else {}
    picture = decode(encoded(Image.new("RGB", size, (90, 60, 30)), kind, **options), reduce_to=reduce_to)
    assert picture.rgb.size == expected
    assert (picture.width, picture.height) == size


def test_a_jpeg_is_reduced_in_its_decoder_which_is_what_makes_it_fast() -> None:
    data = encoded(photo().resize((3200, 2400)), "JPEG")
    with Image.open(io.BytesIO(data)) as drafted:
        drafted.draft("RGB", (400, 300))
        assert np.array_equal(np.asarray(decode(data, reduce_to=300).rgb), np.asarray(drafted))


@given(width=st.integers(16, 150), height=st.integers(16, 150), reduce_to=st.integers(1, 160), grey=st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_jpeg_is_reduced_by_the_same_rule_as_any_other_file(
    width: int, height: int, reduce_to: int, grey: bool
) -> None:
    slopes = np.add.outer(np.arange(height), np.arange(width)).astype(np.uint8) // 2
    image = Image.fromarray(slopes).convert("L" if grey else "RGB")
    jpeg = decode(encoded(image, "JPEG", quality=98), reduce_to=reduce_to).rgb
    other = decode(encoded(image, "PNG"), reduce_to=reduce_to).rgb
    assert jpeg.size == other.size
    assert min(jpeg.size) >= min(reduce_to, width, height)
    inner = (slice(1, -1), slice(1, -1))  # an edge may hold less than a whole block
    if min(jpeg.size) > 4:
        difference = np.asarray(jpeg, np.int16)[inner] - np.asarray(other, np.int16)[inner]
        assert np.abs(difference).mean() < 4


def test_a_turned_picture_of_odd_sides_is_reduced_and_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = photo().resize((333, 201)).transpose(Image.Transpose.ROTATE_90)
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
        picture = decode(encoded(stored, kind, exif=exif), reduce_to=50)
        assert (picture.width, picture.height) == (333, 201), kind
        assert picture.rgb.size == (84, 51), kind
        upright = np.asarray(photo().resize((84, 51)), np.int16)
        assert unlike(np.asarray(picture.rgb, np.int16), upright) < 12, kind


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos"])
def test_the_network_sees_the_centre_of_the_resized_picture(interpolation: str) -> None:
    rule = Preprocessing(size=224, resize=256, reduce_to=512, interpolation=interpolation)
    square = photo().crop((40, 0, 280, 240))
    textbook = square.resize((256, 256), Image.Resampling[interpolation.upper()]).crop((16, 16, 240, 240))
    got = network_pixels(square, rule)
    assert np.abs(got.astype(np.int16) - np.asarray(textbook, np.int16)).max() <= 1
    oblong = Image.new("RGB", (400, 240), "red")
    oblong.paste(square, (80, 0))
    assert np.array_equal(network_pixels(oblong, rule), got)
    assert np.array_equal(network_pixels(oblong.transpose(Image.Transpose.TRANSPOSE), rule), got.transpose(1, 0, 2))


@given(width=st.integers(16, 600), height=st.integers(16, 600), size=st.integers(1, 64), more=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_the_network_sees_a_square_of_any_picture(width: int, height: int, size: int, more: int) -> None:
    rule = Preprocessing(size=size, resize=size + more, reduce_to=1, interpolation="bilinear")
    pixels = network_pixels(Image.new("RGB", (width, height), (1, 2, 3)), rule)
    assert pixels.shape == (size, size, 3)
    assert (pixels == [1, 2, 3]).all()


def test_read_pixels_is_decode_and_then_the_rule() -> None:
    data = encoded(photo().resize((1280, 1100)), "JPEG")
    pixels, picture = read_pixels(data, RULE)
    assert picture.rgb.size == (640, 550)
    assert np.array_equal(pixels, network_pixels(decode(data, reduce_to=512).rgb, RULE))


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"size": 257}, {"reduce_to": 0}, {"interpolation": "nearest"}],
)
def test_a_rule_that_makes_no_sense_is_a_value_error(wrong: dict[str, int]) -> None:
    right = {"size": 224, "resize": 256, "reduce_to": 512, "interpolation": "bicubic"}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Preprocessing(**{**right, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode L"):
        network_pixels(Image.new("L", (32, 32)), RULE)


# Handing pictures out


def test_a_picture_is_handed_out_without_anything_but_its_pixels() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "secret camera"
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "secret words")
    stored = photo().transpose(Image.Transpose.ROTATE_90)
    files = [
        encoded(stored, "JPEG", exif=exif, comment=b"secret", icc_profile=display_p3()) + b"secret tail",
        encoded(stored, "PNG", exif=exif, pnginfo=text, icc_profile=display_p3()),
        encoded(stored.quantize(200), "PNG", exif=exif, pnginfo=text, transparency=0),
    ]
    for data in files:
        anew, media_type = reencode(data)
        assert b"secret" not in anew
        with Image.open(io.BytesIO(anew)) as image:
            assert image.size == (WIDTH, HEIGHT)
            assert Image.MIME[image.format or ""] == media_type
            assert not set(image.info) - {"jfif", "jfif_version", "jfif_unit", "jfif_density"}
        assert unlike(whole(anew), whole(data)) < 3


def test_drawings_are_handed_out_as_png_and_photographs_as_jpeg() -> None:
    drawing = Image.new("RGB", (64, 64), "white")
    drawing.paste((200, 0, 0), (10, 10, 40, 40))
    for kind, expected in {"PNG": "image/png", "GIF": "image/png", "BMP": "image/png", "JPEG": "image/jpeg"}.items():
        anew, media_type = reencode(encoded(drawing, kind))
        assert media_type == expected
        if media_type == "image/png":
            assert np.array_equal(whole(anew), np.asarray(drawing))
    for name in ("good.jpg", "good_png.png", "good_webp.webp", "good_avif.avif", "good_tiff.tiff"):
        assert reencode(PICTURES[name].data)[1] == "image/jpeg"


@pytest.mark.parametrize(("longest", "size"), [(160, (160, 120)), (100, (100, 75)), (1, (1, 1)), (5000, (320, 240))])
def test_a_thumbnail_keeps_its_shape_within_the_longest_side(longest: int, size: tuple[int, int]) -> None:
    for name in ("good.jpg", "good_exif6.jpg", "good_png.png"):
        anew, _ = reencode(PICTURES[name].data, longest_side=longest)
        with Image.open(io.BytesIO(anew)) as image:
            assert image.size == size


def test_a_thumbnail_of_no_pixels_is_a_value_error_and_a_broken_file_an_image_error() -> None:
    with pytest.raises(ValueError, match="longest_side is 0"):
        reencode(PICTURES["good.jpg"].data, longest_side=0)
    with pytest.raises(UnreadableImage):
        reencode(PICTURES["trunc_half.jpg"].data)


# Whatever comes


def test_many_threads_at_once_read_the_same_pixels_as_one() -> None:
    names = [name for name in TAKEN if name != "prog_50mp.jpg"]
    alone = {name: seen(name) for name in names}
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(seen, names * 4))
    for name, pixels in zip(names * 4, together, strict=True):
        assert np.array_equal(pixels, alone[name]), name


def small(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    return encoded(photo().resize((48, 36)).convert(mode), kind, **options)


SOUND: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: small(
        "JPEG", icc_profile=display_p3(), exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1\0\6\0\0"
    ),
    "progressive": lambda: small("JPEG", progressive=True),
    "cmyk": lambda: segments_without(small("JPEG", "CMYK"), 0xEE),
    "png": lambda: small("PNG", icc_profile=display_p3()),
    "palette": lambda: small("PNG", "P", transparency=3),
    "webp": lambda: small("WEBP"),
    "webp alpha": lambda: small(
        "WEBP", "RGBA", lossless=True, save_all=True, append_images=[Image.new("RGB", (48, 36))]
    ),
    "gif": lambda: small("GIF", "P", save_all=True, append_images=[Image.new("P", (48, 36), 9)]),
    "bmp": lambda: small("BMP", "P"),
    "tiff": lambda: small("TIFF", "LA"),
    "tiff jpeg": lambda: small("TIFF", compression="jpeg"),
    "tiff lzw": lambda: small("TIFF", "RGBA", compression="tiff_lzw"),
    "tiff float": lambda: small("TIFF", "F"),
    "avif": lambda: small("AVIF", "RGBA"),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_damaged_file_is_read_or_refused_and_nothing_else_happens(name: str) -> None:
    sound = SOUND[name]()
    assert decode(sound).rgb.size in ((48, 36), (36, 48))
    places = st.integers(0, len(sound) - 1) | st.integers(0, min(200, len(sound) - 1))
    edits = st.lists(st.tuples(st.sampled_from(["flip", "drop", "add"]), places, st.integers(0, 255)), max_size=6)

    @given(edits=edits, end=st.none() | places)
    @settings(max_examples=120, deadline=None, database=None)
    def damage(edits: list[tuple[str, int, int]], end: int | None) -> None:
        data = bytearray(sound[:end])
        for edit, place, value in edits:
            if edit == "add":
                data[place:place] = bytes([value])
            elif place < len(data):
                data[place : place + 1] = b"" if edit == "drop" else bytes([data[place] ^ value])
        try:
            pixels, picture = read_pixels(bytes(data), RULE)
        except ImageError:
            return
        assert picture.rgb.mode == "RGB"
        assert pixels.shape == (224, 224, 3)

    damage()


@given(
    data=st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0", b"RIFF1234WEBP", b""]),
    tail=st.binary(max_size=300),
)
@settings(max_examples=200, deadline=None)
def test_any_bytes_at_all_are_read_or_refused(data: bytes, tail: bytes) -> None:
    with pytest.raises(ImageError):
        decode(data + tail)


def test_a_header_that_lies_about_its_size_costs_no_more_than_it_may() -> None:
    start = time.process_time()
    decode(with_jpeg_size(PICTURES["good_progressive.jpg"].data, 7000, 7000), reduce_to=512)
    assert time.process_time() - start < 2
