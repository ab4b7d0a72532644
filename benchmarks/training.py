"""What the losses reach on real drawings, what a training step costs, and whether the loader keeps up.

`python -m benchmarks.training` prints one JSON object on stdout; what it does at the moment goes to stderr. It takes
about ten minutes on two cores, and the drawings of `python -m benchmarks.drawings .cache/drawings`. Each part runs in
processes of its own whose libraries have one thread; speed is CPU time.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bars import Figures
from roadmatch.errors import RoadmatchError

ROOT = Path(__file__).parents[1]
DRAWINGS = Path(".cache/drawings")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked for and prints it; 1 with one line on stderr if there are no drawings."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="this one alone; may be given again")
    parser.add_argument("--drawings", type=Path, default=DRAWINGS, help=f"folder (default: {DRAWINGS})")
    parser.add_argument("--quick", action="store_true", help="little of everything, on made-up features")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    folder = None if chosen.quick else chosen.drawings.absolute()
    parts = chosen.part or list(PARTS)
    try:
        if chosen.here:
            figures = PARTS[parts[0]](folder)
        else:
            figures = together({part: _in_a_child(part, chosen.quick, chosen.drawings) for part in parts})
    except RoadmatchError as error:
        print(f"benchmarks.training: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=2))
    return 0


def together(parts: dict[str, Figures]) -> Figures:
    """All bars first, then each part's other figures under its name."""
    others = {part: {name: value for name, value in each.items() if name != "bars"} for part, each in parts.items()}
    return {"bars": [bar for each in parts.values() for bar in each["bars"]], **others}


def _compare(folder: Path | None) -> Figures:
    from benchmarks.comparison import COURSES, QUICK, Effort, compare

    return compare(QUICK if folder is None else Effort(folder, COURSES))


def _time(folder: Path | None) -> Figures:
    from benchmarks.training_speed import FULL, QUICK, measure

    return measure(QUICK if folder is None else FULL)


def _in_a_child(part: str, quick: bool, folder: Path) -> Figures:
    """Libraries read their number of threads when they are loaded."""
    command = [sys.executable, "-m", "benchmarks.training", "--here", "--part", part, "--drawings", str(folder)]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        env=os.environ | _ONE_THREAD | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise PartError(f"{part} ended with {done.returncode}")
    figures: Figures = json.loads(done.stdout)
    return figures


class PartError(RoadmatchError):
    """A part that has said on stderr why it failed."""


PARTS: dict[str, Callable[[Path | None], Figures]] = {"comparison": _compare, "speed": _time}


if __name__ == "__main__":
    sys.exit(main())
