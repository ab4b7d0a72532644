"""The real service as a child process, in a temporary folder, that nothing leaves behind."""

import contextlib
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from app.settings import environment_of_a_child
from demo.photographs import DemoError

_READY = "ready at "
_START_S = 60.0
_STOP_S = 25.0  # longer than the service gives requests in flight


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end, whatever happens, for the service's data."""
    with tempfile.TemporaryDirectory(prefix="roadmatch-demo-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def service(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """`roadmatch serve` with its data in `folder`; stopped at the end, whatever happens.

    It takes its settings from here only, not from the user's variables, whose database this is not for. It is in a
    session of its own: Ctrl-C reaches the demonstration alone, which then stops it in order.
    """
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), "--data", str(folder / "data")]
    with (folder / "service.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment_of_a_child(),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process)


def address(process: subprocess.Popen[str], folder: Path) -> str:
    """The URL that it prints once it is ready. Raises DemoError where it does not come to that."""
    assert process.stdout is not None
    end = time.monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, end - time.monotonic())):
            line = process.stdout.readline()
            if _READY in line:
                return line.split(_READY)[1].strip()
            if not line:
                raise ended(folder)
    raise DemoError(f"the service was not ready after {_START_S:.0f} s: try again on a machine with less to do")


def ended(folder: Path) -> DemoError:
    """Why the service ended, by the last line of its log."""
    said = (folder / "service.log").read_text().strip().splitlines() or ["it said nothing"]
    return DemoError(f"the service ended: {said[-1].removeprefix('roadmatch: ')}")


def _stop(process: subprocess.Popen[str]) -> None:
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:  # a second Ctrl-C must not leave it running
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
