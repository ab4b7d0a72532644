"""The photographs of the demonstration: those that two packages ship, or a folder of the user's."""

import importlib.util
import random
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from app.commands import id_of
from roadmatch.errors import ImageError, RoadmatchError
from roadmatch.images import Limits, decode
from training.default_bundle.copies import LONG_SIDE, copies
from training.default_bundle.photographs import MIN_SIDE, distinct

SEED = 20261129
"""Of the choice of photographs, of the half that goes into the gallery and of the edits."""
FEWEST, MOST = 4, 200
_THREADS = 2
_SUFFIXES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

# What a camera took of different things, each once. Left out: even textures (brick, grass, gravel), drawings and charts
# (chessboard, color, horse, logo, phantom), pages of text, cut-outs of a few pixels, and motorcycle_right, the same
# scene as motorcycle_left from beside it. None of them took part in calibration.
SHIPPED: dict[str, tuple[str, ...]] = {
    "skimage": (
        "data/astronaut.png",
        "data/camera.png",
        "data/chelsea.png",
        "data/clock_motion.png",
        "data/coffee.png",
        "data/coins.png",
        "data/hubble_deep_field.jpg",
        "data/ihc.png",
        "data/moon.png",
        "data/motorcycle_left.png",
        "data/retina.jpg",
        "data/rocket.jpg",
    ),
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
}


class DemoError(RoadmatchError):
    """The demonstration cannot be given."""


@dataclass(frozen=True)
class Photograph:
    """A picture file, under the id that it has in the gallery, with its edited copies (JPEG files by edit)."""

    id: str
    file: Path
    copies: dict[str, bytes]


def shipped(packages: Mapping[str, Sequence[str]] = SHIPPED) -> list[Path]:
    """The files of the packages; neither is imported, which would take a second. Raises DemoError."""
    files = []
    for package, names in packages.items():
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise DemoError(
                "the demonstration's photographs are those of scikit-image and scikit-learn: "
                "pip install 'roadmatch[demo]', or give --photos a folder of your own"
            )
        files += [Path(found.origin).parent / name for name in names]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise DemoError(f"{missing} is not there: install the versions of 'roadmatch[demo]', or use --photos FOLDER")
    return files


def of_folder(folder: Path) -> list[Path]:
    """The picture files of a folder and of those in it, by name. Raises DemoError."""
    if not folder.is_dir():
        raise DemoError(f"{folder} is no folder: give --photos a folder of pictures")
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())


def prepared(files: Sequence[Path], skipped: Callable[[Path, str], None]) -> list[Photograph]:
    """At most 200 of the files, by seed, in the order of the seed, each with its copies; others are told to `skipped`.

    Nearly the same picture twice would be a match that is counted as false, so the second is left out. Raises DemoError
    where fewer than four are left.
    """
    drawn = random.Random(SEED).sample(files, len(files))
    ids = unique_ids(drawn)
    seeds = {file: SEED + number for number, file in enumerate(drawn)}
    made: list[tuple[Photograph, Image.Image]] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        while drawn and len(made) < MOST:
            some, drawn = drawn[: MOST - len(made)], drawn[MOST - len(made) :]
            for file, result in zip(
                some, pool.map(lambda file: _prepare(file, ids[file], seeds[file]), some), strict=True
            ):
                if isinstance(result, str):
                    skipped(file, result)
                else:
                    made.append(result)
    kept = set(distinct([small for _, small in made]))
    for number, (photograph, _) in enumerate(made):
        if number not in kept:
            skipped(photograph.file, "nearly the same picture as another one")
    if len(kept) < FEWEST:
        raise DemoError(f"{len(kept)} pictures are left; at least {FEWEST} different ones are needed: add some")
    return [photograph for number, (photograph, _) in enumerate(made) if number in kept]


def halves(photographs: Sequence[Photograph]) -> tuple[list[Photograph], list[Photograph]]:
    """Those that go into the gallery and those that do not; the order is the seed's already."""
    half = (len(photographs) + 1) // 2
    return list(photographs[:half]), list(photographs[half:])


def unique_ids(files: Sequence[Path]) -> dict[Path, str]:
    """An id a file, by its name; a number is put behind one that is there already."""
    ids: dict[Path, str] = {}
    taken: set[str] = set()
    for file in files:
        try:
            wanted = id_of(file)
        except ArgumentTypeError:  # no letter or digit in its name that an id can have
            wanted = "picture"
        number, item = 1, wanted
        while item in taken:
            number += 1
            item = f"{wanted[:120]}-{number}"
        taken.add(item)
        ids[file] = item
    return ids


def _prepare(file: Path, item: str, seed: int) -> tuple[Photograph, Image.Image] | str:
    """The photograph and a small copy of it, or why it is none."""
    try:
        Limits().check_bytes(file.stat().st_size)
        picture = decode(file.read_bytes(), reduce_to=LONG_SIDE).rgb
    except (ImageError, OSError) as error:
        return str(error)
    if min(picture.size) * min(1, LONG_SIDE / max(picture.size)) < MIN_SIDE:
        return f"too small or too narrow for the edits ({picture.width} x {picture.height} pixels)"
    photograph = Photograph(item, file, copies(picture, seed))
    picture.thumbnail((64, 64))  # enough to see what is the same
    return photograph, picture
