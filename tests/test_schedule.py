"""Learning rates over a run: warm-up, cosine, milestones, and what each group of parameters gets of them."""

import pytest
import torch
from torch import nn

from training import recipe
from training.fitting.schedule import ScheduleError, factor_at, optimizer_of, refuse, set_rates


def factors(schedule: recipe.Schedule, *, steps_per_epoch: int = 4, epochs: int = 3) -> list[float]:
    steps = range(steps_per_epoch * epochs)
    return [factor_at(schedule, step, steps_per_epoch=steps_per_epoch, epochs=epochs) for step in steps]


def schedule(**settings: object) -> recipe.Schedule:
    return recipe.Schedule.model_validate(settings)


def test_a_constant_rate_is_full_from_the_first_step() -> None:
    assert factors(schedule(name="constant")) == [1.0] * 12


def test_the_warm_up_rises_in_fractions_of_an_epoch_and_loses_no_step_to_zero() -> None:
    found = factors(schedule(name="constant", warm_up_epochs=1.25))
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0] + [1.0] * 7)


def test_the_cosine_goes_from_the_end_of_the_warm_up_to_nothing() -> None:
    found = factors(schedule(name="cosine", warm_up_epochs=1))
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert found[8] == pytest.approx(0.5)
    assert found[4:] == sorted(found[4:], reverse=True)
    assert 0 < found[-1] < 0.05


def test_milestones_multiply_the_rate_at_their_epoch_to_the_step() -> None:
    found = factors(schedule(name="steps", milestones=(1, 2.5), factor=0.1))
    assert found == pytest.approx([1.0] * 4 + [0.1] * 6 + [0.01] * 2)


def test_each_group_has_its_own_rate_of_which_the_factor_is_taken() -> None:
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [one], "lr": 0.1, "weight_decay": 0.0}, {"params": [other], "lr": 0.4, "weight_decay": 0.0}]
    optimizer = optimizer_of(groups, recipe.Optimizer(name=recipe.OptimizerName.SGD))
    for factor in (0.5, 0.25):
        assert set_rates(optimizer, factor) == pytest.approx(0.1 * factor)
    (one.sum() + other.sum()).backward()
    optimizer.step()
    assert (1 - one).tolist() == pytest.approx([0.025] * 2, abs=1e-6)
    assert (1 - other).tolist() == pytest.approx([0.1] * 2, abs=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)])
def test_the_optimizer_is_the_one_of_the_recipe(name: str, kind: type[torch.optim.Optimizer]) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1, "weight_decay": 0.3}]
    optimizer = optimizer_of(groups, recipe.Optimizer.model_validate({"name": name}))
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"warm_up_epochs": 3}, "warm_up_epochs is 3 of fit.epochs 3"),
        ({"name": "steps"}, "steps, which needs milestones"),
        ({"name": "cosine", "milestones": (1,)}, "cosine, which has no milestones"),
        ({"name": "steps", "milestones": (2, 1)}, r"\[2.0, 1.0\]: they have to ascend"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        refuse(schedule(**settings), epochs=3)
    refuse(schedule(), epochs=3)
