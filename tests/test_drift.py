"""Live scores against those at calibration."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import ks_2samp

from roadmatch.metrics.drift import LEAST_SCORES, Verdict, check_drift, greatest_gap, p_value_of_gap, stability_index
from tests import more_metric_oracles as oracles


def normal(count: int, mean: float = 0, spread: float = 1, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(mean, spread, count)


def test_the_index_worked_by_hand() -> None:
    # Two bins that meet at 2.5: half and half then; one in four and three in four now, half a score added to each.
    index = stability_index(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 3.0, 4.0]), bins=2)
    assert index == pytest.approx((0.3 - 0.5) * np.log(0.3 / 0.5) + (0.7 - 0.5) * np.log(0.7 / 0.5))


@pytest.mark.parametrize("seed", range(5))
def test_the_index_agrees_with_the_loops(seed: int) -> None:
    calibration, live = normal(201, seed=seed), normal(150, 0.4, 1.3, seed=seed + 10)  # deciles are scores
    edges = [float(np.quantile(calibration, share / 10)) for share in range(1, 10)]
    expected = oracles.stability_index(calibration.tolist(), live.tolist(), edges)
    assert stability_index(calibration, live) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("decimals", [1, 12])
def test_the_two_sample_test_agrees_with_scipy(seed: int, decimals: int) -> None:
    one, other = np.round(normal(400, seed=seed), decimals), np.round(normal(250, 0.1 * seed, seed=9), decimals)
    gap, expected = greatest_gap(one, other), ks_2samp(one, other)
    assert gap == pytest.approx(expected.statistic)
    assert p_value_of_gap(gap, 400, 250) == pytest.approx(expected.pvalue, abs=0.03, rel=0.1)
    assert p_value_of_gap(0.0, 400, 250) == 1


@pytest.mark.parametrize(
    ("live", "verdict"),
    [
        (normal(1000, seed=1), Verdict.STABLE),
        (normal(1000, 0.4, seed=1), Verdict.MODERATE),
        (normal(1000, -0.8, seed=1), Verdict.LARGE),
        (normal(1000, 0, 3, seed=1), Verdict.LARGE),
        (normal(LEAST_SCORES - 1, 5), Verdict.TOO_FEW),
        (normal(0), Verdict.TOO_FEW),
    ],
)
def test_verdicts(live: NDArray[np.float64], verdict: Verdict) -> None:
    found = check_drift(normal(2000), live)
    assert found.verdict is verdict
    assert (found.calibration, found.live) == (2000, len(live))
    if verdict is Verdict.TOO_FEW:
        assert (found.stability_index, found.greatest_gap, found.p_value) == (None, None, None)
    else:
        assert found.stability_index == stability_index(normal(2000), live)
        assert found.greatest_gap is not None
        assert found.p_value == p_value_of_gap(found.greatest_gap, 2000, len(live))


def test_a_shift_too_small_to_matter_is_stable_however_sure() -> None:
    found = check_drift(normal(50_000), normal(50_000, 0.1, seed=1))
    assert found.p_value is not None
    assert found.p_value < 1e-6
    assert found.verdict is Verdict.STABLE


def test_an_index_that_chance_may_give_is_stable() -> None:
    """The index of few scores is large by chance alone; the two-sample test knows their number."""
    checks = [check_drift(normal(100, seed=seed), normal(100, seed=1000 + seed)) for seed in range(300)]
    assert sum((check.stability_index or 0) > 0.1 for check in checks) > 150
    assert sum(check.verdict is not Verdict.STABLE for check in checks) <= 9


def test_as_many_scores_as_asked_for_show_a_shift_of_half_a_deviation() -> None:
    checks = [check_drift(normal(2000, seed=seed), normal(LEAST_SCORES, 0.5, seed=999 - seed)) for seed in range(100)]
    assert sum(check.verdict is not Verdict.STABLE for check in checks) >= 85


def test_the_marks_of_the_index_are_shifts_of_three_and_five_tenths() -> None:
    assert stability_index(normal(100_000), normal(100_000, 0.3, seed=1)) == pytest.approx(0.09, abs=0.02)
    assert stability_index(normal(100_000), normal(100_000, 0.5, seed=1)) == pytest.approx(0.25, abs=0.02)


def test_many_equal_scores_share_a_bin_and_an_empty_bin_counts_much_and_not_infinitely() -> None:
    calibration = np.concatenate([np.ones(600), normal(400, -3, 0.1)]).astype(np.float32)
    assert stability_index(calibration, calibration) == 0
    assert 1 < stability_index(calibration, calibration[:600]) < 10
    assert check_drift(calibration, calibration[:600]).verdict is Verdict.LARGE


def test_what_is_undefined_or_wrong_is_an_error() -> None:
    wrong: list[tuple[Any, Any, str]] = [
        (normal(99), normal(200), "99 scores of the calibration are too few"),
        (np.append(normal(200), np.nan), normal(200), "not a number"),
        (normal(200), np.append(normal(200), np.inf), "not a number"),
        (np.full(200, 0.5), normal(200), "every score of the calibration is 0.5"),
    ]
    for calibration, live, message in wrong:
        with pytest.raises(ValueError, match=message):
            check_drift(calibration, live)
