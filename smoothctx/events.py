"""Events: everything that smoothctx does in the background, said once, to ``on_event`` and to the log.

The log is the standard library's logger ``smoothctx`` through structlog: silent until the application
configures logging. A line says what and why (``lookahead.failed session=s reason=failed error="..."``); the fields are
attributes of the record as well. An event sink that raises never reaches the caller.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

#: characters of one field and of one line in the log
MAX_FIELD, MAX_LINE = 300, 1000


def line(name: str, fields: Mapping[str, Any]) -> str:
    """The event as one line of text: numbers and short texts, in the order given; structures are not spelt out."""
    words = [name, *(f"{key}={_word(value)}" for key, value in fields.items() if _told(value))]
    said = " ".join(words)
    return said if len(said) <= MAX_LINE else said[: MAX_LINE - 3] + "..."


def _told(value: object) -> bool:
    return isinstance(value, str | bool | int | float) and value != ""


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    text = text if len(text) <= MAX_FIELD else text[: MAX_FIELD - 3] + "..."
    if text.isprintable() and not any(c in text for c in ' "='):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())  # one line, whatever it says


def _kwargs(_logger: Any, _method: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = {key: value for key, value in event.items() if key != "event"}
    return {"msg": line(event["event"], fields), "extra": fields}


_logger = logging.getLogger("smoothctx")
_logger.addHandler(logging.NullHandler())
_log: Any = structlog.wrap_logger(
    _logger,
    processors=[structlog.stdlib.filter_by_level, _kwargs],
    wrapper_class=structlog.stdlib.BoundLogger,
)

_WARNINGS = frozenset({"lookahead.failed", "fallback.applied", "view.oversized", "store.error"})
_ERRORS = frozenset({"error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    ``name`` is one of:

    - ``lookahead.started``, ``lookahead.running``, ``lookahead.ready``, ``lookahead.promoted``,
      ``lookahead.committed``, ``lookahead.discarded`` (with ``reason``), ``lookahead.failed`` (with ``error``)
      (``lookahead.ready`` has ``warm``, and ``cached_share`` of the prompts behind it, ``None`` where unreported)
    - ``lookahead.resting`` (``transform``, ``rests_s``; ``None``: it is being tried again): nothing is started, since
      the transform failed too often; once for each session until it is tried again
    - ``lookahead.judged`` (with ``score``, ``missed``, ``faithful``), ``lookahead.unjudged`` (``why``): a judge's;
      ``speculation.default`` (with ``why``): the first candidate was used, since the choice was of no use
    - ``session.opened`` (``transform``, its ``locality`` and ``discard`` are the policy's; ``engine``: URL and model)
    - ``ttft``: at ``first_token()`` inside ``session.foreground()`` (``ttft_s`` since the call began; ``rewritten``: it
      is the first call since the view was rewritten; ``waited_s``, what its turn waited for us before)
    - ``view.committed`` (a receipt), ``view.salvaged``, ``view.rebased`` (rewrite mode), ``view.oversized``
    - ``admission.deferred``, ``admission.skipped`` (``work``, ``why``, the figures behind it): once per work and reason
    - ``blocks.at_limit``: how far the blocks of ``ParallelSummarize`` have come when the hard limit is reached
      (``committed``, ``ready``, ``unfinished``, ``failed``, ``unfinished_tokens``, ``filling_tokens``, ``view_tokens``)
    - ``fallback.applied``, ``message.offloaded``, ``nothing_to_rewrite`` (with ``why``)
    - ``request.unsteady`` (``changes``): the agent's tools or prompt change again and again; nothing is preloaded
      until they stay the same for as many turns; ``request.unread`` (``why``): an adapter cannot tell what they are
    - ``usage`` (of one background job), ``preload`` (what the engine reported)
    - ``message.unreadable``, ``source.degraded``, ``store.error``, ``error`` (an internal one; the turn goes on)

    ``time`` is in the runtime clock's seconds; ``data`` depends on the name.
    """

    name: str
    time: float
    session: str = ""
    tenant: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


class EventSink:
    """Hands events to the user's callback and to the log; owns nothing."""

    def __init__(self, on_event: Callable[[Event], None] | None, clock: Callable[[], float]) -> None:
        self._on_event = on_event
        self._clock = clock

    @property
    def heard(self) -> bool:
        """Does anybody listen to what is no error and no warning?"""
        return self._on_event is not None or _logger.isEnabledFor(logging.DEBUG)

    def emit(self, name: str, *, session: str = "", tenant: str = "", **data: Any) -> None:
        """Say that something happened. Never raises."""
        level = "error" if name in _ERRORS else "warning" if name in _WARNINGS else "debug"
        try:
            if level != "debug" or _logger.isEnabledFor(logging.DEBUG):
                getattr(_log, level)(name, session=session, tenant=tenant, **data)
        except Exception:  # a broken log handler is the application's business, never the turn's
            pass
        if self._on_event is not None:
            try:
                self._on_event(Event(name=name, time=self._clock(), session=session, tenant=tenant, data=data))
            except Exception:
                logging.getLogger("smoothctx").warning("on_event raised for %s", name, exc_info=True)

    def error(self, error: BaseException, *, where: str, session: str = "", tenant: str = "") -> None:
        """Report an internal error that was kept from the turn."""
        self.emit("error", session=session, tenant=tenant, where=where, error=f"{type(error).__name__}: {error}")
