"""The API's document: FastAPI's own, with errors as they are sent and with examples."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from app import examples
from app.problems import MEDIA_TYPE
from app.service import Service

_PROBLEM = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
_ALWAYS = {422: "the request is not valid", 500: "the service failed"}
_WITH_BODY = {
    400: "the body cannot be read",
    408: "the body did not arrive in time",
    413: "the body or a picture is too large",
    415: "not a format that is read",
    503: "the service or its database is busy: come again after Retry-After",
}


def operation_id(route: APIRoute) -> str:
    """The name of the route's function, which is what generated clients call."""
    return route.name


def document(app: FastAPI, service: Service) -> dict[str, Any]:
    """The OpenAPI document of the application's routes."""
    whole = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for operations in whole["paths"].values():
        for operation in operations.values():
            _state_problems(operation)
    schemas = whole["components"]["schemas"]
    for name, example in examples.requests().items():
        schemas[name]["examples"] = [example]
    for model, answer in examples.answers(service).items():
        schemas[model.__name__]["examples"] = [answer.model_dump(mode="json")]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return whole


def _state_problems(operation: dict[str, Any]) -> None:
    """The errors that a route names and those that every route has, all of one form."""
    general = _ALWAYS | (_WITH_BODY if "requestBody" in operation else {})
    named = {int(status): answer["description"] for status, answer in operation["responses"].items()}
    for status in sorted({status for status in named if status >= 400} | general.keys()):
        operation["responses"][str(status)] = {"description": general.get(status) or named[status], **_PROBLEM}
