"""Picture files that a service meets sooner or later, made here, each with the answer that it should get.

"ok" is a picture that is taken; 413, 415 and 422 are ImageTooLarge, UnsupportedImage and UnreadableImage. Every file
with "ok" and a name of good_* shows the picture of good.jpg, as far as its format can.
"""

import io
import re
import struct
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageChops, ImageCms, PngImagePlugin

Expectation = Literal["ok", 413, 415, 422]
WIDTH, HEIGHT = 320, 240


@dataclass(frozen=True)
class Hostile:
    """A file and the answer that it should get."""

    data: bytes
    expect: Expectation
    why: str = ""


@cache
def hostile_pictures() -> dict[str, Hostile]:
    """File name -> file. Deterministic; about a second to make, then kept."""
    return {
        **_plain(),
        **_broken(),
        **_jpegs(),
        **_pngs(),
        **_gifs(),
        **_tiffs(),
        **_other_formats(),
        **_refused_formats(),
    }


@cache
def photo() -> Image.Image:
    """A 320 x 240 RGB picture without symmetry: slopes, stripes and a patch of texture."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    channels = (columns * 255 // WIDTH, rows * 255 // HEIGHT, (columns + 2 * rows) % 96 * 2)
    pixels = np.stack(channels, -1).astype(np.uint8)
    pixels[24:72, 200:264] = np.random.default_rng(11).integers(40, 200, (48, 64, 1))
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of an image file, by Pillow's encoder."""
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    """A PNG chunk with its checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes, interlace: int = 0) -> bytes:
    """A PNG from its filtered rows, with more chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    chunks = (chunk(b"IHDR", header), *extra, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff(tags: dict[int, tuple[int, list[int]]], body: bytes = b"") -> bytes:
    """A little-endian TIFF whose directory holds tag -> (type 3 or 4, values), and after it the bytes of body.

    A value of -1 stands for the place of the body.
    """
    sizes = {tag: len(values) * (2 if kind == 3 else 4) for tag, (kind, values) in tags.items()}
    place = 8 + 2 + 12 * len(tags) + 4
    body_place = place + sum(size for size in sizes.values() if size > 4)
    directory, outside = struct.pack("<H", len(tags)), b""
    for tag, (kind, values) in sorted(tags.items()):
        placed = [body_place if value == -1 else value for value in values]
        packed = struct.pack(f"<{len(values)}{'H' if kind == 3 else 'I'}", *placed)
        if len(packed) > 4:
            outside, packed = outside + packed, struct.pack("<I", place + len(outside))
        directory += struct.pack("<HHI4s", tag, kind, len(values), packed)
    return b"II*\0" + struct.pack("<I", 8) + directory + bytes(4) + outside + body


def display_p3() -> bytes:
    """The ICC profile of Display P3: sRGB's own with other primaries (as D50-adapted XYZ)."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    primaries = {
        b"rXYZ": (0.51512, 0.24120, -0.00105),
        b"gXYZ": (0.29198, 0.69225, 0.04189),
        b"bXYZ": (0.15710, 0.06657, 0.78407),
    }
    (count,) = struct.unpack_from(">I", profile, 128)
    for entry in range(132, 132 + 12 * count, 12):
        kind, place = struct.unpack_from(">4sI", profile, entry)
        if kind in primaries:
            struct.pack_into(">3i", profile, place + 8, *(round(value * 65536) for value in primaries[kind]))
    return bytes(profile)


def segments_without(data: bytes, marker: int) -> bytes:
    """A JPEG without the header segments of one marker."""
    kept, place = data[:2], 2
    while data[place + 1] != 0xDA:
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        kept += b"" if data[place + 1] == marker else data[place:end]
        place = end
    return kept + data[place:]


def with_jpeg_size(data: bytes, width: int, height: int, marker: int | None = None) -> bytes:
    """A JPEG whose frame header says another size (and, if given, another kind of coding)."""
    changed = bytearray(data)
    place = 2
    while changed[place + 1] not in (0xC0, 0xC1, 0xC2):
        place += 2 + int.from_bytes(changed[place + 2 : place + 4], "big")
    changed[place + 1] = marker or changed[place + 1]
    struct.pack_into(">HH", changed, place + 5, height, width)
    return bytes(changed)


def with_repeated_scan(data: bytes, scan: int, times: int) -> bytes:
    """A progressive JPEG in which one scan (by its number) comes so many times more."""
    starts = [found.start() for found in re.finditer(rb"\xff\xda", data)]
    following = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]").search(data, starts[scan] + 2)
    assert following is not None
    end = following.start()
    return data[:end] + data[starts[scan] : end] * times + data[end:]


def with_hidden_scans() -> bytes:
    """A JPEG of few scans to whoever trusts lengths, and of 2,000 more to a decoder that looks for a restart."""
    flat = Image.new("L", (3000, 3000), 90)
    data = encoded(flat, "JPEG", progressive=True, quality=60, restart_marker_blocks=65_535)
    last = data.rindex(b"\xff\xda")
    restart = data.index(b"\xff\xd0", last)
    hidden = data[last:-2] * (65_000 // len(data[last:-2]))
    return data[:restart] + b"\xff\x02" + struct.pack(">H", len(hidden) + 2) + hidden + data[restart:]


def _jpeg() -> bytes:
    return encoded(photo(), "JPEG", quality=90)


def _half_transparent() -> Image.Image:
    """The photo, its left half fully transparent."""
    image = photo().copy()
    image.putalpha(
        Image.fromarray(np.where(np.arange(WIDTH) < WIDTH // 2, 0, 255).astype(np.uint8)[None].repeat(HEIGHT, 0))
    )
    return image


def _later_frames() -> list[Image.Image]:
    return [Image.new("RGB", (WIDTH, HEIGHT), (40 * number, 90, 30)) for number in range(1, 5)]


def _stored(orientation: int) -> Image.Image:
    """The photo as a camera stores it that writes this orientation."""
    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }.get(orientation)
    return photo() if turn is None else photo().transpose(turn)


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "a camera"
    return exif


def _plain() -> dict[str, Hostile]:
    jpeg = _jpeg()
    return {
        "good.jpg": Hostile(jpeg, "ok"),
        "good_png.png": Hostile(encoded(photo(), "PNG"), "ok"),
        "good_jpeg_named.png": Hostile(jpeg, "ok", "magic bytes count, names do not"),
        "good_bmp.bmp": Hostile(encoded(photo(), "BMP"), "ok"),
        "good_webp.webp": Hostile(encoded(photo(), "WEBP", quality=90), "ok"),
        "good_webp_lossless.webp": Hostile(encoded(photo(), "WEBP", lossless=True), "ok"),
        "good_avif.avif": Hostile(encoded(photo(), "AVIF", quality=85), "ok"),
        "good_tiff.tiff": Hostile(encoded(photo(), "TIFF"), "ok"),
    }


def _broken() -> dict[str, Hostile]:
    jpeg, whole_png = _jpeg(), encoded(photo(), "PNG")
    flipped = bytearray(whole_png)
    flipped[300] ^= 0xFF
    return {
        "empty.jpg": Hostile(b"", 422),
        "onebyte.jpg": Hostile(b"\xff", 415),
        "soi_only.jpg": Hostile(b"\xff\xd8\xff\xe0" + bytes(64), 422),
        "trunc_half.jpg": Hostile(jpeg[: len(jpeg) // 2], 422, "opens and verifies; only decoding fails"),
        "trunc_last2.jpg": Hostile(jpeg[:-2], 422, "a picture that does not end"),
        "no_scan.jpg": Hostile(jpeg[: jpeg.index(b"\xff\xda")] + b"\xff\xd9", 422),
        "trunc.png": Hostile(whole_png[: len(whole_png) // 2], 422),
        "no_end.png": Hostile(whole_png[:-12], 422, "all pixels are there, the end is not"),
        "crc.png": Hostile(bytes(flipped), 422),
        "trunc.gif": Hostile(encoded(photo(), "GIF")[:3000], 422),
        "trunc.webp": Hostile(encoded(photo(), "WEBP")[:3000], 422),
        "trunc.avif": Hostile(encoded(photo(), "AVIF")[:-2000], 422),
        "trunc.tiff": Hostile(encoded(photo(), "TIFF")[:3000], 422),
        "trunc.bmp": Hostile(encoded(photo(), "BMP")[:3000], 422),
        "1x1.png": Hostile(encoded(Image.new("RGB", (1, 1), "red"), "PNG"), 422, "side under 16"),
        "1x5000.png": Hostile(encoded(Image.new("RGB", (1, 5000), "red"), "PNG"), 422),
        "5000x1.jpg": Hostile(encoded(Image.new("RGB", (5000, 1), "red"), "JPEG"), 422),
        "16x16.jpg": Hostile(encoded(Image.new("RGB", (16, 16), "red"), "JPEG"), "ok", "the least that is read"),
        "flat_black.png": Hostile(encoded(Image.new("RGB", (64, 64)), "PNG"), "ok", "a constant picture"),
        "20001x17.png": Hostile(png(20001, 17, 8, 2, b""), 413, "few pixels, one side too long"),
    }


def _jpegs() -> dict[str, Hostile]:
    jpeg = _jpeg()
    cmyk = photo().convert("CMYK")
    progressive = encoded(photo(), "JPEG", progressive=True, quality=90)
    flat = encoded(Image.new("RGB", (3000, 3000), (120, 30, 200)), "JPEG", progressive=True, quality=60)
    large = encoded(Image.new("RGB", (7070, 7070), (120, 30, 200)), "JPEG", progressive=True, quality=60)
    mpo = encoded(photo(), "MPO", save_all=True, append_images=_later_frames()[:1], quality=90)
    unadobe = segments_without(encoded(ImageChops.invert(cmyk), "JPEG", quality=90), 0xEE)
    files = {
        "good_progressive.jpg": Hostile(progressive, "ok"),
        "good_polyglot.jpg": Hostile(jpeg + b"PK\x03\x04\xff\xda<script>x</script>" * 200, "ok", "bytes after the end"),
        "good_mpo.jpg": Hostile(mpo, "ok", "two pictures in one file; the first counts"),
        "good_cmyk.jpg": Hostile(encoded(cmyk, "JPEG", quality=90), "ok", "inverted, as Adobe writes it"),
        "good_cmyk_plain.jpg": Hostile(unadobe, "ok", "without Adobe's marker, so not inverted"),
        "good_exif_garbage.jpg": Hostile(
            encoded(photo(), "JPEG", quality=90, exif=b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage"), "ok"
        ),
        "good_icc_garbage.jpg": Hostile(encoded(photo(), "JPEG", quality=90, icc_profile=bytes(3000)), "ok"),
        "good_padded_markers.jpg": Hostile(jpeg.replace(b"\xff\xc0", b"\xff\xff\xff\xc0", 1), "ok"),
        "p3.jpg": Hostile(encoded(photo(), "JPEG", quality=90, icc_profile=display_p3()), "ok", "wide gamut"),
        "prog_3000scans.jpg": Hostile(with_repeated_scan(flat, 9, 3000), 422, "150 kB, half a minute of decoding"),
        "scans_50mp.jpg": Hostile(with_repeated_scan(large, 9, 60), 422, "70 scans are allowed, but not of 50 MP"),
        "prog_50mp.jpg": Hostile(large, "ok", "the usual 10 scans of 50 MP"),
        "jpeg_100mp.jpg": Hostile(with_jpeg_size(jpeg, 10_000, 10_000), 413, "from the header, without decoding"),
        "jpeg_100mp_cut.jpg": Hostile(with_jpeg_size(jpeg, 10_000, 10_000)[:700], 413, "size before completeness"),
        "jpeg_arithmetic.jpg": Hostile(with_jpeg_size(jpeg, WIDTH, HEIGHT, 0xC9), 422, "slow, and nobody writes it"),
        "jpeg_lossless.jpg": Hostile(with_jpeg_size(jpeg, WIDTH, HEIGHT, 0xC3), 422),
        "jpeg_many_comments.jpg": Hostile(jpeg[:2] + b"\xff\xfe\0\2" * 100_000 + jpeg[2:], 422, "100,000 segments"),
        "jpeg_reserved_marker.jpg": Hostile(jpeg[:-2] + b"\xff\x02\0\6\xff\xda\0\0\xff\xd9", 422, "hides a scan"),
        "hidden_scans.jpg": Hostile(with_hidden_scans(), 422, "2,000 scans inside what looks like one segment"),
        "text.jpg": Hostile(b"hello, not a picture\n" * 20, 415),
        "html.jpg": Hostile(b"<!doctype html><script>alert(1)</script>", 415),
    }
    for orientation in range(1, 9):
        data = encoded(_stored(orientation), "JPEG", quality=92, exif=_exif(orientation))
        files[f"good_exif{orientation}.jpg"] = Hostile(data, "ok", "shown upright")
    for orientation in (0, 9, 65535):
        data = encoded(photo(), "JPEG", quality=90, exif=_exif(orientation))
        files[f"good_exif_bad{orientation}.jpg"] = Hostile(data, "ok", "no such orientation: ignored")
    return files


def _pngs() -> dict[str, Hostile]:
    whole = encoded(photo(), "PNG")
    grey = np.asarray(photo().convert("L"))
    head, tail = whole[:33], whole[33:]
    bomb = zlib.compress(bytes(32 << 20), 9)
    text = PngImagePlugin.PngInfo()
    text.add_itxt("Title", "\u202egpj.exe", "he", "\u202etitle")
    text.add_text("Comment", "made by somebody")
    palette = photo().quantize(64)
    rows = np.asarray(photo())
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    adam7 = b"".join(b"\0" + row.tobytes() for top, left, down, right in passes for row in rows[top::down, left::right])
    frames = [frame.resize((WIDTH, HEIGHT)) for frame in _later_frames()[:3]]
    return {
        "good_apng.png": Hostile(encoded(photo(), "PNG", save_all=True, append_images=frames), "ok", "first frame"),
        "good_apng_lying.png": Hostile(head + chunk(b"acTL", bytes(8)) + tail, "ok", "an animation of no frames"),
        "good_interlaced.png": Hostile(png(WIDTH, HEIGHT, 8, 2, adam7, interlace=1), "ok"),
        "good_exif6.png": Hostile(encoded(_stored(6), "PNG", exif=_exif(6)), "ok", "shown upright"),
        "good_text_rtl.png": Hostile(encoded(photo(), "PNG", pnginfo=text), "ok"),
        "gray8.png": Hostile(encoded(Image.fromarray(grey), "PNG"), "ok"),
        "gray16.png": Hostile(
            encoded(Image.fromarray(grey.astype(np.uint16) * 257), "PNG"), "ok", "scaled, not clipped"
        ),
        "bilevel.png": Hostile(encoded(photo().convert("1"), "PNG"), "ok"),
        "rgba.png": Hostile(encoded(_half_transparent(), "PNG"), "ok", "left half white"),
        "la.png": Hostile(encoded(_half_transparent().convert("LA"), "PNG"), "ok", "left half white"),
        "pal_trns.png": Hostile(
            encoded(palette, "PNG", transparency=bytes([0, 128] + [255] * 62)), "ok", "two colours see-through"
        ),
        "p3.png": Hostile(encoded(photo(), "PNG", icc_profile=display_p3()), "ok", "wide gamut"),
        "bomb_65500.png": Hostile(png(65_500, 65_500, 8, 2, b""), 413),
        "bomb_120mp.png": Hostile(png(12_000, 10_000, 8, 2, b""), 413, "where Pillow only warns"),
        "bomb_1bit_64mp.png": Hostile(png(8000, 8000, 1, 0, bytes(8000 * 1001)), 413, "8 kB, 345 MB once decoded"),
        "ztxt_bomb.png": Hostile(head + chunk(b"zTXt", b"k\0\0" + bomb) + tail, 422),
        "iccp_bomb.png": Hostile(head + chunk(b"iCCP", b"k\0\0" + bomb) + tail, 422),
        "many_chunks.png": Hostile(head + chunk(b"prVt", b"") * 70_000 + tail, 422, "a second of walking"),
        "no_pixels.png": Hostile(png(64, 64, 8, 2, b""), 422),
    }


def _gifs() -> dict[str, Hostile]:
    palette = photo().quantize(256)
    later = [frame.convert("P") for frame in _later_frames()]
    tiny = b"\x2c\0\0\0\0\x01\0\x01\0\0\2\2\x44\1\0"
    plain = encoded(palette, "GIF")
    giant = struct.pack("<6sHHBBB", b"GIF89a", 64, 64, 0x80, 0, 0) + bytes(6) + b"\x21\xf9\x04\x08\0\0\0\0"
    giant += struct.pack("<BHHHHB", 0x2C, 0, 0, 10_000, 10_000, 0) + b"\2\2\x44\1\0;"
    return {
        "good_anim.gif": Hostile(encoded(palette, "GIF", save_all=True, append_images=later), "ok", "first frame"),
        "good_frames_100k.gif": Hostile(plain[:-1] + tiny * 100_000 + b";", "ok", "100,000 frames, never decoded"),
        "good_cut_later.gif": Hostile(plain[:-1] + tiny[:-3], "ok", "cut within the second frame"),
        "alpha.gif": Hostile(encoded(_half_transparent(), "GIF"), "ok", "left half white"),
        "bomb_35_bytes.gif": Hostile(
            struct.pack("<6sHHBBB", b"GIF89a", 65_535, 65_535, 0x80, 0, 0)
            + bytes(6)
            + struct.pack("<BHHHHB", 0x2C, 0, 0, 65_535, 65_535, 0)
            + b"\2\1\x44\0\0;",
            413,
            "35 bytes of 4 gigapixels",
        ),
        "frame_larger.gif": Hostile(giant, 413, "a small screen, a frame of 100 MP, and a disposal to fill it"),
    }


def _with_second_page_huge(data: bytes) -> bytes:
    """A little-endian TIFF whose second page says that it is four billion pixels wide."""
    changed = bytearray(data)
    (first,) = struct.unpack_from("<I", changed, 4)
    (count,) = struct.unpack_from("<H", changed, first)
    (second,) = struct.unpack_from("<I", changed, first + 2 + 12 * count)
    assert struct.unpack_from("<H", changed, second + 2) == (256,)
    struct.pack_into("<HII", changed, second + 4, 4, 1, 4_000_000_000)
    return bytes(changed)


def _tiffs() -> dict[str, Hostile]:
    grey = np.asarray(photo().convert("L"))
    strip = encoded(Image.new("L", (5000, 5000), 90), "JPEG", progressive=True, quality=60)
    scans = with_repeated_scan(strip, 1, 70)
    size = {256: (4, [5000]), 257: (4, [5000]), 258: (3, [8]), 262: (3, [1]), 277: (3, [1]), 278: (4, [5000])}
    tile = {256: (4, [64]), 257: (4, [64]), 258: (3, [8]), 262: (3, [1]), 277: (3, [1]), 259: (3, [8])}
    zeros = zlib.compress(bytes(8000 * 8000))
    tile |= {322: (4, [8000]), 323: (4, [8000]), 324: (4, [-1]), 325: (4, [len(zeros)])}
    raw = {256: (4, [64]), 257: (4, [64]), 258: (3, [8]), 259: (3, [1]), 262: (3, [1]), 277: (3, [1])}
    raw |= {273: (4, [-1]), 278: (4, [64]), 279: (4, [4096])}
    padded = encoded(Image.new("L", (16, 1)), "JPEG")[:-2] + bytes(2_000_000) + b"\xff\xd9"
    same = {256: (4, [16]), 257: (4, [4096]), 258: (3, [8]), 259: (3, [7]), 262: (3, [1]), 277: (3, [1])}
    same |= {273: (4, [-1] * 4096), 278: (4, [1]), 279: (4, [len(padded)] * 4096)}
    strips = tile | {259: (3, [1]), 278: (4, [1]), 273: (4, [8] * 70_000), 279: (4, [1] * 70_000)}
    strips = {tag: value for tag, value in strips.items() if not 322 <= tag <= 325}
    pages = encoded(photo(), "TIFF", save_all=True, append_images=_later_frames()[:3])
    return {
        "good_multi.tiff": Hostile(pages, "ok", "first page"),
        "good_second_page_huge.tiff": Hostile(_with_second_page_huge(pages), "ok", "later pages are never looked at"),
        "good_jpeg.tiff": Hostile(encoded(photo(), "TIFF", compression="jpeg", quality=90), "ok"),
        "good_lzw.tiff": Hostile(encoded(photo(), "TIFF", compression="tiff_lzw"), "ok"),
        "good_deflate.tiff": Hostile(encoded(photo(), "TIFF", compression="tiff_adobe_deflate"), "ok"),
        "good_cmyk.tiff": Hostile(encoded(photo().convert("CMYK"), "TIFF"), "ok"),
        "good_exif6.tiff": Hostile(encoded(_stored(6), "TIFF", exif=_exif(6)), "ok", "shown upright"),
        "gray16.tiff": Hostile(encoded(Image.fromarray(grey.astype(">u2") * np.uint16(257)), "TIFF"), "ok", "I;16B"),
        "gray_float.tiff": Hostile(encoded(Image.fromarray(grey.astype(np.float32) / 255), "TIFF"), "ok", "mode F"),
        "gray32.tiff": Hostile(encoded(Image.fromarray(grey.astype(np.int32) * 257), "TIFF"), "ok", "mode I"),
        "jpeg_scans.tiff": Hostile(
            tiff(size | {259: (3, [7]), 273: (4, [-1]), 279: (4, [len(scans)])}, scans), 422, "a costly JPEG inside"
        ),
        "tile_larger.tiff": Hostile(tiff(tile, zeros), 422, "64 pixels in a tile of 8,000"),
        "strips_and_tiles.tiff": Hostile(tiff(raw | {324: (4, [-1]), 325: (4, [4096])}, bytes(4096)), 422),
        "cut_a_little.tiff": Hostile(tiff(raw, bytes(4096))[:-20], 422, "20 bytes of pixels are missing"),
        "same_strips.tiff": Hostile(tiff(same, padded), 422, "4,096 strips share the same 2 MB"),
        "lzma.tiff": Hostile(encoded(photo(), "TIFF", compression="lzma"), 422, "a compression that is not read"),
        "many_strips.tiff": Hostile(tiff(strips), 422, "70,000 strips"),
        "bomb.tiff": Hostile(tiff(size | {256: (4, [60_000]), 257: (4, [60_000]), 273: (4, [-1])}, bytes(9)), 413),
        "ring.tiff": Hostile(tiff(size)[:-4] + struct.pack("<I", 8), 422, "pages in a ring, and no pixels"),
        "big.tiff": Hostile(b"II+\0\x08\0\0\0" + struct.pack("<Q", 16) + bytes(64), 415, "BigTIFF"),
    }


def _other_formats() -> dict[str, Hostile]:
    later = [frame.resize((WIDTH, HEIGHT)) for frame in _later_frames()]
    avif = encoded(photo(), "AVIF", quality=85)
    canvas = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16_382).to_bytes(3, "little") * 2
    rle = bytearray(encoded(Image.new("L", (64, 64)), "BMP")[: 14 + 40 + 1024])
    struct.pack_into("<I", rle, 30, 1)
    rle += b"\x40\x07\0\0" * 64 + b"\0\1"
    huge = bytearray(encoded(photo(), "BMP"))
    struct.pack_into("<ii", huge, 18, 20_000, -20_000)
    garbage = encoded(photo(), "AVIF", quality=85, exif=_exif(1)).replace(b"\0*\0\0\0\x08", b"\0*\x7f\xff\xff\xff", 1)
    return {
        "good_anim.webp": Hostile(encoded(photo(), "WEBP", save_all=True, append_images=later, quality=90), "ok"),
        "good_exif6.webp": Hostile(encoded(_stored(6), "WEBP", quality=90, exif=_exif(6)), "ok", "shown upright"),
        "good_anim.avif": Hostile(encoded(photo(), "AVIF", save_all=True, append_images=later, quality=85), "ok"),
        "good_exif6.avif": Hostile(encoded(_stored(6), "AVIF", quality=85, exif=_exif(6)), "ok", "shown upright"),
        "good_exif_garbage.avif": Hostile(garbage, "ok", "its EXIF says nothing about pixels"),
        "good_mif1.avif": Hostile(avif.replace(b"ftypavif", b"ftypmif1", 1), "ok", "AVIF among the compatible brands"),
        "alpha.webp": Hostile(encoded(_half_transparent(), "WEBP", quality=90), "ok", "left half white"),
        "alpha.avif": Hostile(encoded(_half_transparent(), "AVIF", quality=85), "ok", "left half white"),
        "bomb.webp": Hostile(b"RIFF" + struct.pack("<I", len(canvas) + 4) + b"WEBP" + canvas, 413, "268 MP canvas"),
        "bomb.bmp": Hostile(bytes(huge), 413),
        "rle.bmp": Hostile(bytes(rle), 422, "a second of decoding for each megabyte"),
    }


def _refused_formats() -> dict[str, Hostile]:
    inner = png(60_000, 60_000, 8, 2, b"")
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(inner), 22) + inner
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"
    svg = b'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg><text>&x;</text></svg>'
    return {
        "bm_text.bmp": Hostile(b"BMW is a car maker, and this is no picture of any car of theirs." * 4, 415),
        "heic.heic": Hostile(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200), 415),
        "heic_mif1.heic": Hostile(b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(200), 415, "no AVIF among its brands"),
        "evil.svg": Hostile(svg, 415),
        "svg_named.png": Hostile(
            b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1:1/"/></svg>', 415
        ),
        "eps.eps": Hostile(eps, 415, "Ghostscript is never started"),
        "eps_named.jpg": Hostile(eps, 415, "Ghostscript is never started"),
        "pdf_named.png": Hostile(b"%PDF-1.4\n1 0 obj<<>>endobj\ntrailer<<>>\n%%EOF", 415),
        "psd.psd": Hostile(b"8BPS\0\1" + bytes(100), 415),
        "fits.fits": Hostile(b"SIMPLE  =                    T" + b" " * 2850, 415),
        "ico_bomb.ico": Hostile(icon, 415),
        "jpeg2000.jp2": Hostile(encoded(photo(), "JPEG2000"), 415, "Pillow would read it"),
        "tga.tga": Hostile(encoded(photo(), "TGA"), 415, "Pillow would read it"),
        "ppm.ppm": Hostile(encoded(photo(), "PPM"), 415, "Pillow would read it"),
    }
