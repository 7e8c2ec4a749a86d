"""Urgency: a background call to an engine, at the priority that it has now.

It goes out as a lookahead, or as promoted when a turn waits for it already. When a turn begins to wait for one that the
server has not begun to answer, it may stand in the server's queue behind everybody else: it is then sent again, once,
at the promoted priority. Only where the server is sure to sort by priorities, and where what it had evaluated already
is not lost (its prefix cache is not known to be off).

It goes out between the first tokens of turns: in the step in which a server evaluates a turn's prompt, that of a
background call, however short, and each token of its answer cost the turn time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio

from .endpoints import Caller, caller

#: seconds that a work's calls wait for the first tokens of turns
ASIDE_S = 5.0


def aside_s(timeout_s: float) -> float:
    """Seconds of a work's timeout that are for that: most of the time is for the calls themselves."""
    return min(ASIDE_S, timeout_s / 8)


async def complete(engine: Any, messages: list[dict[str, Any]], *, max_tokens: int, options: Mapping[str, Any]) -> Any:
    """``engine.complete``, for whoever the running code calls models for.

    Raises:
        EngineError: see its subclasses.
    """
    ranks: Any = getattr(engine, "priority_options", None)
    waiting: dict[str, Any] = ranks("lookahead") if ranks is not None else {}
    urgent: dict[str, Any] = ranks("promoted") if ranks is not None else {}
    who = caller()
    if who is not None:
        await _aside(who)
    if who is None or waiting == urgent:
        return await engine.complete(messages, max_tokens=max_tokens, **options)
    if not who.urgent() and who.foreground is not None and _sorts(engine):
        begun = False

        def begins() -> None:
            nonlocal begun
            begun = True

        async def first() -> Any:
            async with engine.stream(messages, max_tokens=max_tokens, **{**options, **waiting}) as stream:
                stream.on_token = begins  # reasoning counts too
                async for _ in stream:
                    begins()
            return stream.completion

        done = await who.foreground.unless(lambda: not begun and who.urgent(), first)
        if done is not None:
            return done
    level = urgent if who.urgent() else waiting
    return await engine.complete(messages, max_tokens=max_tokens, **{**options, **level})


async def _aside(who: Caller) -> None:
    """Wait a little while any turn waits for its first token on the same engine."""
    foreground = who.foreground
    if foreground is not None and foreground.prefilling and not who.urgent():
        started = anyio.current_time()
        with anyio.move_on_after(who.aside_s):
            await foreground.wait_until(lambda: not foreground.prefilling or who.urgent())
        who.aside_s -= anyio.current_time() - started


def _sorts(engine: Any) -> bool:
    known = getattr(engine, "capabilities", None)
    return known is not None and known.priority_sure and known.prefix_caching is not False and hasattr(engine, "stream")
