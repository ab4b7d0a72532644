import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from roadmatch import bundle as bundles
from roadmatch.bundle import EMBEDDER, MODEL, Bundle
from roadmatch.embedding import Encoder, open_encoder
from roadmatch.embedding.engine import Pixels
from roadmatch.embedding.openvino_engine import OpenvinoEngine, agree, use_scalars
from roadmatch.embedding.torch_engine import TorchEngine
from roadmatch.embedding.unreported import openvino
from roadmatch.errors import BundleCorrupt, BundleUnsupported, ImageTooLarge, UnsupportedImage
from roadmatch.images import Limits, read_pixels
from roadmatch.scoring import Vector, background_level, similarity
from tests.bundles import DIMENSION, RULE, SIZE, edited, embedder, network, picture, tiny_bundle
from training.network.export import sample_pictures


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture(scope="module")
def engine() -> OpenvinoEngine:
    return OpenvinoEngine(embedder(), cpus=2)


ROOT = Path(__file__).parents[1]
PICTURES = list(sample_pictures(SIZE, number=6))


def test_an_embedding_is_a_unit_vector_of_its_own(engine: OpenvinoEngine) -> None:
    first = engine.embed(PICTURES[0])
    kept = first.copy()
    second = engine.embed(PICTURES[1])
    assert first.dtype == np.float32
    assert first.shape == (DIMENSION,) == (engine.dimension,)
    assert np.linalg.norm(first.astype(np.float64)) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(first, kept)
    assert similarity(first, second[None])[0] < 0.9
    first[0] = 0  # writable, and nobody else's


def test_one_thread_two_threads_and_many_callers_give_the_same_bits(engine: OpenvinoEngine) -> None:
    by_one_thread = OpenvinoEngine(embedder(), cpus=1)
    alone = [engine.embed(pixels) for pixels in PICTURES]
    np.testing.assert_array_equal(alone, [by_one_thread.embed(pixels) for pixels in PICTURES])
    with ThreadPoolExecutor(8) as callers:
        together = list(callers.map(engine.embed, PICTURES * 10))
    np.testing.assert_array_equal(together, alone * 10)
    np.testing.assert_array_equal([engine.embed(pixels) for pixels in PICTURES], alone)
    np.testing.assert_array_equal([engine.embed(pixels, busy=True) for pixels in PICTURES], alone)


class FakeRequest:
    """Counts how often it is asked; answers with one vector."""

    def __init__(self, first: float = 1.0) -> None:
        self.calls = 0
        self._vector = np.array([first, 0.0], np.float32)

    def infer(self, pixels: Pixels) -> Vector:
        self.calls += 1
        return self._vector


def test_equal_factors_of_the_channels_become_one_number_and_no_bit_changes(engine: OpenvinoEngine) -> None:
    core = openvino.Core()
    graph = core.read_model(embedder())
    precise = {"INFERENCE_PRECISION_HINT": "f32"}
    as_read = [core.compile_model(graph, "CPU", precise)(pixels[None])[0][0] for pixels in PICTURES]
    use_scalars(graph)
    first = next(node for node in graph.get_ordered_ops() if node.get_type_name() == "Multiply")
    assert first.input_value(1).get_shape() == openvino.Shape([])
    np.testing.assert_array_equal([engine.embed(pixels) for pixels in PICTURES], as_read)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core alone")
def test_streams_are_bound_to_no_core_or_two_processes_would_share_one(bundle: Bundle) -> None:
    """A worker embeds in streams; OpenVINO would bind the first of each process to the same core."""
    done = subprocess.run(
        [sys.executable, "-c", CORES_OF_THREADS, str(bundle.folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert json.loads(done.stdout) == [sorted(os.sched_getaffinity(0))]


CORES_OF_THREADS = """
import json, os, sys, threading
from pathlib import Path
import numpy as np
from roadmatch import bundle as bundles
from roadmatch.embedding.openvino_engine import OpenvinoEngine
read = bundles.read(Path(sys.argv[1]))
engine, ended = OpenvinoEngine(read.file(bundles.EMBEDDER), cpus=1), threading.Event()
size, found = read.manifest.preprocessing.size, set()
def embed():
    while not ended.is_set():
        engine.embed(np.zeros((size, size, 3), np.uint8), busy=True)
thread = threading.Thread(target=embed)
thread.start()
for _ in range(300):
    for one in os.listdir("/proc/self/task"):
        found.add(tuple(sorted(os.sched_getaffinity(int(one)))))
ended.set()
thread.join()
print(json.dumps(sorted(found)))
"""


def test_the_form_for_lone_calls_is_used_only_where_it_gives_the_same_bits() -> None:
    assert agree(FakeRequest(), FakeRequest(), SIZE)
    assert not agree(FakeRequest(), FakeRequest(float(np.nextafter(np.float32(1), np.float32(0)))), SIZE)


def test_the_torch_engine_agrees_with_the_openvino_engine(bundle: Bundle, engine: OpenvinoEngine) -> None:
    by_torch = TorchEngine(bundle, "cpu")
    assert by_torch.dimension == engine.dimension
    for pixels in PICTURES:
        np.testing.assert_allclose(by_torch.embed(pixels), engine.embed(pixels), rtol=0, atol=1e-4)


def test_the_torch_engine_computes_in_whole_float32(bundle: Bundle) -> None:
    torch.backends.cudnn.allow_tf32 = True
    TorchEngine(bundle, "cpu")
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_an_engine_takes_pixels_of_its_own_size_only(bundle: Bundle, engine: OpenvinoEngine) -> None:
    for other in (engine, TorchEngine(bundle, "cpu")):
        for pixels in (PICTURES[0][:-1], PICTURES[0][..., :1], PICTURES[0].astype(np.float32), PICTURES[0][None]):
            with pytest.raises(ValueError, match="pixels must be"):
                other.embed(pixels)  # type: ignore[arg-type]


def test_pixels_may_be_read_only_or_a_view(engine: OpenvinoEngine) -> None:
    expected = engine.embed(PICTURES[2])
    locked = PICTURES[2].copy()
    locked.flags.writeable = False
    wide = np.zeros((SIZE, 2 * SIZE, 3), np.uint8)
    wide[:, ::2] = PICTURES[2]
    np.testing.assert_array_equal(engine.embed(locked), expected)
    np.testing.assert_array_equal(engine.embed(wide[:, ::2]), expected)


def _graph(nodes: list[onnx.NodeProto], side: int | str = 4, pixel_type: int = onnx.TensorProto.UINT8) -> bytes:
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [onnx.helper.make_tensor_value_info("pixels", pixel_type, [1, side, side, 3])],
        [onnx.helper.make_tensor_value_info("embedding", onnx.TensorProto.FLOAT, [1, 3])],
        [onnx.numpy_helper.from_array(np.array([1, 2]), "axes")],
    )
    opset = [onnx.helper.make_opsetid("", 18)]
    return bytes(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString())


MEANS = [
    onnx.helper.make_node("Cast", ["pixels"], ["numbers"], to=onnx.TensorProto.FLOAT),
    onnx.helper.make_node("ReduceMean", ["numbers", "axes"], ["mean"], keepdims=0),
]
UNIT = [
    onnx.helper.make_node("LpNormalization", ["mean"], ["embedding"], axis=1, p=2),
]
UNDEFINED = [onnx.helper.make_node("Log", ["mean"], ["embedding"])]


def test_an_embedding_that_is_no_unit_vector_is_an_error_and_never_an_answer() -> None:
    right = OpenvinoEngine(_graph(MEANS + UNIT), cpus=1)
    wrong = OpenvinoEngine(_graph(MEANS + UNDEFINED), cpus=2)
    grey, black = np.full((4, 4, 3), 128, np.uint8), np.zeros((4, 4, 3), np.uint8)
    np.testing.assert_allclose(right.embed(grey), np.full(3, 3**-0.5), atol=1e-6)
    for engine, pixels in ((wrong, grey), (wrong, black)):
        for _ in range(3):
            with pytest.raises(BundleCorrupt, match="instead of 1"):
                engine.embed(pixels)


@pytest.mark.parametrize(
    "model",
    [
        b"",
        b"not a graph",
        _graph(MEANS + UNIT, side="any"),
        _graph(MEANS + UNIT, pixel_type=onnx.TensorProto.FLOAT),
    ],
)
def test_a_graph_that_is_no_embedder_is_refused_in_one_line(model: bytes) -> None:
    with pytest.raises(BundleCorrupt, match="embedder") as caught:
        OpenvinoEngine(model)
    assert "\n" not in str(caught.value)


def test_no_threads_at_all_is_a_wrong_argument() -> None:
    with pytest.raises(ValueError, match="cpus"):
        OpenvinoEngine(embedder(), cpus=0)


def _plain_level(vector: Vector, background: Vector, k: int) -> float:
    values = sorted((float(similarity(vector, row[None])[0]) for row in background), reverse=True)[:k]
    return round(sum(values) / len(values), 6) if values else 0.0


def test_encoding_is_reading_embedding_and_the_background_level(bundle: Bundle) -> None:
    data = edited(picture(5))
    encoded = open_encoder(bundle, cpus=2).encode(data)
    pixels, _ = read_pixels(data, RULE)
    with torch.inference_mode():
        expected = network()(torch.from_numpy(pixels)[None])[0].numpy()
    np.testing.assert_allclose(encoded.vector, expected, rtol=0, atol=1e-4)
    assert encoded.b == pytest.approx(_plain_level(encoded.vector, bundle.background, 2), abs=1e-6)
    assert encoded.b > 0
    assert (encoded.format.lower(), encoded.width, encoded.height) == ("jpeg", 96, 96)


@pytest.mark.parametrize("k", [1, 5, 30])
@pytest.mark.parametrize("rows", [1, 29, 30, 31, 700])
def test_the_background_level_is_the_mean_of_the_k_highest_similarities(rows: int, k: int) -> None:
    random = np.random.default_rng(rows)
    background = random.standard_normal((rows, 64)).astype(np.float32)
    background[rows // 2 :] = background[: rows - rows // 2] + 1e-4  # near ties, where a rough choice would go wrong
    background /= np.linalg.norm(background, axis=1, keepdims=True)
    for vector in background[:5]:
        assert background_level(vector, background, k) == _sorted_level(vector, background, k)


def _sorted_level(vector: Vector, background: Vector, k: int) -> float:
    return float(np.round(np.sort(similarity(vector, background))[-k:].mean(), 6))


def test_the_background_level_is_exact_where_float32_cannot_tell_which_is_highest() -> None:
    random = np.random.default_rng(0)
    centre = random.standard_normal((1, 1280))
    background = centre + 1e-6 * random.standard_normal((300, 1280))
    background = (background / np.linalg.norm(background, axis=1, keepdims=True)).astype(np.float32)
    vectors = centre + random.standard_normal((200, 1280))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    for vector in vectors:
        assert background_level(vector, background, 1) == _sorted_level(vector, background, 1)


def test_a_bundle_without_background_has_level_zero(bundle: Bundle, tmp_path: Path) -> None:
    plain = bundles.fitted(bundle, tmp_path / "plain", background=np.zeros((0, DIMENSION), np.float32))
    assert open_encoder(plain, cpus=1).encode(picture(1)).b == 0.0


def test_a_picture_that_is_refused_never_reaches_the_engine(bundle: Bundle) -> None:
    encoder = Encoder(bundle, NoEngine(), Limits(bytes=1000))
    with pytest.raises(UnsupportedImage):
        encoder.encode(b"%PDF-1.7")
    with pytest.raises(ImageTooLarge):
        encoder.encode(picture(1))


class NoEngine:
    """Must not be asked."""

    dimension = DIMENSION

    def embed(self, pixels: Pixels, *, busy: bool = False) -> Vector:
        raise AssertionError("the engine was asked")


def test_an_embedder_of_another_dimension_than_the_manifest_is_refused(bundle: Bundle) -> None:
    engine = NoEngine()
    engine.dimension = DIMENSION + 1
    with pytest.raises(BundleCorrupt, match="dimensions"):
        Encoder(bundle, engine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused_in_one_line(bundle: Bundle) -> None:
    with pytest.raises(BundleUnsupported, match="CUDA"):
        open_encoder(bundle, device="cuda")


def test_another_device_is_a_wrong_argument(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="tpu"):
        open_encoder(bundle, device="tpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why", "error"),
    [
        (lambda files: files.pop(MODEL), MODEL, BundleUnsupported),
        (
            lambda files: files.update({MODEL: bundles.background_bytes(np.eye(2, dtype=np.float32))}),
            MODEL,
            BundleCorrupt,
        ),
    ],
)
def test_the_torch_engine_needs_the_weights_of_the_architecture(
    bundle: Bundle, tmp_path: Path, change: Callable[[dict[str, bytes]], Any], why: str, error: type[Exception]
) -> None:
    files = {EMBEDDER: bundle.file(EMBEDDER), MODEL: bundle.file(MODEL)}
    change(files)
    manifest = bundle.manifest
    other = bundles.write(
        tmp_path / "other",
        name="other",
        architecture=manifest.architecture,
        preprocessing=manifest.preprocessing,
        mean=manifest.mean,
        std=manifest.std,
        dimension=manifest.dimension,
        score=manifest.score,
        licence=manifest.licence,
        provenance={},
        files=files,
        background=bundle.background,
    )
    with pytest.raises(error, match=why) as caught:
        TorchEngine(other, "cpu")
    assert "\n" not in str(caught.value)


def _run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_missing_torch_or_timm_names_the_extra(bundle: Bundle) -> None:
    for missing in ("torch", "timm"):
        assert "pip install 'roadmatch[gpu]'" in _run(
            f"""
import sys
sys.modules[{missing!r}] = None
from pathlib import Path
from roadmatch import bundle, embedding, errors
try:
    embedding.open_encoder(bundle.read(Path({str(bundle.folder)!r})), device="cuda")
except errors.BundleUnsupported as error:
    print(error)
"""
        )


def test_serving_on_the_cpu_loads_no_torch(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(picture(3))
    program = f"""
import importlib, pkgutil, sys
from pathlib import Path
import app
from roadmatch import bundle, embedding
for module in pkgutil.walk_packages(app.__path__, "app."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
encoder = embedding.open_encoder(bundle.read(Path({str(bundle.folder)!r})))
encoder.encode(Path({str(tmp_path / "picture")!r}).read_bytes())
print(sorted({{"torch", "timm", "onnx", "torchvision"}} & set(sys.modules)))
"""
    assert _run(program) == "[]"


def test_nothing_is_reported_to_anybody_on_the_internet(tmp_path: Path) -> None:
    program = """
import sys
seen = []
sys.addaudithook(lambda event, given: seen.append(event) if event.startswith(("socket.", "urllib.")) else None)
import roadmatch.embedding.openvino_engine, time
time.sleep(0.5)
print(seen)
"""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "[]\n"
    assert list(tmp_path.iterdir()) == []
