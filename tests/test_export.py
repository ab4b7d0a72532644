import os
import pickle
import site
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch

from roadmatch import bundle as bundles
from roadmatch.bundle import MODEL
from roadmatch.embedding import open_encoder
from roadmatch.embedding.network import EmbeddingNetwork, build_backbone
from roadmatch.embedding.openvino_engine import OpenvinoEngine
from roadmatch.errors import BundleUnsupported
from tests.bundles import ARCHITECTURE, DIMENSION, SIZE, STD, embedder, network, picture
from training.cli import main
from training.network.build import build
from training.network.export import PARITY, ParityError, check_parity, sample_pictures, to_onnx
from training.network.weights import (
    LITE0_WHEEL,
    StateDict,
    Weights,
    WeightsError,
    by_position,
    fit,
    lite_names,
    load_weights,
)

LITE0 = "tf_efficientnet_lite0"


def _full_model() -> StateDict:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return dict(timm.create_model(ARCHITECTURE, pretrained=False).state_dict())


FULL = _full_model()
BARE = {name: tensor for name, tensor in FULL.items() if not name.startswith("head.fc.")}


def _fit(tensors: StateDict) -> StateDict:
    return fit(Weights(tensors, {}), ARCHITECTURE)


def _same(first: StateDict, second: StateDict) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_the_wheel_maps_to_timm_by_name_and_by_position_alike() -> None:
    weights = load_weights(LITE0_WHEEL, LITE0)
    full = timm.create_model(LITE0, pretrained=False).state_dict()
    assert set(lite_names(weights.tensors)) == set(full)
    by_name = fit(weights, LITE0)
    by_order = by_position(weights.tensors, full, {"classifier.weight", "classifier.bias"})
    assert by_order is not None
    assert _same(by_name, by_order)
    assert _same(by_name, fit(Weights(weights.tensors, {}), LITE0))
    assert weights.mean == pytest.approx((127 / 255,) * 3)
    assert weights.std == pytest.approx((128 / 255,) * 3)
    assert weights.provenance["version"] == "0.1.0"


def test_another_state_dict_is_not_taken_for_the_wheels() -> None:
    with pytest.raises(WeightsError, match="EfficientNet-Lite0"):
        lite_names({"layer1.weight": torch.zeros(1)})


def test_weights_are_taken_by_name_without_the_classifier() -> None:
    assert _same(_fit(FULL), BARE)
    assert _same(_fit(BARE), BARE)
    assert _same(_fit(dict(reversed(FULL.items()))), BARE)
    assert _same(_fit({f"module.{name}": tensor for name, tensor in FULL.items()}), BARE)
    assert _same(_fit({**FULL, "head.fc.weight": torch.zeros(3, DIMENSION), "head.fc.bias": torch.zeros(3)}), BARE)


def test_weights_of_half_precision_become_float32() -> None:
    fitted = _fit({name: tensor.half() for name, tensor in BARE.items()})
    assert {tensor.dtype for tensor in fitted.values()} == {torch.float32}


@pytest.mark.parametrize("tensors", [FULL, BARE, {**FULL, "head.fc.weight": torch.zeros(3, DIMENSION)}])
def test_weights_of_foreign_names_are_taken_by_position_where_every_shape_agrees(tensors: StateDict) -> None:
    assert _same(_fit({f"layer{i}": tensor for i, tensor in enumerate(tensors.values())}), BARE)


def test_weights_that_do_not_fit_are_refused_with_their_keys() -> None:
    names = list(BARE)
    lacking = {name: tensor for name, tensor in BARE.items() if name != names[4]}
    misshapen = {**BARE, names[0]: torch.zeros(1, 2, 3)}
    foreign = {**BARE, "extra.weight": torch.zeros(1)}
    for tensors, words in (
        (lacking, ["missing", names[4]]),
        (misshapen, ["wrong shape", names[0], "(1, 2, 3)"]),
        (foreign, ["unknown", "extra.weight"]),
        ({f"layer{i}": tensor for i, tensor in enumerate(reversed(BARE.values()))}, ["missing", "layer0", "more"]),
    ):
        with pytest.raises(WeightsError) as caught:
            _fit(tensors)
        assert all(word in str(caught.value) for word in words), caught.value
        assert "\n" not in str(caught.value)


def test_position_counts_for_nothing_where_a_known_name_stands_elsewhere() -> None:
    twins = [name for name, tensor in BARE.items() if tensor.shape == torch.Size([DIMENSION])]
    swap = {twins[0]: twins[1], twins[1]: "renamed"}
    with pytest.raises(WeightsError, match="renamed"):
        _fit({swap.get(name, name): tensor for name, tensor in BARE.items()})


def test_weights_that_are_not_finite_are_refused() -> None:
    name = next(iter(BARE))
    with pytest.raises(WeightsError, match=f"{name} is not finite"):
        _fit({**BARE, name: torch.full_like(BARE[name], torch.nan)})


@pytest.mark.parametrize("kind", ["plain", "wrapped", "safetensors"])
def test_weights_are_read_from_a_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pth")
    if kind == "safetensors":
        safetensors.torch.save_file(FULL, path)
    else:
        torch.save(FULL if kind == "plain" else {"state_dict": FULL, "epoch": 3}, path)
    weights = load_weights(str(path), ARCHITECTURE)
    assert _same(fit(weights, ARCHITECTURE), BARE)
    assert weights.provenance["file"] == path.name


class Payload:
    """What a hostile pickle does when it is loaded: it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    torch.save({"weight": Payload(canary)}, tmp_path / "zip.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Payload(canary)))
    (tmp_path / "named.safetensors").write_bytes(pickle.dumps(Payload(canary)))
    for name in ("zip.pth", "plain.pth", "named.safetensors"):
        with pytest.raises(WeightsError, match=name) as caught:
            load_weights(str(tmp_path / name), ARCHITECTURE)
        assert "\n" not in str(caught.value)
    assert not canary.exists()


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, [1, 2], {"weight": [1.0]}])
def test_a_file_of_other_things_than_named_tensors_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(WeightsError, match=r"weights\.pth holds"):
        load_weights(str(tmp_path / "weights.pth"), ARCHITECTURE)


@pytest.mark.parametrize("content", [b"", b"GIF89a"])
def test_a_file_that_is_no_weights_is_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("weights.pth", "weights.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=name):
            load_weights(str(tmp_path / name), ARCHITECTURE)
    with pytest.raises(WeightsError, match="nowhere"):
        load_weights(str(tmp_path / "nowhere.pth"), ARCHITECTURE)


@pytest.mark.parametrize(
    "name", ["hf-hub:timm/resnet18.a1_in1k", "local-dir:.", "resnet18.a1_in1k", "", "no_such_model"]
)
def test_only_names_of_timms_own_list_are_architectures(name: str) -> None:
    with pytest.raises(BundleUnsupported, match="has no model"):
        build_backbone(name)


def test_the_graph_is_the_same_bytes_each_time_and_holds_no_path_of_this_machine() -> None:
    graph = to_onnx(network(), SIZE)
    assert graph == embedder()
    for trace in (str(Path.cwd()), sys.prefix, *site.getsitepackages(), str(Path.home()) + "/", ".py", "Traceback"):
        assert trace.encode() not in graph


def test_the_graph_says_what_torch_says() -> None:
    engine = OpenvinoEngine(embedder(), cpus=1)
    assert check_parity(network(), engine, sample_pictures(SIZE)) < PARITY / 10


def test_a_graph_of_another_normalisation_is_a_parity_error() -> None:
    other = EmbeddingNetwork(network().backbone, (0.5, 0.5, 0.49), STD)
    with pytest.raises(ParityError, match="differs from torch"):
        check_parity(other, OpenvinoEngine(embedder(), cpus=1), sample_pictures(SIZE))


def test_pixels_are_normalised_by_the_stated_mean_and_std() -> None:
    class Corner(torch.nn.Module):
        """The features are the three values of the first pixel."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :, 0, 0]

    pixels = torch.tensor([51, 102, 255], dtype=torch.uint8).expand(1, 2, 2, 3)
    values = (np.array([0.2, 0.4, 1.0]) - [0.1, 0.2, 0.3]) / [0.5, 0.25, 0.2]
    got = EmbeddingNetwork(Corner(), (0.1, 0.2, 0.3), (0.5, 0.25, 0.2))(pixels)[0].numpy()
    np.testing.assert_allclose(got, values / np.linalg.norm(values), atol=1e-6)


@pytest.fixture
def weights_file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(FULL, path)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for seed, name in enumerate(("b.png", "a.png", "more/c.png")):
        (folder / name).write_bytes(picture(seed))
    (folder / ".hidden").write_text("not a picture")
    return folder


def _command(weights: object, out: Path, *more: object, architecture: str = ARCHITECTURE) -> list[str]:
    options = ["--architecture", architecture, "--weights", weights, "--name", "made", "--licence", "CC0-1.0"]
    return [str(part) for part in ("bundle", *options, "--out", out, *more)]


def test_the_command_makes_a_bundle_that_encodes_pictures(
    tmp_path: Path, weights_file: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "made"
    assert main(_command(weights_file, out, "--size", SIZE, "--background", pictures)) == 0
    bundle = bundles.read(out)
    assert capsys.readouterr().out.startswith(bundle.id)
    manifest = bundle.manifest
    assert (manifest.name, manifest.architecture, manifest.licence) == ("made", ARCHITECTURE, "CC0-1.0")
    config = timm.data.resolve_model_data_config(build_backbone(ARCHITECTURE))
    assert (manifest.mean, manifest.std) == (config["mean"], config["std"])
    assert manifest.preprocessing.size == SIZE
    assert manifest.preprocessing.resize == int(SIZE / config["crop_pct"])
    assert manifest.preprocessing.reduce_to == 2 * manifest.preprocessing.resize
    stored = safetensors.torch.load(bundle.file(MODEL))
    assert _same({name: stored[name] for name in BARE}, BARE)
    assert len(stored) == len(BARE)
    encoder = open_encoder(bundle, cpus=1)
    expected = [encoder.encode((pictures / name).read_bytes()).vector for name in ("a.png", "b.png", "more/c.png")]
    np.testing.assert_array_equal(bundle.background, expected)
    assert manifest.provenance["background"]["pictures"] == 3  # type: ignore[index,call-overload]
    assert manifest.provenance["weights"]["file"] == "weights.safetensors"  # type: ignore[index,call-overload]
    for path in out.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()


def test_the_same_parts_build_the_same_bundle(tmp_path: Path, weights_file: Path) -> None:
    first, second = (
        build(
            tmp_path / name,
            architecture=ARCHITECTURE,
            weights=str(weights_file),
            name="made",
            licence="CC0-1.0",
            size=SIZE,
            with_model=False,
        )
        for name in ("a", "b")
    )
    assert first.digest == second.digest
    assert MODEL not in first.manifest.files
    assert first.operating_points is None
    assert first.background.shape == (0, DIMENSION)


def test_a_command_that_fails_says_so_in_one_line_and_leaves_nothing(
    tmp_path: Path, weights_file: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "more" / "broken.png").write_bytes(picture(1)[:200])
    (tmp_path / "none").mkdir()
    out = tmp_path / "out" / "made"
    size = ("--size", SIZE)
    for command, words in (
        (_command(weights_file, out, architecture="hf-hub:a/b"), "has no model"),
        (_command(weights_file, out, architecture="test_resnet"), "do not fit"),
        (_command(weights_file, out, *size, architecture="vit_tiny_patch16_224"), "224 px only"),
        (_command(tmp_path / "nowhere.pth", out), "nowhere.pth"),
        (_command(weights_file, out, *size, "--background", pictures), "broken.png"),
        (_command(weights_file, out, *size, "--background", tmp_path / "none"), "no files"),
        (_command(weights_file, pictures, *size), "is no bundle"),
    ):
        assert main(command) == 1
        told = capsys.readouterr()
        assert words in told.err
        assert told.err.count("\n") == 1
        assert told.out == ""
        assert not out.parent.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none", "pictures", "weights.safetensors"]


@pytest.mark.parametrize(
    "wrong",
    [("--name", "Capital"), ("--name", "../up"), ("--size", "0"), ("--size", "9999"), ("--size", "x"), ("--surprise",)],
)
def test_a_wrong_command_line_is_told_before_any_work(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(_command("timm", tmp_path / "out", *wrong))
    assert caught.value.code == 2


def _module(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "training", *command],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )


def test_timms_own_weights_without_a_hub_are_refused_in_one_line(tmp_path: Path) -> None:
    done = _module(_command("timm", tmp_path / "out"), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 1
    assert "timm's own weights" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_torch_names_the_extra(tmp_path: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; from training.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *_command("timm", tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stderr == "roadmatch-train: torch is not installed: pip install 'roadmatch[train]'\n"
