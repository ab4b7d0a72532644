"""A TCP proxy that fails on demand, as networks and servers do."""

import socket
import struct
import threading
from contextlib import suppress
from enum import Enum

_RESETS = struct.pack("ii", 1, 0)


class Fault(Enum):
    """CLOSED: nobody listens. RESET: every connection is reset. SILENT: it is taken, and nothing ever comes back."""

    CLOSED = "closed"
    RESET = "reset"
    SILENT = "silent"


class Proxy:
    """Passes bytes on to a port of this machine, until it is told to fail; `close` it."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._fault: Fault | None = None
        self._passing = threading.Event()
        self._passing.set()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.port = 0
        self._listen()

    def fail(self, fault: Fault) -> None:
        """From now on, for old connections and new ones."""
        self._fault = fault
        if fault is Fault.CLOSED:
            self._deafen()
        if fault is Fault.SILENT:
            self._passing.clear()
        else:
            self._reset_all()

    def heal(self) -> None:
        """Pass bytes on again; what was kept silent is reset."""
        silent, deaf = self._fault is Fault.SILENT, self._fault is Fault.CLOSED
        self._fault = None
        if silent:
            self._reset_all()
        self._passing.set()
        if deaf:
            self._listen()

    def close(self) -> None:
        """End it, threads and all."""
        if self._fault is not Fault.CLOSED:
            self._deafen()
        self._reset_all()
        self._passing.set()
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._run(self._accept, self._listener)

    def _deafen(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends accept, which close alone does not
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self._keep(client)
            if self._fault is Fault.RESET:
                _reset(client)
            elif self._fault is None:
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target), 5)
        except OSError:
            _reset(client)
            return
        server.settimeout(None)
        self._keep(server)
        self._run(self._pass_on, client, server)
        self._run(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self._passing.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _keep(self, one: socket.socket) -> None:
        with self._lock:
            self._sockets.append(one)

    def _reset_all(self) -> None:
        with self._lock:
            for one in self._sockets:
                _reset(one)
            self._sockets.clear()

    def _run(self, target: object, *given: socket.socket) -> None:
        thread = threading.Thread(target=target, args=given, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


def _reset(one: socket.socket) -> None:
    """Close it with a RST; a thread that reads from it finds its end."""
    with suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
        one.shutdown(socket.SHUT_RD)
    one.close()
