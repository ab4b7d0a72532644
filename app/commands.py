"""What the client commands do: files and names in, a running service asked, an answer printed."""

import json
import os
import stat
import unicodedata
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.client import NAME, Answer, Client, RefusalError
from app.settings import ClientSettings
from app.terminal import complain, printable
from app.verdict import Comparison, GalleryRow, Verdict, Written, compare_lines, gallery_lines, search_lines
from roadmatch.errors import RoadmatchError

_LONGEST_ID = 128
_LARGEST_FILE = 64_000_000
"""Bytes; the service's own limit is lower and it says so, this one keeps a disk image out of memory."""


class FileError(RoadmatchError):
    """A file that cannot be sent."""


@dataclass(frozen=True)
class NewItem:
    """An item to be added, of one file or several."""

    id: str
    files: tuple[Path, ...]


def add(chosen: Namespace) -> int:
    """Add the files; those that the service refuses are named and the others are added. -> exit status"""
    items = items_of(chosen.files, chosen.id)
    for file in chosen.files:
        check_readable(file)  # a mistyped name must not leave an empty gallery behind
    outcomes: Counter[str] = Counter()
    with client_of(chosen) as client:
        make_gallery_unless_there(client, chosen.gallery)
        for item in items:
            outcomes[_add_one(client, chosen, item)] += 1
    if len(items) > 1 and not chosen.json:
        _print(f"gallery {chosen.gallery}: " + ", ".join(f"{count} {what}" for what, count in outcomes.items()))
    return 1 if outcomes["refused"] else 0


def search(chosen: Namespace) -> int:
    """Ask with a file; match and no_match are both an answer. -> exit status"""
    data = read(chosen.image)
    with client_of(chosen) as client:
        try:
            answer = client.search(
                chosen.gallery, data, rule=chosen.rule, threshold=chosen.threshold, top_k=chosen.top_k
            )
        except RefusalError as error:
            raise _explained(error, chosen.image) from error
    show(chosen, answer, lambda: search_lines(Verdict.of(answer)))
    return 0


def compare(chosen: Namespace) -> int:
    """Compare two files. -> exit status"""
    query, picture = read(chosen.query), read(chosen.picture)
    with client_of(chosen) as client:
        try:
            answer = client.compare(
                query,
                picture,
                gallery=chosen.gallery,
                bundle=chosen.bundle,
                rule=chosen.rule,
                threshold=chosen.threshold,
            )
        except RefusalError as error:
            culprit = chosen.picture if error.is_about_the_picture and client.takes(query) else chosen.query
            raise _explained(error, culprit) from error
    show(chosen, answer, lambda: compare_lines(Comparison.of(answer)))
    return 0


def galleries(chosen: Namespace) -> int:
    """List the galleries. -> exit status"""
    with client_of(chosen) as client:
        answer = client.galleries()
    show(chosen, answer, lambda: gallery_lines([GalleryRow.of(row) for row in answer["galleries"]]))
    return 0


def items_of(files: Sequence[Path], given_id: str | None) -> list[NewItem]:
    """One item a file, named by it; with an id all files are images of that one. Raises ArgumentTypeError."""
    if given_id is not None:
        return [NewItem(given_id, tuple(files))]
    by_id: dict[str, Path] = {}
    for file in files:
        item = id_of(file)
        if item in by_id:
            raise ArgumentTypeError(
                f"{by_id[item]} and {file} would both be item {item}: rename one, or add them one by one with --id"
            )
        by_id[item] = file
    return [NewItem(item, (file,)) for item, file in by_id.items()]


def id_of(file: Path) -> str:
    """The file's stem made to fit: accents go, what else an id cannot have becomes `-`. Raises ArgumentTypeError."""
    plain = unicodedata.normalize("NFKD", file.stem)
    letters = (letter for letter in plain if not unicodedata.combining(letter))
    fitting = "".join(letter if NAME.fullmatch(f"x{letter}") else "-" for letter in letters)
    item = fitting.lstrip("._-")[:_LONGEST_ID]
    if not item:
        raise ArgumentTypeError(f"{file} has no letter or digit for an item's id: give one with --id")
    return item


def check_readable(file: Path) -> None:
    """Raises FileError, OSError."""
    try:
        kind = file.stat().st_mode
    except FileNotFoundError as error:
        raise FileError(f"{file} is not there: check the path") from error
    if stat.S_ISDIR(kind):
        raise FileError(f"{file} is a folder: name the files in it, as in {file}/*.jpg")
    if not os.access(file, os.R_OK):
        raise FileError(f"{file} may not be read: change its permissions")


def read(file: Path) -> bytes:
    """The file's bytes. Raises FileError, OSError."""
    check_readable(file)
    with file.open("rb") as opened:
        data = opened.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise FileError(f"{file} has more than {_LARGEST_FILE // 1_000_000} MB: send a smaller copy")
    return data


def client_of(chosen: Namespace) -> Client:
    return Client(ClientSettings.read(url=chosen.url).url)


def make_gallery_unless_there(client: Client, name: str) -> None:
    """Says so where it makes one."""
    if client.gallery(name) is not None:
        return
    made = client.create_gallery(name)
    if made is not None:
        new = GalleryRow.of(made)
        complain(f"gallery {new.name} was not there and is made: rule {new.rule}, bundle {new.bundle}")


def _add_one(client: Client, chosen: Namespace, item: NewItem) -> str:
    """The outcome; a picture that is not taken is named here, so that the others are added."""
    pictures = [read(file) for file in item.files]
    try:
        answer = client.put_item(chosen.gallery, item.id, pictures, label=chosen.label, metadata=chosen.metadata)
    except RefusalError as error:
        culprit = item.files[0]
        if error.is_about_the_picture and len(pictures) > 1:
            refused = [file for file, data in zip(item.files, pictures, strict=True) if not client.takes(data)]
            culprit = next(iter(refused), culprit)
        if not error.is_about_the_picture:
            raise _explained(error, culprit) from error
        complain(_explained(error, culprit))
        return "refused"
    written = Written.of(answer)
    files = ", ".join(map(str, item.files))
    show(chosen, answer, lambda: [printable(f"{written.outcome}  {written.item.id}  from {files}")])
    return written.outcome


def _explained(error: RefusalError, file: Path) -> RoadmatchError:
    """The refusal with the thing and the mend that only this side knows."""
    if error.code == "gallery-not-found":
        return FileError(f"{error}: `roadmatch galleries` lists them, `roadmatch add FILE... --gallery NAME` makes one")
    return FileError(f"{file}: {error}") if error.is_about_the_picture else error


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def show(chosen: Namespace, answer: Answer, lines: Callable[[], list[str]]) -> None:
    """The service's JSON on one line, or the answer for people."""
    if chosen.json:
        _print(json.dumps(answer))
    else:
        _print("\n".join(lines()))
