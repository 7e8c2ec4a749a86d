"""One tool message may answer several calls; and a result may come after its call was rewritten away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from helpers import A, FakeSummarizer, FlakyStore, H, Message, S, T, chat, make_policy, make_runtime, problems, virtual
from smoothctx import Offload, OpenAIMessages
from smoothctx.codec import SeveralResults, openai_messages, results_of, with_results
from smoothctx.history import History
from smoothctx.segments import segment
from smoothctx.transforms.base import TransformRequest
from smoothctx.transforms.inputs import call_names, transcript, units


class Grouped(OpenAIMessages):
    """Dicts in which one tool message holds the results of several calls."""

    name = "grouped"

    def text(self, message: Any) -> str:
        """All results, one a line."""
        return "\n".join(map(super().text, message["results"])) if "results" in message else super().text(message)

    def result_id(self, message: Any) -> str:
        """The first one's id."""
        return super().result_id(message["results"][0] if "results" in message else message)

    def visible(self, message: Any) -> bytes:
        """All results."""
        return b"|".join(map(super().visible, message.get("results", (message,))))

    def estimate(self, message: Any) -> int:
        """All results."""
        return sum(map(super().estimate, message.get("results", (message,))))

    def with_text(self, message: Any, text: str) -> Any:
        """The text in the only result."""
        if "results" not in message:
            return super().with_text(message, text)
        (only,) = message["results"]
        return self.joined(message, [super().with_text(only, text)])

    def joined(self, message: Any, parts: Sequence[Any]) -> Any:
        """These results."""
        return {**message, "results": list(parts)}

    def to_openai(self, message: Any) -> dict[str, Any]:
        """The first result."""
        return super().to_openai(message["results"][0] if "results" in message else message)

    def results(self, message: Any) -> Sequence[Any]:
        """Each result as a message."""
        return message.get("results") or (message,)


CODEC = Grouped()


def R(*results: Message) -> Message:
    """A tool message with several results."""
    return {"role": "tool", "results": list(results)}


def flat(messages: Sequence[Message]) -> list[Message]:
    """As a provider gets them."""
    return [m for message in messages for m in openai_messages(CODEC, message)]


def test_a_codec_says_whether_a_message_holds_several_results() -> None:
    """Codecs without the method, and messages with one result, are as they were."""
    single, several = T("1"), R(T("1"), T("2"))
    assert isinstance(CODEC, SeveralResults) and not isinstance(OpenAIMessages(), SeveralResults)
    assert list(results_of(OpenAIMessages(), single)) == [single]
    assert results_of(CODEC, single)[0] is single
    assert results_of(CODEC, several) == several["results"]
    assert [m["tool_call_id"] for m in openai_messages(CODEC, several)] == ["1", "2"]
    assert with_results(CODEC, several, [T("1", "x"), T("2")]) == R(T("1", "x"), T("2"))
    assert (
        with_results(CODEC, single, [T("1", "x")])
        == T("1", "x")
        == with_results(OpenAIMessages(), single, [T("1", "x")])
    )
    assert openai_messages(CODEC, H("hi")) == [H("hi")]


def test_one_message_answers_all_its_calls() -> None:
    """No call stays open, results of one message may belong to several assistant messages, the rest are orphans."""
    found = segment(CODEC, [H(), A("a", "1", "2"), R(T("2"), T("1")), A()])
    assert [(s.start, s.end, s.kind, s.unanswered) for s in found.segments] == [
        (0, 1, "user", 0),
        (1, 3, "tools", 0),
        (3, 4, "assistant", 0),
    ]
    assert found.answers == {2: (1, 1)} and not found.outstanding
    across = segment(CODEC, [A("a", "1"), H(), A("b", "2"), R(T("2"), T("1"), T("nobody"))])
    assert [(s.start, s.end, s.unanswered) for s in across.segments] == [(0, 4, 0)]
    assert across.answers == {3: (2, 0, None)}
    part = segment(CODEC, [A("a", "1", "2", "3"), R(T("1"), T("3"))])
    assert [(s.start, s.end, s.unanswered) for s in part.segments] == [(0, 2, 1)]
    orphan = segment(CODEC, [H(), R(T("x"), T("y"))])
    assert [s.kind for s in orphan.segments] == ["user", "orphan"]


def test_requests_of_our_own_have_one_result_per_call() -> None:
    """Each result follows its call, named in the transcript; one without its call becomes a note."""
    messages = [H(), A("a", "1", "2", "3"), R(T("3", "three"), T("1", "one"), T("nobody", "stray"))]
    sent = [m for unit in units(messages, CODEC) for m in unit.messages]
    assert not problems(sent)
    assert [(m["tool_call_id"], m["content"]) for m in sent if m["role"] == "tool"] == [
        ("1", "one"),
        ("2", "[no result]"),
        ("3", "three"),
    ]
    assert any(m["role"] == "user" and "stray" in m["content"] for m in sent)
    assert call_names(messages, CODEC) == {id(messages[2]): ["run", "run", ""]}
    assert transcript(messages, CODEC).splitlines()[-3:] == ["tool run: three", "tool run: one", "tool: stray"]


@virtual
async def test_offload_leaves_every_call_answered() -> None:
    """What stands for a big message with several results still has a result for each call."""
    messages = [A("a", "1", "2"), R(T("1", "x", size=400), T("2", "y", size=400)), A("b", "3"), T("3")]
    store = FlakyStore()
    made = await Offload(store=store, min_tokens=100).apply(
        TransformRequest(messages=messages, before=[], codec=CODEC, store=store)
    )
    assert not problems(flat([H(), *made.messages]))
    assert CODEC.estimate(made.messages[1]) < 200 and store.puts
    again = [A("a", "1", "2"), R(T("1", "x", size=400), T("2", "y", size=400)), A("b", "3"), T("3")]
    again[0]["tool_calls"][1]["function"]["name"] = "retrieve"
    kept = await Offload(store=store, min_tokens=100).apply(
        TransformRequest(messages=again, before=[], codec=CODEC, store=store)
    )
    first, page = kept.messages[1]["results"]
    assert page is again[1]["results"][1], "a page that was read again is not offloaded again"
    assert "[offloaded: " in first["content"], "what stands beside it is"


@virtual
async def test_offload_judges_each_result_on_its_own() -> None:
    """A small result beside a huge one stays word for word, whichever comes first, and so does the latest."""
    big, small, later = T("1", "x", size=400), T("2", "BALANCE=4711"), T("3", "z", size=400)
    for results in ([big, small, later], [small, big, later]):
        messages = [A("a", "1", "2", "3"), R(*results)]
        store = FlakyStore()
        made = await Offload(store=store, min_tokens=100).apply(
            TransformRequest(messages=messages, before=[], codec=CODEC, store=store)
        )
        shown = {r["tool_call_id"]: r for r in made.messages[1]["results"]}
        assert shown["2"] is small and shown["3"] is later
        assert "[offloaded: " in shown["1"]["content"] and len(store.puts) == 1
        assert messages[1] == R(*results), "the framework's message is as it was"


@virtual
async def test_the_cap_on_single_results_judges_each_on_its_own() -> None:
    """Only what is over the cap is offloaded on entry; the same message with small results is not touched."""
    events: list[Any] = []
    async with make_runtime(on_event=events.append) as runtime:
        policy = make_policy(FakeSummarizer(), window=3000, max_message_tokens=100)
        session = runtime.session("s", policy=policy, codec=CODEC)
        small, big, huge = T("1", "BALANCE=4711"), T("2", "log", size=300), T("3", "other", size=400)
        messages = [S(), H("q"), A("calling", "1", "2", "3"), R(big, small, huge)]
        view = await session.commit(messages)
        shown = {r["tool_call_id"]: r for r in view[-1]["results"]}
        assert shown["1"] is small and not problems(flat(view))
        stubs = [shown[k]["content"] for k in ("2", "3")]
        ids = [e.data["id"] for e in events if e.name == "message.offloaded"]
        assert len(ids) == 2 and all(k in stub for k, stub in zip(ids, stubs, strict=True))
        assert big["content"] in await session.retrieve(ids[0])
        assert await session.commit(messages) == view
        many = [A("calling", "4", "5"), R(*[T(k, "medium", size=60) for k in ("4", "5")])]
        view = await session.commit([*messages, *many])
        assert view[-1] is many[-1], "together they are over the cap, each of them is not"


@virtual
async def test_a_conversation_with_grouped_results_stays_valid() -> None:
    """Over many turns, each view is one that providers accept, and grouped results are summarised with their calls."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, window=3000), codec=CODEC)
        messages: list[Message] = [S()]
        for k in range(25):
            ids = [f"{k}-{j}" for j in range(3)]
            messages += [H(f"<{5 * k}> question", size=40), A(f"<{5 * k + 1}> calling", *ids, size=20)]
            messages.append(R(*[T(i, f"<{5 * k + 2}> result", size=30) for i in ids]))
            view = await session.commit(messages)
            assert not problems(flat(view)), problems(flat(view))
            messages.append(A(f"<{5 * k + 3}> answer", size=30))
            session.observe(messages)
            await asyncio.sleep(2)
        assert len(session.receipts) >= 2
        assert all(not problems(asked) for asked in model.inputs)


async def _rewritten(codec: OpenAIMessages, *calls: str, during: Sequence[Message] = ()) -> Any:
    """A session whose summary covers an assistant message with these calls, that got no result before."""
    runtime = make_runtime()
    await runtime.__aenter__()
    session = runtime.session("s", policy=make_policy(FakeSummarizer(), window=3000), codec=codec)
    messages = [*chat(2, size=60), H(), A("<700> calling", *calls), *chat(14, size=60, first=2, system=False)]
    await session.commit(messages)
    messages += during
    await asyncio.sleep(5)
    view = await session.commit(messages)
    assert session.receipts and not any(codec.calls(m) for m in view[:8])
    return runtime, session, messages, view


@virtual
async def test_a_result_that_came_while_its_call_was_being_summarised_is_a_note() -> None:
    """The lookahead read the call as unanswered; its result is behind the run, and no orphan."""
    late = [T("old", "late text"), H("go on")]
    runtime, _, messages, view = await _rewritten(OpenAIMessages(), "old", during=late)
    assert not problems(view), problems(view)
    assert "late text" in view[-2]["content"] and view[-2]["role"] == "user" and view[-1] is messages[-1]
    await runtime.aclose()


@virtual
async def test_a_late_result_does_not_take_the_results_of_a_newer_call_with_it() -> None:
    """Only the result whose call is gone is a note; the newer call keeps its own."""
    runtime, session, messages, _ = await _rewritten(OpenAIMessages(), "old")
    messages += [H("next"), A("calling", "new"), T("old", "late text"), T("new", "fresh")]
    view = await session.commit(messages)
    assert view[-1] is messages[-1] and view[-3] is messages[-3]
    assert view[-2]["role"] == "user" and "late text" in view[-2]["content"]
    await runtime.aclose()


@virtual
async def test_late_results_in_one_message_with_those_of_a_newer_call() -> None:
    """The parts whose call is there stay results, the others become a note, and nothing of the text is lost."""
    runtime, session, messages, _ = await _rewritten(CODEC, "old", "older")
    messages += [H("next"), A("calling", "new"), R(T("old", "late text"), T("new", "fresh"), T("older", "later text"))]
    view = await session.commit(messages)
    assert not problems(flat(view)), problems(flat(view))
    assert view[-2] == T("new", "fresh")
    assert "late text" in view[-1]["content"] and "later text" in view[-1]["content"]
    again = await session.commit([*messages, A("done")])
    assert again[:-1] == view
    await runtime.aclose()


@virtual
async def test_a_big_late_result_is_a_note_about_its_offloaded_content() -> None:
    """The cap on single results holds for late ones too, and leaves no orphan."""
    runtime = make_runtime(store=FlakyStore())
    await runtime.__aenter__()
    session = runtime.session("s", policy=make_policy(FakeSummarizer(), window=3000, max_message_tokens=100))
    messages = [*chat(2, size=60), H(), A("<700> calling", "old"), *chat(14, size=60, first=2, system=False)]
    await session.commit(messages)
    await asyncio.sleep(5)
    await session.commit(messages)
    messages += [T("old", "late text", size=600), H("go on")]
    view = await session.commit(messages)
    assert not problems(view), problems(view)
    assert view[-2]["role"] == "user" and "retrieve" in view[-2]["content"]
    assert CODEC.estimate(view[-2]) < 150
    await runtime.aclose()


RESULT = st.sampled_from(["1", "2", "3", "", "never"]).map(T)
MESSAGE = st.one_of(
    st.just(H()),
    st.lists(st.sampled_from(["1", "2", "3", ""]), max_size=3).map(lambda ids: A("a", *ids)),
    st.lists(RESULT, min_size=1, max_size=4).map(lambda results: R(*results)),
)


@given(st.lists(MESSAGE, max_size=20))
def test_property_grouped_results_pair_like_single_ones(messages: list[Message]) -> None:
    """Grouping results into one message changes neither which calls stay open nor what a summariser is sent; the
    segments cover everything once, and incremental equals whole."""
    whole = segment(CODEC, messages)
    assert [i for s in whole.segments for i in range(s.start, s.end)] == list(range(len(messages)))
    single = segment(OpenAIMessages(), flat(messages))
    assert [c.id for c in whole.outstanding] == [c.id for c in single.outstanding]
    assert sum(s.unanswered for s in whole.segments) == sum(s.unanswered for s in single.segments)
    assert not problems([H(), *[m for u in units(messages, CODEC) for m in u.messages]])
    history = History(CODEC)
    for end in range(len(messages) + 1):
        history.sync(messages[:end])
    assert history.segmenter.segments == whole.segments and history.segmenter.answers == whole.answers
    for index, calls in whole.answers.items():
        start = whole.segments[whole.at(index) or 0].start
        assert all(start <= c < index for c in calls if c is not None)


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from([20, 150, 400]), st.sampled_from(["run", "retrieve"])), min_size=1, max_size=3
        ),
        max_size=5,
    ),
    st.integers(0, 4),
)
def test_property_grouping_changes_nothing_about_what_is_offloaded(
    groups: list[list[tuple[int, str]]], keep_recent: int
) -> None:
    """Each result becomes the same text, or stays the same, whether it comes alone or with others in one message."""
    grouped: list[Message] = []
    for g, group in enumerate(groups):
        ids = [f"{g}-{k}" for k in range(len(group))]
        called = A("calling", *ids)
        for call, (_, name) in zip(called["tool_calls"], group, strict=True):
            call["function"]["name"] = name
        grouped += [called, R(*[T(i, f"<{i}>", size=size) for i, (size, _) in zip(ids, group, strict=True)])]

    async def offloaded(messages: list[Message]) -> list[Message]:
        store = FlakyStore()
        offload = Offload(min_tokens=100, keep_recent=keep_recent, store=store)
        made = await offload.apply(TransformRequest(messages=messages, before=[], codec=CODEC, store=store))
        return flat(made.messages)

    assert asyncio.run(offloaded(grouped)) == asyncio.run(offloaded(flat(grouped)))
