"""What a stored image takes in the database and in the memory of a process that searches.

`python -m benchmarks.sizes` prints one JSON object; --images for how many. Vectors are random, and pictures
are not kept: those take their own bytes, and what a file takes more.
"""

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil

from benchmarks.bars import Figures
from roadmatch.blobs import FolderBlobs
from roadmatch.bundle import default_bundle_folder, read
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore, NewImage, Wanted
from roadmatch.gallery.replica import Replicas
from roadmatch.store.database import open_database

_AT_ONCE = 500


def main() -> None:
    """Measure, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=60_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="roadmatch-sizes-") as folder:
        print(json.dumps(measure(Path(folder), chosen.images), indent=2))


def measure(folder: Path, images: int) -> Figures:
    """Of so many images in a gallery that keeps no pictures."""
    bundle = read(default_bundle_folder())
    store = GalleryStore(open_database(f"sqlite:///{folder / 'roadmatch.db'}"), FolderBlobs(folder / "pictures"))
    gallery = galleries.create(store.database, "g", bundle=bundle.id, rule="max_f1", keep=Keep.NONE)
    empty = _on_disk(folder)
    _fill(store, gallery, np.random.default_rng(0), range(images), bundle.manifest.dimension)
    disk = _on_disk(folder) - empty
    store.database.close()
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # nothing that was freed here is used again there
        memory = fresh.submit(_in_memory, folder / "roadmatch.db").result()
    return {
        "images": images,
        "dimension": bundle.manifest.dimension,
        "vector_bytes": 4 * bundle.manifest.dimension,
        "database_bytes_per_image": round(disk / images),
        "searching_process_bytes_per_image": round(memory / images),
    }


def _fill(store: GalleryStore, gallery: Gallery, random: np.random.Generator, numbers: range, dimension: int) -> None:
    for first in range(numbers.start, numbers.stop, _AT_ONCE):
        some = range(first, min(first + _AT_ONCE, numbers.stop))
        vectors = random.standard_normal((len(some), dimension)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        wanted = [
            Wanted(
                f"item-{n:08}",
                "label",
                {},
                [NewImage(b"", sha256(str(n).encode()).hexdigest(), "jpeg", 800, 600, vector, 0.2)],
            )
            for n, vector in zip(some, vectors, strict=True)
        ]
        items.put_many(store, gallery, wanted, lambda *_: None)


def _on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _in_memory(database: Path) -> int:
    """What a replica of the gallery adds to a process."""
    opened = open_database(f"sqlite:///{database}")
    gallery = galleries.get(opened, "g")
    before = psutil.Process().memory_info().rss
    replicas = Replicas(opened)
    replicas.current(gallery.id, gallery.bundle)
    return int(psutil.Process().memory_info().rss - before)


if __name__ == "__main__":
    main()
