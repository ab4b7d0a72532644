"""Archives to import: real photographs with seeded edits, no two the same bytes, made once into a cache folder.

The photographs are those that the wheels of scikit-image and scikit-learn ship. Large and small pictures are few, with
a number in a comment of each copy: only the usual ones take part in a comparison of speed, where each is decoded once.
"""

import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.pictures import query_pictures

_VERSION = 1
"""Of what is made here: a change of it makes everything anew."""
_USUAL = (640, 1_025)
_LARGE = (4_000, 5_600)
_SMALL = (320, 400)
_NOISE = {_USUAL: 5, _LARGE: 7, _SMALL: 3}
_QUALITY = {_USUAL: 89, _LARGE: 95, _SMALL: 82}
_LARGE_ONES, _SMALL_ONES = 8, 64
_LARGE_SEED, _SMALL_SEED = 1_000_000, 2_000_000
_DATE = (2026, 1, 1, 0, 0, 0)


def cache_folder() -> Path:
    """Where they are kept, below TMPDIR; it may be deleted at any time but during a run."""
    return Path(tempfile.gettempdir()) / f"roadmatch-indexing-{_VERSION}"


def photographs(first: int, count: int) -> list[Path]:
    """JPEGs of 640 x 480 to 1024 x 768, about 130 KB each, no two alike; those from number `first` on."""
    folder = cache_folder() / "photographs"
    paths = [folder / f"{number:06}.jpg" for number in range(first, first + count)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda path: _made(path, lambda part: part.write_bytes(_edit(int(path.stem), _USUAL))), paths))
    return paths


def archive_of_photographs(first: int, count: int) -> Path:
    """A zip of `photographs`."""
    pictures = ((f"shop/{path.name}", path.read_bytes()) for path in photographs(first, count))
    return _archive(f"photographs-{first}-{count}", pictures)


def archive_of_large_ones(size: int) -> Path:
    """A zip of so many bytes at least, of JPEGs of 12 to 24 megapixels as cameras write them."""
    return _archive(f"large-{size}", _large_ones(size))


def archive_of_small_ones(count: int) -> Path:
    """A zip of so many JPEGs of about 20 KB, a thousand in a folder."""
    return _archive(f"small-{count}", small_ones(count))


def small_ones(count: int) -> Iterator[tuple[str, bytes]]:
    """What is in `archive_of_small_ones`: names and bytes, in its order."""
    made = [_edit(_SMALL_SEED + number, _SMALL) for number in range(_SMALL_ONES)]
    for number in range(count):
        yield f"{number // 1_000:03}/{number:06}.jpg", _marked(made[number % _SMALL_ONES], number)


def _large_ones(size: int) -> Iterator[tuple[str, bytes]]:
    made: list[bytes] = []
    number = total = 0
    while total < size:
        if number < _LARGE_ONES:
            made.append(_edit(_LARGE_SEED + number, _LARGE))
        picture = _marked(made[number % _LARGE_ONES], number)
        yield f"camera/{number:06}.jpg", picture
        total += len(picture)
        number += 1


def _edit(seed: int, widths: tuple[int, int]) -> bytes:
    """A part of a photograph, 4 to 3, perhaps mirrored, lighter or darker, with a camera's noise."""
    rng = np.random.default_rng(seed)
    sources = _sources()
    source = sources[int(rng.integers(len(sources)))]
    width = int(rng.integers(*widths)) // 4 * 4
    share = rng.uniform(0.6, 1)
    inner = (int(source.width * share), int(source.height * share))
    left, top = (int(rng.integers(whole - part + 1)) for whole, part in zip(source.size, inner, strict=True))
    cut = source.resize((width, width * 3 // 4), box=(left, top, left + inner[0], top + inner[1]))
    if rng.integers(2):
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    noise = rng.integers(-_NOISE[widths], _NOISE[widths] + 1, (*cut.size[::-1], 1), np.int16)
    pixels = np.asarray(cut, np.int16) + noise + np.int16(rng.integers(-20, 21))
    encoded = BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=_QUALITY[widths])
    return encoded.getvalue()


@cache
def _sources() -> list[Image.Image]:
    pictures = query_pictures()
    return [Image.open(BytesIO(pictures[name])).convert("RGB") for name in sorted(pictures) if "as JPEG" in name]


def _marked(jpeg: bytes, number: int) -> bytes:
    """The same picture with a number in a comment, and so with another sha256."""
    comment = struct.pack("!Q", number)
    return jpeg[:2] + b"\xff\xfe" + struct.pack("!H", 2 + len(comment)) + comment + jpeg[2:]


def _archive(name: str, members: Iterable[tuple[str, bytes]]) -> Path:
    """A zip that stores them as they are, as packing JPEGs does."""

    def write(part: Path) -> None:
        with zipfile.ZipFile(part, "w") as archive:
            for inner, data in members:
                archive.writestr(zipfile.ZipInfo(inner, _DATE), data)

    return _made(cache_folder() / f"{name}.zip", write)


def _made(path: Path, write: Callable[[Path], object]) -> Path:
    """A file that is there as a whole or not at all."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        write(part)
        part.replace(path)
    return path
