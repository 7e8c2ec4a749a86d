"""The doctor reads a runtime's own events: are rewrites visible, and what do they do to TTFT?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from helpers import Events, chat, make_runtime, settle, virtual
from smoothctx import ConfigurationError, Event, Policy, Salvage, Summarize, Usage
from smoothctx.doctor import Finding, log
from smoothctx.economics import Speed
from smoothctx.testing import FakeEngine


def write(tmp_path: Path, *rows: Any) -> Path:
    """A file of JSON lines."""
    file = tmp_path / "events.jsonl"
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r, default=str)) + "\n" for r in rows))
    return file


def by_name(found_: list[Finding]) -> dict[str, Finding]:
    """Findings by name."""
    return {f.name: f for f in found_}


def test_events_split_ttft_by_rewrites(tmp_path: Path) -> None:
    """A turn after a rewrite of its own session is a rewritten one; percentiles are of each kind."""
    rows: list[Any] = []
    for k in range(20):
        rows += [{"name": "turn", "session": "a", "ttft_ms": 100 + k}, {"name": "turn", "session": "b", "ttft_s": 0.1}]
        if k % 5 == 0:
            rows += [{"name": "view.committed", "session": "a", "data": {"how": "ready"}}]
            rows += [{"name": "lookahead.committed", "session": "a", "data": {}}, {"session": "a", "ttft_s": 4.0}]
    seen = by_name(log.check(log.read(write(tmp_path, *rows, "no json", ""))))
    assert seen["transform points"].found == "4 rewrites are logged; 1 of 53 lines are no JSON"
    split = seen["TTFT by turn"]
    assert split.status == "warn" and split.data["rewritten"] == {"turns": 4, "p50_s": 4.0, "p95_s": 4.0}
    assert split.data["ordinary"]["turns"] == 40 and split.effect_s == pytest.approx(4.0 - 0.117)


def test_events_as_a_runtime_writes_them(tmp_path: Path) -> None:
    """The events of a runtime, written as the advice says: reasons, and the cached share of background calls."""
    usage = Usage(input_tokens=1000, output_tokens=50, cached_tokens=900, calls=1)
    events = [
        Event(name="lookahead.discarded", time=1.0, session="a", tenant="t", data={"reason": "branch_diverged"}),
        Event(name="usage", time=2.0, session="a", tenant="t", data={"transform": "summarize", "usage": usage}),
        Event(name="fallback.applied", time=3.0, session="a", tenant="t", data={"discard": "Immediate()"}),
    ]
    seen = by_name(log.check(log.read(write(tmp_path, *(dataclasses.asdict(e) for e in events)))))
    assert seen["transform points"].status == "ok" and seen["TTFT by turn"].status == "unknown"
    assert seen["discard policy"].found == "Immediate(); discarded: branch_diverged 1"
    assert seen["summary prompt"].status == "ok" and seen["summary prompt"].data["cached_share"] == 0.9
    # a log handler that writes objects as their repr
    row = {"event": "usage", "session": "a", "usage": dataclasses.replace(usage, cached_tokens=100)}
    assert by_name(log.check(log.read(write(tmp_path, row))))["summary prompt"].status == "warn"


@virtual
async def test_a_runtimes_own_events_answer_all_of_it(tmp_path: Path) -> None:
    """Nothing is added by hand: each question has its answer from what a runtime says of a session in use."""
    events = Events()
    engine = FakeEngine("A summary.", speed=Speed(prefill_tokens_per_s=2000.0, decode_tokens_per_s=100.0))
    policy = Policy(
        Summarize(engine, keep=("messages", 4), max_tokens=100, facts=False),
        context_window=2000,
        discard=Salvage(ttl=60.0),
    )
    messages = chat(9, size=55)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=policy, engine=engine)
        for k in range(12):
            view = await session.commit(messages)
            async with session.foreground() as call, engine.stream(view, max_tokens=20) as stream:
                async for _ in stream:
                    call.first_token()
            messages = [*messages, *chat(1, size=55, first=20 + k, system=False)[::-1]]
            session.observe(messages)
            await settle(30)
        assert session.receipts
    seen = by_name(log.check(log.read(write(tmp_path, *(dataclasses.asdict(e) for e in events)))))
    assert {f.status for f in seen.values()} == {"ok"}, seen
    split = seen["TTFT by turn"].data
    assert split["rewritten"]["turns"] == len(session.receipts)
    assert split["ordinary"]["turns"] == 12 - len(session.receipts)
    assert "ttl=60.0" in seen["discard policy"].found
    assert seen["summary prompt"].found.startswith("summarize is prefix-local; ")


def test_what_a_turn_waited_for_a_rewrite_counts(tmp_path: Path) -> None:
    """A first token that comes soon after a long wait for the summary is a late one."""
    rows = [
        {"name": "ttft", "session": "a", "data": {"ttft_s": 0.5, "rewritten": False, "waited_s": 0.0}},
        {"name": "ttft", "session": "a", "data": {"ttft_s": 0.5, "rewritten": True, "waited_s": 8.0}},
    ]
    split = by_name(log.check(log.read(write(tmp_path, *rows))))["TTFT by turn"]
    assert split.data["rewritten"]["p50_s"] == 8.5 and split.data["ordinary"]["p50_s"] == 0.5


def test_promise_15_a_figure_in_another_event_is_no_turn(tmp_path: Path) -> None:
    """Admission's events tell how long first tokens take, as the reason of a decision: nobody waited then."""
    load = {"why": "waiting", "ttft_s": 9.0, "calm_ttft_s": 0.1}
    rows = [
        {"name": "ttft", "session": "a", "data": {"ttft_s": 0.5, "rewritten": False, "waited_s": 0.0}},
        {"name": "admission.deferred", "session": "a", "data": load},
        {"event": "admission.skipped", "session": "a", **load},
        {"session": "a", "ttft_s": 0.25},
    ]
    read = log.read(write(tmp_path, *rows))
    assert (read.ordinary_s, read.rewritten_s) == ([0.5, 0.25], [])


def test_events_that_say_nothing(tmp_path: Path) -> None:
    """Without events, or with none of ours, each question has its advice."""
    for given_ in (
        None,
        log.read(write(tmp_path, 3, [], {"x": 1}, {"ttft_s": "fast", "name": None}, {"ttft_s": True})),
    ):
        seen = by_name(log.check(given_))
        assert all(f.advice and f.status in ("unknown", "bad") for f in seen.values())
        assert {"transform points", "discard policy", "summary prompt"} <= set(seen)
    with pytest.raises(ConfigurationError, match="--events .*: No such file"):
        log.read(tmp_path / "nowhere")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_property_percentile(values: list[float], share: float) -> None:
    """It is one of the values, with that share of them at or below it."""
    value = log.percentile(values, share)
    assert value in values and sum(v <= value for v in values) >= share * len(values) - 1e-6
