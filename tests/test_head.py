"""A backbone with a head: shapes and names as stated, for each kind of architecture and pooling."""

import pytest
import torch
from torch import nn

from roadmatch.bundle import Head
from roadmatch.embedding.network import EmbeddingNetwork, GeM, Headed, build_backbone, head_of
from roadmatch.embedding.openvino_engine import OpenvinoEngine
from roadmatch.errors import BundleUnsupported
from training.network.export import check_parity, sample_pictures, to_onnx

CNN, TRANSFORMER, NO_STOCHASTIC_DEPTH = "test_resnet", "test_vit", "densenet121"


def test_without_a_head_the_tensors_have_timms_own_names() -> None:
    bare = build_backbone(CNN)
    headed = build_backbone(CNN, Head(dimension=8))
    assert not isinstance(bare, Headed)
    assert {f"trunk.{name}" for name in bare.state_dict()} | {"head.0.weight", "head.0.bias"} == set(
        headed.state_dict()
    )


@pytest.mark.parametrize("pooling", ["own", "avg", "max", "gem"])
@pytest.mark.parametrize("architecture", [CNN, "test_convnext"])
def test_a_map_is_pooled_as_asked(architecture: str, pooling: str) -> None:
    backbone = build_backbone(
        architecture, Head.model_validate({"pooling": pooling, "layer_norm": True, "dimension": 8})
    )
    assert backbone(torch.zeros(2, 3, 64, 64)).shape == (2, 8)


def test_a_layer_behind_the_pooling_gives_the_width() -> None:
    assert build_backbone("mobilenetv3_small_050", Head(pooling="gem", dimension=8))(
        torch.zeros(1, 3, 64, 64)
    ).shape == (1, 8)


def test_poolings_of_the_same_weights_are_mean_maximum_and_between() -> None:
    trunk = build_backbone(CNN)
    picture = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    pooled = {}
    for pooling in ("avg", "max", "gem"):
        headed = build_backbone(CNN, Head.model_validate({"pooling": pooling}))
        assert isinstance(headed, Headed)
        headed.trunk.load_state_dict(trunk.state_dict())
        pooled[pooling] = headed(picture)
    torch.testing.assert_close(pooled["avg"], trunk(picture))
    assert (pooled["avg"] <= pooled["gem"] + 1e-6).all()
    assert (pooled["gem"] <= pooled["max"] + 1e-6).all()
    assert (pooled["avg"] < pooled["max"]).any()


@pytest.mark.parametrize(
    ("architecture", "pooling"), [(TRANSFORMER, "gem"), ("test_vit_relpos", "max"), ("efficientvit_b0", "gem")]
)
def test_a_pooling_that_the_architecture_has_not_is_refused(architecture: str, pooling: str) -> None:
    with pytest.raises(BundleUnsupported, match=f"{architecture} .*'{pooling}': use own") as caught:
        build_backbone(architecture, Head.model_validate({"pooling": pooling}))
    assert "\n" not in str(caught.value)


def test_a_generalised_mean_by_hand() -> None:
    features = torch.tensor([[[[1.0, 2.0], [3.0, -4.0]], [[5.0, 5.0], [5.0, 5.0]]]])
    torch.testing.assert_close(GeM(1.0)(features), torch.tensor([[1.5, 5.0]]))
    torch.testing.assert_close(GeM(2.0)(features), torch.tensor([[3.5**0.5, 5.0]]))
    torch.testing.assert_close(GeM(30.0)(features), torch.tensor([[3.0, 5.0]]), atol=0.15, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_generalised_mean_of_half_precision_keeps_small_values_and_their_slopes(dtype: torch.dtype) -> None:
    features = torch.full((1, 2, 3, 3), 1e-4, dtype=dtype, requires_grad=True)
    pool = GeM()
    pooled = pool(features)
    torch.testing.assert_close(pooled, torch.full((1, 2), 1e-4), rtol=1e-2, atol=0)
    pooled.sum().backward()
    assert features.grad is not None
    assert pool.exponent.grad is not None
    assert torch.isfinite(features.grad).all()
    assert torch.isfinite(pool.exponent.grad)
    torch.testing.assert_close(features.grad.float().sum(), torch.tensor(2.0), rtol=1e-2, atol=0)


def test_a_network_in_half_precision_gives_float32_of_unit_length() -> None:
    torch.manual_seed(0)
    network = EmbeddingNetwork(build_backbone(CNN, Head(dimension=8)), (0.5,) * 3, (0.5,) * 3)
    pixels = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = network(pixels)
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(2), atol=1e-6, rtol=0)


def test_layer_norm_comes_before_the_projection_and_has_no_weights() -> None:
    head = head_of(6, Head(layer_norm=True, dimension=4))
    assert [type(layer) for layer in head] == [nn.LayerNorm, nn.Linear]
    assert set(head.state_dict()) == {"1.weight", "1.bias"}
    assert list(head_of(6, Head())) == []


@pytest.mark.parametrize("architecture", [CNN, TRANSFORMER])
def test_stochastic_depth_changes_training_mode_and_nothing_else(architecture: str) -> None:
    plain, dropping = build_backbone(architecture), build_backbone(architecture, drop_path=0.9)
    assert list(plain.state_dict()) == list(dropping.state_dict())
    pictures = torch.randn(8, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.01)  # a branch whose last scale is 0 at first would not be missed
        dropping.load_state_dict(plain.state_dict())
        torch.testing.assert_close(dropping(pictures), plain(pictures))
        for module in dropping.modules():
            module.training = type(module).__name__ == "DropPath"
        assert not torch.allclose(dropping(pictures), plain(pictures))


def test_stochastic_depth_is_refused_where_there_is_none() -> None:
    with pytest.raises(BundleUnsupported, match=f"{NO_STOCHASTIC_DEPTH} has no stochastic depth: leave drop_path at 0"):
        build_backbone(NO_STOCHASTIC_DEPTH, drop_path=0.1)


@pytest.mark.faults
def test_a_head_is_exported_with_the_rest() -> None:
    torch.manual_seed(0)
    backbone = build_backbone(CNN, Head(pooling="gem", layer_norm=True, dimension=8))
    network = EmbeddingNetwork(backbone, (0.5,) * 3, (0.5,) * 3)
    check_parity(network, OpenvinoEngine(to_onnx(network, 64), cpus=1), sample_pictures(64, number=3))
