"""How well the tail that is fitted on a part of the photographs tells the rates that all of them show.

`python -m benchmarks.tail` prints one JSON object. From random parts of 60, 120 and 240 pictures it predicts how often
pairs of different pictures score as high as the 3 to 60 highest-scoring pairs of all the pictures do, by the form of
roadmatch.calibration.tail and by an exponential one, and divides by what was counted. A rate is what searches meet on
average, so a form is judged by its mean over the parts; single parts scatter widely: their quantiles stand beside it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roadmatch import bundle as bundles
from roadmatch.bundle import default_bundle_folder
from roadmatch.calibration.searches import Floats, Scored, Similarities
from roadmatch.calibration.tail import fit_tail
from roadmatch.scoring import ScoreRule
from training.default_bundle.calibrate import Embedded

Figures = dict[str, Any]
PHOTOGRAPHS = Path(__file__).parents[1] / "tests" / "data" / "photographs.safetensors"
PARTS = (60, 120, 240)
_BARS = (120, 240)
_WITHIN = (0.4, 1.6)
_LEFT = (3, 5, 8, 12, 20, 30, 45, 60)
"""Pairs of pictures that reach the scores that are asked for."""
_ANCHOR_PAIRS = 60
"""Where both forms begin: so many pairs of pictures reach it."""
_SEED = 1


@dataclass(frozen=True)
class Pairs:
    """Pairs of different pictures in a set of searches."""

    scores: Floats  # (P,) of every query with every image of another picture
    highest: Floats  # (P,) of every two pictures, descending

    @staticmethod
    def of(scored: Scored) -> "Pairs":
        different = scored.query_unit[:, None] != scored.gallery_unit
        best = np.full((scored.units, scored.units), -np.inf)
        np.maximum.at(best, (scored.query_unit[:, None], scored.gallery_unit[None, :]), scored.scores)
        one, other = np.triu_indices(scored.units, 1)
        return Pairs(scored.scores[different], -np.sort(-np.maximum(best[one, other], best[other, one])))

    def rate(self, score: float) -> float:
        """Share of the pairs that reach the score."""
        return float((self.scores >= score).mean())


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=40, help="random parts of each size")
    print(json.dumps(measure(parser.parse_args().draws), indent=2))


def measure(draws: int) -> Figures:
    """The bars are about the bundle's own score; plain similarity is reported beside it."""
    bundle = bundles.read(default_bundle_folder())
    embedded = Embedded.load(PHOTOGRAPHS)
    score = bundle.manifest.score
    similarities = Similarities.of(embedded.searches(embedded.copies), bundle.background, [score.k])
    by_rule = {
        name: _ratios(similarities.scored(rule), draws)
        for name, rule in {"score": score, "similarity": ScoreRule(k=score.k)}.items()
    }
    return {
        "bars": [
            {
                "name": f"mean rate predicted from {part} pictures / observed, median of the scores, {name}",
                "value": value,
                "bar": f"{_WITHIN[0]:g} to {_WITHIN[1]:g}",
                "holds": _WITHIN[0] <= value <= _WITHIN[1],
            }
            for name, parts in by_rule.items()
            for part in _BARS
            for value in [parts[str(part)]["power"]["mean_over_parts"]["median"]]
        ],
        "pictures": len(embedded.pictures),
        "draws": draws,
        "predicted_to_observed": by_rule,
    }


def _ratios(scored: Scored, draws: int) -> Figures:
    """For each size of part and each form, predicted / observed."""
    everything = Pairs.of(scored)
    asked = [float(everything.highest[left - 1]) for left in _LEFT]
    observed = np.array([everything.rate(score) for score in asked])
    rng = np.random.default_rng(_SEED)
    figures: Figures = {"scores": asked, "observed": [float(f"{rate:.3g}") for rate in observed]}
    for part in PARTS:
        predicted: dict[str, list[Floats]] = {"power": [], "exponential": []}
        for _ in range(draws):
            some = scored.only(np.sort(rng.choice(scored.units, part, replace=False)))
            predicted["power"].append(_by_power(some, asked))
            predicted["exponential"].append(_by_exponential(some, asked))
        figures[str(part)] = {form: _summary(np.array(rates) / observed) for form, rates in predicted.items()}
    return figures


def _by_power(part: Scored, asked: Sequence[float]) -> Floats:
    """Ours: a power of the way that is left to the highest possible score."""
    tail = fit_tail(part, np.ones((1, part.units)))
    return np.exp(np.interp(asked, tail.grid, np.log(tail.rate)))


def _by_exponential(part: Scored, asked: Sequence[float]) -> Floats:
    """An exponential decay from the same anchor, with the mean of what is above it."""
    pairs = Pairs.of(part)
    anchor = float(pairs.highest[_ANCHOR_PAIRS - 1])
    mean = float((pairs.scores[pairs.scores >= anchor] - anchor).mean())
    return pairs.rate(anchor) * np.exp(-np.maximum(np.array(asked) - anchor, 0) / mean)


def _summary(ratios: Floats) -> Figures:
    """ratios (draws, scores)."""
    means = ratios.mean(axis=0)
    return {
        "mean_over_parts": {"median": _round(np.median(means)), "by_pairs_left": _by_score(means)},
        "single_parts": {
            f"quantile_{share:g}_by_pairs_left": _by_score(np.quantile(ratios, share, axis=0))
            for share in (0.1, 0.5, 0.9)
        },
    }


def _by_score(ratios: Floats) -> dict[str, float]:
    return {str(left): _round(ratio) for left, ratio in zip(_LEFT, ratios, strict=True)}


def _round(ratio: float | np.floating) -> float:
    return round(float(ratio), 3)


if __name__ == "__main__":
    main()
