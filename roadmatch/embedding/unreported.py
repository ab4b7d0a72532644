"""openvino, which by itself reports each of its imports to an analytics service on the internet."""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # not to be had: it then takes a stub

import openvino  # noqa: E402
from openvino import opset13  # noqa: E402

__all__ = ["openvino", "opset13"]
