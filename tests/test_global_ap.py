import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.loss_cases import exact_global_ap, nearly_solved_batch, overlapping_batch, random_batch
from roadmatch.losses.global_ap import global_sigmoid_ap
from roadmatch.losses.pairs import pairs_of_labels, pairs_of_similarity
from tests.oracles import smoothed_ap_loss

TEMPERATURES = (5e-2, 1e-2, 1e-3, 1e-4)
Labels = Sequence[int]


def batch(size: int, seed: int = 0, dimension: int = 8) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(size, dimension, generator=made, dtype=torch.float64))


def of_matrix(x: Tensor, labels: Tensor, temperature: float) -> Tensor:
    apart = ~torch.eye(len(labels), dtype=torch.bool)
    return global_sigmoid_ap(pairs_of_similarity(x @ x.T, (labels[:, None] == labels) & apart, apart), temperature)


def of_themselves(x: Tensor, labels: Tensor, temperature: float) -> Tensor:
    return global_sigmoid_ap(pairs_of_labels(x, labels), temperature)


def of_reference(x: Tensor, labels: Tensor, temperature: float) -> Tensor:
    ids = torch.arange(len(labels))
    return global_sigmoid_ap(pairs_of_labels(x, labels, x, labels, ids, ids), temperature)


Form = Callable[[Tensor, Tensor, float], Tensor]
FORMS = [of_matrix, of_themselves, of_reference]


def oracle(x: Tensor, labels: Tensor, temperature: float) -> float:
    size = len(labels)
    pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
    similarity = (x @ x.T).tolist()
    positive = [bool(labels[i] == labels[j]) for i, j in pairs]
    return smoothed_ap_loss([similarity[i][j] for i, j in pairs], positive, temperature)


def gradient_of(form: Form, x: Tensor, labels: Tensor, temperature: float) -> tuple[float, Tensor]:
    leaf = x.clone().requires_grad_()
    loss = form(leaf, labels, temperature)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


@pytest.mark.parametrize("form", FORMS)
def test_three_images_worked_by_hand(form: Form) -> None:
    x = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.8, 0.6]], dtype=torch.float64)
    # The positive pairs score .6; the pairs with the third image score .8 and .96, each of them twice.
    above = [1 / (1 + math.exp(-0.2 / 0.1)), 1 / (1 + math.exp(-0.36 / 0.1))]
    among, overall = 1.5, 1.5 + 2 * sum(above)  # its mirror image has the same score: half a place
    assert form(x, torch.tensor([0, 0, 1]), 0.1).item() == pytest.approx(1 - among / overall, abs=1e-6)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6), st.integers(0, 5), st.sampled_from(TEMPERATURES))
@settings(deadline=None, max_examples=25)
def test_every_form_has_the_loss_of_the_definition(labels: Labels, seed: int, temperature: float) -> None:
    wanted = torch.tensor(labels)
    x = batch(len(labels), seed)
    x[-1] = x[0]  # a score of 1, and scores that are equal
    if len(set(labels)) == len(labels):
        assert [form(x, wanted, temperature).item() for form in FORMS] == [0, 0, 0]
        return
    for form in FORMS:
        assert form(x, wanted, temperature).item() == pytest.approx(oracle(x, wanted, temperature), abs=1e-6)


@given(st.lists(st.integers(0, 2), min_size=3, max_size=5), st.integers(0, 5), st.sampled_from([0.1, 5e-2, 2e-2]))
@settings(deadline=None, max_examples=8)
def test_gradients_are_the_differences_of_the_definition(labels: Labels, seed: int, temperature: float) -> None:
    wanted, x = torch.tensor(labels), batch(len(labels), seed, dimension=3)
    if len(set(labels)) == len(labels):
        return
    found = [gradient_of(form, x, wanted, temperature)[1] for form in FORMS]
    for row in range(len(labels)):
        for column in range(3):
            step = torch.zeros_like(x)
            step[row, column] = 1e-5
            by_step = (oracle(x + step, wanted, temperature) - oracle(x - step, wanted, temperature)) / 2e-5
            for gradient in found:
                assert gradient[row, column].item() == pytest.approx(by_step, abs=2e-5)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("make", [random_batch, overlapping_batch])
def test_a_batch_of_several_blocks_agrees_with_pair_by_pair_comparison(
    make: Callable[..., object], temperature: float
) -> None:
    made = make(280, 64)
    shuffled = torch.randperm(280, generator=torch.Generator().manual_seed(1))
    x, labels = made.embeddings[shuffled], made.labels[shuffled]  # type: ignore[attr-defined]
    similarity = x @ x.T
    similarity = (similarity + similarity.T) / 2
    relevant = (labels[:, None] == labels) & ~torch.eye(280, dtype=torch.bool)
    exact, by_score = exact_global_ap(similarity, relevant, temperature)
    for form in FORMS:
        loss, gradient = gradient_of(form, x, labels, temperature)
        assert loss == pytest.approx(exact, abs=1e-6)
        by_embedding = 2 * by_score @ x.double()
        assert (gradient - by_embedding).norm() <= 1e-5 * by_embedding.norm()


def test_the_reference_gets_its_gradient_too() -> None:
    x, labels = batch(40), torch.arange(40) // 4
    ids, one, other = torch.arange(40), x.clone().requires_grad_(), x.clone().requires_grad_()
    global_sigmoid_ap(pairs_of_labels(one, labels, other, labels, ids, ids), 1e-2).backward()
    whole = gradient_of(of_themselves, x, labels, 1e-2)[1]
    assert one.grad is not None
    assert other.grad is not None
    assert torch.allclose(one.grad + other.grad, whole, atol=1e-9)


def test_the_loss_of_a_nearly_solved_batch_keeps_its_digits() -> None:
    made = nearly_solved_batch(128, 64, 1e-2)
    exact, by_score = exact_global_ap(made.similarity, made.relevant, 1e-2)
    scores = made.similarity.requires_grad_()
    loss = global_sigmoid_ap(pairs_of_similarity(scores, made.relevant, made.apart), 1e-2)
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=1e-6)
    assert scores.grad is not None
    assert (scores.grad - by_score).norm() <= 5e-5 * by_score.norm()


def test_the_loss_of_a_solved_batch_is_not_below_zero() -> None:
    for seed in range(4):
        made = overlapping_batch(64, 32, noise=0.3, seed=seed)
        assert 0 <= of_themselves(made.embeddings, made.labels, 1e-4).item() < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_batches_that_say_nothing_give_zero_and_keep_the_graph(form: Form) -> None:
    for labels in (torch.arange(5), torch.zeros(5, dtype=torch.int64)):  # no positive; no negative
        loss, gradient = gradient_of(form, batch(5), labels, 1e-3)
        assert loss == pytest.approx(0, abs=1e-12)
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() < 1e-9


def test_all_scores_equal_is_a_loss_like_any_other() -> None:
    x = torch.ones(6, 1, dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    for form in FORMS:
        loss, gradient = gradient_of(form, x, labels, 1e-2)
        assert loss == pytest.approx(oracle(x, labels, 1e-2), abs=1e-9)
        assert torch.isfinite(gradient).all()


def test_the_order_of_a_batch_does_not_matter() -> None:
    made = overlapping_batch(200, 32)
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(2))
    loss, gradient = gradient_of(of_themselves, made.embeddings, made.labels, 1e-3)
    again, moved = gradient_of(of_themselves, made.embeddings[shuffled], made.labels[shuffled], 1e-3)
    assert again == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(moved, gradient[shuffled], atol=1e-4 * float(gradient.abs().max()))


def test_images_of_one_id_are_no_pair() -> None:
    x, labels, ids = batch(6), torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([7, 7, 8, 9, 3, 7])
    apart = ids[:, None] != ids
    by_ids = global_sigmoid_ap(pairs_of_labels(x, labels, ids=ids), 1e-2)
    by_mask = global_sigmoid_ap(pairs_of_similarity(x @ x.T, labels[:, None] == labels, apart), 1e-2)
    assert by_ids.item() == pytest.approx(by_mask.item(), abs=1e-12)
    assert by_ids.item() != pytest.approx(of_themselves(x, labels, 1e-2).item(), abs=1e-4)


def test_a_share_of_the_lowest_negatives_can_be_dropped() -> None:
    x, labels = batch(12, dimension=3), torch.arange(12) // 3
    apart = ~torch.eye(12, dtype=torch.bool)
    scores = (x @ x.T).requires_grad_()
    relevant = (labels[:, None] == labels) & apart
    loss = global_sigmoid_ap(pairs_of_similarity(scores, relevant, apart), 5e-2, drop=0.5)
    loss.backward()
    negative = apart & ~relevant
    floor = scores[negative].sort().values[int(negative.sum()) // 2]
    kept = relevant | (negative & (scores >= floor))
    assert loss.item() == pytest.approx(
        smoothed_ap_loss(scores[kept].tolist(), relevant[kept].tolist(), 5e-2), abs=1e-6
    )
    assert scores.grad is not None
    assert (scores.grad[negative & (scores < floor)] == 0).all()
    assert (scores.grad[kept] != 0).any()
    assert torch.equal(global_sigmoid_ap(pairs_of_labels(x, labels), 5e-2, drop=0.5), loss)


def test_dropping_goes_by_the_negatives_alone() -> None:
    scores = torch.tensor([[-0.9, 0.5, 0.4, 0.3, 0.2]], dtype=torch.float64)
    relevant = torch.tensor([[True, False, False, False, False]])
    loss = global_sigmoid_ap(pairs_of_similarity(scores, relevant), 1e-3, drop=0.75)
    assert loss.item() == pytest.approx(0.5, abs=1e-9)  # one negative is left above the positive


@pytest.mark.parametrize("drop", [-0.1, 1.0, math.nan])
def test_a_share_that_is_none_is_refused(drop: float) -> None:
    with pytest.raises(ValueError, match="drop is"):
        global_sigmoid_ap(pairs_of_labels(batch(4), torch.tensor([0, 0, 1, 1])), 1e-2, drop)


def test_half_precision_embeddings_are_compared_in_float32() -> None:
    made = overlapping_batch(64, 32)
    half = made.embeddings.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, gradient = gradient_of(of_themselves, half, made.labels, 1e-3)
    exact, exact_gradient = gradient_of(of_themselves, half.float(), made.labels, 1e-3)
    assert found == exact
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(gradient, exact_gradient.bfloat16())


def test_float64_stays_float64() -> None:
    x, labels = batch(20), torch.arange(20) // 4
    for form in FORMS:
        assert form(x, labels, 1e-2).dtype == torch.float64
        assert gradient_of(form, x, labels, 1e-2)[1].dtype == torch.float64


def test_similarities_that_were_made_already_are_used() -> None:
    x, labels = batch(20).requires_grad_(), torch.arange(20) // 4
    pairs = pairs_of_labels(x, labels)
    assert not pairs.matrix_made
    fused = global_sigmoid_ap(pairs, 1e-2)
    assert not pairs.matrix_made
    pairs.similarity.sum().item()
    assert global_sigmoid_ap(pairs, 1e-2).item() == pytest.approx(fused.item(), abs=1e-12)


def test_maps_of_single_queries_change_the_one_list() -> None:
    made = overlapping_batch(40, 64, noise=1.0)
    shift = torch.linspace(-0.6, 0.6, 40)[:, None]
    before, after = (
        global_sigmoid_ap(pairs_of_similarity(scores, made.relevant, made.apart), 1e-3).item()
        for scores in (made.similarity, made.similarity + shift)
    )
    assert before < 1e-3
    assert after > 0.05
