"""The network that is trained: pretrained trunk, new layers, what is frozen, and the average over its steps."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from pydantic import JsonValue
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from roadmatch.embedding.network import EmbeddingNetwork, Headed, build_backbone
from roadmatch.errors import RoadmatchError
from roadmatch.images import Preprocessing
from training import recipe
from training.network.build import preprocessing
from training.network.weights import StateDict, fit, load_weights

Three = tuple[float, float, float]


class NetworkError(RoadmatchError):
    """A network that cannot be made as the recipe wants it."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A network in evaluation mode, channels last, and what a bundle has to say of it."""

    network: EmbeddingNetwork
    preprocessing: Preprocessing
    mean: Three
    std: Three
    provenance: dict[str, JsonValue]
    """Of the weights."""


def open_network(network: recipe.Network, *, seed: int) -> Opened:
    """The recipe's network with pretrained weights in its trunk; its new layers are a function of the seed alone.

    Draws nothing from torch's own random numbers. Raises BundleUnsupported, WeightsError and NetworkError.
    """
    with torch.random.fork_rng(devices=[]):
        backbone = build_backbone(network.architecture, network.head, drop_path=network.drop_path)
        loaded = load_weights(network.weights, network.architecture)
        tensors = fit(loaded, network.architecture)
    trunk = backbone.trunk if isinstance(backbone, Headed) else backbone
    trunk.load_state_dict(_for_pooling(tensors, trunk, network), strict=True)
    if isinstance(backbone, Headed):
        initialise(backbone.head, seed)
    rule, mean, std = preprocessing(trunk, loaded, network.size)
    embedding = EmbeddingNetwork(backbone, mean, std).eval()
    if network.freeze_batch_norm:
        freeze_batch_norm(embedding)
    embedding.to(memory_format=torch.channels_last)  # as the pictures come
    return Opened(embedding, rule, mean, std, dict(loaded.provenance))


def initialise(head: nn.Module, seed: int) -> None:
    """Linear layers get torch's usual first weights, drawn from this seed whatever was drawn elsewhere before."""
    generator = torch.Generator().manual_seed(seed)
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            bound = 1 / math.sqrt(layer.in_features)
            for parameter in layer.parameters():
                with torch.no_grad():
                    parameter.copy_((torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)


def stored(network: EmbeddingNetwork) -> StateDict:
    """Copies of the backbone's tensors, contiguous and on the CPU, that load strictly into build_backbone's model."""
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in network.backbone.state_dict().items()
    }


def parameter_groups(network: nn.Module, objective: nn.Module, optimizer: recipe.Optimizer) -> list[dict[str, Any]]:
    """What the optimizer is given: `params`, `lr`, `weight_decay` and `name`, for each group that has parameters.

    Names are backbone, head (a network without a trunk is all head) and loss, the first two once more with
    `_no_decay` for vectors and scalars: biases, norms, GeM's exponent. What is frozen is in none. network may be
    wrapped for data-parallel training.
    """
    network = network.module if isinstance(network, DistributedDataParallel) else network
    head_rate = optimizer.head_learning_rate or optimizer.learning_rate
    rates = {"backbone": optimizer.learning_rate, "head": head_rate}
    members: dict[str, list[nn.Parameter]] = {name + end: [] for name in rates for end in ("", "_no_decay")}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            group = "backbone" if _in_trunk(network, name) else "head"
            members[group + ("_no_decay" if parameter.ndim <= 1 else "")].append(parameter)
    groups: list[dict[str, Any]] = [
        {
            "name": name,
            "params": parameters,
            "lr": rates[name.removesuffix("_no_decay")],
            "weight_decay": 0.0 if name.endswith("_no_decay") else optimizer.weight_decay,
        }
        for name, parameters in members.items()
    ]
    loss_rate = optimizer.loss_learning_rate or head_rate
    groups.append({"name": "loss", "params": list(objective.parameters()), "lr": loss_rate, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def freeze_batch_norm(network: nn.Module) -> int:
    """Every batch norm keeps its statistics and scales from now on, whatever mode is asked for -> how many they are.

    Tensors keep their names. Raises NetworkError for a kind that is not known, or that has no statistics to keep.
    """
    layers = [(name, module) for name, module in network.named_modules() if isinstance(module, _BatchNorm)]
    for name, layer in layers:
        kind = _FROZEN.get(type(layer), type(layer))
        if not issubclass(kind, _Frozen) or layer.running_mean is None:
            raise NetworkError(
                f"batch norm {name} ({type(layer).__name__}) cannot be frozen: set network.freeze_batch_norm to false"
            )
        # The layer stays itself, with its hooks and whoever refers to it: its class alone says what `train` does.
        layer.__class__ = kind
        layer.eval().requires_grad_(False)
    return len(layers)


class Average:
    """An exponential moving average of a network over its steps; `network` is what to validate and to export."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        """network: not wrapped; the average begins with its tensors. Raises ValueError for a decay out of [0, 1)."""
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}: a number in [0, 1) is needed")
        self.decay = decay
        self.network = copy.deepcopy(network).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """One step: average = decay * average + (1 - decay) * network; whole numbers, as counts, are copied."""
        mine, theirs = ([*_tensors(each)] for each in (self.network, network))
        for average, tensor in zip(mine, theirs, strict=True):
            if average.is_floating_point():
                average.lerp_(tensor, 1 - self.decay)
            else:
                average.copy_(tensor)

    def state(self) -> StateDict:
        """Copies of its tensors, for a checkpoint."""
        return {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint. Raises RuntimeError for the tensors of another network."""
        self.network.load_state_dict(state, strict=True)


class _Frozen(_BatchNorm):
    def train(self, mode: bool = True) -> Self:
        super().train(mode)  # what is inside, as an activation, follows
        self.training = False
        return self


class FrozenBatchNorm1d(_Frozen, nn.BatchNorm1d):
    """Batch norm that is never trained."""


class FrozenBatchNorm2d(_Frozen, nn.BatchNorm2d):
    """Batch norm that is never trained."""


class FrozenBatchNormAct2d(_Frozen, BatchNormAct2d):  # type: ignore[misc]  # timm has no types
    """timm's batch norm with an activation; the norm is never trained."""


_FROZEN: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    BatchNormAct2d: FrozenBatchNormAct2d,
}


def _for_pooling(tensors: StateDict, trunk: nn.Module, network: recipe.Network) -> StateDict:
    """The tensors under the trunk's names: a transformer that averages has its last norm behind the pooling."""
    wanted = trunk.state_dict().keys()
    norm, behind = "norm.", "fc_norm."
    found = dict(tensors)
    for name in wanted - tensors.keys():
        for one, other in ((norm, behind), (behind, norm)):
            if name.startswith(one) and name.replace(one, other, 1) in tensors:
                found[name] = tensors[name.replace(one, other, 1)]
    if missing := [name for name in wanted if name not in found]:
        raise NetworkError(
            f"pooling {network.head.pooling!r} of {network.architecture} has weights that were never trained "
            f"({missing[0]}): use own"
        )
    return {name: found[name] for name in wanted}


def _in_trunk(network: nn.Module, parameter: str) -> bool:
    if not isinstance(network, EmbeddingNetwork):
        return False
    return parameter.startswith("backbone.trunk." if isinstance(network.backbone, Headed) else "backbone.")


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    yield from cast("Iterator[Tensor]", network.parameters())
    yield from network.buffers()
