"""Pictures' bytes -> pixels, in child processes that a picture may end without harm to anything else.

A decoder is C code that reads strangers' files. roadmatch.images refuses what is known to be costly; this is the wall
behind it: 2 GB of memory, 2.5 s of CPU and 10 s of time for a picture, and what goes beyond ends one child, no worker.

pebble 5.2.3 does most of this and was not taken: a child that dies between two pictures ends its pool for good, its
children import the parent's main module, and it unpickles what a decoder sends. Measured on two cores, 64 JPEGs of
130 KB a call: 2.9 ms of CPU time a picture here, everything counted, 3.1 with pebble, 2.7 on two threads in process
(0.92 and 0.86 of whose throughput that is with busy cores); by the clock 0.93 to 1.10 and 0.87 to 1.03 of the threads.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import numpy as np
from numpy.typing import NDArray

from roadmatch.errors import ImageError, UnreadableImage
from roadmatch.images import Limits, Preprocessing
from roadmatch.jobs.decoding_child import ANSWER, DECODED, LENGTH, READY, REFUSALS, TOO_LARGE, receive

PROGRAM = "roadmatch.jobs.decoding_child"
WALL_S = 10.0
_START_S = 60.0
_DYING_S = 5.0
_MOST_STARTS = 3
_TOO_LONG = "picture takes too long to decode: save it anew as a baseline JPEG or a PNG"
_TAKEN_OVER = "picture ended the decoder (it gave a senseless answer): save it anew"
_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, eq=False)
class Decoded:
    """pixels (H, W, 3) uint8 as the network sees them; the rest as in roadmatch.images.Picture."""

    pixels: NDArray[np.uint8]
    format: str
    width: int
    height: int


class Decoders:
    """So many child processes (and a thread for each) that decode under a bundle's rule; close it after use.

    wall_s: seconds of time for a picture. program: the module that a child runs.
    """

    def __init__(
        self,
        preprocessing: Preprocessing,
        count: int,
        limits: Limits = _DEFAULT_LIMITS,
        *,
        wall_s: float = WALL_S,
        program: str = PROGRAM,
    ) -> None:
        if count < 1:
            raise ValueError(f"count is {count}: at least 1 child is needed")
        self._limits = limits
        self._wall_s = wall_s
        self._shape = (preprocessing.size, preprocessing.size, 3)
        arguments = json.dumps([asdict(preprocessing), asdict(limits), wall_s])
        self._command = [sys.executable, "-P", "-m", program, arguments]
        self._free: SimpleQueue[_Child | None] = SimpleQueue()  # None: a place whose child has to be started
        self._count = count
        for _ in range(count):
            self._free.put(None)
        self._threads = ThreadPoolExecutor(count, "decoding")

    def decode(self, pictures: Sequence[bytes]) -> list[Decoded | ImageError]:
        """What became of each picture, in the given order; may be called from several threads at once.

        A picture that ends its child is UnreadableImage. Raises ChildProcessError (or another OSError) where a child
        cannot be started, RuntimeError after close and CancelledError where close came before a picture's turn.
        """
        return list(self.begin(pictures))

    def begin(self, pictures: Sequence[bytes]) -> Iterator[Decoded | ImageError]:
        """`decode` without waiting: what became of each picture, as soon as it and those before it are done."""
        return self._threads.map(self._decode, pictures)

    @property
    def bytes_of_pixels(self) -> int:
        """Of each decoded picture."""
        return math.prod(self._shape)

    def close(self) -> None:
        """Finish the pictures that are being decoded, drop those that wait, end the children."""
        self._threads.shutdown(cancel_futures=True)
        for _ in range(self._count):
            child = self._free.get()
            self._free.put(None)
            if child is not None:
                child.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode(self, picture: bytes) -> Decoded | ImageError:
        with suppress(_Killed):
            return self._attempt(picture)
        try:  # perhaps what others needed left it no memory
            return self._attempt(picture)
        except _Killed:
            return UnreadableImage(TOO_LARGE)

    def _attempt(self, picture: bytes) -> Decoded | ImageError:
        child = self._free.get()  # never waits: there are as many as threads
        try:
            self._limits.check_bytes(len(picture))
            if child is not None and child.ended:  # between two pictures: no fault of this one
                child.end()
                child = None
            if child is None:
                child = self._new_child()
            return child.decode(picture, self._wall_s)
        except ImageError as error:
            return error
        finally:
            self._free.put(child)

    def _new_child(self) -> "_Child":
        for _ in range(_MOST_STARTS):
            with suppress(_Killed):
                return _Child(self._command, self._shape)
        raise ChildProcessError(f"a decoding process was killed at its start, {_MOST_STARTS} times in a row")


class _Killed(Exception):  # noqa: N818 - as the others in errors.py
    """A child that decodes was killed, not by us: by the kernel, which ends what takes the last memory, or by hand."""


class _Child:
    """A running process and our end of its socket; for one thread at a time."""

    def __init__(self, command: Sequence[str], shape: tuple[int, int, int]) -> None:
        """Start it.

        Raises ChildProcessError where it does not come up, _Killed where somebody ended it, OSError where there are no
        processes left.
        """
        self._shape = shape
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _started(command, theirs.fileno())
            except OSError:
                self._socket.close()
                raise
        try:
            receive(self._socket, len(READY), time.monotonic() + _START_S)
        except (OSError, EOFError) as error:
            code = self.end(_DYING_S)
            if code == -signal.SIGKILL:
                raise _Killed from error
            raise ChildProcessError(f"a decoding process did not start (exit code {code}): see stderr") from error

    @property
    def ended(self) -> bool:
        """Whether it can decode no more."""
        return self._process.poll() is not None

    def decode(self, picture: bytes, wall_s: float) -> Decoded:
        """Have it decode a picture.

        Raises what the child refused it with, UnreadableImage where it ended, and _Killed where somebody ended it.
        """
        until = time.monotonic() + wall_s
        try:
            self._socket.settimeout(wall_s)
            self._socket.sendall(LENGTH.pack(len(picture)))
            self._socket.sendall(picture)
            return self._answer(until)
        except TimeoutError as error:
            self.end()
            raise UnreadableImage(_TOO_LONG) from error
        except (OSError, EOFError) as error:
            code = self.end(_DYING_S)
            if code == -signal.SIGKILL:
                raise _Killed from error
            raise UnreadableImage(_reason(code)) from error

    def end(self, patience_s: float = 0) -> int:
        """Kill it, if it is still there after so many seconds; its exit code, negative for a signal."""
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience_s)
        self._process.kill()
        return self._process.wait()

    def _answer(self, until: float) -> Decoded:
        place, length, width, height = ANSWER.unpack(receive(self._socket, ANSWER.size, until))
        text = receive(self._socket, length, until).decode(errors="replace")
        if place < len(REFUSALS):
            raise REFUSALS[place](text)
        if place != DECODED:
            self.end()
            raise UnreadableImage(_TAKEN_OVER)
        pixels = np.frombuffer(receive(self._socket, math.prod(self._shape), until), np.uint8)
        return Decoded(pixels.reshape(self._shape), text, width, height)


def _started(command: Sequence[str], standard_input: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=standard_input, stdout=subprocess.DEVNULL, env=_environment())


def _environment() -> dict[str, str]:
    """What a child needs to find Python's modules and ours, and no secret; numpy shall start no threads."""
    found = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    modules = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return {**found, "PYTHONPATH": modules, "OPENBLAS_NUM_THREADS": "1"}


def _reason(exit_code: int) -> str:
    """Why a picture's child ended, in one line with the mend."""
    if exit_code in (-signal.SIGPROF, -signal.SIGALRM):
        return _TOO_LONG
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    return f"picture ended the decoder ({how}): save it anew"
