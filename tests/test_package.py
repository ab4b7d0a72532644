"""Export: a bundle that says what torch says, serves at once and holds no path of the machine, or none at all."""

import json
import re
from pathlib import Path

import httpx2
import numpy as np
import pytest
import safetensors.torch
import torch

from roadmatch import bundle as bundles
from roadmatch.bundle import MODEL, OPERATING_POINTS, Bundle
from roadmatch.calibration import Calibration
from roadmatch.embedding import open_encoder
from roadmatch.embedding.network import EmbeddingNetwork, build_backbone
from roadmatch.errors import BundleUnsupported
from tests import service
from tests.bundles import picture
from tests.tiny_run import DISTRACTORS, TEST_CLASSES, tiny_run, views
from training.fitting.run_folder import RunError
from training.judging import package
from training.judging.embedded import AFTER, Embeddings
from training.judging.package import HTML, JSON, export
from training.judging.points import calibrate
from training.judging.trained import trained
from training.network.export import ParityError, to_onnx
from training.recipe import Mode

HOW = Calibration(resamples=100)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tiny_run(tmp_path_factory.mktemp("package"))
    calibrate(run, HOW)
    return run


@pytest.fixture(scope="module")
def bundle(run: Path) -> Bundle:
    return export(run, run.parent / "deep" / "bundle")


def test_the_bundle_holds_the_trained_network_and_its_points(run: Path, bundle: Bundle) -> None:
    opened = trained(run)
    manifest = bundle.manifest
    assert (manifest.name, manifest.licence, manifest.head) == ("tiny", "CC0-1.0", opened.recipe.network.head)
    assert bundle.operating_points is not None
    assert bundle.operating_points.model == bundle.model
    assert bundle.operating_points.default_rule == "false_match_rate<=0.1"
    backbone = build_backbone(manifest.architecture, manifest.head)
    backbone.load_state_dict(safetensors.torch.load(bundle.file(MODEL)), strict=True)
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            backbone.state_dict().values(), opened.network.backbone.state_dict().values(), strict=True
        )
    )


def test_the_bundle_embeds_files_as_they_were_calibrated(run: Path, bundle: Bundle) -> None:
    opened = trained(run)
    encoder = open_encoder(bundle, cpus=1)
    expected = Embeddings(opened, AFTER).of(np.arange(3))
    for n, vector in enumerate(expected):
        found = encoder.encode(opened.manifest.file(n).read_bytes()).vector
        np.testing.assert_allclose(found, vector, atol=1e-5)


def test_the_bundle_says_where_it_comes_from(run: Path, bundle: Bundle) -> None:
    opened = trained(run)
    said = json.loads(json.dumps(bundle.manifest.provenance))
    assert said["data"]["manifest_sha256"] == opened.manifest.digest
    assert said["checkpoint"] == {"sha256": opened.model, "epoch": 3, "steps": 6, "validation_gap": 0.5}
    assert said["seed"] == 0
    assert "name: gsap" in said["recipe"]
    assert said["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert said["parity"]["on_test_images"] <= said["parity"]["allowed"] == 1e-4
    assert said["parity"]["on_synthetic"] <= 1e-4
    assert (said["parity"]["test_images"], said["parity"]["synthetic"]) == (16, 8)
    assert said["calibration"]["classes"] == TEST_CLASSES
    assert said["calibration"]["distractors"] == DISTRACTORS


def test_no_file_of_the_bundle_names_a_place_of_this_machine(run: Path, bundle: Bundle) -> None:
    names = {path.name for path in bundle.folder.iterdir()}
    assert {HTML, JSON, OPERATING_POINTS} < names
    for name in names:
        content = (bundle.folder / name).read_bytes()
        for place in (str(run.parent), str(Path.cwd()), str(Path.home()) + "/"):
            assert place.encode() not in content, name
    assert b".jpg" not in (bundle.folder / JSON).read_bytes()


def test_the_exported_bundle_answers_match_and_no_match_at_once(tmp_path: Path, bundle: Bundle) -> None:
    """The images of the first test classes that are found again and the distractors, by the service itself."""
    with (
        service.running(tmp_path / "data", bundle.folder) as served,
        httpx2.Client(base_url=served.url, timeout=20) as client,
    ):
        assert client.post("/v1/galleries", json={"name": "g"}).status_code == 201
        for number in range(12):
            files = {"image": views(number)[0]}
            assert client.put(f"/v1/galleries/g/items/i{number}", files=files).status_code == 201

        def search(data: bytes) -> dict[str, object]:
            found: dict[str, object] = client.post("/v1/galleries/g/search", files={"image": data}).json()
            return found

        again = [search(views(number)[0]) for number in range(12)]
        assert {one["decision"] for one in again} == {"match"}
        others = [search(picture(2000 + number)) for number in range(DISTRACTORS)]
        assert [one["decision"] for one in others].count("no_match") >= DISTRACTORS - 1
        assert again[0]["operating_point"] == "false_match_rate<=0.1"
        assert "held-out classes of tiny" in json.dumps(client.get("/v1/bundles").json())
        assert client.get("/openapi.json").status_code == 200
        assert served.stop() == 0


def test_a_graph_that_says_something_else_than_torch_is_not_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another(network: EmbeddingNetwork, size: int) -> bytes:
        graph = to_onnx(network, size)
        with torch.no_grad():
            list(network.parameters())[-1].add_(0.1)  # the projection's bias
        return graph

    monkeypatch.setattr(package, "to_onnx", of_another)
    with pytest.raises(ParityError, match="differs from torch"):
        export(run, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_bundle_stays_as_it_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is no bundle"):
        export(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.faults  # a second export
def test_too_few_classes_make_a_bundle_only_without_points(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, mode=Mode.LINEAR, classes=4)
    out = tmp_path / "bundle"
    with pytest.raises(RunError, match="20 are needed"):
        export(run, out)
    assert not out.exists()
    bundle = export(run, out, calibrated=False, pictures=False)
    assert bundle.operating_points is None
    assert bundle.manifest.head.dimension == 32
    shown = (out / HTML).read_text()
    assert "the bundle is not calibrated" in shown
    assert "data:image/jpeg" not in shown
    old = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(re.sub('"format": 1', '"format": 2', old))
    with pytest.raises(BundleUnsupported, match="has format 2"):
        bundles.read(out)
