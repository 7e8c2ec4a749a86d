"""The same promises over a real PostgreSQL: a private cluster, started for these tests alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from graphs import (
    Chat,
    FakeSummarizer,
    Process,
    SavedState,
    ask,
    chat_graph,
    converse_sync,
    marks,
    on,
    policy_of,
    summaries,
    true_to,
)
from helpers import fill
from smoothctx import Runtime
from smoothctx_langgraph.node import lookahead_node

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parent.parent.name))
#: PostgreSQL does not run as root
USER = "postgres" if os.geteuid() == 0 else None

pytestmark = pytest.mark.skipif(not BINARIES, reason="no PostgreSQL server under /usr/lib/postgresql")


def run(program: str, *arguments: str) -> None:
    """Run one of PostgreSQL's programs, as its own user."""
    command = [str(BINARIES[-1].parent / program), *arguments]
    done = subprocess.run(command, user=USER, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of its own, reached through a socket in its folder."""
    folder = Path(tempfile.mkdtemp(prefix="smoothctx-pg-"))
    data = folder / "data"
    try:
        if USER is not None:
            shutil.chown(folder, USER)
        run("initdb", "-D", str(data), "-A", "trust", "-U", "postgres", "--no-sync", "--no-instructions")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off -c max_connections=20"
        run("pg_ctl", "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "-t", "120", "start")
        try:
            yield f"postgresql:///postgres?host={folder}&user=postgres"
        finally:
            run("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "-t", "120", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def saver(address: str) -> AsyncIterator[Any]:
    """LangGraph's asynchronous checkpointer for PostgreSQL."""
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

    async with AsyncPostgresSaver.from_conn_string(address) as opened:
        await opened.setup()
        yield opened


async def test_a_restart_commits_what_the_checkpoint_holds(saver: Any) -> None:
    """A new runtime and graph on the same database: the same summary at once, and none paid for."""
    async with Process(saver) as first:
        await first.talk(on("restart"), range(8))
        before = summaries(first.chat.last)
        assert before
    async with Process(saver) as second:
        await second.turn(on("restart"), ask(8))
        assert summaries(second.chat.last) == before and second.summariser.calls <= 1


async def test_edits_forks_and_time_travel(saver: Any) -> None:
    """The views are true to their branches (checked in every turn)."""
    async with Process(saver) as process:
        state = await process.talk(on("fork"), range(8))
        old = await process.checkpoint_of(on("fork"), 10)
        state = await process.turn(old, HumanMessage(fill("<900> again", 60)))
        assert len(state["messages"]) == 12 and summaries(process.chat.last)
        edited = HumanMessage(fill("<500> edited", 60), id=state["messages"][0].id)
        await process.graph.aupdate_state(on("fork"), {"messages": [edited]})
        await process.turn(on("fork"), HumanMessage(fill("<910> on", 60)))
        assert 500 in marks(process.chat.last) and 0 not in marks(process.chat.last)


def test_synchronous_callers(address: str) -> None:
    """``invoke`` over the synchronous checkpointer, twice."""
    from langgraph.checkpoint.postgres import PostgresSaver

    texts = []
    for turns in (range(8), range(8, 9)):
        chat, summariser = Chat(), FakeSummarizer(delay=0)
        with PostgresSaver.from_conn_string(address) as saver, Runtime.in_thread() as runtime:
            saver.setup()

            @lookahead_node(runtime, policy_of(summariser))
            def model(state: SavedState, chat: Chat = chat) -> dict[str, Any]:
                return {"messages": [chat.invoke(state["messages"])]}

            state = converse_sync(chat_graph(model, checkpointer=saver), runtime, on("sync"), turns)
            assert true_to(chat.last, state["messages"][:-1])
            texts.append(summaries(chat.last))
    assert texts[0] and texts[0] == texts[1]
