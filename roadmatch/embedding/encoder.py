"""A picture's bytes to its embedding and background level, by the one rule of a bundle."""

from dataclasses import dataclass
from typing import Literal

from roadmatch.bundle import EMBEDDER, Bundle
from roadmatch.embedding.engine import Engine, Pixels
from roadmatch.embedding.openvino_engine import OpenvinoEngine
from roadmatch.errors import BundleCorrupt, BundleUnsupported
from roadmatch.images import Limits, read_pixels
from roadmatch.scoring import Vector, background_level


@dataclass(frozen=True, eq=False)
class Encoded:
    """A picture as search sees it: unit vector (D,), its b, and what the file was."""

    vector: Vector
    b: float
    format: str
    width: int
    height: int


class Encoder:
    """The only way from bytes to vectors: uploads, queries, background and calibration all take it."""

    def __init__(self, bundle: Bundle, engine: Engine, limits: Limits | None = None) -> None:
        if engine.dimension != bundle.manifest.dimension:
            stated = bundle.manifest.dimension
            raise BundleCorrupt(f"{bundle.id} states {stated} dimensions and its embedder has {engine.dimension}")
        self.bundle = bundle
        self._engine = engine
        self._limits = limits or Limits()

    def encode(self, data: bytes, *, busy: bool = False) -> Encoded:
        """data: an image file's bytes. busy: see Engine. Safe to call from many threads. Raises ImageError."""
        pixels, picture = read_pixels(data, self.bundle.manifest.preprocessing, self._limits)
        vector, b = self.encode_pixels(pixels, busy=busy)
        return Encoded(vector=vector, b=b, format=picture.format, width=picture.width, height=picture.height)

    def encode_pixels(self, pixels: Pixels, *, busy: bool = False) -> tuple[Vector, float]:
        """pixels (H, W, 3) uint8, read by the bundle's preprocessing -> the embedding (D,) and its b."""
        vector = self._engine.embed(pixels, busy=busy)
        return vector, background_level(vector, self.bundle.background, self.bundle.manifest.score.k)


def open_encoder(
    bundle: Bundle, *, device: Literal["cpu", "cuda"] = "cpu", cpus: int | None = None, limits: Limits | None = None
) -> Encoder:
    """The encoder of a bundle; cpus bounds the CPU engine's threads, None takes all. Raises BundleError."""
    return Encoder(bundle, _open_engine(bundle, device, cpus), limits)


def _open_engine(bundle: Bundle, device: str, cpus: int | None) -> Engine:
    if device == "cpu":
        return OpenvinoEngine(bundle.file(EMBEDDER), cpus)
    if device != "cuda":
        raise ValueError(f"device must be cpu or cuda, not {device!r}")
    try:
        from roadmatch.embedding.torch_engine import TorchEngine
    except ModuleNotFoundError as error:
        raise BundleUnsupported(f"device cuda needs {error.name}: pip install 'roadmatch[gpu]'") from error
    return TorchEngine(bundle, device)
