"""One process of a run: which of how many it is, its device, and how alike its numbers are from run to run."""

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor

from roadmatch.errors import RoadmatchError

_ENVIRONMENT = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))  # as torchrun sets it, and alone
_NETWORK = 5  # keeps these random numbers apart from those of the batches and of the augmentation
_PATIENCE = datetime.timedelta(hours=12)  # while the first reads all images; a process that died is torchrun's to see


class DeviceError(RoadmatchError):
    """A device that this machine, or this installation, does not have."""


@dataclass(frozen=True)
class Process:
    """Which of `world` processes this is, how many are on this machine, and where it computes."""

    device: torch.device
    rank: int = 0
    world: int = 1
    on_this_machine: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def threads(self, wanted: int) -> int:
        """Loading threads of this process; wanted: as in the recipe, 0 for an equal part of the machine's cores."""
        return wanted or max(1, len(os.sched_getaffinity(0)) // self.on_this_machine)

    def wait_for_all(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            dist.barrier()

    def gathered(self, rows: Tensor, total: int) -> Tensor:
        """This process's rows [rank::world] of (total, D) -> all of them in order, in every process."""
        if self.world == 1:
            return rows
        most = -(-total // self.world)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded)
        return torch.stack(parts, dim=1).flatten(0, 1)[:total]

    def as_the_first_has(self, numbers: Sequence[float]) -> list[float]:
        """The first process's numbers, in every process; the others give as many of any value."""
        if self.world == 1:
            return list(numbers)
        sent = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.broadcast(sent, src=0)
        found: list[float] = sent.tolist()
        return found


@contextlib.contextmanager
def this_process(device: str) -> Iterator[Process]:
    """The process as torchrun's environment describes it, in a group with the others; alone without that.

    device: as in the recipe. Raises DeviceError.
    """
    world, rank, local = (int(os.environ.get(name, default)) for name, default in _ENVIRONMENT)
    chosen = device_of(device, local)
    if world == 1:
        yield Process(chosen)
        return
    own = dist.is_initialized()
    if not own:
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield Process(chosen, rank, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    finally:
        if not own:
            dist.destroy_process_group()


def device_of(wanted: str, local_rank: int = 0) -> torch.device:
    """auto: a GPU of its own for each process of a machine, where torch sees one. Raises DeviceError."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not seen):
        return torch.device("cpu")
    number = int(wanted.partition(":")[2]) if ":" in wanted else local_rank
    if number >= seen:
        raise DeviceError(f"fit.device is {wanted}, and torch sees {seen} GPUs: set it to auto or cpu")
    return torch.device("cuda", number)


@contextlib.contextmanager
def repeatable(wanted: bool, device: torch.device) -> Iterator[None]:
    """While this lasts torch takes algorithms that give the same bits each time.

    On a GPU a few operations have none: torch warns of each, and goes on.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; without it torch refuses
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # set by name
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark


def seed_step(seed: int, step: int, rank: int) -> None:
    """torch's random numbers (dropout, stochastic depth) of a step depend on these alone, so no state is to be kept."""
    torch.manual_seed(int(np.random.SeedSequence((_NETWORK, seed, step, rank)).generate_state(1, np.uint64)[0] >> 1))
