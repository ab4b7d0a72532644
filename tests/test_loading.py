"""Loading: order, the same pixels for any threads, a bounded number ahead, unreadable files, leaving early."""

import pickle
import queue
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import skimage.data
import torch
from numpy.typing import NDArray
from PIL import Image

from roadmatch.images import Preprocessing, read_pixels
from training.data.loading import Features, Pictures, showings
from training.data.manifest import DataError, Manifest, Split
from training.recipe import Augment

Numbers = NDArray[np.int64]
RULE = Preprocessing(size=32, resize=36, reduce_to=72, interpolation="bilinear")
AUGMENT = Augment(jitter=0.3)
COUNT = 12


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Twelve photographs of four classes, every third one of no class."""
    photograph = Image.fromarray(skimage.data.chelsea())
    for n in range(COUNT):
        photograph.rotate(20 * n).crop((80, 30, 380, 270)).save(tmp_path / f"{n}.jpg")
    return Manifest(
        tmp_path,
        tuple(f"{n}.jpg" for n in range(COUNT)),
        tuple("" if n % 3 == 0 else f"class {n % 4}" for n in range(COUNT)),
        (Split.TRAIN,) * COUNT,
        np.ones(COUNT, bool),
        np.ones(COUNT, bool),
        tuple(f"category {n % 2}" for n in range(COUNT)),
    )


def pictures(manifest: Manifest, *, augment: Augment | None = AUGMENT, seed: int = 5, threads: int = 2) -> Pictures:
    return Pictures(manifest, augment=augment, preprocessing=RULE, seed=seed, threads=threads)


def loaded(examples: Pictures | Features, wanted: list[list[int]], epoch: int = 0) -> list[torch.Tensor]:
    with examples.batches((np.array(numbers) for numbers in wanted), epoch=epoch) as coming:
        return list(coming)


def loading_threads() -> int:
    return sum(thread.name.startswith("pictures") for thread in threading.enumerate())


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_evaluation_gets_the_pixels_of_serving_in_the_order_asked_for(manifest: Manifest) -> None:
    examples = pictures(manifest, augment=None)
    batches = loaded(examples, [[3, 1, 11], [0], [7, 7]])
    assert [tuple(batch.shape) for batch in batches] == [(3, 32, 32, 3), (1, 32, 32, 3), (2, 32, 32, 3)]
    assert all(batch.dtype == torch.uint8 for batch in batches)
    for row, number in zip(torch.cat(batches), [3, 1, 11, 0, 7, 7], strict=True):
        np.testing.assert_array_equal(row.numpy(), read_pixels(manifest.file(number).read_bytes(), RULE)[0])


def test_labels_and_categories_are_the_manifests(manifest: Manifest) -> None:
    examples = pictures(manifest)
    np.testing.assert_array_equal(examples.labels, manifest.numbers)
    np.testing.assert_array_equal(examples.categories, manifest.category_numbers)
    assert len(examples) == COUNT


def test_any_number_of_threads_gives_the_same_pixels(manifest: Manifest) -> None:
    wanted = [[0, 5, 2, 7], [7, 1, 1, 3], [4, 6, 8, 9]]
    one, *others = (torch.cat(loaded(pictures(manifest, threads=threads), wanted, 4)) for threads in (1, 3, 8, 0))
    for other in others:
        assert torch.equal(one, other)


def test_a_picture_depends_on_seed_epoch_and_number_alone(manifest: Manifest) -> None:
    """So a run that is resumed in the middle of an epoch sees what it would have seen."""
    (whole,) = loaded(pictures(manifest), [[0, 1, 2, 3]], 1)
    (later,) = loaded(pictures(manifest), [[3, 0]], 1)
    assert torch.equal(later, whole[[3, 0]])
    for other in (loaded(pictures(manifest), [[0]], 2), loaded(pictures(manifest, seed=6), [[0]], 1)):
        assert not torch.equal(other[0][0], whole[0])


def test_a_picture_that_is_repeated_in_a_batch_is_no_copy(manifest: Manifest) -> None:
    """Its first showing is what it is alone."""
    (batch,) = loaded(pictures(manifest), [[4, 2, 4, 4]])
    (alone,) = loaded(pictures(manifest), [[4]])
    assert torch.equal(batch[0], alone[0])
    assert len({row.numpy().tobytes() for row in batch}) == 4


def test_showings_are_counted_in_the_arrays_own_order() -> None:
    assert showings(np.array([5, 3, 5, 5, 3, 9])).tolist() == [0, 0, 1, 2, 1, 0]
    assert showings(np.array([], np.int64)).tolist() == []


def test_the_interpolation_is_the_bundles(manifest: Manifest) -> None:
    bicubic = Preprocessing(size=32, resize=36, reduce_to=72, interpolation="bicubic")
    other = Pictures(manifest, augment=AUGMENT, preprocessing=bicubic, seed=5, threads=2)
    assert not torch.equal(loaded(other, [[0]])[0], loaded(pictures(manifest), [[0]])[0])


def test_few_batches_are_loaded_ahead(manifest: Manifest) -> None:
    asked = 0

    def wanted() -> Iterator[Numbers]:
        nonlocal asked
        for _ in range(20):
            asked += 1
            yield np.array([1, 2])

    with pictures(manifest).batches(wanted(), epoch=0) as coming:
        for taken in range(1, 21):
            next(coming)
            assert asked == min(taken + 2, 20)
        assert next(coming, None) is None


class Noted(Manifest):
    """A manifest that notes which files were asked for."""

    def file(self, n: int) -> Path:
        noted.put(n)
        return super().file(n)


noted: queue.Queue[int] = queue.Queue()


def test_the_next_batches_are_loaded_while_one_is_worked_on(manifest: Manifest) -> None:
    """Nobody asks for more than the first batch, and the files of the next two are read."""
    own = Noted(**{field.name: getattr(manifest, field.name) for field in fields(manifest)})
    with pictures(own).batches(iter([np.array([n]) for n in range(9)]), epoch=0) as coming:
        next(coming)
        assert {noted.get(timeout=20) for _ in range(3)} == {0, 1, 2}
        with pytest.raises(queue.Empty):
            noted.get(timeout=0.2)


def test_an_unreadable_picture_stops_with_its_name(manifest: Manifest) -> None:
    manifest.file(6).write_bytes(manifest.file(6).read_bytes()[:2000])
    with pytest.raises(DataError) as stopped:
        loaded(pictures(manifest), [[1, 2], [5, 6], [7, 8], [9, 10]])
    assert str(stopped.value) == f"{manifest.file(6)}: JPEG is a picture that does not end: send the whole file"
    assert loading_threads() == 0


@pytest.mark.parametrize("augment", [None, AUGMENT])
def test_a_missing_picture_stops_with_its_name(manifest: Manifest, augment: Augment | None) -> None:
    manifest.file(2).unlink()
    with pytest.raises(DataError) as stopped:
        loaded(pictures(manifest, augment=augment), [[2]])
    assert str(stopped.value) == f"{manifest.file(2)} cannot be read: No such file or directory"


def test_the_batches_before_an_unreadable_picture_come(manifest: Manifest) -> None:
    manifest.file(6).write_bytes(b"")
    with pictures(manifest).batches([np.array([1]), np.array([6])], epoch=0) as coming:
        assert len(next(coming)) == 1
        with pytest.raises(DataError, match="the file is empty"):
            next(coming)


def test_leaving_early_leaves_no_thread_no_file_and_does_no_more(manifest: Manifest) -> None:
    files = open_files()
    with pictures(manifest, threads=3).batches([np.arange(COUNT)] * 50, epoch=0) as coming:
        next(coming)
        assert loading_threads() > 0
    assert loading_threads() == 0
    assert open_files() == files
    assert list(coming) == []


def test_an_error_of_the_trainer_passes_through_and_leaves_no_thread(manifest: Manifest) -> None:
    def train() -> None:
        with pictures(manifest).batches([np.arange(COUNT)] * 50, epoch=0) as coming:
            next(coming)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert loading_threads() == 0


def test_a_batch_that_was_handed_out_is_not_written_again(manifest: Manifest) -> None:
    with pictures(manifest).batches([np.arange(n, n + 4) for n in range(8)], epoch=0) as coming:
        first = next(coming)
        kept = first.clone()
        list(coming)
    assert torch.equal(first, kept)


def test_examples_can_be_sent_to_another_process(manifest: Manifest) -> None:
    examples = pictures(manifest)
    again = pickle.loads(pickle.dumps(examples))
    assert torch.equal(loaded(again, [[1, 2]])[0], loaded(examples, [[1, 2]])[0])


def test_no_batches_are_no_error(manifest: Manifest) -> None:
    assert loaded(pictures(manifest), []) == []


def test_a_negative_number_of_threads_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ValueError, match="threads is -1"):
        pictures(manifest, threads=-1)


def test_features_come_as_they_are_stored() -> None:
    features = torch.randn(6, 5)
    labels = np.arange(6)
    examples = Features(features, labels, labels % 2)
    one, other = loaded(examples, [[5, 0], [3]])
    assert torch.equal(one, features[[5, 0]])
    assert torch.equal(other, features[[3]])
    assert len(examples) == 6


def test_features_without_their_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="6 features, 5 labels, 6 categories"):
        Features(torch.randn(6, 5), np.arange(5), np.arange(6))
