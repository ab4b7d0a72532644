"""How far an upload and its job are, for people: a bar on a terminal, else a line now and then."""

import time
from typing import TYPE_CHECKING, Protocol, Self

from app.terminal import complain

if TYPE_CHECKING:
    from rich.progress import TaskID

_EVERY_S = 10.0
_RATE_AFTER_S = 1.0
_MB = 1_000_000


class Progress(Protocol):
    """Is told how far it is, as often as one likes; a context in which it is shown."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def sent(self, count: int, total: int) -> None:
        """Bytes that are sent, of about so many."""

    def job(self, position: int, total: int | None) -> None:
        """Entries that are finished, of so many if that is known."""


class Quiet:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def sent(self, count: int, total: int) -> None: ...

    def job(self, position: int, total: int | None) -> None: ...


class Lines:
    """A line on stderr every ten seconds."""

    def __init__(self, *, every_s: float = _EVERY_S) -> None:
        self._every_s = every_s
        self._said = time.monotonic()
        self._speed = Speed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def sent(self, count: int, total: int) -> None:
        if self._is_due():
            complain(f"sent {count // _MB} of {max(count, total) // _MB} MB")

    def job(self, position: int, total: int | None) -> None:
        self._speed.note(time.monotonic(), position)
        if self._is_due():
            complain(" ".join([_of(position, total), self._speed.figures(total)]).strip())

    def _is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._said >= self._every_s
        self._said = now if due else self._said
        return due


class Bar:
    """A bar on the terminal, gone when it ends."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar: RichProgress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._sending: TaskID | None = None
        self._working: TaskID | None = None
        self._speed = Speed()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def sent(self, count: int, total: int) -> None:
        if self._sending is None:
            self._sending = self._bar.add_task("sending", figures="")
        most = max(count, total)
        self._bar.update(self._sending, completed=count, total=most, figures=f"{count // _MB} of {most // _MB} MB")

    def job(self, position: int, total: int | None) -> None:
        if self._working is None:
            self._working = self._bar.add_task("importing", figures="")
            if self._sending is not None:
                self._bar.update(self._sending, visible=False)
        self._speed.note(time.monotonic(), position)
        figures = f"{_of(position, total)} {self._speed.figures(total)}"
        self._bar.update(self._working, completed=position, total=total, figures=figures)


class Speed:
    """Entries a second since the first that was seen."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)

    def note(self, at_s: float, position: int) -> None:
        """The position at a time; waiting in the queue does not count."""
        if self._first is None or position == self._first[1]:
            self._first = at_s, position
        self._last = at_s, position

    def figures(self, total: int | None) -> str:
        """Images a second and the time left, as far as they are known."""
        assert self._first is not None
        took, moved = (last - first for last, first in zip(self._last, self._first, strict=True))
        if took < _RATE_AFTER_S or not moved:
            return ""
        rate = moved / took
        left = "" if total is None else f", {_clock((total - self._last[1]) / rate)} left"
        return f"({rate:.1f} images/s{left})"


def _of(position: int, total: int | None) -> str:
    return f"{position} done" if total is None else f"{position} of {total}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
