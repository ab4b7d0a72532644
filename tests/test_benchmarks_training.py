import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import drawings, heads, judging, training, training_speed
from benchmarks.drawings import DrawingsError, Package
from benchmarks.heads import Course
from benchmarks.training_speed import Case, Effort
from roadmatch.metrics.global_ap import global_average_precision
from roadmatch.metrics.opis import class_utilities, opis
from roadmatch.scoring import ScoreRule
from training.data import manifest
from training.recipe import recipe_file

ROOT = Path(__file__).parents[1]
CIRCLE = '<circle cx="8" cy="8" r="8" fill="{}"/>'
VENDORS = ("twemoji", "noto", "ours", "theirs")
THINGS = {"apple": "Food & Drink", "monkey": "Animals & Nature", "grin": "Smileys & Emotion"}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of torch, which waits for its other threads longer than they compute; the other tests keep theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def icons(*things: str, colour: str = "1") -> dict[str, Any]:
    """Each thing in a shade of its own, but for the twin, which is an apple."""
    bodies = {thing: CIRCLE.format(f"#{colour}{len(thing.replace('twin', 'apple')):02x}000") for thing in things}
    return {"width": 16, "height": 16, "icons": {thing: {"body": body} for thing, body in bodies.items()}}


def package(folder: Path, vendor: str, content: dict[str, Any]) -> Package:
    """An archive as npm makes it."""
    described = Package(vendor, "1.0.0", "", "CC0-1.0", "us")
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / described.archive, "w:gz") as archive:
        categories = {"categories": {category: [thing] for thing, category in THINGS.items()}}
        for name, value in (("icons", content), ("metadata", categories)):
            data = json.dumps(value).encode()
            member = tarfile.TarInfo(f"package/{name}.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    digest = hashlib.sha256((folder / described.archive).read_bytes()).hexdigest()
    return replace(described, sha256=digest)


def packages(folder: Path) -> list[Package]:
    """Four vendors that draw an apple and a face; three of them a monkey."""
    return [
        package(
            folder / "packages",
            vendor,
            icons("apple", "grin", "apple-skin-tone", "twin", *(["monkey"] if number else []), colour=str(number)),
        )
        for number, vendor in enumerate(VENDORS)
    ]


def test_things_that_four_vendors_draw_are_taken_but_no_skin_tones_and_no_twins(tmp_path: Path) -> None:
    assert drawings.draw(tmp_path, packages(tmp_path)) == 8
    every, objects = (manifest.read(tmp_path / name, tmp_path) for name in (drawings.ALL, drawings.ONLY_OBJECTS))
    assert every.classes == ("apple", "grin")
    assert objects.classes == ("apple",)
    assert set(objects.categories) == {"food-drink"}
    assert {path.stem for path in map(Path, objects.paths)} == set(VENDORS)
    assert all(every.file(number).is_file() for number in range(len(every)))


def test_drawings_that_are_there_are_not_made_again_and_others_are(tmp_path: Path) -> None:
    some = packages(tmp_path)
    drawings.draw(tmp_path, some)
    picture = tmp_path / "images" / "apple" / "noto.png"
    picture.write_bytes(b"kept")
    drawings.draw(tmp_path, some)
    assert picture.read_bytes() == b"kept"
    drawings.draw(tmp_path, [*some[:3], package(tmp_path / "packages", "fourth", icons("apple"))])
    assert picture.read_bytes() != b"kept"
    assert not (tmp_path / "images" / "grin").exists()


def test_the_sources_name_each_package_with_its_licence(tmp_path: Path) -> None:
    drawings.draw(tmp_path, packages(tmp_path))
    sources = (tmp_path / "SOURCES.md").read_text()
    assert all(f"@iconify-json/{vendor} 1.0.0" in sources for vendor in VENDORS)
    assert sources.count("CC0-1.0") == 4


def test_an_archive_that_is_another_one_is_refused(tmp_path: Path) -> None:
    some = packages(tmp_path)
    some[2] = replace(some[2], sha256="0" * 64)
    with pytest.raises(DrawingsError, match=r"is not the archive of @iconify-json/ours 1\.0\.0: delete it"):
        drawings.draw(tmp_path, some)
    assert not (tmp_path / "images").exists()


def test_without_npm_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DrawingsError, match=r"npm is not installed: install it, or put iconify-json-noto-1\.2\.9\.tgz"):
        drawings.draw(tmp_path)


def test_a_drawing_is_on_white_and_what_preprocessing_cuts_off_is_margin() -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><rect width="1" height="1" fill="blue"/></svg>'
    pixels = np.asarray(Image.open(io.BytesIO(drawings.picture(svg))))
    margin = (drawings.CANVAS - drawings.DRAWN) // 2
    inside = pixels[margin:-margin, margin:-margin]
    assert pixels.shape == (128, 128, 3)
    assert (inside == (0, 0, 255)).all()
    assert (pixels != 255).any(axis=2).sum() == inside.shape[0] * inside.shape[1]


def test_without_drawings_the_benchmark_names_the_command_that_makes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DrawingsError, match=r"run `python -m benchmarks\.drawings"):
        heads.drawn(tmp_path)
    assert training.main(["--here", "--part", "comparison", "--drawings", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "benchmarks.drawings" in told.err


def test_a_batch_of_all_is_every_training_image_once() -> None:
    data = heads.made_up(classes=20)
    (numbers, again) = heads._batches(data.labels[data.train], Course(None, 2, 1e-3), 0)
    assert sorted(numbers.tolist()) == sorted(again.tolist()) == list(range(len(data.train)))


def test_a_head_is_a_function_of_its_seed_and_learns(one_thread: None) -> None:
    data, course = heads.made_up(classes=40), Course(32, 30, 2e-3)
    vectors = [heads.trained(data, "gsap", course, seed) for seed in (0, 0, 1)]
    assert np.array_equal(vectors[0], vectors[1])
    assert not np.array_equal(vectors[0], vectors[2])
    gaps = [_judged(data, each)["gAP"] for each in (vectors[0], heads.frozen(data))]
    assert gaps[0] > gaps[1]


def _judged(data: heads.Drawn, vectors: np.ndarray) -> judging.Figures:
    rule = ScoreRule(0.5, 0.5, 5)
    test, validation = (
        judging.Images.of(vectors, data.labels, data.vendors, which, data.background, rule)
        for which in (data.test, data.validation)
    )
    return judging.judged(test.pairs(None, across=True), validation.pairs(None, across=True))


def test_pairs_of_a_vendor_do_not_count_across_vendors() -> None:
    """Two things by two vendors: what a vendor draws is more alike than what a thing is."""
    labels, vendors = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    thing, manner = np.eye(2)[labels], np.eye(2)[vendors]
    vectors = np.concatenate([0.6 * thing, 0.8 * manner], axis=1).astype(np.float32)
    images = judging.Images(vectors, labels, vendors, np.zeros(4))
    across, every = (images.pairs(None, across=across) for across in (True, False))
    assert global_average_precision(across.scores, across.relevant, across.counted) == 1
    # 4 ordered pairs of a vendor at .64, then the 4 that match at .36
    gap = global_average_precision(every.scores, every.relevant, every.counted)
    assert gap == pytest.approx((1 / 5 + 2 / 6 + 3 / 7 + 4 / 8) / 4)


def test_the_threshold_comes_from_the_validation_classes() -> None:
    labels = np.array([0, 0, 1, 1])
    counted = ~np.eye(4, dtype=bool)
    relevant, uneven = labels[:, None] == labels, np.arange(16).reshape(4, 4) / 1000
    high = (np.where(relevant, 0.9, 0.5) - uneven).astype(np.float32)
    low = (np.where(relevant, 0.4, 0.1) - uneven).astype(np.float32)
    test, validation = judging.Pairs(low, labels, counted), judging.Pairs(high, labels, counted)
    figures = judging.judged(test, validation)
    assert figures["R@P90"] == 0  # nothing of the test is above .5
    assert "P at R@P90" not in figures
    assert figures["F1g"] == 0
    assert figures["F1q"] == 1
    assert judging.judged(validation, test)["P at R@P90"] == pytest.approx(1 / 3)


def test_scores_are_normalised_on_both_sides() -> None:
    data = heads.made_up(classes=20)
    vectors = heads.frozen(data)
    rule = ScoreRule(0.5, 0.5, 3)
    images = judging.Images.of(vectors, data.labels, data.vendors, data.test, data.background, rule)
    background = np.sort(vectors[data.test] @ vectors[data.background].T, axis=1)[:, -3:].mean(axis=1)
    scores, similarity = (images.pairs(each, across=False).scores for each in (rule, None))
    assert np.allclose(scores, similarity - 0.5 * background[:, None] - 0.5 * background, atol=1e-5)


def test_opis_of_similarities_of_all_pairs_is_the_library_s() -> None:
    data = heads.made_up(classes=60)
    vectors, labels = heads.frozen(data)[data.test], data.labels[data.test]
    images = judging.Images(vectors, labels, data.vendors[data.test], np.zeros(len(labels)))
    ours = opis(judging.utilities(images.pairs(None, across=False)))
    theirs = opis(class_utilities(vectors, labels))
    assert ours.low == pytest.approx(theirs.low, abs=1e-3)
    assert ours.value == pytest.approx(theirs.value, rel=2e-2)


def test_speed_is_told_of_each_network_and_of_the_loader(one_thread: None) -> None:
    figures = training_speed.measure(Effort((Case("resnet18", 32, 8, 1),), loaded=7))
    assert [bar["bar"] for bar in figures["bars"]] == [">= 0.95", ">= 1"]
    (step,) = figures["steps"].values()
    assert figures["bars"][0]["value"] == pytest.approx(step["ratio"], rel=1e-3)
    assert figures["bars"][1]["value"] == pytest.approx(
        figures["loader_images_per_s"]["training"] / step["images_per_s"], rel=1e-3
    )


@pytest.mark.parametrize("name", ["ci", "small"])
def test_the_recipes_of_the_drawings_are_read(name: str) -> None:
    recipe = recipe_file.read(ROOT / "recipes" / f"{name}.yaml")
    assert recipe.data.root == ROOT / ".cache" / "drawings"
    assert recipe.data.manifest is not None
    assert recipe.data.manifest.name in {drawings.ALL, drawings.ONLY_OBJECTS}


@pytest.mark.faults
def test_the_benchmark_of_training_prints_its_bars_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    assert [bar["bar"] for bar in figures["bars"]] == [">= 0.04", "<= 0.01"] * 2 + [">= 0.95"] * 2 + [">= 1"]
    comparison = figures["comparison"]
    assert set(comparison["batches"]) == {"32", "all"}
    for by_loss in (comparison["batches"]["32"], comparison["batches"]["all"]):
        assert set(by_loss) == {"smooth_ap", "gsap", "info_nce"}
        for by_score in by_loss["gsap"].values():
            for judged in by_score.values():
                assert {"R@1", "mAP", "gAP", "F1g", "F1q", "R@P90", "OPIS"} <= set(judged)
