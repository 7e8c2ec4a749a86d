"""What a transform is: the protocol, its request and its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from ..codec import Codec
from ..errors import ConfigurationError
from ..store import Store
from ..usage import Usage

#: ``("fraction" | "tokens" | "messages", n)``
Size = tuple[str, float]


class Locality(StrEnum):
    """What a transform's result may depend on.

    ``SEGMENT``: only on the segment itself, so the result is reusable anywhere. ``PREFIX``: on the messages
    up to the end of the rewritten run. ``FUTURE``: on later messages too.
    """

    SEGMENT = "segment"
    PREFIX = "prefix"
    FUTURE = "future"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformRequest:
    """What a transform gets to work on. All of it is finished history: nothing later can change it.

    ``messages``: the run to rewrite, as the model sees it (an earlier summary included when the transform's
    ``source`` is ``"view"``, raw otherwise). Messages that must stay word for word (the latest user message,
    orphan results) are already left out. ``before``: everything in the view before the run (system messages).
    ``earlier_summary``: the text of the summary that this run begins with or replaces, if there is one.
    ``pins``: texts that the user marked, to be kept word for word. ``live_tasks``: names of tasks still open.
    ``deadline``: in the runtime clock's seconds, ``None`` without one.
    ``context_tokens``: the agent's window.
    ``shown``: ``messages`` with those that stay word for word still in their places: what a model should read
    (and what the agent's engine has cached); ``None`` where that is the same.
    ``max_tokens``: the messages are one block of the conversation, and its summary may have that many tokens in all;
    ``None``: the transform's own options say how the run is cut and what it may cost.
    ``missed``: what an earlier result for these messages lacked: a summariser is told. Not part of any key.
    ``prompt``: OpenAI-style messages that stand before all of these in the agent's own requests, kept apart from the
    conversation: for a summariser on the agent's own engine.
    ``on_usage``: called with the usage of each model call as it ends, so that failed work is accounted too.
    """

    messages: Sequence[Any]
    before: Sequence[Any]
    codec: Codec
    earlier_summary: str | None = None
    pins: tuple[str, ...] = ()
    live_tasks: tuple[str, ...] = ()
    deadline: float | None = None
    tenant: str = "default"
    session_id: str = ""
    store: Store | None = None
    context_tokens: int | None = None
    shown: Sequence[Any] | None = None
    max_tokens: int | None = None
    missed: str | None = None
    prompt: Sequence[Mapping[str, Any]] = ()
    on_usage: Callable[[Usage], None] | None = None
    #: options for a model call that should reuse the agent's cached prefix (tools, template, salt, lane, ...)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A transform's result: the messages that stand for ``request.messages``, and what they cost.

    A message that is passed on unchanged must be the same object. ``text`` is what the model itself wrote
    (for validators), ``None`` for transforms without a model. ``opening``: the messages
    open a conversation of their own (``Isolate``) and stand for nothing. ``alternatives``: one rewrite per candidate,
    among which the commit chooses (``Speculate``), ``None`` for one that is not there; ``messages`` are those of the
    first there is, and ``usage`` is that of all.
    """

    messages: Sequence[Any]
    usage: Usage = Usage()
    text: str | None = None
    opening: bool = False
    alternatives: tuple[Rewrite | None, ...] = ()


@runtime_checkable
class Transform(Protocol):
    """A rewrite of a run of segments. Stateless: everything it needs is in the request."""

    @property
    def name(self) -> str:
        """Short name, as in events and ``schedule_transform``."""
        ...

    @property
    def locality(self) -> Locality:
        """What the result may depend on."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """Hash of every option, the prompt and the model's identity.

        ``None`` when it cannot be known (a plain callable without ``model_id``): artifacts are then private
        to this object and never stored durably.
        """
        ...

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Rewrite ``request.messages``. May raise; the turn never sees it."""
        ...


#: A plain async callable model: ``async def model(messages, *, max_tokens=None) -> str``
ModelCallable = Callable[..., Awaitable[str]]


def fingerprint(name: str, options: Mapping[str, Any]) -> str:
    """Stable hex digest of a transform's name and options (JSON-able values only)."""
    text = json.dumps([name, options], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_size(option: str, value: Any, kinds: tuple[str, ...] = ("fraction", "tokens", "messages")) -> Size:
    """Validate a ``(kind, n)`` size option and return it normalised.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """
    allowed = " or ".join(f'("{k}", n)' for k in kinds)
    if not (isinstance(value, tuple | list) and len(value) == 2 and value[0] in kinds):
        raise ConfigurationError(f"{option}={value!r}: expected {allowed}")
    kind, n = value
    if isinstance(n, bool) or not isinstance(n, int | float) or not 0 <= n < float("inf"):
        raise ConfigurationError(f"{option}={value!r}: the size must be a number >= 0")
    if kind == "fraction" and not 0 < n <= 1:
        raise ConfigurationError(f"{option}={value!r}: a fraction lies above 0 and at most 1")
    if kind != "fraction" and n != int(n):
        raise ConfigurationError(f"{option}={value!r}: {kind} are counted in whole numbers")
    return (kind, float(n) if kind == "fraction" else int(n))
