"""What must hold of a gallery and a job after any fault: nothing lost, doubled, phantom or left running.

The letters are those of the invariants that the fault tests name: I1 to I7 hold of what a client sent, I8 of the disk.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from roadmatch.embedding import Encoder
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore, Item
from roadmatch.gallery.replica import Generation, Replica
from roadmatch.gallery.search import Query, compare, search
from roadmatch.jobs.queue import Job, State
from roadmatch.scoring import ScoreRule
from roadmatch.store import log
from roadmatch.store.tables import changes, images

GRACE_S = 3600.0
"""A picture that no row names may be so old before the sweep takes it."""
_PAGE = 1000
_SAME = 1e-4
"""Of each number of an embedding that is made again."""


def check(
    store: GalleryStore,
    gallery: Gallery,
    expected: Mapping[str, str],
    *,
    encoder: Encoder | None = None,
    grace_s: float = GRACE_S,
) -> None:
    """The gallery holds these items and nothing else, each with its one picture, found by it. AssertionError if not.

    expected: item id -> sha256 of its picture. encoder: of the gallery's bundle; with it each picture is embedded again
    (a few ms each). grace_s: of the whole store, a picture that no row names is younger than that.
    """
    found = {item.id: item for item in every_item(store, gallery)}
    _check_items(found, expected)
    _check_counts(store, gallery, len(expected))
    _check_log(store, gallery, {item.images[0].id for item in found.values()})
    _check_searches(store, gallery, found, encoder)
    if gallery.keep is Keep.ORIGINAL:
        _check_pictures(store, found)
    check_no_orphans(store, grace_s)


def check_job(job: Job | Mapping[str, Any], entries: int) -> None:
    """The job has succeeded, and each of its source's entries is counted once. job: as the library or the API has it.

    I6: accepted = done + unchanged + failed. AssertionError if not.
    """
    told = vars(job) if isinstance(job, Job) else job
    assert told["state"] == State.SUCCEEDED, told
    assert told["done"] + told["unchanged"] + told["failed"] == entries, told
    assert told.get("position", entries) == entries, told
    assert told["total"] in (None, entries), told
    assert told["finished_at"] is not None, told
    assert told["error"] is None, told


def check_no_orphans(store: GalleryStore, grace_s: float) -> None:
    """I8: of the whole store, a picture that no row names is younger than so many seconds. AssertionError if not."""
    old = set(store.blobs.keys_older_than(grace_s))
    with store.database.read() as connection:
        named = set(connection.scalars(select(images.c.blob)))
    assert old <= named, f"{len(old - named)} old pictures without a row"


def every_item(store: GalleryStore, gallery: Gallery) -> Iterator[Item]:
    """All items of a gallery, in the order of their ids."""
    after = None
    while page := items.list_(store, gallery, after=after, limit=_PAGE):
        yield from page
        after = page[-1].id


def _check_items(found: Mapping[str, Item], expected: Mapping[str, str]) -> None:
    """I1, I2: what was sent, and only that."""
    lost, phantom = expected.keys() - found.keys(), found.keys() - expected.keys()
    assert not lost, f"{len(lost)} items are lost: {sorted(lost)[:5]}"
    assert not phantom, f"{len(phantom)} items are there that nobody sent: {sorted(phantom)[:5]}"
    wrong = [one.id for one in found.values() if [image.sha256 for image in one.images] != [expected[one.id]]]
    assert not wrong, f"{len(wrong)} items have other pictures than were sent: {wrong[:5]}"


def _check_counts(store: GalleryStore, gallery: Gallery, count: int) -> None:
    now = galleries.get(store.database, gallery.name)
    assert (now.items, now.images) == (count, count)


def _check_log(store: GalleryStore, gallery: Gallery, living: set[str]) -> None:
    """The log has no hole and no entry twice, and its replay leaves what the tables hold."""
    asked = select(changes).where(changes.c.gallery_id == gallery.id).order_by(changes.c.seq)
    with store.database.read(snapshot=True) as connection:
        entries = connection.execute(asked).all()
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    replayed: set[str] = set()
    for entry in entries:
        if entry.kind == log.Kind.ADD:
            assert entry.image_id not in replayed, f"image {entry.image_id} came twice"
            replayed.add(entry.image_id)
        else:
            replayed.remove(entry.image_id)
    assert replayed == living


def _check_searches(store: GalleryStore, gallery: Gallery, found: Mapping[str, Item], encoder: Encoder | None) -> None:
    """I1, I3, I5, I7: each picture finds its own item, no item twice, by the numbers that compare gives."""
    generation = Replica(store.database, gallery.id, gallery.bundle).current()
    assert (generation.items, generation.images) == (len(found), len(found))
    rule = ScoreRule() if encoder is None else encoder.bundle.manifest.score
    stored = _stored(generation)
    assert stored.keys() == found.keys()
    for item in found.values():
        query = stored[item.id]
        if encoder is not None:
            _check_embedding(store, item, query, encoder)
        (answer,) = search(generation, [query], ScoreRule(), threshold=1.0, top_k=2)
        best = (*answer.matches, *answer.near_misses)[0]
        assert best.similarity >= 0.999999
        assert found[best.item].images[0].sha256 == item.images[0].sha256, f"{item.id} is not its own best match"
        (answer,) = search(generation, [query], rule, threshold=0.5, top_k=5)
        hits = (*answer.matches, *answer.near_misses)
        assert len({hit.item for hit in hits}) == len(hits)
        for hit in hits:
            pair = compare(query, stored[hit.item], rule, threshold=0.5)
            assert (pair.similarity, pair.score, pair.margin) == (hit.similarity, hit.score, hit.margin)


def _stored(generation: Generation) -> dict[str, Query]:
    """By item, the embedding that the generation holds."""
    rows: NDArray[np.int64] = np.flatnonzero(generation.alive)
    return {
        generation.item_ids[generation.item_numbers[row]]: Query(
            generation.vectors[row, : generation.dimension], float(generation.b[row])
        )
        for row in rows
    }


def _check_embedding(store: GalleryStore, item: Item, stored: Query, encoder: Encoder) -> None:
    (image,) = item.images
    assert image.blob is not None, "without kept pictures nothing can be embedded again"
    again = encoder.encode(store.blobs.read(image.blob))
    assert np.abs(again.vector - stored.vector).max() < _SAME, f"{item.id} has another picture's embedding"
    assert abs(again.b - stored.b) < _SAME


def _check_pictures(store: GalleryStore, found: Mapping[str, Item]) -> None:
    for item in found.values():
        (image,) = item.images
        assert image.blob is not None
        assert sha256(store.blobs.read(image.blob)).hexdigest() == image.sha256, f"{item.id} has other bytes"
