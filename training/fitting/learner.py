"""What is trained, and by what: network, objective, optimizer, and the average over the steps."""

import math
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from roadmatch.embedding.network import EmbeddingNetwork
from training.fitting import checkpoints
from training.fitting.checkpoints import Checkpoint, State
from training.fitting.objective import objective_of
from training.fitting.processes import Process
from training.fitting.schedule import optimizer_of
from training.network.trainable import Average, parameter_groups
from training.recipe import Precision, Recipe


def learner_of(network: nn.Module, recipe: Recipe, process: Process) -> "Learner":
    """network: not wrapped; it is moved to the process's device."""
    network = network.to(process.device)
    objective = objective_of(recipe.loss, recipe.beside, distributed=process.world > 1).to(process.device)
    scaler = GradScaler(process.device.type) if recipe.fit.precision is Precision.FLOAT16 else None
    return Learner(
        network=network,
        wrapped=_wrapped(network, process, broadcast=not recipe.network.freeze_batch_norm),
        objective=objective,
        optimizer=optimizer_of(parameter_groups(network, objective, recipe.optimizer), recipe.optimizer),
        average=Average(network, recipe.network.average) if recipe.network.average else None,
        scaler=scaler,
        clip=recipe.optimizer.clip,
    )


def body(network: nn.Module) -> nn.Module:
    """What a checkpoint holds: the backbone with its head, under its own names; in mode linear, `head.*` alone."""
    return network.backbone if isinstance(network, EmbeddingNetwork) else network


@dataclass(frozen=True, eq=False)
class Learner:
    """average None: what is trained is also what is judged and exported."""

    network: nn.Module
    wrapped: nn.Module
    """The network as it is called in training: by several processes, so that gradients are averaged."""
    objective: nn.Module
    optimizer: Optimizer
    average: Average | None
    scaler: GradScaler | None
    clip: float | None

    @property
    def judged(self) -> nn.Module:
        """What is validated and exported."""
        return self.network if self.average is None else self.average.network

    def descend(self) -> Tensor:
        """Makes a step of the gradients that are there, and drops them -> () their norm before clipping.

        With a scaler, gradients that are not finite make no step.
        """
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        norm = get_total_norm(gradients)
        if self.clip is not None:
            clip_grads_with_norm_(self._parameters(), self.clip, norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.network)
        return norm

    def full_norm(self, norm: Tensor) -> float | None:
        """The norm as a number; None where the scaler found the gradients too large and left the step out."""
        value = float(norm)
        return None if self.scaler is not None and not math.isfinite(value) else value

    def checkpoint(self, state: State, *, whole: bool = True) -> Checkpoint:
        """whole: with what the run needs to go on, beside what is exported."""
        model = checkpoints.state_dict(body(self.judged).state_dict())
        if not whole:
            return Checkpoint(state, model)
        trained = None if self.average is None else checkpoints.state_dict(body(self.network).state_dict())
        scaler = {} if self.scaler is None else self.scaler.state_dict()
        return Checkpoint(state, model, trained, {"optimizer": self.optimizer.state_dict(), "scaler": scaler})

    def restore(self, checkpoint: Checkpoint) -> None:
        """All as it was when the checkpoint, a whole one, was taken."""
        if checkpoint.optimizer is None:
            raise ValueError("the checkpoint is for export alone: it has no optimizer")
        body(self.judged).load_state_dict(checkpoint.model)
        if checkpoint.trained is not None:
            body(self.network).load_state_dict(checkpoint.trained)
        self.optimizer.load_state_dict(checkpoint.optimizer["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(checkpoint.optimizer["scaler"])

    def _parameters(self) -> list[nn.Parameter]:
        return [cast(nn.Parameter, each) for group in self.optimizer.param_groups for each in group["params"]]


def _wrapped(network: nn.Module, process: Process, *, broadcast: bool) -> nn.Module:
    if process.world == 1:
        return network
    devices = [process.device] if process.device.type == "cuda" else None
    return DistributedDataParallel(network, device_ids=devices, broadcast_buffers=broadcast)
