"""The report: what it shows, that nobody's text becomes markup, and that it needs nothing from elsewhere."""

import dataclasses
import html
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from roadmatch.calibration import Calibration
from tests.tiny_run import STRANGE, tiny_run
from training.data.manifest import DataError
from training.judging.evaluate import evaluate
from training.judging.points import Calibrated, calibrate
from training.judging.report import page
from training.judging.thumbnails import thumbnail
from training.judging.trained import Trained, trained


class Tags(HTMLParser):
    """What a browser would see: tags, attributes, and whether all are closed."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("report"), classes=20)


@pytest.fixture(scope="module")
def opened(run: Path) -> Trained:
    return trained(run)


@pytest.fixture(scope="module")
def evaluation(run: Path) -> dict[str, Any]:
    found = evaluate(run)
    pair = found["missed_matches"][0]
    pair["query"]["label"] = pair["image"]["label"] = STRANGE
    del found["after"]["OPIS"]
    found["undefined"]["after"]["OPIS"] = "no <i>range</i>"
    return found


@pytest.fixture(scope="module")
def calibrated(run: Path) -> Calibrated:
    return calibrate(run, Calibration(resamples=50))


@pytest.fixture(scope="module")
def shown(opened: Trained, evaluation: dict[str, Any], calibrated: Calibrated) -> str:
    return page(opened, evaluation, calibrated, pictures=True).decode()


def test_it_shows_what_a_person_judges_by(shown: str, evaluation: dict[str, Any], calibrated: Calibrated) -> None:
    text = html.unescape(re.sub(r"<[^>]*>", " ", shown))
    for words in (
        "test_efficientnet, 32 px, pooling own, layer norm, projection to 32; mode whole",
        "80 of 40 classes",
        "after 6 steps, gAP 0.5000 on the validation classes",
        "On held-out classes of tiny, one image of each in the gallery, 20 pictures not used for fitting",
        "Default rule:",
        "false_match_rate<=0.01 cannot be shown by 20 classes: 300 are needed",
        "its threshold is extrapolated",
        "name: gsap",
        f"{evaluation['before']['gAP']:.3f}",
        f"{evaluation['after']['gAP']:.3f}",
        "no <i>range</i>",
    ):
        assert words in text, words
    threshold = calibrated.points.point(calibrated.points.default_rule).threshold(20).value
    assert f"{threshold:.4f}" in text
    tags = Tags(shown)
    assert tags.tags["svg"] == 4
    assert tags.tags["img"] == 2 * (len(evaluation["false_matches"]) + len(evaluation["missed_matches"]))
    assert not tags.open[2:]


def test_nothing_that_somebody_wrote_becomes_markup(shown: str) -> None:
    assert html.escape(STRANGE) in shown
    assert "warning: two &lt;b&gt;pictures&lt;/b&gt; are alike" in shown
    tags = Tags(shown)
    assert not {"script", "b", "i", "iframe", "object"} & set(tags.tags)


def test_it_loads_nothing_and_runs_nothing(shown: str) -> None:
    for name, value in Tags(shown).attributes:
        assert not name.startswith("on")
        if name in ("href", "src", "xlink:href"):
            assert value.startswith(("#", "data:image/jpeg;base64,")), value
        if not name.startswith("xmlns"):
            assert not re.search(r"https?://|@import", value), value
    assert "default-src 'none'" in shown


def test_each_plots_ids_are_its_own_and_found(shown: str) -> None:
    attributes = Tags(shown).attributes
    ids = Counter(value for name, value in attributes if name == "id")
    assert [one for one, count in ids.items() if count > 1] == []
    used = {value.removeprefix("#") for name, value in attributes if name in ("href", "xlink:href")}
    used |= set(re.findall(r"url\(#([^)]*)\)", shown))
    assert used <= set(ids)


def test_the_same_run_gives_the_same_bytes(
    opened: Trained, evaluation: dict[str, Any], calibrated: Calibrated, shown: str
) -> None:
    assert page(opened, evaluation, calibrated, pictures=True).decode() == shown


def test_pictures_are_left_out_where_that_is_asked(
    opened: Trained, evaluation: dict[str, Any], calibrated: Calibrated
) -> None:
    tags = Tags(page(opened, evaluation, calibrated, pictures=False).decode())
    assert not tags.tags["img"]


def test_a_run_without_a_log_or_points_has_a_report(
    opened: Trained, evaluation: dict[str, Any], tmp_path: Path
) -> None:
    bare = dataclasses.replace(opened, run=tmp_path)
    shown = page(bare, evaluation, None, pictures=False).decode()
    assert "log is not there" in shown
    assert "the bundle is not calibrated" in shown
    (tmp_path / "log.jsonl").write_text('{"kind": "step", "step": 1, "loss": 0.5}\n{"kind": "st')
    assert "<svg" in page(bare, evaluation, None, pictures=False).decode().split("Figures on")[0]


def test_a_thumbnail_of_no_picture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jpg cannot be read"):
        thumbnail(tmp_path / "gone.jpg")
    (tmp_path / "text.jpg").write_text("no picture")
    with pytest.raises(DataError, match=r"text\.jpg: "):
        thumbnail(tmp_path / "text.jpg")
