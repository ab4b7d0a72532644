"""The drawings that training is tried on: the same thing drawn by several vendors, out of six npm packages.

`python -m benchmarks.drawings FOLDER` fetches the packages (9.4 MB), draws 8,381 pictures of 1,557 things and writes
two manifests: `all.csv`, and `objects.csv` without people, faces, symbols and flags. A vendor is to a thing what a
camera is to a person, so that pairs of the same vendor can be left out of an evaluation. The pictures belong to their
makers: `SOURCES.md`, written beside them, names each with the licence.
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from roadmatch.errors import RoadmatchError
from training.data import manifest
from training.data.manifest import Row

CANVAS, DRAWN = 128, 112
"""Sides, pixels: preprocessing cuts an eighth off, and what is cut off is margin."""
FEWEST = 4
"""Vendors of a thing that is taken."""
OBJECTS = frozenset(("activities", "animals-nature", "food-drink", "objects", "travel-places"))
ALL, ONLY_OBJECTS = "all.csv", "objects.csv"
_SOURCES = "SOURCES.md"
_NAMES_CATEGORIES = ("twemoji", "noto", "fluent-emoji-flat")  # whose categories are taken, the first that has the thing


class DrawingsError(RoadmatchError):
    """Drawings that cannot be fetched or made."""


@dataclass(frozen=True)
class Package:
    """An npm package of drawings as SVG, and what its archive must be."""

    vendor: str
    version: str
    sha256: str
    licence: str
    maker: str

    @property
    def name(self) -> str:
        return f"@iconify-json/{self.vendor}"

    @property
    def archive(self) -> str:
        return f"iconify-json-{self.vendor}-{self.version}.tgz"


PACKAGES = (
    Package(
        "noto",
        "1.2.9",
        "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
        "Apache-2.0",
        "Google Inc, https://github.com/googlefonts/noto-emoji",
    ),
    Package(
        "noto-v1",
        "1.2.5",
        "2bf62c26c2c2884aa99e90aec942cdaee17a5921f05690694f4978ad4b017c37",
        "Apache-2.0",
        "Google Inc, https://github.com/googlefonts/noto-emoji",
    ),
    Package(
        "twemoji",
        "1.2.5",
        "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7",
        "CC-BY-4.0",
        "Twitter, https://github.com/jdecked/twemoji",
    ),
    Package(
        "openmoji",
        "1.2.29",
        "03181e2c156cab35cf4a62f1f7886bd971d59212e75ac3f189d5a4cae3930fc5",
        "CC-BY-SA-4.0",
        "OpenMoji, https://github.com/hfg-gmuend/openmoji",
    ),
    Package(
        "emojione",
        "1.2.3",
        "26a14f44284407e8bcde91799388dca2bfd91dbcd55a97f425524a1c5b73610e",
        "CC-BY-4.0",
        "Emoji One, https://github.com/EmojiTwo/emojitwo",
    ),
    Package(
        "fluent-emoji-flat",
        "1.2.6",
        "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
        "MIT",
        "Microsoft Corporation, https://github.com/microsoft/fluentui-emoji",
    ),
)


@dataclass(frozen=True)
class Drawing:
    """A thing as one vendor draws it."""

    thing: str
    vendor: str
    category: str
    svg: str

    @property
    def row(self) -> Row:
        return Row(f"images/{self.thing}/{self.vendor}.png", self.thing, category=self.category)


def draw(folder: Path, packages: Sequence[Package] = PACKAGES) -> int:
    """Makes the pictures and manifests in `folder`, from packages that are fetched if they are not in
    `folder`/packages -> how many pictures; nothing is done where they are there already. Raises DrawingsError.
    """
    sources = _sources(packages)
    if not _is(folder / _SOURCES, sources):
        drawings = list(drawings_of([_opened(folder / "packages", package) for package in packages]))
        if not drawings:
            raise DrawingsError(f"no thing is drawn by {FEWEST} of the packages: name more of them")
        _write(folder, drawings)
        (folder / _SOURCES).write_text(sources)  # last: it says that all is there
    return len(manifest.read(folder / ALL, folder))


def drawings_of(vendors: Sequence[tuple[str, Mapping[str, Any], Mapping[str, str]]]) -> Iterator[Drawing]:
    """(vendor, icons.json, thing -> category) of each -> the things that enough of them draw, sorted by thing.

    Skin tones are left out: they are the same drawing in other colours.
    """
    drawn = defaultdict[str, list[tuple[str, str]]](list)
    for vendor, content, _ in vendors:
        for thing, icon in content["icons"].items():
            if "skin-tone" not in thing:
                drawn[thing].append((vendor, _svg(icon, content)))
    categories = {vendor: named for vendor, _, named in vendors}
    for thing, by_vendor in sorted(drawn.items()):
        if len(by_vendor) >= FEWEST:
            found = (categories[vendor][thing] for vendor in _NAMES_CATEGORIES if thing in categories.get(vendor, ()))
            category = next(found, "")
            yield from (Drawing(thing, vendor, category, svg) for vendor, svg in by_vendor)


def of_their_own(drawings: Sequence[Drawing], pictures: Sequence[bytes]) -> list[int]:
    """Numbers of the drawings whose thing shares no picture with a thing before it: a vendor may draw two as one."""
    first: dict[bytes, str] = {}
    for drawing, png in zip(drawings, pictures, strict=True):
        first.setdefault(png, drawing.thing)
    shared = {drawing.thing for drawing, png in zip(drawings, pictures, strict=True) if first[png] != drawing.thing}
    return [number for number, drawing in enumerate(drawings) if drawing.thing not in shared]


def picture(svg: str) -> bytes:
    """SVG -> PNG, RGB: the drawing on white, with a margin."""
    import resvg_py

    with Image.open(io.BytesIO(resvg_py.svg_to_bytes(svg, width=DRAWN, height=DRAWN, skip_system_fonts=True))) as read:
        drawn = read.convert("RGBA")
    canvas = Image.new("RGBA", (CANVAS, CANVAS), "white")
    canvas.alpha_composite(drawn.crop((0, 0, DRAWN, DRAWN)), ((CANVAS - DRAWN) // 2,) * 2)
    written = io.BytesIO()
    canvas.convert("RGB").save(written, "PNG", compress_level=4)
    return written.getvalue()


def _svg(icon: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    width, height = (icon.get(side, content.get(side, 16)) for side in ("width", "height"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}">{icon["body"]}</svg>'
    )


def _opened(folder: Path, package: Package) -> tuple[str, Mapping[str, Any], Mapping[str, str]]:
    """The vendor, its icons and their categories."""
    archive = folder / package.archive
    if not archive.is_file():
        _fetch(folder, package)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != package.sha256:
        raise DrawingsError(f"{archive} is not the archive of {package.name} {package.version}: delete it, try again")
    with tarfile.open(archive) as opened:
        icons, metadata = (_member(opened, f"package/{name}.json") for name in ("icons", "metadata"))
    categories = {thing: _plain(name) for name, things in metadata["categories"].items() for thing in things}
    return package.vendor, icons, categories


def _member(archive: tarfile.TarFile, name: str) -> Mapping[str, Any]:
    file = archive.extractfile(name)
    assert file is not None
    content: Mapping[str, Any] = json.load(file)
    return content


def _plain(category: str) -> str:
    return "-".join(re.findall(r"[a-z]+", category.lower()))


def _fetch(folder: Path, package: Package) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise DrawingsError(f"npm is not installed: install it, or put {package.archive} into {folder}") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise DrawingsError(f"`{' '.join(command)}` failed ({said}): try again, or put it into {folder}") from None


def _write(folder: Path, drawings: Sequence[Drawing]) -> None:
    """All pictures, then the manifests; those of an earlier try are replaced."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as processes:
        pictures = list(processes.map(picture, [drawing.svg for drawing in drawings], chunksize=64))
    kept = of_their_own(drawings, pictures)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".images.") as draft:
        for number in kept:
            file = Path(draft) / drawings[number].row.path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(pictures[number])
        shutil.rmtree(folder / "images", ignore_errors=True)
        (Path(draft) / "images").rename(folder / "images")
    rows = [drawings[number].row for number in kept]
    for name, taken in ((ALL, rows), (ONLY_OBJECTS, [row for row in rows if row.category in OBJECTS])):
        manifest.write(manifest.of_rows(folder, taken, str), folder / name)


def _sources(packages: Sequence[Package]) -> str:
    lines = [
        f"- {package.name} {package.version} (npm, sha256 {package.sha256}): {package.maker}; {package.licence}"
        for package in packages
    ]
    return "\n".join(
        [
            "# Where the drawings come from",
            f"Drawn on white, {DRAWN} of {CANVAS} pixels; things that {FEWEST} of these packages draw.",
            "Left out: skin tones, and things of which a package has the same picture as of another.",
            *lines,
            "",
        ]
    )


def _is(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text() == text


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints how many pictures there are; 1 with one line on stderr if they cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drawings", description=__doc__)
    parser.add_argument("folder", type=Path, help="for packages, pictures and manifests (75 MB)")
    folder = parser.parse_args(arguments).folder
    try:
        print(f"{draw(folder.absolute())} pictures in {folder}")
    except (DrawingsError, OSError) as error:
        print(f"drawings: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
