"""Data sets that say which of their images ask and which answer."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from training.data.layouts.classes import pictures
from training.data.manifest import DataError, Row, Split
from training.data.tables import fields, lines, objects, records

_DEVELOPMENT = 50_000  # DISC21: queries below this number are those of development
_DISC = re.compile(r"[TRQ][0-9]+")


def in_shop(root: Path) -> list[Row]:
    """DeepFashion In-Shop: Eval/list_eval_partition.txt, `image item status` below two lines, status being train,
    query or gallery. The images are in img/ or Img/img/; the category is their sex and kind of clothes.
    """
    path = root / "Eval" / "list_eval_partition.txt"
    path = path if path.is_file() else root / path.name
    inside = "Img/" if (root / "Img").is_dir() else ""
    rows = []
    for name, label, status in fields(path, 3, skip=2):
        if status not in ("train", "query", "gallery"):
            raise DataError(f"{path}: the status of {name} is {status!r}: train, query or gallery is needed")
        split = Split.TRAIN if status == "train" else Split.TEST
        category = "/".join(name.split("/")[1:3])
        rows.append(Row(inside + name, label, split, status != "gallery", status != "query", category))
    _, first = next(lines(path))
    if first.isdecimal() and int(first) != len(rows):
        raise DataError(f"{path} says that it lists {first} images, and it lists {len(rows)}: unpack it anew")
    return rows


def disc(root: Path) -> list[Row]:
    """DISC21: files T*, R* and Q* in any folders, and *groundtruth*.csv with `query,reference`.

    A training image is a class of its own (its augmented copies are its positives) and a reference is one with its
    queries; the others of the queries are distractors. Queries below Q50000 validate, the rest test; both are searched
    in all the references.
    """
    references = _ground_truth(root)
    rows, found = [], set[str]()
    for path in pictures(root):
        name = PurePosixPath(path).stem
        if not _DISC.fullmatch(name):
            continue
        found.add(name)
        if name.startswith("Q"):
            split = Split.VALIDATION if int(name[1:]) < _DEVELOPMENT else Split.TEST
            rows.append(Row(path, references.get(name, ""), split, is_gallery=False))
        elif name.startswith("R"):
            rows.append(Row(path, name, Split.TEST, is_query=False))
        else:
            rows.append(Row(path, name, Split.TRAIN, is_query=False, is_gallery=False))
    missing = sorted({name for pair in references.items() for name in pair} - found)
    if missing:
        raise DataError(f"{root} lacks {len(missing)} images of the ground truth ({missing[0]}): unpack all of it")
    return rows


def met(root: Path) -> list[Row]:
    """Met: MET_database.json, testset.json and valset.json in ground_truth/ or beside it, images in images/ or there.

    The exhibits are trained on and searched in; a query without MET_id (test_other, test_noart) is a distractor.
    """
    lists = root / "ground_truth" if (root / "ground_truth").is_dir() else root
    inside = "images/" if (root / "images").is_dir() else ""
    rows = []
    for name, split in (("MET_database", Split.TRAIN), ("valset", Split.VALIDATION), ("testset", Split.TEST)):
        exhibit = split is Split.TRAIN
        for one in objects(lists / f"{name}.json"):
            label = one.get("id" if exhibit else "MET_id", None if exhibit else "")
            if not isinstance(one.get("path"), str) or not isinstance(label, str | int):
                raise DataError(f"{lists / name}.json: an entry has no path or id: {str(one)[:80]!r}")
            rows.append(Row(f"{inside}{one['path']}", str(label), split, not exhibit, exhibit))
    return rows


def wildlife(root: Path) -> list[Row]:
    """WildlifeReID-10k: metadata.csv with path, identity, dataset and split; the category is the data set.

    Test images are searched in those of training, where some of their identities are and some are not.
    """
    path = root / "metadata.csv"
    rows = []
    for number, cells in records(path, ("path", "identity", "dataset", "split")):
        if cells["split"] not in ("train", "test"):
            raise DataError(f"{path} line {number}: split is {cells['split']!r}: train or test is needed")
        training = cells["split"] == "train"
        known = cells["identity"] not in ("", "unknown")
        label = f"{cells['dataset']}/{cells['identity']}" if known else ""  # identities are those of their data set
        rows.append(Row(cells["path"], label, Split(cells["split"]), True, training, cells["dataset"]))
    if rows and not (root / rows[0].path).is_file() and (root / "images" / rows[0].path).is_file():
        rows = [Row(f"images/{row.path}", row.label, row.split, True, row.is_gallery, row.category) for row in rows]
    return rows


def _ground_truth(root: Path) -> dict[str, str]:
    """Each query's reference; a query without one is left out."""
    paths = sorted(path for path in root.glob("*.csv") if re.search("ground_?truth", path.name.lower()))
    if not paths:
        raise DataError(f"{root} holds no *groundtruth*.csv with query and reference: put that of DISC21 there")
    references: dict[str, str] = {}
    for path in paths:
        for query, reference in _pairs(path):
            if references.setdefault(query, reference) != reference:
                raise DataError(f"{path}: {query} has two references, {references[query]} and {reference}")
    return references


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in lines(path):
        query, comma, reference = (part.strip() for part in line.partition(","))
        if query.lower() in ("query_id", "query"):
            continue
        if not comma or not _DISC.fullmatch(query.partition(".")[0]):
            raise DataError(f"{path} line {number}: query,reference is needed, and it is {line[:80]!r}")
        if reference:
            yield query.partition(".")[0], reference.partition(".")[0]
