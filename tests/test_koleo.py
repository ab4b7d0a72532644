"""The regulariser that spreads embeddings out, against a loop over all neighbours."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.losses import koleo
from roadmatch.losses.koleo import KoLeo
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.pairs import pairs_of_labels
from tests import other_loss_oracles as oracles
from tests.other_loss_oracles import Batch, Matrix, batch_of, batches


def expected(batch: Batch, term: KoLeo, embeddings: Matrix | None = None) -> float:
    rows = batch.embeddings.tolist() if embeddings is None else embeddings
    allowed = [
        [c and not (term.negatives_only and r) for c, r in zip(counted, relevant, strict=True)]
        for counted, relevant in zip(batch.counted, batch.relevant, strict=True)
    ]
    return oracles.koleo_loss(rows, rows, allowed, term.epsilon)


@given(batches(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_it_is_the_loop_for_every_batch(batch: Batch, negatives_only: bool) -> None:
    term = KoLeo(negatives_only)
    embeddings = batch.embeddings.requires_grad_()
    loss = PairLoss(term)(embeddings, batch.labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected(batch, term), rel=1e-6, abs=1e-12)
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()


@pytest.mark.parametrize("negatives_only", [False, True])
def test_its_gradient_is_the_slope_of_the_loop(negatives_only: bool) -> None:
    batch, term = batch_of([0, 1, 0, 2, 1, 0], 3), KoLeo(negatives_only)
    embeddings = batch.embeddings.requires_grad_()
    PairLoss(term)(embeddings, batch.labels).backward()
    slopes = oracles.slopes(lambda moved: expected(batch, term, moved), embeddings.detach())
    torch.testing.assert_close(embeddings.grad, slopes, atol=1e-8, rtol=0)


def test_equal_images_get_no_gradient_and_a_bounded_loss() -> None:
    embeddings = torch.eye(3)[[0, 0, 1]].requires_grad_()
    loss = PairLoss(KoLeo(epsilon=1e-4))(embeddings, torch.arange(3))
    loss.backward()
    assert loss.item() == pytest.approx(-(2 * math.log(1e-4) + math.log(math.sqrt(2) + 1e-4)) / 3, rel=1e-6)
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()
    assert embeddings.grad.abs().max() < 1  # the equal ones are pushed only by the third


def test_lengths_too_small_for_a_float32_cosine_are_told_apart() -> None:
    embeddings = torch.tensor([[1.0, 0.0], [1.0, 1e-5], [0.0, 1.0]])
    loss = PairLoss(KoLeo(epsilon=1e-12))(embeddings[:2], torch.arange(2)).item()
    assert loss == pytest.approx(-math.log(1e-5), rel=1e-6)


def test_a_step_along_it_spreads_the_images() -> None:
    embeddings = batch_of(range(6), 0, dimensions=2).embeddings.requires_grad_()
    loss = PairLoss(KoLeo())
    before = loss(embeddings, torch.arange(6))
    before.backward()
    assert embeddings.grad is not None
    moved = embeddings.detach() - 0.01 * embeddings.grad
    assert loss(moved / moved.norm(dim=1, keepdim=True), torch.arange(6)) < before


def test_neighbours_are_sought_in_a_memory_and_not_in_the_image_itself() -> None:
    batch, memory = batch_of([0, 1, 0], 1), batch_of([1, 0, 2, 2], 2)
    memory.embeddings[1] = batch.embeddings[2]
    ids, memory_ids = torch.tensor([4, 5, 6]), torch.tensor([9, 6, 8, 7])
    allowed = [[j != 1 or i != 2 for j in range(4)] for i in range(3)]
    loss = PairLoss(KoLeo())(batch.embeddings, batch.labels, memory.embeddings, memory.labels, ids, memory_ids)
    expected = oracles.koleo_loss(batch.embeddings.tolist(), memory.embeddings.tolist(), allowed, 1e-8)
    assert loss.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("negatives_only", [False, True])
def test_blocks_of_a_few_rows_give_the_same_and_no_matrix(
    negatives_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of([0, 1, 0, 2, 1, 0, 3], 3)
    whole = PairLoss(KoLeo(negatives_only))(batch.embeddings, batch.labels)
    monkeypatch.setattr(koleo, "_BLOCK", 2 * 7)
    pairs = pairs_of_labels(batch.embeddings, batch.labels)
    assert KoLeo(negatives_only)(pairs) == whole
    assert not pairs.matrix_made


@pytest.mark.parametrize(("labels", "negatives_only"), [([0], False), ([0, 0, 0], True), ([], False), ([], True)])
def test_without_a_neighbour_the_loss_is_a_connected_zero(labels: list[int], negatives_only: bool) -> None:
    embeddings = torch.eye(4)[: len(labels)].clone().requires_grad_()
    loss = PairLoss(KoLeo(negatives_only))(embeddings, torch.tensor(labels, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert embeddings.grad is not None
    assert not embeddings.grad.any()


def test_a_memory_without_images_leaves_nothing_to_say() -> None:
    embeddings = torch.eye(2).requires_grad_()
    none = torch.empty(0, dtype=torch.int64)
    assert PairLoss(KoLeo())(embeddings, torch.arange(2), torch.empty(0, 2), none).item() == 0


def test_a_bare_matrix_and_an_epsilon_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="needs embeddings"):
        PairLoss(KoLeo()).of_similarity(torch.eye(2), torch.eye(2).bool())
    with pytest.raises(ValueError, match="epsilon 0"):
        KoLeo(epsilon=0)
