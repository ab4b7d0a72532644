"""Jobs: list them, look at them, follow and cancel them."""

import re
from datetime import datetime
from functools import partial
from typing import Annotated, Self

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse

from app.forms import NAME_PATTERN, invalid
from app.job_events import EventStream
from app.routes.galleries import Cursor, Limit
from app.routes.wiring import ServiceDep, failures, from_cursor, to_cursor
from roadmatch.jobs import queue
from roadmatch.jobs.queue import Job, Kind, State

router = APIRouter(tags=["Jobs"])

JobId = Annotated[str, Path(pattern=NAME_PATTERN, description="a job's id")]


class JobView(BaseModel):
    """A job as it is now: position = done + unchanged + failed."""

    id: str
    kind: Kind
    gallery: str
    source: Annotated[str, Field(description="zip, tar, csv, jsonl, folder or ids")]
    state: State
    priority: int
    position: Annotated[int, Field(description="entries that are finished, one way or another")]
    total: Annotated[int | None, Field(description="entries in all; null until they are counted, for a tar to the end")]
    done: Annotated[int, Field(description="items that were added, replaced or deleted")]
    unchanged: Annotated[int, Field(description="items that were already as they shall be")]
    failed: Annotated[int, Field(description="entries that did not go in: /failures lists them")]
    error: Annotated[str | None, Field(description="why the whole job failed")]
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    @classmethod
    def of(cls, job: Job) -> Self:
        """The job as it goes out."""
        names = cls.model_fields.keys() - {"source", "cancel_requested"}
        same = {name: getattr(job, name) for name in names}
        return cls(**same, source=job.source["kind"], cancel_requested=job.cancel)


class JobList(BaseModel):
    """A page of jobs, the newest first; next_cursor is null on the last."""

    jobs: list[JobView]
    next_cursor: str | None


class FailureView(BaseModel):
    """An entry that did not go in: its place in the source from 0, its name there, and why."""

    position: int
    name: str
    code: str
    detail: str


class FailureList(BaseModel):
    """A page of failed entries in the order of the source; next_cursor is null on the last."""

    failures: list[FailureView]
    next_cursor: str | None


@router.get("/v1/jobs", response_model=JobList, responses=failures(422, 503))
def list_jobs(
    service: ServiceDep,
    gallery: Annotated[str | None, Query(pattern=NAME_PATTERN)] = None,
    state: State | None = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> JobList:
    """Jobs, the newest first; those of deleted galleries, too."""
    page = queue.list_(service.database, gallery=gallery, state=state, after=from_cursor(cursor), limit=limit + 1)
    return JobList(
        jobs=[JobView.of(job) for job in page[:limit]],
        next_cursor=to_cursor(page[limit - 1].id) if len(page) > limit else None,
    )


@router.get("/v1/jobs/{job}", response_model=JobView, responses=failures(404, 422, 503))
def get_job(job: JobId, service: ServiceDep) -> JobView:
    """How far a job is."""
    return JobView.of(queue.get(service.database, job))


@router.get("/v1/jobs/{job}/failures", response_model=FailureList, responses=failures(404, 422, 503))
def list_failures(job: JobId, service: ServiceDep, cursor: Cursor = None, limit: Limit = 100) -> FailureList:
    """The entries that did not go in, with reasons."""
    page = queue.failures(service.database, job, after=_position(cursor), limit=limit + 1)
    return FailureList(
        failures=[FailureView.model_validate(one, from_attributes=True) for one in page[:limit]],
        next_cursor=to_cursor(str(page[limit - 1].position)) if len(page) > limit else None,
    )


@router.post("/v1/jobs/{job}/cancel", response_model=JobView, responses=failures(404, 409, 422, 503))
async def cancel_job(job: JobId, service: ServiceDep) -> JobView:
    """End a job: at once where no worker has it, else within a chunk; what it has done stays. May be repeated."""
    return JobView.of(await service.on_a_writer(partial(queue.cancel, service.database, job)))


@router.get(
    "/v1/jobs/{job}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}, **failures(404, 422, 503)},
)
async def follow_job(job: JobId, service: ServiceDep) -> Response:
    """Server-sent events until the job ends: `progress` when it got on, twice a second at most, and `end` at last."""
    return EventStream(service, await service.on_a_watcher(partial(queue.get, service.database, job)))


def _position(cursor: str | None) -> int:
    last = from_cursor(cursor)
    if last is None:
        return -1
    if not re.fullmatch(r"[0-9]{1,18}", last):
        raise invalid("cursor", "not a cursor of this list", "query")
    return int(last)
