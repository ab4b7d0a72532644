import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.gallery.search import Answer, Decision, Query, compare, search
from roadmatch.scoring import ScoreRule, Vector
from tests import oracles
from tests.generations import RULE, Image, generation_of, unit


def by_the_definition(images: Sequence[Image], query: Query, rule: ScoreRule) -> list[tuple[float, str, str]]:
    living = [(image.item, image.id, image.vector.tolist(), image.b) for image in images if image.alive]
    return oracles.ranked_items(query.vector.tolist(), query.b, living, rule.beta, rule.gamma)


def assert_is_the_answer(answer: Answer, expected: list[tuple[float, str, str]], threshold: float, top_k: int) -> None:
    hits = answer.matches + answer.near_misses
    assert [(hit.score, hit.item, hit.image) for hit in hits] == expected[:top_k]
    accepted = [item for item in expected if item[0] >= threshold]
    assert len(answer.matches) == min(len(accepted), top_k)
    assert answer.matches_truncated == (len(accepted) > top_k)
    assert answer.decision == (Decision.MATCH if accepted else Decision.NO_MATCH)
    assert answer.best_score == (expected[0][0] if expected else None)
    for hit in hits:
        assert hit.margin == round(hit.score - threshold, 6)


galleries = st.tuples(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans()), max_size=40),
    st.lists(st.integers(1, 20), max_size=3),
)


@settings(deadline=None, max_examples=200)
@given(
    galleries, st.integers(1, 45), st.floats(-0.5, 1.0), st.sampled_from([ScoreRule(), RULE, ScoreRule(0.7, 0.7, 1)])
)
def test_an_answer_is_the_one_of_a_scan_of_all_pairs(
    gallery: tuple[int, list[tuple[int, int, bool]], list[int]], top_k: int, threshold: float, rule: ScoreRule
) -> None:
    seed, layout, sketched = gallery
    rng = np.random.default_rng(seed)
    pictures, levels = unit(rng, 6, 12), np.round(rng.uniform(0, 0.6, 6), 4)  # six pictures: many exact ties
    images = [
        Image(f"item{item}", f"image{n:02}", pictures[picture], float(levels[picture]), alive)
        for n, (picture, item, alive) in enumerate(layout)
    ]
    sizes = [n for n, end in zip(sketched, np.cumsum(sketched), strict=True) if end <= len(images)]
    queries = [Query(pictures[0], float(levels[0])), Query(unit(rng, 12), 0.2)]
    generation = generation_of(images, sizes)
    threshold = round(threshold, 6)
    for query, answer in zip(queries, search(generation, queries, rule, threshold=threshold, top_k=top_k), strict=True):
        assert_is_the_answer(answer, by_the_definition(images, query, rule), threshold, top_k)
        assert (answer.seq, answer.gallery_size) == (9, len({image.item for image in images if image.alive}))


@pytest.mark.parametrize("top_k", [1, 10, 200, 1999, 5000])
@pytest.mark.parametrize("sketched", [(), (1500, 1000)])
def test_answers_are_complete_at_every_length(top_k: int, sketched: tuple[int, ...]) -> None:
    rng = np.random.default_rng(4)
    centres = unit(rng, 30, 8)
    images = [
        Image(
            f"item{n // 2:05}", f"image{n:05}", unit(rng, 8) if n % 3 else centres[n % 30], float(n % 7) / 10, n % 5 > 0
        )
        for n in range(3000)
    ]
    generation = generation_of(images, sketched)
    query = Query(centres[0], 0.1)
    expected = by_the_definition(images, query, RULE)
    borders = [score for score, _, _ in expected[top_k - 1 : top_k + 1]]  # the last one shown, and the one behind it
    for threshold in (-0.9, 0.2, *borders, 0.99):
        answer = search(generation, [query], RULE, threshold=threshold, top_k=top_k)[0]
        assert_is_the_answer(answer, expected, threshold, top_k)


def test_thousands_of_equal_images_do_not_hide_the_first_of_them() -> None:
    rng = np.random.default_rng(1)
    picture = unit(rng, 8)
    images = [Image(f"item{n:05}", f"image{n}", picture) for n in reversed(range(6000))]
    images.insert(3000, Image("another", "image", unit(rng, 8)))
    answer = search(generation_of(images, [6001]), [Query(picture, 0)], ScoreRule(), threshold=0.9, top_k=3)[0]
    assert [hit.item for hit in answer.matches] == ["item00000", "item00001", "item00002"]
    assert answer.matches_truncated


def test_an_item_of_a_hundred_images_leaves_room_for_the_others() -> None:
    rng = np.random.default_rng(2)
    near = unit(rng, 16)
    images = [Image("crowd", f"crowd{n:03}", near) for n in range(100)]
    images += [Image(f"item{n}", f"single{n}", unit(rng, 16)) for n in range(900)]
    query = Query(near, 0)
    answer = search(generation_of(images, [1000]), [query], ScoreRule(), threshold=0.95, top_k=5)[0]
    assert_is_the_answer(answer, by_the_definition(images, query, ScoreRule()), 0.95, 5)
    assert answer.matches[0].image == "crowd000"


def test_a_match_behind_many_images_of_the_best_item_is_not_overlooked() -> None:
    rng = np.random.default_rng(8)
    query = Query(unit(rng, 16), 0)

    def at(cosine: float) -> Vector:
        aside = unit(rng, 16)
        aside -= (aside @ query.vector) * query.vector
        vector: Vector = cosine * query.vector + np.float32(np.sqrt(1 - cosine**2)) * aside / np.linalg.norm(aside)
        return vector.astype(np.float32)

    images = [Image("crowd", "best", at(0.999))]
    images += [Image("crowd", f"crowd{n}", at(0.95)) for n in range(99)]
    images += [Image("other", "other", at(0.9))]
    images += [Image(f"item{n}", f"single{n}", at(0.1)) for n in range(900)]
    for sketched in ([], [1000]):
        answer = search(generation_of(images, sketched), [query], ScoreRule(), threshold=0.8, top_k=1)[0]
        assert [hit.image for hit in answer.matches] == ["best"]
        assert answer.matches_truncated


@pytest.mark.parametrize("sketched", [0, 3000])
def test_deleted_images_are_in_no_answer_and_shorten_none(sketched: int) -> None:
    rng = np.random.default_rng(3)
    near = unit(rng, 8)
    images = [Image(f"gone{n}", f"gone{n}", near, alive=False) for n in range(700)]
    images += [Image(f"here{n}", f"here{n}", unit(rng, 8)) for n in range(2300)]
    query = Query(near, 0)
    answer = search(
        generation_of(images, [sketched] if sketched else []), [query], ScoreRule(), threshold=0.9, top_k=20
    )[0]
    assert_is_the_answer(answer, by_the_definition(images, query, ScoreRule()), 0.9, 20)
    assert len(answer.matches + answer.near_misses) == 20


def test_near_ties_at_the_threshold_are_decided_alike_in_search_batch_and_compare() -> None:
    rng = np.random.default_rng(7)
    queries = [Query(vector, float(b)) for vector, b in zip(unit(rng, 64, 1280), rng.uniform(0, 1, 64), strict=True)]
    images = []
    for n in range(120):  # similarities to the first query around 0.8, a few millionths apart
        aside = unit(rng, 1280)
        aside -= (aside @ queries[0].vector) * queries[0].vector
        aside /= np.linalg.norm(aside)
        cosine = 0.8 + 1e-6 * (n % 12 - 6)
        vector = (cosine * queries[0].vector + np.sqrt(1 - cosine**2) * aside).astype(np.float32)
        images.append(Image(f"item{n:03}", f"image{n:03}", vector, 0.25))
    generation = generation_of(images, [80])
    scores = {compare(queries[0], Query(image.vector, image.b), RULE, threshold=0).score for image in images}
    assert len(scores) > 8
    for threshold in sorted(scores)[::3]:
        batch = search(generation, queries, RULE, threshold=threshold, top_k=120)
        alone = search(generation, queries[:1], RULE, threshold=threshold, top_k=120)
        small = search(generation_of(images[:1]), queries[:1], RULE, threshold=threshold, top_k=1)[0]
        assert alone[0] == batch[0]
        accepted = {hit.image: hit for hit in batch[0].matches}
        assert any(hit.margin == 0 for hit in accepted.values())
        for image in images:
            pair = compare(queries[0], Query(image.vector, image.b), RULE, threshold=threshold)
            assert (pair.decision is Decision.MATCH) == (image.id in accepted) == (pair.score >= threshold)
            if image.id in accepted:
                hit = accepted[image.id]
                assert (hit.similarity, hit.score, hit.margin) == (pair.similarity, pair.score, pair.margin)
        assert small.best_score == compare(queries[0], Query(images[0].vector, 0.25), RULE, threshold=threshold).score


def test_shown_numbers_explain_the_decision_where_a_threshold_has_more_decimals() -> None:
    image, query = Image("a", "a1", np.array([0.6, 0.8], np.float32)), Query(np.array([1, 0], np.float32), 0)
    answer = search(generation_of([image]), [query], ScoreRule(), threshold=0.6000004, top_k=1)[0]
    assert (answer.threshold, answer.decision, answer.matches[0].margin) == (0.6, Decision.MATCH, 0.0)
    pair = compare(query, Query(image.vector, 0), ScoreRule(), threshold=0.6000004)
    assert (pair.decision, pair.margin) == (Decision.MATCH, 0.0)
    assert compare(query, Query(image.vector, 0), ScoreRule(), threshold=0.600001).decision is Decision.NO_MATCH


def test_an_empty_gallery_answers_no_match() -> None:
    query = Query(np.array([1, 0], np.float32), 0)
    gone = generation_of([Image("a", "a1", query.vector, alive=False)])
    for generation in (generation_of([]), gone):
        answer = search(generation, [query], RULE, threshold=0.5, top_k=10)[0]
        assert answer == Answer(Decision.NO_MATCH, 0.5, None, (), (), False, 9, 0, 0)


def test_a_wrong_argument_is_refused() -> None:
    generation = generation_of([Image("a", "a1", np.array([1, 0], np.float32))])
    with pytest.raises(ValueError, match="top_k is 0"):
        search(generation, [], RULE, threshold=0.5, top_k=0)
    with pytest.raises(ValueError, match="2 dimensions"):
        search(generation, [Query(np.ones(3, np.float32), 0)], RULE, threshold=0.5, top_k=1)


def test_many_threads_search_one_generation_alike() -> None:
    rng = np.random.default_rng(6)
    images = [Image(f"item{n}", f"image{n}", vector) for n, vector in enumerate(unit(rng, 3000, 32))]
    generation = generation_of(images, [2500])
    queries = [Query(vector, 0.1) for vector in unit(rng, 20, 32)]
    expected = search(generation, queries, RULE, threshold=0.3, top_k=7)
    answers: list[list[Answer]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(search(generation, queries, RULE, threshold=0.3, top_k=7)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 4
