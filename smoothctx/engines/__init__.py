"""Engines: model servers that smoothctx can ask, warm ahead of a commit, and look into.

``OpenAIEngine`` is the client for any OpenAI-compatible server; ``EmbeddedEngine`` brings a server of its own.
"""

from __future__ import annotations

from .binding import Binding, EngineBinding
from .calibration import Calibration, Sample, calibrate
from .client import OpenAIEngine
from .completion import Completion, Stream
from .embedded import EmbeddedEngine
from .flavours import Capabilities
from .load import Load
from .preload import Preloader, PreloadReport
from .weights import find_weights

__all__ = (
    "Binding",
    "Calibration",
    "Capabilities",
    "Completion",
    "EmbeddedEngine",
    "EngineBinding",
    "Load",
    "OpenAIEngine",
    "PreloadReport",
    "Preloader",
    "Sample",
    "Stream",
    "calibrate",
    "find_weights",
)
