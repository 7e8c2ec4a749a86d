"""Load: how busy a model server is, read from its Prometheus metrics (vLLM, SGLang, llama.cpp)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: the same quantity under the names of each server, the newer names first
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_KV_USED = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_PROMPT = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "llamacpp:prompt_tokens_total")
_CACHED = (
    "vllm:prompt_tokens_cached_total",
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",
    "sglang:cached_tokens_total",
    "llamacpp:prompt_tokens_cached_total",
)
_CONFIG = "vllm:cache_config_info"
_WANTED = frozenset((*_RUNNING, *_WAITING, *_KV_USED, *_PROMPT, *_CACHED, _CONFIG))

_LINE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a server is. ``None``: it does not say.

    ``running`` and ``waiting`` count requests; ``kv_used`` is the used part of its KV cache, 0 to 1. The tokens are
    totals since the server's start: of all prompts, and those of them that came from the prefix cache.
    """

    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def known(self) -> bool:
        """Does the server say anything of its load?"""
        return self.running is not None or self.waiting is not None or self.kv_used is not None


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a metrics page."""

    labels: dict[str, str]
    value: float


def read_metrics(text: str) -> dict[str, list[Sample]]:
    """The samples that say something of load or cache, by name. What is no metric is skipped, never an error."""
    found: dict[str, list[Sample]] = {}
    for line in text.splitlines():
        if line.partition("{")[0].partition(" ")[0] not in _WANTED:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):
            found.setdefault(name, []).append(Sample(dict(_LABEL.findall(labels or "")), value))
    return found


def read_load(text: str) -> Load:
    """A metrics page as a load. Several engines behind one page: their requests add up, the fullest cache counts."""
    metrics = read_metrics(text)
    return Load(
        running=_total(metrics, _RUNNING),
        waiting=_total(metrics, _WAITING),
        kv_used=max((min(1.0, max(0.0, s.value)) for s in _first(metrics, _KV_USED)), default=None),
        prompt_tokens=_total(metrics, _PROMPT),
        cached_tokens=_total(metrics, _CACHED),
    )


def read_slots(answer: Any) -> Load:
    """llama.cpp's ``/slots`` as a load, for servers that show no metrics."""
    if not isinstance(answer, list) or not answer:
        return Load()
    slots = [slot for slot in answer if isinstance(slot, dict) and isinstance(slot.get("is_processing"), bool)]
    return Load(running=sum(slot["is_processing"] for slot in slots)) if slots else Load()


def cache_config(text: str) -> dict[str, str]:
    """How vLLM's cache is set up (``block_size``, ``enable_prefix_caching``), by its metrics; else empty."""
    samples = read_metrics(text).get(_CONFIG)
    return samples[0].labels if samples else {}


def _first(metrics: dict[str, list[Sample]], names: Sequence[str]) -> list[Sample]:
    for name in names:
        if samples := metrics.get(name):
            # SGLang shows its queue in all and once more by priority: each request counts once
            whole = [s for s in samples if not s.labels.get("priority")]
            return whole or samples
    return []


def _total(metrics: dict[str, list[Sample]], names: Sequence[str]) -> int | None:
    samples = _first(metrics, names)
    return round(sum(max(0.0, s.value) for s in samples)) if samples else None
