"""Checkpoints: all or nothing, whenever the writing ends, and nothing in them is run."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from training.fitting import checkpoints
from training.fitting.checkpoints import Checkpoint, CheckpointError, State, load, read_state, save, standing


def checkpoint(steps: int, *, size: int = 4) -> Checkpoint:
    state = State(epoch=1, step=2, steps=steps, best=1 / 3, best_epoch=1, recipe={"seed": 1}, data="abc")
    parameter = torch.nn.Parameter(torch.full((size,), float(steps)))
    optimizer = torch.optim.AdamW([{"params": [parameter], "lr": 0.1, "name": "head"}])
    parameter.sum().backward()
    optimizer.step()
    return Checkpoint(
        state,
        {"head.weight": torch.full((size,), float(steps))},
        {"head.weight": torch.full((size,), steps + 0.5)},
        {"optimizer": optimizer.state_dict(), "scaler": {}},
    )


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing more fails as on a full disk, but for the number of the error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_saved_is_loaded_to_the_bit(tmp_path: Path) -> None:
    saved = checkpoint(7)
    save(tmp_path / "last", saved)
    found = load(tmp_path / "last")
    assert found.state == saved.state == read_state(tmp_path / "last")
    assert found.model["head.weight"].equal(saved.model["head.weight"])
    assert found.trained is not None
    assert found.trained["head.weight"].tolist() == [7.5] * 4
    assert saved.optimizer is not None
    assert found.optimizer is not None
    assert found.optimizer["optimizer"]["param_groups"] == saved.optimizer["optimizer"]["param_groups"]
    moments = [each["optimizer"]["state"][0]["exp_avg"] for each in (found.optimizer, saved.optimizer)]
    assert moments[0].equal(moments[1])


def test_a_newer_checkpoint_takes_the_place_of_the_older_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    left = tmp_path / ".last.0123.draft"  # of a process that was killed
    left.mkdir()
    for steps in (1, 2, 3):
        save(tmp_path / "last", checkpoint(steps))
    assert load(tmp_path / "last").state.steps == 3
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_a_full_disk_leaves_the_old_checkpoint_and_says_so_in_a_line(tmp_path: Path) -> None:
    save(tmp_path / "last", checkpoint(1))
    with files_of_at_most(100_000), pytest.raises(CheckpointError, match="the checkpoint before it is kept") as caught:
        save(tmp_path / "last", checkpoint(2, size=1_000_000))
    assert "\n" not in str(caught.value)
    assert load(tmp_path / "last").state.steps == 1
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


class Killed(BaseException):
    """As a kill -9: nothing afterwards runs."""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_whenever_the_writing_ends_a_whole_checkpoint_stands(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "last", checkpoint(1))
    real, done = Path.rename, 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal done
        if done == renames:
            raise Killed
        done += 1
        return real(self, target)

    def nothing(*_: object, **__: object) -> None:
        if done == 2:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        patched.setattr(shutil, "rmtree", nothing)
        with pytest.raises(Killed):
            save(tmp_path / "last", checkpoint(2))
    assert load(tmp_path / "last").state.steps == (2 if renames == 2 else 1)
    save(tmp_path / "last", checkpoint(3))
    assert load(tmp_path / "last").state.steps == 3
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_one_for_export_alone_has_no_optimizer(tmp_path: Path) -> None:
    save(tmp_path / "best", replace(checkpoint(1), trained=None, optimizer=None))
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["model.safetensors", "state.json"]
    assert load(tmp_path / "best").optimizer is None


def test_where_there_is_none_nothing_stands(tmp_path: Path) -> None:
    assert standing(tmp_path / "last") is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(tmp_path / "last")


class Trap:
    """Unpickled, it would make a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (checkpoints.MODEL, "cannot be read"),
        (checkpoints.OPTIMIZER, "is broken, or holds more"),
        (checkpoints.STATE, "cannot be read"),
    ],
)
def test_a_file_of_something_else_is_an_error_of_one_line_and_is_not_run(name: str, said: str, tmp_path: Path) -> None:
    save(tmp_path / "last", checkpoint(1))
    torch.save(Trap(str(tmp_path / "sprung")), tmp_path / "last" / name)
    with pytest.raises(CheckpointError, match=said) as caught:
        load(tmp_path / "last")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sprung").exists()


def test_a_checkpoint_that_ends_early_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / "last", checkpoint(1))
    optimizer = tmp_path / "last" / checkpoints.OPTIMIZER
    optimizer.write_bytes(optimizer.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="is broken"):
        load(tmp_path / "last")
