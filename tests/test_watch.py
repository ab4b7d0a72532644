"""What a run says: a log that can be taken up again, TensorBoard, a bar on a terminal, else a line an epoch."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.fitting.diagnostics import Diagnosis
from training.fitting.validation import Judgement
from training.fitting.watch import LogError, Taken, Watch, cut

JUDGED = Judgement(0.4321, 0.5, 0.6, 0.7654, queries=30, images=40)
FOUND = Diagnosis(8, 2.5, None, 0.25, 0.125, 0.01, (0,) * 30 + (3, 5) + (0,) * 8, (1,) * 20 + (0,) * 20)


def taken(step: int, loss: float = 0.5) -> Taken:
    return Taken(step, epoch=1 + step // 3, loss=loss / step, lr=0.1, images_per_s=1234.5, gradient_norm=2.0)


@contextmanager
def watching(run: Path, *, done: int = 0, writes: bool = True, show: bool = True) -> Iterator[Watch]:
    run.mkdir(exist_ok=True)
    watch = Watch(run, total=6, done=done, epochs=2, writes=writes, show=show)
    try:
        yield watch
    finally:
        watch.close()


def read(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_the_log_has_a_line_for_each_step_diagnosis_and_validation(tmp_path: Path) -> None:
    with watching(tmp_path) as watch:
        watch.step(taken(1, loss=1 / 3))
        assert len(read(tmp_path)) == 1  # at once, for who follows it
        watch.diagnosis(1, 1, FOUND)
        watch.validation(1, 1, JUDGED, best=True)
    step, diagnosis, validation = read(tmp_path)
    assert step == {
        "kind": "step", "step": 1, "epoch": 1, "loss": 1 / 3, "lr": 0.1, "images_per_s": 1234.5, "gradient_norm": 2.0
    }  # fmt: skip
    assert diagnosis["kind"] == "diagnosis"
    assert diagnosis["unsaturated_in_own_list"] is None
    assert validation["gap"] == 0.4321
    assert validation["best"] is True


def test_tensorboard_reads_scalars_and_histograms(tmp_path: Path) -> None:
    with watching(tmp_path) as watch:
        for step in (1, 2):
            watch.step(taken(step))
        watch.diagnosis(2, 1, FOUND)
        watch.validation(2, 1, JUDGED, best=True)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    assert board.Scalars("validation/gap")[0].value == pytest.approx(0.4321)
    assert "diagnosis/unsaturated_in_own_list" not in board.Tags()["scalars"]
    histogram = board.Histograms("similarity/positives")[0].histogram_value
    assert histogram.num == 8
    assert 0.5 < histogram.min < histogram.max < 0.6


def test_a_log_is_taken_up_after_the_last_step_of_the_checkpoint(tmp_path: Path) -> None:
    with watching(tmp_path) as watch:
        for step in (1, 2, 3, 4):
            watch.step(taken(step))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "ste')
    with watching(tmp_path, done=2) as watch:
        watch.step(taken(3, loss=9))
    assert [(line["step"], line["loss"]) for line in read(tmp_path)] == [(1, 0.5), (2, 0.25), (3, 3.0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "tensorboard"]


def test_another_file_in_the_logs_place_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("my notes\n")
    with pytest.raises(LogError, match="cannot be taken up again") as caught:
        cut(tmp_path / "log.jsonl", 3)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "log.jsonl").read_text() == "my notes\n"


def test_without_a_terminal_there_is_a_line_an_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with watching(tmp_path) as watch:
        for step in (1, 2, 3):
            watch.step(taken(step))
        watch.epoch(1, JUDGED)
        watch.epoch(2, None)
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1/2: loss 0.1667, gAP 0.4321, R@1 0.7654, 1,234 images/s",
        "epoch 2/2: loss 0.1667, 1,234 images/s",
    ]


@pytest.mark.parametrize(("writes", "show"), [(True, False), (False, True)])
def test_who_shall_not_show_says_nothing_and_another_process_writes_nothing(
    writes: bool, show: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with watching(tmp_path / "run", writes=writes, show=show) as watch:
        watch.step(taken(1))
        watch.diagnosis(1, 1, FOUND)
        watch.validation(1, 1, JUDGED, best=True)
        watch.epoch(1, JUDGED)
    assert capsys.readouterr().err == ""
    assert any((tmp_path / "run").iterdir()) == writes


def test_on_a_terminal_a_bar_shows_loss_pace_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = os.openpty()
    seen: list[bytes] = []

    def listen() -> None:
        try:
            while data := os.read(ours, 65536):
                seen.append(data)
        except OSError:  # the terminal was closed
            return

    thread = threading.Thread(target=listen)
    thread.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with watching(tmp_path) as watch:
            for step in (1, 2, 3):
                watch.step(taken(step))
            watch.epoch(1, JUDGED)
        monkeypatch.undo()
    thread.join()
    os.close(ours)
    shown = b"".join(seen).decode()
    for part in ("3/6", "loss 0.1667", "1,234 images/s", ":", "epoch 1/2: loss"):
        assert part in shown


def test_a_full_disk_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(tmp_path, total=6, done=0, epochs=2, writes=True, show=False)
    watch._log.close()
    full = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115 - the watch closes it
    monkeypatch.setattr(watch, "_log", full)
    with pytest.raises(LogError, match="make room, and resume") as caught:
        watch.diagnosis(1, 1, FOUND)
    watch.close()  # hides no error, and is none
    assert "\n" not in str(caught.value)
