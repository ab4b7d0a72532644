"""Data sets whose test classes are others than those of training, and plain folders."""

import os
from collections.abc import Iterator
from pathlib import Path

from training.data.manifest import DataError, Row, Split
from training.data.tables import fields, in_a_line, lines

PICTURES = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
_SPLITS = {*Split, "val", "valid"}
_CUB_TRAINING = 100  # of 200 classes
_CARS_TRAINING = 98  # of 196 classes


def pictures(root: Path) -> Iterator[str]:
    """Paths, relative to root, of the picture files below it, sorted in each folder; hidden ones are passed over."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(PICTURES) and not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def folder(root: Path) -> list[Row]:
    """A folder whose sub-folders are the classes; all of it is there to be split. Raises DataError."""
    rows = [Row(path, path.split("/")[0]) for path in pictures(root)]
    loose = [row.path for row in rows if "/" not in row.path]
    if loose:
        raise DataError(
            f"{root} holds {len(loose)} pictures outside of a sub-folder ({loose[0]}): one a class is needed"
        )
    if rows and {row.label for row in rows} <= _SPLITS:
        names = ", ".join(sorted({row.label for row in rows}))
        raise DataError(f"the sub-folders of {root} are {names}, and not classes: write a manifest with a column split")
    return rows


def sop(root: Path) -> list[Row]:
    """Stanford Online Products: Ebay_train.txt and Ebay_test.txt, `image_id class_id super_class_id path`."""
    return [
        Row(path, label, split, category=category)
        for split in (Split.TRAIN, Split.TEST)
        for _, label, category, path in fields(root / f"Ebay_{split}.txt", 4, skip=1)
    ]


def cub(root: Path) -> list[Row]:
    """CUB-200-2011: images.txt and image_class_labels.txt; the first 100 classes are those of training."""
    labels = dict(fields(root / "image_class_labels.txt", 2))
    rows = []
    for number, path in fields(root / "images.txt", 2):
        if number not in labels:
            raise DataError(f"{root / 'image_class_labels.txt'} has no class for image {number} ({path})")
        rows.append(_by_number(f"images/{path}", labels[number], _CUB_TRAINING, root))
    return rows


def cars(root: Path) -> list[Row]:
    """Cars196, the first 98 classes being those of training, in either form.

    cars_annos.mat, which names the images (car_ims/...); or cars_train/ and cars_test/ with
    devkit/cars_train_annos.mat and cars_test_annos_withlabels.mat, beside devkit/ or in it.
    """
    whole = root / "cars_annos.mat"
    if whole.is_file():
        return [_by_number(name, number, _CARS_TRAINING, root) for name, number in _mat(whole, "relative_im_path")]
    tests = root / "cars_test_annos_withlabels.mat"
    places = [
        ("cars_train", root / "devkit" / "cars_train_annos.mat"),
        ("cars_test", tests if tests.is_file() else root / "devkit" / tests.name),
    ]
    return [
        _by_number(f"{inside}/{name}", number, _CARS_TRAINING, root)
        for inside, path in places
        for name, number in _mat(path, "fname")
    ]


def inaturalist(root: Path) -> list[Row]:
    """iNaturalist-2018 in the split of Smooth-AP, Recall@k and ROADMAP: Inat_dataset_splits/Inaturalist_*_set1.txt.

    Each line is a path `.../super-category/category/file`.
    """
    rows = []
    for split in (Split.TRAIN, Split.TEST):
        path = root / "Inat_dataset_splits" / f"Inaturalist_{split}_set1.txt"
        for number, line in lines(path):
            if line.count("/") < 2:
                raise DataError(f"{path} line {number}: super-category/category/file is needed, and it is {line!r}")
            *_, category, label, _ = line.split("/")
            rows.append(Row(line, label, split, category=category))
    return rows


def _by_number(path: str, number: str, training: int, root: Path) -> Row:
    """An image whose class number, from 1, says its split."""
    if not number.isdecimal() or int(number) < 1:
        raise DataError(f"{root}: the class of {path} is {number!r}: a number from 1 on is needed")
    return Row(path, str(int(number)), Split.TRAIN if int(number) <= training else Split.TEST)


def _mat(path: Path, name: str) -> list[tuple[str, str]]:
    """Image and class number of each annotation of a MATLAB file of Cars196."""
    import scipy.io  # takes half a second

    try:
        listed = scipy.io.loadmat(path, squeeze_me=True, variable_names=["annotations"])["annotations"]
        return [(str(one[name]), str(one["class"])) for one in listed.reshape(-1)]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {in_a_line(error)}") from error
    except Exception as error:  # the reader trips over foreign bytes in any way at all
        raise DataError(f"{path} holds no annotations with {name} and class") from error
