import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import serving, tail
from benchmarks.load import Connection, search_request
from roadmatch.calibration.searches import Scored
from tests.bundles import tiny_bundle

ROOT = Path(__file__).parents[1]


def printed_by(*arguments: str) -> dict[str, Any]:
    """What a benchmark prints on stdout, all of which must be one JSON object."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    for bar in figures["bars"]:
        assert set(bar) == {"name", "value", "bar", "holds"}
        assert isinstance(bar["holds"], bool)
        assert bar["value"] >= 0
    return figures


@pytest.mark.faults
def test_the_benchmark_of_serving_prints_its_five_bars_and_nothing_else(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "tiny")
    figures = printed_by("benchmarks.serving", "--quick", "--bundle", str(bundle.folder))
    assert [bar["bar"] for bar in figures["bars"]] == ["<= 1.2", ">= 0.88", ">= 4", "<= 5", "<= 0.75"]
    service, embedding, many = figures["service"], figures["embedding"], figures["many_vectors"]
    for bar, value in zip(
        figures["bars"],
        (service["p50_ratio"], service["throughput_ratio"], embedding["ratio"], service["start_s"], many["ratio"]),
        strict=True,
    ):
        sign, limit = bar["bar"].split()
        assert bar["value"] == pytest.approx(value, abs=1e-3)
        assert bar["holds"] == (value <= float(limit) if sign == "<=" else value >= float(limit))
    assert len(service["rounds"]) == serving.QUICK.rounds


def test_the_benchmark_of_the_tail_prints_its_bars_and_nothing_else() -> None:
    figures = printed_by("benchmarks.tail", "--draws", "2")
    assert len(figures["bars"]) == 4
    for bar in figures["bars"]:
        assert bar["holds"] == (0.4 <= bar["value"] <= 1.6)
    assert set(figures["predicted_to_observed"]["score"]["120"]) == {"power", "exponential"}


def test_the_two_ways_of_a_pair_of_pictures_count_as_one_pair() -> None:
    scores = [[0.9, 0.1, 0.4], [0.3, 0.8, 0.2], [0.5, 0.6, 0.7]]
    pictures = np.arange(3)
    pairs = tail.Pairs.of(Scored(np.array(scores), 1.0, pictures, pictures))
    assert pairs.highest.tolist() == [0.6, 0.5, 0.3]  # of the pictures 1 and 2, 0 and 2, 0 and 1
    assert pairs.rate(0.4) == 0.5


class Speaker:
    """Says the same to every request, in small pieces, and keeps what it heard."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.heard = b""
        self._thread = threading.Thread(target=self._speak)
        self._thread.start()

    def _speak(self) -> None:
        with self._listener, self._listener.accept()[0] as caller:
            while heard := caller.recv(65_536):
                self.heard += heard
                for start in range(0, len(self._answer), 7):
                    caller.sendall(self._answer[start : start + 7])

    def end(self) -> None:
        self._thread.join(10)


def test_the_client_reads_an_answer_in_pieces_and_refuses_any_but_200() -> None:
    for status, body in ((b"200 OK", b'{"decision": "match"}'), (b"503 Service Unavailable", b"{}")):
        speaker = Speaker(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        connection = Connection("127.0.0.1", speaker.port)
        try:
            if status.startswith(b"200"):
                assert connection.ask(search_request("birds", b"picture")) == body
            else:
                with pytest.raises(RuntimeError, match="503"):
                    connection.ask(search_request("birds", b"picture"))
        finally:
            connection.close()
            speaker.end()
        assert speaker.heard.startswith(b"POST /v1/galleries/birds/search HTTP/1.1\r\n")
        assert b"\r\n\r\npicture\r\n--" in speaker.heard


@pytest.mark.faults
def test_the_benchmark_of_the_losses_prints_its_bars_and_nothing_else() -> None:
    figures = printed_by("benchmarks.losses", "--quick")
    assert len(figures["bars"]) == 18
    exact = [bar for bar in figures["bars"] if "exact" in bar["name"] or "published arithmetic: error" in bar["name"]]
    assert len(exact) == 9
    assert all(bar["holds"] for bar in exact)


@pytest.mark.faults
def test_the_benchmark_for_gpus_runs_without_one_where_it_is_asked_to() -> None:
    figures = printed_by("benchmarks.gpu", "--device", "cpu", "--quick")
    assert [bar["holds"] for bar in figures["bars"]] == [True, True]
    assert {step["images"] for step in figures["steps"]} == {128, 256}
