import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from roadmatch.errors import ImageError, ImageTooLarge, UnreadableImage, UnsupportedImage
from roadmatch.images import Limits, Preprocessing, read_pixels
from roadmatch.jobs import decoding_child
from roadmatch.jobs.decoding import Decoded, Decoders
from tests.hostile_pictures import hostile_pictures

RULE = Preprocessing(size=64, resize=72, reduce_to=128, interpolation="bicubic")
GOOD = hostile_pictures()["good.jpg"].data
RAISED = ("UnidentifiedImageError", "OSError", "ValueError", "SyntaxError", "DecompressionBombError", "RecursionError")
FAILING = """
import os, resource, signal, sys, time
from PIL import Image, UnidentifiedImageError
from PIL.Image import DecompressionBombError
from roadmatch.errors import UnreadableImage, UnsupportedImage
from roadmatch.images import read_pixels
from roadmatch.jobs import decoding_child

def read(data, rule, limits):
    if not data.startswith(b"!"):
        return read_pixels(data, rule, limits)
    exec(data[1:].decode(), globals())

decoding_child.main(read)
"""
"""A child that runs the pictures that start with "!" as Python."""


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Decoders]:
    """A maker of decoders whose children run what pictures say."""
    (tmp_path / "failing_child.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(count: int = 1, wall_s: float = 30.0) -> Decoders:
        return Decoders(RULE, count, wall_s=wall_s, program="failing_child")

    return make


@pytest.fixture
def core_dumps() -> Iterator[None]:
    """Processes write core dumps, as far as they may here."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)


def children() -> list[psutil.Process]:
    """The decoding processes of this one."""
    return [child for child in psutil.Process().children() if "-P" in child.cmdline()]


def detail(outcome: Decoded | ImageError) -> str:
    """The reason of a picture that is unreadable."""
    assert type(outcome) is UnreadableImage
    assert len(str(outcome).splitlines()) == 1
    return str(outcome)


def assert_good(outcome: Decoded | ImageError) -> None:
    """It is the picture GOOD."""
    assert isinstance(outcome, Decoded)
    assert np.array_equal(outcome.pixels, read_pixels(GOOD, RULE)[0])


def in_process(data: bytes) -> Decoded | ImageError:
    """What roadmatch.images makes of it here."""
    try:
        pixels, picture = read_pixels(data, RULE)
    except ImageError as error:
        return error
    return Decoded(pixels, picture.format, picture.width, picture.height)


def test_every_picture_gets_the_answer_that_it_gets_in_process_in_the_given_order() -> None:
    pictures = [file.data for file in hostile_pictures().values()]
    with Decoders(RULE, 2) as decoders:
        outcomes = decoders.decode(pictures)
    for outcome, expected in zip(outcomes, map(in_process, pictures), strict=True):
        assert type(outcome) is type(expected)
        if isinstance(outcome, Decoded) and isinstance(expected, Decoded):
            assert np.array_equal(outcome.pixels, expected.pixels)
            assert outcome.pixels.dtype == np.uint8
            assert (outcome.format, outcome.width, outcome.height) == (
                expected.format,
                expected.width,
                expected.height,
            )
        else:
            assert str(outcome) == str(expected)


def test_no_pictures_are_no_answers() -> None:
    with Decoders(RULE, 1) as decoders:
        assert decoders.decode([]) == []
        assert children() == []


def test_the_limits_given_are_those_of_the_children() -> None:
    with Decoders(RULE, 1, Limits(bytes=len(GOOD), pixels=100)) as decoders:
        (longer,) = decoders.decode([GOOD + b"\0"])
        assert children() == []  # nobody needs a child for that
        (larger,) = decoders.decode([GOOD])
    assert type(longer) is type(larger) is ImageTooLarge
    assert "MB" in str(longer)
    assert "megapixels" in str(larger)


def test_a_picture_that_takes_too_much_processor_time_fails_alone() -> None:
    costly = hostile_pictures()["prog_3000scans.jpg"].data
    unchecked = Limits(jpeg_scans=1_000_000, jpeg_scan_pixels=10**15)
    with Decoders(RULE, 1, unchecked, wall_s=60) as decoders:
        before, outcome, after = decoders.decode([GOOD, costly, GOOD])
    assert detail(outcome).startswith("picture takes too long")
    assert_good(before)
    assert_good(after)


def test_the_processor_time_is_that_of_a_picture_not_of_a_child(failing: Callable[..., Decoders]) -> None:
    burn = b"!end = time.process_time() + 0.65\nwhile time.process_time() < end: pass\nraise UnsupportedImage('burnt')"
    with failing() as decoders:
        assert [str(outcome) for outcome in decoders.decode([burn] * 5)] == ["burnt"] * 5


def test_the_processor_time_of_a_picture_is_counted_in_less_than_whole_seconds(
    failing: Callable[..., Decoders],
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with failing() as decoders:
        (outcome,) = decoders.decode([b"!while True: pass"])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert detail(outcome).startswith("picture takes too long")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert decoding_child.CPU_S <= used < decoding_child.CPU_S + 0.45  # with its start


def test_a_picture_that_takes_too_much_time_fails_alone(failing: Callable[..., Decoders]) -> None:
    with failing(wall_s=0.5) as decoders:
        before, outcome, after = decoders.decode([GOOD, b"!time.sleep(30)", GOOD])
    assert detail(outcome).startswith("picture takes too long")
    assert_good(before)
    assert_good(after)


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("os.abort()", "ended the decoder (SIGABRT)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended the decoder (SIGSEGV)"),
        ("os._exit(3)", "ended the decoder (exit code 3)"),
        ("raise SystemExit(4)", "ended the decoder (exit code 4)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "needs too much memory"),
    ],
)
def test_a_picture_that_ends_its_child_fails_alone(failing: Callable[..., Decoders], deed: str, reason: str) -> None:
    with failing() as decoders:
        before, outcome, after = decoders.decode([GOOD, f"!{deed}".encode(), GOOD])
    assert reason in detail(outcome)
    assert_good(before)
    assert_good(after)


def test_a_picture_that_takes_too_much_memory_is_refused_and_its_child_goes_on(
    failing: Callable[..., Decoders],
) -> None:
    hog = b"!bytearray(2_100_000_000)"
    explained = b"!try: bytearray(2_100_000_000)\nexcept MemoryError as e: raise UnreadableImage('no') from e"
    with failing() as decoders:
        assert_good(decoders.decode([GOOD])[0])
        (child,) = children()
        outcomes = decoders.decode([hog, explained, GOOD])
        assert children() == [child]
    assert [detail(outcome) for outcome in outcomes[:2]] == [
        "picture needs too much memory to decode: send a smaller copy"
    ] * 2
    assert_good(outcomes[2])


@pytest.mark.parametrize("name", RAISED)
def test_whatever_a_decoder_raises_fails_that_picture_alone(failing: Callable[..., Decoders], name: str) -> None:
    with failing() as decoders:
        outcome, after = decoders.decode([f"!raise {name}('over\\nlines')".encode(), GOOD])
        assert len(children()) == 1
    assert detail(outcome) == f"picture cannot be decoded ({name}): save it anew"
    assert_good(after)


def test_a_child_is_confined_and_imports_only_what_decoding_needs(
    failing: Callable[..., Decoders], monkeypatch: pytest.MonkeyPatch, core_dumps: None
) -> None:
    monkeypatch.setenv("ROADMATCH_DATABASE", "postgresql://me:secret@host/db")
    heavy = "torch", "faiss", "openvino", "sqlalchemy", "pydantic"
    told = (
        "[resource.getrlimit(k)[0] for k in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS)]"
        f" + [len(set(sys.modules) & set({heavy})), sum('secret' in value for value in os.environ.values())]"
        " + [signal.getsignal(signal.SIGTERM) is signal.SIG_IGN]"
        " + [[os.fstat(stream).st_rdev == os.stat(os.devnull).st_rdev for stream in (0, 1, 2)]]"
    )
    with failing() as decoders:
        (outcome,) = decoders.decode([f"!raise UnreadableImage(repr({told}))".encode()])
    core, files, memory, modules, secrets, deaf, mute = eval(detail(outcome))
    assert (core, files, modules, secrets, deaf, mute) == (0, 16, 0, 0, True, [True] * 3)
    assert 2_000_000_000 < memory < 2_500_000_000


def test_a_child_that_dies_between_two_calls_is_replaced_and_no_picture_pays_for_it() -> None:
    with Decoders(RULE, 1) as decoders:
        decoders.decode([GOOD])
        (child,) = children()
        child.send_signal(signal.SIGKILL)
        time.sleep(0.2)
        assert_good(decoders.decode([GOOD])[0])
        assert children() != [child]


def test_a_child_waits_for_its_next_picture_as_long_as_it_takes() -> None:
    with Decoders(RULE, 1, wall_s=0.5) as decoders:
        decoders.decode([GOOD])
        (child,) = children()
        time.sleep(1.2)
        decoders.decode([GOOD])
        assert children() == [child]


def test_many_poisoned_pictures_from_several_threads_fail_alone(failing: Callable[..., Decoders]) -> None:
    wanted = [[GOOD, b"!os.abort()", GOOD, b"!raise UnsupportedImage('%d')" % thread] * 2 for thread in range(4)]
    with failing(2) as decoders, ThreadPoolExecutor(4) as threads:
        for thread, outcomes in enumerate(threads.map(decoders.decode, wanted)):
            for outcome in outcomes[::2]:
                assert_good(outcome)
            assert all("SIGABRT" in detail(outcome) for outcome in outcomes[1::4])
            assert [(type(outcome), str(outcome)) for outcome in outcomes[3::4]] == [
                (UnsupportedImage, str(thread))
            ] * 2
        assert len(children()) <= 2
    assert children() == []


@pytest.mark.parametrize(
    ("sends", "reason"),
    [
        ("parent.sendall(bytes([200]) * 11 + bytes(60_000))", "senseless answer"),
        ("for _ in range(40): parent.sendall(bytes(1)); time.sleep(0.1)", "takes too long"),
    ],
    ids=["nonsense", "a byte now and then"],
)
def test_a_child_that_was_taken_over_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sends: str, reason: str
) -> None:
    (tmp_path / "lying_child.py").write_text(
        f"import socket, time\nparent = socket.socket(fileno=0)\nparent.sendall(b'r')\n{sends}\ntime.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Decoders(RULE, 1, wall_s=0.6, program="lying_child") as decoders:
        (outcome,) = decoders.decode([GOOD])
    assert reason in detail(outcome)


def test_a_child_that_does_not_start_is_no_fault_of_a_picture() -> None:
    with (
        Decoders(RULE, 1, program="roadmatch.no_such_program") as decoders,
        pytest.raises(ChildProcessError, match="exit code 1"),
    ):
        decoders.decode([GOOD])


def test_closing_ends_all_children_and_then_nothing_is_decoded() -> None:
    decoders = Decoders(RULE, 2)
    decoders.decode([GOOD] * 20)
    assert children()
    decoders.close()
    decoders.close()
    assert children() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decoding")]
    with pytest.raises(RuntimeError):
        decoders.decode([GOOD])


def test_without_a_child_there_is_nothing_to_decode_with() -> None:
    with pytest.raises(ValueError, match="count is 0"):
        Decoders(RULE, 0)


@pytest.mark.parametrize("picture", [GOOD, b"!time.sleep(60)"], ids=["idle", "at a picture"])
def test_the_death_of_the_parent_leaves_no_child(tmp_path: Path, picture: bytes) -> None:
    (tmp_path / "failing_child.py").write_text(FAILING)
    (tmp_path / "picture").write_bytes(picture)
    program = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(Path.cwd())!r}]
from pathlib import Path
from roadmatch.images import Preprocessing
from roadmatch.jobs.decoding import Decoders
decoders = Decoders({RULE}, 1, wall_s=1.5, program="failing_child")
decoders.decode([b"nothing"])
print("ready", flush=True)
decoders.decode([Path({str(tmp_path / "picture")!r}).read_bytes()])
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        time.sleep(0.2)
        orphans = psutil.Process(parent.pid).children()
        parent.kill()
    assert len(orphans) == 1
    assert psutil.wait_procs(orphans, timeout=5)[1] == []
