"""AG2 classic: what was committed is used again in a new process, from exported chats or from the runtime's store."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chats import HeldModel, assistant, seen, settle, sleeper, small, summarised, user

from helpers import FakeSummarizer, FlakyStore, make_runtime, virtual
from smoothctx import FolderStore, Runtime
from smoothctx_autogen.ag2_classic import attach

HERE = Path(__file__).parent
FILLER = "lorem ipsum " * 20

#: what the second process does: load, ask once, and say what the model was sent
SECOND = """
import json, sys
import smoothctx.launch
from pathlib import Path
from chats import HeldModel, assistant, settle, small, summarised, seen, user
from helpers import FakeSummarizer, FlakyStore, make_runtime, virtual
from smoothctx import FolderStore, Runtime
from smoothctx_autogen.ag2_classic import attach

state = json.loads(Path(sys.argv[1]).read_text())
smoothctx.launch.STORE_WAIT = 30.0  # a busy machine may not read a file in time
model = HeldModel()
agent, requests = assistant(lambda m: "<900> answer")
person = user(1)
agent.chat_messages[person].extend(state["messages"])
if state["edit"]:
    agent.chat_messages[person][0]["content"] = "<777> edited"
with Runtime.in_thread(store=FolderStore(state["store"]) if state["store"] else None) as runtime:
    attached = attach(agent, runtime, small(model, model_id="fake-1"), name="support")
    attached.restore(state["saved"])
    person.send("<800> and now?", agent, request_reply=True, silent=True)
    hows = [r.how for s in attached.sessions() for r in s.receipts]
print("RESULT" + json.dumps([requests[0], hows, model.calls]))
"""


def first(tmp_path: Path, *, by: str, edit: bool = False) -> Path:
    """A chat with a committed summary, exported; returns the file."""
    agent, requests = assistant(lambda m: f"<{100 + len(requests)}> answer {FILLER}")
    person = user(1)
    store = str(tmp_path / "store") if by == "store" else None
    with Runtime.in_thread(store=FolderStore(store) if store else None) as runtime:
        attached = attach(agent, runtime, small(HeldModel(held=False), model_id="fake-1"), name="support")
        for turn in range(6):
            person.send(f"<{turn}> question {FILLER}", agent, request_reply=True, silent=True)
            settle(attached)
        saved = attached.saved()
    assert summarised(requests[-1]) and saved
    state = {
        "messages": agent.chat_messages[person],
        "saved": saved if by == "saved" else [],
        "store": store,
        "edit": edit,
    }
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    return file


def second(file: Path) -> tuple[list[dict[str, Any]], list[str], int]:
    """Run the second process."""
    done = subprocess.run(
        [sys.executable, "-c", SECOND, str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    request, hows, calls = json.loads(done.stdout.split("RESULT", 1)[1])
    return request, hows, calls


@pytest.mark.parametrize("by", ["saved", "store"])
def test_a_new_process_uses_the_committed_summary(tmp_path: Path, by: str) -> None:
    """The first turn of the new process reads the summary; nothing is paid twice, nothing is missing."""
    request, hows, _ = second(first(tmp_path, by=by))
    assert summarised(request) and hows[0] == "salvaged"
    assert seen(request) >= {*range(6), 800} and len(request) < 12


@pytest.mark.parametrize("by", ["saved", "store"])
def test_not_where_the_history_was_edited_meanwhile(tmp_path: Path, by: str) -> None:
    """A saved summary is used only under a matching digest."""
    request, hows, _ = second(first(tmp_path, by=by, edit=True))
    assert not summarised(request) and "salvaged" not in hows
    assert 777 in seen(request) and 0 not in seen(request) and len(request) == 1 + 12 + 1


def test_saved_texts_that_cannot_be_read_are_an_event() -> None:
    """Garbage is reported and changes nothing."""
    events: list[Any] = []
    agent, requests = assistant(lambda m: "answer")
    with Runtime.in_thread(on_event=events.append) as runtime:
        attached = attach(agent, runtime, small(HeldModel()))
        attached.restore(["{", '{"v": 9}'])
        user(1).send("<0> hello", agent, request_reply=True, silent=True)
    assert [e.data["where"] for e in events if e.name == "error"] == ["restore", "restore"]
    assert seen(requests[0]) == {0}


@virtual
async def test_an_async_chat_finds_what_the_store_has() -> None:
    """The hook cannot wait for the store: what an earlier process committed is used from a later turn on."""
    store, messages = FlakyStore(), []
    for part in range(2):
        agent, asked = sleeper(0.1)
        person = user(1000)
        agent.chat_messages[person].extend(messages)
        model = FakeSummarizer("hang" if part else "answer", delay=0.2)
        async with make_runtime(store=store) as runtime:
            attached = attach(agent, runtime, small(model, model_id="fake-1"), name="support")
            for turn in range(6):
                await person.a_send(f"<{100 * part + turn}> question {FILLER}", agent, request_reply=False, silent=True)
                reply = await agent.a_generate_reply(sender=person)
                await agent.a_send(reply, person, request_reply=False, silent=True)
                await asyncio.sleep(1)
            hows = [r.how for s in attached.sessions() for r in s.receipts]
        messages = agent.chat_messages[person]
    assert hows[0] == "salvaged" and summarised(asked[1][1]) and seen(asked[-1][1]) >= {*range(6), *range(100, 106)}


class Hook:
    """Another hook of the framework, which hands on a list of its own."""

    def __call__(self, content: Any) -> Any:
        return f"{content} (read)"


@virtual
async def test_beside_a_hook_that_makes_a_list_of_its_own() -> None:
    """Then whom the chat is with cannot be told: the view is right all the same, and clearing forgets."""
    agent, asked = sleeper(0.1)
    model = FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        attached = attach(agent, runtime, small(model))
        agent.register_hook("process_last_received_message", Hook())
        person = user(12)
        await person.a_initiate_chat(agent, message=f"<0> question {FILLER}", silent=True)
        assert any(summarised(m) for _, m in asked)
        assert all(m[-1]["content"].endswith("(read)") for _, m in asked)
        assert seen(asked[-1][1]) == set(range(23))
        agent.clear_history(person)
        assert attached.sessions() == []
