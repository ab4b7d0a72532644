"""A followed job as server-sent events."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Annotated

import anyio
from fastapi.sse import format_sse_event
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app import problems
from app.service import Service
from roadmatch.errors import StoreUnavailable
from roadmatch.jobs import queue
from roadmatch.jobs.queue import ENDED, Job, State

MOST_STREAMS = 32
"""Jobs that are followed at a time; each asks the database twice a second."""
_POLL_S, _HEARTBEAT_S = 0.5, 15.0
_RATE_OVER_S = 10.0


class JobProgress(BaseModel):
    """What an event of a followed job says."""

    state: State
    position: int
    total: int | None
    done: int
    unchanged: int
    failed: int
    rate: Annotated[float | None, Field(description="entries a second over the last ten; null until it is known")]
    seconds_left: Annotated[float | None, Field(description="at that rate; null where the rate or the end is unknown")]


class EventStream(StreamingResponse):
    """A job's events, if there is a place for one more who follows."""

    def __init__(self, service: Service, job: Job) -> None:
        super().__init__(
            events(service, job),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The place is free again however it ends."""
        if self._service.watched >= MOST_STREAMS:
            full = problems.of_status(503, "too many jobs are followed: ask for the job itself, or come again")
            await problems.response(full)(scope, receive, send)
            return
        self._service.watched += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.watched -= 1


async def events(
    service: Service, job: Job, *, poll_s: float = _POLL_S, heartbeat_s: float = _HEARTBEAT_S
) -> AsyncIterator[bytes]:
    """Server-sent events from a job's state now to its end, or until the service stops."""
    pace, shown, said = _Speed(), None, anyio.current_time()
    while True:
        now = anyio.current_time()
        pace.note(now, job.position)
        if job != shown:
            yield _event(job, pace.rate)
            shown, said = job, now
        elif now - said >= heartbeat_s:
            yield format_sse_event(comment="still there")
            said = now
        if job.state in ENDED or service.stopping:
            return
        await anyio.sleep(poll_s)
        with suppress(StoreUnavailable):
            job = await service.on_a_watcher(partial(queue.get, service.database, job.id))


def _event(job: Job, rate: float | None) -> bytes:
    progress = JobProgress(
        state=job.state,
        position=job.position,
        total=job.total,
        done=job.done,
        unchanged=job.unchanged,
        failed=job.failed,
        rate=None if rate is None else round(rate, 2),
        seconds_left=round((job.total - job.position) / rate, 1) if rate and job.total is not None else None,
    )
    return format_sse_event(data_str=progress.model_dump_json(), event="end" if job.state in ENDED else "progress")


class _Speed:
    """Entries a second over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, at_s: float, position: int) -> None:
        """The position at a time."""
        self._seen.append((at_s, position))
        while len(self._seen) > 2 and self._seen[1][0] <= at_s - _RATE_OVER_S:
            self._seen.popleft()

    @property
    def rate(self) -> float | None:
        """None before there are two times."""
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - began) if now > began else None
