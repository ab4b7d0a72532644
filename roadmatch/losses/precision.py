"""Products of embeddings in full float32, whatever the training loop allows elsewhere."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


def in_full(tensor: Tensor) -> Tensor:
    """Half precision as float32, for a temperature of 1e-3 is finer than its steps; float32 and float64 as they are."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Autocast and TF32 are off inside and as they were afterwards."""
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))
        for products in _PRODUCTS:
            stack.callback(setattr, products, "fp32_precision", _own(products.fp32_precision))
            products.fp32_precision = "ieee"
        yield


def _own(precision: str) -> str:
    """What is the same as the general setting was taken from it, and goes on following it."""
    return "none" if precision == torch.backends.fp32_precision else precision  # type: ignore[attr-defined]


def product(queries: Tensor, candidates: Tensor) -> Tensor:
    """queries (Q, D), candidates (N, D) -> (Q, N) similarities in full precision, backward too."""
    result: Tensor = _Product.apply(queries, candidates)
    return result


class _Product(torch.autograd.Function):
    """The backward pass of a plain product would run under whatever is set at that time."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, candidates: Tensor) -> Tensor:
        ctx.save_for_backward(queries, candidates)
        with full_precision(queries.device):
            return queries @ candidates.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        queries, candidates = ctx.saved_tensors
        needed = ctx.needs_input_grad
        with full_precision(queries.device):
            return gradient @ candidates if needed[0] else None, gradient.T @ queries if needed[1] else None
