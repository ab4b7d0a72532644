"""Losses of a batch whose rows lie in several processes: each compares its own rows with everybody's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from roadmatch.losses.global_ap import embedding_bounds, ranks, send_gradients
from roadmatch.losses.mesh import grid_over
from roadmatch.losses.pair_loss import Term
from roadmatch.losses.pairs import Pairs, pairs_of_labels
from roadmatch.losses.score_blocks import OfRows


class DistributedGlobalAP(nn.Module):
    """1 - smoothed AP of the list of all pairs of all processes' embeddings (gSAP); self pairs are left out.

    Each process scores its own rows, and only grids are summed.
    averaged: whether gradients of parameters are averaged over the processes afterwards, as
    DistributedDataParallel does; each process then contributes as many times more, and the sum comes out right.
    The value is the same in every process and is that of the whole batch in one.
    """

    def __init__(
        self, temperature: float = 0.01, *, averaged: bool = True, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.averaged = averaged
        self.group = group

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """embeddings (B, D) unit length and labels (B,) of this process, B its own -> () loss of all of them.

        Collective: every process has to call it. Raises ValueError as pairs_of_labels does; RuntimeError without an
        initialised process group.
        """
        sizes = _sizes(len(embeddings), embeddings.device, self.group)
        everyone = _gathered(embeddings.detach(), sizes, self.group)
        all_labels = _gathered(labels, sizes, self.group)
        numbers = torch.arange(sum(sizes), device=labels.device)
        own = numbers[_own(sizes, self.group)]
        pairs = pairs_of_labels(embeddings, labels, everyone, all_labels, own, numbers)
        assert pairs.queries is not None
        total = _sum(torch.tensor(len(pairs.positives), device=labels.device), self.group).item()
        if total == 0:
            return pairs.nothing()
        named = torch.cat([pairs.positives, pairs.left_out])
        scale = 2.0 * (len(sizes) if self.averaged else 1)  # 2: the rows' mirror images lie in other processes
        loss: Tensor = _OfProcesses.apply(
            pairs.queries, pairs.candidates, named, len(pairs.positives), self.temperature, scale, self.group
        )
        return loss


@dataclass(frozen=True)
class Mean:
    """A term that is a mean over `count(pairs)` things, so that shares of processes can be put together; its weight."""

    term: Term
    count: Callable[[Pairs], Tensor]
    weight: float = 1.0


class DistributedMeans(nn.Module):
    """The weighted sum of terms that are means, of the batch of all processes; no process holds a row of another's.

    A process with more queries, or more pairs beyond a margin, has more of the mean. Value, and gradients under
    DistributedDataParallel's averaging, are those of the whole batch in one process.
    """

    def __init__(self, means: Sequence[Mean], group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.means = tuple(means)
        self.group = group

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """embeddings (B, D) unit length and labels (B,) of this process, B its own -> () loss of all of them.

        Collective, backward too. Raises ValueError as pairs_of_labels does.
        """
        sizes = _sizes(len(embeddings), embeddings.device, self.group)
        everyone: Tensor = _Gather.apply(embeddings, sizes, self.group)
        all_labels = _gathered(labels, sizes, self.group)
        own = _own(sizes, self.group)
        numbers = torch.arange(sum(sizes), device=labels.device)
        pairs = pairs_of_labels(embeddings, labels, everyone, all_labels, numbers[own], numbers)
        counts = torch.stack([mean.count(pairs) for mean in self.means]).to(pairs.source.dtype)
        parts = counts / _sum(counts.clone(), self.group).clamp(min=1)
        share = pairs.nothing()  # every process takes part in the backward pass of the gathering, whatever it compares
        for mean, part in zip(self.means, parts, strict=True):
            share = share + mean.weight * part * mean.term(pairs)
        loss: Tensor = _Total.apply(share, self.group)
        return loss


class InEachProcess(nn.Module):
    """Any loss of the batch of all processes, computed as a whole by each of them.

    Costs what it costs in one process, time and memory. Value, and gradients under DistributedDataParallel's
    averaging, are those of the whole batch in one process.
    """

    def __init__(self, loss: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.group = group

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """embeddings (B, D) unit length and labels (B,) of this process, B its own -> () loss of all. Collective."""
        sizes = _sizes(len(embeddings), embeddings.device, self.group)
        own = _own(sizes, self.group)
        everyone = _gathered(embeddings.detach(), sizes, self.group)
        mine: Tensor = _TimesWorld.apply(embeddings, len(sizes))
        rows = torch.cat([everyone[: own.start], mine, everyone[own.stop :]])
        loss: Tensor = self.loss(rows, _gathered(labels, sizes, self.group))
        return loss


class _Gather(torch.autograd.Function):
    """Everybody's rows; backward, what everybody wants of the own rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.own, ctx.group = _own(sizes, group), group
        return _gathered(rows, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum(gradient.clone(), ctx.group)[ctx.own], None, None


class _Total(torch.autograd.Function):
    """The sum of everybody's shares; backward each share counts as often as there are processes, to be averaged."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Any) -> Tensor:
        ctx.world = dist.get_world_size(group)
        return _sum(share.clone(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream * ctx.world, None


class _TimesWorld(torch.autograd.Function):
    """The rows themselves; backward as often as there are processes, to be averaged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: int) -> Tensor:
        ctx.world = world
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.world, None


class _OfProcesses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, everyone: Tensor, named: Tensor, count: int, temperature: float, scale: float, group: Any
    ) -> Tensor:
        grid = grid_over(*embedding_bounds(everyone, None), temperature)
        ctx.reduce = lambda tensor: _sum(tensor, group)
        ctx.scale = scale
        blocks = OfRows(own, everyone, named)
        ctx.ranks = ranks(blocks, len(named), count, grid, temperature, like=own, reduce=ctx.reduce)
        ctx.save_for_backward(own, everyone, named)
        loss: Tensor = ctx.reduce(ctx.ranks.share)
        return loss.to(own.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        own, everyone, named = ctx.saved_tensors
        blocks = OfRows(own, everyone, named, wanted=(True, False))
        send_gradients(blocks, ctx.ranks, upstream.item() * ctx.scale, own.dtype, ctx.reduce)
        return blocks.gradients[0], None, None, None, None, None, None


def _sum(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, group=group)
    return tensor


def _sizes(own: int, device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own], device=device), group=group)
    return [int(size) for size in sizes]


def _own(sizes: list[int], group: dist.ProcessGroup | None) -> slice:
    """Where this process's rows are among everybody's."""
    rank = dist.get_rank(group)
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def _gathered(rows: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Everybody's rows in the order of the processes; padded on the way, as not every backend sends uneven parts."""
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
