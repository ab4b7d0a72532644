"""What a training step costs beside a bare loop, and whether the loader keeps up with it."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.bars import Figures, at_least
from benchmarks.pictures import USUAL_SIZE, query_pictures
from roadmatch.bundle import Head
from roadmatch.embedding.network import EmbeddingNetwork, build_backbone
from roadmatch.images import Preprocessing
from training import recipe
from training.data.loading import Pictures
from training.data.manifest import Row, of_rows
from training.fitting.objective import objective_of
from training.fitting.schedule import optimizer_of
from training.fitting.step import backward
from training.network.trainable import freeze_batch_norm, parameter_groups

_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Case:
    """A network and what it is given at a time."""

    architecture: str
    size: int  # px
    batch: int
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.architecture} at {self.size} px, batch {self.batch}"


@dataclass(frozen=True)
class Effort:
    """How much is measured. The first case is the one that the loader is held against."""

    cases: tuple[Case, ...]
    loaded: int  # pictures


FULL = Effort((Case("resnet50", 224, 8, 5), Case("tf_efficientnet_lite0", 64, 128, 9)), loaded=256)
QUICK = Effort((Case("resnet18", 64, 8, 1), Case("tf_efficientnet_lite0", 64, 8, 1)), loaded=16)


def measure(effort: Effort) -> Figures:
    """The bars, and the figures behind them: CPU time, as one thread computes and one thread loads."""
    torch.set_num_threads(1)
    steps = {case.name: beside_a_bare_loop(case) for case in effort.cases}
    first = effort.cases[0]
    loader = {name: effort.loaded / seconds for name, seconds in loading_s(effort.loaded, first.size).items()}
    keeps_up = loader["training"] / steps[first.name]["images_per_s"]
    return {
        "bars": [
            *(
                at_least(f"images/s of a step / of a bare loop, {name}", each["ratio"], 0.95)
                for name, each in steps.items()
            ),
            at_least(f"images/s of the loader / of the step, {first.name}", keeps_up, 1),
        ],
        "steps": steps,
        "loader_images_per_s": loader,
        "loader": "photographs as JPEGs of {} x {}: random parts, and evaluation's pixels".format(*USUAL_SIZE),
    }


def beside_a_bare_loop(case: Case) -> Figures:
    """A step of each in turn; the ratio is the median of the rounds' own."""
    backbone = build_backbone(case.architecture, Head(dimension=512))
    network = EmbeddingNetwork(backbone, _HALF, _HALF).to(memory_format=torch.channels_last).train()
    freeze_batch_norm(network)
    random = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (case.batch, case.size, case.size, 3), dtype=torch.uint8, generator=random)
    sides = ours(network, pictures, torch.arange(case.batch) // 4), bare(network, pictures)
    for side in sides:
        side()
    taken = [[_seconds(side) for side in sides] for _ in range(case.rounds)]
    return {
        "ratio": median(theirs / own for own, theirs in taken),
        "images_per_s": case.batch / median(own for own, _ in taken),
        "bare_images_per_s": case.batch / median(theirs for _, theirs in taken),
    }


def ours(network: nn.Module, pictures: Tensor, labels: Tensor) -> Callable[[], None]:
    """A step as a run makes it, with gSAP."""
    objective, optimizer = objective_of(recipe.Gsap(), distributed=False), recipe.Optimizer(learning_rate=1e-6)
    descent = optimizer_of(parameter_groups(network, objective, optimizer), optimizer)

    def step() -> None:
        backward(network, pictures, labels, objective, chunk=None)
        descent.step()
        descent.zero_grad()

    return step


def bare(network: nn.Module, pictures: Tensor) -> Callable[[], None]:
    """The least that a step can be: a loss that reads each embedding once."""
    descent = torch.optim.AdamW([each for each in network.parameters() if each.requires_grad], lr=1e-6)

    def step() -> None:
        network(pictures).mean().backward()
        descent.step()
        descent.zero_grad()

    return step


def loading_s(pictures: int, size: int) -> dict[str, float]:
    """Seconds of one thread for so many photographs, out of files: random parts, and evaluation's pixels."""
    with tempfile.TemporaryDirectory() as folder:
        files = [data for name, data in query_pictures().items() if name.endswith(" as JPEG")]
        rows = []
        for number, data in enumerate(islice(cycle(files), pictures)):
            rows.append(Row(f"{number}.jpg", str(number)))
            (Path(folder) / rows[-1].path).write_bytes(data)
        images = of_rows(Path(folder), rows, str)
        resize = int(size / 0.875)
        rule = Preprocessing(size=size, resize=resize, reduce_to=2 * resize, interpolation="bicubic")
        taken = {}
        for name, augment in (("training", recipe.Augment()), ("evaluation", None)):
            loader = Pictures(images, augment=augment, preprocessing=rule, seed=0, threads=1)
            taken[name] = _seconds(lambda loader=loader: _load(loader))  # type: ignore[misc]
    return taken


def _load(pictures: Pictures) -> None:
    numbers = np.arange(len(pictures))
    with pictures.batches([numbers[at : at + 32] for at in range(0, len(numbers), 32)], epoch=0) as loaded:
        for _ in loaded:
            pass


def _seconds(action: Callable[[], None]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started
