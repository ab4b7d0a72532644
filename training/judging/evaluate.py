"""Figures of a run on its test split, before and after training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.data.manifest import Manifest, Split
from training.fitting.run_folder import RunError
from training.judging.embedded import AFTER, BEFORE, Embeddings
from training.judging.figures import DEFINITIONS, Judged, judged
from training.judging.held_out import background_numbers
from training.judging.task import Task
from training.judging.trained import Trained, keep, kept, trained
from training.recipe import Layout

FILE = "evaluation.json"
FORMAT = 1
KS: Mapping[Layout, tuple[int, ...]] = {
    Layout.SOP: (1, 10, 100, 1000),
    Layout.INATURALIST: (1, 4, 16, 32),
    Layout.CUB: (1, 2, 4, 8),
    Layout.CARS: (1, 2, 4, 8),
    Layout.IN_SHOP: (1, 10, 20, 30),
}
"""Those that are published for the data set."""
OTHER_KS = (1, 5, 10)
EXAMPLES = 8
EDGES: NDArray[np.float64] = np.linspace(-1, 1, 401)
"""Of the histograms of similarities."""


def evaluate(run: Path) -> dict[str, Any]:
    """Embeds the test split by serving's preprocessing, judges it, and keeps the answer as evaluation.json.

    `before` are the same figures of the pretrained backbone, with nothing behind its pooling. A figure that is
    undefined is in neither, and `undefined` says why. Memory is that of the embeddings. Raises RoadmatchError.
    """
    return evaluation_of(trained(run), anew=True)


def evaluation_of(trained: Trained, *, anew: bool = False) -> dict[str, Any]:
    """As evaluate; what is kept and up to date is taken as it is, unless `anew`."""
    before = None if anew else stored(trained)
    if before is not None:
        return before
    content = _evaluated(trained)
    keep(trained.run / FILE, content)
    return content


def stored(trained: Trained) -> dict[str, Any] | None:
    """What was kept for this very checkpoint and data; None if nothing."""
    return kept(trained.run / FILE, FORMAT, trained.stamp)


def _evaluated(trained: Trained) -> dict[str, Any]:
    manifest = trained.manifest
    if not len(manifest.queries(Split.TEST)) or not len(manifest.gallery(Split.TEST)):
        raise RunError(f"{trained.run} has no test images to search with and in: give data.test a share of the classes")
    models = {which: Embeddings(trained, which) for which in (BEFORE, AFTER)}
    tasks = {which: Task.of(embeddings, Split.TEST) for which, embeddings in models.items()}
    figures = {which: _judged(trained, models[which], task) for which, task in tasks.items()}
    undefined = {which: found.undefined for which, found in figures.items()}
    return {
        "format": FORMAT,
        "stamp": trained.stamp,
        "name": trained.recipe.name,
        "data": _counts(tasks[AFTER]),
        **{which: found.values for which, found in figures.items()},
        "undefined": undefined,
        "definitions": dict(DEFINITIONS),
        "similarities": {which: _histograms(task) for which, task in tasks.items()},
        **_examples(tasks[AFTER]),
    }


def _judged(trained: Trained, embeddings: Embeddings, task: Task) -> Judged:
    recipe = trained.recipe
    shown = frozenset(trained.manifest.labels[n] for n in task.gallery_numbers)
    background = embeddings.of(background_numbers(trained.manifest, shown))
    # Only there is the category the data set that an image comes from, each of which has its own threshold.
    many = recipe.data.layout is Layout.WILDLIFE
    data_set = np.array(trained.manifest.categories)[task.query_numbers] if many else None
    return judged(task, background, KS.get(recipe.data.layout, OTHER_KS), recipe.batch.size, data_set)


def _counts(task: Task) -> dict[str, Any]:
    shown = "the same images" if task.unimodal else "other images" if task.apart else "some of them the same images"
    return {
        "images": task.images,
        "searches": len(task.queries),
        "searches_without_match": int((~task.known).sum()),
        "gallery": len(task.gallery),
        "gallery_holds": shown,
        "classes": len(set(task.query_labels[task.query_labels >= 0].tolist())),
    }


def _histograms(task: Task) -> dict[str, list[int]]:
    """Numbers of matching and of non-matching pairs in each bin of EDGES."""
    counts = np.zeros((2, len(EDGES) - 1), np.int64)
    for rows in task.rows():
        for kind, which in enumerate((rows.relevant, ~rows.relevant)):
            values = np.clip(rows.scores[which & rows.counted], -1, 1)  # a product of unit vectors may be 1 + 1e-7
            counts[kind] += np.histogram(values, EDGES)[0]
    return {"matching": counts[0].tolist(), "non_matching": counts[1].tolist()}


def _examples(task: Task) -> dict[str, list[dict[str, Any]]]:
    """Searches with the likest image of another class, and searches with the unlikest best image of their own."""
    worst, missed = list[tuple[float, int, int]](), list[tuple[float, int, int]]()
    for rows in task.rows():
        for found, which in ((worst, ~rows.relevant), (missed, rows.relevant)):
            scores = np.where(which & rows.counted, rows.scores, -np.inf)
            at, best = scores.argmax(axis=1), scores.max(axis=1)
            there = np.isfinite(best)
            found += zip(best[there].tolist(), rows.numbers[there].tolist(), at[there].tolist(), strict=True)
        worst, missed = sorted(worst, reverse=True)[: 4 * EXAMPLES], sorted(missed)[:EXAMPLES]
    return {
        "false_matches": [_pair(task, *one) for one in _once(task, worst)[:EXAMPLES]],
        "missed_matches": [_pair(task, *one) for one in missed],
    }


def _once(task: Task, pairs: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Each two images once, where both of them ask."""
    seen: dict[frozenset[int], tuple[float, int, int]] = {}
    for pair in pairs:
        both = frozenset((int(task.query_numbers[pair[1]]), int(task.gallery_numbers[pair[2]])))
        seen.setdefault(both, pair)
    return list(seen.values())


def _pair(task: Task, similarity: float, query: int, image: int) -> dict[str, Any]:
    manifest: Manifest = task.manifest
    numbers = {"query": int(task.query_numbers[query]), "image": int(task.gallery_numbers[image])}
    shown = {name: {"path": manifest.paths[n], "label": manifest.labels[n]} for name, n in numbers.items()}
    return {"similarity": round(similarity, 4), **shown}
