"""Linear heads on stored features of drawings: what the losses are compared on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.drawings import ONLY_OBJECTS, DrawingsError
from roadmatch.bundle import Head
from roadmatch.embedding.network import head_of
from roadmatch.scoring import Vector
from training import recipe
from training.data import splits
from training.data.batches import Batches
from training.data.layouts import images_of
from training.data.manifest import Manifest, Split
from training.fitting.features import Projection, features_of
from training.fitting.objective import objective_of
from training.fitting.schedule import factor_at, optimizer_of, set_rates
from training.fitting.step import backward
from training.judging.held_out import background_numbers
from training.network.trainable import initialise, open_network, parameter_groups

Ints = NDArray[np.int64]

DIMENSION = 512
SIZE = 64  # px
PER_CLASS = 4
LOSSES: dict[str, tuple[recipe.Loss, *tuple[recipe.Beside, ...]]] = {
    "smooth_ap": (recipe.SmoothAp(),),
    "gsap": (recipe.Gsap(),),
    "roadmap": (recipe.Roadmap(),),
    "roadmap, published code": (recipe.SupAp(), recipe.Beside(loss=recipe.Tcm(positive=0.9, negative=0.6))),
    "recall_at_k": (recipe.RecallAtK(),),
    "contrastive": (recipe.Contrastive(),),
    "info_nce": (recipe.InfoNce(temperature=0.05),),
}
"""The main one and what is added to it. ROADMAP's code takes the margins' mean over the pairs beyond them."""


@dataclass(frozen=True)
class Drawn:
    """Stored features (N, F) of N drawings, their things, vendors, and what each is for."""

    features: Tensor
    labels: Ints  # (N,)
    vendors: Ints  # (N,)
    train: Ints  # numbers of the images, as the following
    validation: Ints
    test: Ints
    background: Ints  # of training classes, as a bundle has it


@dataclass(frozen=True)
class Course:
    """How a head is trained. batch: images a step, None for the whole training set."""

    batch: int | None
    steps: int
    learning_rate: float


def drawn(folder: Path) -> Drawn:
    """The drawings of objects that `python -m benchmarks.drawings` made: classes parted 50 / 25 / 25 %.

    The features are kept in the folder. Raises DrawingsError where there are no drawings.
    """
    if not (folder / ONLY_OBJECTS).is_file():
        raise DrawingsError(f"{folder} has no drawings: run `python -m benchmarks.drawings {folder}`")
    data = recipe.Data(layout=recipe.Layout.MANIFEST, root=folder, manifest=folder / ONLY_OBJECTS)
    images = splits.split(images_of(data), validation=1 / 3, test=0.25, seed=0)
    network = recipe.Network(mode=recipe.Mode.LINEAR, size=SIZE, head=Head(dimension=DIMENSION))
    features = features_of(
        open_network(network, seed=0), network, images, folder / "features", device=torch.device("cpu"), threads=0
    )
    vendors = np.unique([Path(path).stem for path in images.paths], return_inverse=True)[1]
    return _drawn(images, features, vendors)


def _drawn(images: Manifest, features: Tensor, vendors: Ints) -> Drawn:
    train, validation, test = (np.flatnonzero(images.of(split)) for split in Split)
    background = background_numbers(images, frozenset())
    return Drawn(features, images.numbers, vendors, train, validation, test, background)


def made_up(classes: int = 120, vendors: int = 5, width: int = 32, seed: int = 0) -> Drawn:
    """The same from random numbers, to see that all runs: a vendor's manner, noise, and in one half of them a thing."""
    random = np.random.default_rng(seed)
    labels, by = (numbers.ravel() for numbers in np.divmod(np.arange(classes * vendors), vendors))
    thing, manner, noise = (random.standard_normal((n, width)) for n in (classes, vendors, classes * vendors))
    features = thing[labels] * (np.arange(width) < width // 2) + 0.5 * manner[by] + 0.8 * noise
    third = np.searchsorted([classes // 2, 3 * classes // 4], labels, side="right")
    train, validation, test = (np.flatnonzero(third == part) for part in range(3))
    return Drawn(torch.tensor(features, dtype=torch.float32), labels, by, train, validation, test, train[::vendors])


def frozen(data: Drawn) -> Vector:
    """(N, F) embeddings without a head."""
    embeddings: Vector = nn.functional.normalize(data.features).numpy()
    return embeddings


def trained(data: Drawn, loss: str, course: Course, seed: int) -> Vector:
    """(N, D) embeddings of all drawings by a head that was trained on those of the training classes."""
    network = Projection(head_of(data.features.shape[1], Head(dimension=DIMENSION)))
    initialise(network, seed)
    main, *beside = LOSSES[loss]
    objective = objective_of(main, beside, distributed=False)
    optimizer = recipe.Optimizer(learning_rate=course.learning_rate)
    descent = optimizer_of(parameter_groups(network, objective, optimizer), optimizer)
    features, labels = data.features[data.train], torch.from_numpy(data.labels[data.train])
    for step, numbers in enumerate(_batches(data.labels[data.train], course, seed)):
        set_rates(descent, factor_at(optimizer.schedule, step, steps_per_epoch=course.steps, epochs=1))
        backward(network, features[numbers], labels[numbers], objective, chunk=None)
        descent.step()
        descent.zero_grad()
    with torch.no_grad():
        embeddings: Vector = network(data.features).numpy()
    return embeddings


def _batches(labels: Ints, course: Course, seed: int) -> Sequence[Tensor]:
    classes, images = np.unique(labels, return_counts=True)
    per_class = PER_CLASS if course.batch else int(images.max())
    size = course.batch or per_class * len(classes)
    batches = Batches(labels, np.zeros_like(labels), recipe.Batch(size=size, per_class=per_class), seed=seed)
    steps = (torch.from_numpy(numbers) for epoch in count() for numbers in batches.epoch(epoch))
    return list(islice(steps, course.steps))
