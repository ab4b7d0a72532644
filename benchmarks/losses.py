"""What the ranking losses cost and how exact they are, beside the same losses computed pair by pair.

`python -m benchmarks.losses` prints one JSON object on stdout; what it does at the moment goes to stderr. One thread;
the sides of a ratio take turns, and the fastest turns are compared, in CPU time. Memory is measured in processes of
their own: the highest that is used beyond the inputs.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.bars import Figures, at_least, at_most
from benchmarks.loss_cases import (
    Batch,
    dense_global_ap,
    exact_global_ap,
    nearly_solved_batch,
    overlapping_batch,
    random_batch,
)
from roadmatch.losses.global_ap import global_sigmoid_ap
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.pairs import pairs_of_labels, pairs_of_similarity
from roadmatch.losses.ready import smooth_ap, sup_ap
from tests.loss_oracles import published_smooth_ap, published_sup_ap

_TEMPERATURES = (5e-2, 1e-2, 1e-3, 1e-4)
_DIMENSION = 512
_TURN_S = 0.1
_WARM_UP = 1024


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    exact: tuple[int, ...] = (256, 1000)
    small: int = 1000
    large: int = 4096
    middle: int = 2048
    rows: int = 200
    huge: tuple[tuple[int, float], ...] = ((16_384, 0.4), (32_768, 1.7))
    turns: int = 5
    asked: int = 48


QUICK = Effort(exact=(64,), small=128, large=512, middle=256, rows=64, huge=((1024, 0.4),), turns=1, asked=8)


def main() -> None:
    """Measure everything, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="little of everything: to see that it runs, not how fast")
    parser.add_argument("--memory", nargs=3, metavar=("FORM", "SIZE", "DIMENSION"), help="one measurement of memory")
    parser.add_argument("--by-query", nargs=3, metavar=("LOSS", "SIZE", "TURNS"), help="one loss by query")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.memory:
        form, size, dimension = chosen.memory
        print(json.dumps(_memory_here(form, int(size), int(dimension))))
    elif chosen.by_query:
        name, size, turns = chosen.by_query
        print(json.dumps(_rows_here(name, int(size), int(turns))))
    else:
        print(json.dumps(measure(QUICK if chosen.quick else Effort()), indent=2))


def measure(effort: Effort) -> Figures:
    """All bars, and the figures behind them."""
    exactness, speed = _exactness(effort), _speed(effort)
    rows = {name: _apart("--by-query", name, effort.rows, effort.turns) for name in _BY_QUERY}
    memory = {
        form: _memory(form, effort.large, _DIMENSION)["beyond_inputs"] / (4 * effort.large**2)
        for form in ("scores", "fused")
    }
    huge = {str(size): _memory("fused", size, 128) for size, _ in effort.huge}
    near, rest = exactness["nearly solved"], [one for kind, one in exactness.items() if kind != "nearly solved"]
    return {
        "bars": [
            at_most("gSAP / exact: error of the loss", max(one["loss"] for one in rest), 1e-6),
            at_most("gSAP / exact: relative error of the gradient by scores", max(one["scores"] for one in rest), 1e-5),
            at_most(
                "gSAP / exact: relative error of the gradient by embeddings",
                max(one["embeddings"] for one in rest),
                1e-5,
            ),
            at_most("gSAP nearly solved / exact: relative error of the loss", near["relative_loss"], 1e-6),
            at_most(
                "gSAP nearly solved / exact: relative error of the gradients",
                max(near["scores"], near["embeddings"]),
                5e-5,
            ),
            at_least(f"gSAP B={effort.small}: pair by pair / ours, time", speed["dense"], 900),
            at_most(f"gSAP B={effort.large}, of scores / similarity product, time", speed["scores"], 0.55),
            at_most(f"gSAP B={effort.large}, of embeddings / similarity product, time", speed["fused"], 1.15),
            at_most(f"gSAP B={effort.large}, of scores: memory / matrix", memory["scores"], 1.1),
            at_most(f"gSAP B={effort.large}, of embeddings: memory / matrix", memory["fused"], 0.3),
            at_most(f"gSAP B={effort.middle}: 32 a class / 4 a class, time", speed["per_class"], 1.5),
            *(
                at_most(f"{name} / published arithmetic: error of the {what}", one[what], 1e-6)
                for name, one in rows.items()
                for what in ("loss", "gradient")
            ),
            at_least(f"SupAP B={effort.rows}: published arithmetic / ours, time", rows["SupAP"]["faster"], 200),
            at_least(f"Smooth-AP B={effort.rows}: published arithmetic / ours, time", rows["Smooth-AP"]["faster"], 70),
            *(
                at_most(
                    f"gSAP B={size}, D=128: GiB beyond the embeddings", huge[str(size)]["beyond_inputs"] / 2**30, limit
                )
                for size, limit in effort.huge
            ),
        ],
        "exactness": exactness,
        "speed": speed,
        "per_query": rows,
        "memory_by_matrix": memory,
        "huge": huge,
    }


def _exactness(effort: Effort) -> Figures:
    """The largest errors over sizes and temperatures, by kind of batch."""
    largest: Figures = {}
    kinds = {"random": random_batch, "overlapping": overlapping_batch}
    for temperature in _TEMPERATURES:
        for size in effort.exact:
            for kind, make in kinds.items():
                _note(largest, kind, _errors(make(size, _DIMENSION), temperature))
        if temperature < max(_TEMPERATURES):
            _note(largest, "nearly solved", _errors(nearly_solved_batch(256, _DIMENSION, temperature), temperature))
    return largest


def _errors(batch: Batch, temperature: float) -> dict[str, float]:
    """Of the form that takes scores, in float64 on the same float32 scores, and of that which takes embeddings."""
    _say(f"exactness: {len(batch.labels)} images, temperature {temperature:g}")
    scores = batch.similarity.requires_grad_()
    pairs = pairs_of_similarity(scores, batch.relevant, batch.apart)
    global_sigmoid_ap(pairs, temperature).backward()
    embeddings = batch.embeddings.clone().requires_grad_()
    of_embeddings = global_sigmoid_ap(pairs_of_labels(embeddings, batch.labels), temperature)
    of_embeddings.backward()
    exact, gradient = exact_global_ap(scores.detach(), batch.relevant, temperature)
    of_scores = global_sigmoid_ap(pairs_of_similarity(scores.detach(), batch.relevant, batch.apart), temperature)
    by_embedding = 2 * gradient @ batch.embeddings.double()
    loss = max(abs(one.item() - exact) for one in (of_scores, of_embeddings))
    return {
        "loss": loss,
        "relative_loss": loss / exact,
        "scores": _relative(scores.grad, gradient),
        "embeddings": _relative(embeddings.grad, by_embedding),
    }


def _speed(effort: Effort) -> Figures:
    """Ratios of the fastest turns, forward and backward."""
    small, large = (overlapping_batch(size, _DIMENSION) for size in (effort.small, effort.large))
    few, many = (overlapping_batch(effort.middle, _DIMENSION, per_class) for per_class in (4, 32))
    _say("speed: pair by pair")
    positives = int(small.relevant.sum())
    asked = min(effort.asked, positives)
    dense, ours = _turns(
        effort.turns,
        lambda: dense_global_ap(small.similarity, small.relevant, small.apart, 1e-3, asked),
        _of_scores(small),
    )
    _say("speed: products")
    product, scores, fused = _turns(effort.turns, _product(large), _of_scores(large), _of_embeddings(large))
    four, thirty_two = _turns(effort.turns, _of_scores(few), _of_scores(many))
    return {
        "dense": dense * positives / asked / ours,
        "dense_measured_on": f"{asked} of {positives} positives: the time is proportional to them",
        "scores": scores / product,
        "fused": fused / product,
        "per_class": thirty_two / four,
        "product_ns_a_pair": product / effort.large**2 * 1e9,
        "scores_ns_a_pair": scores / effort.large**2 * 1e9,
        "fused_ns_a_pair": fused / effort.large**2 * 1e9,
    }


def _product(batch: Batch) -> Callable[[], object]:
    """X @ X.T, forward and backward."""
    x, gradient = batch.embeddings.clone().requires_grad_(), torch.ones(len(batch.labels), len(batch.labels))

    def run() -> None:
        x.grad = None
        (x @ x.T).backward(gradient)

    return run


def _of_scores(batch: Batch) -> Callable[[], object]:
    scores = batch.similarity.requires_grad_()
    pairs = pairs_of_similarity(scores, batch.relevant, batch.apart)

    def run() -> None:
        scores.grad = None
        global_sigmoid_ap(pairs, 1e-3).backward()

    return run


def _of_embeddings(batch: Batch) -> Callable[[], object]:
    x = batch.embeddings.clone().requires_grad_()

    def run() -> None:
        x.grad = None
        global_sigmoid_ap(pairs_of_labels(x, batch.labels), 1e-3).backward()

    return run


_BY_QUERY: dict[str, tuple[Callable[[], PairLoss], Callable[[Tensor, Tensor], Tensor]]] = {
    "Smooth-AP": (partial(smooth_ap, published=True), published_smooth_ap),
    "SupAP": (partial(sup_ap, published=True), published_sup_ap),
}


def _rows_here(name: str, size: int, turns: int) -> Figures:
    """A loss by query beside the published code's arithmetic: the same values, and how many times faster."""
    make, published = _BY_QUERY[name]
    loss, batch = make(), overlapping_batch(size, _DIMENSION)
    relevant, similarity = batch.labels[:, None] == batch.labels, batch.similarity
    mine, mine_by_score = _value_and_gradient(lambda scores: loss.of_similarity(scores, relevant), similarity)
    exact, exact_by_score = _value_and_gradient(lambda scores: published(scores, relevant), similarity.double())
    slow, fast = _turns(
        turns,
        lambda: _value_and_gradient(lambda scores: published(scores, relevant), similarity),
        lambda: _value_and_gradient(lambda scores: loss.of_similarity(scores, relevant), similarity),
    )
    return {
        "loss": abs(mine - exact),
        "gradient": _relative(mine_by_score, exact_by_score),
        "faster": slow / fast,
        "published_ms": slow * 1e3,
        "ours_ms": fast * 1e3,
    }


def _value_and_gradient(loss: Callable[[Tensor], Tensor], scores: Tensor) -> tuple[float, Tensor]:
    scores = scores.detach().clone().requires_grad_()
    value = loss(scores)
    value.backward()
    assert scores.grad is not None
    return value.item(), scores.grad


def _turns(times: int, *forms: Callable[[], object]) -> list[float]:
    """Seconds of CPU of each form's fastest run; they take turns of a tenth of a second or one run."""
    fastest = [float("inf")] * len(forms)
    for form in forms:
        form()
    for _ in range(times):
        for number, form in enumerate(forms):
            end = time.process_time() + _TURN_S
            while True:
                started = time.process_time()
                form()
                now = time.process_time()
                fastest[number] = min(fastest[number], now - started)
                if now > end:
                    break
    return fastest


def _memory(form: str, size: int, dimension: int) -> Figures:
    """Measured where what is freed is given back at once, so that the highest is what is needed at a time."""
    _say(f"memory: {form}, {size} images")
    return _apart("--memory", form, size, dimension, MALLOC_MMAP_THRESHOLD_="65536")


def _apart(*asked: object, **environment: str) -> Figures:
    """Measured in a process of its own: what was done before changes how an allocator finds room, by a factor of 4."""
    command = [sys.executable, "-m", "benchmarks.losses", *map(str, asked)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
    figures: Figures = json.loads(done.stdout)
    return figures


def _memory_here(form: str, size: int, dimension: int) -> Figures:
    """Bytes beyond the inputs at the highest, with the gradient, and seconds of one step."""
    make = {"scores": _of_scores, "fused": _of_embeddings}[form]
    make(overlapping_batch(_WARM_UP, dimension))()  # what libraries take at their first call is not ours
    step = make(overlapping_batch(size, dimension))
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not there to be used again
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as peak:  # noqa: PTH123
        peak.write("5")  # the highest is counted from here
    started = time.perf_counter()
    step()
    return {"beyond_inputs": max(_resident("VmHWM") - before, 1), "seconds": time.perf_counter() - started}


def _resident(figure: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as status:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(figure))


def _note(largest: Figures, kind: str, errors: dict[str, float]) -> None:
    known: dict[str, Any] = largest.setdefault(kind, dict.fromkeys(errors, 0.0))
    known.update({name: max(known[name], value) for name, value in errors.items()})


def _relative(found: Tensor | None, exact: Tensor) -> float:
    assert found is not None
    return float((found.double() - exact).norm() / exact.norm())


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
