"""Entries in chunks: their order, how far they are read ahead, what one slow picture holds up, how it ends."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from roadmatch.errors import StoreUnavailable
from roadmatch.gallery.items import Item
from roadmatch.images import Preprocessing
from roadmatch.jobs import chunks
from roadmatch.jobs.chunks import Chunk
from roadmatch.jobs.decoding import Decoders
from roadmatch.jobs.queue import Failure
from roadmatch.jobs.sources import Entry, EntryFailed, SourceError
from tests.bundles import picture
from tests.test_decoding import FAILING

RULE = Preprocessing(size=32, resize=32, reduce_to=64, interpolation="bicubic")
PIXELS = 32 * 32 * 3
PATIENCE_S = 20.0
AT_ONCE = 2
"""Entries of a chunk here."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few entries make several chunks."""
    monkeypatch.setattr(chunks, "MOST_ENTRIES", AT_ONCE)


@pytest.fixture
def decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoders]:
    """Two children that run what pictures say."""
    (tmp_path / "failing_child.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Decoders(RULE, 2, program="failing_child") as opened:
        opened.decode([picture(0, side=32)] * 2)
        yield opened


class Source:
    """Entries of such files; counts those that were taken. An exception among them is raised in its place."""

    def __init__(self, files: Iterable[bytes | Exception]) -> None:
        self.taken = 0
        self._files = files

    def __iter__(self) -> Iterator[Entry | Failure]:
        for position, file in enumerate(self._files):
            self.taken += 1
            if isinstance(file, Exception) and not isinstance(file, EntryFailed):
                raise file
            yield Entry(position, f"{position}.png", f"{position}", None, {}, lambda file=file: _read(file))  # type: ignore[misc]


def _read(file: bytes | EntryFailed) -> bytes:
    if isinstance(file, EntryFailed):
        raise file
    return file


def nothing(_ids: Sequence[str]) -> dict[str, Item]:
    """An empty gallery."""
    return {}


def positions(chunk: Chunk) -> list[int]:
    """Of the entries of a chunk, decoded and failed."""
    return sorted([one.entry.position for one in chunk.decoded] + [one.position for one in chunk.failures])


def assert_taken(source: Source, wanted: int) -> None:
    """So many entries are taken, and no more."""
    end = time.monotonic() + PATIENCE_S
    while source.taken < wanted and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    assert source.taken == wanted


def endless() -> Source:
    return Source(picture(number % 8, side=32) for number in count())


def test_every_entry_comes_once_in_order_decoded_or_with_what_it_failed_of(decoders: Decoders) -> None:
    good = [picture(0, side=32), picture(1, side=32)]
    files: list[bytes | Exception] = [good[0], EntryFailed("gone", "it is gone"), b"!os.abort()", good[1]]
    with chunks.chunks(iter(Source(files)), decoders, nothing, keeps_files=True) as ready:
        found = list(ready)
    assert [positions(chunk) for chunk in found] == [[0, 1], [2, 3]]
    assert [one.entry.position for chunk in found for one in chunk.decoded] == [0, 3]
    assert [one.data for chunk in found for one in chunk.decoded] == good
    reasons = {one.position: one.detail for chunk in found for one in chunk.failures}
    assert reasons[1] == "it is gone"
    assert "SIGABRT" in reasons[2]


def test_no_entries_are_no_chunks(decoders: Decoders) -> None:
    with chunks.chunks(iter(Source([])), decoders, nothing, keeps_files=True) as ready:
        assert list(ready) == []


def test_a_slow_picture_holds_up_its_own_chunk_alone(decoders: Decoders, tmp_path: Path) -> None:
    told = tmp_path / "told"
    waits = f"!while not os.path.exists({str(told)!r}): time.sleep(0.01)\nraise UnreadableImage('told')".encode()
    tells = f"!open({str(told)!r}, 'w').close()\nraise UnreadableImage('tells')".encode()
    files = [waits, *(picture(number, side=32) for number in range(38)), tells]
    with chunks.chunks(iter(Source(files)), decoders, nothing, keeps_files=True) as ready:
        found = list(ready)
    assert [positions(chunk) for chunk in found] == [[at, at + 1] for at in range(0, 40, 2)]
    assert [one.detail for chunk in found for one in chunk.failures] == ["told", "tells"]


@pytest.mark.parametrize(
    ("limit", "most", "ahead"),
    [
        ("_MOST_AHEAD", 10, 10),
        ("_MOST_AHEAD", 1, AT_ONCE),
        ("_MOST_AHEAD_BYTES", 10 * PIXELS, None),
        ("_MOST_AHEAD_BYTES", 1, AT_ONCE),
    ],
)
def test_so_much_is_read_ahead_and_no_more(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, ahead: int | None
) -> None:
    monkeypatch.setattr(chunks, limit, most)
    if ahead is None:  # whole chunks of files of about the same size
        chunk = AT_ONCE * (PIXELS + len(picture(0, side=32)))
        ahead = AT_ONCE * -(-most // chunk)
    source = endless()
    with chunks.chunks(iter(source), decoders, nothing, keeps_files=True) as ready:
        assert_taken(source, ahead)
        next(ready)
        assert_taken(source, ahead + AT_ONCE)
    assert_taken(source, ahead + AT_ONCE)


def test_entries_without_a_picture_to_decode_are_not_read_ahead_without_end(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_MOST_AHEAD", 10)
    source = Source(EntryFailed("gone", "it is gone") for _ in count())
    with chunks.chunks(iter(source), decoders, nothing, keeps_files=True) as ready:
        assert_taken(source, 10)
        next(ready)
        assert_taken(source, 10 + AT_ONCE)


def test_leaving_early_leaves_no_thread(decoders: Decoders) -> None:
    with chunks.chunks(iter(endless()), decoders, nothing, keeps_files=True) as ready:
        next(ready)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reading")]


def test_leaving_does_not_wait_for_the_rest_of_a_chunk(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MOST_ENTRIES", 1_000)
    begun, source = threading.Event(), endless()

    def slowly() -> Iterator[Entry | Failure]:
        for entry in source:
            yield entry
            begun.set()
            time.sleep(0.01)

    with chunks.chunks(slowly(), decoders, nothing, keeps_files=True):
        begun.wait(PATIENCE_S)
    assert source.taken < 1_000


@pytest.mark.parametrize("error", [SourceError("the archive is cut off"), RuntimeError("a mistake")])
def test_what_ends_reading_is_raised_behind_what_was_read(decoders: Decoders, error: Exception) -> None:
    files: list[bytes | Exception] = [picture(0, side=32), picture(1, side=32), error]
    with chunks.chunks(iter(Source(files)), decoders, nothing, keeps_files=True) as ready:
        assert positions(next(ready)) == [0, 1]
        with pytest.raises(type(error), match=str(error)):
            next(ready)


def test_a_gallery_that_cannot_be_asked_is_told(decoders: Decoders) -> None:
    def away(_ids: Sequence[str]) -> dict[str, Item]:
        raise StoreUnavailable("the database is away")

    with (
        chunks.chunks(iter(endless()), decoders, away, keeps_files=True) as ready,
        pytest.raises(StoreUnavailable, match="away"),
    ):
        next(ready)


def test_a_decoder_that_cannot_start_is_told() -> None:
    with (
        Decoders(RULE, 1, program="roadmatch.no_such_program") as decoders,
        chunks.chunks(iter(endless()), decoders, nothing, keeps_files=True) as ready,
        pytest.raises(ChildProcessError),
    ):
        next(ready)
