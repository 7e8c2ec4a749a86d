"""The cached share of background prompts: what the server reported, in every place where it is shown."""

from __future__ import annotations

import math
from typing import Any

import pytest

from helpers import Events, FakeSummarizer, H, chat, make_policy, make_runtime, settle, virtual
from smoothctx import Policy, Summarize, Usage
from smoothctx.economics import Speed
from smoothctx.engines.wire import read_usage
from smoothctx.testing import FakeEngine
from smoothctx.usage import Counters, token_count


def test_share_of_one_call() -> None:
    """Cached over input; unknown stays unknown."""
    assert Usage(input_tokens=200, cached_tokens=150, calls=1).cached_share == 0.75
    assert Usage(input_tokens=200, cached_tokens=0, calls=1).cached_share == 0.0
    assert Usage(input_tokens=200, calls=1).cached_share is None
    assert Usage(cached_tokens=0).cached_share is Usage().cached_share is None


def test_what_is_no_number_of_tokens_is_no_report() -> None:
    """Servers, and what stands between, send anything: it never gets into a sum."""
    assert [token_count(n) for n in (0, 12, 12.0)] == [0, 12, 12]
    odd = (math.nan, math.inf, -math.inf, -1, True, "12", None, [12], 1j)
    assert [token_count(n) for n in odd] == [None] * len(odd)
    usage = read_usage(
        {"prompt_tokens": math.nan, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": -1}}
    )
    assert usage == Usage(output_tokens=7, calls=1)


def test_promise_15_calls_that_report_nothing_do_not_dilute_it() -> None:
    """The share is over the calls that reported one, in whatever order they are added up."""
    told, silent = Usage(input_tokens=100, cached_tokens=80, calls=1), Usage(input_tokens=900, calls=1)
    assert (told + silent).cached_share == (silent + told).cached_share == 0.8
    assert (silent + silent).cached_share is None
    assert (told + silent + told + Usage()).cached_share == 0.8
    assert ((told + silent) + (silent + told)).cached_share == 0.8
    assert (told + silent).input_tokens == 1000 and (told + silent).unreported_tokens == 900


def test_the_counters_show_it() -> None:
    """Of the transforms' calls; preloads are counted apart."""
    counters = Counters(
        usage=Usage(input_tokens=10, cached_tokens=5), preload_usage=Usage(input_tokens=9, cached_tokens=9)
    )
    assert counters.cached_share == 0.5 and Counters().cached_share is None


@pytest.mark.parametrize("reports", [True, False])
@virtual
async def test_an_aligned_summary_shows_its_share(reports: bool) -> None:
    """On the agent's own engine the summariser's prompt is found in the cache: event, receipt and counters say so
    where the server does, and nothing otherwise."""
    events = Events()
    engine = FakeEngine(
        "A summary.", speed=Speed(prefill_tokens_per_s=2000.0, decode_tokens_per_s=100.0), reports_cache=reports
    )
    policy = Policy(
        Summarize(engine, keep=("messages", 4), max_tokens=100, facts=False),
        context_window=2000,
    )
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=policy, engine=engine)
        messages: list[Any] = chat(11, size=55)
        view = await session.commit(messages)
        await engine.complete(view, max_tokens=4)
        messages.append({"role": "assistant", "content": "done"})
        session.observe(messages)
        await settle(60)
        messages.append(H("next"))
        await session.commit(messages)
        (receipt,) = session.receipts
        (ready,) = events.of("lookahead.ready")
        shares = [receipt.cached_share, ready.data["cached_share"], runtime.counters.cached_share]
    if reports:
        assert receipt.usage.cached_tokens is not None
        assert shares == [receipt.usage.cached_tokens / receipt.usage.input_tokens] * 3
        assert 0.5 < shares[0] < 1.0
    else:
        assert shares == [None] * 3 and receipt.usage.input_tokens > 0


@virtual
async def test_a_model_that_reports_nothing_has_no_share() -> None:
    """A plain callable's calls are estimated: no share is made up."""
    events = Events()
    messages = chat(12, size=55)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=1)))
        session.observe(messages)
        await settle(5)
        await session.commit(messages)
        assert session.receipts[0].cached_share is None and session.receipts[0].usage.estimated
        assert events.of("lookahead.ready")[0].data["cached_share"] is None
        assert runtime.counters.cached_share is None
