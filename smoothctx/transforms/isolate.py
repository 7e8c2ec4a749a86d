"""Isolate: a sub-agent's opening context, prepared ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..codec import USER_STUB
from ..errors import ConfigurationError, TransformError
from ..request import check_request
from .base import Locality, Rewrite, Size, TransformRequest, fingerprint
from .inputs import paired

Select = Callable[[list[Any]], Sequence[Any]]


class Isolate:
    """Opens a sub-agent's context: ``[system, selected messages..., user instruction]``.

    The parent's view stays as it is. Selected messages are the parent's own objects (without thinking, which
    is bound to the parent's prefix); system messages among them, calls without results and results without
    calls are left out.

    Args:
        system: the sub-agent's system prompt, ``None`` for none.
        instruction: what it is asked to do: the last message.
        select: ``callable(list of messages) -> list``, by default all of them.
        request: the constant part of the sub-agent's requests (its tools, template options), with which its opening
            is preloaded; by default that of the session that prepares it, without its messages. Messages in it stand
            before the opening.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    name = "isolate"
    locality = Locality.PREFIX
    source = "view"
    keep: Size = ("messages", 0)

    def __init__(
        self,
        *,
        system: str | None = None,
        instruction: str,
        select: Select | None = None,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        if system is not None and (not isinstance(system, str) or not system.strip()):
            raise ConfigurationError(f"system={system!r}: expected a text that is not empty, or None")
        if not isinstance(instruction, str) or not instruction.strip():
            raise ConfigurationError(f"instruction={instruction!r}: expected a text that is not empty")
        if select is not None and not callable(select):
            raise ConfigurationError(f"select={select!r}: expected a callable (list of messages) -> list, or None")
        check_request(request)
        self.system, self.instruction, self.select = system, instruction, select
        self.request = None if request is None else dict(request)
        # A request of its own is part of what is prepared: another one warms another prompt.
        options = {
            "system": system,
            "instruction": instruction,
            **({} if request is None else {"request": self.request}),
        }
        self.fingerprint: str | None = None if select is not None else fingerprint(self.name, options)

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Make the opening messages.

        Raises:
            TransformError: when ``select`` failed or did not return a list.
        """
        codec = request.codec
        chosen = self._chosen(list(request.messages))
        body: list[Any] = []
        for message, results in paired([m for m in chosen if codec.role(m) != "system"], codec):
            if results is None or any(r is None for r in results):
                continue
            body += [codec.without_thinking(message), *results]
        if body and codec.role(body[0]) != "user":
            body.insert(0, codec.user(USER_STUB))
        head = [] if self.system is None else [codec.system(self.system)]
        return Rewrite(messages=[*head, *body, codec.user(self.instruction)], opening=True)

    def _chosen(self, messages: list[Any]) -> list[Any]:
        if self.select is None:
            return messages
        try:
            chosen: Any = self.select(messages)
        except Exception as error:
            raise TransformError(f"isolate: select failed: {type(error).__name__}: {error}") from error
        if not isinstance(chosen, list | tuple):
            raise TransformError(f"isolate: select returned {type(chosen).__name__}, expected a list of messages")
        return list(chosen)

    def __repr__(self) -> str:
        return f"Isolate(instruction={self.instruction!r})"
