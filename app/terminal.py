"""Text for a terminal: aligned rows, and complaints of one line."""

import contextlib
import os
import sys
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """A line a row, two spaces between columns; columns numbered in `right` end at the same place, others start there.

    All rows have equally many columns; ValueError where they do not.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if number in right else text.ljust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def printable(text: str) -> str:
    """The text on one line, without anything that a terminal would obey and without what cannot be encoded."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def complain(about: object) -> None:
    """One line on stderr."""
    print(f"roadmatch: {printable(str(about))}", file=sys.stderr, flush=True)  # noqa: T201


def let_go_of_stdout() -> None:
    """What is still buffered has nowhere to go; the interpreter would try once more at its end and complain."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # where there is no stdout of the system's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
