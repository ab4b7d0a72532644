"""The losses of the papers under their names."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import normalize

from roadmatch.losses import ready
from roadmatch.losses.approximations import SoftBins, UpperBound
from roadmatch.losses.margins import Margins, Reduction
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.rank_ap import RankAP, Scope

EVERY: list[Callable[[], PairLoss]] = [
    ready.smooth_ap,
    ready.gsap,
    ready.sup_ap,
    ready.roadmap,
    ready.soft_bin_ap,
    ready.fast_ap,
    ready.black_box_ap,
    ready.recall_at_k,
    ready.calibration,
    ready.tcm,
    ready.siglip,
    ready.koleo,
]
LABELS = torch.arange(24) // 3


def embeddings(seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(8, 16, generator=random)
    return normalize(centres[LABELS] + 1.2 * torch.randn(24, 16, generator=random), dim=1)


@pytest.mark.parametrize("make", EVERY)
def test_a_step_down_the_gradient_lowers_the_loss(make: Callable[[], PairLoss]) -> None:
    loss, source = make(), embeddings().requires_grad_()
    before = loss(source, LABELS)
    before.backward()
    assert source.grad is not None
    assert source.grad.norm() > 0
    step = (
        1e-2 / source.grad.norm() * source.grad
        if make is ready.black_box_ap
        else 1e-4 / source.grad.norm() * source.grad
    )
    after = [
        loss(source.detach() - n * step, LABELS).item() for n in ((1, 3, 10) if make is ready.black_box_ap else (1,))
    ]
    assert min(after) < before.item()


@pytest.mark.parametrize("make", EVERY)
def test_it_trains_from_bfloat16_and_beside_a_reference(make: Callable[[], PairLoss]) -> None:
    source = embeddings().bfloat16().requires_grad_()
    loss = make()(source, LABELS, embeddings(1), LABELS)
    assert loss.dtype == torch.float32
    loss.backward()
    assert source.grad is not None
    assert torch.isfinite(source.grad).all()


def test_roadmap_is_its_parts() -> None:
    parts = [loss(embeddings(), LABELS).item() for loss in (ready.sup_ap(), ready.calibration())]
    assert ready.roadmap()(embeddings(), LABELS).item() == pytest.approx(sum(parts) / 2)
    assert ready.roadmap(0.0)(embeddings(), LABELS).item() == pytest.approx(parts[0])
    assert ready.roadmap(1.0)(embeddings(), LABELS).item() == pytest.approx(parts[1])
    for weight in (-0.1, 1.1):
        with pytest.raises(ValueError, match=str(weight)):
            ready.roadmap(weight)


def test_the_published_roadmap_takes_the_published_parts() -> None:
    ranking, margins = ready.roadmap(published=True).terms
    assert ranking == RankAP(Scope.PER_QUERY, UpperBound(published=True))
    assert margins == Margins(0.9, 0.6, Reduction.VIOLATING)
    assert ready.tcm().terms == (Margins(0.9, 0.5, Reduction.VIOLATING),)


def test_fast_ap_counts_the_spaces_between_its_bins() -> None:
    assert ready.fast_ap().terms == (RankAP(Scope.PER_QUERY, SoftBins(11)),)
    assert ready.soft_bin_ap().terms == (RankAP(Scope.PER_QUERY, SoftBins(20)),)


def test_siglip_hands_its_parameters_to_the_optimizer() -> None:
    assert len(list(ready.siglip().parameters())) == 2
    assert not list(ready.roadmap().parameters())
