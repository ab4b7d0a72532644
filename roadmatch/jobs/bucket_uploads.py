"""Uploads in an S3 bucket: sent there in parts as they arrive, and copied to a worker's disk while a job reads them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Set
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import obstore
from anyio.streams.memory import MemoryObjectReceiveStream

from roadmatch.blobs.address import Address
from roadmatch.blobs.keys import checked, is_key, new_key
from roadmatch.blobs.s3 import bucket_failures, listed, open_store, server_time
from roadmatch.jobs.spool import Spool
from roadmatch.jobs.spool import failures as spool_failures
from roadmatch.jobs.uploads import Upload

_TIMEOUT_S, _PART_TIMEOUT_S = 7.0, 20.0
"""Of one request, and of one that carries a part: a slower line than 800 kB/s to the bucket is not enough."""
_BLOCK = 1_000_000
"""Bytes that are handed on at a time."""
_PART, _PARTS_AT_ONCE = 8_000_000, 2
"""Bytes of a part, and how many are on their way: with the one that is being filled, what is in memory of an upload."""
_MOST_PARTS = 9_000
"""A server takes 10,000 parts: of more than 72 GB each part is larger."""


class BucketUploads:
    """Uploads as objects `PREFIX/uploads/KEY`.

    The parts of an upload whose process was killed stay hidden in the bucket until a rule of its own deletes them.
    """

    def __init__(self, address: Address, spool: Path, *, spare: int = 200_000_000) -> None:
        """spool: folder for copies; spare: bytes of its disk that are left to others. Raises StoreUnavailable."""
        self._store = open_store(address, "uploads", timeout_s=_TIMEOUT_S)
        self._parts = open_store(address, "uploads", timeout_s=_PART_TIMEOUT_S)
        self._spool = Spool(spool, spare=spare)

    @property
    def folder(self) -> Path:
        """Where a copy lies while it is at hand."""
        return self._spool.folder

    async def write(self, chunks: AsyncIterator[bytes], *, expected: int = 0) -> Upload:
        """Keep what comes, durably; raises StorageFull, StoreUnavailable, and what `chunks` raises."""
        await anyio.to_thread.run_sync(self._try_out)
        key, digest, size = new_key(), hashlib.sha256(), 0
        sending = _Sending(partial(self._send, key, max(_PART, expected // _MOST_PARTS)))
        try:
            async for block in _blocks(chunks):
                await anyio.to_thread.run_sync(digest.update, block)
                size += len(block)
                if not await sending.add(block):
                    break
            with bucket_failures("uploads"):
                await sending.finish()
        except BaseException:
            with anyio.CancelScope(shield=True):
                if await sending.abandon():
                    await anyio.to_thread.run_sync(self._forget, key)
            raise
        return Upload(key, digest.hexdigest(), size)

    @contextmanager
    def at_hand(self, key: str, given_up: Callable[[], bool]) -> Iterator[bool]:
        """A copy lies in `folder` in the block, unless the upload is not kept any more -> False if given up."""
        with self._spool.opened():
            yield not is_key(key) or self._copy(key, self.folder / key, given_up)

    def delete(self, key: str) -> None:
        """Delete the bytes of a key, if they are there; raises StoreUnavailable."""
        name = checked(key, "an upload")
        with bucket_failures("uploads"):
            obstore.delete(self._store, name)

    def sweep(self, known: Set[str], older_than_s: float) -> int:
        """Delete what no job needs, by ages on the server's clock -> how many; raises StoreUnavailable."""
        count = 0
        with bucket_failures("uploads"):
            youngest = server_time(self._store) - timedelta(seconds=older_than_s)
            for name, changed in listed(self._store):
                if is_key(name) and name not in known and changed <= youngest:
                    obstore.delete(self._store, name)
                    count += 1
        return count

    async def _send(self, key: str, part: int, blocks: AsyncIterator[bytes]) -> None:
        """What `blocks` raises aborts it: the server forgets the parts. Raises what obstore does."""
        await obstore.put_async(
            self._parts, key, blocks, use_multipart=True, chunk_size=part, max_concurrency=_PARTS_AT_ONCE
        )

    def _forget(self, key: str) -> None:
        with suppress(Exception):  # the sweep does it later; the caller has a failure of its own to tell
            self.delete(key)

    def _copy(self, name: str, path: Path, given_up: Callable[[], bool]) -> bool:
        size = self._size(name)
        if size is None:
            return True
        self._spool.check_room(size)
        with spool_failures(), path.open("xb") as file:
            for start in range(0, size, _PART):
                if given_up():
                    return False
                with bucket_failures("uploads"):
                    block = obstore.get_range(self._parts, name, start=start, length=min(_PART, size - start))
                file.write(block)
        return True

    def _size(self, name: str) -> int | None:
        """Bytes of an upload; None where it is not kept any more. Raises StoreUnavailable."""
        with bucket_failures("uploads"):
            try:
                return obstore.head(self._store, name)["size"]
            except FileNotFoundError:
                self._try_out()  # the answer does not tell whether the bucket is
                return None

    def _try_out(self) -> None:
        """Raises StoreUnavailable within seconds where the bucket does not answer."""
        with bucket_failures("uploads"):
            next(iter(obstore.list(self._store, chunk_size=1)), None)


class _LeftError(Exception):
    """Makes obstore abort what it sends."""


class _Sending:
    """Blocks on their way to the bucket, sent by a task that a cancelled request does not take with it."""

    def __init__(self, send: Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, None]]) -> None:
        self._left = False
        self._blocks, receiving = anyio.create_memory_object_stream[bytes](1)
        self._task = asyncio.ensure_future(send(self._taken(receiving)))
        self._task.add_done_callback(lambda _: receiving.close())

    async def add(self, block: bytes) -> bool:
        """Whether it is taken: else sending has failed, and `finish` tells why."""
        try:
            await self._blocks.send(block)
        except anyio.BrokenResourceError:
            return False
        return True

    async def finish(self) -> None:
        """Wait until all is there for good. Raises what obstore does."""
        self._blocks.close()
        await asyncio.shield(self._task)

    async def abandon(self) -> bool:
        """Have it aborted -> whether it was too late for that."""
        self._left = True
        self._blocks.close()
        try:
            await self._task
        except Exception:
            return False
        return True

    async def _taken(self, receiving: MemoryObjectReceiveStream[bytes]) -> AsyncIterator[bytes]:
        async for block in receiving:
            yield block
        if self._left:
            raise _LeftError


async def _blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) >= _BLOCK:
            yield bytes(held)
            held = bytearray()
    if held:
        yield bytes(held)
