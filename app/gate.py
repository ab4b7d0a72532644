"""What happens to a request around the routes: admission, deadline, id, and problems for the framework's own errors."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf

from python_multipart.multipart import parse_options_header
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import problems
from app.metrics import Metrics

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_WITH_BODY = ("POST", "PUT", "PATCH")
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii")
"""The framework would decode by any that Python has, and some take seconds for a field."""
_GRACE_S, _LEAST_RATE = 5.0, 16_000
"""After so many seconds a body must have come with so many bytes a second: who drips holds a place for nothing."""
_LEAST_UPLOAD_RATE = 64_000
"""Bytes a second of an archive, which has no other end: 2 GB have nine hours at most."""
_LINGER_S = 1.0
"""So long what a refused client still sends is read: closed at once, it would see a broken connection and no answer."""
_SAFE = ((b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"DENY"))
_PROCESS, _NUMBERS = secrets.token_hex(4), count(1)
"""Of request ids: random bytes for each would be a system call, for which the loop waits while others compute."""
log = logging.getLogger("roadmatch.requests")


@dataclass(frozen=True)
class _Pace:
    """How a body must arrive, in seconds: whole, at the least rate after the grace, and never silent for longer."""

    whole_s: float
    grace_s: float
    rate: float
    silent_s: float


@dataclass(eq=False)
class _Lane:
    """Requests of a kind: how many may be inside at a time, and are, and how their bodies must arrive."""

    places: int
    pace: _Pace
    inside: int = 0


class Gate:
    """Outermost ASGI layer. A request with a body is admitted or refused before its body is read.

    hosts: the names by which the service may be asked; none: any. is_upload: whether a request's method and path are
    those of an archive, which takes its time and one of upload_places instead of one of the others.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        places: int,
        receive_s: float,
        metrics: Metrics,
        hosts: frozenset[str] = frozenset(),
        is_upload: Callable[[str, str], bool],
        upload_places: int,
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._is_upload = is_upload
        self._requests = _Lane(places, _Pace(receive_s, _GRACE_S, _LEAST_RATE, inf))
        self._uploads = _Lane(upload_places, _Pace(inf, receive_s, _LEAST_UPLOAD_RATE, receive_s))
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        lane = self._uploads if self._is_upload(scope["method"], scope["path"]) else self._requests
        body = _Body(receive, lane.pace) if _has_body(scope["method"], headers) else None
        reply = _Reply(headers, send, body)
        if (stranger := _stranger(headers, self._hosts)) is not None:
            await reply.problem(403, stranger)
        elif body is None:
            await self._run(scope, receive, reply)
        elif (refusal := _unreadable(scope)) is not None:
            await reply.problem(415, refusal)
        elif lane.inside >= lane.places:
            self._metrics.refused.inc()
            await reply.problem(503, "the service is busy: send the request again after the time in Retry-After")
        else:
            lane.inside += 1
            self._metrics.inside.inc()
            try:
                await self._run(scope, body.receive, reply)
            finally:
                lane.inside -= 1
                self._metrics.inside.dec()

    async def _run(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        started = time.perf_counter()
        try:
            await self._app(scope, receive, reply.send)
        except Exception:
            log.exception("request %s failed", reply.request_id)
            await reply.problem(500, "the service failed; its log has the details under the request's id")
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.served(scope["method"], route, reply.status, time.perf_counter() - started)


def _has_body(method: str, headers: dict[bytes, bytes]) -> bool:
    """A deletion has one where it says so; the other methods that may have one are taken to."""
    announced = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    return method in _WITH_BODY or (method == "DELETE" and announced)


def _stranger(headers: dict[bytes, bytes], hosts: frozenset[str]) -> str | None:
    """Why a request is refused that a browser may have sent on behalf of another site, if it is.

    A page can post forms to services on its reader's machine (its Origin tells), and can make its own name stand for
    that machine (then the Host is not one of ours). hosts: names of ours; none: any.
    """
    host, origin = headers.get(b"host", b"").decode("latin-1").lower(), headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
        return "the request comes from the page of another site: send it from a program"
    if hosts and re.sub(r":\d*$", "", host).strip("[]") not in hosts:
        return f"the service does not go by the name {host!r}: add it to ROADMATCH_HOSTS"
    return None


def _unreadable(scope: Scope) -> str | None:
    """Why a body is refused by what its headers say of it, if it is."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"identity", b""):
            return "a Content-Encoding is not read: send the body as it is"
        if name == b"content-type":
            _, options = parse_options_header(value)
            if options.get(b"charset", b"utf-8").lower() not in _CHARSETS:
                return "the only charset that is read is utf-8"
    return None


class _Body:
    """A request's body, which must arrive at some pace; waiting for the client to leave has no limit."""

    def __init__(self, receive: Receive, pace: _Pace) -> None:
        self.whole = False
        self.late = False
        self._receive = receive
        self._pace = pace
        now = asyncio.get_running_loop().time()
        self._slowest = now + pace.grace_s
        self._end = now + pace.whole_s

    async def receive(self) -> Message:
        """The next part; raises TimeoutError."""
        if self.whole:
            return await self._receive()
        try:
            silent = asyncio.get_running_loop().time() + self._pace.silent_s
            async with asyncio.timeout_at(min(self._end, self._slowest, silent)):
                message = await self._receive()
        except TimeoutError:
            self.late = True
            raise
        self.whole = not message.get("more_body", False)
        self._slowest += len(message.get("body", b"")) / self._pace.rate
        return message

    async def discard(self) -> None:
        """Read what is still coming, for a moment."""
        self._end = self._slowest = asyncio.get_running_loop().time() + _LINGER_S
        with suppress(TimeoutError):
            while not self.whole:
                await self.receive()


class _Reply:
    """Sends the answer with the request's id and safe headers; plain-text errors of the framework become problems."""

    def __init__(self, headers: dict[bytes, bytes], send: Send, body: _Body | None) -> None:
        asked = headers.get(b"x-request-id", b"")
        self.request_id = asked.decode() if _REQUEST_ID.fullmatch(asked) else f"{_PROCESS}{next(_NUMBERS):08x}"
        self.status = 0
        self._body = body
        self._send = send
        self._answered = False

    async def send(self, message: Message) -> None:
        """Pass a message of the answer on."""
        if self._answered:
            return  # the rest of an answer that was replaced
        if message["type"] != "http.response.start":
            await self._send_body(message)
        elif self._body is not None and self._body.late:
            await self.problem(408, "the request's body did not arrive in time: send it faster")
        elif message["status"] >= 400 and _media_type(message) in (b"text/plain", b""):
            await self._send_problem(problems.of_status(message["status"]), dict(message["headers"]))
        else:
            await self._start(message["status"], message["headers"])

    async def problem(self, status: int, detail: str) -> None:
        """Answer with a problem, unless an answer has begun."""
        if not self.status:
            await self._send_problem(problems.of_status(status, detail), {})

    async def _send_problem(self, problem: problems.Problem, kept: dict[bytes, bytes]) -> None:
        answer = problems.response(problem)
        kept = {name: value for name, value in kept.items() if name == b"allow"}
        await self._start(problem.status, [*answer.raw_headers, *kept.items()])
        await self._send_body({"type": "http.response.body", "body": answer.body})
        self._answered = True

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        own = [(b"x-request-id", self.request_id.encode()), *_SAFE]
        if self._body is not None and not self._body.whole:
            own.append((b"connection", b"close"))  # what comes next on it may be the rest of this body
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def _send_body(self, message: Message) -> None:
        if self._body is None or self._body.whole or message.get("more_body", False):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        await self._body.discard()
        await self._send({"type": "http.response.body", "body": b""})


def _media_type(message: Message) -> bytes:
    headers = dict(message["headers"])
    return bytes(headers.get(b"content-type", b"").split(b";")[0])
