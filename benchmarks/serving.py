"""What the service costs beside the bare work, and its parts beside what else could do them, as ratios.

`python -m benchmarks.serving` prints one JSON object on stdout; what it does at the moment goes to stderr. The two
sides of a ratio take turns in rounds, and a bar compares the best round of one with the best round of the other: what
else runs on the machine can only slow a side down, and rarely both alike. The median of the rounds' own ratios stands
beside it; on a quiet machine the two agree.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.bars import Figures, at_least, at_most
from benchmarks.load import Connection, answers_per_s, latencies_s, search_request
from benchmarks.pictures import query_pictures
from benchmarks.running import GALLERY, Running, fill, running
from benchmarks.sides import Side, sides
from roadmatch import bundle as bundles
from roadmatch.bundle import default_bundle_folder
from roadmatch.scoring import Vector

_CPUS = len(os.sched_getaffinity(0))
_SELF_CHECK_S = 30.0
_KERNEL_SETTINGS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


@dataclass(frozen=True)
class Effort:
    """How much is measured. times: how often each picture is asked in a round."""

    items: int = 10_000
    rounds: int = 6
    times: int = 10
    loaded_times: int = 30
    clients: int = 16
    starts: int = 3
    embeddings: int = 25
    rows: int = 1_000_000
    queries: int = 10


QUICK = Effort(items=200, rounds=1, times=1, loaded_times=1, clients=4, starts=1, embeddings=3, rows=20_000, queries=2)


def main() -> None:
    """Measure everything, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="little of everything: to see that it runs, not how fast")
    parser.add_argument("--bundle", type=Path, default=default_bundle_folder())
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.bundle, QUICK if chosen.quick else Effort()), indent=2))


def measure(bundle_folder: Path, effort: Effort) -> Figures:
    """All bars, and the figures behind them."""
    with tempfile.TemporaryDirectory(prefix="roadmatch-bench-") as folder:
        service = _service(Path(folder), bundle_folder, effort)
    embedding = _embedding(bundle_folder, effort)
    many = _many_vectors(effort)
    return {
        "bars": [
            at_most("search over HTTP, one client: p50 / best in-process form", service["p50_ratio"], 1.2),
            at_least(
                f"search over HTTP, {effort.clients} clients: throughput / best in-process form",
                service["throughput_ratio"],
                0.88,
            ),
            at_least("embedding, batch 1: torch eager channels_last / ours", embedding["ratio"], 4),
            at_most(f"start with {effort.items} items, seconds", service["start_s"], 5),
            at_most(f"search of {effort.rows} x 512 vectors, batch 1: ours / numpy", many["ratio"], 0.75),
        ],
        "cpus": _CPUS,
        "service": service,
        "embedding": embedding,
        "many_vectors": many,
    }


def _service(folder: Path, bundle_folder: Path, effort: Effort) -> Figures:
    """One service with default settings, and the bare forms, on the same pictures and as many vectors."""
    vectors = _gallery_vectors(bundles.read(bundle_folder).background, effort.items)
    data = folder / "data"
    _say(f"filling a gallery with {effort.items} items")
    fill(data, bundle_folder, vectors)
    pictures = query_pictures()
    np.save(folder / "vectors.npy", vectors)
    for number, picture in enumerate(pictures.values()):
        (folder / f"picture{number:02}").write_bytes(picture)
    requests = [search_request(GALLERY, picture) for picture in pictures.values()]
    starts = [_start(data, bundle_folder, requests[0]) for _ in range(effort.starts)]
    with (
        sides(*_bare_forms(folder, bundle_folder)) as (whole, *single),
        running(data, bundle_folder) as service,
    ):
        _await_self_check(service, requests[0])
        rounds = [_round(service, requests, whole, single, effort) for _ in _rounds("service", effort.rounds)]
    http_p50, bare_p50 = [one["http_p50_s"] for one in rounds], [min(one["bare_p50_s"].values()) for one in rounds]
    http_per_s, bare_per_s = [one["http_per_s"] for one in rounds], [max(one["bare_per_s"].values()) for one in rounds]
    return {
        "items": effort.items,
        "pictures": {name: len(picture) for name, picture in pictures.items()},
        "p50_ratio": min(http_p50) / min(bare_p50),
        "p50_ratio_median": _median_ratio(http_p50, bare_p50),
        "throughput_ratio": max(http_per_s) / max(bare_per_s),
        "throughput_ratio_median": _median_ratio(http_per_s, bare_per_s),
        "start_s": min(starts),
        "starts_s": starts,
        "rounds": rounds,
    }


def _gallery_vectors(real: Vector, items: int) -> Vector:
    """real (n, D), unit -> (items, D), unit: from nearly a real picture's embedding to nearly noise."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((items, real.shape[1]), dtype=np.float32)
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    share = rng.uniform(0, 1, (items, 1)).astype(np.float32)
    mixed: Vector = share * real[np.arange(items) % len(real)] + (1 - share) * noise
    mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
    return mixed


def _start(data: Path, bundle_folder: Path, request: bytes) -> float:
    """Seconds from the start of the process to the first search's answer."""
    _say("starting the service")
    with running(data, bundle_folder) as service:
        connection = Connection(service.host, service.port)
        connection.ask(request)
        taken = time.perf_counter() - service.spawned
        connection.close()
    return taken


def _bare_forms(folder: Path, bundle_folder: Path) -> list[partial[Side]]:
    """One process with all cores, and one for each core.

    numpy's product has one thread in all of them: its others, which spin, keep the embedder's from the cores.
    """
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    arguments = [str(folder), str(bundle_folder)]
    return [partial(Side, "benchmarks.bare", [*arguments, str(_CPUS)], environment)] + [
        partial(Side, "benchmarks.bare", [*arguments, "1"], environment) for _ in range(_CPUS)
    ]


def _await_self_check(service: Running, request: bytes) -> None:
    """The gallery's first self-check would take cores from the first round."""
    end = time.monotonic() + _SELF_CHECK_S
    while time.monotonic() < end:
        connection = Connection(service.host, service.port)
        checked = json.loads(connection.ask(request))["calibration"] != "not_checked"
        connection.close()
        if checked:
            return
        time.sleep(0.5)
    raise RuntimeError(f"the gallery was not checked in {_SELF_CHECK_S:g} s")


def _round(service: Running, requests: list[bytes], whole: Side, single: list[Side], effort: Effort) -> Figures:
    """Both sides, each alone."""
    connection = Connection(service.host, service.port)
    http_p50_s = median(latencies_s(connection, requests * effort.times))
    connection.close()
    p50 = partial(whole.ask, what="p50", times=effort.times)
    loaded = partial(whole.ask, what="throughput", times=effort.loaded_times)
    bare_p50_s = {nearest: p50(nearest=nearest)["p50_s"] for nearest in ("product", "dots", "faiss")}
    nearest = min(bare_p50_s, key=bare_p50_s.__getitem__)
    http_per_s = answers_per_s(service.host, service.port, requests * effort.loaded_times, effort.clients)
    bare_per_s = {
        f"{threads} threads": loaded(nearest=nearest, threads=threads)["pictures_per_s"]
        for threads in (_CPUS, 2 * _CPUS)
    }
    for side in single:
        side.start(what="throughput", nearest=nearest, times=-(-effort.loaded_times // len(single)), threads=1)
    bare_per_s[f"{len(single)} processes"] = sum(side.finish()["pictures_per_s"] for side in single)
    return {"http_p50_s": http_p50_s, "bare_p50_s": bare_p50_s, "http_per_s": http_per_s, "bare_per_s": bare_per_s}


def _embedding(bundle_folder: Path, effort: Effort) -> Figures:
    """Our engine and torch's eager mode, in processes of their own; then in one, where torch slows OpenVINO.

    The bar compares fastest calls: torch's threads wait for each other, so on a busy machine its usual call takes many
    times as long as it should, and a ratio of usual calls would flatter us.
    """
    kinds = ("ours", "torch_no_grad", "torch_inference_mode")
    made = [partial(Side, "benchmarks.embedders", [str(bundle_folder), kind], os.environ) for kind in kinds]
    together = partial(Side, "benchmarks.embedders", [str(bundle_folder), *kinds], os.environ)
    with sides(*made) as apart:
        rounds = [
            {kind: side.ask(kind=kind, times=effort.embeddings) for kind, side in zip(kinds, apart, strict=True)}
            for _ in _rounds("embedding", effort.rounds)
        ]
    with sides(together) as (one,):
        in_one_process = {kind: one.ask(kind=kind, times=effort.embeddings) for kind in kinds}
    p50_s, fastest_s = (
        {kind: [one[kind][figure] for one in rounds] for kind in kinds} for figure in ("p50_s", "fastest_s")
    )
    fastest = {kind: min(of_rounds) for kind, of_rounds in fastest_s.items()}
    return {
        "baseline": "eager model(x), torch.no_grad, model and input channels last, all threads, batch norm not fused",
        "ratio": fastest["torch_no_grad"] / fastest["ours"],
        "ratio_to_inference_mode": fastest["torch_inference_mode"] / fastest["ours"],
        "ratio_of_p50_median": _median_ratio(p50_s["torch_no_grad"], p50_s["ours"]),
        "ratio_in_one_process": in_one_process["torch_no_grad"]["fastest_s"] / in_one_process["ours"]["fastest_s"],
        "fastest_s": fastest_s,
        "p50_s": p50_s,
        "in_one_process": in_one_process,
    }


def _many_vectors(effort: Effort) -> Figures:
    """The service's exact search, and numpy's product with one thread and with all, whichever is faster."""
    environment = {name: value for name, value in os.environ.items() if name not in _KERNEL_SETTINGS}
    hows = ("ours", "product_one_thread", "product_all_threads")
    _say(f"making {effort.rows} vectors")
    with sides(partial(Side, "benchmarks.many", [str(effort.rows), "512"], environment)) as (side,):
        rounds, blas = [], ""
        for _ in _rounds("many vectors", effort.rounds):
            answers = {how: side.ask(how=how, times=effort.queries) for how in hows}
            rounds.append({how: answer["p50_s"] for how, answer in answers.items()})
            blas = answers["ours"]["blas"]
    ours, product = [one["ours"] for one in rounds], [min(one[how] for how in hows[1:]) for one in rounds]
    return {
        "ratio": min(ours) / min(product),
        "ratio_median": _median_ratio(ours, product),
        "blas": blas,
        "p50_s": rounds,
    }


def _median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return median(first / second for first, second in zip(one, other, strict=True))


def _rounds(name: str, count: int) -> range:
    _say(f"{name}: {count} rounds")
    return range(count)


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
