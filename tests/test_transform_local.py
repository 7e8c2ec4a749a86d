"""KeepRecent, Isolate and Chain."""

from __future__ import annotations

from typing import Any

import pytest

from smoothctx.errors import ConfigurationError, TransformError
from smoothctx.stores import MemoryStore
from smoothctx.transforms import (
    Chain,
    Isolate,
    KeepRecent,
    Locality,
    Offload,
    Rewrite,
    Summarize,
    Transform,
    default_validators,
    named_transforms,
    pin,
    validate,
)
from transform_fakes import CODEC, FakeEngine, FakeModel, assistant, chat, content, request, tool, user, valid


async def test_keep_recent_drops_what_it_is_given() -> None:
    """The planner chose the run; all of it goes."""
    result = await KeepRecent().apply(request(chat(5)))
    assert list(result.messages) == [] and result.text is None
    validate(request(chat(5)), result, default_validators())


async def test_keep_recent_keeps_pinned_segments_whole() -> None:
    """A pinned text stays with its whole segment, same objects; a pin of the session counts too."""
    group = [assistant(None, "a", "b"), tool("a", pin("x")), tool("b", "y")]
    told = user("remember this number")
    messages = [*chat(2), *group, *chat(2), told, *chat(1)]
    result = await KeepRecent(("messages", 4)).apply(request(messages, pins=("this number",)))
    assert [id(m) for m in result.messages] == [id(m) for m in [*group, told]]
    validate(request(messages, pins=("this number",)), result, default_validators())


async def test_isolate_opens_a_valid_context() -> None:
    """System, the selected messages, the instruction last; pairs are whole; thinking stays behind."""
    thinking = {"role": "assistant", "content": "a", "reasoning_content": "secret"}
    messages = [
        assistant(None, "a"),
        tool("a", "r"),
        CODEC.system("parent"),
        thinking,
        assistant(None, "open"),
        tool("gone", "o"),
    ]
    made = request(messages)
    result = await Isolate(system="You test.", instruction="Test it.").apply(made)
    opening = list(result.messages)
    valid(opening)
    assert opening[0] == CODEC.system("You test.") and opening[-1] == user("Test it.")
    assert opening[2] is messages[0] and opening[3] is messages[1]
    assert opening[4] == assistant("a") and len(opening) == 6
    assert result.opening
    validate(made, result, default_validators())


async def test_isolate_selects() -> None:
    """select= gets the run and chooses; half a pair that it chose is left out."""
    messages = [user("1"), assistant(None, "a"), tool("a", "r"), user("2")]
    result = await Isolate(instruction="go", select=lambda ms: ms[2:]).apply(request(messages))
    assert list(result.messages) == [messages[3], user("go")]
    assert result.messages[0] is messages[3]
    with pytest.raises(TransformError, match="isolate: select returned str, expected a list of messages"):
        await Isolate(instruction="go", select=lambda ms: "x").apply(request(messages))
    with pytest.raises(TransformError, match="isolate: select failed: KeyError: 'no'"):
        await Isolate(instruction="go", select=lambda ms: {}["no"]).apply(request(messages))


def test_isolate_fingerprint() -> None:
    """Options count; a select hook cannot be known."""
    assert Isolate(instruction="a").fingerprint != Isolate(instruction="b").fingerprint
    assert Isolate(instruction="a", select=list).fingerprint is None


async def test_chain_applies_in_order_and_adds_up() -> None:
    """Offload, then summarise what is left: the model reads the stub, and its id is carried as a fact."""
    engine = FakeEngine()
    chain = Chain(Offload(keep_recent=0), Summarize(engine, keep=("messages", 6), max_tokens=300))
    messages = [user("h"), assistant(None, "a"), tool("a", "data " * 4000), assistant("read")]
    result = await chain.apply(request(messages, store=MemoryStore()))
    stub = engine.requests[0][2]["content"]
    assert len(stub) < 600 and "retrieve(id=" in stub
    assert result.usage.calls == 1 and result.text == "The summary."
    assert stub.split('id="')[1][:24] in content(result)
    assert (chain.name, chain.locality, chain.keep, chain.source) == ("chain", Locality.PREFIX, ("messages", 6), "view")
    assert chain.max_tokens == 300 and isinstance(chain, Transform)
    validate(request(messages), result, default_validators())


async def test_chain_stops_when_nothing_is_left() -> None:
    """A member that drops everything ends it."""
    model = FakeModel()
    result = await Chain(KeepRecent(), Summarize(model)).apply(request(chat(2)))
    assert list(result.messages) == [] and not model.requests


@pytest.mark.parametrize("text", ["r", "data " * 4000])
async def test_chain_shows_a_model_what_stays_raw_too(text: str) -> None:
    """The task that stays word for word is still read in its place, beside what the first member rewrote."""
    task, loop = user("task"), [assistant(None, "a"), tool("a", text)]
    model = FakeModel()
    chain = Chain(Offload(keep_recent=0), Summarize(model))
    await chain.apply(request(loop, shown=[task, *loop], store=MemoryStore()))
    sent = model.requests[0]
    assert sent[:2] == [task, loop[0]] and len(sent) == 4 and len(sent[2]["content"]) < 600


def test_chain_fingerprint_and_locality() -> None:
    """Order and members count; one private member makes it private; the widest locality wins."""
    a, b = Offload(), KeepRecent()
    assert Chain(a, b).fingerprint != Chain(b, a).fingerprint != None  # noqa: E711
    assert Chain(a, Summarize(FakeModel())).fingerprint is None
    assert Chain(a).locality is Locality.SEGMENT and Chain(b, a).locality is Locality.PREFIX


class Mine:
    """A transform of a user's own: it knows nothing of keep and source."""

    name = "mine"
    locality = Locality.FUTURE
    fingerprint = "f"

    async def apply(self, request: Any) -> Rewrite:
        return Rewrite(messages=list(request.messages)[:1])


async def test_chain_takes_transforms_of_ones_own() -> None:
    """The protocol is all it needs."""
    chain = Chain(Mine())
    assert chain.keep == ("messages", 20) and chain.source == "view" and chain.locality is Locality.FUTURE
    assert len((await chain.apply(request(chat(2)))).messages) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain(), r"Chain\(\): expected at least one transform"),
        (lambda: Chain("summarize"), r"Chain\(transforms\[0\]='summarize'\): expected a transform"),
        (lambda: Chain(Offload(), Isolate(instruction="x")), r"Chain\(transforms\[1\]=Isolate\(\.\.\.\)\): it opens"),
        (lambda: KeepRecent(("messages", -1)), r"keep=\('messages', -1\): the size must be a number >= 0"),
        (lambda: KeepRecent(5), r'keep=5: expected \("fraction", n\)'),
        (lambda: Isolate(instruction=""), "instruction='': expected a text that is not empty"),
        (lambda: Isolate(instruction="x", system=3), "system=3: expected a text that is not empty, or None"),
        (lambda: Isolate(instruction="x", select=3), "select=3: expected a callable"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(make: Any, message: str) -> None:
    """Configuration mistakes raise at construction."""
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_transforms_known_by_name() -> None:
    """What schedule_transform accepts as a name."""
    assert set(named_transforms()) == {
        "summarize",
        "parallel_summarize",
        "offload",
        "keep_recent",
        "isolate",
        "speculate",
    }
