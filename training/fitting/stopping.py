"""Ctrl-C and SIGTERM that wait for the end of a step, so that what is saved is whole."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None
_HEARD = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """A context in which a signal raises KeyboardInterrupt: at once, or after the `whole` part that it falls into.

    A second one raises it at once in any place. In another thread than the main one, signals are left as they are.
    """

    def __init__(self) -> None:
        self._within = self._asked = False
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heard) for number in _HEARD}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """What must not be left half done."""
        self._within = True
        try:
            yield
        finally:
            self._within = False
        if self._asked:
            raise KeyboardInterrupt

    def _heard(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if not self._within or self._asked:
            raise KeyboardInterrupt
        self._asked = True
