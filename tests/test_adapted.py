"""Losses of pytorch-metric-learning behind our call: right, in full precision, finite, and clear about misuse."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from roadmatch.losses import adapted
from roadmatch.losses.adapted import Adapted
from roadmatch.losses.margins import Margins
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.pairs import pairs_of_labels
from tests import other_loss_oracles as oracles
from tests.other_loss_oracles import Batch, batch_of, batches

Make = Callable[[], Adapted]

OF_PAIRS: dict[str, Make] = {
    "contrastive": adapted.contrastive,
    "triplet": adapted.triplet,
    "multi_similarity": adapted.multi_similarity,
}


def arc_face() -> Adapted:
    torch.manual_seed(0)
    return adapted.arc_face(4, 4)


def proxy_anchor() -> Adapted:
    torch.manual_seed(0)
    return adapted.proxy_anchor(4, 4)


ALL: dict[str, Make] = {**OF_PAIRS, "arc_face": arc_face, "proxy_anchor": proxy_anchor}


def expected(name: str, batch: Batch) -> float:
    if name == "contrastive":
        near, far = oracles.margin_sides(*batch.masked, 1.0, 0.5)
        return oracles.violating_mean(near) + oracles.violating_mean(far)
    if name == "triplet":
        return oracles.triplet_loss(*batch.masked, 0.1)
    return oracles.multi_similarity_loss(*batch.masked, 2.0, 50.0, 0.5)


@pytest.mark.parametrize("name", OF_PAIRS)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_of_pairs_is_its_definition(name: str, seed: int) -> None:
    batch = batch_of([0, 1, 0, 2, 2, 0, 3], seed)
    assert OF_PAIRS[name]()(batch.embeddings, batch.labels).item() == pytest.approx(expected(name, batch), rel=1e-9)


def test_the_losses_of_classes_are_their_definitions() -> None:
    batch = batch_of([0, 1, 0, 2, 2], 1)
    rows, labels = batch.embeddings.tolist(), batch.labels.tolist()
    faces, anchors = arc_face().double(), proxy_anchor().double()
    (weights,), (proxies,) = ([weight.tolist() for weight in loss.parameters()] for loss in (faces, anchors))
    by_hand = oracles.arc_face_loss(rows, labels, list(zip(*weights, strict=True)), math.radians(28.6), 64)
    assert faces(batch.embeddings, batch.labels).item() == pytest.approx(by_hand, rel=1e-6)
    by_hand = oracles.proxy_anchor_loss(rows, labels, proxies, 0.1, 32)
    assert anchors(batch.embeddings, batch.labels).item() == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("name", ALL)
@given(batch=batches())
@settings(deadline=None, max_examples=25)
def test_any_batch_gives_a_finite_loss_with_a_finite_gradient(name: str, batch: Batch) -> None:
    embeddings = batch.embeddings.float().requires_grad_()
    loss = ALL[name]()(embeddings, batch.labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_a_batch_without_pairs_is_connected(name: str) -> None:
    for count in (0, 1):
        embeddings = torch.eye(4)[:count].clone().requires_grad_()
        loss = ALL[name]()(embeddings, torch.zeros(count, dtype=torch.int64))
        loss.backward()
        assert embeddings.grad is not None
        assert loss.item() == 0 or (count and name in ("arc_face", "proxy_anchor"))


@pytest.mark.parametrize("name", OF_PAIRS)
def test_a_memory_takes_part_and_an_images_past_does_not(name: str) -> None:
    batch, memory = batch_of([0, 1, 0, 2], 1), batch_of([1, 0, 2, 2], 2)
    ids, memory_ids = torch.tensor([4, 5, 6, 7]), torch.tensor([9, 6, 8, 7])
    loss = OF_PAIRS[name]()
    ours = loss(batch.embeddings, batch.labels, memory.embeddings, memory.labels, ids, memory_ids)
    similarity = batch.embeddings @ memory.embeddings.T
    relevant = (batch.labels[:, None] == memory.labels).tolist()
    counted = (ids[:, None] != memory_ids).tolist()
    near, far = oracles.margin_sides(similarity.tolist(), relevant, counted, 1.0, 0.5)
    expected = {
        "contrastive": lambda: oracles.violating_mean(near) + oracles.violating_mean(far),
        "triplet": lambda: oracles.triplet_loss(similarity.tolist(), relevant, counted, 0.1),
        "multi_similarity": lambda: oracles.multi_similarity_loss(similarity.tolist(), relevant, counted, 2, 50, 0.5),
    }[name]()
    assert ours.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_half_precision_and_autocast_change_nothing_but_the_rounding_of_the_input(name: str) -> None:
    batch = batch_of([0, 1, 0, 2, 1, 3], 1)
    halves = batch.embeddings.bfloat16()
    plain, under = ALL[name](), ALL[name]()
    expected = plain(halves.float(), batch.labels)
    with torch.autocast("cpu", torch.bfloat16):
        loss = under(halves.requires_grad_(), batch.labels)
    loss.backward()
    assert loss == expected
    assert halves.grad is not None
    assert halves.grad.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in under.parameters())


@pytest.mark.parametrize("make", [arc_face, proxy_anchor])
def test_weights_of_classes_learn_with_the_optimizer_that_gets_them(make: Make) -> None:
    loss, batch = make(), batch_of([0, 1, 2, 3], 5)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    before = loss(batch.embeddings.float(), batch.labels).item()
    for _ in range(30):
        optimizer.zero_grad()
        loss(batch.embeddings.float(), batch.labels).backward()
        optimizer.step()
    assert loss(batch.embeddings.float(), batch.labels).item() < 0.7 * before
    assert [tuple(parameter.shape) for parameter in loss.parameters()] == [(4, 4)]
    make().load_state_dict(loss.state_dict())


def test_an_embedding_that_is_its_class_has_a_finite_gradient() -> None:
    loss = arc_face()
    (weights,) = loss.parameters()
    nn.init.eye_(weights)
    embeddings = torch.eye(4, requires_grad=True)
    loss(embeddings, torch.arange(4)).backward()
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()
    assert weights.grad is not None
    assert weights.grad.isfinite().all()


@pytest.mark.parametrize("make", [arc_face, proxy_anchor])
def test_labels_outside_the_classes_are_refused_with_the_mend(make: Make) -> None:
    for labels, wrong in (([0, 4], 4), ([-1, 3], -1)):
        with pytest.raises(ValueError, match=f"label {wrong} and 4 classes: number the classes"):
            make()(torch.eye(4)[:2], torch.tensor(labels))
    assert make()(torch.eye(4)[:2], torch.tensor([0, 3], dtype=torch.int32)).isfinite()


@pytest.mark.parametrize("make", [arc_face, proxy_anchor])
def test_a_loss_of_classes_takes_no_reference(make: Make) -> None:
    with pytest.raises(ValueError, match="compares with its classes"):
        make()(torch.eye(4), torch.arange(4), torch.eye(4), torch.arange(4))


class Broken(nn.Module):
    """Divides by nothing, as a loss without active pairs once did."""

    def forward(self, embeddings: Tensor, *_: Tensor) -> Tensor:
        return embeddings.sum() / 0


class Forgetful(nn.Module):
    """Gives a number without a graph."""

    def forward(self, embeddings: Tensor, *_: Tensor) -> Tensor:
        return embeddings.sum().detach()


class Product(nn.Module):
    """Multiplies by itself, which autocast would do in half precision."""

    def forward(self, embeddings: Tensor, *_: Tensor) -> Tensor:
        return (embeddings @ embeddings.T).sum()


def test_whatever_another_loss_computes_is_out_of_reach_of_autocast() -> None:
    embeddings, labels = batch_of(range(5), 0).embeddings.float(), torch.arange(5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = Adapted(Product(), adapted.pair_indices)(embeddings, labels)
    assert loss == (embeddings @ embeddings.T).sum()


def test_a_loss_that_is_not_finite_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="Broken is inf"):
        Adapted(Broken(), adapted.pair_indices)(torch.eye(2), torch.arange(2))


def test_a_loss_without_a_graph_is_connected() -> None:
    embeddings = torch.eye(2, requires_grad=True)
    Adapted(Forgetful(), adapted.pair_indices)(embeddings, torch.arange(2)).backward()
    assert embeddings.grad is not None


def test_pairs_or_classes_have_to_be_named() -> None:
    for indices, classes in ((None, None), (adapted.pair_indices, 4)):
        with pytest.raises(ValueError, match="give indices or classes"):
            Adapted(Broken(), indices, classes=classes)


@given(batches())
@settings(deadline=None, max_examples=40)
def test_triplets_are_every_query_with_a_positive_and_a_negative(batch: Batch) -> None:
    pairs = pairs_of_labels(batch.embeddings, batch.labels)
    places = range(len(batch.labels))
    expected = [
        (i, j, k)
        for i in places
        for j in places
        for k in places
        if batch.relevant[i][j] and i != j and not batch.relevant[i][k]
    ]
    formed = torch.stack(adapted.triplet_indices(pairs), 1).tolist()
    assert [tuple(triplet) for triplet in formed] == expected


def test_the_contrastive_loss_is_our_loss_of_margins() -> None:
    batch = batch_of([0, 1, 0, 2, 1, 3], 1)
    ours = PairLoss(Margins(1.0, 0.5))(batch.embeddings, batch.labels).item()
    assert adapted.contrastive()(batch.embeddings, batch.labels).item() == pytest.approx(ours, abs=1e-12)
