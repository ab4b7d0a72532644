import json
from pathlib import Path

import pytest

from tests.test_fit import given, one_thread, recipe_of  # noqa: F401 - fixtures
from training.cli import main
from training.data import manifest
from training.data.manifest import Split
from training.fitting import checkpoints, tune
from training.fitting.run_folder import BEST, MANIFEST, RECIPE
from training.recipe import Gsap, recipe_file


def test_the_best_of_the_trials_is_fitted_anew_on_all_training_classes(given: Path, tmp_path: Path) -> None:  # noqa: F811
    recipe = recipe_of(given, "linear", fit__epochs=1)
    result = tune.tune(recipe, tmp_path / "search", trials=3, show=False)
    assert json.loads((tmp_path / "search" / "tune.json").read_text()) == result
    assert len({trial["learning_rate"] for trial in result["trials"]}) == 3
    assert result["best"]["gap"] == max(trial["gap"] for trial in result["trials"])
    trial = tmp_path / "search" / "trials" / f"{result['best']['trial']:02}"
    assert checkpoints.read_state(trial / BEST).best == result["best"]["gap"]
    last = tmp_path / "search" / f"final-{result['best']['trial']:02}"
    final = recipe_file.read(last / RECIPE)
    assert isinstance(final.loss, Gsap)
    assert (final.loss.temperature, final.optimizer.learning_rate) == (
        result["best"]["temperature"],
        result["best"]["learning_rate"],
    )
    tried, fitted = (manifest.read(run / MANIFEST, recipe.data.root) for run in (trial, last))
    assert tried.of(Split.VALIDATION).any()
    assert not fitted.of(Split.VALIDATION).any()
    assert (tried.of(Split.TEST) == fitted.of(Split.TEST)).all()


def test_a_search_goes_on_with_the_trials_that_it_has(given: Path, tmp_path: Path) -> None:  # noqa: F811
    recipe = recipe_of(given, "linear", fit__epochs=1)
    first = tune.tune(recipe, tmp_path / "search", trials=1, show=False)
    with pytest.raises(tune.TuneError, match="holds the search of another recipe"):
        tune.tune(recipe.model_copy(update={"seed": 9}), tmp_path / "search", trials=2, show=False)
    second = tune.tune(recipe, tmp_path / "search", trials=2, show=False)
    assert second["trials"][0] == first["trials"][0]
    assert second["trials"][1]["learning_rate"] != first["trials"][0]["learning_rate"]


def test_the_command_says_which_trial_was_best_and_where_all_are(
    given: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_file.text(recipe_of(given, "linear", fit__epochs=1)))
    assert main(["tune", str(recipe), "--run", str(tmp_path / "search"), "--trials", "1"]) == 0
    best = json.loads((tmp_path / "search" / "tune.json").read_text())["best"]
    found = f"learning_rate {best['learning_rate']:.3g}, temperature {best['temperature']:.3g}"
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{tmp_path / 'search'}: trial 0 is best, gAP {best['gap']:.4f} with {found}; tune.json has them all"
    )


def test_a_head_keeps_its_ratio_to_the_backbone(given: Path) -> None:  # noqa: F811
    recipe = recipe_of(given, "whole", optimizer__learning_rate=1e-4, optimizer__head_learning_rate=2e-4)
    changed = tune.with_settings(recipe, {"learning_rate": 3e-5}, validation=0.0)
    assert changed.optimizer.head_learning_rate == pytest.approx(6e-5)
    assert changed.loss == recipe.loss


def test_less_than_one_trial_is_refused(given: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(tune.TuneError, match="0 trials: at least 1 is needed"):
        tune.tune(recipe_of(given, "linear"), tmp_path / "search", trials=0)
    assert not (tmp_path / "search").exists()


def test_a_trial_has_fewer_classes_and_takes_as_many_as_there_are(given: Path, tmp_path: Path) -> None:  # noqa: F811
    recipe = recipe_of(given, "linear", fit__epochs=1, batch__size=18, batch__per_class=2, data__validation=0.0)
    result = tune.tune(recipe, tmp_path / "search", trials=1, show=False)
    tried = recipe_file.read(tmp_path / "search" / "trials" / "00" / RECIPE)
    assert tried.batch.size < 18
    assert recipe_file.read(tmp_path / "search" / f"final-{result['best']['trial']:02}" / RECIPE).batch.size == 18
