"""Saved states and component configs: what goes to another process, and what does not."""

from __future__ import annotations

import asyncio
import json
import warnings
from typing import Any

import pytest
from autogen_core import ComponentModel
from autogen_core.model_context import (
    BufferedChatCompletionContext,
    ChatCompletionContext,
    UnboundedChatCompletionContext,
)
from pydantic import ValidationError

from autogen_helpers import Client, H, Summarizer, chat, options, summaries
from helpers import Events, make_runtime, settle, virtual
from smoothctx import BreakEven, ConfigurationError, KStepOff, Prices, Speed
from smoothctx_autogen import (
    LookaheadChatCompletionContext,
    LookaheadOptions,
    client_model,
    close_default_runtime,
    default_runtime,
    set_default_runtime,
)


def through_json(state: Any) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(state))


async def committed(runtime: Any, client: Any) -> LookaheadChatCompletionContext:
    """A context whose summary is in the view."""
    context = LookaheadChatCompletionContext(client, options=options(), runtime=runtime)
    for message in chat(3):
        await context.add_message(message)
    await settle(2)
    assert summaries(await context.get_messages())
    return context


@virtual
async def test_a_saved_state_goes_on_in_a_new_process() -> None:
    """As JSON, on another runtime, with another client object: the same view, and no call of the summariser."""
    async with make_runtime() as first:
        context = await committed(first, Summarizer(delay=1.0))
        state = through_json(await context.save_state())
        view = await context.get_messages()
    assert set(state) == {"messages", "smoothctx"} and len(state["messages"]) == 6
    async with make_runtime() as second:
        client = Summarizer(delay=1.0)
        context = LookaheadChatCompletionContext(client, options=options(), runtime=second)
        await context.load_state(state)
        assert through_json(await context.save_state()) == state  # also before the first turn
        assert await context.get_messages() == view and client.calls == 0
        assert context.session.receipts[0].how == "salvaged"
        await context.add_message(H("<90> more"))
        assert summaries(await context.get_messages())
        assert through_json(await context.save_state())["smoothctx"] == state["smoothctx"]


@virtual
async def test_a_state_is_kept_when_it_is_saved_again_before_a_turn() -> None:
    """Loaded, a message added, saved, loaded elsewhere: the summary is still there."""
    async with make_runtime() as runtime:
        context = await committed(runtime, Summarizer(delay=1.0))
        state = through_json(await context.save_state())
        middle = LookaheadChatCompletionContext(Summarizer(), options=options(), runtime=runtime)
        await middle.load_state(state)
        await middle.add_message(H("<90> more"))
        again = through_json(await middle.save_state())
        last = LookaheadChatCompletionContext(client := Summarizer(), options=options(), runtime=runtime)
        await last.load_state(again)
        assert summaries(await last.get_messages()) and client.calls == 0


@virtual
async def test_a_plain_context_reads_it() -> None:
    """The messages are where they always are; our key is beside them. And the other way round."""
    async with make_runtime() as runtime:
        context = await committed(runtime, Summarizer(delay=1.0))
        plain = UnboundedChatCompletionContext()
        await plain.load_state(through_json(await context.save_state()))
        assert await plain.get_messages() == await context.inner.get_messages()
        back = LookaheadChatCompletionContext(Summarizer(), options=options(), runtime=runtime)
        await back.load_state(through_json(await plain.save_state()))
        assert await back.get_messages() == await plain.get_messages()


@virtual
async def test_an_edited_history_is_not_summarised_by_an_old_state() -> None:
    """By digest: changed, deleted or reordered messages in the saved state are sent raw."""
    async with make_runtime() as runtime:
        context = await committed(runtime, Summarizer(delay=1.0))
        state = through_json(await context.save_state())
    for edit in (
        lambda m: m[0].update(content="<70> something else"),
        lambda m: m.pop(0),
        lambda m: m.reverse(),
        lambda m: m.insert(0, {"type": "SystemMessage", "content": "new"}),
    ):
        edited = through_json(state)
        edit(edited["messages"])
        async with make_runtime() as runtime:
            context = LookaheadChatCompletionContext(Summarizer(), options=options(trigger=50), runtime=runtime)
            await context.load_state(edited)
            view = await context.get_messages()
            assert not summaries(view) and view == await context.inner.get_messages()


@pytest.mark.parametrize(
    "ours",
    [
        7,
        [],
        {},
        {"version": 99, "committed": []},
        {"version": 1},
        {"version": 1, "committed": [7]},
        {"version": 1, "committed": ["garbage"]},
    ],
)
def test_a_damaged_entry_is_an_event(ours: Any) -> None:
    """The messages are loaded as they are."""

    @virtual
    async def main() -> None:
        events = Events()
        async with make_runtime(on_event=events) as runtime:
            context = LookaheadChatCompletionContext(Summarizer(), options=options(trigger=50), runtime=runtime)
            plain = UnboundedChatCompletionContext(chat(2))
            await context.load_state({**through_json(await plain.save_state()), "smoothctx": ours})
            assert await context.get_messages() == await plain.get_messages()
            assert len(events.of("error")) == 1

    main()


@virtual
async def test_a_state_that_cannot_be_loaded_changes_nothing() -> None:
    """The inner context's own error, and the context goes on with what it had."""
    async with make_runtime() as runtime:
        context = await committed(runtime, Summarizer(delay=1.0))
        view = await context.get_messages()
        with pytest.raises(ValidationError):
            await context.load_state({"messages": [{"type": "Unknown"}]})
        assert await context.get_messages() == view


@virtual
async def test_an_anonymous_client_saves_no_summary() -> None:
    """A client without a config has no name: what it wrote stays in this process."""
    async with make_runtime() as runtime:
        client = Client(lambda _: "The summary.")
        context = await committed(runtime, client)
        assert set(await context.save_state()) == {"messages"}


@virtual
async def test_loading_a_state_drops_what_was_under_way() -> None:
    """A lookahead for the history that was there before is cancelled, and never committed."""
    async with make_runtime() as runtime:
        client = Summarizer("hold")
        context = LookaheadChatCompletionContext(client, options=options(), runtime=runtime)
        for message in chat(3):
            await context.add_message(message)
        await client.started.wait()
        other = UnboundedChatCompletionContext(chat(1, first=50))
        await context.load_state(await other.save_state())
        client.release.set()
        await settle(1)
        assert await context.get_messages() == await other.get_messages()
        assert client.cancelled == 1 and runtime.counters.committed == 0


def test_component_round_trip() -> None:
    """Dumped to JSON and loaded: the same options, client and inner context."""
    made = LookaheadChatCompletionContext(
        Summarizer(model="tiny", text="S."),
        options=options(keep=7, prompt="Be brief."),
        inner=BufferedChatCompletionContext(buffer_size=9),
        tenant="t",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = made.dump_component().model_dump_json()
    component = ComponentModel.model_validate_json(text)
    assert component.provider == "smoothctx_autogen.LookaheadChatCompletionContext"
    assert component.component_type == "chat_completion_context"
    loaded = ChatCompletionContext.load_component(component)
    assert isinstance(loaded, LookaheadChatCompletionContext)
    assert loaded.dump_component().model_dump_json() == text
    assert isinstance(loaded.inner, BufferedChatCompletionContext)
    again = LookaheadChatCompletionContext.load_component(json.loads(text))
    assert again.dump_component().model_dump_json() == text


def test_options_read_what_they_wrote() -> None:
    """Every field survives JSON; a list of triggers too; unknown names are refused."""
    given = options(trigger=9, discard="finish", layout="aligned", window=5000).model_copy(
        update={"trigger": [("tokens", 50), ("messages", 9)]}
    )
    assert LookaheadOptions.model_validate_json(given.model_dump_json()) == given
    policy = given.policy(client_model(Client()))
    assert policy.triggers == (("tokens", 50), ("messages", 9))
    with pytest.raises(ValidationError, match="keeps"):
        LookaheadOptions(keeps=("messages", 2))  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="land_at"):
        LookaheadOptions(context_window=100, land_at=("fraction", 0.9)).policy(client_model(Client()))


RULES = [
    "hard_limit",
    KStepOff(3),
    BreakEven(),
    BreakEven(Prices(3.0, 0.3, 15.0), turns=40, cached_share=0.5),
    BreakEven(Speed(900.0, 20.0, attention_s=1e-6), output_tokens=200),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_commit_rules_and_idle_survive_a_component(rule: Any) -> None:
    """Dumped to JSON and loaded: the same rule and seconds, in the policy as well."""
    given = options(commit=rule, idle=2.5)
    text = LookaheadChatCompletionContext(Summarizer(), options=given).dump_component().model_dump_json()
    loaded = LookaheadChatCompletionContext.load_component(json.loads(text))
    assert loaded.dump_component().model_dump_json() == text
    assert LookaheadOptions.model_validate_json(given.model_dump_json()) == given
    policy = LookaheadOptions.model_validate(json.loads(text)["config"]["options"]).policy(client_model(Client()))
    assert policy.commit == rule and policy.idle == 2.5


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (5, "expected a word, KStepOff"),
        ({"name": "Later"}, "name='Later': expected one of KStepOff, BreakEven"),
        ({"name": "KStepOff", "k": 0}, "KStepOff\\(k\\)=0"),
        ({"name": "KStepOff", "turns": 2}, "turns"),
        ({"name": "Speed", "prefill_tokens_per_s": 1, "decode_tokens_per_s": 1}, "commit=Speed"),
    ],
)
def test_wrong_rules_are_named(rule: Any, said: str) -> None:
    """As configuration errors, in a mapping of options."""
    with pytest.raises(ConfigurationError, match=said):
        LookaheadChatCompletionContext(Summarizer(), options={"context_window": 4000, "commit": rule})


def test_a_loaded_context_works_on_the_default_runtime() -> None:
    """It brings no runtime: one for the process, on its own thread, takes it; its client is its own and lives there."""

    @virtual
    async def main() -> None:
        config = LookaheadChatCompletionContext(Summarizer(), options=options()).dump_component()
        Summarizer.made.clear()
        context = LookaheadChatCompletionContext.load_component(config)
        for message in chat(3):
            await context.add_message(message)
        handle = context.session.lookahead
        assert handle is not None
        handle.wait_sync(60)
        assert summaries(await context.get_messages())
        (client,) = Summarizer.made
        assert client.calls == 1 and client.loops[0] is not asyncio.get_running_loop()

    try:
        main()
        assert default_runtime().counters.committed == 1
    finally:
        close_default_runtime()


@virtual
async def test_a_loaded_context_works_on_the_runtime_that_was_set() -> None:
    """One of the application's, in place of ours; contexts that are open keep theirs."""
    config = LookaheadChatCompletionContext(Summarizer(), options=options()).dump_component()
    async with make_runtime() as runtime:
        set_default_runtime(runtime)
        try:
            context = LookaheadChatCompletionContext.load_component(config)
            for message in chat(3):
                await context.add_message(message)
        finally:
            set_default_runtime(None)
        await settle(1)
        assert summaries(await context.get_messages()) and runtime.counters.committed == 1
    with pytest.raises(ConfigurationError, match="runtime=7"):
        set_default_runtime(7)  # type: ignore[arg-type]
