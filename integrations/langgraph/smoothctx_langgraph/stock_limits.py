"""Sizes for a policy, read off a middleware that has a ``trigger`` and a ``keep`` in LangChain's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smoothctx.errors import ConfigurationError
from smoothctx.transforms.base import Size, check_size


def own_keep(middleware: Any) -> Size | None:
    """What the middleware itself keeps."""
    return _size(getattr(middleware, "keep", None))


def limits(
    middleware: Any, *, trigger: Any, hard_limit: Any, land_at: Any, context_window: int | None
) -> dict[str, Any]:
    """The policy's sizes: those given, the others read off.

    Raises:
        ConfigurationError: one is missing and cannot be read off.
    """
    window = context_window if context_window is not None else _window(middleware)
    own: list[Size] = []
    if trigger is None or hard_limit is None:
        own = [_plain(s, window) for s in _own_triggers(middleware)]
        if not own:
            missing = "trigger=" if trigger is None else "hard_limit="
            raise ConfigurationError(
                f"{missing} is needed: middleware={middleware.name} has no trigger that says when its work is due"
            )
    if hard_limit is None:
        hard_limit = _room(next((s for s in own if s[0] == "tokens"), own[0]), window)
    if trigger is None:
        trigger = [_start(s, hard_limit) for s in own]
        keep = own_keep(middleware)
        for kind, n in trigger:
            if keep is not None and keep[0] == kind and keep[1] + 1 >= n:
                raise ConfigurationError(
                    f"keep={keep!r}: it leaves nothing to rewrite where the work would start, at {kind} {n}; "
                    "give trigger= and hard_limit="
                )
    if land_at is None:
        land_at = _land(trigger, hard_limit, own_keep(middleware))
    return {"trigger": trigger, "hard_limit": hard_limit, "land_at": land_at, "context_window": window}


def _own_triggers(middleware: Any) -> list[Size]:
    given = getattr(middleware, "trigger", None)
    found: list[Size] = []
    for clause in given if isinstance(given, list) else [] if given is None else [given]:
        size = _size(next(iter(clause.items())) if isinstance(clause, Mapping) and len(clause) == 1 else clause)
        if size is None:
            raise ConfigurationError(f"trigger={clause!r}: cannot be read as one size; give trigger= and hard_limit=")
        found.append(size)
    return found


def _size(value: Any) -> Size | None:
    try:
        return check_size("size", value)
    except ConfigurationError:
        return None


def _window(middleware: Any) -> int | None:
    profile = getattr(getattr(middleware, "model", None), "profile", None)
    size = profile.get("max_input_tokens") if isinstance(profile, Mapping) else None
    return size if isinstance(size, int) and size > 0 else None


def _plain(size: Size, window: int | None) -> Size:
    if size[0] != "fraction":
        return size
    if window is None:
        raise ConfigurationError(f"context_window= is needed for a trigger of {size!r}: the model does not tell")
    return ("tokens", int(size[1] * window))


def _room(size: Size, window: int | None) -> Size:
    """How far the view may outgrow the middleware's trigger while its work is under way."""
    kind, n = size
    if kind == "messages":
        return (kind, 2 * n)
    return (kind, n + (window - n) // 2 if window is not None and window > n else n)


def _start(size: Size, hard_limit: Size) -> Size:
    kind, n = size
    if kind != hard_limit[0] or n < hard_limit[1]:
        return size
    return (kind, max(1, int(hard_limit[1] * 3 // 4)))


def _land(trigger: Any, hard_limit: Any, keep: Size | None) -> Size:
    """Where the fallback brings the view: half-way to where the work starts, not below what is kept."""
    sizes = [s for s in map(_size, trigger if isinstance(trigger, list) else [trigger]) if s is not None]
    hard = check_size("hard_limit", hard_limit)
    kind, n = next((s for s in sizes if s[0] == hard[0]), hard)
    if kind == "fraction":
        return (kind, n / 2)
    least = keep[1] + 1 if keep is not None and keep[0] == kind else 1
    return (kind, int(min(max(n // 2, least), hard[1] - 1)))
