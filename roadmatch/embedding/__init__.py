"""Pictures to unit vectors: OpenVINO on the CPU, torch on CUDA."""

from roadmatch.embedding.encoder import Encoded, Encoder, open_encoder
from roadmatch.embedding.engine import Engine, Pixels

__all__ = ["Encoded", "Encoder", "Engine", "Pixels", "open_encoder"]
