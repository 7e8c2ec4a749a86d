"""Validators: what a result must satisfy before it may become ready.

A validator is called with ``(request, rewrite)`` and raises ``InvalidOutput`` to refuse the rewrite. A user's
own may also simply return ``False``; any exception of its own refuses too, under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..codec import Codec
from ..errors import InvalidOutput, MessageError
from ..segments import segment
from .base import Rewrite, TransformRequest
from .facts import message_pins, parse


class Validator(Protocol):
    """Accepts a rewrite, or raises ``InvalidOutput`` (or returns ``False``)."""

    def __call__(self, request: TransformRequest, rewrite: Rewrite, /) -> bool | None:
        """Look at what was made of the request."""
        ...


class NotSmaller(InvalidOutput):
    """The result does not save (enough) tokens."""

    #: it says nothing against the transform or its model
    breaker_neutral = True


def not_empty(request: TransformRequest, rewrite: Rewrite) -> None:
    """The model's own text says something, before facts are added."""
    if rewrite.text is not None and not rewrite.text.strip():
        raise InvalidOutput("not_empty: the model wrote no text")


def smaller(request: TransformRequest, rewrite: Rewrite) -> None:
    """The result has fewer tokens than what it replaces."""
    if rewrite.opening:
        return
    before = sum(map(request.codec.estimate, request.messages))
    after = sum(map(request.codec.estimate, rewrite.messages))
    if after >= before:
        raise NotSmaller(f"smaller: the result has {after} tokens, what it replaces has {before}")


def well_formed(request: TransformRequest, rewrite: Rewrite) -> None:
    """Messages are valid, calls and results stay paired (never worse than before), no new system message."""
    codec = request.codec
    known = {id(m) for m in request.messages}
    try:
        for i, message in enumerate(rewrite.messages):
            if id(message) not in known:
                codec.check(message, i)
        roles = [codec.role(m) for m in rewrite.messages]
    except MessageError as error:
        raise InvalidOutput(f"well_formed: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidOutput(f"well_formed: a message cannot be read: {type(error).__name__}: {error}") from error
    for i, role in enumerate(roles):
        if role == "system" and not rewrite.opening and id(rewrite.messages[i]) not in known:
            raise InvalidOutput(f"well_formed: messages[{i}] is a new system message")
    orphans, unanswered = _unpaired(rewrite.messages, codec)
    if rewrite.opening:
        allowed_orphans, allowed_unanswered = 0, 0
    else:
        allowed_orphans, allowed_unanswered = _unpaired(request.messages, codec)
    if orphans > allowed_orphans:
        raise InvalidOutput(f"well_formed: {orphans} tool results have no call before them")
    if unanswered > allowed_unanswered:
        raise InvalidOutput(f"well_formed: {unanswered} tool calls have no result")


def pins_survive(request: TransformRequest, rewrite: Rewrite) -> None:
    """Every text that the user pinned in the replaced messages is in the result, word for word."""
    if rewrite.opening:
        return
    codec = request.codec
    source = [codec.text(m) for m in request.messages]
    pins = [
        *message_pins(request.messages, codec),
        *(p for p in request.pins if any(p in text for text in source)),
    ]
    if rewrite.text is not None:
        pins += request.pins
    if not pins:
        return
    result = [codec.text(m) for m in rewrite.messages]
    carried = {p for m in rewrite.messages if (text := codec.summary_text(m)) is not None for p in parse(text).pins}
    carried.update(message_pins(rewrite.messages, codec))
    for pin in dict.fromkeys(pins):
        if pin not in carried and not any(pin in text for text in result):
            raise InvalidOutput(f"pins_survive: a pinned text is missing from the result: {pin[:80]!r}")


_DEFAULT: tuple[Callable[[TransformRequest, Rewrite], None], ...] = (
    not_empty,
    smaller,
    well_formed,
    pins_survive,
)


def default_validators() -> tuple[Callable[[TransformRequest, Rewrite], None], ...]:
    """The built-in ones, in the order in which they run."""
    return _DEFAULT


def validate(request: TransformRequest, rewrite: Rewrite, validators: Sequence[Callable[..., Any]]) -> None:
    """Run validators in order.

    Raises:
        InvalidOutput: of the first one that refuses, or naming it when it returned ``False`` or failed.
    """
    for validator in validators:
        try:
            accepted = validator(request, rewrite)
        except InvalidOutput:
            raise
        except Exception as error:
            raise InvalidOutput(f"{_name(validator)}: {type(error).__name__}: {error}") from error
        if accepted is False:
            raise InvalidOutput(f"{_name(validator)}: refused the result")


def _name(validator: Any) -> str:
    return str(getattr(validator, "__name__", None) or type(validator).__name__)


def _unpaired(messages: Sequence[Any], codec: Codec) -> tuple[int, int]:
    segments = segment(codec, messages).segments
    return sum(s.kind == "orphan" for s in segments), sum(s.unanswered for s in segments)
