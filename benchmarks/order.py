"""Which lookahead goes first: earliest deadline against first in, first out, on the same trace.

python benchmarks/order.py [--traces 8] [--minutes 15] [--json FILE]

Eight sessions share one engine: a simulated one, in virtual time, with the rates of a small model on two cores (220
tokens/s prefill, 40 tokens/s decode). They keep it busy but do not overload it (beyond that everything is late, in
whatever order). Half of them grow fast, half slowly. A commit is late when its turn reached the hard limit and had to
wait for the summary, or to do without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from smoothctx import Policy, Runtime, Session, Speed, Summarize
from smoothctx.testing import FakeEngine, run_virtual
from smoothctx.work import Work

SESSIONS = 8
#: tokens of each turn, and seconds between the turns of a session: of those that grow fast, and of the others
FAST, SLOW = (560, 45.0), (140, 45.0)
WINDOW, SUMMARY, REPLY = 4096, 960, 24
RATES = Speed(prefill_tokens_per_s=220.0, decode_tokens_per_s=40.0)
ANSWER = "The summary names what was done, what was found, and what is left to do. " * 40


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the trace: when it begins at the earliest, and how many tokens it adds."""

    at_s: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One session of the trace."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one arm did on one trace. ``waited_s``: of its turns for summaries, in all."""

    order: str
    trace: int
    turns: int
    commits: int
    late: int
    fallbacks: int
    waited_s: float


def trace(number: int, minutes: float) -> list[Agent]:
    """What each session does; the same number gives the same trace."""
    rng = random.Random(number)
    agents = []
    for k in range(SESSIONS):
        size, pause = SLOW if k % 2 == 0 else FAST  # half of them slow, each before a fast one
        at, turns = rng.uniform(0.0, pause), []
        while at < minutes * 60:
            turns.append(Turn(at_s=at, tokens=round(size * rng.uniform(0.8, 1.2))))
            at += pause * rng.uniform(0.8, 1.2)
        agents.append(Agent(turns=tuple(turns)))
    return agents


def text(session: int, number: int, tokens: int) -> str:
    """About so many tokens that no other session has."""
    return (f"[{session}.{number}] " + "the tool has read some lines of a file; " * tokens)[: tokens * 4]


async def converse(session: Session, engine: FakeEngine, k: int, agent: Agent) -> None:
    """One agent: it takes its turns when they are due, or as soon as the last one is over."""
    loop = asyncio.get_running_loop()
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are agent {k}."}]
    for number, turn in enumerate(agent.turns):
        await asyncio.sleep(max(0.0, turn.at_s - loop.time()))
        messages.append({"role": "user", "content": text(k, number, turn.tokens)})
        view = await session.commit(messages)
        async with session.foreground() as call:
            async with engine.stream(view, max_tokens=REPLY, **session.request_options()) as stream:
                async for _ in stream:
                    call.first_token()
        messages.append({"role": "assistant", "content": f"Done with {number}. " + "It went well. " * 5})
        session.observe(messages)


def first_in_first_out(runtime: Runtime) -> None:
    """Hide from the queue when each work is due."""
    pool: Any = runtime.flights._pool
    submit = pool.submit

    def without_due(work: Work) -> None:
        work.due = None
        submit(work)

    pool.submit = without_due


def measure(order: str, number: int, minutes: float) -> Figures:
    """One arm on one trace."""

    async def run() -> Figures:
        loop = asyncio.get_running_loop()
        engine = FakeEngine(ANSWER, speed=RATES)
        policy = Policy(
            Summarize(engine, keep=("messages", 4), max_tokens=SUMMARY, facts=False, fixed_tokens=True),
            context_window=WINDOW,
            token_counter=engine.count,
        )
        async with Runtime(clock=loop.time, concurrency=1) as runtime:
            if order == "fifo":
                first_in_first_out(runtime)
            agents = trace(number, minutes)
            sessions = [runtime.session(f"s{k}", policy=policy, engine=engine) for k in range(SESSIONS)]
            async with asyncio.TaskGroup() as group:
                for k, session in enumerate(sessions):
                    group.create_task(converse(session, engine, k, agents[k]))
            receipts = [receipt for session in sessions for receipt in session.receipts]
            late = [receipt for receipt in receipts if receipt.how in ("promoted", "fallback")]
            return Figures(
                order=order,
                trace=number,
                turns=sum(len(agent.turns) for agent in agents),
                commits=len(receipts),
                late=len(late),
                fallbacks=sum(receipt.how == "fallback" for receipt in late),
                waited_s=round(sum(receipt.waited_s for receipt in late), 1),
            )

    return run_virtual(run)


def compare(traces: int, minutes: float) -> list[Figures]:
    """Both arms on the same traces."""
    return [measure(order, number, minutes) for number in range(traces) for order in ("deadline", "fifo")]


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=8, help="traces (default 8)")
    parser.add_argument("--minutes", type=float, default=15.0, help="simulated minutes of each (default 15)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    found = compare(options.traces, options.minutes)
    print(f"{'trace':>5} {'order':<9} {'turns':>6} {'commits':>8} {'late':>5} {'fallbacks':>10} {'waited_s':>9}")
    for f in found:
        print(f"{f.trace:>5} {f.order:<9} {f.turns:>6} {f.commits:>8} {f.late:>5} {f.fallbacks:>10} {f.waited_s:>9.1f}")
    for order in ("deadline", "fifo"):
        mine = [f for f in found if f.order == order]
        print(f"  all {order:<9} late {sum(f.late for f in mine)} of {sum(f.commits for f in mine)} commits")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(f) for f in found], file, indent=2)


if __name__ == "__main__":
    main()
