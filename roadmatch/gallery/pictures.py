"""The pictures of one write to a gallery: on disk before the rows that name them, and off it if none does."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from roadmatch.blobs import Blobs
from roadmatch.errors import StoreUnavailable
from roadmatch.gallery.item_rows import NewImage

_AT_ONCE = 8


@dataclass
class Pictures:
    """The keys of pictures that a write has put on disk, and which of them its rows name.

    keys: by the image's identity, for two items of a write may have the same picture, and each has a file of its own.
    committing: set right before the commit, which makes the named ones stay. One thread uses it.
    """

    blobs: Blobs
    trace: Callable[[str], None]
    keys: dict[int, str] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)
    committing: bool = False
    _begun: dict[int, list[Future[str]]] = field(default_factory=dict)  # by the identity of the bytes
    _pool: ThreadPoolExecutor | None = None

    def begin(self, pictures: Iterable[bytes]) -> None:
        """Start to put pictures on disk, several at a time, as each waits for the disk most of its time.

        Their images come to `put` later, with these very bytes. Measured on one disk, 64 pictures of 122 KB: 39 to 53
        a second one by one, 493 to 842 by eight threads.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE, "pictures")
        for data in pictures:
            self._begun.setdefault(id(data), []).append(self._pool.submit(self.blobs.put, data))

    def put(self, image: NewImage) -> None:
        """Put the picture on disk unless it is there; raises StorageFull, StoreUnavailable."""
        if id(image) not in self.keys:
            begun = self._begun.get(id(image.data))
            self.keys[id(image)] = begun.pop().result() if begun else self.blobs.put(image.data)
            self.trace("blob_written")

    def put_all(self, images: Sequence[NewImage]) -> None:
        """Put pictures on disk that are not; raises as put."""
        missing = [image for image in images if id(image) not in self.keys and not self._begun.get(id(image.data))]
        if len(missing) > 1:
            self.begin(image.data for image in missing)
        for image in images:
            self.put(image)

    def name(self, image: NewImage) -> str:
        """The key for the row of an image, whose picture is on disk by then."""
        self.put(image)  # does something only if the item has changed since the write's first look
        self.named.add(id(image))
        return self.keys[id(image)]

    def unnamed(self) -> Iterator[str]:
        """Keys of pictures that no row will name, once all are on disk that were begun."""
        if self._pool is not None:
            self._pool.shutdown()
        named = self.named if self.committing else set()
        yield from (key for image, key in self.keys.items() if image not in named)
        for begun in self._begun.values():
            yield from (write.result() for write in begun if write.exception() is None)


@contextmanager
def pictures_of_write(blobs: Blobs, trace: Callable[[str], None]) -> Iterator[Pictures]:
    """Pictures to be put and named in the block; those that no row names in the end are deleted.

    A commit that fails may have happened all the same (a connection that broke before its answer), so from then on the
    named ones are left to the sweep, which asks the rows.
    """
    pictures = Pictures(blobs, trace)
    try:
        yield pictures
    finally:
        delete_pictures(blobs, pictures.unnamed())


def delete_pictures(blobs: Blobs, keys: Iterable[str]) -> None:
    """Delete pictures that no row names any more; what cannot be deleted now is left to the sweep."""
    with suppress(StoreUnavailable):  # at the first of them: each would wait for a bucket that does not answer
        for key in keys:
            blobs.delete(key)
