"""The embedder as a torch module; the ONNX export and the torch engine run this one definition."""

from typing import cast

import timm
import torch
from torch import Tensor, nn

from roadmatch.errors import BundleUnsupported


class EmbeddingNetwork(nn.Module):
    """pixels (B, H, W, 3) uint8 -> unit embeddings (B, D): normalisation, backbone, L2 norm."""

    scale: Tensor
    shift: Tensor

    def __init__(self, backbone: nn.Module, mean: tuple[float, float, float], std: tuple[float, float, float]) -> None:
        super().__init__()
        self.backbone = backbone
        deviation = torch.tensor(std, dtype=torch.float64)
        self.register_buffer("scale", (1 / (255 * deviation)).to(torch.float32), persistent=False)
        self.register_buffer(
            "shift", (-torch.tensor(mean, dtype=torch.float64) / deviation).to(torch.float32), persistent=False
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels (B, H, W, 3) uint8 -> (B, D).

        (x/255 - mean)/std is one product and one sum, taken while the channels are last: the CPU engine then needs no
        copy of the picture into another order.
        """
        normalised = pixels.to(torch.float32) * self.scale + self.shift
        features = self.backbone(normalised.permute(0, 3, 1, 2))
        return nn.functional.normalize(features, dim=1)


def build_backbone(architecture: str) -> nn.Module:
    """timm's model of this name without its classifier, in evaluation mode, with arbitrary weights.

    Only names of timm's own list are taken: a prefix such as `hf-hub:` would load code's settings from elsewhere.
    Raises BundleUnsupported.
    """
    if architecture not in timm.list_models():
        raise BundleUnsupported(
            f"timm {timm.__version__} has no model {architecture!r}: name one of timm.list_models()"
        )
    return cast(nn.Module, timm.create_model(architecture, pretrained=False, num_classes=0)).eval()
