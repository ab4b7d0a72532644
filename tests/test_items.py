"""roadmatch.gallery.items and sweep: writing items, on both databases."""

import dataclasses
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import func, select, text, update

from roadmatch.blobs import FolderBlobs
from roadmatch.errors import (
    BlobMissing,
    GalleryChanged,
    GalleryNotFound,
    ImageNotFound,
    ItemNotFound,
    LastImage,
    PictureNotKept,
    StorageFull,
    StoreUnavailable,
    TooManyImages,
    VersionMismatch,
)
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import Absent, GalleryStore, Item, NewImage, Outcome, Put, Wanted
from roadmatch.gallery.pictures import pictures_of_write
from roadmatch.gallery.sweep import sweep
from roadmatch.store import log
from roadmatch.store.database import open_database
from roadmatch.store.tables import embeddings, metadata
from roadmatch.store.tables import galleries as gallery_rows
from tests.postgres import PostgresServer

MakeImage = Callable[[object], NewImage]


def put(
    store: GalleryStore,
    gallery: Gallery,
    images: Sequence[NewImage],
    *,
    item_id: str = "robin",
    label: str | None = None,
    expect: int | Absent | None = None,
    **fields: str | int | float | bool | None,
) -> Put:
    return items.put(store, gallery, item_id, label=label, metadata=fields, images=images, expect_version=expect)


def entries(store: GalleryStore, gallery: Gallery) -> list[tuple[str, str]]:
    """The whole change log: kinds and image ids; its numbers are dense by what follow promises."""
    with store.database.read() as connection:
        return [(entry.kind.value, entry.image_id) for entry in log.follow(connection, gallery.id, 0, gallery.bundle)]


def counts(store: GalleryStore) -> dict[str, int]:
    with store.database.read() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
            if not table.name.startswith("job")
        }


def blob_count(store: GalleryStore) -> int:
    return len(list(store.blobs.keys_older_than(0)))


def check_whole(store: GalleryStore, gallery: Gallery) -> list[Item]:
    """Rows, counts, log and pictures agree with one another -> the items."""
    found = items.list_(store, gallery, limit=10_000)
    now = galleries.get(store.database, gallery.name)
    ids = [image.id for item in found for image in item.images]
    assert (now.items, now.images) == (len(found), len(ids))
    assert counts(store)["embeddings"] == counts(store)["images"] == len(ids)
    alive: dict[str, None] = {}
    for kind, image_id in entries(store, gallery):
        if kind == "add":
            assert image_id not in alive
            alive[image_id] = None
        else:
            del alive[image_id]
    assert sorted(alive) == sorted(ids)
    named = [image.blob for item in found for image in item.images if image.blob]
    assert sorted(store.blobs.keys_older_than(0)) == sorted(named)
    return found


def test_a_put_item_is_found_as_it_was_put(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    image = make_image(1)
    made = put(store, gallery, [image], label="Erithacus", place="garden", count=2, sure=True, note=None)
    assert made.outcome is Outcome.CREATED
    assert items.get(store, gallery, "robin") == made.item
    assert made.item.label == "Erithacus"
    assert made.item.metadata == {"place": "garden", "count": 2, "sure": True, "note": None}
    (stored,) = made.item.images
    assert (stored.item, stored.sha256, stored.format) == ("robin", image.sha256, "PNG")
    assert (stored.width, stored.height, stored.bytes) == (32, 16, len(image.data))
    assert items.read_picture(store, gallery, stored.id) == (image.data, stored)
    assert made.item.created_at.utcoffset() == timedelta(0)
    with store.database.read() as connection:
        row = connection.execute(select(embeddings)).one()
    assert (row.image_id, row.bundle, row.b) == (stored.id, gallery.bundle, image.b)
    assert row.vector == image.vector.astype("<f4").tobytes()
    check_whole(store, gallery)


def test_the_same_put_again_changes_nothing(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    images = [make_image(1), make_image(2)]
    first = put(store, gallery, images, label="bird", a=1)
    again = put(store, gallery, images[::-1], label="bird", a=1)
    assert (again.outcome, again.item) == (Outcome.UNCHANGED, first.item)
    assert len(entries(store, gallery)) == 2
    check_whole(store, gallery)


def test_a_replaced_item_keeps_the_image_that_is_uploaded_again(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    first = put(store, gallery, [make_image(1), make_image(2)]).item
    replaced = put(store, gallery, [make_image(2), make_image(3)])
    assert replaced.outcome is Outcome.REPLACED
    by_hash = {image.sha256: image for image in (*first.images, *replaced.item.images)}
    kept, gone, new = (by_hash[make_image(i).sha256] for i in (2, 1, 3))
    assert kept in first.images
    assert set(replaced.item.images) == {kept, new}
    assert entries(store, gallery)[2:] == [("add", new.id), ("remove", gone.id)]
    with pytest.raises(ImageNotFound):
        items.read_picture(store, gallery, gone.id)
    check_whole(store, gallery)


def test_a_new_label_is_a_new_version_and_no_entry_of_the_log(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    images = [make_image(1)]
    first = put(store, gallery, images, label="a")
    second = put(store, gallery, images, label="b")
    third = put(store, gallery, images, label="b", place="garden")
    assert [second.outcome, third.outcome] == [Outcome.REPLACED] * 2
    assert first.item.version < second.item.version < third.item.version
    assert third.item.images == first.item.images
    assert len(entries(store, gallery)) == 1
    check_whole(store, gallery)


def test_no_version_comes_twice_even_if_the_item_was_gone(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    versions: list[int] = []
    for _ in range(3):
        versions += [put(store, gallery, [make_image(1)], label=label).item.version for label in "abc"]
        items.delete(store, gallery, "robin")
    assert versions == sorted(set(versions))


def test_an_expected_version_is_kept_to(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    with pytest.raises(VersionMismatch, match="not there"):
        put(store, gallery, [make_image(1)], expect=1)
    item = put(store, gallery, [make_image(1)], expect=Absent.ABSENT).item
    with pytest.raises(VersionMismatch, match="there already"):
        put(store, gallery, [make_image(1)], expect=Absent.ABSENT)
    newer = put(store, gallery, [make_image(1)], label="new", expect=item.version).item
    for write in (
        lambda version: put(store, gallery, [make_image(2)], expect=version),
        lambda version: put(store, gallery, [make_image(1)], label="new", expect=version),
        lambda version: items.add_images(store, gallery, "robin", [make_image(2)], expect_version=version),
        lambda version: items.delete_image(store, gallery, "robin", newer.images[0].id, expect_version=version),
        lambda version: items.delete(store, gallery, "robin", expect_version=version),
    ):
        with pytest.raises(VersionMismatch, match=f"has version {newer.version}, not {item.version}"):
            write(item.version)
    assert items.get(store, gallery, "robin") == newer
    items.delete(store, gallery, "robin", expect_version=newer.version)
    check_whole(store, gallery)


def test_added_images_are_not_doubled(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    first = put(store, gallery, [make_image(1)], label="bird", a=1).item
    added = items.add_images(store, gallery, "robin", [make_image(1), make_image(2), make_image(2)])
    assert added.outcome is Outcome.REPLACED
    assert {image.sha256 for image in added.item.images} == {make_image(1).sha256, make_image(2).sha256}
    assert first.images[0] in added.item.images
    assert (added.item.label, added.item.metadata) == ("bird", {"a": 1})
    again = items.add_images(store, gallery, "robin", [make_image(2)])
    assert (again.outcome, again.item) == (Outcome.UNCHANGED, added.item)
    with pytest.raises(ItemNotFound, match="wren"):
        items.add_images(store, gallery, "wren", [make_image(1)])
    check_whole(store, gallery)


def test_an_item_has_one_to_a_hundred_images(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    with pytest.raises(ValueError, match="none"):
        put(store, gallery, [])
    with pytest.raises(TooManyImages):
        put(store, gallery, [make_image(i) for i in range(101)])
    assert counts(store)["images"] == blob_count(store) == 0
    full = put(store, gallery, [make_image(i) for i in range(100)]).item
    with pytest.raises(TooManyImages):
        items.add_images(store, gallery, "robin", [make_image(100)])
    items.add_images(store, gallery, "robin", [make_image(i) for i in range(100)])
    assert items.get(store, gallery, "robin") == full
    check_whole(store, gallery)


def test_one_image_is_deleted_but_never_the_last(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    item = put(store, gallery, [make_image(1), make_image(2)]).item
    first, second = item.images
    left = items.delete_image(store, gallery, "robin", first.id)
    assert left.images == (second,)
    assert left.version > item.version
    with pytest.raises(ImageNotFound):
        items.delete_image(store, gallery, "robin", first.id)
    with pytest.raises(LastImage):
        items.delete_image(store, gallery, "robin", second.id)
    with pytest.raises(ItemNotFound):
        items.delete_image(store, gallery, "wren", second.id)
    assert entries(store, gallery)[2:] == [("remove", first.id)]
    check_whole(store, gallery)


def test_a_deleted_item_is_gone_and_can_come_again(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    first = put(store, gallery, [make_image(1)]).item
    items.delete(store, gallery, "robin")
    for use in (items.get, items.delete):
        with pytest.raises(ItemNotFound, match="robin"):
            use(store, gallery, "robin")
    with pytest.raises(ImageNotFound):
        items.read_picture(store, gallery, first.images[0].id)
    assert counts(store) == {"galleries": 1, "items": 0, "images": 0, "embeddings": 0, "changes": 2}
    assert put(store, gallery, [make_image(1)]).outcome is Outcome.CREATED
    check_whole(store, gallery)


def test_items_are_listed_by_id_in_pages_that_inserts_do_not_shift(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    names = ["10", "9", "A", "B", "a", "a-1", "a.1", "a_1", "b"]  # by code, alike on both databases
    for name in reversed(names):
        put(store, gallery, [make_image(name), make_image(name + "2")], item_id=name)
    seen: list[str] = []
    while page := items.list_(store, gallery, after=seen[-1] if seen else None, limit=2):
        assert len(page) <= 2
        assert all(len(item.images) == 2 for item in page)
        seen += [item.id for item in page]
        put(store, gallery, [make_image("x")], item_id="0" + seen[-1])  # before the page
    assert seen == names


def test_a_gallery_that_keeps_no_pictures_has_no_blobs(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    none = galleries.update(store.database, gallery.name, keep=Keep.NONE)
    (image,) = put(store, none, [make_image(1)]).item.images
    assert blob_count(store) == 0
    with pytest.raises(PictureNotKept):
        items.read_picture(store, none, image.id)
    keeping = galleries.update(store.database, gallery.name, keep=Keep.ORIGINAL)
    again = put(store, keeping, [make_image(1)])
    assert again.outcome is Outcome.REPLACED
    assert again.item.images[0].id == image.id
    assert items.read_picture(store, keeping, image.id)[0] == make_image(1).data
    assert len(entries(store, keeping)) == 1
    check_whole(store, keeping)


def test_what_is_kept_is_decided_by_the_gallery_as_it_is_now(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    galleries.update(store.database, gallery.name, keep=Keep.NONE)
    assert put(store, gallery, [make_image(1)]).item.images[0].blob is None  # gallery was read before the update
    assert blob_count(store) == 0


def test_a_lost_picture_is_not_called_unknown(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    (image,) = put(store, gallery, [make_image(1)]).item.images
    assert image.blob is not None
    store.blobs.delete(image.blob)
    with pytest.raises(BlobMissing):
        items.read_picture(store, gallery, image.id)


def test_a_picture_deleted_in_a_read_is_not_found(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage, tmp_path: Path
) -> None:
    class SlowBlobs(FolderBlobs):
        """Reads so slowly that the item is gone first."""

        def read(self, key: str) -> bytes:
            items.delete(store, gallery, "robin")
            return super().read(key)

    (image,) = put(store, gallery, [make_image(1)]).item.images
    with pytest.raises(ImageNotFound):
        items.read_picture(dataclasses.replace(store, blobs=SlowBlobs(tmp_path / "blobs")), gallery, image.id)


def test_a_gallery_deleted_in_a_write_goes_after_it(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    deleting = threading.Thread(target=lambda: galleries.delete(store.database, store.blobs, gallery.name))

    def delete_gallery(moment: str) -> None:
        if moment == "before_commit":
            deleting.start()
            deleting.join(0.3)
            assert deleting.is_alive()

    writing = dataclasses.replace(store, trace=delete_gallery)
    assert put(writing, gallery, [make_image(1)]).outcome is Outcome.CREATED
    deleting.join()
    assert set(counts(store).values()) == {0}
    assert blob_count(store) == 0


def test_another_gallery_s_images_are_unknown(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    other = galleries.create(store.database, "fish", bundle=gallery.bundle, rule="max_f1", keep=Keep.ORIGINAL)
    (image,) = put(store, gallery, [make_image(1)]).item.images
    with pytest.raises(ImageNotFound):
        items.read_picture(store, other, image.id)
    with pytest.raises(ItemNotFound):
        items.get(store, other, "robin")


def test_a_gallery_deleted_or_rebuilt_meanwhile_takes_nothing(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    with store.database.write() as connection:
        connection.execute(update(gallery_rows).values(bundle="other@000000000000"))
    with pytest.raises(GalleryChanged):
        put(store, gallery, [make_image(1)])
    galleries.delete(store.database, store.blobs, gallery.name)
    galleries.create(store.database, gallery.name, bundle=gallery.bundle, rule="max_f1", keep=Keep.ORIGINAL)
    with pytest.raises(GalleryNotFound, match="birds"):
        put(store, gallery, [make_image(1)])
    with pytest.raises(GalleryNotFound, match="birds"):
        items.delete(store, gallery, "robin")
    assert counts(store)["images"] == blob_count(store) == 0


@pytest.mark.parametrize("item_id", ["", ".", "../x", "a/b", "-a", "a\n", "a" * 129, "ä"])
def test_odd_ids_are_refused(store: GalleryStore, gallery: Gallery, make_image: MakeImage, item_id: str) -> None:
    with pytest.raises(ValueError, match="id"):
        put(store, gallery, [make_image(1)], item_id=item_id)


def test_what_cannot_be_stored_alike_is_refused(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    for label in ("a\0b", "\ud800", "x" * 257):
        with pytest.raises(ValueError, match="label"):
            put(store, gallery, [make_image(1)], label=label)
    for value in (float("nan"), float("inf"), "a\0", "\udfff", [1], {"a": 1}):
        with pytest.raises(ValueError, match="metadata"):
            put(store, gallery, [make_image(1)], field=value)  # type: ignore[arg-type]
    put(store, gallery, [make_image(1)], label="é" * 256, field="\x01\t\U0001f426", big=2**70)
    assert items.get(store, gallery, "robin").metadata == {"field": "\x01\t\U0001f426", "big": 2**70}
    for poison in (np.full(8, np.nan, np.float32), np.zeros((1, 8), np.float32)):
        with pytest.raises(ValueError, match="finite"):
            dataclasses.replace(make_image(1), vector=poison)
    with pytest.raises(ValueError, match="finite"):
        dataclasses.replace(make_image(1), b=float("inf"))


def test_fifty_equal_puts_at_once_make_one_item(store: GalleryStore, gallery: Gallery, make_image: MakeImage) -> None:
    outcomes: list[Outcome] = []
    start = threading.Barrier(50)

    def write() -> None:
        start.wait()
        outcomes.append(put(store, gallery, [make_image(1), make_image(2)], label="bird").outcome)

    threads = [threading.Thread(target=write) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [Outcome.CREATED] + [Outcome.UNCHANGED] * 49
    assert len(entries(store, gallery)) == 2
    check_whole(store, gallery)


def write_at_random(url: str, folder: Path, name: str, seed: int, rounds: int) -> None:
    """A process that puts, adds to and deletes the same few items as its rivals, and minds no refusal."""
    store = GalleryStore(open_database(url, busy_timeout_s=30), FolderBlobs(folder))
    gallery = galleries.get(store.database, name)
    chance = random.Random(seed)
    for _ in range(rounds):
        item_id = f"item{chance.randrange(3)}"
        images = [_image(chance.randrange(6)) for _ in range(chance.randint(1, 3))]
        try:
            match chance.randrange(4):
                case 0:
                    items.delete(store, gallery, item_id)
                case 1:
                    items.add_images(store, gallery, item_id, images)
                case 2:
                    item = items.get(store, gallery, item_id)
                    items.delete_image(store, gallery, item_id, chance.choice(item.images).id)
                case _:
                    put(store, gallery, images, item_id=item_id, label=str(seed), expect=None)
        except (ItemNotFound, ImageNotFound, LastImage):
            pass  # another process was faster
    store.database.close()


def _image(number: int) -> NewImage:
    vector = np.full(4, number, np.float32)
    return NewImage(b"picture %d" % number, f"{number:064x}", "PNG", 1, 1, vector, 0.0)


def test_rival_processes_leave_what_some_order_of_their_writes_leaves(
    database_url: str, store: GalleryStore, gallery: Gallery, tmp_path: Path
) -> None:
    spawn = multiprocessing.get_context("spawn")
    arguments = [(database_url, tmp_path / "blobs", gallery.name, seed, 40) for seed in range(3)]
    rivals = [spawn.Process(target=write_at_random, args=each) for each in arguments]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join()
        assert rival.exitcode == 0
        rival.close()
    for item in check_whole(store, gallery):  # the log replayed in its order gives exactly the rows
        assert len({image.sha256 for image in item.images}) == len(item.images)


def test_a_locked_database_takes_no_half_of_an_item(sqlite_url: str, tmp_path: Path, make_image: MakeImage) -> None:
    store = GalleryStore(open_database(sqlite_url, busy_timeout_s=0.3), FolderBlobs(tmp_path / "blobs"))
    gallery = galleries.create(store.database, "birds", bundle="b", rule="max_f1", keep=Keep.ORIGINAL)
    code = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "roadmatch.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(StoreUnavailable, match="locked"):
            put(store, gallery, [make_image(1)])
        assert blob_count(store) == counts(store)["items"] == 0
    put(store, gallery, [make_image(1)])
    check_whole(store, gallery)
    store.database.close()


def test_a_server_that_stops_in_a_write_takes_no_half_of_an_item(
    postgres_url: str, postgres_server: PostgresServer, tmp_path: Path, make_image: MakeImage
) -> None:
    stops: set[str] = set()

    def stop(moment: str) -> None:
        if moment in stops:
            stops.remove(moment)
            postgres_server.stop()

    store = GalleryStore(open_database(postgres_url), FolderBlobs(tmp_path / "blobs"), stop)
    gallery = galleries.create(store.database, "birds", bundle="b", rule="max_f1", keep=Keep.ORIGINAL)
    put(store, gallery, [make_image(1)])
    try:
        for moment, left in (("blob_written", 1), ("before_commit", 2)):
            stops.add(moment)
            with pytest.raises(StoreUnavailable):
                put(store, gallery, [make_image(2)])
            assert blob_count(store) == left  # a commit without an answer may have happened: its picture stays for now
            postgres_server.start()
            assert items.get(store, gallery, "robin").images[0].sha256 == make_image(1).sha256
    finally:
        postgres_server.start()
    assert sweep(store, grace_s=0) == 1
    check_whole(store, gallery)
    put(store, gallery, [make_image(2)])
    check_whole(store, gallery)
    store.database.close()


class FullBlobs(FolderBlobs):
    """A folder that has room for a few pictures."""

    room = 2

    def put(self, data: bytes) -> str:
        if self.room == 0:
            raise StorageFull("no room left for pictures")
        self.room -= 1
        return super().put(data)


def test_no_room_for_one_of_the_pictures_leaves_nothing_of_the_item(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage, tmp_path: Path
) -> None:
    full = dataclasses.replace(store, blobs=FullBlobs(tmp_path / "blobs"))
    with pytest.raises(StorageFull):
        put(full, gallery, [make_image(i) for i in range(3)])
    assert counts(store)["items"] == blob_count(store) == 0
    put(store, gallery, [make_image(i) for i in range(3)])
    items.delete(full, gallery, "robin")  # deleting needs no room
    check_whole(store, gallery)


def put_and_die(url: str, folder: Path, name: str, image: NewImage, moment: str) -> None:
    """A process that puts an item and is killed at a moment of the write."""

    def die(now: str) -> None:
        if now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    store = GalleryStore(open_database(url), FolderBlobs(folder), die)
    put(store, galleries.get(store.database, name), [image])


@pytest.mark.parametrize(
    ("moment", "replaces"),
    [("blob_written", False), ("before_commit", False), ("before_commit", True), ("after_commit", True)],
)
def test_a_write_killed_at_any_moment_leaves_the_old_or_the_new_item(
    database_url: str,
    store: GalleryStore,
    gallery: Gallery,
    make_image: MakeImage,
    tmp_path: Path,
    moment: str,
    replaces: bool,
) -> None:
    old, new = make_image(1), make_image(2)
    if replaces:
        put(store, gallery, [old])
    spawn = multiprocessing.get_context("spawn")
    writer = spawn.Process(target=put_and_die, args=(database_url, tmp_path / "blobs", gallery.name, new, moment))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    writer.close()
    assert blob_count(store) == 1 + replaces  # the new picture is on disk before the rows, the old one until after
    assert sweep(store, grace_s=3600) == 0
    assert sweep(store, grace_s=0) == (0 if moment == "after_commit" and not replaces else 1)
    found = check_whole(store, gallery)
    expected = new if moment == "after_commit" else old if replaces else None
    assert [image.sha256 for item in found for image in item.images] == ([expected.sha256] if expected else [])
    assert put(store, gallery, [new]).item.images[0].sha256 == new.sha256
    check_whole(store, gallery)


def test_deleted_bytes_are_in_no_file_of_sqlite(sqlite_url: str, tmp_path: Path, make_image: MakeImage) -> None:
    store = GalleryStore(open_database(sqlite_url), FolderBlobs(tmp_path / "blobs"))
    gallery = galleries.create(store.database, "birds", bundle="b", rule="max_f1", keep=Keep.ORIGINAL)
    long = np.random.default_rng(5).normal(size=1280).astype(np.float32)  # longer than a page of the file
    image = dataclasses.replace(make_image(1), vector=long)
    second = dataclasses.replace(make_image(2), vector=long[::-1].copy())
    for i in range(40):
        put(store, gallery, [make_image(f"other {i}")], item_id=f"other{i}", secret="z" * 50)

    def found(*needles: bytes) -> set[bytes]:
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        return {needle for needle in needles if any(needle in file for file in files)}

    vector, b_side = image.vector.tobytes(), second.vector.tobytes()
    pieces = [vector[:64], vector[2000:2064], vector[-64:], b"Rubecula-label", b"garden-of-secrets", b"erithacus-id"]
    pieces += [image.data, image.sha256.encode()]
    put(store, gallery, [image, second], item_id="erithacus-id", label="Rubecula-label", place="garden-of-secrets")
    assert found(*pieces, b_side[:64]) == {*pieces, b_side[:64]}  # the test can see them
    one = next(stored for stored in items.get(store, gallery, "erithacus-id").images if stored.sha256 == second.sha256)
    items.delete_image(store, gallery, "erithacus-id", one.id)
    assert found(b_side[:64], b_side[-64:], second.data, second.sha256.encode()) == set()
    put(store, gallery, [image], item_id="erithacus-id", label="Rubecula-label", place="new-place")
    assert found(b"garden-of-secrets") == set()
    assert found(b"new-place") == {b"new-place"}
    items.delete(store, gallery, "erithacus-id")
    assert found(*pieces, b"new-place") == set()
    check_whole(store, gallery)
    galleries.delete(store.database, store.blobs, gallery.name)
    assert found(b"z" * 50, make_image("other 3").vector.tobytes(), make_image("other 3").data) == set()
    store.database.close()


def test_a_delete_beside_a_reader_is_erased_by_the_sweep(
    sqlite_url: str, tmp_path: Path, make_image: MakeImage
) -> None:
    store = GalleryStore(open_database(sqlite_url), FolderBlobs(tmp_path / "blobs"))
    gallery = galleries.create(store.database, "birds", bundle="b", rule="max_f1", keep=Keep.ORIGINAL)
    put(store, gallery, [make_image(1)], place="garden-of-secrets")
    with store.database.read(snapshot=True) as connection:
        connection.execute(select(gallery_rows)).all()
        started = time.monotonic()
        items.delete(store, gallery, "robin")
        assert time.monotonic() - started < 3  # it does not wait for the reader
    sweep(store)
    assert not any(b"garden-of-secrets" in path.read_bytes() for path in tmp_path.glob("roadmatch.db*"))
    store.database.close()


def make_old(folder: Path, seconds: float) -> None:
    for path in folder.rglob("*"):
        at = path.stat().st_mtime - seconds
        os.utime(path, (at, at))


def test_the_sweep_takes_old_orphans_only(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage, tmp_path: Path
) -> None:
    for i in range(5):
        put(store, gallery, [make_image(i)], item_id=f"item{i}")
    store.blobs.put(b"old orphan")
    leftover = next(path for path in (tmp_path / "blobs").rglob("*") if path.is_file()).with_suffix(".part")
    leftover.write_bytes(b"half")
    make_old(tmp_path / "blobs", 7200)
    young = store.blobs.put(b"young orphan")
    assert sweep(store) == 2
    assert sweep(store) == 0
    assert store.blobs.read(young) == b"young orphan"
    assert not leftover.exists()
    store.blobs.delete(young)
    check_whole(store, gallery)


def test_the_sweep_asks_again_before_it_deletes(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage, tmp_path: Path
) -> None:
    key = store.blobs.put(make_image(1).data)
    looks: list[object] = []

    class Reading:
        """A database that lets a writer name the picture after the first look."""

        def __getattr__(self, name: str) -> object:
            if name == "read":
                looks.append(name)
                if len(looks) == 2:
                    late = dataclasses.replace(store, blobs=Given(key))
                    put(late, gallery, [make_image(1)])
            return getattr(store.database, name)

    class Given(FolderBlobs):
        """Has put the picture already."""

        def __init__(self, key: str) -> None:
            self._key = key

        def put(self, data: bytes) -> str:
            return self._key

    assert sweep(dataclasses.replace(store, database=Reading()), grace_s=0) == 0  # type: ignore[arg-type]
    check_whole(store, gallery)


def test_pictures_that_were_begun_ahead_are_named_once_or_deleted(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage
) -> None:
    first, second, other = make_image(1), make_image(2), make_image(3)
    wanted = [Wanted("robin", None, {}, [first]), Wanted("wren", None, {}, [second])]
    with pictures_of_write(store.blobs, store.trace) as pictures:
        pictures.begin([first.data, second.data, second.data, other.data])
        items.put_many(store, gallery, wanted, lambda *_: None, pictures)
        items.put_many(store, gallery, wanted, lambda *_: None, pictures)  # again, as after a lost answer
    assert blob_count(store) == 2
    check_whole(store, gallery)


def test_a_write_that_fails_leaves_none_of_the_pictures_that_were_begun_ahead(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage, tmp_path: Path
) -> None:
    full = dataclasses.replace(store, blobs=FullBlobs(tmp_path / "blobs"))
    images = [make_image(number) for number in range(4)]
    wanted = [Wanted(f"b{number}", None, {}, [image]) for number, image in enumerate(images)]

    def write() -> None:
        with pictures_of_write(full.blobs, full.trace) as pictures:
            pictures.begin(image.data for image in images)
            items.put_many(full, gallery, wanted, lambda *_: None, pictures)

    with pytest.raises(StorageFull):
        write()
    assert counts(store)["items"] == blob_count(store) == 0


def test_a_look_at_a_few_items_reads_their_images_alone_also_by_a_plan_made_for_an_empty_gallery(
    postgres_url: str, tmp_path: Path, make_image: MakeImage
) -> None:
    store = GalleryStore(open_database(postgres_url), FolderBlobs(tmp_path / "blobs"))
    gallery = galleries.create(store.database, "birds", bundle="b", rule="max_f1", keep=Keep.NONE)
    wanted = [Wanted(f"b{number}", None, {}, [make_image(number)]) for number in range(400)]
    few = [one.item_id for one in wanted[:8]]
    for _ in range(12):  # psycopg prepares a statement after five times, and after ten PostgreSQL keeps its plan
        assert items.get_many(store, gallery, few) == {}
    items.put_many(store, gallery, wanted, lambda *_: None)
    before = images_read(store)
    assert len(items.get_many(store, gallery, few)) == len(few)
    assert len(few) <= images_read(store) - before <= 2 * len(few)
    store.database.close()


def images_read(store: GalleryStore) -> int:
    """How many rows of images PostgreSQL has read so far."""
    rows = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'images'"
    with store.database.read() as connection:
        connection.execute(text("SELECT pg_stat_force_next_flush()"))
    with store.database.read() as connection:
        return int(connection.execute(text(rows)).scalar_one())
