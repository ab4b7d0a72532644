"""A worker process for fault tests: the real one with a short lease, and a file of the moments that it went through.

`python -m tests.job_worker plain|celery MOMENTS LEASE_S` is the program; `start` runs it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roadmatch.jobs.run import Runner
from worker import plain
from worker.settings import Settings

LEASE_S = 1.0
"""So long a job of a killed worker waits in these tests; 30 s would make hours of them."""
_ROOT = Path(__file__).parents[1]
_LOOK_S = 0.002


class JobWorker:
    """A running worker; the caller kills it. moments: its file, one line for each moment."""

    def __init__(self, process: "subprocess.Popen[bytes]", moments: Path) -> None:
        self.process = process
        self._moments = moments

    def count(self, moment: str) -> int:
        """How often it went through a moment, as far as it wrote that down before it."""
        return self._moments.read_text().split().count(moment) if self._moments.exists() else 0

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and wait for the end -> exit status."""
        self.process.terminate()
        return self.process.wait(30)


def start(
    data: Path, bundle: Path, moments: Path, *, kind: str = "plain", lease_s: float = LEASE_S, **settings: object
) -> JobWorker:
    """Start a worker and do not wait for it. kind: "plain" or "celery". settings: fields of worker.settings.Settings.

    Its stderr goes to a file beside `data`.
    """
    given = {"data": data, "bundles": bundle, "cpus": 1, "nice": 0} | settings
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROADMATCH_")}
    own = {f"ROADMATCH_{name.upper()}": str(value) for name, value in given.items()}
    with (data.parent / "workers.stderr").open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.job_worker", kind, str(moments), str(lease_s)],
            cwd=_ROOT,
            env=inherited | own,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    return JobWorker(process, moments)


def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait until it holds; AssertionError if it does not within so many seconds."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"not within {within_s} s"
        time.sleep(_LOOK_S)


def main() -> None:
    """The program."""
    kind, moments, lease_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    plain.open_runner = _watched(plain.open_runner, moments, lease_s)  # type: ignore[assignment]
    if kind == "plain":
        plain.work(Settings.read())
        return
    from celery.__main__ import main as celery

    sys.argv = ["celery", "-A", "worker.celery_app", "worker", "--loglevel=WARNING"]
    celery()


def _watched(open_runner: Callable[[Settings], Runner], moments: Path, lease_s: float) -> Callable[[Settings], Runner]:
    """Runners that write each moment down before they go through it, which a failpoint may make the last."""
    file = os.open(moments, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def opened(settings: Settings) -> Runner:
        runner = open_runner(settings)

        def trace(moment: str) -> None:
            os.write(file, f"{moment}\n".encode())
            runner.trace(moment)

        return replace(runner, store=replace(runner.store, trace=trace), trace=trace, lease_s=lease_s)

    return opened


if __name__ == "__main__":
    main()
