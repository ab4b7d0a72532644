"""What imports take beside time: the memory of a large archive's, the looks of one that changes nothing, and rows."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path, PurePosixPath

import numpy as np
from sqlalchemy import func, inspect, select, table

from benchmarks.archives import archive_of_large_ones, archive_of_photographs, archive_of_small_ones, small_ones
from benchmarks.bars import Figures, at_least, at_most
from benchmarks.footprint import Course, Footprint, cpu_s
from benchmarks.importing import Place, place, workers
from roadmatch import bundle as bundles
from roadmatch.blobs import FolderBlobs
from roadmatch.gallery import items
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore, NewImage, Wanted
from roadmatch.jobs.entry import item_id_of

_MEMORY_MB, _GROWTH_MB = 700, 35
"""Flat: the second half of the time goes no higher than the first by more than a twentieth of the limit."""
_AT_A_TIME = 1_000
_OWN = ("items", "images", "embeddings", "changes")
"""Tables that have a row for each image; the others must not."""


def memory(folder: Path, bundle_folder: Path, archive_bytes: int, url: str = "") -> tuple[list[Figures], Figures]:
    """A worker with all cores, and the children in which it decodes, from the job's start to its end."""
    archive = archive_of_large_ones(archive_bytes)
    with place(folder / "data", bundle_folder, url) as at, workers(at, 1, cpus=0) as (worker,):
        job = at.queued(at.gallery("large"), archive)
        footprint = Footprint(worker)
        span = at.followed([job], footprint.look)
        highest = footprint.highest()
    looks = footprint.looks
    seconds = [one.second for one in looks]
    own = Course.of(seconds, [one.worker for one in looks])
    size = archive.stat().st_size / 1e6
    figures = {
        "archive_mb": size,
        "pictures": span.jobs[0].done,
        "seconds": span.seconds,
        "looks": len(looks),
        "worker_highest_mb": highest,
        "worker_mb": asdict(own),
        "decoding_children_mb": asdict(Course.of(seconds, [one.children for one in looks])),
        "all_with_shared_pages_once_mb": max(one.proportional for one in looks if one.proportional is not None),
    }
    return [
        at_most(f"import of a zip of {size:.0f} MB: memory of the worker, MB", highest, _MEMORY_MB),
        at_most("the same: peak of the second half above that of the first, MB", own.growth, _GROWTH_MB),
    ], figures


def unchanged(folder: Path, bundle_folder: Path, files: int, url: str = "") -> tuple[list[Figures], Figures]:
    """A zip of small files that the gallery holds already; their embeddings are made up, and nobody looks at them."""
    archive = archive_of_small_ones(files)
    with place(folder / "data", bundle_folder, url) as at:
        gallery = at.gallery("small", Keep.NONE)
        started = time.perf_counter()
        _fill(at, gallery, files)
        filled = time.perf_counter() - started
        with workers(at, 1, cpus=0) as (worker,):
            span = at.followed([at.queued(gallery, archive)])
            cpu = cpu_s(worker)
    if span.jobs[0].unchanged != files:
        raise RuntimeError(f"{span.jobs[0].unchanged} of {files} files were found unchanged")
    figures = {
        "mean_bytes": archive.stat().st_size / files,
        "seconds": span.seconds,
        "per_s": span.per_s,
        "worker_cpu_s_start_included": cpu,
        "filled_by_put_many_per_s": files / filled,
    }
    return [at_least(f"import of a zip of {files} unchanged files: entries/s", span.per_s, 5_000)], figures


def rows(folder: Path, bundle_folder: Path, images: int, url: str = "") -> tuple[list[Figures], Figures]:
    """Rows that come into all tables with imports of n and of 2 n images, each into a gallery of its own."""
    with place(folder / "data", bundle_folder, url) as at, workers(at, 1, cpus=0):
        counts = [_rows(at)]
        for count in (images, 2 * images):
            at.followed([at.queued(at.gallery(f"rows{count}"), archive_of_photographs(0, count))])
            counts.append(_rows(at))
    of_n, of_2n = ({name: after[name] - before[name] for name in after} for before, after in pairwise(counts))
    an_image = {name: (of_2n[name] - of_n[name]) / images for name in of_n}
    others = sum(abs(more) for name, more in an_image.items() if name not in _OWN)
    figures = {"images": [images, 2 * images], "rows": [of_n, of_2n], "more_for_each_image": an_image}
    return [at_most(f"rows for each image beside those of {', '.join(_OWN)}", others, 0)], figures


def _rows(at: Place) -> dict[str, int]:
    with at.database.read() as connection:
        names = inspect(connection).get_table_names()
        return {name: int(connection.scalar(select(func.count()).select_from(table(name))) or 0) for name in names}


def _fill(at: Place, gallery: Gallery, files: int) -> None:
    """What an import of the small ones would leave behind, with vectors of noise."""
    store = GalleryStore(at.database, FolderBlobs(at.data / "pictures"))
    wanted = _wanted(at.bundle, files)
    while some := list(islice(wanted, _AT_A_TIME)):
        items.put_many(store, gallery, some, lambda _connection, _puts: None)


def _wanted(bundle_folder: Path, files: int) -> Iterator[Wanted]:
    rng = np.random.default_rng(0)
    dimension = bundles.read(bundle_folder).manifest.dimension
    for name, data in small_ones(files):
        vector = rng.standard_normal(dimension, dtype=np.float32)
        vector /= np.linalg.norm(vector)
        image = NewImage(data, sha256(data).hexdigest(), "JPEG", 320, 240, vector, 0.0)
        yield Wanted(item_id_of(PurePosixPath(name)), None, {}, [image])
