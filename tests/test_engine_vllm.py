"""A real vLLM, where ``SMOOTHCTX_VLLM_URL`` names one (``docs/engines.md`` says how to start it on a CPU)."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from smoothctx.engines import OpenAIEngine
from smoothctx.foreground import Foreground

URL = os.environ.get("SMOOTHCTX_VLLM_URL", "")  # without it this file is not collected


@pytest.fixture
async def engine() -> AsyncGenerator[OpenAIEngine]:
    """A client of the server's first model, probed."""
    async with OpenAIEngine(URL, "-") as unnamed:
        model = (await unnamed.get_json("/v1/models"))["data"][0]["id"]
    async with OpenAIEngine(URL, model, cache_salt=secrets.token_hex(8)) as client:
        await client.probe(timeout_s=120.0)
        yield client


def prompt(size: int = 4000) -> list[dict[str, Any]]:
    """A prompt that nobody sent before."""
    return [{"role": "user", "content": secrets.token_hex(8) + " fact" * (size // 5)}]


async def test_probe(engine: OpenAIEngine) -> None:
    """The server's own answers give flavour, version, window, block size and tokenizer."""
    known = engine.capabilities
    assert known is not None and known.flavour == "vllm" and known.version
    assert known.metrics and known.tokenize and known.cache_salt and known.priority == "lower"
    assert known.block_size is not None and known.block_size >= 1 and known.prefix_caching is True
    assert engine.context_window is not None and engine.context_window >= 1024 and engine.preload_by_default
    assert not known.unanswered


async def test_load_and_tokens(engine: OpenAIEngine) -> None:
    """Its metrics say what runs and how full its cache is; its tokenizer counts."""
    load = await engine.load(timeout_s=60.0)
    assert load.running is not None and load.waiting is not None and load.kv_used is not None
    assert load.prompt_tokens is not None and load.prompt_tokens > 0
    one, two = await engine.count_tokens("hello"), await engine.count_tokens("hello hello hello")
    assert 0 < one < two


async def test_preload_is_found_in_the_cache(engine: OpenAIEngine) -> None:
    """What was preloaded in growing prefixes the agent's own call finds, with its salt; another salt finds nothing."""
    binding, view = engine.bind("s"), prompt()
    request = {"temperature": 0}
    report = await binding.preload(
        lambda: view,
        request=request,
        foreground=Foreground(engine.clock),
        needed=lambda: True,
        hurried=lambda rate: False,
    )
    assert report.complete and report.requests > 1
    before = await engine.load(timeout_s=60.0)
    done = await engine.complete(view, max_tokens=1, **request, **binding.request_options())
    after = await engine.load(timeout_s=60.0)
    block = engine.capabilities.block_size if engine.capabilities is not None else None
    assert block is not None and before.cached_tokens is not None and after.cached_tokens is not None
    assert after.cached_tokens - before.cached_tokens >= done.usage.input_tokens - 2 * block
    if engine.capabilities is not None and engine.capabilities.cached_tokens:
        assert done.usage.cached_tokens is not None
        assert done.usage.cached_tokens >= done.usage.input_tokens - 2 * block
        other = await engine.complete(view, max_tokens=1, cache_salt="another")
        assert other.usage.cached_tokens == 0


async def test_every_priority_is_taken(engine: OpenAIEngine) -> None:
    """Each level of the scale is a request that the server answers."""
    for level in ("foreground", "promoted", "lookahead"):
        done = await engine.complete(prompt(200), max_tokens=2, **engine.priority_options(level))  # type: ignore[arg-type]
        assert done.usage.input_tokens > 0
