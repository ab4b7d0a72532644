"""The ranking losses on a GPU: the same numbers as on the CPU, and what a step costs beside the similarity product.

`python -m benchmarks.gpu` prints one JSON object on stdout and takes less than five minutes. `--device cpu --quick`
runs all of it where there is no GPU, to see that it runs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.bars import Figures, at_most
from benchmarks.loss_cases import Batch, overlapping_batch
from roadmatch.losses.global_ap import global_sigmoid_ap
from roadmatch.losses.pairs import pairs_of_labels, pairs_of_similarity

_TEMPERATURES = (1e-3, 1e-4)
_DIMENSION = 512
Step = Callable[[], object]


def main() -> None:
    """Measure everything, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small batches")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use: run this where there is one, or give --device cpu --quick")
    sizes, same, turns = ((128, 256), 128, 1) if chosen.quick else ((4096, 16_384), 1000, 10)
    print(json.dumps(measure(torch.device(chosen.device), sizes, same, turns), indent=2))


def measure(device: torch.device, sizes: tuple[int, ...], same: int, turns: int) -> Figures:
    """sizes: of the batches that are timed. same: of that which is compared with the CPU."""
    agreement = {
        f"{temperature:g}": _agreement(overlapping_batch(same, _DIMENSION), device, temperature)
        for temperature in _TEMPERATURES
    }
    return {
        "bars": [
            at_most("loss: GPU - CPU", max(one["loss"] for one in agreement.values()), 1e-6),
            at_most("gradient: GPU - CPU, relative", max(one["gradient"] for one in agreement.values()), 1e-5),
        ],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "agreement": agreement,
        "steps": [_steps(size, device, temperature, turns) for size in sizes for temperature in _TEMPERATURES],
    }


def _agreement(batch: Batch, device: torch.device, temperature: float) -> Figures:
    """On the same similarities, and on the same embeddings, whose products may differ in their last bit."""
    similarity = batch.similarity
    on_cpu, on_device = (
        _value_and_gradient(
            lambda scores, at=at: global_sigmoid_ap(  # type: ignore[misc]
                pairs_of_similarity(scores, batch.relevant.to(at), batch.apart.to(at)), temperature
            ),
            similarity.to(at),
        )
        for at in (torch.device("cpu"), device)
    )
    fused = _value_and_gradient(
        lambda x: global_sigmoid_ap(pairs_of_labels(x, batch.labels.to(device)), temperature),
        batch.embeddings.to(device),
    )
    return {
        "loss": max(abs(on_device[0] - on_cpu[0]), abs(fused[0] - on_cpu[0])),
        "gradient": _relative(on_device[1], on_cpu[1]),
        "gradient_of_embeddings": _relative(fused[1], 2 * on_cpu[1].double() @ batch.embeddings.double()),
    }


def _value_and_gradient(loss: Callable[[torch.Tensor], torch.Tensor], of: torch.Tensor) -> tuple[float, torch.Tensor]:
    leaf = of.detach().clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad.cpu()


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def _steps(size: int, device: torch.device, temperature: float, turns: int) -> Figures:
    """Milliseconds and bytes of a step, forward and backward: of the product alone, of scores, of embeddings."""
    print(f"{time.strftime('%H:%M:%S')} {size} images, temperature {temperature:g}", file=sys.stderr, flush=True)
    batch = overlapping_batch(size, _DIMENSION)
    labels, x = batch.labels.to(device), batch.embeddings.to(device).requires_grad_()
    product, fused = _product(x), _fused(x, labels, temperature)
    figures = {"product": _cost(product, device, turns), "of_embeddings": _cost(fused, device, turns)}
    figures["of_scores"] = _cost(_of_scores(x.detach(), labels, temperature), device, turns)
    for form in ("of_embeddings", "of_scores"):
        figures[form]["time_by_product"] = figures[form]["ms"] / figures["product"]["ms"]
    return {"images": size, "temperature": temperature, **figures}


def _product(x: torch.Tensor) -> Step:
    gradient = torch.ones((len(x), len(x)), device=x.device)
    return lambda: torch.autograd.grad(x @ x.T, x, gradient)


def _fused(x: torch.Tensor, labels: torch.Tensor, temperature: float) -> Step:
    return lambda: torch.autograd.grad(global_sigmoid_ap(pairs_of_labels(x, labels), temperature), x)


def _of_scores(x: torch.Tensor, labels: torch.Tensor, temperature: float) -> Step:
    apart = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    scores = (x @ x.T).requires_grad_()
    pairs = pairs_of_similarity(scores, (labels[:, None] == labels) & apart, apart)
    return lambda: torch.autograd.grad(global_sigmoid_ap(pairs, temperature), scores)


def _cost(step: Step, device: torch.device, turns: int) -> Figures:
    """ms of the fastest turn; bytes at the highest beyond what was there before, None where they are not counted."""
    step()
    fastest, on_gpu = float("inf"), device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(turns):
        _wait(device)
        started = time.perf_counter()
        step()
        _wait(device)
        fastest = min(fastest, time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else None
    return {"ms": fastest * 1e3, "bytes": peak}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
