"""Candidates by FAISS in process: every row is looked at, and what an answer cannot miss is proved, not hoped.

Reading float32 rows is bound by memory, and one byte a number is a quarter of it: the first pass runs over an 8-bit
copy (`Sketch`) whose error has a hard bound, and the caller scores what it returns from the float32 rows.

One query on 2 cores with AVX-512, in ms, beside numpy's product with argpartition (one thread, two threads):

                        sketch, 1 thread   faiss.knn, 1 thread   2 threads   numpy
    1,000,000 x 512                 20.9                    55          80   59, 35
    10,000 x 1,296                  0.60                   1.3         1.9   1.4, 0.7

`IndexFlatIP` is 8 to 13 % slower than `faiss.knn`. FAISS releases the GIL: two threads search 1.9 times as fast as one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import faiss
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "FAISS is not installed: pip install 'roadmatch[cpu]', or 'roadmatch[gpu]' on a machine with CUDA"
    ) from error

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

_LEVELS = 127
"""Codes run from -127 to 127, stored with 128 added."""
_CACHED_ROWS = 256
"""So many rows are coded at a time: they stay in the cache."""
_LONGEST = 1.5
"""No row is longer: a folded row is a unit vector beside a level in [-1, 1]."""
_ULP = 2.0**-23
_LEAST_STEP = 1e-30
"""A smaller step is none: its inverse would be infinite."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """rows (K,), highest (K,) descending: the true product of row n with the query is not above highest[n].

    ceiling: no product of any other row is above it; -inf when every row is among the candidates.
    """

    rows: Rows
    highest: NDArray[np.float64]
    ceiling: float


@dataclass(frozen=True, eq=False)
class Sketch:
    """An 8-bit copy of the rows from `first` on: row = middle + step * code, each number within half a step.

    middle, step (W,): per dimension, so the one that holds b does not coarsen the others.
    """

    first: int
    middle: Floats
    step: Floats
    _index: Any

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def nearest(self, query: Floats, k: int) -> tuple[NDArray[np.float64], Rows, float]:
        """query (W,), 1 <= k <= length -> (products (K,) best first, rows (K,), largest error of any product)."""
        stepped = query * self.step
        products, rows = self._index.search(stepped[None], k)
        offset = np.dot(query.astype(np.float64), self.middle.astype(np.float64))
        # Half a step in every dimension, the rounding of a float32 sum over codes of up to 128, and that of the middle.
        error = float(np.abs(stepped).sum()) * (0.5 + 128 * (len(query) + 16) * _ULP) + product_error(query)
        return products[0].astype(np.float64) + offset, rows[0] + self.first, error


def sketch(vectors: Floats, first: int) -> Sketch:
    """vectors (N, W), N >= 1 -> their 8-bit copy; first: the number of the first row."""
    low, high = vectors.min(axis=0), vectors.max(axis=0)
    middle, step = (low + high) / 2, (high - low) / (2 * _LEVELS)
    step[step < _LEAST_STEP] = 0
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
    codes = np.empty(vectors.shape, np.uint8)
    for start in range(0, len(vectors), _CACHED_ROWS):
        scaled = (vectors[start : start + _CACHED_ROWS] - middle) * inverse
        codes[start : start + _CACHED_ROWS] = np.clip(np.rint(scaled), -_LEVELS, _LEVELS) + 128
    return Sketch(first, middle, step, _index(codes))


def candidates(vectors: Floats, sketches: Sequence[Sketch], query: Floats, k: int) -> Candidates:
    """vectors (N, W), query (W,) -> k rows (all, if there are fewer) and a proof about them and the others.

    sketches: of the first rows, in order and without a gap; the rows behind them are read as they are.
    """
    parts: list[tuple[NDArray[np.float64], Rows]] = []
    ceiling = -np.inf
    with _one_thread():
        for part in sketches:
            taken = min(k, len(part))
            products, rows, error = part.nearest(query, taken)
            parts.append((products + error, rows))
            if taken < len(part):
                ceiling = max(ceiling, float(products[-1]) + error)
        first = sketches[-1].first + len(sketches[-1]) if sketches else 0
        if first < len(vectors):
            taken = min(k, len(vectors) - first)
            exact, found = _nearest(vectors[first:], query[None], taken)
            highest = exact[0] + np.float64(product_error(query))
            parts.append((highest, found[0] + first))
            if taken < len(vectors) - first:
                ceiling = max(ceiling, float(highest[-1]))
    if not parts:
        return Candidates(np.empty(0, np.int64), np.empty(0), -np.inf)
    highest, rows = parts[0] if len(parts) == 1 else (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if len(parts) > 1:
        order = np.argsort(-highest)
        highest, rows = highest[order], rows[order]
        ceiling = max(ceiling, float(highest[k])) if len(rows) > k else ceiling
    return Candidates(rows[:k], highest[:k], ceiling)


def nearest(vectors: Floats, queries: Floats, k: int) -> tuple[Floats, Rows]:
    """vectors (N, W), queries (Q, W), C-contiguous -> (products (Q, K), rows (Q, K)), best first, K = min(k, N)."""
    with _one_thread():
        return _nearest(vectors, queries, min(k, len(vectors)))


def product_error(query: Floats) -> float:
    """query (W,) -> how far a float32 product with a folded row can be from the true one, in any order of summing."""
    return (len(query) + 16) * _ULP * _LONGEST * float(np.linalg.norm(query))


def _nearest(vectors: Floats, queries: Floats, k: int) -> tuple[Floats, Rows]:
    if k == 0:
        return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    found: tuple[Floats, Rows] = faiss.knn(queries, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
    return found


def _index(codes: NDArray[np.uint8]) -> Any:
    """codes (N, W) -> an index that gives sum(query * (code - 128)).

    Of FAISS's 8-bit kinds this one computes in float32 at every width; `QT_8bit_direct_signed` cuts the query itself to
    whole numbers where the width is a multiple of 32 or 64.
    """
    width = codes.shape[1]
    index = faiss.IndexScalarQuantizer(width, faiss.ScalarQuantizer.QT_8bit_uniform, faiss.METRIC_INNER_PRODUCT)
    # It decodes to trained[0] + trained[1] * (code + 0.5) / 255.
    faiss.copy_array_to_vector(np.array([-128.5, 255], np.float32), index.sq.trained)
    index.is_trained = True
    index.add_sa_codes(codes)
    return index


@contextmanager
def _one_thread() -> Iterator[None]:
    """One query gains nothing from OpenMP's threads and loses half of its speed to them.

    OpenMP keeps the number per calling thread, so this touches no other thread's, and the caller's own is put back.
    """
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
