"""A trained run as a bundle: exported, proven to say what torch says, calibrated, with its report."""

import json
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
from pydantic import JsonValue

from roadmatch import bundle as bundles
from roadmatch.bundle import EMBEDDER, MODEL, Bundle
from roadmatch.embedding.network import Headed
from roadmatch.embedding.openvino_engine import OpenvinoEngine
from roadmatch.scoring import ScoreRule
from training.data.loading import Pictures
from training.data.manifest import Split
from training.fitting.run_folder import RunError
from training.judging.evaluate import evaluation_of
from training.judging.points import calibrated_of, provenance
from training.judging.report import page
from training.judging.trained import Trained, trained
from training.network.build import circumstances
from training.network.export import PARITY, check_parity, sample_pictures, to_onnx
from training.network.trainable import stored

__all__ = ["RunError", "Trained", "export", "trained"]

REAL, SYNTHETIC = 16, 8
"""Pictures on which torch and the exported graph are compared."""
HTML, JSON = "report.html", "report.json"


def export(run: Path, out: Path, *, pictures: bool = True, calibrated: bool = True) -> Bundle:
    """The bundle at `out`, which may be a bundle already; what has not been evaluated or calibrated is so now.

    pictures: show small test images in report.html, which everybody who gets the bundle can see. calibrated: False
    for a bundle without operating points, where there are too few classes for them. Raises RoadmatchError and
    FileExistsError; `out` is as before then.
    """
    bundles.check_free(out)
    mine = trained(run)
    points = calibrated_of(mine) if calibrated else None
    evaluation = evaluation_of(mine)
    with tempfile.TemporaryDirectory() as temporary:
        draft = _draft(mine, Path(temporary) / "draft")
        if points is None:
            shown = page(mine, evaluation, None, pictures=pictures)
            return bundles.fitted(draft, out, reports=_reports(shown, evaluation))
        model = bundles.model_of(draft, points.score, points.background)
        return bundles.fitted(
            draft,
            out,
            score=points.score,
            background=points.background,
            operating_points=points.points.model_copy(update={"model": model}),
            provenance={"calibration": provenance(points)},
            reports=_reports(page(mine, evaluation, points, pictures=pictures), evaluation),
        )


def _draft(mine: Trained, folder: Path) -> Bundle:
    """The bundle with plain similarity as its score and nothing promised."""
    rule, recipe = mine.preprocessing, mine.recipe
    onnx_bytes = to_onnx(mine.network, rule.size)
    engine = OpenvinoEngine(onnx_bytes)
    return bundles.write(
        folder,
        name=recipe.name,
        architecture=recipe.network.architecture,
        preprocessing=rule,
        mean=mine.opened.mean,
        std=mine.opened.std,
        dimension=engine.dimension,
        score=ScoreRule(),
        licence=recipe.network.licence,
        provenance={**mine.provenance, "parity": parity(mine, engine), **circumstances()},
        files={EMBEDDER: onnx_bytes, MODEL: safetensors.torch.save(stored(mine.network))},
        background=np.zeros((0, engine.dimension), np.float32),
        head=recipe.network.head if isinstance(mine.network.backbone, Headed) else None,
    )


def parity(mine: Trained, engine: OpenvinoEngine) -> dict[str, JsonValue]:
    """The largest difference of an embedding's number between torch and the graph, on test images and synthetic ones.

    Raises ParityError above PARITY, DataError for an image that cannot be read.
    """
    manifest, rule = mine.manifest, mine.preprocessing
    numbers = np.flatnonzero(manifest.of(Split.TEST))
    some = np.sort(np.random.default_rng(mine.recipe.seed).permutation(numbers)[:REAL])
    images = Pictures(manifest, augment=None, preprocessing=rule, seed=0, threads=mine.recipe.data.threads)
    with images.batches([some], epoch=0) as loaded:
        real = [pixels for batch in loaded for pixels in batch.numpy()]
    return {
        "allowed": PARITY,
        "test_images": len(real),
        "on_test_images": check_parity(mine.network, engine, real),
        "synthetic": SYNTHETIC,
        "on_synthetic": check_parity(mine.network, engine, sample_pictures(rule.size, SYNTHETIC)),
    }


def _reports(shown: bytes, evaluation: dict[str, JsonValue]) -> dict[str, bytes]:
    # Its examples name files, which are nobody's business where report.html does not show them.
    content = {name: value for name, value in evaluation.items() if name not in ("false_matches", "missed_matches")}
    return {HTML: shown, JSON: (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()}
