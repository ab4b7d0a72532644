"""What a worker and the processes that decode for it take of memory, as time goes on."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

MB = 1e6
_LOOK_S = 0.1
_SHARES_EVERY = 10
"""A look at what is shared with other processes takes the kernel a while, so only each tenth does."""


@dataclass(frozen=True)
class Look:
    """At one moment, in MB. worker, children: resident; proportional: of all of them, what they share counted once."""

    second: float
    worker: float
    children: float
    proportional: float | None


@dataclass(eq=False)
class Footprint:
    """Looks at a process from its making on."""

    pid: int
    looks: list[Look] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)

    def look(self) -> None:
        """Wait for the next look's time, and look."""
        time.sleep(_LOOK_S)
        worker = psutil.Process(self.pid)
        children = worker.children(recursive=True)
        resident = [_resident(child) for child in children]
        shares = len(self.looks) % _SHARES_EVERY == 0
        self.looks.append(
            Look(
                time.perf_counter() - self._started,
                _resident(worker),
                sum(resident),
                sum(_proportional(one) for one in (worker, *children)) if shares else None,
            )
        )

    def highest(self) -> float:
        """The most that was ever resident of the process, in MB: what it was between two looks, too."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / MB


@dataclass(frozen=True)
class Course:
    """How a figure went, in MB: its highest, how much higher the second half went than the first, and its slope."""

    peak: float
    growth: float
    slope_a_minute: float

    @classmethod
    def of(cls, seconds: Sequence[float], sizes: Sequence[float]) -> "Course":
        """At least four looks; the slope is that of the second half."""
        half = len(sizes) // 2
        first, second = sizes[:half], sizes[half:]
        slope = np.polyfit(np.array(seconds[half:]) / 60, second, 1)[0]
        return cls(max(sizes), max(second) - max(first), float(slope))


def cpu_s(pid: int) -> float:
    """Seconds of CPU time that a process took so far, those of its children apart."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _resident(process: psutil.Process) -> float:
    with suppress(psutil.Error):  # it has ended meanwhile
        return float(process.memory_info().rss) / MB
    return 0.0


def _proportional(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return float(process.memory_full_info().pss) / MB
    return 0.0
