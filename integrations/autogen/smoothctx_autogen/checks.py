"""What the integrations of this package check alike: options, what is restored, and whether the runtime is open."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from smoothctx.errors import ClosedError, ConfigurationError, MessageError, NoSession
from smoothctx.policy import Policy
from smoothctx.request import check_request as check_request
from smoothctx.runtime import Runtime


def check_runtime(runtime: Any) -> None:
    """Raise ``ConfigurationError`` unless it is a runtime. Whether it is open shows at its first use."""
    if not isinstance(runtime, Runtime):
        raise ConfigurationError(f"runtime={runtime!r}: expected a Runtime")


def check_policy(policy: Any) -> None:
    """Raise ``ConfigurationError`` unless it is a policy."""
    if not isinstance(policy, Policy):
        raise ConfigurationError(f"policy={policy!r}: expected a Policy")


def check_text(option: str, value: Any, *, optional: bool = False) -> None:
    """Raise ``ConfigurationError`` unless it is a text with something in it (or ``None``, where it is optional)."""
    if optional and value is None:
        return
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(
            f"{option}={value!r}: expected a text that is not empty{', or None' if optional else ''}"
        )


def check_flag(option: str, value: Any) -> None:
    """Raise ``ConfigurationError`` unless it is ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{option}={value!r}: expected True or False")


def check_engine(engine: Any) -> None:
    """Raise ``ConfigurationError`` unless it can do what an engine does (or is ``None``)."""
    if engine is not None and not any(callable(getattr(engine, name, None)) for name in ("bind", "complete")):
        raise ConfigurationError(f"engine={engine!r}: expected an engine of smoothctx (bind, complete), or None")


def saved_texts(saved: Any, runtime: Runtime, *, where: str, tenant: str = "") -> list[str]:
    """The texts in what a caller restores. What is no text among them is an event: it comes from outside.

    Raises:
        ConfigurationError: it is no collection of texts at all.
    """
    if isinstance(saved, str | bytes | Mapping) or not isinstance(saved, Iterable):
        raise ConfigurationError(f"saved={saved!r}: expected a list of texts, as saved() gave it")
    found: list[str] = []
    for k, text in enumerate(saved):
        if isinstance(text, str):
            found.append(text)
        else:
            error = MessageError(f"saved[{k}]: expected a text, got {type(text).__name__}")
            runtime.events.error(error, where=where, tenant=tenant)
    return found


@contextmanager
def guarded(failed: Callable[[Exception], None]) -> Iterator[None]:
    """What goes wrong in this block is told to ``failed``, and the turn goes on without it."""
    try:
        yield
    except Exception as error:
        failed(error)


class RawTurns:
    """What happens to the turns of one integration object while its runtime has no sessions to give."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._said = False
        self._lock = threading.Lock()

    def refused(self, error: ClosedError, runtime: Runtime) -> None:
        """The turns go on, whatever stands in the way of a session. Of a runtime that was closed it is said once: an
        event ``turn.raw`` and a warning.

        Raises:
            ClosedError: it was never opened, which is a mistake of the caller's.
        """
        if isinstance(error, NoSession):
            return  # the event ``error`` has said why
        if runtime.is_open:  # something else was closed, such as an engine
            runtime.events.error(error, where=self._where)
            return
        if not runtime.closed:
            raise error
        with self._lock:
            said, self._said = self._said, True
        if not said:
            why = "the runtime is closed: the agent goes on with its raw messages"
            runtime.events.emit("turn.raw", where=self._where, why=why)
            warn(self._where, why)


def warn(where: str, text: str) -> None:
    """A warning of the logger ``smoothctx.<where>``. A log handler that raises is no business of the turn."""
    try:
        logging.getLogger(f"smoothctx.{where}").warning("%s", text)
    except Exception:
        pass
