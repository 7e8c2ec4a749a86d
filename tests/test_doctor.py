"""The doctor: real measurements on a real engine, and fake servers with one defect each."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given, strategies as st

from flavour_servers import LLAMA_PROPS, VLLM_METRICS, ModelServer
from smoothctx import ConfigurationError, EngineOverloaded, EngineRefused, EngineUnreachable
from smoothctx.cli import main
from smoothctx.doctor import (
    Examination,
    Finding,
    Settings,
    examine,
    findings as shown,
    positions,
    volatile,
)
from smoothctx.engines import Capabilities, EmbeddedEngine, find_weights
from smoothctx.patience import patiently
from virtual import run_virtual

QUICK = Settings(tokens=800, repeats=2)


def examined(server: ModelServer, settings: Settings = QUICK, **options: Any) -> Examination:
    """What the doctor finds on this server."""

    async def run() -> Examination:
        return await examine(server.engine(**options), settings)

    return run_virtual(run)


def found(server: ModelServer, settings: Settings = QUICK, **options: Any) -> dict[str, Finding]:
    """The findings by name."""
    return {f.name: f for f in examined(server, settings, **options).findings}


def names(findings: dict[str, Finding], status: str) -> set[str]:
    """The findings of this status."""
    return {name for name, f in findings.items() if f.status == status}


# --- one defect each


def test_a_healthy_server_has_nothing_to_change() -> None:
    """vLLM with its flags, and small steps: everything is well, in figures."""
    seen = found(ModelServer("vllm", step=32))
    assert names(seen, "bad") == names(seen, "warn") == set()
    assert names(seen, "unknown") == {"priority"}  # only its flags tell
    cache = seen["prefix cache"].data
    assert cache["cold_s"] == pytest.approx(0.82, rel=0.1) and cache["again_s"] < 0.06
    assert cache["cached_tokens"] > 0.9 * cache["tokens"] and 700 < cache["tokens"] < 900
    assert "TTFT 8" in seen["prefix cache"].found and "ms" in seen["prefix cache"].found


def test_no_prefix_cache() -> None:
    """A prompt that is evaluated anew each time: the flag that is missing, and what it costs."""
    seen = found(ModelServer("vllm", caching=False))
    cache = seen["prefix cache"]
    assert cache.status == "bad" and "0 of" in cache.found and "--enable-prefix-caching" in cache.advice
    assert cache.effect_s == pytest.approx(0.8, rel=0.1)
    assert seen["changed middle"].status == "unknown"


@pytest.mark.parametrize(("caching", "status"), [(True, "ok"), (False, "bad")])
def test_promise_15_without_reports_time_tells(caching: bool, status: str) -> None:
    """A server that reports no cached tokens is judged by TTFT, and that is said."""
    seen = found(ModelServer("vllm", reports=False, caching=caching))
    assert seen["prefix cache"].status == status and "judged by time" in seen["prefix cache"].found
    assert seen["prefix cache"].data["cached_tokens"] is None
    assert seen["cache reports"].status == "warn" and "--enable-prompt-tokens-details" in seen["cache reports"].advice
    if caching:
        assert seen["changed middle"].status == "ok"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("nonsense", [False, True])
def test_promise_15_what_takes_no_time_is_not_judged_by_it(caching: bool, nonsense: bool) -> None:
    """Prompts that are done at once show nothing; more cached tokens than the prompt has are no report either."""
    server = ModelServer("vllm", rate=1e6, latency_s=0.002, reports=False, caching=caching)
    if nonsense:
        server.reports = True
        server._hit = lambda prompt, tokens: 5000  # type: ignore[method-assign]
    seen = found(server)
    for name in ("prefix cache", "changed middle"):
        assert seen[name].status == "unknown" and not seen[name].advice and seen[name].effect_s is None
        assert "ask again with more --tokens" in seen[name].found and "5,000" not in seen[name].found
    assert seen["cache reports"].status == "warn"
    assert examined(server).chars_per_s is None


def test_promise_15_chance_is_not_judged() -> None:
    """Short calls that differ as much as a long prompt takes: nothing is concluded from such times."""

    class Uneven(ModelServer):
        """Every second answer comes two seconds later."""

        async def answer(self, request: httpx.Request) -> httpx.Response:
            """Answer one request."""
            await anyio.sleep(2.0 * (len(self.bodies) % 2))
            return await super().answer(request)

    seen = found(Uneven("vllm", reports=False))
    assert seen["prefix cache"].status == seen["changed middle"].status == "unknown"


def test_b186_blocks_larger_than_the_prompt() -> None:
    """Hybrid models cache in blocks of hundreds of tokens: no hit, and no wrong conclusion."""
    page = VLLM_METRICS.replace('block_size="128"', 'block_size="1024"')
    seen = found(ModelServer("vllm", block=1024, pages={"/metrics": (200, page)}))
    assert seen["prefix cache"].status == "bad"
    assert "blocks are of 1024 tokens, more than this prompt" in seen["prefix cache"].found


@pytest.mark.parametrize("reports", [True, False])
def test_a_changed_middle_loses_everything(reports: bool) -> None:
    """A sliding-window model without --swa-full: growth is cached, a rewrite starts from nothing."""
    seen = found(ModelServer("llama.cpp", keeps_head=False, reports=reports))
    assert seen["prefix cache"].status == "ok"
    assert seen["changed middle"].status == "bad" and "--swa-full" in seen["changed middle"].advice
    assert seen["changed middle"].effect_s is not None and seen["changed middle"].effect_s > 0.1


def test_no_headroom() -> None:
    """A background prefill that nothing interrupts: the foreground waits for all of it."""
    seen = found(ModelServer("vllm"))
    room = seen["headroom"]
    assert room.status == "bad" and "--long-prefill-token-threshold" in room.advice
    assert room.data["beside_s"] - room.data["alone_s"] == pytest.approx(1.5, rel=0.2)
    assert room.effect_s == pytest.approx(room.data["beside_s"] - room.data["alone_s"])


def test_headroom_of_a_fast_server() -> None:
    """Where a background prompt is over before a call can meet it, there is room."""
    assert found(ModelServer("vllm", rate=1e6, latency_s=0.001))["headroom"].status == "ok"


def test_headroom_where_the_background_is_refused() -> None:
    """What the server refuses in the background is no error of the examination."""

    class Refusing(ModelServer):
        async def _complete(self, body: dict[str, Any]) -> httpx.Response:
            if body.get("priority") == 20:
                return httpx.Response(400, json={"error": {"message": "too long"}})
            return await super()._complete(body)

    assert found(Refusing("vllm"))["headroom"].status == "unknown"


def test_priority() -> None:
    """Refused, ignored, taken, and sorted by for certain, are four things."""
    refused = found(ModelServer("vllm", priority=False))["priority"]
    assert refused.status == "warn" and "--scheduling-policy priority" in refused.advice
    taken = found(ModelServer("vllm"))["priority"]
    assert taken.status == "unknown" and "make sure of it" in taken.advice
    assert found(ModelServer("sglang"))["priority"].status == "ok"
    none = found(ModelServer("llama.cpp"))["priority"]
    assert none.status == "unknown" and not none.advice


@pytest.mark.parametrize(("flavour", "flag"), [("sglang", "--enable-metrics"), ("llama.cpp", "--metrics")])
def test_no_metrics(flavour: str, flag: str) -> None:
    """Without metrics the flag that shows them is named."""
    seen = found(ModelServer(flavour, pages={"/metrics": (404, "")}))["metrics"]
    assert seen.status == "warn" and flag in seen.advice


def test_a_single_slot() -> None:
    """Background work would take the place of the agent's cache."""
    seen = found(ModelServer("llama.cpp", pages={"/props": (200, {**LLAMA_PROPS, "total_slots": 1})}))["slots"]
    assert seen.status == "bad" and seen.found == "1 slot" and "--parallel 2" in seen.advice
    assert found(ModelServer("llama.cpp"))["slots"].status == "ok"


def test_b189_two_slots_of_their_own_are_used() -> None:
    """On llama.cpp the prompts go to the last slot, the background one beside it: never to the first of three."""
    server = ModelServer("llama.cpp")
    found(server)
    assert {b["id_slot"] for b in server.bodies} == {1, 2}


def test_a_small_window_is_kept_to() -> None:
    """No prompt is longer than the window."""
    server = ModelServer(
        "llama.cpp", pages={"/props": (200, {**LLAMA_PROPS, "default_generation_settings": {"n_ctx": 512}})}
    )
    found(server)
    assert max(len(b["messages"][0]["content"]) // 4 for b in server.bodies) < 400


def test_an_unknown_server_gets_no_special_options() -> None:
    """Another server is sent nothing that it may not know."""
    server = ModelServer("other")
    seen = found(server)
    known = {"model", "messages", "stream", "stream_options", "max_tokens", "temperature"}
    assert all(set(b) <= known for b in server.bodies)
    assert seen["priority"].status == "unknown" and seen["metrics"].status == "warn"


def test_a_server_that_fails_in_the_middle_is_an_error_of_its_own() -> None:
    """An error of the server comes out bare, whatever it interrupts."""
    for text in ("Report", "-5."):
        with pytest.raises(EngineRefused, match="refused"):
            examined(ModelServer("vllm", refuse=text))

    class Stops(ModelServer):
        async def _complete(self, body: dict[str, Any]) -> httpx.Response:
            if any(b.get("priority") == 20 for b in self.bodies):
                raise httpx.ReadError("reset")
            return await super()._complete(body)

    with pytest.raises(EngineUnreachable, match="reset"):
        examined(Stops("vllm"))


class Limited(ModelServer):
    """Refuses each of these requests (by their number) with a status first; ``tried`` counts all of them."""

    def limit(self, *numbers: int, code: int = 429, wait: str | None = "1") -> Limited:
        """Say which."""
        self.numbers, self.code, self.wait, self.tried = set(numbers), code, wait, 0
        return self

    async def _complete(self, body: dict[str, Any]) -> httpx.Response:
        self.tried += 1
        if self.tried in self.numbers:
            headers = {} if self.wait is None else {"Retry-After": self.wait}
            return httpx.Response(self.code, json={"error": {"message": "rate limit"}}, headers=headers)
        return await super()._complete(body)


@pytest.mark.parametrize("wait", ["1", None])
@pytest.mark.parametrize("number", range(1, 24))
def test_a_single_429_does_not_end_it(number: int, wait: str | None) -> None:
    """Whichever call it meets: it is asked again later, and only the answer is timed."""
    seen = found(Limited("other").limit(number, wait=wait))
    cache = seen["prefix cache"]
    assert cache.status == seen["changed middle"].status == "ok" and cache.data["cold_s"] < 0.9


def test_a_server_that_stays_overloaded_is_an_error() -> None:
    """After six times, and no sooner than it asked for."""

    async def run() -> float:
        server = Limited("other").limit(*range(1, 99), code=503, wait="7")
        with pytest.raises(EngineOverloaded, match="rate limit"):
            await examine(server.engine(), QUICK)
        assert server.tried == 6
        return asyncio.get_running_loop().time()

    assert run_virtual(run) >= 35


class Picky(ModelServer):
    """As a hosted reasoning model: its own temperature, its own name of the cap, and no answer of one token."""

    async def _complete(self, body: dict[str, Any]) -> httpx.Response:
        said = ""
        if "max_tokens" in body:
            said = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'"
        elif "temperature" in body:
            said = "Unsupported value: 'temperature' does not support 0 with this model."
        elif body["max_completion_tokens"] < 16:
            said = "Could not finish the message because max_tokens or model output limit was reached."
        return httpx.Response(400, json={"error": {"message": said}}) if said else await super()._complete(body)


def test_a_server_that_refuses_our_options_is_examined_without_them() -> None:
    """No temperature, the other name of the cap and a longer answer: each refusal is met once."""
    server = Picky("other")
    seen = found(server)
    assert names(seen, "bad") == set() and seen["prefix cache"].status == "ok"
    assert sum("temperature" in b for b in server.bodies) == 2 and sum("max_tokens" in b for b in server.bodies) == 1


def test_promise_15_no_headroom_is_claimed_where_the_background_was_refused() -> None:
    """Nothing was beside the call: that is said, not that all is well."""

    class Refusing(ModelServer):
        async def _complete(self, body: dict[str, Any]) -> httpx.Response:
            if body.get("priority") == 20:
                return httpx.Response(429, json={"error": {"message": "limit"}})
            return await super()._complete(body)

    room = found(Refusing("vllm"))["headroom"]
    assert room.status == "unknown" and "refused" in room.found


async def test_the_list_of_models_is_waited_for() -> None:
    """The first request of all may meet a limit as well."""
    told: list[str] = []
    answers = [EngineOverloaded("limit", status=429, retry_after_s=0.001)]

    async def call() -> str:
        if answers:
            raise answers.pop()
        return "models"

    assert await patiently(call, told.append) == ("models", 2)
    assert told == ["the server is overloaded or limits requests (429): again in 0.001 s"]


@pytest.mark.parametrize(("asked", "waited"), [(3600.0, 3600.0), (0.0, 1.0), (90.0, 90.0), (None, 1.0)])
def test_nobody_is_asked_again_sooner_than_it_wishes(asked: float | None, waited: float) -> None:
    """However long that is, up to an hour; where it names nothing, after a pause of ours."""

    async def run() -> float:
        answers = [EngineOverloaded("limit", status=429, retry_after_s=asked)]

        async def call() -> float:
            if answers:
                raise answers.pop()
            return asyncio.get_running_loop().time()

        return (await patiently(call, lambda line: None))[0]

    assert run_virtual(run) == pytest.approx(waited)


def test_a_server_that_wants_more_than_an_hour_is_an_error_at_once() -> None:
    """It says for how long; nobody sits and waits for it."""

    async def run() -> float:
        server = Limited("other").limit(*range(1, 99), wait="7200")
        with pytest.raises(EngineOverloaded, match="asks to be left alone for 7200 s"):
            await examine(server.engine(), QUICK)
        assert server.tried == 1
        return asyncio.get_running_loop().time()

    assert run_virtual(run) < 60


def test_promise_11_a_cancelled_examination_ends() -> None:
    """Cancelling it stops it at once."""

    async def run() -> bool:
        with anyio.move_on_after(1.0) as scope:
            await examine(ModelServer("vllm", rate=1.0).engine(), QUICK)
        return scope.cancelled_caught

    assert run_virtual(run)


@pytest.mark.parametrize(("tokens", "repeats", "text"), [(10, 1, "--tokens 10"), (100, 0, "--repeats 0")])
def test_settings(tokens: int, repeats: int, text: str) -> None:
    """Sizes that cannot work are named."""
    with pytest.raises(ConfigurationError, match=f"^{text}: expected a whole number of at least"):
        Settings(tokens=tokens, repeats=repeats)


# --- the order, and how it is shown


def test_changes_are_in_order_of_effect() -> None:
    """The largest measured effect first; what has none after it, the worse first; what is well not at all."""
    given_ = [
        Finding(name="a", status="unknown", found="", advice="x"),
        Finding(name="b", status="warn", found="", advice="x", effect_s=0.2),
        Finding(name="c", status="bad", found="", advice="x"),
        Finding(name="d", status="bad", found="", advice="x", effect_s=3.0),
        Finding(name="e", status="ok", found=""),
    ]
    assert [f.name for f in shown.in_order(given_)] == ["d", "b", "c", "a"]
    text = shown.as_text("http://x", "m", Capabilities(flavour="vllm", version="1"), given_)
    assert text.startswith("http://x: vllm 1, model m\n") and "1. d: x (saves about 3.0 s a turn)" in text
    assert "BAD   c" in text and max(map(len, text.splitlines())) <= 120
    assert shown.as_text("u", "m", Capabilities(), given_[-1:]).endswith("Nothing to change.")
    data = json.loads(json.dumps(shown.as_json("u", "m", Capabilities(), given_)))
    assert [c["name"] for c in data["changes"]] == ["d", "b", "c", "a"] and len(data["findings"]) == 5
    assert data["capabilities"]["flavour"] == "unknown"


# --- volatile prefixes


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("now 12:03:04. Be brief.", "now 12:03:05. Be brief.", "a time of day"),
        ("on 2026-01-01 we", "on 2026-01-02 we", "a date"),
        ("id 0f8fad5b-d9cb-469f-a165-70867728950e!", "id 7c9e6679-7425-40de-944b-e07fc1f90ae7!", "a uuid"),
        ("at 1796073922 s", "at 1796073925 s", "a Unix time"),
        ("tools: a, b", "tools: b, a", "something"),
    ],
)
def test_b187_two_renderings_differ(first: str, second: str, kind: str) -> None:
    """The offset of the first difference is told, what stands there, and what it costs."""
    head, tail = "You are an agent.\n" * 10, " More text." * 100
    finding = volatile.check([head + first + tail, head + second + tail], chars_per_s=1000.0)
    offset = len(head) + volatile.differs(first, second)
    assert finding.status == "bad" and finding.data["offset"] == offset and finding.data["kind"] == kind
    assert f"offset {offset}" in finding.advice
    assert finding.effect_s == pytest.approx((len(head + first + tail) - offset) / 1000.0)


def test_equal_renderings() -> None:
    """Equal ones are well; a longer one that goes on is volatile at the end of the shorter."""
    assert volatile.check(["abc", "abc", "abc"]).status == "ok"
    assert volatile.check(["abc", "abcd"]).data["offset"] == 3
    assert volatile.check(["abc", "abc", "axc"]).data["offset"] == 1
    assert volatile.check([]).status == "unknown"


def test_of_several_renderings_two_that_differ_are_shown() -> None:
    """Wherever the one that differs stands; of several, the one that differs first."""
    same, other, late = "You are brief. It is 12:00:01 now.", "You are brief. It is 12:00:02 now.", "You are brief. X"
    for texts in ([same, same, other], [same, other, same], [same, other, other, same]):
        finding = volatile.check(texts)
        assert finding.data["offset"] == 28 and finding.data["kind"] == "a time of day"
        assert finding.data["shown"] == [t[4:] for t in (same, other)]
    finding = volatile.check([same, other, same, late])
    assert finding.data["offset"] == 15 and finding.data["shown"] == [same[:39], late]
    assert finding.data["kind"] == "something"


def test_one_rendering_is_searched() -> None:
    """A clock in a single rendering is a suspect; finding none proves nothing."""
    finding = volatile.check(["You are an agent. It is 2026-11-30 21:10:34 now."])
    assert finding.status == "warn" and finding.data["offset"] == 24 and "a date at offset 24" in finding.found
    assert volatile.check(["You are an agent."]).status == "unknown"


@given(st.text(max_size=50), st.text(max_size=50))
def test_property_differs(a: str, b: str) -> None:
    """Everything before the offset is equal, and nothing equal is cut off."""
    k = volatile.differs(a, b)
    assert a[:k] == b[:k] and (k == min(len(a), len(b)) or a[k] != b[k])


async def test_renders(tmp_path: Path) -> None:
    """Files and commands give texts; what fails is a wrong option."""
    file, count = tmp_path / "a.txt", tmp_path / "count"
    file.write_text("hello")
    command = f"echo x >> {count}; wc -l < {count}"
    texts = await volatile.renders([file, file], command, pause_s=0)
    assert texts[:2] == ["hello", "hello"] and [t.strip() for t in texts[2:]] == ["1", "2"]
    with pytest.raises(ConfigurationError, match="--prompt .*nowhere: No such file"):
        await volatile.renders([tmp_path / "nowhere"], None)
    with pytest.raises(ConfigurationError, match="--prompt-command 'echo no >&2; exit 3': exit code 3: no"):
        await volatile.renders([], "echo no >&2; exit 3", pause_s=0)


# --- positions


def test_positions_by_files(tmp_path: Path) -> None:
    """The model's own file is believed before its name."""
    gguf = tmp_path / "gpt2.gguf"
    gguf.write_bytes(b"GGUF" + struct.pack("<I", 3) + b"gemma3.rope.freq_base" + bytes(8))
    finding = positions.check("gpt2", {"model_path": str(gguf)})
    assert finding.data == {"positions": "rope", "by": "the model's own file"}
    for config, kind in (
        ({"rope_theta": 10000.0}, "rope"),
        ({"text_config": {"rope_parameters": {"rope_type": "default"}}}, "rope"),
        ({"n_positions": 1024}, "absolute"),
        ({"alibi": True}, "alibi"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert positions.check("x", {"root": str(tmp_path)}).data["positions"] == kind
    (tmp_path / "config.json").write_text("{")
    assert positions.check("x", {"root": str(tmp_path)}).status == "unknown"


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "rope"),
        ("Qwen/Qwen3-8B", "rope"),
        ("/models/gemma-3-270m-q4_k_m.gguf", "rope"),
        ("openai-community/gpt2", "absolute"),
        ("facebook/opt-125m", "absolute"),
        ("bigscience/bloom-560m", "alibi"),
        ("my-finetune", None),
    ],
)
def test_positions_by_name(model: str, kind: str | None) -> None:
    """Known families are known by name; another one is unknown, not guessed."""
    finding = positions.check(model, {})
    assert finding.data.get("positions") == kind and (finding.status == "unknown") == (kind is None)
    assert bool(finding.advice) == (kind == "absolute")


# --- the command


@pytest.fixture(scope="module")
def engine() -> Generator[EmbeddedEngine]:
    """A real llama.cpp server, asked over HTTP as any other."""
    with asyncio.Runner() as runner:
        server = EmbeddedEngine(find_weights(), context_window=1024, slots=2, start_timeout_s=300.0)
        runner.run(server.start())
        runner.run(server.disconnect())
        yield server
        runner.run(server.aclose())


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs the extra 'local'")
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_real_server(
    engine: EmbeddedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured over HTTP: flavour, cache, kept head, slots, metrics, positions; the table and the JSON agree."""
    assert engine._child is not None
    monkeypatch.setenv("DOCTOR_KEY", engine._child.key)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for k, file in enumerate(files):
        file.write_text(f"You are an agent. Now: 12:00:0{k}. " + "Rules. " * 100)
    events = tmp_path / "events.jsonl"
    events.write_text(json.dumps({"name": "view.committed", "session": "s"}) + "\n")
    out = tmp_path / "doctor.json"
    arguments = ["doctor", engine.root, "--api-key-env", "DOCTOR_KEY", "--tokens", "200", "--repeats", "1"]
    arguments += ["--prompt", str(files[0]), "--prompt", str(files[1]), "--events", str(events), "--json", str(out)]
    assert main(arguments) == 0
    shown_, data = capsys.readouterr(), json.loads(out.read_text())
    seen = {f["name"]: f for f in data["findings"]}
    assert data["capabilities"]["flavour"] == "llama.cpp" and data["capabilities"]["slots"] == 2
    assert data["capabilities"]["context_window"] == 1024 and data["capabilities"]["cached_tokens"] is True
    for name in ("prefix cache", "changed middle", "cache reports", "metrics", "slots", "transform points"):
        assert seen[name]["status"] == "ok", seen[name]
    assert seen["positions"]["data"] == {"positions": "rope", "by": "the model's own file"}
    assert seen["volatile prefix"]["data"]["offset"] == 30 and seen["volatile prefix"]["effect_s"] > 0
    cache = seen["prefix cache"]["data"]
    assert cache["cached_tokens"] >= cache["tokens"] - 2 and 120 < cache["tokens"] < 330
    assert "llama.cpp" in shown_.out and "What to change, in order of effect:" in shown_.out
    assert shown_.err.startswith("... asking the server") and "... " not in shown_.out


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one line that names the option, before anything is measured."""
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for arguments, text in (
        (["--tokens", "3"], "--tokens 3: expected a whole number of at least 64"),
        (["--api-key-env", "NO_SUCH_KEY"], "--api-key-env NO_SUCH_KEY: this environment variable is not set"),
        (["--json", str(tmp_path / "no" / "x.json")], "the folder"),
        (["--json", str(tmp_path)], "that is a folder"),
        (["--events", str(tmp_path / "no.jsonl")], "No such file"),
        (["--prompt", str(tmp_path / "no.txt")], "No such file"),
    ):
        assert main(["doctor", "http://127.0.0.1:9", *arguments]) == 1
        assert text in capsys.readouterr().err
    for url in ("nonsense", "http://127.0.0.1:80000"):
        assert main(["doctor", url]) == 1
        assert f"base_url='{url}'" in capsys.readouterr().err


def test_no_password_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Not in the error of a server that lists no models either."""

    async def nothing(self: Any, path: str) -> Any:
        return {"data": []}

    monkeypatch.setattr("smoothctx.engines.client.OpenAIEngine.get_json", nothing)
    assert main(["doctor", "http://bob:secret@127.0.0.1:9"]) == 1
    said = capsys.readouterr().err
    assert "http://127.0.0.1:9 lists no models" in said and "secret" not in said


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    """A closed port is one line."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert main(["doctor", url, "--model", "m"]) == 1
    assert "is the server running there?" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The help says what is measured, what it costs, and shows examples."""
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for part in ("prefix cache", "headroom", "--prompt-command", "--events", "TOKENS x REPEATS", "examples:"):
        assert part in text


async def test_promise_11_ctrl_c_ends_it_cleanly() -> None:
    """Interrupted in the middle of a measurement: exit code 130, one line, no traceback."""
    asked = asyncio.Event()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            if b"/chat/completions" in line:
                asked.set()
                await reader.read()
            else:
                writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "smoothctx", "doctor", url, "--model", "m", stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        with anyio.fail_after(120):
            await asked.wait()
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        server.close()
    assert process.returncode == 130 and out == b""
    assert b"Traceback" not in err and err.rstrip().endswith(b"interrupted")
