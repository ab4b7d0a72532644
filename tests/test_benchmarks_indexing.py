import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.archives import (
    archive_of_large_ones,
    archive_of_photographs,
    archive_of_small_ones,
    cache_folder,
    photographs,
    small_ones,
)
from benchmarks.footprint import Course
from benchmarks.importing import place, workers
from benchmarks.indexing import PARTS
from benchmarks.upkeep import rows, unchanged
from roadmatch.bundle import default_bundle_folder

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True, scope="module")
def made_anew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The pictures of this module are made in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("cache")))
        yield


def members(archive: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def test_the_same_pictures_are_made_again_and_no_two_are_the_same() -> None:
    made = [path.read_bytes() for path in photographs(0, 4)]
    assert len(set(made)) == 4
    assert all(Image.open(BytesIO(data)).size >= (640, 480) for data in made)
    for path in photographs(0, 4):
        path.unlink()
    assert [path.read_bytes() for path in photographs(0, 4)] == made
    assert list(members(archive_of_photographs(1, 2)).values()) == made[1:3]


def test_copies_of_a_picture_have_bytes_of_their_own_and_can_be_read() -> None:
    made = members(archive_of_small_ones(130))
    assert made == dict(small_ones(130))
    assert len({sha256(data).digest() for data in made.values()}) == 130
    for data in (made["000/000000.jpg"], made["000/000129.jpg"]):
        with Image.open(BytesIO(data)) as picture:
            picture.load()


def test_an_archive_of_large_pictures_has_the_size_that_is_asked_for() -> None:
    archive = archive_of_large_ones(8_000_000)
    made = members(archive)
    assert archive.stat().st_size >= 8_000_000 > archive.stat().st_size - len(made["camera/000001.jpg"])
    assert 12e6 <= Image.open(BytesIO(made["camera/000000.jpg"])).size[0] ** 2 * 3 / 4 <= 24e6


def test_what_was_made_before_is_taken_from_the_cache() -> None:
    archive = cache_folder() / "photographs-7-1.zip"
    archive.parent.mkdir(exist_ok=True)
    archive.write_bytes(b"made before")
    assert archive_of_photographs(7, 1).read_bytes() == b"made before"


def test_a_course_is_told_by_its_peak_its_growth_and_the_slope_of_its_second_half() -> None:
    course = Course.of([0, 30, 60, 90, 120], [100, 110, 105, 108, 111])
    assert (course.peak, course.growth) == (111, 1)
    assert course.slope_a_minute == pytest.approx(6)


@pytest.mark.faults
def test_an_import_that_changes_nothing_is_measured_on_either_database(tmp_path: Path, database_url: str) -> None:
    (bar,), figures = unchanged(tmp_path, default_bundle_folder(), 70, database_url)
    assert bar["bar"] == ">= 5000"
    assert figures["per_s"] == pytest.approx(70 / figures["seconds"])


@pytest.mark.faults
def test_only_an_image_s_own_tables_grow_with_the_images(tmp_path: Path) -> None:
    (bar,), figures = rows(tmp_path, default_bundle_folder(), 2)
    assert (bar["value"], bar["holds"]) == (0, True)
    assert [counts["images"] for counts in figures["rows"]] == [2, 4]
    assert figures["more_for_each_image"]["embeddings"] == 1


def test_no_figure_comes_of_a_job_with_failed_entries(tmp_path: Path) -> None:
    archive = tmp_path / "notes.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("notes.txt", "no picture")
    with place(tmp_path / "data", default_bundle_folder()) as at:
        job = at.queued(at.gallery("g"), archive)
        with workers(at, 1, cpus=1), pytest.raises(RuntimeError, match="1 entries failed"):
            at.followed([job])


@pytest.mark.faults
def test_the_benchmark_of_imports_prints_its_bars_and_nothing_else() -> None:
    command = [sys.executable, "-m", "benchmarks.indexing", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures.keys() == {"bars", "machine", "database", *PARTS}
    for bar in figures["bars"]:
        sign, limit = bar["bar"].split()
        assert bar["holds"] == (bar["value"] <= float(limit) if sign == "<=" else bar["value"] >= float(limit))
    assert [bar["bar"] for bar in figures["bars"]] == [
        ">= 0.85",
        ">= 1.8",
        ">= 1.8",
        ">= 1.8",
        "<= 3",
        "<= 700",
        "<= 35",
        ">= 5000",
        "<= 0",
    ]
