"""The model bundle: a folder that holds an embedder, its score and the evidence for it."""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import safetensors.numpy
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from safetensors import SafetensorError

from roadmatch.errors import BundleCorrupt, BundleUnsupported
from roadmatch.images import Preprocessing
from roadmatch.operating_points import OperatingPoints
from roadmatch.scoring import ScoreRule, Vector

FORMAT: Literal[1] = 1
NAME = "[a-z0-9][a-z0-9._-]{0,63}"
MANIFEST = "manifest.json"
EMBEDDER = "embedder.onnx"
MODEL = "model.safetensors"
BACKGROUND = "background.safetensors"
OPERATING_POINTS = "operating_points.json"
REQUIRED = (EMBEDDER, BACKGROUND)
KNOWN = (*REQUIRED, MODEL, OPERATING_POINTS)

_REPORT = re.compile(r"report\.[a-z0-9]{1,8}")
_SEAL = "sha256"
_BACKGROUND_TENSOR = "embeddings"
_UNIT_TOLERANCE = 1e-4
_BLOCK = 1 << 20


Sha256 = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
Three = tuple[float, float, float]


class Head(BaseModel):
    """What comes between the backbone's features and the embedding; by default nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pooling: Literal["own", "avg", "max", "gem"] = Field(
        default="own",
        description="own: as timm has it for the architecture (average, class token, attention); "
        "the others need a feature map",
    )
    layer_norm: bool = Field(default=False, description="of the pooled features, without weights of its own")
    dimension: Annotated[int, Field(ge=2, le=65_536)] | None = Field(
        default=None, description="of a linear projection; none: no projection"
    )


class Manifest(BaseModel):
    """What a bundle says of itself; every file beside it is listed with its sha256."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1]
    name: Annotated[str, Field(pattern=rf"\A{NAME}\z")]
    architecture: Annotated[str, Field(pattern=r"\A[A-Za-z0-9_]{1,128}\z")]
    """A name of timm's own list."""
    head: Head = Head()
    preprocessing: Preprocessing
    mean: Three
    std: Three
    """mean and std are those of RGB values in [0, 1]; the embedder has them inside."""
    dimension: Annotated[int, Field(ge=1, le=65_536)]
    score: ScoreRule
    licence: Annotated[str, Field(min_length=1)]
    """Of the weights."""
    provenance: dict[str, JsonValue]
    files: dict[str, Sha256]

    @model_validator(mode="after")
    def _values_make_sense(self) -> Self:
        rule, score = self.preprocessing, self.score
        if not 0 < rule.size <= rule.resize <= rule.reduce_to:
            raise ValueError("preprocessing needs 0 < size <= resize <= reduce_to")
        if min(self.std) <= 0:
            raise ValueError("std must be positive")
        if not (np.isfinite([score.beta, score.gamma]).all() and min(score.beta, score.gamma) >= 0 and score.k >= 1):
            raise ValueError("score needs finite beta and gamma of at least 0 and k of at least 1")
        for file in self.files:
            if file not in KNOWN and not _REPORT.fullmatch(file):
                raise ValueError(f"{file!r} is no file of a bundle")
        for file in REQUIRED:
            if file not in self.files:
                raise ValueError(f"{file} is not listed")
        return self

    def to_bytes(self) -> bytes:
        """manifest.json: one spelling, so that equal bundles have equal ids, sealed by the sha256 of all the rest."""
        content = self.model_dump(mode="json")
        if self.head == Head():  # so that a bundle without a head has the id that it had before there were heads
            del content["head"]
        return _json_bytes({**content, _SEAL: hashlib.sha256(_json_bytes(content)).hexdigest()})


@dataclass(frozen=True, eq=False)
class Bundle:
    """A verified bundle; its background (N, D) is read-only and N may be 0."""

    folder: Path
    manifest: Manifest
    digest: str
    """sha256 of manifest.json's bytes, and so of every file."""
    background: Vector
    operating_points: OperatingPoints | None
    """None only while the bundle is not calibrated."""

    @property
    def id(self) -> str:
        """`name@` and the first 12 hex digits of the digest."""
        return f"{self.manifest.name}@{self.digest[:12]}"

    @cached_property
    def model(self) -> str:
        """sha256 of what scores depend on; operating points name it."""
        files = self.manifest.files
        return _model(files[EMBEDDER], files[BACKGROUND], self.manifest.preprocessing, self.manifest.score)

    def file(self, name: str) -> bytes:
        """A file's bytes, verified once more: the folder may have changed since it was read. Raises BundleCorrupt."""
        if name not in self.manifest.files:
            raise BundleUnsupported(f"bundle {self.id} has no {name}: build it with one")
        return _verified(self.folder, name, self.manifest.files[name])


def read(folder: Path) -> Bundle:
    """Every file is verified before anything is used. Raises BundleCorrupt (names the file), BundleUnsupported."""
    raw = _read_file(folder, MANIFEST)
    manifest = _parse_manifest(folder, raw)
    _refuse_unlisted(folder, manifest)
    content = {name: _verified(folder, name, sha256) for name, sha256 in sorted(manifest.files.items())}
    bundle = Bundle(
        folder=folder,
        manifest=manifest,
        digest=hashlib.sha256(raw).hexdigest(),
        background=_parse_background(folder, content[BACKGROUND], manifest.dimension),
        operating_points=_parse_points(folder, content.get(OPERATING_POINTS)),
    )
    if bundle.operating_points and bundle.operating_points.model != bundle.model:
        raise BundleCorrupt(f"{folder / OPERATING_POINTS} was fitted for another model: calibrate this bundle")
    return bundle


def write(
    folder: Path,
    *,
    name: str,
    architecture: str,
    preprocessing: Preprocessing,
    mean: Three,
    std: Three,
    dimension: int,
    score: ScoreRule,
    licence: str,
    provenance: Mapping[str, JsonValue],
    files: Mapping[str, bytes | Path],
    background: Vector,
    operating_points: OperatingPoints | None = None,
    head: Head | None = None,
) -> Bundle:
    """The bundle of these parts, written to `folder` as a whole; equal parts give equal bytes.

    `files` are embedder.onnx and, where wanted, model.safetensors and report.*; the others are made here from
    background (N, D) and the operating points. All is built in a temporary sibling, fsynced, read back and renamed. A
    bundle that is already at `folder` is first renamed aside and then removed: a reader sees the old one, none (for
    the time between two renames) or the new one, never a mixture. A crash in between leaves the old one beside it,
    as `.NAME.<hex>.replaced`. Raises ValueError for parts that make no bundle, FileExistsError (see check_free).
    """
    content: dict[str, bytes | Path] = {**files, BACKGROUND: background_bytes(background)}
    if operating_points is not None:
        content[OPERATING_POINTS] = _json_bytes(operating_points.model_dump(mode="json"))
    try:
        manifest = Manifest(
            format=FORMAT,
            name=name,
            architecture=architecture,
            head=head or Head(),
            preprocessing=preprocessing,
            mean=mean,
            std=std,
            dimension=dimension,
            score=score,
            licence=licence,
            provenance=dict(provenance),
            files={file: _sha256(part) for file, part in content.items()},
        )
    except ValidationError as error:
        raise ValueError(_first(error)) from error
    folder = folder.absolute()
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        _fill(building, {**content, MANIFEST: manifest.to_bytes()})
        read(building)
        _put_in_place(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return read(folder)


def check_free(folder: Path) -> None:
    """A bundle takes the place of nothing, of an empty folder or of a bundle; FileExistsError for anything else."""
    if folder.exists() and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is no bundle: name another folder")


def fitted(
    bundle: Bundle,
    folder: Path,
    *,
    score: ScoreRule | None = None,
    background: Vector | None = None,
    operating_points: OperatingPoints | None = None,
    provenance: Mapping[str, JsonValue] | None = None,
    reports: Mapping[str, bytes] | None = None,
) -> Bundle:
    """A new bundle at `folder` with the same embedder; what is None stays, provenance is added to.

    Operating points stay only where they still fit, that is where neither score nor background changes; new ones
    must name `model_of(bundle, score, background)`.
    """
    manifest = bundle.manifest
    rule = manifest.score if score is None else score
    vectors = bundle.background if background is None else background
    if operating_points is None and model_of(bundle, rule, vectors) == bundle.model:
        operating_points = bundle.operating_points
    kept = {name: bundle.file(name) for name in manifest.files if name not in (BACKGROUND, OPERATING_POINTS)}
    return write(
        folder,
        name=manifest.name,
        architecture=manifest.architecture,
        preprocessing=manifest.preprocessing,
        mean=manifest.mean,
        std=manifest.std,
        dimension=manifest.dimension,
        score=rule,
        licence=manifest.licence,
        provenance={**manifest.provenance, **(provenance or {})},
        files={**kept, **(reports or {})},
        background=vectors,
        operating_points=operating_points,
        head=manifest.head,
    )


def model_of(bundle: Bundle, score: ScoreRule, background: Vector) -> str:
    """The `model` that `bundle` has once it has this score and background (N, D): what new operating points name."""
    return _model(
        bundle.manifest.files[EMBEDDER], _sha256(background_bytes(background)), bundle.manifest.preprocessing, score
    )


def background_bytes(background: Vector) -> bytes:
    """background (N, D) -> background.safetensors."""
    return safetensors.numpy.save({_BACKGROUND_TENSOR: np.ascontiguousarray(background, np.float32)})


def default_bundle_folder() -> Path:
    """The bundle that comes with Roadmatch."""
    return Path(__file__).parent / "bundles" / "efficientnet-lite0"


def _model(embedder: str, background: str, preprocessing: Preprocessing, score: ScoreRule) -> str:
    parts = {
        "embedder": embedder,
        "background": background,
        "preprocessing": {field.name: getattr(preprocessing, field.name) for field in fields(preprocessing)},
        "score": {"beta": float(score.beta), "gamma": float(score.gamma), "k": score.k},
    }
    return hashlib.sha256(_json_bytes(parts)).hexdigest()


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _sha256(part: bytes | Path) -> str:
    if isinstance(part, bytes):
        return hashlib.sha256(part).hexdigest()
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_file(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise BundleCorrupt(f"{folder / name} cannot be read: {error.strerror or error}") from error


def _verified(folder: Path, name: str, sha256: str) -> bytes:
    content = _read_file(folder, name)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise BundleCorrupt(f"{folder / name} is not the file that {MANIFEST} names: take a fresh copy of the bundle")
    return content


def _parse_manifest(folder: Path, raw: bytes) -> Manifest:
    where = folder / MANIFEST
    try:
        content = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BundleCorrupt(f"{where} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise BundleCorrupt(f"{where} is no JSON object")
    if type(content.get("format")) is not int:
        raise BundleCorrupt(f"{where}: format: a whole number is needed")
    if content["format"] != FORMAT:
        raise BundleUnsupported(f"{where} has format {content['format']}, and this Roadmatch reads format {FORMAT}")
    content.pop(_SEAL, None)
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise BundleCorrupt(f"{where}: {_first(error)}") from error
    if manifest.to_bytes() != raw:
        raise BundleCorrupt(f"{where} was changed after it was written: take a fresh copy of the bundle")
    return manifest


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not finite")


def _refuse_unlisted(folder: Path, manifest: Manifest) -> None:
    """A file that nobody vouches for is refused rather than ignored, hidden ones excepted."""
    for name in sorted(path.name for path in folder.iterdir()):
        if name != MANIFEST and name not in manifest.files and not name.startswith("."):
            raise BundleCorrupt(f"{folder / name} is not listed in {MANIFEST}: remove it")


def _parse_background(folder: Path, raw: bytes, dimension: int) -> Vector:
    where = folder / BACKGROUND
    try:
        tensors = safetensors.numpy.load(raw)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise BundleCorrupt(f"{where} is no safetensors file: {_line(error)}") from error
    vectors = tensors.get(_BACKGROUND_TENSOR)
    if vectors is None or len(tensors) != 1 or vectors.dtype != np.float32 or vectors.ndim != 2:
        raise BundleCorrupt(f"{where} needs exactly the float32 matrix {_BACKGROUND_TENSOR!r}")
    if vectors.shape[1] != dimension:
        raise BundleCorrupt(f"{where} has {vectors.shape[1]} dimensions and {MANIFEST} {dimension}")
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    if not (np.abs(lengths - 1) <= _UNIT_TOLERANCE).all():  # also where a length is not finite
        raise BundleCorrupt(f"{where} has a vector that is not of unit length")
    vectors.flags.writeable = False
    return vectors


def _parse_points(folder: Path, raw: bytes | None) -> OperatingPoints | None:
    if raw is None:
        return None
    try:
        return OperatingPoints.model_validate_json(raw)
    except ValidationError as error:
        raise BundleCorrupt(f"{folder / OPERATING_POINTS}: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {_line(first['msg'])}" if place else _line(first["msg"])


def _line(error: object) -> str:
    return " ".join(str(error).split())


def _fill(folder: Path, content: Mapping[str, bytes | Path]) -> None:
    folder.mkdir()
    for name, part in content.items():
        with (folder / name).open("xb") as file:
            if isinstance(part, bytes):
                file.write(part)
            else:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file, _BLOCK)
            file.flush()
            os.fsync(file.fileno())
    _sync_folder(folder)


def _put_in_place(building: Path, folder: Path) -> None:
    replaced = building.with_name(building.name + ".replaced")
    if folder.exists():
        folder.rename(replaced)
    try:
        building.rename(folder)
    except OSError:
        if replaced.exists():
            replaced.rename(folder)
        raise
    _sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
