"""The client's side of HTTP: one method a route, and every failure an error of one line."""

import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import httpx

from roadmatch.errors import RoadmatchError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What names of galleries and ids of items look like."""
Answer = dict[str, Any]
"""The service's JSON as it came."""

_TRIES = 5
_PATIENCE_S = 20.0
_PAUSE_S = 1.0
_BUSY = 503
_OF_THE_PICTURE = ("unsupported-image", "unreadable-image", "image-too-large", "content-too-large")


class ClientError(RoadmatchError):
    """The service cannot be asked, or what answers is not the service."""


class RefusalError(ClientError):
    """The service says why it does not do it: status and code as in its problem."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code

    @property
    def is_about_the_picture(self) -> bool:
        """Whether another picture would have been taken."""
        return self.code in _OF_THE_PICTURE


class Client:
    """A running service. Methods raise ClientError; RefusalError where the service itself refuses.

    After 503 the request is sent again when Retry-After says, four times and for 20 s at most: all can be repeated.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 120.0,
        patience_s: float = _PATIENCE_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url
        self._patience_s = patience_s
        self._sleep = sleep
        # trust_env: a proxy for the web must not get in between, and only app/settings.py reads the environment
        self._http = httpx.Client(base_url=url, timeout=httpx.Timeout(timeout_s, connect=5.0), trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def gallery(self, name: str) -> Answer | None:
        """The gallery; None where there is none of this name."""
        try:
            return self._send("GET", f"/v1/galleries/{name}")
        except RefusalError as error:
            if error.code == "gallery-not-found":
                return None
            raise

    def galleries(self) -> Answer:
        """All galleries, however many pages they take."""
        return {"galleries": list(self._all("/v1/galleries", "galleries")), "next_cursor": None}

    def create_gallery(self, name: str) -> Answer | None:
        """The new gallery; None where somebody else made it just now."""
        try:
            return self._send("POST", "/v1/galleries", json={"name": name})
        except RefusalError as error:
            if error.code == "gallery-exists":
                return None
            raise

    def put_item(
        self,
        gallery: str,
        item: str,
        pictures: Sequence[bytes],
        *,
        label: str | None = None,
        metadata: str | None = None,
    ) -> Answer:
        """Add or replace an item; metadata is JSON text."""
        images = [("image", ("image", picture)) for picture in pictures]
        return self._send(
            "PUT", f"/v1/galleries/{gallery}/items/{item}", files=images, data=_given(label=label, metadata=metadata)
        )

    def search(
        self,
        gallery: str,
        picture: bytes,
        *,
        rule: str | None = None,
        threshold: float | None = None,
        top_k: int | None = None,
    ) -> Answer:
        """Is the picture in the gallery?"""
        return self._send(
            "POST",
            f"/v1/galleries/{gallery}/search",
            files={"image": ("image", picture)},
            data=_given(rule=rule, threshold=threshold, top_k=top_k),
        )

    def compare(
        self,
        query: bytes,
        picture: bytes,
        *,
        gallery: str | None = None,
        bundle: str | None = None,
        rule: str | None = None,
        threshold: float | None = None,
    ) -> Answer:
        """Do two pictures show the same thing?"""
        return self._send(
            "POST",
            "/v1/compare",
            files={"query": ("query", query), "picture": ("picture", picture)},
            data=_given(gallery=gallery, bundle=bundle, rule=rule, threshold=threshold),
        )

    def import_(
        self,
        gallery: str,
        content: Callable[[], Iterator[bytes]],
        media_type: str,
        *,
        size: int | None = None,
        labels: str | None = None,
    ) -> Answer:
        """Send an archive or a manifest -> the job. content: its bytes, asked for anew where the request is repeated.

        size: how many bytes, where that is known. A repeat makes no second job.
        """
        headers = {"Content-Type": media_type, "Idempotency-Key": secrets.token_hex(16)}
        if size is not None:
            headers["Content-Length"] = str(size)
        path = f"/v1/galleries/{gallery}/imports"
        return self._send("POST", path, content=content, headers=headers, params=_given(labels=labels))

    def job(self, job: str) -> Answer:
        """How far a job is."""
        return self._send("GET", f"/v1/jobs/{job}")

    def jobs(self, gallery: str | None = None) -> Answer:
        """All jobs, the newest first."""
        return {"jobs": list(self._all("/v1/jobs", "jobs", **_given(gallery=gallery))), "next_cursor": None}

    def failures(self, job: str) -> Iterator[Answer]:
        """The entries of a job that did not go in; pages are asked for as they are needed."""
        return self._all(f"/v1/jobs/{job}/failures", "failures")

    def cancel_job(self, job: str) -> Answer:
        """Ask for a job's end."""
        return self._send("POST", f"/v1/jobs/{job}/cancel")

    def takes(self, picture: bytes) -> bool:
        """Whether the service reads this picture: it is compared with itself."""
        try:
            self.compare(picture, picture)
        except RefusalError as error:
            if error.is_about_the_picture:
                return False
            raise
        return True

    def _all(self, path: str, name: str, **query: str) -> Iterator[Answer]:
        """What a list holds under a name, however many pages it takes."""
        cursor: str | None = None
        while True:
            page = self._send("GET", path, params={"limit": "1000", **query, **_given(cursor=cursor)})
            try:
                yield from page[name]
                cursor = page["next_cursor"]
            except (KeyError, TypeError) as error:
                raise self._stranger() from error
            if cursor is None:
                return

    def _send(self, method: str, path: str, **parts: Any) -> Answer:
        end = time.monotonic() + self._patience_s
        for tries in range(1, _TRIES + 1):
            response = self._ask(method, path, **parts)
            pause = _PAUSE_S if response is None else _retry_after_s(response)
            answered = response is not None and response.status_code != _BUSY
            if answered or tries == _TRIES or time.monotonic() + pause > end:
                break
            self._sleep(pause)
        if response is None:
            raise ClientError(f"{self.url} broke the connection off {_times(tries)}: try again")
        return self._read(response, tries)

    def _ask(self, method: str, path: str, **parts: Any) -> httpx.Response | None:
        """None where the connection broke off, as it may when the service is busy and refuses a body unread."""
        if "content" in parts:
            parts["content"] = parts["content"]()
        try:
            return self._http.request(method, path, **parts)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ClientError(
                f"no service answers at {self.url} ({error}): start one with `roadmatch serve`, "
                "or say where it runs with --url or ROADMATCH_URL"
            ) from error
        except httpx.TimeoutException as error:
            raise ClientError(f"the service at {self.url} did not answer in time: try again") from error
        except (httpx.ReadError, httpx.WriteError):
            return None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ClientError(
                f"{self.url} hung up or is not Roadmatch ({error}): try again, or say with --url where the service runs"
            ) from error

    def _read(self, response: httpx.Response, tries: int) -> Answer:
        try:
            answer = response.json()
        except ValueError as error:
            raise self._stranger(response.status_code) from error
        if response.is_success and isinstance(answer, dict):
            return answer
        if not isinstance(answer, dict) or not {"code", "detail"} <= answer.keys():
            raise self._stranger(response.status_code)
        asked = f" (asked {_times(tries)})" if tries > 1 else ""
        raise RefusalError(response.status_code, str(answer["code"]), f"{answer['detail']}{asked}")

    def _stranger(self, status: int | None = None) -> ClientError:
        said = "" if status is None else f" (status {status})"
        return ClientError(f"what answers at {self.url} is not Roadmatch{said}: say with --url where the service runs")


def _given(**fields: str | float | None) -> dict[str, str]:
    """The form's fields that were given."""
    return {name: str(value) for name, value in fields.items() if value is not None}


def _times(tries: int) -> str:
    return "once" if tries == 1 else f"{tries} times"


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds; the header's other form, a date, is never sent by the service."""
    header = response.headers.get("Retry-After", "")
    return float(header) if header.isascii() and header.isdigit() else _PAUSE_S
