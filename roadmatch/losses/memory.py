"""Embeddings of past batches as further candidates: cross-batch memory (XBM)."""

from typing import Any

import torch
from torch import Tensor, nn


class CrossBatchMemory(nn.Module):
    """A loss whose candidates are the batch itself and the images of the batches before (Wang et al., 2020).

    The loss is called with the batch as queries and with batch and memory as the reference, so gradients reach the
    batch on both sides of its own pairs; what is remembered is without a graph. No image is compared with itself: not
    in the batch, and not with what is remembered of it under its id. Afterwards the batch is remembered, and the
    oldest images beyond `size` are forgotten. In eval mode, as for a validation loss, the memory is neither used nor
    changed. Its state is in buffers, so checkpoints keep it; each process of a distributed run has its own (keep the
    loss outside DistributedDataParallel, or set broadcast_buffers=False: the buffers change their size).

    embeddings (n, D): kept in the precision and on the device of the first batch; labels (n,), ids (n,), oldest first.
    """

    embeddings: Tensor
    labels: Tensor
    ids: Tensor
    steps: Tensor
    unnamed: Tensor

    def __init__(self, loss: nn.Module, size: int, *, warm_up_steps: int = 0, one_per_id: bool = False) -> None:
        """loss: called as PairLoss is. size: images that are remembered at most.

        warm_up_steps: so many batches are neither compared with the memory nor remembered, for embeddings that still
        drift say little later. one_per_id: a new embedding of an image takes the place of the old one, also among the
        candidates of its own batch; without it, both are kept until the old one is forgotten.
        Raises ValueError for a size below 1 or negative steps.
        """
        super().__init__()
        if size < 1 or warm_up_steps < 0:
            raise ValueError(f"a memory of {size} images after {warm_up_steps} steps: give at least 1 and 0")
        self.loss, self.size, self.warm_up_steps, self.one_per_id = loss, size, warm_up_steps, one_per_id
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("unnamed", torch.tensor(0))
        for name, empty in _nothing(self.steps.device).items():
            self.register_buffer(name, empty)
        self.register_load_state_dict_pre_hook(_take_sizes)  # type: ignore[no-untyped-call]

    def forward(self, embeddings: Tensor, labels: Tensor, *, ids: Tensor | None = None) -> Tensor:
        """embeddings (B, D) unit length, labels (B,) int, ids (B,) int from 0 -> () loss.

        Without ids every image is taken for a new one. Raises ValueError for negative ids, for none with one_per_id,
        for another D than is remembered, and where the loss does.
        """
        if not self.training:
            return self._loss(embeddings, labels, ids=ids)
        names = self._names(labels, ids)
        if self.steps < self.warm_up_steps:
            loss = self._loss(embeddings, labels, ids=names)
        else:
            loss = self._with_memory(embeddings, labels, names)
            self._remember(embeddings.detach(), labels, names)
        self.steps += 1
        return loss

    def reset(self) -> None:
        """Forget everything: as new, with the warm-up before it."""
        self.steps.zero_()
        self.unnamed.zero_()
        for name, empty in _nothing(self.embeddings.device).items():
            setattr(self, name, empty)

    def _with_memory(self, embeddings: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
        if len(self.ids) == 0:
            return self._loss(embeddings, labels, ids=ids)
        if embeddings.shape[1:] != self.embeddings.shape[1:]:
            raise ValueError(f"embeddings {tuple(embeddings.shape)} and a memory of {tuple(self.embeddings.shape)}")
        device = embeddings.device
        past, past_labels, past_ids = self.embeddings.to(device), self.labels.to(device), self.ids.to(device)
        if self.one_per_id:
            kept = ~torch.isin(past_ids, ids)
            past, past_labels, past_ids = past[kept], past_labels[kept], past_ids[kept]
        return self._loss(
            embeddings,
            labels,
            reference=torch.cat((embeddings, past)),
            reference_labels=torch.cat((labels, past_labels)),
            ids=ids,
            reference_ids=torch.cat((ids, past_ids)),
        )

    def _remember(self, embeddings: Tensor, labels: Tensor, ids: Tensor) -> None:
        if len(self.ids) == 0:
            self.embeddings = embeddings[:0]
            self.labels, self.ids = self.labels.to(labels.device), self.ids.to(labels.device)
        together = torch.cat((self.ids, ids.to(self.ids)))
        kept = _last_of_each(together) if self.one_per_id else torch.arange(len(together), device=together.device)
        kept = kept[-self.size :]
        self.ids = together[kept]
        self.labels = torch.cat((self.labels, labels.to(self.labels)))[kept]
        self.embeddings = torch.cat((self.embeddings, embeddings.to(self.embeddings)))[kept]

    def _names(self, labels: Tensor, ids: Tensor | None) -> Tensor:
        """ids (B,) as they are, or negative numbers that no image had before."""
        if ids is not None:
            if (ids < 0).any():
                raise ValueError(f"id {int(ids.min())}: ids are numbered from 0")
            return ids
        if self.one_per_id:
            raise ValueError("a memory of one embedding per id needs ids")
        fresh = torch.arange(1, len(labels) + 1, device=labels.device) + self.unnamed.to(labels.device)
        self.unnamed += len(labels)
        return -fresh

    def _loss(self, *arguments: Tensor, **named: Tensor | None) -> Tensor:
        loss: Tensor = self.loss(*arguments, **named)
        return loss


def _nothing(device: torch.device) -> dict[str, Tensor]:
    none = torch.empty(0, dtype=torch.int64, device=device)
    return {"embeddings": torch.empty(0, 0, device=device), "labels": none, "ids": none.clone()}


def _last_of_each(ids: Tensor) -> Tensor:
    """ids (n,) -> places of the last occurrence of each, ascending."""
    ordered, places = ids.sort(stable=True)
    is_last = torch.cat((ordered[1:] != ordered[:-1], ordered.new_ones(min(len(ids), 1), dtype=torch.bool)))
    return places[is_last].sort()[0]


def _take_sizes(memory: CrossBatchMemory, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Buffers are as long as the memory is full, so those of a checkpoint are of another size than ours."""
    for name, empty in _nothing(memory.embeddings.device).items():
        saved = state.get(prefix + name, empty)
        setattr(memory, name, torch.empty_like(saved, device=empty.device))
