"""Every error that smoothctx raises, by whose fault it is.

SmoothctxError
├── ConfigurationError   an option is wrong: raised at construction, names option, value and what is allowed
│   └── PolicyConflict   the session is open with another policy
├── MessageError         a message is malformed: names the index and the field
├── ClosedError          the runtime or the session was already closed
│   └── NoSession        the runtime is open, and no session could be had all the same
├── HandleError          a handle cannot be committed
│   ├── HandleNotReady   it is still pending or running (or never came to a result)
│   └── StaleHandle      its result no longer fits the history it is asked to change
├── TransformError       a transform could not produce a usable result
│   └── InvalidOutput    the result was produced and then refused by a validator
├── StoreError           an artifact or content store is unreachable or corrupt
└── EngineError          a model server could not be used
    ├── EngineUnreachable   no connection, or it broke
    ├── EngineRefused       HTTP 4xx: the request itself is wrong (or no template takes it), retrying cannot help
    ├── EngineOverloaded    HTTP 429 or 5xx: retrying may help
    └── EngineProtocolError the answer is not what an OpenAI-compatible server sends
"""

from __future__ import annotations

import re

#: how servers say that the model's chat template does not take the messages: llama.cpp does so with HTTP 500
_TEMPLATE = re.compile(
    r"\bjinja\b|chat[ _-]?template|raise_exception|roles must alternate|failed to parse messages"
    r"|while executing \w+ at line|\bat row \d+, column \d+",
    re.IGNORECASE,
)


class SmoothctxError(Exception):
    """Base of every error raised by smoothctx."""


class ConfigurationError(SmoothctxError, ValueError):
    """An option has a value that cannot work. The text names option, value and what is allowed."""


class PolicyConflict(ConfigurationError):
    """A session of this id is open with another policy."""


class MessageError(SmoothctxError, ValueError):
    """A message is malformed. The text names its index and the field."""


class ClosedError(SmoothctxError, RuntimeError):
    """The runtime or session was closed (or never opened) before this call."""


class NoSession(ClosedError):
    """No session could be had from a runtime that is open; the event ``error`` says why. The turn goes on without."""


class HandleError(SmoothctxError, RuntimeError):
    """A lookahead handle cannot be committed."""


class HandleNotReady(HandleError):
    """The handle has no result (yet): look at ``handle.state`` and ``handle.reason``."""


class StaleHandle(HandleError):
    """The handle's result does not apply to this history: its digest does not match any more."""


class TransformError(SmoothctxError):
    """A transform could not produce a usable result."""

    retryable: bool = False


class InvalidOutput(TransformError):
    """A transform's result was refused by a validator. The text says which one and why."""


class StoreError(SmoothctxError):
    """A store is unreachable, full or corrupt."""


class EngineError(SmoothctxError):
    """A model server could not be used.

    ``status`` is the HTTP status where there was one; ``retryable`` says if the same request may work later;
    ``retry_after_s`` is the server's own wish in seconds, if it gave one.
    """

    retryable: bool = False

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class EngineUnreachable(EngineError):
    """No connection to the server could be made, or it broke off."""

    retryable = True


class EngineRefused(EngineError):
    """The server refused the request: HTTP 4xx other than 408, 409, 425 and 429, or 5xx with a text which says that
    the model's chat template does not take the messages."""


class EngineOverloaded(EngineError):
    """The server is overloaded, rate-limited or failing (HTTP 408, 409, 425, 429, 5xx)."""

    retryable = True


class EngineProtocolError(EngineError):
    """The server answered something that is not an OpenAI-compatible answer, or only half of one."""

    retryable = True


def refuses_messages(said: str) -> bool:
    """Does a server's error text speak of the chat template? Then the same messages are refused every time."""
    return _TEMPLATE.search(said) is not None
