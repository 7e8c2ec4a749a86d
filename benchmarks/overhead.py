"""What a turn costs when there is nothing to do, against LangChain's SummarizationMiddleware in the same run.

Ours: ``commit`` and ``observe`` with one new message each turn. Theirs: the no-op ``before_model``, once a turn.
Both see the same texts, each in its own message type. Rows at 100, 1,000 and 10,000 messages; besides, a turn
after a reload (equal copies), once.

    python benchmarks/overhead.py [--turns 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import statistics
import time
from typing import Any

from smoothctx import KeepRecent, Policy, Runtime

SIZES = (100, 1_000, 10_000)
TEXT = "The agent read src/app/router.py and found that the session id is missing at line {n}. "


def dicts(n: int) -> list[dict[str, Any]]:
    """A conversation of ``n`` messages, a tool call with its result in every tenth turn."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a careful engineer."}]
    while len(messages) < n:
        k = len(messages)
        messages.append({"role": "user", "content": TEXT.format(n=k) * 3})
        if k % 20 == 1:
            call = {"id": f"c{k}", "type": "function", "function": {"name": "grep", "arguments": '{"q": "session"}'}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{k}", "content": TEXT.format(n=k) * 4})
        messages.append({"role": "assistant", "content": TEXT.format(n=k)})
    return messages[:n]


async def ours(n: int, turns: int) -> tuple[list[float], float]:
    """Seconds per turn, and of the one turn after a reload."""
    async with Runtime() as runtime:
        policy = Policy(
            KeepRecent(), trigger=("tokens", 10**9), hard_limit=("tokens", 2 * 10**9), land_at=("tokens", 1000)
        )
        session = runtime.session("bench", policy=policy)
        messages = dicts(n)
        view = await session.commit(messages)
        assert len(view) == n and all(a is b for a, b in zip(view, messages, strict=True))
        samples = []
        for k in range(turns):
            messages.append({"role": "user" if k % 2 else "assistant", "content": TEXT.format(n=k)})
            start = time.perf_counter()
            view = await session.commit(messages)
            session.observe(messages)
            samples.append(time.perf_counter() - start)
        assert all(a is b for a, b in zip(view, messages, strict=True))
        reloaded = copy.deepcopy(messages)
        start = time.perf_counter()
        await session.commit(reloaded)
        session.observe(reloaded)
        return samples, time.perf_counter() - start


def theirs(n: int, turns: int) -> list[float]:
    """Seconds per turn of the stock middleware that finds nothing to do."""
    from langchain.agents.middleware import SummarizationMiddleware
    from langchain_core.language_models.fake_chat_models import FakeListChatModel
    from langchain_core.messages import convert_to_messages

    middleware = SummarizationMiddleware(FakeListChatModel(responses=["x"]), trigger=("tokens", 10**9))
    messages: list[Any] = convert_to_messages(dicts(n))
    runtime: Any = None
    middleware.before_model({"messages": messages}, runtime)
    samples = []
    for k in range(turns):
        messages.append(
            convert_to_messages([{"role": "user" if k % 2 else "assistant", "content": TEXT.format(n=k)}])[0]
        )
        start = time.perf_counter()
        assert middleware.before_model({"messages": messages}, runtime) is None
        samples.append(time.perf_counter() - start)
    return samples


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100, help="turns measured at each size (default 100)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args()
    rows = []
    print(f"{'messages':>9} {'smoothctx':>12} {'SummarizationMiddleware':>24} {'ratio':>8} {'after a reload':>15}")
    for n in SIZES:
        turns = options.turns if n < 10_000 else max(20, options.turns // 3)
        # Interleaved in three rounds, so that a slow phase of the machine hits both.
        mine: list[float] = []
        peer: list[float] = []
        reload = 0.0
        for _ in range(3):
            samples, reload = asyncio.run(ours(n, turns))
            mine += samples
            peer += theirs(n, turns)
        a, b = statistics.median(mine) * 1e6, statistics.median(peer) * 1e6
        rows.append({"messages": n, "ours_us": a, "peer_us": b, "ratio": a / b, "reload_us": reload * 1e6})
        print(f"{n:>9} {a:>9.0f} us {b:>21.0f} us {a / b:>8.3f} {reload * 1e6:>12.0f} us")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": rows, "turns": options.turns}, file, indent=2)


if __name__ == "__main__":
    main()
