"""Works on jobs in a Celery worker's process: when a message comes, and each few seconds without one."""

import logging
import os
import threading
from typing import Any

from celery import signals
from celery.concurrency.solo import TaskPool

from roadmatch.errors import RoadmatchError
from roadmatch.jobs.run import Runner
from worker.celery_app import celery_app, settings
from worker.plain import open_runner, run_next

log = logging.getLogger("roadmatch.worker")
LOOK_S = 5.0
"""So often an idle worker looks for a job by itself: what a Redis costs that lost its messages."""
LONGEST_WAIT_S = 50.0
"""So long a message is kept from a busy worker; much less than the visibility timeout."""
_GOODBYE_S = 20.0


class Jobs:
    """The one thread of this process that works on jobs, beside the one in which Celery listens."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._woken = threading.Event()
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)
        self._thread.start()

    def wake_up(self, wait_s: float) -> None:
        """Look for jobs now, and come back when none is free, or after so long.

        Meanwhile no further message comes to this process: it goes to one that has nothing to do.
        """
        self._idle.clear()
        self._woken.set()
        self._idle.wait(wait_s)

    def end_soon(self) -> None:
        """End after the chunk that it is at. Safe in a signal handler: no lock that `wake_up` takes is taken here."""
        self._runner.stop.set()

    def close(self) -> None:
        """Wait for that chunk, and let go of the database; the job of a longer one is free when its lease ends."""
        self.end_soon()
        self._woken.set()
        self._thread.join(_GOODBYE_S)
        if not self._thread.is_alive():
            self._runner.store.database.close()

    def _work(self) -> None:
        while not self._runner.stop.is_set():
            self._woken.clear()
            try:
                while not self._runner.stop.is_set() and run_next(self._runner):
                    pass
            except Exception:
                log.exception("looking for a job")  # a fault here must not end it for good
            self._idle.set()
            self._woken.wait(LOOK_S)
        self._idle.set()


_here: list[Jobs] = []
"""This process's, from `worker_init` on."""


@celery_app.task(name="roadmatch.wake_up")  # type: ignore[untyped-decorator]
def wake_up() -> None:
    """A hint only: jobs are claimed from SQL, so a lost or doubled message changes nothing."""
    for jobs in _here:
        jobs.wake_up(LONGEST_WAIT_S)


@signals.worker_init.connect  # type: ignore[untyped-decorator]
def _open(sender: Any, **_: Any) -> None:
    if sender.pool_cls not in (TaskPool, "solo"):
        raise SystemExit("roadmatch worker: start it with --pool=solo, and several of them for more at a time")
    os.nice(settings.nice)  # before there is a thread: on Linux each has its own
    try:
        _here.append(Jobs(open_runner(settings)))
    except (RoadmatchError, OSError) as error:  # Celery would log any other exception, and go on without jobs
        raise SystemExit(f"roadmatch worker: {error}") from error


@signals.worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _end_soon(**_: Any) -> None:
    for jobs in _here:
        jobs.end_soon()


@signals.worker_shutdown.connect  # type: ignore[untyped-decorator]
def _close(**_: Any) -> None:
    while _here:
        _here.pop().close()
