"""What the commands on jobs do: a folder, an archive or a manifest sent, the job followed, and told how it ended."""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from app.client import Client, ClientError, RefusalError
from app.commands import FileError, check_readable, client_of, make_gallery_unless_there, show
from app.job_progress import Bar, Lines, Progress, Quiet
from app.packing import Folder
from app.terminal import aligned, complain, printable
from app.verdict import Answered

MEDIA_TYPES = {
    ".zip": "application/zip",
    ".tar": "application/x-tar",
    ".tar.gz": "application/gzip",
    ".tgz": "application/gzip",
    ".csv": "text/csv",
    ".jsonl": "application/jsonl",
    ".ndjson": "application/jsonl",
}
"""What a file is sent as, by the end of its name."""
SHOWN = 20
"""Failures that are printed by themselves."""
_ENDED = ("succeeded", "failed", "cancelled")
_LOOK_S = 0.5
_PATIENCE_S = 60.0
"""So long a service that is being started anew is waited for."""
_WORKER_S = 15.0
"""A worker that is idle takes a job within seconds."""
_BLOCK = 1 << 16


class JobRow(Answered):
    """A job as it is listed."""

    id: str
    kind: str
    gallery: str
    state: str
    position: int
    total: int | None
    done: int
    unchanged: int
    failed: int
    error: str | None
    cancel_requested: bool
    created_at: str


class FailureRow(Answered):
    """An entry that did not go in."""

    position: int
    name: str
    code: str
    detail: str


@dataclass(frozen=True, eq=False)
class Load:
    """What is sent: its bytes, read anew at each call. size: how many, if known; about: how many there will be."""

    content: Callable[[], Iterator[bytes]]
    media_type: str
    size: int | None
    about: int
    folder: Folder | None = None


def import_(chosen: Namespace) -> int:
    """Send it and follow the job. -> exit status, 1 where anything did not go in"""
    load = load_of(chosen.source)
    with client_of(chosen) as client:
        make_gallery_unless_there(client, chosen.gallery)
        with _progress(chosen) as progress:
            job = JobRow.of(_send(client, chosen, load, progress))
            if not chosen.detach:
                job = _followed(client, job, progress)
        refused = [] if load.folder is None else load.folder.refused
        show(chosen, client.job(job.id), lambda: [_summary(job, len(refused), detached=chosen.detach)])
        _tell_refused(refused)
        if not chosen.detach:
            _tell_failures(client, job)
    incomplete = not chosen.detach and (job.state != "succeeded" or job.failed > 0)
    return 1 if refused or incomplete else 0


def jobs(chosen: Namespace) -> int:
    """List jobs. -> exit status"""
    with client_of(chosen) as client:
        answer = client.jobs(chosen.gallery)
    show(chosen, answer, lambda: job_lines([JobRow.of(row) for row in answer["jobs"]]))
    return 0


def cancel(chosen: Namespace) -> int:
    """Ask for a job's end. -> exit status"""
    with client_of(chosen) as client:
        answer = client.cancel_job(chosen.job)
    job = JobRow.of(answer)
    how = "is cancelled" if job.state in _ENDED else "ends as soon as its worker has finished what it is at"
    show(chosen, answer, lambda: [f"job {job.id} {how}; what has gone in stays"])
    return 0


def failures(chosen: Namespace) -> int:
    """Print every entry of a job that did not go in, and why the job failed as a whole if it did. -> exit status"""
    with client_of(chosen) as client:
        job = client.job(chosen.job)
        if job["error"] and not chosen.json:
            show(chosen, job, lambda: [f"the job failed: {job['error']}"])
        for answer in client.failures(chosen.job):
            show(chosen, answer, lambda answer=answer: [_failure_line(FailureRow.of(answer))])  # type: ignore[misc]
    return 0


def load_of(source: Path) -> Load:
    """What a file or a folder is sent as. Raises FileError, OSError."""
    if source.is_dir():
        folder = Folder(source)
        count, about = folder.measure()
        if not count:
            raise FileError(f"{source} holds no files: check the path")
        return Load(folder.tar, "application/x-tar", None, about, folder)
    check_readable(source)
    ends = [end for end in MEDIA_TYPES if source.name.lower().endswith(end)]
    if not ends:
        raise FileError(f"{source} is no folder and its name ends in none of {', '.join(MEDIA_TYPES)}: rename it")
    size = source.stat().st_size
    return Load(lambda: _blocks(source), MEDIA_TYPES[ends[0]], size, size)


def job_lines(rows: list[JobRow]) -> list[str]:
    """Jobs as a table."""
    if not rows:
        return ["no jobs: `roadmatch import FOLDER --gallery NAME` makes one"]
    table = [("job", "gallery", "kind", "state", "entries", "failed", "sent")]
    for row in rows:
        state = f"{row.state}, to be cancelled" if row.cancel_requested and row.state not in _ENDED else row.state
        entries = str(row.position) if row.total is None else f"{row.position} of {row.total}"
        table.append((row.id, row.gallery, row.kind, state, entries, str(row.failed), row.created_at))
    reasons = [f"job {row.id} failed: {printable(row.error)}" for row in rows if row.error]
    return [*aligned(table, right=(4, 5)), *reasons]


def _send(client: Client, chosen: Namespace, load: Load, progress: Progress) -> dict[str, object]:
    def content() -> Iterator[bytes]:
        sent = 0
        for block in load.content():
            yield block
            sent += len(block)
            progress.sent(sent, load.about)

    return client.import_(chosen.gallery, content, load.media_type, size=load.size, labels=chosen.labels)


def _followed(client: Client, job: JobRow, progress: Progress) -> JobRow:
    """The job at its end. Ctrl-C ends the looking and not the job."""
    seen = sent = time.monotonic()
    told = False
    try:
        while job.state not in _ENDED:
            progress.job(job.position, job.total)
            if job.state == "queued" and not told and time.monotonic() - sent > _WORKER_S:
                told = True
                complain(f"job {job.id} waits for a worker: all are busy, or none is alive")
            time.sleep(_LOOK_S)
            try:
                job = JobRow.of(client.job(job.id))
                seen = time.monotonic()
            except RefusalError:
                raise
            except ClientError as error:
                if time.monotonic() - seen > _PATIENCE_S:
                    raise ClientError(f"{error} (job {job.id} goes on when the service does)") from error
    except KeyboardInterrupt:
        complain(f"job {job.id} goes on: `roadmatch jobs` shows it, `roadmatch jobs cancel {job.id}` ends it")
        raise
    return job


def _progress(chosen: Namespace) -> Progress:
    if chosen.json:
        return Quiet()
    return Bar() if sys.stderr is not None and sys.stderr.isatty() else Lines()


def _summary(job: JobRow, refused: int, *, detached: bool) -> str:
    if detached:
        return f"job {job.id} is {job.state}: `roadmatch jobs` shows how far it is"
    counts = f"{job.done} added or replaced, {job.unchanged} unchanged, {job.failed} failed"
    unsent = f", {refused} not sent" if refused else ""
    return f"gallery {job.gallery}: {counts}{unsent}  (job {job.id})"


def _tell_refused(refused: list[tuple[str, str]]) -> None:
    for name, reason in refused[:SHOWN]:
        complain(f"{name}: not sent, {reason}")
    if len(refused) > SHOWN:
        complain(f"and {len(refused) - SHOWN} more that were not sent")


def _tell_failures(client: Client, job: JobRow) -> None:
    """Why a job failed as a whole, and its first entries that did."""
    if job.state == "failed":
        complain(f"job {job.id} failed at entry {job.position}: {job.error}")
    if job.state == "cancelled":
        complain(f"job {job.id} was cancelled at entry {job.position}; what had gone in stays")
    for answer in islice(client.failures(job.id) if job.failed else (), SHOWN):
        complain(_failure_line(FailureRow.of(answer)))
    if job.failed > SHOWN:
        complain(f"and {job.failed - SHOWN} more: `roadmatch jobs failures {job.id}` prints them all")


def _failure_line(failure: FailureRow) -> str:
    return printable(f"{failure.name}: {failure.detail}")


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            yield block
