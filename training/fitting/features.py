"""What frozen layers make of each picture, computed once and kept for every run on the same data and weights."""

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from roadmatch.embedding.network import EmbeddingNetwork, Headed
from roadmatch.errors import RoadmatchError
from training import recipe
from training.data.loading import Pictures
from training.data.manifest import DataError, Manifest
from training.network.trainable import Opened

_AT_ONCE = 64  # pictures in the network
_NAME = "features"


class FeaturesError(RoadmatchError):
    """Features that cannot be made or kept."""


class Projection(nn.Module):
    """features (B, F) -> unit embeddings (B, D); its tensors have the names that the whole backbone gives them."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        """features (B, F) -> (B, D) of unit length."""
        return nn.functional.normalize(self.head(features), dim=1)


def projection_of(network: EmbeddingNetwork) -> Projection:
    """What is trained on features: the network's own head. Raises FeaturesError for a network without one."""
    return Projection(_headed(network).head)


def features_of(
    opened: Opened,
    network: recipe.Network,
    manifest: Manifest,
    folder: Path,
    *,
    device: torch.device,
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """(N, F) float32 on the CPU: the pooled features, before layer norm and projection, of every image of the manifest.

    They are taken from `folder` where they lie there already: under a key of the weights, the preprocessing and each
    image's path, size and time of change. Otherwise serving's preprocessing and the network make them, and they are
    kept, at once or not at all. progress is told how many images are done. Raises FeaturesError and DataError.
    """
    file = folder / f"{key_of(opened, network, manifest)}.safetensors"
    try:
        if file.exists():
            return safetensors.torch.load_file(file)[_NAME]
    except (OSError, SafetensorError, KeyError) as error:
        raise FeaturesError(f"{file} cannot be read ({_line(error)}): delete it, and it is made anew") from error
    pictures = Pictures(manifest, augment=None, preprocessing=opened.preprocessing, seed=0, threads=threads)
    features = _computed(opened.network.to(device).eval(), pictures, device, progress or (lambda _: None))
    opened.network.to("cpu")
    _keep(features, file)
    return features


def key_of(opened: Opened, network: recipe.Network, manifest: Manifest) -> str:
    """What the features depend on, as 32 hexadecimal digits; labels, splits and the head are not in it."""
    made_by = {
        "architecture": network.architecture,
        "pooling": network.head.pooling,
        "weights": opened.provenance,
        "preprocessing": asdict(opened.preprocessing),
        "mean": opened.mean,
        "std": opened.std,
    }
    sha256 = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode())
    for n, path in enumerate(manifest.paths):
        try:
            stat = manifest.file(n).stat()
        except OSError as error:
            raise DataError(f"{manifest.file(n)} cannot be read: {error.strerror}") from error
        sha256.update(json.dumps([path, stat.st_size, stat.st_mtime_ns]).encode() + b"\n")
    return sha256.hexdigest()[:32]


@torch.no_grad()
def _computed(
    network: EmbeddingNetwork, pictures: Pictures, device: torch.device, progress: Callable[[int], None]
) -> Tensor:
    pooled: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        pooled.append(inputs[0].float().cpu())

    numbers = torch.arange(len(pictures)).numpy()
    wanted = [numbers[start : start + _AT_ONCE] for start in range(0, len(numbers), _AT_ONCE)]
    hook = _headed(network).head.register_forward_pre_hook(keep)
    try:
        with pictures.batches(wanted, epoch=0) as coming:
            for done, pixels in enumerate(coming, 1):
                network(pixels.to(device))
                progress(min(done * _AT_ONCE, len(numbers)))
    finally:
        hook.remove()
    features = torch.cat(pooled)
    if not torch.isfinite(features).all():
        raise FeaturesError("the frozen network's features are not finite: other weights are needed")
    return features


def _headed(network: EmbeddingNetwork) -> Headed:
    if not isinstance(network.backbone, Headed):
        raise FeaturesError("the network has no head to train: give network.head.dimension")
    return network.backbone


def _keep(features: Tensor, file: Path) -> None:
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file({_NAME: features}, draft)
        draft.replace(file)
    except (OSError, SafetensorError) as error:
        raise FeaturesError(f"{file} cannot be written ({_line(error)}): make room, and try again") from error
    finally:
        draft.unlink(missing_ok=True)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
