"""What the model calls inside a piece of code cost, read from LangChain's own callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers.context import register_configure_hook

from smoothctx.tokens import count_text
from smoothctx.usage import Usage

from .codec import LangChainMessages
from .models import usage_of

_CODEC = LangChainMessages()


class _Meter(BaseCallbackHandler):
    """Adds up usage as the provider reported it, else as estimated. Its methods may be called from any thread."""

    run_inline = True

    def __init__(self, on_usage: Callable[[Usage], None] | None) -> None:
        self.total = Usage()
        self._on_usage = on_usage
        self._prompts: dict[UUID, int] = {}

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **_: Any
    ) -> None:
        self._prompts[run_id] = sum(_CODEC.estimate(m) for batch in messages for m in batch)

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], *, run_id: UUID, **_: Any) -> None:
        self._prompts[run_id] = sum(map(count_text, prompts))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        prompt = self._prompts.pop(run_id, 0)
        found = response.generations[0][0] if response.generations and response.generations[0] else None
        message = found.message if isinstance(found, ChatGeneration) else None
        usage = usage_of(message) if isinstance(message, AIMessage) else None
        if usage is None:
            output = count_text(found.text) if found is not None else 0
            usage = Usage(input_tokens=prompt, output_tokens=output, calls=1, estimated=True)
        self.total += usage
        if self._on_usage is not None:
            self._on_usage(usage)


_meter: ContextVar[_Meter | None] = ContextVar("smoothctx_meter", default=None)
register_configure_hook(_meter, inheritable=True)


@contextmanager
def metered(on_usage: Callable[[Usage], None] | None) -> Iterator[_Meter]:
    """Count what the calls in this block cost; ``on_usage`` hears of each as it ends."""
    meter = _Meter(on_usage)
    token = _meter.set(meter)
    try:
        yield meter
    finally:
        _meter.reset(token)
