"""Random walks over checkpoints: turns, edits under an id, deletions, time travel, forks and restarts in any order.

In every turn the model has seen exactly the messages of its branch, raw or summarised.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import Phase, given, settings, strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState

from graphs import Chat, FakeSummarizer, SavedState, chat_graph, idle, marks, on, policy_of, summaries
from helpers import fill
from smoothctx import Runtime
from smoothctx_langgraph.node import lookahead_node

pytestmark = pytest.mark.langgraph

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.integers(1, 3)),
        st.tuples(st.just("hurry"), st.integers(1, 3)),
        st.tuples(st.just("edit"), st.integers(0, 40)),
        st.tuples(st.just("delete"), st.integers(0, 40)),
        st.tuples(st.just("travel"), st.integers(0, 40)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("fail"), st.just(0)),
    ),
    min_size=4,
    max_size=14,
)


class Walk:
    """One walk: a thread, a checkpointer, and processes that come and go."""

    def __init__(self, mode: str, channel: bool) -> None:
        self.saver = InMemorySaver()
        self.mode = mode
        self.schema = SavedState if channel else MessagesState
        self.config: Any = on("t")
        self.next_mark = 0
        self.fails = False
        self.summarised = 0

    def start(self) -> None:
        """A process begins."""
        self.chat, self.summariser = Chat(), FakeSummarizer(delay=0)
        self.runtime = Runtime()
        decorate = lookahead_node(self.runtime, policy_of(self.summariser), mode=self.mode)

        @decorate
        async def model(state: Any) -> dict[str, Any]:
            reply = await self.chat.ainvoke(state["messages"])
            if self.fails:
                raise ConnectionError("down")
            self.next_mark += 1
            return {"messages": [AIMessage(fill(f"<{self.next_mark}> answer", 60), id=reply.id)]}

        self.graph = chat_graph(model, state=self.schema, checkpointer=self.saver)

    async def held(self) -> list[BaseMessage]:
        """The messages in the state."""
        found: list[BaseMessage] = (await self.graph.aget_state(self.config)).values.get("messages", [])
        return found

    async def turn(self) -> None:
        """One turn; the oracle."""
        self.next_mark += 1
        question = HumanMessage(fill(f"<{self.next_mark}> question", 60))
        before = marks(await self.held()) | {self.next_mark}
        state = await self.graph.ainvoke({"messages": [question]}, self.config)
        self.config = on("t")
        assert marks(self.chat.last) == before, (sorted(marks(self.chat.last)), sorted(before))
        assert marks(state["messages"]) == before | {self.next_mark}
        assert self.mode == "state" or not summaries(state["messages"])
        assert not any(isinstance(m, RemoveMessage) for m in state["messages"])
        self.summarised += bool(summaries(self.chat.last))

    async def step(self, what: str, n: int) -> None:
        """One thing that happens."""
        if what in ("turn", "hurry"):
            for _ in range(n):
                await self.turn()
                if what == "turn":
                    await idle(self.runtime)
            return
        if what == "restart":
            await self.runtime.aclose()
            self.start()
            await self.runtime.__aenter__()
            return
        messages = await self.held()
        if not messages:
            return
        target = messages[n % len(messages)]
        if what == "edit":
            self.next_mark += 1
            edited = type(target)(fill(f"<{self.next_mark}> edited", 60), id=target.id)
            await self.update([edited])
        elif what == "delete":
            await self.update([RemoveMessage(str(target.id))])
        elif what == "travel":
            history = [s async for s in self.graph.aget_state_history(self.config) if not s.next]
            self.config = history[n % len(history)].config
        elif what == "fail":
            self.fails = True
            with pytest.raises(ConnectionError):
                await self.turn()
            self.fails, self.config = False, on("t")
            before = marks(await self.held())
            await self.graph.ainvoke(None, self.config)
            assert marks(self.chat.last) == before

    async def update(self, messages: list[Any]) -> None:
        """The user changes the state, as the model's node would."""
        self.config = await self.graph.aupdate_state(self.config, {"messages": messages}, as_node="model")

    async def run(self, steps: list[tuple[str, int]]) -> None:
        """The whole walk."""
        self.start()
        await self.runtime.__aenter__()
        try:
            for what, n in [("turn", 3), *steps, ("turn", 2)]:
                await self.step(what, n)
        finally:
            await self.runtime.aclose()


@pytest.mark.parametrize("channel", [True, False])
@settings(max_examples=15, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(steps=STEPS)
def test_views_are_true_to_their_branch(channel: bool, steps: list[tuple[str, int]]) -> None:
    """View mode, with and without the private channel."""
    asyncio.run(Walk("view", channel).run(steps))


@settings(max_examples=15, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(steps=STEPS)
def test_rewritten_states_are_true_to_their_branch(steps: list[tuple[str, int]]) -> None:
    """State mode: what the state says, summary or not, is what the model saw."""
    asyncio.run(Walk("state", False).run(steps))


def test_walks_do_summarise() -> None:
    """The walks reach what they are about: a long one has summaries in most of its views."""
    for mode in ("view", "state"):
        walk = Walk(mode, True)
        asyncio.run(walk.run([("turn", 3)] * 4))
        assert walk.summarised >= 6
