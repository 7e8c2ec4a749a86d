"""Transforms: rewrites of a run of segments. Own ones implement the ``Transform`` protocol of ``base``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Locality, Rewrite, Size, Transform, TransformRequest
from .chain import Chain
from .facts import Facts, pin
from .isolate import Isolate
from .keep_recent import KeepRecent
from .model import Model, ModelEngine, ModelReply
from .offload import Offload
from .parallel import ParallelSummarize
from .speculate import Candidate, Speculate
from .summarize import Summarize
from .validators import NotSmaller, Validator, default_validators, validate

__all__ = (
    "Candidate",
    "Chain",
    "Facts",
    "Isolate",
    "KeepRecent",
    "Locality",
    "Model",
    "ModelEngine",
    "ModelReply",
    "NotSmaller",
    "Offload",
    "ParallelSummarize",
    "Rewrite",
    "Size",
    "Speculate",
    "Summarize",
    "Transform",
    "TransformRequest",
    "Validator",
    "default_validators",
    "named_transforms",
    "pin",
    "validate",
)


def named_transforms() -> dict[str, Callable[..., Any]]:
    """The transforms that ``schedule_transform`` knows by name."""
    return {t.name: t for t in (Summarize, ParallelSummarize, Offload, KeepRecent, Isolate, Speculate)}
