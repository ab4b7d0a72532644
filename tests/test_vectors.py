import subprocess
import sys
import threading
import time

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.vectors.faiss import Floats, candidates, nearest, product_error, sketch

widths = st.sampled_from([16, 32, 48, 64, 128, 256, 528])
seeds = st.integers(0, 2**32 - 1)


def folded_rows(rng: np.random.Generator, count: int, width: int, shape: str) -> Floats:
    """Unit vectors of several kinds beside a level, as galleries hold them."""
    vectors = rng.normal(size=(count, width - 1))
    if shape == "positive":
        vectors = np.maximum(vectors, 0) ** 3  # as a network's pooled activations: many small, few large
        vectors[:, 0] += 1e-3
    if shape == "alike":
        vectors = vectors[:1] + 1e-4 * vectors
    if shape == "equal":
        vectors = np.repeat(vectors[:1], count, axis=0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.concatenate([vectors, rng.uniform(-1, 1, (count, 1))], axis=1).astype(np.float32)


def folded_query(rng: np.random.Generator, vectors: Floats) -> Floats:
    near = vectors[0] + 0.1 * rng.normal(size=vectors.shape[1]) / np.sqrt(vectors.shape[1])
    query = np.append(near[:-1] / np.linalg.norm(near[:-1]), -rng.uniform(0, 1))
    return query.astype(np.float32)


def exact_products(vectors: Floats, query: Floats) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.array([sum(float(x) * float(y) for x, y in zip(row, query, strict=True)) for row in vectors])


shapes = st.sampled_from(["normal", "positive", "alike", "equal"])


@settings(deadline=None)
@given(seeds, widths, st.integers(1, 60), shapes)
def test_a_sketch_is_never_further_off_than_it_says(seed: int, width: int, count: int, shape: str) -> None:
    rng = np.random.default_rng(seed)
    vectors = folded_rows(rng, count, width, shape)
    query = folded_query(rng, vectors)
    products, rows, error = sketch(vectors, 7).nearest(query, count)
    assert sorted(rows - 7) == list(range(count))
    assert np.abs(products - exact_products(vectors, query)[rows - 7]).max() <= error
    assert error < 0.2


@settings(deadline=None)
@given(seeds, widths, st.lists(st.integers(1, 40), max_size=3), st.integers(0, 30), st.integers(1, 90), shapes)
def test_no_row_that_is_not_a_candidate_is_above_the_ceiling(
    seed: int, width: int, sketched: list[int], tail: int, k: int, shape: str
) -> None:
    rng = np.random.default_rng(seed)
    count = sum(sketched) + tail
    vectors = folded_rows(rng, max(count, 1), width, shape)[:count]
    starts = [sum(sketched[:n]) for n in range(len(sketched))]
    sketches = [sketch(vectors[start : start + n], start) for start, n in zip(starts, sketched, strict=True)]
    query = folded_query(rng, folded_rows(rng, 1, width, "normal") if count == 0 else vectors)
    found = candidates(vectors, sketches, query, k)
    assert len(set(found.rows.tolist())) == len(found.rows) == min(k, count)
    exact = exact_products(vectors, query)
    others = np.setdiff1d(np.arange(count), found.rows)
    assert (found.ceiling == -np.inf) == (len(others) == 0)
    assert (exact[others] <= found.ceiling).all()
    assert (exact[found.rows] <= found.highest).all()
    assert (np.diff(found.highest) <= 0).all()


def test_the_candidates_of_a_large_gallery_are_few_and_hold_the_best() -> None:
    rng = np.random.default_rng(5)
    vectors = folded_rows(rng, 20_000, 128, "normal")
    query = folded_query(rng, vectors)
    found = candidates(vectors, [sketch(vectors, 0)], query, 60)
    products = vectors.astype(np.float64) @ query
    assert set(np.argsort(-products)[:10]) <= set(found.rows.tolist())
    assert found.ceiling < np.sort(products)[-10]  # the proof closes without another look


@settings(deadline=None)
@given(seeds, st.integers(0, 50), st.integers(1, 5), st.integers(1, 60))
def test_nearest_gives_the_highest_products_best_first(seed: int, count: int, queries: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(count, 16)).astype(np.float32)
    asked = rng.normal(size=(queries, 16)).astype(np.float32)
    scores, rows = nearest(vectors, asked, k)
    expected = asked @ vectors.T
    assert scores.shape == rows.shape == (queries, min(k, count))
    assert scores == pytest.approx(-np.sort(-expected, axis=1)[:, :k], abs=1e-4)
    assert np.take_along_axis(expected, rows, axis=1) == pytest.approx(scores, abs=1e-4)


def test_a_float32_product_is_within_its_stated_error() -> None:
    rng = np.random.default_rng(3)
    vectors = folded_rows(rng, 200, 528, "positive")
    query = folded_query(rng, vectors)
    assert np.abs(vectors @ query - exact_products(vectors, query)).max() <= product_error(query)
    assert product_error(query) < 3e-4


def test_the_callers_number_of_threads_is_left_as_it_was() -> None:
    before = faiss.omp_get_max_threads()
    vectors = np.eye(16, dtype=np.float32)
    try:
        faiss.omp_set_num_threads(3)
        nearest(vectors, vectors[:1], 1)
        candidates(vectors, [sketch(vectors, 0)], vectors[0], 1)
        assert faiss.omp_get_max_threads() == 3
        with pytest.raises(AssertionError):
            nearest(vectors, vectors[:1, :8], 1)
        assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(before)


def test_other_threads_run_during_a_scan() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(40_000, 512)).astype(np.float32)
    part = sketch(vectors, 0)
    queries = np.repeat(vectors[:1], 19, axis=0)
    done = threading.Event()
    ticks: list[float] = []

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        for scan in (lambda: nearest(vectors, queries, 10), lambda: part._index.search(queries, 10)):
            started = time.perf_counter()
            scan()
            ended = time.perf_counter()
            assert sum(started < moment < ended for moment in ticks) >= 3
    finally:
        done.set()
        ticking.join()


def test_a_missing_faiss_names_the_extras() -> None:
    code = "import sys; sys.modules['faiss'] = None; import roadmatch.vectors.faiss"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "roadmatch[cpu]" in ended.stderr
    assert "roadmatch[gpu]" in ended.stderr
