"""The verdict: does a commit pay under ``BreakEven``, by what the session knows of itself now?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .conversation import Conversation
from .economics import Expected, Prices, Speed
from .rules import BreakEven
from .turns import reply_tokens
from .view import Artifact


def speed_of(rates: Any) -> Speed | None:
    """What an engine has shown, once it was calibrated."""
    prefill, decode = getattr(rates, "prefill", None), getattr(rates, "decode", None)
    attention = getattr(rates, "attention_s", None)
    return Speed(prefill, decode, attention) if prefill and decode and attention is not None else None


def of_commit(conversation: Conversation, artifacts: Sequence[Artifact], messages: Sequence[Any]) -> Expected | None:
    """What committing these would bring and cost now: the summaries are paid for, what a preload warmed costs nothing
    any more. ``None`` under another rule, or while no rates are known."""
    rule, rates = _rule_and_rates(conversation)
    if rule is None or rates is None or not artifacts:
        return None
    branch = conversation.branch
    weighed = branch.weigh(artifacts, messages)
    cold = int(sum(a.tokens for a in artifacts) * branch.scale) + weighed.rebilled
    return rule.expected(
        rates,
        made=conversation.pace.made,
        before_tokens=weighed.after + weighed.saved,
        after_tokens=weighed.after,
        uncached_tokens=0 if artifacts[-1].warm else cold,
        output_tokens=reply_tokens(branch.history) * branch.scale,
    )


def worth_starting(conversation: Conversation, *, source: int, expected: int) -> bool:
    """Is a lookahead worth its cost, that makes ``expected`` tokens of ``source`` tokens of the view? It is where the
    hard limit is expected within the turns that are left, or where that cannot be known."""
    rule, rates = _rule_and_rates(conversation)
    if rule is None or rates is None or needed(conversation, rule):
        return True
    branch = conversation.branch
    after = branch.tokens - (source - expected) * branch.scale
    money = isinstance(rates, Prices)
    return rule.expected(
        rates,
        made=conversation.pace.made,
        before_tokens=branch.tokens,
        after_tokens=after,
        uncached_tokens=min(after, after - branch.history.tokens[branch.history.segmenter.lead] * branch.scale),
        output_tokens=reply_tokens(branch.history) * branch.scale,
        summary_input_tokens=source * branch.scale if money else 0,
        summary_output_tokens=expected if money else 0,
    ).pays


def needed(conversation: Conversation, rule: BreakEven) -> bool:
    """Will the hard limit be reached within the turns that are left, as far as is known?"""
    policy = conversation.policy
    tokens = conversation.branch.tokens + policy.reserved_tokens
    turns = conversation.forecast.turns_left(tokens, policy.limit_tokens(policy.hard_limit))
    return turns is None or turns < rule.turns_left(conversation.pace.made)


def _rule_and_rates(conversation: Conversation) -> tuple[BreakEven | None, Speed | Prices | None]:
    rule = conversation.policy.commit
    if not isinstance(rule, BreakEven):
        return None, None
    rates = rule.rates or speed_of(conversation.rates)
    if rates is None:
        conversation.say("breakeven.unrated", "", why="BreakEven() without rates, and no calibrated engine")
    return rule, rates
