"""Offload: stubs in the context, content in the store, and the way back."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from smoothctx.errors import ConfigurationError, StoreError, TransformError
from smoothctx.stores import MemoryStore
from smoothctx.transforms import Locality, Offload, default_validators, pin, validate
from smoothctx.transforms.offload import MAX_PAGE, TOOL_NAME, is_stub, offload_message
from transform_fakes import CODEC, assistant, chat, request, tool, user

BIG = "\n".join(f"row {k}: some value" for k in range(1000))


def history(text: Any, **fields: Any) -> list[dict[str, Any]]:
    return [user("h"), assistant(None, "a"), tool("a", text, **fields), assistant(None, "b"), tool("b", "small")]


def id_of(message: dict[str, Any]) -> str:
    found = re.search(r'id="([0-9a-f]+)"', CODEC.text(message))
    assert found is not None
    return found[1]


async def whole(offload: Offload, content_id: str, **where: Any) -> str:
    """All pages, put together."""
    text, offset = "", 0
    while True:
        page = await offload.retrieve(content_id, offset, **where)
        head, _, body = page.partition("\n")
        text += body
        more = re.search(r"read on with offset=(\d+)", head)
        if more is None:
            return text
        offset = int(more[1])


async def test_big_results_become_stubs_and_come_back() -> None:
    """The stub keeps role, call id and a preview; everything else is the same object; the content is all there."""
    store, messages = MemoryStore(), history(BIG)
    offload = Offload()
    result = await offload.apply(request(messages, store=store))
    stub = result.messages[2]
    assert [m is n for m, n in zip(messages, result.messages, strict=True)] == [True, True, False, True, True]
    assert (stub["role"], stub["tool_call_id"]) == ("tool", "a")
    assert stub["content"].startswith("row 0: some value") and f"{len(BIG)} characters" in stub["content"]
    assert CODEC.estimate(stub) < 150
    assert await whole(offload, id_of(stub)) == BIG
    assert messages == history(BIG)
    validate(request(messages), result, default_validators())


async def test_keep_recent_results_stay() -> None:
    """The latest observations stay whole, whatever their size."""
    messages = [m for k in range(4) for m in (assistant(None, f"c{k}"), tool(f"c{k}", BIG + str(k)))]
    for keep in (0, 1, 3, 9):
        result = await Offload(keep_recent=keep).apply(request(messages, store=MemoryStore()))
        changed = [m is not n for m, n in zip(messages, result.messages, strict=True)][1::2]
        assert changed == [k < 4 - keep for k in range(4)]


async def test_content_blocks_are_offloaded_b111() -> None:
    """B111: text parts are joined; media parts stay in place."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = history([{"type": "text", "text": BIG}, image, {"type": "text", "text": "tail"}])
    offload = Offload()
    result = await offload.apply(request(messages, store=MemoryStore()))
    content = result.messages[2]["content"]
    assert (
        [p["type"] for p in content] == ["image_url", "text"]
        and content[0] is image
        and is_stub(CODEC.text(result.messages[2]))
    )
    assert await whole(offload, id_of(result.messages[2])) == f"{BIG}\n[image]\ntail"


async def test_every_other_field_is_kept_b166() -> None:
    """B166: control fields of a result survive."""
    messages = history(BIG, name="run", status="success", goto="next", update={"a": 1})
    stub = (await Offload().apply(request(messages, store=MemoryStore()))).messages[2]
    assert {k: v for k, v in stub.items() if k != "content"} == {k: v for k, v in messages[2].items() if k != "content"}


async def test_never_grows_b113() -> None:
    """B113: a stub that is not smaller is not made; a made one saves nearly everything."""
    messages = history("x" * 200)
    result = await Offload(min_tokens=1, preview_tokens=500).apply(request(messages, store=MemoryStore()))
    assert list(result.messages) == messages
    result = await Offload().apply(request(history("x" * 10_000), store=MemoryStore()))
    assert CODEC.estimate(result.messages[2]) < 0.1 * CODEC.estimate(history("x" * 10_000)[2])


@given(st.text(max_size=600), st.integers(1, 200), st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_property_a_stub_is_smaller_and_content_is_exact(text: str, max_tokens: int, preview: int) -> None:
    """Any text: the bytes to store are the text, and the stub costs less."""
    made = offload_message(tool("c", text), CODEC, max_tokens=max_tokens, preview_tokens=preview)
    if made is not None:
        stub, content_id, content = made
        assert content.decode("utf-8", "surrogatepass") == text
        assert re.fullmatch("[0-9a-f]{24}", content_id)
        assert CODEC.estimate(stub) < CODEC.estimate(tool("c", text))


async def test_recovery_is_exempt_and_paged_b167() -> None:
    """B167: a page read back is never offloaded again, nor is a stub; pages are by characters, lines of any length."""
    store, offload = MemoryStore(), Offload(keep_recent=0, min_tokens=100)
    text = "\n".join("z" * 20_000 for _ in range(5))
    first = await offload.apply(request(history(text), store=store))
    content_id = id_of(first.messages[2])
    page = await offload.retrieve(content_id, limit=10**9)
    assert len(page) <= MAX_PAGE + 200 and f"characters 0 to {MAX_PAGE} of {len(text)}" in page
    messages = [*first.messages, assistant(None, "r", name=TOOL_NAME), tool("r", page)]
    again = await offload.apply(request(messages, store=store))
    assert list(again.messages) == messages
    assert offload_message(tool("x", page), CODEC, max_tokens=10, preview_tokens=5) is None
    assert offload_message(first.messages[2], CODEC, max_tokens=10, preview_tokens=5) is None
    assert await whole(offload, content_id) == text


async def test_fake_marks_do_not_hide_a_flood() -> None:
    """Content that begins like a page but is far longer is offloaded all the same."""
    fake = f"[{TOOL_NAME} id={'0' * 24}: characters 0 to 1 of 2]\n" + BIG * 3
    assert offload_message(tool("c", fake), CODEC, max_tokens=100, preview_tokens=10) is not None


async def test_redaction_comes_before_everything_b168() -> None:
    """B168: neither the store nor the preview holds what the hook removed; its results are private."""
    store = MemoryStore()
    offload = Offload(redact=lambda t: t.replace("sk-12345", "[key]"))
    result = await offload.apply(request(history("sk-12345 " + BIG), store=store))
    assert "sk-12345" not in result.messages[2]["content"] and "[key]" in result.messages[2]["content"]
    assert "sk-12345" not in await whole(offload, id_of(result.messages[2]))
    assert offload.fingerprint is None and Offload().fingerprint is not None


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("../../etc/passwd",), "error: '../../etc/passwd' is not a content id; expected 24 hexadecimal characters"),
        ((7,), "error: '7' is not a content id; expected 24 hexadecimal characters"),
        (("0" * 24,), "error: no offloaded content under id " + "0" * 24),
        (("0" * 24 + "\n",), "is not a content id"),
        (("0" * 24, -1), "error: offset=-1: expected a number of characters of at least 0"),
        (("0" * 24, "x"), "error: offset='x': expected a number of characters of at least 0"),
        (("0" * 24, 0, 0), f"error: limit=0: expected a number of characters from 1 to {MAX_PAGE}"),
    ],
)
async def test_errors_come_back_as_text_b169(arguments: tuple[Any, ...], answer: str) -> None:
    """B169: a model's wrong arguments never crash the run; paths never come from content."""
    assert answer in await Offload(store=MemoryStore()).retrieve(*arguments)


async def test_retrieve_without_content_or_store() -> None:
    """Nothing offloaded yet, an offset behind the end, and a store that fails."""

    class Broken(MemoryStore):
        async def get(self, tenant: str, key: str) -> bytes | None:
            raise StoreError("gone")

    assert await Offload().retrieve("0" * 24) == "error: nothing has been offloaded yet"
    assert await Offload(store=Broken()).retrieve("0" * 24) == "error: the store could not be read: StoreError"
    offload = Offload()
    result = await offload.apply(request(history(BIG), store=MemoryStore()))
    content_id = id_of(result.messages[2])
    assert await offload.retrieve(content_id, 10**6) == f"error: offset={10**6}: the content has {len(BIG)} characters"
    assert (await offload.retrieve(content_id, "6", "3")).endswith("]\n so")  # type: ignore[arg-type]


async def test_promise_12_tenants_do_not_see_each_others_content() -> None:
    """The same content has the same id, and is still only there for who stored it."""
    store, offload = MemoryStore(), Offload()
    result = await offload.apply(request(history(BIG), store=store, tenant="a"))
    content_id = id_of(result.messages[2])
    assert await whole(offload, content_id, tenant="a") == BIG
    assert await offload.retrieve(content_id, tenant="b") == f"error: no offloaded content under id {content_id}"


async def test_a_failing_store_replaces_nothing() -> None:
    """No stub without its content."""

    class Full(MemoryStore):
        async def put(self, tenant: str, key: str, value: bytes, *, ttl: float | None = None) -> None:
            raise StoreError("full")

    with pytest.raises(StoreError, match="full"):
        await Offload().apply(request(history(BIG), store=Full()))
    with pytest.raises(TransformError, match="offload: there is no store"):
        await Offload().apply(request(history(BIG)))


async def test_pinned_texts_stay_in_the_stub() -> None:
    """A text that the user pinned stays readable, and the validators agree."""
    messages = history(BIG + pin("note well") + BIG + " told " + BIG)
    made = request(messages, store=MemoryStore(), pins=("told",))
    result = await Offload().apply(made)
    assert pin("note well") in result.messages[2]["content"] and "told" in result.messages[2]["content"]
    validate(made, result, default_validators())


async def test_nothing_to_do_passes_everything_on() -> None:
    """Same objects, same order."""
    messages = chat(3)
    result = await Offload().apply(request(messages, store=MemoryStore()))
    assert all(a is b for a, b in zip(messages, result.messages, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": 0}, "min_tokens=0: expected a whole number of at least 1"),
        ({"keep_recent": -1}, "keep_recent=-1: expected a whole number of at least 0"),
        ({"preview_tokens": 1.5}, r"preview_tokens=1\.5: expected a whole number of at least 0"),
        ({"store": {}}, r"store=\{\}: expected a Store"),
        ({"redact": "x"}, "redact='x': expected a callable"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    """Configuration mistakes raise at construction."""
    with pytest.raises(ConfigurationError, match=message):
        Offload(**options)


def test_the_tool_is_declared_as_a_function() -> None:
    """What an agent is given: a strict JSON schema with the id required."""
    function = Offload.tool_schema["function"]
    assert function["name"] == "retrieve" and function["parameters"]["required"] == ["id"]
    assert set(function["parameters"]["properties"]) == {"id", "offset", "limit"}
    assert (Offload.name, Offload.locality) == ("offload", Locality.SEGMENT)
