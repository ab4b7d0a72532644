"""The list of a run's images: where each lies, its class, its split and whether it asks or answers."""

import csv
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from training.data.tables import PARQUET, DataError, in_a_line, records, unit

__all__ = ["COLUMNS", "DataError", "Manifest", "Row", "Split", "of_rows", "read", "write"]

COLUMNS = ("path", "label", "split", "is_query", "is_gallery", "category")
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": True}


class Split(StrEnum):
    """What an image is for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Row:
    """An image: its path relative to the root, its class ("" for none) and its part in the evaluation."""

    path: str
    label: str
    split: Split = Split.TRAIN
    is_query: bool = True
    is_gallery: bool = True
    category: str = ""


@dataclass(frozen=True, eq=False)
class Manifest:
    """N images in a fixed order.

    Paths are POSIX, relative to root and never outside of it. The label "" belongs to no class: a distractor. The
    category is a super-class, "" where there is none.
    """

    root: Path
    paths: tuple[str, ...]
    labels: tuple[str, ...]
    splits: tuple[Split, ...]
    is_query: NDArray[np.bool_]
    is_gallery: NDArray[np.bool_]
    categories: tuple[str, ...]

    def __post_init__(self) -> None:
        columns = (self.paths, self.labels, self.splits, self.is_query, self.is_gallery, self.categories)
        if len({len(column) for column in columns}) != 1:
            raise ValueError(f"the columns have {[len(column) for column in columns]} rows: the same number is needed")

    def __len__(self) -> int:
        return len(self.paths)

    def file(self, n: int) -> Path:
        """The n-th image's file."""
        return self.root / self.paths[n]

    def of(self, split: Split) -> NDArray[np.bool_]:
        """(N,) which images are of the split."""
        return np.array([own is split for own in self.splits], bool)

    def only(self, split: Split) -> "Manifest":
        """The images of one split, in the same order."""
        wanted = np.flatnonzero(self.of(split))
        return Manifest(
            self.root,
            tuple(self.paths[n] for n in wanted),
            tuple(self.labels[n] for n in wanted),
            tuple(self.splits[n] for n in wanted),
            self.is_query[wanted],
            self.is_gallery[wanted],
            tuple(self.categories[n] for n in wanted),
        )

    def queries(self, split: Split) -> NDArray[np.int64]:
        """(Q,) numbers of the images that ask when a split is evaluated."""
        return np.flatnonzero(self.of(split) & self.is_query)

    def gallery(self, split: Split) -> NDArray[np.int64]:
        """(M,) numbers of the images that the queries of a split are searched in.

        They are the gallery images of the split; one without any (Met, DISC21's development queries,
        WildlifeReID-10k) is searched in the gallery images of all the others.
        """
        return np.flatnonzero(self.is_gallery & (self.of(split) | self.is_closed(split)))

    def is_closed(self, split: Split) -> bool:
        """Whether the split has no gallery of its own, so that its classes are meant to be those of the others."""
        return not (self.of(split) & self.is_gallery).any()

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The distinct labels, sorted, without ""."""
        return tuple(sorted(set(self.labels) - {""}))

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """(N,) numbers of the labels, in the order of the classes; each "" has a negative number of its own."""
        known = {label: number for number, label in enumerate(self.classes)}
        alone = iter(range(-1, -len(self) - 1, -1))
        return _fixed([known[label] if label else next(alone) for label in self.labels])

    @cached_property
    def category_numbers(self) -> NDArray[np.int64]:
        """(N,) numbers of the categories, in the order of the sorted names."""
        known = {name: number for number, name in enumerate(sorted(set(self.categories)))}
        return _fixed([known[name] for name in self.categories])

    @cached_property
    def digest(self) -> str:
        """sha256 over all rows in their order, without the root: that of the same data set at any place."""
        sha256 = hashlib.sha256()
        for row in _cells(self):
            sha256.update(json.dumps(row).encode() + b"\n")
        return sha256.hexdigest()


def of_rows(root: Path, rows: Iterable[Row], named: Callable[[int], str]) -> Manifest:
    """A manifest of these rows; `named` says where row n stands in its source. Raises DataError.

    Refused are paths that leave the root, texts that break a line, an image that is listed twice, and no rows at all.
    """
    known, seen = list(rows), dict[str, int]()
    for n, row in enumerate(known):
        first = seen.setdefault(row.path, n)
        problem = _problem(row)
        if first != n:
            problem = f"{row.path} is there already ({named(first)}): list each image once"
        if problem is not None:
            raise DataError(f"{named(n)}: {problem}")
    return Manifest(
        root,
        tuple(row.path for row in known),
        tuple(row.label for row in known),
        tuple(row.split for row in known),
        np.array([row.is_query for row in known], bool),
        np.array([row.is_gallery for row in known], bool),
        tuple(row.category for row in known),
    )


def read(path: Path, root: Path) -> Manifest:
    """A CSV (UTF-8, with a header) or Parquet file, by its suffix.

    Columns are path and label, and if wanted split (else all train), is_query, is_gallery (else all true) and
    category. An empty label belongs to no class. Raises DataError, which names the line or row.
    """
    rows, numbers = list[Row](), list[int]()
    for number, cells in records(path, COLUMNS[:2], COLUMNS):
        rows.append(_row(f"{path} {unit(path)} {number}", cells))
        numbers.append(number)
    if not rows:
        raise DataError(f"{path} lists no images")
    return of_rows(root, rows, lambda n: f"{path} {unit(path)} {numbers[n]}")


def write(manifest: Manifest, path: Path) -> None:
    """CSV or Parquet, by the suffix, at once or not at all. Raises DataError where it cannot be written."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        (_write_parquet if path.suffix.lower() == PARQUET else _write_csv)(manifest, draft)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {in_a_line(error)}") from error
    finally:
        draft.unlink(missing_ok=True)


def _write_csv(manifest: Manifest, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, label, split, is_query, is_gallery, category in _cells(manifest):
            writer.writerow([name, label, split, str(is_query).lower(), str(is_gallery).lower(), category])


def _write_parquet(manifest: Manifest, path: Path) -> None:
    types = (pa.string(), pa.string(), pa.string(), pa.bool_(), pa.bool_(), pa.string())
    columns = list(zip(*_cells(manifest), strict=True)) or [()] * len(COLUMNS)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    pq.write_table(pa.table(arrays, names=list(COLUMNS)), path)


def _cells(manifest: Manifest) -> Iterator[tuple[str, str, str, bool, bool, str]]:
    """Each row's values in the order of the columns."""
    asks, answers = manifest.is_query.tolist(), manifest.is_gallery.tolist()
    splits = (split.value for split in manifest.splits)
    return zip(manifest.paths, manifest.labels, splits, asks, answers, manifest.categories, strict=True)


def _row(named: str, cells: Mapping[str, str]) -> Row:
    split = cells.get("split", "") or Split.TRAIN.value
    if split not in set(Split):
        raise DataError(f"{named}: split is {split!r}: {', '.join(Split)} are the ones there are")
    booleans = {}
    for name in ("is_query", "is_gallery"):
        text = cells.get(name, "").strip().lower()
        if text not in _BOOLEANS:
            raise DataError(f"{named}: {name} is {text!r}: true or false is needed")
        booleans[name] = _BOOLEANS[text]
    path = cells["path"] and PurePosixPath(cells["path"]).as_posix()
    return Row(path, cells["label"], Split(split), category=cells.get("category", ""), **booleans)


def _problem(row: Row) -> str | None:
    """What is wrong with a row's texts, and the mend."""
    for name, text in (("path", row.path), ("label", row.label), ("category", row.category)):
        if any(ord(sign) < 32 or 0x7F <= ord(sign) < 0xA0 or 0xD800 <= ord(sign) < 0xE000 for sign in text):
            return f"{name} is {text!r}: control signs and names that are not in UTF-8 are not taken: rename it"
    if not row.path or row.path == ".":
        return "path is empty: name the image's file, relative to the folder of the images"
    if "\\" in row.path:
        return f"path is {row.path!r}: write / between folders"
    if row.path.startswith("/") or ".." in row.path.split("/"):
        return f"path is {row.path!r}: it has to be relative to the folder of the images, and stay inside"
    return None


def _fixed(numbers: Sequence[int]) -> NDArray[np.int64]:
    """An array that nobody can change, since it is kept for the next who asks."""
    array = np.array(numbers, np.int64)
    array.flags.writeable = False
    return array
