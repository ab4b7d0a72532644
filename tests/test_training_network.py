"""The network that is trained: its weights, what stays frozen, its groups of parameters, its average."""

import copy
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from roadmatch.bundle import Head
from roadmatch.embedding.network import EmbeddingNetwork, build_backbone
from training import recipe
from training.network.export import to_onnx
from training.network.trainable import (
    Average,
    NetworkError,
    Opened,
    freeze_batch_norm,
    initialise,
    open_network,
    parameter_groups,
    stored,
)

CNN, WITH_ACTIVATIONS, TRANSFORMER, DINO = "test_resnet", "test_efficientnet", "test_vit", "vit_small_patch16_dinov3"


def weights_of(folder: Path, architecture: str) -> Path:
    """A file of weights of timm's model, none of them at its first value."""
    path = folder / f"{architecture}.safetensors"
    if not path.exists():
        made = torch.Generator().manual_seed(7)
        tensors = timm.create_model(architecture, pretrained=False).state_dict()
        safetensors.torch.save_file({name: _drawn(tensor, made) for name, tensor in tensors.items()}, path)
    return path


def _drawn(tensor: Tensor, made: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.full_like(tensor, 5)
    return tensor.contiguous() * 0.5 + 0.05 * torch.rand(tensor.shape, generator=made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where weights are kept for the module."""
    return tmp_path_factory.mktemp("weights")


def opened(folder: Path, architecture: str = CNN, *, seed: int = 0, **settings: object) -> Opened:
    wanted = {"architecture": architecture, "weights": str(weights_of(folder, architecture)), **settings}
    return open_network(recipe.Network.model_validate(wanted), seed=seed)


def pixels(side: int = 64, batch: int = 2) -> Tensor:
    made = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch, side, side, 3), dtype=torch.uint8, generator=made)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("architecture", [CNN, WITH_ACTIVATIONS, TRANSFORMER])
def test_the_trunk_has_the_pretrained_weights_with_and_without_a_head(folder: Path, architecture: str) -> None:
    content = safetensors.torch.load_file(weights_of(folder, architecture))
    for head in (Head(), Head(dimension=8)):
        found = opened(folder, architecture, head=head)
        tensors = {name.removeprefix("trunk."): tensor for name, tensor in stored(found.network).items()}
        kept = [name for name in content if name in tensors]
        assert len(kept) == len(tensors) - (0 if head == Head() else 2)
        assert all(torch.equal(tensors[name], content[name]) for name in kept)
        assert found.provenance["file"] == f"{architecture}.safetensors"
        assert not found.network.training


@pytest.mark.faults
def test_a_dinov3_name_opens_with_its_own_size(folder: Path) -> None:
    found = opened(folder, DINO, head={"layer_norm": True, "dimension": 8}, drop_path=0.1)
    assert found.preprocessing.size == 256
    assert found.network(pixels(256, 1)).shape == (1, 8)


@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_a_transformer_that_pools_takes_the_pretrained_last_norm(folder: Path, pooling: str) -> None:
    found = opened(folder, TRANSFORMER, head={"pooling": pooling})
    content = safetensors.torch.load_file(weights_of(folder, TRANSFORMER))
    assert torch.equal(stored(found.network)["trunk.fc_norm.weight"], content["norm.weight"])


def test_weights_that_nobody_trained_are_refused(folder: Path) -> None:
    with pytest.raises(NetworkError, match=r"pooling 'map' of test_vit .*attn_pool.* use own") as caught:
        opened(folder, TRANSFORMER, head=Head.model_construct(pooling="map", layer_norm=False, dimension=8))
    assert "\n" not in str(caught.value)


def test_new_layers_depend_on_the_seed_alone_and_nothing_else_is_drawn(folder: Path) -> None:
    head = {"dimension": 8}
    torch.manual_seed(1)
    first = opened(folder, head=head, seed=3)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)
    assert same(stored(opened(folder, head=head, seed=3).network), stored(first.network))
    other = stored(opened(folder, head=head, seed=4).network)
    assert not torch.equal(other["head.0.weight"], stored(first.network)["head.0.weight"])
    alone = nn.Linear(96, 8)
    initialise(alone, 3)
    assert torch.equal(alone.weight, stored(first.network)["head.0.weight"])
    bound = 96**-0.5
    assert 0.9 * bound < alone.weight.abs().max() <= bound


def trained(network: EmbeddingNetwork, steps: int = 2) -> EmbeddingNetwork:
    """The network after some steps in training mode."""
    network.train()
    moving = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(moving, lr=0.1, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        embeddings = network(pixels())
        (embeddings[0] @ embeddings[1]).backward()
        optimizer.step()
    return network


def batch_norms(network: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": tensor.clone()
        for name, module in network.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for key, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize("architecture", [CNN, WITH_ACTIVATIONS])
def test_frozen_batch_norm_stays_through_training_copies_and_pickles(folder: Path, architecture: str) -> None:
    network = opened(folder, architecture).network
    before, first = batch_norms(network), stored(network)
    assert before
    for again in (network, copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert same(batch_norms(trained(again)), before)
        assert not same(stored(again), first)
        norms = [module for module in again.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        assert not any(norm.training for norm in norms)
        assert again.backbone.training
        assert all(norm.act.training for norm in norms if isinstance(norm, BatchNormAct2d))


def test_batch_norm_that_is_not_frozen_is_trained(folder: Path) -> None:
    network = opened(folder, freeze_batch_norm=False).network
    before = batch_norms(network)
    after = batch_norms(trained(network))
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_freezing_twice_is_freezing_once(folder: Path) -> None:
    network = opened(folder).network
    assert freeze_batch_norm(network) == freeze_batch_norm(network) > 0


@pytest.mark.parametrize("norm", [nn.SyncBatchNorm(4), nn.BatchNorm2d(4, track_running_stats=False)])
def test_batch_norm_that_cannot_be_frozen_is_named(norm: nn.Module) -> None:
    with pytest.raises(NetworkError, match=r"batch norm 1 \(\w+\) cannot be frozen: set network.freeze_batch_norm"):
        freeze_batch_norm(nn.Sequential(nn.Identity(), norm))


@pytest.mark.parametrize(("architecture", "head"), [(CNN, {"pooling": "gem", "dimension": 8}), (WITH_ACTIVATIONS, {})])
def test_what_was_trained_loads_strictly_into_the_bundles_network(
    folder: Path, architecture: str, head: dict[str, object]
) -> None:
    found = opened(folder, architecture, head=head, drop_path=0.2)
    network = trained(found.network).eval()
    tensors = safetensors.torch.load(safetensors.torch.save(stored(network)))
    backbone = build_backbone(architecture, Head.model_validate(head))
    backbone.load_state_dict(tensors, strict=True)
    rebuilt = EmbeddingNetwork(backbone, found.mean, found.std)
    torch.testing.assert_close(network(pixels()), rebuilt(pixels()), rtol=0, atol=1e-6)


@pytest.mark.faults
def test_a_trained_network_has_the_graph_of_the_bundles_network(folder: Path) -> None:
    found = opened(folder, WITH_ACTIVATIONS, drop_path=0.2)
    network = trained(found.network).eval()
    backbone = build_backbone(WITH_ACTIVATIONS)
    backbone.load_state_dict(stored(network), strict=True)
    assert to_onnx(network, 64) == to_onnx(EmbeddingNetwork(backbone, found.mean, found.std), 64)


def grouped(network: nn.Module, objective: nn.Module, **settings: object) -> dict[str, dict[str, object]]:
    groups = parameter_groups(network, objective, recipe.Optimizer.model_validate(settings))
    return {str(group["name"]): group for group in groups}


def test_parameters_are_grouped_by_rate_and_decay(folder: Path) -> None:
    network = opened(folder, head={"pooling": "gem", "dimension": 8}, freeze_batch_norm=False).network
    loss = nn.Linear(1, 1)
    groups = grouped(
        network, loss, learning_rate=1e-3, head_learning_rate=1e-2, loss_learning_rate=0.1, weight_decay=0.5
    )
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "backbone": (1e-3, 0.5),
        "backbone_no_decay": (1e-3, 0),
        "head": (1e-2, 0.5),
        "head_no_decay": (1e-2, 0),
        "loss": (0.1, 0),
    }
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    members = {name: [names.get(id(one), "loss") for one in group["params"]] for name, group in groups.items()}  # type: ignore[attr-defined]
    assert members["head"] == ["backbone.head.0.weight"]
    assert sorted(members["head_no_decay"]) == ["backbone.head.0.bias", "backbone.pool.exponent"]
    assert all(name.startswith("backbone.trunk.") for name in members["backbone"] + members["backbone_no_decay"])
    assert sum(map(len, members.values())) == len(names) + 2


def test_what_is_frozen_is_in_no_group_and_rates_fall_back(folder: Path) -> None:
    network = opened(folder).network
    groups = grouped(network, nn.Linear(1, 1), learning_rate=1e-3)
    assert set(groups) == {"backbone", "loss"}
    assert groups["loss"]["lr"] == 1e-3
    assert set(grouped(nn.Linear(3, 2), nn.Identity(), head_learning_rate=0.1)) == {"head", "head_no_decay"}


def test_the_average_is_that_of_all_steps_by_hand() -> None:
    network = nn.BatchNorm1d(1)
    average = Average(network, 0.75)
    for value in (2.0, 6.0):
        with torch.no_grad():
            network.weight.fill_(value)
            network.running_mean.fill_(value)  # type: ignore[union-attr]
            network.num_batches_tracked.fill_(int(value))  # type: ignore[union-attr]
        average.update(network)
    state = average.state()
    assert state["weight"].item() == pytest.approx(0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 6)
    assert state["running_mean"].item() == pytest.approx(0.75 * (0.25 * 2) + 0.25 * 6)
    assert state["num_batches_tracked"].item() == 6
    assert network.weight.item() == 6
    assert not average.network.training


def test_an_average_goes_on_from_its_state(folder: Path) -> None:
    network = opened(folder).network
    average = Average(network, 0.9)
    average.update(trained(network))
    again = Average(opened(folder).network, 0.9)
    again.load(average.state())
    for one in (average, again):
        one.update(network)
    assert same(average.state(), again.state())
    assert not any(parameter.requires_grad for parameter in average.network.parameters())


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay is"):
        Average(nn.Linear(1, 1), decay)
