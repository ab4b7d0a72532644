"""How exact the shared-threshold metrics are, and what they cost beside the products they need.

`python -m benchmarks.metrics` prints one JSON object on stdout; what it does at the moment goes to stderr. Each part
runs in a process of its own with one BLAS thread. Times are CPU time; the sides take turns, and the fastest turns are
compared.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bars import Figures, at_least, at_most
from roadmatch.metrics.ceiling import Ceiling, ceiling
from roadmatch.metrics.estimate import estimated_global_average_precision
from roadmatch.metrics.global_ap import global_average_precision
from roadmatch.metrics.ordered_pairs import OrderedPairs, ordered_pairs
from roadmatch.metrics.streaming import BLOCK, streaming_global_average_precision
from roadmatch.metrics.ties import Counts, Scores, Ties
from tests.metric_oracles import best_interleaving

ROOT = Path(__file__).parents[1]
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_DIMENSION = 512
_CLASSES_PER_SUPER_CLASS = 16
_ROUNDING = 1e-12
_MEANING = {
    "work_beside": "(time of the whole metric - time of each of its blocks once) / time of the products of all pairs",
    "total": "time of the whole metric, products included, / time of the products of all pairs",
    "the products of all pairs": "as one matrix product or in the metric's blocks, whichever is faster",
    "one_set": "the queries are the gallery: each unordered pair is computed once, so a total can be below 1",
}


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    agreement_items: int = 1200
    instances: int = 400
    memory_items: int = 20_000
    speed_items: int = 8192
    rounds: int = 5


QUICK = Effort(agreement_items=200, instances=20, memory_items=1500, speed_items=1024, rounds=1)


def main() -> None:
    """Measure everything, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="little of everything: to see that it runs, not how fast")
    parser.add_argument("--part", choices=PARTS, help="one part alone, in this process")
    chosen = parser.parse_args()
    effort = QUICK if chosen.quick else Effort()
    figures = PARTS[chosen.part](effort) if chosen.part else measure(effort, quick=chosen.quick)
    print(json.dumps(figures, indent=2))


def measure(effort: Effort, *, quick: bool) -> Figures:
    """All bars, and the figures behind them."""
    parts = {part: _in_a_child(part, quick) for part in PARTS}
    bound, speed = parts["ceiling"], parts["speed"]["query_x_gallery"]
    peak = max(parts[part]["peak_gib"] for part in ("memory_one_set", "memory_query_x_gallery"))
    size = f"{effort.memory_items:,} x {effort.memory_items:,}"
    return {
        "bars": [
            *(at_most(f"|gAP - scikit-learn|, {name}", gap, _ROUNDING) for name, gap in parts["agreement"].items()),
            at_least("ceiling equal to exhaustive search, share of instances", bound["equal_share"], 0.95),
            at_least("ceiling <= exhaustive search <= its bound, share of instances", bound["bounded_share"], 1),
            at_most(f"exact streaming gAP of {size}, peak of the whole process, GiB", peak, 1.5),
            at_most("bounded estimate, work beside the score product / product", speed["estimate"]["work_beside"], 0.5),
            at_most("exact streaming gAP, total / score product", speed["exact"]["total"], 2.5),
        ],
        "meaning": _MEANING,
        "effort": asdict(effort),
        **parts,
    }


def _in_a_child(part: str, quick: bool) -> Figures:
    """BLAS reads its number of threads when it is loaded; and a process's peak of memory stays with it."""
    print(f"measuring {part}", file=sys.stderr)
    command = [sys.executable, "-m", "benchmarks.metrics", "--part", part, *(["--quick"] if quick else [])]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | _ONE_THREAD, stdout=subprocess.PIPE, check=True)
    figures: Figures = json.loads(done.stdout)
    return figures


def overlapping(items: int, per_class: int, seed: int) -> tuple[Scores, Counts]:
    """Unit embeddings (items, D) float32 and labels: super-class centre + class centre + noise of varying strength.

    Pairs of one class have similarity 0.61 +- 0.11, of one super-class 0.5, others 0: positives lie among negatives.
    """
    rng = np.random.default_rng(seed)
    labels = np.arange(items) // per_class
    vectors = rng.standard_normal((items, _DIMENSION), dtype=np.float32)
    vectors *= np.float32(0.95) * np.exp(np.float32(0.35) * rng.standard_normal((items, 1), dtype=np.float32))
    for weight, group in ((1.14, labels // _CLASSES_PER_SUPER_CLASS), (0.55, labels)):
        centres = np.float32(weight) * rng.standard_normal((int(group[-1]) + 1, _DIMENSION), dtype=np.float32)
        for start in range(0, items, BLOCK):
            vectors[start : start + BLOCK] += centres[group[start : start + BLOCK]]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors, labels


def _queries_and_gallery(items: int) -> tuple[Scores, Counts, Scores, Counts]:
    """So many of each, four of each class."""
    vectors, labels = overlapping(2 * items, 8, seed=4)
    return vectors[::2].copy(), labels[::2], vectors[1::2].copy(), labels[1::2]


def _agreement(effort: Effort) -> Figures:
    """|ours - scikit-learn's| over all pairs, dense and streaming; scikit-learn groups ties.

    The streaming form gets embeddings in steps of 2**-11 (or 2**-5, for ties), whose float32 products are exact: both
    sides see the same scores, whatever blocks they are computed in.
    """
    from sklearn.metrics import average_precision_score

    vectors, labels = overlapping(effort.agreement_items, 4, seed=1)
    counted = ~np.eye(len(labels), dtype=np.bool_)
    relevance = labels[:, None] == labels
    figures = {}
    for name, step in (("without ties", 0.0), ("ties in steps of 0.01", 0.01), ("ties in steps of 1/256", 1 / 256)):
        similarity = vectors @ vectors.T
        similarity = np.round(similarity / step) * step if step else similarity
        theirs = average_precision_score(relevance[counted], similarity[counted])
        ours = global_average_precision(similarity, relevance, counted, Ties.GROUPED)
        figures[f"dense, {name}"] = abs(ours - theirs)
    for name, steps in (("hardly a tie", 2**11), ("with ties", 2**5)):
        coarse = np.round(vectors * steps) / np.float32(steps)
        theirs = average_precision_score(relevance[counted], (coarse @ coarse.T)[counted])
        streamed = streaming_global_average_precision(coarse, labels, ties=Ties.GROUPED, block=256)
        figures[f"streaming, {name}"] = abs(streamed.gap - theirs)
    return figures


def _ceiling(effort: Effort) -> Figures:
    """Ours beside the best of all interleavings of 2 to 4 random lists of 3 to 7 entries."""
    rng = np.random.default_rng(0)
    exact: list[float] = []
    ours: list[Ceiling] = []
    while len(exact) < effort.instances:
        shape = (int(rng.integers(2, 5)), int(rng.integers(3, 8)))
        similarity, relevant = rng.random(shape), rng.random(shape) < 0.35
        if relevant.any():
            exact.append(best_interleaving(similarity.tolist(), relevant.tolist()))
            ours.append(ceiling(similarity, relevant))
    missing = np.array(exact) - [one.value for one in ours]
    room = np.array([one.bound for one in ours]) - exact
    return {
        "instances": len(exact),
        "equal_share": float(np.mean(np.abs(missing) <= _ROUNDING)),
        "bounded_share": float(np.mean((missing >= -_ROUNDING) & (room >= -_ROUNDING))),
        "mean_missing": float(missing.mean()),
        "worst_missing": float(missing.max()),
    }


def _memory(effort: Effort, alone: bool) -> Figures:
    """Highest memory of this process, and how much higher than before the metric."""
    arguments = overlapping(effort.memory_items, 4, seed=2) if alone else _queries_and_gallery(effort.memory_items)
    before, started = _peak_gib(), time.process_time()
    result = streaming_global_average_precision(*arguments)
    return {
        "items": effort.memory_items,
        "pairs": result.positive_pairs + result.negative_pairs,
        "peak_gib": _peak_gib(),
        "above_the_peak_before_gib": _peak_gib() - before,
        "embeddings_gib": sum(each.nbytes for each in arguments[::2]) / 2**30,
        "cpu_s": time.process_time() - started,
        "gap": result.gap,
    }


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _speed(effort: Effort) -> Figures:
    """Both forms for as many queries as gallery images, and for one set of items."""
    return {
        "items": effort.speed_items,
        "query_x_gallery": _beside_products(_queries_and_gallery(effort.speed_items), effort.rounds),
        "one_set": _beside_products(overlapping(effort.speed_items, 4, seed=5), effort.rounds),
    }


def _beside_products(arguments: tuple[Any, ...], rounds: int) -> Figures:
    pairs = ordered_pairs(*arguments)
    whole = np.zeros((len(pairs.queries), len(pairs.gallery)), np.float32)
    gallery = pairs.gallery.copy()  # of one array with itself numpy would compute half
    best = _fastest(
        {
            "whole": lambda: np.matmul(pairs.queries, gallery.T, out=whole),
            "blocks": lambda: _all_blocks(pairs),
            "estimate": lambda: estimated_global_average_precision(*arguments),
            "exact": lambda: streaming_global_average_precision(*arguments),
        },
        rounds,
    )
    product = best["whole"] if pairs.unimodal else min(best["whole"], best["blocks"])
    exact, estimate = streaming_global_average_precision(*arguments).gap, estimated_global_average_precision(*arguments)
    figures: Figures = {
        form: {"work_beside": (best[form] - best["blocks"]) / product, "total": best[form] / product}
        for form in ("estimate", "exact")
    }
    bounds = (estimate.gap.lower, estimate.gap.estimate, estimate.gap.upper)
    return figures | {
        "ns_per_pair": {name: taken / whole.size * 1e9 for name, taken in best.items()},
        "gap": exact,
        "bounds_and_estimate_minus_gap": [each - exact for each in bounds],
    }


def _all_blocks(pairs: OrderedPairs) -> None:
    buffer = np.empty(BLOCK * BLOCK, np.float32)
    for phase in pairs.phases(BLOCK):
        for block in phase:
            pairs.scores(block, buffer)


def _fastest(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """CPU seconds of each side's best round."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, side in sides.items():
            started = time.process_time()
            side()
            best[name] = min(best[name], time.process_time() - started)
    return best


PARTS: dict[str, Callable[[Effort], Figures]] = {
    "agreement": _agreement,
    "ceiling": _ceiling,
    "memory_one_set": lambda effort: _memory(effort, alone=True),
    "memory_query_x_gallery": lambda effort: _memory(effort, alone=False),
    "speed": _speed,
}

if __name__ == "__main__":
    main()
