"""The collected cases in AutoGen's own shape: pairs, races, sizes and openings, message by message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from autogen_core.models import (
    FunctionExecutionResultMessage,
    LLMMessage,
    SystemMessage,
    UserMessage,
)

from autogen_helpers import CODEC, A, Client, H, S, Summarizer, T, chat, marks, options, problems, summaries
from helpers import Events, make_runtime, same_objects, settle, virtual
from smoothctx import Policy, Summarize
from smoothctx_autogen import LookaheadChatCompletionContext, client_model

Message = LLMMessage


def kinds(messages: Sequence[Message]) -> Counter[str]:
    """The kinds of fault in a request, without their places and ids."""
    return Counter(p.split(": ", 1)[1].split("'")[0].split("[")[0] for p in problems(messages))


@dataclass
class Turn:
    """One inference: what was held, and what the model got."""

    held: list[Message]
    view: list[Message]


async def drive(messages: Sequence[Message], events: Events | None = None, **given: Any) -> list[Turn]:
    """Add a history message by message, with an inference after each; no view may be worse than what is held."""
    turns: list[Turn] = []
    given = {"trigger": 4, "keep": 2, "land": 3, **given}
    async with make_runtime(on_event=events) as runtime:
        context = LookaheadChatCompletionContext(Summarizer(delay=0.1), options=options(**given), runtime=runtime)
        held: list[Message] = []
        for message in messages:
            held.append(message)
            await context.add_message(message)
            await settle(1)
            view = await context.get_messages()
            faults, had = kinds(view), kinds(held)
            assert not {f for f, n in faults.items() if n > had[f]}, (problems(view), problems(held))
            own = [m for m in view if any(m is h for h in held)]
            assert same_objects(own, [m for m in held if any(m is v for v in view)]), "in the order of the history"
            assert marks(view) >= marks(held), "raw or in the summary"
            turns.append(Turn(list(held), view))
            await settle(1)
    return turns


def cycles(n: int, *, first: int = 0, parallel: int = 1, size: int = 40) -> list[Message]:
    """Steps of a tool loop, each with its parallel calls."""
    found: list[Message] = []
    for k in range(first, first + n):
        ids = [f"c{k}-{j}" for j in range(parallel)]
        found += [A(f"<{2 * k}> calling", *ids, size=size), T(*ids, text=f"<{2 * k + 1}> result", size=size)]
    return found


PAIRS: dict[str, list[Message]] = {
    "B01": [H(size=60), A("", "a"), A("", "b"), T("a", size=60), T("b", size=60), H(), A(), H()],
    "B02": [m for k in range(6) for m in (H(size=60), A("", f"{k}"), T(f"{k}", size=60))],
    "B03": [m for k in range(4) for m in (H(size=60), A("", f"{k}"), T(f"{k}", size=60), A(size=60))],
    "B04": [
        *chat(2),
        H(size=40),
        A("", "1", "2"),
        FunctionExecutionResultMessage(content=[T("1", size=900).content[0], T("2", size=50).content[0]]),
        A(size=40),
        *chat(2, first=5),
    ],
    "B05": [H(size=60), A(size=60), H(size=60), A("", "1"), T("1", size=60), A(size=60), H(size=60), A(), H()],
    "B11": [*chat(2), H(size=60), A("", "1"), T("1", size=60), A(size=60), H()],
    "B14": [*chat(3), A("", "confirm"), *[H(f"<{50 + k}> still there?", size=40) for k in range(10)], T("confirm")],
    "B15": [*chat(3), H(size=40), A("", "1"), T("1")],
    "B16": [H(size=40), *cycles(8)],
    "B17": [*chat(4), H(), A("", "1")],
    "B20": [*chat(3), H(), A("", "1"), T("1"), A(), H(), A("", "2"), T("2"), A()],
    "B23": [
        m for k in range(5) for m in (H(size=60), A("", "call_0"), T("call_0", text=f"<{k}>", size=60), A(size=60))
    ],
    "B24": [*chat(4), A("", "1"), H("<90> hurry"), H("<91> well?")],
    "B25": [H(size=40), *cycles(8, parallel=3)],
    "B27": [*chat(3), A("", "1", "2"), T("1"), T("2"), A(size=60), *chat(2, first=5)],
    "no ids": [m for k in range(5) for m in (H(size=60), A("", "", ""), T("", "", text=f"<{k}>", size=60), A(size=60))],
    "orphan": [*chat(2), T("gone", size=60), *chat(4, first=5)],
    "no results": [*chat(2), H(), A("", "1"), T(), A(size=60), *chat(3, first=5)],
    "answered in parts": [*chat(2), A("", "1", "2", "3"), T("2"), T("1", "3"), A(size=60), *chat(3, first=5)],
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_stay_whole(name: str) -> None:
    """A call and all its results are one unit, kept or summarised together; what is pending is not touched."""

    @virtual
    async def main() -> None:
        turns = await drive(PAIRS[name])
        assert any(summaries(t.view) for t in turns), "it was put to the test"
        for turn in turns:
            newest = turn.held[-1]
            assert any(newest is m for m in turn.view), "what was just added is raw"

    main()


@virtual
async def test_results_that_the_model_has_not_read_are_raw() -> None:
    """B25: in a long loop with one user message every inference sees the newest results word for word."""
    turns = await drive([H("<90> the task", size=40), *cycles(10, parallel=3)])
    assert any(summaries(t.view) for t in turns)
    for turn in turns:
        assert any(m is turn.held[0] for m in turn.view), "the question is kept"
        if isinstance(turn.held[-1], FunctionExecutionResultMessage):
            assert turn.view[-1] is turn.held[-1] and turn.view[-2] is turn.held[-2]


@pytest.mark.parametrize("parallel", [1, 2, 3])
@pytest.mark.parametrize("limit", [6, 8, 11])
def test_the_fallback_leaves_pairs_whole_and_fits(parallel: int, limit: int) -> None:
    """B05, B07, B11, B92, B97: a window without any summary is cut at whole pairs, and opens with a user message."""

    @virtual
    async def main() -> None:
        async with make_runtime() as runtime:
            given = options(trigger=4, keep=2, land=3, hard=limit, overrun="fallback")
            context = LookaheadChatCompletionContext(Summarizer("hang"), options=given, runtime=runtime)
            history = [m for k in range(6) for m in (H(f"<{k}>", size=40), *cycles(1, first=50 + k, parallel=parallel))]
            for message in [*history, H("<90> last")]:
                await context.add_message(message)
                if isinstance(message, UserMessage | FunctionExecutionResultMessage):
                    view = await context.get_messages()
                    assert not problems(view), problems(view)
                    results = sum(len(m.content) - 1 for m in view if isinstance(m, FunctionExecutionResultMessage))
                    assert len(view) + results <= limit
            assert runtime.counters.fallbacks >= 1

    main()


OPENINGS: dict[str, list[Message]] = {
    "B12": [*chat(1), H(size=60), A("", "1"), T("1", size=60), A(size=60), H(), A(), H()],
    "B93": chat(12),
    "B94": [S("memory"), *chat(4)],
    "B96": [S("memory"), H("<90> q", size=60), A("", "1"), T("1", size=900), A(size=60), A("", "2"), T("2"), A()],
    "starts with the agent": [A("<90> hello", size=60), *chat(4)],
    "starts with a call": [*cycles(2, first=40), *chat(3)],
}


@pytest.mark.parametrize("name", OPENINGS)
def test_a_rewritten_view_opens_with_a_user_message(name: str) -> None:
    """Behind the system messages, however often it was rewritten; and that summary is a user message."""

    @virtual
    async def main() -> None:
        turns = await drive(OPENINGS[name], keep=0, land=1)
        rewritten = [t for t in turns if summaries(t.view)]
        assert rewritten
        for turn in rewritten:
            first = next(m for m in turn.view if not isinstance(m, SystemMessage))
            assert isinstance(first, UserMessage) and len(summaries(turn.view)) == 1
            lead = [m for m in turn.held if isinstance(m, SystemMessage)]
            assert same_objects([m for m in turn.view if isinstance(m, SystemMessage)], lead)

    main()


@virtual
async def test_a_huge_message_behind_the_snapshot() -> None:
    """B51: a result that no longer brings the view under its limits is cut anew; the view fits at every turn."""
    async with make_runtime() as runtime:
        client = Summarizer("hold")
        given = options(trigger=10, keep=2, land=4).model_copy(
            update={"hard_limit": ("tokens", 2500), "trigger": ("tokens", 600), "land_at": ("tokens", 500)}
        )
        context = LookaheadChatCompletionContext(client, options=given, runtime=runtime)
        for message in chat(7):
            await context.add_message(message)
        await client.started.wait()
        for message in chat(2, first=50, size=900):
            await context.add_message(message)
        await context.add_message(H("<99> last"))
        client.mode = "answer"
        client.release.set()
        view = await context.get_messages()
        assert sum(map(CODEC.estimate, view)) <= 2500 and not problems(view)
        assert view[-1].content == "<99> last"


@virtual
async def test_triggers_count_what_is_not_in_the_messages() -> None:
    """B99, B104: reserved tokens (tools, the agent's system message) count; no reported usage is needed."""
    for reserved, expected in ((0, 0), (1500, 1)):
        async with make_runtime() as runtime:
            given = options(reserved_tokens=reserved, context_window=4000).model_copy(
                update={"trigger": ("fraction", 0.6), "hard_limit": ("fraction", 0.9), "land_at": ("fraction", 0.5)}
            )
            context = LookaheadChatCompletionContext(Summarizer(), options=given, runtime=runtime)
            for message in chat(10):
                await context.add_message(message)
            await settle(1)
            assert runtime.counters.started == expected


@virtual
async def test_calls_and_thoughts_reach_the_trigger() -> None:
    """B101: a history that consists of arguments is not an empty one."""
    async with make_runtime() as runtime:
        given = options().model_copy(update={"trigger": ("tokens", 800), "land_at": ("tokens", 400)})
        context = LookaheadChatCompletionContext(Summarizer(), options=given, runtime=runtime)
        for k in range(4):
            call: Any = A("", f"{k}")
            call.content[0].arguments = "word " * 200
            for message in (H(), call, T(f"{k}"), A()):
                await context.add_message(message)
        await settle(1)
        assert summaries(await context.get_messages())


@virtual
async def test_each_message_is_counted_once() -> None:
    """B145: not with every inference anew."""
    counted: list[int] = []

    def counter(messages: list[Any]) -> int:
        counted.extend(map(id, messages))
        return sum(map(CODEC.estimate, messages))

    async with make_runtime() as runtime:
        policy = Policy(
            Summarize(client_model(Client()), max_tokens=100), context_window=100_000, token_counter=counter
        )
        context = LookaheadChatCompletionContext(policy=policy, runtime=runtime)
        held: list[Message] = [m for k in range(10) for m in (H(f"{k}"), *cycles(1, first=k, parallel=2), A(f"{k}"))]
        for message in held:
            await context.add_message(message)
            for _ in range(3):
                await context.get_messages()
        assert len(counted) == 50, "one count for each of 40 messages, and for each second result"


@virtual
async def test_no_endless_summaries() -> None:
    """B78, B152: nothing new to summarise starts nothing, however often the context is read."""
    async with make_runtime() as runtime:
        client = Summarizer()
        context = LookaheadChatCompletionContext(client, options=options(), runtime=runtime)
        for message in chat(3):
            await context.add_message(message)
        for _ in range(20):
            await context.get_messages()
            await settle(1)
        assert client.calls == 1 and runtime.counters.started == 1


@virtual
async def test_the_last_summary_is_part_of_the_next() -> None:
    """B154, B155: each one covers what the one before it covered."""
    turns = await drive(chat(20), trigger=6)
    texts = list(dict.fromkeys(text for t in turns for text in summaries(t.view)))
    assert len(texts) >= 3
    for earlier, later in zip(texts, texts[1:], strict=False):
        assert marks([CODEC.user(earlier)]) <= marks([CODEC.user(later)])
