"""The private channel: what is committed, in the graph's own state, so that it is right on every branch and after a
restart.

Give the state one more key, and hide it where the graph speaks to the outside::

    class State(MessagesState, LookaheadState): ...

    builder = StateGraph(State, input_schema=MessagesState, output_schema=MessagesState)

Or only the node's own input: LangGraph adds the channel because the node's parameter has it, and shows it to no one::

    class Input(MessagesState, LookaheadState): ...

    @lookahead_node(runtime, policy)
    async def call_model(state: Input): ...

As with every private channel of LangGraph, ``get_state`` and the stream modes of the state do show it;
``stream(..., output_keys=["messages"])`` keeps it out of ``values`` and ``updates``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from typing_extensions import TypedDict

#: the channel's key in the state
SAVED_KEY = "smoothctx"
#: of what is not of the present branch, as many stay in the channel
MAX_OTHERS = 8

#: what a turn writes for a place: all that it keeps there, or ``{"drop": [...], "add": [...]}``
Written = Sequence[str] | Mapping[str, Sequence[str]]


def merge_saved(old: Mapping[str, Sequence[str]] | None, new: Mapping[str, Written] | None) -> dict[str, list[str]]:
    """The channel's reducer. Of each place in the graph it holds the texts of ``Session.saved()``.

    A list takes the place of what is there; a change leaves alone what a parallel run of the same node writes.
    """
    merged = {place: list(texts) for place, texts in (old or {}).items()}
    for place, written in (new or {}).items():
        texts = list(written)
        if isinstance(written, Mapping):
            drop = set(written.get("drop", ()))
            texts = [*(t for t in merged.get(place, ()) if t not in drop), *written.get("add", ())]
        merged[place] = list(dict.fromkeys(texts))
    return {place: texts for place, texts in merged.items() if texts}


#: the type of the channel, for states that are not a ``TypedDict``: ``smoothctx: Saved = {}``
Saved = Annotated[dict[str, list[str]], merge_saved]


class LookaheadState(TypedDict, total=False):
    """What to inherit from, beside the state's own keys."""

    smoothctx: Saved


def read_saved(channel: Any, place: str) -> list[str]:
    """What one place in the graph left in the channel; whatever else stands there is taken for nothing."""
    texts = channel.get(place) if isinstance(channel, Mapping) else None
    return [t for t in texts if isinstance(t, str)] if isinstance(texts, list | tuple) else []


def change_of(held: Sequence[str], now: Sequence[str], chain: Sequence[bytes]) -> dict[str, list[str]] | None:
    """What to write so that the channel says what is committed ``now``; ``None`` for nothing.

    ``held``: what it says; ``chain``: the digests of the present history. What is superseded on this history goes;
    what belongs to another branch or a parallel node stays, within bounds.
    """
    others = [text for text in held if text not in now]
    foreign = [text for text in others if not _belongs(text, chain)]
    spare = set(foreign[: max(0, len(foreign) - MAX_OTHERS)])
    drop = [text for text in others if text not in foreign or text in spare]
    add = [text for text in now if text not in held]
    return {"drop": drop, "add": add} if drop or add else None


def _belongs(text: str, chain: Sequence[bytes]) -> bool:
    """Was this made for the history that has these digests? What cannot be read is of no use to another one either."""
    try:
        found = json.loads(text)
        end = found["end"]
        return 0 <= end < len(chain) and bool(chain[end].hex() == found["end_digest"])
    except (ValueError, KeyError, TypeError):
        return True
