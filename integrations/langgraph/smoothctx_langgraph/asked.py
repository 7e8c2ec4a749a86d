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
        self._schemas: OrderedDict[int, tuple[Any, dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, request: ModelRequest[Any]) -> dict[str, Any]:
        """The request as ``runtime.session(request=)`` takes it.

        Raises:
            Exception: what LangChain raises where a tool has no schema.
        """
        found: dict[str, Any] = {}
        if request.system_message is not None:
            found["messages"] = [self._codec.to_openai(request.system_message)]
        if request.tools:
            found["tools"] = [self._schema(tool) for tool in request.tools]
        return found

    def _schema(self, tool: Any) -> dict[str, Any]:
        with self._lock:
            known = self._schemas.get(id(tool))
            if known is not None and known[0] is tool:
                self._schemas.move_to_end(id(tool))
                return known[1]
        schema = convert_to_openai_tool(tool)
        with self._lock:
            self._schemas[id(tool)] = (tool, schema)
            while len(self._schemas) > MAX_TOOLS:
                self._schemas.popitem(last=False)
        return schema
