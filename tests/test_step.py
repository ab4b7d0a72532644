"""The gradient of a batch: the same in chunks as at once, and a clear word where there is none."""

import subprocess
import sys
from collections.abc import Iterable

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import normalize

from roadmatch.losses import ready
from training.fitting.step import ChunkError, StepError, backward
from training.recipe import Precision

SIDE, BATCH = 8, 10
LABELS = torch.arange(BATCH) // 2


class Tiny(nn.Module):
    """A convolution, a residual branch with stochastic depth, dropout, a projection, unit length."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, stride=2)
        self.norm = norm or nn.Identity()
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.drop_path, self.dropout = DropPath(0.3), nn.Dropout(0.2)
        self.head = nn.Linear(16, 8)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        x = x + self.drop_path(torch.relu(self.second(x)))
        self.dtypes.append(x.dtype)
        return normalize(self.head(self.dropout(x.mean((2, 3)))), dim=1)


def tiny(norm: nn.Module | None = None) -> Tiny:
    torch.manual_seed(1)
    return Tiny(norm).train()


def pictures(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(2))


def gradients(network: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def one_graph(network: nn.Module, parts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and gradient with a graph of the whole batch, drawing random numbers in the order of the parts."""
    loss: Tensor = ready.smooth_ap(0.1)(torch.cat([network(part) for part in parts]), LABELS)
    loss.backward()
    return loss.detach(), gradients(network)


@pytest.mark.parametrize("chunk", [1, 3, 5, 10, None])
def test_chunks_have_the_gradient_of_one_graph_with_dropout_and_stochastic_depth_on(chunk: int | None) -> None:
    one, network = tiny(), tiny()
    torch.manual_seed(5)
    loss, expected = one_graph(one, pictures().split(chunk or BATCH))
    torch.manual_seed(5)
    stepped = backward(network, pictures(), LABELS, ready.smooth_ap(0.1), chunk=chunk)
    found = gradients(network)
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    assert stepped.loss.item() == pytest.approx(loss.item(), abs=1e-7)
    assert stepped.embeddings.shape == (BATCH, 8)
    assert not stepped.embeddings.requires_grad


def test_random_numbers_go_on_after_a_step_as_if_each_chunk_had_been_embedded_once() -> None:
    network = tiny()
    torch.manual_seed(5)
    for part in pictures().split(3):
        network(part)
    expected = torch.rand(4)
    torch.manual_seed(5)
    backward(network, pictures(), LABELS, ready.smooth_ap(0.1), chunk=3)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.faults
def test_chunks_of_a_pretrained_kind_of_network_have_the_gradient_of_one_graph() -> None:
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=0, img_size=64, drop_path_rate=0.2, proj_drop_rate=0.1).train()
    inputs = torch.randn(BATCH, 3, 64, 64)
    torch.manual_seed(7)
    embeddings = torch.cat([normalize(network(part)) for part in inputs.split(4)])
    ready.gsap(0.05)(embeddings, LABELS).backward()
    expected = gradients(network)
    network.zero_grad()

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor) -> Tensor:
            return normalize(self.network(x))

    torch.manual_seed(7)
    backward(Unit(), inputs, LABELS, ready.gsap(0.05), chunk=4)
    assert (gradients(network) - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("chunk", [None, 4])
def test_half_precision_is_for_the_network_and_the_loss_sees_float32(chunk: int | None) -> None:
    seen: list[torch.dtype] = []

    class Loss(nn.Module):
        def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
            seen.extend([embeddings.dtype, (embeddings @ embeddings.T).dtype])
            value: Tensor = ready.smooth_ap(0.1)(embeddings, labels)
            return value

    network, exact = tiny().eval(), tiny().eval()
    backward(network, pictures(), LABELS, Loss(), chunk=chunk, precision=Precision.BFLOAT16)
    backward(exact, pictures(), LABELS, Loss(), chunk=None)
    assert set(network.dtypes) == {torch.bfloat16}
    assert set(seen) == {torch.float32}
    assert 0 < (gradients(network) - gradients(exact)).norm() < 0.1 * gradients(exact).norm()


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_scaler_scales_the_gradient_once(chunk: int | None) -> None:
    plain, scaled, scaler = tiny().eval(), tiny().eval(), GradScaler("cpu", init_scale=1024.0)
    without = backward(plain, pictures(), LABELS, ready.smooth_ap(0.1), chunk=chunk)
    stepped = backward(scaled, pictures(), LABELS, ready.smooth_ap(0.1), chunk=chunk, scaler=scaler)
    torch.testing.assert_close(gradients(scaled), 1024 * gradients(plain))
    assert stepped.loss == without.loss


def test_batch_norm_in_training_mode_is_refused_in_chunks_alone() -> None:
    network = tiny(nn.BatchNorm2d(16))
    with pytest.raises(ChunkError, match=r"batch norm norm .* network\.freeze_batch_norm") as caught:
        backward(network, pictures(), LABELS, ready.smooth_ap(0.1), chunk=4)
    assert "\n" not in str(caught.value)
    assert all(parameter.grad is None for parameter in network.parameters())
    backward(network, pictures(), LABELS, ready.smooth_ap(0.1), chunk=None)
    backward(network, pictures(), LABELS, ready.smooth_ap(0.1), chunk=BATCH)
    backward(network.eval(), pictures(), LABELS, ready.smooth_ap(0.1), chunk=4)
    unkept = tiny(nn.BatchNorm2d(16, track_running_stats=False)).eval()
    with pytest.raises(ChunkError, match="batch norm norm"):
        backward(unkept, pictures(), LABELS, ready.smooth_ap(0.1), chunk=4)


class Moving(nn.Module):
    """Keeps a count of its calls, as no replay of random numbers can bring back."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * torch.linspace(0, float(self.calls), x.shape[1])[:, None, None]


def test_a_network_that_does_not_repeat_itself_is_an_error() -> None:
    with pytest.raises(StepError, match=r"moved by .* batch\.chunk"):
        backward(tiny(Moving()), pictures(), LABELS, ready.smooth_ap(0.1), chunk=4)


class Undefined(nn.Module):
    """A loss of the given value, connected to the embeddings."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return embeddings.sum() * 0 + self.value


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error_with_the_batch_and_leaves_no_gradient(
    value: float, chunk: int | None
) -> None:
    network, inputs = tiny(), pictures()
    with pytest.raises(StepError, match=f"the loss is {value}: lower the learning rate") as caught:
        backward(network, inputs, LABELS, Undefined(value), chunk=chunk)
    assert caught.value.inputs is inputs
    assert caught.value.labels is LABELS
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("chunk", [None, 4])
def test_embeddings_that_are_not_finite_are_an_error_with_the_batch(chunk: int | None) -> None:
    inputs = pictures()
    inputs[3, 0] = torch.nan
    with pytest.raises(StepError, match="embeddings hold NaN") as caught:
        backward(tiny(), inputs, LABELS, ready.gsap(), chunk=chunk)
    assert caught.value.inputs is inputs


@pytest.mark.parametrize(("batch", "chunk"), [(0, None), (0, 2), (4, 0)])
def test_an_empty_batch_or_chunk_is_refused(batch: int, chunk: int | None) -> None:
    with pytest.raises(ValueError, match="at least one is needed"):
        backward(tiny(), pictures(batch), LABELS[:batch], ready.gsap(), chunk=chunk)


MEMORY = """
import re, sys, torch
from pathlib import Path
from torch import nn
from training.fitting.step import backward
from roadmatch.losses import ready
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 16)
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *last)
    def forward(self, x):
        return nn.functional.normalize(self.layers(x / 255 - 0.5))
torch.set_num_threads(1)
torch.manual_seed(0)
batch, chunk = (int(argument) for argument in sys.argv[1:])
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
network, labels = Network(), torch.arange(512) // 4
inputs = torch.randint(0, 256, (512, 3, 64, 64), dtype=torch.uint8)
backward(network, inputs[:2], labels[:2] * 0, ready.gsap(), chunk=1)
before = peak()
backward(network, inputs[:batch], labels[:batch], ready.gsap(), chunk=chunk or None)
print(peak() - before)
"""


def grown_mib(batch: int, chunk: int) -> float:
    """By how much the peak memory of a process of its own grows in a step; chunk 0: all at once."""
    command = [sys.executable, "-c", MEMORY, str(batch), str(chunk)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.faults
def test_a_large_batch_takes_the_memory_of_its_chunk() -> None:
    one, many, at_once = grown_mib(16, 0), grown_mib(512, 16), grown_mib(128, 0)
    print(f"MiB: one chunk of 16 {one:.0f}, 512 in chunks of 16 {many:.0f}, 128 at once {at_once:.0f}")
    assert at_once > 5 * one
    assert many < 3 * one  # the loss of 512 images takes some 40 MiB by itself; their network at once would take 1,300
