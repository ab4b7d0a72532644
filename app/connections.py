"""A client's connection: a request's head must arrive in time, and what is no HTTP is answered with a problem."""

import asyncio
import secrets
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app import problems

_LONGEST_HEAD = 65_536
_ONE_READ = 262_144
_TOO_LONG = "the request's head is longer than 64 KiB"


class Connection(HttpToolsProtocol):
    """uvicorn's own, which waits for the head of a request without end."""

    def __init__(self, *given: Any, head_s: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_s = head_s
        self._head_due: asyncio.TimerHandle | None = None
        self._head_bytes = self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects has to send something."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client, or this side, has closed it."""
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A head that goes on and on is given up; the parser alone would keep all of it."""
        super().data_received(data)
        if self._head_due is not None and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > _LONGEST_HEAD + _ONE_READ:
                self.send_400_response(_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the head; the trailers behind a chunked body are no headers and are dropped."""
        if self._head_due is None:
            return
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > _LONGEST_HEAD:
            raise ValueError(_TOO_LONG)  # the parser gives up, and the client is told so

    def on_message_begin(self) -> None:
        """The first byte of a request, the connection's first or a later one."""
        super().on_message_begin()
        self._head_bytes = self._header_bytes = 0
        self._expect_head()

    def on_headers_complete(self) -> None:
        """From here on the gate looks after the request."""
        self._head_came()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close."""
        answer = problems.response(problems.of_status(400, msg))
        headers = [*answer.raw_headers, (b"x-request-id", secrets.token_hex(8).encode()), (b"connection", b"close")]
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(answer.body))
        self.transport.close()

    def _expect_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(self._head_s, self.transport.close)

    def _head_came(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


def connections(head_s: float) -> Any:
    """What uvicorn makes its connections with. head_s: time for a request's head to arrive, seconds."""
    return partial(Connection, head_s=head_s)
