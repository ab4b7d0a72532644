"""`make demo`: photographs into a gallery, copies of them and others asked, every verdict printed.

Exit status: 0 if there are no more wrong verdicts than the rule's bounds allow, 1 if there are or the demonstration
cannot be given, 2 for a wrong command line, 130 if it was stopped before its end.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from app.client import Client
from app.terminal import let_go_of_stdout, printable
from app.verdict import GalleryRow, Verdict, warning
from demo import process
from demo.photographs import MOST, SEED, DemoError, Photograph, halves, of_folder, prepared, shipped
from demo.questions import Asked, edits_each, questions
from demo.tally import Tally, tallies
from roadmatch.errors import RoadmatchError
from roadmatch.gallery.self_check import LEAST_IMAGES
from training.default_bundle.copies import EDITS

GALLERY = "demo"
_LONGEST = 24
"""Letters of a name in the table."""
_CHECK_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; a failure is one line on stderr."""
    chosen = parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal leaves no more behind than Ctrl-C
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _as_ctrl_c)
    try:
        return run(chosen)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        let_go_of_stdout()
        return 141
    except (RoadmatchError, OSError) as error:
        print(f"demo: {printable(str(error))}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(prog="python -m demo", description="Photographs in, verdicts out.")
    line.add_argument("--photos", type=Path, metavar="FOLDER", help="pictures of your own; nothing of them is kept")
    line.add_argument("--exit", action="store_true", help="stop after the verdicts")
    line.add_argument("--port", type=int, default=0, help="of the service (any free one)")
    return line


def run(chosen: argparse.Namespace) -> int:
    """The demonstration -> exit status. Raises RoadmatchError, OSError."""
    files = of_folder(chosen.photos) if chosen.photos else shipped()
    with process.temporary_folder() as folder, process.service(folder, chosen.port) as child:
        print(f"Starting the service, and making copies of {min(len(files), MOST)} photographs ...", flush=True)
        photographs = prepared(files, _skipped)
        url = process.address(child, folder)
        with Client(url) as client:
            right = demonstrate(client, photographs)
        if chosen.exit:
            return 0 if right else 1
        stay(child, folder, url, files[0])
        return 0 if right else 1


def demonstrate(client: Client, photographs: Sequence[Photograph]) -> bool:
    """Fill a gallery, ask, print -> whether the wrong verdicts are no more than the bounds allow."""
    inside, outside = halves(photographs)
    introduce(len(inside), len(outside))
    client.create_gallery(GALLERY)
    for photograph in inside:
        client.put_item(GALLERY, photograph.id, [photograph.file.read_bytes()])
    asked = []
    print(row("asked with", "edit", "verdict", "best item", "score", "threshold", "rule", ""))
    for question in questions(inside, outside):
        verdict = Verdict.of(client.search(GALLERY, question.data, top_k=1))
        asked.append(Asked(question, verdict))
        print(verdict_row(asked[-1]), flush=True)
    return summarise(checked(client), tallies(asked))


def introduce(inside: int, outside: int) -> None:
    """What is going to be done."""
    each = edits_each(inside + outside)
    edits = "the" if each == len(EDITS) else f"{each} in turn of the"
    print(
        f"{inside} photographs go into a gallery, {outside} do not, drawn with seed {SEED}. It is asked with copies\n"
        f"of each by {edits} {len(EDITS)} edits ({', '.join(EDITS)}; strengths by\n"
        "the same seed), and with those that are not in it also as they are.\n"
    )


def row(name: str, edit: str, decision: str, item: str, score: str, threshold: str, rule: str, mark: str) -> str:
    """A line of the table."""
    return (
        f"{_short(name):{_LONGEST}}  {edit:8}  {decision:8}  {_short(item):{_LONGEST}}  {score:>9}  {threshold:>9}  "
        f"{rule:22}  {mark}"
    ).rstrip()


def verdict_row(asked: Asked) -> str:
    """A question with its verdict, right or wrong."""
    question, verdict = asked.question, asked.verdict
    item, score = (verdict.best.item, f"{verdict.best.score:.6f}") if verdict.best else ("", "")
    mark = f"WRONG: {asked.wrong}" if asked.wrong else "right"
    return row(
        question.photograph,
        question.edit,
        verdict.decision,
        item,
        score,
        f"{verdict.threshold:.6f}",
        verdict.operating_point or "",
        mark,
    )


def checked(client: Client) -> GalleryRow:
    """The gallery once its own images were checked, which the service does by the way if there are enough."""
    end = time.monotonic() + _CHECK_S
    while True:
        found = client.gallery(GALLERY)
        if found is None:
            raise DemoError(f"gallery {GALLERY} is gone: start again")
        gallery = GalleryRow.of(found)
        if gallery.calibration != "not_checked" or gallery.images < LEAST_IMAGES or time.monotonic() > end:
            return gallery
        time.sleep(0.1)


def summarise(gallery: GalleryRow, results: Sequence[Tally]) -> bool:
    """Print what came of it -> whether it holds."""
    print()
    for tally in results:
        print(tally.line)
    few = f" (that takes {LEAST_IMAGES})" if gallery.images < LEAST_IMAGES else ""
    print(f"calibration, by the gallery's own images: {gallery.calibration}{few}")
    if gallery.stated_rate is not None:
        print(gallery.stated_rate.promise)
    for line in warning(gallery.calibration):
        print(line)
    return all(tally.holds for tally in results)


def stay(child: subprocess.Popen[str], folder: Path, url: str, picture: Path) -> None:
    """Keep the service up until Ctrl-C. Raises DemoError where it ends by itself."""
    print(
        f"\nThe service stays up at {url} until Ctrl-C; its data go with it. Try:\n"
        f"  curl -F 'image=@{picture}' {url}/v1/galleries/{GALLERY}/search\n"
        f"  {url}/docs",
        flush=True,
    )
    try:
        child.wait()
    except KeyboardInterrupt:
        return
    raise process.ended(folder)


def _skipped(file: Path, why: str) -> None:
    print(printable(f"left out: {file}: {why}"))


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _as_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
