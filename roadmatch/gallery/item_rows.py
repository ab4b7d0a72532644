"""Items and images as rows: reading them, and what a write does to them inside its transaction."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, Select, bindparam, delete, func, insert, select, update

from roadmatch.gallery.galleries import Keep
from roadmatch.store import log
from roadmatch.store.tables import embeddings, galleries, images, items

Metadata = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True)
class NewImage:
    """An image to be stored: the bytes as uploaded, what was read from them, and the embedding of the gallery's bundle.

    vector: (D,) float32, unit length. b: level of the background, roadmatch.scoring.
    """

    data: bytes
    sha256: str
    format: str
    width: int
    height: int
    vector: NDArray[np.float32]
    b: float

    def __post_init__(self) -> None:
        """Refuse what would poison every search: an embedding that is not a list of finite numbers."""
        if self.vector.ndim != 1 or not np.isfinite(self.vector).all() or not np.isfinite(self.b):
            raise ValueError(f"an embedding is a finite vector (D,) and a finite b, not {self.vector.shape}, {self.b}")


@dataclass(frozen=True)
class StoredImage:
    """An image of an item. bytes: how many were uploaded. blob: key of the kept bytes, None where none are kept."""

    id: str
    item: str
    sha256: str
    format: str
    width: int
    height: int
    bytes: int
    blob: str | None
    created_at: datetime


@dataclass(frozen=True)
class Item:
    """An item. version: changes with every visible change and never comes back within the gallery (Gallery.id)."""

    id: str
    label: str | None
    metadata: Metadata
    version: int
    images: tuple[StoredImage, ...]
    created_at: datetime
    updated_at: datetime


def spelt(metadata: Metadata) -> str:
    """Metadata as text, by which it is compared: Python holds true for 1, and callers do not."""
    return json.dumps(dict(metadata), sort_keys=True)


@dataclass(frozen=True)
class Plan:
    """What an item shall be. kept: images that it has and keeps; wanted: uploaded ones, stored unless they are kept."""

    label: str | None
    metadata: Metadata
    kept: tuple[StoredImage, ...]
    wanted: Sequence[NewImage]

    @property
    def added(self) -> list[NewImage]:
        """The uploaded images that the item has not."""
        hashes = {image.sha256 for image in self.kept}
        return [image for image in self.wanted if image.sha256 not in hashes]

    def regained(self, keep: Keep) -> list[tuple[StoredImage, NewImage]]:
        """Images whose picture was not kept when they came, and is from now on."""
        if keep is Keep.NONE:
            return []
        uploaded = {image.sha256: image for image in self.wanted}
        return [(old, uploaded[old.sha256]) for old in self.kept if old.blob is None and old.sha256 in uploaded]

    def changes(self, item: Item | None, keep: Keep) -> bool:
        """Whether the item is not this already."""
        return (
            item is None
            or self.kept != item.images
            or bool(self.added or self.regained(keep))
            or (self.label, spelt(self.metadata)) != (item.label, spelt(item.metadata))
        )


def new_id() -> str:
    """An id of ours for an item or an image: 24 random hex digits."""
    return secrets.token_hex(12)


def load(connection: Connection, gallery_id: int, item_id: str) -> Item | None:
    """The item of an id with its images, as of one moment."""
    found = _items(connection.execute(_one_item, {"gallery": gallery_id, "item": item_id}).all())
    return found[0] if found else None


def load_page(connection: Connection, gallery_id: int, after: str | None, limit: int) -> list[Item]:
    """Items in the order of their ids, those after an id, at most `limit`, as of one moment."""
    page = select(items).where(items.c.gallery_id == gallery_id).order_by(items.c.id).limit(limit)
    if after is not None:
        page = page.where(items.c.id > after)
    return _items(connection.execute(_with_images(page)).all())


def load_labels(connection: Connection, gallery_id: int) -> dict[str, str | None]:
    """The labels of a gallery's items, by item id; items without one are left out."""
    rows = connection.execute(
        select(items.c.id, items.c.label).where(items.c.gallery_id == gallery_id, items.c.label.is_not(None))
    )
    return {row.id: row.label for row in rows}


def load_image(connection: Connection, gallery_id: int, image_id: str) -> StoredImage | None:
    """The image of an id."""
    row = connection.execute(_one_image, {"gallery": gallery_id, "image": image_id}).one_or_none()
    return _image(row) if row else None


def apply(
    connection: Connection,
    gallery: Row[Any],
    item_id: str,
    item: Item | None,
    plan: Plan,
    blob: Callable[[NewImage], str | None],
) -> list[StoredImage]:
    """Make the item (None where there is none) what the plan says -> the images that are gone.

    gallery: its row, locked. blob: gives the key of an image's kept picture.
    """
    gone = [image for image in item.images if image not in plan.kept] if item else []
    added = [(new_id(), image) for image in plan.added]
    content = {"label": plan.label, "metadata": dict(plan.metadata), "version": gallery.writes + 1}
    if item is None:
        connection.execute(insert(items), {"gallery_id": gallery.id, "id": item_id, **content})
    else:
        connection.execute(_update_item, {"gallery": gallery.id, "item": item_id, **content})
    for stored, image in plan.regained(Keep(gallery.keep)):
        connection.execute(_update_blob, {"image": stored.id, "key": blob(image)})
    _delete_images(connection, gone)
    _insert_images(connection, gallery, item_id, added, blob)
    _log(connection, gallery.id, [image_id for image_id, _ in added], gone)
    _count(connection, gallery, items=0 if item else 1, images=len(added) - len(gone))
    return gone


def delete_item(connection: Connection, gallery: Row[Any], item: Item) -> None:
    """Delete the rows of an item. gallery: its row, locked."""
    _delete_images(connection, item.images)
    connection.execute(_delete_item, {"gallery": gallery.id, "item": item.id})
    _log(connection, gallery.id, [], item.images)
    _count(connection, gallery, items=-1, images=-len(item.images))


def _with_images(page: Select[Any]) -> Select[Any]:
    """The items of a page with their images, in one statement so that both are of one moment."""
    item = page.subquery("item")
    return (
        select(
            images,
            item.c.label,
            item.c.metadata.label("item_metadata"),
            item.c.version,
            item.c.created_at.label("item_created_at"),
            item.c.updated_at,
        )
        .join(item, (images.c.gallery_id == item.c.gallery_id) & (images.c.item_id == item.c.id))
        .order_by(item.c.id, images.c.created_at, images.c.id)
    )


_one_item = _with_images(
    select(items).where(items.c.gallery_id == bindparam("gallery"), items.c.id == bindparam("item"))
)
_one_image = select(images).where(images.c.gallery_id == bindparam("gallery"), images.c.id == bindparam("image"))
_delete_item = delete(items).where(items.c.gallery_id == bindparam("gallery"), items.c.id == bindparam("item"))
_update_item = (
    update(items)
    .where(items.c.gallery_id == bindparam("gallery"), items.c.id == bindparam("item"))
    .values(
        label=bindparam("label"), metadata=bindparam("metadata"), version=bindparam("version"), updated_at=func.now()
    )
)
_update_blob = update(images).where(images.c.id == bindparam("image")).values(blob=bindparam("key"))


def _items(rows: Sequence[Row[Any]]) -> list[Item]:
    """Rows of _with_images -> their items, in the same order; every item has an image."""
    of_item: dict[str, list[Row[Any]]] = {}
    for row in rows:
        of_item.setdefault(row.item_id, []).append(row)
    return [
        Item(
            item_id,
            group[0].label,
            group[0].item_metadata,
            group[0].version,
            tuple(_image(row) for row in group),
            group[0].item_created_at,
            group[0].updated_at,
        )
        for item_id, group in of_item.items()
    ]


def _image(row: Row[Any]) -> StoredImage:
    return StoredImage(
        row.id, row.item_id, row.sha256, row.format, row.width, row.height, row.bytes, row.blob, row.created_at
    )


def _insert_images(
    connection: Connection,
    gallery: Row[Any],
    item_id: str,
    added: Sequence[tuple[str, NewImage]],
    blob: Callable[[NewImage], str | None],
) -> None:
    image_rows = [
        {
            "id": image_id,
            "gallery_id": gallery.id,
            "item_id": item_id,
            "sha256": image.sha256,
            "format": image.format,
            "width": image.width,
            "height": image.height,
            "bytes": len(image.data),
            "blob": blob(image),
        }
        for image_id, image in added
    ]
    embedding_rows = [
        {"image_id": image_id, "bundle": gallery.bundle, "vector": image.vector.astype("<f4").tobytes(), "b": image.b}
        for image_id, image in added
    ]
    if added:
        connection.execute(insert(images), image_rows)
        connection.execute(insert(embeddings), embedding_rows)


def _delete_images(connection: Connection, gone: Sequence[StoredImage]) -> None:
    ids = [image.id for image in gone]
    if ids:
        connection.execute(delete(embeddings).where(embeddings.c.image_id.in_(ids)))
        connection.execute(delete(images).where(images.c.id.in_(ids)))


def _log(connection: Connection, gallery_id: int, added_ids: Sequence[str], gone: Sequence[StoredImage]) -> None:
    """Adds come first: a replica that stops in between sees a replaced item twice for a moment, never not at all."""
    entries = [log.Change(log.Kind.ADD, image_id) for image_id in added_ids]
    entries += [log.Change(log.Kind.REMOVE, image.id) for image in gone]
    if entries:
        log.append(connection, gallery_id, entries)


def _count(connection: Connection, gallery: Row[Any], *, items: int, images: int) -> None:
    """Count the write and what it changed in the gallery's locked row."""
    counts = {"writes": gallery.writes + 1, "items": gallery.items + items, "images": gallery.images + images}
    connection.execute(update(galleries).where(galleries.c.id == gallery.id).values(counts))
