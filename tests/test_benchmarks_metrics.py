import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.faults
def test_the_benchmark_of_the_metrics_prints_its_bars_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.metrics", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    speed = figures["speed"]["query_x_gallery"]
    values = [
        *figures["agreement"].values(),
        figures["ceiling"]["equal_share"],
        figures["ceiling"]["bounded_share"],
        max(figures[part]["peak_gib"] for part in ("memory_one_set", "memory_query_x_gallery")),
        speed["estimate"]["work_beside"],
        speed["exact"]["total"],
    ]
    assert [bar["bar"] for bar in figures["bars"]] == [
        *["<= 1e-12"] * 5,
        ">= 0.95",
        ">= 1",
        "<= 1.5",
        "<= 0.5",
        "<= 2.5",
    ]
    for bar, value in zip(figures["bars"], values, strict=True):
        assert set(bar) == {"name", "value", "bar", "holds"}
        sign, limit = bar["bar"].split()
        assert bar["value"] == pytest.approx(value, rel=1e-3)
        assert bar["holds"] == (value <= float(limit) if sign == "<=" else value >= float(limit))
    assert all(bar["holds"] for bar in figures["bars"][:8])  # but for time, little of everything is enough
