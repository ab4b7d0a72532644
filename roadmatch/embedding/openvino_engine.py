"""The CPU engine: one picture at a time, on all threads when it is alone and on one thread when it is not."""

import os
from queue import SimpleQueue
from threading import Lock
from typing import Any, Protocol

import numpy as np

from roadmatch.embedding.engine import Pixels, checked_pixels, checked_vector
from roadmatch.embedding.unreported import openvino, opset13
from roadmatch.errors import BundleCorrupt
from roadmatch.scoring import Vector


class OpenvinoEngine:
    """Two compiled forms of one embedder, which give the same bits.

    A lone call takes the form that spreads a picture over all threads (least waiting); a call that finds another one
    under way, or is told that the cores have other work, waits for one of `cpus` streams of one thread each (most
    pictures a second). Batches gain nothing here.
    """

    def __init__(self, model: bytes, cpus: int | None = None) -> None:
        """model: an ONNX graph, uint8 (1, S, S, 3) -> float32 (1, D); cpus: None for all that this process may use."""
        if cpus is not None and cpus < 1:
            raise ValueError(f"cpus must be at least 1, not {cpus}")
        usable = len(os.sched_getaffinity(0))
        cpus = cpus or usable
        core = openvino.Core()
        graph = _read(core, model)
        self._size, self._dimension = _shape(graph)
        use_scalars(graph)
        streams = _compile(core, graph, streams=cpus, threads=cpus)
        self._streams: SimpleQueue[Request] = SimpleQueue()
        for _ in range(cpus):
            self._streams.put(_Prepared(streams, self._size))
        self._alone: Request | None = None
        if cpus > 1:
            alone = _Prepared(_compile(core, graph, streams=1, threads=cpus, pinned=cpus == usable), self._size)
            # Thread counts that split a sum in two ways are not known to occur, but nobody tried them all.
            if agree(alone, _Prepared(streams, self._size), self._size):
                self._alone = alone
        self._lock = Lock()
        self._under_way = 0

    @property
    def dimension(self) -> int:
        return self._dimension

    def embed(self, pixels: Pixels, *, busy: bool = False) -> Vector:
        pixels = checked_pixels(pixels, self._size)
        with self._lock:
            # The lone request is free here: whoever has it is counted until it is done.
            alone = None if busy or self._under_way else self._alone
            self._under_way += 1
        try:
            return checked_vector(alone.infer(pixels) if alone else self._in_stream(pixels))
        finally:
            with self._lock:
                self._under_way -= 1

    def _in_stream(self, pixels: Pixels) -> Vector:
        request = self._streams.get()
        try:
            return request.infer(pixels)
        finally:
            self._streams.put(request)


class Request(Protocol):
    """One place to infer in; one call at a time."""

    def infer(self, pixels: Pixels) -> Vector:
        """pixels (S, S, 3) uint8 -> (D,), the caller's own."""
        ...


class _Prepared:
    """An infer request with its memory set once: handing over arrays at each call costs 0.1 to 0.3 ms of Python."""

    def __init__(self, compiled: Any, size: int) -> None:
        self._request = compiled.create_infer_request()
        self._pixels = np.zeros((1, size, size, 3), np.uint8)
        self._request.set_input_tensor(openvino.Tensor(self._pixels, shared_memory=True))
        self._output = self._request.get_output_tensor()

    def infer(self, pixels: Pixels) -> Vector:
        self._pixels[0] = pixels
        self._request.start_async()
        self._request.wait()
        vector: Vector = self._output.data[0].copy()  # the next call writes there
        return vector


def agree(first: Request, second: Request, size: int) -> bool:
    """Whether two requests give the same bits for a picture of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    return np.array_equal(first.infer(noise), second.infer(noise))


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


def use_scalars(graph: Any) -> None:
    """Factors and summands that are the same for every channel become one number; not a bit of the output changes.

    OpenVINO's loop over the three channels of a pixel takes some hundredths of a whole embedding, that over plain
    numbers next to nothing.
    """
    for node in graph.get_ops():
        if node.get_type_name() not in ("Multiply", "Add"):
            continue
        constant = node.input_value(1).get_node()
        if constant.get_type_name() != "Constant" or node.input_value(0).partial_shape != node.output(0).partial_shape:
            continue
        values = constant.data
        if values.size > 1 and (values == values.flat[0]).all():
            node.input(1).replace_source_output(opset13.constant(values.flat[0], values.dtype).output(0))
    graph.validate_nodes_and_infer_types()


def _compile(core: Any, graph: Any, *, streams: int, threads: int, pinned: bool = False) -> Any:
    """Numbers stay float32 whatever the processor offers: bfloat16 would move scores across the threshold.

    pinned: each thread to a core of its own, the first one to the first. Streams are never: those of another process
    would be on the same cores, and two workers would embed on one of them while the others idle.
    """
    return core.compile_model(
        graph,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": "f32",
            "NUM_STREAMS": streams,
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": pinned,
        },
    )
