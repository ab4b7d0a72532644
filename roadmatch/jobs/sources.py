"""A job's source -> its entries, one by one and in the same order at every reading.

    sources:   position, rules of an item, ids that came before
      archives:   zip and tar, streamed
      manifests:  rows of CSV or JSON lines that name files or URLs
      folders:    files of an allowed folder of the server

An entry that cannot be used is a Failure in its place. Only a source as a whole raises SourceError.
"""

import re
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roadmatch.gallery import items
from roadmatch.jobs import archives, folders, manifests
from roadmatch.jobs.entry import MOST_ENTRIES, Broken, Entry, EntryFailed, Found, SourceError, shown, text_field
from roadmatch.jobs.queue import Failure

__all__ = ["MOST_ENTRIES", "Entry", "EntryFailed", "Places", "SourceError", "counted", "entries"]

_UPLOAD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_SEEN_CACHE_KB = 16_384


@dataclass(frozen=True)
class Places:
    """Where pictures may come from. uploads: folder of uploaded archives and manifests. folders: of the server, whose
    files may be imported. fetch: URL -> bytes, or EntryFailed; None where URLs are off.
    """

    uploads: Path
    folders: tuple[Path, ...] = ()
    fetch: Callable[[str], bytes] | None = None


@contextmanager
def entries(source: Mapping[str, Any], places: Places, start: int = 0) -> Iterator[Iterator[Entry | Failure]]:
    """The entries from position `start` on, lazily. Each is read before the next one is taken, if at all.

    Those before `start` cost a look at their names, in a tar a reading of their bytes. Memory holds one picture, and of
    a zip 16 bytes an entry. Raises SourceError on entering or later, where the source as a whole cannot be read on.
    """
    with closing(_found(source, places)) as found, closing(_ids()) as seen:
        yield _numbered(found, seen, start)


def counted(source: Mapping[str, Any], places: Places) -> int | None:
    """How many entries there are; None for a tar, which would have to be read through. Raises SourceError."""
    if source.get("kind") == "tar":
        return None
    with closing(_found(source, places)) as found:
        return sum(1 for _ in _capped(found))


def _found(source: Mapping[str, Any], places: Places) -> Generator[Found | Broken, None, None]:
    labels = source.get("labels")
    match source.get("kind"):
        case "zip":
            return archives.zip_members(_upload(source, places), labels)
        case "tar":
            return archives.tar_members(_upload(source, places), labels)
        case "csv":
            return manifests.csv_rows(_upload(source, places), places.folders, places.fetch)
        case "jsonl":
            return manifests.json_rows(_upload(source, places), places.folders, places.fetch)
        case "folder":
            return folders.files(text_field(source, "folder"), places.folders, labels)
        case "ids" if "ids" in source:
            return manifests.ids(source["ids"])
        case "ids":
            return manifests.ids_of(_upload(source, places))
    raise SourceError(f"the job's source is of no known kind: {shown(str(source.get('kind')))}")


def _upload(source: Mapping[str, Any], places: Places) -> Path:
    key = text_field(source, "upload")
    path = places.uploads / key
    if not _UPLOAD.fullmatch(key) or not path.is_file():
        raise SourceError(f"upload {shown(key)} is not there any more: send the file again")
    return path


def _numbered(found: Iterable[Found | Broken], seen: sqlite3.Connection, start: int) -> Iterator[Entry | Failure]:
    for position, one in enumerate(_capped(found)):
        entry = _judged(position, one, seen)
        if position >= start:
            yield entry


def _capped(found: Iterable[Found | Broken]) -> Iterator[Found | Broken]:
    for position, one in enumerate(found):
        if position == MOST_ENTRIES:
            raise SourceError(f"the source has more than {MOST_ENTRIES:,} entries: split it")
        yield one


def _judged(position: int, one: Found | Broken, seen: sqlite3.Connection) -> Entry | Failure:
    if isinstance(one, Broken):
        return Failure(position, one.name, one.code, one.detail)
    try:
        items.check(items.Wanted(one.item_id, one.label, one.metadata, ()))
    except ValueError as error:
        return Failure(position, one.name, "invalid-item", shown(str(error)))
    first = _first(seen, one)
    if first is not None:
        return Failure(
            position, one.name, "duplicate-id", f"id {one.item_id} came before, at {first}: an id comes once"
        )
    return Entry(position, one.name, one.item_id, one.label, one.metadata, one.read)


def _ids() -> sqlite3.Connection:
    """Ids that came before, in a nameless database that moves to the disk where it grows: a million texts are more
    than a worker should hold."""
    seen = sqlite3.connect("", check_same_thread=False)  # entries are taken by a thread that reads ahead
    seen.execute(f"PRAGMA cache_size=-{_SEEN_CACHE_KB}")
    seen.execute("PRAGMA journal_mode=OFF")
    seen.execute("CREATE TABLE seen (id TEXT PRIMARY KEY, name TEXT) WITHOUT ROWID")
    return seen


def _first(seen: sqlite3.Connection, one: Found) -> str | None:
    """The name under which an id came first; None where that is now."""
    if seen.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (one.item_id, one.name)).rowcount:
        return None
    (name,) = seen.execute("SELECT name FROM seen WHERE id = ?", (one.item_id,)).fetchone()
    return str(name)
