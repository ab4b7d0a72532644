"""docs/training.md from top to bottom, on parts of real photographs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from skimage import data

from tests.service import start

PAGE = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ (roadmatch.*)$", PAGE, re.MULTILINE)]
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
TILES, SIDE = 12, 96


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """48 things: parts of four photographs, three pictures of each; photo.jpg is another picture of one of them."""
    for name in PHOTOGRAPHS:
        whole = Image.fromarray(getattr(data, name)())
        for tile in range(TILES):
            left, top = 30 + 100 * (tile % 4), 10 + 95 * (tile // 4)
            part = tmp_path / "photos" / f"{name}-{tile:02}"
            part.mkdir(parents=True)
            for picture, (shift, quality) in enumerate(((0, 90), (5, 60), (-5, 40))):
                box = (left + shift, top, left + shift + SIDE, top + SIDE)
                whole.crop(box).save(part / f"{picture}.jpg", quality=quality)
            if (name, tile) == ("chelsea", 5):
                whole.crop((left + 3, top + 3, left + SIDE, top + SIDE)).save(tmp_path / "photo.jpg", quality=50)
    return tmp_path


def run(folder: Path, words: list[str], url: str = "") -> str:
    """A command of the page, in the folder -> what it prints."""
    program = "training" if words[0] == "roadmatch-train" else "app.cli"
    call = f"import sys; from {program}.cli import main; sys.exit(main())".replace("app.cli.cli", "app.cli")
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", call, *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, **({"ROADMATCH_URL": url} if url else {})},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, (words, done.stderr[-2000:])
    return done.stdout


@pytest.mark.faults
def test_the_page_leads_from_photographs_to_an_answer(folder: Path) -> None:
    train = [words for words in COMMANDS if words[0] == "roadmatch-train"]
    serve, *ask = [words for words in COMMANDS if words[0] == "roadmatch"]
    assert [words[1] for words in train] == ["init", "fit", "evaluate", "export"]
    printed = {words[1]: run(folder, words) for words in train}
    assert "linear" in printed["init"]
    assert {"before", "after"} <= set(json.loads(printed["evaluate"]))
    assert (folder / "bundles" / "photos" / "report.html").stat().st_size > 10_000
    assert serve[1:] == ["serve", "--bundle", "bundles/photos", "--data", "gallery"]
    served = start(folder / "gallery", folder / "bundles" / "photos")
    try:
        answers = [run(folder, words, served.url) for words in ask]
    finally:
        served.kill()
    assert "144" in answers[0]
    assert answers[1].startswith(("match", "no_match"))
    assert "chelsea-05" in answers[1]
