"""Losses compared on the same features: each with several seeds and batch sizes, judged in several ways."""

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks import heads, judging
from benchmarks.bars import Figures, at_least, at_most
from benchmarks.heads import Course, Drawn
from roadmatch.scoring import Vector
from training.judging.figures import NORMALISED

PROTOCOLS = {"across vendors": True, "all pairs": False}
SCORES = {"similarity": None, "normalised": NORMALISED}
COURSES = {
    "128": Course(128, steps=200, learning_rate=2e-4),
    "512": Course(512, steps=200, learning_rate=2e-4),
    "all": Course(None, steps=60, learning_rate=5e-4),
    "128, ten times the rate": Course(128, steps=200, learning_rate=2e-3),
}
"""Rates had the highest gAP on the validation classes, Smooth-AP and gSAP taken together, out of 2e-4, 5e-4 and 1e-3.
With all images in a batch steps are fewer, for time, and larger. At the last one heads learn the training classes by
heart; it shows what a loss makes of that.
"""
SEEDS = (0, 1, 2)
GAIN, SAME = 0.04, 0.01
_FROZEN = "frozen"


@dataclass(frozen=True)
class Run:
    """One head."""

    loss: str
    batch: str
    seed: int


@dataclass(frozen=True)
class Effort:
    """What is compared; no folder: on made-up features."""

    folder: Path | None
    courses: dict[str, Course]
    losses: tuple[str, ...] = tuple(heads.LOSSES)
    seeds: tuple[int, ...] = SEEDS


QUICK = Effort(
    None,
    {"32": Course(32, 4, 5e-4), "all": Course(None, 2, 5e-4)},
    losses=("smooth_ap", "gsap", "info_nce"),
    seeds=(0, 1),
)


def compare(effort: Effort) -> Figures:
    """The bars, mean and spread of every figure, and how long it took."""
    started = time.time()
    if effort.folder:
        heads.drawn(effort.folder)  # which stores the features: once, and not in every process
    runs = [Run(*each) for each in product(effort.losses, effort.courses, effort.seeds)]
    runs.sort(key=lambda run: effort.courses[run.batch].batch or sys.maxsize, reverse=True)  # the longest first
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context, _begin, (effort,)) as processes:
        judged = dict(zip(runs, processes.map(_judged, runs), strict=True))
        frozen = processes.submit(_judged, Run(_FROZEN, "", 0)).result()
    table = {
        batch: {loss: summary([judged[Run(loss, batch, seed)] for seed in effort.seeds]) for loss in effort.losses}
        for batch in effort.courses
    }
    return {
        "bars": [bar for batch, by_loss in table.items() for bar in _bars(batch, by_loss)],
        "data": _DATA if effort.folder else "made up",
        "figures": "mean and standard deviation over the seeds; thresholds are fitted on the validation classes",
        "seeds": len(effort.seeds),
        "courses": {batch: vars(course) for batch, course in effort.courses.items()},
        "frozen": summary([frozen]),
        "batches": table,
        "seconds": round(time.time() - started),
    }


_DATA = (
    f"drawings of objects by six vendors; linear heads to {heads.DIMENSION} dimensions on frozen EfficientNet-Lite0 "
    f"features at {heads.SIZE} px; half of the classes train, a quarter each validates and tests"
)


def summary(judged: Sequence[dict[str, dict[str, judging.Figures]]]) -> Figures:
    """Figures of each seed -> protocol, score and figure: [mean, standard deviation] of the seeds that have it."""
    return {
        protocol: {score: _means([one[protocol][score] for one in judged]) for score in SCORES}
        for protocol in PROTOCOLS
    }


def _means(figures: Sequence[judging.Figures]) -> dict[str, list[float]]:
    values = {name: [one[name] for one in figures if name in one] for one in figures for name in one}
    return {name: [round(float(np.mean(each)), 4), round(float(np.std(each)), 4)] for name, each in values.items()}


def _bars(batch: str, by_loss: Figures) -> list[Figures]:
    """gSAP beside Smooth-AP: what one shared threshold gains, and what the ranking loses."""
    ours, theirs = (by_loss[loss]["across vendors"]["similarity"] for loss in ("gsap", "smooth_ap"))
    gain, less = ours["gAP"][0] - theirs["gAP"][0], abs(ours["mAP"][0] - theirs["mAP"][0])
    return [
        at_least(f"batch {batch}: gAP of gSAP - gAP of Smooth-AP, across vendors", gain, GAIN),
        at_most(f"batch {batch}: |mAP of gSAP - mAP of Smooth-AP|, across vendors", less, SAME),
    ]


def _begin(effort: Effort) -> None:
    """In each process: one thread, since the runs are many."""
    global _effort, _data
    torch.set_num_threads(1)
    _effort, _data = effort, heads.drawn(effort.folder) if effort.folder else heads.made_up()


def _judged(run: Run) -> dict[str, dict[str, judging.Figures]]:
    print(f"{time.strftime('%H:%M:%S')} {run.loss} {run.batch} {run.seed}", file=sys.stderr, flush=True)
    if run.loss == _FROZEN:
        return judgement(_data, heads.frozen(_data))
    return judgement(_data, heads.trained(_data, run.loss, _effort.courses[run.batch], run.seed))


def judgement(data: Drawn, vectors: Vector) -> dict[str, dict[str, judging.Figures]]:
    """vectors (N, D) of all drawings -> protocol, score: figures of the test classes."""
    validation, test = (
        judging.Images.of(vectors, data.labels, data.vendors, which, data.background, NORMALISED)
        for which in (data.validation, data.test)
    )
    return {
        protocol: {
            score: judging.judged(test.pairs(rule, across=across), validation.pairs(rule, across=across))
            for score, rule in SCORES.items()
        }
        for protocol, across in PROTOCOLS.items()
    }


_effort: Effort
_data: Drawn
