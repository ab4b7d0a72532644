"""training.data.checks and training.data.duplicates: what would spoil a run is found before it starts."""

import io
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import skimage
from numpy.typing import NDArray
from PIL import Image

from roadmatch.images import decode
from training.data.checks import Findings, check, few_to_test, refuse
from training.data.duplicates import NEAR, SIDE, Hashes, nearest, perceptual_hash
from training.data.manifest import DataError, Manifest, Row, Split, of_rows
from training.recipe import Batch, Sampler, SmallClasses

PHOTOGRAPHS = [
    "astronaut.png", "camera.png", "chelsea.png", "clock_motion.png", "coffee.png", "coins.png", "grass.png",
    "gravel.png", "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg",
]  # fmt: skip
SMALL = Batch(size=4, per_class=2)


def encoded(picture: Image.Image, kind: str = "PNG", quality: int = 90) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, quality=quality)
    return file.getvalue()


def noise(seed: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def data_set(root: Path, rows: list[Row], files: dict[str, bytes] | None = None) -> Manifest:
    """Rows with a picture of its own each, but for the files that are given."""
    for n, row in enumerate(rows):
        (root / row.path).parent.mkdir(parents=True, exist_ok=True)
        (root / row.path).write_bytes((files or {}).get(row.path) or encoded(noise(n)))
    return of_rows(root, rows, lambda n: f"row {n}")


def pairs(names: str, split: Split = Split.TRAIN) -> list[Row]:
    """Two images of each class."""
    return [Row(f"{name}{n}.png", name, split) for name in names.split() for n in (0, 1)]


def found(given: Manifest, batch: Batch = SMALL, *, near_duplicates: bool = True) -> Findings:
    findings = check(given, batch, near_duplicates=near_duplicates, threads=2)
    assert not any("\n" in line for line in (*findings.errors, *findings.warnings))
    return findings


def test_a_good_data_set_has_no_findings(tmp_path: Path) -> None:
    seen: list[int] = []
    given = data_set(tmp_path, [*pairs("a b c"), *pairs("d e", Split.VALIDATION), *pairs("f g", Split.TEST)])
    findings = check(given, SMALL, near_duplicates=True, threads=0, progress=seen.append)
    assert findings == Findings((), ())
    assert seen == [14]
    refuse(findings)


def test_images_that_cannot_be_read_are_counted_and_named_with_the_reason(tmp_path: Path) -> None:
    broken = {"a0.png": b"GIF89a", "a1.png": encoded(noise(0))[:90], "b0.png": b"hello"}
    given = data_set(tmp_path, pairs("a b c"), broken)
    (tmp_path / "b1.png").unlink()
    (line,) = found(given).errors
    assert line.startswith("4 of 6 images cannot be read: a0.png (")
    assert line.endswith(" and 1 more: save them anew or take them out")
    with pytest.raises(DataError, match="4 of 6 images cannot be read"):
        refuse(found(given))


def test_the_first_error_is_told_with_the_number_of_the_others(tmp_path: Path) -> None:
    given = data_set(tmp_path, pairs("a"), {"a0.png": b"hello"})
    with pytest.raises(DataError, match=r"1 of 2 images cannot be read.*\(and 1 more errors\)"):
        refuse(found(given))


@pytest.mark.parametrize(
    ("rows", "batch", "said"),
    [
        (pairs("a"), SMALL, "the training split has 1 classes: two or more are needed"),
        (
            pairs("a b c"),
            Batch(size=8, per_class=2),
            "batch.size 8 with 2 per class needs 4 classes, and the training split has 3: set batch.size to 6 or less",
        ),
        (
            pairs("a b c"),
            Batch(size=6, per_class=3, small_classes=SmallClasses.LEAVE_OUT),
            "0 of 3 training classes have the 3 images of batch.per_class: set batch.small_classes to fewer or repeat",
        ),
        (
            pairs("a b c")[::2],
            SMALL,
            "every training class has one image, so that there are no pairs: set batch.small_classes to repeat",
        ),
        (
            pairs("a b c"),
            Batch(size=4, per_class=2, sampler=Sampler.HIERARCHICAL),
            "batch.sampler is hierarchical, and the training images have no two categories: set it to classes",
        ),
    ],
)
def test_batches_that_cannot_be_made_are_errors_with_the_mend(
    tmp_path: Path, rows: list[Row], batch: Batch, said: str
) -> None:
    assert found(data_set(tmp_path, rows), batch).errors == (said,)


def test_classes_with_one_image_are_a_warning_unless_copies_of_it_are_its_pair(tmp_path: Path) -> None:
    given = data_set(
        tmp_path, [*pairs("a b"), Row("c.png", "c"), Row("t.png", "t", Split.TEST), *pairs("u", Split.TEST)]
    )
    test = "1 of 2 classes of test have one image and so no right match: t"
    assert found(given).warnings == ("1 of 3 classes of train have one image and so no right match: c", test)
    repeat = Batch(size=4, per_class=2, small_classes=SmallClasses.REPEAT)
    assert found(given, repeat).warnings == (test,)


def test_a_class_in_two_splits_is_an_error_where_the_split_has_its_own_gallery(tmp_path: Path) -> None:
    both = [Row("a2.png", "a", Split.TEST), Row("a3.png", "a", Split.TEST)]
    (line,) = found(data_set(tmp_path, [*pairs("a b"), *both])).errors
    assert line.startswith("1 of 2 training classes are in test, too, whose figures would be too good: a: ")
    closed = [Row("a2.png", "a", Split.TEST, is_gallery=False), Row("x.png", "", Split.TEST, is_gallery=False)]
    assert found(data_set(tmp_path, [*pairs("a b"), *closed])) == Findings((), ())


def test_exact_copies_in_two_splits_are_errors_and_a_small_share_of_them_a_warning(tmp_path: Path) -> None:
    copy = {"d1.png": encoded(noise(0))}  # that of a0
    few = data_set(tmp_path / "few", [*pairs("a b"), *pairs("d e", Split.TEST)], copy)
    said = "images of test are copies of images of train: d1.png = a0.png: keep one of each"
    assert found(few) == Findings((f"1 of 4 {said}",), ())
    assert found(few, near_duplicates=False) == Findings((f"1 of 4 {said}",), ())
    many = " ".join(f"z{n}." for n in range(60))
    rows = [*pairs("a b"), *pairs(f"d {many}", Split.TEST)]
    assert found(data_set(tmp_path / "many", rows, copy)) == Findings((), (f"1 of 122 {said}",))


def test_near_copies_in_two_splits_are_warnings_between_any_two(tmp_path: Path) -> None:
    photograph = decode((skimage_data() / "coffee.png").read_bytes()).rgb
    files = {
        "a0.png": encoded(photograph),
        "v0.png": encoded(photograph.resize((300, 200)), "JPEG", 60),
        "t0.png": encoded(photograph, "WEBP", 50),
    }
    given = data_set(tmp_path, [*pairs("a b"), *pairs("v w", Split.VALIDATION), *pairs("t u", Split.TEST)], files)
    near = "are near copies of images of"
    assert found(given) == Findings(
        (),
        (
            f"1 of 4 images of validation {near} train: v0.png = a0.png: keep one of each",
            f"1 of 4 images of test {near} train: t0.png = a0.png: keep one of each",
            f"1 of 4 images of test {near} validation: t0.png = v0.png: keep one of each",
        ),
    )
    assert found(given, near_duplicates=False) == Findings((), ())


def test_a_distractor_that_is_a_labelled_picture_is_named(tmp_path: Path) -> None:
    rows = [*pairs("ab"), *pairs("cd", Split.TEST)]
    copied = Row("lost.png", "", Split.TEST)
    given = data_set(tmp_path, [*rows, copied, Row("other.png", "", Split.TEST)])
    (tmp_path / "lost.png").write_bytes(given.file(given.paths.index(rows[-1].path)).read_bytes())
    (warning,) = found(given).warnings
    assert warning == (
        f"1 unlabelled images of test are copies of labelled ones: lost.png = {rows[-1].path}: label them"
    )


def test_a_test_split_that_no_threshold_can_come_of_is_said(tmp_path: Path) -> None:
    few, enough = (
        data_set(tmp_path / str(count), [row for n in range(count) for row in pairs(chr(97 + n), Split.TEST)])
        for count in (19, 20)
    )
    (line,) = few_to_test(few)
    assert line.startswith("the test split has 19 classes of two images or more, and 20 are needed for a threshold")
    assert few_to_test(enough) == few_to_test(data_set(tmp_path / "none", pairs("ab"))) == []


def test_a_near_copy_of_its_own_class_is_what_a_query_of_a_closed_split_looks_for(tmp_path: Path) -> None:
    photograph = decode((skimage_data() / "coffee.png").read_bytes()).rgb
    copy = {"a0.png": encoded(photograph), "q.png": encoded(photograph, "JPEG", 50)}
    right = data_set(tmp_path, [*pairs("a b"), Row("q.png", "a", Split.TEST, is_gallery=False)], copy)
    assert found(right) == Findings((), ())
    for label in ("b", ""):
        wrong = data_set(tmp_path, [*pairs("a b"), Row("q.png", label, Split.TEST, is_gallery=False)], copy)
        assert len(found(wrong).warnings) == 1


def skimage_data() -> Path:
    return Path(skimage.__file__).parent / "data"


def photographs() -> list[Image.Image]:
    pictures = [decode((skimage_data() / name).read_bytes(), reduce_to=240).rgb for name in PHOTOGRAPHS]
    return [picture.resize((picture.width * 240 // picture.height, 240)) for picture in pictures]


def hashes(pictures: list[bytes]) -> Hashes:
    return np.stack([perceptual_hash(decode(data, reduce_to=SIDE).rgb) for data in pictures])


def bits(first: Hashes, second: Hashes) -> NDArray[np.int64]:
    differing: NDArray[np.int64] = np.bitwise_count(first ^ second).sum(axis=-1, dtype=np.int64)
    return differing


def test_copies_of_photographs_are_near_and_different_photographs_are_not() -> None:
    originals = photographs()
    known = hashes([encoded(picture) for picture in originals])
    nobody = np.full(len(known), -1)
    apart = bits(known[:, None], known[None])[np.triu_indices(len(known), 1)]
    assert apart.min() > 1.5 * NEAR
    for copies in (
        [encoded(picture, "JPEG", 30) for picture in originals],
        [encoded(picture, "WEBP", 50) for picture in originals],
        [encoded(picture.resize((picture.width // 2, picture.height // 2)), "JPEG", 85) for picture in originals],
        [encoded(picture.resize((256, 256)), "JPEG", 85) for picture in originals],
    ):
        assert nearest(hashes(copies), known, nobody, nobody).tolist() == list(range(len(known)))
    mirrored = hashes([encoded(picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) for picture in originals])
    assert (nearest(mirrored, known, nobody, nobody) < 0).all()


def test_plain_pictures_are_like_nothing_and_no_pictures_have_no_copies() -> None:
    plain = np.stack([perceptual_hash(Image.new("RGB", (64, 64), colour)) for colour in ("white", "white", "red")])
    assert not plain.any()
    nobody = np.full(3, -1)
    assert nearest(plain, plain, nobody, nobody).tolist() == [-1, -1, -1]
    assert nearest(plain[:0], plain, nobody[:0], nobody).tolist() == []
    assert nearest(plain, plain[:0], nobody, nobody[:0]).tolist() == [-1, -1, -1]


def test_a_hundred_thousand_pictures_are_compared_in_seconds_and_alike_ones_too() -> None:
    random = np.random.default_rng(0)
    known = random.integers(0, 2**64, (75_000, 4), dtype=np.uint64)
    asked = random.integers(0, 2**64, (25_000, 4), dtype=np.uint64)
    asked[7] = known[5] ^ np.array([3, 1, 0, 7 << 60], np.uint64)  # a few bits
    asked[10_000:] = known[70_000:70_001]  # fifteen thousand copies of one
    known[60_000:] = known[70_000]
    nobody = np.full(len(known), -1)
    start = time.perf_counter()
    result = nearest(asked, known, nobody[: len(asked)], nobody)
    assert time.perf_counter() - start < 20  # 2 on an idle machine
    assert result[7] == 5
    assert (result[10_000:] >= 60_000).all()
    assert (np.delete(result[:10_000], 7) < 0).all()


@pytest.mark.faults
def test_a_hundred_photographs_a_second_are_checked_on_two_threads_in_little_memory(tmp_path: Path) -> None:
    photograph = decode((skimage_data() / "coffee.png").read_bytes()).rgb.resize((640, 480))
    files = {f"{n}.jpg": encoded(photograph.rotate(n / 10), "JPEG") for n in range(1500)}
    given = data_set(tmp_path, [Row(name, f"class {n // 2}") for n, name in enumerate(files)], files)
    tracemalloc.start()
    start = time.perf_counter()
    assert found(given).errors == ()
    rate = len(given) / (time.perf_counter() - start)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rate > 100
    assert peak < 20_000_000
