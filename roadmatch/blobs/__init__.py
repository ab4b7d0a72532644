"""Bytes of pictures under random keys: in a folder or in a bucket."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from roadmatch.blobs.address import Address, bucket_of
from roadmatch.blobs.folder import FolderBlobs, disk_failures
from roadmatch.errors import StoreUnavailable

__all__ = ["Address", "Blobs", "FolderBlobs", "bucket_of", "disk_failures", "open_blobs"]


class Blobs(Protocol):
    """Where pictures are kept. A key names the same bytes for ever and is never given twice."""

    def put(self, data: bytes) -> str:
        """Keep the bytes, durably -> their key; raises StorageFull, StoreUnavailable and then keeps nothing."""

    def read(self, key: str) -> bytes:
        """The bytes of a key; raises BlobMissing, StoreUnavailable."""

    def delete(self, key: str) -> None:
        """Delete the bytes of a key, if they are there; raises StoreUnavailable."""

    def keys_older_than(self, seconds: float) -> Iterator[str]:
        """Keys that were put at least so long ago."""

    def delete_temporaries(self, seconds: float) -> int:
        """Delete what writes left unfinished at least so long ago -> how many."""


def open_blobs(address: str, folder: Path) -> Blobs:
    """Pictures in the bucket of that address, or in the folder where it is empty.

    A bucket is tried out, so that a wrong one is found now. Raises ValueError, StoreUnavailable.
    """
    if not address:
        return FolderBlobs(folder)
    bucket = bucket_of(address)
    try:
        from roadmatch.blobs.bucket import BucketBlobs, try_out
    except ModuleNotFoundError as error:
        raise StoreUnavailable("obstore is not installed: pip install 'roadmatch[s3]'") from error
    try_out(bucket)
    return BucketBlobs(bucket)
