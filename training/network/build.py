"""A bundle, not yet calibrated, from a timm architecture and pretrained weights."""

import hashlib
import math
import platform
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import timm
import timm.data
from pydantic import JsonValue
from torch import nn

from roadmatch import bundle as bundles
from roadmatch.bundle import EMBEDDER, MODEL, Bundle
from roadmatch.embedding import Encoder, open_encoder
from roadmatch.embedding.network import EmbeddingNetwork, build_backbone
from roadmatch.embedding.openvino_engine import OpenvinoEngine
from roadmatch.errors import BundleUnsupported, ImageError, RoadmatchError
from roadmatch.images import Preprocessing
from roadmatch.scoring import ScoreRule, Vector
from training.network.export import check_parity, sample_pictures, to_onnx
from training.network.weights import Weights, fit, load_weights

PACKAGES = ("torch", "timm", "onnx", "onnxscript", "openvino", "numpy", "pillow", "roadmatch")


class BackgroundError(RoadmatchError):
    """A background folder that cannot be taken as a whole."""


def build(
    folder: Path,
    *,
    architecture: str,
    weights: str,
    name: str,
    licence: str,
    size: int | None = None,
    background: Path | None = None,
    with_model: bool = True,
) -> Bundle:
    """The bundle at `folder`: exported, checked against torch, with plain similarity as its score.

    size: input side in pixels, None for the architecture's own. background: a folder of image files. with_model: with
    the tensors that further training and the CUDA engine need. Raises RoadmatchError; `folder` is as before then.
    """
    backbone = build_backbone(architecture)
    loaded = load_weights(weights, architecture)
    rule, mean, std = preprocessing(backbone, loaded, size)
    tensors = fit(loaded, architecture)
    backbone.load_state_dict(tensors, strict=True)
    network = EmbeddingNetwork(backbone, mean, std)
    onnx_bytes = to_onnx(network, rule.size)
    engine = OpenvinoEngine(onnx_bytes)
    check_parity(network, engine, sample_pictures(rule.size))
    with tempfile.TemporaryDirectory() as temporary:
        draft = bundles.write(
            Path(temporary) / "draft",
            name=name,
            architecture=architecture,
            preprocessing=rule,
            mean=mean,
            std=std,
            dimension=engine.dimension,
            score=ScoreRule(),
            licence=licence,
            provenance={"weights": dict(loaded.provenance), **circumstances()},
            files={EMBEDDER: onnx_bytes, **({MODEL: safetensors.torch.save(tensors)} if with_model else {})},
            background=np.zeros((0, engine.dimension), np.float32),
        )
        if background is None:
            return bundles.fitted(draft, folder)
        encoder = open_encoder(draft)
        vectors, record = embed_folder(encoder, background)
        return bundles.fitted(draft, folder, background=vectors, provenance={"background": record})


def preprocessing(
    backbone: nn.Module, weights: Weights, size: int | None
) -> tuple[Preprocessing, tuple[float, float, float], tuple[float, float, float]]:
    """The rule, mean and std that timm states for the architecture; the weights' own mean and std go first.

    A picture may be decoded at a reduced size of at least twice the resize: what bicubic resizing then sees has
    lost nothing that it would have kept. Raises BundleUnsupported.
    """
    known: Any = backbone.pretrained_cfg
    config: dict[str, Any] = timm.data.resolve_model_data_config(backbone)
    channels, height, width = config["input_size"]
    if (channels, height) != (3, width):
        raise BundleUnsupported(
            f"the model takes {config['input_size']} values, and only square RGB pictures are given"
        )
    fixed = known.get("fixed_input_size") and not getattr(backbone, "dynamic_img_size", False)  # as DINOv3 has both
    if size is not None and size != height and fixed:
        raise BundleUnsupported(f"the model takes pictures of {height} px only, not of {size}")
    side = size or height
    resize = math.floor(side / config["crop_pct"])
    try:
        rule = Preprocessing(size=side, resize=resize, reduce_to=2 * resize, interpolation=config["interpolation"])
    except ValueError as error:
        raise BundleUnsupported(f"timm's preprocessing of the model is not offered: {error}") from error
    return rule, weights.mean or config["mean"], weights.std or config["std"]


def embed_folder(encoder: Encoder, folder: Path) -> tuple[Vector, dict[str, JsonValue]]:
    """Embeddings (N, D) of every file in the folder and below, in the order of their names, and a record of the files.

    Hidden files are passed over; one that is no picture refuses the folder (BackgroundError), since which pictures
    are in a background is part of what its scores mean.
    """
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")),
        key=lambda path: path.relative_to(folder).as_posix(),
    )
    if not files:
        raise BackgroundError(f"{folder} holds no files")
    vectors, lines = [], []
    for path in files:
        data = path.read_bytes()
        try:
            vectors.append(encoder.encode(data).vector)
        except ImageError as error:
            raise BackgroundError(f"{path}: {error}") from error
        lines.append(f"{hashlib.sha256(data).hexdigest()}  {path.relative_to(folder).as_posix()}\n")
    manifest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return np.stack(vectors), {"pictures": len(files), "manifest_sha256": manifest}


def circumstances() -> dict[str, JsonValue]:
    """Versions and, in a checkout, the commit: what decides a bundle's bytes beside its parts."""
    versions: dict[str, JsonValue] = {package: version(package) for package in PACKAGES if _installed(package)}
    return {"versions": {"python": platform.python_version(), **versions}, "commit": _commit()}


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _commit() -> str | None:
    """Of the checkout that holds this very file, marked where it differs from its commit; None outside of one."""
    here = Path(__file__)
    for command in (
        ["git", "ls-files", "--error-unmatch", here.name],
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
    ):
        try:
            done = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            return None
    return done.stdout.strip()
