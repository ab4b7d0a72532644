"""What happens to a request before and after the routes: admission, deadline, id, and problems for the framework's own."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import problems
from app.metrics import Metrics

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_WITH_BODY = ("POST", "PUT", "PATCH")
log = logging.getLogger("roadmatch.requests")


class Gate:
    """Outermost ASGI layer. A request with a body is admitted or refused before its body is read."""

    def __init__(self, app: ASGIApp, *, places: int, receive_s: float, metrics: Metrics) -> None:
        self._app = app
        self._places = places
        self._receive_s = receive_s
        self._metrics = metrics
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = _Reply(scope, send)
        if scope["method"] not in _WITH_BODY:
            await self._run(scope, receive, reply)
        elif self._inside >= self._places:
            self._metrics.refused.inc()
            await reply.problem(503, "the service is busy: send the request again after the time in Retry-After")
        else:
            self._inside += 1
            self._metrics.inside.set(self._inside)
            try:
                await self._run(scope, _deadline(receive, self._receive_s, reply), reply)
            finally:
                self._inside -= 1
                self._metrics.inside.set(self._inside)

    async def _run(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        started = time.perf_counter()
        try:
            await self._app(scope, receive, reply.send)
        except Exception:
            log.exception("request %s failed", reply.request_id)
            await reply.problem(500, "the service failed; its log has the details under the request's id")
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.served(scope["method"], route, reply.status, time.perf_counter() - started)


def _deadline(receive: Receive, seconds: float, reply: "_Reply") -> Receive:
    """The whole body must arrive in so many seconds; waiting for the client to leave has no limit."""
    end = asyncio.get_running_loop().time() + seconds
    whole = False

    async def receive_in_time() -> Message:
        nonlocal whole
        if whole:
            return await receive()
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            reply.late = True
            raise
        whole = not message.get("more_body", False)
        return message

    return receive_in_time


class _Reply:
    """Sends the answer with the request's id and safe headers; plain-text errors of the framework become problems."""

    def __init__(self, scope: Scope, send: Send) -> None:
        asked = dict(scope["headers"]).get(b"x-request-id", b"")
        self.request_id = asked.decode() if _REQUEST_ID.fullmatch(asked) else secrets.token_hex(8)
        self.status = 0
        self.late = False
        self._send = send
        self._swallow: Callable[[Message], bool] = lambda _: False

    async def send(self, message: Message) -> None:
        """Pass a message of the answer on."""
        if message["type"] == "http.response.start":
            if self.late:
                self._swallow = lambda _: True
                late = problems.of_status(408, "the request's body did not arrive in time: send it faster")
                await self._send_problem(late, {})
                return
            if message["status"] >= 400 and _media_type(message) in (b"text/plain", b""):
                self._swallow = lambda _: True
                await self._send_problem(problems.of_status(message["status"]), dict(message["headers"]))
                return
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self._own_headers()]
        if not self._swallow(message):
            await self._send(message)

    async def problem(self, status: int, detail: str) -> None:
        """Answer with a problem, unless an answer has begun."""
        if not self.status:
            await self._send_problem(problems.of_status(status, detail), {})

    async def _send_problem(self, problem: problems.Problem, kept: dict[bytes, bytes]) -> None:
        self.status = problem.status
        answer = problems.response(problem)
        kept = {name: value for name, value in kept.items() if name in (b"allow", b"connection")}
        if problem.status in (
            HTTPStatus.SERVICE_UNAVAILABLE,
            HTTPStatus.REQUEST_TIMEOUT,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        ):
            kept[b"connection"] = b"close"  # the rest of the body will not be read
        headers = [*answer.raw_headers, *kept.items(), *self._own_headers()]
        await self._send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": answer.body})

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"x-request-id", self.request_id.encode()), (b"x-content-type-options", b"nosniff")]


def _media_type(message: Message) -> bytes:
    headers = dict(message["headers"])
    return bytes(headers.get(b"content-type", b"").split(b";")[0])
