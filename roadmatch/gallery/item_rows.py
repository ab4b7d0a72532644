"""Items and images as rows: reading them, and what a write does to them inside its transaction."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import BindParameter, Connection, Row, Select, bindparam, delete, func, insert, select, update

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


def load_many(connection: Connection, gallery_id: int, item_ids: Sequence[str]) -> dict[str, Item]:
    """Those items of these ids that are there, by id, as of one moment."""
    found = _items(connection.execute(_some_items, {"gallery": gallery_id, "ids": list(item_ids)}).all())
    return {item.id: item for item in found}


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


@dataclass(frozen=True)
class Rewrite:
    """A change of one item: before is None where there is none."""

    item_id: str
    before: Item | None
    plan: Plan

    @property
    def gone(self) -> list[StoredImage]:
        """Images that the item loses."""
        return [image for image in self.before.images if image not in self.plan.kept] if self.before else []


def apply(
    connection: Connection, gallery: Row[Any], rewrites: Sequence[Rewrite], blob: Callable[[NewImage], str | None]
) -> None:
    """Make items what their plans say; no item comes twice.

    gallery: its row, locked. blob: gives the key of an image's kept picture.
    """
    gone = [image for rewrite in rewrites for image in rewrite.gone]
    added = [(rewrite.item_id, new_id(), image) for rewrite in rewrites for image in rewrite.plan.added]
    _write_items(connection, gallery, rewrites)
    for rewrite in rewrites:
        for stored, image in rewrite.plan.regained(Keep(gallery.keep)):
            connection.execute(_update_blob, {"image": stored.id, "key": blob(image)})
    _delete_images(connection, gone)
    _insert_images(connection, gallery, added, blob)
    _log(connection, gallery.id, [image_id for _, image_id, _ in added], gone)
    new = sum(rewrite.before is None for rewrite in rewrites)
    _count(connection, gallery, writes=len(rewrites), items=new, images=len(added) - len(gone))


def delete_items(connection: Connection, gallery: Row[Any], gone: Sequence[Item]) -> None:
    """Delete the rows of items. gallery: its row, locked."""
    gone_images = [image for item in gone for image in item.images]
    _delete_images(connection, gone_images)
    connection.execute(_delete_items, {"gallery": gallery.id, "ids": [item.id for item in gone]})
    _log(connection, gallery.id, [], gone_images)
    _count(connection, gallery, writes=len(gone), items=-len(gone), images=-len(gone_images))


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
_ids: BindParameter[Sequence[str]] = bindparam("ids", expanding=True)
# The ids are said of both tables: planned while a gallery is new, PostgreSQL would read all images of it.
_some_items = _with_images(select(items).where(items.c.gallery_id == bindparam("gallery"), items.c.id.in_(_ids))).where(
    images.c.item_id.in_(_ids)
)
_one_image = select(images).where(images.c.gallery_id == bindparam("gallery"), images.c.id == bindparam("image"))
_delete_items = delete(items).where(
    items.c.gallery_id == bindparam("gallery"), items.c.id.in_(bindparam("ids", expanding=True))
)
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


def _write_items(connection: Connection, gallery: Row[Any], rewrites: Sequence[Rewrite]) -> None:
    new, old = [], []
    for number, rewrite in enumerate(rewrites, start=1):
        plan = rewrite.plan
        content = {"label": plan.label, "metadata": dict(plan.metadata), "version": gallery.writes + number}
        if rewrite.before is None:
            new.append({"gallery_id": gallery.id, "id": rewrite.item_id, **content})
        else:
            old.append({"gallery": gallery.id, "item": rewrite.item_id, **content})
    if new:
        connection.execute(insert(items), new)
    if old:
        connection.execute(_update_item, old)


def _insert_images(
    connection: Connection,
    gallery: Row[Any],
    added: Sequence[tuple[str, str, NewImage]],
    blob: Callable[[NewImage], str | None],
) -> None:
    """added: item id, image id and the image."""
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
        for item_id, image_id, image in added
    ]
    embedding_rows = [
        {"image_id": image_id, "bundle": gallery.bundle, "vector": image.vector.astype("<f4").tobytes(), "b": image.b}
        for _, image_id, image in added
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


def _count(connection: Connection, gallery: Row[Any], *, writes: int, items: int, images: int) -> None:
    """Count the writes and what they changed in the gallery's locked row."""
    counts = {"writes": gallery.writes + writes, "items": gallery.items + items, "images": gallery.images + images}
    connection.execute(update(galleries).where(galleries.c.id == gallery.id).values(counts))
