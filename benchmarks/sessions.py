"""Memory of many open sessions: our own bytes per held message, the caller's messages not counted.

python benchmarks/sessions.py [--sessions 10000] [--messages 50] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tracemalloc
from typing import Any

from smoothctx import KeepRecent, Policy, Runtime


def conversation(session: int, n: int) -> list[dict[str, Any]]:
    """Texts differ in every session, as they would."""
    roles = ("user", "assistant")
    return [{"role": roles[k % 2], "content": f"session {session}, message {k}: " + "x" * 200} for k in range(n)]


async def measure(sessions: int, n: int) -> dict[str, float]:
    """Open the sessions and return what they hold, in bytes."""
    policy = Policy(KeepRecent(), context_window=32_000)
    histories = [conversation(k, n) for k in range(sessions)]
    async with Runtime() as runtime:
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for k, messages in enumerate(histories):
            session = runtime.session(f"user-{k}", policy=policy)
            await session.commit(messages)
            session.observe(messages)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    return {"sessions": sessions, "messages": n, "bytes": held, "bytes_per_message": held / (sessions * n)}


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000, help="open sessions (default 10000)")
    parser.add_argument("--messages", type=int, default=50, help="messages in each (default 50)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    found = asyncio.run(measure(options.sessions, options.messages))
    print(
        f"{options.sessions:,} sessions x {options.messages} messages: {found['bytes'] / 2**20:.1f} MiB held, "
        f"{found['bytes_per_message']:.0f} bytes per message"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
