"""`roadmatch backup`: a whole data folder, copied while the service runs."""

import secrets
import shutil
from argparse import Namespace
from pathlib import Path

from app.settings import DATABASE, Settings, SettingsError
from roadmatch.blobs import FolderBlobs, open_blobs
from roadmatch.gallery.backup import Copied, copy_pictures
from roadmatch.store.database import open_database
from roadmatch.store.snapshot import copy_sqlite, sqlite_file


def run_backup(chosen: Namespace) -> int:
    """Copy, and say what was copied."""
    settings = Settings.read(data=chosen.data, database=chosen.database, blobs=chosen.blobs)
    copied = back_up(settings, chosen.folder)
    erased = f", {copied.erased:,} erased meanwhile" if copied.erased else ""
    print(f"{chosen.folder}: the database and {copied.pictures:,} pictures, {copied.size / 1e6:,.1f} MB{erased}")
    return 0


def back_up(settings: Settings, folder: Path) -> Copied:
    """A new data folder, whole or not there. Raises StoreUnavailable, StorageFull, SettingsError, OSError."""
    database = sqlite_file(settings.database_url)
    if database is None:
        raise SettingsError("the database is no SQLite: copy it with pg_dump, then the pictures (docs/production.md)")
    if folder.exists():
        raise FileExistsError(17, "is there already: name a new folder", str(folder))
    building = folder.absolute().with_name(f".{folder.name}.{secrets.token_hex(4)}")
    building.mkdir(mode=0o700, parents=True)
    try:
        copied = _fill(settings, database, building)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return copied


def _fill(settings: Settings, database: Path, building: Path) -> Copied:
    copy_sqlite(database, building / DATABASE)
    copy = open_database(f"sqlite:///{building / DATABASE}")
    try:
        blobs = open_blobs(settings.blobs, settings.data / "pictures")
        return copy_pictures(copy, blobs, FolderBlobs(building / "pictures"))
    finally:
        copy.close()
