"""Similarities are made in full precision, whatever the training loop allows elsewhere."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roadmatch.losses import adapted
from roadmatch.losses.margins import Margins
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.precision import full_precision, in_full, product
from roadmatch.losses.recall import RecallAtK
from roadmatch.losses.sigmoid_pairs import SigmoidPairs
from tests.other_loss_oracles import batch_of

CPU = torch.device("cpu")
PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


@pytest.fixture(params=["none", "high", "medium", "allow_tf32", "tf32 by backend"])
def reduced(request: pytest.FixtureRequest) -> Iterator[str]:
    """The ways a training loop has to allow less than float32."""
    before = [products.fp32_precision for products in PRODUCTS]
    if request.param in ("high", "medium"):
        torch.set_float32_matmul_precision(request.param)
    if request.param == "allow_tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    if request.param == "tf32 by backend":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield request.param
    torch.set_float32_matmul_precision("highest")
    for products, precision in zip(PRODUCTS, before, strict=True):
        products.fp32_precision = precision


def state() -> tuple[object, ...]:
    return (*(products.fp32_precision for products in PRODUCTS), torch.is_autocast_enabled("cpu"), *old_settings())


def old_settings() -> Iterator[object]:
    """As the old names of the settings read, which refuse an answer once the new ones say something else."""
    for setting in (torch.get_float32_matmul_precision, lambda: torch.backends.cuda.matmul.allow_tf32):
        try:
            yield setting()
        except RuntimeError:
            yield "refused"


class Products(TorchDispatchMode):
    """Notes the precision of every product and the state it is made in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append((args[0].dtype, args[1].dtype, *state()[:2]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
def test_the_state_inside_is_full_and_afterwards_as_before(reduced: str, autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        before = state()
        with full_precision(CPU):
            assert state()[:3] == ("ieee", "ieee", False)
        assert state() == before
        with pytest.raises(RuntimeError, match="an error inside"), full_precision(CPU):
            raise RuntimeError("an error inside")
        assert state() == before
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
            product(torch.ones(2, 3), torch.ones(2, 4))
        assert state() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_full_forwards_and_backwards(reduced: str, dtype: torch.dtype) -> None:
    queries, candidates = (torch.randn(n, 5, dtype=dtype, requires_grad=True) for n in (3, 4))
    with Products() as products, torch.autocast("cpu", torch.bfloat16):
        similarity = product(queries, candidates)
        torch.autograd.backward(similarity.square().sum())
    assert products.seen == [(dtype, dtype, "ieee", "ieee")] * 3
    assert similarity.dtype == dtype
    assert queries.grad is not None
    assert queries.grad.dtype == dtype


def test_a_precision_that_the_processor_would_lower_is_kept(reduced: str) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, candidates, weights = (torch.randn(256, 256, generator=generator) for _ in range(3))
    queries.requires_grad_()
    similarity = product(queries, candidates)
    (gradient,) = torch.autograd.grad((similarity * weights).sum(), queries)
    exact, exact_gradient = queries.double() @ candidates.double().T, weights.double() @ candidates.double()
    assert (similarity - exact).abs().max() < 1e-4  # bfloat16 is off by a tenth where the processor has it
    assert (gradient - exact_gradient).abs().max() < 1e-4


def test_a_loss_of_another_library_multiplies_in_full_backwards_too(reduced: str) -> None:
    embeddings = batch_of(range(5), 0).embeddings.float().requires_grad_()
    with Products() as products:
        torch.autograd.backward(adapted.contrastive(negative=-1)(embeddings, torch.arange(5)))
    assert products.seen == [(torch.float32, torch.float32, "ieee", "ieee")] * 3


def test_a_side_that_needs_no_gradient_gets_none() -> None:
    queries, candidates = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2)
    with Products() as products:
        torch.autograd.backward(product(queries, candidates).sum())
    assert len(products.seen) == 2
    assert candidates.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_become_float32_without_a_change(dtype: torch.dtype) -> None:
    halves = torch.randn(5).to(dtype)
    assert in_full(halves).dtype == torch.float32
    assert torch.equal(in_full(halves).to(dtype), halves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_full_is_handed_on(dtype: torch.dtype) -> None:
    values = torch.randn(5, dtype=dtype)
    assert in_full(values) is values


@pytest.mark.parametrize("term", [Margins(0.9, 0.2), RecallAtK(temperature=1e-3), SigmoidPairs()], ids=type)
@pytest.mark.parametrize("network", [torch.bfloat16, torch.float16])
def test_a_loss_under_autocast_is_that_of_the_rounded_embeddings(term: Any, network: torch.dtype) -> None:
    batch, loss = batch_of([0, 1, 0, 2, 1, 0], 4, dimensions=16), PairLoss(term)
    halves = batch.embeddings.to(network)
    full = halves.float().requires_grad_()
    plain = loss(full, batch.labels)
    plain.backward()
    with torch.autocast("cpu", network):
        mixed = loss(halves.requires_grad_(), batch.labels)
    mixed.backward()
    assert mixed.dtype == torch.float32
    assert mixed == plain
    assert full.grad is not None
    assert halves.grad is not None
    torch.testing.assert_close(halves.grad, full.grad.to(network))


@pytest.mark.parametrize("term", [Margins(0.9, 0.2), RecallAtK(), SigmoidPairs()], ids=type)
def test_float64_stays_float64_under_autocast(term: Any) -> None:
    batch = batch_of([0, 1, 0], 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = PairLoss(term)(batch.embeddings, batch.labels)
    assert loss.dtype == torch.float64
