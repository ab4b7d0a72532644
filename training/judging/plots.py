"""The report's plots as SVG text, the same bytes for the same numbers."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from numpy.typing import NDArray

from roadmatch.operating_points import OperatingPoint, OperatingPoints

Floats = NDArray[np.float64]

_BEFORE, _AFTER, _OTHER = "#8a8f98", "#0b63ce", "#c2410c"
_STYLE = {"svg.fonttype": "none", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
_SIZE = (6.0, 3.4)  # inches


def loss_curve(steps: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]) -> str:
    """Loss of each step, and gAP and R@1 of each validation, from the run's log."""

    def draw(axes: Axes) -> None:
        at, loss = [row["step"] for row in steps], [row["loss"] for row in steps]
        axes.plot(at, loss, color=_BEFORE, linewidth=0.8, label="loss")
        axes.set(xlabel="step", ylabel="loss")
        if validations:
            beside = axes.twinx()
            beside.spines["right"].set_visible(True)
            at = [row["step"] for row in validations]
            beside.plot(at, [row["gap"] for row in validations], "o-", color=_AFTER, markersize=3)
            beside.set(ylabel="gAP of the validation classes", ylim=(0, 1))
            axes.plot([], [], "o-", color=_AFTER, markersize=3, label="gAP of the validation classes")
        axes.legend(frameon=False, loc="upper center")

    return _svg("loss", draw)


def precision_recall(similarities: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """Of all pairs, one threshold for every search: before and after training, from histograms."""

    def draw(axes: Axes) -> None:
        for which, colour in (("before", _BEFORE), ("after", _AFTER)):
            counts = similarities[which]
            right = np.cumsum(counts["matching"][::-1])
            wrong = np.cumsum(counts["non_matching"][::-1])
            some = right + wrong > 0
            if right[-1]:
                axes.plot(right[some] / right[-1], right[some] / (right + wrong)[some], color=colour, label=which)
        axes.set(xlabel="recall of pairs", ylabel="precision of pairs", xlim=(0, 1), ylim=(0, 1.02))
        axes.legend(frameon=False)

    return _svg("precision-recall", draw)


def histogram(edges: Floats, counts: Mapping[str, Sequence[int]]) -> str:
    """How similar matching and non-matching pairs are after training; edges (T + 1,)."""

    def draw(axes: Axes) -> None:
        wide = slice(None, None, 4)
        for name, colour, label in (
            ("non_matching", _OTHER, "non-matching pairs"),
            ("matching", _AFTER, "matching pairs"),
        ):
            numbers = np.add.reduceat(np.asarray(counts[name], np.float64), np.arange(0, len(counts[name]), 4))
            axes.stairs(numbers / max(numbers.sum(), 1), edges[wide], fill=True, color=colour, alpha=0.5, label=label)
        seen = np.flatnonzero(np.asarray(counts["matching"]) + np.asarray(counts["non_matching"]))
        axes.set(
            xlabel="similarity", ylabel="share of the pairs", xlim=(edges[seen[0]] - 0.02, edges[seen[-1] + 1] + 0.02)
        )
        axes.legend(frameon=False)

    return _svg("histogram", draw)


def rates(points: OperatingPoints, shown: Sequence[OperatingPoint], gallery_size: int) -> str:
    """Matches found and false matches expected at each threshold on the score, with the operating points."""
    scores = np.array(points.curves.scores)
    false = np.array([points.curves.expected_false_match_rate(float(at), gallery_size) for at in scores])

    def draw(axes: Axes) -> None:
        axes.plot(scores, points.curves.found, color=_AFTER, label="matches found")
        axes.plot(scores, false, color=_OTHER, label=f"false matches, gallery of {gallery_size}")
        found = np.array(points.curves.found)
        low = scores[np.searchsorted(-false, -0.5)] if (false > 0.5).any() else scores[0]
        high = scores[np.searchsorted(-found, -0.005)] if (found < 0.005).any() else scores[-1]
        for number, point in enumerate(shown):
            at = point.threshold(gallery_size).value
            low, high = min(low, at), max(high, at)
            axes.axvline(at, color="#444", linewidth=0.8, linestyle=("--", "-.", ":", (0, (1, 3)))[number % 4])
            axes.annotate(
                point.rule,
                (at, 1.0),
                rotation=90,
                fontsize=7,
                ha="right",
                va="top",
                xytext=(-1, -2),
                textcoords="offset points",
            )
        axes.set(
            xlabel="threshold on the score", ylabel="share of searches", ylim=(0, 1.02), xlim=(low - 0.05, high + 0.05)
        )
        axes.legend(frameon=False, loc="center right")

    return _svg("rates", draw)


def _svg(name: str, draw: Callable[[Axes], None]) -> str:
    """name: keeps the ids of one plot apart from those of the others on a page."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": f"roadmatch {name}"}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Who made it, and when.
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # matplotlib gives the same ids in every file, and a page holds several.
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
