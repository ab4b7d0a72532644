"""The CPU engine: one picture at a time, on all threads when it is alone and on one thread when it is not."""

import os
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np
import openvino

from roadmatch.embedding.engine import Pixels, checked_pixels, checked_vector
from roadmatch.errors import BundleCorrupt
from roadmatch.scoring import Vector


class OpenvinoEngine:
    """Two compiled forms of one embedder, which give the same bits.

    A lone call takes the form that spreads a picture over all threads (least waiting); a call that finds another one
    under way waits for one of `cpus` streams of one thread each (most pictures a second). Batches gain nothing here.
    """

    def __init__(self, model: bytes, cpus: int | None = None) -> None:
        """model: an ONNX graph, uint8 (1, S, S, 3) -> float32 (1, D); cpus: None for all that this process may use."""
        if cpus is not None and cpus < 1:
            raise ValueError(f"cpus must be at least 1, not {cpus}")
        cpus = cpus or len(os.sched_getaffinity(0))
        core = openvino.Core()
        graph = _read(core, model)
        self._size, self._dimension = _shape(graph)
        streams = _compile(core, graph, streams=cpus, threads=cpus)
        self._streams: SimpleQueue[Any] = SimpleQueue()
        for _ in range(cpus):
            self._streams.put(streams.create_infer_request())
        self._alone: Any = None
        if cpus > 1:
            alone = _compile(core, graph, streams=1, threads=cpus).create_infer_request()
            # Thread counts that split a sum in two ways are not known to occur, but nobody tried them all.
            if agree(alone, streams.create_infer_request(), self._size):
                self._alone = alone
        self._lock = Lock()
        self._under_way = 0

    @property
    def dimension(self) -> int:
        return self._dimension

    def embed(self, pixels: Pixels) -> Vector:
        pixels = checked_pixels(pixels, self._size)
        with self._lock:
            # The lone request is free here: whoever has it is counted until it is done.
            take_alone = self._under_way == 0 and self._alone is not None
            self._under_way += 1
        try:
            return checked_vector(_infer(self._alone, pixels) if take_alone else self._in_stream(pixels))
        finally:
            with self._lock:
                self._under_way -= 1

    def _in_stream(self, pixels: Pixels) -> Vector:
        request = self._streams.get()
        try:
            return _infer(request, pixels)
        finally:
            self._streams.put(request)


def agree(first: Any, second: Any, size: int) -> bool:
    """Whether two infer requests give the same bits for a picture of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    return np.array_equal(_infer(first, noise), _infer(second, noise))


def _read(core: Any, model: bytes) -> Any:
    try:
        return core.read_model(model)
    except RuntimeError as error:
        raise BundleCorrupt(f"OpenVINO cannot read the embedder: {' '.join(str(error).split())[:200]}") from error


def _shape(graph: Any) -> tuple[int, int]:
    """S and D of a graph uint8 (1, S, S, 3) -> float32 (1, D). Raises BundleCorrupt for any other."""
    inputs, outputs = graph.inputs, graph.outputs
    if len(inputs) == len(outputs) == 1 and inputs[0].partial_shape.is_static and outputs[0].partial_shape.is_static:
        pixels, embedding = tuple(inputs[0].shape), tuple(outputs[0].shape)
        types = (inputs[0].element_type, outputs[0].element_type)
        if types == (openvino.Type.u8, openvino.Type.f32) and len(pixels) == 4 and len(embedding) == 2:
            side, dimension = pixels[1], embedding[1]
            if pixels == (1, side, side, 3) and embedding == (1, dimension):
                return side, dimension
    raise BundleCorrupt("the embedder must take uint8 (1, S, S, 3) and give float32 (1, D)")


def _compile(core: Any, graph: Any, *, streams: int, threads: int) -> Any:
    """Numbers stay float32 whatever the processor offers: bfloat16 would move scores across the threshold."""
    return core.compile_model(
        graph,
        "CPU",
        {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": threads},
    )


def _infer(request: Any, pixels: Pixels) -> Vector:
    """Shares the picture with the request; the copy is of the D numbers, which the next call would overwrite."""
    outputs = request.infer(pixels[None], share_inputs=True, share_outputs=True)
    vector: Vector = outputs[0][0].copy()
    return vector
