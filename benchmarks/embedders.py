"""Embedding one picture at a time: our engine, or the same network in torch's eager mode.

`python -m benchmarks.embedders BUNDLE KIND...`, KIND being `ours`, `torch_no_grad` or `torch_inference_mode`.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.sides import Answers, answer_commands
from roadmatch import bundle as bundles
from roadmatch.bundle import EMBEDDER, MODEL, Bundle
from roadmatch.embedding import Pixels
from roadmatch.embedding.openvino_engine import OpenvinoEngine

Embed = Callable[[Pixels], object]
_WARM_UP = 5


def _ours(bundle: Bundle) -> Embed:
    return OpenvinoEngine(bundle.file(EMBEDDER)).embed


def _in_torch(bundle: Bundle, without_gradients: str) -> Embed:
    """The network as a user of timm runs it: eager, channels last, all threads, batch norm as it is."""
    import safetensors.torch
    import torch

    from roadmatch.embedding.network import EmbeddingNetwork, build_backbone

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    manifest = bundle.manifest
    backbone = build_backbone(manifest.architecture)
    backbone.load_state_dict(safetensors.torch.load(bundle.file(MODEL)))
    network = EmbeddingNetwork(backbone, manifest.mean, manifest.std).eval()
    network.to(memory_format=torch.channels_last)  # its input is (1, H, W, 3): channels last, too

    def embed(pixels: Pixels) -> object:
        with getattr(torch, without_gradients)():
            return network(torch.from_numpy(pixels)[None])[0].numpy()

    return embed


KINDS: dict[str, Callable[[Bundle], Embed]] = {
    "ours": _ours,
    "torch_no_grad": partial(_in_torch, without_gradients="no_grad"),
    "torch_inference_mode": partial(_in_torch, without_gradients="inference_mode"),
}


def main(bundle_folder: Path, kinds: list[str]) -> None:
    """Time what is asked for."""
    bundle = bundles.read(bundle_folder)
    size = bundle.manifest.preprocessing.size
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    embedders = {kind: KINDS[kind](bundle) for kind in kinds}

    def answer(kind: str, times: int) -> Answers:
        embed, taken = embedders[kind], []
        for _ in range(_WARM_UP):
            embed(pixels)
        for _ in range(times):
            started = time.perf_counter()
            embed(pixels)
            taken.append(time.perf_counter() - started)
        return {"p50_s": float(np.median(taken)), "fastest_s": min(taken)}

    answer_commands(answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
