"""Lists of pictures: CSV or JSON lines with id, path or url, label and metadata; and lists of ids."""

import csv
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from roadmatch.gallery.items import Metadata
from roadmatch.jobs import folders
from roadmatch.jobs.entry import Broken, EntryFailed, Found, SourceError, shown

HOSTS_SETTING = "ROADMATCH_IMPORT_HOSTS"
"""The setting by which an operator allows URLs."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#]*@)?([^?#]*)")
COLUMNS = ("id", "path", "url", "label", "metadata")
_HEADER = "line 1 names the columns: id, path or url, and if wanted label and metadata, with commas between"
_LONGEST_LINE = 1_000_000
_METADATA_BYTES, _METADATA_FIELDS = 16_384, 64

Fetch = Callable[[str], bytes] | None


class _RowError(Exception):
    """What is wrong with one row."""


@dataclass(frozen=True)
class _Places:
    folders: tuple[Path, ...]
    fetch: Fetch

    def read(self, path: str | None, url: str | None) -> bytes:
        """The bytes that a row names. Raises EntryFailed."""
        if path:
            return folders.read_named(path, self.folders)
        if self.fetch is None:
            raise EntryFailed(
                "urls-off", f"this server fetches no URLs: its operator can allow hosts with {HOSTS_SETTING}"
            )
        return self.fetch(url or "")


def csv_rows(path: Path, allowed: tuple[Path, ...], fetch: Fetch) -> Generator[Found | Broken, None, None]:
    """The rows of a CSV in UTF-8 with a header. Raises SourceError for no header, a quote that is not closed, or
    another encoding.
    """
    with path.open("rb") as file:
        rows = csv.reader(_lines(file), strict=True)
        header, places = _header(rows), _Places(folders.real(allowed), fetch)
        while True:
            line = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                open_for_long = rows.line_num > line and "limit" in str(error)
                if open_for_long or "unexpected end" in str(error):
                    raise SourceError(f"line {line}: a quote is opened and not closed: close it") from error
                yield _broken(line, None, f"the row is no CSV: {error}")
                continue
            if row:
                yield _checked(line, partial(_csv_fields, header, row), places)


def _header(rows: Iterator[list[str]]) -> list[str]:
    try:
        header = [name.strip().lower() for name in next(rows)]
    except StopIteration:
        raise SourceError(f"the manifest is empty: {_HEADER}") from None
    except csv.Error as error:
        raise SourceError(f"the manifest has no header: {_HEADER}") from error
    unknown = next((name for name in header if name not in COLUMNS), None)
    if "id" not in header or not {"path", "url"} & set(header):
        raise SourceError(f"the manifest has no header: {_HEADER}")
    if unknown is not None or len(set(header)) < len(header):
        raise SourceError(f"column {shown(repr(unknown))} is not known, or one comes twice: {_HEADER}")
    return header


def _csv_fields(header: list[str], row: list[str]) -> dict[str, Any]:
    if len(row) != len(header):
        raise _RowError(f"the row has {len(row)} columns, and the header {len(header)}")
    fields: dict[str, Any] = {name: value for name, value in zip(header, row, strict=True) if value}
    if "metadata" in fields:
        fields["metadata"] = _metadata_of_text(fields["metadata"])
    return fields


def json_rows(path: Path, allowed: tuple[Path, ...], fetch: Fetch) -> Generator[Found | Broken, None, None]:
    """The rows of JSON lines in UTF-8, one object a line. Raises SourceError for an empty file or another encoding."""
    places, empty = _Places(folders.real(allowed), fetch), True
    with path.open("rb") as file:
        for line, text in enumerate(_lines(file), 1):
            empty = False
            if text.strip():
                yield _checked(line, partial(_json, text), places)
    if empty:
        raise SourceError("the manifest is empty: write one JSON object with id and path or url a line")


def ids(listed: Any) -> Generator[Found | Broken, None, None]:
    """The ids of a deletion. Raises SourceError for what is no list."""
    if not isinstance(listed, list):
        raise SourceError("the job's source has no list of ids: submit it again")
    for item_id in listed:
        yield Found(shown(str(item_id)), str(item_id), _no_picture)


def ids_of(path: Path) -> Generator[Found | Broken, None, None]:
    """The ids of a deletion from an upload in UTF-8, one a line. Raises SourceError for another encoding."""
    with path.open("rb") as file:
        for line, text in enumerate(_lines(file), 1):
            if text.strip():
                yield Found(shown(f"line {line}: {text.strip()}"), text.strip(), _no_picture)


def _no_picture() -> bytes:
    raise EntryFailed("no-picture", "an id of a deletion has no picture")


def _lines(file: BinaryIO) -> Iterator[str]:
    """Lines in UTF-8, a mark at the start left out; one that is too long is cut, and so no row. Raises SourceError."""
    number = 0
    while raw := file.readline(_LONGEST_LINE):
        number += 1
        cut = len(raw) == _LONGEST_LINE and not raw.endswith(b"\n")
        while cut and (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
            pass
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8", "replace" if cut else "strict")
        except UnicodeDecodeError as error:
            raise SourceError(f"line {number} is not in the encoding UTF-8: save the manifest as UTF-8") from error


def _checked(line: int, fields: Callable[[], Any], places: _Places) -> Found | Broken:
    """A row's entry."""
    row: Any = None
    try:
        row = fields()
        return _found(line, row, places)
    except (_RowError, ValueError, RecursionError) as error:
        return _broken(
            line,
            row,
            str(error) if isinstance(error, _RowError) else f"the row is no JSON: {getattr(error, 'msg', error)}",
        )


def _found(line: int, row: Any, places: _Places) -> Found:
    if not isinstance(row, dict) or not set(row) <= set(COLUMNS):
        raise _RowError(f"a row has {', '.join(COLUMNS)} and nothing else")
    item_id, path, url, label = (_text(row, name) for name in COLUMNS[:4])
    if not item_id:
        raise _RowError("the row has no id")
    if bool(path) == bool(url):
        raise _RowError("a row has either a path or a url")
    return Found(_name(line, row), item_id, partial(places.read, path, url), label, _metadata(row.get("metadata")))


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise _RowError(f"{name} is a text without NUL")
    return value


def _metadata(value: Any) -> Metadata:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _METADATA_FIELDS:
        raise _RowError(f"metadata is a JSON object of at most {_METADATA_FIELDS} fields")
    if len(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")) > _METADATA_BYTES:
        raise _RowError(f"metadata has more than {_METADATA_BYTES} bytes")
    return value


def _metadata_of_text(text: str) -> Any:
    try:
        return _json(text)
    except json.JSONDecodeError as error:
        raise _RowError(f'metadata is no JSON object, such as {{"price": 12}}: {error.msg}') from error


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_not_finite, object_pairs_hook=_without_repeats)


def _not_finite(name: str) -> float:
    raise _RowError(f"{name} is not finite")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _RowError("a name comes twice")
    return fields


def _broken(line: int, row: Any, detail: str) -> Broken:
    return Broken(_name(line, row), "invalid-row", shown(detail))


def _without_secrets(named: str) -> str:
    """A URL without user, password and query, which may hold a token; a path as it is."""
    url = _ADDRESS.match(named)
    return f"{url[1]}{url[2]}" if url else named


def _name(line: int, row: Any) -> str:
    named = (row.get("path") or row.get("url") or row.get("id")) if isinstance(row, dict) else None
    return shown(f"line {line}: {_without_secrets(named)}") if isinstance(named, str) else f"line {line}"
