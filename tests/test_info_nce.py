import pytest
import torch
from hypothesis import given
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import NTXentLoss

from roadmatch.losses.info_nce import InfoNCE
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.pairs import pairs_of_labels
from tests import other_loss_oracles as oracles
from tests.other_loss_oracles import Batch, batch_of, batches


@given(batches())
def test_it_is_its_definition(batch: Batch) -> None:
    loss = InfoNCE(0.2)(pairs_of_labels(batch.embeddings, batch.labels))
    relevant = [[a == b for b in batch.labels.tolist()] for a in batch.labels.tolist()]
    if not any(sum(row) > 1 for row in relevant) or all(map(all, relevant)):
        assert loss == 0
    else:
        assert loss.item() == pytest.approx(oracles.info_nce_loss(*batch.masked, 0.2), rel=1e-9, abs=1e-12)


def test_value_and_gradient_are_those_of_pytorch_metric_learning() -> None:
    batch = batch_of([0, 1, 0, 2, 2, 0, 3, 1], 4)
    ours, theirs = batch.embeddings.clone().requires_grad_(), batch.embeddings.clone().requires_grad_()
    PairLoss(InfoNCE(0.07))(ours, batch.labels).backward()
    NTXentLoss(0.07, distance=CosineSimilarity())(theirs, batch.labels).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    along = (theirs.grad * theirs).sum(1, keepdim=True)  # theirs looks at the direction only
    difference = (ours.grad - (ours.grad * ours).sum(1, keepdim=True) * ours) - (theirs.grad - along * theirs)
    assert difference.abs().max() < 1e-7


def test_one_class_and_lone_images_say_nothing_and_have_a_gradient_of_zero() -> None:
    for labels in ([0, 0, 0], [0, 1, 2]):
        embeddings = batch_of(labels, 1).embeddings.requires_grad_()
        loss = InfoNCE()(pairs_of_labels(embeddings, torch.tensor(labels)))
        loss.backward()
        assert loss == 0
        assert embeddings.grad is not None
        assert not embeddings.grad.any()


def test_its_memory_is_that_of_the_similarities() -> None:
    labels = torch.arange(2_048) // 32  # each positive with each negative would be 500 GB
    embeddings = torch.nn.functional.normalize(torch.randn(2_048, 8, generator=torch.manual_seed(0))).requires_grad_()
    InfoNCE()(pairs_of_labels(embeddings, labels)).backward()
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature is"):
        InfoNCE(temperature)
