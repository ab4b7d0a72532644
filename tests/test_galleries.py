"""roadmatch.gallery.galleries: making, finding, changing and deleting galleries, on both databases."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select

from roadmatch.errors import GalleryExists, GalleryNotFound, StoreUnavailable
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore, NewImage
from roadmatch.store.database import Database, open_database
from roadmatch.store.tables import metadata

MakeImage = Callable[[object], NewImage]


def create(database: Database, name: str) -> Gallery:
    return galleries.create(database, name, bundle="small@0123456789ab", rule="max_f1", keep=Keep.NONE)


def test_a_new_gallery_is_empty_and_found_by_name(database: Database) -> None:
    made = galleries.create(database, "birds", bundle="small@0123456789ab", rule="max_f1", keep=Keep.ORIGINAL)
    assert galleries.get(database, "birds") == made
    assert (made.name, made.bundle, made.rule, made.keep) == ("birds", "small@0123456789ab", "max_f1", Keep.ORIGINAL)
    assert (made.seq, made.items, made.images) == (0, 0, 0)
    assert abs(made.created_at - datetime.now(UTC)) < timedelta(seconds=60)
    assert made.created_at.utcoffset() == timedelta(0)


def test_a_name_is_given_once(database: Database) -> None:
    create(database, "birds")
    with pytest.raises(GalleryExists, match="birds"):
        create(database, "birds")
    create(database, "Birds")


def test_of_many_who_make_one_gallery_at_once_one_succeeds(database: Database) -> None:
    outcomes: list[object] = []

    def make() -> None:
        try:
            outcomes.append(create(database, "birds"))
        except GalleryExists:
            outcomes.append(None)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 8
    assert [made for made in outcomes if made] == [galleries.get(database, "birds")]


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "-a", "a/b", "a b", "a\n", "é", "a\0", "a" * 129, "a%2Fb"])
def test_odd_names_are_refused(database: Database, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        create(database, name)
    with pytest.raises(GalleryNotFound):
        galleries.get(database, name.replace("\0", "0"))


@pytest.mark.parametrize("name", ["a", "9", "a" * 128, "A.b_c-d"])
def test_good_names_are_taken(database: Database, name: str) -> None:
    assert galleries.get(database, create(database, name).name).name == name


def test_an_unknown_kind_of_keeping_is_refused(database: Database) -> None:
    with pytest.raises(ValueError, match="thumbnails"):
        galleries.create(database, "birds", bundle="b", rule="max_f1", keep="thumbnails")  # type: ignore[arg-type]


def test_galleries_are_listed_by_name_in_pages(database: Database) -> None:
    for name in ("b", "B", "a.1", "a-1", "a_1", "A", "a", "10", "9"):
        create(database, name)
    names: list[str] = []
    while page := galleries.list_(database, after=names[-1] if names else None, limit=2):
        assert len(page) <= 2
        names += [gallery.name for gallery in page]
    assert names == ["10", "9", "A", "B", "a", "a-1", "a.1", "a_1", "b"]  # by code, alike on both databases


def test_rule_and_keep_can_change_and_nothing_else_does(database: Database) -> None:
    made = create(database, "birds")
    assert galleries.update(database, "birds", rule="false_match_rate<=0.05").rule == "false_match_rate<=0.05"
    changed = galleries.update(database, "birds", keep=Keep.ORIGINAL)
    assert (changed.rule, changed.keep) == ("false_match_rate<=0.05", Keep.ORIGINAL)
    assert galleries.update(database, "birds") == changed == galleries.get(database, "birds")
    assert (changed.id, changed.bundle, changed.created_at) == (made.id, made.bundle, made.created_at)


def test_what_is_not_there_is_not_found(store: GalleryStore) -> None:
    for use in (
        lambda: galleries.get(store.database, "birds"),
        lambda: galleries.update(store.database, "birds", rule="max_f1"),
        lambda: galleries.update(store.database, "birds"),
        lambda: galleries.delete(store.database, store.blobs, "birds"),
    ):
        with pytest.raises(GalleryNotFound, match="birds"):
            use()


def test_a_deleted_gallery_leaves_nothing_and_spares_the_others(
    store: GalleryStore, gallery: Gallery, make_image: MakeImage, tmp_path: Path
) -> None:
    other = galleries.create(store.database, "fish", bundle=gallery.bundle, rule="max_f1", keep=Keep.ORIGINAL)
    for owner in (gallery, other):
        for name in ("one", "two"):
            images = [make_image(1), make_image(2)]
            items.put(store, owner, name, label=None, metadata={}, images=images)
    galleries.delete(store.database, store.blobs, gallery.name)
    with store.database.read() as connection:
        counts = {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
            if not table.name.startswith("job")
        }
    assert counts == {"galleries": 1, "items": 2, "images": 4, "embeddings": 4, "changes": 4}
    assert len(list(store.blobs.keys_older_than(0))) == 4
    kept = [image.id for item in items.list_(store, other) for image in item.images]
    pictures = [items.read_picture(store, other, image_id)[0] for image_id in kept]
    assert sorted(pictures) == sorted([make_image(1).data, make_image(2).data] * 2)


def test_a_gallery_of_the_same_name_is_another_one(store: GalleryStore, gallery: Gallery) -> None:
    galleries.delete(store.database, store.blobs, gallery.name)
    again = create(store.database, gallery.name)
    assert again.id > gallery.id  # a replica of the old one cannot take it for its own


def test_a_known_gallery_is_read_again_as_it_is_now(store: GalleryStore, make_image: MakeImage) -> None:
    known = create(store.database, "birds")
    create(store.database, "fish")
    items.put(store, known, "owl", label=None, metadata={}, images=[make_image("owl")])
    galleries.update(store.database, "birds", rule="other", keep=Keep.ORIGINAL)
    now = galleries.again(store.database, known)
    assert now == galleries.get(store.database, "birds")
    assert (now.seq, now.items, now.images, now.rule, now.keep) == (1, 1, 1, "other", Keep.ORIGINAL)


def test_a_known_gallery_that_is_gone_is_not_found_and_one_made_anew_is_another(store: GalleryStore) -> None:
    known = create(store.database, "birds")
    galleries.delete(store.database, store.blobs, "birds")
    with pytest.raises(GalleryNotFound, match="birds"):
        galleries.again(store.database, known)
    anew = create(store.database, "birds")
    assert galleries.again(store.database, known) == anew != known


def test_a_known_gallery_in_a_database_that_fails_is_unavailable(sqlite_url: str, tmp_path: Path) -> None:
    database = open_database(sqlite_url)
    known = create(database, "birds")
    database.close()
    (tmp_path / "roadmatch.db").write_bytes(b"no database" * 100)
    with pytest.raises(StoreUnavailable, match="not an SQLite file"):
        galleries.again(database, known)
    database.close()
