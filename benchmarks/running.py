"""A running service for benchmarks: its data folder with a filled gallery, and the process."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sqlalchemy import insert, update

from app.settings import environment_of_a_child
from benchmarks.load import Connection, get_request
from roadmatch import bundle as bundles
from roadmatch.gallery import galleries
from roadmatch.gallery.galleries import Keep
from roadmatch.gallery.items import new_id
from roadmatch.scoring import Vector
from roadmatch.store import log, tables
from roadmatch.store.database import open_database

GALLERY = "benchmark"
_AT_A_TIME = 1_000
_READY = "http://"
_STOP_S = 30.0


@dataclass(frozen=True)
class Running:
    """A service that answers readyz. spawned: when its process was started, time.perf_counter()."""

    host: str
    port: int
    spawned: float


def unit_vectors(count: int, dimension: int) -> Vector:
    """(count, dimension), the same at every call."""
    vectors = np.random.default_rng(0).standard_normal((count, dimension), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def fill(data: Path, bundle_folder: Path, vectors: Vector) -> None:
    """vectors (N, D), unit -> a gallery of N items of one image each in a new data folder, in one transaction.

    The rows are those of N uploads; a real upload each would take minutes of decoding.
    """
    bundle = bundles.read(bundle_folder)
    assert bundle.operating_points is not None
    data.mkdir(parents=True)
    database = open_database(f"sqlite:///{data / 'roadmatch.db'}")
    rule = bundle.operating_points.default_rule
    gallery = galleries.create(database, GALLERY, bundle=bundle.id, rule=rule, keep=Keep.NONE)
    levels = _levels(vectors, bundle.background, bundle.manifest.score.k)
    with database.write(long=True) as connection:
        for start in range(0, len(vectors), _AT_A_TIME):
            numbers = range(start, min(start + _AT_A_TIME, len(vectors)))
            ids = [new_id() for _ in numbers]
            connection.execute(
                insert(tables.items),
                [{"gallery_id": gallery.id, "id": f"item{n:06}", "metadata": {}, "version": n + 1} for n in numbers],
            )
            connection.execute(
                insert(tables.images),
                [
                    {
                        "id": image,
                        "gallery_id": gallery.id,
                        "item_id": f"item{n:06}",
                        "sha256": f"{n:064x}",
                        "format": "jpeg",
                        "width": 640,
                        "height": 480,
                        "bytes": 60_000,
                    }
                    for n, image in zip(numbers, ids, strict=True)
                ],
            )
            connection.execute(
                insert(tables.embeddings),
                [
                    {"image_id": image, "bundle": bundle.id, "vector": vectors[n].tobytes(), "b": float(levels[n])}
                    for n, image in zip(numbers, ids, strict=True)
                ],
            )
            log.append(connection, gallery.id, [log.Change(log.Kind.ADD, image) for image in ids])
        counts = {"items": len(vectors), "images": len(vectors), "writes": len(vectors)}
        connection.execute(update(tables.galleries).where(tables.galleries.c.id == gallery.id).values(counts))
    database.close()


def _levels(vectors: Vector, background: Vector, k: int) -> Vector:
    """b of each vector (N,), all at once."""
    if not len(background):
        return np.zeros(len(vectors), np.float32)
    highest: Vector = np.sort(vectors @ background.T, axis=1)[:, -k:].mean(axis=1)
    return highest


@contextmanager
def running(data: Path, bundle_folder: Path) -> Iterator[Running]:
    """`roadmatch serve` in a process of its own, with default settings but for its folder, bundle and port."""
    options = ("--data", str(data), "--bundle", str(bundle_folder), "--port", "0")
    spawned = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "serve", *options],
        env=environment_of_a_child(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if _READY not in line:
            raise RuntimeError(f"the service did not start: {line!r}")
        host, port = line.split(_READY)[1].strip().rsplit(":", 1)
        connection = Connection(host, int(port))
        connection.ask(get_request("/readyz"))
        connection.close()
        yield Running(host, int(port), spawned)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
