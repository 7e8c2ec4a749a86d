"""Driving a session through a conversation, turn by turn, for the tests of the collected cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helpers import Events, FakeSummarizer, make_runtime, problems, settle, summaries
from smoothctx import KeepRecent, Policy, Session, Summarize


@dataclass
class Turn:
    """One boundary: what the caller held and what the model was sent."""

    held: list[Any]
    view: list[Any]
    rewrote: bool = False


def small_policy(
    model: Any,
    *,
    keep: tuple[str, float] = ("messages", 2),
    trigger: Any = ("messages", 4),
    hard_limit: tuple[str, float] = ("messages", 1000),
    land_at: tuple[str, float] = ("messages", 3),
    **options: Any,
) -> Policy:
    """A policy that counts messages and starts early, so that a handful of messages shows everything."""
    summary = {k: options.pop(k) for k in ("source", "layout", "model_id", "facts", "max_tokens") if k in options}
    summary = {"facts": False, "max_tokens": 100, **summary}
    options.setdefault("min_savings", 0.0)
    options.setdefault("fallback", KeepRecent(keep=keep))
    return Policy(
        Summarize(model, keep=keep, **summary), trigger=trigger, hard_limit=hard_limit, land_at=land_at, **options
    )


def kinds(messages: Sequence[Any]) -> Counter[str]:
    """The kinds of fault in a request, without their places."""
    return Counter(p.split(": ", 1)[1] for p in problems(messages))


def check(held: Sequence[Any], view: Sequence[Any]) -> None:
    """No view is worse than what the caller held, and what is not replaced is the caller's own."""
    faults, had = kinds(view), kinds(held)
    if any("the first one after" in f for f in had) and list(view) == list(held):
        return
    assert not {f for f, n in faults.items() if n > had[f]}, (faults, had, view)
    lead = [m for m in held if m["role"] == "system"]
    inside = [m for m in view if m["role"] == "system"]
    assert all(a is b for a, b in zip(lead, inside, strict=True)), "system messages stay"


async def drive(
    messages: Sequence[Any],
    policy: Policy,
    *,
    every: bool = True,
    settle_s: float = 10.0,
    events: Events | None = None,
    session_id: str = "s",
) -> list[Turn]:
    """Grow a history message by message; commit before and after each, with time for the background between."""
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session(session_id, policy=policy)
        return await feed(session, messages, every=every, settle_s=settle_s)


async def feed(session: Session, messages: Sequence[Any], *, every: bool = True, settle_s: float = 10.0) -> list[Turn]:
    """As :func:`drive`, on a session that is open."""
    turns: list[Turn] = []
    held: list[Any] = []
    for k, message in enumerate(messages):
        held.append(message)
        session.observe(held)
        await settle(settle_s)
        due = message["role"] in ("user", "tool") and (k + 1 == len(messages) or messages[k + 1]["role"] != "tool")
        if every or due:
            receipts = len(session.receipts)
            view = await session.commit(held)
            check(held, view)
            turns.append(Turn(list(held), view, len(session.receipts) > receipts))
            await settle(settle_s)
    return turns


def rewritten(turns: Sequence[Turn]) -> list[Turn]:
    """The turns whose view differs from what was held."""
    return [
        t for t in turns if len(t.view) != len(t.held) or any(a is not b for a, b in zip(t.held, t.view, strict=True))
    ]


def summarised(turns: Sequence[Turn]) -> list[Turn]:
    """The turns whose view holds a summary."""
    return [t for t in turns if summaries(t.view)]


def fast() -> FakeSummarizer:
    """A summariser that answers at once."""
    return FakeSummarizer(delay=0.1)
