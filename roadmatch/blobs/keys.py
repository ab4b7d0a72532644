"""Keys of what is kept: 128 random bits in hex, so that none is given twice."""

import re
import secrets

_KEY = re.compile(r"[0-9a-f]{32}")


def new_key() -> str:
    """A key that names nothing yet."""
    return secrets.token_hex(16)


def is_key(name: str) -> bool:
    """Whether a name is one that `new_key` may have given."""
    return _KEY.fullmatch(name) is not None


def checked(key: str, of: str) -> str:
    """The key, so that whatever comes from outside cannot leave its place. of: what it names. Raises ValueError."""
    if not is_key(key):
        raise ValueError(f"not a key of {of}: {key!r}")
    return key
