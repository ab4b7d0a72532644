import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

import httpx
import psutil
import pytest
from PIL import Image

from app.verdict import Evidence, Hit, Rate, StatedRate, Verdict
from demo.photographs import FEWEST, DemoError, Photograph, halves, of_folder, prepared, shipped, unique_ids
from demo.questions import AS_IT_IS, Asked, Question, edits_each, questions
from demo.tally import allowed, quantile, tallies
from tests.bundles import edited, picture
from training.default_bundle.copies import EDITS

DEMO = [sys.executable, "-m", "demo"]
ROW = re.compile(
    r"(?P<name>\S+) +(?P<edit>as it is|[a-z]+) +(?P<decision>match|no_match) +(?P<item>\S+) +(?P<score>-?\d\.\d{6}) +"
    r"(?P<threshold>-?\d\.\d{6}) +(?P<rule>\S+) +(?P<mark>right|WRONG: .*)"
)


@pytest.fixture
def port() -> int:
    """One that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


@pytest.fixture
def nothing_left(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test no service is left, nothing listens on the port and the folder for temporary files is empty."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("ROADMATCH_DATABASE", "postgresql://the-users-own/database")  # which the demo must not touch
    yield
    left = [process for process in psutil.process_iter(["cmdline"]) if str(temporary) in " ".join(_command(process))]
    for process in left:
        process.kill()
    assert left == []
    assert list(temporary.iterdir()) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """The demonstration to its end."""
    command = [*DEMO, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.usefixtures("nothing_left")
def test_the_shipped_photographs_end_to_end(port: int) -> None:
    started = time.monotonic()
    done = run("--exit", "--port", port)
    assert time.monotonic() - started < 40
    assert (done.returncode, done.stderr) == (0, "")
    rows = [found for found in map(ROW.fullmatch, done.stdout.splitlines()) if found]
    assert len(rows) == 7 * len(EDITS) + 7 * (1 + len(EDITS))
    assert {row["rule"] for row in rows} == {"false_match_rate<=0.01"}
    for row in rows:
        assert (row["decision"] == "match") == (float(row["score"]) >= float(row["threshold"]))
    inside = {row["name"] for row in rows if row["edit"] != AS_IT_IS} - {
        row["name"] for row in rows if row["edit"] == AS_IT_IS
    }
    assert len(inside) == 7
    for row in rows:
        found = row["item"] if row["decision"] == "match" else None
        assert (row["mark"] == "right") == (found == (row["name"] if row["name"] in inside else None))
    false_matches = sum(row["mark"] == "WRONG: false match" for row in rows)
    misses = sum(row["mark"] == "WRONG: missed" for row in rows)
    assert f"false matches: {false_matches} of 70 searches with 7 photographs; at the bound of " in done.stdout
    assert f"misses: {misses} of 63 searches with 7 photographs; at the bound of " in done.stdout
    assert "pictures not used for fitting" in done.stdout
    assert "Here, with 7 images" in done.stdout


@pytest.mark.usefixtures("nothing_left")
def test_a_folder_of_ones_own_with_broken_files_in_it(tmp_path: Path, port: int) -> None:
    folder = tmp_path / "photos"
    (folder / "deeper").mkdir(parents=True)
    for number, file in enumerate(shipped()[:6]):
        shutil.copy(file, folder / ("deeper" if number % 2 else "") / file.name)
    (folder / "broken.jpg").write_bytes(b"no picture")
    (folder / "again.jpg").write_bytes(edited((folder / "astronaut.png").read_bytes()))
    (folder / "notes.txt").write_text("no picture, and not called one")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    done = run("--exit", "--photos", folder, "--port", port)
    assert (done.returncode, done.stderr) == (0, "")
    left_out = [line for line in done.stdout.splitlines() if line.startswith("left out: ")]
    assert len(left_out) == 2
    assert any(line.startswith(f"left out: {folder / 'broken.jpg'}: not one of") for line in left_out)
    assert any(line.endswith("nearly the same picture as another one") for line in left_out)
    rows = [found for found in map(ROW.fullmatch, done.stdout.splitlines()) if found]
    assert len(rows) == 3 * len(EDITS) + 3 * (1 + len(EDITS))
    assert before == {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.usefixtures("nothing_left")
def test_it_stays_up_until_ctrl_c_and_says_what_to_try(tmp_path: Path, port: int) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for file in shipped()[:4]:
        shutil.copy(file, folder)
    command = [*DEMO, "--photos", str(folder), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "/docs" not in lines[-1]:
            line = process.stdout.readline()
            assert line, process.communicate()
            lines.append(line)
        assert lines[-3].startswith(f"The service stays up at http://127.0.0.1:{port} until Ctrl-C")
        curl = re.fullmatch(r"  curl -F 'image=@(.+)' (http\S+)\n", lines[-2])
        assert curl
        answer = httpx.post(curl[2], files={"image": Path(curl[1]).read_bytes()}, trust_env=False).json()
        assert answer["gallery_size"] == 2
        assert httpx.get(lines[-1].strip(), trust_env=False).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("nothing_left")
def test_stopped_while_it_starts_it_leaves_nothing(port: int, number: signal.Signals) -> None:
    with subprocess.Popen([*DEMO, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"Starting the service")
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.usefixtures("nothing_left")
def test_what_hinders_it_is_one_line(tmp_path: Path, port: int) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    for number in range(FEWEST - 1):
        (folder / f"{number}.png").write_bytes(picture(number))
    done = run("--exit", "--photos", folder, "--port", port)
    assert (done.returncode, done.stderr) == (
        1,
        "demo: 3 pictures are left; at least 4 different ones are needed: add some\n",
    )
    done = run("--exit", "--photos", folder / "nowhere")
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("--exit", "--port", taken.getsockname()[1])
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "the service ended: 127.0.0.1 port" in done.stderr


def test_it_needs_no_torch_and_imports_no_package_for_its_pictures() -> None:
    code = (
        "import sys, demo.__main__ as demo; demo.shipped(); "
        "print([m for m in ('torch', 'timm', 'skimage', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_missing_package_or_file_is_named() -> None:
    with pytest.raises(DemoError, match=r"pip install 'roadmatch\[demo\]'"):
        shipped({"no_such_package": ("a.png",)})
    with pytest.raises(DemoError, match=r"no_such\.png is not there"):
        shipped({"skimage": ("no_such.png",)})


def test_the_shipped_photographs_are_fourteen_different_ones() -> None:
    skipped: list[object] = []
    assert len(prepared(shipped(), lambda file, why: skipped.append((file, why)))) == 14
    assert skipped == []


def test_the_same_folder_gives_the_same_choice_and_copies(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "narrow.png").write_bytes(_narrow())
    skipped: list[str] = []
    first, second = (prepared(of_folder(tmp_path), lambda _, why: skipped.append(why)) for _ in range(2))
    assert first == second
    assert [photograph.id for photograph in first] != sorted(photograph.id for photograph in first)
    assert [why.partition(" (")[0] for why in skipped] == ["too small or too narrow for the edits"] * 2
    inside, outside = halves(first)
    assert (len(inside), len(outside)) == (3, 2)


def test_ids_of_files_of_one_name_differ() -> None:
    files = [Path("a/x.png"), Path("b/x.jpg"), Path("x-2.png"), Path("日.png"), Path("本.png")]
    assert list(unique_ids(files).values()) == ["x", "x-2", "x-2-2", "picture", "picture-2"]


def test_many_photographs_are_asked_with_all_edits_equally_often(tmp_path: Path) -> None:
    file = tmp_path / "any.png"
    file.write_bytes(b"any")
    some = [Photograph(str(number), file, dict.fromkeys(EDITS, b"copy")) for number in range(90)]
    asked = questions(some[:45], some[45:])
    assert edits_each(90) == 4
    assert len(asked) == 45 * 4 + 45 * 5
    counts = [sum(question.edit == edit for question in asked) for edit in EDITS]
    assert counts == [90 * 4 // len(EDITS)] * len(EDITS)
    assert [question.item for question in asked if question.edit == AS_IT_IS] == [None] * 45


def test_a_verdict_is_wrong_where_the_item_is_another_or_should_be_none() -> None:
    assert [_asked("a", found).wrong for found in ("a", "b", None)] == ["", "missed", "missed"]
    assert [_asked(None, found).wrong for found in ("a", None)] == ["false match", ""]


def test_the_quantile_by_hand() -> None:
    assert [quantile(2, 0.05), quantile(2, 0.25), quantile(7, 0.0), quantile(7, 1.0)] == [1, 2, 0, 7]
    assert quantile(1, 0.01) == 0  # P(0) is exactly 0.99
    assert quantile(1, 0.011) == 1


def test_allowed_counts_what_searches_are_worth() -> None:
    value, searches = 0.2, 4000
    half = 1.96 * (value * (1 - value) / searches) ** 0.5
    independent = Rate(value=value, low=value - half, high=value + half)
    assert allowed(independent, searches, 60, 6) == quantile(60, value + half)
    doubled = Rate(value=value, low=value - 2**0.5 * half, high=value + 2**0.5 * half)
    assert allowed(doubled, searches, 60, 6) == 2 * quantile(30, value + 2**0.5 * half)
    wide = Rate(value=value, low=0.0, high=1.0)
    assert allowed(wide, searches, 60, 6) == 60
    assert allowed(Rate(value=0.0, low=0.0, high=0.01), searches, 60, 6) == 10 * quantile(6, 0.01)


@pytest.mark.parametrize(("wrong", "holds"), [(0, True), (10, True), (11, False)])
def test_more_wrong_verdicts_than_the_bounds_allow_are_noticed(wrong: int, holds: bool) -> None:
    """Six photographs by ten: at the bound of 1 % one photograph may go wrong, with all of its copies."""
    asked = [_asked(None, "x" if number < wrong else None, f"photograph {number % 6}") for number in range(60)]
    false_matches, misses = tallies([*asked, _asked("a", "a")])
    assert (false_matches.allowed, false_matches.holds) == (10, holds)
    assert ("MORE THAN ALLOWED" in false_matches.line) != holds
    assert misses.holds


def test_rates_without_bounds_cannot_be_judged() -> None:
    with pytest.raises(DemoError, match="state no rate"):
        tallies([Asked(_asked(None, None).question, _verdict(None, None))])
    with pytest.raises(DemoError, match="have no bounds"):
        tallies([Asked(_asked(None, None).question, _verdict(None, Rate(value=0.0, low=None, high=None)))])


def _asked(item: str | None, found: str | None, photograph: str = "p") -> Asked:
    question = Question(photograph, "flip", b"", item)
    return Asked(question, _verdict(found, Rate(value=0.0, low=0.0, high=0.01)))


def _verdict(found: str | None, false_match_rate: Rate | None) -> Verdict:
    recall = Rate(value=0.8, low=0.7, high=0.9)
    hits: Sequence[Hit] = [] if found is None else [Hit(item=found, image="i", similarity=1, score=1, margin=0.5)]
    stated = None
    if false_match_rate is not None:
        evidence = Evidence(
            pictures=1,
            searches_with_match=9,
            searches_without_match=9,
            recall=recall,
            false_match_rate=false_match_rate,
        )
        stated = StatedRate(evidence=evidence, promise="promised")
    return Verdict(
        threshold=0.5,
        operating_point="rule",
        calibration="fits",
        stated_rate=stated,
        gallery="demo",
        gallery_size=3,
        decision="match" if hits else "no_match",
        best_score=None,
        matches=tuple(hits),
        near_misses=(),
        matches_truncated=False,
    )


def _command(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []


def _narrow() -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (900, 30), "red").save(buffer, "PNG")
    return buffer.getvalue()
