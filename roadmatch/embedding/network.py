"""The embedder as a torch module; the ONNX export and the torch engine run this one definition."""

from typing import Any, cast

import timm
import torch
from torch import Tensor, nn

from roadmatch.bundle import Head
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
        features = _in_full(self.backbone(normalised.permute(0, 3, 1, 2)))
        return nn.functional.normalize(features, dim=1)


def build_backbone(architecture: str, head: Head | None = None, *, drop_path: float = 0.0) -> nn.Module:
    """timm's model of this name without its classifier, with a head, in evaluation mode, with arbitrary weights.

    Only names of timm's own list are taken: a prefix such as `hf-hub:` would load code's settings from elsewhere.
    Without a head its tensors have timm's own names. drop_path: rate of stochastic depth, in training mode only; it
    changes no tensor and no name. Raises BundleUnsupported.
    """
    head = head or Head()
    if architecture not in timm.list_models():
        raise BundleUnsupported(
            f"timm {timm.__version__} has no model {architecture!r}: name one of timm.list_models()"
        )
    trunk = _trunk(architecture, head, drop_path)
    return (trunk if head == Head() else Headed(trunk, head)).eval()


class Headed(nn.Module):
    """pictures (B, 3, H, W) -> (B, D): the trunk's pooled features, then layer norm and projection where wanted."""

    def __init__(self, trunk: nn.Module, head: Head) -> None:
        """trunk: gives (B, F), or a feature map (B, F, h, w) for `gem`."""
        super().__init__()
        width = _width(trunk)
        self.trunk = trunk
        self.pool = GeM() if head.pooling == "gem" else nn.Identity()
        self.head = head_of(width, head)

    def forward(self, pictures: Tensor) -> Tensor:
        """pictures (B, 3, H, W) -> (B, D), not of unit length."""
        return cast(Tensor, self.head(self.pool(self.trunk(pictures))))


def head_of(width: int, head: Head) -> nn.Sequential:
    """pooled features (B, width) -> (B, D): layer norm and projection, as far as the head has them."""
    layers: list[nn.Module] = []
    if head.layer_norm:
        layers.append(nn.LayerNorm(width, elementwise_affine=False))
    if head.dimension is not None:
        layers.append(nn.Linear(width, head.dimension))
    return nn.Sequential(*layers)


class GeM(nn.Module):
    """Generalised mean over places (Radenovic et al., 2018, eq. 3): exponent 1 is the mean, a large one the maximum."""

    def __init__(self, exponent: float = 3.0, least: float = 1e-6) -> None:
        super().__init__()
        self.exponent = nn.Parameter(torch.tensor(exponent))
        self.least = least

    def forward(self, features: Tensor) -> Tensor:
        """features (B, F, h, w) -> (B, F); values below `least` count as that much."""
        features = _in_full(features)  # a small value's third power is 0 in half precision, and its root has no slope
        return features.clamp(min=self.least).pow(self.exponent).mean(dim=(2, 3)).pow(1 / self.exponent)


def _trunk(architecture: str, head: Head, drop_path: float) -> nn.Module:
    pooling = {"own": {}, "gem": {"global_pool": ""}}.get(head.pooling, {"global_pool": head.pooling})
    trunk = _created(architecture, f"does not offer pooling {head.pooling!r}: use own", **pooling)
    if head.pooling == "gem" and not _gives_maps(trunk):
        raise BundleUnsupported(f"{architecture} has no feature map for pooling 'gem': use own")
    if drop_path:
        has_none = "has no stochastic depth: leave drop_path at 0"
        trunk = _created(architecture, has_none, **pooling, drop_path_rate=drop_path)
        if not any(getattr(module, "drop_prob", 0) for module in trunk.modules()):
            raise BundleUnsupported(f"{architecture} {has_none}")
    return trunk


def _created(architecture: str, refusal: str, **settings: object) -> nn.Module:
    try:
        return cast(nn.Module, timm.create_model(architecture, pretrained=False, num_classes=0, **settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise BundleUnsupported(f"{architecture} {refusal}") from error


def _width(trunk: nn.Module) -> int:
    """Numbers of its pooled features; some architectures have one more layer behind the pooling."""
    model = cast(Any, trunk)
    return int(getattr(model, "head_hidden_size", None) or model.num_features)


def _gives_maps(trunk: nn.Module) -> bool:
    side = cast(Any, trunk).pretrained_cfg["input_size"][1]
    with torch.inference_mode():
        features = cast(Tensor, trunk.eval()(torch.zeros(1, 3, side, side)))
    return features.dim() == 4 and features.shape[1] == _width(trunk)


def _in_full(features: Tensor) -> Tensor:
    """Half precision, as autocast makes it, as float32: a unit vector in it is off by up to 0.4 %."""
    return features.float() if features.dtype in (torch.float16, torch.bfloat16) else features
