"""What a run says while it goes: a bar or a line, a log, TensorBoard; nothing leaves the machine."""

import json
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from roadmatch.errors import RoadmatchError
from training.fitting.diagnostics import Diagnosis
from training.fitting.validation import Judgement

LOG, TENSORBOARD = "log.jsonl", "tensorboard"


class LogError(RoadmatchError):
    """A log that cannot be written or read."""


@dataclass(frozen=True)
class Taken:
    """A step that was taken: its number from 1 in the whole run, and its epoch from 1."""

    step: int
    epoch: int
    loss: float
    lr: float
    """Of the backbone; in mode linear, which has none, of the head."""
    images_per_s: float
    gradient_norm: float | None
    """Before clipping; None where float16's scaler found it too large and left the step out."""


def cut(log: Path, steps: int) -> None:
    """Takes the lines of later steps out of a log, and a last one that was not written whole. Raises LogError."""
    draft = log.with_name(f".{log.name}.{secrets.token_hex(4)}")
    try:
        whole = [line for line in log.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= steps]
        draft.write_text("".join(kept), "utf-8")
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(log)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LogError(f"{log} cannot be taken up again: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


class Watch:
    """Of one process: only the first writes or shows anything. Close it at the end."""

    def __init__(self, run: Path, *, total: int, done: int, epochs: int, writes: bool, show: bool) -> None:
        """total: steps of the whole run; done: of them before this start, whose lines stay in the log.

        Raises LogError.
        """
        self._writes, self._show, self._epochs = writes, show and writes, epochs
        self._last: Taken | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if not writes:
            return
        try:
            cut(run / LOG, done)
            self._log = (run / LOG).open("a", encoding="utf-8", buffering=1)  # a line at a time, for who follows it
            self._board = SummaryWriter(str(run / TENSORBOARD), purge_step=done + 1 if done else None)
        except OSError as error:
            raise LogError(f"{run} cannot be written: {error.strerror or error}") from error
        if self._show and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("training", total=total, completed=done, loss="", speed="")
            self._bar.start()

    def step(self, taken: Taken) -> None:
        """After each step."""
        self._last = taken
        if not self._writes:
            return
        self._line("step", asdict(taken))
        for name in ("loss", "lr", "images_per_s", "gradient_norm"):
            if (value := getattr(taken, name)) is not None:
                self._board.add_scalar(f"train/{name}", value, taken.step)
        if self._bar is not None and self._task is not None:
            speed = f"{taken.images_per_s:,.0f} images/s"
            self._bar.update(self._task, completed=taken.step, loss=f"loss {taken.loss:.4f}", speed=speed)

    def diagnosis(self, step: int, epoch: int, found: Diagnosis) -> None:
        """Once an epoch; step and epoch from 1."""
        if not self._writes:
            return
        self._line("diagnosis", {"step": step, "epoch": epoch, **asdict(found)})
        for name, value in asdict(found).items():
            if isinstance(value, float):
                self._board.add_scalar(f"diagnosis/{name}", value, step)
        for name in ("positives", "negatives"):
            self._histogram(f"similarity/{name}", getattr(found, name), step)

    def validation(self, step: int, epoch: int, found: Judgement, *, best: bool) -> None:
        """After each validation; step and epoch from 1."""
        if not self._writes:
            return
        self._line("validation", {"step": step, "epoch": epoch, **asdict(found), "best": best})
        for name, value in asdict(found).items():
            if isinstance(value, float):
                self._board.add_scalar(f"validation/{name}", value, step)

    def epoch(self, epoch: int, found: Judgement | None) -> None:
        """At an epoch's end, from 1: a line for who watches."""
        if self._last is not None:
            judged = "" if found is None else f", gAP {found.gap:.4f}, R@1 {found.recall_at_1:.4f}"
            pace = f"{self._last.images_per_s:,.0f} images/s"
            self.say(f"epoch {epoch}/{self._epochs}: loss {self._last.loss:.4f}{judged}, {pace}")

    def say(self, line: str) -> None:
        """A line on stderr, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._show:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """What was written is on the disk; the bar is gone. A full disk has been told of by then."""
        if self._bar is not None:
            self._bar.stop()
        if self._writes:
            for file in (self._log, self._board):
                with suppress(OSError):
                    file.close()

    def _line(self, kind: str, record: Mapping[str, object]) -> None:
        try:
            self._log.write(json.dumps({"kind": kind, **record}, allow_nan=False) + "\n")
        except OSError as error:
            raise LogError(f"{self._log.name} cannot be written: {error.strerror}: make room, and resume") from error

    def _histogram(self, name: str, counts: tuple[int, ...], step: int) -> None:
        if sum(counts):
            edges = np.linspace(-1, 1, len(counts) + 1)
            centres, numbers = (edges[1:] + edges[:-1]) / 2, np.array(counts)
            seen = centres[numbers > 0]
            self._board.add_histogram_raw(
                name,
                min=float(seen[0]),
                max=float(seen[-1]),
                num=int(numbers.sum()),
                sum=float((centres * numbers).sum()),
                sum_squares=float((centres**2 * numbers).sum()),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=numbers.tolist(),
                global_step=step,
            )


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
