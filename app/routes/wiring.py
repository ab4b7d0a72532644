"""What routes receive, and how items go out."""

import base64
import binascii
import re
from typing import Annotated, Any

from fastapi import Depends, Request

from app.forms import NAME_PATTERN, invalid
from app.problems import Problem
from app.service import Service

_NAME = re.compile(NAME_PATTERN)


async def _service(request: Request) -> Service:  # a plain function would cost each request a thread's turn
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's answers of a route that goes wrong."""
    return {status: {"model": Problem, "description": "problem+json"} for status in statuses}


def to_cursor(last: str) -> str:
    """The place behind the last one shown, opaque to callers and stable under inserts."""
    return base64.urlsafe_b64encode(last.encode()).decode().rstrip("=")


def from_cursor(cursor: str | None) -> str | None:
    """Raises RequestValidationError for one that did not come from here."""
    if cursor is None:
        return None
    try:
        last = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise invalid("cursor", "not a cursor of this list", "query") from error
    if to_cursor(last) != cursor or not _NAME.fullmatch(last):
        raise invalid("cursor", "not a cursor of this list", "query")
    return last
