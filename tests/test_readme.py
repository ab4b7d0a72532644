"""README.md says what is there: its commands, settings, figures and files exist."""

import json
import re
import shlex

import pytest

from app.answers import SearchAnswer
from app.cli import parser
from app.settings import PREFIX, ClientSettings, Settings
from roadmatch.bundle import default_bundle_folder, read
from tests.readme import README, rewritten

ROOT = README.parent
TEXT = README.read_text()


def commands() -> list[str]:
    """Every line of the README that begins with a prompt, without its remark."""
    blocks = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    lines = [line.removeprefix("$ ").split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    assert len(lines) >= 8
    return lines


def test_the_figures_are_those_of_the_default_bundle_and_of_the_settings() -> None:
    assert rewritten(TEXT, read(default_bundle_folder())) == TEXT, "run: python -m tests.readme"


def test_every_setting_is_in_the_table_and_the_table_names_no_other() -> None:
    named = set(re.findall(rf"^\| `({PREFIX}\w+)`", TEXT, re.MULTILINE))
    assert named == {PREFIX + name.upper() for name in Settings.model_fields}
    for name in ClientSettings.model_fields:
        assert f"`{PREFIX}{name.upper()}`" in TEXT


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make (\w+)", TEXT))
    assert named <= targets
    assert {"demo", "test", "check", "bench", "faults", "bundle"} <= named | targets


def test_every_file_and_folder_of_the_tree_exists() -> None:
    tree = re.search(r"## The tree\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert tree
    folder = ROOT
    for line in filter(str.strip, tree[1].splitlines()):
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name if name.endswith("/") else ROOT
            assert (ROOT / name).exists(), name
        else:
            assert (folder / name).exists(), name


def test_every_path_of_the_table_of_changes_exists() -> None:
    table = re.search(r"\| to change \| edit \|\n(.*?)\n\n", TEXT, re.DOTALL)
    assert table
    paths = re.findall(r"`([a-z_/]+/[a-z_./]*)`", table[1])
    assert len(paths) >= 8
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("command", [line for line in commands() if "roadmatch " in line])
def test_every_roadmatch_command_is_understood(command: str) -> None:
    words = shlex.split(command)
    assert words[0] == ".venv/serve/bin/roadmatch"
    parser().parse_args(words[1:])


def test_the_other_commands_are_everybodys() -> None:
    assert {shlex.split(line)[0] for line in commands() if "roadmatch " not in line} <= {"make", "curl", "cp", "docker"}


def test_the_answer_that_is_shown_is_one() -> None:
    shown = re.search(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert shown
    answer = SearchAnswer.model_validate(json.loads(shown[1]), extra="forbid")
    assert answer.matches[0].margin == pytest.approx(answer.matches[0].score - answer.threshold, abs=1e-6)
    points = read(default_bundle_folder()).operating_points
    assert points is not None
    point = points.point(points.default_rule)
    assert answer.operating_point == point.rule
    assert answer.threshold == point.threshold(answer.gallery_size).value
    assert answer.stated_rate is not None
    assert answer.stated_rate.evidence == point.evidence


def test_nothing_is_left_to_be_filled_in() -> None:
    assert not re.findall(r"<!-- (mb-\w+|bench|answer) -->", TEXT)
