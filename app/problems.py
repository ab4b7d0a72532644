"""Every error as problem+json (RFC 9457), and the one table from errors to statuses."""

import errno
import logging
from collections.abc import Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from roadmatch import errors

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
_PHRASES = {413: "Content Too Large", 422: "Unprocessable Content"}
_LONGEST_DETAIL = 500
_LONGEST_PLACE = 80
_DETAILS = {
    404: "there is nothing at this address",
    405: "this address does not take the method",
    413: "the request's body is too large: send fewer or smaller pictures at a time",
}

log = logging.getLogger("roadmatch.requests")
STATUSES: dict[type[errors.RoadmatchError], int] = {
    errors.UnsupportedImage: 415,
    errors.UnreadableImage: 422,
    errors.ImageTooLarge: 413,
    errors.RuleError: 422,
    errors.NotFound: 404,
    errors.VersionMismatch: 412,
    errors.IdempotencyMismatch: 422,
    errors.Conflict: 409,
    errors.StorageFull: 507,
    errors.StoreUnavailable: 503,
    errors.StoreError: 503,
    errors.RoadmatchError: 500,
}
"""An error has the status of the first of its classes that stands here."""


class Problem(BaseModel):
    """What went wrong: `code` is stable, `detail` is for people."""

    type: str
    title: str
    status: int
    code: str
    detail: str


def problem(status: int, code: str, detail: str) -> Problem:
    """A problem with its type and title."""
    title = _phrase(status)
    line = _one_line(detail)
    return Problem(type=f"urn:roadmatch:problem:{code}", title=title, status=status, code=code, detail=line)


def _one_line(text: str) -> str:
    """Without line breaks, control characters and lone surrogates, which a request may have brought."""
    printable = "".join(sign if sign.isprintable() else " " for sign in text)
    return " ".join(printable.split())[:_LONGEST_DETAIL]


def of_error(error: errors.RoadmatchError) -> Problem:
    """The problem of an expected failure; its code is the class's name, as in gallery-not-found."""
    status = next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return problem(status, errors.code_of(error), str(error))


def response(problem: Problem) -> Response:
    """The answer; 503 and 507 say when to come again."""
    again = {"Retry-After": str(RETRY_AFTER_S)} if problem.status in (503, 507) else {}
    return Response(problem.model_dump_json(), problem.status, again, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every exception with a problem."""
    app.add_exception_handler(errors.RoadmatchError, _expected)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_framework)
    app.add_exception_handler(Exception, _unexpected)


def _phrase(status: int) -> str:
    """The same under every Python: 3.13 has new names for two of them."""
    return _PHRASES.get(status) or HTTPStatus(status).phrase


def of_status(status: int, detail: str | None = None) -> Problem:
    """The problem of a bare HTTP status."""
    phrase = _phrase(status)
    if detail in (None, phrase):
        detail = _DETAILS.get(status, phrase)
    return problem(status, phrase.lower().replace(" ", "-"), detail or phrase)


def of_validation(found: Sequence[dict[str, object]]) -> Problem:
    """The problem of pydantic's findings: the first one, named by its place."""
    first = found[0]
    where = first["loc"] if isinstance(first["loc"], tuple) else ()
    place = ".".join(str(part) for part in where[1:])  # behind the part of the request that it is in
    message = str(first["msg"]).removeprefix("Value error, ")
    if message.startswith("Expected UploadFile"):  # the framework's own words name a class of Python
        message = "send it as a file, with a filename"
    return problem(422, "invalid-request", f"{place[:_LONGEST_PLACE]}: {message}" if place else message)


async def _expected(_: Request, error: Exception) -> Response:
    assert isinstance(error, errors.RoadmatchError)
    return response(of_error(error))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return response(of_validation(error.errors()))


async def _of_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    broken = error.__cause__ or error.__context__
    if isinstance(broken, OSError):  # a large upload is spooled to the disk, and the framework blames the client
        log.warning("a request's body could not be spooled: %s", broken)
        full = broken.errno in (errno.ENOSPC, errno.EDQUOT)
        return response(of_status(507 if full else 503, "the upload could not be spooled: make room in TMPDIR"))
    answer = response(of_status(error.status_code, str(error.detail)))
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        answer.headers["Allow"] = ", ".join(_methods(request))
    return answer


def _methods(request: Request) -> list[str]:
    """What the address takes; the framework names the methods of its first route only."""
    return [
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]


async def _unexpected(_: Request, __: Exception) -> Response:
    return response(
        problem(500, "internal-error", "the service failed; its log has the details under the request's id")
    )
