"""Deleting pictures that no image names: what killed or failed writes left on disk."""

from itertools import islice

from sqlalchemy import select

from roadmatch.gallery.items import GalleryStore
from roadmatch.store.tables import images

_AT_ONCE = 500


def sweep(store: GalleryStore, *, grace_s: float = 3600.0) -> int:
    """Delete unfinished and unnamed pictures -> how many; raises StoreUnavailable.

    grace_s: younger ones stay, because a write puts its pictures on disk before the rows that name them; it is far
    longer than any write lasts. Safe to run beside writers and beside another sweep.
    """
    count = store.blobs.delete_temporaries(grace_s)
    old = store.blobs.keys_older_than(grace_s)
    while keys := list(islice(old, _AT_ONCE)):
        for key in set(keys) - _named(store, keys):
            if not _named(store, [key]):  # asked again at the last moment: a stopped writer may have gone on
                store.blobs.delete(key)
                count += 1
    store.database.checkpoint()  # for deletes that found a reader in the way of theirs
    return count


def _named(store: GalleryStore, keys: list[str]) -> set[str]:
    with store.database.read() as connection:
        return set(connection.scalars(select(images.c.blob).where(images.c.blob.in_(keys))))
