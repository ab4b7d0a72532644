"""The jobs table as a queue: submit, claim, advance, cancel.

A claim is a lease by the database's clock and a fence, a number that grows with each claim. Whoever works on a job
extends the lease and commits under the fence; a worker that was taken for dead finds that it lost the job and leaves
nothing behind. A broker's message can only wake somebody up.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, Double, Row, and_, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from roadmatch.errors import IdempotencyMismatch, JobFinished, JobNotFound, LeaseLost
from roadmatch.store.database import Database
from roadmatch.store.tables import job_failures, jobs

LEASE_S = 30.0
"""So long after its last sign of life a worker's job is free for another."""
MOST_ATTEMPTS = 3
"""A job that was claimed so often without getting on is failed: something in it ends its workers."""
_LONGEST_TEXT = 512


class Kind(StrEnum):
    """What a job does to its gallery."""

    IMPORT = "import"
    DELETE = "delete"


class State(StrEnum):
    """Where a job is; the last three are for good."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = (State.SUCCEEDED, State.FAILED, State.CANCELLED)


@dataclass(frozen=True)
class Job:
    """A job as it was at one moment. position = done + unchanged + failed: entries that are finished.

    source: where its entries come from, as roadmatch.jobs.sources reads it. total: entries, None until they were
    counted. error: why the whole job failed. cancel: somebody asked for its end.
    """

    id: str
    kind: Kind
    gallery_id: int
    gallery: str
    source: Mapping[str, Any]
    state: State
    priority: int
    position: int
    total: int | None
    done: int
    unchanged: int
    failed: int
    error: str | None
    cancel: bool
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True)
class Claim:
    """A job that this process works on, until its lease runs out."""

    job: Job
    fence: int


@dataclass(frozen=True)
class Failure:
    """An entry that did not go in. position: of the entry in its source, from 0."""

    position: int
    name: str
    code: str
    detail: str


@dataclass(frozen=True)
class Progress:
    """What a chunk of entries came to."""

    done: int = 0
    unchanged: int = 0
    failures: Sequence[Failure] = ()

    @property
    def entries(self) -> int:
        """All that are finished by it."""
        return self.done + self.unchanged + len(self.failures)


@dataclass(frozen=True)
class Load:
    """The queue at one moment: jobs by state, and entries of all jobs by what became of them.

    waiting_since: when the oldest queued job was sent, None where none waits.
    """

    jobs: Mapping[State, int]
    done: int
    unchanged: int
    failed: int
    waiting_since: datetime | None


class _Now(FunctionElement[float]):
    """Seconds since 1970 by the database's clock: workers' clocks may differ."""

    type = Double()
    inherit_cache = True


@compiles(_Now, "sqlite")
def _now_of_sqlite(_: _Now, __: SQLCompiler, **___: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(_Now)
def _now_of_postgres(_: _Now, __: SQLCompiler, **___: Any) -> str:
    return "CAST(extract(epoch from clock_timestamp()) AS double precision)"


_free = or_(
    jobs.c.state == State.QUEUED,
    and_(jobs.c.state == State.RUNNING, jobs.c.lease_until < _Now()),
)
_next = jobs.c.priority.desc(), jobs.c.position, jobs.c.id
"""Jobs that have had less go first, so a small one is not stuck behind a large one."""


def submit(
    database: Database,
    kind: Kind,
    gallery_id: int,
    gallery: str,
    source: Mapping[str, Any],
    *,
    priority: int = 0,
    total: int | None = None,
    key: str | None = None,
    request: str | None = None,
) -> Job:
    """A new job, queued. key: a repeat with it gives the job that is there; request: sha256 of what was asked.

    Raises IdempotencyMismatch where the key was used for another request, StoreUnavailable.
    """
    row = {
        "id": f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}",
        "kind": kind,
        "gallery_id": gallery_id,
        "gallery": gallery,
        "source": dict(source),
        "priority": priority,
        "total": total,
        "key": key,
        "request": request,
    }
    try:
        with database.write() as connection:
            return _job(connection.execute(insert(jobs).values(row).returning(jobs)).one())
    except IntegrityError:
        if key is None:
            raise
    found = of_key(database, key, request)
    assert found is not None
    return found


def of_key(database: Database, key: str, request: str | None) -> Job | None:
    """The job that an Idempotency-Key was used for; raises IdempotencyMismatch where it was for another request."""
    with database.read() as connection:
        row = connection.execute(select(jobs).where(jobs.c.key == key)).one_or_none()
    if row is not None and row.request != request:
        raise IdempotencyMismatch(f"the Idempotency-Key {key} was used for another job, {row.id}")
    return _job(row) if row else None


def get(database: Database, job_id: str) -> Job:
    """Raises JobNotFound."""
    with database.read() as connection:
        return _job(_row(connection, job_id))


def list_(
    database: Database, *, gallery: str | None = None, state: State | None = None, after: str | None = None, limit: int
) -> list[Job]:
    """Jobs from the newest on, those before the one with the id `after`, at most `limit`."""
    asked = select(jobs).order_by(jobs.c.id.desc()).limit(limit)
    if gallery is not None:
        asked = asked.where(jobs.c.gallery == gallery)
    if state is not None:
        asked = asked.where(jobs.c.state == state)
    if after is not None:
        asked = asked.where(jobs.c.id < after)
    with database.read() as connection:
        return [_job(row) for row in connection.execute(asked)]


def failures(database: Database, job_id: str, *, after: int = -1, limit: int = 100) -> list[Failure]:
    """Entries that failed, in the order of the source, those behind a position; raises JobNotFound."""
    with database.read() as connection:
        _row(connection, job_id)
        rows = connection.execute(
            select(job_failures)
            .where(job_failures.c.job_id == job_id, job_failures.c.position > after)
            .order_by(job_failures.c.position)
            .limit(limit)
        )
        return [Failure(row.position, row.name, row.code, row.detail) for row in rows]


def load(database: Database) -> Load:
    """The queue as of now."""
    with database.read() as connection:
        rows = connection.execute(
            select(
                jobs.c.state,
                func.count().label("jobs"),
                func.sum(jobs.c.done).label("done"),
                func.sum(jobs.c.unchanged).label("unchanged"),
                func.sum(jobs.c.failed).label("failed"),
                func.min(jobs.c.created_at, type_=jobs.c.created_at.type).label("oldest"),
            ).group_by(jobs.c.state)
        ).all()
    oldest = next((row.oldest for row in rows if row.state == State.QUEUED), None)
    return Load(
        jobs=dict.fromkeys(State, 0) | {State(row.state): row.jobs for row in rows},
        done=sum(row.done for row in rows),
        unchanged=sum(row.unchanged for row in rows),
        failed=sum(row.failed for row in rows),
        waiting_since=oldest,
    )


def any_free(database: Database) -> bool:
    """Whether there is a job to be claimed."""
    with database.read() as connection:
        return connection.execute(select(jobs.c.id).where(_free).limit(1)).first() is not None


def uploads_needed(database: Database) -> set[str]:
    """Keys of the uploads of jobs that have not ended, as of one moment."""
    with database.read() as connection:
        sources = connection.scalars(select(jobs.c.source).where(jobs.c.state.in_((State.QUEUED, State.RUNNING))))
        return {source["upload"] for source in sources if "upload" in source}


def claim(database: Database, *, lease_s: float = LEASE_S) -> Claim | None:
    """The next free job, for this process; None where there is none. Jobs that end their workers are failed here."""
    if not any_free(database):  # asked every second by every worker, so without the lock of a write
        return None
    with database.write() as connection:
        while True:
            free = select(jobs.c.id).where(_free).order_by(*_next).limit(1).with_for_update(skip_locked=True)
            row = connection.execute(
                update(jobs)
                .where(jobs.c.id == free.scalar_subquery())
                .values(
                    state=State.RUNNING,
                    fence=jobs.c.fence + 1,
                    attempts=jobs.c.attempts + 1,
                    lease_until=_Now() + lease_s,
                    started_at=func.coalesce(jobs.c.started_at, func.now()),
                )
                .returning(jobs)
            ).one_or_none()
            if row is None:
                return None
            if row.cancel:
                _end(connection, row.id, row.fence, State.CANCELLED)
            elif row.attempts > MOST_ATTEMPTS:
                reason = f"its worker failed {MOST_ATTEMPTS} times at entry {row.position}: look at the worker's log"
                _end(connection, row.id, row.fence, State.FAILED, reason)
            else:
                return Claim(_job(row), row.fence)


def renew(database: Database, claim: Claim, *, lease_s: float = LEASE_S) -> bool:
    """Extend the lease -> whether somebody asked for the job's end. Raises LeaseLost."""
    with database.write() as connection:
        return bool(_held(connection, claim, {"lease_until": _Now() + lease_s}).cancel)


def advance(
    connection: Connection, claim: Claim, progress: Progress, *, at: int | None = None, lease_s: float = LEASE_S
) -> Job:
    """Note what a chunk came to, in the transaction that wrote its items -> the job. Raises LeaseLost.

    at: the position that the chunk starts at; a repeat changes nothing, as after a commit whose answer was lost.
    """
    if at is not None and progress.entries:
        behind = jobs.c.position == at + progress.entries
        row = connection.execute(select(jobs).where(_is(claim.job.id, claim.fence), behind)).one_or_none()
        if row is not None:
            return _job(row)
    row = _held(
        connection,
        claim,
        {
            "position": jobs.c.position + progress.entries,
            "done": jobs.c.done + progress.done,
            "unchanged": jobs.c.unchanged + progress.unchanged,
            "failed": jobs.c.failed + len(progress.failures),
            "lease_until": _Now() + lease_s,
            **({"attempts": 0} if progress.entries else {}),
        },
    )
    if progress.failures:
        connection.execute(insert(job_failures), [_failure_row(claim.job.id, one) for one in progress.failures])
    return _job(row)


def count(database: Database, claim: Claim, total: int) -> None:
    """Note how many entries the source has. Raises LeaseLost."""
    with database.write() as connection:
        _held(connection, claim, {"total": total})


def finish(database: Database, claim: Claim, state: State, error: str | None = None) -> None:
    """The job's end. Raises LeaseLost."""
    with database.write() as connection:
        if not _end(connection, claim.job.id, claim.fence, state, error):
            raise _lost(claim)


def release(database: Database, claim: Claim, *, failed: bool = False) -> None:
    """Give the job back to the queue: this process stops, or another job's turn has come. Raises LeaseLost.

    failed: it was an attempt that went wrong, and counts as one.
    """
    forgiven = {} if failed else {"attempts": 0}
    with database.write() as connection:
        _held(connection, claim, {"state": State.QUEUED, "lease_until": None, **forgiven})


def others_turn(database: Database, claim: Claim, position: int) -> bool:
    """Whether another free job goes before this one, at its position now."""
    before = or_(
        jobs.c.priority > claim.job.priority,
        and_(jobs.c.priority == claim.job.priority, jobs.c.position < position),
    )
    with database.read() as connection:
        return connection.execute(select(jobs.c.id).where(_free, before).limit(1)).first() is not None


def cancel(database: Database, job_id: str) -> Job:
    """Ask for a job's end: at once where nobody works on it, else within a chunk. A repeat changes nothing.

    Raises JobNotFound, JobFinished where it ended otherwise.
    """
    with database.write() as connection:
        row = connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).one_or_none()
        if row is None:
            raise _not_found(job_id)
        if row.state in (State.SUCCEEDED, State.FAILED):
            raise JobFinished(f"job {job_id} has {row.state} already")
        at_once = and_(_free, jobs.c.id == job_id)
        ended = connection.execute(update(jobs).where(at_once).values(_cancelled()))
        if not ended.rowcount:
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(cancel=True))
        return _job(_row(connection, job_id))


def end_cancelled(database: Database) -> int:
    """End the jobs that were to be cancelled within a chunk, and whose worker is gone -> how many."""
    asked = and_(_free, jobs.c.cancel)
    with database.read() as connection:
        if connection.execute(select(jobs.c.id).where(asked).limit(1)).first() is None:
            return 0
    with database.write() as connection:
        return connection.execute(update(jobs).where(asked).values(_cancelled())).rowcount


def _cancelled() -> dict[str, Any]:
    """Of a job that nobody works on: a worker that was taken for dead can change nothing any more."""
    return {
        "state": State.CANCELLED,
        "cancel": True,
        "lease_until": None,
        "finished_at": func.now(),
        "fence": jobs.c.fence + 1,
    }


def _held(connection: Connection, claim: Claim, values: Mapping[str, Any]) -> Row[Any]:
    """Change a job under its fence -> its row."""
    row = connection.execute(
        update(jobs).where(_is(claim.job.id, claim.fence)).values(values).returning(jobs)
    ).one_or_none()
    if row is None:
        raise _lost(claim)
    return row


def _end(connection: Connection, job_id: str, fence: int, state: State, error: str | None = None) -> bool:
    values = {
        "state": state,
        "error": error and _short(error),
        "lease_until": None,
        "finished_at": func.now(),
    }
    return bool(connection.execute(update(jobs).where(_is(job_id, fence)).values(values)).rowcount)


def _is(job_id: str, fence: int) -> ColumnElement[bool]:
    return and_(jobs.c.id == job_id, jobs.c.fence == fence, jobs.c.state == State.RUNNING)


def _failure_row(job_id: str, failure: Failure) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "position": failure.position,
        "name": _short(failure.name),
        "code": failure.code,
        "detail": _short(failure.detail),
    }


def _short(text: str) -> str:
    """What any database takes: no NUL, no lone surrogate, not too long."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()[:_LONGEST_TEXT]


def _row(connection: Connection, job_id: str) -> Row[Any]:
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
    if row is None:
        raise _not_found(job_id)
    return row


def _job(row: Row[Any]) -> Job:
    return Job(
        row.id,
        Kind(row.kind),
        row.gallery_id,
        row.gallery,
        row.source,
        State(row.state),
        row.priority,
        row.position,
        row.total,
        row.done,
        row.unchanged,
        row.failed,
        row.error,
        row.cancel,
        row.created_at,
        row.started_at,
        row.finished_at,
    )


def _not_found(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id}")


def _lost(claim: Claim) -> LeaseLost:
    return LeaseLost(f"job {claim.job.id} is another worker's, or was ended, since its lease ran out")
