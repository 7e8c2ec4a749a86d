"""Real agents and teams of AutoGen on the context: what each model call gets, and how long each turn takes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import Handoff
from autogen_agentchat.conditions import HandoffTermination, MaxMessageTermination
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_core import CancellationToken, FunctionCall
from autogen_core.memory import (
    ListMemory,
    Memory,
    MemoryContent,
    MemoryMimeType,
    MemoryQueryResult,
    UpdateContextResult,
)
from autogen_core.model_context import ChatCompletionContext, UnboundedChatCompletionContext
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResultMessage,
    LLMMessage,
    SystemMessage,
    UserMessage,
)

from autogen_helpers import CODEC, Client, Summarizer, marks, options, problems, summaries
from helpers import MARK, fill, make_runtime, now, settle, virtual
from smoothctx import Runtime
from smoothctx_autogen import LookaheadChatCompletionContext


def context_of(runtime: Runtime, client: Client | None = None, **given: Any) -> LookaheadChatCompletionContext:
    """A context that starts early."""
    given = {"trigger": 10, "land": 4, "keep": 2, **given}
    return LookaheadChatCompletionContext(
        client if client is not None else Summarizer(delay=2.0), options=options(**given), runtime=runtime
    )


def ask(number: int) -> str:
    """A question with its mark, of a usual length."""
    return fill(f"<{number}> question", 40)


async def run(x: int) -> str:
    """A tool that takes a moment."""
    await asyncio.sleep(0.1)
    return fill(f"result <{x}>", 40)


def calling(*numbers: int) -> list[FunctionCall]:
    """Parallel calls of it."""
    return [FunctionCall(id=f"call_{k}", name="run", arguments=json.dumps({"x": n})) for k, n in enumerate(numbers)]


def sound(client: Client) -> None:
    """Every request that the model got is one that a provider accepts."""
    assert client.requests
    for request in client.requests:
        assert not problems(request), problems(request)


def echo(messages: Sequence[LLMMessage]) -> str:
    """Answers with a mark of its own: that of the last user message plus one."""
    last = next(m for m in reversed(messages) if isinstance(m, UserMessage))
    return fill(f"<{int(MARK.findall(CODEC.text(last))[-1]) + 1}> answer", 30)


@virtual
async def test_no_turn_is_longer_than_the_model_takes() -> None:
    """The stall: 30 turns, a model of 0.3 s, a summariser of 2.0 s; the transform turns take what the others take."""
    async with make_runtime() as runtime:
        client = Client(echo, delay=0.3)
        context = context_of(runtime, trigger=20, land=6)
        agent = AssistantAgent("agent", client, model_context=context)
        took, rewrote = [], []
        for turn in range(30):
            started, before = now(), runtime.counters.committed
            await agent.run(task=ask(2 * turn))
            took.append(now() - started)
            rewrote.append(runtime.counters.committed > before)
            sound(client)
            assert marks(client.requests[-1]) == set(range(2 * turn + 1)), "nothing is lost"
        assert sum(rewrote) >= 2
        assert max(took) == pytest.approx(0.3) and min(took) == pytest.approx(0.3)
        assert max(map(len, client.requests)) < 40


@pytest.mark.parametrize("mode", ["hang", "fail", "empty", "hold", "cancel"])
def test_a_bad_summariser_never_shows(mode: str) -> None:
    """Failing, hanging or silent: each turn takes what the model takes, and gets the raw messages."""

    @virtual
    async def main() -> None:
        async with make_runtime() as runtime:
            client = Client(echo, delay=0.3)
            agent = AssistantAgent("agent", client, model_context=context_of(runtime, Summarizer(mode)))
            for turn in range(12):
                started = now()
                await agent.run(task=ask(2 * turn))
                assert now() - started == pytest.approx(0.3)
            sound(client)
            assert marks(client.requests[-1]) == set(range(23)) and not summaries(client.requests[-1])
            assert runtime.counters.started >= 1

    main()


@pytest.mark.parametrize("reflect", [False, True])
def test_tool_loops_with_parallel_calls(reflect: bool) -> None:
    """Constant call ids, as some servers give them (B23): each call with its result in every request; the summary
    comes inside a loop too; results that the model has not read are raw (B25)."""

    def script(messages: Sequence[LLMMessage]) -> Any:
        steps = 0
        for message in reversed(messages):
            if isinstance(message, UserMessage):
                break
            steps += isinstance(message, FunctionExecutionResultMessage)
        number = int(MARK.findall(CODEC.text(next(m for m in reversed(messages) if isinstance(m, UserMessage))))[-1])
        if steps < 3:
            return calling(*(number + 1 + 3 * steps + k for k in range(3)))
        return f"<{number + 10}> answer"

    @virtual
    async def main() -> None:
        async with make_runtime() as runtime:
            client = Client(script, delay=0.3)
            context = context_of(runtime, Summarizer(delay=1.0), trigger=30, land=10)
            agent = AssistantAgent(
                "agent",
                client,
                tools=[run],
                model_context=context,
                max_tool_iterations=4 if not reflect else 3,
                reflect_on_tool_use=reflect,
            )
            expected: set[int] = set()
            for turn in range(8):
                await agent.run(task=ask(20 * turn))
                expected |= {20 * turn + k for k in range(10)}
                assert marks(client.requests[-1]) == expected
                expected.add(20 * turn + 10)
            sound(client)
            inside = [r for r in client.requests if summaries(r) and isinstance(r[-1], FunctionExecutionResultMessage)]
            assert inside and runtime.counters.committed >= 2
            for request in inside:
                unread: Any = request[-1]
                assert len(unread.content) == 3 and "result <" in unread.content[0].content
            held = await context.inner.get_messages()
            assert all(len(m.content) == 3 for m in held if isinstance(m, FunctionExecutionResultMessage))

    main()


class Reader(Memory):
    """A memory that reads the context before every inference, as those with a vector store do."""

    def __init__(self) -> None:
        self.seen: list[list[LLMMessage]] = []

    async def update_context(self, model_context: ChatCompletionContext) -> UpdateContextResult:
        messages = await model_context.get_messages()
        self.seen.append(list(messages))
        messages.clear()  # it is the reader's own list
        return UpdateContextResult(memories=MemoryQueryResult(results=[]))

    async def query(self, query: Any, cancellation_token: Any = None, **kwargs: Any) -> MemoryQueryResult:
        return MemoryQueryResult(results=[])

    async def add(self, content: MemoryContent, cancellation_token: Any = None) -> None: ...

    async def clear(self) -> None: ...

    async def close(self) -> None: ...


@virtual
async def test_memories_that_read_and_add() -> None:
    """They see what the model will see; the system messages that they add are word for word in every request."""
    async with make_runtime() as runtime:
        client, reader, facts = Client(echo, delay=0.3), Reader(), ListMemory()
        await facts.add(MemoryContent(content="The user likes tea.", mime_type=MemoryMimeType.TEXT))
        context = context_of(runtime, Summarizer(delay=0.1), trigger=20, land=14)
        agent = AssistantAgent("agent", client, model_context=context, memory=[reader, facts])
        for turn in range(14):
            await agent.run(task=ask(2 * turn))
            request = client.requests[-1]
            added = [m for m in request if isinstance(m, SystemMessage) and "likes tea" in m.content]
            assert len(added) == turn + 1
            assert [m for m in request[1:] if m not in added] == [m for m in reader.seen[-1] if m not in added]
        assert any(map(summaries, client.requests)) and runtime.counters.committed >= 1


@virtual
async def test_a_cancelled_run_neither_loses_nor_doubles_a_message() -> None:
    """Its question stays once, as without us; the summary that was being written goes on and is used."""
    async with make_runtime() as runtime:
        client, model = Client(echo, delay=0.3), Summarizer("hold")
        context = context_of(runtime, model)
        agent = AssistantAgent("agent", client, model_context=context)
        for turn in range(5):
            await agent.run(task=ask(2 * turn))
        await model.started.wait()
        task = asyncio.get_running_loop().create_task(agent.run(task=ask(10)))
        await settle(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held = await context.inner.get_messages()
        assert [MARK.findall(CODEC.text(m)) for m in held] == [[str(k)] for k in range(11)]
        model.release.set()
        await settle(1)
        await agent.run(task=ask(12))
        request = client.requests[-1]
        assert marks(request) == {*range(11), 12} and len(summaries(request)) == 1
        assert model.cancelled == 0
        sound(client)


@virtual
async def test_a_cancelled_team_leaves_each_message_once() -> None:
    """Through AutoGen's own token, in the middle of a run and of a lookahead: each context holds what it would hold
    without us, and the next run goes on."""
    histories: list[list[list[LLMMessage]]] = []
    for ahead in (True, False):
        async with make_runtime() as runtime:
            team, clients, models = make_team(runtime, plain=not ahead)
            for turn in range(2):
                await team.run(task=ask(turn))
            token = CancellationToken()
            task = asyncio.get_running_loop().create_task(team.run(task=ask(2), cancellation_token=token))
            await settle(1.0)
            token.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            contexts = [a.model_context for a in team._participants if isinstance(a, AssistantAgent)]
            inner = [c.inner if isinstance(c, LookaheadChatCompletionContext) else c for c in contexts]
            histories.append([list(await c.get_messages()) for c in inner])
            for client in clients:
                sound(client)
    assert histories[0] == histories[1]


@virtual
async def test_a_model_that_fails_is_the_agents_own_error() -> None:
    """It passes through; the run after it goes on with everything."""
    async with make_runtime() as runtime:
        client = Client([*[fill("a", 30)] * 5, RuntimeError("the model failed"), "b"])
        agent = AssistantAgent("agent", client, model_context=context_of(runtime))
        for turn in range(5):
            await agent.run(task=ask(turn))
        with pytest.raises(RuntimeError, match="the model failed"):
            await agent.run(task=ask(5))
        await settle(5)
        await agent.run(task=ask(6))
        assert marks(client.requests[-1]) == set(range(7)) and summaries(client.requests[-1])


@virtual
async def test_reset_cancels_and_forgets() -> None:
    """Of an agent and through its team: the next run begins with an empty context."""
    async with make_runtime() as runtime:
        client, model = Client(echo, delay=0.3), Summarizer("hold")
        agent = AssistantAgent("agent", client, model_context=context_of(runtime, model))
        team = RoundRobinGroupChat([agent], termination_condition=MaxMessageTermination(2))
        for reset in (lambda: agent.on_reset(CancellationToken()), team.reset):
            for turn in range(6):
                await team.run(task=ask(2 * turn))
            assert model.calls >= 1
            await reset()
            await settle(1)
            assert model.cancelled == model.calls and runtime.counters.committed == 0
            await team.run(task=ask(70))
            assert marks(client.requests[-1]) == {70}
            await agent.on_reset(CancellationToken())


def make_team(runtime: Runtime, *, plain: bool = False) -> tuple[RoundRobinGroupChat, list[Client], list[Summarizer]]:
    """Two agents that talk, each with a context of its own on one runtime; or with AutoGen's, to compare."""
    counter = iter(range(100, 10_000))
    clients = [Client(lambda _: fill(f"<{next(counter)}> said", 20), delay=0.3) for _ in range(2)]
    models = [Summarizer(delay=2.0) for _ in range(2)]
    agents = [
        AssistantAgent(
            name,
            client,
            description=name,
            model_context=UnboundedChatCompletionContext()
            if plain
            else LookaheadChatCompletionContext(model, options=options(trigger=14, land=6, keep=4), runtime=runtime),
        )
        for name, client, model in zip(("one", "two"), clients, models, strict=True)
    ]
    team = RoundRobinGroupChat(list(agents), termination_condition=MaxMessageTermination(9))
    return team, clients, models


@virtual
async def test_a_team_goes_on_from_its_saved_state() -> None:
    """Through JSON into new agents on a new runtime: the committed summaries are used, nobody is asked for them."""
    async with make_runtime() as runtime:
        team, clients, models = make_team(runtime)
        for turn in range(3):
            await team.run(task=ask(turn))
        await settle(5)
        await team.run(task=ask(3))
        assert all(summaries(c.requests[-1]) for c in clients)
        state = json.loads(json.dumps(await team.save_state()))
        last = [c.requests[-1] for c in clients]
    async with make_runtime() as runtime:
        team, clients, models = make_team(runtime)
        await team.load_state(state)
        await team.run(task=ask(4))
        for client, before in zip(clients, last, strict=True):
            sound(client)
            assert summaries(client.requests[0]) == summaries(before)
            assert marks(client.requests[0]) >= marks(before)
        assert runtime.counters.salvaged == 2


@virtual
async def test_agents_of_one_team_do_not_share_state() -> None:
    """One runtime, equal options: no summary of the one is in a request of the other."""
    async with make_runtime() as runtime:
        clients, models = [Client(echo, delay=0.3) for _ in range(2)], [Summarizer(text=f"Of {k}.") for k in range(2)]
        agents = [
            AssistantAgent(f"agent{k}", clients[k], model_context=context_of(runtime, models[k])) for k in range(2)
        ]
        for turn in range(12):
            for k, agent in enumerate(agents):
                await agent.run(task=ask(1000 * k + 2 * turn))
        for k in range(2):
            own = {1000 * k + n for n in range(23)}
            assert marks(clients[k].requests[-1]) == own
            found = [s for r in clients[k].requests for s in summaries(r)]
            assert found and all(f"Of {k}." in s for s in found)


@virtual
async def test_streams_show_nothing_of_the_summariser() -> None:
    """Promise 13: chunks and messages are the agent's own."""
    async with make_runtime() as runtime:
        agent = AssistantAgent(
            "agent",
            Client(echo, delay=0.3),
            model_context=context_of(runtime, Summarizer(delay=0.5)),
            model_client_stream=True,
        )
        shown: list[str] = []
        for turn in range(12):
            async for event in agent.run_stream(task=ask(2 * turn)):
                if isinstance(event, ModelClientStreamingChunkEvent | TextMessage):
                    shown.append(event.content)
        assert runtime.counters.committed >= 1 and len(shown) == 36
        assert not any("summary" in text for text in shown)


@virtual
async def test_handoffs_and_their_context() -> None:
    """A swarm: the calls and results that one agent hands to the other are pairs there too."""
    async with make_runtime() as runtime:

        def first(messages: Sequence[LLMMessage]) -> Any:
            handed = [FunctionCall(id="h", name="transfer_to_two", arguments="{}")]
            return [*calling(7, 8), *handed]

        clients = [Client(first, delay=0.3), Client(lambda m: [FunctionCall(id="u", name="ask", arguments="{}")])]
        contexts = [context_of(runtime, trigger=8, keep=3, land=5) for _ in range(2)]
        one = AssistantAgent("one", clients[0], tools=[run], handoffs=["two"], model_context=contexts[0])
        two = AssistantAgent(
            "two",
            clients[1],
            handoffs=[Handoff(target="user", name="ask"), "one"],
            model_context=contexts[1],
        )
        for turn in range(6):
            team = Swarm([one, two], termination_condition=HandoffTermination("user") | MaxMessageTermination(20))
            await team.run(task=ask(turn))
            await settle(3)
        for client in clients:
            sound(client)
            assert any(map(summaries, client.requests))
        assert any(isinstance(m, AssistantMessage) and len(CODEC.calls(m)) == 2 for m in clients[1].requests[0])


@virtual
async def test_a_selector_with_such_a_context() -> None:
    """The speaker is chosen from a context too: it takes the same one."""
    async with make_runtime() as runtime:
        chooser, context = Client(lambda m: "one" if len(m) % 2 else "two"), context_of(runtime)
        agents = [AssistantAgent(n, Client(lambda _: "<1> said"), description=n) for n in ("one", "two")]
        team = SelectorGroupChat(
            list(agents),
            model_client=chooser,
            model_context=context,
            allow_repeated_speaker=True,
            termination_condition=MaxMessageTermination(16),
        )
        await team.run(task=ask(0))
        assert chooser.requests and len(await context.inner.get_messages()) >= 14
        assert len(await context.get_messages()) <= len(await context.inner.get_messages())


def test_an_agent_is_dumped_and_loaded_with_it() -> None:
    """The whole agent as a component, its context inside."""
    model = Summarizer(model="tiny")
    context = LookaheadChatCompletionContext(model, options=options(keep=7))
    text = AssistantAgent("agent", model, model_context=context).dump_component().model_dump_json()
    agent = AssistantAgent.load_component(json.loads(text))
    assert isinstance(agent.model_context, LookaheadChatCompletionContext)
    assert agent.dump_component().model_dump_json() == text
