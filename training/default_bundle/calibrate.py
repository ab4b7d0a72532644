"""Fit the score and the operating points of a bundle on photographs and their edited copies."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import JsonValue

from roadmatch.bundle import Bundle, fitted, model_of
from roadmatch.calibration import Calibration, Searches, calibrate, choose_score
from roadmatch.calibration.rules import other_scores
from roadmatch.calibration.searches import Scored, Similarities
from roadmatch.embedding import Encoder
from roadmatch.operating_points import OperatingPoints
from roadmatch.scoring import ScoreRule, Vector
from training.default_bundle.copies import EDITS, FITTING, SHIFTED, Strength, copies
from training.default_bundle.photographs import SELECTION, Photograph, upright

BACKGROUND_PICTURES = 120
SEED = 20261129
HOW = Calibration(seed=SEED)
WHAT = "edited copies of photographs"


@dataclass(frozen=True)
class Embedded:
    """Photographs and their copies as a bundle sees them: M pictures, E edits.

    Rounded to half precision and brought back to unit length, so that what is fitted is exactly what is stored.
    """

    pictures: Vector  # (M, D)
    copies: Vector  # (M, E, D)
    shifted: Vector | None  # (M, E, D), copies of other strengths; not stored

    def save(self, path: Path) -> None:
        """The pictures and copies; the shifted ones are as many again and only reported."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"pictures": self.pictures.astype(np.float16), "copies": self.copies.astype(np.float16)}
        path.write_bytes(safetensors.numpy.save(tensors))

    @staticmethod
    def load(path: Path) -> "Embedded":
        """What `save` wrote."""
        tensors = safetensors.numpy.load_file(path)
        return Embedded(as_stored(tensors["pictures"]), as_stored(tensors["copies"]), None)

    def searches(self, copies: Vector) -> Searches:
        """The copies as queries, the pictures as gallery, each picture a unit."""
        count, edits, dimension = copies.shape
        return Searches(
            WHAT, copies.reshape(-1, dimension), np.repeat(np.arange(count), edits), self.pictures, np.arange(count)
        )


def as_stored(vectors: NDArray[np.floating]) -> Vector:
    """(..., D) -> what is left of unit vectors after half precision, of unit length again."""
    rounded = vectors.astype(np.float16).astype(np.float32)
    return np.asarray(rounded / np.linalg.norm(rounded, axis=-1, keepdims=True), np.float32)


def split(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the photographs that are background, and of those that are calibrated on."""
    drawn = np.random.default_rng(SEED).permutation(count)
    return np.sort(drawn[:BACKGROUND_PICTURES]), np.sort(drawn[BACKGROUND_PICTURES:])


def embed(encoder: Encoder, photographs: Sequence[Photograph], workers: int) -> tuple[Vector, Embedded]:
    """photographs -> background (n, D) and the calibration pictures with copies at both strengths.

    Everything goes in as a file's bytes, the way the service gets it.
    """
    background, calibrated = split(len(photographs))

    def pictures(numbers: NDArray[np.int64]) -> Vector:
        return np.stack(list(pool.map(lambda n: encoder.encode(photographs[n].data).vector, numbers)))

    def edited(strength: Strength) -> Vector:
        def one(number: int) -> Vector:
            files = copies(upright(photographs[number].data), int(number), strength)
            return np.stack([encoder.encode(file).vector for file in files.values()])

        return np.stack(list(pool.map(one, calibrated)))

    with ThreadPoolExecutor(workers) as pool:
        return pictures(background), Embedded(
            as_stored(pictures(calibrated)), as_stored(edited(FITTING)), as_stored(edited(SHIFTED))
        )


def fit_bundle(bundle: Bundle, background: Vector, embedded: Embedded, folder: Path) -> Bundle:
    """The bundle with its score chosen and its points fitted, written to `folder`."""
    searches = embedded.searches(embedded.copies)
    score, recalls = choose_score(searches, background, HOW)
    points = calibrate(
        searches,
        background,
        score,
        model_of(bundle, score, background),
        HOW,
        None if embedded.shifted is None else embedded.searches(embedded.shifted),
    )
    return fitted(
        bundle,
        folder,
        score=score,
        background=background,
        operating_points=points,
        provenance={"calibration": provenance()},
        reports={"report.json": report(searches, background, score, recalls, points)},
    )


def provenance() -> dict[str, JsonValue]:
    """Where the evidence comes from, so that it can be made again."""
    return {
        "photographs": "Debian gcompris-qt-data and tuxpaint-stamps-default, the files of training/photographs.csv",
        "photographs_sha256": hashlib.sha256(SELECTION.read_bytes()).hexdigest(),
        "background_pictures": BACKGROUND_PICTURES,
        "seed": SEED,
        "folds": HOW.folds,
        "resamples": HOW.resamples,
        "edits": {name: list(value) for name, value in dataclasses.asdict(FITTING).items()},
        "shifted_edits": {name: list(value) for name, value in dataclasses.asdict(SHIFTED).items()},
    }


def report(
    searches: Searches, background: Vector, score: ScoreRule, recalls: dict[ScoreRule, float], points: OperatingPoints
) -> bytes:
    """report.json: the recall of each score tried, and the figures by which models are compared."""
    similarities = Similarities.of(searches, background, [score.k])
    content = {
        "scores_tried": [
            {**dataclasses.asdict(rule), "cross_fitted_recall": round(recall, 4)} for rule, recall in recalls.items()
        ],
        "default_rule": points.default_rule,
        "similarity": figures(similarities.scored(ScoreRule())),
        "score": figures(similarities.scored(score)),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def figures(scored: Scored) -> dict[str, float | dict[str, float]]:
    """Ranking and the one threshold at precision 0.9 with as many searches that have no match, all units together.

    The threshold is chosen on the same searches: a figure to compare models by, no promise.
    """
    best = scored.scores.max(axis=1)
    right = scored.gallery_unit[scored.scores.argmax(axis=1)] == scored.query_unit
    without = np.sort(other_scores(scored))
    order = np.argsort(-best, kind="stable")
    hits = np.cumsum(right[order])
    false = len(without) - np.searchsorted(without, best[order], side="left")
    precise = np.flatnonzero(hits / (np.arange(1, len(order) + 1) + false) >= 0.9)
    last = int(precise[-1]) if len(precise) else None
    by_edit = right.reshape(-1, len(EDITS)).mean(axis=0)
    return {
        "pictures": scored.units,
        "recall_at_1": round(float(right.mean()), 4),
        "recall_at_1_by_edit": {name: round(float(share), 4) for name, share in zip(EDITS, by_edit, strict=True)},
        "recall_at_precision_90": 0.0 if last is None else round(float(hits[last] / len(order)), 4),
        "false_matches_there": 0.0 if last is None else round(float(false[last] / len(order)), 4),
    }
