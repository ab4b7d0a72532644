"""The recipe's losses as one module: the right ones, and the same in one process and in two."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from roadmatch.losses import adapted, ready
from roadmatch.losses.approximations import UpperBound
from roadmatch.losses.margins import Margins
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.rank_ap import RankAP, Scope
from training import recipe
from training.fitting.objective import objective_of
from training.fitting.step import backward

Parts = tuple[recipe.Loss, tuple[recipe.Beside, ...]]

LOSSES: dict[str, Parts] = {
    "gsap": (recipe.Gsap(temperature=0.05), ()),
    "gsap, drop": (recipe.Gsap(temperature=0.05, drop=0.4), ()),
    "smooth_ap": (recipe.SmoothAp(temperature=0.05), ()),
    "sup_ap": (recipe.SupAp(temperature=0.05, slope=20), ()),
    "roadmap": (recipe.Roadmap(weight=0.3), ()),
    "roadmap by query": (recipe.Roadmap(weight=0.3, violating=False), ()),
    "recall_at_k": (recipe.RecallAtK(ks=(1, 2)), ()),
    "calibration": (recipe.Calibration(), ()),
    "tcm": (recipe.Tcm(), ()),
    "contrastive": (recipe.Contrastive(), ()),
    "info_nce": (recipe.InfoNce(), ()),
    "triplet": (recipe.Triplet(), ()),
    "koleo": (recipe.KoLeo(), ()),
    "koleo, negatives": (recipe.KoLeo(negatives_only=True), ()),
    "gsap beside others": (
        recipe.Gsap(temperature=0.05),
        (recipe.Beside(loss=recipe.Tcm(), weight=0.5), recipe.Beside(loss=recipe.KoLeo(), weight=0.1)),
    ),
}
CHUNKS = (None, 4)
ROWS = 22
FIRST = 9
"""Rows of the first process; the other has the rest."""


def test_every_loss_of_a_recipe_is_tried_here() -> None:
    names = TypeAdapter(recipe.Loss).json_schema()["discriminator"]["mapping"]
    assert {loss.name for loss, _ in LOSSES.values()} == set(names)


def whole_batch() -> tuple[Tensor, Tensor]:
    """Classes of several images, of one, and of images in both processes; the first process has fewer positives."""
    made = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1, 2, 3, 4, 4, 5, 6, 7, 0, 1, 1, 8, 8, 8, 9, 9, 9, 9, 10, 2, 2])
    return torch.randn(ROWS, 6, generator=made, dtype=torch.float64), labels


class Network(nn.Module):
    """A layer, dropout (off: its random numbers would be those of the process), and unit length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return normalize(self.layer(inputs))


def step(name: str, network: nn.Module, rows: slice, chunk: int | None, *, distributed: bool) -> float:
    inputs, labels = whole_batch()
    objective = objective_of(*LOSSES[name], distributed=distributed)
    return backward(network, inputs[rows], labels[rows], objective, chunk=chunk).loss.item()


def found_by(network: Network) -> Tensor:
    assert network.layer.weight.grad is not None
    assert network.layer.bias.grad is not None
    return torch.cat([network.layer.weight.grad.flatten(), network.layer.bias.grad]).clone()


def work(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    rows = slice(0, FIRST) if rank == 0 else slice(FIRST, ROWS)
    found = {}
    for name in LOSSES:
        for chunk in CHUNKS:
            network = Network()
            loss = step(name, DistributedDataParallel(network), rows, chunk, distributed=True)
            found[f"{name} {chunk}"] = (loss, found_by(network))
    torch.save(found, folder / f"rank{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[float, Tensor]]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("two")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spawn(work, (2, folder), nprocs=2)
    return [torch.load(folder / f"rank{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_have_the_loss_and_the_gradient_of_one(
    of_two: list[dict[str, tuple[float, Tensor]]], name: str, chunk: int | None
) -> None:
    network = Network()
    loss = step(name, network, slice(0, ROWS), None, distributed=False)
    expected = found_by(network)
    assert expected.norm() > 1e-3
    for found in of_two:
        theirs, gradient = found[f"{name} {chunk}"]
        assert theirs == pytest.approx(loss, rel=1e-6)
        assert (gradient - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (recipe.Gsap(temperature=0.03, drop=0.2), ready.gsap(0.03, 0.2)),
        (recipe.SmoothAp(temperature=0.03), ready.smooth_ap(0.03)),
        (recipe.SupAp(temperature=0.03, slope=7), ready.sup_ap(0.03, 7)),
        (recipe.Roadmap(weight=0.2, positive=0.8, negative=0.3, violating=False), ready.roadmap(0.2, 0.8, 0.3)),
        (
            recipe.Roadmap(weight=0.2, positive=0.8, negative=0.3),
            PairLoss(RankAP(Scope.PER_QUERY, UpperBound()), Margins(0.8, 0.3), weights=(0.8, 0.2)),
        ),
        (recipe.RecallAtK(ks=(1, 3)), ready.recall_at_k((1, 3))),
        (recipe.Calibration(positive=0.8, negative=0.3), ready.calibration(0.8, 0.3)),
        (recipe.Tcm(positive=0.8, negative=0.3), ready.tcm(0.8, 0.3)),
        (recipe.Contrastive(positive=0.8, negative=0.3), adapted.contrastive(0.8, 0.3)),
        (recipe.InfoNce(temperature=0.2), ready.info_nce(0.2)),
        (recipe.Triplet(margin=0.3), adapted.triplet(0.3)),
        (recipe.KoLeo(negatives_only=True), ready.koleo(negatives_only=True)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_settings_of_the_recipe_reach_the_loss(loss: recipe.Loss, expected: nn.Module) -> None:
    inputs, labels = whole_batch()
    embeddings = normalize(inputs)
    found = objective_of(loss, distributed=False)(embeddings, labels)
    assert found == expected(embeddings, labels)
    assert found != objective_of(type(loss)(), distributed=False)(embeddings, labels)


def test_losses_beside_are_added_with_their_weights() -> None:
    inputs, labels = whole_batch()
    embeddings = normalize(inputs)
    beside = [recipe.Beside(loss=recipe.KoLeo(), weight=0.25), recipe.Beside(loss=recipe.Tcm(), weight=2)]
    found = objective_of(recipe.Gsap(temperature=0.05), beside, distributed=False)(embeddings, labels)
    parts = [loss(embeddings, labels) for loss in (ready.gsap(0.05), ready.koleo(), ready.tcm())]
    assert found.item() == pytest.approx(parts[0].item() + 0.25 * parts[1].item() + 2 * parts[2].item(), rel=1e-12)
