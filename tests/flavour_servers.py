"""Model servers in this process, one for each flavour: real answers, a prefix cache, a prefill that takes time.

They answer over ``httpx.MockTransport`` and take the time of the (virtual) loop. The texts of vLLM were recorded from
vLLM 0.32.0 and those of llama.cpp from its server; SGLang's follow its documented API: no SGLang server has been asked.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from smoothctx.engines import OpenAIEngine

VLLM_METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smol"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="smol"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="deferred"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="smol"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="smol"} 931.0
vllm:prefix_cache_hits_total{engine="0",model_name="smol"} 896.0
vllm:prompt_tokens_total{engine="0",model_name="smol"} 1986.0
vllm:prompt_tokens_created{engine="0",model_name="smol"} 1.7960739067166026e+09
vllm:prompt_tokens_cached_total{engine="0",model_name="smol"} 896.0
vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",enable_prefix_caching="True",\
kv_cache_dtype_skip_layers="[]",kv_cache_size_tokens="46592",num_gpu_blocks="364",sliding_window="None"} 1.0
"""
SGLANG_METRICS = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 8.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0",priority=""} 4.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0",priority="1"} 3.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.52
sglang:prompt_tokens_total{model_name="m"} 500.0
sglang:cached_tokens_total{model_name="m"} 120.0
"""
LLAMA_METRICS = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 1774
llamacpp:prompt_tokens_cached_total 1458
llamacpp:requests_processing 1
llamacpp:requests_deferred 0
"""
VLLM_MODELS = {
    "object": "list",
    "data": [{"id": "m", "object": "model", "owned_by": "vllm", "root": "models/smollm2-hf", "max_model_len": 8192}],
}
LLAMA_PROPS = {
    "default_generation_settings": {"id": 0, "n_ctx": 4096, "params": {}},
    "total_slots": 3,
    "model_path": "/nowhere/model.gguf",
    "build_info": "b6987-4b13a684",
}
SGLANG_INFO = {
    "model_path": "m",
    "context_length": 32768,
    "schedule_policy": "fcfs",
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": False,
    "page_size": 64,
    "disable_radix_cache": False,
    "enable_cache_report": True,
    "version": "0.5.23",
    "internal_states": [{}],
}
#: as vLLM documents it for a priority without --scheduling-policy priority; 0.32.0 takes it instead, and ignores it
REFUSED = {"error": {"message": "Got priority 1 but ...", "type": "BadRequestError", "param": None, "code": 400}}


@dataclass
class ModelServer:
    """One server. ``pages`` are its GET answers by path: a status and a JSON value or a text."""

    flavour: str = "vllm"
    rate: float = 1000.0  # prompt tokens a second; one prompt at a time
    latency_s: float = 0.02
    block: int = 16
    caching: bool = True
    keeps_head: bool = True  # a prompt that is no continuation of a cached one reuses what they share
    reports: bool = True
    priority: bool = True
    step: int | None = None  # tokens that one request may evaluate before another has its turn
    refuse: str = ""  # prompts that contain this are refused
    hang: frozenset[str] = frozenset()
    pages: dict[str, tuple[int, Any]] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._unit = asyncio.Lock()  # what evaluates prompts
        self.pages = {**_pages(self.flavour), **self.pages}

    def engine(self, url: str = "http://127.0.0.1:8000", **options: Any) -> OpenAIEngine:
        """A client of it, on the loop's clock."""
        client = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        clock = options.pop("clock", lambda: asyncio.get_running_loop().time())
        return OpenAIEngine(url, options.pop("model", "m"), client=client, clock=clock, **options)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        path = request.url.path
        self.paths.append(path)
        if path in self.hang:
            await anyio.sleep_forever()
        await anyio.sleep(self.latency_s)
        if request.method == "GET":
            status, value = self.pages.get(path, (404, {"detail": "Not Found"}))
            return httpx.Response(status, text=value) if isinstance(value, str) else httpx.Response(status, json=value)
        body = json.loads(request.content)
        if path == "/tokenize" and path in self.pages:
            return httpx.Response(self.pages[path][0], json=self.pages[path][1])
        if path != "/v1/chat/completions":
            return httpx.Response(404, json={"detail": "Not Found"})
        self.bodies.append(body)
        return await self._complete(body)

    async def _complete(self, body: dict[str, Any]) -> httpx.Response:
        prompt = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
        if body.get("priority") and not self.priority and self.flavour == "vllm":
            return httpx.Response(400, json=REFUSED)
        if self.refuse and self.refuse in prompt:
            return httpx.Response(400, json={"error": {"message": "refused"}})
        salted = f"{body.get('cache_salt', '')}|{prompt}"
        tokens = len(prompt) // 4 + 1
        hit = self._hit(salted, tokens)
        left = tokens - hit
        while left > 0:
            async with self._unit:
                part = min(left, self.step or left)
                await anyio.sleep(part / self.rate)
                left -= part
        if self.caching:
            self.cached.append(salted)
        usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        if self.reports:
            usage["prompt_tokens_details"] = {"cached_tokens": hit}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
            return httpx.Response(200, json={"choices": [choice], "usage": usage})
        events = [
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "x"}, "finish_reason": "length"}]},
            {"choices": [], "usage": usage},
        ]
        text = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    def _hit(self, prompt: str, tokens: int) -> int:
        """Tokens found in whole blocks, never the last one."""
        best = 0
        for known in self.cached:
            shared = next((k for k, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), None)
            if shared is not None and not self.keeps_head:
                continue
            best = max(best, min(len(known), len(prompt)) if shared is None else shared)
        return min(best // 4, tokens - 1) // self.block * self.block


def _pages(flavour: str) -> dict[str, tuple[int, Any]]:
    if flavour == "vllm":
        return {
            "/version": (200, {"version": "0.32.0"}),
            "/v1/models": (200, VLLM_MODELS),
            "/metrics": (200, VLLM_METRICS),
            "/tokenize": (200, {"count": 2, "max_model_len": 8192, "tokens": [28120, 905], "token_strs": None}),
        }
    if flavour == "sglang":
        return {
            "/server_info": (200, SGLANG_INFO),
            "/get_server_info": (200, SGLANG_INFO),
            "/v1/models": (200, {"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 32768}]}),
            "/metrics": (200, SGLANG_METRICS),
            "/tokenize": (200, {"tokens": [1, 2, 3], "count": 3, "max_model_len": 32768}),
        }
    if flavour == "llama.cpp":
        return {
            "/props": (200, LLAMA_PROPS),
            "/slots": (200, [{"id": k, "n_ctx": 4096, "is_processing": k == 0} for k in range(3)]),
            "/v1/models": (200, {"data": [{"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx_train": 32768}}]}),
            "/metrics": (200, LLAMA_METRICS),
            "/tokenize": (200, {"tokens": [17, 4]}),
        }
    return {"/v1/models": (200, {"data": [{"id": "m", "owned_by": "somebody"}]})}
