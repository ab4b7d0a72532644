"""How fast imports of new pictures are, one or two at a time, and how slow searches get beside them."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from app.client import Client
from app.job_commands import load_of
from benchmarks.archives import archive_of_photographs
from benchmarks.bars import Figures, at_least, at_most
from benchmarks.heavy import heavy_bundle
from benchmarks.importing import Place, place, workers
from benchmarks.load import Connection, latencies_s, search_request
from benchmarks.pictures import query_pictures
from benchmarks.running import GALLERY, Running, fill, running, unit_vectors
from benchmarks.sides import Side, sides
from roadmatch import bundle as bundles
from roadmatch.gallery.galleries import Keep
from roadmatch.jobs.chunks import MOST_ENTRIES

_CPUS = len(os.sched_getaffinity(0))
_THINK_S = 0.02
_SELF_CHECK_S = 60.0
_CHUNKED, _UNCHUNKED = f"chunks of {MOST_ENTRIES}", "one chunk"


def throughput(folder: Path, bundle_folder: Path, images: int, rounds: int) -> tuple[list[Figures], Figures]:
    """The service and the worker that it starts, a zip sent to it; and the same files in one process with all cores.

    They take turns, and the best rounds are compared, as in benchmarks.serving.
    """
    archive, data = archive_of_photographs(0, images), folder / "data"
    measured = []
    with (
        sides(_bare(bundle_folder, _CPUS)) as (bare,),
        running(data, bundle_folder) as service,
        place(data, bundle_folder) as at,
    ):
        for number in range(rounds):
            one = {
                name: bare.ask(first=0, count=images, chunk=chunk)["per_s"]
                for name, chunk in ((_CHUNKED, MOST_ENTRIES), (_UNCHUNKED, images))
            }
            for what, keep in (("import", Keep.ORIGINAL), ("import_without_keeping", Keep.NONE)):
                name = f"{what}-{number}"
                at.gallery(name, keep)
                one[what] = at.followed([_sent(service, name, archive)]).per_s
            measured.append(one)
    best = _best(measured)
    figures: Figures = {
        "import": "zip sent over HTTP (the job counts, not the sending), pictures kept, one worker at nice 10",
        "mean_picture_bytes": archive.stat().st_size / images,
        "ratio": best["import"] / best[_CHUNKED],
        "ratio_to_one_chunk": best["import"] / best[_UNCHUNKED],
        "ratio_without_keeping": best["import_without_keeping"] / best[_CHUNKED],
        "per_s": measured,
    }
    name = f"import of {images} JPEGs: images/s / decode and embed in process, {_CPUS} threads, {_CHUNKED}"
    return [at_least(name, figures["ratio"], 0.85)], figures


def two_workers(
    folder: Path, bundle_folder: Path, images: int, rounds: int, url: str = ""
) -> tuple[list[Figures], Figures]:
    """`python -m worker` with one thread each: one with one job of so many images, two with two jobs.

    A worker decodes in a child while it embeds. With the default bundle that is as much work again, so one worker takes
    both of two cores and leaves a second one little; how well workers share a machine shows beside one that is held to
    a core, and with a bundle whose embedding is the work. Bare processes show what the machine can.
    """
    heavy = _two_with_much_to_embed(folder, images // 4, rounds, url)
    archives = _two_archives(images)
    bare_form = _bare(bundle_folder, 1)
    measured = []
    with sides(bare_form, bare_form) as bare, place(folder / "data", bundle_folder, url) as at:
        for number in range(rounds):
            held, both = (at.gallery(f"round{number}-{name}") for name in ("held", "both"))
            one = {
                "one_on_one_core": _worked(at, 1, [at.queued(held, archives[0])], cores=1),
                "two_on_one_gallery": _worked(at, 2, [at.queued(both, archive) for archive in archives]),
            }
            measured.append(_one_and_two(at, f"round{number}", archives) | one | _processes(bare, images))
    best = _best(measured)
    figures: Figures = {
        "images_of_a_job": images,
        "ratio": best["two"] / best["one"],
        "ratio_on_one_gallery": best["two_on_one_gallery"] / best["one"],
        "ratio_to_one_on_one_core": best["two"] / best["one_on_one_core"],
        "ratio_of_bare_processes": best["two_processes"] / best["one_process"],
        "per_s": measured,
        "heavy": heavy,
    }
    bars = [
        at_least("two workers / one, one engine thread each", figures["ratio"], 1.8),
        at_least("two workers / one, one engine thread each, ResNet-50", heavy["ratio"], 1.8),
        at_least("two workers / one that is held to one core", figures["ratio_to_one_on_one_core"], 1.8),
    ]
    return bars, figures


def _two_with_much_to_embed(folder: Path, images: int, rounds: int, url: str) -> Figures:
    archives = _two_archives(images)
    with place(folder / "heavy", heavy_bundle(folder / "bundle"), url) as at:
        measured = [_one_and_two(at, f"heavy{number}", archives) for number in range(rounds)]
    best = _best(measured)
    return {"images_of_a_job": images, "ratio": best["two"] / best["one"], "per_s": measured}


def _one_and_two(at: Place, name: str, archives: Sequence[Path]) -> dict[str, float]:
    """Images a second of a worker with a job, and of two with one each, into new galleries of such a name."""
    alone, left, right = (at.gallery(f"{name}-{n}") for n in range(3))
    return {
        "one": _worked(at, 1, [at.queued(alone, archives[0])]),
        "two": _worked(at, 2, list(map(at.queued, (left, right), archives))),
    }


def _two_archives(images: int) -> list[Path]:
    return [archive_of_photographs(number * images, images) for number in range(2)]


def searches(folder: Path, bundle_folder: Path, images: int, items: int, count: int) -> tuple[list[Figures], Figures]:
    """One client that thinks a while after each answer, before, during and after an import into the gallery it asks.

    count: searches without the import; those during it are as many as fit.
    """
    archive, data = archive_of_photographs(0, images), folder / "data"
    fill(data, bundle_folder, unit_vectors(items, bundles.read(bundle_folder).manifest.dimension))
    requests = [search_request(GALLERY, picture) for picture in query_pictures().values()]
    taken: dict[str, list[float]] = {"before": [], "during": [], "after": []}
    with running(data, bundle_folder) as service, place(data, bundle_folder) as at:
        _await_self_check(service, requests[0])

        def ask(when: str) -> None:
            taken[when].append(_search_s(service, requests[len(taken[when]) % len(requests)]))
            time.sleep(_THINK_S)

        for _ in range(count // 2):
            ask("before")
        imported = at.followed([_sent(service, GALLERY, archive)], partial(ask, "during"))
        for _ in range(count // 2):
            ask("after")
    without = _p99(taken["before"] + taken["after"])
    figures = {
        "searches": {when: len(times) for when, times in taken.items()},
        "think_s": _THINK_S,
        "p50_s": {when: float(np.median(times)) for when, times in taken.items()},
        "p99_s": {when: _p99(times) for when, times in taken.items()},
        "import_per_s": imported.per_s,
    }
    name = f"search beside an import, one client: p99 of {len(taken['during'])} / p99 without it"
    return [at_most(name, _p99(taken["during"]) / without, 3)], figures


def _bare(bundle_folder: Path, cpus: int) -> "partial[Side]":
    return partial(Side, "benchmarks.in_process", [str(bundle_folder), str(cpus)], os.environ)


def _worked(at: Place, count: int, jobs: Sequence[str], cores: int = _CPUS) -> float:
    """Images a second of so many workers, each on so many cores."""
    allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    with workers(at, count, cpus=1, command=("taskset", "-c", allowed)):
        return at.followed(jobs).per_s


def _processes(bare: Sequence[Side], images: int) -> dict[str, float]:
    """Images a second of one process that does nothing else, and of two."""
    one: float = bare[0].ask(first=0, count=images, chunk=images)["per_s"]
    started = time.perf_counter()
    for number, side in enumerate(bare):
        side.start(first=number * images, count=images, chunk=images)
    for side in bare:
        side.finish()
    return {"one_process": one, "two_processes": len(bare) * images / (time.perf_counter() - started)}


def _best(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in rounds) for name in rounds[0]}


def _sent(service: Running, gallery: str, archive: Path) -> str:
    """The id of the job that an upload makes."""
    load = load_of(archive)
    with Client(f"http://{service.host}:{service.port}") as client:
        return str(client.import_(gallery, load.content, load.media_type, size=load.size)["id"])


def _search_s(service: Running, request: bytes) -> float:
    """Seconds from the sending to the answer, on a connection of its own: one that is idle for long is closed."""
    with closing(Connection(service.host, service.port)) as connection:
        return latencies_s(connection, [request])[0]


def _await_self_check(service: Running, request: bytes) -> None:
    """The gallery's first self-check would take cores from the searches that are compared with."""
    end = time.monotonic() + _SELF_CHECK_S
    while _calibration(service, request) == "not_checked":
        if time.monotonic() > end:
            raise RuntimeError(f"the gallery was not checked in {_SELF_CHECK_S:g} s")
        time.sleep(0.5)


def _calibration(service: Running, request: bytes) -> str:
    with closing(Connection(service.host, service.port)) as connection:
        return str(json.loads(connection.ask(request))["calibration"])


def _p99(times: Sequence[float]) -> float:
    return float(np.percentile(times, 99))
