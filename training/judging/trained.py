"""What a run has made, opened for what comes after training: its recipe, its images and its network."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic import JsonValue
from safetensors import SafetensorError
from torch import nn

from roadmatch.bundle import Head
from roadmatch.embedding.network import EmbeddingNetwork, Headed
from roadmatch.images import Preprocessing
from training.data import manifest as manifests
from training.data.manifest import Manifest
from training.fitting import checkpoints, run_folder
from training.fitting.run_folder import RunError
from training.network.trainable import Opened, open_network
from training.recipe import Mode, Network, Recipe, recipe_file


@dataclass(frozen=True, eq=False)
class Trained:
    """What a run has made; the network is in evaluation mode and on the CPU."""

    run: Path
    recipe: Recipe
    manifest: Manifest
    opened: Opened
    state: checkpoints.State
    """Where the run stood when the checkpoint was written."""
    model: str
    """sha256 of the checkpoint's tensors."""

    @property
    def network(self) -> EmbeddingNetwork:
        """pixels (B, H, W, 3) uint8 -> (B, D)."""
        return self.opened.network

    @property
    def preprocessing(self) -> Preprocessing:
        """Serving's rule."""
        return self.opened.preprocessing

    @property
    def stamp(self) -> dict[str, str]:
        """What everything that is derived from the run hangs on; another stamp means that it is out of date."""
        return {"model": self.model, "data": self.data}

    @cached_property
    def data(self) -> str:
        """The manifest's digest."""
        return self.manifest.digest

    @property
    def provenance(self) -> dict[str, JsonValue]:
        """What a bundle says of its origin, without a path of the machine that it was made on."""
        recipe = recipe_file.text(without_places(self.recipe))
        images: dict[str, JsonValue] = {"manifest_sha256": self.data, "images": len(self.manifest)}
        return {
            "weights": dict(self.opened.provenance),
            "recipe": recipe,
            "seed": self.recipe.seed,
            "data": {**images, "classes": len(self.manifest.classes)},
            "checkpoint": {
                "sha256": self.model,
                "epoch": self.state.epoch,
                "steps": self.state.steps,
                "validation_gap": self.state.best,
            },
        }


def trained(run: Path) -> Trained:
    """The network of the run's best checkpoint. Raises RoadmatchError."""
    recipe = run_folder.recipe_of(run)
    if not recipe.data.root.is_dir():
        where = run / run_folder.RECIPE
        raise RunError(f"the images of {run} are gone: {recipe.data.root} is no folder; set data.root in {where}")
    manifest = manifests.read(run / run_folder.MANIFEST, recipe.data.root)
    folder = checkpoints.standing(run / run_folder.BEST)
    if folder is None:
        raise RunError(f"{run} has no checkpoint yet: `roadmatch-train resume {run}` trains until there is one")
    state = checkpoints.read_state(run / run_folder.BEST)
    if state.data != manifest.digest:
        raise RunError(f"{run / run_folder.MANIFEST} is not the one that {run} was trained on: put that one back")
    opened = open_network(recipe.network, seed=recipe.seed)
    model = _load(opened.network.backbone, recipe.network, folder / checkpoints.MODEL)
    return Trained(run, recipe, manifest, opened, state, model)


def untrained(recipe: Recipe) -> EmbeddingNetwork:
    """The pretrained backbone with the recipe's pooling and nothing behind it: what training had to better."""
    head = Head(pooling=recipe.network.head.pooling)
    return open_network(recipe.network.model_copy(update={"head": head, "drop_path": 0.0}), seed=recipe.seed).network


def without_places(recipe: Recipe) -> Recipe:
    """The recipe with the last part of each path, for other people's eyes."""
    data, network = recipe.data, recipe.network
    named = None if data.manifest is None else Path(data.manifest.name)
    return recipe.model_copy(
        update={
            "data": data.model_copy(update={"root": Path(data.root.name or "."), "manifest": named}),
            "network": network.model_copy(update={"weights": Path(network.weights).name}),
        }
    )


def keep(path: Path, content: dict[str, Any]) -> None:
    """content as JSON at `path`, at once or not at all. Raises RunError where it cannot be written."""
    run_folder.write(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def kept(path: Path, version: int, stamp: dict[str, str]) -> dict[str, Any] | None:
    """What `keep` wrote; None where it is missing, of another version, or of another stamp than this."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    fits = isinstance(found, dict) and found.get("format") == version and found.get("stamp") == stamp
    return found if fits else None


def _load(backbone: nn.Module, network: Network, path: Path) -> str:
    """Puts the file's tensors into the backbone, or in mode linear into its head -> the file's sha256."""
    try:
        raw = path.read_bytes()
        tensors = safetensors.torch.load(raw)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read ({_line(error)}): resume the run to write a new one") from error
    load: Callable[..., object] = backbone.load_state_dict
    if network.mode is Mode.LINEAR and isinstance(backbone, Headed):
        load = backbone.head.load_state_dict
        tensors = {name.removeprefix("head."): tensor for name, tensor in tensors.items()}
    try:
        load(tensors, strict=True)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit the recipe's {network.architecture}: {_line(error)}") from error
    return hashlib.sha256(raw).hexdigest()


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200]
