"""How much memory a training step takes, and for what, without taking it."""

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roadmatch.embedding.network import EmbeddingNetwork, Headed, build_backbone
from training.data.batches import BatchError
from training.fitting.features import Projection
from training.fitting.objective import objective_of
from training.network.build import preprocessing
from training.network.trainable import freeze_batch_norm
from training.network.weights import Weights
from training.recipe import Mode, Network, OptimizerName, Precision, Recipe

_HALF = {Precision.BFLOAT16: torch.bfloat16, Precision.FLOAT16: torch.float16}
_MOMENTS = {OptimizerName.ADAMW: 2, OptimizerName.ADAM: 2, OptimizerName.SGD: 1}
_ENOUGH = 32 << 20  # bytes, from which on the growth can be seen
_GIB = 1 << 30
_GREY = (0.5, 0.5, 0.5)
_NO_WEIGHTS = Weights({}, {})


@dataclass(frozen=True)
class Memory:
    """Bytes of each process in a step, at the moment when most are taken."""

    parameters: int  # and the statistics of batch norm
    gradients: int  # twice with several processes, whose gradients travel in buckets
    optimizer: int
    average: int  # the moving average of the network
    inputs: int  # of the whole batch
    activations: int  # of one chunk, kept for its gradient, and what passes by
    loss: int  # embeddings, and what the loss makes of them

    @property
    def total(self) -> int:
        """As if the loss and the chunk's activations were there together; they are where the batch is one chunk."""
        return sum(vars(self).values())

    def lines(self) -> list[str]:
        """A line for each part and for the total, in GiB."""
        parts = {**vars(self), "total": self.total}
        return [f"{name:12} {size / _GIB:9.3f} GiB" for name, size in parts.items()]


def estimate(recipe: Recipe, *, processes: int = 1) -> Memory:
    """The memory of each of so many processes in a step of this recipe.

    The network is built without memory and stepped through with shapes alone, on one chunk of the recipe's own size;
    the loss is measured on real embeddings and extrapolated. Not counted are what the device's driver and libraries
    take for themselves (about half a GiB with CUDA), working space of convolutions, and holes between tensors.
    Raises BundleUnsupported and NetworkError for a network, and BatchError for a batch, that cannot be.
    """
    batch = recipe.batch.size
    if processes < 1 or batch % processes:
        raise BatchError(f"batch.size {batch} cannot be parted equally among {processes} processes")
    own = batch // processes
    network, inputs = (_linear if recipe.network.mode is Mode.LINEAR else _whole)(recipe.network, own)
    with FakeTensorMode(allow_non_fake_inputs=True):  # as on a CPU, so that each operation keeps what it would keep
        network = network.to_empty(device="cpu")
        inputs = torch.empty_like(inputs, device="cpu")
        activations, dimension = _step(network, inputs[: recipe.batch.chunk or own], recipe.fit.precision)
    trained = sum(each.nbytes for each in network.parameters() if each.requires_grad)
    parameters = sum(each.nbytes for each in (*network.parameters(), *network.buffers()))
    return Memory(
        parameters=parameters,
        gradients=trained * (1 if processes == 1 else 2),
        optimizer=trained * _MOMENTS[recipe.optimizer.name],
        average=parameters if recipe.network.average else 0,
        inputs=inputs.nbytes,
        activations=activations,
        loss=loss_memory(recipe, dimension) // processes + 4 * batch * dimension,
    )


def loss_memory(recipe: Recipe, dimension: int, *, largest: int = 1024) -> int:
    """Bytes that the recipe's losses take at most, with gradient, for a batch of such embeddings in one process.

    Measured on random embeddings of up to `largest` images, fewer if those take much already; beyond, it is taken to
    grow with the square of the batch, or the cube where it does so in what was measured.
    """
    objective, batch = objective_of(recipe.loss, recipe.beside, distributed=False), recipe.batch
    size = min(batch.size, 8 * batch.per_class)
    taken = before = _loss_peak(objective, size, dimension, batch.per_class)
    while size < batch.size and taken < _ENOUGH and 2 * size <= largest:
        size, before = min(2 * size, batch.size), taken
        taken = _loss_peak(objective, size, dimension, batch.per_class)
    power = 3 if taken > 6 * before else 2
    return round(taken * (batch.size / size) ** power)


def _whole(described: Network, batch: int) -> tuple[nn.Module, Tensor]:
    """The network in training mode and inputs (B, H, W, 3), with shapes alone."""
    backbone, trunk = _described(described)
    side = preprocessing(trunk, _NO_WEIGHTS, described.size)[0].size
    network = EmbeddingNetwork(backbone, _GREY, _GREY).to(memory_format=torch.channels_last)
    if described.freeze_batch_norm:
        freeze_batch_norm(network)
    return network.train(), torch.empty(batch, side, side, 3, dtype=torch.uint8, device="meta")


def _linear(described: Network, batch: int) -> tuple[nn.Module, Tensor]:
    """The projection and features (B, F), with shapes alone."""
    backbone, _ = _described(described)
    head = cast(Headed, backbone).head  # a recipe of this mode has one
    width = next(layer.in_features for layer in head if isinstance(layer, nn.Linear))
    return Projection(head).train(), torch.empty(batch, width, device="meta")


def _described(described: Network) -> tuple[nn.Module, nn.Module]:
    """The backbone and its trunk, without memory for their tensors."""
    with torch.device("meta"):
        backbone = build_backbone(described.architecture, described.head, drop_path=described.drop_path)
    return backbone, backbone.trunk if isinstance(backbone, Headed) else backbone


def _step(network: nn.Module, inputs: Tensor, precision: Precision) -> tuple[int, int]:
    """Bytes that a chunk's forward and backward pass take beside parameters, gradients and inputs; dimensions."""
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # as in every chunk but the first
    half = _HALF.get(precision)
    with _Watch() as watch:
        with contextlib.nullcontext() if half is None else torch.autocast("cpu", half):
            embeddings: Tensor = network(inputs)
        embeddings.backward(torch.ones_like(embeddings))
    return watch.peak, int(embeddings.shape[1])


def _loss_peak(objective: nn.Module, size: int, dimension: int, per_class: int) -> int:
    """Bytes that the loss and its gradient take beside the embeddings."""
    made = torch.Generator().manual_seed(0)
    embeddings = nn.functional.normalize(torch.randn(size, dimension, generator=made), dim=1).requires_grad_()
    labels = torch.arange(size) // per_class
    with _Watch() as watch:
        objective(embeddings, labels).backward()
    return int(watch.peak)


class _Watch(TorchDispatchMode):
    """Adds up the tensors that come to be inside of it, and how many bytes there were at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.peak = 0
        self._now = 0
        self._known = set[int]()

    def __torch_dispatch__(
        self,
        operation: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = operation(*args, **(kwargs or {}))
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and _address(each) not in given:
                self._add(each)
        return made

    def _add(self, tensor: Tensor) -> None:
        storage, address = tensor.untyped_storage(), _address(tensor)
        if address not in self._known:
            self._known.add(address)
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, address, storage.nbytes())

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self._now -= size


def _address(tensor: Tensor) -> int:
    """Of what torch keeps a storage's bytes in: views share it."""
    return int(tensor.untyped_storage()._cdata)
