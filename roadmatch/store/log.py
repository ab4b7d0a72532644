"""The change log of a gallery: which images came and went, in order of commit, without a hole.

The numbers are taken by an UPDATE of the gallery's own row, so the row's lock serialises the writers of one gallery and
an entry is never visible before an older one. A sequence of the database gives no such order: followers miss entries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from roadmatch.errors import GalleryNotFound, LogGap
from roadmatch.store.tables import changes, embeddings, galleries, images

_STREAMED_ROWS = 1000


class Kind(StrEnum):
    """What happened to an image; a replaced picture is an add and a remove, because an image never changes."""

    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True)
class Change:
    """A change to be logged."""

    kind: Kind
    image_id: str


@dataclass(frozen=True)
class Entry:
    """A logged change with what a replica needs to follow it.

    item_id, vector (float32, little-endian) and b are None in an add whose image is gone again by a later entry, and in
    every remove. An image that is there without an embedding under the asked bundle has an item_id but no vector.
    """

    seq: int
    kind: Kind
    image_id: str
    item_id: str | None
    vector: bytes | None
    b: float | None


@dataclass(frozen=True)
class Snapshot:
    """All images of a gallery at one moment.

    seq: of the newest entry that the rows include. images: how many rows come (for arrays made beforehand).
    rows: (image_id, item_id, vector, b) in no particular order, streamed: read them before the transaction ends.
    """

    seq: int
    images: int
    rows: Iterator[tuple[str, str, bytes, float]]


_newest = select(galleries.c.seq).where(galleries.c.id == bindparam("gallery"))
_tail = (
    select(
        changes.c.seq,
        changes.c.kind,
        changes.c.image_id,
        images.c.item_id,
        embeddings.c.vector,
        embeddings.c.b,
    )
    .select_from(changes)
    .join(images, images.c.id == changes.c.image_id, isouter=True)
    .join(
        embeddings,
        (embeddings.c.image_id == changes.c.image_id) & (embeddings.c.bundle == bindparam("bundle")),
        isouter=True,
    )
    .where(changes.c.gallery_id == bindparam("gallery"), changes.c.seq > bindparam("after"))
    .order_by(changes.c.seq)
)
_first_tail = _tail.limit(bindparam("limit"))
_all = (
    select(images.c.id, images.c.item_id, embeddings.c.vector, embeddings.c.b)
    .join(embeddings, (embeddings.c.image_id == images.c.id) & (embeddings.c.bundle == bindparam("bundle")))
    .where(images.c.gallery_id == bindparam("gallery"))
)
_row = select(galleries).where(galleries.c.id == bindparam("gallery"))
_locked_row = _row.with_for_update(key_share=True)
_take = (
    update(galleries)
    .where(galleries.c.id == bindparam("gallery"))
    .values(seq=galleries.c.seq + bindparam("count"))
    .returning(galleries.c.seq)
)


def lock(connection: Connection, gallery_id: int) -> Row[Any]:
    """Lock the gallery until the transaction ends -> its row; raises GalleryNotFound.

    A writer that first reads what it will change calls this before it reads: what it then sees is newer than every
    other writer's commit and stays so until its own. On SQLite the transaction has the only write lock already.
    """
    row = connection.execute(_locked_row, {"gallery": gallery_id}).one_or_none()
    if row is None:
        raise _gone(gallery_id)
    return row


def append(connection: Connection, gallery_id: int, entries: Sequence[Change]) -> int:
    """Log the changes in their order -> the gallery's newest seq; raises GalleryNotFound.

    From here to the end of the transaction no one else writes to this gallery. Images that are added are in the same
    transaction, before or after this call.
    """
    newest = connection.execute(_take, {"gallery": gallery_id, "count": len(entries)}).scalar_one_or_none()
    if newest is None:
        raise _gone(gallery_id)
    if entries:
        first = newest - len(entries) + 1
        connection.execute(
            insert(changes),
            [
                {"gallery_id": gallery_id, "seq": seq, "kind": entry.kind.value, "image_id": entry.image_id}
                for seq, entry in enumerate(entries, first)
            ],
        )
    return int(newest)


def follow(connection: Connection, gallery_id: int, after: int, bundle: str, limit: int | None = None) -> list[Entry]:
    """The entries after a seq, oldest first, at most `limit`; raises LogGap, GalleryNotFound.

    Every entry that was committed before the call is in the answer. With nothing new it costs one look at one row.
    A limit may cut a transaction in two; adds come before removes there, so a replaced item is never without an image.
    """
    newest = connection.execute(_newest, {"gallery": gallery_id}).scalar_one_or_none()
    if newest is None:
        raise _gone(gallery_id)
    if newest == after:
        return []
    asked = {"gallery": gallery_id, "after": after, "bundle": bundle}
    if limit is None:
        rows = connection.execute(_tail, asked).all()
    else:
        rows = connection.execute(_first_tail, asked | {"limit": limit}).all()
    entries = [Entry(seq, Kind(kind), image_id, item_id, vector, b) for seq, kind, image_id, item_id, vector, b in rows]
    due = newest - after if limit is None else min(limit, newest - after)
    seqs = range(after + 1, after + 1 + max(due, len(entries)))
    if due < 0 or [entry.seq for entry in entries] != list(seqs):
        raise LogGap(f"the change log of gallery {gallery_id} has no full account after {after}: open the replica anew")
    return entries


def prune(connection: Connection, gallery_id: int, older_than: datetime) -> int:
    """Delete the entries before a moment (aware) -> how many; what is left starts where the deleted ones end.

    Times need not rise with seq (a transaction's time is that of its start), so only what comes before the first young
    entry goes.
    """
    first_kept = (
        select(func.min(changes.c.seq))
        .where(changes.c.gallery_id == gallery_id, changes.c.at >= older_than)
        .scalar_subquery()
    )
    gone = delete(changes).where(
        changes.c.gallery_id == gallery_id, (changes.c.seq < first_kept) | first_kept.is_(None)
    )
    return connection.execute(gone).rowcount


def snapshot(connection: Connection, gallery_id: int, bundle: str) -> Snapshot:
    """What a replica opens with; raises GalleryNotFound. Call it in `Database.read(snapshot=True)`."""
    row = connection.execute(_row, {"gallery": gallery_id}).one_or_none()
    if row is None:
        raise _gone(gallery_id)
    result = connection.execute(
        _all, {"gallery": gallery_id, "bundle": bundle}, execution_options={"yield_per": _STREAMED_ROWS}
    )
    return Snapshot(row.seq, row.images, (tuple(fields) for fields in result))


def _gone(gallery_id: int) -> GalleryNotFound:
    return GalleryNotFound(f"gallery number {gallery_id} is no longer there")
