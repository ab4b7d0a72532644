"""From score to the probability of a match."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadmatch.metrics.probability import MatchProbability, fit_probability
from roadmatch.metrics.ties import Bools, Floats
from tests.more_metric_oracles import isotonic

samples = st.lists(
    st.tuples(st.sampled_from([-0.5, 0.0, 0.25, 0.5, 0.75, 1.0]), st.booleans()), min_size=2, max_size=25
)
both_kinds = samples.filter(lambda drawn: 0 < sum(match for _, match in drawn) < len(drawn))


def test_two_violators_worked_by_hand() -> None:
    fitted = fit_probability(np.array([0.1, 0.2, 0.3, 0.4]), np.array([False, True, False, True]))
    assert fitted.of([0.1, 0.2, 0.25, 0.3, 0.4]).tolist() == [0, 0.5, 0.5, 0.5, 1]
    assert fitted.of(0.35) == pytest.approx(0.75)  # straight between knots
    assert fitted.of([-9, 0.05, 0.45, np.inf]).tolist() == [0, 0, 1, 1]  # flat beyond them


@settings(deadline=None, max_examples=80)
@given(both_kinds, st.sampled_from([None, 0.05, 0.5]))
def test_it_is_the_rising_fit_with_the_least_squares(drawn: list[tuple[float, bool]], share: float | None) -> None:
    scores, matches = np.array([score for score, _ in drawn]), np.array([match for _, match in drawn])
    fitted = fit_probability(scores, matches, share)
    wanted = matches.mean() if share is None else share
    weights = [wanted / matches.sum() if match else (1 - wanted) / (~matches).sum() for match in matches]
    expected = isotonic(scores.tolist(), matches.astype(float).tolist(), weights)
    assert fitted.of(list(expected)) == pytest.approx(list(expected.values()), abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(both_kinds)
def test_it_never_falls_and_stays_in_range(drawn: list[tuple[float, bool]]) -> None:
    fitted = fit_probability(np.array([score for score, _ in drawn]), np.array([match for _, match in drawn]))
    curve = fitted.of(np.linspace(-2, 2, 401))
    assert (np.diff(curve) >= 0).all()
    assert 0 <= curve[0] <= curve[-1] <= 1


def test_it_goes_through_json_unchanged() -> None:
    random = np.random.default_rng(1)
    scores = random.random(300).astype(np.float32)
    fitted = fit_probability(scores, random.random(300) < scores)
    again = MatchProbability.from_lists(**json.loads(json.dumps(fitted.as_lists())))
    assert again == fitted
    assert again.of(scores).tolist() == fitted.of(scores).tolist()


def test_it_is_right_on_other_pairs_of_the_same_kind_and_of_another_share() -> None:
    random = np.random.default_rng(2)

    def pairs(count: int, share: float) -> tuple[Floats, Bools]:
        matches = random.random(count) < share
        return random.normal(0.5 * matches, 0.2), matches

    for share in (None, 0.1):
        fitted = fit_probability(*pairs(20_000, 0.5), share)
        scores, matches = pairs(20_000, share or 0.5)
        stated = fitted.of(scores)
        for low in np.arange(0, 1, 0.2):
            within = (stated >= low) & (stated < low + 0.2)
            assert matches[within].mean() == pytest.approx(stated[within].mean(), abs=0.06)


def test_what_is_undefined_or_wrong_is_an_error() -> None:
    scores, matches = np.array([0.1, 0.9]), np.array([False, True])
    for same in (~matches & matches, matches | ~matches):
        with pytest.raises(ValueError, match="needs matches and others"):
            fit_probability(scores, same)
    with pytest.raises(ValueError, match="must be as many"):
        fit_probability(scores, matches[:1])
    with pytest.raises(ValueError, match="the scores numbers"):
        fit_probability(np.array([np.nan, 0.1]), matches)
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="match_share must lie"):
            fit_probability(scores, matches, share)
    with pytest.raises(ValueError, match="not a number"):
        fit_probability(scores, matches).of([0.5, np.nan])


@pytest.mark.parametrize(
    ("scores", "probabilities", "message"),
    [
        ([], [], "make no map"),
        ([0.1], [0.1, 0.2], "make no map"),
        ([0.1, 0.1], [0.1, 0.2], "ascending order"),
        ([0.1, np.nan], [0.1, 0.2], "ascending order"),
        ([0.1, 0.2], [0.2, 0.1], "must not fall"),
        ([0.1, 0.2], [-0.1, 0.1], "must not fall"),
        ([0.1, 0.2], [0.1, 1.1], "must not fall"),
        ([0.1, 0.2], [0.1, np.nan], "must not fall"),
    ],
)
def test_knots_that_are_no_map_are_an_error(scores: list[float], probabilities: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatchProbability.from_lists(scores, probabilities)
