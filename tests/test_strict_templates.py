"""Chat templates that want user and assistant by turns: what the guide says of them, on a server that has one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers import A, H, S, make_runtime, now, settle, virtual
from smoothctx import EngineRefused, KeepRecent, ParallelSummarize, Policy, Summarize
from smoothctx.engines import OpenAIEngine

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
SAID = "\n---\nWhile executing CallExpression at line 19, column 27 in source:\nJinja Exception: roles must alternate"


def recipe() -> Any:
    """The engine of the guide."""
    codes = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    [code] = [c for c in codes if "class Alternating" in c]
    names: dict[str, Any] = {}
    exec(code, names)
    return names["Alternating"]


class Strict:
    """As llama.cpp with a model of the Gemma family: it summarises, or refuses."""

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        roles = [m["role"] for m in json.loads(request.content)["messages"] if m["role"] != "system"]
        if any((role == "user") != (k % 2 == 0) for k, role in enumerate(roles)):
            return httpx.Response(500, json={"error": {"code": 500, "message": SAID}})
        event = {"choices": [{"delta": {"content": "They asked, and it answered."}, "finish_reason": "stop"}]}
        return httpx.Response(200, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    def engine(self, kind: type[OpenAIEngine]) -> OpenAIEngine:
        """A client of this kind."""
        client = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return kind("http://x", "m", client=client, clock=now)


async def views(transform: Any, *, engine: Any = None, turns: int = 30) -> list[list[Any]]:
    """The views of a conversation's turns."""
    found = []
    async with make_runtime() as runtime:
        policy = Policy(transform, context_window=2500, preload_kv=False)
        session = runtime.session("s", policy=policy)
        messages = [S()]
        for k in range(turns):
            messages = [*messages, H(f"<{k}> question", size=60)]
            found.append(await session.commit(messages))
            if engine is not None:
                await engine.complete(found[-1], max_tokens=1)
            messages = [*messages, A(f"<{k}> answer", size=60)]
            session.observe(messages)
            await settle(5)
        assert session.receipts
    return found


def in_a_row(view: list[Any]) -> bool:
    """Do two messages of the user's role stand side by side?"""
    return any(a["role"] == b["role"] == "user" for a, b in zip(view, view[1:], strict=False))


async def brief(messages: list[Any], *, max_tokens: int | None = None) -> str:
    """A summary."""
    return "They asked, and it answered."


@virtual
async def test_which_transforms_put_user_messages_in_a_row() -> None:
    """As the guide says: those that write summaries, and no others."""
    for transform, expected in (
        (KeepRecent(("messages", 6)), False),
        (Summarize(brief, keep=("messages", 5), facts=False), True),
        (ParallelSummarize(brief, block_tokens=400, facts=False), True),
    ):
        assert any(map(in_a_row, await views(transform))) is expected, transform


@virtual
async def test_the_guides_engine_lets_a_strict_template_take_every_view() -> None:
    """Joined, all of them are taken, and so is the summariser's own request; as they are, they are refused."""
    strict = Strict()
    engine = strict.engine(recipe())
    seen = await views(Summarize(engine, keep=("messages", 5), layout="standalone", facts=False), engine=engine)
    hard = next(view for view in seen if in_a_row(view))
    with pytest.raises(EngineRefused, match="chat template does not take these messages"):
        await strict.engine(OpenAIEngine).complete(hard, max_tokens=1)
