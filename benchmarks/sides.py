"""One side of a comparison in a process of its own, so that the libraries of the two do not get in each other's way."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

Answers = dict[str, Any]
_STOP_S = 10.0


class Side:
    """A child process that answers commands, one JSON object a line."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """module: runs `answer_commands`. environment: all of the child's."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment),
        )

    def start(self, **command: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def finish(self) -> Answers:
        """Wait for the answer to it. Raises RuntimeError where the process ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with status {self._process.wait()}")
        answer: Answers = json.loads(line)
        return answer

    def ask(self, **command: Any) -> Answers:
        """Send a command and wait for its answer."""
        self.start(**command)
        return self.finish()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def sides(*made: Callable[[], Side]) -> Iterator[list[Side]]:
    """Several sides, all ready before any is asked, and ended together."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(contextlib.closing(make())) for make in made]
        for side in running:
            side.finish()
        yield running


def answer_commands(answer: Callable[..., Answers]) -> None:
    """In the child: one JSON object a line of stdin -> answer(**command) on stdout, until stdin ends.

    An empty answer comes first, to say that the child is ready. What a library prints goes to stderr.
    """
    out, sys.stdout = sys.stdout, sys.stderr
    _say(out, {})
    for line in sys.stdin:
        _say(out, answer(**json.loads(line)))


def _say(out: TextIO, answer: Answers) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()
