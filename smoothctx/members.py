"""Members: what a transform is made of, and which engines and models its parts ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .transforms.base import Transform
from .transforms.model import Model


def members(transform: Transform) -> Sequence[Any]:
    """The transforms in a chain; of any other transform itself."""
    found: Sequence[Any] = getattr(transform, "transforms", (transform,))
    return found


def engine_of(member: Any) -> Any:
    """The engine that a transform asks, where that is known."""
    return getattr(member, "engine", None)


def uses(transform: Transform, engine: Any) -> bool:
    """Does any part of it ask this engine?"""
    return any(engine_of(m) is engine for m in members(transform))


def endpoint_of(member: Any) -> tuple[Any, str | None]:
    """The model that a transform asks, as it was given, and its identity."""
    model = getattr(member, "model", None)
    return (model.given, model.identity) if isinstance(model, Model) else (engine_of(member), None)
