"""Orphaned calls and results: the collected cases, and every neighbour of theirs that a generator finds.

Rows of this class that are not here:

| id | why |
| --- | --- |
| B10, B22 | a nested copy of the output is a matter of the framework's codec |
| B06 | see ``test_cases_observability`` |
| B12 | see ``test_cases_first_message`` |
| B21, B23 | see ``test_cases_ids`` |
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from driving import Turn, check, drive, fast, feed, kinds, rewritten, small_policy, summarised
from helpers import (
    CODEC,
    A,
    FakeSummarizer,
    H,
    Message,
    S,
    T,
    make_runtime,
    same_objects,
    settle,
    summaries,
    valid_request,
    virtual,
)
from smoothctx import KeepRecent, Policy, Summarize
from virtual import run_virtual

BIG = 150  # tokens: a rewrite of one message pays


def h(k: int) -> Message:
    return H(f"<{k}> question", size=BIG)


def a(k: int, *calls: str) -> Message:
    return A(f"<{k}> answer", *calls, size=BIG)


def t(k: int, call: str, size: int = BIG) -> Message:
    return T(call, f"<{k}> result", size=size)


HISTORIES: dict[str, list[Message]] = {
    "B01": [h(0), a(1, "a"), h(2), a(3, "b"), t(4, "a"), t(5, "b"), h(6), a(7), h(8)],
    "B02": [m for k in range(6) for m in (h(10 * k), a(10 * k + 1, f"c{k}"), t(10 * k + 2, f"c{k}"))],
    "B03": [h(0), a(1, "1"), t(2, "1"), a(3), h(4), a(5), h(6)],
    "B04": [h(0), a(1, "1", "2"), t(2, "1", 5000), t(3, "2", 200), a(4), h(5)],
    "B05": [h(0), a(1), h(2), a(3, "1"), t(4, "1"), a(5), h(6)],
    "B07": [h(0), a(1, "1"), t(2, "1"), a(3)],
    "B11": [S(), h(0), a(1, "1"), t(2, "1"), a(3), h(4), a(5, "2"), t(6, "2"), a(7)],
    "B13": [h(0), a(1, "k"), t(2, "k"), a(3), h(4), a(5, "l"), t(6, "l"), a(7), h(8)],
    "B14": [h(0), a(1, "confirm"), *(h(2 + k) for k in range(10)), t(20, "confirm"), a(21), h(22)],
    "B15": [h(0), a(1), h(2), a(3, "1"), t(4, "1"), a(5)],
    "B16": [h(0), *(m for k in range(6) for m in (a(10 * k + 1, f"c{k}"), t(10 * k + 2, f"c{k}")))],
    "B17": [h(0), a(1), h(2), a(3), h(4), a(5, "1")],
    "B24": [h(0), a(1), h(2), a(3), h(4), a(5, "1", "2"), t(6, "1")],
    "B25": [h(0), *(m for k in range(5) for m in (a(10 * k + 1, f"c{k}"), t(10 * k + 2, f"c{k}")))],
    "B27": [h(0), a(1), h(2), a(3, "1", "2"), t(4, "1"), t(5, "2"), a(6), h(7)],
    "results out of order": [h(0), a(1, "1", "2", "3"), t(2, "3"), t(3, "1"), t(4, "2"), a(5), h(6), a(7), h(8)],
    "late result behind another turn": [h(0), a(1, "1"), h(2), a(3), t(4, "1"), h(5), a(6), h(7), a(8), h(9)],
    "two late results, crossed": [h(0), a(1, "1"), a(2, "2"), h(3), t(4, "2"), t(5, "1"), a(6), h(7), a(8), h(9)],
    "call that never got its result": [h(0), a(1, "1"), h(2), a(3), h(4), a(5), h(6), a(7), h(8)],
    "half answered batch, given up": [h(0), a(1, "1", "2"), t(2, "1"), h(3), a(4), h(5), a(6), h(7)],
    "orphan result": [h(0), t(1, "x"), a(2), h(3), a(4), h(5), a(6), h(7)],
    "orphan result first": [t(0, "x"), h(1), a(2), h(3), a(4), h(5), a(6)],
    "two results for one id": [h(0), a(1, "1"), t(2, "1"), t(3, "1"), a(4), h(5), a(6), h(7), a(8)],
    "same ids every turn": [m for k in range(4) for m in (h(9 * k), a(9 * k + 1, "call_0"), t(9 * k + 2, "call_0"))],
    "ids left empty": [
        m for k in range(4) for m in (h(9 * k), a(9 * k + 1, "", ""), t(9 * k + 2, ""), t(9 * k + 3, ""))
    ],
    "assistant opens": [S(), a(0), h(1), a(2), h(3), a(4), h(5)],
    "system inside": [S(), h(0), a(1), S("later"), h(2), a(3), h(4), a(5), h(6)],
}

POLICIES: dict[str, dict[str, Any]] = {
    "keep 1": {"keep": ("messages", 1)},
    "keep 2": {},
    "keep 3": {"keep": ("messages", 3)},
    "keep 0": {"keep": ("messages", 0), "land_at": ("messages", 0)},
    "keep 1.5 messages' tokens": {"keep": ("tokens", 230)},
    "fallback at 3": {"overrun": "fallback", "hard_limit": ("messages", 4), "land_at": ("messages", 3)},
    "fallback at 2, keep 0": {
        "overrun": "fallback", "hard_limit": ("messages", 4), "land_at": ("messages", 2), "keep": ("messages", 0),
    },
    "tokens": {
        "trigger": ("tokens", 500), "hard_limit": ("tokens", 1200), "land_at": ("tokens", 300), "keep": ("tokens", 160),
    },
    "hard limit": {"commit": "hard_limit", "hard_limit": ("messages", 5)},
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("messages", HISTORIES.values(), ids=HISTORIES.keys())
@virtual
async def test_promise_03_no_view_is_worse_than_what_was_held(messages: list[Message], policy: dict[str, Any]) -> None:
    """Every history at every prefix under every policy: no new orphan, no unanswered call, system and user first."""
    turns = await drive(messages, small_policy(fast(), **policy))
    for before, turn in zip(turns, turns[1:], strict=False):
        assert turn.rewrote or same_objects(turn.view[:-1], before.view), "between commits it only grows"


@pytest.mark.parametrize("name", ["B01", "B02", "B03", "B04", "B05", "B11", "B13", "B16", "B25", "B27"])
@virtual
async def test_pairs_are_cut_whole_and_the_view_is_rewritten(name: str) -> None:
    """These histories leave something to rewrite: the view is a valid request with a summary and whole pairs."""
    messages = HISTORIES[name]
    last = (await drive(messages, small_policy(fast())))[-1]
    assert summaries(last.view)
    assert len(last.view) < len(messages)
    assert valid_request(last.view)


@pytest.mark.parametrize("name", ["B01", "B02", "B03", "B04", "B05", "B16", "B25"])
@virtual
async def test_dropping_by_the_fallback_is_as_careful(name: str) -> None:
    """The same with no model at all: whole segments go, and what is sent is valid."""
    policy = small_policy(
        FakeSummarizer("fail"), overrun="fallback", hard_limit=("messages", 4), land_at=("messages", 3)
    )
    last = (await drive(HISTORIES[name], policy))[-1]
    assert not summaries(last.view)
    assert valid_request(last.view)
    assert len(last.view) <= 5


@virtual
async def test_b04_a_parallel_batch_over_the_budget_stays_whole() -> None:
    """The first result alone exceeds the budget: call and both results go together or stay together."""
    messages = HISTORIES["B04"]
    policy = small_policy(
        fast(), trigger=("tokens", 3000), hard_limit=("tokens", 4000), land_at=("tokens", 1500), keep=("tokens", 100)
    )
    for turn in await drive(messages, policy):
        there = [any(m is x for m in turn.view) for x in messages[1:4] if any(x is m for m in turn.held)]
        assert len(set(there)) <= 1
    assert sum(map(CODEC.estimate, turn.view)) <= 4000


@virtual
async def test_b14_a_call_that_waits_for_a_person_pins_everything_from_it_on() -> None:
    """Ten messages later the confirmation comes: its call is still there."""
    messages = [h(90), a(91), h(92), a(93), *HISTORIES["B14"]]
    policy = small_policy(fast(), hard_limit=("messages", 8), overrun="fallback")
    turns = await drive(messages, policy)
    call = messages[5]
    waiting = [
        t for t in turns if any(m is call for m in t.held) and messages[16] is not t.held[-1] and len(t.held) < 17
    ]
    assert waiting
    for turn in waiting:
        k = next(i for i, m in enumerate(turn.view) if m is call)
        assert same_objects(turn.view[k:], turn.held[5:])
    answered = next(t for t in turns if len(t.held) == 17)
    assert any(m is call for m in answered.view)


@virtual
async def test_b15_the_run_in_progress_is_not_eligible() -> None:
    """With the smallest keep, the newest user message and the pair behind it stay."""
    messages = [h(0), a(1), h(2), a(3, "1"), t(4, "1")]
    last = (await drive(messages, small_policy(fast(), keep=("messages", 1))))[-1]
    assert same_objects(last.view[-3:], messages[-3:])


@virtual
async def test_b16_tool_cycles_behind_one_user_message_are_rewritten_behind_it() -> None:
    """One user message and six cycles in a window of four: old pairs go, the question and the last pair stay."""
    messages = HISTORIES["B16"]
    policy = small_policy(fast(), trigger=("messages", 3), hard_limit=("messages", 4), land_at=("messages", 3))
    turns = await drive(messages, policy, every=False)
    for turn in turns:
        assert any(m is messages[0] for m in turn.view)
        assert len(turn.view) <= 4 or len(turn.held) <= 5
    assert same_objects(turns[-1].view[-2:], messages[-2:])
    assert valid_request(turns[-1].view)


@pytest.mark.parametrize("name", ["B17", "B24"])
@virtual
async def test_b17_b20_b24_an_open_call_is_never_touched(name: str) -> None:
    """A boundary while a call is open rewrites what is before it and nothing of it."""
    messages = HISTORIES[name]
    last = (await drive(messages, small_policy(fast(), keep=("messages", 0))))[-1]
    call = next(k for k, m in enumerate(messages) if m.get("tool_calls"))
    assert summaries(last.view)
    assert same_objects(last.view[-(len(messages) - call) :], messages[call:])


@virtual
async def test_b20_a_result_that_comes_after_the_commit_meets_its_call() -> None:
    """Commit while a call is open, then the result: one call, one result."""
    messages = [*HISTORIES["B17"], t(6, "1"), a(7), h(8)]
    turns = await drive(messages, small_policy(fast(), keep=("messages", 0)))
    assert valid_request(turns[-1].view)
    assert valid_request(turns[-3].view)


@virtual
async def test_b25_results_that_the_model_has_not_read_stay() -> None:
    """In one long turn, the last pair is still unread: it is the caller's own in every view."""
    messages = HISTORIES["B25"]
    for turn in await drive(messages, small_policy(fast(), keep=("messages", 0), land_at=("messages", 0)), every=False):
        assert turn.view[-1] is turn.held[-1]
        if turn.held[-1]["role"] == "tool":
            assert turn.view[-2] is turn.held[-2]


@virtual
async def test_b25_unread_parallel_results_stay_under_the_fallback_too() -> None:
    """At the hard limit the unread batch goes out whole, although it is too large."""
    messages = [h(0), a(1), h(2), a(3, "1", "2"), t(4, "1", 900), t(5, "2", 900)]
    policy = small_policy(
        FakeSummarizer("hang"), trigger=("tokens", 500), hard_limit=("tokens", 1000), land_at=("tokens", 400),
        overrun="fallback", keep=("messages", 0),
    )  # fmt: skip
    last = (await drive(messages, policy, every=False))[-1]
    assert same_objects(last.view[-3:], messages[-3:])
    assert valid_request(last.view)


@virtual
async def test_b24_an_old_call_without_a_result_blocks_nothing() -> None:
    """A call that was given up many turns ago is summarised like anything else."""
    messages = HISTORIES["call that never got its result"]
    last = (await drive(messages, small_policy(fast())))[-1]
    assert not any(m is messages[1] for m in last.view)
    assert kinds(last.view) == {}


@virtual
async def test_orphans_of_the_caller_pass_through_and_are_never_part_of_a_cut() -> None:
    """An orphan result that the caller holds stays where it was, as the same object."""
    messages = HISTORIES["orphan result"]
    last = (await drive(messages, small_policy(fast())))[-1]
    assert summaries(last.view)
    assert any(m is messages[1] for m in last.view)


@virtual
async def test_the_summariser_gets_a_valid_request_whatever_the_history() -> None:
    """What we ask ourselves is valid: every kind of broken history, at every prefix."""
    for name, messages in HISTORIES.items():
        model = fast()
        await drive(messages, small_policy(model), every=False)
        for request in model.inputs:
            assert set(kinds(request)) <= {"a system message inside"}, name  # that one is the caller's own


# -- generated histories -------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """Conversations with parallel calls, late, missing, repeated and orphaned results, and repeated ids."""
    messages: list[Message] = draw(st.sampled_from([[], [S()], [S(), S("rules")]]))[:]
    ids = draw(st.sampled_from([["call_0"], ["a", "b", "c"], [""]]))
    open_calls: list[str] = []
    for k in range(draw(st.integers(3, 14))):
        kind = draw(st.sampled_from(["user", "assistant", "calls", "result", "result", "orphan"]))
        if kind == "user":
            messages.append(h(k))
        elif kind == "assistant":
            messages.append(a(k))
        elif kind == "calls":
            made = [draw(st.sampled_from(ids)) for _ in range(draw(st.integers(1, 3)))]
            made = list(dict.fromkeys(made)) if "" not in made else made
            messages.append(a(k, *made))
            open_calls += made
        elif kind == "result" and open_calls:
            messages.append(t(k, open_calls.pop(draw(st.integers(0, len(open_calls) - 1)))))
        elif kind == "orphan":
            messages.append(t(k, "nobody"))
    return messages or [h(0)]


@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from(list(POLICIES)))
def test_property_promise_02_03_any_history_any_policy(messages: list[Message], policy: str) -> None:
    """No generated history is made worse, and every view ends with the caller's own newest message."""

    async def main() -> list[Turn]:
        return await drive(messages, small_policy(fast(), **POLICIES[policy]))

    for turn in run_virtual(main):
        newest = turn.held[-1]
        assert turn.view[-1] is newest or newest["role"] == "tool", "only a late result is shown as a note"


@virtual
async def test_tail_objects_are_the_callers_own_after_every_rewrite() -> None:
    """A rewritten view is Σ, what had to stay, and the caller's own tail."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=Policy(
            Summarize(fast(), keep=("messages", 4), facts=False, max_tokens=100),
            trigger=("tokens", 1200), hard_limit=("tokens", 3000), land_at=("tokens", 900), min_savings=0.1,
            fallback=KeepRecent(("messages", 4)),
        ))  # fmt: skip
        messages = [S(), *HISTORIES["B02"]]
        turns = await feed(session, messages)
        assert len(summarised(turns)) >= 3
        for turn in rewritten(turns):
            own = [m for m in turn.view if any(m is x for x in turn.held)]
            assert same_objects(own[-4:], turn.held[-4:])
        await settle()
        check(messages, await session.commit(messages))
