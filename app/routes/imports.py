"""What puts jobs into the queue: archives, manifests, folders of the server, and lists of items to be deleted."""

import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app import problems
from app.forms import Form, GalleryName, IdempotencyKey, Name, invalid
from app.routes.jobs import JobView
from app.routes.wiring import ServiceDep, failures
from app.service import Service
from roadmatch.errors import IdempotencyMismatch
from roadmatch.gallery import galleries
from roadmatch.gallery.galleries import Gallery
from roadmatch.jobs import queue
from roadmatch.jobs.queue import Kind

router = APIRouter(tags=["Jobs"])

MEDIA_TYPES = {
    "application/zip": "zip",
    "application/x-tar": "tar",
    "application/gzip": "tar",
    "text/csv": "csv",
    "application/jsonl": "jsonl",
    "application/x-ndjson": "jsonl",
    "application/json": "folder",
}
"""What the body of an import is, by its Content-Type."""
_ADDRESS = re.compile(r"/v1/galleries/[^/]+/imports")
_JSON_BYTES = 65_536
_MOST_IDS = 100_000
_IDS_BYTES = 16_000_000
_IDS_IN_ROW = 1_000
"""More ids than these are kept as an upload, one a line: a job's row is read at each of its steps."""

Priority = Annotated[int, Query(ge=-100, le=100, description="jobs of a higher one go first")]
Labels = Annotated[
    Literal["folder", "none"],
    Query(description="folder: a picture's label is the name of the folder that it lies in; not for manifests"),
]


class FolderImport(Form):
    """A folder of the server that is to be imported."""

    folder: Annotated[str, Field(min_length=1, max_length=4096, description="below one of ROADMATCH_IMPORT_FOLDERS")]
    labels: Annotated[Literal["folder"] | None, Field(description="as the parameter of the address")] = None


class ItemIds(Form):
    """Items that are to be deleted."""

    ids: Annotated[list[Name], Field(min_length=1, max_length=_MOST_IDS)]


_BINARY = {"schema": {"type": "string", "format": "binary"}, "example": "(the file's bytes)"}
_IMPORT_BODY = {
    "required": True,
    "description": "An archive of pictures, a manifest (columns id, path or url, label, metadata), or a folder's name.",
    "content": {
        **{media_type: _BINARY for media_type, kind in MEDIA_TYPES.items() if kind != "folder"},
        "application/json": {
            "schema": FolderImport.model_json_schema(),
            "example": {"folder": "/srv/pictures/shoes", "labels": "folder"},
        },
    },
}


def is_upload(method: str, path: str) -> bool:
    """Whether a request brings an archive, which takes its time."""
    return method == "POST" and _ADDRESS.fullmatch(path) is not None


def archives(most_bytes: int) -> APIRouter:
    """The route that takes archives, of so many bytes at most."""
    own = APIRouter(tags=["Jobs"])
    own.add_api_route(
        "/v1/galleries/{gallery}/imports",
        create_import,
        methods=["POST"],
        status_code=202,
        response_model=JobView,
        responses=failures(404, 413, 415, 422, 503, 507),
        max_body_size=most_bytes,
        openapi_extra={"requestBody": _IMPORT_BODY},
    )
    return own


async def create_import(
    gallery: GalleryName,
    request: Request,
    response: Response,
    service: ServiceDep,
    labels: Labels = "none",
    priority: Priority = 0,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Import pictures from the body: it is kept, and a worker goes through it. A repeat with its key adds no job."""
    kind = _kind_of(request, labels)
    found = await service.on_a_core(partial(galleries.get, service.database, gallery))
    source: dict[str, Any] = {"kind": kind, "labels": "folder" if labels == "folder" else None}
    if kind == "folder":
        asked = await _folder(request)
        source["folder"] = await service.on_a_core(partial(_allowed, service, asked.folder))
        source["labels"] = asked.labels or source["labels"]
        digest = sha256(source["folder"].encode()).hexdigest()
    else:
        upload = await service.uploads.write(_arriving(request), expected=_announced(request))
        source["upload"], digest = upload.key, upload.sha256
        if not upload.size:
            await _delete(service, upload.key)
            raise invalid("", "the body is empty: send an archive or a manifest")
    asked_for = [found.id, Kind.IMPORT, kind, source["labels"], priority, digest]
    return await _submit(service, response, Kind.IMPORT, found, source, asked_for, priority, idempotency_key)


@router.delete(
    "/v1/galleries/{gallery}/items",
    max_body_size=_IDS_BYTES,
    status_code=202,
    response_model=JobView,
    responses=failures(404, 413, 422, 503, 507),
)
async def delete_items(
    gallery: GalleryName,
    items: ItemIds,
    response: Response,
    service: ServiceDep,
    priority: Priority = 0,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Delete many items; one that is not there counts as unchanged. A repeat with its key adds no job."""
    found = await service.on_a_core(partial(galleries.get, service.database, gallery))
    lines = "".join(f"{item}\n" for item in items.ids).encode()
    source: dict[str, Any] = {"kind": "ids", "ids": items.ids}
    if len(items.ids) > _IDS_IN_ROW:
        upload = await service.uploads.write(_once(lines))
        source = {"kind": "ids", "upload": upload.key}
    asked = [found.id, Kind.DELETE, priority, sha256(lines).hexdigest()]
    return await _submit(
        service, response, Kind.DELETE, found, source, asked, priority, idempotency_key, total=len(items.ids)
    )


def _kind_of(request: Request, labels: str) -> str:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    kind = MEDIA_TYPES.get(media_type)
    if kind is None:
        raise HTTPException(415, f"the Content-Type of an import is one of {', '.join(MEDIA_TYPES)}")
    if kind in ("csv", "jsonl") and labels == "folder":
        raise invalid("labels", "a manifest names its labels itself: leave it out", "query")
    return kind


async def _folder(request: Request) -> FolderImport:
    body = bytearray()
    async for chunk in _arriving(request):
        body += chunk
        if len(body) > _JSON_BYTES:
            raise HTTPException(413)
    try:
        return FolderImport.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from error


def _allowed(service: Service, asked: str) -> str:
    """The folder, if it lies in one that may be imported; what lies elsewhere is not even looked at."""
    allowed = service.settings.import_folders
    path = os.path.normpath(asked)
    if "\0" not in asked and any(_lies_in(path, str(folder)) for folder in allowed):
        real = os.path.realpath(path)
        if any(_lies_in(real, os.path.realpath(folder)) for folder in allowed):
            if os.path.isdir(real):  # noqa: PTH112
                return real
            raise invalid("folder", "is not there or is no folder")
    raise invalid("folder", "is not in a folder that may be imported: ROADMATCH_IMPORT_FOLDERS names those")


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _announced(request: Request) -> int:
    """Bytes of the body as its head says, and at most as many as are taken: more are refused in the framework's way."""
    length = request.headers.get("content-length", "")
    return int(length) if re.fullmatch(r"[0-9]{1,15}", length) else 0


async def _arriving(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes. Raises HTTPException where the client leaves or is too slow."""
    try:
        async for chunk in request.stream():
            yield chunk
    except (ClientDisconnect, TimeoutError):
        pass
    else:
        return
    raise HTTPException(408, "the request's body did not arrive as a whole")  # out here: its context is not to blame


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _submit(
    service: Service,
    response: Response,
    kind: Kind,
    gallery: Gallery,
    source: Mapping[str, Any],
    asked: list[Any],
    priority: int,
    key: str | None,
    total: int | None = None,
) -> JobView:
    """The job's row, committed. Where that fails for now the upload stays: the row may be there nevertheless."""
    request = sha256(json.dumps(asked).encode()).hexdigest() if key else None
    submit = partial(
        queue.submit,
        service.database,
        kind,
        gallery.id,
        gallery.name,
        source,
        priority=priority,
        total=total,
        key=key,
        request=request,
    )
    upload = source.get("upload")
    try:
        job = await service.on_a_writer(submit)
    except IdempotencyMismatch:
        if upload:
            await _delete(service, upload)
        raise
    if upload and job.source.get("upload") != upload:
        await _delete(service, upload)
    service.wake()
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    response.headers["Retry-After"] = str(problems.RETRY_AFTER_S)
    return JobView.of(job)


async def _delete(service: Service, upload: str) -> None:
    await service.on_a_writer(partial(service.uploads.delete, upload))
