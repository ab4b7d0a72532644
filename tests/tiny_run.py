"""A small run's folder for tests: drawings on disk, a seeded network as its checkpoint, a log; nothing is trained."""

import json
from functools import cache
from io import BytesIO
from pathlib import Path

import safetensors.torch
import timm
import torch
from PIL import Image

from roadmatch.bundle import Head
from tests.bundles import picture
from training.data import manifest
from training.data.manifest import Row, Split
from training.fitting import checkpoints, run_folder
from training.fitting.checkpoints import Checkpoint, State
from training.network.trainable import open_network, stored
from training.network.weights import StateDict
from training.recipe import Data, Layout, Mode, Network, Recipe

TEST_CLASSES, DISTRACTORS = 32, 10
ARCHITECTURE = "test_efficientnet"
SIZE = 32
STRANGE = '<script>alert("1")</script> & "so on"'
"""The label of one class."""


@cache
def weights() -> bytes:
    """Of a seeded network, as safetensors."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return safetensors.torch.save(timm.create_model(ARCHITECTURE, pretrained=False).state_dict())


def training_classes(classes: int) -> int:
    """So many that a background for k = 30 is there, but for the smallest runs."""
    return 40 if classes > 10 else 4


def views(seed: int) -> list[bytes]:
    """Three pictures of one thing, as JPEG."""
    whole = Image.open(BytesIO(picture(seed))).convert("RGB")
    parts = [whole, whole.crop((4, 4, 96, 96)), whole.crop((0, 2, 94, 94))]
    found = []
    for part in parts:
        buffer = BytesIO()
        part.save(buffer, "JPEG", quality=90)
        found.append(buffer.getvalue())
    return found


@cache
def images(classes: int = TEST_CLASSES) -> dict[str, tuple[Row, bytes]]:
    """Path -> row and file: test classes of three, training classes of two, and distractors."""
    found: dict[str, tuple[Row, bytes]] = {}

    def add(path: str, label: str, split: Split, data: bytes) -> None:
        found[path] = (Row(path, label, split), data)

    for number in range(classes):
        label = STRANGE if number == 0 else f"test {number}"
        for view, data in enumerate(views(number)):
            add(f"test/{number}-{view}.jpg", label, Split.TEST, data)
    for number in range(training_classes(classes)):
        for view, data in enumerate(views(1000 + number)[:2]):
            add(f"train/{number}-{view}.jpg", f"train {number}", Split.TRAIN, data)
    for number in range(DISTRACTORS):
        add(f"test/distractor-{number}.jpg", "", Split.TEST, picture(2000 + number))
    return found


def tiny_run(folder: Path, *, mode: Mode = Mode.WHOLE, classes: int = TEST_CLASSES) -> Path:
    """The run's folder `folder`/run; its images are in `folder`/images."""
    root, run = folder / "images", folder / "run"
    rows = []
    for path, (row, data) in images(classes).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
        rows.append(row)
    (folder / "weights.safetensors").write_bytes(weights())
    recipe = Recipe(
        name="tiny",
        data=Data(layout=Layout.FOLDER, root=root, threads=2),
        network=Network(
            architecture=ARCHITECTURE,
            weights=str(folder / "weights.safetensors"),
            licence="CC0-1.0",
            mode=mode,
            size=SIZE,
            head=Head(layer_norm=True, dimension=32),
        ),
    )
    listed = manifest.of_rows(root, rows, str)
    run_folder.begin(run, recipe, listed)
    (run / run_folder.FINDINGS).write_text("warning: two <b>pictures</b> are alike\n")
    write_checkpoint(run, recipe, State(epoch=3, steps=6, best=0.5, best_epoch=2, data=listed.digest))
    write_log(run)
    return run


def write_checkpoint(run: Path, recipe: Recipe, state: State, *, seed: int = 5) -> None:
    """A network whose head is drawn from `seed`, as the run's best."""
    key = recipe.network.mode, seed
    if key not in _drawn:
        tensors = stored(open_network(recipe.network, seed=seed).network)
        linear = recipe.network.mode is Mode.LINEAR
        _drawn[key] = {name: each for name, each in tensors.items() if name.startswith("head.") or not linear}
    checkpoints.save(run / run_folder.BEST, Checkpoint(state, _drawn[key]))


_drawn: dict[tuple[Mode, int], StateDict] = {}


def write_log(run: Path) -> None:
    """Six steps of three epochs."""
    lines = [
        {"kind": "step", "step": step, "epoch": (step + 1) // 2, "loss": 1 / step, "lr": 1e-3, "images_per_s": 10.0}
        for step in range(1, 7)
    ]
    lines += [{"kind": "validation", "step": step, "epoch": step // 2, "gap": step / 10} for step in (2, 4, 6)]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
