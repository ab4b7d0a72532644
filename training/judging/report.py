"""report.html: one file that a person judges a bundle by, without a script and without anything from elsewhere."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from roadmatch.operating_points import OperatingPoint, OperatingPoints, Rate, promise
from training.data.manifest import Split
from training.fitting.run_folder import FINDINGS
from training.fitting.watch import LOG
from training.judging import plots
from training.judging.evaluate import EDGES
from training.judging.points import Calibrated
from training.judging.thumbnails import thumbnail
from training.judging.trained import Trained, without_places
from training.recipe import recipe_file

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top;
border-bottom: 1px solid #e3e6ea; } td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.warning { background: #fff4e5; border-left: 4px solid #c2410c; padding: .3rem .8rem; margin: .4rem 0; }
.promise { border-left: 4px solid #0b63ce; padding: .3rem .8rem; margin: .4rem 0; }
.pairs { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; width: 15rem; font-size: .8rem; }
figure img { margin-right: 3px; height: 7rem; width: 7rem; object-fit: contain; background: #f3f4f6; }
figcaption { overflow-wrap: anywhere; } svg { max-width: 100%; height: auto; } pre { overflow-x: auto;
background: #f3f4f6; padding: .8rem; font-size: .8rem; } small { color: #59636e; }
</style>
"""


def page(trained: Trained, evaluation: Mapping[str, Any], calibrated: Calibrated | None, *, pictures: bool) -> bytes:
    """The report of a run; pictures: show test images, small. Raises DataError for one that cannot be read."""
    name = escape(trained.recipe.name)
    parts = [
        f"{_HEAD}<title>{name}: training report</title></head><body>\n<h1>{name}</h1>",
        _warnings(trained, calibrated),
        "<h2>What was trained on what</h2>" + _about(trained, evaluation),
        "<h2>Course</h2>" + _course(trained.run),
        "<h2>Figures on the test classes</h2>" + _figures(evaluation),
        "<h2>Similarities</h2>" + _similarities(evaluation),
        "<h2>What is promised</h2>" + _promises(calibrated),
        "<h2>Worst errors</h2>" + _errors(trained, evaluation, pictures),
        f"<h2>Recipe</h2><pre>{escape(recipe_file.text(without_places(trained.recipe)))}</pre>",
        "</body></html>\n",
    ]
    return "\n".join(parts).encode()


def _warnings(trained: Trained, calibrated: Calibrated | None) -> str:
    lines = list(calibrated.warnings) if calibrated else ["the bundle is not calibrated: it has no operating points"]
    if calibrated is not None:
        lines += [
            f"{point.rule}: in galleries of more than {point.shown_up_to} images its threshold is extrapolated"
            for point in calibrated.points.points
            if point.supported
        ]
    try:
        findings = (trained.run / FINDINGS).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        findings = []
    lines += [line for line in findings if line.startswith(("error", "warning"))]
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in lines)


def _about(trained: Trained, evaluation: Mapping[str, Any]) -> str:
    manifest, recipe = trained.manifest, trained.recipe
    network = recipe.network
    rows = []
    for split in Split:
        part = manifest.only(split)
        rows.append((f"{split} images", f"{len(part):,} of {len(part.classes):,} classes"))
    data = evaluation["data"]
    head = network.head
    behind = [f"pooling {head.pooling}", *(["layer norm"] if head.layer_norm else [])]
    behind += [f"projection to {head.dimension}"] if head.dimension else []
    validation = "" if trained.state.best is None else f", gAP {trained.state.best:.4f} on the validation classes"
    searches = f"{data['searches']:,} in {data['gallery']:,} images ({data['gallery_holds']})"
    size = f"{trained.preprocessing.size} px"
    rows += [
        ("test searches", f"{searches}; {data['searches_without_match']:,} have no match"),
        ("network", f"{network.architecture}, {size}, {', '.join(behind)}; mode {network.mode}"),
        ("weights", f"{Path(network.weights).name}, {network.licence}"),
        ("loss", ", ".join([recipe.loss.name, *(beside.loss.name for beside in recipe.beside)])),
        ("batch", f"{recipe.batch.size} images, {recipe.batch.per_class} of a class"),
        ("checkpoint", f"after {trained.state.steps:,} steps{validation}"),
        ("images' digest", trained.data),
    ]
    return _table((), [(escape(name), escape(text)) for name, text in rows])


def _course(run: Path) -> str:
    steps, validations = list[Any](), list[Any]()
    try:
        lines = (run / LOG).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for row in filter(None, map(_row, lines)):
        if row.get("kind") == "step":
            steps.append(row)
        elif row.get("kind") == "validation":
            validations.append(row)
    return plots.loss_curve(steps, validations) if steps else "<p>The run's log is not there, or holds no step.</p>"


def _row(line: str) -> dict[str, Any] | None:
    """None for the last line of a run that ended while it was written."""
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return found


def _figures(evaluation: Mapping[str, Any]) -> str:
    definitions, undefined = evaluation["definitions"], evaluation["undefined"]
    names = list(
        dict.fromkeys([*evaluation["before"], *evaluation["after"], *undefined["before"], *undefined["after"]])
    )
    rows = []
    for name in names:
        meaning = definitions.get(name) or definitions["R@k"].replace("k best", f"{name.removeprefix('R@')} best")
        why = undefined["after"].get(name) or undefined["before"].get(name)
        meaning = escape(meaning) + (f"<br><small>-: {escape(why)}</small>" if why else "")
        numbers = [_number(evaluation[which].get(name)) for which in ("before", "after")]
        rows.append((escape(name), *numbers, meaning))
    note = "<p>Before: the pretrained backbone as it came, with nothing behind its pooling.</p>"
    return note + _table(("", "before", "after", ""), rows, numbers=(1, 2))


def _similarities(evaluation: Mapping[str, Any]) -> str:
    counts = evaluation["similarities"]
    note = (
        "<p>All pairs of a test search and a gallery image. The less the two overlap, the better one threshold serves "
        "all.</p>"
    )
    return note + plots.histogram(EDGES, counts["after"]) + plots.precision_recall(counts)


def _promises(calibrated: Calibrated | None) -> str:
    if calibrated is None:
        return "<p>Nothing: the bundle is not calibrated.</p>"
    points, score = calibrated.points, calibrated.score
    size = calibrated.classes
    shown = [point for point in points.points if point.supported and _reaches(point, size)]
    rule = next((point for point in shown if point.rule == points.default_rule), None)
    words = "" if rule is None else f'<p class="promise">{escape(promise(points, rule, size, None))}</p>'
    formula = (
        "the similarity itself"
        if score.beta == score.gamma == 0
        else f"similarity - {score.beta:g} b(query) - {score.gamma:g} b(image), b being the mean of the {score.k} "
        f"highest similarities to {len(calibrated.background)} training images"
    )
    note = f"<p>Score: {escape(formula)}. Default rule: <code>{escape(points.default_rule)}</code>.</p>"
    return words + note + plots.rates(points, shown, size) + _points(points, size) + _distractors(points)


def _reaches(point: OperatingPoint, size: int) -> bool:
    return (size - 1).bit_length() < len(point.thresholds)


def _points(points: OperatingPoints, size: int) -> str:
    """Thresholds for `size` images; rates as they were reached in the smaller galleries of cross-fitting."""
    rows = list[tuple[str, ...]]()
    judged_in = {point.evidence.gallery_size for point in points.points if point.evidence is not None}
    for point in points.points:
        evidence = point.evidence
        if evidence is None:
            rows.append((escape(point.rule), "-", "-", "-", "-"))
            continue
        threshold = f"{point.threshold(size).value:.4f}" if _reaches(point, size) else "-"
        rates = (evidence.recall, evidence.false_match_rate, evidence.precision)
        rows.append((escape(point.rule), threshold, *map(_rate, rates)))
    header = ("rule", f"threshold, {size} images", "found", "false matches", "precision, half of the searches matching")
    note = (
        f"<p>Rates (with 95 % bounds) are those of galleries of {', '.join(map(str, judged_in))} images, each with a "
        "threshold that its own classes took no part in fitting.</p>"
    )
    return _table(header, rows, numbers=(1, 2, 3, 4)) + note


def _distractors(points: OperatingPoints) -> str:
    rows = [
        (escape(point.rule), str(point.evidence.distractors), _rate(point.evidence.distractor_match_rate))
        for point in points.points
        if point.evidence is not None and point.evidence.distractor_match_rate is not None
    ]
    if not rows:
        return ""
    return "<p>Searches with images of no class in the gallery:</p>" + _table(
        ("rule", "of no class", "answered match"), rows, numbers=(1, 2)
    )


def _errors(trained: Trained, evaluation: Mapping[str, Any], pictures: bool) -> str:
    if not pictures:
        return "<p>Pictures were left out.</p>"
    false = "<h3>The likest images of two classes</h3>" + _pairs(trained, evaluation["false_matches"])
    return false + "<h3>The unlikest best images of one class</h3>" + _pairs(trained, evaluation["missed_matches"])


def _pairs(trained: Trained, pairs: Sequence[Mapping[str, Any]]) -> str:
    shown = []
    for pair in pairs:
        both = (pair["query"], pair["image"])
        images = "".join(f'<img alt="" src="{thumbnail(trained.recipe.data.root / one["path"])}">' for one in both)
        names = "<br>".join(f"{escape(one['label'] or 'no class')}: {escape(one['path'])}" for one in both)
        shown.append(f"<figure>{images}<figcaption>{pair['similarity']:.3f}<br>{names}</figcaption></figure>")
    return f'<div class="pairs">{"".join(shown)}</div>' if shown else "<p>None.</p>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML already."""
    top = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr>" if header else ""
    lines = (
        "".join(f"<td{' class=n' if at in numbers else ''}>{cell}</td>" for at, cell in enumerate(row)) for row in rows
    )
    return f"<table>{top}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.3f}"


def _rate(rate: Rate) -> str:
    bounds = (
        ""
        if rate.low is None or rate.high is None
        else f" <small>({100 * rate.low:.1f} to {100 * rate.high:.1f})</small>"
    )
    return f"{100 * rate.value:.1f} %{bounds}"
