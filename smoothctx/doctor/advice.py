"""Advice: the options of each server that put right what the doctor found."""

from __future__ import annotations

from collections.abc import Mapping

#: by what is wrong, and by the server's flavour
FLAGS: Mapping[str, Mapping[str, str]] = {
    "cache": {
        "vllm": "start vLLM with --enable-prefix-caching",
        "sglang": "start SGLang without --disable-radix-cache",
        "llama.cpp": "send cache_prompt: true (the default), and give each conversation a slot of its own (--parallel)",
    },
    "head": {
        "vllm": "this model's cache does not survive a change in the middle (hybrid or sliding-window attention): "
        "prefer a model with full attention, or rewrite seldom",
        "sglang": "this model's cache does not survive a change in the middle: --swa-full-tokens-ratio and the radix "
        "cache for hybrid models decide it",
        "llama.cpp": "start llama-server with --swa-full: without it a sliding-window model loses the shared head too",
    },
    "reports": {
        "vllm": "start vLLM with --enable-prompt-tokens-details",
        "sglang": "start SGLang with --enable-cache-report",
        "llama.cpp": "update llama.cpp: newer servers report usage.prompt_tokens_details.cached_tokens",
    },
    "priority": {
        "vllm": "start vLLM with --scheduling-policy priority",
        "sglang": "start SGLang with --enable-priority-scheduling",
    },
    "metrics": {
        "vllm": "do not start vLLM with --disable-log-stats, and let /metrics through",
        "sglang": "start SGLang with --enable-metrics",
        "llama.cpp": "start llama-server with --metrics",
    },
    "headroom": {
        "vllm": "bound what one step may prefill: at most --max-num-batched-tokens 1024 "
        "--long-prefill-token-threshold 256",
        "sglang": "bound what one step may prefill: a smaller --chunked-prefill-size, or --enable-mixed-chunk",
        "llama.cpp": "bound what one batch evaluates: -b 64 -ub 64 (256 for more throughput)",
    },
}
