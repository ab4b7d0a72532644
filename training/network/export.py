"""A torch embedder to the ONNX graph that serving runs, with the proof that both say the same."""

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
import torch

from roadmatch.embedding.engine import Engine, Pixels
from roadmatch.embedding.network import EmbeddingNetwork
from roadmatch.errors import RoadmatchError
from training.network.quiet import quiet

PARITY = 1e-4
"""Largest difference of any number of an embedding between torch and the exported graph."""


class ParityError(RoadmatchError):
    """The exported graph does not compute what the torch model does."""


def to_onnx(network: EmbeddingNetwork, size: int) -> bytes:
    """The graph `pixels` uint8 (1, size, size, 3) -> `embedding` float32 (1, D), one file, the same bytes each time."""
    pixels = torch.zeros((1, size, size, 3), dtype=torch.uint8)
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            network.eval(),
            (pixels,),
            input_names=["pixels"],
            output_names=["embedding"],
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    assert program is not None  # as it is with dynamo
    model = program.model_proto
    _strip(model)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def check_parity(network: EmbeddingNetwork, engine: Engine, pictures: Iterable[Pixels]) -> float:
    """The largest difference over the pictures (size, size, 3). Raises ParityError above PARITY."""
    worst = 0.0
    for pixels in pictures:
        with torch.inference_mode():
            expected = network.eval()(torch.from_numpy(pixels)[None])[0].numpy()
        worst = max(worst, float(np.abs(engine.embed(pixels) - expected).max()))
    if not worst <= PARITY:
        raise ParityError(f"the exported graph differs from torch by {worst:.2g}, and {PARITY:g} is the most allowed")
    return worst


def sample_pictures(size: int, number: int = 8, seed: int = 0) -> Iterator[Pixels]:
    """Pictures (size, size, 3): one of noise, one of one colour, the rest with the 1/f spectrum of photographs."""
    random = np.random.default_rng(seed)
    yield random.integers(0, 256, (size, size, 3), np.uint8)
    yield np.broadcast_to(random.integers(0, 256, 3, np.uint8), (size, size, 3)).copy()
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size)[None]) * size
    falloff = 1 / np.maximum(frequency, 1)[..., None]
    for _ in range(number - 2):
        spectrum = np.fft.fft2(random.standard_normal((size, size, 3)), axes=(0, 1)) * falloff
        picture = np.fft.ifft2(spectrum, axes=(0, 1)).real
        low, high = np.percentile(picture, (1, 99))
        yield (np.clip((picture - low) / (high - low), 0, 1) * 255).round().astype(np.uint8)


def _strip(model: onnx.ModelProto) -> None:
    """Remove what the exporter notes for debugging: stack traces, and with them paths of the machine that built it."""
    del model.metadata_props[:]
    model.doc_string = ""
    for graph in [model.graph, *model.functions]:
        del graph.metadata_props[:]
        graph.doc_string = ""
        for node in graph.node:
            del node.metadata_props[:]
            node.doc_string = ""
            for attribute in node.attribute:
                if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
                    raise ParityError(f"the graph has a branch ({node.op_type}), which is not exported")
        for value in graph.value_info:
            del value.metadata_props[:]
            value.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""
