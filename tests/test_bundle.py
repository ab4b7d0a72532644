import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from roadmatch import bundle as bundles
from roadmatch.bundle import BACKGROUND, EMBEDDER, MANIFEST, MODEL, OPERATING_POINTS, Bundle
from roadmatch.errors import BundleCorrupt, BundleError, BundleUnsupported
from roadmatch.scoring import ScoreRule, Vector
from tests.bundles import ARCHITECTURE, DIMENSION, MEAN, RULE, SCORE, STD, operating_points, tiny_bundle

FILES = (MANIFEST, EMBEDDER, MODEL, BACKGROUND, OPERATING_POINTS)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny").folder


@pytest.fixture
def bundle(made_once: Path, tmp_path: Path) -> Bundle:
    return bundles.read(Path(shutil.copytree(made_once, tmp_path / "tiny")))


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _spelled(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest and seals it again, as a forger or a faulty program would."""
    content = json.loads((folder / MANIFEST).read_bytes())
    del content["sha256"]
    change(content)
    (folder / MANIFEST).write_bytes(_spelled({**content, "sha256": hashlib.sha256(_spelled(content)).hexdigest()}))


def _replace(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    _rewrite(folder, lambda manifest: manifest["files"].update({name: hashlib.sha256(content).hexdigest()}))


def _parts(files: dict[str, bytes | Path], background: Vector | None = None) -> dict[str, Any]:
    return {
        "name": "parts",
        "architecture": ARCHITECTURE,
        "preprocessing": RULE,
        "mean": MEAN,
        "std": STD,
        "dimension": DIMENSION,
        "score": SCORE,
        "licence": "CC0-1.0",
        "provenance": {},
        "files": files,
        "background": np.zeros((0, DIMENSION), np.float32) if background is None else background,
    }


def test_a_bundle_reads_back_as_it_was_written(bundle: Bundle) -> None:
    again = bundles.read(bundle.folder)
    assert again.manifest == bundle.manifest
    assert again.digest == hashlib.sha256((bundle.folder / MANIFEST).read_bytes()).hexdigest()
    assert again.id == f"tiny@{again.digest[:12]}"
    assert again.manifest.score == SCORE
    assert again.manifest.preprocessing == RULE
    assert again.background.shape == (8, DIMENSION)
    assert again.operating_points is not None
    assert again.operating_points.model == again.model
    assert hashlib.sha256(again.file(MODEL)).hexdigest() == again.manifest.files[MODEL]


def test_equal_parts_give_equal_bytes(tmp_path: Path) -> None:
    first, second = tiny_bundle(tmp_path / "a"), tiny_bundle(tmp_path / "b")
    assert _contents(first.folder) == _contents(second.folder)
    assert first.id == second.id
    assert first.id != tiny_bundle(tmp_path / "c", name="other").id


@pytest.mark.parametrize("name", FILES)
def test_one_changed_byte_is_refused_with_the_name_of_its_file(bundle: Bundle, name: str) -> None:
    path = bundle.folder / name
    original = path.read_bytes()
    random = np.random.default_rng(0)
    for place in random.integers(0, len(original), 40 if name == MANIFEST else 3):
        changed = bytearray(original)
        changed[place] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(changed)
        with pytest.raises(BundleError, match=str(path)) as caught:
            bundles.read(bundle.folder)
        assert "\n" not in str(caught.value)
    path.write_bytes(original)
    assert bundles.read(bundle.folder).id == bundle.id


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_with_its_name(bundle: Bundle, name: str) -> None:
    (bundle.folder / name).unlink()
    with pytest.raises(BundleCorrupt, match=str(bundle.folder / name)):
        bundles.read(bundle.folder)


def test_a_file_that_changes_after_the_bundle_was_read_is_not_used(bundle: Bundle) -> None:
    (bundle.folder / EMBEDDER).write_bytes(b"another")
    with pytest.raises(BundleCorrupt, match=EMBEDDER):
        bundle.file(EMBEDDER)


def test_a_file_that_the_manifest_does_not_list_is_refused(bundle: Bundle) -> None:
    (bundle.folder / "report.html").write_text("<p>stray</p>")
    with pytest.raises(BundleCorrupt, match=r"report\.html is not listed"):
        bundles.read(bundle.folder)


def test_another_format_version_is_unsupported_and_not_corrupt(bundle: Bundle) -> None:
    _rewrite(bundle.folder, lambda manifest: manifest.update(format=2))
    with pytest.raises(BundleUnsupported, match="format 2"):
        bundles.read(bundle.folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.update(format="1"), "format"),
        (lambda m: m.pop("format"), "format"),
        (lambda m: m.update(name="../up"), "name"),
        (lambda m: m.update(name="Capital"), "name"),
        (lambda m: m.update(name="a\n"), "name"),
        (lambda m: m.update(architecture="hf-hub:someone/model"), "architecture"),
        (lambda m: m.update(surprise=1), "surprise"),
        (lambda m: m.pop("licence"), "licence"),
        (lambda m: m.update(dimension=0), "dimension"),
        (lambda m: m.update(std=[0.5, 0.0, 0.5]), "std"),
        (lambda m: m.update(mean=[0.5, 0.5]), "mean"),
        (lambda m: m["preprocessing"].update(size=0), "preprocessing"),
        (lambda m: m["preprocessing"].update(resize=8), "preprocessing"),
        (lambda m: m["preprocessing"].update(crop="middle"), "preprocessing"),
        (lambda m: m["preprocessing"].pop("reduce_to"), "preprocessing"),
        (lambda m: m["score"].update(k=0), "score"),
        (lambda m: m["score"].update(beta=-0.1), "score"),
        (lambda m: m["score"].update(alpha=0.1), "score"),
        (lambda m: m["score"].update(beta=float("nan")), "NaN"),
        (lambda m: m["provenance"].update(rate=float("inf")), "Infinity"),
        (lambda m: m["files"].pop(BACKGROUND), BACKGROUND),
        (lambda m: m["files"].pop(EMBEDDER), EMBEDDER),
        (lambda m: m["files"].update({EMBEDDER: "00"}), EMBEDDER),
        (lambda m: m["files"].update({"../secret": "0" * 64}), "secret"),
        (lambda m: m["files"].update({"sub/report.html": "0" * 64}), "sub/report.html"),
        (lambda m: m["files"].update({MANIFEST: "0" * 64}), MANIFEST),
        (lambda m: m["files"].update({"weights.pth": "0" * 64}), "weights.pth"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_in_one_line(
    bundle: Bundle, change: Callable[[dict[str, Any]], Any], why: str
) -> None:
    _rewrite(bundle.folder, change)
    with pytest.raises(BundleCorrupt) as caught:
        bundles.read(bundle.folder)
    assert str(caught.value).startswith(str(bundle.folder / MANIFEST))
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}'])
def test_a_manifest_that_is_no_manifest_is_refused(bundle: Bundle, raw: bytes) -> None:
    (bundle.folder / MANIFEST).write_bytes(raw)
    with pytest.raises(BundleCorrupt, match=MANIFEST):
        bundles.read(bundle.folder)


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleCorrupt, match=MANIFEST):
        bundles.read(tmp_path / folder)


def _unit(count: int, dimension: int) -> Vector:
    vectors = np.random.default_rng(1).standard_normal((count, dimension)).astype(np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (bundles.background_bytes(_unit(3, DIMENSION + 1)), "dimensions"),
        (bundles.background_bytes(_unit(3, DIMENSION) * np.float32(1.001)), "unit length"),
        (bundles.background_bytes(_unit(3, DIMENSION) * np.array([[1], [np.nan], [1]], np.float32)), "unit length"),
        (bundles.background_bytes(np.zeros((2, DIMENSION), np.float32)), "unit length"),
        (bundles.background_bytes(_unit(3, DIMENSION)[0]), "matrix"),
        (safetensors.numpy.save({"embeddings": _unit(3, DIMENSION).astype(np.float64)}), "matrix"),
        (safetensors.numpy.save({"vectors": _unit(3, DIMENSION)}), "matrix"),
        (b"", "safetensors"),
        (b"\x80\x04N.", "safetensors"),
        (bundles.background_bytes(_unit(3, DIMENSION))[:-8], "safetensors"),
    ],
)
def test_a_background_of_other_things_than_unit_vectors_is_refused(bundle: Bundle, content: bytes, why: str) -> None:
    _replace(bundle.folder, BACKGROUND, content)
    with pytest.raises(BundleCorrupt, match=why) as caught:
        bundles.read(bundle.folder)
    assert str(caught.value).startswith(str(bundle.folder / BACKGROUND))


def test_the_background_cannot_be_written_to(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="read-only"):
        bundle.background[0, 0] = 1


@pytest.mark.parametrize("content", [b"{}", b"not json"])
def test_operating_points_that_are_none_are_refused(bundle: Bundle, content: bytes) -> None:
    _replace(bundle.folder, OPERATING_POINTS, content)
    with pytest.raises(BundleCorrupt, match=OPERATING_POINTS):
        bundles.read(bundle.folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["score"].update(beta=0.25),
        lambda m: m["preprocessing"].update(resize=72),
    ],
)
def test_operating_points_fitted_for_another_model_are_refused(
    bundle: Bundle, change: Callable[[dict[str, Any]], Any]
) -> None:
    _rewrite(bundle.folder, change)
    with pytest.raises(BundleCorrupt, match=f"{OPERATING_POINTS} was fitted for another model"):
        bundles.read(bundle.folder)


def test_operating_points_are_refused_after_another_background_or_embedder(bundle: Bundle) -> None:
    _replace(bundle.folder, BACKGROUND, bundles.background_bytes(bundle.background[1:]))
    with pytest.raises(BundleCorrupt, match="fitted for another model"):
        bundles.read(bundle.folder)
    _replace(bundle.folder, BACKGROUND, bundles.background_bytes(bundle.background))
    assert bundles.read(bundle.folder).model == bundle.model
    _replace(bundle.folder, EMBEDDER, b"another graph")
    with pytest.raises(BundleCorrupt, match="fitted for another model"):
        bundles.read(bundle.folder)


def test_a_written_bundle_takes_the_place_of_another_as_a_whole(tmp_path: Path) -> None:
    old = tiny_bundle(tmp_path / "tiny")
    plain = bundles.write(tmp_path / "tiny", **_parts({EMBEDDER: b"graph"}))
    assert set(_contents(tmp_path / "tiny")) == {MANIFEST, EMBEDDER, BACKGROUND}
    assert plain.id != old.id
    assert plain.operating_points is None
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_bundle_that_cannot_be_built_leaves_everything_as_it_was(tmp_path: Path) -> None:
    old = tiny_bundle(tmp_path / "tiny")
    before = _contents(old.folder)
    wrong_points = operating_points("0" * 64)
    attempts: tuple[Callable[[], Bundle], ...] = (
        lambda: bundles.write(old.folder, **_parts({EMBEDDER: tmp_path / "nowhere"})),
        lambda: bundles.write(old.folder, **_parts({EMBEDDER: b"graph"}, background=_unit(2, DIMENSION) * 2)),
        lambda: bundles.write(old.folder, **_parts({EMBEDDER: b"graph", "weights.pth": b"pickle"})),
        lambda: bundles.fitted(old, old.folder, operating_points=wrong_points),
    )
    for attempt in attempts:
        with pytest.raises((OSError, ValueError, BundleCorrupt)) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert _contents(old.folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_bytes(b"")
    for name in ("photos", "file"):
        with pytest.raises(FileExistsError, match="is no bundle"):
            bundles.write(tmp_path / name, **_parts({EMBEDDER: b"graph"}))
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"


def test_a_file_may_come_from_a_path(tmp_path: Path) -> None:
    (tmp_path / "graph").write_bytes(b"graph")
    from_path = bundles.write(tmp_path / "a", **_parts({EMBEDDER: tmp_path / "graph"}))
    from_bytes = bundles.write(tmp_path / "b", **_parts({EMBEDDER: b"graph"}))
    assert from_path.digest == from_bytes.digest


def test_fitting_keeps_the_embedder_and_drops_points_that_no_longer_hold(bundle: Bundle, tmp_path: Path) -> None:
    same = bundles.fitted(bundle, tmp_path / "same", provenance={"fitted": "again"}, reports={"report.json": b"{}"})
    assert same.operating_points == bundle.operating_points
    assert same.manifest.provenance == {"made": "for tests", "fitted": "again"}
    assert same.file("report.json") == b"{}"

    rule = ScoreRule(beta=0.3, gamma=0.0, k=5)
    changed = bundles.fitted(bundle, tmp_path / "changed", score=rule)
    assert changed.operating_points is None
    assert changed.model == bundles.model_of(bundle, rule, bundle.background) != bundle.model
    assert changed.manifest.files[EMBEDDER] == bundle.manifest.files[EMBEDDER]

    fresh = operating_points(changed.model)
    assert bundles.fitted(changed, tmp_path / "fresh", operating_points=fresh).operating_points == fresh


def test_a_file_that_the_bundle_was_made_without_is_asked_for_in_one_line(tmp_path: Path) -> None:
    plain = bundles.write(tmp_path / "plain", **_parts({EMBEDDER: b"graph"}))
    with pytest.raises(BundleUnsupported, match=MODEL):
        plain.file(MODEL)
