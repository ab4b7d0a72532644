"""Checkpoints of a run: a folder that is replaced at once, or not at all."""

import io
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import JsonValue
from safetensors import SafetensorError

from roadmatch.errors import RoadmatchError
from training.network.weights import StateDict

MODEL, TRAINED, OPTIMIZER, STATE = "model.safetensors", "trained.safetensors", "optimizer.pt", "state.json"


class CheckpointError(RoadmatchError):
    """A checkpoint that cannot be written or read."""


@dataclass(frozen=True)
class State:
    """Where a run stands: so many epochs are done, and so many steps of the next one."""

    epoch: int = 0
    step: int = 0
    steps: int = 0
    """Taken in the whole run."""
    best: float | None = None
    """The highest gAP of a validation."""
    best_epoch: int | None = None
    """From 1."""
    stale: int = 0
    """Validations since then."""
    finished: bool = False
    recipe: Mapping[str, JsonValue] = field(default_factory=dict)
    data: str = ""
    """The manifest's digest."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a run goes on from.

    model: what is validated and exported, the average where there is one. trained: what the optimizer moves, where
    that is another. optimizer: states of optimizer and scaler, plain containers and tensors; None in a checkpoint that
    is only for export.
    """

    state: State
    model: StateDict
    trained: StateDict | None = None
    optimizer: dict[str, Any] | None = None


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """All of it at `folder`, or the one that is there stays. Raises CheckpointError.

    It is written in a temporary sibling, fsynced, and renamed. The old one is renamed aside before and removed after,
    so that at any moment one of them is whole: `standing` says which.
    """
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.draft")
    try:
        draft.mkdir(parents=True)
        for name, data in _files(checkpoint).items():
            _write(draft / name, data)
        _fsync(draft)
        _put_in_place(draft, folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error.strerror or error}): the checkpoint before it is kept; make room, "
            "and resume the run"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def load(folder: Path) -> Checkpoint:
    """Onto the CPU; nothing that it holds is run. Raises CheckpointError."""
    whole = standing(folder)
    if whole is None:
        raise CheckpointError(f"{folder} holds no checkpoint")
    state = read_state(folder)
    try:
        trained = safetensors.torch.load_file(whole / TRAINED) if (whole / TRAINED).exists() else None
        return Checkpoint(state, safetensors.torch.load_file(whole / MODEL), trained, _optimizer(whole / OPTIMIZER))
    except (OSError, SafetensorError) as error:
        raise _broken(whole, error) from error


def read_state(folder: Path) -> State:
    """Where the run stood. Raises CheckpointError."""
    whole = standing(folder)
    if whole is None:
        raise CheckpointError(f"{folder} holds no checkpoint")
    try:
        found = json.loads((whole / STATE).read_bytes())
        return State(**{each.name: found[each.name] for each in fields(State)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(whole, error) from error


def standing(folder: Path) -> Path | None:
    """The whole checkpoint: at `folder`, or beside it if the run ended between two renames; None if there is none."""
    return next((each for each in (folder, _previous(folder)) if (each / STATE).is_file()), None)


def state_dict(tensors: Mapping[str, torch.Tensor]) -> StateDict:
    """Copies on the CPU, contiguous, as a file takes them and the next step does not change them."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _optimizer(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's restricted unpickler trips over foreign bytes in any way at all
        raise CheckpointError(f"{file} is broken, or holds more than plain containers: begin the run anew") from error
    return found


def _files(checkpoint: Checkpoint) -> dict[str, bytes | memoryview]:
    files: dict[str, bytes | memoryview] = {MODEL: safetensors.torch.save(checkpoint.model)}
    if checkpoint.trained is not None:
        files[TRAINED] = safetensors.torch.save(checkpoint.trained)
    if checkpoint.optimizer is not None:
        buffer = io.BytesIO()
        torch.save(checkpoint.optimizer, buffer)
        files[OPTIMIZER] = buffer.getbuffer()
    return files | {STATE: json.dumps(asdict(checkpoint.state), indent=1, allow_nan=False).encode()}


def _write(path: Path, data: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(draft: Path, folder: Path) -> None:
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)  # left by an end between the renames; `folder` is newer, and whole
        folder.rename(previous)
    try:
        draft.rename(folder)
    except OSError:
        if previous.exists():
            previous.rename(folder)
        raise
    _fsync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)
    for left in folder.parent.glob(f".{folder.name}.*.draft"):  # of a run that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _broken(folder: Path, error: Exception) -> CheckpointError:
    why = " ".join(str(error).split())[:200]
    return CheckpointError(f"{folder} cannot be read ({why}): begin the run anew")
