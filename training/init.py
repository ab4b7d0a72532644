"""A folder of labelled images, or a list of them -> a recipe whose sizes fit, with the reason for each."""

import json
import math
import re
import statistics
from pathlib import Path

from roadmatch.errors import RoadmatchError
from training.data.manifest import Split
from training.data.splits import FEWEST
from training.recipe import Mode, Recipe, plain_yaml, recipe_file
from training.sizing import PER_CLASS, Seen, Sizes, look, sizes


def init(source: Path, out: Path, *, gpu: bool) -> Recipe:
    """Writes a recipe for a folder (sub-folder = class) or a CSV or Parquet manifest to `out`, and returns it.

    gpu: whether the run will have one. Looks into a few of the images. Raises InitError, DataError, RecipeError and
    FileExistsError; nothing is written then.
    """
    seen = look(source)
    if out.exists():
        raise FileExistsError(f"{out} is there already: name another file with --out")
    content = text(seen, sizes(seen, gpu=gpu), name=name_of(source), out=out, gpu=gpu)
    with out.open("x", encoding="utf-8") as file:
        file.write(content)
    try:
        return recipe_file.read(out)
    except RoadmatchError:
        out.unlink()
        raise


def name_of(source: Path) -> str:
    """A bundle's name from a file's or folder's."""
    stem = source.resolve().stem.lower() if source.is_file() else source.resolve().name.lower()
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-._")[:64] or "images"


def text(seen: Seen, sizes: Sizes, *, name: str, out: Path, gpu: bool) -> str:
    """The recipe in YAML, each choice with its reason."""
    parts = [
        f"name: {_value(name)}  # of the bundle",
        "",
        *_data(seen, out),
        "",
        *_network(seen, sizes),
        "",
        *_batch(seen, sizes),
        "",
        *_course(seen, sizes, gpu=gpu),
    ]
    return "".join(f"{line}\n" for line in parts)


def _data(seen: Seen, out: Path) -> list[str]:
    images, data = seen.manifest, seen.data
    formats = ", ".join(f"{count} {name}" for name, count in seen.formats.items())
    broken = f", {seen.unreadable} unreadable" if seen.unreadable else ""
    split = ", ".join(f"{len(images.only(each).classes):,} classes {each}" for each in Split)
    lines = [
        f"# {len(images):,} images of {len(images.classes):,} classes; of some looked at: {formats}{broken}",
        "data:",
        f"  layout: {data.layout}",
        f"  root: {_value(_path(data.root, out))}",
    ]
    if data.manifest is not None:
        lines.append(f"  manifest: {_value(_path(data.manifest, out))}")
    why = "the manifest's own split" if seen.given else "by a hash of the label, so that a class is in one split only"
    few = []
    if not data.validation:
        few.append("  # too few classes for a validation split: the last model is taken")
    if len(images.only(Split.TEST).classes) < FEWEST:
        few.append(f"  # fewer than {FEWEST} test classes: too few for operating points (export --no-calibration)")
    return [
        *lines,
        f"  # {split}: {why}",
        *few,
        f"  validation: {data.validation}",
        f"  test: {data.test}",
        f"  split_seed: {data.split_seed}",
    ]


def _network(seen: Seen, sizes: Sizes) -> list[str]:
    why = {
        Mode.LINEAR: "no GPU was seen: a projection on frozen features trains in minutes",
        Mode.WHOLE: "a GPU was seen: all layers are trained",
    }
    side = f"  size: {sizes.side}  # pixels: the median picture's shorter side is {seen.side}"
    return [
        "network:",
        "  architecture: tf_efficientnet_lite0  # its weights come with a package, Apache-2.0",
        f"  mode: {sizes.mode}  # {why[sizes.mode]}",
        *([] if sizes.side is None else [side]),
        "  head: {dimension: 512}  # of the embedding; 512 is what the papers compare at",
    ]


def _batch(seen: Seen, sizes: Sizes) -> list[str]:
    counts, classes = seen.training, sizes.batch // sizes.per_class
    median = int(statistics.median(counts))
    lines = [
        f"# training classes have {counts[0]:,} to {counts[-1]:,} images, the median one {median:,}",
        "batch:",
        f"  size: {sizes.batch}  # {classes} of {len(counts):,} classes; larger ones help up to about 512",
        f"  per_class: {sizes.per_class}  # {PER_CLASS}, or more where the classes are few, at most the median class",
    ]
    chunk = f"  chunk: {sizes.chunk}  # images in the GPU at once; the gradient is that of the whole batch"
    return lines if sizes.chunk is None else [*lines, chunk]


def _course(seen: Seen, sizes: Sizes, *, gpu: bool) -> list[str]:
    images = sum(seen.training)
    steps = sizes.epochs * math.ceil(images / sizes.batch)
    rate = {Mode.LINEAR: "2e-3  # of the projection alone", Mode.WHOLE: "1e-4  # of pretrained layers"}[sizes.mode]
    head = [] if sizes.mode is Mode.LINEAR else ["  head_learning_rate: 1e-3  # of the new projection"]
    patience = 0 if not seen.data.validation else max(5, sizes.epochs // 5)
    half = ["  precision: bfloat16  # half of the memory; the loss is float32"] if gpu else []
    return [
        "loss:",
        "  name: gsap  # one ranking of all pairs, so that one threshold serves every query",
        "  temperature: 0.01  # 1e-4 to 1e-2 work, above 0.1 nothing does; the smaller, the larger batches have to be",
        "",
        "optimizer:",
        f"  learning_rate: {rate}",
        *head,
        "",
        "fit:",
        f"  epochs: {sizes.epochs}  # about {steps:,} steps over {images:,} training images",
        f"  patience: {patience}  # validations without a better gAP before the end; 0: none",
        *half,
    ]


def _path(path: Path, out: Path) -> str:
    """Relative to the recipe's folder where it is inside of that, so that both can be moved together."""
    folder = out.resolve().parent
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _value(word: str) -> str:
    plain = re.fullmatch(r"[\w/][\w/.-]*", word) and plain_yaml.load(word, "") == word
    return word if plain else json.dumps(word, ensure_ascii=False)
