"""Tables and lists of a data set, row by row as texts, with errors that name the file and the line."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from roadmatch.errors import RoadmatchError

PARQUET = ".parquet"
Record = tuple[int, Mapping[str, str]]
_CHUNK = 65_536  # rows of a Parquet file that are held as Python values at once


class DataError(RoadmatchError):
    """Images, or a list of them, that cannot be trained on."""


def unit(path: Path) -> str:
    """What the numbers of a file's records count."""
    return "row" if path.suffix.lower() == PARQUET else "line"


def records(path: Path, needed: Sequence[str], known: Sequence[str] | None = None) -> Iterator[Record]:
    """Line (CSV, the header being 1) or row (Parquet, from 1) and the cells of each, by column; an empty one is "".

    known: the columns that there may be; None for any. Raises DataError.
    """
    try:
        yield from (_parquet if path.suffix.lower() == PARQUET else _csv)(path, needed, known)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {in_a_line(error)}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in UTF-8: save it as CSV in UTF-8") from error


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line of a UTF-8 file that is not empty. Raises DataError."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from ((number, line.strip()) for number, line in enumerate(file, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {in_a_line(error)}") from error


def fields(path: Path, count: int, *, skip: int = 0) -> Iterator[list[str]]:
    """The words of each line behind the first `skip`, of which there are `count`. Raises DataError."""
    for number, line in lines(path):
        words = line.split()
        if number <= skip:
            continue
        if len(words) != count:
            raise DataError(f"{path} line {number}: {count} words are needed, and there are {len(words)}")
        yield words


def objects(path: Path) -> list[dict[str, object]]:
    """The objects of a JSON list. Raises DataError."""
    try:
        listed = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {in_a_line(error)}") from error
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise DataError(f"{path} is no JSON list of objects")
    return listed


def in_a_line(error: object) -> str:
    """An error's text without line breaks, cut to 200 signs."""
    return " ".join(str(error).split())[:200]


def _csv(path: Path, needed: Sequence[str], known: Sequence[str] | None) -> Iterator[Record]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, strict=True)
        try:
            header = [name.strip().lower() for name in next(rows, [])]
            _check_header(path, header, needed, known)
            for row in rows:
                if row and len(row) != len(header):
                    raise DataError(f"{path} line {rows.line_num}: {len(row)} cells, and the header has {len(header)}")
                if row:
                    yield rows.line_num, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise DataError(f"{path} line {rows.line_num}: {in_a_line(error)}") from error


def _parquet(path: Path, needed: Sequence[str], known: Sequence[str] | None) -> Iterator[Record]:
    with pq.ParquetFile(path) as file:
        names = list(file.schema_arrow.names)
        _check_header(path, names, needed, known)
        wanted = [name for name in names if known is None or name in known]
        number = 0
        for batch in file.iter_batches(_CHUNK, columns=wanted):
            columns = [batch.column(name).to_pylist() for name in wanted]
            for cells in zip(*columns, strict=True):
                number += 1
                yield number, {name: _text(path, number, name, cell) for name, cell in zip(wanted, cells, strict=True)}


def _text(path: Path, number: int, name: str, cell: object) -> str:
    """A cell as a CSV would have it; numbers with a fraction are refused, since 3.0 and 3 would be two labels."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, str | int):
        return str(cell)
    raise DataError(f"{path} row {number}: {name} is {cell!r}: make the column one of texts or whole numbers")


def _check_header(path: Path, names: Sequence[str], needed: Sequence[str], known: Sequence[str] | None) -> None:
    for name in needed:
        if name not in names:
            raise DataError(
                f"{path} has no column {name}: its first line names {', '.join(needed)}, with commas between"
            )
    for name in [] if known is None else [name for name in names if name not in known]:
        near = get_close_matches(name, known or (), 1)
        mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(known or ())}"
        raise DataError(f"{path}: {name!r} is no column of a manifest: {mend}")
    if len(set(names)) < len(names):
        raise DataError(f"{path}: a column comes twice: {', '.join(names)}")
