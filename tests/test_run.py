import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from roadmatch import bundle as bundles
from roadmatch.embedding import open_encoder
from roadmatch.errors import StorageFull, StoreUnavailable
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore
from roadmatch.jobs import chunks, queue, run
from roadmatch.jobs.decoding import Decoders
from roadmatch.jobs.queue import Job, Kind, State
from roadmatch.jobs.run import Runner
from roadmatch.jobs.sources import Places
from roadmatch.store.database import open_database
from tests.bundles import picture

ROOT = Path(__file__).parents[1]
PICTURES = 12


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve pictures in two sub-folders, and two that are none."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(PICTURES):
        path = folder / ("cats" if number % 2 else "dogs") / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture(number, side=32))
    (folder / "cats" / "broken.png").write_bytes(picture(0, side=32)[:200])
    (folder / "dogs" / "text.jpg").write_text("not a picture")
    return folder


@pytest.fixture
def runner(store: GalleryStore, bundle: Path, photos: Path, tmp_path: Path) -> Runner:
    """A runner on a database of either kind, with a tiny real bundle."""
    encoder = open_encoder(bundles.read(bundle), cpus=1)
    return Runner(
        store=store,
        encoders={encoder.bundle.id: encoder},
        decoders=partial(_decoders, 1),
        places=Places(tmp_path / "uploads", (photos,)),
        cpus=1,
    )


def _decoders(count: int, encoder: object) -> Decoders:
    return Decoders(encoder.bundle.manifest.preprocessing, count)  # type: ignore[attr-defined]


@pytest.fixture
def pets(runner: Runner) -> Gallery:
    """An empty gallery of the runner's bundle."""
    return galleries.create(
        runner.store.database, "pets", bundle=next(iter(runner.encoders)), rule="max_f1", keep=Keep.ORIGINAL
    )


def import_of(runner: Runner, gallery: Gallery, folder: Path, **given: int) -> Job:
    source = {"kind": "folder", "folder": str(folder), "labels": "folder"}
    return queue.submit(runner.store.database, Kind.IMPORT, gallery.id, gallery.name, source, **given)  # type: ignore[arg-type]


def run_next(runner: Runner) -> Job:
    claim = queue.claim(runner.store.database)
    assert claim is not None
    runner.run(claim)
    return queue.get(runner.store.database, claim.job.id)


def names(runner: Runner, gallery: Gallery) -> list[str]:
    return [item.id for item in items.list_(runner.store, gallery)]


def test_an_import_brings_every_picture_once_and_names_those_that_failed(
    runner: Runner, pets: Gallery, photos: Path
) -> None:
    import_of(runner, pets, photos)
    job = run_next(runner)
    assert (job.state, job.total, job.position) == (State.SUCCEEDED, PICTURES + 2, PICTURES + 2)
    assert (job.done, job.unchanged, job.failed) == (PICTURES, 0, 2)
    failed = queue.failures(runner.store.database, job.id)
    assert [(one.name, one.code) for one in failed] == [
        ("cats/broken.png", "unreadable-image"),
        ("dogs/text.jpg", "unsupported-image"),
    ]
    stored = items.list_(runner.store, pets)
    assert len(stored) == PICTURES
    assert {item.label for item in stored} == {"cats", "dogs"}
    data, _ = items.read_picture(runner.store, pets, stored[0].images[0].id)
    assert data == (photos / "cats" / "01.png").read_bytes()


def test_a_second_import_of_the_same_finds_all_unchanged_and_embeds_nothing(
    runner: Runner, pets: Gallery, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_of(runner, pets, photos)
    run_next(runner)
    seq = galleries.get(runner.store.database, "pets").seq
    monkeypatch.setattr(next(iter(runner.encoders.values())), "encode_pixels", None)
    import_of(runner, pets, photos)
    job = run_next(runner)
    assert (job.done, job.unchanged, job.failed) == (0, PICTURES, 2)
    assert galleries.get(runner.store.database, "pets").seq == seq


def test_what_is_new_or_changed_goes_in_beside_what_is_not(
    runner: Runner, pets: Gallery, photos: Path, tmp_path: Path
) -> None:
    import_of(runner, pets, photos)
    run_next(runner)
    first = items.list_(runner.store, pets)[0]
    items.delete(runner.store, pets, items.list_(runner.store, pets)[-1].id)
    items.put(
        runner.store,
        pets,
        first.id,
        label="other",
        metadata={},
        images=[_as_new(runner, picture(77, side=32))],
    )
    import_of(runner, pets, photos)
    job = run_next(runner)
    assert (job.done, job.unchanged) == (2, PICTURES - 2)
    assert items.get(runner.store, pets, first.id).label == first.label


def _as_new(runner: Runner, data: bytes) -> items.NewImage:
    from hashlib import sha256

    encoded = next(iter(runner.encoders.values())).encode(data)
    digest = sha256(data).hexdigest()
    return items.NewImage(data, digest, encoded.format, encoded.width, encoded.height, encoded.vector, encoded.b)


def test_a_deletion_takes_what_is_there(runner: Runner, pets: Gallery, photos: Path) -> None:
    import_of(runner, pets, photos)
    run_next(runner)
    gone = names(runner, pets)[:3]
    source = {"kind": "ids", "ids": [*gone, "nobody"]}
    queue.submit(runner.store.database, Kind.DELETE, pets.id, pets.name, source)
    job = run_next(runner)
    assert (job.state, job.done, job.unchanged) == (State.SUCCEEDED, 3, 1)
    assert len(names(runner, pets)) == PICTURES - 3
    assert not set(gone) & set(names(runner, pets))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MOST_ENTRIES", 3)


@pytest.mark.usefixtures("small_chunks")
def test_a_cancelled_job_ends_within_a_chunk_and_what_went_in_stays(
    runner: Runner, pets: Gallery, photos: Path
) -> None:
    job = import_of(runner, pets, photos)
    cancelling = Runner(
        **{**vars(runner), "trace": partial(_at_first, lambda: queue.cancel(runner.store.database, job.id))}
    )
    ended = run_next(cancelling)
    assert (ended.state, ended.position) == (State.CANCELLED, 6)
    assert len(names(runner, pets)) == ended.done


def _at_first(act: Callable[[], object], moment: str) -> None:
    if moment == "chunk_committed":
        act()


@pytest.mark.usefixtures("small_chunks")
def test_a_worker_that_stops_gives_its_job_back_and_the_next_one_goes_on(
    runner: Runner, pets: Gallery, photos: Path
) -> None:
    import_of(runner, pets, photos)
    stopping = Runner(**{**vars(runner), "trace": partial(_at_first, runner.stop.set)})
    given_back = run_next(stopping)
    assert (given_back.state, given_back.position) == (State.QUEUED, 3)
    runner.stop.clear()
    ended = run_next(runner)
    assert (ended.state, ended.done, ended.failed) == (State.SUCCEEDED, PICTURES, 2)
    assert len(names(runner, pets)) == PICTURES


@pytest.mark.usefixtures("small_chunks")
def test_a_large_job_makes_room_for_a_small_one(
    runner: Runner, pets: Gallery, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_SLICE_S", 0.0)
    large = import_of(runner, pets, photos)
    small: list[str] = []

    def submit(moment: str) -> None:
        if moment == "chunk_committed" and not small:
            small.append(import_of(runner, pets, photos / "dogs").id)

    assert run_next(Runner(**{**vars(runner), "trace": submit})).id == large.id
    assert queue.get(runner.store.database, large.id).state is State.QUEUED
    assert run_next(runner).id == small[0]


@pytest.mark.usefixtures("small_chunks")
def test_a_job_of_a_deleted_gallery_fails(runner: Runner, pets: Gallery, photos: Path) -> None:
    import_of(runner, pets, photos)
    deleting = partial(_at_first, lambda: galleries.delete(runner.store.database, runner.store.blobs, "pets"))
    job = run_next(Runner(**{**vars(runner), "trace": deleting}))
    assert job.state is State.FAILED
    assert "there is no gallery pets" in (job.error or "")
    import_of(runner, pets, photos)
    assert run_next(runner).state is State.FAILED


def test_a_job_whose_source_is_gone_fails_with_the_reason(runner: Runner, pets: Gallery) -> None:
    queue.submit(runner.store.database, Kind.IMPORT, pets.id, pets.name, {"kind": "zip", "upload": "gone"})
    job = run_next(runner)
    assert job.state is State.FAILED
    assert "not there any more" in (job.error or "")


@pytest.mark.usefixtures("small_chunks")
def test_a_worker_that_was_taken_for_dead_leaves_nothing_behind(runner: Runner, pets: Gallery, photos: Path) -> None:
    import_of(runner, pets, photos)
    claim = queue.claim(runner.store.database)
    assert claim is not None
    stolen: list[Job] = []

    def steal(moment: str) -> None:
        if moment == "embedded" and not stolen:
            with runner.store.database.write() as connection:
                queue.advance(connection, claim, queue.Progress(), lease_s=-1)
            stolen.append(run_next(runner))

    Runner(**{**vars(runner), "trace": steal}).run(claim)
    ended = queue.get(runner.store.database, claim.job.id)
    assert (ended.state, ended.done, ended.position) == (State.SUCCEEDED, PICTURES, PICTURES + 2)
    assert len(list(runner.store.blobs.keys_older_than(-1))) == PICTURES


@pytest.mark.usefixtures("small_chunks")
def test_a_database_that_is_away_for_a_moment_costs_a_moment(
    runner: Runner, pets: Gallery, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = items.put_many, threading.Event()

    def away_once(*given: object) -> object:
        if not failed.is_set():
            failed.set()
            raise StoreUnavailable("the database is locked: try again")
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(items, "put_many", away_once)
    import_of(runner, pets, photos)
    assert run_next(runner).done == PICTURES
    assert failed.is_set()


@pytest.mark.usefixtures("small_chunks")
def test_a_full_disk_lets_a_job_wait_and_does_not_count_as_a_dead_worker(
    runner: Runner, pets: Gallery, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_PAUSE_S", 0.0)
    full, real = [True], items.put_many

    def put_many(*given: object) -> object:
        if full[0]:
            raise StorageFull("no room left for pictures: free some and try again")
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(items, "put_many", put_many)
    import_of(runner, pets, photos)
    for _ in range(queue.MOST_ATTEMPTS + 2):
        assert run_next(runner).state is State.QUEUED
    full[0] = False
    assert run_next(runner).done == PICTURES


def test_the_same_picture_under_two_names_is_two_items(runner: Runner, pets: Gallery, photos: Path) -> None:
    twins = photos / "twins"
    twins.mkdir()
    try:
        for name in ("a.png", "b.png"):
            (twins / name).write_bytes(picture(3, side=32))
        import_of(runner, pets, twins)
        assert run_next(runner).done == 2
        one, other = (item.images[0] for item in items.list_(runner.store, pets))
        assert one.sha256 == other.sha256
        assert one.blob != other.blob
        items.delete(runner.store, pets, one.item)
        assert items.read_picture(runner.store, pets, other.id)[0] == picture(3, side=32)
    finally:
        for file in twins.iterdir():
            file.unlink()
        twins.rmdir()


def test_a_mistake_of_ours_is_tried_three_times_and_then_given_up(
    runner: Runner, pets: Gallery, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "put_many", None)
    job = import_of(runner, pets, photos)
    for _ in range(queue.MOST_ATTEMPTS):
        assert run_next(runner).state is State.QUEUED
    assert queue.claim(runner.store.database) is None
    failed = queue.get(runner.store.database, job.id)
    assert failed.state is State.FAILED
    assert "failed 3 times at entry 0" in (failed.error or "")


# The worker as a process


def worker(data: Path, bundle: Path, photos: Path, **settings: object) -> "subprocess.Popen[bytes]":
    given = {"data": data, "bundles": bundle, "import_folders": photos, "cpus": 1, "nice": 0, **settings}
    environment = {**os.environ, **{f"ROADMATCH_{name.upper()}": str(value) for name, value in given.items()}}
    return subprocess.Popen([sys.executable, "-m", "worker"], cwd=ROOT, env=environment, stderr=subprocess.PIPE)


@pytest.fixture
def place(tmp_path: Path, bundle: Path, photos: Path) -> Iterator[tuple[Path, GalleryStore, Gallery]]:
    """A data folder as the service has it, with an empty gallery."""
    from roadmatch.blobs import FolderBlobs

    data = tmp_path / "data"
    data.mkdir()
    database = open_database(f"sqlite:///{data / 'roadmatch.db'}")
    store = GalleryStore(database, FolderBlobs(data / "pictures"))
    made = galleries.create(database, "pets", bundle=bundles.read(bundle).id, rule="max_f1", keep=Keep.ORIGINAL)
    yield data, store, made
    database.close()


def ended(store: GalleryStore, job_id: str, within_s: float = 60.0) -> Job:
    end = time.monotonic() + within_s
    while (job := queue.get(store.database, job_id)).state not in queue.ENDED:
        assert time.monotonic() < end, job
        time.sleep(0.05)
    return job


def test_a_worker_process_works_on_jobs_until_it_is_told_to_stop(
    place: tuple[Path, GalleryStore, Gallery], bundle: Path, photos: Path
) -> None:
    data, store, gallery = place
    source = {"kind": "folder", "folder": str(photos), "labels": "folder"}
    job = queue.submit(store.database, Kind.IMPORT, gallery.id, gallery.name, source)
    process = worker(data, bundle, photos)
    try:
        assert ended(store, job.id).done == PICTURES
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert errors == b""


@pytest.mark.parametrize(
    "moment",
    [
        "before_commit@1",
        "after_commit@1",
        *(pytest.param(moment, marks=pytest.mark.faults) for moment in ("embedded@1", "blob_written@5")),
    ],
)
def test_a_worker_that_is_killed_loses_and_doubles_nothing(
    place: tuple[Path, GalleryStore, Gallery], bundle: Path, photos: Path, moment: str
) -> None:
    data, store, gallery = place
    source = {"kind": "folder", "folder": str(photos), "labels": "folder"}
    job = queue.submit(store.database, Kind.IMPORT, gallery.id, gallery.name, source)
    killed = worker(data, bundle, photos, failpoint=moment)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert queue.get(store.database, job.id).state is State.RUNNING
    with store.database.write() as connection:  # its lease would run out in half a minute
        claim = queue.Claim(job, fence=1)
        queue.advance(connection, claim, queue.Progress(), lease_s=-1)
    process = worker(data, bundle, photos)
    try:
        done = ended(store, job.id)
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert (done.position, done.done, done.failed) == (PICTURES + 2, PICTURES, 2)
    assert len(items.list_(store, gallery)) == PICTURES


def test_a_setting_that_no_program_knows_is_refused_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker"],
        cwd=ROOT,
        env={**os.environ, "ROADMATCH_SHINE": "1"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("roadmatch worker: ROADMATCH_SHINE is no setting of Roadmatch")
    assert done.stderr.count("\n") == 1


def test_the_worker_takes_every_setting_of_the_app_that_it_does_not_use() -> None:
    from app.settings import ClientSettings
    from app.settings import Settings as AppSettings
    from worker.settings import OF_THE_APP, Settings

    known = {*AppSettings.model_fields, *ClientSettings.model_fields}
    assert known <= {*Settings.model_fields, *OF_THE_APP}


def test_a_job_whose_thread_hangs_goes_to_another_worker_and_this_process_is_given_up(
    runner: Runner, pets: Gallery, photos: Path
) -> None:
    hangs, given_up = threading.Event(), threading.Event()

    def trace(moment: str) -> None:
        if moment == "embedded":
            hangs.wait(30)

    job = import_of(runner, pets, photos)
    hung = replace(runner, trace=trace, lease_s=0.3, chunk_s=0.5, give_up=given_up.set)
    claim = queue.claim(runner.store.database)
    assert claim is not None
    thread = threading.Thread(target=hung.run, args=(claim,), daemon=True)
    thread.start()
    assert given_up.wait(10)
    assert queue.get(runner.store.database, job.id).state is State.QUEUED
    assert run_next(runner).state is State.SUCCEEDED
    seq = galleries.get(runner.store.database, "pets").seq
    hangs.set()
    thread.join(30)
    assert galleries.get(runner.store.database, "pets").seq == seq


def test_a_job_that_gets_on_is_not_given_up(runner: Runner, pets: Gallery, photos: Path) -> None:
    given_up = threading.Event()
    slow = replace(runner, trace=lambda _: time.sleep(0.3), lease_s=0.3, chunk_s=5, give_up=given_up.set)
    import_of(slow, pets, photos)
    assert run_next(slow).state is State.SUCCEEDED
    assert not given_up.is_set()


def test_what_is_unchanged_is_noted_many_entries_at_a_time(
    runner: Runner, pets: Gallery, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_of(runner, pets, photos)
    run_next(runner)
    committed: list[str] = []
    monkeypatch.setattr(chunks, "MOST_ENTRIES", 2)
    monkeypatch.setattr(chunks, "_MOST_UNCHANGED", 4)
    import_of(runner, pets, photos)
    job = run_next(replace(runner, trace=committed.append))
    assert (job.unchanged, job.failed) == (PICTURES, 2)
    assert committed.count("chunk_committed") <= 2 + PICTURES // 4 + 1
