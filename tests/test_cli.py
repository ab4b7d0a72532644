import contextlib
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from argparse import ArgumentTypeError
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest

from app import cli, commands
from app.client import NAME, Client, ClientError, RefusalError
from app.forms import NAME_PATTERN
from app.settings import ClientSettings, Settings, SettingsError
from app.terminal import aligned, printable
from app.verdict import Verdict, search_lines
from roadmatch.bundle import Bundle
from tests.bundles import DEFAULT_RULE, edited, picture, tiny_bundle
from tests.service import Served, running

ROADMATCH = [sys.executable, "-m", "app.cli"]
NOWHERE = "http://127.0.0.1:9"  # the port of the discard service, where nothing listens


class Scripted:
    """An HTTP server that gives the same answers in turn, the last one for ever, and counts what it is asked."""

    def __init__(self, *answers: tuple[int, dict[str, str], bytes]) -> None:
        self.asked = 0
        script = list(answers)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked += 1
                status, headers, body = script[min(server.asked, len(script)) - 1]
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def problem(status: int, code: str, detail: str) -> bytes:
    """A problem as the service words it."""
    return json.dumps(
        {"type": f"urn:roadmatch:problem:{code}", "title": "x", "status": status, "code": code, "detail": detail}
    ).encode()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny bundle."""
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, bundle: Bundle) -> Iterator[Served]:
    """One service for all tests of this file; each makes its own galleries."""
    with running(tmp_path_factory.mktemp("service") / "data", bundle.folder) as served:
        yield served


@pytest.fixture
def roadmatch(service: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> "Command":
    """Runs a client command here against the service."""
    monkeypatch.setenv("ROADMATCH_URL", service.url)
    return Command(capsys)


class Command:
    """A command line run in this process -> exit status, stdout, stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in arguments])
        printed = self._capsys.readouterr()
        return status, printed.out, printed.err

    def fails(self, *arguments: object, status: int = 1) -> str:
        """The complaint, which is one line with nothing on stdout."""
        code, out, err = self(*arguments)
        assert (code, out) == (status, "")
        assert re.fullmatch(r"roadmatch: [^\n]+\n", err), err
        return err


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Three different pictures and a fourth that is none."""
    files = [tmp_path / "Été 1.png", tmp_path / "two.png", tmp_path / "three.png", tmp_path / "broken.jpg"]
    for number, file in enumerate(files[:3]):
        file.write_bytes(picture(number))
    files[3].write_bytes(b"no picture")
    return files


def test_add_makes_the_gallery_says_so_and_names_items_by_their_files(roadmatch: Command, pictures: list[Path]) -> None:
    status, out, err = roadmatch("add", *pictures[:2], "--gallery", "added", "--label", "x", "--metadata", '{"a": 1}')
    assert status == 0
    assert out.splitlines() == [
        f"created Ete-1 from {pictures[0]}",
        f"created two from {pictures[1]}",
        "gallery added: 2 created",
    ]
    assert re.fullmatch(r"roadmatch: gallery added was not there and is made: rule \S+, bundle tiny@\w{12}\n", err)
    assert roadmatch("add", pictures[1], "--gallery", "added")[1:] == (f"replaced two from {pictures[1]}\n", "")


def test_add_prints_the_services_json_one_line_an_item(roadmatch: Command, pictures: list[Path]) -> None:
    status, out, _ = roadmatch(
        "add", *pictures[:2], "--gallery", "json", "--json", "--label", "é", "--metadata", '{"a": 1}'
    )
    written = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [(one["outcome"], one["item"]["id"]) for one in written] == [("created", "Ete-1"), ("created", "two")]
    assert [(one["item"]["label"], one["item"]["metadata"]) for one in written] == [("é", {"a": 1})] * 2


def test_one_id_for_several_files_is_one_item(roadmatch: Command, pictures: list[Path]) -> None:
    _, out, _ = roadmatch("add", *pictures[:3], "--gallery", "one", "--id", "thing", "--json")
    (written,) = map(json.loads, out.splitlines())
    assert (written["item"]["id"], len(written["item"]["images"])) == ("thing", 3)


def test_a_file_that_is_no_picture_is_named_and_the_others_are_added(roadmatch: Command, pictures: list[Path]) -> None:
    status, out, err = roadmatch("add", pictures[3], *pictures[:2], "--gallery", "some")
    assert status == 1
    assert out.splitlines()[-1] == "gallery some: 1 refused, 2 created"
    assert err.splitlines()[-1].startswith(f"roadmatch: {pictures[3]}: not one of the picture formats")


def test_the_bad_one_of_an_items_files_is_named(roadmatch: Command, pictures: list[Path]) -> None:
    roadmatch("add", pictures[0], "--gallery", "mixed")
    said = roadmatch.fails("add", *pictures[1:], "--gallery", "mixed", "--id", "all")
    assert said.startswith(f"roadmatch: {pictures[3]}: not one of")


def test_a_name_that_is_not_there_stops_add_before_a_gallery_is_made(roadmatch: Command, pictures: list[Path]) -> None:
    missing = pictures[0].with_name("nothing.png")
    assert f"{missing} is not there" in roadmatch.fails("add", pictures[0], missing, "--gallery", "never")
    assert "is a folder" in roadmatch.fails("add", pictures[0], missing.parent, "--gallery", "never")
    assert "there is no gallery never" in roadmatch.fails("search", pictures[0], "--gallery", "never")


def test_two_files_of_one_name_are_named_as_a_wrong_command_line(roadmatch: Command, pictures: list[Path]) -> None:
    other = pictures[0].parent / "deeper" / "two.jpg"
    other.parent.mkdir()
    other.write_bytes(picture(3))
    said = roadmatch.fails("add", pictures[1], other, "--gallery", "twice", status=2)
    assert f"{pictures[1]} and {other} would both be item two" in said


def test_search_says_match_first_and_no_match_is_no_failure(roadmatch: Command, pictures: list[Path]) -> None:
    roadmatch("add", *pictures[:3], "--gallery", "found")
    query = pictures[0].with_name("query.jpg")
    query.write_bytes(edited(picture(1)))
    status, out, err = roadmatch("search", query, "--gallery", "found")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0].startswith("match two  (gallery found, 3 items)")
    assert re.fullmatch(r"score 0\.\d{6}  threshold 0\.\d{6}  margin \+0\.\d{6}  rule (\S+)", lines[1])
    assert "pictures not used for fitting" in lines[2]
    head, best, *misses = lines[3:]
    assert best.startswith("match      two")
    assert len({head.index("item"), best.index("two"), misses[0].index(misses[0].split()[2])}) == 1
    query.write_bytes(picture(50))
    status, out, _ = roadmatch("search", query, "--gallery", "found", "--top-k", 1)
    assert (status, out.split()[0]) == (0, "no_match")
    assert [line.split()[:2] for line in out.splitlines()[-1:]] == [["near", "miss"]]


def test_search_passes_rule_threshold_and_top_k_on(roadmatch: Command, pictures: list[Path]) -> None:
    roadmatch("add", *pictures[:3], "--gallery", "passed")

    def answer(*options: object) -> dict[str, object]:
        status, out, err = roadmatch("search", pictures[0], "--gallery", "passed", "--json", *options)
        assert (status, err, out.count("\n")) == (0, "", 1)
        parsed: dict[str, object] = json.loads(out)
        return parsed

    assert answer()["operating_point"] == DEFAULT_RULE
    assert answer("--rule", "max_f1")["operating_point"] == "max_f1"
    assert answer("--threshold", "-0.5")["threshold"] == -0.5
    matches = answer("--threshold", "-0.5", "--top-k", 2)["matches"]
    assert isinstance(matches, list)
    assert len(matches) == 2
    _, out, _ = roadmatch("search", pictures[0], "--gallery", "passed", "--threshold", "-0.5", "--top-k", 2)
    assert "your own threshold: no rate is stated" in out
    assert out.splitlines()[-1] == "more items match: --top-k shows them"


def test_a_gallery_that_its_own_images_contradict_is_warned_of(roadmatch: Command, pictures: list[Path]) -> None:
    roadmatch("add", pictures[0], "--gallery", "doubted")
    answer = json.loads(roadmatch("search", pictures[0], "--gallery", "doubted", "--json")[1])
    assert "warning: " not in "".join(search_lines(Verdict.of(answer)))
    doubted = search_lines(Verdict.of({**answer, "calibration": "does_not_fit"}))
    assert doubted[3].startswith("warning: calibration does_not_fit: ")


def test_compare_decides_by_bundle_gallery_or_threshold(
    roadmatch: Command, bundle: Bundle, pictures: list[Path]
) -> None:
    same = pictures[0].with_name("same.jpg")
    same.write_bytes(edited(picture(0)))
    assert roadmatch("compare", same, pictures[0])[1].startswith("match  (similarity ")
    assert roadmatch("compare", pictures[1], pictures[0], "--rule", "max_f1")[1].startswith("no_match  (similarity ")
    roadmatch("add", pictures[0], "--gallery", "compared")
    answers = [
        json.loads(roadmatch("compare", same, pictures[0], "--json", *place)[1])
        for place in (["--gallery", "compared"], ["--bundle", bundle.id], ["--threshold", "0.99"])
    ]
    assert [one["gallery"] for one in answers] == ["compared", None, None]
    assert [one["decision"] for one in answers] == ["match", "match", "no_match"]
    assert roadmatch.fails("compare", pictures[0], pictures[3]).startswith(f"roadmatch: {pictures[3]}: not one of")
    assert roadmatch.fails("compare", pictures[3], pictures[0]).startswith(f"roadmatch: {pictures[3]}: not one of")


def test_galleries_are_listed_as_a_table_or_as_one_document(
    roadmatch: Command, bundle: Bundle, pictures: list[Path]
) -> None:
    roadmatch("add", *pictures[:2], "--gallery", "listed")
    _, out, _ = roadmatch("galleries")
    row = next(line.split() for line in out.splitlines() if line.startswith("listed "))
    assert row[1:4] == ["2", "2", DEFAULT_RULE]
    assert row[-1] == bundle.id
    (document,) = map(json.loads, roadmatch("galleries", "--json")[1].splitlines())
    assert document["next_cursor"] is None
    assert "listed" in [gallery["name"] for gallery in document["galleries"]]


def test_pages_of_galleries_become_one_list() -> None:
    pages = [{"galleries": [{"name": "a"}], "next_cursor": "more"}, {"galleries": [{"name": "b"}], "next_cursor": None}]
    with (
        Scripted(*((200, {}, json.dumps(page).encode()) for page in pages)) as server,
        Client(server.url) as client,
    ):
        assert client.galleries() == {"galleries": [{"name": "a"}, {"name": "b"}], "next_cursor": None}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rule", "nope"], "no operating point 'nope'"),
        (["--top-k", "0"], "top_k: "),
        (["--threshold", "nan"], "threshold: "),
        (["--url", NOWHERE], "start one with `roadmatch serve`"),
        (["--url", "somewhere"], "is no address of a service"),
    ],
)
def test_an_expected_failure_is_one_line(
    roadmatch: Command, pictures: list[Path], arguments: list[str], said: str
) -> None:
    roadmatch("add", pictures[0], "--gallery", "failing")
    assert said in roadmatch.fails("search", pictures[0], "--gallery", "failing", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["search", "a.png"],
        ["search", "a.png", "--gallery", "a/b"],
        ["search", "a.png", "--gallery", "g", "--rule", "r", "--threshold", "1"],
        ["search", "a.png", "--gallery", "g", "--top-k", "many"],
        ["compare", "a.png", "b.png", "--gallery", "g", "--bundle", "b"],
        ["add", "...png", "--gallery", "g"],
        ["galleries", "--js"],
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(roadmatch: Command, arguments: list[str]) -> None:
    roadmatch.fails(*arguments, status=2)


def test_a_picture_too_large_to_send_is_refused_by_the_service_or_here(roadmatch: Command, tmp_path: Path) -> None:
    roadmatch("add", *(_written(tmp_path / "small.png", picture(0)),), "--gallery", "large")
    file = tmp_path / "large.jpg"
    for size, said in ((21_000_000, "at most 20 are read"), (65_000_000, "has more than 64 MB")):
        with file.open("wb") as opened:
            opened.truncate(size)
        assert said in roadmatch.fails("search", file, "--gallery", "large")


def test_a_busy_service_is_asked_again_when_it_says() -> None:
    busy = (503, {"Retry-After": "3"}, problem(503, "service-unavailable", "the service is busy"))
    pauses: list[float] = []
    with (
        Scripted(busy, busy, (200, {}, b'{"galleries": [], "next_cursor": null}')) as server,
        Client(server.url, sleep=pauses.append) as client,
    ):
        assert client.galleries()["galleries"] == []
    assert pauses == [3.0, 3.0]


@pytest.mark.parametrize(("after_s", "tries"), [("0", 5), ("30", 1), ("soon", 5)])
def test_a_service_that_stays_busy_is_given_up(after_s: str, tries: int) -> None:
    busy = (503, {"Retry-After": after_s}, problem(503, "service-unavailable", "the service is busy"))
    with (
        Scripted(busy) as server,
        Client(server.url, sleep=lambda _: None) as client,
        pytest.raises(RefusalError, match=r"is busy" + (" .asked 5 times.$" if tries == 5 else "$")),
    ):
        client.galleries()
    assert server.asked == tries


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>"), (200, b"[]"), (200, b"{}"), (404, b"<html>"), (404, b"{}"), (301, b""), (500, b"null")],
)
def test_something_else_at_the_address_is_recognised(
    capsys: pytest.CaptureFixture[str], status: int, body: bytes
) -> None:
    with Scripted((status, {}, body)) as server:
        assert "is not Roadmatch" in Command(capsys).fails("galleries", "--url", server.url)


def test_a_proxy_for_the_web_does_not_get_in_between(roadmatch: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", NOWHERE)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert roadmatch("galleries")[0] == 0


def test_an_answer_of_another_shape_is_no_traceback(roadmatch: Command) -> None:
    with Scripted((200, {}, b'{"galleries": [{"name": "a"}], "next_cursor": null}')) as server:
        assert "is not that of Roadmatch" in roadmatch.fails("galleries", "--url", server.url)


def test_a_connection_that_breaks_off_is_tried_again_and_then_said() -> None:
    taken = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reset_each() -> None:
            nonlocal taken
            with contextlib.suppress(OSError):  # the listener is shut down
                while True:
                    client, _ = listener.accept()
                    client.recv(1)
                    taken += 1
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.close()

        thread = threading.Thread(target=reset_each)
        thread.start()
        try:
            with (
                Client(f"http://127.0.0.1:{listener.getsockname()[1]}", sleep=lambda _: None) as client,
                pytest.raises(ClientError, match="broke the connection off 5 times"),
            ):
                client.galleries()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert taken == 5


def test_nobody_reading_is_quiet(service: Served, pictures: list[Path]) -> None:
    command = [*ROADMATCH, "add", *map(str, pictures[:3]), "--gallery", "unread", "--url", service.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 141
    assert said.count("\n") == 1  # that the gallery is made
    assert "Broken" not in said


def test_a_full_disk_behind_stdout_is_one_line(service: Served) -> None:
    with Path("/dev/full").open("w") as full:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [*ROADMATCH, "galleries", "--url", service.url], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "roadmatch: input or output: No space left on device\n")


def test_ctrl_c_is_quiet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with subprocess.Popen(
            [*ROADMATCH, "galleries", "--url", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            client, _ = listener.accept()
            with client:
                client.recv(1)  # it has asked, and gets no answer
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_serve_takes_options_prints_where_it_is_and_stops_at_ctrl_c(tmp_path: Path, bundle: Bundle) -> None:
    options = ["--port", "0", "--bundle", str(bundle.folder), "--data", str(tmp_path / "data"), "--cpus", "1"]
    with subprocess.Popen(
        [*ROADMATCH, "serve", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert re.fullmatch(r"roadmatch: ready at http://127\.0\.0\.1:\d+\n", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0
    assert (tmp_path / "data" / "roadmatch.db").is_file()


def test_serve_names_a_port_that_is_taken(capsys: pytest.CaptureFixture[str], service: Served) -> None:
    said = Command(capsys).fails("serve", "--port", service.port)
    assert "cannot be listened on (Address already in use)" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "65536"], "ROADMATCH_PORT: "),
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached by others"),
        (["--host", "no.such.host.invalid", "--allow-open"], "cannot be listened on"),
        (["--bundle", "/nowhere"], "/nowhere/manifest.json"),
        (["--cpus", "many"], "ROADMATCH_CPUS: "),
        (["--data", "/proc/nowhere"], "/proc/nowhere: "),
    ],
)
def test_serve_says_what_is_wrong_in_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert said in Command(capsys).fails("serve", "--port", "0", *options)


def test_serve_refuses_another_kind_of_database(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, bundle: Bundle
) -> None:
    said = Command(capsys).fails(
        "serve", "--port", "0", "--bundle", bundle.folder, "--data", tmp_path / "data", "--database", "mysql://x"
    )
    assert "ROADMATCH_DATABASE: mysql is not a database" in said


def test_every_setting_has_an_option_but_the_one_for_fault_tests() -> None:
    given = vars(cli.parser().parse_args(["serve"])).keys() - {"run"}
    assert given == Settings.model_fields.keys() - {"failpoint"}


def test_options_go_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROADMATCH_PORT", "1234")
    monkeypatch.setenv("ROADMATCH_QUEUE", "5")
    monkeypatch.setenv("ROADMATCH_URL", "http://there:1/")
    chosen = cli.parser().parse_args(["serve", "--port", "4321", "--bundle", "a", "--bundle", "b", "--allow-open"])
    settings = Settings.read(**{name: value for name, value in vars(chosen).items() if name != "run"})
    assert (settings.port, settings.queue, settings.allow_open) == (4321, 5, True)
    assert settings.bundles == (Path("a"), Path("b"))
    assert ClientSettings.read().url == "http://there:1"
    assert ClientSettings.read(url="https://here").url == "https://here"


def test_a_variable_that_no_program_knows_is_refused_by_both() -> None:
    with pytest.raises(SettingsError, match="ROADMATCH_PROT is no setting"):
        ClientSettings.read({"ROADMATCH_PROT": "1"})
    with pytest.raises(SettingsError, match=r"use one of .*ROADMATCH_PORT.*ROADMATCH_URL"):
        Settings.read({"ROADMATCH_PROT": "1"})


def test_version_and_help_are_no_failures(capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(capsys)
    assert re.fullmatch(r"roadmatch \d+\.\d+\.\d+\n", command("--version")[1])
    status, out, err = command("search", "--help")
    assert (status, err) == (0, "")
    assert "--top-k" in out


def test_client_commands_import_neither_the_framework_nor_the_engine() -> None:
    code = (
        "import sys; from app import cli; cli.main(['galleries', '--url', 'http://127.0.0.1:9']); "
        "print([m for m in ('fastapi', 'openvino', 'faiss', 'sqlalchemy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("stem", "item"),
    [("a b", "a-b"), ("Ünï", "Uni"), ("..x", "x"), ("_1", "1"), ("日本 7", "7"), ("a" * 200, "a" * 128), ("a/ß", "-")],
)
def test_ids_are_made_to_fit(stem: str, item: str) -> None:
    if item == "-":
        with pytest.raises(ArgumentTypeError, match="no letter or digit"):
            commands.id_of(Path("ß.png"))
        return
    assert commands.id_of(Path(f"{stem}.png")) == item
    assert NAME.fullmatch(item)


def test_names_are_those_of_the_service() -> None:
    assert f"^{NAME.pattern}$" == NAME_PATTERN


def test_tables_are_aligned_and_texts_are_harmless() -> None:
    assert aligned([("a", "1"), ("bcd", "22")], right=[1]) == ["a     1", "bcd  22"]
    assert printable("a\n\x1b[31mb\udce4") == "a ?[31mb?"


def _written(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file
