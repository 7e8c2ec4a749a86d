"""Engines: model servers that smoothctx can ask, warm ahead of a commit, and look into.

``OpenAIEngine`` is the client for any OpenAI-compatible server; ``EmbeddedEngine`` brings a server of its own.
"""

from __future__ import annotations

from .binding import Binding, EngineBinding
from .client import Completion, OpenAIEngine, Stream
from .embedded import EmbeddedEngine
from .preload import PreloadReport
from .weights import find_weights

__all__ = (
    "Binding",
    "Completion",
    "EmbeddedEngine",
    "EngineBinding",
    "OpenAIEngine",
    "PreloadReport",
    "Stream",
    "find_weights",
)
