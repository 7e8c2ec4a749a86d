"""Chain: transforms one after the other, as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ConfigurationError
from ..usage import Usage
from .base import Locality, Rewrite, Size, Transform, TransformRequest, fingerprint
from .isolate import Isolate

_WIDTH = (Locality.SEGMENT, Locality.PREFIX, Locality.FUTURE)


class Chain:
    """Applies transforms in order, each to what the one before made: ``Chain(Offload(), Summarize(model))``.

    What stays raw (``keep``) and what is read (``source``) are the last one's. Its locality is the widest.

    Raises:
        ConfigurationError: without members, or with something that cannot be one.
    """

    name = "chain"

    def __init__(self, *transforms: Transform) -> None:
        if not transforms:
            raise ConfigurationError("Chain(): expected at least one transform")
        for k, member in enumerate(transforms):
            if not isinstance(member, Transform):
                raise ConfigurationError(
                    f"Chain(transforms[{k}]={member!r}): expected a transform (an object with name, "
                    "locality, fingerprint and an async apply)"
                )
            if isinstance(member, Isolate):
                raise ConfigurationError(
                    f"Chain(transforms[{k}]=Isolate(...)): it opens a sub-agent's context and cannot be part of a chain"
                )
        self.transforms = transforms
        self.locality = max((m.locality for m in transforms), key=_WIDTH.index)
        prints = [m.fingerprint for m in transforms]
        self.fingerprint: str | None = None if None in prints else fingerprint(self.name, {"members": prints})
        last: Any = transforms[-1]
        self.keep: Size = getattr(last, "keep", ("messages", 20))
        self.source: str = getattr(last, "source", "view")
        self.max_tokens: int = getattr(last, "max_tokens", 0) or 0

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Apply the members; what they cost is added up."""
        usage = Usage()
        text: str | None = None
        for member in self.transforms:
            result = await member.apply(request)
            usage += result.usage
            text = result.text if result.text is not None else text
            request = replace(request, messages=list(result.messages), shown=_shown(request, result))
            if not result.messages:
                break
        return Rewrite(messages=request.messages, usage=usage, text=text)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.transforms))})"


def _shown(request: TransformRequest, result: Rewrite) -> list[Any] | None:
    """What a model should read after this member: the messages that stay word for word still in their places."""
    if request.shown is None:
        return None
    if len(result.messages) != len(request.messages):
        return None  # what stands where cannot be known any more
    made = {id(old): new for old, new in zip(request.messages, result.messages, strict=True)}
    return [made.get(id(m), m) for m in request.shown]
