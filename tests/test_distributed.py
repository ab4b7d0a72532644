import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from roadmatch.losses.distributed import DistributedGlobalAP
from roadmatch.losses.global_ap import global_sigmoid_ap
from roadmatch.losses.pairs import pairs_of_labels

TEMPERATURE = 1e-2


def whole_batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 12, (50,), generator=made)
    return torch.randn(50, 6, generator=made, dtype=torch.float64), labels


def rows_of(rank: int, world: int, *, even: bool) -> slice:
    size = 50 // world
    if even:
        return slice(rank * size, (rank + 1) * size)
    ends = [*[0, 7, *range(7 + size, 50, size)][:world], 50]
    return slice(ends[rank], ends[rank + 1])


def network() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(6, 4, dtype=torch.float64)


def one_process() -> tuple[float, Tensor, Tensor]:
    """Loss, and its gradients by inputs and by the network's weights."""
    inputs, labels = whole_batch()
    net, inputs = network(), inputs.requires_grad_()
    loss = global_sigmoid_ap(pairs_of_labels(normalize(net(inputs)), labels), TEMPERATURE)
    loss.backward()
    assert inputs.grad is not None
    assert net.weight.grad is not None
    return loss.item(), inputs.grad, net.weight.grad


def work(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    inputs, labels = whole_batch()
    found = {}
    for even in (False, True):
        rows = rows_of(rank, world, even=even)
        mine, net = inputs[rows].clone().requires_grad_(), network()
        embeddings = normalize(net(mine))
        loss = DistributedGlobalAP(TEMPERATURE, averaged=False)(embeddings, labels[rows])
        loss.backward()
        found[f"even={even}"] = (loss.item(), mine.grad, rows.start)
    mine, parallel = inputs[rows_of(rank, world, even=False)], DistributedDataParallel(network())
    DistributedGlobalAP(TEMPERATURE)(normalize(parallel(mine)), labels[rows_of(rank, world, even=False)]).backward()
    found["weights"] = parallel.module.weight.grad
    lone = DistributedGlobalAP()(normalize(inputs[rank : rank + 1]).requires_grad_(), torch.tensor([rank]))
    lone.backward()
    found["nothing"] = lone.item()
    torch.save(found, folder / f"rank{rank}")
    dist.barrier()
    dist.destroy_process_group()


def test_several_processes_have_the_loss_and_the_gradients_of_one(tmp_path: Path) -> None:
    world = 2
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spawn(work, (world, tmp_path), nprocs=world)
    loss, by_input, by_weight = one_process()
    found = [torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in range(world)]
    assert [one["even=False"][0] for one in found] == pytest.approx([loss] * world, abs=1e-12)
    gathered = torch.cat([one["even=False"][1] for one in found])
    assert gathered.shape == by_input.shape
    assert (gathered - by_input).norm() <= 1e-6 * by_input.norm()
    for one in found:
        assert (one["weights"] - by_weight).norm() <= 1e-6 * by_weight.norm()
        assert one["nothing"] == 0
    assert found[0]["even=True"][0] == pytest.approx(loss, abs=1e-12)
