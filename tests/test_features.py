"""Features of frozen layers: serving's, computed once, and found again by every run to which they belong."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor

from roadmatch.images import read_pixels
from tests.bundles import edited, picture
from training import recipe
from training.data.manifest import DataError, Manifest, Split
from training.fitting import features
from training.fitting.features import FeaturesError, features_of, key_of, projection_of
from training.network.trainable import Opened, open_network

ARCHITECTURE = "test_resnet"
COUNT = 5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So small a network is faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    for n in range(COUNT):
        (tmp_path / f"{n}.jpg").write_bytes(edited(picture(n)))
    return of_labels(tmp_path, "a")


def of_labels(root: Path, label: str) -> Manifest:
    every = np.ones(COUNT, bool)
    paths = tuple(f"{n}.jpg" for n in range(COUNT))
    return Manifest(root, paths, (label,) * COUNT, (Split.TRAIN,) * COUNT, every, every, ("",) * COUNT)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        tensors = timm.create_model(ARCHITECTURE, pretrained=False).state_dict()
    path = tmp_path_factory.mktemp("weights") / "resnet.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path


def network_of(weights: Path, **head: object) -> recipe.Network:
    wanted = {"dimension": 8, **head}
    settings = {"architecture": ARCHITECTURE, "weights": str(weights), "size": 64, "head": wanted}
    return recipe.Network.model_validate(settings)


def made(network: recipe.Network, manifest: Manifest, folder: Path, told: list[int] | None = None) -> Tensor:
    opened = open_network(network, seed=1)
    progress = None if told is None else told.append
    return features_of(opened, network, manifest, folder, device=torch.device("cpu"), threads=2, progress=progress)


@pytest.mark.parametrize("head", [{}, {"layer_norm": True}, {"pooling": "gem"}])
def test_projected_features_are_the_embeddings_of_the_whole_network(
    head: dict[str, object], weights: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_AT_ONCE", 2)
    network = network_of(weights, **head)
    opened = open_network(network, seed=1)
    pixels = [read_pixels(manifest.file(n).read_bytes(), opened.preprocessing)[0] for n in range(COUNT)]
    with torch.no_grad():
        whole = opened.network(torch.from_numpy(np.stack(pixels)))
        found = projection_of(opened.network)(made(network, manifest, tmp_path / "features"))
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-5)


def test_the_projection_has_the_names_of_the_whole_backbones_head(weights: Path) -> None:
    opened = open_network(network_of(weights, layer_norm=True), seed=1)
    names = set(projection_of(opened.network).state_dict())
    assert names == {name for name in opened.network.backbone.state_dict() if name.startswith("head.")}
    assert names


def test_another_head_other_labels_and_splits_find_the_same_features(
    weights: Path, manifest: Manifest, tmp_path: Path
) -> None:
    told: list[int] = []
    first = made(network_of(weights), manifest, tmp_path / "features", told)
    assert told == [COUNT]
    other = made(
        network_of(weights, dimension=4, layer_norm=True), of_labels(tmp_path, "b"), tmp_path / "features", told
    )
    assert told == [COUNT]
    assert other.equal(first)
    assert len(list((tmp_path / "features").iterdir())) == 1


def test_what_changes_the_features_has_another_key(weights: Path, manifest: Manifest, tmp_path: Path) -> None:
    def key(network: recipe.Network, **size: int) -> str:
        opened: Opened = open_network(network.model_copy(update=size), seed=1)
        return key_of(opened, network, manifest)

    plain = network_of(weights)
    keys = [key(plain), key(plain, size=96), key(network_of(weights, pooling="max"))]
    tensors = safetensors.torch.load_file(weights)
    tensors["conv1.0.weight"] += 0.5
    safetensors.torch.save_file(tensors, tmp_path / "other.safetensors")
    keys.append(key(network_of(tmp_path / "other.safetensors")))
    (tmp_path / "3.jpg").write_bytes(edited(picture(77)))
    keys.append(key(plain))
    assert len(set(keys)) == 5


def test_a_picture_that_cannot_be_read_is_named_and_nothing_is_kept(
    weights: Path, manifest: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "3.jpg").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"3\.jpg"):
        made(network_of(weights), manifest, tmp_path / "features")
    (tmp_path / "3.jpg").unlink()
    with pytest.raises(DataError, match=r"3\.jpg cannot be read: No such file"):
        made(network_of(weights), manifest, tmp_path / "features")
    assert not (tmp_path / "features").exists()


def test_a_broken_file_of_features_is_an_error_that_says_what_to_do(
    weights: Path, manifest: Manifest, tmp_path: Path
) -> None:
    made(network_of(weights), manifest, tmp_path / "features")
    (file,) = (tmp_path / "features").iterdir()
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(FeaturesError, match="delete it, and it is made anew") as caught:
        made(network_of(weights), manifest, tmp_path / "features")
    assert "\n" not in str(caught.value)


def test_a_network_without_a_head_has_nothing_to_train(weights: Path) -> None:
    with pytest.raises(FeaturesError, match=r"network\.head\.dimension"):
        projection_of(open_network(network_of(weights, dimension=None), seed=1).network)
