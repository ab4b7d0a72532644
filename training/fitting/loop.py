"""The steps and epochs of a run, from wherever it stands to its end."""

import itertools
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from roadmatch.errors import RoadmatchError
from training.data.batches import Batches
from training.data.loading import Examples
from training.fitting import checkpoints
from training.fitting.checkpoints import State
from training.fitting.diagnostics import Looks, diagnose
from training.fitting.learner import Learner
from training.fitting.processes import Process, seed_step
from training.fitting.run_folder import BEST, LAST, write
from training.fitting.schedule import factor_at, set_rates
from training.fitting.step import StepError, Stepped, backward
from training.fitting.stopping import Stopping
from training.fitting.validation import Judged, Judgement, judge
from training.fitting.watch import Taken, Watch
from training.recipe import Recipe

Numbers = NDArray[np.int64]


class LossError(RoadmatchError):
    """A batch without a usable gradient, which now lies in the run's folder."""


@dataclass(frozen=True, eq=False)
class Data:
    """What is trained on, by number, with the paths of these images; and what is judged."""

    examples: Examples
    paths: tuple[str, ...]
    batches: Batches
    judged_examples: Examples
    judged: Judged | None


@dataclass(frozen=True, eq=False)
class _Batch:
    """This process's part of a step."""

    numbers: Numbers
    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class _Pending:
    """A step whose figures are read when the device has them."""

    batch: _Batch
    loss: Tensor
    norm: Tensor
    taken: Taken
    """Without these two."""


class Loop:
    """A run under way; `state` says where."""

    def __init__(
        self, recipe: Recipe, run: Path, data: Data, learner: Learner, process: Process, state: State, watch: Watch
    ) -> None:
        self.state = state
        self._recipe, self._run, self._data, self._learner = recipe, run, data, learner
        self._process, self._watch = process, watch
        self._looks = Looks.of(recipe.loss, recipe.beside)
        self._pending: _Pending | None = None
        self._clock = 0.0

    def go(self) -> None:
        """To the end; interrupted, it keeps the last whole step and raises KeyboardInterrupt.

        Raises LossError, CheckpointError, LogError, and what loading and validation raise.
        """
        try:
            with Stopping() as stopping:
                while not self.state.finished:
                    self._epoch(stopping)
        except KeyboardInterrupt:
            self._read_pending()
            self._save()
            self._watch.say(
                f"stopped after step {self.state.steps:,}; to go on where it stands: roadmatch-train resume {self._run}"
            )
            raise

    def _epoch(self, stopping: Stopping) -> None:
        state, data, device = self.state, self._data, self._process.device
        own, ahead = itertools.tee(data.batches.epoch(state.epoch, state.step))
        self._learner.network.train()
        self._clock = time.perf_counter()
        with data.examples.batches(ahead, epoch=state.epoch) as coming:
            for numbers, inputs in zip(own, coming, strict=True):
                labels = torch.from_numpy(data.examples.labels[numbers]).to(device)
                batch = _Batch(numbers, inputs.to(device, non_blocking=True), labels)
                with stopping.whole():
                    stepped = self._step(batch)
                    if self.state.step == len(data.batches):
                        self._diagnose(stepped, batch)
                    elif self._is_due():
                        self._save()
        judgement = self._judgement()
        with stopping.whole():
            self._end_epoch(judgement)

    def _step(self, batch: _Batch) -> Stepped:
        recipe, state, learner = self._recipe, self.state, self._learner
        seed_step(recipe.seed, state.steps, self._process.rank)
        steps, epochs = len(self._data.batches), recipe.fit.epochs
        factor = factor_at(recipe.optimizer.schedule, state.steps, steps_per_epoch=steps, epochs=epochs)
        rate = set_rates(learner.optimizer, factor)
        try:
            stepped = backward(
                learner.wrapped,
                batch.inputs,
                batch.labels,
                learner.objective,
                chunk=recipe.batch.chunk,
                precision=recipe.fit.precision,
                scaler=learner.scaler,
            )
        except StepError as error:
            raise self._kept(batch, state.epoch + 1, state.steps + 1, str(error)) from error
        norm = learner.descend()
        self._read_pending()
        self.state = replace(state, step=state.step + 1, steps=state.steps + 1)
        taken = Taken(self.state.steps, state.epoch + 1, math.nan, rate, self._pace(len(batch.numbers)), None)
        self._pending = _Pending(batch, stepped.loss, norm, taken)
        if self._process.device.type == "cpu":  # a GPU is asked one step late, so that it need not be waited for
            self._read_pending()
        return stepped

    def _pace(self, images: int) -> float:
        """Images a second of all processes since the step before."""
        before, self._clock = self._clock, time.perf_counter()
        return images * self._process.world / max(self._clock - before, 1e-9)

    def _read_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        norm = self._learner.full_norm(pending.norm)
        if norm is not None and not math.isfinite(norm):
            why = f"the gradient's norm is {norm}: lower the learning rate, or take another precision"
            raise self._kept(pending.batch, pending.taken.epoch, pending.taken.step, why)
        self._watch.step(replace(pending.taken, loss=float(pending.loss), gradient_norm=norm))

    def _kept(self, batch: _Batch, epoch: int, step: int, why: str) -> LossError:
        """The error, once the batch is saved for who wants to look at it; epoch and step from 1, as in the log."""
        name = "nan" if self._process.world == 1 else f"nan.{self._process.rank}"
        tensors = {"inputs": batch.inputs, "labels": batch.labels}
        images = [self._data.paths[number] for number in batch.numbers]
        told = {"error": why, "epoch": epoch, "step": step, "images": images}
        write(self._run / f"{name}.safetensors", safetensors.torch.save(checkpoints.state_dict(tensors)))
        write(self._run / f"{name}.json", json.dumps(told, indent=1).encode())
        batch_is = f"the batch is in {self._run / name}.safetensors and .json"
        return LossError(f"epoch {epoch}, step {step}: {why}; {batch_is}")

    def _diagnose(self, stepped: Stepped, batch: _Batch) -> None:
        self._read_pending()
        if self._process.first:
            found = diagnose(stepped.embeddings, batch.labels, self._looks)
            self._watch.diagnosis(self.state.steps, self.state.epoch + 1, found)

    def _judgement(self) -> Judgement | None:
        fit, epoch, data = self._recipe.fit, self.state.epoch + 1, self._data
        if data.judged is None or (epoch % fit.validate_every and epoch < fit.epochs):
            return None
        return judge(self._learner.judged, data.judged_examples, data.judged, self._process)

    def _end_epoch(self, judgement: Judgement | None) -> None:
        fit, epoch = self._recipe.fit, self.state.epoch + 1
        best = judgement is not None and (self.state.best is None or judgement.gap > self.state.best)
        state = self.state
        if judgement is not None and best:
            state = replace(state, best=judgement.gap, best_epoch=epoch, stale=0)
        elif judgement is not None:
            state = replace(state, stale=state.stale + 1)
        stale = bool(fit.patience) and state.stale >= fit.patience
        self.state = replace(state, epoch=epoch, step=0, finished=stale or epoch == fit.epochs)
        if judgement is not None:
            self._watch.validation(state.steps, epoch, judgement, best=best)
        if best or (self.state.finished and state.best is None):
            self._save_best()
        self._save()
        self._watch.epoch(epoch, judgement)
        if stale and epoch < fit.epochs:
            self._watch.say(f"no better gAP since epoch {state.best_epoch}: stopped by fit.patience")

    def _is_due(self) -> bool:
        every = self._recipe.fit.checkpoint_every
        return bool(every) and self.state.steps % every == 0

    def _save(self) -> None:
        self._read_pending()
        if self._process.first:
            checkpoints.save(self._run / LAST, self._learner.checkpoint(self.state))

    def _save_best(self) -> None:
        """Before the state that names it, so that a run that ends in between only does the validation again."""
        if self._process.first:
            checkpoints.save(self._run / BEST, self._learner.checkpoint(self.state, whole=False))
