"""Evaluation: figures against dense ones, who asks and who answers, what is kept, and runs that are not whole."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from roadmatch.errors import RoadmatchError
from roadmatch.images import read_pixels
from roadmatch.metrics.global_ap import global_average_precision_with_distractors
from roadmatch.metrics.normalisation import background_levels, normalised
from roadmatch.metrics.retrieval import matrix_retrieval_metrics
from roadmatch.scoring import ScoreRule, Vector
from tests.tiny_run import DISTRACTORS, tiny_run, write_checkpoint
from training.data.manifest import DataError, Manifest, Row, Split, of_rows
from training.fitting import checkpoints, run_folder
from training.fitting.features import features_of
from training.fitting.run_folder import RunError
from training.judging import figures
from training.judging import task as tasks
from training.judging.embedded import AFTER, BEFORE, Embeddings
from training.judging.evaluate import EDGES, FILE, evaluate, stored
from training.judging.figures import global_ap, global_ap_in_rows, judged, list_metrics, list_metrics_in_rows
from training.judging.task import Levels, Task
from training.judging.trained import trained
from training.recipe import Mode

CLASSES = 12
RULE = ScoreRule(beta=0.4, gamma=0.3, k=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody changes."""
    return tiny_run(tmp_path_factory.mktemp("evaluate"), classes=CLASSES)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run to be spoilt."""
    return tiny_run(tmp_path, classes=3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every matrix is worked on in several blocks."""
    monkeypatch.setattr(tasks, "_PAIRS_AT_ONCE", 400)


def unit(count: int, seed: int) -> Vector:
    vectors = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def searches(asks: NDArray[np.bool_], answers: NDArray[np.bool_]) -> Task:
    """Sixty images of eight classes and four of none."""
    labels = [f"class {n % 8}" for n in range(56)] + [""] * 4
    rows = [Row(f"{n}.jpg", label, Split.TEST, bool(asks[n]), bool(answers[n])) for n, label in enumerate(labels)]
    manifest = of_rows(Path(), rows, str)
    vectors = unit(60, 3)
    vectors[:56] += 2 * unit(8, 4)[np.arange(56) % 8]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries, gallery = manifest.queries(Split.TEST), manifest.gallery(Split.TEST)
    return Task(manifest, queries, gallery, vectors[queries], vectors[gallery])


ALL, SOME, REST = np.ones(60, bool), np.arange(60) % 3 > 0, np.arange(60) % 3 == 0


@pytest.fixture(params=["all ask all", "others answer", "some ask all"])
def task(request: pytest.FixtureRequest) -> Task:
    return searches(
        *{"all ask all": (ALL, ALL), "others answer": (SOME, REST), "some ask all": (SOME, ALL)}[request.param]
    )


def dense(task: Task) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_]]:
    """Similarities, relevance and which pairs count, by the definition."""
    relevant = task.query_labels[:, None] == task.gallery_labels
    return task.queries @ task.gallery.T, relevant, task.query_numbers[:, None] != task.gallery_numbers


def test_lists_are_judged_as_a_whole_matrix_would_be(task: Task) -> None:
    similarity, relevant, counted = dense(task)
    expected = matrix_retrieval_metrics(similarity, relevant, counted, ks=(1, 5))
    for found in (list_metrics(task, (1, 5)), list_metrics_in_rows(task, (1, 5))):
        assert found.recall_at == pytest.approx(expected.recall_at)
        assert found.mean_average_precision == pytest.approx(expected.mean_average_precision, abs=1e-6)
        assert found.mean_average_precision_at_r == pytest.approx(expected.mean_average_precision_at_r, abs=1e-6)
        assert found.r_precision == pytest.approx(expected.r_precision)
        assert (found.queries, found.queries_without_positive) == (
            expected.queries,
            expected.queries_without_positive,
        )


def test_all_pairs_are_judged_as_a_whole_matrix_would_be(task: Task) -> None:
    coarse = dataclasses.replace(task, queries=np.round(2 * task.queries), gallery=np.round(2 * task.gallery))
    for each in (task, coarse):  # the second has many equal scores
        expected = global_average_precision_with_distractors(*dense(each))
        for found in (global_ap(each), global_ap_in_rows(each)):
            assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(expected), abs=1e-6)


def test_normalised_scores_are_judged_as_a_whole_matrix_would_be(task: Task) -> None:
    background = unit(20, 9)
    similarity, relevant, counted = dense(task)
    levels = [background_levels(vectors, background, RULE.k) for vectors in (task.queries, task.gallery)]
    expected = global_average_precision_with_distractors(
        normalised(similarity, levels[0], levels[1], RULE), relevant, counted
    )
    found = global_ap(task, Levels.of(task, background, RULE))
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(expected), abs=1e-5)


def test_every_figure_has_a_value_and_a_definition(task: Task) -> None:
    found = judged(task, unit(40, 9), (1, 5), 16, None)
    assert not found.undefined
    assert set(found.values) - {"R@1", "R@5"} == set(figures.DEFINITIONS) - {"R@k"}
    assert 0 < found.values["efficiency"] <= 1
    assert found.values["C"] >= found.values["gAP-"] >= found.values["gAP"]
    assert found.values["F1q"] >= found.values["F1g"]


def test_an_undefined_figure_has_a_reason_and_no_value() -> None:
    whole = searches(ALL, ALL)
    known = np.arange(56)
    task = Task(whole.manifest, known, known, whole.queries[:56], whole.gallery[:56])
    found = judged(task, unit(2, 9), (1,), 16, None)
    assert "known and unknown" in found.undefined["AUROC"]
    assert "fewer than k" in found.undefined["gAP SN"]
    assert not set(found.undefined) & set(found.values)
    assert found.values["gAP"] == found.values["gAP-"]


@pytest.fixture(scope="module")
def evaluated(run: Path) -> dict[str, object]:
    return evaluate(run)


def test_a_run_is_evaluated_before_and_after_and_the_answer_is_kept(run: Path, evaluated: dict[str, object]) -> None:
    kept = json.loads((run / FILE).read_text())
    assert kept == json.loads(json.dumps(evaluated)) == stored(trained(run))
    images = 3 * CLASSES + DISTRACTORS
    data = kept["data"]
    assert (data["searches"], data["gallery"], data["classes"]) == (images, images, CLASSES)
    assert data["searches_without_match"] == DISTRACTORS
    assert kept["before"]["gAP"] != kept["after"]["gAP"]
    for which in (BEFORE, AFTER):
        counts = kept["similarities"][which]
        assert sum(counts["matching"]) == CLASSES * 3 * 2
        assert sum(counts["matching"]) + sum(counts["non_matching"]) == images * (images - 1)
        assert len(counts["matching"]) == len(EDGES) - 1


def test_examples_are_the_likest_of_two_classes_and_the_unlikest_of_one(
    run: Path, evaluated: dict[str, object]
) -> None:
    pairs = json.loads((run / FILE).read_text())
    false, missed = pairs["false_matches"], pairs["missed_matches"]
    assert all(pair["query"]["label"] != pair["image"]["label"] or not pair["query"]["label"] for pair in false)
    assert all(pair["query"]["label"] == pair["image"]["label"] for pair in missed)
    assert [pair["similarity"] for pair in false] == sorted((pair["similarity"] for pair in false), reverse=True)
    assert [pair["similarity"] for pair in missed] == sorted(pair["similarity"] for pair in missed)
    both = [frozenset((pair["query"]["path"], pair["image"]["path"])) for pair in false]
    assert len(set(both)) == len(both)
    task = Task.of(Embeddings(trained(run), AFTER), Split.TEST)
    similarity, relevant, counted = dense(task)
    assert false[0]["similarity"] == pytest.approx(similarity[~relevant & counted].max(), abs=1e-4)


def test_embeddings_are_those_of_the_network_and_are_computed_once(small: Path) -> None:
    opened = trained(small)
    numbers = np.array([3, 0, 3])
    vectors = Embeddings(opened, AFTER).of(numbers)
    assert vectors.shape == (3, 32)
    np.testing.assert_array_equal(vectors[0], vectors[2])
    with torch.inference_mode():
        pixels, _ = read_pixels(opened.manifest.file(3).read_bytes(), opened.preprocessing)
        expected = opened.network(torch.from_numpy(pixels)[None])[0].numpy()
    np.testing.assert_allclose(vectors[0], expected, atol=1e-5)
    opened.manifest.file(3).unlink()
    np.testing.assert_array_equal(Embeddings(trained(small), AFTER).of(numbers), vectors)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        Embeddings(trained(small), BEFORE).of(numbers)


def test_embeddings_of_an_earlier_checkpoint_are_not_used_and_not_kept(small: Path) -> None:
    opened = trained(small)
    numbers = np.arange(4)
    old = Embeddings(opened, AFTER).of(numbers)
    write_checkpoint(small, opened.recipe, opened.state, seed=6)
    new = Embeddings(trained(small), AFTER).of(numbers)
    assert np.abs(old - new).max() > 0.01
    assert len(list((small / "embeddings").glob("after-*"))) == 1


def test_a_broken_file_of_embeddings_is_made_anew(small: Path) -> None:
    opened = trained(small)
    vectors = Embeddings(opened, AFTER).of(np.arange(4))
    (file,) = (small / "embeddings").glob("after-*/vectors.npy")
    file.write_bytes(file.read_bytes()[:200])
    np.testing.assert_array_equal(Embeddings(opened, AFTER).of(np.arange(4)), vectors)


def test_mode_linear_embeds_from_the_features_that_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = trained(tiny_run(tmp_path, mode=Mode.LINEAR, classes=3))
    numbers = np.arange(5)
    slowly = {which: Embeddings(opened, which).of(numbers) for which in (BEFORE, AFTER)}
    folder = opened.run.parent / "features"
    network, cpu = opened.recipe.network, torch.device("cpu")
    features_of(opened.opened, network, opened.manifest, folder, device=cpu, threads=2)
    monkeypatch.setattr("training.judging.embedded.FOLDER", "again")
    monkeypatch.setattr("training.judging.embedded.embedded", None)  # pictures are not looked at
    for which, vectors in slowly.items():
        np.testing.assert_allclose(Embeddings(opened, which).of(numbers), vectors, atol=1e-5)


def remove_checkpoint(run: Path) -> None:
    for file in (run / run_folder.BEST).iterdir():
        file.unlink()


def cut_checkpoint(run: Path) -> None:
    file = run / run_folder.BEST / checkpoints.MODEL
    file.write_bytes(file.read_bytes()[:-5])


def change_network(run: Path) -> None:
    text = (run / run_folder.RECIPE).read_text()
    (run / run_folder.RECIPE).write_text(re.sub("dimension: 32", "dimension: 16", text))


def lose_image(run: Path) -> None:
    (run.parent / "images/test/1-1.jpg").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run: (run / run_folder.RECIPE).unlink(), "recipe.yaml"),
        (lambda run: (run / run_folder.MANIFEST).unlink(), "manifest.parquet cannot be read"),
        (lambda run: (run.parent / "images").rename(run.parent / "elsewhere"), "are gone"),
        (remove_checkpoint, "has no checkpoint yet"),
        (cut_checkpoint, "model.safetensors cannot be read"),
        (change_network, "does not fit the recipe's test_efficientnet"),
        (lose_image, "1-1.jpg cannot be read"),
    ],
)
def test_a_run_that_is_not_whole_is_refused_in_one_line(small: Path, spoil: object, words: str) -> None:
    assert callable(spoil)
    spoil(small)
    with pytest.raises(RoadmatchError, match=re.escape(words)) as caught:
        evaluate(small)
    assert "\n" not in str(caught.value)
    assert not (small / FILE).exists()


def test_a_manifest_that_was_not_trained_on_is_refused(small: Path) -> None:
    opened = trained(small)
    state = dataclasses.replace(opened.state, data="0" * 64)
    write_checkpoint(small, opened.recipe, state)
    with pytest.raises(RunError, match="is not the one that"):
        trained(small)


def test_a_run_without_test_images_says_so(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, classes=3)
    opened = trained(run)
    manifest: Manifest = opened.manifest
    rows = [Row(path, label) for path, label in zip(manifest.paths, manifest.labels, strict=True)]
    listed = of_rows(manifest.root, rows, str)
    run_folder.begin(run, opened.recipe, listed)
    write_checkpoint(run, opened.recipe, dataclasses.replace(opened.state, data=listed.digest))
    with pytest.raises(RunError, match="no test images"):
        evaluate(run)
