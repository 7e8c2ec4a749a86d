"""The context on its own: what goes out, what never waits, what is forgotten."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from autogen_core.model_context import BufferedChatCompletionContext, UnboundedChatCompletionContext
from autogen_core.models import LLMMessage, UserMessage

from autogen_helpers import CODEC, A, Client, H, Summarizer, T, chat, marks, options, problems, summaries
from helpers import Events, Rateless, make_runtime, same_objects, settle, virtual
from smoothctx import ClosedError, ConfigurationError, HandleState, KeepRecent, Policy, Runtime
from smoothctx_autogen import LookaheadChatCompletionContext, LookaheadOptions


@asynccontextmanager
async def opened(
    mode: str = "answer", *, delay: float = 1.0, events: Events | None = None, inner: Any = None, **given: Any
) -> AsyncIterator[tuple[LookaheadChatCompletionContext, Summarizer, Runtime]]:
    """A context on a runtime of its own, on the running loop's clock."""
    client = Summarizer(mode, delay=delay)
    async with make_runtime(on_event=events) as runtime:
        yield (
            LookaheadChatCompletionContext(client, options=options(**given), inner=inner, runtime=runtime),
            client,
            runtime,
        )


async def add(context: LookaheadChatCompletionContext, messages: Sequence[LLMMessage]) -> None:
    """Add them all, one after the other."""
    for message in messages:
        await context.add_message(message)


def at_once(coroutine: Any) -> Any:
    """Run a coroutine that may not wait for anything: its result, from the first step."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise AssertionError("it waited for something")


@virtual
async def test_a_summary_stands_for_the_finished_part() -> None:
    """Prepared behind a reply, in the view from the next call on; the history is whole and untouched."""
    async with opened() as (context, client, _):
        messages = chat(3)
        await add(context, messages)
        before = copy.deepcopy(messages)
        assert same_objects(await context.get_messages(), messages)
        await settle(2)
        await context.add_message(late := H("<90> more"))
        view = await context.get_messages()
        assert len(summaries(view)) == 1 and not problems(view)
        assert marks(view) >= marks(messages) and view[-1] is late
        kept = [m for m in view if not CODEC.summary_text(m)]
        assert all(any(m is own for own in [*messages, late]) for m in kept)
        assert await context.inner.get_messages() == [*before, late]
        assert client.calls == 1 and context.session.receipts[0].how == "ready"


@virtual
async def test_every_call_gives_the_same_in_a_new_list() -> None:
    """Any number of calls, memories that read the context included; what a caller does to the list stays there."""
    async with opened() as (context, client, runtime):
        await add(context, chat(3))
        await settle(2)
        first = await context.get_messages()
        again = await context.get_messages()
        assert first is not again and same_objects(first, again)
        again.clear()
        assert same_objects(await context.get_messages(), first)
        assert client.calls == 1
        raw = LookaheadChatCompletionContext(Summarizer(), options=options(), runtime=runtime)
        await raw.add_message(H())
        assert await raw.get_messages() is not await raw.inner.get_messages()  # that one is the live list


@pytest.mark.parametrize("mode", ["hold", "hang", "fail", "empty", "long", "call", "cut", "cancel", "answer"])
def test_no_call_waits_whatever_the_summariser_does(mode: str) -> None:
    """Each call is over at its first step: with nothing prepared, with work under way, and after it."""

    @virtual
    async def main() -> None:
        async with opened(mode) as (context, client, runtime):
            held: list[LLMMessage] = []
            for turn in range(12):
                held += (pair := chat(1, first=turn))
                at_once(context.add_message(pair[0]))
                view = at_once(context.get_messages())
                assert not problems(view) and marks(view) == marks(held[:-1])
                at_once(context.add_message(pair[1]))
                assert at_once(context.save_state())["messages"]
                await settle(1.5 if turn % 2 else 0)
            assert client.calls >= 1 and runtime.counters.started >= 1
            assert (runtime.counters.committed > 0) == (mode == "answer")

    main()


@virtual
async def test_concurrent_calls_are_one_lookahead() -> None:
    """Ten inferences at once over the trigger: one call of the summariser (single flight), one view."""
    async with opened("hold", trigger=5) as (context, client, runtime):
        await add(context, [*chat(3)[:-1]])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(context.get_messages()) for _ in range(10)]
        views = [t.result() for t in tasks]
        await client.started.wait()
        await context.add_message(A("<5> answer"))
        client.release.set()
        await settle(1)
        assert all(same_objects(v, views[0]) for v in views)
        assert client.calls == 1 and runtime.counters.started == 1
        assert summaries(await context.get_messages())


@virtual
async def test_messages_that_come_while_the_summary_is_written_stay_raw() -> None:
    """B28a, B31, B50: appended behind the snapshot, verbatim behind the summary, in order; nothing is made stale."""
    async with opened("hold", trigger=10) as (context, client, runtime):
        await add(context, first := chat(5))
        await client.started.wait()
        await add(context, later := [*chat(1, first=50), A("", "1", "2"), T("1", "2"), A("<99> after")])
        client.release.set()
        await settle(1)
        view = await context.get_messages()
        assert summaries(view) and same_objects(view[-len(later) :], later)
        assert marks(view) >= marks([*first, *later]) and runtime.counters.stale_total == 0


@virtual
async def test_clear_wins_over_a_summary_under_way() -> None:
    """B28b, B29: it cancels and forgets; nothing of the old history comes back, and the next one starts anew."""
    async with opened("hold") as (context, client, runtime):
        await add(context, chat(3))
        await client.started.wait()
        handle, old = context.session.lookahead, context.session
        assert handle is not None
        await context.clear()
        assert old.closed and await context.get_messages() == []
        client.release.set()
        await settle(1)
        assert handle.state is HandleState.DISCARDED and client.cancelled == 1
        assert await context.get_messages() == [] and runtime.counters.committed == 0
        await add(context, fresh := chat(1, first=70))
        assert same_objects(await context.get_messages(), fresh)
        assert "smoothctx" not in await context.save_state()
        await add(context, chat(3))
        await settle(5)
        view = await context.get_messages()
        assert "<140>" in summaries(view)[0] and runtime.counters.committed == 1


@virtual
async def test_clear_forgets_a_committed_summary() -> None:
    """The same messages again after a clear are new ones: they go out raw until a lookahead was due for them anew.

    That one finds the text which its model wrote for these very messages, and asks for no other."""
    async with opened() as (context, client, _):
        await add(context, messages := chat(3))
        await settle(2)
        assert summaries(await context.get_messages())
        await context.clear()
        await add(context, messages)
        assert same_objects(await context.get_messages(), messages)
        await settle(2)
        assert summaries(await context.get_messages()) and client.calls == 1
        assert context.session.receipts[0].how == "ready"


@virtual
async def test_clear_during_a_wait_at_the_hard_limit() -> None:
    """B45: the inference that waits goes on with its own messages; nothing is left of them afterwards."""
    async with opened("hold", trigger=4, hard=6) as (context, client, runtime):
        await add(context, messages := chat(4))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(context.get_messages())
            await client.started.wait()
            await settle()
            await context.clear()
        assert same_objects(task.result(), messages)
        assert await context.get_messages() == [] and runtime.counters.committed == 0


@virtual
async def test_at_the_hard_limit_the_view_fits() -> None:
    """A summariser that hangs: one bounded wait, then whole oldest segments are dropped, the pairs intact."""
    async with opened("hang", trigger=4, hard=8, land=4, max_wait=5.0) as (context, client, runtime):
        await add(context, chat(3))
        await add(context, [A("", "1", "2"), T("1", "2"), H("<80> next"), A("<81> yes"), H("<82> go on")])
        started = asyncio.get_running_loop().time()
        view = await context.get_messages()
        assert asyncio.get_running_loop().time() - started <= 5.0
        assert len(view) <= 8 and not problems(view) and view[-1].content == "<82> go on"  # type: ignore[union-attr]
        assert context.session.receipts[-1].how == "fallback" and runtime.counters.fallbacks == 1
        assert same_objects(at_once(context.get_messages()), view)


@virtual
async def test_at_the_hard_limit_a_summary_that_comes_in_time_is_used() -> None:
    """The pending one is promoted and waited for."""
    async with opened(delay=2.0, trigger=8, hard=9) as (context, _, __):
        await add(context, chat(5))
        view = await context.get_messages()
        assert summaries(view) and len(view) <= 9
        receipt = context.session.receipts[-1]
        assert receipt.how == "promoted" and receipt.waited_s == 2.0


@virtual
async def test_a_cancelled_wait_leaves_everything_as_it_was() -> None:
    """The turn is cancelled; the lookahead is not, and no message is lost or doubled."""
    async with opened("hold", trigger=4, hard=6) as (context, client, _):
        await add(context, messages := chat(4))
        task = asyncio.get_running_loop().create_task(context.get_messages())
        await client.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert same_objects(await context.inner.get_messages(), messages)
        client.release.set()
        await settle(1)
        assert client.cancelled == 0 and summaries(await context.get_messages())


@virtual
async def test_an_edit_of_the_history_drops_what_stood_for_it() -> None:
    """By digest: an equal copy of every message keeps the summary (B56), one edited message does not."""
    async with opened() as (context, client, _):
        await add(context, chat(3))
        await settle(2)
        assert summaries(await context.get_messages())
        copied = copy.deepcopy(await context.inner.save_state())
        await context.inner.load_state(copied)
        assert summaries(await context.get_messages()) and client.calls == 1
        edited: Any = (await context.inner.get_messages())[0]
        edited.content = "<70> edited in place"
        view = await context.get_messages()
        assert not summaries(view) and view[0] is edited


@virtual
async def test_a_context_that_drops_messages_itself() -> None:
    """Around a buffered one: its own window goes out, in its order; it is not made worse."""
    inner = BufferedChatCompletionContext(buffer_size=5)
    async with opened(inner=inner, trigger=3) as (context, _, __):
        for turn in range(10):
            await add(context, chat(1, first=turn))
            await settle(2)
            view = await context.get_messages()
            last = await inner.get_messages()
            assert view[-1] is last[-1] and len(view) <= len(last) + 1
        assert len((await context.save_state())["messages"]) == 20


@virtual
async def test_a_runtime_that_was_closed_leaves_the_raw_messages(caplog: pytest.LogCaptureFixture) -> None:
    """However many turns follow, it is said once: an event and a warning."""
    events = Events()
    async with opened(events=events) as (context, _, runtime):
        await add(context, messages := chat(3))
        await settle(2)
        assert summaries(await context.get_messages())
    assert same_objects(at_once(context.get_messages()), messages)
    at_once(context.add_message(A("more")))
    at_once(context.get_messages())
    assert len(await context.inner.get_messages()) == 7
    (event,) = events.of("turn.raw")
    assert event.data["where"] == "autogen" and "raw messages" in event.data["why"]
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("smoothctx.autogen", "WARNING", event.data["why"])
    ]
    assert not events.of("error")
    with pytest.raises(ClosedError):
        _ = context.session


@pytest.mark.parametrize("error", [RuntimeError("no rates"), ClosedError("it was closed")], ids=repr)
@virtual
async def test_an_engine_that_no_session_can_be_had_with_leaves_the_raw_messages(error: Exception) -> None:
    """It is no runtime that was never opened, whatever the engine raises: the turns go on, and events tell of it."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        context = LookaheadChatCompletionContext(
            Summarizer(), options=options(), runtime=runtime, engine=Rateless(error)
        )
        await add(context, messages := chat(3))
        assert same_objects(await context.get_messages(), messages)
    assert {str(e.data["error"]) for e in events.of("error")} == {f"{type(error).__name__}: {error}"}
    assert not events.of("turn.raw")


@virtual
async def test_errors_of_the_inner_context_are_the_callers() -> None:
    """They pass through ``get_messages``, as they would without us; behind an added message they are events."""

    class Broken(UnboundedChatCompletionContext):
        async def get_messages(self) -> list[LLMMessage]:
            raise RuntimeError("the inner context failed")

    events = Events()
    async with opened(inner=Broken(), events=events) as (context, _, __):
        await context.add_message(A("kept"))
        with pytest.raises(RuntimeError, match="inner context failed"):
            await context.get_messages()
    assert [e.data["where"] for e in events.of("error")] == ["autogen.add_message"]


@virtual
async def test_a_message_that_cannot_be_read_goes_out_as_it_is() -> None:
    """What no codec can read is an event, not an error of the turn."""
    events = Events()
    async with opened(events=events) as (context, _, __):
        odd: Any = UserMessage.model_construct(content=7, source="user")
        await add(context, [*chat(3), odd])
        view = await context.get_messages()
        assert view[-1] is odd and events.of("message.unreadable")


@virtual
async def test_a_session_that_the_runtime_closed_is_opened_again() -> None:
    """Crowded out by others: what it had committed goes on to hold, without another call of the summariser."""
    client = Summarizer(delay=1.0)
    async with make_runtime(max_sessions=1) as runtime:
        context = LookaheadChatCompletionContext(client, options=options(), runtime=runtime)
        await add(context, chat(3))
        await settle(2)
        view = await context.get_messages()
        assert summaries(view)
        other = LookaheadChatCompletionContext(Summarizer(), options=options(), runtime=runtime)
        await other.get_messages()
        assert await context.get_messages() == view and client.calls == 1


@virtual
async def test_two_contexts_on_one_runtime_share_no_state() -> None:
    """B138, B141: the same client, options and runtime; each sees its own history, cleared on its own."""
    client = Summarizer(delay=1.0)
    async with make_runtime() as runtime:
        one, two = (LookaheadChatCompletionContext(client, options=options(), runtime=runtime) for _ in range(2))
        await add(one, chat(3))
        await add(two, chat(3, first=50))
        await settle(3)
        views = [await one.get_messages(), await two.get_messages()]
        assert all(summaries(v) for v in views)
        assert not marks(views[0]) & marks(views[1]) and one.session is not two.session
        await one.clear()
        assert await two.get_messages() == views[1] and await one.get_messages() == []


@virtual
async def test_the_latest_user_message_is_always_kept() -> None:
    """B89: a summary never swallows the question that is being answered, however small ``keep`` is."""
    async with opened(keep=0, land=1, trigger=11) as (context, _, __):
        await add(context, [*chat(3), question := H("<90> the question"), A("", "1"), T("1"), A("", "2"), T("2")])
        await context.get_messages()
        await settle(2)
        view = await context.get_messages()
        assert summaries(view) and any(m is question for m in view) and not problems(view)


@virtual
async def test_a_big_result_among_parallel_ones_is_offloaded_alone() -> None:
    """``max_message_tokens`` caps one result; the others of its message stay, and it can be read again."""
    async with opened(trigger=500, land=400, max_message_tokens=200) as (context, _, __):
        big = T("1", "2", size=20)
        big.content[1].content = "word " * 2000
        await add(context, [H(), A("", "1", "2"), big])
        view = await context.get_messages()
        result: Any = view[-1]
        assert [r.call_id for r in result.content] == ["1", "2"] and not problems(view)
        assert result.content[0] is big.content[0] and "[offloaded: 10000 characters" in result.content[1].content
        assert big.content[1].content == "word " * 2000
        found = result.content[1].content.split('id="')[1].split('"')[0]
        await settle()
        assert "word word" in await context.session.retrieve(found)
        assert await context.get_messages() == view


@virtual
async def test_a_pinned_text_is_in_every_summary() -> None:
    """The session of a context is the application's to use."""
    async with opened() as (context, _, __):
        context.session.pin("<90> never deploy on Fridays")
        await add(context, chat(3))
        await settle(2)
        assert "never deploy on Fridays" in summaries(await context.get_messages())[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "exactly one of them"),
        ({"model_client": 7}, "model_client=7"),
        ({"model_client": Client(), "policy": 7}, "exactly one of them"),
        ({"policy": 7}, "policy=7"),
        ({"policy": Policy(KeepRecent(), context_window=100), "options": LookaheadOptions()}, "options: they go with"),
        ({"model_client": Client(), "inner": 7}, "inner=7"),
        ({"model_client": Client(), "runtime": 7}, "runtime=7"),
        ({"model_client": Client(), "tenant": ""}, "tenant=''"),
        ({"model_client": Client()}, "context_window="),
        ({"model_client": Client(), "options": LookaheadOptions(context_window=9, commit="now")}, "commit='now'"),
    ],
)
def test_wrong_options_are_errors_at_construction(given: dict[str, Any], said: str) -> None:
    """In the caller's words."""
    with pytest.raises(ConfigurationError, match=said):
        LookaheadChatCompletionContext(**given)


@virtual
async def test_with_a_policy_of_ones_own() -> None:
    """Any transform; it cannot be dumped, and says what to do."""
    async with make_runtime() as runtime:
        policy = Policy(
            KeepRecent(("messages", 2)),
            trigger=("messages", 6),
            land_at=("messages", 3),
            hard_limit=("messages", 100),
            min_savings=0.0,
        )
        context = LookaheadChatCompletionContext(policy=policy, runtime=runtime)
        await add(context, messages := chat(3))
        await settle(1)
        view = await context.get_messages()
        assert len(view) < len(messages) and not problems(view)
        with pytest.raises(NotImplementedError, match="model_client and options"):
            context.dump_component()
