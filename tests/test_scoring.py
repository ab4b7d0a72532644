import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadmatch import scoring
from roadmatch.scoring import (
    ScoreRule,
    background_level,
    fold,
    fold_query,
    folded_width,
    score,
    similarity,
)
from tests import oracles
from tests.generations import unit

shapes = st.tuples(st.integers(1, 60), st.sampled_from([1, 2, 7, 8, 9, 31, 127, 128, 129, 500, 1280]))
seeds = st.integers(0, 2**32 - 1)


def test_similarity_and_score_worked_by_hand() -> None:
    query = np.array([0.6, 0.8], np.float32)
    images = np.array([[0.6, 0.8], [0.8, 0.6], [-0.8, 0.6]], np.float32)
    assert similarity(query, images).tolist() == [1.0, 0.96, 0.0]
    # 0.96 - 0.5 * 0.2 - 0.25 * 0.4
    assert score(np.array([0.96]), 0.2, np.array([0.4]), ScoreRule(beta=0.5, gamma=0.25)).tolist() == [0.76]
    assert str(similarity(query, images)[2]) == "0.0"


@given(shapes, seeds)
def test_similarity_and_score_are_those_of_the_definition(shape: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    images, query, b = unit(rng, *shape), unit(rng, shape[1]), rng.uniform(0, 1, shape[0])
    rule = ScoreRule(beta=0.7, gamma=0.3)
    found = score(similarity(query, images), 0.4, b, rule)
    expected = [
        oracles.score_of_pair(query.tolist(), 0.4, x.tolist(), float(y), 0.7, 0.3)
        for x, y in zip(images, b, strict=True)
    ]
    assert found.tolist() == pytest.approx(
        expected, abs=1.01e-6
    )  # a value in the middle of two may be rounded either way
    assert np.mean(found != np.array(expected)) < 0.2


@given(shapes, seeds)
def test_the_similarity_of_a_pair_does_not_depend_on_what_else_is_asked(shape: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    images, query = unit(rng, *shape), unit(rng, shape[1])
    order = rng.permutation(len(images))[: rng.integers(1, len(images) + 1)]
    padded = np.zeros((len(images), shape[1] + 5), np.float32)
    padded[:, : shape[1]] = images
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "DECIMALS", 17)  # rounding would hide a different last bit from all but a few pairs
        together = similarity(query, images)
        assert similarity(query, images[order]).tobytes() == together[order].tobytes()
        assert similarity(query, padded[:, : shape[1]]).tobytes() == together.tobytes()  # a view with gaps
        for image, expected in zip(images, together, strict=True):
            assert similarity(query, image[None])[0] == expected
            assert similarity(image, query[None])[0] == expected  # symmetric


@given(seeds, st.integers(0, 40), st.integers(1, 30))
def test_the_background_level_is_the_mean_of_the_highest_similarities(seed: int, pictures: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    vector, background = unit(rng, 24), unit(rng, pictures, 24)
    if pictures > 3:
        background[1] = background[0]
    expected = oracles.background_mean(vector.tolist(), background.tolist(), k)
    assert background_level(vector, background, k) == pytest.approx(expected, abs=1.01e-6)


@given(shapes, seeds, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_folded_product_is_the_score_before_the_querys_part(
    shape: tuple[int, int], seed: int, beta: float, gamma: float, b_query: float
) -> None:
    rng = np.random.default_rng(seed)
    images, query, b = unit(rng, *shape), unit(rng, shape[1]), rng.uniform(-1, 1, shape[0])
    rule = ScoreRule(beta, gamma)
    product = fold(images, b) @ fold_query(query, rule)
    exact = score(similarity(query, images), b_query, b, rule) + beta * b_query
    assert product == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize(("dimension", "width"), [(1, 16), (15, 16), (16, 32), (512, 528), (1280, 1296)])
def test_a_folded_vector_has_room_for_b_and_is_padded_to_16(dimension: int, width: int) -> None:
    assert folded_width(dimension) == width
    assert fold(np.ones((1, dimension), np.float32), np.array([0.5]))[0, dimension:].tolist() == [0.5] + [0.0] * (
        width - dimension - 1
    )


def test_raw_nearest_misses_the_best_image_of_the_score_where_the_fold_finds_it() -> None:
    rule = ScoreRule(beta=0.5, gamma=0.5)
    query = np.array([1, 0], np.float32)
    similarities = np.array([0.90, 0.89, 0.88, 0.80])
    images = np.stack([similarities, np.sqrt(1 - similarities**2)], axis=1).astype(np.float32)
    b = np.array([0.7, 0.7, 0.7, 0.2])  # three crowd-pleasers, and one that is like few others
    raw = np.argsort(-(images @ query))[:3]
    folded = np.argsort(-(fold(images, b) @ fold_query(query, rule)))[:3]
    best = int(np.argmax(score(similarity(query, images), 0.3, b, rule)))
    assert best == 3
    assert best not in raw
    assert folded[0] == best
