"""Average precision as a loss: every scope with every approximation."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from roadmatch.losses.approximations import Approximation, BlackBox, Sigmoid, SoftBins, Step, UpperBound
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.rank_ap import RankAP, Scope
from tests import loss_oracles
from tests.loss_oracles import mean_over_queries, of_all_pairs

ORACLES: dict[Approximation, loss_oracles.OfList] = {
    Sigmoid(0.05): lambda s, y: loss_oracles.sigmoid_loss(s, y, 0.05),
    UpperBound(0.02, 50.0): lambda s, y: loss_oracles.upper_bound_loss(s, y, 0.02, 50.0, 0.0919024),
    UpperBound(0.03, 10.0, 0.05): lambda s, y: loss_oracles.upper_bound_loss(s, y, 0.03, 10.0, 0.05),
    SoftBins(12): lambda s, y: loss_oracles.soft_bins_loss(s, y, 12),
    BlackBox(2.0, 0.05): lambda s, y: loss_oracles.black_box(s, y, 2.0, 0.05)[0],
    Step(): loss_oracles.step_loss,
}
SMOOTH = [how for how in ORACLES if not isinstance(how, BlackBox | Step)]
EVERY = list(product(Scope, ORACLES))


def expected(scope: Scope, how: Approximation, similarity: Tensor, relevant: Tensor, counted: Tensor) -> float:
    over = mean_over_queries if scope is Scope.PER_QUERY else of_all_pairs
    return over(similarity.tolist(), relevant.tolist(), counted.tolist(), ORACLES[how])


def made_up(queries: int, candidates: int, seed: int, positives: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Similarities (Q, N) float64, relevance and what counts, with queries that have no positive."""
    random = torch.Generator().manual_seed(seed)
    similarity = torch.rand(queries, candidates, generator=random, dtype=torch.float64) * 1.6 - 0.8
    relevant = torch.rand(queries, candidates, generator=random) < positives
    relevant[-1] = False
    return similarity, relevant, torch.rand(queries, candidates, generator=random) < 0.8


def batch(labels: Tensor, dimension: int = 16, seed: int = 0, spread: float = 1.5) -> Tensor:
    """Overlapping classes, (B, D) float64."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(int(labels.max()) + 1, dimension, generator=random, dtype=torch.float64)
    noise = torch.randn(len(labels), dimension, generator=random, dtype=torch.float64)
    return normalize(centres[labels] + spread * noise, dim=1)


@st.composite
def labelled(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Labels with lone and single classes, and scores that are spread, on a lattice, all equal or exactly 1."""
    labels = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=2, max_size=9)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    spread = torch.rand(len(labels), len(labels), generator=random, dtype=torch.float64) * 2 - 1
    kind = draw(st.sampled_from(("spread", "lattice", "equal", "one", "some ones")))
    if kind == "lattice":
        spread = (spread * 4).round() / 4
    elif kind in ("equal", "one"):
        spread = torch.full_like(spread, 0.25 if kind == "equal" else 1.0)
    elif kind == "some ones":
        spread[spread > 0.3] = 1.0
    return spread, labels


@settings(deadline=None, max_examples=40)
@given(labelled())
def test_every_combination_is_what_its_definition_says(drawn: tuple[Tensor, Tensor]) -> None:
    similarity, labels = drawn
    relevant, counted = labels[:, None] == labels, ~torch.eye(len(labels), dtype=torch.bool)
    has_positives = bool((relevant & counted).any())
    for scope, how in EVERY:
        source = similarity.clone().requires_grad_()
        loss = PairLoss(RankAP(scope, how)).of_similarity(source, relevant, counted)
        wanted = expected(scope, how, similarity, relevant, counted) if has_positives else 0.0
        assert loss.item() == pytest.approx(wanted, abs=2e-6), (scope, how)
        loss.backward()
        assert source.grad is not None
        assert torch.isfinite(source.grad).all()


@pytest.mark.parametrize(("scope", "how"), EVERY)
@pytest.mark.parametrize("shape", [(5, 14), (9, 4)])
def test_rectangular_and_masked_pairs_are_what_the_definition_says(
    scope: Scope, how: Approximation, shape: tuple[int, int]
) -> None:
    similarity, relevant, counted = made_up(*shape, seed=1)
    loss = PairLoss(RankAP(scope, how)).of_similarity(similarity, relevant, counted)
    assert loss.item() == pytest.approx(expected(scope, how, similarity, relevant, counted), abs=1e-7)


@pytest.mark.parametrize(("scope", "how"), list(product(Scope, SMOOTH)))
def test_gradients_are_the_differences_of_the_definition(scope: Scope, how: Approximation) -> None:
    similarity, relevant, counted = made_up(4, 9, seed=2)
    relevant[1, ::2] = True  # lists of unlike numbers of positives
    source = similarity.clone().requires_grad_()
    loss = 3 * PairLoss(RankAP(scope, how)).of_similarity(source, relevant, counted)
    loss.backward()
    step = torch.zeros_like(similarity)
    differences = torch.zeros_like(similarity)
    for row, column in product(range(4), range(9)):
        step.zero_()[row, column] = 1e-6
        higher, lower = (expected(scope, how, similarity + s, relevant, counted) for s in (step, -step))
        differences[row, column] = 3 * (higher - lower) / 2e-6
    assert differences.abs().max() > 0.01
    torch.testing.assert_close(source.grad, differences, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("how", [UpperBound(0.02, 50.0), SoftBins(12), Step(), BlackBox(2.0, 0.05), Sigmoid(0.05)])
def test_dropping_leaves_out_the_lowest_negatives(how: Approximation) -> None:
    similarity, relevant, counted = made_up(6, 8, seed=3)
    negatives = similarity[counted & ~relevant].sort().values
    dropped = int(0.6 * len(negatives))
    kept = counted & (relevant | (similarity >= negatives[dropped]))
    assert int((counted & ~kept).sum()) == dropped
    source = similarity.clone().requires_grad_()
    loss = PairLoss(RankAP(Scope.GLOBAL, how, drop=0.6)).of_similarity(source, relevant, counted)
    assert loss.item() == pytest.approx(expected(Scope.GLOBAL, how, similarity, relevant, kept), abs=1e-7)
    whole = similarity.clone().requires_grad_()
    PairLoss(RankAP(Scope.GLOBAL, how)).of_similarity(whole, relevant, kept).backward()
    loss.backward()
    torch.testing.assert_close(source.grad, whole.grad, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize(("scope", "how"), EVERY)
def test_the_order_of_a_batch_does_not_matter(scope: Scope, how: Approximation) -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 4])
    embeddings = batch(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(4))
    loss = PairLoss(RankAP(scope, how))
    assert loss(embeddings[order], labels[order]).item() == pytest.approx(loss(embeddings, labels).item(), abs=1e-9)


@pytest.mark.parametrize(("scope", "how"), EVERY)
@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0], [0, 0, 0], [1, 1, 2]])
def test_batches_with_little_to_say_give_a_finite_loss_on_the_graph(
    scope: Scope, how: Approximation, labels: list[int]
) -> None:
    numbers = torch.tensor(labels)
    embeddings = batch(numbers).float().requires_grad_()
    loss = PairLoss(RankAP(scope, how))(embeddings, numbers)
    loss.backward()
    assert embeddings.grad is not None
    assert torch.isfinite(embeddings.grad).all()
    if labels != [1, 1, 2]:  # no positives, or no negatives
        assert loss.item() == pytest.approx(0, abs=1e-15)
        assert embeddings.grad.abs().max() < 1e-15


@pytest.mark.parametrize("how", [Sigmoid(0.01), UpperBound(0.01), Sigmoid(0.001), UpperBound(0.001), SoftBins()])
@pytest.mark.parametrize("scope", list(Scope))
def test_float32_is_as_exact_as_its_scores(scope: Scope, how: Approximation) -> None:
    labels = torch.arange(120) // 5
    embeddings = batch(labels, 32).float()
    similarity = embeddings @ embeddings.T
    relevant, counted = labels[:, None] == labels, ~torch.eye(120, dtype=torch.bool)
    single, double = similarity.requires_grad_(), similarity.detach().double().requires_grad_()
    losses = [PairLoss(RankAP(scope, how)).of_similarity(s, relevant, counted) for s in (single, double)]
    assert [loss.dtype for loss in losses] == [torch.float32, torch.float64]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    torch.autograd.backward(losses)
    assert single.grad is not None
    assert double.grad is not None
    assert (single.grad - double.grad).norm() <= 2e-6 * double.grad.norm()


@settings(deadline=None, max_examples=40)
@given(labelled())
def test_the_upper_bound_is_never_below_the_exact_loss(drawn: tuple[Tensor, Tensor]) -> None:
    similarity, labels = drawn
    relevant, counted = labels[:, None] == labels, ~torch.eye(len(labels), dtype=torch.bool)
    for scope, how in product(
        Scope, (UpperBound(), UpperBound(0.001), UpperBound(0.05, 0.0), UpperBound(0.02, 1.0, 0.02))
    ):
        bound, exact = (
            PairLoss(RankAP(scope, by)).of_similarity(similarity, relevant, counted).item() for by in (how, Step())
        )
        assert bound >= exact - 1e-9


def toy(how: Approximation, scores: list[float]) -> list[float]:
    """The gradient at a list of two positives and a negative (ROADMAP, supplement A)."""
    similarity = torch.tensor([scores], dtype=torch.float64, requires_grad=True)
    relevant = torch.tensor([[True, True, False]])
    PairLoss(RankAP(Scope.PER_QUERY, how)).of_similarity(similarity, relevant).backward()
    assert similarity.grad is not None
    gradient: list[float] = similarity.grad[0].tolist()
    return gradient


def test_sigmoids_pull_two_positives_apart_and_leave_a_far_negative() -> None:
    first, second, negative = toy(Sigmoid(0.01), [0.31, 0.30, 0.6])
    assert first == pytest.approx(-second, rel=1e-6)
    assert abs(first) > 0.5
    assert abs(negative) < 1e-9


def test_the_upper_bound_lifts_both_positives_and_lowers_the_negative() -> None:
    first, second, negative = toy(UpperBound(), [0.31, 0.30, 0.6])
    assert first < -0.05
    assert second < -0.05
    assert negative == pytest.approx(-first - second)


def test_sigmoids_may_be_below_the_exact_loss() -> None:
    similarity, relevant = torch.tensor([[0.5, 0.501]]), torch.tensor([[True, False]])
    smooth, exact = (
        PairLoss(RankAP(Scope.PER_QUERY, how)).of_similarity(similarity, relevant).item() for how in (Sigmoid(), Step())
    )
    assert smooth < exact == 0.5


def test_an_increasing_map_of_each_query_changes_the_global_loss_alone() -> None:
    similarity, relevant, counted = made_up(6, 10, seed=5)
    moved = torch.tanh(similarity) * torch.linspace(0.2, 0.9, 6)[:, None] + torch.linspace(-0.1, 0.1, 6)[:, None]
    for scope, same in ((Scope.PER_QUERY, True), (Scope.GLOBAL, False)):
        loss = PairLoss(RankAP(scope, Step()))
        before, after = (loss.of_similarity(s, relevant, counted).item() for s in (similarity, moved))
        assert (before == pytest.approx(after, abs=1e-12)) is same


def test_an_exact_loss_has_no_gradient_but_a_graph() -> None:
    similarity, relevant, counted = made_up(4, 6, seed=6)
    source = similarity.requires_grad_()
    loss = PairLoss(RankAP(Scope.PER_QUERY, Step())).of_similarity(source, relevant, counted)
    loss.backward()
    assert source.grad is not None
    assert not source.grad.any()


def test_a_loss_is_the_same_without_a_graph_and_may_be_followed_back_twice() -> None:
    similarity, relevant, counted = made_up(4, 6, seed=7)
    for scope, how in EVERY:
        source = similarity.clone().requires_grad_()
        loss = PairLoss(RankAP(scope, how))
        with_graph = loss.of_similarity(source, relevant, counted)
        (first,) = torch.autograd.grad(with_graph, source, retain_graph=True)
        (second,) = torch.autograd.grad(with_graph, source)
        assert torch.equal(first, second)
        assert loss.of_similarity(similarity, relevant, counted).item() == with_graph.item()


@pytest.mark.parametrize("how", [Sigmoid(published=True), UpperBound(published=True)])
def test_the_published_arithmetic_takes_a_batch_with_itself_and_nothing_else(how: Approximation) -> None:
    loss = PairLoss(RankAP(Scope.PER_QUERY, how))
    labels = torch.tensor([0, 0, 1, 1])
    embeddings = batch(labels)
    with pytest.raises(ValueError, match="diagonal"):
        loss(embeddings, labels, embeddings[:3], labels[:3])
    with pytest.raises(ValueError, match="diagonal"):
        loss.of_similarity(embeddings @ embeddings.T, (labels[:, None] == labels) & ~torch.eye(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="diagonal"):
        loss.of_similarity(torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool), ~torch.eye(2, 4, dtype=torch.bool))
    similarity, relevant = embeddings @ embeddings.T, labels[:, None] == labels
    assert loss.of_similarity(similarity, relevant).item() == loss(embeddings, labels).item()
    with pytest.raises(ValueError, match="per query"):
        RankAP(Scope.GLOBAL, how)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: RankAP(Scope.PER_QUERY, Step(), drop=0.5), "0.5"),
        (lambda: RankAP(Scope.GLOBAL, Step(), drop=1.0), "1.0"),
        (lambda: RankAP(Scope.GLOBAL, Step(), drop=-0.1), "-0.1"),
        (lambda: Sigmoid(0.0), "temperature is 0.0"),
        (lambda: Sigmoid(float("nan")), "temperature is nan"),
        (lambda: UpperBound(-1.0), "temperature is -1.0"),
        (lambda: UpperBound(slope=-1.0), "slope is -1.0"),
        (lambda: UpperBound(0.01, knee=0.001), "knee is 0.001"),
        (lambda: SoftBins(1), "bins is 1"),
        (lambda: BlackBox(strength=0.0), "strength is 0.0"),
        (lambda: BlackBox(margin=-0.1), "margin is -0.1"),
    ],
)
def test_a_wrong_argument_is_named(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
