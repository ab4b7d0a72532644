"""What the losses are for: one threshold for all queries, seen on a set whose queries live on scales of their own."""

import torch
from torch import Tensor

from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.ready import gsap, smooth_ap
from roadmatch.metrics.retrieval import matrix_retrieval_metrics
from roadmatch.metrics.thresholds import SharedThreshold, shared_threshold_of_matrix

QUERIES, PER_CLASS = 96, 4


def similarities() -> tuple[Tensor, Tensor]:
    """(Q, Q) that rank every query's list nearly right, each moved by an offset of the query; (Q, Q) relevance."""
    made = torch.Generator().manual_seed(0)
    labels = torch.arange(QUERIES) // PER_CLASS
    relevant = labels[:, None] == labels
    lists = 0.15 * relevant + 0.04 * torch.randn(QUERIES, QUERIES, generator=made)
    return lists + 0.5 * (torch.rand(QUERIES, 1, generator=made) - 0.5), relevant


def trained(loss: PairLoss) -> tuple[float, SharedThreshold]:
    """mAP, and the shared threshold, after a query's offset was learned with the loss."""
    fixed, relevant = similarities()
    apart = ~torch.eye(QUERIES, dtype=torch.bool)
    offsets = torch.zeros(QUERIES, 1, requires_grad=True)
    optimizer = torch.optim.Adam([offsets], lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        loss.of_similarity(fixed + offsets, relevant & apart, apart).backward()
        optimizer.step()
    scores = (fixed + offsets).detach().double().numpy()
    figures = matrix_retrieval_metrics(scores, (relevant & apart).numpy(), apart.numpy(), ks=(1,))
    classes = [n // PER_CLASS for n in range(QUERIES)]
    own = torch.arange(QUERIES).numpy()
    return figures.mean_average_precision, shared_threshold_of_matrix(scores, relevant.numpy(), classes, own=own)


def test_a_loss_of_each_query_leaves_the_shared_threshold_bad_and_the_loss_of_all_pairs_mends_it() -> None:
    map_of_each, shared_of_each = trained(smooth_ap(0.01))
    map_of_all, shared_of_all = trained(gsap(0.01))
    assert abs(map_of_each - map_of_all) < 1e-6  # offsets move whole lists: no order within one changes
    assert map_of_each > 0.9
    assert shared_of_each.f1q - shared_of_each.f1g > 0.3
    assert shared_of_all.f1g > shared_of_each.f1g + 0.25
    assert abs(shared_of_all.f1q - shared_of_each.f1q) < 1e-2
