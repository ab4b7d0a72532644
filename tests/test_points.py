"""Operating points of a run: which images testify, which never do, what is kept, and what too few classes get."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from roadmatch.calibration import Calibration
from roadmatch.calibration.rules import false_match_rate
from tests.tiny_run import DISTRACTORS, tiny_run, write_checkpoint
from training.data.manifest import Manifest, Row, Split, of_rows
from training.fitting.run_folder import RunError
from training.judging import held_out as testifying
from training.judging import points
from training.judging.held_out import HeldOut, background_numbers, held_out
from training.judging.points import (
    Calibrated,
    calibrate,
    calibrated_of,
    rules_for,
    stored,
)
from training.judging.trained import trained

HOW = Calibration(resamples=100)
CLASSES = 64


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("points"), classes=CLASSES)


@pytest.fixture(scope="module")
def calibrated(run: Path) -> Calibrated:
    return calibrate(run, HOW)


def listed(*rows: Row) -> Manifest:
    return of_rows(Path(), rows, str)


def of_class(label: str, count: int, split: Split = Split.TEST, asks: bool = True, answers: bool = True) -> list[Row]:
    """Rows with paths of their own."""
    return [
        Row(f"{split}/{label}/{n}-{asks}-{answers}.jpg", label, split, is_query=asks, is_gallery=answers)
        for n in range(count)
    ]


def labels_of(manifest: Manifest, found: HeldOut) -> tuple[list[str], list[str], list[str]]:
    stored, asking, distractors = (
        sorted(manifest.labels[n] for n in numbers) for numbers in (found.stored, found.asking, found.distractors)
    )
    return stored, asking, distractors


def test_one_image_of_a_class_is_stored_and_others_ask() -> None:
    manifest = listed(*of_class("a", 3), *of_class("b", 9))
    found = held_out(manifest, 1)
    stored, asking, distractors = labels_of(manifest, found)
    assert (stored, distractors) == (["a", "b"], [])
    assert Counter(asking) == {"a": 2, "b": testifying.MOST_QUERIES}
    assert not set(found.stored) & set(found.asking)
    assert set(held_out(manifest, 2).stored) != set(found.stored) or set(held_out(manifest, 3).stored) != set(
        found.stored
    )


def test_what_was_trained_on_or_chose_the_model_never_testifies() -> None:
    manifest = listed(
        *of_class("a", 3),
        *of_class("b", 3),
        *of_class("b", 1, Split.TRAIN),
        *of_class("c", 3),
        *of_class("c", 1, Split.VALIDATION),
        *of_class("d", 3, Split.VALIDATION),
    )
    assert labels_of(manifest, held_out(manifest, 1)) == (["a"], ["a", "a"], [])


def test_images_of_no_class_and_lone_ones_are_distractors() -> None:
    manifest = listed(*of_class("a", 2), *of_class("lone", 1), Row("x", "", Split.TEST), Row("y", "", Split.TRAIN))
    assert labels_of(manifest, held_out(manifest, 1)) == (["a"], ["a"], ["", "lone"])


def test_who_asks_and_who_answers_is_as_the_manifest_says() -> None:
    manifest = listed(
        *of_class("a", 2, asks=False),
        *of_class("a", 2, answers=False),
        *of_class("only answers", 3, asks=False),
        *of_class("only asks", 3, answers=False),
        Row("x", "", Split.TEST, is_query=False),
    )
    found = held_out(manifest, 1)
    assert labels_of(manifest, found) == (["a"], ["a", "a"], ["only asks"] * 3)
    assert manifest.is_gallery[found.stored].all()
    assert manifest.is_query[found.asking].all()


def test_where_the_test_images_have_no_gallery_they_are_each_others() -> None:
    manifest = listed(
        *of_class("known", 2, answers=False), *of_class("known", 2, Split.TRAIN), *of_class("new", 2, answers=False)
    )
    assert labels_of(manifest, held_out(manifest, 1)) == (["new"], ["new"], [])


def test_the_background_is_one_training_image_of_each_class_before_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testifying, "BACKGROUND_IMAGES", (5, 6))
    rows = [*of_class("a", 9, Split.TRAIN), *of_class("b", 2, Split.TRAIN), *of_class("c", 1, Split.TRAIN)]
    manifest = listed(*rows, *of_class("d", 9), *of_class("e", 9, Split.VALIDATION))
    found = background_numbers(manifest, frozenset())
    assert Counter(manifest.labels[n] for n in found) == {"a": 2, "b": 2, "c": 1}
    assert len(set(found)) == 5
    assert {manifest.labels[n] for n in background_numbers(manifest, frozenset("ab"))} == {"c"}
    many = listed(*(row for n in range(9) for row in of_class(f"class {n}", 2, Split.TRAIN)))
    assert len({many.labels[n] for n in background_numbers(many, frozenset())}) == 6


@pytest.mark.parametrize(("classes", "default"), [(20, 0.2), (30, 0.1), (60, 0.05), (300, 0.01)])
def test_the_default_rule_is_the_strictest_that_so_many_classes_show(classes: int, default: float) -> None:
    rules = rules_for(classes)
    rates = [rule.false_match_rate for rule in rules if rule.false_match_rate and rule.least_rate(classes) is None]
    assert rates[0] == default
    assert false_match_rate(0.01).name in [rule.name for rule in rules]


def test_the_points_say_what_they_were_fitted_on(run: Path, calibrated: Calibrated) -> None:
    found = calibrated.points
    assert found.model == trained(run).model
    assert found.default_rule == "false_match_rate<=0.05"
    evidence = found.point(found.default_rule).evidence
    assert evidence is not None
    assert evidence.what == "held-out classes of tiny, one image of each in the gallery"
    assert (evidence.pictures, evidence.gallery_size) == (CLASSES, 13)
    assert evidence.searches_with_match == 2 * CLASSES
    low = evidence.false_match_rate.low
    assert low is not None
    assert low <= 0.05
    assert evidence.distractors == DISTRACTORS
    assert evidence.searches_without_match == 2 * CLASSES
    assert any("300 are needed" in line for line in calibrated.warnings)
    assert any("background images are few" in line for line in calibrated.warnings)


def test_the_rate_of_distractors_is_stated_by_itself(run: Path, calibrated: Calibrated) -> None:
    opened = trained(run)
    images = held_out(opened.manifest, HOW.seed)
    assert [opened.manifest.labels[n] for n in images.distractors] == [""] * DISTRACTORS
    for point in calibrated.points.points:
        if point.evidence is not None:
            alone = point.evidence.distractor_match_rate
            assert alone is not None
            assert (alone.value * DISTRACTORS) % 1 == pytest.approx(0, abs=1e-4)


def test_a_point_that_did_not_hold_for_distractors_is_warned_of(
    run: Path, calibrated: Calibrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distractors here are in truth images of the stored classes, which all find them."""
    opened = trained(run)
    images = held_out(opened.manifest, HOW.seed)
    numbers, asking = opened.manifest.numbers.copy(), images.asking
    _, second = np.unique(numbers[asking][::-1], return_index=True)
    alike = asking[::-1][second][::10]  # each of these classes asks with another image, too
    numbers[alike] = -1000 - np.arange(len(alike))
    monkeypatch.setitem(vars(opened.manifest), "numbers", numbers)
    split = HeldOut(images.stored, np.setdiff1d(asking, alike), alike)
    monkeypatch.setattr(points, "held_out", lambda *_: split)
    found = calibrated_of(opened, HOW, anew=True)
    assert any("did not hold for distractors alone" in line for line in found.warnings)


def test_what_was_calibrated_is_kept_until_the_checkpoint_changes(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, classes=20)
    first = calibrate(run, HOW)
    opened = trained(run)
    again = calibrated_of(opened)
    np.testing.assert_array_equal(first.background, again.background)
    assert dataclasses.replace(first, background=again.background).points == again.points
    assert (first.score, first.classes, first.warnings) == (
        again.score,
        again.classes,
        again.warnings,
    )
    assert first.points.default_rule == "false_match_rate<=0.2"
    kept = run / points.FOLDER / points.FILE
    content = json.loads(kept.read_text())
    for spoilt in (
        {**content, "format": 3},
        {**content, "background_sha256": "0"},
        {**content, "score": {"beta": 1, "x": 2}},
    ):
        kept.write_text(json.dumps(spoilt))
        assert stored(opened) is None
    kept.write_text(json.dumps(content))
    write_checkpoint(run, opened.recipe, opened.state, seed=6)
    assert stored(trained(run)) is None


def test_too_few_classes_are_told_how_many_are_needed(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, classes=19)
    with pytest.raises(RunError, match=r"has 19 test classes of two .* and 20 are needed") as caught:
        calibrate(run, HOW)
    assert "\n" not in str(caught.value)
    assert not (run / points.FOLDER).exists()
