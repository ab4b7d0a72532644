"""Galleries: named, bound to one bundle and a default rule."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select
from sqlalchemy import delete as delete_rows
from sqlalchemy import insert as insert_rows
from sqlalchemy import update as update_rows
from sqlalchemy.exc import IntegrityError

from roadmatch.blobs import Blobs
from roadmatch.errors import GalleryExists, GalleryNotFound, StoreUnavailable
from roadmatch.store import log
from roadmatch.store.database import Database
from roadmatch.store.tables import changes, embeddings, galleries, images, items

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_by_name = select(galleries).where(galleries.c.name == bindparam("name"))
_what_changes = select(
    *(galleries.c[name] for name in ("id", "bundle", "rule", "keep", "seq", "items", "images"))
).where(galleries.c.name == bindparam("name"))


class Keep(StrEnum):
    """What is kept of an uploaded picture beside its embedding."""

    ORIGINAL = "original"
    NONE = "none"


@dataclass(frozen=True)
class Gallery:
    """A gallery as it was at one moment; id is never given twice, not even for the same name.

    seq: of the newest entry of its change log. items, images: how many it holds.
    """

    id: int
    name: str
    bundle: str
    rule: str
    keep: Keep
    seq: int
    items: int
    images: int
    created_at: datetime


def create(database: Database, name: str, *, bundle: str, rule: str, keep: Keep) -> Gallery:
    """A new, empty gallery; raises GalleryExists, ValueError for a bad name or keep."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a gallery's name is 1 to 128 of A-Z a-z 0-9 . _ - and starts with a letter or digit: {name!r}"
        )
    row = {"name": name, "bundle": bundle, "rule": rule, "keep": Keep(keep).value}
    try:
        with database.write() as connection:
            return _gallery(connection.execute(insert_rows(galleries).values(row).returning(galleries)).one())
    except IntegrityError as error:
        raise GalleryExists(f"there is a gallery {name} already") from error


def get(database: Database, name: str) -> Gallery:
    """The gallery of a name; raises GalleryNotFound."""
    with database.read() as connection:
        return _gallery(_row(connection, name))


def again(database: Database, known: Gallery) -> Gallery:
    """A gallery that was read before, as it is now, for a third of the time of `get`; raises GalleryNotFound."""
    row = database.look(_what_changes, {"name": known.name})
    if row is None:
        raise _not_found(known.name)
    id_, bundle, rule, keep, seq, items_, images_ = row
    if id_ != known.id:  # deleted and made anew
        return get(database, known.name)
    return replace(known, bundle=bundle, rule=rule, keep=Keep(keep), seq=seq, items=items_, images=images_)


def list_(database: Database, *, after: str | None = None, limit: int = 100) -> list[Gallery]:
    """Galleries in the order of their names, those after a name, at most `limit`."""
    asked = select(galleries).order_by(galleries.c.name).limit(limit)
    if after is not None:
        asked = asked.where(galleries.c.name > after)
    with database.read() as connection:
        return [_gallery(row) for row in connection.execute(asked)]


def update(database: Database, name: str, *, rule: str | None = None, keep: Keep | None = None) -> Gallery:
    """Change the default rule, or what is kept of the pictures to come; raises GalleryNotFound.

    Pictures that are kept already stay until their item is written or deleted.
    """
    wanted = {"rule": rule, "keep": keep and Keep(keep).value}
    changed = {column: value for column, value in wanted.items() if value is not None}
    if not changed:
        return get(database, name)
    change = update_rows(galleries).where(galleries.c.name == name).values(changed).returning(galleries)
    with database.write() as connection:
        row = connection.execute(change).one_or_none()
    if row is None:
        raise _not_found(name)
    return _gallery(row)


def delete(database: Database, blobs: Blobs, name: str) -> None:
    """Delete a gallery with all it holds; raises GalleryNotFound.

    Its rows go in one transaction, its pictures right after; what a kill leaves of those is swept.
    """
    with database.write(long=True) as connection:
        gallery_id = _row(connection, name).id
        log.lock(connection, gallery_id)  # a writer in between finishes first, the next one finds no gallery
        of_gallery = images.c.gallery_id == gallery_id
        blob_keys = connection.scalars(select(images.c.blob).where(of_gallery, images.c.blob.is_not(None))).all()
        connection.execute(
            delete_rows(embeddings).where(embeddings.c.image_id.in_(select(images.c.id).where(of_gallery)))
        )
        connection.execute(delete_rows(images).where(of_gallery))
        connection.execute(delete_rows(items).where(items.c.gallery_id == gallery_id))
        connection.execute(delete_rows(changes).where(changes.c.gallery_id == gallery_id))
        connection.execute(delete_rows(galleries).where(galleries.c.id == gallery_id))
    database.checkpoint()
    with suppress(StoreUnavailable):  # this one and the rest are left to the sweep
        for key in blob_keys:
            blobs.delete(key)


def _row(connection: Connection, name: str) -> Row[Any]:
    row = connection.execute(_by_name, {"name": name}).one_or_none()
    if row is None:
        raise _not_found(name)
    return row


def _gallery(row: Row[Any]) -> Gallery:
    return Gallery(
        row.id, row.name, row.bundle, row.rule, Keep(row.keep), row.seq, row.items, row.images, row.created_at
    )


def _not_found(name: str) -> GalleryNotFound:
    return GalleryNotFound(f"there is no gallery {name}")
