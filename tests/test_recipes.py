"""The recipes of published settings: each is read, fits its data set, and says what it is worth."""

import re
from pathlib import Path

import pytest

from roadmatch.embedding.network import build_backbone
from training.cli import main
from training.fitting import schedule
from training.fitting.memory import estimate
from training.recipe import Layout, Mode, Recipe, plain_yaml
from training.recipe.recipe_file import read
from training.recipe.recipe_table import DOCUMENT

FOLDER = Path(__file__).parent.parent / "recipes"
PUBLISHED = sorted(path for path in FOLDER.glob("*-*.yaml"))
PARTS = sorted((FOLDER / "parts").glob("*.yaml"))
CLASSES = {  # of the official training split
    Layout.SOP: 11_318,
    Layout.CUB: 100,
    Layout.CARS: 98,
    Layout.INATURALIST: 5_690,
    Layout.IN_SHOP: 3_997,
    Layout.DISC: 1_000_000,
    Layout.MET: 224_408,
    Layout.WILDLIFE: 8_000,
}
H200 = 139 << 30


def stated() -> dict[str, float]:
    """The memory that the document states for each recipe, GiB."""
    rows = re.findall(r"^\| \[([\w-]+)\]\(\.\./recipes/.*\| ([\d.]+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: float(size) for name, size in rows}


def named(path: Path) -> str:
    return path.stem


def test_every_data_set_and_every_setting_of_the_papers_has_a_recipe() -> None:
    assert {read(path).data.layout for path in PUBLISHED} == set(CLASSES)
    assert {path.stem.rpartition("-")[0].partition("-")[0] for path in PUBLISHED} == {"roadmap", "recall", "gsap"}
    assert len(PUBLISHED) >= 20
    assert stated().keys() == {path.stem for path in PUBLISHED}


@pytest.mark.parametrize("path", PUBLISHED, ids=named)
def test_a_recipe_is_read_and_fits_its_data_set(path: Path) -> None:
    recipe = read(path)
    assert recipe.name == path.stem
    assert recipe.batch.size // recipe.batch.per_class <= (1 - recipe.data.validation) * CLASSES[recipe.data.layout]
    assert recipe.batch.chunk is None or recipe.batch.size > recipe.batch.chunk
    schedule.refuse(recipe.optimizer.schedule, recipe.fit.epochs)
    assert recipe.data.root.is_relative_to(FOLDER.parent / "data")


@pytest.mark.parametrize("path", PUBLISHED, ids=named)
def test_a_recipe_says_what_the_paper_reached_where_and_that_nobody_measured_it_here(path: Path) -> None:
    paper = read(path).paper
    assert paper.endswith("ot measured here.")
    assert any(source in paper for source in ("arXiv", "CVPR", "gSAP paper"))
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", PARTS, ids=named)
def test_what_recipes_share_is_used_and_explained(path: Path) -> None:
    users = [other for other in (*PUBLISHED, *PARTS) if f"extends: parts/{path.name}" in other.read_text()]
    users += [other for other in PARTS if f"extends: {path.name}" in other.read_text()]
    assert users
    assert path.read_text().startswith("# ")
    assert "name" not in plain_yaml.read(path)


@pytest.mark.faults
@pytest.mark.parametrize("path", PUBLISHED, ids=named)
def test_a_recipes_network_exists_and_its_step_fits_on_one_large_gpu(path: Path) -> None:
    recipe = read(path)
    assert recipe.network.mode is Mode.WHOLE
    build_backbone(recipe.network.architecture, recipe.network.head, drop_path=recipe.network.drop_path)
    assert recipe.network.weights == "timm"
    total = estimate(recipe).total
    assert total < H200
    assert stated()[path.stem] == pytest.approx(total / 2**30, rel=0.02)


def test_the_command_prints_what_a_recipes_step_takes(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["network.architecture=test_vit", "network.size=160", "batch.size=64", "batch.chunk=8"]
    assert main(["memory", str(FOLDER / "recall-at-k-sop-vit.yaml"), "--set", *changes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("parameters")
    assert lines[-1].startswith("total")
    sizes = [float(line.split()[1]) for line in lines]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.004)


def test_a_variant_differs_from_what_it_extends_in_what_it_says_alone() -> None:
    one, other = (read(FOLDER / f"{name}.yaml") for name in ("gsap-sop-resnet50", "gsap-sop-vit"))
    changed = {"name", "network", "batch", "optimizer"}
    same = set(Recipe.model_fields) - changed
    assert all(getattr(one, field) == getattr(other, field) for field in same)
    assert all(getattr(one, field) != getattr(other, field) for field in changed)
