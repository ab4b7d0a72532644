"""How unlike the classes fare at one threshold."""

import numpy as np
import pytest
from numpy.typing import NDArray

from roadmatch.metrics import opis as module
from roadmatch.metrics.opis import Utilities, class_utilities, opis, opis_tail
from tests.more_metric_oracles import class_utility, mean_over

Vectors = NDArray[np.float32]


def embedded(
    noise: float | NDArray[np.float64], sizes: tuple[int, ...], seed: int = 0
) -> tuple[Vectors, NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    spread = np.broadcast_to(noise, len(sizes))[labels, None]
    vectors = random.normal(size=(len(sizes), 8))[labels] + spread * random.normal(size=(len(labels), 8))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels


def test_two_curves_worked_by_hand() -> None:
    # The classes' utilities are 1 apart at the ends' left half and equal at the right end: (1/2)^2 falling to 0.
    utilities = Utilities(np.array([0.2, 0.3, 0.4]), np.array([[1.0, 1.0, 0.5], [0.0, 1.0, 0.5]]), left_out=3)
    found = opis(utilities)
    assert found.value == pytest.approx((0.25 + 0) / 2 * 0.1 / 0.2)
    assert (found.low, found.high, found.classes, found.left_out) == (0.2, 0.4, 2, 3)
    assert opis_tail(utilities, 0.5).value == pytest.approx((1.0 + 0) / 2 * 0.1 / 0.2)


@pytest.mark.parametrize("pairs_at_once", [1, 1 << 21])
@pytest.mark.parametrize("seed", range(3))
def test_utilities_agree_with_the_loops(seed: int, pairs_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAIRS_AT_ONCE", pairs_at_once)
    monkeypatch.setattr(module, "THRESHOLDS", 7)
    vectors, labels = embedded(0.8, (4, 1, 2, 5, 3, 1), seed)
    order = np.random.default_rng(seed).permutation(len(labels))
    vectors, labels = vectors[order], labels[order]
    found = class_utilities(vectors, labels, similarity_range=(-0.5, 0.9))
    similarity = (vectors.astype(np.float64) @ vectors.T.astype(np.float64)).tolist()
    expected = [
        [class_utility(similarity, labels.tolist(), which, threshold) for threshold in found.thresholds]
        for which in (0, 2, 3, 4)
    ]
    assert found.left_out == 2
    assert found.thresholds == pytest.approx(np.linspace(-0.5, 0.9, 7))
    assert found.utility == pytest.approx(np.array(expected))
    curves = np.array(expected)
    variances = [sum((u - sum(at) / 4) ** 2 for u in at) / 4 for at in curves.T.tolist()]
    assert opis(found).value == pytest.approx(mean_over(found.thresholds.tolist(), variances))
    gaps = [(max(at) - min(at)) ** 2 for at in curves.T.tolist()]
    assert opis_tail(found, 0.25).value == pytest.approx(mean_over(found.thresholds.tolist(), gaps))
    pairs = [(sum(sorted(at)[2:]) / 2 - sum(sorted(at)[:2]) / 2) ** 2 for at in curves.T.tolist()]
    assert opis_tail(found, 0.3).value == pytest.approx(mean_over(found.thresholds.tolist(), pairs))  # 1.2 are 2


def test_the_range_is_that_of_the_false_accept_rates() -> None:
    vectors, labels = embedded(0.8, (6,) * 20)
    found = class_utilities(vectors, labels)
    assert len(found.thresholds) == 101
    others = (vectors @ vectors.T)[labels[:, None] != labels]
    for threshold, rate in ((found.thresholds[0], 0.1), (found.thresholds[-1], 0.01)):
        assert (others >= threshold).mean() <= rate < (others >= threshold - 5e-5).mean()


def test_classes_of_unlike_spread_are_less_consistent() -> None:
    sizes = (6,) * 24
    alike = class_utilities(*embedded(0.5, sizes))
    unlike = class_utilities(*embedded(np.tile([0.1, 1.2], 12), sizes))
    assert opis(unlike).value > 3 * opis(alike).value
    assert opis_tail(unlike).value > opis_tail(alike).value


def test_a_class_that_finds_nothing_has_no_utility_instead_of_no_number() -> None:
    between = [0.2**0.5, 0.8**0.5]
    vectors = np.array([[1, 0], [-0.6, 0.8], between, between], np.float32)  # one class lies apart, about the other
    found = class_utilities(vectors, [0, 0, 1, 1], similarity_range=(0, 0.4))
    assert found.utility.tolist() == [[0] * 101, [0] * 101]


def test_a_similarity_at_a_threshold_is_accepted() -> None:
    vectors = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    found = class_utilities(vectors, [0, 0, 1, 1], similarity_range=(0, 0.5))
    assert found.utility.tolist() == [[0] + [1] * 100] * 2


def test_half_precision_is_multiplied_in_single() -> None:
    vectors, labels = embedded(0.8, (6,) * 20)
    half = vectors.astype(np.float16)
    assert opis(class_utilities(half, labels)) == opis(class_utilities(half.astype(np.float32), labels))


def test_what_is_undefined_or_wrong_is_an_error() -> None:
    vectors, labels = embedded(0.8, (3, 3, 1))
    with pytest.raises(ValueError, match="1 of 2 have two images"):
        class_utilities(vectors[:5], [0, 0, 0, 0, 1])
    with pytest.raises(ValueError, match="range of thresholds is empty"):
        class_utilities(vectors, labels, similarity_range=(0.5, 0.5))
    for rates in ((0.1, 0.01), (0.0, 0.1), (0.1, 1.0)):
        with pytest.raises(ValueError, match="false accept rates must ascend"):
            class_utilities(vectors, labels, false_accept_rates=rates)
    with pytest.raises(ValueError, match="have a similarity of 1"):
        class_utilities(np.ones((4, 1), np.float32), [0, 0, 1, 1])
    for eps in (0.0, 0.6):
        with pytest.raises(ValueError, match="eps must lie"):
            opis_tail(class_utilities(vectors, labels), eps)
