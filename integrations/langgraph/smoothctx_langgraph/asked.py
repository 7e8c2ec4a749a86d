"""What an agent sends beside its messages: its system prompt and its tools, as an engine is sent them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from .codec import LangChainMessages

if TYPE_CHECKING:
    from langchain.agents.middleware.types import ModelRequest

#: tools whose schemas are kept
MAX_TOOLS = 512


class Asked:
    """Reads the constant part off a model request; the schema of a tool is made once. Thread-safe."""

    def __init__(self, codec: LangChainMessages) -> None:
        self._codec = codec
        self._schemas: OrderedDict[int, tuple[tuple[Any, ...], dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, request: ModelRequest[Any], *, tools: bool = True) -> dict[str, Any]:
        """The request as ``runtime.session(request=)`` takes it, with or without its ``tools``.

        Raises:
            Exception: what LangChain raises where a tool has no schema.
            TypeError: the agent's structured output adds tools of its own, behind every middleware.
        """
        found: dict[str, Any] = {}
        if request.system_message is not None:
            found["messages"] = [self._codec.to_openai(request.system_message)]
        if tools and request.response_format is not None:
            raise TypeError(f"{type(request.response_format).__name__} may add tools or change them")
        if tools and request.tools:
            found["tools"] = [self._schema(tool) for tool in request.tools]
        return found

    def _schema(self, tool: Any) -> dict[str, Any]:
        if isinstance(tool, dict):
            return convert_to_openai_tool(tool)
        # What may be changed in place: its schema is another one then.
        state = (tool, *(getattr(tool, part, None) for part in ("name", "description", "args_schema")))
        with self._lock:
            known = self._schemas.get(id(tool))
            if known is not None and all(a is b or a == b for a, b in zip(known[0], state, strict=True)):
                self._schemas.move_to_end(id(tool))
                return known[1]
        schema = convert_to_openai_tool(tool)
        with self._lock:
            self._schemas[id(tool)] = (state, schema)
            while len(self._schemas) > MAX_TOOLS:
                self._schemas.popitem(last=False)
        return schema
