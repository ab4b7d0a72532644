"""The service for tests: opened in this process, or as a process of its own on a free port."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.service import Service, open_service
from app.settings import Settings

_ROOT = Path(__file__).resolve().parents[1]
_COMMAND = [sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())", "serve"]
_READY = "ready at "
_PATIENCE_S = 30.0


def open_here(data: Path, bundle: Path, **settings: object) -> Service:
    """The service's parts in this process; the caller closes them. settings: fields of Settings."""
    return open_service(Settings.read({}, data=data, bundles=(bundle,), **({"cpus": 2} | settings)))


class Served:
    """A service process that was ready when this was made."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self._log = log

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1."""
        return int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """kill -9, and wait for the end; does nothing to a process that has ended."""
        self.process.kill()
        self._wait()

    def stop(self) -> int:
        """SIGTERM, and wait for the end -> exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def errors(self) -> str:
        """What it wrote to stderr so far."""
        return self._log.read_text()

    def _wait(self) -> int:
        status = self.process.wait(_PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


def start(data: Path, bundle: Path, **settings: object) -> Served:
    """Start `roadmatch serve` and wait until it is ready. settings: fields of Settings; port 0 unless given.

    Its stderr goes to a file beside `data`. The caller ends it.
    """
    log = data.parent / f"{data.name}.stderr"
    with log.open("a") as stderr:
        process = subprocess.Popen(
            _COMMAND,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(data, bundle, **settings),
            cwd=data.parent,
        )
    assert process.stdout is not None
    for line in process.stdout:
        if _READY in line:
            return Served(process, line.split(_READY)[1].split()[0].rstrip("/"), log)
    process.wait(_PATIENCE_S)
    process.stdout.close()
    raise AssertionError(f"the service ended with {process.returncode} before it was ready: {log.read_text()[-2000:]}")


@contextmanager
def running(data: Path, bundle: Path, **settings: object) -> Iterator[Served]:
    """A service process for a block; killed at its end if it still runs."""
    served = start(data, bundle, **settings)
    try:
        yield served
    finally:
        served.kill()


def refused(data: Path, bundle: Path, **settings: object) -> "subprocess.CompletedProcess[str]":
    """Run `roadmatch serve` where it cannot start -> its exit status, stdout and stderr."""
    return subprocess.run(
        _COMMAND,
        capture_output=True,
        text=True,
        env=environment(data, bundle, **settings),
        cwd=data.parent,
        timeout=_PATIENCE_S,
        check=False,
    )


def environment(data: Path, bundle: Path, **settings: object) -> dict[str, str]:
    """The variables of a service process: this process's without its ROADMATCH_*, and the given settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROADMATCH_")}
    given = {"data": data, "bundles": bundle, "port": 0, "cpus": 2} | settings
    own = {f"ROADMATCH_{name.upper()}": str(value) for name, value in given.items()}
    return inherited | own | {"PYTHONPATH": str(_ROOT)}
