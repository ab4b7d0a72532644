"""The best form in one process of what a search does: decode, embed, nearest vector; no HTTP, no database, no score.

`python -m benchmarks.bare FOLDER BUNDLE CPUS`: FOLDER holds vectors.npy (N, D) and the query pictures.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import faiss
import numpy as np

from benchmarks.sides import Answers, answer_commands
from roadmatch import bundle as bundles
from roadmatch.bundle import EMBEDDER
from roadmatch.embedding.openvino_engine import OpenvinoEngine
from roadmatch.images import read_pixels
from roadmatch.scoring import Vector

Nearest = Callable[[Vector, Vector], int]


class Bare:
    """All that it needs, in memory."""

    def __init__(self, folder: Path, bundle_folder: Path, cpus: int) -> None:
        bundle = bundles.read(bundle_folder)
        self._rule = bundle.manifest.preprocessing
        self._engine = OpenvinoEngine(bundle.file(EMBEDDER), cpus)
        self._vectors = np.load(folder / "vectors.npy")
        self._pictures = [path.read_bytes() for path in sorted(folder.glob("picture*"))]

    def answer(self, what: str, nearest: str, times: int, threads: int = 1) -> Answers:
        """`p50`: seconds, one picture after the other; `throughput`: pictures a second on so many threads."""
        pictures = self._pictures * times
        search = partial(self._search, NEAREST[nearest])
        if what == "p50":
            taken = []
            for picture in pictures:
                started = time.perf_counter()
                search(False, picture)
                taken.append(time.perf_counter() - started)
            return {"p50_s": float(np.median(taken))}
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(partial(search, True), pictures))
        return {"pictures_per_s": len(pictures) / (time.perf_counter() - started)}

    def _search(self, nearest: Nearest, busy: bool, picture: bytes) -> int:
        pixels, _ = read_pixels(picture, self._rule)
        return nearest(self._vectors, self._engine.embed(pixels, busy=busy))


def _by_product(vectors: Vector, query: Vector) -> int:
    return int((vectors @ query).argmax())


def _by_dots(vectors: Vector, query: Vector) -> int:
    """One thread whatever the product's library would take."""
    return int(np.vecdot(vectors, query).argmax())


def _by_faiss(vectors: Vector, query: Vector) -> int:
    faiss.omp_set_num_threads(1)  # it is kept per thread
    return int(faiss.knn(query[None], vectors, 1, metric=faiss.METRIC_INNER_PRODUCT)[1][0, 0])


NEAREST: dict[str, Nearest] = {"product": _by_product, "dots": _by_dots, "faiss": _by_faiss}


if __name__ == "__main__":
    answer_commands(Bare(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])).answer)
