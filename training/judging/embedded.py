"""Embeddings of a run's images, computed once, in a file that is not held in memory."""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from roadmatch.embedding.network import EmbeddingNetwork
from roadmatch.scoring import Vector
from training.data.loading import Pictures
from training.fitting.features import features_of, key_of, projection_of
from training.fitting.processes import device_of
from training.fitting.run_folder import FEATURES, RunError
from training.judging.trained import Trained, untrained
from training.recipe import Mode

Ints = NDArray[np.int64]

FOLDER = "embeddings"
AFTER, BEFORE = "after", "before"
_VECTORS, _DONE = "vectors.npy", "done.npy"
_AT_ONCE = 32  # pictures in the network: activations of a ResNet-50 at 224 px take 2 GB then, without gradients
_BETWEEN_MARKS = 64  # batches


@dataclass(frozen=True, eq=False)
class Embeddings:
    """A run's images as one network sees them: row n belongs to image n of the manifest."""

    trained: Trained
    which: str
    """AFTER training, or BEFORE."""

    def of(self, numbers: Ints) -> Vector:
        """numbers (n,) of images -> (n, D), unit length; what was never asked for is computed now.

        The file is sparse: it takes the room of what is in it. Raises RunError and DataError.
        """
        wanted = np.unique(numbers)
        vectors, done = self._files()
        missing = wanted[~done[wanted]]
        if len(missing):
            self._add(missing)
            vectors, _ = self._files()
        return np.asarray(vectors[numbers], np.float32)

    def _add(self, missing: Ints) -> None:
        network = self.trained.network if self.which == AFTER else untrained(self.trained.recipe)
        vectors, done = self._opened(network)
        for numbers in _cut(missing, _AT_ONCE * _BETWEEN_MARKS):
            for rows, found in self._computed(network, numbers):
                vectors[rows] = found
            vectors.flush()  # before the marks: what is marked is there
            done[numbers] = True
            done.flush()

    def _computed(self, network: EmbeddingNetwork, numbers: Ints) -> Iterator[tuple[Ints, Vector]]:
        """From the features that were trained on, where the run has them still; else from the pictures."""
        features = _features(self.trained)
        if features is None:
            yield from embedded(network, self.trained, numbers)
            return
        behind = projection_of(network) if self.which == AFTER else nn.functional.normalize
        with torch.inference_mode():
            found = behind(features[torch.from_numpy(numbers)]).numpy()
        _check(found, numbers, self.trained)
        yield numbers, found

    def _files(self) -> tuple[Vector, NDArray[np.bool_]]:
        folder, count = self._folder, len(self.trained.manifest)
        try:
            vectors = np.load(folder / _VECTORS, mmap_mode="r")
            done = np.load(folder / _DONE)
        except (OSError, ValueError, EOFError):
            return np.zeros((count, 0), np.float32), np.zeros(count, bool)
        fits = len(vectors) == len(done) == count
        return (vectors, done) if fits else (np.zeros((count, 0), np.float32), np.zeros(count, bool))

    def _opened(self, network: EmbeddingNetwork) -> tuple[np.memmap, np.memmap]:
        """The two files, made where they are not there or are broken; those of an earlier network are removed."""
        folder, count = self._folder, len(self.trained.manifest)
        side = self.trained.preprocessing.size
        with torch.inference_mode():
            dimension = int(network(torch.zeros((1, side, side, 3), dtype=torch.uint8)).shape[1])
        try:
            if self._files()[0].shape != (count, dimension):
                for old in folder.parent.glob(f"{self.which}-*"):
                    shutil.rmtree(old)
                folder.mkdir(parents=True)
                np.lib.format.open_memmap(folder / _VECTORS, "w+", np.float32, (count, dimension))
                np.lib.format.open_memmap(folder / _DONE, "w+", np.bool_, (count,))
            vectors = np.lib.format.open_memmap(folder / _VECTORS, "r+")
            return vectors, np.lib.format.open_memmap(folder / _DONE, "r+")
        except OSError as error:
            raise RunError(f"{folder} cannot be written: {error.strerror}") from error

    @property
    def _folder(self) -> Path:
        network = self.trained.recipe.network
        made_of = (
            self.trained.model if self.which == AFTER else f"{network.architecture} {self.trained.opened.provenance}"
        )
        key = f"{made_of} {self.trained.data} {self.trained.preprocessing} {self.trained.opened.mean}"
        return self.trained.run / FOLDER / f"{self.which}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def embedded(network: EmbeddingNetwork, trained: Trained, numbers: Ints) -> Iterator[tuple[Ints, Vector]]:
    """numbers (n,) -> batches of them with their embeddings (B, D), by serving's preprocessing, in float32.

    Raises DataError for a file that cannot be read, RunError for a network that gives no unit vector.
    """
    device = device_of(trained.recipe.fit.device)
    pictures = Pictures(
        trained.manifest,
        augment=None,
        preprocessing=trained.preprocessing,
        seed=0,
        threads=trained.recipe.data.threads,
    )
    network = network.to(device)
    with pictures.batches(_cut(numbers, _AT_ONCE), epoch=0) as loaded, torch.inference_mode():
        for group, pixels in zip(_cut(numbers, _AT_ONCE), loaded, strict=True):
            found = network(pixels.to(device)).float().cpu().numpy()
            _check(found, group, trained)
            yield group, found
    network.to("cpu")


def _features(trained: Trained) -> Tensor | None:
    """(N, F) pooled features of a run of mode linear, if they lie where `fit` keeps them."""
    network, manifest, folder = trained.recipe.network, trained.manifest, trained.run.absolute().parent / FEATURES
    if network.mode is not Mode.LINEAR:
        return None
    if not (folder / f"{key_of(trained.opened, network, manifest)}.safetensors").is_file():
        return None
    return features_of(trained.opened, network, manifest, folder, device=torch.device("cpu"), threads=0)


def _cut(numbers: Ints, size: int) -> list[Ints]:
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def _check(found: Vector, numbers: Ints, trained: Trained) -> None:
    lengths = np.linalg.norm(found.astype(np.float64), axis=1)
    bad = np.flatnonzero(~(np.abs(lengths - 1) <= 1e-3))  # also where a length is not finite
    if len(bad):
        file = trained.manifest.file(int(numbers[bad[0]]))
        raise RunError(f"the network gives a vector of length {lengths[bad[0]]:.3g} for {file}: train it anew")
