"""A tiny real bundle for tests: a seeded network of 64 dimensions at 64 px, with operating points made by hand."""

from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image

from roadmatch import bundle as bundles
from roadmatch.bundle import EMBEDDER, MODEL, Bundle
from roadmatch.embedding import open_encoder
from roadmatch.embedding.network import EmbeddingNetwork, build_backbone
from roadmatch.images import Preprocessing
from roadmatch.operating_points import Curves, Evidence, OperatingPoint, OperatingPoints, Rate
from roadmatch.scoring import ScoreRule, Vector
from training.network.export import sample_pictures, to_onnx

ARCHITECTURE = "test_convnext"
SIZE = 64
DIMENSION = 64
RULE = Preprocessing(size=SIZE, resize=SIZE, reduce_to=2 * SIZE, interpolation="bicubic")
MEAN = STD = (0.5, 0.5, 0.5)
SCORE = ScoreRule(beta=0.5, gamma=0.5, k=2)
BACKGROUND_SEED = 900
DEFAULT_RULE = "false_match_rate<=0.01"


def picture(seed: int, side: int = 96) -> bytes:
    """A PNG whose spectrum is like a photograph's; another seed is another picture."""
    *_, pixels = sample_pictures(side, number=3, seed=seed)
    return _encoded(Image.fromarray(pixels), "PNG")


def edited(data: bytes, quality: int = 90) -> bytes:
    """The same picture as a JPEG of lower quality."""
    return _encoded(Image.open(BytesIO(data)), "JPEG", quality=quality)


@cache
def network() -> EmbeddingNetwork:
    """Seeded weights; do not change them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return EmbeddingNetwork(build_backbone(ARCHITECTURE), MEAN, STD).eval()


@cache
def embedder() -> bytes:
    """The exported graph, made once a process."""
    return to_onnx(network(), SIZE)


@cache
def model() -> bytes:
    """The weights as a bundle keeps them."""
    return safetensors.torch.save(network().backbone.state_dict())


def tiny_bundle(
    folder: Path,
    *,
    name: str = "tiny",
    score: ScoreRule = SCORE,
    background: Vector | None = None,
    calibrated: bool = True,
) -> Bundle:
    """The bundle at `folder`; background None is eight pictures of its own. About 4 s the first time, then 0.3 s."""
    draft = bundles.write(
        folder,
        name=name,
        architecture=ARCHITECTURE,
        preprocessing=RULE,
        mean=MEAN,
        std=STD,
        dimension=DIMENSION,
        score=score,
        licence="CC0-1.0",
        provenance={"made": "for tests"},
        files={EMBEDDER: embedder(), MODEL: model()},
        background=np.zeros((0, DIMENSION), np.float32),
    )
    if background is None:
        encoder = open_encoder(draft, cpus=1)
        background = np.stack([encoder.encode(picture(BACKGROUND_SEED + i)).vector for i in range(8)])
    points = operating_points(bundles.model_of(draft, score, background)) if calibrated else None
    return bundles.fitted(draft, folder, background=background, operating_points=points)


def operating_points(fitted_for: str) -> OperatingPoints:
    """Points by hand: with SCORE, edited pictures score above 0.6 and others below 0.4."""
    return OperatingPoints(
        model=fitted_for,
        default_rule=DEFAULT_RULE,
        curves=Curves(scores=(-0.5, 0.0, 0.4, 0.8), pair_rate=(1.0, 0.3, 1e-4, 1e-8), found=(1.0, 1.0, 0.99, 0.1)),
        points=(
            _point(DEFAULT_RULE, 0.01, 0.45, 0.002),
            _point("false_match_rate<=0.05", 0.05, 0.40, 0.002),
            _point("max_f1", None, 0.42, 0.0),
            OperatingPoint(
                rule="false_match_rate<=0.0001", stated_false_match_rate=0.0001, supported=False, least_rate=0.006
            ),
        ),
    )


def _point(rule: str, stated: float | None, threshold: float, rise: float) -> OperatingPoint:
    return OperatingPoint(
        rule=rule,
        stated_false_match_rate=stated,
        match_share=0.5,
        supported=True,
        thresholds=tuple(round(threshold + rise * step, 6) for step in range(21)),
        shown_up_to=512,
        evidence=Evidence(
            what="edited copies of synthetic pictures",
            pictures=500,
            gallery_size=500,
            searches_with_match=4500,
            searches_without_match=4500,
            recall=Rate(value=0.95, low=0.93, high=0.97),
            false_match_rate=Rate(value=stated or 0.02, low=0.0, high=0.05),
            precision=Rate(value=0.98, low=0.97, high=0.99),
            match_share=0.5,
        ),
    )


def _encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
