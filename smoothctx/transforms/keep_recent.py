"""KeepRecent: drop what is old. Local; cannot fail."""

from __future__ import annotations

from ..segments import segment
from .base import Locality, Rewrite, Size, TransformRequest, check_size, fingerprint
from .facts import message_pins


class KeepRecent:
    """Drops the run that it is given, which is all but ``keep`` at the end of the view.

    Only segments that hold a text which the user pinned stay, whole and as the same objects.

    Args:
        keep: what stays at the end: ``("messages" | "tokens" | "fraction", n)``.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    name = "keep_recent"
    locality = Locality.PREFIX
    source = "view"

    def __init__(self, keep: Size = ("messages", 20)) -> None:
        self.keep = check_size("keep", keep)
        self.fingerprint: str | None = fingerprint(self.name, {"keep": self.keep})

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Drop everything that is not pinned."""
        codec = request.codec
        found = segment(codec, request.messages)
        runs = [(i, i + 1) for i in range(found.lead)] + [(s.start, s.end) for s in found.segments]
        kept = [m for start, end in runs if self._pinned(request, start, end) for m in request.messages[start:end]]
        return Rewrite(messages=kept)

    def _pinned(self, request: TransformRequest, start: int, end: int) -> bool:
        messages, codec = request.messages[start:end], request.codec
        if message_pins(messages, codec):
            return True
        return bool(request.pins) and any(p in codec.text(m) for m in messages for p in request.pins)

    def __repr__(self) -> str:
        return f"KeepRecent(keep={self.keep!r})"
