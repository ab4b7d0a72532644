"""`python -m worker`: work on jobs until SIGTERM."""

import argparse
import logging
import sys

from roadmatch.errors import RoadmatchError
from worker.plain import work
from worker.settings import Settings


def main() -> int:
    """The exit status; an expected failure is one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--stdin", action="store_true", help="look for a job at each byte of it, end where it ends")
    parser.add_argument("--idle-s", type=float, help="end after so many seconds without a job")
    chosen = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    try:
        work(Settings.read(), listen=chosen.stdin, idle_s=chosen.idle_s)
    except (RoadmatchError, OSError) as error:
        print(f"roadmatch worker: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
