"""One query in very many vectors: the service's search, and numpy's product with argpartition.

`python -m benchmarks.many ROWS WIDTH`; WIDTH is that of the index vectors, so embeddings have one number less.
"""

import sys
import time

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

from benchmarks.sides import Answers, answer_commands
from roadmatch.gallery.replica import Generation
from roadmatch.gallery.search import Query, search
from roadmatch.scoring import ScoreRule, Vector, fold_query
from roadmatch.vectors.faiss import sketch

_AT_A_TIME = 50_000
_SKETCHED = 65_536  # rows of one sketch, as in a replica
_TOP_K = 10
_THRESHOLD = 0.5
_NOISE = 1.0  # as long as the picture's own part: its copy scores about 0.7
_PAUSE_S = 0.05  # a library's threads spin for a while after their work


class Many:
    """A generation of so many items, and queries that are noisy copies of some of them."""

    def __init__(self, rows: int, width: int) -> None:
        rng = np.random.default_rng(0)
        vectors = np.empty((rows, width), np.float32)
        for start in range(0, rows, _AT_A_TIME):
            some = vectors[start : start + _AT_A_TIME]
            rng.standard_normal(out=some, dtype=np.float32)
            some[:, -1] = 0  # b of every image
            some /= np.linalg.norm(some, axis=1, keepdims=True)
        self._generation = _generation(vectors)
        self._queries = []
        for row in rng.integers(0, rows, 64):
            aside = rng.standard_normal(width - 1, dtype=np.float32)
            mixed = vectors[row, :-1] + _NOISE * aside / np.linalg.norm(aside)
            self._queries.append((int(row), mixed / np.linalg.norm(mixed)))

    def answer(self, how: str, times: int) -> Answers:
        """how: `ours`, or `product_one_thread` or `product_all_threads` for numpy's."""
        one = _ours if how == "ours" else _by_product
        limit = 1 if how == "product_one_thread" else None
        taken = []
        time.sleep(_PAUSE_S)
        with threadpool_limits(limit, "blas"):
            for row, vector in self._queries[:times]:
                started = time.perf_counter()
                found = one(self._generation, vector)
                taken.append(time.perf_counter() - started)
                if found != row:
                    raise AssertionError(f"{how} found row {found} instead of {row}")
        return {"p50_s": float(np.median(taken)), "blas": _blas()}


def _generation(vectors: Vector) -> Generation:
    rows = len(vectors)
    starts = range(0, rows, _SKETCHED)
    names = [str(row) for row in range(rows)]
    return Generation(
        seq=rows,
        dimension=vectors.shape[1] - 1,
        vectors=vectors,
        sketches=tuple(sketch(vectors[start : start + _SKETCHED], start) for start in starts),
        b=np.zeros(rows),
        image_ids=names,
        item_numbers=np.arange(rows),
        item_ids=names,
        alive=np.ones(rows, np.bool_),
        items=rows,
        images=rows,
    )


def _ours(generation: Generation, vector: Vector) -> int:
    """The service's own: exact scores, the best ten items, and proof that there are no others."""
    answer = search(generation, [Query(vector, 0.0)], ScoreRule(), threshold=_THRESHOLD, top_k=_TOP_K)[0]
    return int((*answer.matches, *answer.near_misses)[0].item)


def _by_product(generation: Generation, vector: Vector) -> int:
    products = generation.vectors @ fold_query(vector, ScoreRule())
    best = np.argpartition(products, -_TOP_K)[-_TOP_K:]
    return int(best[products[best].argmax()])


def _blas() -> str:
    kinds = [info for info in threadpool_info() if info["user_api"] == "blas"]
    return ", ".join(f"{info['internal_api']} {info.get('architecture', '')}".strip() for info in kinds)


if __name__ == "__main__":
    answer_commands(Many(int(sys.argv[1]), int(sys.argv[2])).answer)
