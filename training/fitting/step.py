"""The gradient of one batch, whole or in chunks: exactly the same, in the memory of a chunk."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from roadmatch.errors import RoadmatchError
from training.recipe import Precision

_HALF = {Precision.BFLOAT16: torch.bfloat16, Precision.FLOAT16: torch.float16}
_SAME = {Precision.FLOAT32: 1e-3, Precision.BFLOAT16: 5e-2, Precision.FLOAT16: 5e-2}
"""Length of the difference of two embeddings that count as the same: a device may choose another algorithm when it
keeps a graph, and dropout with other random numbers moves an embedding by more."""

_MOVED = (
    "a chunk's embeddings moved by {:.2g} when it was embedded again: the network keeps a state (batch norm in "
    "training mode) or draws random numbers that are not torch's; set batch.chunk to none"
)


class ChunkError(RoadmatchError):
    """A network that cannot be worked through in chunks."""


class StepError(RoadmatchError):
    """A batch that gives no gradient; inputs (B, ...) and labels (B,) are there to be saved and looked at."""

    def __init__(self, message: str, inputs: Tensor, labels: Tensor) -> None:
        super().__init__(message)
        self.inputs = inputs
        self.labels = labels


@dataclass(frozen=True, eq=False)
class Stepped:
    """What a step found: loss () and embeddings (B, D), both detached and where the network is."""

    loss: Tensor
    embeddings: Tensor


def backward(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    objective: nn.Module,
    *,
    chunk: int | None,
    precision: Precision = Precision.FLOAT32,
    scaler: GradScaler | None = None,
) -> Stepped:
    """Adds the gradient of objective(network(inputs), labels) to the parameters, scaled where a scaler is given.

    inputs (B, ...), labels (B,), on the network's device. chunk: inputs that are in the network at a time, None for
    all: multi-stage back-propagation (Revaud et al., 2019, section 4.2) embeds the chunks without a graph, takes the
    loss of all embeddings, and puts each chunk through once more with the same random numbers. precision is that of
    the network; embeddings and loss are float32. network may be wrapped by DistributedDataParallel, and gradients
    travel once. Raises StepError for a loss or embeddings that are not finite, and where a chunk does not come out the
    same again (gradients are of no use then); ChunkError for batch norm in training mode; ValueError for an empty
    batch or chunk.
    """
    if len(inputs) == 0 or (chunk is not None and chunk < 1):
        raise ValueError(f"{len(inputs)} inputs in chunks of {chunk}: at least one is needed")
    if chunk is None or chunk >= len(inputs):
        embeddings = _embed(network, inputs, precision)
        loss = _loss(objective, embeddings, inputs, labels)
        _scaled(loss, scaler).backward()
        return Stepped(loss.detach(), embeddings.detach())
    refuse_batch_norm(network)
    chunks = inputs.split(chunk)
    states, embeddings = _first_pass(network, chunks, precision)
    leaf = embeddings.requires_grad_()
    loss = _loss(objective, leaf, inputs, labels)
    _scaled(loss, scaler).backward()
    assert leaf.grad is not None
    embeddings = leaf.detach()
    moved = _second_pass(network, chunks, states, embeddings.split(chunk), leaf.grad.split(chunk), precision)
    if not moved <= _SAME[precision]:
        raise StepError(_MOVED.format(moved), inputs, labels)
    return Stepped(loss.detach(), embeddings)


def refuse_batch_norm(network: nn.Module) -> None:
    """Raises ChunkError for a network whose batch norm takes its statistics from what is in the network at once."""
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ChunkError(
                f"batch norm {name} is in training mode and would see a chunk in place of the batch, which is another "
                "network: set network.freeze_batch_norm to true, or batch.chunk to none"
            )


def _first_pass(
    network: nn.Module, chunks: tuple[Tensor, ...], precision: Precision
) -> tuple[list["_RandomState"], Tensor]:
    """The random numbers that each chunk began with, and the embeddings (B, D) of all, without a graph."""
    bare = network.module if isinstance(network, DistributedDataParallel) else network
    states, embeddings = [], []
    with torch.no_grad():
        for inputs in chunks:
            states.append(_RandomState.now(inputs.device))
            embeddings.append(_embed(bare, inputs, precision))
    return states, torch.cat(embeddings)


def _second_pass(
    network: nn.Module,
    chunks: tuple[Tensor, ...],
    states: list["_RandomState"],
    expected: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
    precision: Precision,
) -> float:
    """Each chunk's share of the gradient -> the length of the largest difference to the expected embeddings."""
    afterwards = _RandomState.now(chunks[0].device)
    moved = []
    for number, (inputs, state) in enumerate(zip(chunks, states, strict=True)):
        state.restore()
        with _apart(network, last=number == len(chunks) - 1):
            embeddings = _embed(network, inputs, precision)
            embeddings.backward(gradients[number])
        moved.append((embeddings.detach() - expected[number]).norm(dim=1).max())
    afterwards.restore()
    return float(torch.stack(moved).max())


def _embed(network: nn.Module, inputs: Tensor, precision: Precision) -> Tensor:
    half = _HALF.get(precision)
    with contextlib.nullcontext() if half is None else torch.autocast(inputs.device.type, half):
        embeddings: Tensor = network(inputs)
    return embeddings.float() if embeddings.dtype in _HALF.values() else embeddings


def _loss(objective: nn.Module, embeddings: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    try:
        loss: Tensor = objective(embeddings, labels)
    except ValueError as error:
        raise StepError(f"the loss does not take this batch: {error}", inputs, labels) from error
    if not torch.isfinite(loss.detach()):
        raise StepError(
            f"the loss is {float(loss.detach())}: lower the learning rate, or clip gradients (optimizer.clip)",
            inputs,
            labels,
        )
    return loss


def _scaled(loss: Tensor, scaler: GradScaler | None) -> Tensor:
    if scaler is None:
        return loss
    scaled: Tensor = scaler.scale(loss)
    return scaled


@contextlib.contextmanager
def _apart(network: nn.Module, *, last: bool) -> Iterator[None]:
    """Gradients stay in this process but for the last chunk, which sends the sum of all."""
    with network.no_sync() if isinstance(network, DistributedDataParallel) and not last else contextlib.nullcontext():
        yield


@dataclass(frozen=True, eq=False)
class _RandomState:
    """Of torch's random numbers on the CPU, and on the device of the inputs where that is another."""

    device: torch.device
    cpu: Tensor
    own: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "_RandomState":
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), own)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            torch.cuda.set_rng_state(self.own, self.device)
