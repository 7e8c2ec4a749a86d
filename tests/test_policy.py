"""Policies: defaults, sizes, and what counts as reached. Wrong options are in ``test_bad_input``."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from driving import fast
from smoothctx import Finish, Immediate, KeepRecent, Offload, Policy, Salvage, Summarize


def policy(**options: Any) -> Policy:
    """Over a window of 1,000."""
    return Policy(Summarize(fast()), context_window=1000, **options)


def test_the_defaults_are_those_of_the_contract() -> None:
    """Names and values that users rely on."""
    made = policy()
    assert made.triggers == (("fraction", 0.6),)
    assert (made.hard_limit, made.land_at) == (("fraction", 0.85), ("fraction", 0.40))
    assert (made.reserved_tokens, made.commit, made.overrun, made.max_wait) == (0, "ready", "promote", 30.0)
    assert isinstance(made.fallback, KeepRecent)
    assert made.discard == Salvage(ttl=1800)
    assert (made.min_savings, made.max_message_tokens, made.preload_kv) == (0.30, None, "auto")
    assert made.validators == ()
    assert made.token_counter is None
    assert Summarize(fast()).keep == KeepRecent().keep == ("messages", 20)


def test_sizes_in_tokens() -> None:
    """A fraction is of the window; messages have no tokens."""
    made = policy()
    assert made.limit_tokens(("fraction", 0.6)) == 600
    assert made.limit_tokens(("tokens", 70)) == 70
    assert made.limit_tokens(("messages", 7)) is None


@pytest.mark.parametrize(
    ("trigger", "tokens", "messages", "reached"),
    [
        (("fraction", 0.6), 599, 5, False),
        (("fraction", 0.6), 600, 5, True),
        (("tokens", 300), 299, 5, False),
        (("tokens", 300), 300, 5, True),
        (("messages", 10), 999, 9, False),
        (("messages", 10), 1, 10, True),
        ([("tokens", 300), ("messages", 10)], 1, 10, True),
        ([("tokens", 300), ("messages", 10)], 300, 1, True),
        ([("tokens", 300), ("messages", 10)], 299, 9, False),
        ((("tokens", 300), ("messages", 10)), 299, 10, True),
        (["tokens", 300], 0, 0, None),
    ],
)  # fmt: skip
def test_any_of_several_triggers(trigger: Any, tokens: int, messages: int, reached: bool | None) -> None:
    """A list means any of them; a list that is no list of sizes is an error."""
    if reached is None:
        with pytest.raises(ValueError, match="trigger='tokens': expected"):
            policy(trigger=trigger)
    else:
        assert policy(trigger=trigger).reached(tokens, messages) is reached


def test_over_is_strict() -> None:
    """Exactly at the limit still fits."""
    made = policy()
    assert not made.over(("fraction", 0.85), 850, 1)
    assert made.over(("fraction", 0.85), 851, 1)
    assert not made.over(("messages", 5), 10**6, 5)
    assert made.over(("messages", 5), 0, 6)


def test_no_window_is_needed_without_fractions() -> None:
    """Sizes in tokens or messages stand for themselves."""
    made = Policy(Summarize(fast()), trigger=("messages", 9), hard_limit=("tokens", 900), land_at=("messages", 4))
    assert made.context_window is None


def test_a_policy_is_a_value() -> None:
    """Frozen, and the same as another that says the same; transforms count by their fingerprint."""
    made = policy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.max_wait = 1.0  # type: ignore[misc]
    assert made.same_as(made)
    assert not made.same_as(policy())  # two nameless models
    left, right = (Policy(Offload(), context_window=1000) for _ in range(2))
    assert left.same_as(right)
    assert not left.same_as(Policy(Offload(min_tokens=5), context_window=1000))
    assert not left.same_as(Policy(Offload(), context_window=1001))
    assert not left.same_as(Policy(Offload(), context_window=1000, fallback=KeepRecent(("messages", 3))))
    assert not left.same_as(Policy(Offload(), context_window=1000, discard=Finish()))
    assert Immediate() == Immediate()
