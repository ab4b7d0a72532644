"""The memory estimate of a training step, held against the memory that real steps take on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training import recipe
from training.data.batches import BatchError
from training.fitting.memory import Memory, estimate, loss_memory

ROOT = Path(__file__).parent.parent
FACTOR = 1.15  # between what is measured and what is estimated, either way

_MEASURE = """
import json, sys
import torch
from pathlib import Path
from roadmatch.embedding.network import EmbeddingNetwork, build_backbone
from training.network.trainable import freeze_batch_norm, parameter_groups
from training.fitting.objective import objective_of
from training.recipe import Recipe
from training.fitting.step import backward

def kilobytes(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

recipe = Recipe.model_validate_json(sys.argv[1])
torch.set_num_threads(1)
size = recipe.network.size
def step(network, objective, batch, optimizer=None):
    inputs = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8)
    labels = torch.arange(batch) // recipe.batch.per_class
    backward(network, inputs, labels, objective, chunk=recipe.batch.chunk, precision=recipe.fit.precision)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

def made():
    network = EmbeddingNetwork(build_backbone(recipe.network.architecture, recipe.network.head), (.5,) * 3, (.5,) * 3)
    freeze_batch_norm(network)
    return network.to(memory_format=torch.channels_last).train()

objective = objective_of(recipe.loss, recipe.beside, distributed=False)
step(made(), objective, 8)  # libraries load what they need
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
network = made()
optimizer = torch.optim.AdamW(parameter_groups(network, objective, recipe.optimizer))
for _ in range(2):
    step(network, objective, recipe.batch.size, optimizer)
print(json.dumps((kilobytes("VmHWM") - before) * 1024))
"""


def described(**parts: object) -> recipe.Recipe:
    return recipe.Recipe.model_validate({"name": "measured", "data": {"root": "pictures"}, **parts})


CNN = {"architecture": "resnet18", "size": 96, "head": {"pooling": "gem", "layer_norm": True, "dimension": 64}}
TRANSFORMER = {"architecture": "deit_tiny_patch16_224", "size": 224, "head": {"layer_norm": True, "dimension": 64}}


def measured(described: recipe.Recipe) -> int:
    """Bytes that two real steps take at most beside what the process had before, in a process of its own."""
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, described.model_dump_json()],
        cwd=ROOT,
        env={**os.environ, **given_back},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return int(json.loads(done.stdout))


@pytest.mark.faults
@pytest.mark.parametrize("network", [CNN, TRANSFORMER])
@pytest.mark.parametrize(("chunk", "precision"), [(None, "float32"), (16, "float32"), (None, "bfloat16")])
def test_a_real_step_takes_what_was_estimated(network: dict[str, object], chunk: int | None, precision: str) -> None:
    one = described(network=network, batch={"size": 64, "chunk": chunk}, fit={"precision": precision})
    found, expected = measured(one), estimate(one).total
    assert expected / FACTOR <= found <= expected * FACTOR


SMALL = {"architecture": "test_resnet", "size": 64, "head": {"dimension": 32}}


def test_parameters_gradients_and_the_optimizers_moments_are_counted() -> None:
    head = {"mode": "linear", "architecture": "test_resnet", "head": {"dimension": 64}}
    plain = estimate(described(network=head))
    width = plain.parameters // 4 // 64 - 1
    layer = 4 * 64 * (width + 1)
    assert (plain.parameters, plain.gradients, plain.optimizer, plain.average) == (layer, layer, 2 * layer, 0)
    other = estimate(described(network={**head, "average": 0.99}, optimizer={"name": "sgd"}))
    assert (other.optimizer, other.average) == (layer, layer)


def test_a_chunk_takes_its_share_of_the_activations_and_nothing_else_changes() -> None:
    whole, chunked = (estimate(described(network=SMALL, batch={"size": 64, "chunk": chunk})) for chunk in (None, 16))
    assert chunked.activations == pytest.approx(whole.activations / 4, rel=0.1)
    assert (chunked.parameters, chunked.inputs, chunked.loss) == (whole.parameters, whole.inputs, whole.loss)
    assert whole.inputs == 64 * 64 * 64 * 3


def test_half_precision_takes_about_half_of_the_activations() -> None:
    full, half = (
        estimate(described(network=SMALL, fit={"precision": precision})) for precision in ("float32", "bfloat16")
    )
    assert 0.4 < half.activations / full.activations < 0.75
    assert half.parameters == full.parameters


def test_several_processes_share_the_batch_and_keep_gradients_twice() -> None:
    one, two = (estimate(described(network=SMALL), processes=processes) for processes in (1, 2))
    assert two.inputs == one.inputs / 2
    assert two.gradients == 2 * one.gradients
    with pytest.raises(BatchError, match=r"batch.size 128 cannot be parted equally among 3 processes"):
        estimate(described(network=SMALL), processes=3)


@pytest.mark.parametrize("loss", ["gsap", "smooth_ap", "roadmap"])
def test_what_a_loss_takes_is_not_underestimated_beyond_what_is_measured(loss: str) -> None:
    one = described(loss={"name": loss}, batch={"size": 512})
    real = loss_memory(one, 32)
    assert real <= loss_memory(one, 32, largest=128) <= 8 * real


def test_a_loss_whose_memory_grows_with_the_cube_of_the_batch_is_extrapolated_so() -> None:
    one = described(loss={"name": "triplet"}, batch={"size": 128})
    assert loss_memory(one, 8, largest=64) == pytest.approx(loss_memory(one, 8), rel=0.1)


def test_the_lines_name_every_part_and_the_total() -> None:
    gib = 1 << 30
    lines = Memory(gib, gib, 2 * gib, 0, gib // 2, 10 * gib, gib // 4).lines()
    assert lines[0].split() == ["parameters", "1.000", "GiB"]
    assert lines[-1].split() == ["total", "14.750", "GiB"]
    assert len(lines) == 8
