"""`python -m tests.readme` writes the figures of README.md anew; a test compares them with what they come from."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from pydantic_core import PydanticUndefined

from app.settings import PREFIX, Settings
from roadmatch.bundle import Bundle, default_bundle_folder, read
from roadmatch.operating_points import OperatingPoints, Rate, promise

README = Path(__file__).parent.parent / "README.md"
SIZES = (10, 100, 1_000, 10_000)


def sections(bundle: Bundle) -> dict[str, str]:
    """What stands between `<!-- NAME -->` and `<!-- /NAME -->`."""
    points = bundle.operating_points
    assert points is not None
    return {
        "promise": _promise(points),
        "points": _points(points),
        "sizes": _sizes(points),
        "models": _models(bundle),
        "settings": _settings(),
    }


def _promise(points: OperatingPoints) -> str:
    return "> " + promise(points, points.point(points.default_rule), 100, None)


def _points(points: OperatingPoints) -> str:
    def share(rate: Rate) -> str:
        bounds = "" if rate.low is None or rate.high is None else f" ({100 * rate.low:.1f} to {100 * rate.high:.1f})"
        return f"{100 * rate.value:.1f}{bounds}"

    rows = []
    for point in points.points:
        assert point.evidence is not None
        assert point.shifted is not None
        for name, evidence in ((f"`{point.rule}`", point.evidence), ("shifted", point.shifted)):
            rates = (evidence.recall, evidence.false_match_rate, evidence.precision)
            rows.append([name, *map(share, rates)])
    return _table(["rule", "found, %", "false matches, %", "precision at match share .5, %"], rows)


def _sizes(points: OperatingPoints) -> str:
    rows = []
    for point in points.points:
        row = [f"`{point.rule}`"]
        for size in SIZES:
            applied = point.threshold(size)
            found = 100 * points.curves.expected_recall(applied.value)
            false = 100 * points.curves.expected_false_match_rate(applied.value, size)
            row.append(f"{applied.value:.3f}: {found:.0f}, {false:.2f}{' *' if applied.extrapolated else ''}")
        rows.append(row)
    table = _table(["threshold: found %, false matches %", *(f"{size:,} items" for size in SIZES)], rows)
    return f"{table}\n\n\\* extrapolated"


def _models(bundle: Bundle) -> str:
    report = json.loads(bundle.file("report.json"))
    measured = {
        "ours, plain similarity, 224 px, nine edits, 482 photographs": report["similarity"],
        "ours, the bundle's score": report["score"],
    }
    rows = [
        [name, *(f"{row[key]:.3f}" for key in ("recall_at_1", "recall_at_precision_90", "false_matches_there"))]
        for name, row in measured.items()
    ]
    rows += [
        ["zero-shot reference, 128 px, nine edits, 590 photographs", ".974", ".796", ".084"],
        ["zero-shot reference, 224 px, the five hard edits", ".970", ".789", ".082"],
    ]
    return _table(["EfficientNet-Lite0", "recall@1", "recall at precision .9", "false matches there"], rows)


def _settings() -> str:
    rows = []
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = "the default bundle" if name == "bundles" else f"`{default}`" if default not in ("", ()) else "empty"
        assert default is not PydanticUndefined
        rows.append([f"`{PREFIX}{name.upper()}`", shown, _limits(field.metadata), str(field.description)])
    return _table(["variable", "default", "limit", "meaning"], rows)


def _limits(metadata: list[object]) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{word} {getattr(limit, sign)}" for limit in metadata for sign, word in signs.items() if hasattr(limit, sign)
    ]
    return ", ".join(found)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rewritten(text: str, bundle: Bundle) -> str:
    """README with its figures made anew; raises KeyError for a section that is not marked."""
    for name, content in sections(bundle).items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        if not marked.search(text):
            raise KeyError(name)
        text = marked.sub(_between(content), text)
    return text


def _between(content: str) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{found[1]}{content}{found[2]}"


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(), read(default_bundle_folder())))
