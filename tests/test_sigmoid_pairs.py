"""SigLIP's loss, against the paper's pseudocode as a loop."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.sigmoid_pairs import SigmoidPairs
from tests import other_loss_oracles as oracles
from tests.other_loss_oracles import Batch, batch_of, batches


def test_it_starts_where_the_paper_starts() -> None:
    term = SigmoidPairs()
    assert term.log_scale.item() == pytest.approx(math.log(10))
    assert term.bias.item() == -10
    similarity = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    loss = PairLoss(term).of_similarity(similarity, torch.eye(2, dtype=torch.bool)).item()
    assert loss == pytest.approx(2 * (math.log(2) + math.log1p(math.exp(-10))) / 2, abs=1e-6)


@given(batches(), st.sampled_from([(10.0, -10.0), (1.0, 0.5), (100.0, -30.0)]))
@settings(deadline=None, max_examples=60)
def test_it_is_the_loop_for_every_batch(batch: Batch, settings: tuple[float, float]) -> None:
    term = SigmoidPairs(*settings).double()
    scale = math.exp(term.log_scale.item())
    embeddings = batch.embeddings.requires_grad_()
    loss = PairLoss(term)(embeddings, batch.labels)
    loss.backward()
    assert loss.item() == pytest.approx(oracles.sigmoid_pairs_loss(*batch.masked, scale, settings[1]), rel=1e-9)
    for gradient in (embeddings.grad, term.log_scale.grad, term.bias.grad):
        assert gradient is not None
        assert gradient.isfinite().all()


def test_images_and_texts_of_one_batch_are_a_rectangle_with_the_identity() -> None:
    images, texts = batch_of(range(4), 0).embeddings, batch_of(range(4), 1).embeddings
    similarity, relevant = images @ texts.T, torch.eye(4, dtype=torch.bool)
    everything = [[True] * 4] * 4
    loss = PairLoss(SigmoidPairs()).of_similarity(similarity, relevant).item()
    expected = oracles.sigmoid_pairs_loss(similarity.tolist(), relevant.tolist(), everything, 10.0, -10.0)
    assert loss == pytest.approx(expected, rel=1e-6)


def test_its_gradients_are_the_slopes_of_the_loop() -> None:
    batch, term = batch_of([0, 1, 0, 2, 1], 3), SigmoidPairs(4.0, -1.0).double()
    scale = math.exp(term.log_scale.item())
    similarity = batch.similarity.requires_grad_()
    relevant, counted = torch.tensor(batch.relevant), torch.tensor(batch.counted)
    whole = PairLoss(term).of_similarity(similarity, relevant, counted)
    of_pairs, of_scale, of_bias = torch.autograd.grad(whole, (similarity, term.log_scale, term.bias))

    def loss(log_scale: float, bias: float) -> float:
        return oracles.sigmoid_pairs_loss(*batch.masked, math.exp(log_scale), bias)

    by_pair = oracles.slopes(
        lambda moved: oracles.sigmoid_pairs_loss(moved, batch.relevant, batch.counted, scale, -1.0), similarity.detach()
    )
    by_setting = oracles.slopes(lambda moved: loss(*moved[0]), torch.tensor([[math.log(scale), -1.0]]).double())
    torch.testing.assert_close(of_pairs, by_pair, atol=1e-8, rtol=0)
    torch.testing.assert_close(torch.stack((of_scale, of_bias))[None], by_setting, atol=1e-8, rtol=0)


def test_the_optimizer_gets_scale_and_bias_from_the_loss_that_holds_the_term() -> None:
    assert [tuple(p.shape) for p in PairLoss(SigmoidPairs()).parameters()] == [(), ()]


def test_training_finds_the_threshold_between_matches_and_others() -> None:
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(20, 20, generator=generator) < 0.1
    similarity = torch.where(positive, 0.7, 0.3) + 0.02 * torch.randn(20, 20, generator=generator)
    loss = PairLoss(term := SigmoidPairs())
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.3)
    for _ in range(200):
        optimizer.zero_grad()
        torch.autograd.backward(loss.of_similarity(similarity, positive))
        optimizer.step()
    assert -term.bias.item() / math.exp(term.log_scale.item()) == pytest.approx(0.5, abs=0.1)


def test_extreme_logits_stay_finite() -> None:
    similarity = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], requires_grad=True)
    loss = PairLoss(SigmoidPairs(1e4, 0.0)).of_similarity(similarity, ~torch.eye(2, dtype=torch.bool))
    assert loss.item() == pytest.approx(2e4)
    assert torch.autograd.grad(loss, similarity)[0].isfinite().all()


def test_a_batch_without_pairs_gives_a_connected_zero() -> None:
    embeddings = torch.ones(1, 1, requires_grad=True)
    loss = PairLoss(SigmoidPairs())(embeddings, torch.tensor([0]))
    loss.backward()
    assert loss.item() == 0
    assert embeddings.grad is not None


def test_a_scale_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="scale 0"):
        SigmoidPairs(0)
