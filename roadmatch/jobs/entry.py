"""What one picture of an import is, wherever it comes from."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import PurePosixPath

from roadmatch.errors import ImageTooLarge, RoadmatchError
from roadmatch.gallery.items import Metadata
from roadmatch.images import Limits

MOST_BYTES = Limits().bytes
"""Of one picture; more is not read."""
MOST_ENTRIES = 1_000_000
"""Of a source: what a gallery holds, and at 5,000 unchanged entries a second what a resumed job looks through in
minutes."""

_LONGEST_NAME, _LONGEST_ID = 200, 128
_JUNK = {"__macosx", "thumbs.db", "desktop.ini"}
_NESTED = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz", ".zst", ".7z", ".rar")


class SourceError(RoadmatchError):
    """A source whose entries cannot be read."""


class EntryFailed(RoadmatchError):  # noqa: N818 - as the others in errors.py
    """One entry that cannot be read; code is stable, the text is for people."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass(frozen=True)
class Entry:
    """One picture of an import, or one id of a deletion.

    position: from 0, in the source; the same at every reading. name: for people, printable. read: the picture's bytes,
    at most MOST_BYTES; to be called once and before the next entry is taken, since an archive is a stream. Raises
    EntryFailed.
    """

    position: int
    name: str
    item_id: str
    label: str | None
    metadata: Metadata
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Found:
    """An entry before it has a position; see Entry."""

    name: str
    item_id: str
    read: Callable[[], bytes]
    label: str | None = None
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class Broken:
    """An entry that failed before it was read."""

    name: str
    code: str
    detail: str


def of_path(path: PurePosixPath, labels: str | None, read: Callable[[], bytes]) -> Found:
    """The entry of a file; labels "folder": the label is the name of the folder that holds it."""
    label = path.parent.name if labels == "folder" else None
    return Found(shown(str(path)), item_id_of(path), read, label or None)


def inner_path(name: str) -> PurePosixPath:
    """A path below some folder, as a file, an archive or a manifest names it. Raises EntryFailed for any other."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match("[A-Za-z]:", name) or "\0" in name or not path.parts:
        raise EntryFailed("unsafe-path", "its path leads out of its folder: name it below the folder, without ..")
    return path


def is_junk(path: PurePosixPath) -> bool:
    """Whether a file is one that systems leave about, or is hidden."""
    return any(part.startswith(".") or part.lower() in _JUNK for part in path.parts)


def refuse_nested(path: PurePosixPath) -> None:
    """Raises EntryFailed for an archive."""
    if path.name.lower().endswith(_NESTED):
        raise EntryFailed("nested-archive", "archives inside an import are not opened: send it on its own")


def check_size(count: int) -> None:
    """Raises EntryFailed for a picture of too many bytes."""
    if count > MOST_BYTES:
        try:
            Limits().check_bytes(count)
        except ImageTooLarge as error:
            raise EntryFailed("image-too-large", str(error)) from error


def item_id_of(path: PurePosixPath) -> str:
    """The id of a file's item: its path as far as an id can say it, and a hash of the path where that is not all."""
    text = str(path)
    plain = re.sub("[^A-Za-z0-9._-]", "-", text).lstrip("._-")
    if plain == text and len(plain) <= _LONGEST_ID:
        return plain
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{plain[: _LONGEST_ID - 13] or 'item'}-{digest}"


def shown(name: str) -> str:
    """A name as people can safely be shown it: one line, no signs that cannot be seen, not too long."""
    cut = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 60]}…{name[-59:]}"
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in cut)


def text_field(source: Mapping[str, object], name: str) -> str:
    """A text of a job's source. Raises SourceError where it is missing."""
    value = source.get(name)
    if not isinstance(value, str):
        raise SourceError(f"the job's source has no {name}: submit it again")
    return value
