"""A run's folder: what it says of recipe and data when it begins, and what must be the same when it goes on."""

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue

from roadmatch.errors import RoadmatchError
from training.data import manifest
from training.data.checks import Findings
from training.data.manifest import Manifest
from training.fitting import checkpoints
from training.fitting.checkpoints import State
from training.recipe import Recipe, recipe_file

RECIPE, MANIFEST, FINDINGS = "recipe.yaml", "manifest.parquet", "findings.txt"
LAST, BEST = Path("checkpoints", "last"), Path("checkpoints", "best")
FEATURES = "features"
"""Beside the runs, for all of them."""
_FREE = {"data.threads"}  # changes nothing but the time


class RunError(RoadmatchError):
    """A run that cannot begin or go on here."""


def refuse_begun(run: Path) -> None:
    """Raises RunError where a run is there already."""
    if (run / RECIPE).exists() or checkpoints.standing(run / LAST) is not None:
        raise RunError(f"{run} holds a run already: resume it, or name another folder")


def recipe_of(run: Path) -> Recipe:
    """The recipe that a run was begun with. Raises RunError and RecipeError."""
    if not (run / RECIPE).is_file():
        raise RunError(f"{run} holds no run: there is no {RECIPE}")
    return recipe_file.read(run / RECIPE)


def begin(run: Path, recipe: Recipe, images: Manifest) -> None:
    """Writes recipe and manifest. Raises RunError and DataError."""
    write(run / RECIPE, recipe_file.text(recipe).encode())
    manifest.write(images, run / MANIFEST)


def note_findings(run: Path, findings: Findings) -> None:
    """Writes what the checks found. Raises RunError."""
    lines = [*(f"error: {line}" for line in findings.errors), *(f"warning: {line}" for line in findings.warnings)]
    write(run / FINDINGS, "".join(f"{line}\n" for line in lines or ["nothing was found"]).encode())


def write(path: Path, data: bytes) -> None:
    """At once or not at all. Raises RunError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


def refuse_changed_recipe(state: State, recipe: Recipe) -> None:
    """Raises RunError with the name of the first field that is not as it was when the run began."""
    before, now = _flat(state.recipe), _flat(recipe.model_dump(mode="json"))
    for name in [*now, *before]:
        if before.get(name) != now.get(name) and name not in _FREE:
            raise RunError(
                f"{name} was {before.get(name)!r} when the run began and is {now.get(name)!r}: set it back, or begin "
                "a new run"
            )


def refuse_changed_images(run: Path, state: State, images: Manifest) -> None:
    """Raises RunError with the first image that is not as it was when the run began. DataError."""
    if state.data != images.digest:
        raise RunError(f"the images have changed since the run began ({_difference(run, images)}): begin a new run")


def _difference(run: Path, images: Manifest) -> str:
    """The first image that is not as it was."""
    before = manifest.read(run / MANIFEST, images.root)
    old, new = _rows(before), _rows(images)
    for what, paths in (("is gone", old.keys() - new.keys()), ("is new", new.keys() - old.keys())):
        if paths:
            return f"{min(paths)} {what}"
    changed = [path for path, row in old.items() if new[path] != row]
    return f"{min(changed)} has another class or part" if changed else "their order"


def _rows(images: Manifest) -> dict[str, tuple[object, ...]]:
    asks, answers = images.is_query.tolist(), images.is_gallery.tolist()
    rows = zip(images.labels, images.splits, asks, answers, images.categories, strict=True)
    return dict(zip(images.paths, rows, strict=True))


def _flat(tree: Mapping[str, JsonValue], above: str = "") -> dict[str, JsonValue]:
    return dict(_leaves(tree, above))


def _leaves(tree: Mapping[str, JsonValue], above: str) -> Iterator[tuple[str, JsonValue]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
