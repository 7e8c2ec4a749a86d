"""What a caller may get wrong with AutoGen: named at once, in the caller's words; and a runtime that is not open."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent

from autogen_helpers import A, Client, H, Summarizer, options
from helpers import Events, FakeSummarizer, virtual
from smoothctx import ClosedError, ConfigurationError, Policy, Runtime, Summarize
from smoothctx_autogen import (
    LookaheadChatCompletionContext,
    LookaheadOptions,
    client_model,
    set_default_runtime,
)
from smoothctx_autogen.config import read_options


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"options": 3}, "options=3"),
        ({"options": [("keep", 3)]}, "options="),
        ({"options": {"contextwindow": 4000}}, "options: 'contextwindow' is unknown; .*context_window"),
        ({"options": {"context_window": "much"}}, "options: context_window='much': "),
        ({"options": {"keep": 12}}, "options: keep=12: "),
        ({"options": {"trigger": ("half", 1)}}, "options: trigger=.*'fraction', 'tokens' or 'messages'"),
        ({"options": {"discard": "never"}}, "options: discard='never': .*'salvage'"),
        ({"options": {"commit": "never", "context_window": 4000}}, "commit='never'"),
        ({"tenant": ""}, "tenant=''"),
        ({"tenant": 3}, "tenant=3"),
        ({"own_client": "yes"}, "own_client='yes': expected True or False"),
        ({"own_client": None}, "own_client=None"),
        ({"runtime": "here"}, "runtime='here'"),
        ({"inner": []}, r"inner=\[\]"),
        ({"engine": "x"}, "engine='x': expected an engine"),
        ({"request": []}, r"request=\[\]: expected a mapping"),
        ({"options": {"preload_kv": "maybe"}}, "options: preload_kv='maybe': "),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], names: str) -> None:
    """At construction: option, value, and what is allowed."""
    with pytest.raises(ConfigurationError, match=f"^{names}"):
        LookaheadChatCompletionContext(Summarizer(), **{"options": options(), **given})


def test_options_that_exclude_each_other() -> None:
    """A policy has its own model and options; one of these contexts is not wrapped into another."""
    policy = Policy(Summarize(FakeSummarizer()), context_window=4000)
    with pytest.raises(ConfigurationError, match="^own_client: "):
        LookaheadChatCompletionContext(policy=policy, own_client=True)
    with pytest.raises(ConfigurationError, match="^options: "):
        LookaheadChatCompletionContext(policy=policy, options={})
    with pytest.raises(ConfigurationError, match="^policy='x'"):
        LookaheadChatCompletionContext(policy="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="^inner="):
        LookaheadChatCompletionContext(
            Summarizer(), options=options(), inner=LookaheadChatCompletionContext(Summarizer(), options=options())
        )


def test_options_may_be_a_mapping() -> None:
    """As a config file holds them: the same as given one by one; left out, they are the defaults."""
    given = {"context_window": 4000, "keep": ["messages", 6], "trigger": [["fraction", 0.5], ["messages", 40]]}
    assert read_options(given) == LookaheadOptions(
        context_window=4000, keep=("messages", 6), trigger=[("fraction", 0.5), ("messages", 40)]
    )
    assert read_options(None) == read_options({}) == LookaheadOptions()
    assert LookaheadChatCompletionContext(Summarizer(), options=given).dump_component().config["options"]["keep"] == (
        "messages",
        6,
    )


@pytest.mark.parametrize("model_id", ["", " ", 3])
def test_a_wrong_model_id_is_named(model_id: Any) -> None:
    """It would name artifacts, or quietly be left out."""
    with pytest.raises(ConfigurationError, match="^model_id="):
        client_model(Summarizer(), model_id=model_id)


@pytest.mark.parametrize("default", [False, True])
@virtual
async def test_a_runtime_that_was_never_opened_is_the_callers_mistake(default: bool) -> None:
    """It raises at the first use, before anything is added; once it is open everything works."""
    events = Events()
    runtime = Runtime(on_event=events)
    set_default_runtime(runtime if default else None)
    try:
        client = Client()
        given = None if default else runtime
        context = LookaheadChatCompletionContext(Summarizer(), options=options(), runtime=given)
        for message in (H(), A()):
            with pytest.raises(ClosedError, match="async with Runtime"):
                await context.add_message(message)
        with pytest.raises(ClosedError, match="async with Runtime"):
            await context.get_messages()
        agent = AssistantAgent("agent", client, model_context=context)
        with pytest.raises(ClosedError, match="async with Runtime"):
            await agent.run(task="hello")
        assert await context.inner.get_messages() == [] and client.requests == [] and events == []
        async with runtime:
            await agent.run(task="hello")
            assert len(await context.get_messages()) == 2
    finally:
        set_default_runtime(None)


def test_the_retrieve_snippet_reads_what_was_offloaded(tmp_path: Path) -> None:
    """The page's agent gets the end of the log that it could not see."""
    page = (Path(__file__).parents[2] / "docs" / "autogen.md").read_text()
    (code,) = [c for c in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "retrieve" in c]
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("[retrieve id=") and lines[-1] == "The disk was full."
