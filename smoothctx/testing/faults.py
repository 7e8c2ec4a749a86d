"""Faults that a test switches on: for the next calls, or until they are cleared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from ..errors import ConfigurationError


@dataclass(slots=True)
class _Fault:
    kind: str
    left: int | None
    delay_s: float = 0.0
    error: Exception | None = None


class Faults:
    """What goes wrong in the next calls, in the order in which it was switched on.

    Each call takes one fault: the first that is left. ``times`` is how many calls it is for, ``None`` for all of
    them until :meth:`clear`.
    """

    def __init__(self, default: Callable[[], Exception]) -> None:
        self._default = default
        self._faults: list[_Fault] = []
        self._hanging: list[asyncio.Event] = []

    def fail(self, times: int | None = 1, *, error: Exception | None = None) -> None:
        """The next calls raise ``error`` (by default, that the server or store cannot be reached)."""
        self._add(_Fault("fail", times, error=error))

    def hang(self, times: int | None = 1) -> None:
        """The next calls do not come back, until :meth:`clear` or until they are cancelled."""
        self._add(_Fault("hang", times))

    def slow(self, delay_s: float, times: int | None = 1) -> None:
        """The next calls begin ``delay_s`` seconds later."""
        if isinstance(delay_s, bool) or not isinstance(delay_s, int | float) or not 0 <= delay_s < float("inf"):
            raise ConfigurationError(f"delay_s={delay_s!r}: expected seconds of at least 0")
        self._add(_Fault("slow", times, delay_s=delay_s))

    def garbage(self, times: int | None = 1) -> None:
        """The next calls get an answer that is not one."""
        self._add(_Fault("garbage", times))

    def clear(self) -> None:
        """Everything works again, and calls that hang go on."""
        self._faults.clear()
        for event in self._hanging:
            event.set()

    @property
    def hanging(self) -> int:
        """Calls that hang now."""
        return len(self._hanging)

    async def strike(self) -> bool:
        """What this call meets: waits or raises accordingly. True where its answer is to be garbage.

        Raises:
            Exception: the one given to :meth:`fail`.
        """
        fault = self._take()
        if fault is None:
            return False
        if fault.kind == "fail":
            raise fault.error if fault.error is not None else self._default()
        if fault.kind == "slow":
            await anyio.sleep(fault.delay_s)
        if fault.kind == "hang":
            event = asyncio.Event()
            self._hanging.append(event)
            try:
                await event.wait()
            finally:
                self._hanging.remove(event)
        return fault.kind == "garbage"

    def _add(self, fault: _Fault) -> None:
        left = fault.left
        if left is not None and (isinstance(left, bool) or not isinstance(left, int) or left < 1):
            raise ConfigurationError(f"times={left!r}: expected a whole number of at least 1, or None for all calls")
        self._faults.append(fault)

    def _take(self) -> _Fault | None:
        if not self._faults:
            return None
        fault = self._faults[0]
        if fault.left is not None:
            fault.left -= 1
            if fault.left == 0:
                self._faults.pop(0)
        return fault

    def __repr__(self) -> str:
        waiting = ", ".join(f"{f.kind} x {'all' if f.left is None else f.left}" for f in self._faults)
        return f"Faults({waiting})"
