"""`roadmatch-train init`: from images to a recipe that is read, fits them, and says why."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from roadmatch.errors import RoadmatchError
from training.cli import main
from training.data.batches import Batches
from training.data.checks import check, refuse
from training.data.layouts import images_of
from training.data.manifest import Manifest, Split
from training.data.splits import split
from training.init import init, name_of
from training.recipe import Mode, Recipe, recipe_file


def drawn(folder: Path, classes: Mapping[str, int] | Sequence[int], side: int = 40) -> Path:
    """A folder with so many small pictures in each of its sub-folders."""
    named = classes if isinstance(classes, Mapping) else {f"thing {n}": count for n, count in enumerate(classes)}
    random = np.random.default_rng(0)
    for name, count in named.items():
        (folder / name).mkdir(parents=True)
        for n in range(count):
            Image.fromarray(random.integers(0, 256, (side, side + 8, 3), np.uint8)).save(folder / name / f"{n}.png")
    return folder


def split_of(recipe: Recipe) -> Manifest:
    data = recipe.data
    return split(images_of(data), validation=data.validation, test=data.test, seed=data.split_seed)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("classes", [[2] * 6, [3, 9, 1, 4, 4, 2, 6, 5, 1, 8], [30] * 4, [2] * 40])
def test_the_recipe_fits_the_images(tmp_path: Path, classes: list[int], gpu: bool) -> None:
    recipe = init(drawn(tmp_path / "pictures", classes), tmp_path / "recipe.yaml", gpu=gpu)
    images = split_of(recipe)
    training = images.only(Split.TRAIN)
    refuse(check(images, recipe.batch, near_duplicates=False, threads=1))
    assert len(Batches(training.numbers, training.category_numbers, recipe.batch, seed=0)) > 0
    assert recipe.network.mode is (Mode.WHOLE if gpu else Mode.LINEAR)
    assert recipe == recipe_file.read(tmp_path / "recipe.yaml")


def test_every_choice_has_its_reason(tmp_path: Path) -> None:
    init(drawn(tmp_path / "pictures", [8] * 20, side=100), tmp_path / "recipe.yaml", gpu=True)
    text = (tmp_path / "recipe.yaml").read_text()
    assert "# 160 images of 20 classes; of some looked at: 54 png" in text
    for field in ("size", "per_class", "chunk", "epochs", "temperature", "learning_rate", "mode", "dimension"):
        assert any(f"{field}: " in line and "#" in line for line in text.splitlines()), field
    assert "size: 96  # pixels: the median picture's shorter side is 100" in text
    assert "root: pictures\n" in text


def test_few_large_classes_give_more_of_each_and_many_small_ones_the_papers_four(tmp_path: Path) -> None:
    few = init(drawn(tmp_path / "few", [40] * 6), tmp_path / "few.yaml", gpu=False)
    many = init(drawn(tmp_path / "many", [5] * 80), tmp_path / "many.yaml", gpu=False)
    assert few.batch.per_class > many.batch.per_class == 4
    assert few.batch.size >= 80


def test_a_manifest_keeps_its_own_split(tmp_path: Path) -> None:
    pictures = drawn(tmp_path / "pictures", [2] * 9)
    lines = [f"pictures/thing {n}/{i}.png,{n},{'test' if n > 5 else 'train'}" for n in range(9) for i in range(2)]
    (pictures.parent / "list.csv").write_text("\n".join(["path,label,split", *lines]))
    recipe = init(tmp_path / "list.csv", tmp_path / "recipe.yaml", gpu=False)
    assert recipe.name == "list"
    assert split_of(recipe).only(Split.TEST).classes == ("6", "7", "8")
    assert "the manifest's own split" in (tmp_path / "recipe.yaml").read_text()


def test_a_folder_elsewhere_is_named_in_full_and_one_with_a_number_for_a_name_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    recipe = init(drawn(tmp_path / "2024", [2] * 9), tmp_path / "here" / "recipe.yaml", gpu=False)
    assert recipe.name == "2024"
    assert recipe.data.root == (tmp_path / "2024").resolve()


def test_where_classes_suffice_enough_are_kept_for_operating_points_and_else_the_recipe_says_so(tmp_path: Path) -> None:
    enough = init(drawn(tmp_path / "enough", [2] * 40), tmp_path / "enough.yaml", gpu=False)
    assert len(split_of(enough).only(Split.TEST).classes) >= 20
    assert "operating points" not in (tmp_path / "enough.yaml").read_text()
    init(drawn(tmp_path / "few", [2] * 30), tmp_path / "few.yaml", gpu=False)
    assert "fewer than 20 test classes: too few for operating points" in (tmp_path / "few.yaml").read_text()


def test_four_classes_do_without_a_validation_split(tmp_path: Path) -> None:
    recipe = init(drawn(tmp_path / "pictures", [4] * 4), tmp_path / "recipe.yaml", gpu=False)
    assert (recipe.data.validation, recipe.fit.patience) == (0, 0)
    assert "the last model is taken" in (tmp_path / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({}, "holds no images"),
        ({"dog": 5}, r"has one class \(dog\)"),
        ({"dog": 1, "cat": 1}, "every class of .* has one image"),
        ({"dog": 2, "cat": 2}, "2 classes have two images or more, too few to train and to test on"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line_and_nothing_is_written(
    tmp_path: Path, classes: dict[str, int], message: str
) -> None:
    (tmp_path / "pictures").mkdir()
    drawn(tmp_path / "pictures", classes)
    with pytest.raises(RoadmatchError, match=message) as caught:
        init(tmp_path / "pictures", tmp_path / "recipe.yaml", gpu=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "recipe.yaml").exists()


def test_broken_files_are_counted_and_a_folder_of_nothing_else_is_refused(tmp_path: Path) -> None:
    folder = drawn(tmp_path / "pictures", [2] * 9)
    (folder / "thing 0" / "0.png").write_bytes(b"no picture")
    init(folder, tmp_path / "recipe.yaml", gpu=False)
    assert "17 png, 1 unreadable" in (tmp_path / "recipe.yaml").read_text()
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.raises(RoadmatchError, match="none of 18 images"):
        init(folder, tmp_path / "other.yaml", gpu=False)


def test_the_command_writes_a_recipe_and_never_over_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = drawn(tmp_path / "pictures", [3] * 9), tmp_path / "recipe.yaml"
    assert main(["init", str(folder), "--out", str(out)]) == 0
    assert f"next: roadmatch-train fit {out}" in capsys.readouterr().out
    before = out.read_text()
    assert main(["init", str(folder), "--out", str(out)]) == 1
    assert f"{out} is there already: name another file with --out" in capsys.readouterr().err
    assert out.read_text() == before


def test_a_run_that_is_there_is_not_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init(drawn(tmp_path / "pictures", [2] * 9), Path("recipe.yaml"), gpu=False)
    run = tmp_path / "runs" / "pictures"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("")
    assert main(["fit", "recipe.yaml"]) == 1
    assert "runs/pictures holds a run already: resume it, or name another folder" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("command", [["resume"], ["evaluate"], ["calibrate"], ["export", "--out", "bundle"]])
def test_a_folder_without_a_run_is_refused_in_a_line(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command[0], "nowhere", *command[1:]]) == 1
    error = capsys.readouterr().err
    assert error.startswith("roadmatch-train: nowhere holds no run")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_is_neither_a_folder_nor_a_manifest_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "nothing.txt"), "--out", str(tmp_path / "recipe.yaml")]) == 1
    assert "is no folder, and no CSV or Parquet manifest" in capsys.readouterr().err


def test_a_name_is_made_of_any_folders(tmp_path: Path) -> None:
    assert name_of(tmp_path / "My Photos (2024)!") == "my-photos-2024"
    assert name_of(tmp_path / "写真") == "images"
