"""A copy of an SQLite database while others write to it."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import make_url

from roadmatch.errors import StorageFull, StoreUnavailable


def sqlite_file(url: str) -> Path | None:
    """The file of a database URL; None where it is no SQLite file."""
    parsed = make_url(url)
    return Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None


def copy_sqlite(source: Path, target: Path) -> None:
    """The database as of one moment, to a file that is not there yet. Raises StoreUnavailable, StorageFull."""
    if not source.is_file():
        raise StoreUnavailable(f"{source} is not there: name the data folder of a service that uses SQLite")
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as ours,
            closing(sqlite3.connect(target)) as theirs,
        ):
            ours.execute("BEGIN")
            ours.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on it sees one moment
            ours.backup(theirs)
    except sqlite3.Error as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise StorageFull(f"no room left for a copy of {source}") from error
        raise StoreUnavailable(f"{source} cannot be copied: {error}") from error
    with target.open("rb+") as file:
        os.fsync(file.fileno())
