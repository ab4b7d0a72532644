"""Items and their images: the writing side of a gallery.

A write puts its pictures on disk first and then does one transaction: lock the gallery, look at the item, change item,
images, embeddings, log and counts, commit. What is no longer named is deleted after the commit. A kill at any moment
leaves either the old item or the new one, and at most some pictures that no row names, for the sweep.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from sqlalchemy import Connection, Row

from roadmatch.blobs import Blobs
from roadmatch.errors import (
    BlobMissing,
    GalleryChanged,
    GalleryNotFound,
    ImageNotFound,
    ItemNotFound,
    LastImage,
    PictureNotKept,
    TooManyImages,
    VersionMismatch,
)
from roadmatch.gallery import item_rows
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.item_rows import Item, Metadata, NewImage, Plan, Rewrite, StoredImage, new_id, spelt
from roadmatch.gallery.pictures import Pictures, delete_pictures, pictures_of_write
from roadmatch.store import log
from roadmatch.store.database import Database

__all__ = [
    "LONGEST_LABEL",
    "MOST_IMAGES",
    "UNSTORABLE",
    "Absent",
    "GalleryStore",
    "Item",
    "Metadata",
    "NewImage",
    "Outcome",
    "Put",
    "StoredImage",
    "Wanted",
    "add_images",
    "check",
    "delete",
    "delete_image",
    "delete_many",
    "get",
    "get_many",
    "labels",
    "list_",
    "new_id",
    "put",
    "put_many",
    "read_picture",
    "spelt",
]

MOST_IMAGES = 100
"""An item holds at most so many images."""
LONGEST_LABEL = 256
"""In characters."""

_ITEM_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
"""PostgreSQL takes no NUL in a text, and UTF-8 no lone surrogate."""


class Absent(Enum):
    """What a caller expects of an item that must not be there yet."""

    ABSENT = "absent"


class Outcome(StrEnum):
    """What a write did to the item."""

    CREATED = "created"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"


@dataclass(frozen=True)
class GalleryStore:
    """What writes to galleries need. trace is told of the moments "blob_written", "before_commit", "after_commit"."""

    database: Database
    blobs: Blobs
    trace: Callable[[str], None] = lambda _moment: None


@dataclass(frozen=True)
class Wanted:
    """What an item shall be as a whole."""

    item_id: str
    label: str | None
    metadata: Metadata
    images: Sequence[NewImage]


@dataclass(frozen=True)
class Put:
    """What a write left behind and did."""

    item: Item
    outcome: Outcome


def put(
    store: GalleryStore,
    gallery: Gallery,
    item_id: str,
    *,
    label: str | None,
    metadata: Metadata,
    images: Sequence[NewImage],
    expect_version: int | Absent | None = None,
) -> Put:
    """Make the item be this: the images replace those it has, but one that is uploaded again keeps its id.

    An item that is this already is left as it is, so a repeated upload costs one look. expect_version: the version that
    the item must have, ABSENT for none, None for any. Raises GalleryNotFound, GalleryChanged, VersionMismatch,
    TooManyImages, StorageFull, StoreUnavailable; ValueError for a bad id, label or metadata, or for no image.
    """
    replacing = _replacing(Wanted(item_id, label, metadata, images))

    def plan(item: Item | None) -> Plan:
        _check_expected(item_id, item, expect_version)
        return replacing(item)

    return _write(store, gallery, item_id, plan)


def put_many(
    store: GalleryStore,
    gallery: Gallery,
    wanted: Sequence[Wanted],
    also: Callable[[Connection, Sequence[Put]], None],
    pictures: Pictures | None = None,
) -> list[Put]:
    """`put` for many items in one transaction, each id once; all of them are written, or none.

    also: what else belongs to the transaction; it is called before the commit with what was done, also where that is
    nothing. pictures: of a block of pictures_of_write around this, for a caller that has begun to put them on disk or
    tries again. Raises what put does.
    """
    plans = {one.item_id: _replacing(one) for one in wanted}
    if len(plans) < len(wanted):
        raise ValueError(f"{len(wanted)} items have {len(plans)} ids: each comes once")
    return _write_all(store, gallery, plans, also, pictures)


def _replacing(wanted: Wanted) -> Callable[[Item | None], Plan]:
    """The plan by which an item becomes what is wanted. Raises ValueError, TooManyImages."""
    check(wanted)
    images = _distinct(wanted.item_id, wanted.images)
    hashes = {image.sha256 for image in images}

    def plan(item: Item | None) -> Plan:
        kept = tuple(image for image in item.images if image.sha256 in hashes) if item else ()
        return Plan(wanted.label, wanted.metadata, kept, images)

    return plan


def check(wanted: Wanted) -> None:
    """Raises ValueError for an id, a label or metadata that no item can have."""
    _check_id(wanted.item_id)
    _check_content(wanted.label, wanted.metadata)


def add_images(
    store: GalleryStore,
    gallery: Gallery,
    item_id: str,
    images: Sequence[NewImage],
    *,
    expect_version: int | None = None,
) -> Put:
    """Give the item more images; one that it has already is not doubled. Raises what put does, and ItemNotFound."""
    more = _distinct(item_id, images)

    def plan(item: Item | None) -> Plan:
        found = _expected(gallery, item_id, item, expect_version)
        _check_count(item_id, len({image.sha256 for image in found.images} | {image.sha256 for image in more}))
        return Plan(found.label, found.metadata, found.images, more)

    return _write(store, gallery, item_id, plan)


def delete_image(
    store: GalleryStore, gallery: Gallery, item_id: str, image_id: str, *, expect_version: int | None = None
) -> Item:
    """Delete one image of an item -> the item; the bytes go as `delete` says.

    Raises ItemNotFound, ImageNotFound, LastImage, VersionMismatch, GalleryNotFound, StoreUnavailable.
    """

    def plan(item: Item | None) -> Plan:
        found = _expected(gallery, item_id, item, expect_version)
        kept = tuple(image for image in found.images if image.id != image_id)
        if len(kept) == len(found.images):
            raise ImageNotFound(f"item {item_id} has no image {image_id}")
        if not kept:
            raise LastImage(f"{image_id} is the only image of item {item_id}: delete the item")
        return Plan(found.label, found.metadata, kept, ())

    return _write(store, gallery, item_id, plan).item


def delete(store: GalleryStore, gallery: Gallery, item_id: str, *, expect_version: int | None = None) -> None:
    """Delete an item with its images, embeddings, pictures and metadata; only ids of ours stay, in the log.

    On SQLite the deleted bytes are overwritten when this returns, unless a reader holds an old snapshot: then at the
    next checkpoint. PostgreSQL overwrites them after its next vacuum.
    Raises ItemNotFound, VersionMismatch, GalleryNotFound, GalleryChanged, StoreUnavailable.
    """
    with store.database.write() as connection:
        row = _locked(connection, gallery)
        item = _expected(gallery, item_id, item_rows.load(connection, gallery.id, item_id), expect_version)
        item_rows.delete_items(connection, row, [item])
        store.trace("before_commit")
    store.trace("after_commit")
    _erase(store, item.images)


def delete_many(
    store: GalleryStore, gallery: Gallery, item_ids: Sequence[str], also: Callable[[Connection, Sequence[str]], None]
) -> list[str]:
    """Delete those items of these ids that are there, in one transaction -> their ids. The bytes go as `delete` says.

    also: what else belongs to the transaction, called before the commit with the ids of what was deleted.
    Raises GalleryNotFound, GalleryChanged, StoreUnavailable.
    """
    with store.database.write() as connection:
        row = _locked(connection, gallery)
        found = list(item_rows.load_many(connection, gallery.id, item_ids).values())
        if found:
            item_rows.delete_items(connection, row, found)
        deleted = [item.id for item in found]
        also(connection, deleted)
        store.trace("before_commit")
    store.trace("after_commit")
    if found:
        _erase(store, [image for item in found for image in item.images])
    return deleted


def get(store: GalleryStore, gallery: Gallery, item_id: str) -> Item:
    """The item of an id; raises ItemNotFound, StoreUnavailable."""
    with store.database.read() as connection:
        return _found(gallery, item_id, item_rows.load(connection, gallery.id, item_id))


def get_many(store: GalleryStore, gallery: Gallery, item_ids: Sequence[str]) -> dict[str, Item]:
    """Those items of these ids that are there, by id; raises StoreUnavailable."""
    if not item_ids:
        return {}
    with store.database.read() as connection:
        return item_rows.load_many(connection, gallery.id, item_ids)


def list_(store: GalleryStore, gallery: Gallery, *, after: str | None = None, limit: int = 100) -> list[Item]:
    """Items in the order of their ids, those after an id, at most `limit`."""
    with store.database.read() as connection:
        return item_rows.load_page(connection, gallery.id, after, limit)


def labels(store: GalleryStore, gallery: Gallery) -> dict[str, str | None]:
    """The label of every item that has one, by item id; raises StoreUnavailable."""
    with store.database.read() as connection:
        return item_rows.load_labels(connection, gallery.id)


def read_picture(store: GalleryStore, gallery: Gallery, image_id: str) -> tuple[bytes, StoredImage]:
    """The bytes of an image as uploaded; raises ImageNotFound, PictureNotKept, BlobMissing, StoreUnavailable."""
    image = _image(store, gallery, image_id)
    if image.blob is None:
        raise PictureNotKept(f"gallery {gallery.name} keeps no picture of image {image_id}")
    try:
        return store.blobs.read(image.blob), image
    except BlobMissing:
        _image(store, gallery, image_id)  # deleted meanwhile: then it is not found, and nothing is amiss
        raise


def _write(store: GalleryStore, gallery: Gallery, item_id: str, plan: Callable[[Item | None], Plan]) -> Put:
    return _write_all(store, gallery, {item_id: plan})[0]


def _write_all(
    store: GalleryStore,
    gallery: Gallery,
    plans: Mapping[str, Callable[[Item | None], Plan]],
    also: Callable[[Connection, Sequence[Put]], None] | None = None,
    given: Pictures | None = None,
) -> list[Put]:
    """Make items be what their plans make of them, in the order that the module's first lines tell.

    also: is called in the transaction before its commit; without it, and where nothing changes, there is none.
    """
    with store.database.read() as connection:
        rewrites = _rewrites(connection, gallery, plans)
    changed = [one for one in rewrites if one.plan.changes(one.before, gallery.keep)]
    if not changed and also is None:
        return [_unchanged(one) for one in rewrites]
    with nullcontext(given) if given else pictures_of_write(store.blobs, store.trace) as pictures:
        if gallery.keep is Keep.ORIGINAL:
            plans_made = [one.plan for one in changed]
            regained = (new for plan in plans_made for _, new in plan.regained(gallery.keep))
            pictures.put_all([*(image for plan in plans_made for image in plan.added), *regained])
        with store.database.write() as connection:
            row = _locked(connection, gallery)
            rewrites = _rewrites(connection, gallery, plans)
            changed = [one for one in rewrites if one.plan.changes(one.before, Keep(row.keep))]
            puts = _apply(
                connection, row, rewrites, changed, pictures.name if row.keep == Keep.ORIGINAL else _keep_none
            )
            if also is not None:
                also(connection, puts)
            if changed:
                store.trace("before_commit")
            pictures.committing = pictures.committing or bool(changed)  # a commit before may have gone through
        if changed:
            store.trace("after_commit")
    gone = [image for one in changed for image in one.gone]
    if gone or any(_overwrote(one) for one in changed):
        _erase(store, gone)
    return puts


def _rewrites(
    connection: Connection, gallery: Gallery, plans: Mapping[str, Callable[[Item | None], Plan]]
) -> list[Rewrite]:
    found = item_rows.load_many(connection, gallery.id, list(plans)) if plans else {}
    return [Rewrite(item_id, found.get(item_id), plan(found.get(item_id))) for item_id, plan in plans.items()]


def _apply(
    connection: Connection,
    row: Row[Any],
    rewrites: Sequence[Rewrite],
    changed: Sequence[Rewrite],
    name: Callable[[NewImage], str | None],
) -> list[Put]:
    if not changed:
        return [_unchanged(one) for one in rewrites]
    item_rows.apply(connection, row, changed, name)
    after = item_rows.load_many(connection, row.id, [one.item_id for one in changed])
    return [
        Put(after[one.item_id], Outcome.REPLACED if one.before else Outcome.CREATED)
        if one.item_id in after
        else _unchanged(one)
        for one in rewrites
    ]


def _unchanged(rewrite: Rewrite) -> Put:
    assert rewrite.before is not None  # an item that is not there is changed by any plan
    return Put(rewrite.before, Outcome.UNCHANGED)


def _overwrote(rewrite: Rewrite) -> bool:
    """Whether a label or metadata that the database's files still hold is gone."""
    before, plan = rewrite.before, rewrite.plan
    return before is not None and (before.label, spelt(before.metadata)) != (plan.label, spelt(plan.metadata))


def _keep_none(_: NewImage) -> None:
    return None


def _locked(connection: Connection, gallery: Gallery) -> Row[Any]:
    """The gallery's row, locked until the end of the transaction; raises GalleryNotFound, GalleryChanged."""
    try:
        row = log.lock(connection, gallery.id)
    except GalleryNotFound as error:
        raise GalleryNotFound(f"there is no gallery {gallery.name}") from error
    if row.bundle != gallery.bundle:
        raise GalleryChanged(f"gallery {gallery.name} has changed to bundle {row.bundle}: embed the pictures anew")
    return row


def _erase(store: GalleryStore, gone: Sequence[StoredImage]) -> None:
    """After the commit: deleted bytes leave the database's files, and their pictures the disk."""
    store.database.checkpoint()
    delete_pictures(store.blobs, (image.blob for image in gone if image.blob is not None))


def _image(store: GalleryStore, gallery: Gallery, image_id: str) -> StoredImage:
    with store.database.read() as connection:
        image = item_rows.load_image(connection, gallery.id, image_id)
    if image is None:
        raise ImageNotFound(f"gallery {gallery.name} has no image {image_id}")
    return image


def _found(gallery: Gallery, item_id: str, item: Item | None) -> Item:
    if item is None:
        raise ItemNotFound(f"gallery {gallery.name} has no item {item_id}")
    return item


def _expected(gallery: Gallery, item_id: str, item: Item | None, expect_version: int | None) -> Item:
    found = _found(gallery, item_id, item)
    _check_expected(item_id, found, expect_version)
    return found


def _check_expected(item_id: str, item: Item | None, expect_version: int | Absent | None) -> None:
    if expect_version is None:
        return
    if expect_version is Absent.ABSENT:
        if item is not None:
            raise VersionMismatch(f"item {item_id} is there already, with version {item.version}")
    elif item is None:
        raise VersionMismatch(f"item {item_id} is not there, so it has no version {expect_version}")
    elif item.version != expect_version:
        raise VersionMismatch(f"item {item_id} has version {item.version}, not {expect_version}")


def _check_id(item_id: str) -> None:
    if not _ITEM_ID.fullmatch(item_id):
        raise ValueError(f"an item's id is 1 to 128 of A-Z a-z 0-9 . _ -, the first a letter or digit: {item_id!r}")


def _check_content(label: str | None, metadata: Metadata) -> None:
    if label is not None and (len(label) > LONGEST_LABEL or UNSTORABLE.search(label)):
        raise ValueError(f"a label is a text of at most {LONGEST_LABEL} characters without NUL: {label[:40]!r}")
    for name, value in metadata.items():
        if not isinstance(value, str | int | float | bool | None) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise ValueError(f"a value of metadata is a text, a finite number, true, false or null: {name!r}")
        if UNSTORABLE.search(name) or (isinstance(value, str) and UNSTORABLE.search(value)):
            raise ValueError(f"metadata holds no NUL and no lone surrogate: {name!r}")


def _check_count(item_id: str, count: int) -> None:
    if count > MOST_IMAGES:
        raise TooManyImages(f"an item holds at most {MOST_IMAGES} images, {item_id} would have {count}")


def _distinct(item_id: str, images: Sequence[NewImage]) -> list[NewImage]:
    """The images without repeated pictures, each as it came first; raises TooManyImages, ValueError for none."""
    if not images:
        raise ValueError(f"an item's write brings 1 to {MOST_IMAGES} images: {item_id} gets none")
    distinct = list({image.sha256: image for image in reversed(images)}.values())[::-1]
    _check_count(item_id, len(distinct))
    return distinct
