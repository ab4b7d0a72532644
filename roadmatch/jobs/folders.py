"""Pictures in folders of the server that an operator allows, and nothing outside them."""

import os
import stat
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from roadmatch.jobs.entry import (
    MOST_BYTES,
    Broken,
    EntryFailed,
    Found,
    SourceError,
    check_size,
    inner_path,
    is_junk,
    of_path,
    refuse_nested,
    shown,
)

SETTING = "ROADMATCH_IMPORT_FOLDERS"
"""The setting by which an operator allows folders."""


def real(allowed: tuple[Path, ...]) -> tuple[Path, ...]:
    """Allowed folders as they lie on the disk, without links: what the functions here compare with."""
    return tuple(folder.resolve() for folder in allowed)


def files(folder: str, allowed: tuple[Path, ...], labels: str | None) -> Generator[Found | Broken, None, None]:
    """The pictures of a folder and those below it, sorted by name in each. A link to a file is read where that lies in
    an allowed folder; a link to a folder is not walked. Raises SourceError for a folder that is not allowed.
    """
    allowed = real(allowed)
    root = _root(folder, allowed)
    for path, problem in _walk(root):
        yield _file(root, path, problem, allowed, labels)


def read_named(name: str, allowed: tuple[Path, ...]) -> bytes:
    """A picture by its path, below a (real) allowed folder or from the server's root on. Raises EntryFailed."""
    if not allowed:
        raise EntryFailed("folders-off", f"this server reads no paths: its operator can allow folders with {SETTING}")
    if "://" in name:
        raise EntryFailed("unsafe-path", "it is a URL: name it in the column url")
    inner = inner_path(name.removeprefix("/"))
    if not name.startswith("/"):
        places = [folder / inner for folder in allowed]
        return _read(next((place for place in places if os.path.lexists(place)), places[0]), allowed)
    if not _inside(Path("/") / inner, allowed):  # before any look at the disk, which would tell what is there
        raise _outside()
    return _read(Path("/") / inner, allowed)


def _root(folder: str, allowed: tuple[Path, ...]) -> Path:
    if not allowed:
        raise SourceError(f"this server imports no folders: its operator can allow some with {SETTING}")
    try:
        root = Path(folder).resolve(strict=True)
        if _inside(root, allowed) and os.access(root, os.R_OK | os.X_OK) and root.is_dir():
            return root
    except (OSError, ValueError, RuntimeError):
        pass
    raise SourceError(f"folder {shown(folder)} is not one that may be imported and read here: see {SETTING}")


def _inside(path: Path, allowed: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in allowed)


def _outside() -> EntryFailed:
    return EntryFailed("unsafe-path", f"the file is outside the folders that may be imported: see {SETTING}")


def _walk(root: Path) -> Iterator[tuple[str, str | None]]:
    """Files, and folders that are not walked with the reason, each folder's in the order of their names."""
    stack = [(str(root), iter(_names(str(root)) or ()))]  # of our own: folders may lie deeper than Python calls
    while stack:
        folder, names = stack[-1]
        name = next(names, None)
        if name is None:
            stack.pop()
        elif not is_junk(PurePosixPath(name)):
            path = os.path.join(folder, name)  # noqa: PTH118 - a Path takes 10 times the memory and time
            if not os.path.isdir(path):  # noqa: PTH112 - as above
                yield path, None
            elif os.path.islink(path):  # noqa: PTH114 - as above
                yield path, "it is a link to a folder, which is not followed: import that folder itself"
            elif (inner := _names(path)) is None:
                yield path, "the folder cannot be read: let the worker's user read it"
            else:
                stack.append((path, iter(inner)))


def _names(folder: str) -> list[str] | None:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - as above
    except OSError:
        return None


def _file(root: Path, path: str, problem: str | None, allowed: tuple[Path, ...], labels: str | None) -> Found | Broken:
    inner = PurePosixPath(path).relative_to(root)
    if problem:
        return Broken(shown(str(inner)), "folder-not-read", problem)
    try:
        refuse_nested(inner)
    except EntryFailed as error:
        return Broken(shown(str(inner)), error.code, error.detail)
    return of_path(inner, labels, partial(_read, Path(path), allowed))


def _read(path: Path, allowed: tuple[Path, ...]) -> bytes:
    """The bytes of a regular file whose real place is allowed."""
    try:
        real_path = path.resolve(strict=True)
        if not _inside(real_path, allowed):
            raise _outside()
        # Without following a link that came in between, and without waiting for a pipe's other end.
        handle = os.open(real_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise EntryFailed("not-a-file", "it is a folder or a device, no file: name the picture itself")
            check_size(status.st_size)
            data = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise EntryFailed("file-missing", "there is no such file in the folders that may be imported") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise EntryFailed("unreadable-file", "the file cannot be read: let the worker's user read it") from error
    check_size(len(data))
    return data
