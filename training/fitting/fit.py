"""A recipe and a folder -> a trained network: `fit` begins a run, `resume` goes on with one."""

import sys
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from training.data import checks, splits
from training.data.batches import Batches
from training.data.layouts import images_of
from training.data.loading import Features, Pictures
from training.data.manifest import Manifest, Split
from training.fitting import checkpoints, features, run_folder, schedule
from training.fitting.checkpoints import Checkpoint, State
from training.fitting.learner import learner_of
from training.fitting.loop import Data, Loop
from training.fitting.processes import Process, repeatable, this_process
from training.fitting.validation import Judged
from training.fitting.watch import Watch
from training.network.trainable import Opened, open_network
from training.recipe import Mode, Recipe


def fit(recipe: Recipe, run: Path, *, resume: bool = False, show: bool = True) -> None:
    """Trains as the recipe says, alone or as one of torchrun's processes; all that comes of it is in the folder `run`.

    recipe.yaml, manifest.parquet (with splits), findings.txt of the checks, log.jsonl, tensorboard/, checkpoints/last
    to go on from, and checkpoints/best, the model of the highest validation gAP (the last, where the validation split
    has no pair of images to judge by). Features of mode linear are kept in `features` beside the run. show: progress
    on stderr. Raises RoadmatchError, and KeyboardInterrupt once the last whole step is saved.
    """
    schedule.refuse(recipe.optimizer.schedule, recipe.fit.epochs)
    with this_process(recipe.fit.device) as process, repeatable(recipe.fit.deterministic, process.device):
        tell = _Tell(show and process.first)
        checkpoint = _to_go_on_from(run, recipe) if resume else None
        data = recipe.data
        images = splits.split(images_of(data), validation=data.validation, test=data.test, seed=data.split_seed)
        if checkpoint is not None:
            run_folder.refuse_changed_images(run, checkpoint.state, images)
            if checkpoint.state.finished:
                tell(f"{run} is finished after {checkpoint.state.epoch} epochs: evaluate, calibrate or export it")
                return
        if not resume:
            _check(recipe, images, run, process, tell)
        _train(recipe, images, run, process, checkpoint, tell)


def resume(run: Path, *, show: bool = True) -> None:
    """Goes on with a run that was interrupted, from its last checkpoint; the rest is as if it had not been.

    A finished run says so. Raises as `fit` does, and RunError where recipe or images have changed.
    """
    fit(run_folder.recipe_of(run), run, resume=True, show=show)


class _Tell:
    """A line on stderr, from one process."""

    def __init__(self, shows: bool) -> None:
        self.shows = shows

    def __call__(self, line: str) -> None:
        if self.shows:
            print(line, file=sys.stderr, flush=True)


def _to_go_on_from(run: Path, recipe: Recipe) -> Checkpoint | None:
    """None for a run that ended before its first checkpoint."""
    run_folder.recipe_of(run)
    if checkpoints.standing(run / run_folder.LAST) is None:
        return None
    checkpoint = checkpoints.load(run / run_folder.LAST)
    run_folder.refuse_changed_recipe(checkpoint.state, recipe)
    return checkpoint


def _check(recipe: Recipe, images: Manifest, run: Path, process: Process, tell: _Tell) -> None:
    """One process reads every image, and refuses what would spoil the run."""
    if process.first:
        run_folder.refuse_begun(run)
        tell(f"{len(images):,} images, {len(images.classes):,} classes: looking at each")
        near, threads = recipe.data.near_duplicates, recipe.data.threads
        findings = checks.check(images, recipe.batch, near_duplicates=near, threads=threads)
        run_folder.note_findings(run, findings)
        for line in (*findings.warnings, *checks.few_to_test(images)):
            tell(f"warning: {line}")
        checks.refuse(findings)
    process.wait_for_all()


def _train(
    recipe: Recipe, images: Manifest, run: Path, process: Process, checkpoint: Checkpoint | None, tell: _Tell
) -> None:
    network, data = _opened(recipe, images, run, process, tell)
    learner = learner_of(network, recipe, process)
    state = State(recipe=recipe.model_dump(mode="json"), data=images.digest)
    if checkpoint is not None:
        learner.restore(checkpoint)
        state = checkpoint.state
    elif process.first:
        run_folder.begin(run, recipe, images)
    if data.judged is None:
        tell("the validation split has no two images of a class: the last model is taken, not the best")
    steps = len(data.batches)
    watch = Watch(
        run,
        total=recipe.fit.epochs * steps,
        done=state.steps,
        epochs=recipe.fit.epochs,
        writes=process.first,
        show=tell.shows,
    )
    try:
        Loop(recipe, run, data, learner, process, state, watch).go()
    finally:
        watch.close()
    process.wait_for_all()


def _opened(recipe: Recipe, images: Manifest, run: Path, process: Process, tell: _Tell) -> tuple[nn.Module, Data]:
    """What is trained, and on what."""
    opened = open_network(recipe.network, seed=recipe.seed)
    threads = process.threads(recipe.data.threads)
    trained = images.only(Split.TRAIN)
    batches = Batches(
        trained.numbers,
        trained.category_numbers,
        recipe.batch,
        seed=recipe.seed,
        rank=process.rank,
        world=process.world,
    )
    judged = Judged.of(images)
    if recipe.network.mode is Mode.LINEAR:
        stored = _features(opened, recipe, images, run, process, tell)
        own = stored[np.flatnonzero(images.of(Split.TRAIN))].to(process.device)
        examples = Features(own, trained.numbers, trained.category_numbers)
        every = Features(stored, images.numbers, images.category_numbers)
        return features.projection_of(opened.network), Data(examples, trained.paths, batches, every, judged)
    rule = opened.preprocessing
    augmented = Pictures(trained, augment=recipe.augment, preprocessing=rule, seed=recipe.seed, threads=threads)
    plain = Pictures(images, augment=None, preprocessing=rule, seed=recipe.seed, threads=threads)
    return opened.network, Data(augmented, trained.paths, batches, plain, judged)


def _features(opened: Opened, recipe: Recipe, images: Manifest, run: Path, process: Process, tell: _Tell) -> Tensor:
    """One process makes them, and the others find them; on a machine that does not see its folder, all do."""

    def progress(done: int) -> None:
        if done == len(images) or done % 4096 < 64:
            tell(f"features of {done:,} of {len(images):,} images")

    def asked() -> Tensor:
        return features.features_of(
            opened,
            recipe.network,
            images,
            run.absolute().parent / run_folder.FEATURES,
            device=process.device,
            threads=process.threads(recipe.data.threads),
            progress=progress,
        )

    if not process.first:
        process.wait_for_all()
        return asked()
    found = asked()
    process.wait_for_all()
    return found
