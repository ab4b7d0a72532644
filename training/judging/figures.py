"""The figures of a model on a split's searches, each with its definition, and the reason where it has no value."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roadmatch.metrics.ceiling import Blocks, ceiling_of
from roadmatch.metrics.decomposability import decomposability_gap
from roadmatch.metrics.global_ap import GlobalAP
from roadmatch.metrics.open_set import open_set
from roadmatch.metrics.opis import class_utilities, opis, opis_tail
from roadmatch.metrics.retrieval import RetrievalMetrics, matrix_retrieval_metrics, retrieval_metrics
from roadmatch.metrics.streaming import streaming_global_average_precision
from roadmatch.metrics.thresholds import SharedThreshold, shared_threshold, shared_threshold_of_matrix
from roadmatch.metrics.ties import Ties, precisions, tied_groups
from roadmatch.scoring import ScoreRule, Vector
from training.judging.task import Levels, Task

Figures = dict[str, float]

NORMALISED = ScoreRule(beta=0.5, gamma=0.5, k=30)
ASKED_IN_BATCHES = 100
_MOST_ON_DISK = 1 << 29  # pairs whose similarities are laid down in a file: 2.5 GB

DEFINITIONS: Mapping[str, str] = {
    "R@k": "share of the searches that have a match with one among their k best",
    "mAP": "mean over the searches of the average precision of their lists; equal scores count against us",
    "mAP@R": "the same over each list's R best, R being its number of matches (Musgrave et al., 2020)",
    "R-precision": "share of matches among each list's R best",
    "gAP": "average precision of all pairs in one list, searches without a match among them",
    "gAP-": "the same without the searches that have no match",
    "gAP drop": "the share of gAP- that searches without a match cost",
    "gAP SN": f"gAP of scores normalised by training images: beta = gamma = {NORMALISED.beta}, k = {NORMALISED.k}",
    "F1g": "mean F1 of the searches at one threshold for all, fitted on half of the classes, judged on the others",
    "F1q": "the same with the best threshold of each search, which nobody knows",
    "R@P90": "share of matching pairs found at the lowest threshold with precision 0.9 on the fitting half",
    "P at R@P90": "the precision reached there on the other half",
    "OPIS": "variance between classes of the utility of a shared threshold (Zhang et al., 2024); 0: all fare alike",
    "OPIS low": "least similarity of OPIS's range: a tenth of the non-matching pairs is above it",
    "OPIS high": "greatest similarity of that range: a hundredth of them is above it",
    "OPIS tail": "the same between the best and the worst tenth of the classes, in our reading",
    "C": "the highest gAP- that any shift of the lists against each other allows; 1 if all lists are perfect",
    "efficiency": "gAP- / C: what the scores lose because they are not comparable between searches",
    "AUROC": "a search with a match has a higher best score than one without",
    "TNR@95": "share of searches without a match refused where 95 % of those with one are accepted",
    "BAKS": "accepted with the right class there, mean over the known classes",
    "BAUS": "refused there, mean over the unknown classes",
    "decomposability gap": "how much better AP looks in batches of training's size than over the whole gallery, mean "
    f"of {ASKED_IN_BATCHES} searches (Ramzi et al., 2021, Eq. 6)",
    "decomposability bound": "what that can be at most where every batch is ranked perfectly (Eq. 8)",
}


@dataclass(frozen=True)
class Judged:
    """Figures by name, and why others have none."""

    values: Figures
    undefined: dict[str, str]


def judged(task: Task, background: Vector, ks: Sequence[int], batch: int, data_set: NDArray[np.str_] | None) -> Judged:
    """All figures. background (M, D) of training images; batch: images; data_set (Q,) for open-set figures, if any."""
    parts: list[tuple[tuple[str, ...], Callable[[], Figures]]] = [
        ((*(f"R@{k}" for k in ks), "mAP", "mAP@R", "R-precision"), lambda: _of_lists(task, ks)),
        (("gAP", "gAP-", "gAP drop"), lambda: _of_pairs(task)),
        (("gAP SN",), lambda: {"gAP SN": global_ap(task, Levels.of(task, background, NORMALISED)).gap}),
        (("F1g", "F1q", "R@P90", "P at R@P90"), lambda: _of_threshold(task)),
        (("OPIS", "OPIS low", "OPIS high", "OPIS tail"), lambda: _of_classes(task)),
        (("C", "efficiency"), lambda: _of_ceiling(task)),
        (("AUROC", "TNR@95", "BAKS", "BAUS"), lambda: _of_open_set(task, data_set)),
        (("decomposability gap", "decomposability bound"), lambda: _of_batches(task, batch)),
    ]
    values, undefined = Figures(), dict[str, str]()
    for names, part in parts:
        try:
            found = part()
        except ValueError as error:
            undefined |= dict.fromkeys(names, " ".join(str(error).split()))
            continue
        values |= {name: round(found[name], 6) for name in names if name in found}
        undefined |= {name: "no pair is accepted at precision 0.9" for name in names if name not in found}
    return Judged(values, undefined)


def list_metrics(task: Task, ks: Sequence[int]) -> RetrievalMetrics:
    """Metrics of each query's own list. ValueError where no query has a match."""
    if task.unimodal:
        return retrieval_metrics(task.queries, task.query_labels, ks=ks)
    if task.apart:
        return retrieval_metrics(task.queries, task.query_labels, task.gallery, task.gallery_labels, ks=ks)
    return list_metrics_in_rows(task, ks)


def list_metrics_in_rows(task: Task, ks: Sequence[int]) -> RetrievalMetrics:
    """The same where some queries are in the gallery and some are not."""
    asking = np.flatnonzero(task.known)
    if not len(asking):
        raise ValueError("undefined without a positive: no query has one")
    parts = [matrix_retrieval_metrics(rows.scores, rows.relevant, rows.counted, ks=ks) for rows in task.rows(asking)]
    share = np.array([part.queries for part in parts]) / len(asking)

    def mean(of: Callable[[RetrievalMetrics], float]) -> float:
        return float(share @ [of(part) for part in parts])

    return RetrievalMetrics(
        {k: mean(lambda part, k=k: part.recall_at[k]) for k in ks},  # type: ignore[misc]  # mypy cannot infer a default
        mean(lambda part: part.r_precision),
        mean(lambda part: part.mean_average_precision),
        mean(lambda part: part.mean_average_precision_at_r),
        len(asking),
        len(task.queries) - len(asking),
    )


def global_ap(task: Task, levels: Levels | None = None) -> GlobalAP:
    """Exact gAP of all pairs, of scores where levels are given. ValueError without a matching pair."""
    if levels is None and task.unimodal:
        return streaming_global_average_precision(task.queries, task.query_labels)
    if levels is None and task.apart:
        return streaming_global_average_precision(task.queries, task.query_labels, task.gallery, task.gallery_labels)
    return global_ap_in_rows(task, levels)


def global_ap_in_rows(task: Task, levels: Levels | None = None) -> GlobalAP:
    """The same for scores that are no inner product, and where some queries are in the gallery and some are not."""
    found = [rows.scores[rows.relevant & rows.counted] for rows in task.rows(levels=levels)]
    distinct, counts = np.unique(np.concatenate(found), return_counts=True)
    if not len(distinct):
        raise ValueError("gAP is undefined without a positive pair")
    known, negatives = task.known, 0
    sums = {some: np.zeros((2, len(distinct)), np.int64) for some in (True, False)}
    for rows in task.rows(levels=levels):
        others = rows.counted & ~rows.relevant
        negatives += int(others.sum())
        for some, sum_ in sums.items():
            values = np.sort(rows.scores[known[rows.numbers] == some][others[known[rows.numbers] == some]])
            sum_ += len(values) - np.stack([np.searchsorted(values, distinct, side) for side in ("right", "left")])
    without = sums[True]
    everything, alone = (
        float(precisions(tied_groups(counts[::-1], *each[:, ::-1]), Ties.PESSIMISTIC).sum() / counts.sum())
        for each in (without + sums[False], without)
    )
    return GlobalAP(everything, alone, len(known), int((~known).sum()), int(counts.sum()), negatives)


def _of_lists(task: Task, ks: Sequence[int]) -> Figures:
    metrics = list_metrics(task, ks)
    return {f"R@{k}": share for k, share in metrics.recall_at.items()} | {
        "mAP": metrics.mean_average_precision,
        "mAP@R": metrics.mean_average_precision_at_r,
        "R-precision": metrics.r_precision,
    }


def _of_pairs(task: Task) -> Figures:
    found = global_ap(task)
    return {"gAP": found.gap, "gAP-": found.gap_without_distractors, "gAP drop": found.relative_drop}


def _of_threshold(task: Task) -> Figures:
    found = shared_threshold(task.queries, task.query_labels) if task.unimodal else _shared_threshold_on_disk(task)
    figures = {"F1g": found.f1g, "F1q": found.f1q, "R@P90": found.recall_at_precision}
    return figures if found.precision_reached is None else figures | {"P at R@P90": found.precision_reached}


def _shared_threshold_on_disk(task: Task) -> SharedThreshold:
    """Through a file of all similarities: memory is that of the rows that are looked at."""
    shape = len(task.queries), len(task.gallery) + 1
    if shape[0] * shape[1] > _MOST_ON_DISK:
        raise ValueError(f"{shape[0]} searches in {shape[1] - 1} images are more pairs than are laid down in a file")
    with tempfile.TemporaryDirectory() as folder:
        scores = np.memmap(Path(folder) / "scores", np.float32, "w+", shape=shape)
        relevant = np.memmap(Path(folder) / "relevant", np.bool_, "w+", shape=shape)
        for rows in task.rows():
            scores[rows.numbers], relevant[rows.numbers] = rows.scores, rows.relevant
        return shared_threshold_of_matrix(scores, relevant, task.query_labels, own=task.own)


def _of_classes(task: Task) -> Figures:
    utilities = class_utilities(*task.labelled())
    found = opis(utilities)
    return {
        "OPIS": found.value,
        "OPIS low": found.low,
        "OPIS high": found.high,
        "OPIS tail": opis_tail(utilities).value,
    }


def _of_ceiling(task: Task) -> Figures:
    parts, queries = [], []
    for rows in task.rows(np.flatnonzero(task.known)):
        rows.scores[:, -1] = -2  # below all others: what follows the last match costs nothing
        parts.append(Blocks.of(rows.scores, rows.relevant, rows.own))
        queries.append(len(rows.numbers))
    found = ceiling_of(Blocks.joined(parts, queries))
    gap = global_ap(task).gap_without_distractors
    return {"C": found.above(gap), "efficiency": found.efficiency(gap)}


def _of_open_set(task: Task, data_set: NDArray[np.str_] | None) -> Figures:
    best, predicted = np.empty(len(task.queries)), np.empty(len(task.queries), np.int64)
    labels = np.append(task.gallery_labels, 0)
    for rows in task.rows():
        scores = np.where(rows.counted, rows.scores, -np.inf)
        at = scores.argmax(axis=1)
        best[rows.numbers], predicted[rows.numbers] = scores.max(axis=1), labels[at]
    found = open_set(best, predicted, task.query_labels, task.known, data_set).pooled
    return {"AUROC": found.auroc, "TNR@95": found.tnr, "BAKS": found.baks, "BAUS": found.baus}


def _of_batches(task: Task, batch: int) -> Figures:
    """A seeded sample of the searches, and one random order of the gallery for all of them."""
    random = np.random.default_rng(0)
    asking = np.flatnonzero(task.known)
    asking = np.sort(random.permutation(asking)[:ASKED_IN_BATCHES])
    order = random.permutation(len(task.gallery))
    gaps = []
    for rows in task.rows(asking):
        counted = rows.counted
        for row in range(len(rows.numbers)):
            some = order[counted[row, order]]
            gaps.append(decomposability_gap(rows.scores[row, some], rows.relevant[row, some], batch))
    if not gaps:
        raise ValueError("undefined without a positive: no query has one")
    mean = np.mean([(gap.measured, gap.bound) for gap in gaps], axis=0).tolist()
    return {"decomposability gap": mean[0], "decomposability bound": mean[1]}
