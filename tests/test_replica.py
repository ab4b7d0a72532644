import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import cast

import numpy as np
import pytest
from sqlalchemy import Connection, delete, insert, select

from roadmatch.blobs import FolderBlobs
from roadmatch.errors import GalleryNotFound, LogGap
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery
from roadmatch.gallery.items import GalleryStore, NewImage
from roadmatch.gallery.replica import Generation, Replica, Replicas
from roadmatch.gallery.search import Decision, Query, search
from roadmatch.scoring import ScoreRule
from roadmatch.store import log
from roadmatch.store.database import Database, open_database
from roadmatch.store.tables import changes, embeddings, images
from roadmatch.store.tables import items as items_table

Make = Callable[[object], NewImage]
Contents = dict[str, tuple[str, bytes, float]]


class WatchedDatabase:
    """A database that counts its reading transactions and tells of each before it begins."""

    def __init__(self, database: Database, tell: Callable[[bool], None] = lambda _snapshot: None) -> None:
        self._database, self._tell, self.reads = database, tell, 0

    @contextmanager
    def read(self, *, snapshot: bool = False) -> Iterator[Connection]:
        self.reads += 1
        self._tell(snapshot)
        with self._database.read(snapshot=snapshot) as connection:
            yield connection


def replica_of(database: Database | WatchedDatabase, gallery: Gallery) -> Replica:
    return Replica(cast(Database, database), gallery.id, gallery.bundle)


def put(store: GalleryStore, gallery: Gallery, item: str, *pictures: NewImage) -> list[str]:
    """Make the item of these pictures -> the ids of its images."""
    done = items.put(store, gallery, item, label=None, metadata={}, images=pictures)
    return [image.id for image in done.item.images]


def put_many(database: Database, gallery: Gallery, first: int, count: int, dimension: int = 8) -> None:
    """Add so many items of one image each, faster than by uploads."""
    vectors = np.random.default_rng(first).normal(size=(count, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    names = [f"many{n:06}" for n in range(first, first + count)]
    with database.write(long=True) as connection:
        seq = log.append(connection, gallery.id, [log.Change(log.Kind.ADD, name) for name in names])
        connection.execute(
            insert(items_table),
            [{"gallery_id": gallery.id, "id": name, "metadata": {}, "version": seq} for name in names],
        )
        picture = {"sha256": "0" * 64, "format": "PNG", "width": 32, "height": 16, "bytes": 9}
        connection.execute(
            insert(images), [{"id": name, "gallery_id": gallery.id, "item_id": name, **picture} for name in names]
        )
        stored = [
            {"image_id": name, "bundle": gallery.bundle, "vector": vector.tobytes(), "b": 0.25}
            for name, vector in zip(names, vectors, strict=True)
        ]
        connection.execute(insert(embeddings), stored)


def contents(generation: Generation) -> Contents:
    """By image id: item, vector and b of all that is alive; also checks what the generation says about itself."""
    rows = np.flatnonzero(generation.alive).tolist()
    assert len(generation.vectors) == len(generation.b) == len(generation.item_numbers) == len(generation.alive)
    found = {
        generation.image_ids[row]: (
            generation.item_ids[generation.item_numbers[row]],
            generation.vectors[row, : generation.dimension].tobytes(),
            float(generation.b[row]),
        )
        for row in rows
    }
    assert len(found) == len(rows) == generation.images
    assert len({item for item, _, _ in found.values()}) == generation.items
    assert [part.first for part in generation.sketches] == np.cumsum(
        [0, *(len(part) for part in generation.sketches)]
    ).tolist()[: len(generation.sketches)]
    return found


def stored(database: Database, gallery: Gallery) -> Contents:
    """The same from the tables."""
    asked = select(images.c.id, images.c.item_id, embeddings.c.vector, embeddings.c.b).join_from(images, embeddings)
    with database.read() as connection:
        rows = connection.execute(asked.where(images.c.gallery_id == gallery.id)).all()
    return {row.id: (row.item_id, row.vector, row.b) for row in rows}


def query_for(image: NewImage) -> Query:
    return Query(image.vector, 0.25)


def best_image(generation: Generation, image: NewImage) -> str | None:
    """The image that a search with this picture finds at a similarity of 1."""
    answer = search(generation, [query_for(image)], ScoreRule(), threshold=0.999, top_k=1)[0]
    return answer.matches[0].image if answer.decision is Decision.MATCH else None


def test_an_empty_gallery_has_an_empty_generation_until_something_comes(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    replica = replica_of(store.database, gallery)
    empty = replica.current()
    assert (empty.items, empty.images, empty.seq, len(empty.vectors)) == (0, 0, 0, 0)
    assert best_image(empty, make_image("a")) is None
    (image,) = put(store, gallery, "robin", make_image("a"))
    assert best_image(replica.current(), make_image("a")) == image
    assert best_image(empty, make_image("a")) is None


def test_a_replica_is_what_the_tables_say_after_every_change(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    rng = np.random.default_rng(11)
    replica = replica_of(store.database, gallery)
    names = [f"item{n}" for n in range(6)]
    for step in range(60):
        item = str(rng.choice(names))
        pictures = [make_image(f"{item}-{n}") for n in rng.permutation(5)[: rng.integers(1, 5)]]
        there = {item for item, _, _ in stored(store.database, gallery).values()}
        if item in there and rng.random() < 0.35:
            items.delete(store, gallery, item)
        else:
            put(store, gallery, item, *pictures)
        if step % 3 == 0:  # several changes at a time as well
            generation = replica.current()
            assert contents(generation) == stored(store.database, gallery)
            assert contents(replica_of(store.database, gallery).current()) == contents(generation)
    assert replica.current().seq == galleries.get(store.database, gallery.name).seq


def test_without_changes_a_refresh_is_one_short_look(store: GalleryStore, gallery: Gallery, make_image: Make) -> None:
    watched = WatchedDatabase(store.database)
    replica = replica_of(watched, gallery)
    put(store, gallery, "robin", make_image("a"))
    first = replica.current()
    reads = watched.reads
    assert replica.current() is first
    assert watched.reads == reads + 1


def test_deleting_and_adding_again_under_one_id_finds_only_the_newer_image(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    replica = replica_of(store.database, gallery)
    for _ in range(3):
        (image,) = put(store, gallery, "robin", make_image("a"))
        generation = replica.current()
        assert best_image(generation, make_image("a")) == image
        assert (generation.items, generation.images) == (1, 1)
        items.delete(store, gallery, "robin")
        assert best_image(replica.current(), make_image("a")) is None
        assert replica.current().items == 0


def test_an_image_that_came_and_went_between_two_refreshes_is_passed_over(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    replica = replica_of(store.database, gallery)
    put(store, gallery, "robin", make_image("a"))
    replica.current()
    put(store, gallery, "gull", make_image("b"))
    items.delete(store, gallery, "gull")
    (image,) = put(store, gallery, "wren", make_image("c"))
    generation = replica.current()
    assert contents(generation) == stored(store.database, gallery)
    assert best_image(generation, make_image("c")) == image


def test_a_pinned_generation_does_not_change_while_others_write(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    put_many(store.database, gallery, 0, 3000)
    for n in range(20):
        put(store, gallery, f"item{n}", make_image(n))
    replica = replica_of(store.database, gallery)
    pinned = replica.current()
    before = contents(pinned)
    queries = [query_for(make_image(n)) for n in range(20)]
    answers = search(pinned, queries, ScoreRule(), threshold=0.9, top_k=5)
    problems: list[BaseException] = []

    def write(first: int) -> None:
        try:
            for n in range(first, first + 8):
                items.delete(store, gallery, f"item{n}")
                put(store, gallery, f"item{n}", make_image(f"other {n}"), make_image(f"third {n}"))
                replica.current()
        except BaseException as problem:  # seen by the test below
            problems.append(problem)

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 10)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert search(pinned, queries, ScoreRule(), threshold=0.9, top_k=5) == answers
    for thread in threads:
        thread.join()
    assert problems == []
    assert contents(pinned) == before
    assert contents(replica.current()) == stored(store.database, gallery)


def test_one_more_image_does_not_move_the_others(store: GalleryStore, gallery: Gallery, make_image: Make) -> None:
    put_many(store.database, gallery, 0, 3000)
    replica = replica_of(store.database, gallery)
    before = replica.current()
    put(store, gallery, "robin", make_image("a"))
    after = replica.current()
    assert len(after.vectors) == len(before.vectors) + 1
    assert np.shares_memory(before.vectors, after.vectors)
    assert after.sketches == before.sketches


def test_a_gallery_that_grows_has_few_sketches_that_leave_few_rows_out(store: GalleryStore, gallery: Gallery) -> None:
    replica = replica_of(store.database, gallery)
    for first in range(0, 9000, 500):
        put_many(store.database, gallery, first, 500)
        generation = replica.current()
        assert len(generation.sketches) <= 2
        assert len(generation.vectors) - sum(len(part) for part in generation.sketches) < 2048
    assert contents(generation) == stored(store.database, gallery)


def test_dead_rows_are_cleared_away_when_they_are_more_than_a_quarter(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    for n in range(16):
        put(store, gallery, f"item{n}", make_image(n))
    replica = replica_of(store.database, gallery)
    pinned = replica.current()
    before = contents(pinned)
    for n in range(4):
        items.delete(store, gallery, f"item{n}")
    a_quarter = replica.current()
    assert (len(a_quarter.vectors), a_quarter.images) == (16, 12)
    items.delete(store, gallery, "item4")
    cleared = replica.current()
    assert (len(cleared.vectors), cleared.images) == (11, 11)
    assert contents(cleared) == stored(store.database, gallery)
    assert contents(pinned) == before
    (image,) = put(store, gallery, "item0", make_image(0))
    items.delete(store, gallery, "item15")
    assert best_image(replica.current(), make_image(0)) == image
    assert contents(replica.current()) == stored(store.database, gallery)


def test_a_gap_in_the_log_is_refused_and_the_replica_opens_anew(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    watched = WatchedDatabase(store.database)
    replica = replica_of(watched, gallery)
    put(store, gallery, "robin", make_image("a"))
    replica.current()
    (wren,) = put(store, gallery, "wren", make_image("b"))
    items.delete(store, gallery, "robin")
    with store.database.write() as connection:
        assert log.prune(connection, gallery.id, datetime.now(UTC) + timedelta(days=1)) > 0
    with pytest.raises(LogGap), store.database.read() as connection:
        log.follow(connection, gallery.id, 1, gallery.bundle)
    generation = replica.current()
    assert contents(generation) == stored(store.database, gallery)
    assert best_image(generation, make_image("b")) == wren
    assert best_image(generation, make_image("a")) is None


def test_a_second_gap_is_told_and_the_next_call_starts_over(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    names = iter(range(100))
    losing = False

    def lose_an_entry(snapshot: bool) -> None:
        if not snapshot and losing:  # just before the tail is read
            put(store, gallery, f"lost{next(names)}", make_image(f"lost {next(names)}"))
            with store.database.write() as connection:
                connection.execute(delete(changes).where(changes.c.gallery_id == gallery.id))

    replica = replica_of(WatchedDatabase(store.database, lose_an_entry), gallery)
    replica.current()
    losing = True
    with pytest.raises(LogGap):
        replica.current()
    losing = False
    assert contents(replica.current()) == stored(store.database, gallery)


def test_two_replicas_of_one_database_find_in_the_next_search_what_was_committed_by_the_other_side(
    store: GalleryStore, gallery: Gallery, make_image: Make, database_url: str
) -> None:
    other_database = open_database(database_url)
    try:
        other_store = GalleryStore(other_database, cast(FolderBlobs, store.blobs))
        here, there = replica_of(store.database, gallery), replica_of(other_database, gallery)
        here.current(), there.current()
        for n in range(10):
            (image,) = put(store, gallery, f"here{n}", make_image(f"here {n}"))
            assert best_image(there.current(), make_image(f"here {n}")) == image
            (image,) = put(other_store, gallery, f"there{n}", make_image(f"there {n}"))
            assert best_image(here.current(), make_image(f"there {n}")) == image
            items.delete(other_store, gallery, f"here{n}")
            assert best_image(here.current(), make_image(f"here {n}")) is None
    finally:
        other_database.close()


def test_threads_that_wait_for_a_refresh_share_the_next_one(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    entered, release = threading.Event(), threading.Event()

    def hold_the_first(_: bool) -> None:
        if not entered.is_set():
            entered.set()
            release.wait(20)

    watched = WatchedDatabase(store.database)
    replica = replica_of(watched, gallery)
    replica.current()
    watched._tell, watched.reads = hold_the_first, 0
    generations: list[Generation] = []
    first = threading.Thread(target=lambda: generations.append(replica.current()))
    first.start()
    assert entered.wait(20)
    (image,) = put(store, gallery, "robin", make_image("a"))
    waiting = [threading.Thread(target=lambda: generations.append(replica.current())) for _ in range(8)]
    for thread in waiting:
        thread.start()
    time.sleep(0.2)  # until they wait
    release.set()
    for thread in [first, *waiting]:
        thread.join()
    # The first one had begun before they came, so one of them reads again, for all of them.
    assert watched.reads == 2
    assert sum(best_image(generation, make_image("a")) == image for generation in generations) >= 8


def test_replicas_are_opened_once_and_dropped_with_their_gallery(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    replicas = Replicas(store.database)
    put(store, gallery, "robin", make_image("a"))
    first = replicas.current(gallery.id, gallery.bundle)
    assert replicas.current(gallery.id, gallery.bundle) is first
    replicas.keep_only([gallery.id])
    assert replicas.current(gallery.id, gallery.bundle) is first
    replicas.keep_only([])
    assert replicas.current(gallery.id, gallery.bundle) is not first
    galleries.delete(store.database, store.blobs, gallery.name)
    with pytest.raises(GalleryNotFound):
        replicas.current(gallery.id, gallery.bundle)
    assert replicas._replicas == {}


def test_a_replica_that_stands_where_the_gallery_was_seen_does_not_look_again(
    store: GalleryStore, gallery: Gallery, make_image: Make
) -> None:
    put(store, gallery, "owl", make_image("owl"))
    watched = WatchedDatabase(store.database)
    replica = replica_of(watched, gallery)
    seen = galleries.get(store.database, gallery.name).seq
    generation = replica.current(seen)
    reads = watched.reads
    assert replica.current(seen) is generation
    assert watched.reads == reads
    put(store, gallery, "crow", make_image("crow"))
    newer = replica.current(galleries.get(store.database, gallery.name).seq)
    assert newer.items == 2
    assert watched.reads > reads
    assert replica.current(seen).seq >= newer.seq  # what was seen before is no reason to answer from the past
