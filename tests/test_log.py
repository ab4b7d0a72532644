"""roadmatch.store.log: the change log, on both databases."""

import multiprocessing
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from multiprocessing.queues import Queue

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, delete, event, insert, update

from roadmatch.errors import GalleryNotFound, LogGap
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery
from roadmatch.gallery.items import GalleryStore, NewImage
from roadmatch.store import log
from roadmatch.store.database import Database, open_database
from roadmatch.store.log import Change, Entry, Kind
from roadmatch.store.tables import changes, embeddings, images
from roadmatch.store.tables import items as item_rows

WRITERS = 3
CHANGES = 5000
Report = tuple[list[tuple[int, str, str]], list[str]]
MakeImage = Callable[[object], NewImage]


def put(store: GalleryStore, gallery: Gallery, item_id: str, *new: NewImage) -> list[str]:
    """Put an item -> the ids of its images."""
    result = items.put(store, gallery, item_id, label=None, metadata={}, images=new)
    return [image.id for image in result.item.images]


def follow(store: GalleryStore, gallery: Gallery, after: int, limit: int | None = None) -> list[Entry]:
    with store.database.read() as connection:
        return log.follow(connection, gallery.id, after, gallery.bundle, limit)


def write_changes(url: str, gallery_id: int, bundle: str, writer: int, count: int, told: "Queue[Report]") -> None:
    """A writer process: adds images, removes some of its own again, and tells what it committed under which seq."""
    database = open_database(url, busy_timeout_s=30)
    chance = random.Random(writer)
    alive: list[str] = []
    committed: list[tuple[int, str, str]] = []
    with database.write() as connection:
        connection.execute(
            insert(item_rows), {"gallery_id": gallery_id, "id": f"w{writer}", "metadata": {}, "version": 0}
        )
    while len(committed) < count:
        entries = []
        for _ in range(min(chance.randint(1, 12), count - len(committed))):
            if alive and chance.random() < 0.3:
                entries.append(Change(Kind.REMOVE, alive.pop(chance.randrange(len(alive)))))
            else:
                alive.append(f"w{writer}n{len(committed) + len(entries)}")
                entries.append(Change(Kind.ADD, alive[-1]))
        with database.write() as connection:
            seq = log.append(connection, gallery_id, entries)
            added = [entry.image_id for entry in entries if entry.kind is Kind.ADD]
            add_images(connection, gallery_id, bundle, f"w{writer}", added)
            remove_images(connection, [entry.image_id for entry in entries if entry.kind is Kind.REMOVE])
        first = seq - len(entries) + 1
        committed += [(first + i, entry.kind.value, entry.image_id) for i, entry in enumerate(entries)]
    told.put((committed, alive))
    told.close()
    database.close()


def add_images(connection: Connection, gallery_id: int, bundle: str, item_id: str, ids: list[str]) -> None:
    if ids:
        row = {
            "gallery_id": gallery_id,
            "item_id": item_id,
            "sha256": "0" * 64,
            "format": "PNG",
            "width": 1,
            "height": 1,
        }
        connection.execute(insert(images), [row | {"id": image_id, "bytes": 1} for image_id in ids])
        vectors = [{"image_id": image_id, "bundle": bundle, "vector": image_id.encode(), "b": 0.5} for image_id in ids]
        connection.execute(insert(embeddings), vectors)


def remove_images(connection: Connection, ids: list[str]) -> None:
    connection.execute(delete(embeddings).where(embeddings.c.image_id.in_(ids)))
    connection.execute(delete(images).where(images.c.id.in_(ids)))


def test_a_follower_of_three_writing_processes_misses_and_doubles_nothing(
    database_url: str, store: GalleryStore, gallery: Gallery
) -> None:
    spawn = multiprocessing.get_context("spawn")
    told: Queue[Report] = spawn.Queue()
    shares = [CHANGES // WRITERS] * (WRITERS - 1) + [CHANGES - CHANGES // WRITERS * (WRITERS - 1)]
    arguments = [(database_url, gallery.id, gallery.bundle, i, share, told) for i, share in enumerate(shares)]
    writers = [spawn.Process(target=write_changes, args=each) for each in arguments]
    for writer in writers:
        writer.start()
    held: dict[str, bytes] = {}
    followed: list[tuple[int, str, str]] = []
    deadline = time.monotonic() + 60
    while len(followed) < CHANGES:
        assert time.monotonic() < deadline, f"only {len(followed)} changes came"
        for entry in follow(store, gallery, len(followed)):
            followed.append((entry.seq, entry.kind.value, entry.image_id))
            if entry.kind is Kind.REMOVE:
                held.pop(entry.image_id, None)  # never seen when it was gone again before we looked
            elif entry.vector is not None:
                held[entry.image_id] = entry.vector
        time.sleep(0.002)
    reports = [told.get(timeout=10) for _ in writers]
    for writer in writers:
        writer.join()
        writer.close()
    told.close()
    told.join_thread()
    committed = [change for changes_, _ in reports for change in changes_]
    assert followed == sorted(committed)
    assert [seq for seq, _, _ in followed] == list(range(1, CHANGES + 1))
    alive = {image_id for _, alive_ in reports for image_id in alive_}
    assert held == {image_id: image_id.encode() for image_id in alive}
    assert galleries.get(store.database, gallery.name).seq == CHANGES


def test_an_entry_carries_what_a_replica_needs(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    image = make_image(1)
    (image_id,) = put(store, gallery, "robin", image)
    (entry,) = follow(store, gallery, 0)
    assert (entry.seq, entry.kind, entry.image_id, entry.item_id, entry.b) == (1, Kind.ADD, image_id, "robin", 0.25)
    assert entry.vector is not None
    np.testing.assert_array_equal(np.frombuffer(entry.vector, "<f4"), image.vector)


def test_a_deleted_and_added_item_is_three_entries_with_two_images(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    (first,) = put(store, gallery, "robin", make_image(1))
    items.delete(store, gallery, "robin")
    (second,) = put(store, gallery, "robin", make_image(1))
    entries = follow(store, gallery, 0)
    assert first != second
    assert [(entry.kind, entry.image_id) for entry in entries] == [
        (Kind.ADD, first),
        (Kind.REMOVE, first),
        (Kind.ADD, second),
    ]
    assert [entry.item_id for entry in entries] == [None, None, "robin"]
    assert [entry.vector is None for entry in entries] == [True, True, False]


def test_a_replaced_picture_comes_before_the_old_one_goes(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    put(store, gallery, "robin", make_image(1))
    put(store, gallery, "robin", make_image(2))
    assert [entry.kind for entry in follow(store, gallery, 1)] == [Kind.ADD, Kind.REMOVE]


def test_an_embedding_of_another_bundle_is_not_given(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    put(store, gallery, "robin", make_image(1))
    with store.database.read() as connection:
        (entry,) = log.follow(connection, gallery.id, 0, "other@000000000000")
    assert (entry.item_id, entry.vector) == ("robin", None)


def test_a_limit_gives_the_oldest_and_the_rest_follows(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    put(store, gallery, "robin", *(make_image(i) for i in range(7)))
    seqs: list[int] = []
    while entries := follow(store, gallery, len(seqs), limit=3):
        assert len(entries) <= 3
        seqs += [entry.seq for entry in entries]
    assert seqs == [1, 2, 3, 4, 5, 6, 7]


def test_nothing_new_is_one_statement(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    put(store, gallery, "robin", make_image(1))
    follow(store, gallery, 1)
    statements: list[str] = []

    def note(connection: Connection, cursor: object, statement: str, *more: object) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        assert follow(store, gallery, 1) == []
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert len(statements) == 1
    assert "JOIN" not in statements[0]


def test_galleries_have_logs_of_their_own(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    other = galleries.create(store.database, "fish", bundle="b", rule="max_f1", keep=gallery.keep)
    put(store, gallery, "robin", make_image(1))
    put(store, other, "carp", make_image(1))
    put(store, gallery, "wren", make_image(2))
    assert [entry.item_id for entry in follow(store, gallery, 0)] == ["robin", "wren"]
    assert [entry.seq for entry in follow(store, other, 0)] == [1]


def test_a_missing_entry_is_a_gap(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    put(store, gallery, "robin", *(make_image(i) for i in range(5)))
    with store.database.write() as connection:
        connection.execute(delete(changes).where(changes.c.seq == 3))
    for after, limit in ((0, None), (2, None), (0, 4)):
        with pytest.raises(LogGap):
            follow(store, gallery, after, limit)
    assert [entry.seq for entry in follow(store, gallery, 0, limit=2)] == [1, 2]
    assert [entry.seq for entry in follow(store, gallery, 3)] == [4, 5]


def test_a_replica_ahead_of_the_log_is_a_gap(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    put(store, gallery, "robin", make_image(1))
    with pytest.raises(LogGap):  # the database was put back to an older copy
        follow(store, gallery, 2)


def test_a_deleted_gallery_has_no_log(store: GalleryStore, gallery: Gallery) -> None:
    galleries.delete(store.database, store.blobs, gallery.name)
    with pytest.raises(GalleryNotFound):
        follow(store, gallery, 0)
    with store.database.write() as connection, pytest.raises(GalleryNotFound):
        log.append(connection, gallery.id, [Change(Kind.ADD, "x")])


def age(database: Database, seq: int, days: int) -> None:
    """Make an entry look as if it were written days ago."""
    with database.write() as connection:
        at = datetime.now(UTC) - timedelta(days=days)
        connection.execute(update(changes).where(changes.c.seq == seq).values(at=at))


def test_pruning_deletes_old_entries_and_leaves_no_hole(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    put(store, gallery, "robin", *(make_image(i) for i in range(6)))
    for seq, days in ((1, 9), (2, 9), (4, 9)):  # 3 is young, so 4 stays behind it
        age(store.database, seq, days)
    yesterday = datetime.now(UTC) - timedelta(days=1)
    with store.database.write() as connection:
        assert log.prune(connection, gallery.id, yesterday) == 2
    with pytest.raises(LogGap):
        follow(store, gallery, 1)
    assert [entry.seq for entry in follow(store, gallery, 2)] == [3, 4, 5, 6]


def test_a_replica_behind_a_log_that_was_pruned_to_nothing_is_told(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    put(store, gallery, "robin", make_image(1), make_image(2))
    with store.database.write() as connection:
        assert log.prune(connection, gallery.id, datetime.now(UTC) + timedelta(days=1)) == 2
    assert follow(store, gallery, 2) == []
    with pytest.raises(LogGap):
        follow(store, gallery, 1)
    put(store, gallery, "wren", make_image(3))
    assert [entry.seq for entry in follow(store, gallery, 2)] == [3]


def test_a_snapshot_is_the_gallery_at_its_seq(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    ids = put(store, gallery, "robin", *(make_image(i) for i in range(3)))
    put(store, gallery, "wren", make_image(9))
    items.delete(store, gallery, "wren")
    with store.database.read(snapshot=True) as connection:
        taken = log.snapshot(connection, gallery.id, gallery.bundle)
        put(store, gallery, "late", make_image(10))
        rows = list(taken.rows)
    assert (taken.seq, taken.images) == (5, 3)
    assert {image_id: item_id for image_id, item_id, _, _ in rows} == dict.fromkeys(ids, "robin")
    assert {vector for _, _, vector, _ in rows} == {make_image(i).vector.tobytes() for i in range(3)}
    assert [entry.item_id for entry in follow(store, gallery, taken.seq)] == ["late"]


def test_a_snapshot_streams_its_rows(store: GalleryStore, gallery: Gallery) -> None:
    with store.database.write() as connection:
        connection.execute(insert(item_rows), {"gallery_id": gallery.id, "id": "robin", "metadata": {}, "version": 0})
        add_images(connection, gallery.id, gallery.bundle, "robin", [f"n{i}" for i in range(2500)])
    with store.database.read(snapshot=True) as connection:
        rows = log.snapshot(connection, gallery.id, gallery.bundle).rows
        assert len({image_id for image_id, *_ in rows}) == 2500
