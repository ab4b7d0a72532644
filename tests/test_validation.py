"""Who asks and who answers in a validation, and what comes of it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from roadmatch.metrics.global_ap import global_average_precision
from training.data.loading import Features
from training.data.manifest import Manifest, Split
from training.fitting.processes import Process
from training.fitting.validation import Judged, ValidationError, embed, judge

HERE = Process(torch.device("cpu"))
T, V = Split.TRAIN, Split.VALIDATION


def manifest(labels: str, splits: list[Split], queries: str = "", gallery: str = "") -> Manifest:
    """A letter an image; `.` is no class. queries, gallery: 1 or 0 an image, all if empty."""
    count = len(labels)

    def flags(text: str) -> np.ndarray:
        return np.array([sign == "1" for sign in text or "1" * count])

    named = tuple("" if label == "." else label for label in labels)
    paths = tuple(f"{n}.jpg" for n in range(count))
    return Manifest(Path(), paths, named, tuple(splits), flags(queries), flags(gallery), ("",) * count)


def judged(labels: str, splits: list[Split], queries: str = "", gallery: str = "") -> tuple[list[int], object]:
    found = Judged.of(manifest(labels, splits, queries, gallery))
    assert found is not None
    return found.queries.tolist(), None if found.gallery is None else found.gallery.tolist()


def test_images_that_ask_and_answer_are_searched_among_themselves() -> None:
    assert judged("aabbcc.", [T, T, V, V, V, V, V]) == ([2, 3, 4, 5, 6], None)


def test_a_gallery_of_its_own_is_what_is_searched() -> None:
    assert judged("aabbcc", [T, T, V, V, V, V], "001010", "110101") == ([2, 4], [3, 5])


def test_a_split_without_a_gallery_is_searched_in_the_others() -> None:
    assert judged("aabb.a", [T, T, T, T, V, V], gallery="111100") == ([4, 5], [0, 1, 2, 3])


def test_no_image_is_searched_for_itself() -> None:
    assert judged("bbbb", [V] * 4, "1110", "0011") == ([0, 1], [2, 3])
    assert judged("bbbb", [V] * 4, "0011", "1111") == ([0, 1, 2, 3], None)


@pytest.mark.parametrize(
    ("labels", "splits", "gallery"),
    [("aabb", [T] * 4, ""), ("aabc..", [T, T, V, V, V, V], ""), ("aabb", [T, T, V, V], "1100")],
)
def test_a_split_without_a_right_match_cannot_be_judged(labels: str, splits: list[Split], gallery: str) -> None:
    assert Judged.of(manifest(labels, splits, gallery=gallery)) is None


class Unit(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        assert not self.training
        return nn.functional.normalize(features, dim=1)


@pytest.mark.parametrize("gallery", ["", "0" * 40 + "1" * 60])
def test_the_judgement_is_gap_of_all_pairs_and_the_mode_is_as_before(gallery: str) -> None:
    random = np.random.default_rng(0)
    labels = "".join(random.choice(list("abcd."), 100))
    queries = "1" * 100 if not gallery else "1" * 40 + "0" * 60
    images = manifest(labels, [V] * 100, queries, gallery)
    vectors = torch.from_numpy(random.normal(size=(100, 6)).astype(np.float32))
    examples, who = Features(vectors, images.numbers, images.category_numbers), Judged.of(images)
    assert who is not None
    network = Unit().train()
    found = judge(network, examples, who, HERE)
    assert network.training
    unit = nn.functional.normalize(vectors, dim=1).numpy()
    asking, answering = who.queries, who.queries if who.gallery is None else who.gallery
    relevance = images.numbers[asking][:, None] == images.numbers[answering]
    mask = asking[:, None] != answering
    expected = global_average_precision(unit[asking] @ unit[answering].T, relevance & mask, mask)
    assert found.gap == pytest.approx(expected, abs=1e-6)
    assert (found.queries, found.images) == (len(asking), 100)


def test_embeddings_come_in_the_order_asked_for() -> None:
    vectors = torch.eye(200)
    examples = Features(vectors, np.arange(200), np.zeros(200, np.int64))
    numbers = np.random.default_rng(0).permutation(200)
    assert embed(Unit(), examples, numbers, HERE).equal(vectors[torch.from_numpy(numbers)])


def test_embeddings_that_are_no_numbers_are_an_error_of_one_line() -> None:
    images = manifest("aabb", [V] * 4)
    examples, who = Features(torch.full((4, 3), torch.nan), images.numbers, images.category_numbers), Judged.of(images)
    assert who is not None
    with pytest.raises(ValidationError, match=r"NaN or infinite values: lower optimizer\.learning_rate") as caught:
        judge(Unit(), examples, who, HERE)
    assert "\n" not in str(caught.value)
