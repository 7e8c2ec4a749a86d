"""Flavours: what a probe finds on each server, and what is then sent.

The answers of vLLM and llama.cpp are recorded ones; those of SGLang follow its documented API: no
server of it was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from flavour_servers import SGLANG_INFO, VLLM_METRICS, ModelServer
from smoothctx import ConfigurationError, EngineProtocolError, EngineRefused, EngineUnreachable
from smoothctx.engines import Binding, Capabilities, OpenAIEngine, PreloadReport
from smoothctx.engines.slots import SlotBinding
from smoothctx.foreground import Foreground
from virtual import run_virtual

HELLO = [{"role": "user", "content": "hello " * 200}]


def probed(server: ModelServer, url: str = "http://127.0.0.1:8000", **options: Any) -> Capabilities:
    """What a probe of this server finds."""

    async def main() -> Capabilities:
        return await server.engine(url, **options).probe()

    return run_virtual(main)


def test_vllm() -> None:
    """Version, window, block size and prefix caching as told; priority and cached tokens as shown by a request."""
    server = ModelServer("vllm")
    assert probed(server) == Capabilities(
        flavour="vllm",
        version="0.32.0",
        context_window=8192,
        priority="lower",
        preload=True,
        metrics=True,
        cached_tokens=True,
        tokenize=True,
        cache_salt=True,
        block_size=128,
        prefix_caching=True,
    )
    assert [b["priority"] for b in server.bodies] == [1] and server.bodies[0]["max_tokens"] == 1


def test_vllm_without_the_flags() -> None:
    """A refused priority is none, unreported cached tokens are unknown, and without a cache there is no preload."""
    page = VLLM_METRICS.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')
    known = probed(ModelServer("vllm", priority=False, reports=False, pages={"/metrics": (200, page)}))
    assert (known.priority, known.cached_tokens, known.prefix_caching, known.preload) == (None, None, False, False)
    known = probed(ModelServer("vllm", reports=False))
    assert (known.priority, known.cached_tokens) == ("lower", None)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"scheduler_config": {"policy": "priority"}}, ("lower", True)),
        ({"scheduler_config": {"policy": "fcfs"}}, (None, False)),
        ({"scheduler_config": None}, ("lower", False)),
        ("model='smol', scheduler_config=...", ("lower", False)),
    ],
)
def test_vllm_in_developer_mode_tells_its_policy(config: Any, found: tuple[str | None, bool]) -> None:
    """vLLM 0.32 takes a priority without its flag and ignores it: only its configuration tells."""
    known = probed(ModelServer("vllm", pages={"/server_info": (200, {"vllm_config": config})}))
    assert (known.flavour, known.priority, known.priority_sure) == ("vllm", *found)


def test_sglang() -> None:
    """By its documented server arguments (not from a running server)."""
    assert probed(ModelServer("sglang")) == Capabilities(
        flavour="sglang",
        version="0.5.23",
        context_window=32768,
        priority="higher",
        priority_sure=True,
        preload=True,
        metrics=True,
        cached_tokens=True,
        tokenize=True,
        block_size=64,
        prefix_caching=True,
    )


@pytest.mark.parametrize(
    ("change", "priority"),
    [
        ({"schedule_low_priority_values_first": True}, "lower"),
        ({"enable_priority_scheduling": False}, None),
        ({"enable_priority_scheduling": "yes"}, None),
    ],
)
def test_sglang_priority_is_as_its_flags_say(change: dict[str, Any], priority: str | None) -> None:
    """Without the flag SGLang takes a priority and ignores it, so that it is taken proves nothing (documented API)."""
    server = ModelServer("sglang", pages={"/server_info": (200, {**SGLANG_INFO, **change})})
    assert probed(server).priority == priority
    assert len(server.bodies) == (priority is not None)


def test_an_older_sglang() -> None:
    """Its server arguments are found at the older path too (documented API)."""
    server = ModelServer("sglang", pages={"/server_info": (404, {}), "/metrics": (404, {})})
    known = probed(server)
    assert (known.flavour, known.metrics, known.block_size) == ("sglang", False, 64)


def test_llama_cpp() -> None:
    """Slots and window by its props; nothing is completed for a probe, it could displace somebody's cache."""
    server = ModelServer("llama.cpp")
    assert probed(server) == Capabilities(
        flavour="llama.cpp",
        version="b6987-4b13a684",
        context_window=4096,
        preload=True,
        slots=3,
        metrics=True,
        tokenize=True,
        block_size=1,
    )
    assert server.bodies == []


def test_llama_cpp_with_one_slot_is_not_preloaded_by_default() -> None:
    """A preload would take the place of what the agent has in the only slot."""
    props = {"total_slots": 1, "default_generation_settings": {"n_ctx": 512}}
    assert not probed(ModelServer("llama.cpp", pages={"/props": (200, props)})).preload


def test_llama_cpp_behind_a_proxy_is_not_preloaded_by_default() -> None:
    """Only its API passes: nobody knows its slots, so a preload might go where the agent's cache is."""
    gone = (404, {"detail": "Not Found"})
    server = ModelServer("llama.cpp", pages=dict.fromkeys(("/props", "/slots", "/metrics", "/tokenize"), gone))
    known = probed(server)
    assert (known.flavour, known.slots, known.preload) == ("llama.cpp", 0, False)


@pytest.mark.parametrize(
    ("url", "flavour"),
    [
        ("https://api.example.com", "hosted"),
        ("https://8.8.8.8/v1", "hosted"),
        ("http://127.0.0.1:1234", "unknown"),
        ("http://[::1]:1234", "unknown"),
        ("http://10.0.0.7:1234", "unknown"),
        ("http://localhost:1234", "unknown"),
        ("http://gpu-box.local:1234", "unknown"),
    ],
)
def test_none_of_these(url: str, flavour: str) -> None:
    """Another server gets nothing that it might not know, and nothing that costs money."""
    server = ModelServer("other")
    assert probed(server, url) == Capabilities(flavour=flavour)  # type: ignore[arg-type]
    assert server.bodies == [] and "/tokenize" not in server.paths


def test_no_models_page_no_metrics_no_rights() -> None:
    """A server that refuses every question is an unknown one."""
    refused = {p: (401, {"error": "no"}) for p in ("/version", "/v1/models", "/metrics", "/tokenize")}
    assert probed(ModelServer("vllm", pages=refused)) == Capabilities()


@pytest.mark.parametrize(
    "answer", ["", "null", "[]", "3", '"x"', "{", "[" * 100_000, '{"data": 3}', '{"data": [3, null]}', "\x00\xff"]
)
@pytest.mark.parametrize("flavour", ["vllm", "sglang", "llama.cpp"])
def test_garbage_everywhere_is_not_supported(flavour: str, answer: str) -> None:
    """Whatever the pages hold, a probe ends with what little is known."""
    server = ModelServer(flavour)
    server.pages = {path: (200, answer) for path in server.pages}
    assert probed(server) == Capabilities()


@pytest.mark.parametrize("flavour", ["vllm", "sglang", "llama.cpp"])
def test_numbers_that_cannot_be(flavour: str) -> None:
    """Sizes that are no positive whole numbers are unknown."""
    odd: dict[str, Any] = {"total_slots": "3", "page_size": -1, "context_length": True, "version": 7}
    odd |= {"default_generation_settings": {"n_ctx": 0.5}, "disable_radix_cache": None, "build_info": None}
    models = {"data": [{"id": "m", "owned_by": flavour.replace(".", ""), "max_model_len": "8192"}]}
    pages = {path: (200, odd) for path in ("/props", "/server_info", "/get_server_info", "/version")}
    known = probed(ModelServer(flavour, pages={**pages, "/v1/models": (200, models)}))
    assert known.flavour == flavour and known.version is None and known.context_window is None
    assert known.block_size == {"vllm": 128, "sglang": None, "llama.cpp": 1}[flavour]


PATHS = ["/version", "/props", "/server_info", "/get_server_info", "/metrics", "/v1/models", "/slots", "/tokenize"]


@pytest.mark.parametrize("path", [*PATHS, "/v1/chat/completions"])
@pytest.mark.parametrize("flavour", ["vllm", "sglang", "llama.cpp"])
def test_a_step_that_hangs_is_not_supported_and_bounded(flavour: str, path: str) -> None:
    """One question without an answer costs at most the time that a probe may take, and what it would have told."""
    whole = probed(ModelServer(flavour))

    async def main() -> tuple[Capabilities, float]:
        found = await ModelServer(flavour, hang=frozenset({path})).engine().probe(timeout_s=5.0)
        return found, asyncio.get_running_loop().time()

    found, took = run_virtual(main)
    assert took <= 5.0 and found.flavour == flavour
    asked = path in PATHS[:-1] or (path == "/tokenize") or whole.priority is not None
    assert found.unanswered == ((path.replace("/v1/chat/completions", "priority"),) if asked else ())
    lost = {"/tokenize": "tokenize", "/v1/chat/completions": "priority", "/metrics": "metrics"}.get(path)
    if lost is not None:
        assert not getattr(found, lost)


def test_a_server_that_hangs_altogether() -> None:
    """It is an unknown one, after the time that a probe may take."""

    async def main() -> tuple[Capabilities, float]:
        found = await ModelServer(hang=frozenset([*PATHS, "/"])).engine().probe(timeout_s=2.0)
        return found, asyncio.get_running_loop().time()

    found, took = run_virtual(main)
    assert took <= 2.0 and found == Capabilities(unanswered=tuple(sorted(PATHS[:-1])))


async def test_no_server_at_all() -> None:
    """A refused connection is an error that says so, bare."""
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with OpenAIEngine(f"http://127.0.0.1:{port}", "m") as engine:
        with pytest.raises(EngineUnreachable, match="is the server running there"):
            await engine.probe(timeout_s=60.0)
        assert engine.capabilities is None
        with pytest.raises(EngineUnreachable):
            await engine.load(timeout_s=60.0)


def test_a_connection_that_breaks_at_one_question() -> None:
    """A broken connection is a missing answer, not a missing server."""

    async def main() -> Capabilities:
        server = ModelServer("vllm")

        async def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path in ("/props", "/slots", "/version"):
                raise httpx.ReadError("reset")
            return await server.answer(request)

        client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        return await OpenAIEngine("http://127.0.0.1:1", "m", client=client).probe()

    found = run_virtual(main)
    assert (found.flavour, found.version, found.priority) == ("vllm", None, "lower")


def test_what_was_found_is_remembered() -> None:
    """A second probe asks nothing, unless it is told to; the engine's own settings win."""

    async def main() -> None:
        server = ModelServer("vllm")
        engine = server.engine()
        assert not engine.preload_by_default
        first = await engine.probe()
        asked = len(server.paths)
        assert await engine.probe() is first and len(server.paths) == asked
        assert (engine.context_window, engine.preload_by_default, engine.capabilities) == (8192, True, first)
        server.priority = False
        assert (await engine.probe(again=True)).priority is None
        own = server.engine(context_window=2000, preload=False)
        await own.probe()
        assert (own.context_window, own.preload_by_default) == (2000, False)

    run_virtual(main)


def test_promise_15_cached_tokens_count_as_reported_once_they_were() -> None:
    """A server that reports them only when there are some is known to from then on."""

    async def main() -> None:
        server = ModelServer("vllm", reports=False)
        engine = server.engine()
        assert (await engine.probe()).cached_tokens is None
        await engine.complete(HELLO, max_tokens=1)
        assert engine.capabilities is not None and engine.capabilities.cached_tokens is None
        server.reports = True
        await engine.complete(HELLO, max_tokens=1)
        assert engine.capabilities.cached_tokens is True

    run_virtual(main)


# --- what is sent


@pytest.mark.parametrize(
    ("known", "numbers"),
    [
        (Capabilities(flavour="vllm", priority="lower"), (None, 1, 20)),
        (Capabilities(flavour="sglang", priority="higher"), (0, -1, -20)),
        (Capabilities(flavour="sglang", priority="lower"), (0, 1, 20)),
        (Capabilities(flavour="vllm"), (None, None, None)),
        (Capabilities(flavour="llama.cpp"), (None, None, None)),
    ],
)
def test_one_scale_of_priorities(known: Capabilities, numbers: tuple[int | None, ...]) -> None:
    """Foreground before promoted before lookahead, in the server's own direction; nothing where it has none."""
    levels = [known.priority_options(level) for level in ("foreground", "promoted", "lookahead")]
    assert [o.get("priority") for o in levels] == list(numbers)
    assert all(set(o) <= {"priority"} for o in levels)


def foreground() -> Foreground:
    """A foreground on the virtual clock."""
    return Foreground(lambda: asyncio.get_running_loop().time())


async def preload(
    binding: Any, view: Sequence[Mapping[str, Any]], *, quiet_s: float | None = None, **request: Any
) -> PreloadReport:
    """Preload a view on an idle engine on which no turn is expected for so long."""
    report: PreloadReport = await binding.preload(
        lambda: view,
        request=request,
        foreground=foreground(),
        needed=lambda: True,
        hurried=lambda rate: False,
        quiet=lambda: quiet_s,
    )
    return report


def test_a_binding_follows_the_probe() -> None:
    """Before the probe nothing special is sent, even for a session that was there before; after it, its options."""

    async def main() -> None:
        server = ModelServer("vllm", block=128)
        engine = server.engine(cache_salt="s")
        binding = engine.bind("a")
        assert isinstance(binding, Binding) and binding.request_options() == {}
        await preload(binding, HELLO)
        assert not any("priority" in b or "cache_salt" in b for b in server.bodies)
        await engine.probe()
        assert binding.request_options() == {"cache_salt": "s"}
        assert binding.transform_options(foreground(), lambda: False) == {"priority": 20, "cache_salt": "s"}
        assert binding.transform_options(foreground(), lambda: True) == {"priority": 1, "cache_salt": "s"}
        server.bodies.clear()
        report = await preload(binding, HELLO, temperature=0)
        assert report.complete and server.bodies
        assert all((b["priority"], b["cache_salt"], b["max_tokens"]) == (20, "s", 1) for b in server.bodies)
        # what was warmed is what the agent sends, with its salt
        done = await engine.complete(HELLO, max_tokens=1, **binding.request_options())
        assert done.usage.cached_tokens is not None and done.usage.cached_tokens >= done.usage.input_tokens - 128
        assert engine.rates.prefill is None or engine.rates.prefill > 0

    run_virtual(main)


def test_b184_b185_all_but_the_last_token_is_warm() -> None:
    """A preload asks for one token, never for none, and leaves the agent's call one prompt token to evaluate."""

    async def main() -> None:
        server = ModelServer("vllm", block=1)
        engine = server.engine()
        assert (await preload(engine.bind("a"), HELLO)).complete
        assert {b["max_tokens"] for b in server.bodies} == {1}
        usage = (await engine.complete(HELLO, max_tokens=50)).usage
        assert usage.cached_tokens == usage.input_tokens - 1

    run_virtual(main)


def test_promise_12_a_salt_keeps_caches_apart() -> None:
    """Two clients with different salts share no cached prefix; the user's own option wins."""

    async def main() -> None:
        server = ModelServer("vllm")
        one, two = server.engine(cache_salt="1"), server.engine(cache_salt="2")
        for engine in (one, two):
            await engine.probe()
        await one.complete(HELLO, max_tokens=1)
        assert (await two.complete(HELLO, max_tokens=1)).usage.cached_tokens == 0
        assert (await two.complete(HELLO, max_tokens=1, cache_salt="1")).usage.cached_tokens != 0

    run_virtual(main)


def test_llama_cpp_gets_slots_over_http() -> None:
    """A session has a slot of its own, preload goes into a spare one, and the commit moves the agent there."""

    async def main() -> None:
        server = ModelServer("llama.cpp")
        engine = server.engine()
        assert isinstance(engine.bind("early"), Binding)
        await engine.probe()
        first, second = engine.bind("a"), engine.bind("b")
        assert isinstance(first, SlotBinding)
        assert first.request_options() == {"id_slot": 0, "cache_prompt": True}
        assert second.request_options()["id_slot"] == 1
        report = await preload(first, HELLO, temperature=0)
        assert report.complete and {b["id_slot"] for b in server.bodies} == {2}
        assert {b["temperature"] for b in server.bodies} == {0}
        first.committed(True)
        assert first.request_options()["id_slot"] == 2
        first.close()
        second.close()
        assert engine.bind("c").request_options()["id_slot"] == 0

    run_virtual(main)


def test_one_request_for_all_of_it_only_where_no_other_session_is_answered() -> None:
    """llama.cpp looks for closed connections only while it streams to nobody: with several sessions an aborted request
    would go on, in front of everybody's turns. So prefixes grow there, by a batch at least."""

    async def main() -> None:
        server = ModelServer("llama.cpp")
        engine = server.engine()
        await engine.probe()
        first = engine.bind("a")
        assert (await preload(first, HELLO)).requests == 1
        second = engine.bind("b")
        opening = second.opening()
        longer = [{"role": "user", "content": "other words " * 400}]
        assert (await preload(first, longer)).requests > 1
        opening.close()
        second.close()
        second.close()
        assert (await preload(first, [{"role": "user", "content": "third words " * 400}])).requests == 1
        async with engine.stream(HELLO):  # a summary of its own, for one
            assert (await preload(first, [{"role": "user", "content": "fourth words " * 400}])).requests > 1
        assert (await preload(first, [{"role": "user", "content": "fifth words " * 400}])).requests == 1

    run_virtual(main)


def test_the_strategy_can_be_chosen() -> None:
    """Growing prefixes in a slot, or one request on a server without slots."""

    async def main() -> None:
        server = ModelServer("llama.cpp")
        engine = server.engine(preload_strategy="growing")
        await engine.probe()
        assert (await preload(engine.bind("a"), HELLO)).requests > 1
        assert {b["id_slot"] for b in server.bodies} == {1}
        server = ModelServer("vllm")
        engine = server.engine(preload_strategy="abort")
        assert (await preload(engine.bind("a"), HELLO)).requests == 1
        engine = server.engine()
        assert (await preload(engine.bind("a"), [{"role": "user", "content": "other " * 300}])).requests > 1

    run_virtual(main)


def test_llama_cpp_is_preloaded_by_when_a_turn_is_expected() -> None:
    """In one request as long as there is time, and in parts from then on; beside another session always in parts."""

    async def main() -> None:
        view = [{"role": "user", "content": "hello " * 2000}]
        for strategy, quiet_s, most in (
            (None, None, 1),
            (None, 1e9, 2),  # the first one tells the rate
            (None, 0.0, None),
            ("abort", 0.0, 1),
            ("growing", 1e9, None),
        ):
            engine = ModelServer("llama.cpp").engine(preload_strategy=strategy)
            await engine.probe()
            found = await preload(engine.bind("a"), view, quiet_s=quiet_s)
            assert found.complete and (found.requests == most if most else found.requests > 2), (strategy, quiet_s)
        engine = ModelServer("llama.cpp").engine()
        await engine.probe()
        binding, _ = engine.bind("a"), engine.bind("b")
        assert (await preload(binding, view, quiet_s=1e9)).requests > 2
        engine = ModelServer("vllm").engine(preload_strategy="timed")
        assert (await preload(engine.bind("a"), view, quiet_s=0.0)).requests > 2
        assert (await preload(engine.bind("a"), [{"role": "user", "content": "other " * 2000}])).requests == 1

    run_virtual(main)


@pytest.mark.parametrize("flavour", ["vllm", "sglang", "llama.cpp"])
def test_tokenize(flavour: str) -> None:
    """The model's own tokens, asked in each server's words."""

    async def main() -> tuple[list[int], int]:
        engine = ModelServer(flavour).engine()
        return await engine.tokenize("hello world"), await engine.count_tokens("hello world")

    tokens = {"vllm": [28120, 905], "sglang": [1, 2, 3], "llama.cpp": [17, 4]}[flavour]
    assert run_virtual(main) == (tokens, len(tokens))


def test_tokenize_where_there_is_none() -> None:
    """A server without a tokenizer refuses; one that answers nonsense breaks the protocol."""

    async def main() -> None:
        with pytest.raises(EngineRefused, match="HTTP 404"):
            await ModelServer("other").engine().tokenize("x")
        for answer in ({"tokens": "x"}, {"tokens": ["a"]}, [], {}):
            with pytest.raises(EngineProtocolError, match="expected tokens, got"):
                await ModelServer("vllm", pages={"/tokenize": (200, answer)}).engine().tokenize("x")

    run_virtual(main)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"preload_strategy": "fast"}, "preload_strategy='fast': expected 'growing', 'abort', 'timed' or None"),
        ({"chunk_delay_s": 0}, "chunk_delay_s=0: expected seconds above 0"),
        ({"chunk_delay_s": True}, "chunk_delay_s=True: expected seconds above 0"),
        ({"cache_salt": ""}, "cache_salt: expected a text that is not empty, or None (its value is not shown)"),
    ],
)
def test_configuration_errors(options: dict[str, Any], text: str) -> None:
    """Wrong options are named at construction."""
    with pytest.raises(ConfigurationError) as caught:
        OpenAIEngine("http://127.0.0.1:1", "m", **options)
    assert str(caught.value) == text


def test_capabilities_can_be_set_by_hand() -> None:
    """What is known without a probe can be said: it is a plain value."""

    async def main() -> None:
        engine = ModelServer("other").engine()
        engine.capabilities = replace(Capabilities(), flavour="sglang", priority="higher")
        assert engine.bind("a").request_options() == {"priority": 0}

    run_virtual(main)
