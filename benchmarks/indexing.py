"""What imports cost beside the bare work, what they do to searches beside them, and what they take.

`python -m benchmarks.indexing` prints one JSON object on stdout; what it does at the moment goes to stderr. The
pictures are made once, into a folder below TMPDIR (7 GB at the usual sizes; a run takes up to 3 GB more there
meanwhile). Jobs come as a zip and go into SQLite with the default settings; --only chooses among the parts.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from benchmarks import import_speed, upkeep
from benchmarks.bars import Figures
from roadmatch.bundle import default_bundle_folder

_PACKAGES = ("faiss-cpu", "numpy", "openvino", "pillow", "sqlalchemy")


@dataclass(frozen=True)
class Effort:
    """How much is measured. images: of the imports whose pictures are embedded; files: of the one that is unchanged.

    database: URL for the parts that need no service; empty: SQLite.
    """

    images: int = 5_000
    rounds: int = 2
    items: int = 10_000
    searches: int = 1_000
    archive_bytes: int = 2_000_000_000
    files: int = 100_000
    rows: int = 100
    database: str = ""


QUICK = Effort(images=16, rounds=1, items=100, searches=20, archive_bytes=40_000_000, files=300, rows=4)

Part = Callable[[Path, Path, Effort], tuple[list[Figures], Figures]]
PARTS: dict[str, Part] = {
    "throughput": lambda at, bundle, effort: import_speed.throughput(at, bundle, effort.images, effort.rounds),
    "workers": lambda at, bundle, effort: import_speed.two_workers(
        at, bundle, effort.images // 4, effort.rounds, effort.database
    ),
    "searches": lambda at, bundle, effort: import_speed.searches(
        at, bundle, effort.images, effort.items, effort.searches
    ),
    "memory": lambda at, bundle, effort: upkeep.memory(at, bundle, effort.archive_bytes, effort.database),
    "unchanged": lambda at, bundle, effort: upkeep.unchanged(at, bundle, effort.files, effort.database),
    "rows": lambda at, bundle, effort: upkeep.rows(at, bundle, effort.rows, effort.database),
}

_WITH_SERVICE = {"throughput", "searches"}


def main() -> None:
    """Measure what is asked for, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="little of everything: to see that it runs, not how fast")
    parser.add_argument("--bundle", type=Path, default=default_bundle_folder())
    parser.add_argument("--images", type=int, help="pictures of an import")
    parser.add_argument("--files", type=int, help="entries of the import that changes nothing")
    parser.add_argument("--archive-mb", type=int, help="size of the archive whose import's memory is looked at")
    parser.add_argument("--database", default="", help="URL of an empty PostgreSQL for the parts without a service")
    chosen = parser.parse_args()
    names = chosen.only.split(",")
    if unknown := set(names) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if chosen.database and (served := set(names) & _WITH_SERVICE):
        parser.error(f"{', '.join(sorted(served))} run on SQLite: choose others by --only")
    effort = QUICK if chosen.quick else Effort()
    effort = replace(
        effort,
        images=chosen.images or effort.images,
        files=chosen.files or effort.files,
        archive_bytes=(chosen.archive_mb or 0) * 1_000_000 or effort.archive_bytes,
        database=chosen.database,
    )
    print(json.dumps(measure(names, chosen.bundle, effort), indent=2))


def measure(names: list[str], bundle_folder: Path, effort: Effort) -> Figures:
    """The bars of some parts, and the figures behind them."""
    bars, figures = [], {}
    for name in names:
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="roadmatch-bench-") as folder:
            of_part, figures[name] = PARTS[name](Path(folder), bundle_folder.absolute(), effort)
        bars += of_part
    return {"bars": bars, "machine": _machine(), "database": effort.database.partition(":")[0] or "sqlite", **figures}


def _machine() -> Figures:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "processor": models[0].split(":")[1].strip() if models else platform.machine(),
        "system": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
    }


if __name__ == "__main__":
    main()
