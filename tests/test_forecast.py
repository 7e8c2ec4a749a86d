"""Forecasts: growth, idle time and work of a session, and what follows from them. Time comes in as numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from smoothctx.forecast import Average, Forecast


def seen(*, growth: int = 100, turn: float = 10.0, idle: float = 4.0, turns: int = 20) -> Forecast:
    """A session that has seen so many equal turns."""
    forecast = Forecast()
    for k in range(turns):
        forecast.boundary(k * turn, k * growth)
        forecast.rested(k * turn + turn - idle)
    return forecast


def test_an_average_follows_the_newest_samples() -> None:
    """The first sample is taken as it is; about the last five count."""
    average = Average()
    assert average.value is None
    average.add(10)
    assert average.value == 10
    for _ in range(15):
        average.add(20)
    assert average.value == pytest.approx(20, rel=0.01)


def test_nothing_is_claimed_before_anything_was_seen() -> None:
    """Unknown is ``None``, and never a reason to hurry."""
    forecast = Forecast()
    assert forecast.turns_left(0, 1000) is None
    assert forecast.due(0.0, 0, 1000) is None
    assert not forecast.late(0, 1000, 5.0)
    assert not forecast.hurried(100.0, 1000, 0, 1000)
    assert forecast.growth_during(5.0) == 0
    forecast.boundary(0.0, 500)
    assert forecast.turns_left(0, 1000) is None
    assert seen().turns_left(0, None) is None


def test_turns_and_time_to_the_limit() -> None:
    """500 tokens are left at 100 tokens and 10 seconds per turn."""
    forecast = seen()
    assert forecast.turns_left(500, 1000) == pytest.approx(5)
    assert forecast.due(200.0, 500, 1000) == pytest.approx(250)
    assert forecast.turns_left(1500, 1000) == 0
    assert forecast.idle.value == pytest.approx(4)


def test_a_history_that_shrank_is_no_growth() -> None:
    """Time travel or a rewritten list neither counts as growth nor as a turn."""
    forecast = seen()
    forecast.boundary(1000.0, 50)
    assert forecast.growth.value == pytest.approx(100)
    assert forecast.turn.value == pytest.approx(10)
    forecast.boundary(1010.0, 150)
    assert forecast.growth.value == pytest.approx(100)


def test_late_is_when_the_work_takes_longer_than_what_is_left() -> None:
    """Work of its own is held against whole turns, a first guess against idle time; the last turn cannot be used."""
    forecast = seen()
    assert not forecast.late(500, 1000, None)
    assert forecast.late(500, 1000, 20.0)
    assert not forecast.late(500, 1000, 5.0)
    forecast.work.add(60.0)
    assert forecast.late(500, 1000, None)
    assert not forecast.late(0, 2000, None)
    assert forecast.late(1000, 1000, None)


def test_the_last_turn_may_be_as_long_as_the_longest_one_of_late() -> None:
    """Tools answer at length now and then: work of two turns starts while such a turn and two more fit. What was long
    ago, or is longer than any early start could make up for, does not count."""
    forecast = seen()
    forecast.work.add(16.0)  # two turns, with the margin
    assert forecast.late(1000 - 299, 1000, None) and not forecast.late(1000 - 301, 1000, None)
    tokens = 1900
    for k, growth in enumerate([220, *[100] * 15]):
        forecast.boundary(200 + 10 * k, tokens := tokens + growth)
    usual = forecast.growth.value
    assert usual is not None and usual < 102
    assert forecast.late(1000 - 219 - int(2 * usual), 1000, None)
    assert not forecast.late(1000 - 224 - int(2 * usual), 1000, None)
    forecast.boundary(360.0, tokens + 100)
    assert not forecast.late(1000 - 103 - int(2 * usual), 1000, None), "that was 16 turns ago"
    forecast.boundary(370.0, tokens + 900)
    grown = forecast.growth.value
    assert grown is not None
    assert not forecast.late(4000 - 1000 - 2 * int(grown) - 40, 4000, None)


def test_results_without_a_model_say_nothing_about_those_that_need_one() -> None:
    """They count while no model was ever asked, and not from then on."""
    forecast = Forecast()
    forecast.landed(2.0, 1.0, asked=False)
    assert (forecast.work.value, forecast.write.value) == (2.0, 1.0)
    forecast.landed(30.0, 20.0, asked=True)
    forecast.landed(0.0, 0.0, asked=False)
    assert (forecast.work.value, forecast.write.value) == (30.0, 20.0)


def test_growth_while_the_work_runs() -> None:
    """Work of 25 seconds at 10 per turn: 250 tokens more."""
    forecast = seen()
    assert forecast.growth_during(25.0) == pytest.approx(250, abs=1)
    forecast.work.add(50.0)
    assert forecast.growth_during(25.0) == pytest.approx(500, abs=1)


def test_hurried_is_when_idle_time_cannot_prefill_what_is_left() -> None:
    """400 tokens in each idle time; 550 are left at 100 a turn, so the sixth turn passes the limit: 6 idle times."""
    forecast = seen()
    room = 6 * 400 - 5 * 100  # what the five turns before it add is warmed too
    assert not forecast.hurried(100.0, int(room / 1.25), 450, 1000)
    assert forecast.hurried(100.0, int(room / 1.25) + 1, 450, 1000)
    assert forecast.hurried(10.0, 10, 500, 1000)  # 40 in each do not even keep up with what is added
    assert not forecast.hurried(None, 3000, 500, 1000)


@pytest.mark.parametrize("tokens", [900, 950, 1000, 5000])
def test_the_idle_time_before_the_last_turn_counts(tokens: int) -> None:
    """With the next turn, or the one after it, the limit is passed: what that idle time is enough for is no hurry."""
    forecast = seen()
    assert not forecast.hurried(100.0, 320, tokens, 1000)
    assert forecast.hurried(100.0, 900, tokens, 1000)


def test_quiet_is_what_most_idle_times_of_late_were_longer_than() -> None:
    """A turn that came early once does not make all of it busy; what has passed counts, and old times are forgotten."""
    forecast, now = Forecast(), 0.0
    assert forecast.quiet(5.0, in_flight=False) is None
    for idle in (9.0, 9.0, 9.0, 9.0, 6.0, 5.0, 1.0, 7.0, 8.0, 6.0, 5.0, 1.0):
        forecast.boundary(now, int(now))
        forecast.rested(now + 2.0)
        now += 2.0 + idle
    forecast.boundary(now, int(now))  # (6, 5, 1, 7, 8, 6, 5, 1), sorted: 1, 1, 5, 5, 6, 6, 7, 8
    assert forecast.quiet(now, in_flight=True) == forecast.quiet(now + 100, in_flight=True) == 5.0, "after the turn"
    assert forecast.quiet(now + 1, in_flight=False) == 0.0, "it ended, and nobody said when"
    forecast.rested(now + 10)
    assert forecast.quiet(now + 12, in_flight=False) == pytest.approx(3.0)
    assert forecast.quiet(now + 16, in_flight=False) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 10**7)), max_size=20), st.integers(0, 10**7))
def test_property_any_sequence_gives_sane_numbers(samples: list[tuple[float, int]], tokens: int) -> None:
    """No order of times and sizes raises or gives a negative number of turns."""
    forecast = Forecast()
    for now, size in samples:
        forecast.boundary(now, size)
        forecast.rested(now)
    turns = forecast.turns_left(tokens, 1000)
    assert turns is None or turns >= 0
    assert isinstance(forecast.late(tokens, 1000, 1.0), bool)
    assert isinstance(forecast.growth_during(1.0), int)
    gaps = [after - before for (before, _), (after, _) in pairwise(samples)]
    quiet = forecast.quiet(samples[-1][0], in_flight=False) if samples else None
    assert (quiet is None) == (not gaps) and (quiet is None or 0.0 <= quiet <= max(0.0, *gaps[-8:]))
