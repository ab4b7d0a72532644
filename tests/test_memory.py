"""The memory of past batches: who is compared with whom, what is kept, and for how long."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from roadmatch.losses import adapted
from roadmatch.losses.info_nce import InfoNCE
from roadmatch.losses.koleo import KoLeo
from roadmatch.losses.margins import Margins, Reduction
from roadmatch.losses.memory import CrossBatchMemory
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.pairs import Pairs
from roadmatch.losses.recall import RecallAtK
from roadmatch.losses.sigmoid_pairs import SigmoidPairs
from tests.other_loss_oracles import batch_of


class Watcher(nn.Module):
    """A loss that keeps the pairs that it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Pairs] = []
        self.loss = PairLoss(self._look)

    def _look(self, pairs: Pairs) -> Tensor:
        self.seen.append(pairs)
        return pairs.similarity.sum()

    def forward(self, *arguments: Tensor, **named: Tensor) -> Tensor:
        loss: Tensor = self.loss(*arguments, **named)
        return loss


def step(memory: CrossBatchMemory, labels: list[int], seed: int, ids: list[int] | None = None) -> Tensor:
    batch = batch_of(labels, seed)
    loss: Tensor = memory(batch.embeddings, batch.labels, ids=None if ids is None else torch.tensor(ids))
    return loss


def test_the_second_batch_is_compared_with_itself_and_with_the_first() -> None:
    memory = CrossBatchMemory(PairLoss(Margins(0.9, 0.1, Reduction.ALL_PAIRS)), 10)
    first, second = batch_of([0, 1, 1], 0), batch_of([1, 0], 1)
    memory(first.embeddings, first.labels)
    loss = memory(second.embeddings, second.labels)
    near: list[float] = []
    far: list[float] = []
    for i in range(2):
        for x, label in [(second.embeddings[1 - i], second.labels[1 - i]), *zip(*vars(first).values(), strict=True)]:
            (near if label == second.labels[i] else far).append(float(second.embeddings[i] @ x))
    expected = sum(max(0, 0.9 - s) for s in near) / len(near) + sum(max(0, s - 0.1) for s in far) / len(far)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_gradients_reach_the_batch_on_both_sides_and_nothing_else() -> None:
    memory = CrossBatchMemory(PairLoss(SigmoidPairs().double()), 10)
    past = batch_of([0, 1], 0).embeddings.requires_grad_()
    now = batch_of([1, 0, 1], 1).embeddings.requires_grad_()
    memory(past, torch.tensor([0, 1]))
    assert not memory.embeddings.requires_grad
    memory(now, torch.tensor([1, 0, 1])).backward()
    assert past.grad is None
    loss = PairLoss(SigmoidPairs().double())
    with_past = loss(now, torch.tensor([1, 0, 1]), past.detach(), torch.tensor([0, 1]))
    (expected,) = torch.autograd.grad(loss(now, torch.tensor([1, 0, 1])) + with_past, now)
    torch.testing.assert_close(now.grad, expected, atol=1e-12, rtol=0)


def test_an_image_met_again_is_not_compared_with_what_is_remembered_of_it() -> None:
    watcher = Watcher()
    memory = CrossBatchMemory(watcher, 10)
    step(memory, [0, 1, 0], 0, ids=[7, 8, 9])
    step(memory, [0, 0], 1, ids=[9, 3])
    pairs = watcher.seen[-1]
    assert pairs.shape == (2, 5)
    assert pairs.left_out.tolist() == [0, 4, 6]  # 9 with itself and with its past, 3 with itself
    assert pairs.positives.tolist() == [1, 2, 5, 7, 9]


def test_without_ids_every_image_is_new() -> None:
    watcher = Watcher()
    memory = CrossBatchMemory(watcher, 10)
    for seed in range(3):
        step(memory, [0, 0], seed)
    assert watcher.seen[-1].left_out.tolist() == [0, 7]
    assert len(set(memory.ids.tolist())) == 6


def test_an_image_without_an_id_is_no_image_that_has_one() -> None:
    watcher = Watcher()
    memory = CrossBatchMemory(watcher, 10)
    step(memory, [0, 0, 0], 0)
    step(memory, [0, 0, 0], 1, ids=[0, 1, 2])
    assert watcher.seen[-1].left_out.tolist() == [0, 7, 14]


def test_with_one_per_id_the_new_embedding_takes_the_place_of_the_old_at_once() -> None:
    watcher = Watcher()
    memory = CrossBatchMemory(watcher, 10, one_per_id=True)
    step(memory, [0, 1, 0], 0, ids=[7, 8, 9])
    old = memory.embeddings.clone()
    step(memory, [0, 0], 1, ids=[9, 3])
    assert watcher.seen[-1].shape == (2, 4)
    assert memory.ids.tolist() == [7, 8, 9, 3]
    torch.testing.assert_close(memory.embeddings, torch.cat((old[:2], batch_of([0, 0], 1).embeddings)))
    step(memory, [0, 0], 2, ids=[5, 5])  # two views of one image: the last is kept
    assert memory.ids.tolist() == [7, 8, 9, 3, 5]
    torch.testing.assert_close(memory.embeddings[-1], batch_of([0, 0], 2).embeddings[1])


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(1, 8),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_it_holds_the_last_images_and_no_more(batches: list[list[int]], size: int, one_per_id: bool) -> None:
    memory = CrossBatchMemory(PairLoss(Margins()), size, one_per_id=one_per_id)
    queue: list[tuple[int, int, list[float]]] = []
    for seed, ids in enumerate(batches):
        step(memory, [i % 3 for i in ids], seed, ids)
        for i, embedding in zip(ids, batch_of(ids, seed).embeddings.tolist(), strict=True):
            queue = [entry for entry in queue if not (one_per_id and entry[0] == i)] + [(i, i % 3, embedding)]
        queue = queue[-size:]
        assert memory.ids.tolist() == [i for i, _, _ in queue]
        assert memory.labels.tolist() == [label for _, label, _ in queue]
        assert memory.embeddings.tolist() == [embedding for _, _, embedding in queue]


def test_a_batch_larger_than_the_memory_leaves_its_end_and_holds_no_more_storage() -> None:
    memory = CrossBatchMemory(PairLoss(Margins()), 3)
    for seed in range(2):
        step(memory, [0, 1, 2, 3, 4], seed)
        assert memory.labels.tolist() == [2, 3, 4]
        assert memory.embeddings.untyped_storage().nbytes() == 3 * 4 * 8


def test_warm_up_steps_neither_use_nor_fill_the_memory() -> None:
    watcher = Watcher()
    memory = CrossBatchMemory(watcher, 10, warm_up_steps=2)
    for seed in range(4):
        step(memory, [0, 1], seed)
    assert [pairs.shape for pairs in watcher.seen] == [(2, 2), (2, 2), (2, 2), (2, 4)]
    assert len(memory.ids) == 4


def test_an_empty_memory_gives_the_loss_of_the_batch() -> None:
    batch, ids = batch_of([0, 0, 1, 0], 0), torch.tensor([1, 2, 3, 1])
    loss = PairLoss(Margins(0.9, 0.0))
    alone = loss(batch.embeddings, batch.labels, ids=ids)
    assert CrossBatchMemory(loss, 4)(batch.embeddings, batch.labels, ids=ids) == alone
    assert CrossBatchMemory(loss, 4, warm_up_steps=1)(batch.embeddings, batch.labels, ids=ids) == alone


def test_a_validation_loss_neither_uses_nor_changes_the_memory() -> None:
    watcher = Watcher()
    memory = CrossBatchMemory(watcher, 10)
    step(memory, [0, 1], 0)
    before = copy.deepcopy(memory.state_dict())
    step(memory.eval(), [0, 1, 2], 1)
    assert watcher.seen[-1].shape == (3, 3)
    torch.testing.assert_close(dict(memory.state_dict()), dict(before))


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def fresh() -> CrossBatchMemory:
        return CrossBatchMemory(PairLoss(SigmoidPairs()), 5, warm_up_steps=1)

    straight = fresh()
    losses = [step(straight, [0, 1, 2, 0], seed).item() for seed in range(5)]
    for stopped_after in range(5):
        stopped, resumed = fresh(), fresh()
        first = [step(stopped, [0, 1, 2, 0], seed).item() for seed in range(stopped_after)]
        torch.save(stopped.state_dict(), tmp_path / "memory.pt")
        resumed = copy.deepcopy(resumed)  # as for an average of weights
        resumed.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
        rest = [step(resumed, [0, 1, 2, 0], seed).item() for seed in range(stopped_after, 5)]
        assert first + rest == losses
        torch.testing.assert_close(dict(resumed.state_dict()), dict(straight.state_dict()))


def test_a_full_memory_takes_the_checkpoint_of_an_empty_one_and_a_partial_one_is_reported() -> None:
    empty = CrossBatchMemory(PairLoss(Margins()), 5)
    used = CrossBatchMemory(PairLoss(Margins()), 5)
    step(used, [0, 1], 0)
    used.load_state_dict(empty.state_dict())
    assert len(used.ids) == 0
    assert step(used, [0, 1], 0) == step(empty, [0, 1], 0)
    with pytest.raises(RuntimeError, match="Missing key"):
        used.load_state_dict({name: value for name, value in empty.state_dict().items() if name != "ids"})


def test_reset_makes_it_as_new() -> None:
    memory = CrossBatchMemory(PairLoss(Margins()), 5, warm_up_steps=1)
    new = copy.deepcopy(memory.state_dict())
    for seed in range(3):
        step(memory, [0, 1], seed)
    memory.reset()
    torch.testing.assert_close(dict(memory.state_dict()), dict(new))
    wider = batch_of([0, 1], 0, dimensions=7)
    for _ in range(2):
        memory(wider.embeddings, wider.labels)
    assert memory.embeddings.shape == (2, 7)


def test_the_precision_of_the_first_batch_is_kept() -> None:
    memory = CrossBatchMemory(PairLoss(Margins(0.9, -0.5)), 8)
    halves = batch_of([0, 1], 0).embeddings.bfloat16()
    memory(halves, torch.tensor([0, 1]))
    step(memory, [0, 1], 1)
    assert memory.embeddings.dtype == torch.bfloat16
    assert len(memory.ids) == 4
    loss = memory(halves, torch.tensor([0, 1]))
    assert loss.dtype == torch.float32


def test_labels_and_ids_of_another_integer_kind_are_taken() -> None:
    memory = CrossBatchMemory(PairLoss(Margins()), 8)
    for kind in (torch.int64, torch.int32, torch.int64):
        embeddings = batch_of([0, 1], 0).embeddings
        loss = memory(embeddings, torch.tensor([0, 1], dtype=kind), ids=torch.tensor([0, 1], dtype=kind))
        assert loss.isfinite()


@pytest.mark.parametrize(
    "loss",
    [
        PairLoss(Margins(0.9, 0.1), SigmoidPairs(), KoLeo(), weights=(1.0, 0.1, 0.1)),
        PairLoss(RecallAtK()),
        adapted.contrastive(),
        adapted.triplet(),
        adapted.multi_similarity(),
        PairLoss(InfoNCE()),
    ],
)
def test_every_loss_of_pairs_can_be_wrapped(loss: nn.Module) -> None:
    memory = CrossBatchMemory(loss, 6)
    for seed in range(3):
        embeddings = batch_of([0, 1, 0, 2], seed).embeddings.requires_grad_()
        memory(embeddings, torch.tensor([0, 1, 0, 2]), ids=torch.arange(4)).backward()
        assert embeddings.grad is not None
        assert embeddings.grad.isfinite().all()
        assert embeddings.grad.any()
    assert list(memory.parameters()) == list(loss.parameters())


def test_a_batch_that_fails_is_not_remembered() -> None:
    memory = CrossBatchMemory(PairLoss(Margins()), 5)
    with pytest.raises(ValueError, match="NaN"):
        memory(torch.full((2, 2), torch.nan), torch.arange(2))
    assert len(memory.ids) == 0
    assert memory.steps == 0


def test_wrong_arguments_are_refused_with_their_cause() -> None:
    for size, steps in ((0, 0), (1, -1)):
        with pytest.raises(ValueError, match=f"{size} images after {steps} steps"):
            CrossBatchMemory(PairLoss(Margins()), size, warm_up_steps=steps)
    memory = CrossBatchMemory(PairLoss(Margins()), 5)
    with pytest.raises(ValueError, match="id -2"):
        step(memory, [0, 1], 0, ids=[1, -2])
    with pytest.raises(ValueError, match="needs ids"):
        step(CrossBatchMemory(PairLoss(Margins()), 5, one_per_id=True), [0, 1], 0)
    step(memory, [0, 1], 0)
    other = batch_of([0, 1], 0, dimensions=3)
    with pytest.raises(ValueError, match=r"embeddings \(2, 3\) and a memory of \(2, 4\)"):
        memory(other.embeddings, other.labels)
