"""The program that decodes pictures for roadmatch.jobs.decoding, in a process that may be killed at any time.

Its standard input is a socket to the parent. There and back go length-prefixed frames, never pickles: what a decoder
that was taken over by its picture may send is a refusal or pixels, and nothing that the parent would run.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roadmatch.errors import ImageError, ImageTooLarge, UnreadableImage, UnsupportedImage
from roadmatch.images import Limits, Picture, Preprocessing, read_pixels

MEMORY = 2_000_000_000
"""Bytes of address space for a picture, above what Python has taken at the start."""
CPU_S = 2.5
"""Seconds of CPU time for a picture, by a timer: RLIMIT_CPU counts in whole ones, and lets up to one more pass."""
REFUSALS: tuple[type[ImageError], ...] = (UnreadableImage, UnsupportedImage, ImageTooLarge)
TOO_LARGE = "picture needs too much memory to decode: send a smaller copy"
READY = b"r"
LENGTH = struct.Struct("!I")
"""Before a picture: its bytes."""
ANSWER = struct.Struct("!BHII")
"""Before an answer: place of its class in REFUSALS or DECODED; bytes of the text that follows (the detail, or the
format); width and height. After the text of DECODED come the pixels, as many as the rule says."""
DECODED = len(REFUSALS)

_FILES = 16
_LONGEST_DETAIL = 1000

Read = Callable[[bytes, Preprocessing, Limits], tuple[NDArray[np.uint8], Picture]]


def main(read: Read = read_pixels) -> None:
    """Answer picture after picture until the parent closes the socket or ends."""
    rule, limits, wall_s = json.loads(sys.argv[1])
    parent = socket.socket(fileno=os.dup(0))
    _confine()
    parent.sendall(READY)
    with contextlib.suppress(OSError):  # the parent is gone
        _serve(parent, read, Preprocessing(**rule), Limits(**limits), wall_s)


def receive(connection: socket.socket, count: int, until: float | None = None) -> bytearray:
    """Exactly so many bytes. Raises EOFError where they end before, TimeoutError after `until` (monotonic clock)."""
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        if until is not None:
            connection.settimeout(max(until - time.monotonic(), 1e-3))
        taken = connection.recv_into(rest)
        if not taken:
            raise EOFError
        rest = rest[taken:]
    return data


def _serve(parent: socket.socket, read: Read, rule: Preprocessing, limits: Limits, wall_s: float) -> None:
    with contextlib.suppress(EOFError):
        while True:
            (length,) = LENGTH.unpack(receive(parent, LENGTH.size))
            _allow(2 * wall_s, CPU_S)  # the parent kills after wall_s; the timer ends a child whose parent is gone
            parent.sendall(_answer(bytes(receive(parent, length)), read, rule, limits))
            _allow(0, 0)


def _answer(data: bytes, read: Read, rule: Preprocessing, limits: Limits) -> bytes:
    try:
        pixels, picture = read(data, rule, limits)
    except Exception as error:  # one picture never fails the rest
        return _refusal(error)
    kind = picture.format.encode()
    return ANSWER.pack(DECODED, len(kind), picture.width, picture.height) + kind + pixels.tobytes()


def _refusal(error: Exception) -> bytes:
    kind: type[ImageError] = UnreadableImage
    if MemoryError in (type(error), type(error.__cause__)):
        detail = TOO_LARGE
    elif isinstance(error, ImageError):
        kind, detail = type(error), str(error)
    else:
        detail = f"picture cannot be decoded ({type(error).__name__}): save it anew"
    text = detail[:_LONGEST_DETAIL].encode(errors="replace")
    return ANSWER.pack(REFUSALS.index(kind), len(text), 0, 0) + text


def _allow(wall_s: float, cpu_s: float) -> None:
    """This process ends after so many seconds, by the clock or of its own work; 0: never."""
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _confine() -> None:
    """From here on: little memory, few files, no core dumps, nothing on stderr; only the parent ends this process."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # they may be sent to the whole group, and the parent has pictures
        signal.signal(stop, signal.SIG_IGN)
    for ends in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(ends, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    with contextlib.suppress(OSError):  # some containers refuse it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # rather this process than the parent
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 2):  # libtiff writes complaints there, with words from the file
        os.dup2(null, stream)
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _FILES)


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


if __name__ == "__main__":
    main()
