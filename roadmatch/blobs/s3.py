"""An S3 bucket through obstore: opened, listed, and its failures as errors of ours.

Credentials, endpoint and region are what the AWS_ variables say, which obstore reads itself. What it says of a failure
may hold addresses and names of keys, so only the status and the code of the server's answer are passed on.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, cast

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from roadmatch.blobs.address import Address
from roadmatch.blobs.keys import new_key
from roadmatch.errors import StorageFull, StoreUnavailable

if TYPE_CHECKING:
    from obstore.store import RetryConfig, S3Config

CONNECT_S = 2.0
_RETRY_S = 2.0
"""Quick failures are tried again for so long; a request that took its whole time is not."""
_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_FULL_STATUS = "507"
_FULL_CODES = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}
_CREDENTIALS = re.compile(r"Missing (AccessKeyId|SecretAccessKey)|/latest/(api|meta-data)/")
_AT_ONCE = 1_000


def open_store(address: Address, part: str, *, timeout_s: float) -> S3Store:
    """A part of a bucket, such as its pictures; nothing is asked of the server yet. Raises StoreUnavailable.

    timeout_s: of one request, its body included; a call ends after 2 s more at the latest.
    """
    retries: RetryConfig = {
        "max_retries": 5,
        "retry_timeout": timedelta(seconds=_RETRY_S),
        "backoff": {"max_backoff": timedelta(seconds=0.5)},
    }
    # As `client_options` these would put those of the environment, such as AWS_ALLOW_HTTP, out of force.
    config = {"timeout": f"{timeout_s * 1e3:.0f}ms", "connect_timeout": f"{CONNECT_S * 1e3:.0f}ms"}
    prefix = f"{address.prefix}/{part}" if address.prefix else part
    with bucket_failures(part):
        return S3Store(address.bucket, prefix=prefix, config=cast("S3Config", config), retry_config=retries)


@contextmanager
def bucket_failures(kept: str) -> Iterator[None]:
    """Failures of a bucket as errors of ours, without any of its addresses. kept: what is in it, in plural."""
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise _error(kept, str(error)) from None  # its text holds addresses, and a traceback would show it


def is_gone(error: FileNotFoundError) -> bool:
    """Whether the object is not there, and not the bucket as a whole."""
    return "NoSuchBucket" not in str(error)


def listed(store: S3Store) -> Iterator[tuple[str, datetime]]:
    """Names and times of last change of all objects, page by page; raises what obstore does."""
    for page in obstore.list(store, chunk_size=_AT_ONCE):
        for one in page:
            yield one["path"], one["last_modified"]


def server_time(store: S3Store) -> datetime:
    """The time on the server's clock, by which objects have their ages; raises what obstore does."""
    key = new_key()
    obstore.put(store, key, b"", mode="create")
    try:
        return obstore.head(store, key)["last_modified"]
    finally:
        obstore.delete(store, key)


def _error(kept: str, said: str) -> StoreUnavailable:
    status, code = _STATUS.search(said), _CODE.search(said)
    if (status and status[1] == _FULL_STATUS) or (code and code[1] in _FULL_CODES):
        return StorageFull(f"the bucket of the {kept} has no room left: free some and try again")
    return StoreUnavailable(f"the bucket of the {kept} cannot be used: {_reason(said, status, code)}")


def _reason(said: str, status: "re.Match[str] | None", code: "re.Match[str] | None") -> str:
    if _CREDENTIALS.search(said):
        return "no credentials were found"
    if "BadScheme" in said:
        return "its endpoint is http, which only AWS_ALLOW_HTTP=true allows"
    if status:
        return f"it answers {status[1]} {code[1] if code else ''}".rstrip()
    return "it does not answer"
