"""The optimizer and how its learning rates go over a run."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from roadmatch.errors import RoadmatchError
from training import recipe
from training.recipe import OptimizerName, ScheduleName

_FULL = "full_rate"  # of a group, beside torch's own `lr`, which is what the schedule has made of it


class ScheduleError(RoadmatchError):
    """A schedule that says nothing, or ends before it has begun."""


def optimizer_of(groups: list[dict[str, Any]], wanted: recipe.Optimizer) -> Optimizer:
    """The recipe's optimizer over `training.network.trainable.parameter_groups`."""
    groups = [{**group, _FULL: group["lr"]} for group in groups]
    match wanted.name:
        case OptimizerName.ADAMW:
            return torch.optim.AdamW(groups)
        case OptimizerName.ADAM:
            return torch.optim.Adam(groups)
        case OptimizerName.SGD:
            return torch.optim.SGD(groups, momentum=0.9)


def set_rates(optimizer: Optimizer, factor: float) -> float:
    """Each group's learning rate becomes its full one times the factor -> that of the first group."""
    for group in optimizer.param_groups:
        group["lr"] = group[_FULL] * factor
    return float(optimizer.param_groups[0]["lr"])


def refuse(schedule: recipe.Schedule, epochs: int) -> None:
    """Raises ScheduleError for a schedule that does not fit its name or the run's epochs."""
    name, milestones = schedule.name, schedule.milestones
    if schedule.warm_up_epochs >= epochs:
        raise ScheduleError(
            f"optimizer.schedule.warm_up_epochs is {schedule.warm_up_epochs:g} of fit.epochs {epochs}: set it lower"
        )
    if (name is ScheduleName.STEPS) != bool(milestones):
        wants = "needs milestones" if name is ScheduleName.STEPS else "has no milestones: set name to steps"
        raise ScheduleError(f"optimizer.schedule.name is {name}, which {wants}")
    if any(later <= earlier for earlier, later in pairwise(milestones)):
        raise ScheduleError(f"optimizer.schedule.milestones are {list(milestones)}: they have to ascend")


def factor_at(schedule: recipe.Schedule, step: int, *, steps_per_epoch: int, epochs: int) -> float:
    """What the full rates are multiplied by in step 0, 1, ... of the whole run, in [0, 1].

    The warm-up rises linearly and reaches 1 in its last step; the first step is not lost to a rate of 0. The cosine
    begins where the warm-up ends, and would be 0 one step after the last. Milestones count from the run's beginning.
    """
    warm_up = round(schedule.warm_up_epochs * steps_per_epoch)
    if step < warm_up:
        return (step + 1) / warm_up
    match schedule.name:
        case ScheduleName.CONSTANT:
            return 1.0
        case ScheduleName.COSINE:
            through = (step - warm_up) / (epochs * steps_per_epoch - warm_up)
            return (1 + math.cos(math.pi * through)) / 2
        case ScheduleName.STEPS:
            passed = sum(step >= round(milestone * steps_per_epoch) for milestone in schedule.milestones)
            return float(schedule.factor**passed)
