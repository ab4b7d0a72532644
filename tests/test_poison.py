"""Pictures that end, fill, hold up or confuse the decoder, in the midst of an import: exactly they fail."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import mean

import pytest

from roadmatch import bundle as bundles
from roadmatch.blobs import FolderBlobs
from roadmatch.embedding import Encoder, open_encoder
from roadmatch.gallery import galleries
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore
from roadmatch.jobs import queue
from roadmatch.jobs.decoding import Decoders
from roadmatch.jobs.queue import Job, Kind
from roadmatch.jobs.run import Runner
from roadmatch.jobs.sources import Places
from roadmatch.store.database import open_database
from tests.bundles import picture
from tests.hostile_pictures import hostile_pictures
from tests.job_oracle import check, check_job, every_item
from tests.test_decoding import FAILING, RAISED

ENTRIES, POISONED = 10_000, 30
LONGER = 1.2
"""So many times the time of the job without poison, the mean of one before and one behind."""
CPUS = 2
CODES = {413: "image-too-large", 415: "unsupported-image", 422: "unreadable-image"}
_MEMORY = "needs too much memory"


@dataclass(frozen=True)
class Poison:
    """A picture that fails: its bytes, the code of its failure, and a part of the reason."""

    data: bytes
    code: str = "unreadable-image"
    reason: str = ""


DEEDS = {
    "aborts": Poison(b"!os.abort()", reason="SIGABRT"),
    "crashes": Poison(b"!os.kill(os.getpid(), signal.SIGSEGV)", reason="SIGSEGV"),
    "exits": Poison(b"!os._exit(3)", reason="exit code 3"),
    "is-killed": Poison(b"!os.kill(os.getpid(), signal.SIGKILL)", reason=_MEMORY),
    "takes-all-memory": Poison(b"!bytearray(2_100_000_000)", reason=_MEMORY),
    "fills-memory": Poison(b"!held = [bytes(50_000_000) for _ in range(100)]", reason=_MEMORY),
    "memory-error": Poison(b"!raise MemoryError", reason=_MEMORY),
    **{name: Poison(f"!raise {name}('on purpose')".encode(), reason=f"({name})") for name in RAISED},
}
"""What a decoder may do, done by the child of tests/test_decoding.py."""
SPINS = Poison(b"!while True: pass", reason="takes too long")


@cache
def photo(number: int) -> bytes:
    return picture(number, side=32)


@pytest.fixture
def make_runner(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], tuple[Runner, Gallery]]]:
    """A maker of runners on a database, whose decoding children do what poison says, each with an empty gallery."""
    (tmp_path / "failing_child.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    encoder = open_encoder(bundles.read(bundle), cpus=CPUS)
    opened = []

    def make(url: str) -> tuple[Runner, Gallery]:
        database = open_database(url)
        opened.append(database)
        store = GalleryStore(database, FolderBlobs(tmp_path / "blobs"))
        places = Places(tmp_path / "uploads", (tmp_path,))
        runner = Runner(store, {encoder.bundle.id: encoder}, decoders, places, CPUS)
        return runner, new_gallery(runner, "poisoned")

    yield make
    for database in opened:
        database.close()


def decoders(encoder: Encoder) -> AbstractContextManager[Decoders]:
    return Decoders(encoder.bundle.manifest.preprocessing, CPUS, program="failing_child")


def new_gallery(runner: Runner, name: str) -> Gallery:
    return galleries.create(
        runner.store.database, name, bundle=next(iter(runner.encoders)), rule="max_f1", keep=Keep.ORIGINAL
    )


def write_folder(folder: Path, count: int, poison: Mapping[str, Poison]) -> dict[str, str]:
    """So many entries, the poison spread among them -> item id -> sha256 of those that shall go in."""
    folder.mkdir()
    every, left, good = count // len(poison) if poison else count + 1, dict(poison), {}
    for number in range(count):
        if left and number % every == every // 2:
            name = next(iter(left))
            (folder / f"{number:05}.{name}").write_bytes(left.pop(name).data)
        else:
            data = photo(number)
            (folder / f"{number:05}.png").write_bytes(data)
            good[f"{number:05}.png"] = sha256(data).hexdigest()
    assert not left
    return good


def imported(runner: Runner, gallery: Gallery, folder: Path) -> tuple[Job, float]:
    """The job of a folder, when it has ended, and its seconds."""
    source = {"kind": "folder", "folder": str(folder), "labels": None}
    job = queue.submit(runner.store.database, Kind.IMPORT, gallery.id, gallery.name, source)
    claim = queue.claim(runner.store.database)
    assert claim is not None
    started = time.monotonic()
    runner.run(claim)
    return queue.get(runner.store.database, job.id), time.monotonic() - started


def assert_failed(runner: Runner, job: Job, poison: Mapping[str, Poison]) -> None:
    """Exactly the poison failed, each by its name and place, in one line that says why."""
    failed = queue.failures(runner.store.database, job.id, limit=1000)
    by_name = {one.name.partition(".")[2]: one for one in failed}
    assert by_name.keys() == poison.keys()
    assert len(failed) == len(poison)
    for name, one in by_name.items():
        assert one.code == poison[name].code, (name, one)
        assert poison[name].reason in one.detail, (name, one)
        assert len(one.detail.splitlines()) == 1
        assert one.position == int(one.name.partition(".")[0])


def hostile(count: int) -> dict[str, Poison]:
    """Files that a decoder refuses, so many of them, of each kind."""
    bad = {name: one for name, one in hostile_pictures().items() if one.expect != "ok"}
    chosen = sorted(bad)[:: max(1, len(bad) // count)][:count]
    return {f"hostile-{name}": Poison(bad[name].data, CODES[int(bad[name].expect)]) for name in chosen}


def test_exactly_the_poisoned_entries_of_an_import_fail(
    make_runner: Callable[[str], tuple[Runner, Gallery]], sqlite_url: str, tmp_path: Path
) -> None:
    runner, gallery = make_runner(sqlite_url)
    poison = {**DEEDS, **hostile(16)}
    good = write_folder(tmp_path / "poisoned", 400, poison)
    job, _ = imported(runner, gallery, tmp_path / "poisoned")
    check_job(job, 400)
    assert_failed(runner, job, poison)
    check(runner.store, gallery, good, encoder=runner.encoders[gallery.bundle])


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_poison_in_a_large_import_costs_little_time(
    make_runner: Callable[[str], tuple[Runner, Gallery]], database_url: str, tmp_path: Path
) -> None:
    runner, gallery = make_runner(database_url)
    poison = {**DEEDS, "spins": SPINS, **hostile(POISONED - len(DEEDS) - 1)}
    assert len(poison) == POISONED
    write_folder(tmp_path / "clean", ENTRIES, {})
    good = write_folder(tmp_path / "poisoned", ENTRIES, poison)
    before, before_s = imported(runner, new_gallery(runner, "before"), tmp_path / "clean")
    job, poisoned_s = imported(runner, gallery, tmp_path / "poisoned")
    behind, behind_s = imported(runner, new_gallery(runner, "behind"), tmp_path / "clean")
    print(f"{ENTRIES} entries: {before_s:.1f} s, {poisoned_s:.1f} s with {POISONED} poisoned, {behind_s:.1f} s")
    check_job(before, ENTRIES)
    check_job(behind, ENTRIES)
    check_job(job, ENTRIES)
    assert_failed(runner, job, poison)
    assert {item.id: item.images[0].sha256 for item in every_item(runner.store, gallery)} == good
    assert poisoned_s <= LONGER * mean([before_s, behind_s])
