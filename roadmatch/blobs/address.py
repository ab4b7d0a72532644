"""The address of a bucket, as it stands in the settings."""

import re
from dataclasses import dataclass

_ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)/?")


@dataclass(frozen=True)
class Address:
    """A bucket, and what stands before all names in it: empty or a path such as `shop/test`."""

    bucket: str
    prefix: str


def bucket_of(address: str) -> Address:
    """`s3://bucket/prefix` -> its parts; raises ValueError."""
    found = _ADDRESS.fullmatch(address)
    if found is None:  # it may be a URL with a password in it, so it is not shown
        raise ValueError("this is no address of a bucket: write it as s3://bucket or s3://bucket/prefix")
    return Address(found[1], found[2].removeprefix("/"))
