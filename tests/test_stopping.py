"""A signal waits for the end of what must not be left half done, and no longer."""

import os
import signal
import threading

import pytest

from training.fitting.stopping import Stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_whole_part_waits_for_its_end(number: signal.Signals) -> None:
    done: list[str] = []

    def work() -> None:
        with Stopping() as stopping:
            for name in ("first", "second"):
                with stopping.whole():
                    os.kill(os.getpid(), number)
                    done.append(name)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["first"]


def test_a_second_signal_does_not_wait() -> None:
    done: list[str] = []

    def work() -> None:
        with Stopping() as stopping, stopping.whole():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("after one")
            os.kill(os.getpid(), signal.SIGINT)
            done.append("after two")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["after one"]


def test_between_whole_parts_a_signal_does_not_wait() -> None:
    done: list[str] = []

    def work() -> None:
        with Stopping() as stopping:
            with stopping.whole():
                done.append("whole")
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]


def test_afterwards_signals_mean_what_they_meant_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Stopping():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_in_another_thread_signals_are_left_alone() -> None:
    found: list[object] = []

    def work() -> None:
        with Stopping() as stopping, stopping.whole():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
