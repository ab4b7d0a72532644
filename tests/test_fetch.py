"""roadmatch.jobs.fetch: pictures by URL, and the ways into a network that must stay shut.

Every connection that is made at all, to whatever address, arrives at one server on this machine, which counts.
"""

import gzip
import http.server
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import certifi
import pytest
import requests.adapters
import urllib3.util.connection

from roadmatch.jobs.entry import MOST_BYTES, EntryFailed
from roadmatch.jobs.fetch import fetcher

GOOD, OTHER = "pictures.example.com", "other.example.com"
HOSTS = frozenset({GOOD, OTHER})
PICTURE = b"picture" * 1000
PUBLIC = "93.184.216.34"

URLS = [
    *(
        "http://169.254.169.254/latest",
        "https://169.254.169.254/",
        "https://[fd00:ec2::254]/",
        "https://168.63.129.16/",
    ),
    *("http://metadata.google.internal/", "https://metadata.google.internal/", "file:///etc/passwd", "ftp://x/a"),
    *("gopher://127.0.0.1:70/1", "data:image/png;base64,AAAA", "jar:https://x!/a", f"//{GOOD}/a.jpg", "http:/x", ""),
    *(
        "https:/x",
        f"https:{GOOD}/a",
        f"https:///{GOOD}/a",
        "https://127.0.0.1/",
        "https://localhost/",
        "https://127.1/",
    ),
    *("https://2130706433/", "https://0x7f.1/", "https://0x7f000001/", "https://0177.0.0.1/", "https://0.0.0.0/"),
    *("https://[::]/", "https://[::1]/", "https://[::ffff:127.0.0.1]/", "https://[::127.0.0.1]/", "https://0/"),
    *("https://[64:ff9b::7f00:1]/", "https://[2002:7f00:1::]/", "https://[fe80::1%25lo]/", "https://10.0.0.1/"),
    *("https://192.168.1.1/", "https://100.64.0.1/", "https://127。0。0。1/", "https://①②⑦.0.0.1/", f"http://{GOOD}/a"),
    *(f"https://{GOOD}@127.0.0.1/", f"https://user:word@{GOOD}/a", f"https://127.0.0.1\\@{GOOD}/", "https://evil.com/"),
    *(f"https://{GOOD}\\@127.0.0.1/", f"https://127.0.0.1#@{GOOD}/", f"https://{GOOD}#@127.0.0.1/", f"https://{GOOD}."),
    *(
        f"https://{GOOD}:22/",
        f"https://{GOOD}:6379/",
        f"https://{GOOD}:5432/",
        f"https://{GOOD}:80/",
        f"https://{GOOD}:/",
    ),
    *(
        f"https://{GOOD}./a",
        f"https://{GOOD}\t/a",
        f"https://{GOOD}/a\r\nHost: x",
        f" https://{GOOD}/a",
        f"https://{GOOD}/\n",
    ),
    *(f"https://evil.{GOOD}/", f"https://{GOOD}.evil.com/", f"https://evil-{GOOD}/", f"https://{GOOD}%2f@evil.com/"),
    *(
        f"https://{GOOD}%00.evil.com/",
        f"https://{GOOD}\0/a",
        f"https://{GOOD} /a",
        f"https://{GOOD}:443:80/a",
        "\ud800",
    ),
]
ADDRESSES = [
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255"),
    *("192.168.0.1", "100.64.0.1", "100.127.255.255", "169.254.169.254", "168.63.129.16", "198.18.0.1", "198.19.9.9"),
    *("192.0.0.1", "192.0.2.1", "192.88.99.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1"),
    *("255.255.255.255", "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1"),
    *("2002:7f00:1::", "2001:0:7f00:1::", "fd00:ec2::254", "fc00::1", "fe80::1", "fec0::1", "ff02::1", "2001:db8::1"),
]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        cast(_Server, self.server).asked.append((self.path, dict(self.headers)))
        kind, _, rest = self.path[1:].partition("/")
        getattr(self, f"_{kind}")(rest)

    def _good(self, rest: str) -> None:
        self._send(PICTURE, rest or "image/jpeg")

    def _send(self, body: bytes, kind: str = "image/jpeg", **headers: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": kind, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _gone(self, rest: str) -> None:
        self.send_error(404)

    def _to(self, rest: str) -> None:
        self.send_response(302)
        self.send_header("Location", rest)
        self.send_header("Set-Cookie", "secret=1; Path=/")
        self.end_headers()

    def _hops(self, rest: str) -> None:
        self._to(f"/hops/{int(rest) - 1}" if int(rest) > 1 else "/good")

    def _gzip(self, rest: str) -> None:
        self._send(gzip.compress(bytes(1_000_000)), Content_Encoding="gzip")

    def _short(self, rest: str) -> None:
        self._send(PICTURE, Content_Length=str(len(PICTURE) + 5))
        self.close_connection = True

    def _endless(self, rest: str) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        while True:
            self.wfile.write(bytes(1_000_000))

    def _slow(self, rest: str) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        while True:
            self.wfile.write(b"x")
            time.sleep(0.02)

    def _slowhead(self, rest: str) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
        self._slow(rest)

    def log_message(self, *args: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.connections = 0
        self.asked: list[tuple[str, dict[str, str]]] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        self.connections += 1
        return super().get_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what is tested."""


@dataclass
class Network:
    """names: what the patched resolver answers; every connection goes to the server."""

    server: _Server
    names: dict[str, list[str]] = field(default_factory=dict)
    dialled: list[tuple[str, int]] = field(default_factory=list)

    def resolve(self, host: str, port: Any, *_args: Any, **_options: Any) -> list[Any]:
        addresses = self.names.get(host, ["127.0.0.1"])
        kinds = [socket.AF_INET6 if ":" in one else socket.AF_INET for one in addresses]
        return [(kind, socket.SOCK_STREAM, 6, "", (one, port)) for kind, one in zip(kinds, addresses, strict=True)]

    def dial(self, address: tuple[str, int], *_args: Any, **_options: Any) -> socket.socket:
        self.dialled.append(address)
        connection = socket.socket()
        connection.settimeout(5)
        connection.connect(self.server.server_address)
        return connection


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate of the two hosts, signed by nobody else."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    names = f"subjectAltName=DNS:{GOOD},DNS:{OTHER}"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    more = ["-keyout", str(path), "-out", str(path.with_suffix(".crt")), "-days", "2", "-subj", "/CN=test"]
    subprocess.run([*command, *more, "-addext", names], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + path.with_suffix(".crt").read_bytes())
    return path


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, certificate: Path) -> Iterator[Network]:
    """A server whose certificate is trusted; both hosts lie at a public address."""
    server = _Server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    network = Network(server, {GOOD: [PUBLIC], OTHER: [PUBLIC], "evil.com": [PUBLIC], PUBLIC: [PUBLIC]})
    monkeypatch.setattr(socket, "getaddrinfo", network.resolve)
    monkeypatch.setattr(urllib3.util.connection, "create_connection", network.dial)
    monkeypatch.setattr(requests.adapters, "DEFAULT_CA_BUNDLE_PATH", str(certificate.with_suffix(".crt")))
    yield network
    server.shutdown()
    thread.join()
    server.server_close()


def failure(url: str, deadline_s: float = 5.0) -> EntryFailed:
    """How the fetching of a URL fails."""
    with pytest.raises(EntryFailed) as failed:
        fetcher(HOSTS, deadline_s=deadline_s)(url)
    return failed.value


@pytest.mark.parametrize("url", [f"https://{GOOD}/good", "HTTPS://Pictures.Example.COM:443/good/text/html?a=%20&b=@x"])
def test_a_picture_comes_from_an_allowed_host_by_the_address_that_was_checked(network: Network, url: str) -> None:
    assert fetcher(HOSTS)(url) == PICTURE
    assert network.dialled == [(PUBLIC, 443)]
    assert network.server.connections == 1
    headers = network.server.asked[0][1]
    assert headers["Host"] == GOOD
    assert not {"Authorization", "Cookie"} & set(headers)


@pytest.mark.parametrize("url", URLS)
def test_a_url_that_is_not_plainly_of_an_allowed_host_is_refused_before_any_connection(
    network: Network, url: str
) -> None:
    assert failure(url).code == "url-not-fetched"
    assert network.server.connections == 0


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_allowed_host_with_an_inner_address_is_refused_before_any_connection(network: Network, address: str) -> None:
    network.names[GOOD] = [address]
    failure(f"https://{GOOD}/good")
    network.names[GOOD] = [PUBLIC, address]
    failure(f"https://{GOOD}/good")
    assert network.server.connections == 0


def test_a_name_that_changes_its_address_after_the_check_is_connected_to_the_checked_one(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([[PUBLIC], ["127.0.0.1"], ["127.0.0.1"]])

    def changing(host: str, port: Any, *args: Any, **options: Any) -> list[Any]:
        network.names[GOOD] = next(answers) if host == GOOD else network.names.get(GOOD, [])
        return network.resolve(host, port)

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    assert fetcher(HOSTS)(f"https://{GOOD}/good") == PICTURE
    assert network.dialled == [(PUBLIC, 443)]


@pytest.mark.parametrize(
    "target",
    [
        *("http://127.0.0.1/", "https://127.0.0.1/", "https://[::1]/", f"http://{GOOD}/good", "file:///etc/passwd"),
        *("//evil.com/good", "https://evil.com/good", f"https://{GOOD}:22/", f"https://x@{GOOD}/good", "gopher://x"),
    ],
)
def test_a_redirect_is_checked_as_the_first_url_is(network: Network, target: str) -> None:
    failure(f"https://{GOOD}/to/{target}")
    assert network.server.connections == 1


def test_a_redirect_to_a_host_that_moved_inside_is_refused(network: Network) -> None:
    network.names[OTHER] = ["10.0.0.1"]
    failure(f"https://{GOOD}/to/https://{OTHER}/good")
    assert network.server.connections == 1


def test_three_redirects_are_followed_without_cookies_and_a_fourth_is_not(network: Network) -> None:
    assert fetcher(HOSTS)(f"https://{GOOD}/to/https://{OTHER}/hops/2") == PICTURE
    assert [path for path, _ in network.server.asked] == [f"/to/https://{OTHER}/hops/2", "/hops/2", "/hops/1", "/good"]
    assert not any("Cookie" in headers for _, headers in network.server.asked)
    failure(f"https://{GOOD}/hops/4")
    assert len(network.server.asked) == 4 + 4


@pytest.mark.parametrize("path", ["gzip", "short", "endless", "gone", "to/"])
def test_an_answer_that_is_packed_cut_endless_or_none_is_refused(network: Network, path: str) -> None:
    failure(f"https://{GOOD}/{path}")


@pytest.mark.parametrize("path", ["slow", "slowhead"])
def test_an_answer_that_drips_is_given_up_at_the_deadline_and_its_thread_ends(network: Network, path: str) -> None:
    start = time.monotonic()
    failure(f"https://{GOOD}/{path}", deadline_s=0.5)
    assert time.monotonic() - start < 2
    _wait_for_no_fetches()


def test_a_name_whose_lookup_hangs_is_given_up_at_the_deadline(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()

    def hanging(*args: Any, **options: Any) -> list[Any]:
        hang.wait(10)
        return network.resolve(GOOD, 443)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    start = time.monotonic()
    failure(f"https://{GOOD}/slow", deadline_s=0.3)
    assert time.monotonic() - start < 2
    hang.set()
    _wait_for_no_fetches()


def test_proxies_and_passwords_of_the_environment_are_not_used(
    network: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text(f"machine {GOOD} login user password word")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetcher(HOSTS)(f"https://{GOOD}/good") == PICTURE
    assert network.dialled == [(PUBLIC, 443)]
    assert "Authorization" not in network.server.asked[0][1]


def test_a_certificate_that_nobody_vouches_for_is_refused(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests.adapters, "DEFAULT_CA_BUNDLE_PATH", certifi.where())
    failure(f"https://{GOOD}/good")
    assert network.server.asked == []


def test_all_failures_read_alike(network: Network) -> None:
    urls = [f"https://{GOOD}/gone", "https://127.0.0.1:22/", "https://127.0.0.1/", "file:///etc/passwd"]
    assert len({failure(url).detail for url in urls}) == 1


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "Example.com", "https://example.com", "*.example.com", "a b.c"]
)
def test_a_host_of_the_list_is_a_name(host: str) -> None:
    with pytest.raises(ValueError, match="small letters"):
        fetcher(frozenset({host}))


def test_the_limit_is_that_of_pictures(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (MOST_BYTES, MOST_BYTES + 1):
        monkeypatch.setattr(_Handler, "_good", lambda self, rest, size=size: self._send(bytes(size)))
        if size == MOST_BYTES:
            assert len(fetcher(HOSTS)(f"https://{GOOD}/good")) == MOST_BYTES
        else:
            failure(f"https://{GOOD}/good")


def _wait_for_no_fetches() -> None:
    for thread in threading.enumerate():
        if thread.name == "fetch":
            thread.join(5)
            assert not thread.is_alive()
