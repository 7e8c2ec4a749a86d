"""LangChain messages of every class and with every kind of content, as LangGraph may hold them in its state."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from smoothctx_langgraph.codec import LangChainMessages

CODEC = LangChainMessages()
BIG = "QUJD" * 100_000  # 400 kB of base64

CALL = {"name": "run", "args": {"x": 1, "y": [1, 2]}, "id": "c1", "type": "tool_call"}
BROKEN = {"name": "run", "args": '{"x": ', "id": "c2", "error": "cut off", "type": "invalid_tool_call"}

MEDIA_PARTS: dict[str, dict[str, Any]] = {
    "openai image": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BIG}"}},
    "openai image link": {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    "openai image as text": {"type": "image_url", "image_url": "https://example.org/a.png"},
    "responses image": {"type": "input_image", "image_url": "https://example.org/a.png"},
    "v0 image": {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": BIG},
    "v0 image link": {"type": "image", "source_type": "url", "url": "https://example.org/a.png"},
    "v0 image by id": {"type": "image", "source_type": "id", "id": "file-1"},
    "v1 image": {"type": "image", "base64": BIG, "mime_type": "image/png"},
    "v1 image link": {"type": "image", "url": "https://example.org/a.png"},
    "anthropic image": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BIG}},
    "openai audio": {"type": "input_audio", "input_audio": {"data": BIG, "format": "wav"}},
    "v0 audio": {"type": "audio", "source_type": "base64", "mime_type": "audio/wav", "data": BIG},
    "v1 audio": {"type": "audio", "base64": BIG, "mime_type": "audio/wav"},
    "v1 video": {"type": "video", "base64": BIG, "mime_type": "video/mp4"},
    "v1 file": {"type": "file", "base64": BIG, "mime_type": "application/pdf"},
    "openai file": {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{BIG}"}},
    "anthropic document": {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": BIG},
    },
    "google media": {"type": "media", "mime_type": "image/png", "data": BIG},
    "google bytes": {"type": "media", "mime_type": "image/png", "data": b"\xff\x00raw"},
    "generated image": {"type": "image_generation_call", "id": "ig_1", "result": BIG},
}
TEXT_PARTS: dict[str, Any] = {
    "plain": "a plain string",
    "text": {"type": "text", "text": "some text"},
    "cited": {"type": "text", "text": "some text", "annotations": [{"type": "citation", "cited_text": "source"}]},
    "responses": {"type": "output_text", "text": "some text"},
    "refusal": {"type": "refusal", "refusal": "no, some text"},
    "text file": {"type": "text-plain", "mime_type": "text/plain", "text": "some text"},
    "v0 text file": {"type": "file", "source_type": "text", "mime_type": "text/plain", "text": "some text"},
    "text document": {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "some text"}},
    "result": {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "some text"}]},
    "found": {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "some text"}]},
}
THINKING_PARTS: dict[str, dict[str, Any]] = {
    "anthropic": {"type": "thinking", "thinking": "let me see, let me see", "signature": "c2ln"},
    "anthropic redacted": {"type": "redacted_thinking", "data": "ZW5jcnlwdGVkZW5jcnlwdGVk"},
    "v1": {"type": "reasoning", "reasoning": "let me see, let me see", "extras": {"signature": "c2ln"}},
    "responses": {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "let me see it"}]},
    "bedrock": {"type": "reasoning_content", "reasoning_content": {"text": "let me see, let me see", "signature": "s"}},
}
SERVER_PARTS: dict[str, dict[str, Any]] = {
    "anthropic": {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "a long query"}},
    "anthropic result": {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"title": "a long title"}]},
    "v1": {"type": "server_tool_call", "id": "s1", "name": "web_search", "args": {"query": "a long query"}},
    "v1 result": {"type": "server_tool_result", "tool_call_id": "s1", "status": "success", "output": "a long output"},
    "responses": {"type": "web_search_call", "id": "ws_1", "action": {"query": "a long query"}},
    "google": {"type": "executable_code", "executable_code": "print('a long program')", "language": "python"},
    "other": {"type": "non_standard", "value": {"anything": "a provider may send"}},
}
CALL_PARTS: dict[str, dict[str, Any]] = {
    "anthropic": {"type": "tool_use", "id": "c1", "name": "run", "input": {"x": 1, "y": [1, 2]}},
    "anthropic streamed": {
        "type": "tool_use",
        "id": "c1",
        "name": "run",
        "input": {},
        "partial_json": '{"x": 1, "y": [1, 2]}',
        "index": 1,
    },
    "v1": {"type": "tool_call", "id": "c1", "name": "run", "args": {"x": 1, "y": [1, 2]}},
    "responses": {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "run",
        "arguments": '{"x": 1, "y": [1, 2]}',
    },
}
ALL_PARTS = [*MEDIA_PARTS.values(), *TEXT_PARTS.values(), *THINKING_PARTS.values(), *SERVER_PARTS.values()]

MESSAGES: dict[str, BaseMessage] = {
    "system": SystemMessage("rules", id="s"),
    "human": HumanMessage("question", id="h", name="ann"),
    "human parts": HumanMessage([*TEXT_PARTS.values(), *MEDIA_PARTS.values()]),
    "ai": AIMessage("answer", id="a", name="agent", response_metadata={"model_name": "m"}),
    "ai calls": AIMessage("", tool_calls=[CALL], invalid_tool_calls=[BROKEN]),
    "ai parts": AIMessage([*THINKING_PARTS.values(), *SERVER_PARTS.values(), *CALL_PARTS.values()], tool_calls=[CALL]),
    "ai reasoning": AIMessage("answer", additional_kwargs={"reasoning_content": "let me see"}),
    "ai legacy": AIMessage("", additional_kwargs={"function_call": {"name": "run", "arguments": "{}"}}),
    "chunk": AIMessageChunk("ans", tool_call_chunks=[{"name": "run", "args": '{"x": 1}', "id": "c3", "index": 0}]),
    "tool": ToolMessage("result", tool_call_id="c1", name="run", artifact=object()),
    "tool error": ToolMessage([{"type": "text", "text": "failed"}], tool_call_id="c1", status="error"),
    "function": FunctionMessage("result", name="run"),
    "chat user": ChatMessage("hello", role="user"),
    "chat assistant": ChatMessage("hello", role="assistant"),
}
every_message = pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
