"""Pure parts of the stock adapter: folding an update, reading it as a rewrite, and the sizes that are read off."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Overwrite

from graphs import CODEC
from smoothctx.errors import ConfigurationError, TransformError
from smoothctx.view import Unit, align, project
from smoothctx_langgraph.stock_fold import folded, rewritten, snapshot
from smoothctx_langgraph.stock_limits import limits

pytestmark = pytest.mark.langgraph


def history(n: int) -> list[BaseMessage]:
    """Questions and answers."""
    kinds = (HumanMessage, AIMessage)
    return [kinds[k % 2](f"text {k}", id=f"m{k}") for k in range(n)]


def after(update: Any, messages: list[BaseMessage], run: list[BaseMessage] | None = None) -> list[Any]:
    """What stands for ``run`` after this update."""
    taken = snapshot(messages)
    return rewritten(folded(update, taken), taken, messages if run is None else run, CODEC)


def test_the_hook_gets_copies_with_ids() -> None:
    """Editing them in place changes nothing of the history; each has an id, as in a state."""
    messages = [HumanMessage([{"type": "text", "text": "a"}]), AIMessage("b", id="m1")]
    taken = snapshot(messages)
    taken.copies[0].content[0]["text"] = "changed"  # type: ignore[index,call-overload]
    taken.copies[1].additional_kwargs["x"] = 1
    assert messages[0].content == [{"type": "text", "text": "a"}] and messages[0].id is None
    assert messages[1].additional_kwargs == {}
    assert all(m.id for m in taken.copies) and taken.copies[1].id == "m1"


def test_what_it_leaves_alone_is_passed_on_as_the_same_objects() -> None:
    """Also where it returned copies of its own, or wrote the same text again."""
    messages = history(6)
    summary = HumanMessage("summary")
    update = [RemoveMessage(id=REMOVE_ALL_MESSAGES), summary, *(m.model_copy() for m in messages[4:])]
    result = after({"messages": update}, messages)
    assert result[0].content == "summary" and result[1] is messages[4] and result[2] is messages[5]
    assert all(a is b for a, b in zip(after({"messages": [messages[2].model_copy()]}, messages), messages, strict=True))
    assert all(a is b for a, b in zip(after({"messages": None}, messages), messages, strict=True))


def test_edits_by_id_removals_and_overwrites_are_read() -> None:
    """Each way in which a state's messages can be updated."""
    messages = history(4)
    edited = AIMessage("shorter", id="m1")
    result = after({"messages": [edited, RemoveMessage(id="m2")]}, messages)
    assert [m.content for m in result] == ["text 0", "shorter", "text 3"] and result[2] is messages[3]
    assert after({"messages": Overwrite(messages[3:])}, messages) == [messages[3]]
    in_place = snapshot(messages)
    in_place.copies[0].content = "edited in place"
    assert rewritten(list(in_place.copies), in_place, messages, CODEC)[0].content == "edited in place"
    assert messages[0].content == "text 0"


def test_what_stays_in_any_case_is_left_out() -> None:
    """A message that the run lacks stays where it is: whatever the hook did to it, it is not part of the rewrite."""
    messages = history(6)
    run = [m for m in messages if m.id != "m4"]
    kept = [RemoveMessage(id=REMOVE_ALL_MESSAGES), HumanMessage("summary"), *messages[3:]]
    assert [m.content for m in after({"messages": kept}, messages, run)] == ["summary", "text 3", "text 5"]
    edited = [RemoveMessage(id="m0"), HumanMessage("changed", id="m4")]
    assert [m.content for m in after({"messages": edited}, messages, run)] == [f"text {k}" for k in (1, 2, 3, 5)]


@pytest.mark.parametrize("update", ["text", {"messages": [], "jump_to": "end"}, {"todos": [1]}, 3])
def test_more_than_messages_is_refused(update: Any) -> None:
    """A jump, another channel, something else entirely."""
    with pytest.raises(TransformError):
        folded(update, snapshot(history(2)))


@given(
    st.integers(1, 8),
    st.lists(st.one_of(st.integers(0, 7), st.just("new")), max_size=10),
    st.sets(st.integers(0, 7), max_size=2),
)
def test_any_result_can_be_written_as_edits(n: int, shape: list[Any], kept: set[int]) -> None:
    """Whatever a hook leaves, in any order, with anything new anywhere: the edits give it, what stays in its place."""
    messages = history(n)
    seen: set[int] = set()
    result: list[BaseMessage] = []
    for k in shape:
        if k == "new":
            result.append(HumanMessage(f"new {len(result)}"))
        elif k < n and k not in seen:
            seen.add(k)
            result.append(messages[k].model_copy())
    run = [m for k, m in enumerate(messages) if k not in kept]
    found = after({"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), *result]}, messages, run)
    wanted = [m.content for m in result if m.content not in [f"text {k}" for k in kept]]
    assert [m.content for m in found] == wanted
    if not run:
        return
    units = [Unit(k, k + 1, (m,)) for k, m in enumerate(messages)]
    edits = align(units, frozenset(kept & set(range(n))), found, lambda ms: len(ms))
    view = [m.content for m in project(messages, edits)]
    stays = [m.content for k, m in enumerate(messages) if k in kept]
    assert [t for t in view if t not in stays] == wanted
    assert [t for t in view if t in stays] == stays


def test_a_result_keeps_its_call() -> None:
    """An edited tool result goes under the id of its call."""
    messages: list[BaseMessage] = [
        HumanMessage("q", id="m0"),
        AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "c"}], id="m1"),
        ToolMessage("long " * 100, tool_call_id="c", id="m2"),
    ]
    result = after({"messages": [ToolMessage("[cleared]", tool_call_id="c", id="m2")]}, messages)
    assert result[:2] == messages[:2] and result[2].content == "[cleared]" and result[2].tool_call_id == "c"


class Sized(AgentMiddleware):
    """A middleware with sizes in LangChain's form."""

    def __init__(self, trigger: Any, keep: Any = ("messages", 4), window: int | None = None) -> None:
        super().__init__()
        self.trigger, self.keep = trigger, keep
        self.model = type("Model", (), {"profile": {"max_input_tokens": window} if window else None})()


def read_off(middleware: Any, **given: Any) -> tuple[Any, Any, Any]:
    """Trigger, hard limit and landing."""
    options = dict.fromkeys(("trigger", "hard_limit", "land_at", "context_window")) | given
    found = limits(middleware, **options)
    return found["trigger"], found["hard_limit"], found["land_at"]


@pytest.mark.parametrize(
    ("middleware", "expected"),
    [
        (Sized(("messages", 20)), ([("messages", 20)], ("messages", 40), ("messages", 10))),
        (Sized({"messages": 20}), ([("messages", 20)], ("messages", 40), ("messages", 10))),
        (Sized(("tokens", 4000)), ([("tokens", 3000)], ("tokens", 4000), ("tokens", 1500))),
        (Sized(("tokens", 4000), window=8000), ([("tokens", 4000)], ("tokens", 6000), ("tokens", 2000))),
        (Sized(("fraction", 0.5), window=8000), ([("tokens", 4000)], ("tokens", 6000), ("tokens", 2000))),
        (
            Sized([("messages", 20), ("tokens", 4000)]),
            ([("messages", 20), ("tokens", 3000)], ("tokens", 4000), ("tokens", 1500)),
        ),
        (Sized(("messages", 6), keep=("messages", 4)), ([("messages", 6)], ("messages", 12), ("messages", 5))),
    ],
)
def test_sizes_are_read_off(middleware: Any, expected: Any) -> None:
    """Work starts at the trigger where there is room above it, else at three quarters of it."""
    assert read_off(middleware) == expected


def test_sizes_that_are_given_stand() -> None:
    """Nothing is read off a middleware where everything is said."""
    given_all = {"trigger": ("messages", 6), "hard_limit": ("messages", 9), "land_at": ("messages", 3)}
    assert read_off(Sized({"messages": 5, "tokens": 5}), **given_all) == tuple(given_all.values())


@pytest.mark.parametrize(
    ("middleware", "word"),
    [
        (Sized(None), "trigger= is needed"),
        (Sized({"messages": 5, "tokens": 5}), "cannot be read as one size"),
        (Sized(("fraction", 0.5)), "context_window= is needed"),
        (Sized(("messages", 5), keep=("messages", 5)), "keep="),
        (Sized(("days", 5)), "cannot be read as one size"),
    ],
)
def test_sizes_that_cannot_be_read_off_are_asked_for(middleware: Any, word: str) -> None:
    """In the caller's words."""
    with pytest.raises(ConfigurationError, match=word):
        read_off(middleware)
