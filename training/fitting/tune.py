"""Learning rate and temperature by search, then a run on all training classes with the best: gSAP's protocol.

As in Global Average Precision for Representation Learning (2026): the training classes are divided 70 to 30 by a seeded
hash, many trials are fitted on the first part and judged by gAP on the second, and the best setting is fitted anew on
both. Test classes have no part in it.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from roadmatch.errors import RoadmatchError
from training.data import splits
from training.data.layouts import images_of
from training.data.manifest import Split
from training.fitting import checkpoints, run_folder
from training.fitting.fit import fit
from training.fitting.run_folder import BEST, LAST
from training.recipe import Mode, Recipe, recipe_file

JUDGED_ON = 0.3
"""Share of the training classes that judge a trial."""
LEARNING_RATES = (1e-5, 5e-4)
HEAD_LEARNING_RATES = (1e-4, 5e-2)
"""Of a linear head on frozen features, which takes larger steps than a backbone does."""
TEMPERATURES = (1e-4, 5e-2)
TRIALS, FINAL = "trials", "final"
_JOURNAL, _RESULT = "tune.journal", "tune.json"


class TuneError(RoadmatchError):
    """A search that cannot begin or go on here."""


def tune(recipe: Recipe, folder: Path, *, trials: int = 10, show: bool = True) -> dict[str, Any]:
    """Search, then fit on all training classes in `folder`/final-N, N the best trial -> what tune.json holds.

    A search that was interrupted goes on with the next trial: the same command again. Raises TuneError for
    less than one trial and where the folder belongs to another search, and what fit raises.
    """
    if trials < 1:
        raise TuneError(f"{trials} trials: at least 1 is needed")
    _claim(recipe, folder)
    study = _study(recipe, folder)
    while len(_done(study)) < trials:
        trial = study.ask()
        study.tell(trial, _gap_of(_tried(recipe, trial), folder / TRIALS / f"{trial.number:02}", show))
    best = study.best_trial
    result = {"best": _described(best), "trials": [*map(_described, _done(study))]}
    run_folder.write(folder / _RESULT, (json.dumps(result, indent=2) + "\n").encode())
    # On all training classes: none is left to choose an epoch by.
    _fit(with_settings(recipe, best.params, validation=0.0), folder / f"{FINAL}-{best.number:02}", show)
    return result


def _study(recipe: Recipe, folder: Path) -> optuna.Study:
    """The search so far; the journal is a text file that is only added to."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        storage = JournalStorage(JournalFileBackend(str(folder / _JOURNAL)))
    study = optuna.create_study(
        study_name=recipe.name,
        storage=storage,
        direction="maximize",
        load_if_exists=True,
    )
    study.sampler = optuna.samplers.TPESampler(seed=recipe.seed + len(study.trials))  # not the first ones again
    for trial in study.get_trials(states=(TrialState.RUNNING,)):  # of a process that was ended
        study.tell(trial.number, state=TrialState.FAIL)
    return study


def _done(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    done: list[optuna.trial.FrozenTrial] = study.get_trials(states=(TrialState.COMPLETE,))
    return done


def _tried(recipe: Recipe, trial: Trial) -> Recipe:
    """The recipe with what the search asks for, judged on a part of its training classes."""
    rates = HEAD_LEARNING_RATES if recipe.network.mode is Mode.LINEAR else LEARNING_RATES
    asked = {"learning_rate": trial.suggest_float("learning_rate", *rates, log=True)}
    if hasattr(recipe.loss, "temperature"):
        asked["temperature"] = trial.suggest_float("temperature", *TEMPERATURES, log=True)
    return with_settings(recipe, asked, validation=JUDGED_ON)


def with_settings(recipe: Recipe, params: Mapping[str, float], validation: float) -> Recipe:
    """The recipe with another learning rate, the others in their ratio to it, and another temperature, if given."""
    optimizer, loss = recipe.optimizer, recipe.loss
    rate = params["learning_rate"]
    ratio = rate / optimizer.learning_rate
    heads = {
        name: value * ratio
        for name in ("head_learning_rate", "loss_learning_rate")
        if (value := getattr(optimizer, name)) is not None
    }
    changed = {
        "optimizer": optimizer.model_copy(update={"learning_rate": rate, **heads}),
        "data": recipe.data.model_copy(update={"validation": validation}),
    }
    if "temperature" in params:
        changed["loss"] = loss.model_copy(update={"temperature": params["temperature"]})
    return recipe.model_copy(update=changed)


def _gap_of(recipe: Recipe, run: Path, show: bool) -> float:
    _fit(_with_room(recipe), run, show)
    best = checkpoints.read_state(run / BEST).best
    if best is None:
        raise TuneError(f"{run} has no validation: the training classes are too few for {JUDGED_ON:.0%} to judge by")
    return best


def _with_room(recipe: Recipe) -> Recipe:
    """The recipe with batches of no more classes than there are to train a trial on: fewer than in the end."""
    data, batch = recipe.data, recipe.batch
    images = splits.split(images_of(data), validation=data.validation, test=data.test, seed=data.split_seed)
    most = batch.per_class * max(2, len(images.only(Split.TRAIN).classes))
    if batch.size <= most:
        return recipe
    return recipe.model_copy(update={"batch": batch.model_copy(update={"size": most})})


def _fit(recipe: Recipe, run: Path, show: bool) -> None:
    """A run that was begun by a process that was ended is gone on with, if it is the same one."""
    fit(recipe, run, resume=checkpoints.standing(run / LAST) is not None, show=show)


def _claim(recipe: Recipe, folder: Path) -> None:
    """Makes the folder this recipe's. Raises TuneError where it is another's."""
    path = folder / run_folder.RECIPE
    if path.exists():
        if recipe_file.read(path) != recipe:
            raise TuneError(f"{folder} holds the search of another recipe: name another folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write(path, recipe_file.text(recipe).encode())


def _described(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    return {"trial": trial.number, "gap": trial.value, **trial.params}
