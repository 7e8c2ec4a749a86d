"""What a caller may get wrong with AG2 classic, and results beside a huge one."""

from __future__ import annotations

from typing import Any

import pytest
from autogen import ConversableAgent
from chats import HeldModel, Message, assistant, settle, small, summarised, texts, user

from helpers import Events, Rateless, problems
from smoothctx import ClosedError, ConfigurationError, Offload, Policy, Runtime
from smoothctx_autogen.ag2_classic import WrapperModel, attach


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"name": 3}, "name=3"),
        ({"name": ""}, "name=''"),
        ({"tenant": ""}, "tenant=''"),
        ({"tenant": None}, "tenant=None"),
        ({"engine": "x"}, "engine='x'"),
        ({"request": 3}, "request=3"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], names: str) -> None:
    """When it is attached, and then nothing of it is left on the agent."""
    agent, _ = assistant(lambda m: "answer")
    hooks = {k: list(v) for k, v in agent.hook_lists.items()}
    with Runtime.in_thread() as runtime:
        with pytest.raises(ConfigurationError, match=f"^{names}: expected"):
            attach(agent, runtime, small(HeldModel()), **given)
        assert agent.hook_lists == hooks and "clear_history" not in vars(agent)
        attach(agent, runtime, small(HeldModel())).detach()


def test_attached_twice_is_an_error() -> None:
    """Whoever means it detaches the first; the agent stays as it was with that."""
    agent, requests = assistant(lambda m: "answer")
    with Runtime.in_thread() as runtime, Runtime.in_thread() as other:
        first = attach(agent, runtime, small(HeldModel(held=False)))
        hooks = {k: list(v) for k, v in agent.hook_lists.items()}
        for again in (runtime, other):
            with pytest.raises(ConfigurationError, match="attached already"):
                attach(agent, again, small(HeldModel()))
        assert agent.hook_lists == hooks
        person = user(1)
        for turn in range(8):
            person.send(f"<{turn}> question {'lorem ipsum ' * 20}", agent, request_reply=True, silent=True)
            settle(first)
    assert summarised(requests[-1])


@pytest.mark.parametrize("model_id", ["", " ", 3])
def test_a_wrong_model_id_is_named(model_id: Any) -> None:
    """It would name artifacts, or quietly be left out."""
    with pytest.raises(ConfigurationError, match="^model_id="):
        WrapperModel({"config_list": [{"model": "m", "api_key": "k"}]}, model_id=model_id)


@pytest.mark.parametrize("saved", [None, "junk", b"junk", {"a": "b"}, 3])
def test_what_is_no_list_of_texts_is_not_restored(saved: Any) -> None:
    """The mistake of a caller, named at once."""
    agent, _ = assistant(lambda m: "answer")
    with Runtime.in_thread() as runtime:
        attached = attach(agent, runtime, small(HeldModel()))
        with pytest.raises(ConfigurationError, match="^saved="):
            attached.restore(saved)


def test_bad_texts_are_events() -> None:
    """Saved texts come from outside: what cannot be read is said, and the chat goes on."""
    events = Events()
    agent, requests = assistant(lambda m: "answer")
    with Runtime.in_thread(on_event=events) as runtime:
        attached = attach(agent, runtime, small(HeldModel()))
        attached.restore([1, "junk"])
        user(1).send("<0> question", agent, request_reply=True, silent=True)
    assert len(requests) == 1
    assert [e.data["where"] for e in events.of("error")] == ["ag2_classic.restore", "restore"]
    assert events.of("error")[0].data["error"] == "MessageError: saved[0]: expected a text, got int"


def test_a_runtime_that_was_never_opened_is_the_callers_mistake() -> None:
    """The first reply raises, before the model is asked."""
    events = Events()
    agent, requests = assistant(lambda m: "answer")
    attach(agent, Runtime(on_event=events), small(HeldModel()))
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"Runtime\.in_thread"):
            user(1).send("<0> question", agent, request_reply=True, silent=True)
    assert requests == [] and events == []


@pytest.mark.parametrize("error", [RuntimeError("no rates"), ClosedError("it was closed")], ids=repr)
def test_an_engine_that_no_session_can_be_had_with_leaves_the_agent_as_it_was(error: Exception) -> None:
    """It is no runtime that was never opened, whatever the engine raises: the replies go on, and events tell of it."""
    events = Events()
    agent, requests = assistant(lambda m: "answer")
    with Runtime.in_thread(on_event=events) as runtime:
        attach(agent, runtime, small(HeldModel()), engine=Rateless(error))
        user(1).send("<0> question", agent, request_reply=True, silent=True)
    assert len(requests) == 1
    assert [e.data["where"] for e in events.of("error")] == ["lines"] and not events.of("turn.raw")


@pytest.mark.parametrize("how", ["max_message_tokens", "offload"])
def test_a_small_result_beside_a_huge_one_stays(how: str) -> None:
    """Parallel calls: the huge result becomes a stub, the small one is read as it is, in both forms of the group."""

    def answer(messages: list[Message]) -> str | Message:
        if messages[-1]["role"] == "tool":
            return "<90> done"
        made = [
            {"id": f"{name}{len(messages)}", "type": "function", "function": {"name": name, "arguments": "{}"}}
            for name in ("read_log", "balance")
        ]
        return {"role": "assistant", "content": None, "tool_calls": made}

    limits: dict[str, Any] = {"hard_limit": ("tokens", 400_000), "min_savings": 0.0}
    policy = (
        small(HeldModel(), trigger=("tokens", 300_000), land_at=("tokens", 10_000), max_message_tokens=500, **limits)
        if how == "max_message_tokens"
        else Policy(
            Offload(min_tokens=500, keep_recent=0), trigger=("tokens", 20_000), land_at=("tokens", 10), **limits
        )
    )
    agent, requests = assistant(answer)
    person = ConversableAgent("person", llm_config=False, human_input_mode="NEVER", max_consecutive_auto_reply=1000)
    person.register_function({"read_log": lambda: "log line\n" * 20_000, "balance": lambda: "BALANCE=4711"})
    inputs: list[list[Message]] = []
    with Runtime.in_thread() as runtime:
        attached = attach(agent, runtime, policy)
        agent.register_hook("update_agent_state", lambda a, messages: settle(attached))
        agent.register_hook("process_all_messages_before_reply", lambda m: inputs.append(list(m)) or m)
        for turn in range(3):
            person.send(f"<{turn}> question", agent, request_reply=False, silent=True)
            made = agent.generate_reply(sender=person)
            agent.send(made, person, request_reply=False, silent=True)
            person.send(person.generate_reply(sender=agent), agent, request_reply=True, silent=True)
    request = requests[-1]
    assert not problems(request)
    told = {m["tool_call_id"]: m["content"] for m in request if m["role"] == "tool"}
    logs = [t for i, t in told.items() if i.startswith("read_log")]
    assert [t for i, t in told.items() if i.startswith("balance")] == ["BALANCE=4711"] * 3 and len(logs) == 3
    assert sum("[offloaded:" in t for t in logs) >= (3 if how == "max_message_tokens" else 1)
    assert "BALANCE=4711" in texts(inputs[-1])
