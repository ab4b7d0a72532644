"""The engine for CUDA: the embedder's weights in timm's model, in float32."""

import safetensors.torch
import torch

from roadmatch.bundle import MODEL, Bundle
from roadmatch.embedding.engine import Pixels, checked_pixels, checked_vector
from roadmatch.embedding.network import EmbeddingNetwork, build_backbone
from roadmatch.errors import BundleCorrupt, BundleUnsupported
from roadmatch.scoring import Vector


class TorchEngine:
    """timm's model of the bundle's architecture on one device."""

    def __init__(self, bundle: Bundle, device: str) -> None:
        """device: `cuda`, `cuda:1`, or `cpu`. Raises BundleUnsupported, BundleCorrupt."""
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise BundleUnsupported("torch finds no CUDA device: use device cpu")
        # TF32 keeps 10 bits of each factor: enough to move a score across the threshold.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        manifest = bundle.manifest
        backbone = build_backbone(manifest.architecture, manifest.head)
        try:
            backbone.load_state_dict(safetensors.torch.load(bundle.file(MODEL)), strict=True)
        except RuntimeError as error:
            raise BundleCorrupt(f"{bundle.folder / MODEL} does not fit {manifest.architecture}") from error
        self._network = EmbeddingNetwork(backbone, manifest.mean, manifest.std).eval().to(device)
        self._network.to(memory_format=torch.channels_last)
        self._device = device
        self._size = manifest.preprocessing.size
        self._dimension = manifest.dimension

    @property
    def dimension(self) -> int:
        return self._dimension

    @torch.inference_mode()
    def embed(self, pixels: Pixels, *, busy: bool = False) -> Vector:  # noqa: ARG002
        batch = torch.from_numpy(checked_pixels(pixels, self._size)).to(self._device)[None]
        vector: Vector = self._network(batch)[0].cpu().numpy()
        return checked_vector(vector)
