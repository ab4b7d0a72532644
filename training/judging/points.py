"""Operating points of a run from classes that had no part in training."""

import hashlib
import json
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from pydantic import JsonValue
from safetensors import SafetensorError

from roadmatch.calibration import Calibration, Searches, choose_score
from roadmatch.calibration import calibrate as fit_points
from roadmatch.calibration.fit import RULES, SCORES
from roadmatch.calibration.rules import Rule, false_match_rate
from roadmatch.operating_points import OperatingPoints
from roadmatch.scoring import ScoreRule, Vector
from training.data.splits import FEWEST
from training.fitting.run_folder import RunError, write
from training.judging.embedded import AFTER, Embeddings
from training.judging.held_out import BACKGROUND_IMAGES, HeldOut, background_numbers, held_out
from training.judging.trained import Trained, keep, kept, trained

FOLDER, FILE, BACKGROUND = "calibration", "calibration.json", "background.safetensors"
FORMAT = 2
_WIDER = (0.1, 0.2)
"""Rates for data sets that cannot show lesser ones."""
_TENSOR = "embeddings"


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A run's score and operating points; these name the checkpoint until a bundle's model takes its place."""

    score: ScoreRule
    background: Vector  # (n, D)
    points: OperatingPoints
    classes: int
    scores_tried: tuple[tuple[ScoreRule, float], ...]
    warnings: tuple[str, ...]


def calibrate(run: Path, how: Calibration | None = None) -> Calibrated:
    """Fits the score and the operating points, and keeps them in the run's folder. Raises RoadmatchError.

    The searches are those of the test classes. The validation classes would be as many again, but the best checkpoint
    was chosen on them: their figures are better than those of classes that nobody looked at. A class is the unit. One
    image of it is stored, as rates are stated for a gallery of so many images; the others ask, up to four of them. For
    the search without a match the class is held out. Images of no class, and of classes that store nothing, are
    distractors: they make thresholds stricter where they are mistaken more, and their rate is stated by itself.
    """
    return calibrated_of(trained(run), how, anew=True)


def calibrated_of(trained: Trained, how: Calibration | None = None, *, anew: bool = False) -> Calibrated:
    """As calibrate; what is kept and up to date is taken as it is, unless `anew`."""
    before = None if anew else stored(trained)
    if before is not None:
        return before
    found = _calibrated(trained, how or Calibration())
    _keep(trained, found)
    return found


def rules_for(classes: int) -> tuple[Rule, ...]:
    """The usual rules, and before them, where so few classes show none of their rates, wider ones that they do show."""
    if any(rule.false_match_rate and rule.least_rate(classes) is None for rule in RULES):
        return RULES
    return (*(rule for rule in map(false_match_rate, _WIDER) if rule.least_rate(classes) is None), *RULES)


def stored(trained: Trained) -> Calibrated | None:
    """What was kept for this very checkpoint and data; None if nothing."""
    folder = trained.run / FOLDER
    content = kept(folder / FILE, FORMAT, trained.stamp)
    try:
        raw = (folder / BACKGROUND).read_bytes()
        if content is None or hashlib.sha256(raw).hexdigest() != content["background_sha256"]:
            return None
        return Calibrated(
            ScoreRule(**content["score"]),
            safetensors.numpy.load(raw)[_TENSOR],
            OperatingPoints.model_validate_json(json.dumps(content["points"])),
            content["classes"],
            tuple((ScoreRule(**score), recall) for score, recall in content["scores_tried"]),
            tuple(content["warnings"]),
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def provenance(found: Calibrated) -> dict[str, JsonValue]:
    """What a bundle says of its calibration."""
    return {
        "classes": found.classes,
        "distractors": max((point.evidence.distractors for point in found.points.points if point.evidence), default=0),
        "background_images": len(found.background),
    }


def _calibrated(trained: Trained, how: Calibration) -> Calibrated:
    manifest = trained.manifest
    images = held_out(manifest, how.seed)
    if len(images.stored) < FEWEST:
        raise RunError(
            f"{trained.run} has {len(images.stored)} test classes of two images or more that were not trained on, and "
            f"{FEWEST} are needed to calibrate: raise data.test, or add classes"
        )
    classes = frozenset(manifest.labels[n] for n in images.stored)
    background = background_numbers(manifest, classes, how.seed)
    if not len(background):
        raise RunError(f"{trained.run} has no training images for the background: give it some with split train")
    embeddings = Embeddings(trained, AFTER)
    vectors = embeddings.of(background)
    searches = _searches(embeddings, images)
    rules = rules_for(len(classes))
    default = next(rule for rule in rules if rule.false_match_rate and rule.least_rate(len(classes)) is None)
    how = replace(how, rules=rules, default=default)
    score, recalls = choose_score(searches, vectors, how, [rule for rule in SCORES if rule.k <= len(vectors)])
    points = fit_points(searches, vectors, score, trained.model, how)
    warnings = _warnings(points, len(classes), len(vectors))
    return Calibrated(score, vectors, points, len(classes), tuple(recalls.items()), warnings)


def _searches(embeddings: Embeddings, images: HeldOut) -> Searches:
    classes = embeddings.trained.manifest.numbers
    return Searches(
        f"held-out classes of {embeddings.trained.recipe.name}, one image of each in the gallery",
        embeddings.of(images.asking),
        classes[images.asking],
        embeddings.of(images.stored),
        classes[images.stored],
        embeddings.of(images.distractors) if len(images.distractors) else None,
        classes[images.distractors],
    )


def _warnings(points: OperatingPoints, classes: int, background: int) -> tuple[str, ...]:
    lines = [
        f"{point.rule} cannot be shown by {classes} classes"
        + (f": {ceil(3 / point.stated_false_match_rate)} are needed" if point.stated_false_match_rate else "")
        for point in points.points
        if not point.supported
    ]
    if background < BACKGROUND_IMAGES[0]:
        lines.append(f"{background} background images are few: {BACKGROUND_IMAGES[0]} or more are usual")
    for point in points.points:
        alone = None if point.evidence is None else point.evidence.distractor_match_rate
        stated = point.stated_false_match_rate
        if alone is not None and alone.low is not None and stated is not None and alone.low > stated:
            lines.append(
                f"{point.rule} did not hold for distractors alone: {alone.value:.1%} of them were answered `match`"
            )
    return tuple(lines)


def _keep(trained: Trained, found: Calibrated) -> None:
    folder = trained.run / FOLDER
    raw = safetensors.numpy.save({_TENSOR: np.ascontiguousarray(found.background, np.float32)})
    write(folder / BACKGROUND, raw)
    content: dict[str, Any] = {
        "format": FORMAT,
        "stamp": trained.stamp,
        "background_sha256": hashlib.sha256(raw).hexdigest(),
        "score": vars(found.score),
        "classes": found.classes,
        "scores_tried": [[vars(score), round(float(recall), 6)] for score, recall in found.scores_tried],
        "warnings": list(found.warnings),
        "points": found.points.model_dump(mode="json"),
    }
    keep(folder / FILE, content)
