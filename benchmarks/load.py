"""A client that costs the measured cores as little as it can: prepared bytes over plain sockets, one thread."""

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_BOUNDARY = "roadmatch-benchmark"
_TIMEOUT_S = 30.0
_CHUNK = 65_536


@dataclass
class Connection:
    """One kept-alive HTTP/1.1 connection."""

    host: str
    port: int
    _socket: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self._socket = socket.create_connection((self.host, self.port), _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, request: bytes) -> None:
        """Send a whole request."""
        self._socket.sendall(request)

    def receive(self) -> bytes:
        """The body of the next answer. Raises RuntimeError unless it is 200."""
        received = b""
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._more()
        head, body = received[:end].lower(), received[end + 4 :]
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += self._more()
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"the service answered {head.splitlines()[0]!r}: {body[:400]!r}")
        return body

    def ask(self, request: bytes) -> bytes:
        """Send a request and wait for its answer."""
        self.send(request)
        return self.receive()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _more(self) -> bytes:
        chunk = self._socket.recv(_CHUNK)
        if not chunk:
            raise RuntimeError("the service hung up")
        return chunk


def search_request(gallery: str, picture: bytes) -> bytes:
    """A search with this picture, as it goes over the wire."""
    body = b"".join(
        (
            f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="query"\r\n'.encode(),
            b"Content-Type: application/octet-stream\r\n\r\n",
            picture,
            f"\r\n--{_BOUNDARY}--\r\n".encode(),
        )
    )
    head = (
        f"POST /v1/galleries/{gallery}/search HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get_request(path: str) -> bytes:
    """A GET, as it goes over the wire."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def latencies_s(connection: Connection, requests: Sequence[bytes]) -> list[float]:
    """Ask one after the other -> seconds of each."""
    taken = []
    for request in requests:
        started = time.perf_counter()
        connection.ask(request)
        taken.append(time.perf_counter() - started)
    return taken


def answers_per_s(host: str, port: int, requests: Sequence[bytes], clients: int) -> float:
    """Throughput of `clients` that each ask again as soon as they have their answer, until all requests are asked."""
    left = iter(requests)
    connections = [Connection(host, port) for _ in range(clients)]
    waiting = selectors.DefaultSelector()
    started = time.perf_counter()
    for connection, request in zip(connections, left, strict=False):
        connection.send(request)
        waiting.register(connection, selectors.EVENT_READ)
    while waiting.get_map():
        ready = waiting.select(_TIMEOUT_S)
        if not ready:
            raise RuntimeError(f"the service gave no answer for {_TIMEOUT_S:g} s")
        for key, _ in ready:
            connection = key.fileobj  # type: ignore[assignment]
            connection.receive()
            request = next(left, b"")
            if request:
                connection.send(request)
            else:
                waiting.unregister(connection)
    taken = time.perf_counter() - started
    waiting.close()
    for connection in connections:
        connection.close()
    return len(requests) / taken
