"""The real photographs that calibrate the default bundle, out of two Debian packages.

`photographs.csv` names every photograph with its sha256, so that a calibration always sees the same pictures.
`python -m training.default_bundle.photographs CACHE` fetches them; with `--select` it makes the CSV anew from the
choice below.
"""

import argparse
import csv
import hashlib
import io
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from roadmatch.errors import RoadmatchError

SELECTION = Path(__file__).parents[1] / "photographs.csv"
NEAR_DUPLICATE = 0.97
GRID = 16
IMAGES = (".jpg", ".png", ".webp")
ZLIB, FOLDER, ZSTD = 1, 2, 4  # flags of an entry of a Qt container
MIN_SIDE = 40  # px; below that the crops and the reduction of the edits leave a few pixels of nothing

# What holds photographs, chosen by looking at every raster image of both packages. Left out: paintings and pieces
# of them, drawings, renderings, signs, flags, silhouettes, animation strips.
GCOMPRIS = "gcompris-qt-data"
TUXPAINT = "tuxpaint-stamps-default"
PHOTOGRAPHS: dict[str, tuple[str, ...]] = {
    GCOMPRIS: (
        "*/categorization/resource/images/fishes/*",
        "*/categorization/resource/images/monuments/*",
        "*/categorization/resource/images/others/*",
        "*/categorization/resource/images/renewable/*",
        "*/categorization/resource/images/tools/*",
        "*/clickgame/resource/sea*",
        "*/details/resource/image/*_background*",
        "*/erase/resource/*",
        "*/explore_farm_animals/resource/animals/*",
        "*/explore_monuments/resource/*",
        "*/explore_world_animals/resource/animals/*",
        "*/explore_world_music/resource/music/*",
        "*/leftright/resource/*",
        "*/louis-braille/resource/*",
        "*/solar_system/resource/*",
    ),
    TUXPAINT: (
        "*/stamps/animals/*",
        "*/stamps/clothes/clothespin_*",
        "*/stamps/food/*",
        "*/stamps/hobbies/*",
        "*/stamps/household/*",
        "*/stamps/medical/*",
        "*/stamps/military/*",
        "*/stamps/naturalforces/explosion*",
        "*/stamps/people/fireman200b*",
        "*/stamps/people/toys/*",
        "*/stamps/plants/*",
        "*/stamps/seasonal/candle*",
        "*/stamps/seasonal/christmas/[A-Z]*",
        "*/stamps/seasonal/christmas/xmaswreath*",
        "*/stamps/seasonal/halloween/grave-*",
        "*/stamps/space/*",
        "*/stamps/sports/*",
        "*/stamps/town/*photo*",
        "*/stamps/town/*box*",
        "*/stamps/town/roadsigns/railroad_crossing*",
        "*/stamps/town/roadsigns/traffic_cone*",
        "*/stamps/vehicles/*",
    ),
}
NOT_PHOTOGRAPHS: tuple[str, ...] = (
    "*/cartoon/*",
    "*/details/*Gogh*",
    "*/details/*Eglise_dAuvers*",
    "*/details/*PortraitOfPereTang*",
    "*/louis-braille/*/braille_ball.*",
    "*/louis-braille/*/chart.*",
    "*/louis-braille/*/louis.*",
    "*/louis-braille/*/night_printing.*",
    "*/animals/fish/shrimp.*",
    "*/animals/insects/bee.*",
    "*/animals/mammals/echidna.*",
    "*/animals/mammals/hedgehog.*",
    "*/food/pizza.*",
    "*/household/arttools/highlighter.*",
    "*/household/dishes/glass.*",
    "*/household/dishes/mug.*",
    "*/household/key.*",
    "*/medical/tooth.*",
    "*/naturalforces/fire.*",
    "*/seasonal/christmas/Santa.*",
    "*/plants/trees/birch.*",
    "*/space/apollo_lander.*",
    "*/space/planets/0_sun.*",
    "*/sports/rugby_goal_posts.*",
    "*/vehicles/emergency/sedan_police*",
)
# The same photograph as one that is kept, in other colours or cut otherwise, so that the grey correlation misses it;
# and of eight photographs of one person's hands all but two, since the flip of a left hand is a right hand.
SAME_PHOTOGRAPH: tuple[str, ...] = (
    "*/leftright/resource/main_droite_*",
    "*/leftright/resource/main_gauche_dessus_*",
    "*/leftright/resource/poing_droit_paume_*",
    "*/leftright/resource/poing_gauche_*",
    "*/space/planets/3_earth.*",
    "*/space/planets/5_jupiter.*",
    "*/space/planets/7_uranus.*",
    "*/space/planets/8_neptune.*",
    "*/vehicles/construction/dumper_mirror.*",
)


class PhotographError(RoadmatchError):
    """The photographs cannot be fetched, or are not the ones that the selection names."""


@dataclass(frozen=True)
class Photograph:
    """One photograph: a name that no other has, and the bytes of its image file."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Row:
    """One line of the selection; inside a Qt container the path is `file.rcc:/inner/path`."""

    package: str
    path: str
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.package}/{self.path}"


def fetch(cache: Path) -> None:
    """Both packages, unpacked to cache/PACKAGE; nothing is done for one that is there already."""
    cache = cache.resolve()  # the commands run inside it
    cache.mkdir(parents=True, exist_ok=True)
    for package in PHOTOGRAPHS:
        if (cache / package).is_dir():
            continue
        if not list(cache.glob(f"{package}_*.deb")):
            run(["apt-get", "download", package], cache, f"run `apt-get update`, or put {package}_*.deb into {cache}")
        deb = max(cache.glob(f"{package}_*.deb"))
        with tempfile.TemporaryDirectory(dir=cache) as half:  # renamed when whole, so a stopped run leaves no half
            run(["dpkg", "-x", deb.name, f"{half}/{package}"], cache, f"delete {deb} and try again")
            Path(half, package).rename(cache / package)


def run(command: Sequence[str], folder: Path, mend: str) -> None:
    """Runs the command in folder; PhotographError names the mend where it is missing or fails."""
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise PhotographError(
            f"{command[0]} is not installed: the photographs come in Debian packages, so use Debian or Ubuntu"
        ) from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise PhotographError(f"`{' '.join(command[:3])}` failed ({said}): {mend}") from None


def load(cache: Path, selection: Path = SELECTION) -> list[Photograph]:
    """The photographs of the selection in its order, each verified; PhotographError names one that differs."""
    photographs, container, inside = [], Path(), dict[str, bytes]()
    for row in read_selection(selection):
        file = cache / row.package / row.path.partition(":")[0]
        if not file.is_file():
            raise PhotographError(f"{file} is missing: run `python -m training.default_bundle.photographs {cache}`")
        if file != container:  # the rows of one container follow each other: it is read once
            container, inside = file, read_images(file)
        data = inside.get(row.path.removeprefix(str(file.relative_to(cache / row.package))))
        if data is None or hashlib.sha256(data).hexdigest() != row.sha256:
            raise PhotographError(f"{row.name} is not the picture of {selection.name}: use Debian 12's packages")
        photographs.append(Photograph(row.name, data))
    return photographs


def read_images(file: Path) -> dict[str, bytes]:
    """What `images` gives, by inner path; PhotographError if the file is damaged."""
    try:
        return dict(images(file))
    except (ValueError, zlib.error) as error:
        raise PhotographError(f"{file} is damaged ({error}): delete it and fetch it anew") from None


def read_selection(selection: Path = SELECTION) -> list[Row]:
    """The rows of the CSV, in its order."""
    with selection.open(newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def write_selection(rows: Sequence[Row], selection: Path = SELECTION) -> None:
    """One line a row below a line of names."""
    with selection.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Row))
        writer.writerows(astuple(row) for row in rows)


def select(cache: Path) -> list[Row]:
    """The chosen photographs without near-duplicates, sorted by package and path."""
    rows, pictures = [], []
    for package in PHOTOGRAPHS:
        root = cache / package
        for file in sorted(file for file in root.rglob("*") if file.suffix in {".rcc", *IMAGES}):
            for inner, data in sorted(images(file)):
                path = f"{file.relative_to(root)}{inner}"
                if is_chosen(package, path) and min(upright(data).size) >= MIN_SIDE:
                    rows.append(Row(package, path, hashlib.sha256(data).hexdigest()))
                    pictures.append(upright(data))
    return [rows[index] for index in distinct(pictures)]


def is_chosen(package: str, path: str) -> bool:
    """Whether the path holds a photograph, by the lists of this module."""
    left_out = any(fnmatchcase(path, pattern) for pattern in NOT_PHOTOGRAPHS + SAME_PHOTOGRAPH)
    return not left_out and any(fnmatchcase(path, pattern) for pattern in PHOTOGRAPHS[package])


def distinct(pictures: Sequence[Image.Image]) -> list[int]:
    """RGB pictures -> indices of those kept: the first of all that correlate above 0.97 on a grey grid of 16 x 16.

    A mirrored picture counts as a duplicate, since the flip is one of the edits: its copy would be the other's too.
    """
    kept: list[int] = []
    grids = np.empty((0, GRID * GRID))
    for index, picture in enumerate(pictures):
        grid, mirrored = grey_grid(picture), grey_grid(ImageOps.mirror(picture))
        if not (grids @ np.stack([grid, mirrored], axis=1) > NEAR_DUPLICATE).any():
            kept.append(index)
            grids = np.vstack([grids, grid])
    return kept


def grey_grid(picture: Image.Image) -> NDArray[np.float64]:
    """RGB picture -> (256,) grey values of zero mean and unit length, whose product is the correlation."""
    grey = np.asarray(picture.convert("L").resize((GRID, GRID), Image.Resampling.BOX), dtype=np.float64).ravel()
    grey -= grey.mean()
    length = np.linalg.norm(grey)
    return grey / length if length else grey  # an even picture correlates with nothing


def upright(data: bytes) -> Image.Image:
    """Image file -> RGB picture, turned as EXIF says, transparent parts white."""
    with Image.open(io.BytesIO(data)) as opened:
        picture = ImageOps.exif_transpose(opened).convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture)
    return white.convert("RGB")


def images(file: Path) -> Iterator[tuple[str, bytes]]:
    """What a file holds: itself (with the inner path ""), or the images of a Qt container (`:/inner/path`)."""
    if file.suffix != ".rcc":
        yield "", file.read_bytes()
        return
    for path, data in container_entries(file.read_bytes()):
        if path.endswith(IMAGES):
            yield f":{path}", data


def container_entries(container: bytes) -> Iterator[tuple[str, bytes]]:
    """Qt resource container (.rcc) -> (path, content) of every file in it; ValueError if it is none or is cut off.

    Big-endian: "qres", version, offsets of tree, contents and names. A node of the tree is its name's offset, flags,
    then for a folder the number and first index of its children, for a file its locale and its content's offset; from
    version 2 on also 8 bytes of time. A name is its length, a hash and UTF-16; a content its length and bytes. (The
    format is that of Qt's tools/rcc and qresource.cpp.)
    """
    try:
        yield from entries(container)
    except struct.error as error:
        raise ValueError(f"a Qt resource container that is cut off: {error}") from None


def entries(container: bytes) -> Iterator[tuple[str, bytes]]:
    """What container_entries gives; struct.error where the container ends too soon."""
    magic, version, tree, contents, names = struct.unpack_from(">4sIIII", container)
    if magic != b"qres" or version not in {1, 2, 3}:
        raise ValueError(f"not a Qt resource container of version 1 to 3: {magic!r}, {version}")
    node_size = 14 if version == 1 else 22
    folders = [("", 0)]
    while folders:
        above, node = folders.pop()
        _, _, count, first = struct.unpack_from(">IHII", container, tree + node * node_size)
        for child in range(first, first + count):
            at = tree + child * node_size
            name_offset, flags = struct.unpack_from(">IH", container, at)
            (length,) = struct.unpack_from(">H", container, names + name_offset)
            text = names + name_offset + 6
            path = f"{above}/{container[text : text + 2 * length].decode('utf-16-be')}"
            if flags & FOLDER:
                folders.append((path, child))
                continue
            (offset,) = struct.unpack_from(">I", container, at + 10)
            (size,) = struct.unpack_from(">I", container, contents + offset)
            start = contents + offset + 4
            yield path, uncompressed(path, flags, container[start : start + size])


def uncompressed(path: str, flags: int, content: bytes) -> bytes:
    """The content of an entry: as it stands, or inflated (zlib, after 4 bytes that give the size)."""
    if flags & ZSTD:  # no entry of the packages is; Python reads it from 3.14 on
        raise ValueError(f"{path} is compressed with zstd, which is not read here")
    return zlib.decompress(content[4:]) if flags & ZLIB else content


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetches the photographs and prints how many there are; 1 with one line on stderr if that fails."""
    parser = argparse.ArgumentParser(prog="python -m training.default_bundle.photographs", description=__doc__)
    parser.add_argument("cache", type=Path, help="folder for the packages (205 MB, and 300 MB unpacked)")
    parser.add_argument(
        "--select", action="store_true", help=f"write {SELECTION.name} anew from the choice in the module"
    )
    options = parser.parse_args(arguments)
    try:
        fetch(options.cache)
        if options.select:
            write_selection(select(options.cache))
        photographs = load(options.cache)
    except PhotographError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(photographs)} photographs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
