import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roadmatch.losses.mesh import (
    Curve,
    Grid,
    deposit,
    grid_over,
    interpolated,
    sigmoid_sums,
    slope_sums,
    spread,
)
from tests.oracles import sigmoid


def scores_of(rows: int, count: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return (0.3 * torch.randn(rows, count, generator=made)).clamp(-1, 1)


def grid_of(scores: Tensor, temperature: float) -> Grid:
    return grid_over(scores.min().item(), scores.max().item(), temperature)


@pytest.mark.parametrize("temperature", [5e-2, 1e-2, 1e-3, 1e-4])
def test_sums_of_sigmoids_and_of_slopes_are_those_of_the_definition(temperature: float) -> None:
    scores = scores_of(3, 60)
    weights = torch.rand(3, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.3
    grid = grid_of(scores, temperature)
    nodal = spread(deposit(grid, scores, weights))
    ranks = interpolated(grid, sigmoid_sums(grid, nodal, temperature), scores)
    slopes = interpolated(grid, slope_sums(grid, nodal, temperature), scores)
    for row in range(3):
        for asked in range(60):
            rank = slope = size = 0.0
            for weight, score in zip(weights[row].tolist(), scores[row].tolist(), strict=True):
                share = sigmoid((score - scores[row, asked].item()) / temperature)
                rank += weight * share
                slope += weight * share * (1 - share) / temperature
                size += abs(weight) * share * (1 - share) / temperature
            assert ranks[row, asked].item() == pytest.approx(rank, abs=1e-5)
            assert slopes[row, asked].item() == pytest.approx(slope, abs=1e-5 * size)


def test_rows_do_not_touch_each_other() -> None:
    scores = scores_of(2, 40)
    grid = grid_of(scores, 1e-2)
    together = spread(deposit(grid, scores))
    apart = torch.cat([spread(deposit(grid, row[None])) for row in scores])
    assert torch.equal(together, apart)


def test_nothing_is_lost_on_the_grid() -> None:
    scores = scores_of(1, 5000)
    nodal = spread(deposit(grid_of(scores, 1e-3), scores))
    assert nodal.sum().item() == pytest.approx(5000, abs=1e-6)


def test_a_score_finds_one_half_of_itself() -> None:
    scores = torch.tensor([[0.123456]])
    grid = grid_of(scores, 1e-2)
    found = interpolated(grid, sigmoid_sums(grid, spread(deposit(grid, scores)), 1e-2), scores)
    assert found.item() == pytest.approx(0.5, abs=1e-12)


def test_more_scores_than_are_taken_at_a_time_are_all_counted() -> None:
    scores = scores_of(1, (1 << 16) + 77)
    grid = grid_of(scores, 5e-2)
    moments = deposit(grid, scores)
    assert moments[0].sum().item() == scores.shape[1]
    curve, read = Curve(grid, torch.ones(grid.nodes, dtype=torch.float64), torch.float32), torch.zeros(scores.shape[1])
    curve.read_into(read, scores[0])
    assert torch.allclose(read, torch.ones_like(read))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_curve_is_read_as_interpolation_reads_it(dtype: torch.dtype) -> None:
    scores = scores_of(1, 500).to(dtype)
    grid = grid_of(scores, 1e-2)
    values = slope_sums(grid, spread(deposit(grid, scores)), 1e-2)
    read = torch.empty(500, dtype=dtype)
    Curve(grid, values[0], dtype).read_into(read, scores[0])
    assert torch.allclose(
        read.double(), interpolated(grid, values, scores)[0], rtol=2e-6 if dtype == torch.float32 else 1e-12
    )


@given(st.floats(-1, 1), st.floats(0, 1), st.sampled_from([0.3, 1e-2, 1e-4]))
@settings(deadline=None, max_examples=60)
def test_a_grid_has_room_for_every_score_and_its_spread(low: float, width: float, temperature: float) -> None:
    grid = grid_over(low, low + width, temperature)
    assert math.log2(grid.step).is_integer()
    assert temperature / 24 < grid.step <= temperature / 12
    assert (grid.first + 1) * grid.step <= low
    assert low + width < (grid.first + grid.nodes - 2) * grid.step


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature is"):
        grid_over(-1, 1, temperature)


def test_scores_far_from_unit_length_at_a_low_temperature_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"scale the scores to \[-1, 1\]"):
        grid_over(-1e4, 1e4, 1e-3)
