import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from app import cli, job_commands
from app.client import Client, ClientError
from app.job_commands import SHOWN, JobRow
from app.job_progress import Lines, Quiet, Speed
from app.packing import LARGEST_PICTURE, Folder
from app.routes.imports import MEDIA_TYPES
from roadmatch.images import Limits
from roadmatch.jobs import queue
from roadmatch.jobs.queue import Claim, Failure, Progress, State
from roadmatch.store.database import open_database
from tests.bundles import tiny_bundle
from tests.service import Served, running
from tests.test_cli import ROADMATCH, Command


@dataclass(eq=False)
class Worker:
    """Stands for a worker: takes jobs and says of each entry of a tar that it is in, but for those called broken."""

    data: Path
    seen: list[tuple[str, bytes]] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    end: State = State.SUCCEEDED
    pause_s: float = 0.0

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._database = open_database(f"sqlite:///{self.data / 'roadmatch.db'}")
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._database.close()

    def _work(self) -> None:
        while not self._stop.wait(0.05):
            claim = queue.claim(self._database)
            if claim is not None:
                self.sources.append(dict(claim.job.source))
                self._do(claim)

    def _do(self, claim: Claim) -> None:
        data = (self.data / "uploads" / claim.job.source["upload"]).read_bytes()
        found = [("whole", data)] if claim.job.source["kind"] != "tar" else members(data)
        self.seen += found
        failures = [
            Failure(position, name, "unreadable-image", f"the picture is \x1b[31mbroken, number {position}")
            for position, (name, _) in enumerate(found)
            if "broken" in name
        ]
        queue.count(self._database, claim, len(found))
        self._stop.wait(self.pause_s)
        with self._database.write() as connection:
            queue.advance(connection, claim, Progress(done=len(found) - len(failures), failures=failures))
        queue.finish(self._database, claim, self.end, "the archive is cut off" if self.end is State.FAILED else None)


def members(data: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as archive:
        return [(member.name, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One service for all tests of this file; each makes its own galleries."""
    folder = tmp_path_factory.mktemp("service")
    with running(folder / "data", tiny_bundle(folder / "tiny").folder, workers=0) as served:
        yield served


@pytest.fixture
def worker(service: Served, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """Nobody works before it is entered; what was left in the queue is taken out."""
    worker = Worker(Path(f"/proc/{service.process.pid}/cwd").readlink() / "data")
    database = open_database(f"sqlite:///{worker.data / 'roadmatch.db'}")
    while claim := queue.claim(database):
        queue.finish(database, claim, State.CANCELLED)
    database.close()
    return worker


@pytest.fixture
def roadmatch(service: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a client command here against the service."""
    monkeypatch.setenv("ROADMATCH_URL", service.url)
    return Command(capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures, folders of pictures, and junk."""
    top = tmp_path / "shop"
    for name in ("b.jpg", "a/2.jpg", "a/1.jpg", "Ünï 日本.jpg", "a b/c/d.jpg", "empty.jpg", "x" * 150 + ".jpg"):
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if name == "empty.jpg" else name.encode() * 40)
    for name in (".hidden/x.jpg", "a/.DS_Store", "Thumbs.db", "__MACOSX/._b.jpg", "desktop.ini"):
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"junk")
    return top


# --- packing


def test_a_folder_is_a_tar_of_its_files_in_the_order_of_their_names_each_time_the_same(folder: Path) -> None:
    packed = Folder(folder)
    data = b"".join(packed.tar())
    found = members(data)
    names = [name for name, _ in found]
    assert names == ["a/1.jpg", "a/2.jpg", "a b/c/d.jpg", "b.jpg", "empty.jpg", "x" * 150 + ".jpg", "Ünï 日本.jpg"]
    assert all(content == (folder / name).read_bytes() for name, content in found)
    assert b"".join(packed.tar()) == data
    count, about = packed.measure()
    assert count == len(found)
    assert about <= len(data) <= about + 4 * 1024  # long names have headers of their own


def test_names_that_are_no_text_and_folders_without_end_are_packed(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"1")
    inner = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1_010):
        os.mkdir("d", dir_fd=inner)
        deeper = os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    os.close(inner)
    try:
        ((name, content),) = members(b"".join(Folder(tmp_path).tar()))
        assert (os.fsencode(name), content) == (b"caf\xe9.jpg", b"1")
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


def test_what_cannot_be_sent_is_named_with_the_reason_and_never_opened(tmp_path: Path) -> None:
    (tmp_path / "good.jpg").write_bytes(b"1")
    (tmp_path / "linked.jpg").symlink_to(tmp_path / "good.jpg")
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "fifo.jpg")
    with (tmp_path / "film.mov").open("wb") as film:
        film.truncate(LARGEST_PICTURE + 1)
    packed = Folder(tmp_path)
    for _ in range(2):
        assert [name for name, _ in members(b"".join(packed.tar()))] == ["good.jpg", "linked.jpg"]
        reasons = dict(packed.refused)
        assert reasons.keys() == {"dangling.jpg", "loop", "fifo.jpg", "film.mov"}
        assert len(packed.refused) == 4
    assert "more than 20 MB" in reasons["film.mov"]
    assert "link to a folder" in reasons["loop"]


def test_a_folder_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    for number in range(40):
        with (tmp_path / f"{number}.jpg").open("wb") as file:
            file.truncate(1_000_000)
    tracemalloc.start()
    total = sum(map(len, Folder(tmp_path).tar()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 40_000_000
    assert peak < 4_000_000


def test_the_largest_picture_and_the_kinds_of_files_are_those_of_the_service() -> None:
    assert Limits().bytes == LARGEST_PICTURE
    assert set(job_commands.MEDIA_TYPES.values()) <= MEDIA_TYPES.keys()


# --- import


def test_a_folder_goes_in_and_the_gallery_is_made(roadmatch: Command, worker: Worker, folder: Path) -> None:
    with worker:
        status, out, err = roadmatch("import", folder, "--gallery", "whole", "--labels", "folder")
    assert status == 0, err
    assert re.fullmatch(r"gallery whole: 7 added or replaced, 0 unchanged, 0 failed  \(job \w+\)\n", out)
    assert re.fullmatch(r"roadmatch: gallery whole was not there and is made: .*\n", err)
    assert worker.seen == members(b"".join(Folder(folder).tar()))
    assert (worker.sources[0]["kind"], worker.sources[0]["labels"]) == ("tar", "folder")


def test_failures_are_told_with_reasons_the_first_of_them_and_how_to_get_the_rest(
    roadmatch: Command, worker: Worker, tmp_path: Path
) -> None:
    for number in range(SHOWN + 5):
        (tmp_path / f"broken {number:02}.jpg").write_bytes(b"x")
    (tmp_path / "good.jpg").write_bytes(b"x")
    (tmp_path / "loop").symlink_to(tmp_path)
    with worker:
        status, out, err = roadmatch("import", tmp_path, "--gallery", "failing")
    job = re.search(r"\(job (\w+)\)", out)
    assert status == 1
    assert job
    assert "1 added or replaced, 0 unchanged, 25 failed, 1 not sent" in out
    lines = err.splitlines()[1:]
    assert lines[0].startswith("roadmatch: loop: not sent, it is a link to a folder")
    assert lines[1] == "roadmatch: broken 00.jpg: the picture is ?[31mbroken, number 0"
    assert len(lines) == 1 + SHOWN + 1
    assert lines[-1] == f"roadmatch: and 5 more: `roadmatch jobs failures {job[1]}` prints them all"
    status, out, _ = roadmatch("jobs", "failures", job[1])
    assert (status, len(out.splitlines())) == (0, SHOWN + 5)
    _, out, _ = roadmatch("jobs", "failures", job[1], "--json")
    assert [json.loads(line)["position"] for line in out.splitlines()] == list(range(SHOWN + 5))


@pytest.mark.parametrize(
    ("name", "kind"), [("a.ZIP", "zip"), ("a.tar.gz", "tar"), ("a.csv", "csv"), ("a.b.ndjson", "jsonl")]
)
def test_archives_and_manifests_are_sent_as_they_are(
    roadmatch: Command, worker: Worker, tmp_path: Path, name: str, kind: str
) -> None:
    file = tmp_path / name
    file.write_bytes(os.urandom(300_000))
    status, out, _ = roadmatch("import", file, "--gallery", "asis", "--detach", "--json")
    job = json.loads(out)
    assert (status, job["state"], job["source"]) == (0, "queued", kind)
    uploads = [path for path in (worker.data / "uploads").iterdir() if path.read_bytes() == file.read_bytes()]
    assert len(uploads) == 1
    status, out, _ = roadmatch("import", file, "--gallery", "asis", "--detach")
    assert re.fullmatch(r"job \w+ is queued: `roadmatch jobs` shows how far it is\n", out)


def test_what_cannot_be_imported_is_said_before_a_gallery_is_made(roadmatch: Command, tmp_path: Path) -> None:
    (tmp_path / "a.rar").write_bytes(b"x")
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    assert "ends in none of .zip" in roadmatch.fails("import", tmp_path / "a.rar", "--gallery", "never")
    assert "holds no files" in roadmatch.fails("import", tmp_path / "empty", "--gallery", "never")
    assert "is not there" in roadmatch.fails("import", tmp_path / "none.zip", "--gallery", "never")
    (tmp_path / "e.zip").touch()
    roadmatch("import", tmp_path / "a.rar", "--gallery", "x")
    status, out, err = roadmatch("import", tmp_path / "e.zip", "--gallery", "made")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("roadmatch: the body is empty")
    assert "never" not in roadmatch("galleries")[1]


@pytest.mark.parametrize(
    ("end", "said"), [(State.FAILED, "failed at entry 7: the archive is cut off"), (State.CANCELLED, "was cancelled")]
)
def test_a_job_that_does_not_succeed_is_a_failure(
    roadmatch: Command, worker: Worker, folder: Path, end: State, said: str
) -> None:
    worker.end = end
    with worker:
        status, out, err = roadmatch("import", folder, "--gallery", "ended", "--json")
    assert (status, json.loads(out)["state"]) == (1, end)
    assert said in err


def test_ctrl_c_says_that_the_job_goes_on_and_how_to_end_it(
    service: Served, roadmatch: Command, worker: Worker, folder: Path
) -> None:
    command = [*ROADMATCH, "import", str(folder), "--gallery", "stopped", "--url", service.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while "stopped" not in roadmatch("jobs", "--gallery", "stopped")[1]:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    row = next(line for line in roadmatch("jobs", "--gallery", "stopped")[1].splitlines() if "stopped" in line)
    job = row.split()[0]
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == (
        f"roadmatch: job {job} goes on: `roadmatch jobs` shows it, `roadmatch jobs cancel {job}` ends it"
    )
    assert "queued" in row
    assert roadmatch("jobs", "cancel", job) == (0, f"job {job} is cancelled; what has gone in stays\n", "")


# --- jobs


def test_jobs_are_listed_and_cancelled(roadmatch: Command, worker: Worker, folder: Path) -> None:
    assert roadmatch("jobs", "--gallery", "nothing")[1].startswith("no jobs: ")
    for _ in range(2):
        roadmatch("import", folder, "--gallery", "listed", "--detach")
    _, out, _ = roadmatch("jobs", "--gallery", "listed")
    head, first, second = (line.split() for line in out.splitlines())
    assert head == ["job", "gallery", "kind", "state", "entries", "failed", "sent"]
    assert first[0] > second[0]
    assert first[1:6] == ["listed", "import", "queued", "0", "0"]
    whole = json.loads(roadmatch("jobs", "--gallery", "listed", "--json")[1])
    assert [job["id"] for job in whole["jobs"]] == [first[0], second[0]]
    cancelled = json.loads(roadmatch("jobs", "--json", "cancel", second[0])[1])
    assert cancelled["state"] == "cancelled"
    assert "cancelled" in roadmatch("jobs")[1]
    database = open_database(f"sqlite:///{worker.data / 'roadmatch.db'}")
    claim = queue.claim(database)
    assert claim is not None
    assert "as soon as its worker has finished" in roadmatch("jobs", "cancel", first[0])[1]
    assert "running, to be cancelled" in roadmatch("jobs", "--gallery", "listed")[1]
    queue.finish(database, claim, State.SUCCEEDED)
    database.close()
    assert "has succeeded already" in roadmatch.fails("jobs", "cancel", first[0])
    assert "there is no job none" in roadmatch.fails("jobs", "cancel", "none")
    assert "there is no job none" in roadmatch.fails("jobs", "failures", "none")
    for arguments in (["jobs", "cancel"], ["jobs", "end", "x"], ["jobs", "cancel", "a/b"], ["import", str(folder)]):
        roadmatch.fails(*arguments, status=2)


def test_an_option_before_or_behind_the_action_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["jobs", "--url", "http://x", "cancel", "a"], ["jobs", "cancel", "a", "--url", "http://x"]):
        assert cli.parser().parse_args(words).url == "http://x"
    assert cli.parser().parse_args(["jobs", "cancel", "a"]).json is False


# --- following


def test_a_terminal_gets_a_bar_with_images_a_second_and_the_time_left(
    service: Served, worker: Worker, folder: Path
) -> None:
    ours, theirs = pty.openpty()
    command = [*ROADMATCH, "import", str(folder), "--gallery", "bar", "--url", service.url]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with worker, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # what a terminal whose other side is closed gives
            while more := os.read(ours, 65_536):
                shown += more
        out, _ = process.communicate(timeout=20)
        os.close(ours)
    assert b"importing" in shown
    assert "━".encode() in shown
    assert (process.returncode, b"7 added or replaced" in out) == (0, True)


def test_a_line_now_and_then_tells_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, now = Lines(), time.monotonic()
    for second, position in ((0, 0), (11, 0), (12, 40), (31, 800)):
        monkeypatch.setattr(time, "monotonic", lambda second=second: now + second)
        lines.job(position, 2_000)
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    lines.sent(12_345_678, 99_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "roadmatch: 0 of 2000",
        "roadmatch: 800 of 2000 (40.0 images/s, 0:00:30 left)",
        "roadmatch: sent 12 of 99 MB",
    ]


def test_the_speed_of_a_job_without_a_known_end_has_no_time_left() -> None:
    speed = Speed()
    speed.note(0.0, 0)
    assert speed.figures(None) == ""
    speed.note(4.0, 10)
    assert speed.figures(None) == "(2.5 images/s)"


class Restarting(Client):
    """A service that cannot be asked for a while."""

    def __init__(self, away: int) -> None:
        self.away = away

    def job(self, job: str) -> dict[str, Any]:
        self.away -= 1
        if self.away >= 0:
            raise ClientError("no service answers")
        return {**_row("succeeded"), "id": job}


def _row(state: str) -> dict[str, Any]:
    counts = dict.fromkeys(("position", "done", "unchanged", "failed"), 0)
    return {"id": "a", "kind": "import", "gallery": "g", "state": state, "total": None, "error": None} | {
        **counts,
        "cancel_requested": False,
        "created_at": "2026-01-01T00:00:00Z",
    }


def test_a_service_that_is_started_anew_is_waited_for_and_one_that_stays_away_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_commands, "_LOOK_S", 0.01)
    job = JobRow.of(_row("queued"))
    assert job_commands._followed(Restarting(5), job, Quiet()).state == "succeeded"
    monkeypatch.setattr(job_commands, "_PATIENCE_S", 0.05)
    with pytest.raises(ClientError, match=r"no service answers \(job a goes on"):
        job_commands._followed(Restarting(10_000), job, Quiet())


class Queued(Client):
    """A service whose job nobody takes for so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def job(self, job: str) -> dict[str, Any]:
        self.looks -= 1
        return _row("queued" if self.looks > 0 else "succeeded")


def test_a_job_that_nobody_takes_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_commands, "_LOOK_S", 0.001)
    job_commands._followed(Queued(20), JobRow.of(_row("queued")), Quiet())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(job_commands, "_WORKER_S", 0.005)
    job_commands._followed(Queued(50), JobRow.of(_row("queued")), Quiet())
    assert capsys.readouterr().err == "roadmatch: job a waits for a worker: all are busy, or none is alive\n"


def test_the_reason_of_a_failed_job_stands_below_the_list() -> None:
    rows = [JobRow.of(_row("failed") | {"error": "the archive is\nno zip"}), JobRow.of(_row("succeeded"))]
    *table, reason = job_commands.job_lines(rows)
    assert len(table) == 3
    assert reason == "job a failed: the archive is no zip"
