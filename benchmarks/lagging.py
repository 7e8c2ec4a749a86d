"""KStepOff: an agent goes on while a memory model, three times slower than a turn, summarises k turns behind it.

Two tables. Over 200 turns: how long any turn waited, how stale the summaries were that it went on with. And the bound
of when a shorter context saves time: ten settings around break-even, its verdict beside the measured seconds.

An engine of given rates in virtual time (``smoothctx.testing``): exact, the same on every machine, done in seconds.

python benchmarks/lagging.py [--turns 200] [--k 1 4 8] [--slower 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from smoothctx import KStepOff, Policy, Runtime, Speed, Summarize
from smoothctx.economics import LatencyBound, latency_bound
from smoothctx.testing import FakeEngine, FakeModel, run_virtual

#: attention's seconds for a token of context, as parts and multiples of break-even
FACTORS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.5, 2.0)
#: seconds that the agent's tools take in a turn
TOOLS_S = 0.2
SYSTEM = {"role": "system", "content": "You are an agent."}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The agent, its engine and its memory model. Sizes in tokens, rates in tokens a second."""

    k: int = 4
    prefill: float = 2000.0
    decode: float = 50.0
    attention_s: float = 2e-7
    output: int = 48
    given: int = 60
    summary: int = 150
    #: turns that lie behind when it begins, and the tokens of each
    behind: int = 20
    behind_tokens: int = 200
    #: the memory model's seconds, in turns
    slower: float = 3.0

    @property
    def turn_s(self) -> float:
        """Seconds of an ordinary turn, without prefill and attention."""
        return self.output / self.decode + TOOLS_S


@dataclass(kw_only=True)
class Played:
    """What became of an agent, turn by turn: seconds of its model call, seconds that the boundary took before it, and
    tokens of its view. And the turns at which the view was rewritten, each with the summary's lag in turns, and the
    tokens of the history at the end."""

    call_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    view: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    history: int = 0


def text(tokens: int, number: int) -> str:
    """So many tokens of the fake engine, different for each number."""
    return (f"{number:03d} " * tokens)[: 4 * tokens]


async def play(setting: Setting, turns: int, *, lagging: bool) -> Played:
    """So many turns of an agent, with the lagging memory model or with its raw context."""
    now = asyncio.get_running_loop().time
    engine = FakeEngine(
        *[text(setting.output, 500 + n) for n in range(turns)],
        speed=Speed(setting.prefill, setting.decode, attention_s=setting.attention_s),
    )
    memory = FakeModel(text(setting.summary, 0), delay_s=setting.slower * setting.turn_s)
    messages: list[dict[str, Any]] = [SYSTEM]
    for n in range(setting.behind):
        messages.append({"role": "user", "content": text(setting.behind_tokens // 2, n)})
        messages.append({"role": "assistant", "content": text(setting.behind_tokens // 2, n)})
    await engine.prefill(messages)
    found = Played()
    policy = Policy(
        Summarize(memory, max_tokens=2 * setting.summary, facts=False),
        commit=KStepOff(setting.k),
        context_window=1_000_000,
        token_counter=engine.count,
    )
    async with Runtime(clock=now) as runtime:
        session = runtime.session("agent", policy=policy)
        for n in range(turns):
            messages.append({"role": "user", "content": text(setting.given, n)})
            began, before = now(), len(session.receipts)
            view = await session.commit(messages) if lagging else list(messages)
            found.waited_s.append(now() - began)
            if len(session.receipts) > before:
                found.commits.append(n)
                found.lags.append(session.receipts[-1].lag)
            found.view.append(engine.count(view))
            began = now()
            reply = await engine.complete(view, max_tokens=setting.output)
            found.call_s.append(now() - began)
            messages.append({"role": "assistant", "content": reply.text})
            if lagging:
                session.observe(messages)
            await asyncio.sleep(TOOLS_S)
    found.history = engine.count(messages)
    return found


# -- no turn waits -----------------------------------------------------------------------------------------------------


def staleness(setting: Setting, turns: int) -> dict[str, Any]:
    """Many turns with the memory model: what they waited, and how stale the summaries were."""
    found = run_virtual(lambda: play(setting, turns, lagging=True))
    return {
        "k": setting.k,
        "turns": turns,
        "waits": sum(waited > 0 for waited in found.waited_s),
        "longest_wait_s": max(found.waited_s),
        "commits": len(found.commits),
        "lag_least": min(found.lags, default=0),
        "lag_most": max(found.lags, default=0),
        "lag_mean": sum(found.lags) / len(found.lags) if found.lags else 0.0,
        "view_most_tokens": max(found.view[found.commits[0] :]) if found.commits else max(found.view),
        "history_tokens": found.history,
    }


# -- the bound ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One setting: what the bound says, and what the calls between two commits took with and without the summary."""

    factor: float
    attention_s: float
    summary_tokens: int
    full_tokens: int
    decoded_tokens: int
    bound: LatencyBound
    raw_s: float
    lagging_s: float

    @property
    def saves(self) -> bool:
        """Measured: were the calls faster with the shorter context?"""
        return self.lagging_s < self.raw_s

    @property
    def agrees(self) -> bool:
        """Does the bound say so, too?"""
        return self.bound.holds == self.saves


def judged(setting: Setting, factor: float) -> Verdict:
    """Play the agent with and without its memory model, and look at the calls from the first commit to the second."""
    turns = 2 * setting.k + 2 * math.ceil(setting.slower) + 6
    found = run_virtual(lambda: play(setting, turns, lagging=True))
    raw = run_virtual(lambda: play(setting, turns, lagging=False))
    first, second = found.commits[:2]
    # In the paper's terms, on a machine of 1e12 bytes and 2e14 operations a second.
    memory_bytes, flops = 1e12, 2e14
    sizes = {"summary_tokens": found.view[first], "full_tokens": raw.view[first]}
    decoded = (second - first) * setting.output
    bound = latency_bound(
        **sizes,
        decoded_tokens=decoded,
        prefill_flops_per_token=flops / setting.prefill,
        kv_bytes_per_token=setting.attention_s * memory_bytes,
        flops_per_byte=flops / memory_bytes,
    )
    return Verdict(
        factor=factor,
        attention_s=setting.attention_s,
        **sizes,
        decoded_tokens=decoded,
        bound=bound,
        raw_s=sum(raw.call_s[first:second]),
        lagging_s=sum(found.call_s[first:second]),
    )


def around_break_even(setting: Setting) -> list[Verdict]:
    """Ten settings around break-even: attention that costs a part of, or several times, what the bound asks for."""
    pilot = judged(setting, 1.0)
    ratio = pilot.bound.ratio
    even = ratio / (1 - ratio) / (setting.prefill * pilot.decoded_tokens)
    return [judged(replace(setting, attention_s=even * f), f) for f in FACTORS]


# -- printing ----------------------------------------------------------------------------------------------------------


def table(waits: list[dict[str, Any]], verdicts: list[Verdict]) -> str:
    """Both tables for people."""
    lines = ["  k  turns  waits  longest wait  commits  lag least/mean/most  largest view  history"]
    for w in waits:
        lags = f"{w['lag_least']}/{w['lag_mean']:.1f}/{w['lag_most']}"
        lines.append(
            f"{w['k']:>3}{w['turns']:>7}{w['waits']:>7}{w['longest_wait_s'] * 1000:>11.1f} ms{w['commits']:>9}"
            f"{lags:>21}{w['view_most_tokens']:>14}{w['history_tokens']:>9}"
        )
    lines += ["", "x break-even  L_sum/L_full  bound  holds  raw s  with summary s  saves  agree"]
    for v in verdicts:
        yes = ["yes" if flag else "no" for flag in (v.bound.holds, v.saves, v.agrees)]
        lines.append(
            f"{v.factor:>12.2f}{v.bound.ratio:>14.3f}{v.bound.bound:>7.3f}{yes[0]:>7}{v.raw_s:>7.2f}"
            f"{v.lagging_s:>16.2f}{yes[1]:>7}{yes[2]:>7}"
        )
    lines.append(f"the bound's verdict agrees in {sum(v.agrees for v in verdicts)} of {len(verdicts)} settings")
    return "\n".join(lines)


def as_json(waits: list[dict[str, Any]], verdicts: list[Verdict]) -> dict[str, Any]:
    """Everything for machines."""
    rows = [{**asdict(v), "holds": v.bound.holds, "saves": v.saves, "agrees": v.agrees} for v in verdicts]
    return {"benchmark": "lagging", "waits": waits, "bound": rows}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200, help="turns of the first table (default 200)")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4, 8], help="lags in turns (default 1 4 8)")
    parser.add_argument("--slower", type=float, default=3.0, help="a summary takes so many turns (default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args(arguments)
    setting = Setting(slower=options.slower)
    waits = [staleness(replace(setting, k=k), options.turns) for k in options.k]
    verdicts = around_break_even(replace(setting, k=options.k[len(options.k) // 2]))
    print(table(waits, verdicts))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(as_json(waits, verdicts), file, indent=2)


if __name__ == "__main__":
    main()
