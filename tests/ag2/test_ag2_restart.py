"""AG2 1.x: what was committed is used again in a new process, from saved events or from the runtime's store."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from streams import Model, agent, converse, exported, imported, seen, small, stream_of, summarised

from helpers import Events, FakeSummarizer, make_runtime, virtual
from smoothctx import FolderStore, Runtime
from smoothctx_autogen.ag2 import restore, saved, sessions

HERE = Path(__file__).parent

#: what the second process does: load, ask once, and say what the model was sent
SECOND = """
import asyncio, json, sys
import smoothctx.launch
from pathlib import Path
from ag2.events import ModelRequest, TextInput
from helpers import FakeSummarizer
from smoothctx import FolderStore, Runtime
from smoothctx_autogen.ag2 import restore, sessions
from streams import Model, agent, imported, rendered, small, stream_of

state = json.loads(Path(sys.argv[1]).read_text())
smoothctx.launch.STORE_WAIT = 30.0  # a busy machine may not read a file in time


async def main():
    model, stream = Model(), stream_of(state["number"])
    events = imported(state["events"])
    if state["edit"]:
        events[0] = ModelRequest([TextInput("<777> edited")])
    await stream.history.replace(events)
    async with Runtime(store=FolderStore(state["store"]) if state["store"] else None) as runtime:
        restore(runtime, stream, state["saved"])
        one = agent(model, runtime, small(FakeSummarizer("hang"), model_id="fake-1"))
        await one.ask("<800> and now?", stream=stream)
        hows = [r.how for s in sessions(runtime, stream) for r in s.receipts]
    print("RESULT" + json.dumps([rendered(model.requests[0]), hows]))


asyncio.run(main())
"""


async def first(tmp_path: Path, *, by: str, edit: bool = False) -> Path:
    """A conversation with a committed summary, exported; returns the file."""
    model, stream = Model(), stream_of(5)
    store = str(tmp_path / "store") if by == "store" else None
    async with Runtime(store=FolderStore(store) if store else None) as runtime:
        one = agent(model, runtime, small(FakeSummarizer(delay=0.0), model_id="fake-1"))
        for turn in range(6):
            await converse(one, 1, stream=stream, first=turn)
            for session in sessions(runtime, stream):
                if session.lookahead is not None:
                    await session.lookahead.wait(30)
        texts = saved(runtime, stream)
    assert summarised(model.requests[-1]) and texts
    state = {
        "events": exported(await stream.history.get_events()),
        "saved": texts if by != "store" else [],
        "store": store,
        "edit": edit,
        "number": 6 if by == "saved elsewhere" else 5,
    }
    file = tmp_path / "state.json"
    await asyncio.to_thread(file.write_text, json.dumps(state))
    return file


def second(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the second process."""
    done = subprocess.run(
        [sys.executable, "-c", SECOND, str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    request, hows = json.loads(done.stdout.split("RESULT", 1)[1])
    return request, hows


@pytest.mark.parametrize("by", ["saved", "saved elsewhere", "store"])
def test_a_new_process_uses_the_committed_summary(tmp_path: Path, by: str) -> None:
    """The first turn of the new process reads the summary, and nothing is missing; saved texts also on a stream of
    another id."""
    request, hows = second(asyncio.run(first(tmp_path, by=by)))
    told = "\n".join(m["content"] for m in request)
    assert "<conversation_summary>" in told and hows[0] == "salvaged" and len(request) < 11
    assert all(f"<{n}>" in told for n in (*range(0, 12, 2), 800))


@pytest.mark.parametrize("by", ["saved", "store"])
def test_not_where_the_history_was_edited_meanwhile(tmp_path: Path, by: str) -> None:
    """A saved summary is used only under a matching digest."""
    request, hows = second(asyncio.run(first(tmp_path, by=by, edit=True)))
    told = "\n".join(m["content"] for m in request)
    assert "<conversation_summary>" not in told and "salvaged" not in hows
    assert "<777>" in told and "<0>" not in told and len(request) == 13


@virtual
async def test_a_reloaded_history_is_the_same_branch() -> None:
    """Equal events in place of those that were there: nothing is stale, nothing is done again."""
    events, model, stream = Events(), Model(delay=0.1), stream_of(5)
    async with make_runtime(on_event=events) as runtime:
        one = agent(model, runtime, small(FakeSummarizer(delay=0.1)))
        await converse(one, 8, stream=stream, pause=0.5)
        (session,) = sessions(runtime, stream)
        before = len(session.receipts)
        await stream.history.replace(imported(exported(await stream.history.get_events())))
        await one.ask("<800> and now?", stream=stream)
        assert summarised(model.requests[-1]) and not events.of("view.dropped")
        assert sessions(runtime, stream) == [session] and len(session.receipts) <= before + 1
        assert seen(model.requests[-1]) == {*range(16), 800}


@virtual
async def test_saved_texts_that_cannot_be_read_are_an_event() -> None:
    """Garbage is reported and changes nothing."""
    events, model, stream = Events(), Model(), stream_of(5)
    async with make_runtime(on_event=events) as runtime:
        restore(runtime, stream, ["{", '{"v": 9}'])
        await converse(agent(model, runtime, small(FakeSummarizer())), 1, stream=stream)
    assert [e.data["where"] for e in events.of("error")] == ["restore", "restore"]
    assert seen(model.requests[0]) == {0}
