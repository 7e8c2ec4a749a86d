"""Demand where users always overlap: when are first tokens late, although no call ever has the engine for itself?"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from smoothctx.demand import CALM_S, MAX_CALM, MAX_SPELLS, Demand, Latency
from smoothctx.foreground import Foreground, Seen

#: seconds between two calls of a steady load
STEP_S = 2.0
prompts = st.lists(st.integers(1, 100_000), min_size=1, max_size=40)


def late(demand: Demand, now: float) -> bool | None:
    """What everybody asks."""
    return Seen(latency=demand.latency(now)).slower


def load(demand: Demand, ttfts: list[tuple[float, int | None]], *, now: float = 0.0) -> float:
    """Calls one behind the other, none of them alone; returns the time."""
    for ttft_s, new_tokens in ttfts:
        demand.answered(now, ttft_s, new_tokens=new_tokens, calm=False)
        now += STEP_S
    return now


@given(prompts, prompts, st.floats(0, 10), st.floats(1e-6, 0.1), st.integers(0, 200))
def test_no_change_of_the_prompts_makes_a_calm_engine_look_late(
    before: list[int], lately: list[int], constant_s: float, token_s: float, more: int
) -> None:
    """A first token that takes a constant time and so much for each new token is never late, whatever is asked."""
    demand, now = Demand(), 0.0
    for n in [*(before[k % len(before)] for k in range(100 + more)), *(lately[k % len(lately)] for k in range(40))]:
        now = load(demand, [(constant_s + n * token_s, n)], now=now)
        assert not late(demand, now)
    assert demand.latency(now) is not None


@given(prompts, st.floats(0.1, 10), st.floats(1e-6, 0.1), st.floats(3.0, 50.0))
def test_an_engine_that_gets_slower_is_seen(ns: list[int], constant_s: float, token_s: float, factor: float) -> None:
    """The same prompts, and each takes so many times as long: once all the latest calls do."""
    demand = Demand()
    n = sorted(ns)[len(ns) // 2]
    now = load(demand, [(constant_s + n * token_s, n)] * 100)
    assert late(demand, now) is False
    now = load(demand, [(factor * (constant_s + n * token_s), n)] * 16, now=now)
    assert late(demand, now) is True
    now = load(demand, [(constant_s + n * token_s, n)] * 16, now=now)
    assert late(demand, now) is False


@pytest.mark.parametrize("seed", range(4))
def test_what_varies_by_itself_is_not_late(seed: int) -> None:
    """First tokens that take a third to three times as long, by chance alone, all day."""
    source, demand, now = random.Random(seed), Demand(), 0.0
    for _ in range(1500):
        new_tokens = source.randrange(100, 20_000)
        now = load(demand, [((0.2 + new_tokens / 5000) * source.lognormvariate(0, 0.5), new_tokens)], now=now)
        assert not late(demand, now)


def test_what_is_known_after_how_long() -> None:
    """Three spells of half a minute or sixteen calls, whichever is longer, and six calls of late."""
    demand, ready = Demand(), None
    for k in range(200):
        load(demand, [(0.3, 500)], now=k * STEP_S)
        if ready is None and demand.latency(k * STEP_S) is not None:
            ready = k
    assert ready == 48
    assert demand.latency(200 * STEP_S) == Latency(now_s=0.3, calm_s=0.3)
    assert demand.latency(200 * STEP_S + 25.0) is None, "too few calls of late"


@pytest.mark.parametrize("tokens", [None, 500])
def test_without_new_tokens_nothing_is_concluded(tokens: int | None) -> None:
    """Prompts grow: of calls that do not tell their new tokens nobody knows if they should take longer."""
    demand = Demand()
    now = load(demand, [(0.3, tokens)] * 100)
    now = load(demand, [(6.0, tokens)] * 16, now=now)
    assert late(demand, now) is (None if tokens is None else True)


def test_calls_alone_say_more() -> None:
    """Where there are such, they decide."""
    demand = Demand()
    now = load(demand, [(3.0, 500)] * 100)
    assert late(demand, now) is False
    for _ in range(3):
        demand.answered(now, 0.5, new_tokens=500, calm=True)
    assert demand.latency(now) == Latency(now_s=3.0, calm_s=0.5)


def test_promise_10_what_is_remembered_is_bounded_and_grows_old() -> None:
    """Many calls in little time, and a long day."""
    demand = Demand()
    for k in range(20_000):
        demand.answered(k / 10, 0.3, new_tokens=500, calm=False)
    assert len(demand._spells) <= MAX_SPELLS and len(demand._crowded) <= MAX_CALM
    assert demand.latency(2000.0) is not None
    now = load(demand, [(6.0, 500)] * 10, now=2000.0 + CALM_S)
    assert demand.latency(now) is None, "better times of long ago say nothing of today"


def _overlapping(ttft_s: Callable[[float], float]) -> list[bool | None]:
    """Four users whose calls overlap from the first one on; what is seen after each call."""
    now = [0.0]
    foreground, seen = Foreground(lambda: now[0]), []
    events = [(0.25 * k, "begin", k % 4) for k in range(1200)] + [(0.25 * k + 0.95, "end", k % 4) for k in range(1200)]
    for at, what, who in sorted(events):
        now[0] = at
        if what == "begin":
            foreground.begin((who,), who)
        else:
            foreground.answered((who,), ttft_s(at), 500)
            foreground.end((who,))
        seen.append(foreground.seen().slower)
    return seen


def test_users_who_always_overlap_are_seen_to_wait() -> None:
    """No call of theirs is ever alone; as soon as first tokens come later it is known."""
    seen = _overlapping(lambda at: 0.3 if at < 150 else 6.0)
    first = seen.index(True)
    assert 1150 < first < 1250 and all(seen[first:]) and seen[1000] is False
    assert True not in _overlapping(lambda at: 0.3)
