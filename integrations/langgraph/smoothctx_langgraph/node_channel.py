"""The graph's channels, as a node that runs in it can see them: what they hold, and what a write would make of them."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.channels.base import BaseChannel
from langgraph.errors import EmptyChannelError
from langgraph.runtime import get_runtime

from smoothctx import Runtime

from .identity import Identity, identity
from .node_state import keys_of
from .notices import Notices
from .rewrite import shrunk
from .saved import SAVED_KEY

#: LangGraph's function to read the state from inside a node
_READ = "__pregel_read"
#: rewrites remembered, so that only one task of a step writes one
MAX_CLAIMS = 1024


def read_channel(where: Identity) -> tuple[bool, Any]:
    """Has the graph around this node the private channel, and what does it hold?"""
    read = (where.config.get("configurable") or {}).get(_READ)
    if not callable(read):
        return False, None
    try:
        return True, read(SAVED_KEY)
    except KeyError:
        return False, None


def takes(where: Identity, key: str, writes: Sequence[BaseMessage], view: Sequence[BaseMessage]) -> str | None:
    """Tries the writes on a copy of the channel. ``None`` if it then holds the view; else why it does not."""
    channel = _channels(where).get(key)
    if channel is None:
        return f"the state has no channel {key!r} that could be read"
    tried = channel.copy()
    try:
        tried.update([list(writes), []])  # with one more write, since others may write in the same step
        value = tried.get()
    except EmptyChannelError:
        return "the channel is empty"
    except Exception as error:
        return f"its reducer does not know these messages by their ids ({type(error).__name__}: {error})"
    if not shrunk(value, view):
        return "its reducer does not replace and remove messages by their ids, as add_messages does"
    return None


def say_missing(notices: Notices, state: Any, key: str) -> None:
    """Say once per node that its messages are not where they are looked for, if neither state nor graph has the key."""
    where = identity()
    if where is None or isinstance(state, list) or key in keys_of(state):
        return
    channels = _channels(where)
    if key in channels:
        return  # not set yet, or not what a `Send` carries
    keys = sorted(k for k in channels or keys_of(state) if k.isidentifier() and not k.startswith("__"))
    why = f"{where.node}: messages_key={key!r} is not in the state, so nothing is done there; it has {', '.join(keys)}"
    notices.once("messages.missing", where.node, why, node=where.node, key=key, keys=keys)


def _channels(where: Identity) -> Mapping[str, BaseChannel[Any, Any, Any]]:
    read = (where.config.get("configurable") or {}).get(_READ)
    for given in read.args if isinstance(read, partial) else ():
        if isinstance(given, Mapping) and any(isinstance(c, BaseChannel) for c in given.values()):
            return given
    return {}


class Claims:
    """Which task of a step rewrites the channel: the removal of one message twice is an error in LangGraph."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, where: Identity, key: str) -> bool:
        """Is this task the one? It stays it when it runs again."""
        step = (where.thread or "", where.owner, _checkpoint(where), key)
        with self._lock:
            first = self._held.setdefault(step, where.task) == where.task
            while len(self._held) > MAX_CLAIMS:
                self._held.popitem(last=False)
            return first


def _checkpoint(where: Identity) -> str:
    info = getattr(get_runtime(), "execution_info", None)
    step = (where.config.get("metadata") or {}).get("langgraph_step")
    return f"{getattr(info, 'checkpoint_id', None)}/{step}"


_CLAIMS: weakref.WeakKeyDictionary[Runtime, Claims] = weakref.WeakKeyDictionary()


def claims_of(runtime: Runtime) -> Claims:
    """The claims of a runtime, shared by every node that it serves."""
    return _CLAIMS.setdefault(runtime, Claims())
