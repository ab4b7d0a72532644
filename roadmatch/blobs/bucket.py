"""Pictures as objects of an S3 bucket."""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import obstore
from obstore.exceptions import AlreadyExistsError

from roadmatch.blobs.address import Address
from roadmatch.blobs.keys import checked, is_key, new_key
from roadmatch.blobs.s3 import bucket_failures, is_gone, listed, open_store, server_time
from roadmatch.errors import BlobMissing, StoreUnavailable

_TIMEOUT_S = 7.0
"""Of one request; with the retries of quick failures a picture is refused within 9 s."""


class BucketBlobs:
    """Blobs as objects `PREFIX/pictures/KEY`."""

    def __init__(self, address: Address) -> None:
        """Nothing is asked of the bucket. Raises StoreUnavailable."""
        self._store = open_store(address, "pictures", timeout_s=_TIMEOUT_S)

    def put(self, data: bytes) -> str:
        """Keep the bytes, durably -> their key; raises StorageFull, StoreUnavailable."""
        key = new_key()
        with _failures():
            try:
                self._create(key, data)
            except AlreadyExistsError:  # a try whose answer was lost did come through: the sweep deletes what it put
                key = new_key()
                self._create(key, data)
        return key

    def read(self, key: str) -> bytes:
        """The bytes of a key; raises BlobMissing, StoreUnavailable."""
        name = checked(key, "a blob")
        with _failures():
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError as error:
                if not is_gone(error):
                    raise
        raise BlobMissing(f"the kept picture {key} is not in its bucket")

    def delete(self, key: str) -> None:
        """Delete the bytes of a key, if they are there; raises StoreUnavailable."""
        name = checked(key, "a blob")
        with _failures():
            obstore.delete(self._store, name)

    def keys_older_than(self, seconds: float) -> Iterator[str]:
        """Keys that were put at least so long ago on the server's clock, in no particular order."""
        with _failures():
            youngest = server_time(self._store) - timedelta(seconds=seconds)
            for name, changed in listed(self._store):
                if is_key(name) and changed <= youngest:
                    yield name

    def delete_temporaries(self, seconds: float) -> int:  # noqa: ARG002
        """None: an object is there as a whole or not at all."""
        return 0

    def _create(self, key: str, data: bytes) -> None:
        """Raises AlreadyExistsError; nothing is ever overwritten."""
        obstore.put(self._store, key, data, mode="create")


def try_out(address: Address) -> None:
    """Write, look at, delete and list, as will be done later. Raises StoreUnavailable where one of them is refused."""
    try:
        store = open_store(address, "pictures", timeout_s=_TIMEOUT_S)
        with _failures():
            server_time(store)
            next(iter(obstore.list(store, chunk_size=1)), None)
    except StoreUnavailable as error:
        raise type(error)(f"{error}: look at ROADMATCH_BLOBS and the AWS_ variables") from None


_failures = partial(bucket_failures, "pictures")
