"""roadmatch.jobs.sources: what holds for every source of a job."""

import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from roadmatch.jobs import sources
from roadmatch.jobs.entry import item_id_of, shown
from roadmatch.jobs.queue import Failure
from roadmatch.jobs.sources import Entry, Places, SourceError, counted, entries


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A folder with 30 pictures."""
    for name in range(30):
        (tmp_path / f"{name:02}.jpg").write_bytes(b"%d" % name)
    return Places(tmp_path, (tmp_path,))


def first(source: dict[str, object], places: Places) -> Entry | Failure:
    with entries(source, places) as found:
        return next(found)


@pytest.mark.parametrize(
    "source",
    [
        *({}, {"kind": "rar"}, {"kind": "csv"}, {"kind": "csv", "upload": 7}, {"kind": "zip", "upload": "gone"}),
        *(
            {"kind": "csv", "upload": "../rows"},
            {"kind": "csv", "upload": ""},
            {"kind": "csv", "upload": "/etc/passwd"},
        ),
        *({"kind": "folder"}, {"kind": "ids", "ids": "abc"}, {"kind": "csv", "upload": "."}, {"kind": None}),
    ],
)
@pytest.mark.parametrize("use", [counted, first])
def test_a_source_that_nobody_can_read_is_refused(
    places: Places, source: dict[str, object], use: Callable[[dict[str, object], Places], object]
) -> None:
    (places.uploads.parent / "rows").write_bytes(b"id,path\n")
    with pytest.raises(SourceError):
        use(source, places)


def test_an_upload_that_is_swept_away_is_named(places: Places) -> None:
    with pytest.raises(SourceError, match="upload gone is not there any more: send the file again"):
        counted({"kind": "zip", "upload": "gone"}, places)


def test_entries_are_handed_out_one_by_one_also_to_another_thread(places: Places) -> None:
    taken: list[bytes] = []
    with entries({"kind": "folder", "folder": str(places.uploads)}, places, 5) as found:
        sixth = next(found)
        (places.uploads / "06.jpg").write_bytes(b"changed meanwhile")
        thread = threading.Thread(target=lambda: taken.extend(one.read() for one in found if isinstance(one, Entry)))
        thread.start()
        thread.join()
    assert isinstance(sixth, Entry)
    assert (sixth.position, sixth.name, sixth.item_id, sixth.label) == (5, "05.jpg", "05.jpg", None)
    assert taken == [b"changed meanwhile", *(b"%d" % number for number in range(7, 30))]


def test_more_entries_than_the_limit_are_refused(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"kind": "folder", "folder": str(places.uploads)}
    monkeypatch.setattr(sources, "MOST_ENTRIES", 30)
    assert counted(source, places) == 30
    monkeypatch.setattr(sources, "MOST_ENTRIES", 29)
    with pytest.raises(SourceError, match="more than 29 entries: split it"):
        counted(source, places)
    with pytest.raises(SourceError, match="more than 29"), entries(source, places) as found:
        list(found)


def test_ids_of_many_entries_leave_memory_for_the_disk_and_are_still_known(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SEEN_CACHE_KB", 16)
    ids = [f"item-{number}" for number in range(20_000)]
    with entries({"kind": "ids", "ids": [*ids, *ids[::2000]]}, places) as found:
        failed = [one for one in found if isinstance(one, Failure)]
    assert [(one.position, one.name) for one in failed] == [(20_000 + n, ids[2000 * n]) for n in range(10)]


@pytest.mark.parametrize(
    ("path", "item_id"),
    [
        *(("cat.jpg", "cat.jpg"), ("A-b_c.9", "A-b_c.9"), ("x" * 128, "x" * 128)),
        *(("a/b.jpg", "a-b.jpg-"), ("a b.jpg", "a-b.jpg-"), ("-a", "a-"), ("é", "item-"), ("x" * 129, "x" * 115 + "-")),
    ],
)
def test_an_id_is_the_path_where_it_can_be_and_else_has_a_hash(path: str, item_id: str) -> None:
    found = item_id_of(PurePosixPath(path))
    assert found == item_id if not item_id.endswith("-") else found[:-12] == item_id
    assert len(found) <= 128


def test_paths_that_look_alike_have_ids_that_do_not() -> None:
    paths = ["a/b.jpg", "a-b.jpg", "a b.jpg", "a_b.jpg", "x" * 200, "x" * 201, "é", "è"]
    assert len({item_id_of(PurePosixPath(path)) for path in paths}) == len(paths)


def test_a_name_is_shown_as_one_line_that_cannot_be_misread() -> None:
    assert shown("a\nb\u202egpj.exe\x1b[2J\udcff") == "a\\nb\\u202egpj.exe\\x1b[2J\\udcff"
    assert shown("x" * 300) == "x" * 140 + "…" + "x" * 59
    assert shown("図 é.jpg") == "図 é.jpg"
