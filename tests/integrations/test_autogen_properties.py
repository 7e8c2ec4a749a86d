"""Whatever an agent, its user and its summariser do in whatever order: what goes out is sound and complete."""

from __future__ import annotations

import itertools
import json
from typing import Any

from autogen_core.models import LLMMessage
from hypothesis import given, settings, strategies as st

from autogen_helpers import A, H, S, Summarizer, T, marks, options, problems, summaries
from helpers import coherent, make_runtime, same_objects, settle, virtual
from smoothctx import Runtime
from smoothctx_autogen import LookaheadChatCompletionContext

STEP = st.one_of(
    st.tuples(st.just("turns"), st.integers(1, 5)),
    st.tuples(st.just("turns"), st.integers(1, 5)),
    st.tuples(st.just("tools"), st.integers(1, 3)),
    st.tuples(st.just("system"), st.just(0)),
    st.tuples(st.just("time"), st.integers(0, 3)),
    st.tuples(st.just("time"), st.integers(1, 3)),
    st.tuples(st.just("mode"), st.sampled_from(["answer", "answer", "answer", "fail", "hang", "empty", "long"])),
    st.tuples(st.just("edit"), st.integers(0, 30)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("rewind"), st.integers(0, 5)),
    st.tuples(st.just("reload"), st.booleans()),
    st.tuples(st.just("clear"), st.just(0)),
)


class Conversation:
    """One context driven step by step, with what it must hold."""

    def __init__(self, runtime: Runtime, hard: int) -> None:
        self.runtime, self.hard = runtime, hard
        self.client = Summarizer(delay=0.5)
        self.context = self.make()
        self.numbers = itertools.count()
        self.states: list[str] = []

    def make(self) -> LookaheadChatCompletionContext:
        return LookaheadChatCompletionContext(
            self.client,
            options=options(trigger=12, keep=2, land=4, hard=self.hard, max_wait=2.0),
            runtime=self.runtime,
        )

    def mark(self) -> str:
        return f"<{next(self.numbers)}>"

    async def add(self, *messages: LLMMessage) -> None:
        for message in messages:
            await self.context.add_message(message)

    async def step(self, kind: str, value: Any) -> None:
        if kind == "turns":
            for _ in range(value):
                await self.add(H(self.mark(), size=40))
                await self.check()
                await self.add(A(self.mark(), size=40))
        elif kind == "tools":
            ids = [f"call_{k}" for k in range(value)]
            await self.add(H(self.mark(), size=20), A(self.mark(), *ids, size=20), T(*ids, text=self.mark(), size=30))
            await self.check()
            await self.add(A(self.mark(), size=20))
        elif kind == "time":
            await settle(value)
        elif kind == "mode":
            self.client.mode = value
        elif kind == "clear":
            await self.context.clear()
            assert await self.context.get_messages() == []
        elif kind == "reload":
            await self.reload(new=value)
        elif kind == "edit":
            await self.edit(value)
        elif kind == "system":
            await self.add(S(self.mark()))
        elif kind == "save":
            self.states.append(json.dumps(await self.context.save_state()))
        elif self.states:
            await self.context.load_state(json.loads(self.states[value % len(self.states)]))
        await self.check()

    async def edit(self, value: int) -> None:
        held: Any = await self.context.inner.get_messages()
        if held and isinstance(held[value % len(held)].content, str):
            held[value % len(held)].content = f"{self.mark()} edited"

    async def reload(self, *, new: bool) -> None:
        state = json.loads(json.dumps(await self.context.save_state()))
        view = await self.context.get_messages()
        old = self.context
        if new:
            self.context = self.make()
        await self.context.load_state(state)
        if new:
            await old.clear()
        if summaries(view) and "smoothctx" in state:
            assert summaries(await self.context.get_messages())

    async def check(self) -> None:
        held = list(await self.context.inner.get_messages())
        view = await self.context.get_messages()
        assert not problems(view) or view == held, problems(view)
        own = [m for m in view if any(m is h for h in held)]
        assert same_objects(own, [m for m in held if any(m is v for v in view)])
        assert not held or any(m is held[-1] for m in view)
        if not self.runtime.counters.fallbacks:
            assert marks(view) == marks(held), "each message is there, raw or in the summary"
        assert same_objects(view, await self.context.get_messages())


@settings(max_examples=100)
@given(st.lists(STEP, min_size=8, max_size=30), st.sampled_from([18, 1000]))
def test_every_view_is_sound(steps: list[tuple[str, Any]], hard: int) -> None:
    """Pairs whole, a user message first, own objects in order, nothing lost; after the end nothing is left."""

    @virtual
    async def main() -> None:
        async with make_runtime() as runtime:
            conversation = Conversation(runtime, hard)
            for kind, value in steps:
                await conversation.step(kind, value)
            session = conversation.context.session
            await conversation.context.clear()
            await settle(1)
            coherent(session, runtime)  # every lookahead that was started has ended in one way
        assert not runtime._sessions

    main()
