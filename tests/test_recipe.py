"""The recipe file: what is read, what is refused in one line, and the tables that say what there is."""

import re
import time
from pathlib import Path

import pytest

from training.cli import main
from training.network import weights
from training.recipe import Gsap, InfoNce, RecallAtK, Recipe, recipe_table
from training.recipe.plain_yaml import MOST_BYTES
from training.recipe.recipe_file import NO_FILES, RecipeError, read, text

LEAST = "name: stamps\ndata: {root: pictures}\n"


def recipe(folder: Path, content: str = "", *changes: str, name: str = "recipe.yaml") -> Recipe:
    (folder / name).write_text(LEAST + content, encoding="utf-8")
    return read(folder / name, changes)


def refusal(folder: Path, content: str, *changes: str) -> str:
    """What the one-line error says behind the folder."""
    (folder / "recipe.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        read(folder / "recipe.yaml", changes)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


def test_what_is_not_given_has_its_default_and_paths_become_absolute(tmp_path: Path) -> None:
    found = recipe(tmp_path)
    assert found == Recipe.model_validate({"name": "stamps", "data": {"root": tmp_path / "pictures"}})


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "0.0001", ".0001", "+1.e-4", "1e-04"])
def test_a_number_is_a_number_however_it_is_written(tmp_path: Path, number: str) -> None:
    assert recipe(tmp_path, f"optimizer: {{learning_rate: {number}}}").optimizer.learning_rate == 1e-4


def test_words_are_texts_that_older_yaml_takes_for_something_else(tmp_path: Path) -> None:
    assert recipe(tmp_path, "paper: no\nnetwork: {licence: 2024-01-01}").paper == "no"
    assert recipe(tmp_path, "seed: 010").seed == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("optimizer: {learning_rat: 1}", "optimizer.learning_rat is no field: did you mean learning_rate?"),
        ("nmae: x", "nmae is no field: did you mean name?"),
        ("loss: {name: gsap, temperatur: 1}", "loss.temperatur is no field: did you mean temperature?"),
        ("beside: [{loss: {name: koleo, x: 1}}]", "beside.0.loss.x is no field: there are name, negatives_only"),
        ("loss: {name: gsapp}", "loss.name is 'gsapp': did you mean gsap?"),
        ("beside: [{loss: {weight: 0.1}}]", "beside.0.loss.name is not given: there are"),
        ("loss: {temperature: 7}", "loss.temperature is 7: input should be less than or equal to 1"),
        ("loss: {name: gsap, temperature: 7}", "loss.temperature is 7: input should be less than or equal to 1"),
        ("loss: {name: tcm, positive: 2}", "loss.positive is 2: input should be less than or equal to 1"),
        ("batch: {size: true}", "batch.size is True: input should be a valid integer"),
        ("batch: {size: '8'}", "batch.size is '8': input should be a valid integer"),
        ("batch: {size: 5}", "batch: size is 5: a multiple of per_class (4), at least twice, is needed"),
        ("fit: 3", "fit is 3: input should be an object"),
        ("seed: .nan", "seed is '.nan': input should be a valid integer"),
        ("optimizer: {learning_rate: 1e999}", "optimizer.learning_rate is inf: input should be a finite number"),
        ("optimizer: {accumulate: 4}", "optimizer: accumulate is not 1: pairs between the parts would be lost"),
        ("network: {mode: linear}", "network: mode is linear and head.dimension is not given"),
        ("network: {head: {pooling: x}}", "network.head.pooling is 'x': input should be 'own', 'avg', 'max' or 'gem'"),
        ('paper: "\\ud800"', "a text holds half of a character"),
        ("extends: 3", "extends is 3: one path is needed"),
    ],
)
def test_a_wrong_field_is_named_with_its_path_and_the_mend(tmp_path: Path, content: str, message: str) -> None:
    assert refusal(tmp_path, LEAST + content).startswith(f"recipe.yaml: {message}")


def test_a_loss_without_a_name_is_the_usual_one(tmp_path: Path) -> None:
    found = recipe(tmp_path, "loss: {temperature: 0.1}").loss
    assert isinstance(found, Gsap)
    assert found.temperature == 0.1


def test_several_errors_are_counted_and_what_is_missing_is_described(tmp_path: Path) -> None:
    assert refusal(tmp_path, LEAST + "a: 1\nb: 2").endswith("(and 1 more)")
    assert refusal(tmp_path, "name: stamps\ndata: {}").startswith("recipe.yaml: data.root is not given: folder of the")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: a\nname: b", "recipe.yaml line 2: name comes twice: delete one"),
        ("data:\n  root: x\n  root: y", "recipe.yaml line 3: root comes twice"),
        ("a: [1", "recipe.yaml line 1: expected ',' or ']'"),
        ("a: b\nb: c: d", "recipe.yaml line 2: mapping values are not allowed here"),
        ("a: &x [1]\nb: *x", "recipe.yaml line 2: references (*x) are not taken"),
        ("a: !!python/object/apply:os.system [x]", "recipe.yaml line 1: could not determine a constructor for the tag"),
        ("a: 1\nb: \x07", "recipe.yaml line 2: the sign '\\x07' is not taken"),
        ("? [a]\n: 1", "recipe.yaml line 1: a key is a word"),
        ("1: x", "recipe.yaml line 1: a key is a word"),
        ("", "recipe.yaml holds no fields"),
        ("- a", "recipe.yaml holds no fields"),
        ("[" * 3000, "recipe.yaml line 1: more than 20 levels"),
        ("a: " + "x" * MOST_BYTES, "recipe.yaml is longer than 65,536 bytes"),
    ],
)
def test_what_is_no_plain_yaml_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    assert refusal(tmp_path, content).startswith(message)


def test_references_that_would_grow_without_end_cost_nothing(tmp_path: Path) -> None:
    laughs = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    laughs += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    before = time.monotonic()
    assert "references (*a) are not taken" in refusal(tmp_path, "\n".join(laughs))
    assert time.monotonic() - before < 1


def test_a_file_that_is_missing_or_not_in_utf_8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nothing.yaml cannot be read: No such file"):
        read(tmp_path / "nothing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(RecipeError, match=r"latin.yaml is not in UTF-8"):
        read(tmp_path / "latin.yaml")


def test_a_variant_takes_the_rest_from_what_it_extends(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    content = "batch: {size: 64}\nloss: {name: gsap, drop: 0.5}\noptimizer: {learning_rate: 1e-3, clip: 1}\n"
    recipe(tmp_path / "shared", content, name="one.yaml")
    (tmp_path / "two.yaml").write_text("extends: shared/one.yaml\noptimizer: {clip: null}\nname: two\n")
    two = read(tmp_path / "two.yaml")
    assert (two.name, two.batch.size, two.optimizer.learning_rate, two.optimizer.clip) == ("two", 64, 1e-3, None)
    assert two.loss == Gsap(drop=0.5)
    assert two.data.root == tmp_path / "shared" / "pictures"  # as seen from the file that says so
    (tmp_path / "three.yaml").write_text("extends: two.yaml\nloss: {name: recall_at_k, ks: [1]}\n")
    assert read(tmp_path / "three.yaml").loss == RecallAtK(ks=(1,))


def test_recipes_that_extend_each_other_in_a_ring_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("extends: recipe.yaml\n")
    assert "(recipe.yaml -> other.yaml -> recipe.yaml)" in refusal(tmp_path, "extends: other.yaml\n")


def test_a_change_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = recipe(tmp_path, "fit: {epochs: 3}", "fit.epochs=5", "batch.chunk=8", "augment.crop_area=[0.5, 1]")
    assert (changed.fit.epochs, changed.batch.chunk, changed.augment.crop_area) == (5, 8, (0.5, 1.0))
    before = "loss: {name: gsap, drop: 0.5}"
    assert recipe(tmp_path, before, "loss.temperature=.1").loss == Gsap(temperature=0.1, drop=0.5)
    assert recipe(tmp_path, before, "loss.temperature=.1", "loss.name=info_nce").loss == InfoNce(temperature=0.1)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert recipe(tmp_path, "", "data.root=other").data.root == tmp_path / "here" / "other"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("epochs", "--set epochs: field=value is needed, such as"),
        ("=5", "--set =5: field=value is needed"),
        ("fit.=5", "--set fit.=5: field=value is needed"),
        ("fit.epochs=[1", "--set fit.epochs line 1: expected ',' or ']'"),
        ("fit.epoch=5", "recipe.yaml: fit.epoch is no field: did you mean epochs?"),
        ("beside.0.weight=2", "recipe.yaml: beside is {'0': {'weight': 2}}: input should be a valid array"),
    ],
)
def test_a_wrong_change_is_refused(tmp_path: Path, change: str, message: str) -> None:
    assert refusal(tmp_path, LEAST, change).startswith(message)


def test_a_file_of_weights_is_a_path_and_the_names_of_weights_are_none(tmp_path: Path) -> None:
    assert recipe(tmp_path, "network: {weights: w.safetensors}").network.weights == str(tmp_path / "w.safetensors")
    assert {weights.TIMM, weights.LITE0_WHEEL} == NO_FILES
    for name in NO_FILES:
        assert recipe(tmp_path, f"network: {{weights: {name}}}").network.weights == name


@pytest.mark.parametrize("name", ["1e-4", "2024", "true", "null", "a.b-c"])
def test_the_text_of_a_recipe_is_read_back_as_the_same(tmp_path: Path, name: str) -> None:
    before = recipe(
        tmp_path,
        "beside: [{loss: {name: koleo}, weight: 1e-20}]\noptimizer: {learning_rate: 1e-5, clip: 3}\n"
        f"paper: 'no: \"1e-4\" # {'long ' * 60}\n\n  ü'\nnetwork: {{head: {{dimension: 8}}, licence: '{name}'}}",
    )
    (tmp_path / "again.yaml").write_text(text(before), encoding="utf-8")
    assert read(tmp_path / "again.yaml") == before


def test_the_command_line_prints_one_line_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(LEAST + "optimizer: {learning_rat: 1}")
    for command in ("fit", "tune", "memory"):
        assert main([command, "recipe.yaml"]) == 1
        error = capsys.readouterr().err
        assert (
            error == "roadmatch-train: recipe.yaml: optimizer.learning_rat is no field: did you mean learning_rate?\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_the_tables_of_the_document_are_those_of_the_recipe() -> None:
    document = recipe_table.DOCUMENT.read_text()
    assert recipe_table.rewritten(document) == document, "run: python -m training.recipe.recipe_table"


def test_every_field_has_a_row_that_says_what_it_is() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*?) \| (.+?) \|$", recipe_table.tables(), re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| `", recipe_table.tables(), re.MULTILINE))
    assert all(value and meaning for _, value, _, meaning in rows)
    fields = {name for name, *_ in rows}
    assert {"name", "data.root", "network.head.dimension", "loss.temperature", "beside.weight"} <= fields
    assert {"optimizer.schedule.milestones", "fit.precision", "paper"} <= fields


def test_the_recipe_that_the_document_shows_is_one(tmp_path: Path) -> None:
    shown = re.search(r"```yaml\n(.*?)```", recipe_table.DOCUMENT.read_text(), re.DOTALL)
    assert shown
    (tmp_path / "recipe.yaml").write_text(shown[1])
    assert read(tmp_path / "recipe.yaml").name == "stamps"
