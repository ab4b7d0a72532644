"""The best form in one process of what an import computes: files decoded and embedded by threads, and nothing kept.

`python -m benchmarks.in_process BUNDLE CPUS`
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.archives import photographs
from benchmarks.sides import Answers, answer_commands
from roadmatch import bundle as bundles
from roadmatch.bundle import EMBEDDER
from roadmatch.embedding.openvino_engine import OpenvinoEngine
from roadmatch.images import read_pixels
from roadmatch.scoring import Vector


class InProcess:
    """An engine of so many streams, and as many threads."""

    def __init__(self, bundle_folder: Path, cpus: int) -> None:
        bundle = bundles.read(bundle_folder)
        self._rule = bundle.manifest.preprocessing
        self._engine = OpenvinoEngine(bundle.file(EMBEDDER), cpus)
        self._cpus = cpus

    def answer(self, first: int, count: int, chunk: int) -> Answers:
        """Pictures a second of the photographs from number `first` on; a chunk is finished before the next begins."""
        paths = photographs(first, count)
        started = time.perf_counter()
        with ThreadPoolExecutor(self._cpus) as pool:
            for start in range(0, count, chunk):
                list(pool.map(self._embed, paths[start : start + chunk]))
        return {"per_s": count / (time.perf_counter() - started)}

    def _embed(self, path: Path) -> Vector:
        pixels, _ = read_pixels(path.read_bytes(), self._rule)
        return self._engine.embed(pixels, busy=True)


if __name__ == "__main__":
    answer_commands(InProcess(Path(sys.argv[1]), int(sys.argv[2])).answer)
