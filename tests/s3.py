"""A real S3 server for tests, from a wheel: moto's, in a process of its own that can be frozen."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from obstore.store import S3Store

_RUNNING = "Running on "


class S3Server:
    """An S3 server on a free port of 127.0.0.1."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        line = next(line for line in self._process.stderr if _RUNNING in line)
        self.url = line.split(_RUNNING)[1].strip()
        self._log = subprocess.Popen(["cat"], stdin=self._process.stderr, stdout=subprocess.DEVNULL)  # or it stops
        self._process.stderr.close()

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which it is reached."""
        return {
            "AWS_ACCESS_KEY_ID": "the-key-id",
            "AWS_SECRET_ACCESS_KEY": "the-secret-key",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
        }

    def bucket(self) -> str:
        """The name of a new bucket."""
        name = f"bucket-{secrets.token_hex(8)}"
        httpx.put(f"{self.url}/{name}").raise_for_status()
        return name

    def store(self, bucket: str) -> "S3Store":
        """A look into a bucket beside the code under test; the variables are set."""
        from obstore.store import S3Store

        return S3Store(bucket)

    def unfinished(self, bucket: str) -> int:
        """How many uploads in parts the bucket has begun and not ended."""
        return httpx.get(f"{self.url}/{bucket}?uploads").raise_for_status().text.count("<UploadId>")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It takes connections in the block, and does not answer."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def strict(self) -> Iterator[None]:
        """It checks credentials in the block, and knows none."""
        httpx.post(f"{self.url}/moto-api/reset-auth", content=b"0").raise_for_status()
        try:
            yield
        finally:
            httpx.post(f"{self.url}/moto-api/reset-auth", content=b"inf").raise_for_status()

    def close(self) -> None:
        """End it; may be done again."""
        self._process.kill()
        self._process.wait()
        self._log.wait()


@cache
def _server() -> S3Server:
    return S3Server()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for the session, whichever modules import this fixture."""
    server = _server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, and this process's variables lead to it and to nothing else."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server
