"""The worker processes of the embedded service: started when there is a job, ended with the service."""

import logging
import subprocess
import sys
import threading
import time

from app.settings import PREFIX, Settings, environment_of_a_child
from roadmatch.errors import StoreError
from roadmatch.jobs import queue
from roadmatch.store.database import Database

log = logging.getLogger("roadmatch.workers")
_LOOK_S = 1.0
_IDLE_S = 60
"""A worker without a job for so long ends; the next job starts one in a second."""
_LONGEST_PAUSE_S = 60.0
_WELL_S = 60.0
"""A worker that lived for so long has not failed at its start, and the next one is started at once."""


class Workers:
    """So many `python -m worker`, which hear of new jobs by a byte on their stdin and end where it ends."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._processes: list[subprocess.Popen[bytes]] = []
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._failures = 0
        self._not_before = self._started = 0.0
        self._thread = threading.Thread(target=self._tend, name="workers", daemon=True)
        if settings.workers:
            self._thread.start()

    def wake(self) -> None:
        """There is a new job; returns at once."""
        self._woken.set()

    def stop(self) -> None:
        """End the workers after the chunk that they are at; their jobs go back to the queue."""
        self._ended.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        for process in self._processes:
            process.terminate()
        end = time.monotonic() + self._settings.shutdown_s
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close_stdin(process)

    def _tend(self) -> None:
        while not self._ended.is_set():
            woken = self._woken.wait(_LOOK_S)
            self._woken.clear()
            if self._ended.is_set():
                return
            self._bury()
            if woken:
                for process in self._processes:
                    _tell(process)
            if len(self._processes) < self._settings.workers and time.monotonic() >= self._not_before:
                self._start_if_needed()

    def _start_if_needed(self) -> None:
        try:
            free = queue.any_free(self._database)
        except StoreError as error:
            log.warning("%s", error)
            return
        while free and len(self._processes) < self._settings.workers:
            self._started = time.monotonic()
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "worker", "--stdin", "--idle-s", str(_IDLE_S)],
                    stdin=subprocess.PIPE,
                    env=environment_of_a_child() | _environment(self._settings),
                )
            )

    def _bury(self) -> None:
        """Let go of those that have ended; one that failed is not started again at once."""
        for process in [one for one in self._processes if one.poll() is not None]:
            self._processes.remove(process)
            _close_stdin(process)
            if process.returncode == 0:
                self._failures = 0
                continue
            if time.monotonic() - self._started >= _WELL_S:
                self._failures = 0
            self._failures += 1
            pause = min(_LONGEST_PAUSE_S, 2.0 ** (self._failures - 1))
            self._not_before = time.monotonic() + pause
            log.warning("a worker ended with status %s: the next one starts in %g s", process.returncode, pause)


def _environment(settings: Settings) -> dict[str, str]:
    """What a worker is told: the service's settings that are its own, too."""
    given = {
        "data": settings.data.absolute(),
        "database": settings.database,
        "blobs": settings.blobs,
        "bundles": ":".join(str(folder.absolute()) for folder in settings.bundles),
        "cpus": max(1, settings.threads // settings.workers),
        "nice": settings.nice,
        "device": settings.device,
        "import_folders": ":".join(map(str, settings.import_folders)),
        "import_hosts": settings.import_hosts,
    }
    return {f"{PREFIX}{name.upper()}": str(value) for name, value in given.items()}


def _tell(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(b"\n")
        process.stdin.flush()
    except OSError:  # it has ended meanwhile, and looks like it at the next turn
        return


def _close_stdin(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()
    except OSError:
        return
