"""The fit: what a run leaves behind, that it goes on to the same bits wherever it ended, and what it refuses."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image, ImageDraw

from roadmatch.embedding.network import build_backbone
from roadmatch.errors import RoadmatchError
from training.data import manifest
from training.fitting import checkpoints, loop, step
from training.fitting.fit import fit, resume
from training.fitting.loop import LossError
from training.fitting.run_folder import RunError
from training.network.trainable import open_network
from training.recipe import Recipe, recipe_file

CLASSES, IMAGES, SIDE = 12, 6, 32
ARCHITECTURE = "test_resnet"
SHAPES = ("ellipse", "rectangle")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So small a network is faster on one, and the same bits need the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawings of twelve classes, a shape and a colour each, and weights."""
    folder = tmp_path_factory.mktemp("given")
    for number in range(CLASSES):
        (folder / "images" / f"c{number:02}").mkdir(parents=True)
        for image in range(IMAGES):
            drawing(number, image).save(folder / "images" / f"c{number:02}" / f"{image}.png")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        # without that, residual branches are nothing at first, and to drop one changes nothing
        weights = timm.create_model(ARCHITECTURE, pretrained=False, zero_init_last=False).state_dict()
    safetensors.torch.save_file(weights, folder / "weights.safetensors")
    return folder


def drawing(number: int, image: int) -> Image.Image:
    colour = (40 * (number % 6), 255 - 40 * (number % 6), 90 * (number % 3))
    canvas = Image.new("RGB", (64, 64), (230 - 5 * image, 230, 230 - 3 * number))
    box = (8 + 3 * image, 6 + image, 40 + 3 * image, 44 + 4 * image)
    getattr(ImageDraw.Draw(canvas), SHAPES[number % 2])(box, fill=colour)
    return canvas


def recipe_of(given: Path, mode: str, **changes: object) -> Recipe:
    """changes: as in `optimizer__clip=1`."""
    wanted: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "data": {
            "root": str(given / "images"),
            "validation": 0.3,
            "test": 0.2,
            "split_seed": 2,
            "near_duplicates": False,
            "threads": 2,
        },
        "network": {
            "architecture": ARCHITECTURE,
            "weights": str(given / "weights.safetensors"),
            "mode": mode,
            "size": SIDE,
            "head": {"layer_norm": True, "dimension": 16},
        },
        "batch": {"size": 8, "per_class": 2, "chunk": 4 if mode == "whole" else None},
        "loss": {"name": "gsap", "temperature": 0.05},
        "optimizer": {"learning_rate": 1e-3, "schedule": {"warm_up_epochs": 0.5}},
        "fit": {"epochs": 2, "checkpoint_every": 2, "device": "cpu"},
    }
    for path, value in changes.items():
        *above, name = path.split("__")
        part = wanted
        for each in above:
            part = part.setdefault(each, {})
        part[name] = value
    return Recipe.model_validate(wanted)


def everything(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in everything(run) if line["kind"] == kind]


def all_but_pace(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "images_per_s"}


def course(run: Path) -> list[tuple[int, float, float, float]]:
    """What must be the same to the last bit: JSON keeps all digits."""
    return [(line["step"], line["loss"], line["lr"], line["gradient_norm"]) for line in lines(run, "step")]


def model(run: Path, which: str = "best") -> Mapping[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "checkpoints" / which / "model.safetensors")


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(each.equal(other[name]) for name, each in one.items())


@pytest.fixture(scope="module", params=["whole", "linear"])
def done(request: pytest.FixtureRequest, given: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A mode, and a run of it that nobody interrupted."""
    run = tmp_path_factory.mktemp("runs") / str(request.param)
    fit(settled(given, request.param), run, show=False)
    return request.param, run


def settled(given: Path, mode: str) -> Recipe:
    """With all that a checkpoint has to bring back: stochastic depth, average, clipping."""
    average = {"network__average": 0.9, "optimizer__clip": 0.5}
    return recipe_of(given, mode, **average, **({"network__drop_path": 0.3} if mode == "whole" else {}))


def test_a_run_leaves_a_model_a_manifest_a_recipe_and_a_log(done: tuple[str, Path], given: Path) -> None:
    mode, run = done
    recipe = settled(given, mode)
    assert recipe_file.read(run / "recipe.yaml") == recipe
    images = manifest.read(run / "manifest.parquet", given / "images")
    assert {str(split) for split in images.splits} == {"train", "validation", "test"}
    assert "nothing was found" in (run / "findings.txt").read_text()
    steps = lines(run, "step")
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert [line["epoch"] for line in lines(run, "validation")] == [1, 2]
    assert [line["epoch"] for line in lines(run, "diagnosis")] == [1, 2]
    assert any((run / "tensorboard").iterdir())
    state = checkpoints.read_state(run / "checkpoints" / "last")
    assert state.finished
    assert state.best_epoch is not None
    assert state.best == max(line["gap"] for line in lines(run, "validation"))
    assert lines(run, "validation")[state.best_epoch - 1]["best"]


def test_the_best_model_loads_strictly_into_what_serving_builds(done: tuple[str, Path], given: Path) -> None:
    mode, run = done
    backbone = build_backbone(ARCHITECTURE, settled(given, mode).network.head)
    found = model(run)
    if mode == "whole":
        backbone.load_state_dict(dict(found), strict=True)
    else:
        assert set(found) == {name for name in backbone.state_dict() if name.startswith("head.")}


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch, number: signal.Signals = signal.SIGINT) -> None:
    """Sends this process a signal in the midst of a step: not later, when nobody takes it any more."""
    taken = 0

    def counted(*given: Any, **named: Any) -> step.Stepped:
        nonlocal taken
        taken += 1
        if taken == steps:
            signal.raise_signal(number)
        return step.backward(*given, **named)

    monkeypatch.setattr(loop, "backward", counted)


@pytest.mark.faults  # a signal to a process that shares a connection with others: not beside them
def test_an_interrupted_run_goes_on_to_the_same_bits(
    done: tuple[str, Path], given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, undisturbed = done
    run, recipe = tmp_path / "run", settled(given, mode)
    with monkeypatch.context() as patched:
        interrupt_after(4, patched, signal.SIGINT if mode == "whole" else signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            fit(recipe, run, show=False)
    state = checkpoints.read_state(run / "checkpoints" / "last")
    assert 3 <= state.steps < len(course(undisturbed))
    assert len(course(run)) == state.steps
    resume(run, show=False)
    assert course(run) == course(undisturbed)
    assert [line["gap"] for line in lines(run, "validation")] == [
        line["gap"] for line in lines(undisturbed, "validation")
    ]
    assert same(model(run), model(undisturbed))
    assert same(model(run, "last"), model(undisturbed, "last"))


def test_a_run_interrupted_in_a_validation_does_only_that_again(
    done: tuple[str, Path], given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, undisturbed = done
    run, calls = tmp_path / "run", 0

    def interrupted(*_: object) -> None:
        nonlocal calls
        calls += 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop, "judge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(settled(given, mode), run, show=False)
    assert calls == 1
    resume(run, show=False)
    assert [all_but_pace(line) for line in everything(run)] == [all_but_pace(line) for line in everything(undisturbed)]


def test_the_average_is_what_is_judged_and_kept(done: tuple[str, Path], given: Path) -> None:
    mode, run = done
    recipe, weight = settled(given, mode), "head.1.weight"
    first = open_network(recipe.network, seed=recipe.seed).network.backbone.state_dict()[weight]
    trained = safetensors.torch.load_file(run / "checkpoints" / "last" / "trained.safetensors")
    average = model(run, "last")
    assert trained.keys() == average.keys()
    moved, followed = (trained[weight] - first).norm(), (average[weight] - first).norm()
    assert 0.05 * moved < followed < 0.9 * moved


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains(precision: str, given: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(recipe_of(given, "whole", fit__epochs=1, fit__precision=precision), run, show=False)
    assert all(line["loss"] < 1 for line in lines(run, "step"))
    optimizer = checkpoints.load(run / "checkpoints" / "last").optimizer
    assert optimizer is not None
    assert bool(optimizer["scaler"]) == (precision == "float16")


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ALONE = [sys.executable, "-m", "training"]
BY_TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--", "training"]


def started(recipe: Recipe, run: Path, command: list[str]) -> "subprocess.Popen[str]":
    """A process of its own that fits, or that starts two."""
    file = run.with_suffix(".yaml")
    file.write_text(recipe_file.text(recipe))
    return subprocess.Popen(
        [*command, "fit", str(file), "--run", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD, "GLOO_SOCKET_IFNAME": "lo"},
    )


def ended_after(steps: int, process: "subprocess.Popen[str]", run: Path, number: signal.Signals) -> str:
    """Sends the process a signal once the log has so many steps -> what it said."""
    log = run / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count('"kind": "step"') >= steps):
        time.sleep(0.001)
    process.send_signal(number)
    return process.communicate(timeout=60)[1]


@pytest.mark.faults
def test_a_run_that_was_killed_goes_on_to_the_same_bits(done: tuple[str, Path], given: Path, tmp_path: Path) -> None:
    mode, undisturbed = done
    run, recipe = tmp_path / "run", settled(given, mode)
    process = started(recipe, run, ALONE)
    ended_after(3, process, run, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    state = checkpoints.read_state(run / "checkpoints" / "last")
    assert 0 < state.steps < len(course(undisturbed))
    with (run / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # as the end of a block that was not written
    resume(run, show=False)
    assert course(run) == course(undisturbed)
    assert same(model(run), model(undisturbed))
    assert same(model(run, "last"), model(undisturbed, "last"))


def test_a_run_killed_before_its_first_checkpoint_begins_anew(given: Path, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", recipe_of(given, "linear", fit__epochs=1)
    fit(recipe, run, show=False)
    expected = course(run)
    for each in ("last", "best"):
        (run / "checkpoints" / each).rename(tmp_path / each)
    resume(run, show=False)
    assert course(run) == expected


@pytest.mark.faults
def test_ctrl_c_ends_the_command_with_130_and_says_how_to_go_on(given: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started(recipe_of(given, "linear", fit__epochs=5000), run, ALONE)
    said = ended_after(3, process, run, signal.SIGINT)
    assert process.returncode == 130, said
    steps = checkpoints.read_state(run / "checkpoints" / "last").steps
    assert f"stopped after step {steps:,}; to go on" in said
    assert "Traceback" not in said


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["whole", "linear"])
def test_two_processes_have_the_losses_of_one(mode: str, given: Path, tmp_path: Path) -> None:
    recipe = recipe_of(given, mode)
    fit(recipe, tmp_path / "alone", show=False)
    run = tmp_path / "runs" / "two"
    run.parent.mkdir()
    process = started(recipe, run, BY_TWO)
    try:
        _, said = process.communicate(timeout=100)
    finally:
        process.terminate()  # the starter ends what it started
    assert process.returncode == 0, said
    assert said.count("looking at each") == 1
    for name in ("loss", "gradient_norm"):
        one, two = ([line[name] for line in lines(each, "step")] for each in (tmp_path / "alone", run))
        assert two == pytest.approx(one, abs=1e-5, rel=1e-4 if name == "gradient_norm" else 0)
    gaps = [[line["gap"] for line in lines(each, "validation")] for each in (tmp_path / "alone", run)]
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-3)


def test_a_finished_run_says_so_and_changes_nothing(done: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, run = done
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    resume(run)
    assert "is finished after 2 epochs: evaluate" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


def test_a_run_that_is_there_is_not_begun_again(done: tuple[str, Path], given: Path) -> None:
    mode, run = done
    with pytest.raises(RunError, match="holds a run already: resume it"):
        fit(settled(given, mode), run, show=False)
    with pytest.raises(RunError, match=r"holds no run: there is no recipe\.yaml"):
        resume(run.parent / "nowhere")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer__learning_rate": 2e-3}, "optimizer.learning_rate was 0.001 when the run began and is 0.002"),
        ({"loss": {"name": "smooth_ap"}}, "loss.name was 'gsap' when the run began and is 'smooth_ap'"),
        ({"data__split_seed": 16}, "data.split_seed was 2"),
    ],
)
def test_a_run_with_another_recipe_does_not_go_on(
    changes: dict[str, object], said: str, done: tuple[str, Path], given: Path
) -> None:
    mode, run = done
    if mode == "linear":
        recipe = recipe_of(given, mode, network__average=0.9, optimizer__clip=0.5, **changes)
        with pytest.raises(RunError, match=said):
            fit(recipe, run, resume=True, show=False)


def test_a_run_with_other_images_does_not_go_on(given: Path, tmp_path: Path) -> None:
    images, run = tmp_path / "images", tmp_path / "run"
    for file in (given / "images").rglob("*.png"):
        place = images / file.relative_to(given / "images")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    recipe = recipe_of(given, "linear", data__root=str(images), fit__epochs=1)
    fit(recipe, run, show=False)
    (images / "c00" / "new.png").write_bytes((images / "c00" / "0.png").read_bytes())
    with pytest.raises(RunError, match=r"the images have changed .*c00/new\.png is new"):
        resume(run, show=False)


def test_more_loading_threads_are_no_change(done: tuple[str, Path], given: Path) -> None:
    mode, run = done
    changed = settled(given, mode).model_dump(mode="json")
    changed["data"]["threads"] = 7
    fit(Recipe.model_validate(changed), run, resume=True, show=False)


def test_a_loss_that_is_not_finite_stops_with_the_batch_and_the_names_of_its_images(
    given: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(LossError, match=r"epoch \d, step \d: .*the batch is in .*nan\.safetensors") as caught:
        fit(recipe_of(given, "linear", optimizer__name="sgd", optimizer__learning_rate=1e38), run, show=False)
    assert "\n" not in str(caught.value)
    saved, told = safetensors.torch.load_file(run / "nan.safetensors"), json.loads((run / "nan.json").read_text())
    assert len(saved["inputs"]) == len(saved["labels"]) == len(told["images"]) == 8
    assert all((given / "images" / name).is_file() for name in told["images"])
    assert not any(value != value for line in lines(run, "step") for value in line.values())


def test_a_gradient_that_is_not_finite_stops_before_it_is_kept(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = tmp_path / "run", step.backward

    def overflowing(network: torch.nn.Module, *arguments: Any, **settings: Any) -> Any:
        stepped = real(network, *arguments, **settings)
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad[0] = torch.inf
        return stepped

    monkeypatch.setattr(loop, "backward", overflowing)
    with pytest.raises(LossError, match="epoch 1, step 1: the gradient's norm is inf"):
        fit(recipe_of(given, "linear"), run, show=False)
    assert (run / "nan.safetensors").exists()
    assert lines(run, "step") == []
    assert checkpoints.standing(run / "checkpoints" / "last") is None


def test_early_stopping_keeps_the_best(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    fit(recipe_of(given, "linear", fit__epochs=60, fit__patience=2, optimizer__learning_rate=0.3), run)
    gaps = [line["gap"] for line in lines(run, "validation")]
    state = checkpoints.read_state(run / "checkpoints" / "last")
    assert len(gaps) < 60
    assert state.best_epoch == gaps.index(max(gaps)) + 1 == len(gaps) - 2
    assert checkpoints.read_state(run / "checkpoints" / "best").epoch == state.best_epoch
    assert "no better gAP since epoch" in capsys.readouterr().err


def test_nothing_contacts_a_network(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    fit(recipe_of(given, "linear", fit__epochs=1), tmp_path / "run", show=False)


def test_without_a_validation_split_the_last_model_is_kept_and_that_is_said_once(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    fit(recipe_of(given, "linear", data__validation=0.0), run)
    assert capsys.readouterr().err.count("the last model is taken, not the best") == 1
    assert lines(run, "validation") == []
    assert same(model(run, "best"), model(run, "last"))


def test_what_cannot_be_trained_on_is_refused_and_nothing_is_begun(given: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RoadmatchError, match=r"batch\.size 64 .*set batch\.size to") as caught:
        fit(recipe_of(given, "linear", batch__size=64), run, show=False)
    assert "\n" not in str(caught.value)
    assert [path.name for path in run.iterdir()] == ["findings.txt"]
