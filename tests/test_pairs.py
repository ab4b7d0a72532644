"""Which pairs of a batch belong together, which are left out, and how terms on them become a loss."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.pairs import Pairs, pairs_of_labels, pairs_of_similarity, without
from roadmatch.losses.sigmoid_pairs import SigmoidPairs

LABELS = st.lists(st.integers(-2, 2), max_size=7)
IDS = st.integers(0, 5)


def directions(count: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(drawn)


def numbers(rows: int, columns: int, holds: Callable[[int, int], bool]) -> list[int]:
    return [i * columns + j for i in range(rows) for j in range(columns) if holds(i, j)]


def check(pairs: Pairs, positive: Callable[[int, int], bool], left_out: Callable[[int, int], bool]) -> None:
    rows, columns = pairs.shape
    assert pairs.positives.tolist() == numbers(rows, columns, lambda i, j: positive(i, j) and not left_out(i, j))
    assert pairs.left_out.tolist() == numbers(rows, columns, left_out)
    kept = [[j for j in range(columns) if not left_out(i, j)] for i in range(rows)]
    assert pairs.positives_per_query.tolist() == [sum(positive(i, j) for j in row) for i, row in enumerate(kept)]
    assert pairs.negatives_per_query.tolist() == [sum(not positive(i, j) for j in row) for i, row in enumerate(kept)]


@given(LABELS)
@settings(deadline=None, max_examples=50)
def test_in_a_batch_equal_labels_are_positive_and_no_image_is_compared_with_itself(labels: list[int]) -> None:
    embeddings = directions(len(labels))
    pairs = pairs_of_labels(embeddings, torch.tensor(labels, dtype=torch.int64))
    check(pairs, lambda i, j: labels[i] == labels[j], lambda i, j: i == j)
    assert not pairs.matrix_made
    torch.testing.assert_close(pairs.similarity, embeddings @ embeddings.T)
    assert pairs.matrix_made


@given(st.lists(st.tuples(st.integers(0, 2), IDS), max_size=7))
@settings(deadline=None, max_examples=50)
def test_two_views_of_one_image_are_left_out_by_its_id(batch: list[tuple[int, int]]) -> None:
    labels, ids = (torch.tensor([entry[side] for entry in batch], dtype=torch.int64) for side in (0, 1))
    pairs = pairs_of_labels(directions(len(batch)), labels, ids=ids)
    check(pairs, lambda i, j: batch[i][0] == batch[j][0], lambda i, j: batch[i][1] == batch[j][1])


@given(st.lists(st.tuples(st.integers(0, 2), IDS), max_size=6), st.lists(st.tuples(st.integers(0, 2), IDS), max_size=8))
@settings(deadline=None, max_examples=50)
def test_with_a_reference_the_pairs_are_a_rectangle(
    batch: list[tuple[int, int]], memory: list[tuple[int, int]]
) -> None:
    sides = [[torch.tensor([e[side] for e in some], dtype=torch.int64) for side in (0, 1)] for some in (batch, memory)]
    (labels, ids), (reference_labels, reference_ids) = sides
    queries, reference = directions(len(batch)), directions(len(memory), 1)
    with_ids = pairs_of_labels(queries, labels, reference, reference_labels, ids, reference_ids)
    check(with_ids, lambda i, j: batch[i][0] == memory[j][0], lambda i, j: batch[i][1] == memory[j][1])
    plain = pairs_of_labels(queries, labels, reference, reference_labels)
    check(plain, lambda i, j: batch[i][0] == memory[j][0], lambda i, j: False)
    torch.testing.assert_close(plain.similarity, queries @ reference.T)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 1000), st.booleans())
@settings(deadline=None, max_examples=50)
def test_a_matrix_says_itself_what_is_relevant_and_counted(rows: int, columns: int, seed: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(rows, columns, generator=generator)
    relevant, counted = (torch.rand(rows, columns, generator=generator) < share for share in (0.4, 0.7))
    pairs = pairs_of_similarity(similarity, relevant, counted if masked else None)
    check(pairs, lambda i, j: bool(relevant[i, j]), lambda i, j: masked and not bool(counted[i, j]))
    assert pairs.similarity is similarity
    assert pairs.matrix_made


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
@settings(deadline=None, max_examples=50)
def test_numbers_without_others_are_a_difference_of_sets(some: set[int], others: set[int]) -> None:
    kept = without(*(torch.tensor(sorted(each), dtype=torch.int64) for each in (some, others)))
    assert kept.tolist() == sorted(some - others)


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_any_integer_kind_will_do(kind: torch.dtype) -> None:
    pairs = pairs_of_labels(directions(3), torch.tensor([1, 2, 1], dtype=kind))
    assert pairs.positives.tolist() == [2, 6]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_similarities_are_float32_unless_the_embeddings_are_float64(dtype: torch.dtype) -> None:
    embeddings = directions(4).to(dtype).requires_grad_()
    pairs = pairs_of_labels(embeddings, torch.arange(4))
    assert pairs.similarity.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (gradient,) = torch.autograd.grad(pairs.similarity.sum(), embeddings)
    assert gradient.dtype == dtype
    matrix = pairs_of_similarity(torch.eye(2, dtype=dtype), torch.eye(2).bool())
    assert matrix.similarity.dtype == pairs.similarity.dtype


def test_a_memory_in_another_precision_takes_that_of_the_batch() -> None:
    one, other = directions(2).double(), directions(3, 1)
    pairs = pairs_of_labels(one, torch.arange(2), other, torch.arange(3))
    assert pairs.similarity.dtype == torch.float64
    pairs = pairs_of_labels(other.bfloat16(), torch.arange(3), one, torch.arange(2))
    assert pairs.similarity.dtype == torch.float32


def test_gradients_reach_both_sides() -> None:
    one, other = directions(2).requires_grad_(), directions(3, 1).requires_grad_()
    pairs = pairs_of_labels(one, torch.arange(2), other, torch.arange(3))
    weights = torch.arange(6.0).view(2, 3)
    of_one, of_other = torch.autograd.grad((weights * pairs.similarity).sum(), (one, other))
    torch.testing.assert_close(of_one, weights @ other)
    torch.testing.assert_close(of_other, weights.T @ one)


def test_nothing_is_a_zero_that_is_connected() -> None:
    embeddings, matrix = directions(2).requires_grad_(), torch.eye(2, requires_grad=True)
    for pairs, source in (
        (pairs_of_labels(embeddings, torch.arange(2)), embeddings),
        (pairs_of_similarity(matrix, torch.eye(2).bool()), matrix),
    ):
        assert pairs.nothing() == 0
        assert not torch.autograd.grad(pairs.nothing(), source)[0].any()


def test_what_does_not_fit_is_refused_with_its_cause() -> None:
    x, y, label = directions(2), directions(3), torch.arange(2)
    cases: list[tuple[str, tuple[Tensor | None, ...]]] = [
        (r"embeddings \(2, 3\) and labels \(3,\)", (x, torch.arange(3))),
        (r"embeddings \(2, 3, 1\)", (x[..., None], label)),
        (r"labels \(2, 1\)", (x, label[:, None])),
        ("labels are torch.float32", (x, label.float())),
        ("embeddings are torch.int64", (x.long(), label)),
        ("needs reference_labels", (x, label, y)),
        ("reference .* do not fit", (x, label, y, label)),
        ("3 dimensions and a reference of 2", (x, label, y[:, :2], torch.arange(3))),
        ("come together", (x, label, y, torch.arange(3), label)),
        ("3 ids", (x, label, None, None, torch.arange(3))),
        ("3 ids", (x, label, y, torch.arange(3), torch.arange(3), torch.arange(3))),
        ("2 reference_ids", (x, label, y, torch.arange(3), label, label)),
        ("embeddings hold NaN", (x * torch.nan, label)),
        ("embeddings hold NaN", (x / 0, label)),
        ("reference hold NaN", (x, label, y * torch.nan, torch.arange(3))),
    ]
    for cause, arguments in cases:
        with pytest.raises(ValueError, match=cause):
            pairs_of_labels(*arguments)  # type: ignore[arg-type]


def test_a_matrix_that_does_not_fit_is_refused_with_its_cause() -> None:
    square, marks = torch.eye(2), torch.eye(2).bool()
    cases: list[tuple[str, tuple[Tensor, ...]]] = [
        (r"\(2, 2\) and relevance \(1, 2\)", (square, marks[:1])),
        (r"\(4,\)", (square.flatten(), marks.flatten())),
        (r"counted is \(1, 2\)", (square, marks, marks[:1])),
        ("similarities hold NaN", (square / 0, marks)),
    ]
    for cause, arguments in cases:
        with pytest.raises(ValueError, match=cause):
            pairs_of_similarity(*arguments)


def test_large_halves_that_overflow_in_sum_are_still_finite() -> None:
    assert pairs_of_labels(torch.full((2, 3), 60000.0).half(), torch.arange(2)).shape == (2, 2)


# A loss of terms


def first(pairs: Pairs) -> Tensor:
    return pairs.similarity[0, 1]


def total(pairs: Pairs) -> Tensor:
    return pairs.similarity.sum()


def test_a_loss_is_the_weighted_sum_of_its_terms() -> None:
    x, labels = directions(3), torch.arange(3)
    similarity = x @ x.T
    assert PairLoss(first)(x, labels).item() == pytest.approx(similarity[0, 1].item())
    both = PairLoss(first, total, weights=(2.0, -0.5))
    expected = 2 * similarity[0, 1] - 0.5 * similarity.sum()
    assert both(x, labels).item() == pytest.approx(expected.item(), rel=1e-5)
    relevant = torch.eye(3).bool()
    assert both.of_similarity(similarity, relevant).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_loss_hands_on_the_parameters_of_its_terms_and_their_state() -> None:
    loss = PairLoss(first, SigmoidPairs(), total)
    assert len(list(loss.parameters())) == 2
    nn.init.constant_(next(loss.parameters()), 0.25)
    other = PairLoss(first, SigmoidPairs(), total)
    other.load_state_dict(loss.state_dict())
    x = directions(3)
    assert other(x, torch.arange(3)) == loss(x, torch.arange(3))
    assert loss.double()(x, torch.arange(3)).isfinite()


def test_terms_and_weights_have_to_be_as_many() -> None:
    for terms, weights in (((), None), ((first,), (1.0, 2.0)), ((first, total), (1.0,))):
        with pytest.raises(ValueError, match="terms and"):
            PairLoss(*terms, weights=weights)
