"""Pictures by URL from hosts that an operator allows, without a way into the server's own network.

The host is checked against the list, its addresses against the ranges of microsoft-antissrf, which then connects to the
address that was checked; each redirect is checked as the first URL is. Whatever goes wrong is told with the same words,
so that nobody learns from them what the server can reach.
"""

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urljoin

import requests
import urllib3
from AntiSSRF import AntiSSRFError, AntiSSRFPolicy, PolicyConfigOptions
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPSConnection
from urllib3.connectionpool import HTTPSConnectionPool

from roadmatch.jobs.entry import MOST_BYTES, EntryFailed
from roadmatch.jobs.hosts import checked

DEADLINE_S = 10.0
"""For all of a picture: names, connection, redirects and bytes."""
MOST_REDIRECTS = 3
_CHUNK = 65_536
_URL = re.compile(r"(?i:https)://([A-Za-z0-9.-]+)(?::443)?(?:[/?](?:(?![\\#])[!-~])*)?")
_HEADERS = {"User-Agent": "Roadmatch", "Accept": "image/*", "Accept-Encoding": "identity"}
_ERRORS = (requests.RequestException, urllib3.exceptions.HTTPError, AntiSSRFError, OSError, ValueError)


class _RefusedError(Exception):
    """A URL or an answer that is not taken."""


def fetcher(hosts: frozenset[str], *, deadline_s: float = DEADLINE_S) -> Callable[[str], bytes]:
    """A function URL -> bytes, at most MOST_BYTES, which raises EntryFailed; safe to call from several threads.

    hosts: names as example.com, each for itself and not for those below it. Raises ValueError for what is no such name.
    """
    checked(hosts)

    def fetch(url: str) -> bytes:
        download = _Download(hosts, url)
        download.start()
        download.join(deadline_s)
        data = download.data  # before the sockets are shut, which may look like the end of an answer
        download.abort()
        if data is None:
            raise EntryFailed(
                "url-not-fetched",
                f"the URL gave no picture: it must be https on an allowed host, answer within {deadline_s:g} s, "
                f"and hold at most {MOST_BYTES / 1e6:g} MB",
            )
        return data

    return fetch


class _Download(threading.Thread):
    """One URL's fetching: on a thread, since the lookup of a name cannot be given up otherwise.

    data: the bytes, None until they are there as a whole. Aborting closes the connections, which ends the thread.
    """

    def __init__(self, hosts: frozenset[str], url: str) -> None:
        super().__init__(name="fetch", daemon=True)
        self.data: bytes | None = None
        self._hosts, self._url = hosts, url
        self._sockets: list[socket.socket] = []
        self._aborted = False

    def run(self) -> None:
        """Fetch; what goes wrong leaves no data."""
        try:
            with _session(self._connected) as session:
                self.data = self._fetched(session)
        except (_RefusedError, *_ERRORS):
            return

    def abort(self) -> None:
        """End what is still going on."""
        self._aborted = True
        for opened in self._sockets:
            _shut(opened)

    def _connected(self, opened: socket.socket) -> None:
        self._sockets.append(opened)
        if self._aborted:  # which may have been before there was a socket
            _shut(opened)

    def _fetched(self, session: requests.Session) -> bytes:
        url = self._url
        for _ in range(1 + MOST_REDIRECTS):
            _check_url(url, self._hosts)
            if self._aborted:
                raise _RefusedError
            with session.get(url, headers=_HEADERS, stream=True, allow_redirects=False, timeout=DEADLINE_S) as answer:
                if answer.status_code == 200:
                    return _body(answer)
                session.cookies.clear()
                url = urljoin(url, answer.headers["Location"]) if answer.is_redirect else ""
        raise _RefusedError


def _check_url(url: str, hosts: frozenset[str]) -> None:
    """Raises _RefusedError for all but https, an allowed host and its usual port, in the one spelling that no two
    programs read differently."""
    found = _URL.fullmatch(url)
    if found is None or found[1].lower() not in hosts:
        raise _RefusedError


def _body(answer: requests.Response) -> bytes:
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise _RefusedError
    data = bytearray()
    while chunk := answer.raw.read(_CHUNK, decode_content=False):
        data += chunk
        if len(data) > MOST_BYTES:
            raise _RefusedError
    return bytes(data)


def _session(connected: Callable[[socket.socket], None]) -> requests.Session:
    """A session without the environment's proxies and passwords; connected is told of each socket."""
    session: requests.Session = AntiSSRFPolicy(PolicyConfigOptions.EXTERNAL_ONLY_LATEST).get_antissrf_session()
    session.trust_env = False

    class Connection(HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            connected(self.sock)  # of its own, since the connection forgets it once an answer has begun

    class Pool(HTTPSConnectionPool):
        ConnectionCls = Connection

    adapter = session.get_adapter("https://")
    assert isinstance(adapter, HTTPAdapter)
    adapter.poolmanager.pool_classes_by_scheme = {"https": Pool}
    return session


def _shut(opened: socket.socket) -> None:
    """Let a thread that waits for this socket go on, to an error."""
    with suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)
