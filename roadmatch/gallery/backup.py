"""The pictures that a copied database names, copied after it."""

from dataclasses import dataclass

from sqlalchemy import select

from roadmatch.blobs import Blobs, FolderBlobs
from roadmatch.errors import BlobMissing
from roadmatch.store.database import Database
from roadmatch.store.tables import images


@dataclass(frozen=True)
class Copied:
    """pictures: that were copied, with their bytes. erased: deleted since the database was copied."""

    pictures: int
    size: int
    erased: int


def copy_pictures(copy: Database, blobs: Blobs, into: FolderBlobs) -> Copied:
    """copy: of the database that `blobs` belongs to. A picture is written before its row and deleted after it, so what
    is not there any more was erased on purpose. Raises StoreUnavailable, StorageFull.
    """
    pictures = size = erased = 0
    with copy.read() as connection:
        for key in connection.scalars(select(images.c.blob).where(images.c.blob.is_not(None))):
            try:
                data = blobs.read(key)
            except BlobMissing:
                erased += 1
                continue
            into.put_as(key, data)
            pictures, size = pictures + 1, size + len(data)
    return Copied(pictures, size, erased)
