"""A bundle whose embedding is nearly all of the work, as with the larger networks that users bring: for speed alone."""

from pathlib import Path

import torch

from benchmarks.running import unit_vectors
from roadmatch import bundle as bundles
from roadmatch.bundle import EMBEDDER, default_bundle_folder
from roadmatch.embedding.network import EmbeddingNetwork, build_backbone
from training.network.export import to_onnx

ARCHITECTURE, DIMENSION = "resnet50", 2048
_BACKGROUND = 256


def heavy_bundle(folder: Path) -> Path:
    """ResNet-50 at the default bundle's size, its weights, background and thresholds made up -> the bundle's folder."""
    like = bundles.read(default_bundle_folder())
    assert like.operating_points is not None
    manifest = like.manifest
    torch.manual_seed(0)
    network = EmbeddingNetwork(build_backbone(ARCHITECTURE), manifest.mean, manifest.std).eval()
    background = unit_vectors(_BACKGROUND, DIMENSION)
    draft = bundles.write(
        folder,
        name="heavy",
        architecture=ARCHITECTURE,
        preprocessing=manifest.preprocessing,
        mean=manifest.mean,
        std=manifest.std,
        dimension=DIMENSION,
        score=manifest.score,
        licence="CC0-1.0",
        provenance={"made": "for benchmarks, of random weights"},
        files={EMBEDDER: to_onnx(network, manifest.preprocessing.size)},
        background=background,
    )
    fitted_for = bundles.model_of(draft, manifest.score, background)
    points = like.operating_points.model_copy(update={"model": fitted_for})
    return bundles.fitted(draft, folder, background=background, operating_points=points).folder
